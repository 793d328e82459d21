"""ZeRO-3: forwards with fewer gathers, whole weights where they are needed, and offloading."""

import contextlib

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from machinery.base import modules, ranks
from machinery.engine import old_deepspeed, patches, tensor_parallel


def add_options(args, zero, train):
    """Adds offloading, to the CPU unless ds_config.json names another device.

    zero: "zero_optimization" of DeepSpeed's config. train: for an engine that trains.
    """
    to_cpu = {"device": "cpu", "pin_memory": True}
    if args.offload and zero["stage"] == 3:
        zero["offload_param"] = {**to_cpu, **zero.get("offload_param", {})}
    if args.adam_offload and train:
        zero["offload_optimizer"] = {**to_cpu, **zero.get("offload_optimizer", {})}


def ease_zero3(model, whole_layers):
    """Makes forwards under ZeRO-3 cheaper: quicker products, decoder layers gathered in one go.

    Layers only if `whole_layers`: with adapters DeepSpeed 0.19.8 frees whole layers too early.
    """
    patches.quicken_linear()
    kinds = model._no_split_modules or ()
    layers = {type(layer) for layer in model.modules() if type(layer).__name__ in kinds}
    if whole_layers and layers:
        deepspeed.utils.set_z3_leaf_modules(model, list(layers))


@contextlib.contextmanager
def gather_for_generation(engine, room=0):
    """The model in an engine, under ZeRO-3 with all weights gathered once for many forwards.

        with gather_for_generation(engine) as (model, synced): ...

    room: the bytes that the forwards need beside the weights.

    DeepSpeed's hooks are taken off meanwhile. At every stage they keep the engine's clocks, and
    under ZeRO-3 they gather the weights anew for every token (4 times as long). If the gathered
    weights do not fit beside what is there, the hooks stay, and `synced` is True: then all ranks
    must make the same number of forwards.
    """
    release_early_gathers(engine)
    model = modules.unwrap_model(engine)
    sharded = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    synced = bool(sharded) and not fit_on_every_rank(sharded, room)
    deepspeeds = sharded or model is not engine  # hooks; a plain model has its user's alone
    hooked = model.modules() if deepspeeds and not synced else ()
    hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in hooked]
    with old_deepspeed.gathered_parameters(sharded, enabled=not synced):
        for module, before, after in hooks:
            module._forward_pre_hooks, module._forward_hooks = type(before)(), type(after)()
        yield model, synced
    for module, before, after in hooks:
        module._forward_pre_hooks, module._forward_hooks = before, after


def release_early_gathers(engine):
    """Makes all weights that ZeRO-3 has sharded ready to be gathered.

    After a forward DeepSpeed (0.19.8) begins to gather what the backward will need. If none comes,
    as in an evaluation, GatheredParameters ends in "Cannot partition a param in flight".
    The engine's own method also collects Python's garbage, which took a fifth of a small model's
    PPO step, and empties the device's cache.
    """
    optimizer = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "empty_partition_cache"):
        optimizer.empty_partition_cache()


def fit_on_every_rank(sharded, room):
    """Returns whether each rank has memory for all weights that ZeRO-3 has sharded, and `room`."""
    need = room + sum(parameter.ds_numel * parameter.element_size() for parameter in sharded)
    if ranks.device().type == "cuda":  # what PyTorch holds and does not use is free, too
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] + unused
    else:
        free = get_accelerator().available_memory() / ranks.ranks_on_this_host()
    return ranks.all_sum(need < 0.8 * free)[0] == ranks.data_parallel_size()


def full_tensor(name, parameter):
    """Returns a copy of a weight on rank 0's CPU, None on other ranks. All ranks call it.

    name: used only where a weight's EMA is saved in its place (ema.py).
    """
    with deepspeed.zero.GatheredParameters([parameter]):
        tensor = tensor_parallel.join_shards(parameter, parameter.detach())
        return tensor.cpu().clone() if ranks.get_rank() == 0 else None


@torch.no_grad()
def set_weights(engine, weights):
    """Writes weights(name), a whole tensor on rank 0, over each weight that forwards use.

    All ranks call it, for a frozen model only: the next step of one that trains would write its
    fp32 master weights back. Checkpoints do not hold a frozen model's weights.
    """
    for name, parameter in modules.unwrap_model(engine).named_parameters():
        if parameter.requires_grad or hasattr(parameter, "gather_params"):
            raise ValueError("set_weights takes a frozen model with whole layers")
        tensor = weights(name)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if ranks.get_rank() == 0:
                parameter.copy_(tensor)
        if not hasattr(parameter, "ds_id"):
            torch.distributed.broadcast(parameter.data, 0)
