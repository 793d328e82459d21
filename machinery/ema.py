"""EMA (--enable_ema): an average of the actor's weights over its updates, in fp32.

Each rank averages its own share of every weight, so there is no communication until it is saved.
"""

import deepspeed.comm as dist
import torch
import torch.nn as nn

from machinery import ranks, zero3


class Ema:
    """The average of the weights of `model` that train. Without --enable_ema it does nothing.

    It lives in state["ema"], {name: this rank's share} or None, where checkpoints save it and put
    it back. It is fp32: in bf16 (1 - 0.992) of a step is below half an ulp.
    """

    def __init__(self, args, model, state):
        self.decay, self.state = args.ema_decay, state
        state["ema"] = None
        if args.enable_ema:
            state["ema"] = {name: share.clone() for name, share in local_shards(model)}

    @property
    def shards(self):
        """{name: this rank's share of the average}, empty without --enable_ema."""
        return self.state["ema"] or {}

    def update(self, engine):
        """Moves the average towards the weights, unless fp16 skipped the engine's last step.

            ema += (1 - decay) * (weights - ema)

        Written to gathered weights it would be lost: ZeRO-3 throws them away on exit unless
        `modifier_rank` is set.
        """
        if self.shards and engine.was_step_applied():
            for name, share in local_shards(engine.module):
                self.shards[name].lerp_(share, 1 - self.decay)

    def save(self, run, engine, tokenizer):
        """Saves the average of the engine's weights as a model, in ema/ of the output folder."""
        if self.shards:
            run.save(engine, tokenizer, f"{run.args.output_dir}/ema", self.full_tensor)

    def full_tensor(self, name, parameter):
        """Returns the average of a weight for saving, as zero3.full_tensor does the weight."""
        if name not in self.shards:  # frozen
            return zero3.full_tensor(name, parameter)
        tensor = zero3.join_split(parameter, whole_part(parameter, self.shards[name]))
        return tensor.cpu() if ranks.get_rank() == 0 else None


def local_shards(model):
    """Yields the name of each weight that trains, and this rank's equal share of it, in fp32.

    The share is 1-d, padded at the end: ZeRO-3's partition, else a slice of the whole weight.
    """
    rank, count = ranks.data_parallel_rank(), ranks.data_parallel_size()
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, parameter in trained:
        if hasattr(parameter, "ds_tensor"):
            share = parameter.ds_tensor
        else:
            flat = parameter.detach().flatten()
            share = nn.functional.pad(flat, (0, -len(flat) % count)).view(count, -1)[rank]
        yield name, share.float()


def whole_part(parameter, shard):
    """Returns the tensor of which each rank holds a shard, on all of them, which all call it.

    It has the shape and dtype of the weight; with tensor parallelism it is this rank's part.
    """
    mine = shard.to(ranks.device(), parameter.dtype).contiguous()
    rank, count = ranks.get_rank(), ranks.get_world_size()
    shards = mine.new_empty(count, len(mine))  # the one copy of the whole, in the weight's dtype
    torch.distributed.all_gather([*shards], mine)
    shares = ranks.data_parallel_size()
    if hasattr(parameter, "ds_tensor"):
        shares = dist.get_world_size(parameter.ds_process_group)
    # With tensor parallelism neighbouring ranks hold different parts of a layer: the shards of
    # one part are those of every so-many-th rank.
    split = count // shares
    shape = getattr(parameter, "ds_shape", parameter.shape)
    part = shards[rank % split :: split]
    return part.flatten()[: shape.numel()].view(shape)  # a copy only where split > 1
