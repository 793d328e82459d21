"""Shows the responses of several models as they are written: side by side, or one below another."""

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

NARROWEST = 28  # a column with less is not read with ease: then one model stands below another


def clean(text):
    r"""Returns text without what could move the cursor or change colours, whatever a model writes.

    >>> clean("a\x1b[2Jb")
    'a�[2Jb'
    """
    text = text.expandtabs(4).replace("\r\n", "\n")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


class Screen:
    """One question's answers. `write` for each model in turn, then `done` with its scores.

    In a terminal they grow; elsewhere (a pipe, a file) each is printed once it is whole.
    """

    def __init__(self, names, console=None):
        self.console = console or Console(highlight=False)
        self.names = names
        self.texts, self.notes = [""] * len(names), [""] * len(names)
        self.live = Live(console=self.console, auto_refresh=False)

    def __enter__(self):
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error):
        if self.console.is_terminal:
            self.live.update(self.picture(whole=True))
            self.live.stop()

    def write(self, number, text):
        """Shows the text, so far, of model `number`."""
        self.texts[number] = clean(text).strip()
        if self.console.is_terminal:
            self.live.update(self.picture(), refresh=True)

    def done(self, number, text, note):
        """Shows the whole text of model `number`, and its scores."""
        self.notes[number] = note
        self.write(number, text)
        if not self.console.is_terminal:
            parts = self.names[number], self.texts[number], note
            self.console.print(Text("{}:\n{}\n  ({})\n".format(*parts)), soft_wrap=True)

    def picture(self, whole=False):
        """Returns all responses: of each its end, as much as the screen holds, or the `whole`."""
        columns = self.console.width // len(self.names) >= NARROWEST
        width = self.console.width // len(self.names) - 3 if columns else self.console.width
        height = self.console.height // (1 if columns else len(self.names)) - 5
        parts = []
        for name, text, note in zip(self.names, self.texts, self.notes):
            lines = Text(text).wrap(self.console, width)
            shown = lines if whole else lines[-max(height, 1) :]
            parts.append(Text("\n").join([Text(name, style="bold"), *shown, Text(note, "dim")]))
        if not columns:
            return Group(*parts)
        table = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in parts:
            table.add_column(ratio=1)
        table.add_row(*parts)
        return table
