"""Weights and states that are not whole on a device: ZeRO-3, offloading, tensor parallelism."""

import contextlib

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.layers import LinearAllreduce
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from packaging import version

from machinery import ranks
from machinery.refused import Refused


# ---- The model inside an engine ----
def unwrap_model(engine):
    """Returns the transformers model inside a DeepSpeed engine, a ValueModel, or both."""
    model = getattr(engine, "module", engine)
    return model.model if hasattr(model, "value_head_name") else model


def count_parameters(model, training=False):
    """Returns how many weights the model has (or trains), on however many ranks they are spread."""
    return sum(size_of(p) for p in model.parameters() if p.requires_grad or not training)


def size_of(parameter):
    """Returns how many weights a parameter has, on however many ranks they are spread."""
    split = hasattr(parameter, "gather_params")  # by tensor parallelism
    size = getattr(parameter, "ds_numel", parameter.numel())
    return size * (ranks.tensor_parallel_size() if split else 1)


# ---- DeepSpeed ----
def older_than(number):
    """Returns whether the installed DeepSpeed is older than version `number`."""
    return version.parse(deepspeed.__version__) < version.parse(number)


def add_options(args, config, train):
    """Adds to DeepSpeed's `config` what the flags of offloading and tensor parallelism say.

    Offloads go to the CPU unless ds_config.json names another device. train: for an engine that
    trains. DeepSpeed can split the output matrix, too; ours is whole: every rank sees all logits.
    """
    zero, to_cpu = config["zero_optimization"], {"device": "cpu", "pin_memory": True}
    if args.offload and zero["stage"] == 3:
        zero["offload_param"] = {**to_cpu, **zero.get("offload_param", {})}
    if args.adam_offload and train:
        zero["offload_optimizer"] = {**to_cpu, **zero.get("offload_optimizer", {})}
    if args.tensor_parallel_size > 1:
        split = {"autotp_size": args.tensor_parallel_size, "vocab_parallel_lm_head": False}
        config["tensor_parallel"] = split


# ---- Gathering ----
def gather_layers_whole(model):
    """Makes ZeRO-3 gather each decoder layer in one go: fewer and larger gathers."""
    kinds = model._no_split_modules or ()
    layers = {type(layer) for layer in model.modules() if type(layer).__name__ in kinds}
    if layers:
        deepspeed.utils.set_z3_leaf_modules(model, list(layers))


@contextlib.contextmanager
def gathered_parameters(parameters, **options):
    """Gathers weights that ZeRO-3 has sharded: DeepSpeed's GatheredParameters.

    Before 0.19 one by one: of several gathers it awaits the last alone, and on a CPU they may
    overtake each other.
    """
    with contextlib.ExitStack() as stack:
        for part in [[p] for p in parameters] if older_than("0.19") else [parameters]:
            stack.enter_context(deepspeed.zero.GatheredParameters(part, **options))
        yield


@contextlib.contextmanager
def gather_for_generation(engine, room=0):
    """The model in an engine, under ZeRO-3 with all weights gathered once for many forwards.

        with gather_for_generation(engine) as (model, synced): ...

    room: the bytes that the forwards need beside the weights.

    DeepSpeed's hooks are taken off meanwhile, and nobody else's: by its own transformers collects
    what a config asks for. At every stage DeepSpeed's keep the engine's clocks, and under ZeRO-3
    they gather the weights anew for every token (4 times as long). If the gathered weights do not
    fit beside what is there, the hooks stay, and `synced` is True: then all ranks must make the
    same number of forwards.
    """
    release_early_gathers(engine)
    model = unwrap_model(engine)
    sharded = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    synced = bool(sharded) and not fit_on_every_rank(sharded, room)
    hooked = () if synced else model.modules()
    tables = [t for m in hooked for t in (m._forward_pre_hooks, m._forward_hooks)]  # {id: hook}
    before = [dict(table) for table in tables]
    with gathered_parameters(sharded, enabled=not synced):
        for table, hooks in zip(tables, before):
            put_in(table, {key: hook for key, hook in hooks.items() if not is_deepspeeds(hook)})
        yield model, synced
    for table, hooks in zip(tables, before):
        now = {**hooks, **table}  # in their order, with what came meanwhile
        put_in(table, {k: hook for k, hook in now.items() if k in table or is_deepspeeds(hook)})


def is_deepspeeds(hook):
    """Returns whether a hook is a function of DeepSpeed's."""
    return (getattr(hook, "__module__", "") or "").startswith("deepspeed.")


def put_in(table, hooks):
    """Makes `hooks` all that is in a table. It stays the same object: handles refer to it."""
    table.clear()
    table.update(hooks)


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
        tensor = join_split(parameter, parameter.detach())
        return tensor.cpu().clone() if ranks.get_rank() == 0 else None


# ---- State offload (--offload_states): what only optimizers need waits on the CPU ----
def states_to_cpu(args, engines):
    """Moves the optimizer states, fp32 weights and gradients of `engines` to the CPU.

    Only the weights that forwards use stay. Without --offload_states nothing moves.
    """
    states = set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_params}
    on_gpu = ranks.device().type != "cpu"  # DeepSpeed 0.18.5 cannot pin memory without a GPU
    for engine in engines if args.offload_states else ():
        engine.offload_states(include=states, pin_memory=on_gpu)


def states_to_device(args, engines):
    """Moves back what `states_to_cpu` moved away."""
    for engine in engines if args.offload_states else ():
        engine.reload_states()


def drop_offload_buffers(engine):
    """Drops the CPU buffers that stage 3 keeps among Adam's state. The next offload makes new ones.

    DeepSpeed (0.19.8) would write them to a checkpoint, a second copy of the moments, and load them
    onto the device, where an offload would then move the moments to.
    """
    for state in engine.basic_optimizer.state.values():
        for name in [name for name in state if name.endswith("_offload_buffer")]:
            del state[name]


# ---- Tensor parallelism (--tensor_parallel_size): ranks that share each layer ----
def refuse_unless_split(path, config, args):
    """Refuses the model in `path` if its layers cannot be split as asked."""
    size, text = args.tensor_parallel_size, config.get_text_config()
    names = "num_attention_heads", "num_key_value_heads"
    heads = {getattr(layer, name, 0) or size for layer in text.per_layer_config for name in names}
    if size > 1 and (not text.base_model_tp_plan or any(count % size for count in heads)):
        rule = f"must divide {sorted(heads)}, the attention and key-value heads of {path}"
        known = f"and transformers must know how to split a {config.model_type} model"
        raise Refused("cannot-split-layers", f"--tensor_parallel_size {size} {rule},\n  {known}.")


def loading_device(args):
    """Returns where weights are read to: this rank's device, or the CPU if they are split next."""
    return "cpu" if args.tensor_parallel_size > 1 else ranks.device()


def join_split(parameter, tensor):
    """Returns the whole of a weight, or of its EMA, of which this rank holds `tensor`.

    The ranks that share the layer put it together; all of them call this.
    """
    gather = getattr(parameter, "gather_params", None)  # DeepSpeed's, in place, on layers it split
    if not gather:
        return tensor
    box = [tensor.clone()]
    if tensor.dim() > 1 or not isinstance(gather.__self__, LinearAllreduce):  # whose bias is whole
        gather(box)
    return box[0]
