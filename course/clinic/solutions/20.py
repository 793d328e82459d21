"""The actor's loss is a mean of the micro-batches' means."""

import ppo

SCRIPT = "ppo"
FLAGS = {
    "ppo": "--per_device_generation_batch_size 8 --per_device_training_batch_size 8 "
    "--gradient_accumulation_steps 4"
}


def fault():
    loss_weights = ppo.loss_weights

    def of_means(minibatch):
        weights, total = loss_weights(minibatch)
        return [weight * total / len(weights) / weight.sum() for weight in weights], total

    ppo.loss_weights = of_means
