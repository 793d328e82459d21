"""LoRA in a rollout by two products a matrix: the frozen weight W and the adapter's A lie together.

    rows (out + r, in)    W, of which the layer's weight is a view from now on
                          A, a copy of the one that trains: made anew before each call of `sample`

    x rows^T            = x W^T | x A^T                      (n, out) and (n, r), by one product
    x W^T + (x A^T) B^T * alpha / r                          (n, out), by another one, in place

No weight is kept twice, none is rounded, and W itself never changes.
"""

import functools

import torch
from peft.tuners.lora import Linear
from torch import nn

from machinery import flags, lora
from machinery.refused import Refused


def check(args):
    """Refuses --fuse_adapters where W is not whole, or where there is nothing to fuse."""
    whole = 3 not in flags.stages_of(args, "actor") and args.tensor_parallel_size == 1
    if args.fuse_adapters and not (args.actor_lora_dim and whole):
        words = "--fuse_adapters 1 needs --actor_lora_dim, and --actor_zero_stage 0, 1 or 2:"
        raise Refused("fuse-adapters", f"{words}\n  at 3 DeepSpeed shards frozen weights, too.")


class FusedLinear(Linear):
    """A layer with an adapter, which peft put there: a whole one of its kind, with `rows`."""

    fused = False  # True while `sample` runs

    def forward(self, x, *others, **options):
        if not self.fused:
            return super().forward(x, *others, **options)
        b, scale = self.lora_B["default"].weight, self.scaling["default"]
        both = nn.functional.linear(x, self.rows, self.rows_bias).flatten(0, -2)  # (n, out + r)
        whole, thin = both.split([len(b), b.shape[1]], -1)  # (n, out), (n, r)
        return whole.addmm_(thin, b.T, alpha=scale).unflatten(0, x.shape[:-1])


@torch.no_grad()
def fuse(engine):
    """Gives each frozen matrix of a model, or of an engine, its `rows`.

    An engine must have its dtype and device. Layers of another kind (GPT-2's) stay as they are.
    """
    for layer in lora.adapted_layers(engine).values():
        base, a = layer.base_layer, layer.lora_A["default"].weight
        if type(layer) is Linear and type(base) is nn.Linear:
            # Buffers, as CUDA graphs copy any other tensor into place for each replay. Not saved.
            layer.register_buffer("rows", torch.cat([base.weight, a]), persistent=False)
            bias = None if base.bias is None else nn.functional.pad(base.bias, (0, len(a)))
            layer.register_buffer("rows_bias", bias, persistent=False)
            base.weight.data = layer.rows[: base.out_features]
            layer.__class__ = FusedLinear


def with_fused_adapters(sample):
    """Returns ppo.sample, during which the fused layers of the model have A as it is now."""

    @functools.wraps(sample)
    def fused(args, model, *others, **options):
        layers = [layer for layer in model.modules() if type(layer) is FusedLinear]
        for layer in layers:
            a = layer.lora_A["default"].weight.detach()
            layer.rows[-len(a) :] = a
            layer.fused = True
        try:
            return sample(args, model, *others, **options)
        finally:
            for layer in layers:
                layer.fused = False

    return fused
