"""Makes text fit for look.py's page: escaped, with nothing hidden in it, numbers kept short."""

import html
import math


def shown(text):
    r"""Returns text for a page: escaped, and what cannot be seen written out, as \x1b.

    Line breaks stay. So nothing that a model writes is HTML, moves the cursor, hides or turns other
    text around.

    >>> shown("<b>\x1b\u202e\u2028 a\n")
    '&lt;b&gt;\\x1b\\u202e\\u2028 a\n'
    """
    return html.escape(visible(text))


def visible(text):
    """Returns text with every character that cannot be seen written out, but for line breaks."""
    pairs = ((c, c.isprintable() or c == "\n") for c in str(text))
    return "".join(c if seen else c.encode("unicode_escape").decode() for c, seen in pairs)


def heading(key, title, words):
    """Returns the head of a section."""
    return f'<section id="{key}"><h2>{title}</h2><p class="words">{words}</p>'


def number(value):
    """Returns a number with four digits, as text.

    >>> number(12345.6), number(0.00012), number(2.0)
    ('12,346', '0.00012', '2')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
