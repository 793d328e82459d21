"""The output folder: who may write there, and args.json."""

import contextlib
import fcntl
import json
import os
import time
from importlib import metadata
from pathlib import Path

from machinery import checkpoints, ranks, saving
from machinery.flags import FORMAT, OF_A_START
from machinery.refused import Refused, read_run

LOCK = ".lock"
LOGS = (".log", ".out", ".err", ".txt")  # what a launcher or a shell may have opened there before


def taken(output):
    """Returns what is in the folder already: all but logs of launchers and hidden files."""
    return sorted(path.name for path in output.glob("[!.]*") if path.suffix not in LOGS)


def versions():
    """Returns {library: its version} of those on which a run's numbers depend."""
    libraries = "torch deepspeed transformers tokenizers datasets numpy".split()
    return {library: metadata.version(library) for library in libraries}


def started_with(args):
    """Returns the flags, but for OF_A_START, and the libraries' versions: {name: value}."""
    flags = {name: value for name, value in vars(args).items() if name not in OF_A_START}
    return {**flags, **versions()}


# ---- The lock: one run at a time in a folder, also where several hosts share it ----
# The kernel keeps it (flock, which network file systems pass on to other hosts) until the file is
# closed, or this process ends, however it ends. The file stays: if it were removed, two processes
# could each hold a lock, one on the old file and one on a new one.
def locked(file, kind):
    """Tries to lock an open file; returns whether this process has it now.

    Where the file system has no locks, nobody is locked out.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True


def take_lock(path):
    """Locks a file and returns it, open; None if another process holds it."""
    file = open(path, "a")
    if not locked(file, fcntl.LOCK_EX):
        return None
    # A forked child has a copy of the file, and would hold the lock if it lived longer.
    os.register_at_fork(after_in_child=file.close)
    return file


def is_held(path):
    """Returns whether another process holds the lock of a file."""
    with contextlib.suppress(OSError), open(path) as file:
        return not locked(file, fcntl.LOCK_SH)


# ---- What is refused ----
def refuse_unusable(args, mine=False):
    """Refuses --output_dir if it cannot be had, and --resume of a run that is finished.

    mine: this run holds its lock. A run that stopped before its first checkpoint starts anew:
    args.resume becomes False.
    """
    output = Path(args.output_dir)
    above = (output, *output.absolute().parents)
    exists = next(path for path in above if os.path.lexists(path))
    if not (exists.is_dir() and os.access(exists, os.W_OK)):
        words = f"--output_dir {output}: {exists} is no folder, or cannot be written to."
        raise Refused("output-unusable", words)
    refuse_in_use(args, not mine and is_held(output / LOCK))
    if args.resume and saving.is_whole(output):
        words = f"--resume: the run in {output} is finished. A new one can start from its model."
        raise Refused("run-finished", words)
    if args.resume and not checkpoints.whole_checkpoints(args):
        ranks.say(f"the run in {output} stopped before its first checkpoint: it starts anew")
        args.resume, args.overwrite = False, True
    found = not args.resume and taken(output)
    if found and not (args.overwrite and read_run(output)):
        words = f"--output_dir {output} is not empty: it holds {found[0]}.\n  "
        words += "If it is a run, --resume goes on, --overwrite moves it aside."
        raise Refused("output-taken", words)


def refuse_in_use(args, held):
    """Refuses a folder if another run is writing there."""
    if held:
        words = f"--output_dir {args.output_dir} is in use by another run."
        raise Refused("output-in-use", words)


# ---- The run's own ----
def take(args):
    """Locks the folder, checks it again, and moves aside what --overwrite replaces.

    Other runs may have been there while models were loaded. From here on nothing is refused but a
    checkpoint. Returns the lock, which is held until this process ends.
    """
    output, first, lock = Path(args.output_dir), ranks.get_rank() == 0, None
    if first:
        output.mkdir(parents=True, exist_ok=True)
        lock = take_lock(output / LOCK)
    refuse_in_use(args, ranks.all_gather_objects([first and not lock])[0])
    refuse_unshared(output)
    refuse_unusable(args, mine=True)
    ranks.barrier()  # rank 0 writes below: all must have seen the folder as it was
    return move_aside(args, output, lock) if first and taken(output) and not args.resume else lock


def refuse_unshared(output):
    """Refuses a folder in which a rank does not see, within a minute, rank 0's lock.

    Else each machine would keep its own part of every checkpoint.
    """
    late = time.monotonic() + 60  # over NFS a new file may come into sight after a while
    while not (output / LOCK).exists() and time.monotonic() < late:
        time.sleep(1)
    why = f"--output_dir {output} must be the same folder on all machines, on shared storage"
    ranks.fail_unless_alike({LOCK: (output / LOCK).exists()}, why)


def move_aside(args, output, lock):
    """Moves the folder to NAME.old-1, or the next free number, and makes a new one. On rank 0.

    The lock moves with the old folder, and another run may take the new one's first. Returns that.
    """
    here, number = output.resolve(), 1  # of a link, what it points to
    while os.path.lexists(aside := f"{here}.old-{number}"):
        number += 1
    here.rename(aside)
    here.mkdir(exist_ok=True)
    lock.close()
    lock = take_lock(output / LOCK)
    refuse_in_use(args, not lock)
    ranks.say(f"what was in {output} is now in {aside}")
    return lock


def note(args, facts):
    """Writes args.json, whole or not at all. facts: a dict, beside flags and versions."""
    if ranks.get_rank() == 0:
        record = {
            **vars(args),
            "format": FORMAT,
            "script": args.declared.script,
            "left_open": args.declared.left_open,
            "versions": versions(),
            "world_size": ranks.get_world_size(),
            "device": str(ranks.device()),
            **facts,
        }
        aside = Path(args.output_dir, ".args.json")
        aside.write_text(json.dumps(record, indent=1, default=str) + "\n")
        os.sync()  # a power cut leaves the old file or the new one
        aside.replace(aside.with_name("args.json"))
