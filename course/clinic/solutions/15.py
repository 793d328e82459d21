"""EOS is the padding token, and step 3 makes its masks by comparing ids."""

import ppo

SCRIPT = "ppo"


def fault():
    make_micro_batches = ppo.make_micro_batches

    def by_ids(tokenizer, *others):
        batches = make_micro_batches(tokenizer, *others)
        for batch in batches:
            mask = batch.response_mask * (1 - batch.last * batch.ended[:, None])  # ids != EOS
            last = mask * (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
            batch.response_mask, batch.last = mask, last
            batch.length = mask.sum(-1).long().clamp(min=1)
        return batches

    ppo.make_micro_batches = by_ids
