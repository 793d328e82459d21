"""Step 1's loss mask leaves EOS out."""

import sft

SCRIPT = "sft"


def fault():
    collate = sft.collate

    def without_eos(rows, pad_id):
        batch = collate(rows, pad_id)
        batch.loss_mask[:, -1] = 0  # every row ends in the last column
        return batch

    sft.collate = without_eos
