"""Shows the responses of several models as they are written: side by side, or one below another."""

import shutil
import sys
import time
import unicodedata

GAP = " │ "
NARROWEST = 28  # a column with less is not read with ease: then one model stands below another
SECONDS = 0.05  # between two pictures


def clean(text):
    """Returns text without what could move the cursor or change colours, whatever a model writes.

    >>> clean("a\\x1b[2Jb")
    'a\ufffd[2Jb'
    """
    text = text.expandtabs(4).replace("\r\n", "\n")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def cells(text):
    """Returns how many columns of a screen a text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def wrapped(text, width):
    """Returns text as lines of at most `width` columns, broken at spaces where there are some.

    >>> wrapped("one two\\n\\nabcdefgh", 5)
    ['one', 'two', '', 'abcde', 'fgh']
    """
    lines = []
    for line in text.split("\n"):
        while cells(line) > width:
            fits = len(line)
            while cells(line[:fits]) > width:
                fits -= 1
            space = line.rfind(" ", 1, fits + 1)
            end = space if space > 0 else max(fits, 1)
            lines.append(line[:end])
            line = line[end:].removeprefix(" ")
        lines.append(line)
    return lines


def side_by_side(texts, width):
    """Returns the lines of several texts in columns, in `width` columns of the screen."""
    own = (width - len(GAP) * (len(texts) - 1)) // len(texts)
    columns = [wrapped(text, own) for text in texts]
    lines = []
    for i in range(max(map(len, columns))):
        parts = [column[i] if i < len(column) else "" for column in columns]
        parts = [part + " " * (own - cells(part)) for part in parts]
        lines.append(GAP.join(parts).rstrip())
    return lines


class Screen:
    """One question's answers. `write` for each model in turn, then `done` with its scores."""

    def __init__(self, names, out=None):
        self.names, self.out = names, out or sys.stdout
        self.width, self.height = shutil.get_terminal_size((100, 40))
        own = (self.width - 1) // len(names) - len(GAP)
        self.columns = self.out.isatty() and own >= NARROWEST
        self.texts, self.notes = [""] * len(names), [""] * len(names)
        self.drawn, self.drawn_at = 0, 0.0  # lines of the last picture, and when
        self.printed = 0  # characters of the text, if one stands below another

    def write(self, number, text):
        """Shows the text, so far, of model `number`."""
        self.texts[number] = clean(text).strip()
        if not self.columns:
            self.print_more(number)
        elif time.time() - self.drawn_at >= SECONDS:
            self.draw()

    def done(self, number, text, note):
        """Shows the whole text of model `number`, and under it a note: its scores."""
        self.write(number, text)
        self.notes[number] = note
        if self.columns:
            self.draw(whole=number == len(self.names) - 1)
            return
        self.print_more(number, whole=True)
        self.out.write(f"\n  ({note})\n")
        self.out.flush()
        self.printed = 0

    def print_more(self, number, whole=False):
        """Prints what is new of a text; half a character at its end waits."""
        text = self.texts[number]
        text = text if whole else text.rstrip("\ufffd").rstrip()
        if not self.printed and (text or whole):
            self.out.write(f"{self.names[number]}:\n")
        new = text[self.printed :]
        self.out.write(new)
        self.out.flush()
        self.printed += len(new)

    def draw(self, whole=False):
        """Draws all columns over the last picture: its end, or `whole` if no other follows."""
        parts = []
        for name, text, note in zip(self.names, self.texts, self.notes):
            parts.append("\n".join([name, text, *(["", f"({note})"] if note else [])]))
        lines = side_by_side(parts, self.width - 1)
        lines = lines if whole else lines[-(self.height - 2) :]
        up = f"\x1b[{self.drawn}A" if self.drawn else ""
        self.out.write(f"{up}\x1b[J" + "".join(f"{line}\n" for line in lines))
        self.out.flush()
        self.drawn, self.drawn_at = len(lines), time.time()
