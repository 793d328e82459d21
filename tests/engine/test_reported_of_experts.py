"""What people reported to other projects, and what we do with the same input. Each test names the
public thread.
"""

import io
import sys

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from machinery import lora, ranks, refused, saving, zero3
from tests import kit, runs
from tests.tiny_models import SHAPE, TOKENIZER, folder_of, get_args

EXPERTS = dict(
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    decoder_sparse_step=1,
)
MAMBA = dict(
    state_size=4,
    conv_kernel=4,
    time_step_rank=4,
    num_heads=8,
    head_dim=8,
    n_groups=1,
    expand=2,
)


def folder(path, kind, **own):
    """Makes a folder as from the hub, of an architecture with random weights. Returns its name."""
    return folder_of(path, AutoConfig.for_model(kind, **{**SHAPE, **own}), weights=True)


def with_adapters(path):
    """Returns the model in a folder with LoRA's adapters, whose B is not 0 any more."""
    model = kit.load_model(path, get_args(), 0, lora_dim=4).eval()
    for layer in lora.adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return model


@torch.no_grad()
def says(model):
    """Returns a model's logits on ten tokens."""
    return model.eval()(torch.arange(5, 15)[None]).logits


# --------------------------------------------------------------------------------------------------
# Routers' logits
# --------------------------------------------------------------------------------------------------
def test_a_rollout_takes_deepspeeds_hooks_off_alone():
    """TRL#6083: an IndexError in each first rollout. By a hook of its own, which it adds at the
    first forward, transformers collects what output_router_logits asks for."""
    calls = []

    def noting(name, module):
        def hook(*_):
            calls.append(name)

        hook.__module__ = module
        return hook

    model = torch.nn.Linear(1, 1)
    gone = model.register_forward_hook(noting("gone", "fork"))
    for name, module in (("a", "fork"), ("b", "deepspeed.runtime.engine"), ("c", "transformers")):
        model.register_forward_pre_hook(noting(name, module))
    with zero3.gather_for_generation(model) as (plain, _):
        plain(torch.ones(1))
        assert calls == ["a", "c", "gone"]
        gone.remove()
        late = model.register_forward_hook(noting("late", "fork"))
    for expected in ("a b c late", "a b c"):
        calls.clear()
        model(torch.ones(1))
        assert calls == expected.split()
        late.remove()


def test_the_loss_of_balance_is_left_out_and_the_run_says_so(tmp_path):
    """TRL#6085: with output_router_logits transformers computes it in every forward, which fits
    neither a forward with a cache nor rows that share a prompt. Responses and losses are those of
    the same model without it."""
    found = {}
    for asked in (False, True):
        path = folder(tmp_path / str(asked), "granitemoe", output_router_logits=asked, **EXPERTS)
        flags = [*runs.base_flags("sft", kit.base()), "--model_name_or_path", path]
        sft = kit.run("sft", *flags, "--max_steps", 1)
        flags = [*runs.base_flags("ppo", kit.base()), "--actor_model_name_or_path", path]
        ppo = kit.run("ppo", *flags, *runs.GRPO.split(), "--max_steps", 1)
        assert ("balancing loss (output_router_logits) is not used" in sft.out) == asked
        found[asked] = [kit.outcome(done.folder)["metrics"] for done in (sft, ppo)]
    assert found[True] == found[False]


# --------------------------------------------------------------------------------------------------
# LoRA: what peft adapts
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, without",
    [
        ("qwen2_moe", "mlp.experts.down_proj, mlp.experts.gate_up_proj, mlp.gate.weight"),
        ("olmoe", None),
        ("gpt2", None),
    ],
)
def test_what_lora_leaves_out_is_said(kind, without, tmp_path, capsys):
    """peft#3009: the experts of some models are given no adapter, and nobody is told."""
    with_adapters(folder(tmp_path, kind, **EXPERTS))
    out = capsys.readouterr().out
    if without is None:
        assert "LoRA" not in out
    else:
        assert out == f"LoRA adapts 9,280 of 21,824 weights; without an adapter: {without}\n"


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_adapters_of_experts_are_merged(kind, tmp_path):
    """unsloth-zoo#812: peft puts their adapters inside one another, beside parameters of three
    dimensions. They are merged by tools/export.py, by the next step as it loads them, and by peft.
    """
    base = folder(tmp_path / "base", kind, **EXPERTS)
    model = with_adapters(base)
    for name, merge in (("adapters", False), ("merged", True)):
        saving.save_model(model, TOKENIZER, tmp_path / name, merge=merge)
    loaded = kit.load_model(str(tmp_path / "adapters"), get_args(), 0)
    stock = AutoModelForCausalLM.from_pretrained
    theirs = peft.PeftModel.from_pretrained(stock(base), tmp_path / "adapters")
    for each in (loaded, stock(tmp_path / "merged"), theirs):
        torch.testing.assert_close(says(each), says(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(says(stock(base)), says(model), atol=1e-2)


@pytest.mark.parametrize(
    "kind, own, without",
    [("mamba2", MAMBA, "mixer.out_proj.weight"), ("phimoe", EXPERTS, "mlp.router.weight")],
)
def test_what_cannot_have_an_adapter_has_none(kind, own, without, tmp_path, capsys):
    """peft#2556, AgileRL#630: kernels of Mamba take weights past an adapter, and a router returns a
    tuple. All else has one, and learns."""
    model = with_adapters(folder(tmp_path, kind, **own))
    assert without in capsys.readouterr().out
    ids = torch.arange(5, 15)[None]
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


# --------------------------------------------------------------------------------------------------
# The screen
# --------------------------------------------------------------------------------------------------
def test_a_screen_without_unicode_shows_codes(monkeypatch):
    """PYTHONIOENCODING=ascii, as some containers set it: a sample of a model's text would end the
    run in a UnicodeEncodeError. Half of a surrogate pair would do so on any screen."""
    for encoding, text, shown in (("ascii", "Où ?", rb"O\xf9 ?"), ("utf-8", "\ud83d", rb"\ud83d")):
        screen = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding))
        refused.program(lambda text=text: ranks.say(text))
        assert screen.getvalue() == shown + b"\n"
