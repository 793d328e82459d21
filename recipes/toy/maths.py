r"""A verifier of word problems: 1 where the final answer is right, 0 where it is not.

    --reward_fn recipes/toy/maths.py:solved

It reads the two forms of the well-known data sets, in the response and in the data alike:

    #### 42           the text after the last ####, to the end of its line         GSM8K, `answer`
    \boxed{42}        the text in the last box                                     MATH, `solution`

If a text has both, the later one counts. A response that has neither gets 0, and so does an empty
answer. Two numbers are compared exactly: 1,234 is 1234, 5 million is 5,000,000, and 1.50, 3/2,
\frac{3}{2} and 1\frac{1}{2} are equal. A number may be followed or preceded by one of UNITS, or by
the words in \text{...} that the data's answer has. An answer without a unit matches any unit; two
units must be the same. Anything else beside a number makes it a different answer: 2 pi, 2x and 2 or
3 are not 2. An answer that is not a number, such as \sqrt{2}, (1, 2) or \text{Monday}, is compared
as text, so x+1 is not 1+x. A policy finds out what a verifier accepts, so an answer in doubt counts
as wrong.

If your answers are formulas, use Math-Verify, which parses them
(github.com/huggingface/Math-Verify), in a function of your own.
"""

import re
from fractions import Fraction

LONGEST = 1000  # characters of an answer; a longer text is not taken for one

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"  # commas between the thousands, or none
DECIMAL = rf"(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER = re.compile(rf"([-+]?) ?(?:({DIGITS}) )?({DECIMAL})(?:/({DIGITS}))?")  # 42, 3/4, 1 3/4
SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# One unit per line, in all its spellings. A plural in -s needs none of its own.
UNITS = r"""
    % \% percent
    degree ° ^\circ ^{\circ} \circ
    dollar $ \$ USD
    cent ¢
    euro € EUR
    pound £
    yen ¥
    mm millimeter millimetre
    cm centimeter centimetre
    m meter metre
    km kilometer kilometre
    inch inches in
    foot feet ft
    yard yd
    mile mi
    mg milligram
    g gram
    kg kilogram
    ounce oz
    lb
    ton
    ml mL milliliter millilitre
    l L liter litre
    cup
    pint
    quart
    gallon
    second s sec
    minute min
    hour h hr
    day
    week
    month
    year
    mph
    unit
"""
UNITS = {name: line.split()[0] for line in UNITS.strip().splitlines() for name in line.split()}

LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(rf"\\frac\{{(-?{DECIMAL})\}}\{{({DIGITS})\}}")
SIZE = re.compile(r"(square |sq |cubic |)(.*?)\s*(?:\^\{?([23])\}?|([²³])|)")  # m^2, cubic foot
POWERS = {"square ": 2, "sq ": 2, "cubic ": 3, "²": 2, "³": 3}
CURRENCY = re.compile(r"([-+]?)\s*(\\?\$|[€£¥])?(.*)", re.DOTALL)


def solved(prompts, completions, answer=None, solution=None, **columns):
    """Returns 1.0 for each completion whose final answer is the data's, and 0.0 for the others.

    The data's answer is in the column `answer` (as in GSM8K), or else in `solution` (as in MATH). A
    row that has neither raises a ValueError: a 0 for it would teach that every answer is wrong.
    """
    nothing = [None] * len(prompts)
    rows = zip(prompts, completions, answer or nothing, solution or nothing)
    scores = []
    for prompt, completion, of_answer, of_solution in rows:
        text = str(next((one for one in (of_answer, of_solution) if one is not None), ""))
        true = final_answer(text)
        true = text.strip() if true is None else true  # some data hold the bare answer
        if not plain(true):
            words = "no answer in the columns `answer` and `solution` for the prompt"
            raise ValueError(f"{words} {prompt!r:.200}")
        if not isinstance(completion, str):  # a chat: a list of messages
            completion = completion[-1]["content"]
        found = final_answer(completion)
        scores.append(float(found is not None and same(found, true)))
    return scores


def final_answer(text):
    r"""Returns the final answer of a text, or None if it gives none.

    >>> final_answer("48 / 2 = 24, and 48 + 24 = 72.\n#### 72"), final_answer(r"so \boxed{72}.")
    ('72', '72')
    """
    hashes, box = text.rfind("####"), text.rfind("\\boxed")
    if hashes == box:  # both are -1
        return None
    if hashes > box:
        return text[hashes + 4 :].partition("\n")[0].strip()
    rest = text[box + len("\\boxed") :].lstrip()
    return in_braces(rest) if rest.startswith("{") else rest[:1]  # \boxed 5, as TeX reads it


def in_braces(text):
    r"""Returns the text between a first brace and the one that closes it; None if none does.

    >>> in_braces(r"{\frac{1}{2}} of it")
    '\\frac{1}{2}'
    """
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:i].strip()
    return None


