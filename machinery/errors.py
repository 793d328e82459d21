"""Messages for input that is wrong."""

import difflib
import os
import sys
import time


def fail(message, this_rank=False):
    """Ends the program with exit code 2 and one message, because the user's input is wrong.

    Rank 0 prints it. With `this_rank` this rank prints it too, unless rank 0 has found the same.
    """
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if rank and not this_rank:
        time.sleep(20)  # rank 0 has found it too, unless the launcher leaves us alive so long
    where = f"rank {rank}: " if rank else ""
    print(f"error: {where}{message}", file=sys.stderr, flush=True)
    sys.exit(2)


def nearest(path):
    """Returns, in words, the names beside `path` that are most like it."""
    beside = [file.name for file in path.parent.glob("*")]
    names = difflib.get_close_matches(path.name, beside, cutoff=0.0)
    return f"Nearest in {path.parent}: {', '.join(names) or 'nothing'}."
