"""Locks that are files: for one run at a time in a folder, also where several hosts share it."""

import contextlib
import fcntl
import os
import socket
import time


class Lock:
    """The lock of a file, held from `take` until `release` or the end of this process.

    The kernel keeps it (flock, which network file systems pass on to other hosts), and drops it
    however the process ends. The file stays: if it were removed, two processes could each hold a
    lock, one on the old file and one on a new one. Where the file system has no locks, nobody is
    locked out. (The library filelock does not say who holds a lock, cannot test one without taking
    it, and raises an error or leaves a lock behind where the file system has no locks.)
    """

    def __init__(self, path):
        self.path, self.file = path, None

    def holder(self):
        """Returns, in words, which process holds the lock, or None."""
        with contextlib.suppress(OSError), open(self.path) as file:
            return held_by(file, fcntl.LOCK_SH)

    def take(self):
        """Takes the lock and returns None, or returns, in words, which process holds it."""
        file = open(self.path, "a+")
        if who := held_by(file, fcntl.LOCK_EX):
            return who
        self.file = file
        # A forked child has a copy of the file, and would hold the lock if it lived longer.
        os.register_at_fork(after_in_child=file.close)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        os.fsync(file.fileno())  # for other hosts
        return None

    def release(self):
        """Drops the lock, if this process holds it."""
        if self.file:
            self.file.close()


def held_by(file, kind):
    """Tries to lock an open file. Returns None, or who holds it already, in words."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read() or "another process"
    except OSError:  # there are no locks here
        return None


@contextlib.contextmanager
def holding(path):
    """Waits for the lock of a file, as long as it takes, and holds it inside."""
    lock = Lock(path)
    while lock.take():
        time.sleep(0.1)
    try:
        yield
    finally:
        lock.release()
