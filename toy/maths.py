r"""A verifier of word problems: 1 where the final answer is right, 0 where it is not.

    --reward_fn toy/maths.py:solved

It reads the two forms of the well-known data sets, in the response and in the data alike:

    #### 42           what stands after the last ####, to the end of the line      GSM8K, `answer`
    \boxed{42}        what stands in the last box                                  MATH, `solution`

If a text has both, the later one counts; a response that has neither gets 0. The two answers are
then compared as numbers, exactly: 1,234 is 1234, and 0.50, 1/2 and \frac{1}{2} are equal. Currency,
percent signs and units are left out. What is no number, such as \sqrt{2} or (1, 2), is compared as
text without its spaces: x+1 is then not 1+x. Where answers are formulas take Math-Verify, which
parses them (github.com/huggingface/Math-Verify), in a function of your own.
"""

import re
from fractions import Fraction

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"  # with or without commas between the thousands
DECIMAL = rf"[-+]?(?:{DIGITS}(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"({DECIMAL})(?:/({DIGITS}))?")  # 42, -1,234.50, 3/4
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
CURRENCY = re.compile(r"\\?[$€£¥]")
SPACES = re.compile(r"\\[ ,;!]|~")  # LaTeX's; a thin one stands between thousands, too
NAME = re.compile(r"^[a-zA-Z]\s*=(?!=)")  # x = 42
UNIT = re.compile(r"\s*(?:\\?%|\^?\{?\\circ\}?|[a-zA-Z]{2,}\b\D*|\s[a-zA-Z]\b\D*)$")


def solved(prompts, completions, answer=None, solution=None, **columns):
    """Returns 1.0 for each completion whose final answer is the data's.

    The data's is in the column `answer` (as in GSM8K), else in `solution` (as in MATH). A row that
    has neither raises a ValueError: to count it as 0 would teach that every answer is wrong.
    """
    truths = answer or solution or [None] * len(prompts)
    scores = []
    for prompt, completion, truth in zip(prompts, completions, truths):
        text = "" if truth is None else str(truth)
        true = final_answer(text) or text.strip()  # some data hold the bare answer
        if not true:
            words = "no answer in the columns `answer` and `solution` for the prompt"
            raise ValueError(f"{words} {prompt!r:.200}")
        if not isinstance(completion, str):  # a chat: a list of messages
            completion = completion[-1]["content"]
        found = final_answer(completion)
        scores.append(float(found is not None and same(found, true)))
    return scores


def final_answer(text):
    r"""Returns what a text gives as its final answer, or None if it gives none.

    >>> final_answer("48 / 2 = 24, and 48 + 24 = 72.\n#### 72"), final_answer(r"so \boxed{72}.")
    ('72', '72')
    """
    hashes, box = text.rfind("####"), text.rfind("\\boxed")
    if hashes == box:  # both are -1
        return None
    if hashes > box:
        return text[hashes + 4 :].strip().partition("\n")[0].strip()
    rest = text[box + len("\\boxed") :].lstrip()
    return in_braces(rest) if rest.startswith("{") else rest[:1]  # \boxed 5, as TeX reads it


def in_braces(text):
    r"""Returns what stands between a first brace and the one that closes it; None if none does.

    >>> in_braces(r"{\frac{1}{2}} of it")
    '\\frac{1}{2}'
    """
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:i].strip()
    return None


def same(one, other):
    """Returns whether two answers are equal, as numbers if both are."""
    numbers = as_number(one), as_number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return "".join(plain(one).split()) == "".join(plain(other).split())


def plain(answer):
    """Returns an answer without LaTeX's spaces and texts, currencies, stars, and a last dot."""
    answer = SPACES.sub("", answer.replace("{,}", ",").replace("−", "-"))
    answer = CURRENCY.sub("", LATEX_TEXT.sub(" ", answer))
    return LATEX_FRACTION.sub(r"\1/\2", answer).strip(" *").rstrip(".").strip()


def as_number(answer):
    r"""Returns an answer as an exact Fraction, or None if it is no single number.

    >>> [str(as_number(text)) for text in ("$1,234.50", r"\frac{1}{2}", "18 apples", "3 or 4")]
    ['2469/2', '1/2', '18', 'None']
    """
    words = NAME.sub("", plain(answer)).strip()
    number = NUMBER.match(words)
    if not number or UNIT.sub("", words[number.end() :]).strip():
        return None
    whole, divisor = (Fraction((part or "1").replace(",", "")) for part in number.groups())
    return whole / divisor if divisor else None
