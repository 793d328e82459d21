"""DeepSpeed 0.18.5, the oldest that is supported: what is done otherwise for it. What it cannot do
is refused: tests/run/test_flags.py.
"""

import contextlib

import deepspeed
import pytest

import common
import sft
from machinery.engine import old_deepspeed

old = pytest.mark.parametrize("installed, is_old", [("0.18.5", True), ("0.19.0", False)])


@pytest.fixture
def opened(monkeypatch):
    """Collects what is gathered at a time."""
    found = []

    def gathered(parameters, **options):
        found.append(list(parameters))
        return contextlib.nullcontext()

    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", gathered)
    return found


def test_versions_are_compared_as_versions(monkeypatch):
    """As strings "0.9.5" is above "0.16.4"."""
    monkeypatch.setattr(deepspeed, "__version__", "0.9.5")
    assert old_deepspeed.older_than("0.16.4") and not old_deepspeed.older_than("0.9.5")


@old
def test_gradients_wait_for_the_last_micro_batch(monkeypatch, installed, is_old):
    """In bf16 at stage 1, 0.18.5 sums over the ranks before the last micro-batch is in, unless it
    is told not to."""
    monkeypatch.setattr(deepspeed, "__version__", installed)
    args = sft.get_args(["--preset", "toy", "--dtype", "bf16", "--zero_stage", "1"])
    expected = {"enabled": True, **({"immediate_grad_update": True} if is_old else {})}
    assert common.ds_config(args, 1, 4)["bf16"] == expected


@old
def test_weights_are_gathered_one_by_one(monkeypatch, opened, installed, is_old):
    """Of several gathers at once 0.18.5 awaits the last alone."""
    monkeypatch.setattr(deepspeed, "__version__", installed)
    with old_deepspeed.gathered_parameters([1, 2]):
        assert opened == ([[1], [2]] if is_old else [[1, 2]])


@old
def test_layers_are_split_before_an_engine_is_made(monkeypatch, installed, is_old):
    monkeypatch.setattr(deepspeed, "__version__", installed)
    calls = []
    monkeypatch.setattr(deepspeed, "tp_model_init", lambda *_, **options: calls.append(options))
    old_deepspeed.split_layers("model", 1, "dtype")
    old_deepspeed.split_layers("model", 2, "dtype")
    assert calls == [{"tp_size": 2, "dtype": "dtype"}] * is_old