def same(found, true):
    """Returns whether an answer equals the data's: as a number if that is one, else as text."""
    number, right = quantity(found, true), quantity(true, true)
    if right is None or number is None:
        text = as_text(found)
        return right is number and text != "" and text == as_text(true)
    return number[0] == right[0] and (not number[1] or not right[1] or number[1] == right[1])


def plain(answer):
    r"""Returns an answer in one spelling of LaTeX: without $...$, stars, sizes and a final dot.

    >>> plain(r"**$\dfrac12$**."), plain(r"\left(10\,000, 2\right)")
    ('\\frac{1}{2}', '(10,000, 2)')
    """
    if len(answer) > LONGEST:
        return ""
    answer = answer.replace("−", "-").replace("{,}", ",").replace("\\!", "").strip(" *")
    answer = answer.removesuffix(".").strip(" *")
    if len(answer) > 2 and answer[0] == answer[-1] == "$" and answer[-2] != "\\":
        answer = answer[1:-1].strip().removesuffix(".")
    answer = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3})", ",", answer)  # a thin space between thousands
    answer = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", re.sub(r"\\[ ,;:]|~", " ", answer))
    answer = re.sub(r"\\[dt]?frac\s*", r"\\frac", answer)
    answer = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", answer)
    return re.sub(r"(\\frac\{[^{}]*\})\s+\{", r"\1{", answer).strip().rstrip("\\ ")


def as_text(answer):
    r"""Returns an answer as text to compare. Spaces are kept only between two numbers.

    >>> as_text(r"\text{(C)}"), as_text(r"( \frac{1}{2}, 3 )"), as_text("1 2")
    ('C', '(1/2,3)', '1 2')
    """
    text = LATEX_TEXT.sub(r"\1", plain(answer))
    text = re.sub(r"(?<![\w.)}])\\frac\{([0-9]+)\}\{([0-9]+)\}(?![\w.])", r"\1/\2", text)
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    return re.sub(r"^\(([A-Z])\)$", r"\1", text)  # a choice


def quantity(answer, true):
    r"""Returns the number and the unit of an answer, or None if it is not a single number.

    true: the data's answer; the words in its \text{...} count as a unit.

    >>> for text in ("$1,234.50", r"-1\frac{1}{2}", r"18\text{ cm}^2", "5 million", "2 pi"):
    ...     print(quantity(text, ""))
    (Fraction(2469, 2), 'dollar')
    (Fraction(-3, 2), '')
    (Fraction(18, 1), 'cm^2')
    (Fraction(5000000, 1), '')
    None
    """
    text = re.sub(r"^[a-zA-Z]\s*=(?!=)\s*", "", plain(answer))  # x = 42
    text = re.sub(rf"^{LATEX_TEXT.pattern}$", r"\1", text).strip()
    sign, currency, text = CURRENCY.match(FRACTION.sub(r" \1/\2 ", text)).groups()
    text = " ".join((sign + text.strip()).split())
    number = NUMBER.match(text)
    if not number:
        return None
    rest = text[number.end() :]
    if re.match(r"[a-zA-Z](?![a-zA-Z])", rest):  # 3m may be a product
        return None
    minus, whole, top, below = number.groups()
    top, below, whole = (Fraction((part or "1").replace(",", "")) for part in (top, below, whole))
    if not below or (number[2] and not (number[4] and top < below)):
        return None
    value = top / below + (whole if number[2] else 0)
    scale, words = scaled(" ".join(LATEX_TEXT.sub(r" \1 ", rest).split()))
    unit = unit_of(words, true)
    if currency:
        name = UNITS[currency]
        unit = name if unit in ("", name) else unit_of(f"{name} {words}", true)
    return None if unit is None else (value * scale * (-1 if minus == "-" else 1), unit)


def scaled(words):
    """Returns the factor that the words begin with, and the words after it.

    >>> scaled("hundred million dollars")
    (100000000, 'dollars')
    """
    first, _, others = words.partition(" ")
    if first not in SCALES:
        return 1, words
    factor, others = scaled(others)
    return SCALES[first] * factor, others


def unit_of(words, true):
    r"""Returns a unit's one spelling, "" if there are no words, or None if they are not a unit.

    >>> unit_of("square feet", ""), unit_of("miles per hour", ""), unit_of("pi", "")
    ('foot^2', 'mile/hour', None)
    """
    if not words:
        return ""
    names = []
    for part in re.split(r" ?/ ?| per ", words):
        before, name, power, sign = SIZE.fullmatch(part).groups()
        name = name.lower() if len(name) > 3 else name  # 5 M is not 5 m
        name = UNITS.get(name) or UNITS.get(name.removesuffix("s"))
        power = power or POWERS.get(before or sign)
        names.append(f"{name}^{power}" if name and power else name)
    if all(names):
        return "/".join(names)
    own = [part.strip() for part in LATEX_TEXT.findall(plain(true))]
    return words if words in own else None
