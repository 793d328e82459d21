"""Runs several scripts one after another, as `make class` does, and imports libraries once.

    python course/in_turn.py sft.py --max_steps 9 then reward.py --model_name_or_path output/sft

Each script runs in a process of its own, with its own flags, as after `python`. That process is
forked from this one, which has imported PyTorch, DeepSpeed and transformers and computed nothing.
These imports take longer than a short run's steps. On a GPU start each script by itself: CUDA does
not survive a fork.
"""

import gc
import importlib
import itertools
import os
import runpy
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LATE = [  # what a script imports only when it needs it
    "transformers.models.llama.modeling_llama",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.figure",
]


def split(words):
    """Returns the commands between the words "then".

    >>> split(["sft.py", "--seed", "1", "then", "ppo.py"])
    [['sft.py', '--seed', '1'], ['ppo.py']]
    """
    groups = itertools.groupby(words, lambda word: word == "then")
    return [list(group) for between, group in groups if not between]


def run(command):
    """Runs a script in a forked process. Returns its exit code."""
    child = os.fork()
    if child == 0:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        sys.exit()
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except KeyboardInterrupt:  # the script has it, too: it saves a checkpoint and ends
            pass


def main(words):
    sys.path[0] = str(ROOT)
    gc.disable()  # imports only add objects
    for name in ("ppo", *LATE):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for command in split(words):
        print("python", shlex.join(command), flush=True)
        if code := run(command):
            raise SystemExit(code)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
