"""Shows how far long work is: a bar in a terminal, elsewhere a line every minute."""

import os
import sys
import time

from tqdm import tqdm

from machinery.base import ranks

EVERY = 60  # seconds between two lines
LINE = "{desc}: {n_fmt} of {total_fmt}, {remaining} left"


class Lines:
    """A file for tqdm that prints what would be a bar as a line of its own."""

    def write(self, text):
        """Prints the text, if there is any."""
        if text := text.strip():
            ranks.say(f"    {text}")

    def flush(self):
        """Does nothing: each line is flushed."""


def bar(total, what, done=0):
    """Returns a tqdm of `total` pieces of work, `done` of them before. It shows on rank 0 alone."""
    options = {"total": total, "initial": done, "desc": what, "leave": False, "delay": 1}
    if not sys.stderr.isatty():
        options |= {"mininterval": EVERY, "miniters": 1, "delay": EVERY, "position": 0}
        options |= {"file": Lines(), "bar_format": LINE}
    return tqdm(disable=int(os.environ.get("RANK", 0)) > 0, **options)


def shown(pieces, what):
    """Yields the pieces (a range, a list), and shows how many are done."""
    noted = time.monotonic()
    with bar(len(pieces), what) as shows:
        for piece in pieces:
            yield piece
            shows.update()
            if time.monotonic() > noted + EVERY:  # at each piece it would take as long as a token
                noted = time.monotonic()
                ranks.go_on()
