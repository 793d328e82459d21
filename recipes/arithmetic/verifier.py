"""The verifier of the toy arithmetic: 1 where the final answer is right, 0 where it is not.

    --reward_fn recipes/arithmetic/verifier.py:correct

It reads only what stands after the last "=". So a derivation with a wrong step gets 1 if its answer
is right. `all_steps_right` finds such lucky answers; no run trains on it.
"""


def final_answer(completion):
    """Returns the number after the last "=", or None if something else is there.

    >>> final_answer(" 12 - 9 + 2 = 3 + 2 = 5"), final_answer(" 12 - 9 + 2 = 3 + 2")
    (5, None)
    """
    last = completion.rpartition("=")[2].strip()
    return int(last) if last.isdecimal() else None


def correct(prompts, completions, answer, **columns):
    """Returns 1.0 for each right answer, else 0.0. `answer` is the data's column of that name.

    >>> correct(["7 + 5 - 9 ="] * 3, [" 12 - 9 = 3", " 11 - 9 = 2", " 12 - 9 ="], [3] * 3)
    [1.0, 0.0, 0.0]
    """
    return [float(final_answer(text) == right) for text, right in zip(completions, answer)]


def all_steps_right(prompt, completion):
    """Returns whether every step of a derivation has the same value as the sum.

    >>> all_steps_right("7 + 5 - 9 =", " 12 - 9 = 3"), all_steps_right("7 + 5 - 9 =", " 11 - 9 = 3")
    (True, False)
    """
    values = {value_of(step) for step in [prompt.removesuffix("="), *completion.split("=")]}
    return len(values) == 1 and None not in values


def value_of(step):
    """Returns the value of a sum such as "12 - 9 + 2", or None if the text is not a sum."""
    words = step.split()
    if not words or len(words) % 2 == 0 or not all(word.isdecimal() for word in words[::2]):
        return None
    value = int(words[0])
    for sign, operand in zip(words[1::2], words[2::2]):
        if sign not in "+-":
            return None
        value += int(operand) if sign == "+" else -int(operand)
    return value
