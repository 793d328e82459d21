"""A lock on a folder: one run at a time writes there, also where several hosts share the folder."""

import atexit
import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path


class Lock:
    """The lock of a folder, held from `take` until `release` or the end of this process.

    The kernel keeps it (flock, which network file systems pass on to other hosts), and drops it
    when the process ends in any way: a file that was left behind locks nobody out.
    """

    def __init__(self, folder):
        self.path, self.file = Path(folder) / ".lock", None

    def words(self):
        """Returns what the file says of its holder, "" if there is no file."""
        with contextlib.suppress(OSError):
            return self.path.read_text()
        return ""

    def holder(self):
        """Returns, in words, which process holds the lock, or None."""
        with contextlib.suppress(OSError), open(self.path) as file:
            return held_by(file, fcntl.LOCK_SH)

    def take(self):
        """Takes the lock and returns None, or returns, in words, which process holds it."""
        for _ in range(5):  # another process may only be looking, or be removing the file
            file = open(self.path, "a+")
            if not (who := held_by(file, fcntl.LOCK_EX) or self.replaced(file)):
                break
            file.close()
            time.sleep(0.2)
        else:
            return who
        self.file = file
        atexit.register(self.release)
        os.register_at_fork(after_in_child=self.disown)
        since = time.strftime("%Y-%m-%d %H:%M")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        os.fsync(file.fileno())  # for other hosts
        return None

    def replaced(self, file):
        """Returns words if `file`, which was open under our path, has been removed meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                return None
        return "another process"

    def disown(self):
        """Closes the file in a forked child, which else would hold the lock if it lived longer."""
        if self.file:
            self.file.close()
            self.file = None

    def release(self):
        """Removes the file and drops the lock, if this process holds it."""
        if self.file:
            self.path.unlink(missing_ok=True)
            self.disown()


def held_by(file, kind):
    """Tries to lock an open file. Returns None, or who holds it already, in words.

    Where the file system has no locks, the words in the file count, unless they name a process of
    this host that is gone. Whether one of another host is, only the user can know.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return None
    except OSError as error:
        file.seek(0)
        who = file.read()
        if isinstance(error, (BlockingIOError, PermissionError)):
            return who or "another process"
        advice = f"(or, if that process has ended, delete {file.name})"
        return f"{who} {advice}" if who and not is_gone(who) else None


def is_gone(who):
    """Returns whether the words of `take` name a process of this host that has ended."""
    words = who.split()  # process 123 on HOST since ...
    here = words[3:4] == [socket.gethostname()]
    return here and not Path(f"/proc/{words[1]}").exists()
