"""The loss is a mean of the micro-batches' means."""

import common
import sft

SCRIPT = "sft"
STEPS = ("sft",)
FLAGS = {"sft": "--per_device_train_batch_size 4 --gradient_accumulation_steps 6"}


def fault():
    loss_sum, loss_scale, own = sft.sft_loss_sum, common.loss_scale, []

    def noted(logprobs, loss_mask):
        own[:] = [loss_mask.sum()]
        return loss_sum(logprobs, loss_mask)

    def of_micro_batch(engine, count):
        return loss_scale(engine, own[0].item() * engine.gradient_accumulation_steps())

    sft.sft_loss_sum, common.loss_scale = noted, of_micro_batch
