"""Repairs of libraries (machinery/patches.py), and why they exist. Where it can be seen, a test
fails when the library behaves as it should, so that the repair may go. For record_backward and
reduce_nothing, see test_engines.py; for the norm of gradients test_layouts.py, for the masks and
kernels of attention test_accelerators.py, and for skip_together in real runs test_environment.py.
"""

import datetime
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from deepspeed.comm.torch import TorchBackend
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero import linear
from deepspeed.runtime.zero.config import ZeroStageEnum

from machinery import patches

c10d = torch.distributed.distributed_c10d


def test_a_group_without_a_limit_of_its_own_takes_ours(monkeypatch):
    """A rank that hangs must end the run within ranks.WAIT_MINUTES, wherever the others wait.
    DeepSpeed hands the limit to the first group of ranks, and to none that it makes later. PyTorch
    gives such a group its defaults, 10 or 30 minutes; these are what is replaced."""
    seen = {}
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **more: seen.update(more))
    TorchBackend.new_group(SimpleNamespace(), [0])
    assert "timeout" not in seen, "DeepSpeed limits its groups now: wait_at_most may go"
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))  # put back after the test
    limit = patches.wait_at_most(3)
    found = {c10d._get_default_timeout("gloo"), c10d.default_pg_nccl_timeout, limit}
    assert found == {datetime.timedelta(minutes=3)}


def test_a_checkpoint_names_no_getattr(monkeypatch):
    """As Python 3.11.2 stores a member of an enum, which is Debian 12's."""
    old = lambda stage, protocol: (getattr, (type(stage), stage.name))  # noqa: E731
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", old)
    assert b"getattr" in pickle.dumps(ZeroStageEnum.weights)
    patches.save_stages_as_numbers()
    stored = pickle.dumps(ZeroStageEnum.weights)
    assert b"getattr" not in stored and pickle.loads(stored) is ZeroStageEnum.weights


def updated(optimizer, steps):
    """Returns the weights after updates with gradients that depend on the step alone."""
    [parameter] = optimizer.param_groups[0]["params"]
    for step in steps:
        parameter.grad = torch.randn(9999, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return parameter.detach().clone()


def adam(kind, repair=lambda optimizer: None, start=None, **options):
    start = torch.linspace(-1, 1, 9999) if start is None else start
    optimizer = kind([nn.Parameter(start.clone())], lr=1e-2, betas=(0.9, 0.95), **options)
    repair(optimizer)
    return optimizer


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_a_resumed_adam_goes_on_to_the_bit(kind):
    """DeepSpeed's Adam on a CPU carries beta^t along as a product in fp32, and does not save it.
    A resumed run takes pow(beta, t), which differs in the last bit after a few steps. The repaired
    one is still Adam: the step of no weights in between moves nothing."""
    gaps = []
    for repair in (lambda optimizer: None, patches.correct_by_step_number):
        expected, stopped = updated(adam(kind, repair), range(40)), adam(kind, repair)
        resumed = adam(kind, repair, start=updated(stopped, range(9)))
        updated(adam(kind, repair), range(3))  # another engine's steps come between
        resumed.load_state_dict(stopped.state_dict())
        gaps.append((updated(resumed, range(9, 40)) - expected).abs().max().item())
    assert gaps[0] > 0, "it needs no product now: correct_by_step_number may go"
    assert gaps[1] == 0
    torchs = updated(adam(torch.optim.AdamW, weight_decay=0), range(40))
    assert (expected - torchs).abs().max() < 2e-6


class Overflowing:
    """An optimizer in fp16, and its engine."""

    def __init__(self, overflows, boundary):
        self.overflows, self.optimizer = overflows, self
        self.is_gradient_accumulation_boundary = lambda: boundary

    def has_overflow(self):
        return self.overflows


def test_deepspeeds_linear_takes_the_long_way_without_a_backward(monkeypatch):
    """That ours takes its place: test_sharded_generation_equals_the_plain_model."""
    calls = []
    monkeypatch.setattr(linear.LinearFunctionForZeroStage3, "apply", lambda *x: calls.append(x))
    with torch.no_grad():
        linear.zero3_linear_wrap(torch.ones(1, 2), torch.ones(3, 2))
    assert calls, "it takes the short way now: quicken_linear may go"


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 7)])
@pytest.mark.parametrize("shape", [(5, 33), (2, 5, 33), (0, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quick_product_has_the_same_bits(shape, bias, dtype):
    """Old log-probs come without a backward, new ones with it: their ratio must be exactly 1."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(7, 33, dtype=dtype)
    bias = bias if bias is None else bias.to(dtype)
    with torch.no_grad():
        quick = patches.quick_linear(x, weight, bias)
    slow = patches.quick_linear(x, weight.requires_grad_(True), bias)
    assert "LinearFunctionForZeroStage3" in type(slow.grad_fn).__name__ and quick.grad_fn is None
    assert quick.equal(slow)


@pytest.mark.parametrize("dtype, boundary", [("fp16", True), ("fp16", False), ("bf16", True)])
def test_both_engines_skip_where_one_overflows(dtype, boundary):
    """At the end of an update in fp16. In the next update they are asked anew."""
    engines = [Overflowing(overflows, boundary) for overflows in (True, False)]
    for overflows in (True, False):
        engines[0].overflows = overflows
        patches.skip_together(SimpleNamespace(dtype=dtype), engines)
        both = dtype == "fp16" and boundary
        found = [engine.optimizer.has_overflow() for engine in engines]
        assert found == [overflows, overflows and both]
