"""Mean and deviation of the advantages are taken over the padding, too."""

import torch

import ppo

SCRIPT = "ppo"


def fault():
    whitened = ppo.whitened

    def padded(advantages, masks):
        everything = [torch.ones_like(mask) for mask in masks]
        return [a * mask for a, mask in zip(whitened(advantages, everything), masks)]

    ppo.whitened = padded
