"""Repairs of libraries (machinery/patches.py): each has a test that says why it exists, and
that fails when the library behaves as it should, so that the repair may go. For record_backward,
see test_engines.py, and for skip_together in real runs test_environment.py."""

import datetime
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from deepspeed.comm.torch import TorchBackend
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import ZeroStageEnum

from machinery import patches

c10d = torch.distributed.distributed_c10d


# --------------------------------------------------------------------------------------------------
# wait_at_most
# --------------------------------------------------------------------------------------------------
def test_deepspeed_makes_groups_without_the_limit_it_was_given(monkeypatch):
    """A rank that hangs must end the run within ranks.WAIT_MINUTES, wherever the others wait.
    DeepSpeed hands the limit to the first group of ranks, and to none that it makes later."""
    seen = {}
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **more: seen.update(more))
    TorchBackend.new_group(SimpleNamespace(), [0])
    assert "timeout" not in seen, "DeepSpeed limits its groups now: wait_at_most may go"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_without_a_limit_of_its_own_takes_ours(monkeypatch, backend):
    """PyTorch gives such a group its defaults, 10 or 30 minutes; these are what is replaced."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))  # put back after the test
    assert patches.wait_at_most(3) == datetime.timedelta(minutes=3)
    assert c10d._get_default_timeout(backend) == datetime.timedelta(minutes=3)


# --------------------------------------------------------------------------------------------------
# keep_grad_norm
# --------------------------------------------------------------------------------------------------
def test_a_stage_0_engine_forgets_the_norm_of_its_gradients():
    """metrics.jsonl has grad_norm at each step. Every other engine notes it while it clips. That
    ours is the norm of the other stages: test_gradient_norms_agree."""
    source = inspect.getsource(DeepSpeedEngine.clip_fp32_gradients)
    assert "_global_grad_norm" not in source, "it keeps the norm now: keep_grad_norm may go"


# --------------------------------------------------------------------------------------------------
# save_stages_as_numbers
# --------------------------------------------------------------------------------------------------
def test_a_checkpoint_names_no_getattr(monkeypatch):
    """As Python 3.11.2 stores a member of an enum, which is Debian 12's."""
    old = lambda stage, protocol: (getattr, (type(stage), stage.name))  # noqa: E731
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", old)
    assert b"getattr" in pickle.dumps(ZeroStageEnum.weights)
    patches.save_stages_as_numbers()
    stored = pickle.dumps(ZeroStageEnum.weights)
    assert b"getattr" not in stored and pickle.loads(stored) is ZeroStageEnum.weights


# --------------------------------------------------------------------------------------------------
# correct_by_step_number
# --------------------------------------------------------------------------------------------------
def updated(optimizer, parameter, steps):
    """The weights after updates with gradients that depend on the step alone."""
    for step in steps:
        parameter.grad = torch.randn(9999, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return parameter.detach().clone()


def adam(kind, repair):
    parameter = nn.Parameter(torch.linspace(-1, 1, 9999))
    optimizer = kind([parameter], lr=1e-2, betas=(0.9, 0.95))
    repair(optimizer)
    return optimizer, parameter


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_a_resumed_adam_goes_on_to_the_bit(kind):
    """DeepSpeed's Adam on a CPU carries beta^t along as a product in fp32, and does not save it.
    A resumed run takes pow(beta, t), which differs in the last bit after a few steps."""
    gaps = []
    for repair in (lambda optimizer: optimizer, patches.correct_by_step_number):
        expected = updated(*adam(kind, repair), range(40))
        optimizer, parameter = adam(kind, repair)
        updated(optimizer, parameter, range(9))
        resumed, weights = adam(kind, repair)
        updated(resumed, weights, range(3))  # another engine's steps come between
        weights.data.copy_(parameter.data)
        resumed.load_state_dict(optimizer.state_dict())
        gaps.append((updated(resumed, weights, range(9, 40)) - expected).abs().max().item())
    assert gaps[0] > 0, "it needs no product now: correct_by_step_number may go"
    assert gaps[1] == 0


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_the_repaired_adam_is_still_adam(kind):
    """The step of no weights in between moves nothing: torch's own AdamW goes the same way."""
    found = updated(*adam(kind, patches.correct_by_step_number), range(40))
    parameter = nn.Parameter(torch.linspace(-1, 1, 9999))
    torchs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    assert (found - updated(torchs, parameter, range(40))).abs().max() < 2e-6


# --------------------------------------------------------------------------------------------------
# skip_together
# --------------------------------------------------------------------------------------------------
class Overflowing:
    """An optimizer in fp16, and its engine."""

    def __init__(self, overflows, boundary):
        self.overflows, self.optimizer = overflows, self
        self.is_gradient_accumulation_boundary = lambda: boundary

    def has_overflow(self):
        return self.overflows


@pytest.mark.parametrize(
    "dtype, boundary, expected",
    [("fp16", True, [True, True]), ("fp16", False, [True, False]), ("bf16", True, [True, False])],
)
def test_both_engines_skip_where_one_overflows(dtype, boundary, expected):
    """At the end of an update in fp16. In the next update they are asked anew."""
    engines = [Overflowing(overflows, boundary) for overflows in (True, False)]
    args = SimpleNamespace(dtype=dtype)
    patches.skip_together(args, engines)
    assert [engine.optimizer.has_overflow() for engine in engines] == expected
    engines[0].overflows = False
    patches.skip_together(args, engines)
    assert not any(engine.optimizer.has_overflow() for engine in engines)
