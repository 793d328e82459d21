"""How fast a step was: tokens, FLOPs and seconds; and its learning rate and gradient norm."""

import functools
from dataclasses import dataclass

import torch

from machinery.base import modules, ranks


@dataclass
class Pass:
    """How often a model went over a step's micro-batches."""

    model: torch.nn.Module  # or an engine
    forwards: float = 0  # without a backward
    trains: float = 0  # with one


def work(micro_batches, passes, checkpointing=False):
    """Returns the tokens of a step and its FLOPs, over all ranks, without padding and fillers.

    micro_batches: with counts(), see common.Layout. passes: a list of Pass. checkpointing: a pass
    that trains makes the layers' forward twice.
    """
    counts = zip(*(batch.counts() for batch in micro_batches))
    tokens, rows, scored = ranks.all_sum(*map(sum, counts)).tolist()
    flops = 0.0
    for one in passes:
        cost = functools.partial(count_flops, one.model, tokens, tokens / rows, scored)
        flops += one.forwards * cost()
        flops += one.trains * cost(trains=True, checkpointing=checkpointing)
    return tokens, flops


def count_flops(engine, tokens, length, scored, trains=False, checkpointing=False):
    """Returns the FLOPs of a forward on `tokens` tokens in rows of `length`.

    With `trains` also those of its backward. A forward takes, per token, 2 for each weight in a
    matrix product, and 4 * layers * hidden * length in attention (PaLM, Chowdhery et al. 2022,
    appendix B). A backward takes as much for the gradients of what goes in, and as much for those
    of the weights that train: with LoRA the adapters alone. With checkpointing the layers' forward
    is made twice. The input embedding is a look-up, and the output matrix is multiplied for the
    `scored` tokens alone.
    """
    model = modules.unwrap_model(engine)
    config = model.config.get_text_config()
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up, output = (getattr(layer, "weight", None) for layer in ends)  # one, if tied
    forwards = 1 + (trains and checkpointing)
    attention = 4 * config.num_hidden_layers * config.hidden_size * length * tokens
    flops = attention * (forwards + 2 * trains)
    for weight in model.parameters():
        passes, count = (1, scored) if weight is output else (forwards, tokens)
        passes += trains * (1 + weight.requires_grad)
        if weight is output or weight is not looked_up:
            flops += 2 * passes * count * modules.size_of(weight)
    return flops


def grad_norm(args, engine):
    """Returns the norm of the gradient before clipping, or None where fp16 skipped the step."""
    norm = engine.get_global_grad_norm()
    skipped = args.dtype == "fp16" and not engine.was_step_applied()
    return None if norm is None or skipped else float(norm)


def learning_rate(engine):
    """Returns the rate of the step just made."""
    schedule = engine.lr_scheduler
    # its schedule has moved on, unless fp16 skipped the step
    step = max(0, schedule.last_epoch - engine.was_step_applied())
    return float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step))


def speed(tokens, flops, seconds):
    """Returns the metrics of a step that took `seconds`.

    tokens, without padding, and flops are of all ranks; "tflops" is per device.
    """
    return {
        "tokens_per_second": tokens / seconds,
        "tflops": flops / seconds / ranks.get_world_size() / 1e12,
        "seconds": seconds,
    }
