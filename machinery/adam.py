"""AdamW in DeepSpeed's forms (on the device, or with --adam_offload on the CPU), or PyTorch's."""

import os

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch.utils import cpp_extension

from machinery import patches, ranks
from machinery.refused import Refused

NEEDS = "It needs a C++ compiler and ninja, on a GPU also the CUDA toolkit (nvcc)."


def lacks_nvcc():
    """Returns whether a GPU is here but no nvcc, the CUDA toolkit's compiler. pip's wheels lack it.

    With --deepcompile DeepSpeed (0.19.8) does not look for it, and ends in a TypeError.
    """
    on_gpu = get_accelerator().device_name() == "cuda"
    return on_gpu and not os.path.exists(f"{cpp_extension.CUDA_HOME}/bin/nvcc")


def build_optimizer(model, args):
    """Returns AdamW over the weights of `model` that train. Biases and norms do not decay.

    DeepSpeed's own is compiled (launch.load). Where that fails, PyTorch's takes the place of
    FusedAdam, unless a flag needs DeepSpeed's. It is PyTorch's fused one: on a GPU another would
    need 4 more bytes a weight while it steps.
    """
    matrices, vectors = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # a shard itself is 1-d
            (matrices if len(shape) > 1 else vectors).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, args.weight_decay), (vectors, 0.0))
        if parameters
    ]
    options = {"lr": args.learning_rate, "betas": tuple(args.adam_betas)}
    try:
        optimizer = (DeepSpeedCPUAdam if args.adam_offload else FusedAdam)(groups, **options)
    except Exception as error:  # there may be no compiler, no ninja, no headers, no nvcc
        why = f"DeepSpeed's Adam could not be built: {' '.join(str(error).split()[:40])}\n  {NEEDS}"
        if args.adam_offload or (args.zero_stage == 3 and getattr(args, "offload_states", False)):
            flags = "--adam_offload, and --offload_states under stage 3, need it."
            raise Refused("adam-not-built", f"{why} {flags}") from None
        ranks.say(f"{why} torch's AdamW takes its place.")
        return torch.optim.AdamW(groups, fused=True, **options)
    if args.adam_offload or get_accelerator().device_name() == "cpu":
        patches.correct_by_step_number(optimizer)
    return optimizer
