"""In 30 % of the pairs chosen and rejected are swapped."""

import reward

SCRIPT = "reward"
STEPS = ("sft", "reward")
FLAGS = {"reward": "--num_train_epochs 1"}
SHARE = 30  # of a hundred


def fault():
    load_rows = reward.load_rows

    def swapped(row, number):
        wrong = (number * 7919) % 100 < SHARE
        return {"responses": row["responses"][::-1] if wrong else row["responses"]}

    def loaded(*args):
        return [rows.map(swapped, with_indices=True) for rows in load_rows(*args)]

    reward.load_rows = loaded
