"""Shows the responses of several models as they are written: side by side, or one below another."""

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tools.report.text import visible

NARROWEST = 28  # a column with less is not read with ease: then one model stands below another


class Screen(Live):
    """The answers to one question: `write` what each model has written so far.

    In a terminal they grow; elsewhere (a pipe, a file) they are printed when all are whole.
    """

    def __init__(self, names):
        self.names = names
        self.texts, self.notes = [""] * len(names), [""] * len(names)
        console = Console(highlight=False)
        super().__init__(console=console, auto_refresh=False, get_renderable=self.picture)

    def write(self, number, text, note=""):
        """Shows the text, so far, of model `number`, and below it a note."""
        text = text.expandtabs(4).replace("\r\n", "\n").strip()
        self.texts[number], self.notes[number] = visible(text), note  # it moves no cursor
        self.refresh()

    def picture(self):
        """Returns all responses: of each its end, as much as the screen holds; in the end all."""
        fits = self.console.is_terminal and self.console.width // len(self.names) >= NARROWEST
        beside = len(self.names) if fits else 1
        width = self.console.width // beside - 3
        height = self.console.height * beside // len(self.names) - 5
        parts = []
        for name, text, note in zip(self.names, self.texts, self.notes):
            lines = Text(text).wrap(self.console, width)
            shown = lines[-max(height, 1) :] if self.is_started else lines
            note = Text(note and f"({note})", style="dim")
            parts.append(Text("\n").join([Text(name, style="bold"), *shown, note]))
        return Columns(parts, width=width, padding=(0, 3, 0, 0))
