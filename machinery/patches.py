"""Repairs of libraries: one function each, with the reason and the version that needs it.

Its tests fail when a library no longer needs one of them.
"""

import datetime

import deepspeed
import torch
import torch.nn as nn
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.config import ZeroStageEnum
from transformers import AttentionMaskInterface, modeling_utils
from transformers.masking_utils import sdpa_mask

from machinery import zero3


def wait_at_most(minutes):
    """Limits how long a rank waits for another, in every group of ranks.

    init_distributed() limits the first group only. DeepSpeed (0.19.8) makes more without a limit,
    and PyTorch (2.13) then takes its defaults. Returns the limit.
    """
    limit = datetime.timedelta(minutes=minutes)
    c10d = torch.distributed.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit
    return limit


def save_stages_as_numbers():
    """Has a checkpoint store the ZeRO stage that DeepSpeed puts there as a class and a number.

    Python before 3.11.4 (Debian 12's, for example) stores a member of an enum as a call of getattr.
    That could run any code, so that tools/export.py would refuse a run's own checkpoint.
    """
    ZeroStageEnum.__reduce_ex__ = lambda stage, _: (ZeroStageEnum, (int(stage),))


def compare_whole_weights():
    """Makes transformers compare weights whole before it ties them, also where ZeRO-3 has them.

    A config may tie the output matrix to the embedding while the file holds another one, which
    transformers (5.24) then uses. What ZeRO-3 has partitioned it takes for equal, as it sees two
    empty tensors: at stage 3 alone the file's own matrix was dropped.
    """

    def equal(one, other):
        with zero3.gathered_parameters([one, other]):
            return torch.equal(one, other)

    modeling_utils._tied_params_are_equal = equal


def forget_unused_names(model):
    """Has a model that ZeRO-3 partitioned saved under the names under which it was read.

    transformers (5.24) reverses, when it saves, the renamings that it kept. Of those that matched
    nothing in the file it keeps none at other stages, and all at stage 3: Gemma 3's weights were
    saved under names that nobody knows.
    """
    found = getattr(model, "_weight_conversions", [])
    model._weight_conversions = [renaming for renaming in found if renaming.was_used()]


def quicken_linear():
    """Makes nn.Linear under ZeRO-3 use `quick_linear`, from the first partitioned model on.

    DeepSpeed (0.19.8) makes each product by an autograd function, whose backward gathers the weight
    anew. It does so without a backward, too: in a rollout, for each matrix at each token.
    """
    deepspeed.zero.partition_parameters.zero3_linear_wrap = quick_linear


def quick_linear(input, weight, bias=None):
    """Returns nn.functional.linear as DeepSpeed computes it under ZeRO-3, to the bit.

    The parameters have PyTorch's names, which some callers use (peft's HRA).
    """
    if torch.is_grad_enabled():
        return deepspeed.runtime.zero.linear.zero3_linear_wrap(input, weight, bias)
    if input.dim() == 2 and bias is not None:
        return torch.addmm(bias, input, weight.t())
    out = input.matmul(weight.t())
    return out if bias is None else out.add_(bias)


def mend_attention():
    """Makes all repairs of attention: what every run of the scripts has."""
    do_without_cudnn_attention()
    share_masks()


def do_without_cudnn_attention():
    """Turns off cuDNN's attention kernels, which PyTorch (2.13) takes first on H100, H200 and B200.

    With a mask and T % 128 == 64 their gradient of the queries is NaN where a row's logsumexp is
    below -88.7 (pytorch#196678, closed since): Qwen2.5-0.5B has such a head, and ends so within 60
    steps (trl#7181). Torch 2.13 has this cuDNN; a later one, 9.26, gives NaN elsewhere
    (cudnn-frontend#1072). PyTorch's own kernels, flash and memory-efficient, do the work.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def share_masks():
    """Makes all layers of a forward attend with one additive mask.

    transformers (5.23) hands them True and False, of which PyTorch (2.13) makes the same numbers
    anew in every layer, and keeps them there for the backward: in bf16 2 N T^2 bytes a layer.
    """
    AttentionMaskInterface.register("sdpa", additive_mask)


def additive_mask(*args, dtype, **options):
    """Returns what transformers' sdpa_mask does, as numbers; None where none is needed."""
    mask = sdpa_mask(*args, **options)
    return None if mask is None else as_numbers(mask, dtype)


def as_numbers(mask, dtype):
    """Returns what is added to the scores of attention: 0 where mask (N, 1, T, T) is True, or -inf.

    A row of it begins at a multiple of 16 numbers. PyTorch's memory-efficient kernel would copy one
    that does not begin at a multiple of 8 (preprocess_mask in aten's transformers/attention.cpp).
    """
    *shape, T = mask.shape
    aligned = torch.zeros(*shape, T + -T % 16, dtype=dtype, device=mask.device)
    return aligned[..., :T].masked_fill_(~mask, -torch.inf)


def keep_grad_norm(engine, max_norm):
    """Makes a stage 0 engine in fp32 keep the norm that get_global_grad_norm() returns.

    There alone DeepSpeed (0.19.8) clips without noting it. With max_norm 0 it measures nothing.
    """

    def clip_and_keep():
        parameters = engine.module.parameters()
        engine._global_grad_norm = nn.utils.clip_grad_norm_(parameters, max_norm)

    engine.clip_fp32_gradients = clip_and_keep


def reduce_nothing(engine):
    """Makes the engine of a single rank leave its gradients where they are; ranks that share all
    layers count as one.

    DeepSpeed (0.19.8) sums them over this one rank at stage 0, and in bf16 at stage 1. It copies
    all to one buffer and back, and in bf16 rounds what was summed in fp32 to bf16 on the way.
    """
    engine._reduce_non_expert_gradients = lambda *_: None


def correct_by_step_number(optimizer):
    """Makes DeepSpeed's Adam on a CPU take its bias correction from the step number alone.

    0.19.8 multiplies beta^t up from step to step, in fp32, for all engines of the process, and
    takes pow() only where the step is not the next one: after a load, for example. So a run that
    was resumed differed in the last bit from step 6 on. A step 0 of no weights makes each step
    "not the next one".
    """
    empty = [torch.empty(0)] * 4  # weights, gradients, moments
    rates = 0.0, 0.0, 0.0, 0.0  # learning rate, betas, eps

    def forget(*_):
        if isinstance(optimizer, DeepSpeedCPUAdam):
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, *rates, 0.0, True, *empty)
        else:
            lists, no_flag = [[x] for x in empty], torch.zeros(1, dtype=torch.int)
            optimizer.multi_tensor_adam(1, no_flag, lists, *rates, 0, 1, True, 0.0)

    optimizer.register_step_pre_hook(forget)


def record_backward(engine):
    """Makes stage 3 record the pass to come, forward and backward, and prefetch weights by it.

    DeepSpeed (0.19.8) records what lies between the starts of two forwards. Where one that scores
    and one that trains take turns, no record has a backward, and none prefetches.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    coordinator = offload and offload.get_param_coordinator()
    if coordinator and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def skip_together(args, engines):
    """Makes all engines skip an update in fp16 if the gradients of one have overflowed.

    Called before each step(); it acts at the last one of an update. A DeepSpeed engine (0.19.8)
    decides for itself: the critic would learn from a rollout that the actor did not learn from.
    """
    if args.dtype == "fp16" and all(e.is_gradient_accumulation_boundary() for e in engines):
        optimizers = [engine.optimizer for engine in engines]
        # Each sums over the ranks. It is called by its class: the replacement below may hide it.
        own = [type(optimizer).has_overflow(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.has_overflow = lambda *args, **options: any(own)
