"""AdamW in DeepSpeed's forms (on the device, or with --adam_offload on the CPU), or PyTorch's."""

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from machinery.base import ranks, refused
from machinery.engine import patches


def build_optimizer(model, args, stage, learning_rate, weight_decay):
    """Returns AdamW over the weights of `model` that train. Biases and norms do not decay.

    DeepSpeed compiles its own on first use. Where that fails, PyTorch's takes the place of
    FusedAdam, unless a flag needs DeepSpeed's. On a GPU it is PyTorch's fused one: another would
    need 4 more bytes a weight while it steps.
    """
    matrices, vectors = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # a shard itself is 1-d
            (matrices if len(shape) > 1 else vectors).append(parameter)
    pairs = (matrices, weight_decay), (vectors, 0.0)
    groups = [{"params": params, "weight_decay": decay} for params, decay in pairs if params]
    options = {"lr": learning_rate, "betas": tuple(args.adam_betas)}
    try:
        if args.adam_offload:
            optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        else:
            optimizer = FusedAdam(groups, adam_w_mode=True, **options)
        on_cpu = args.adam_offload or get_accelerator().device_name() == "cpu"
        return patches.correct_by_step_number(optimizer) if on_cpu else optimizer
    except Exception as error:  # there may be no compiler, no ninja, no headers, no nvcc
        on_gpu = get_accelerator().device_name() == "cuda"
        needs = "a C++ compiler (g++) and ninja" + ", and the CUDA toolkit (nvcc)" * on_gpu
        states = getattr(args, "offload_states", False) and stage == 3
        if args.adam_offload or states:
            flag = "--adam_offload" if args.adam_offload else "--offload_states under stage 3"
            refused.fail(
                f"{flag} needs DeepSpeed's Adam, which could not be built: {error}\n"
                f"  Install {needs}, or leave the flag out."
            )
        reason = str(error).splitlines()[0]
        ranks.say(
            f"FusedAdam could not be built, torch's AdamW takes its place: {reason}\n"
            f"  It needs {needs}."
        )
    return torch.optim.AdamW(groups, fused=on_gpu or None, **options)
