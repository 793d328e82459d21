"""Makes text fit for a page or a terminal: nothing hidden in it, numbers kept short."""

import json
from contextlib import suppress

CHARACTERS = 900  # of a text on the page
LARGEST = 1e100  # of a number that a picture can hold


def is_number(value):
    """Returns whether a value of a log is a number that can be drawn: finite, not huge."""
    return isinstance(value, (int, float)) and abs(value) < LARGEST


def numbers_of(line):
    """Returns those entries of a dict that are numbers."""
    return {name: value for name, value in line.items() if is_number(value)}


def visible(text):
    r"""Returns text with what cannot be seen written out, as \x1b. Line breaks stay.

    So nothing that a model writes moves the cursor, hides or turns other text around.

    >>> visible("a\x1b\u202e\u2028 b")
    'a\\x1b\\u202e\\u2028 b'
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def spoken(prompt):
    """Returns a prompt as it reads: a chat, which is logged as JSON, turn by turn.

    >>> print(spoken('[{"role": "user", "content": "Hello"}]'), spoken("[1]"))
    user: Hello [1]
    """
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        turns = [f"{turn['role']}: {turn['content']}" for turn in json.loads(prompt)]
        return "\n\n".join(turns) or prompt
    return prompt


def cut(text):
    """Returns a text, or the beginning of a long one."""
    more = len(text) - CHARACTERS
    return text if more <= 0 else f"{text[:CHARACTERS]}… ({more} characters more)"


def number(value, digits=4):
    """Returns a number with so many digits, as text; "" of what is no number.

    >>> number(12345.6), number(0.00012), number(2.0), number(None)
    ('12,346', '0.00012', '2', '')
    """
    if not is_number(value):
        return ""
    value = float(f"{value:.{digits}g}") if digits < 4 else value
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def rounded(values):
    """Returns numbers with five digits, and None for what is no number."""
    return [float(f"{x:.5g}") if is_number(x) else None for x in values]
