"""Locks that are files: for one run at a time in a folder, also where several hosts share it.

The kernel keeps a lock (flock, which network file systems pass on to other hosts) until the file is
closed, or this process ends, however it ends. The file stays: if it were removed, two processes
could each hold a lock, one on the old file and one on a new one.
"""

import contextlib
import fcntl
import os
import time


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


def take(path):
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


@contextlib.contextmanager
def holding(path):
    """Waits for the lock of a file, as long as it takes, and holds it inside."""
    while not (file := take(path)):
        time.sleep(0.1)
    with file:
        yield
