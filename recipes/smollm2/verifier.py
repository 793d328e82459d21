"""The verifier of the sums: 1 where the last whole number of a response is the answer, else 0.

    --reward_fn recipes/smollm2/verifier.py:right

Nothing else is rewarded: no format, no end, no length. A response that is cut off has whatever
number it has come to.
"""

import re


def last_number(text):
    """Returns the last run of digits of a text as a number, or None. No answer is below 0.

    >>> last_number("37 + 48 = 85."), last_number("48 - 23 = -25"), last_number("Eighty.")
    (85, 25, None)
    >>> last_number("37 + 48 = 1000000085") == 85, last_number("0085"), last_number("0")
    (False, 85, 0)
    """
    found = re.findall(r"[0-9]+", text)
    return int(found[-1].lstrip("0")[:9] or 0) if found else None  # of pages of digits: enough


def right(prompts, completions, answer, **columns):
    """Returns 1.0 for each right response: a list of messages, as the prompts are chats.

    >>> texts = "37 + 48 = 85.", "37 + 48 = 75", "85 is the sum of 37 and 48."
    >>> right([], [[{"role": "assistant", "content": text}] for text in texts], [85] * 3)
    [1.0, 0.0, 0.0]
    """
    texts = [completion[-1]["content"] for completion in completions]
    return [float(last_number(text) == true) for text, true in zip(texts, answer)]
