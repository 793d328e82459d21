"""Each micro-batch's loss is its own mean, and the loss of a step is the mean of these."""

import torch

import sft

SCRIPT = "sft"
FLAGS = {"sft": "--per_device_train_batch_size 4 --gradient_accumulation_steps 6"}


def fault():
    collate = sft.collate

    def own_mean(rows, pad_id):
        batch = collate(rows, pad_id)
        if torch.is_grad_enabled():  # evaluations measure as always
            batch.loss_mask /= batch.loss_mask.sum().clamp(min=1)  # weights that sum to 1
        return batch

    sft.collate = own_mean
