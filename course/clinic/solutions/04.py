"""Prompt and response together are cut to so few tokens that most pairs become equal."""

import reward

SCRIPT = "reward"
STEPS = ("sft", "reward")
FLAGS = {"reward": "--share_prompt 0 --num_train_epochs 1"}
LIMIT = 12  # tokens; a prompt has 11 to 13


def fault():
    load_rows = reward.load_rows

    def cut(row):
        room = max(LIMIT - len(row["prompt_ids"]), 0)
        return {"responses": [response[:room] for response in row["responses"]]}

    def loaded(*args):
        return [rows.map(cut) for rows in load_rows(*args)]

    reward.load_rows = loaded
