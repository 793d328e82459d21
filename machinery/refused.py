"""Input that is wrong: an error in words, and the one place where it ends the program.

And small JSON files, such as args.json, in which a run notes its flags and what it found. What is
damaged there counts as nothing, so that the caller can say so in words.
"""

import contextlib
import difflib
import errno
import json
import os
import sys
import time
from pathlib import Path


class Refused(Exception):
    """The user's input is wrong.

    rule: a short name of what was broken, which tests look for. words: what was given, what holds,
    and the nearest valid choice.
    """

    def __init__(self, rule, words):
        super().__init__(rule, words)  # both, or it could not come from another process
        self.rule, self.words = rule, words

    def __str__(self):
        return self.words


def program(main):
    """Runs main(). A refusal becomes one message on rank 0, without a traceback, and exit code 2.

    The other ranks mostly found the same. They wait until the launcher ends them, and print only if
    rank 0 goes on without them. A rank that is told no number of ranks is alone, and prints at
    once. OSError: a name that is too long for a file can come from any flag. Of text that the
    terminal's encoding does not have, the screen shows the codes.
    """
    with contextlib.suppress(AttributeError):  # a notebook's stdout has no reconfigure()
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except (Refused, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        alone = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")) == "1"
        if rank != "0" and not alone:
            time.sleep(20)
        where = "" if rank == "0" else f"rank {rank}: "
        words = "\n  ".join([str(error), *getattr(error, "__notes__", [])])
        print(f"error: {where}{words}", file=sys.stderr, flush=True)
        sys.exit(2)


def nearest(path):
    """Returns, in words, the names beside `path` that are most like it."""
    beside = [file.name for file in path.parent.glob("*")]
    names = difflib.get_close_matches(path.name, beside, cutoff=0.0)
    return f"Nearest in {path.parent}: {', '.join(names) or 'nothing'}."


# ---- Small JSON files ----
def read_json(folder, name="args.json"):
    """Returns a JSON file in `folder` as a dict; {} if there is none, or something else."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads((Path(folder) / name).read_text())
        return record if isinstance(record, dict) else {}
    return {}


def read_run(folder):
    """Returns args.json of the run in `folder`; {} if there is none, or it is not of ours."""
    record = read_json(folder)
    return record if "data_fingerprint" in record else {}


def record_of_model(folder):
    """Returns args.json of the run that saved the model in `folder`, {} if it is unknown.

    That of ema/, critic/ and best/ is in the folder above.
    """
    return read_run(folder) or read_run(Path(folder).parent)
