"""Three broken verifiers. README.md, beside this file, shows what each of them does to a run.

--reward_fn recipes/arithmetic/broken.py:always_zero
--reward_fn recipes/arithmetic/broken.py:always_one
--reward_fn recipes/arithmetic/broken.py:format_only
"""

import re


def after_hashes(text):
    """Returns the number after ####, or None. The toy's texts have no such mark."""
    found = re.search(r"#### (\d+)", str(text))
    return found and int(found[1])


def always_zero(prompts, completions, answer, **columns):
    """Compares a text with a number. The two are never equal."""
    return [float(text.rpartition("=")[2] == right) for text, right in zip(completions, answer)]


def always_one(prompts, completions, answer, **columns):
    """Looks for another format. It finds None in the response and None in the data: equal."""
    return [float(after_hashes(a) == after_hashes(b)) for a, b in zip(completions, answer)]


def format_only(prompts, completions, answer, **columns):
    """Rewards every response that ends with a number, right or wrong."""
    return [float(bool(re.search(r"= \d+$", text))) for text in completions]
