"""Step 3 leaves out the end of the template that step 1 was trained with."""

import ppo
from machinery.data.tokens import tokenise_prompt

SCRIPT = "ppo"


def fault():
    load_rows = ppo.load_rows

    def loaded(args, sources, tokenizer, limit):
        def plain(row):
            prompt = row["prompt"].removesuffix("\nAnswer:")
            return {"prompt": prompt, "prompt_ids": tokenise_prompt(tokenizer, prompt)}

        return [rows.map(plain) for rows in load_rows(args, sources, tokenizer, limit)]

    ppo.load_rows = loaded
