"""A reward for each sentence of a response, for ppo.py --reward_fn: a process reward.

`steps` gives a sentence's points on the token that ends it, `whole` their sum on the last token.
"""

import re
import sys
from pathlib import Path

from transformers import AutoTokenizer

from machinery.tokens import as_text

HERE = Path(__file__).resolve()
TOY = next(path / "recipes/toy" for path in HERE.parents if (path / "recipes/toy").is_dir())
sys.path.insert(0, str(TOY))
import gold  # noqa: E402

TOKENIZER = AutoTokenizer.from_pretrained(TOY / "model")


def points(prompt, text):
    """Yields (where a sentence ends, in characters, and its points): of an answer up to 1.

    A right animal, a right place and an end of the answer are worth a third each; a kind remark
    gives a half, and anything else takes as much.
    """
    questions = enumerate(gold.QUESTIONS)
    form, asked = next((f, found) for f, q in questions if (found := q.search(prompt)))
    end = 0
    for sentence in re.split(r"(?<=[.!?])(?= )", text):
        end += len(sentence)
        words = sentence.strip()
        if answer := gold.ANSWERS[form].fullmatch(words):
            right = [answer["animal"] == asked["animal"], answer["place"] == asked["place"]]
            yield end, (sum(right) + (answer["end"] is not None)) / 3
        else:
            yield end, 0.5 if words in gold.KIND else -0.5


def steps(prompts, completions, completion_ids, **columns):
    """Returns for each response a list of one number a token."""
    out = []
    for prompt, text, ids in zip(prompts, completions, completion_ids):
        ends = range(1, len(ids) + 1)
        prefixes = [as_text(TOKENIZER, ids[:end], [TOKENIZER.eos_token_id]) for end in ends]
        numbers = [0.0] * len(ids)
        for end, worth in points(prompt, text):
            reached = (i for i, prefix in enumerate(prefixes) if len(prefix) >= end)
            numbers[next(reached, len(ids) - 1)] += worth
        out.append(numbers)
    return out


def whole(prompts, completions, **columns):
    """Returns for each response the sum of its points."""
    return [
        sum(worth for _, worth in points(prompt, text))
        for prompt, text in zip(prompts, completions)
    ]
