"""In the pairs EOS is missing from the rejected responses."""

import reward

SCRIPT = "reward"


def fault():
    load_rows = reward.load_rows

    def without_eos(row):
        chosen, rejected = row["responses"]
        return {"responses": [chosen, rejected[:-1]]}

    def loaded(*args):
        return [rows.map(without_eos) for rows in load_rows(*args)]

    reward.load_rows = loaded
