"""A task of your own with a verifiable reward: sums.

docs/ppo.md has the commands and what they gave. Four of ten sums that step 1 learns from
are wrong, so its answers are, too. Step 3 needs no reward model: it checks each answer.
"""

import json
import random
from pathlib import Path


def correct(prompts, completions, total, **columns):
    """1 for the right number and nothing else, 0 for all else. `total` is the
    column of that name in the data."""
    return [float(text == f" {number}") for text, number in zip(completions, total)]


if __name__ == "__main__":
    rng, folder = random.Random(0), Path("output/sums")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.jsonl", "w") as file:
        for _ in range(12_000):
            a, b = rng.randrange(30), rng.randrange(30)
            said = (
                a + b if rng.random() < 0.6 else max(0, a + b + rng.choice([-10, -2, -1, 1, 2, 10]))
            )
            file.write(
                json.dumps({"prompt": f"{a} + {b} =", "response": f" {said}", "total": a + b})
                + "\n"
            )
