"""Logits that are many are made in parts, and never all there: the numbers are the same."""

import resource
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import common
import ppo
from machinery import output_head
from tests import kit, runs
from tests.tiny_models import KINDS, SHAPE, config_of, folder_of, get_args, load_model

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18]]
LAYOUT = common.last_columns(*common.pad(ROWS, 0), 4)
MASK = torch.tensor([[1.0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]])  # 8 tokens
WEIGHTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def in_parts_of(monkeypatch, tokens, vocabulary=SHAPE["vocab_size"]):
    """Has logits made for so many tokens at a time; None: for all at once."""
    monkeypatch.setattr(output_head, "LARGEST", 4 * vocabulary * (tokens or 99))


def numbers(model, mask=MASK, temperature=0.7):
    """Returns log-probs, and the gradients of all weights that train."""
    model.zero_grad()
    logprobs = common.response_logprobs(model, LAYOUT, mask, temperature)
    (logprobs * WEIGHTS).sum().backward()
    named = model.named_parameters()
    return {"": logprobs} | {name: p.grad for name, p in named if p.grad is not None}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        off = (found[name] - expected[name]).abs().max()
        assert off <= 5e-6 * expected[name].abs().max().clamp(min=1), (name, off)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_parts_change_no_logprob_and_no_gradient(name, tied, tmp_path, monkeypatch):
    """In parts of 3, 3 and 2 tokens, and of 1; also where the embedding
    is the output matrix, and has a gradient of its own; and where no token at all is wanted."""
    config = config_of(name, tie_word_embeddings=tied)
    model = load_model(folder_of(tmp_path, config), get_args(), stage=0).eval()
    assert model.ends_with_head
    in_parts_of(monkeypatch, None)
    expected, none = numbers(model), numbers(model, 0 * MASK)
    made = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, found: made.append(found.shape))
    for tokens in (3, 1):
        in_parts_of(monkeypatch, tokens)
        same(numbers(model), expected)
        same(numbers(model, 0 * MASK), none)
    assert {*made} == {MASK.shape}  # and the logits are nowhere


AFTER = dict(granite=False, gemma2=False, cohere=False, gpt_oss=True, phi=True, qwen3_moe=True)


@pytest.mark.parametrize("name", AFTER)
def test_what_a_model_does_after_its_output_matrix_is_seen(name, monkeypatch):
    """A soft cap, a scale: such a model makes its logits at once, and they stay right. A matrix
    with a bias (Phi) is no obstacle."""
    shape = {k: v for k, v in SHAPE.items() if k not in ("ffn_dim", "init_std")}
    config = AutoConfig.for_model(name, **shape, num_key_value_heads=2, head_dim=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.ends_with_head = output_head.ends_with_head(model)
    assert model.ends_with_head == AFTER[name]
    in_parts_of(monkeypatch, None)
    expected = numbers(model)
    in_parts_of(monkeypatch, 3)
    same(numbers(model), expected)


def test_a_change_in_place_is_seen(tiny_model, monkeypatch):
    """The same tensor comes back, but not with the same numbers."""
    plain = tiny_model.forward

    def capped(*inputs, **options):
        found = plain(*inputs, **options)
        found.logits.tanh_()
        return found

    assert output_head.ends_with_head(tiny_model)
    monkeypatch.setattr(tiny_model, "forward", capped)
    assert not output_head.ends_with_head(tiny_model)


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_entropy_comes_from_the_same_parts(coef, tiny_model, monkeypatch):
    """With its gradient where --entropy_coef trains on it."""
    batch = SimpleNamespace(**vars(LAYOUT), response_mask=MASK, entropy=None)
    args = ppo.get_args(["--preset", "toy", "--entropy_coef", str(coef), "--temperature", "0.7"])
    made = []
    tiny_model.ends_with_head = output_head.ends_with_head(tiny_model)
    for tokens in (None, 3):
        in_parts_of(monkeypatch, tokens, tiny_model.config.vocab_size)
        tiny_model.zero_grad()
        logprobs, entropy = ppo.actor_forward(args, tiny_model, batch)
        assert entropy.requires_grad == (coef > 0)
        (logprobs * WEIGHTS + coef * entropy).sum().backward()
        grads = {name: p.grad.clone() for name, p in tiny_model.named_parameters()}
        made.append({"logprobs": logprobs, "entropy": entropy, **grads})
    same(*made)


def test_an_adapter_on_the_output_matrix_has_its_logits_at_once(tmp_path, monkeypatch):
    """Its forward is more than a product."""
    folder = folder_of(tmp_path, config_of("llama"), weights=True)
    model = load_model(folder, get_args(), stage=0)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.ends_with_head = output_head.ends_with_head(model)
    in_parts_of(monkeypatch, None)
    expected = numbers(model)
    in_parts_of(monkeypatch, 3)
    same(numbers(model), expected)


def steps(base, stage, tokens, options):
    """Returns the losses of three steps and the sums of the weights after them, in each rank."""
    output_head.LARGEST = 4 * 550 * (tokens or 99)
    engine, losses = runs.tiny_engine(base, stage, options=options), []
    for seed in range(3):
        ids = runs.rows_of_rank(seed).tolist()
        layout = common.last_columns(*common.pad(ids, 0), 5)
        loss = -common.response_logprobs(engine, layout, torch.ones(2, 5)).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    whole = runs.whole_weights(engine)
    return losses, {name: weight.double().sum().item() for name, weight in whole.items()}


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16"), ("--lora_dim", "4")])
def test_parts_train_as_all_logits_do_under_every_stage(options):
    """ZeRO-3 gathers the matrix for its own forward, and again for its backward."""
    stages = [0, 1, 2, 3] if not options else [3]
    for stage in stages:
        at_once, parts = (
            kit.on_ranks(steps, 2, runs.base(), stage, tokens, options) for tokens in (None, 3)
        )
        for (losses, weights), (expected, others) in zip(parts, at_once):
            close = dict(rel=1e-2) if "bf16" in options else dict(rel=1e-4, abs=1e-4)
            assert losses == pytest.approx(expected, **close)
            assert weights == pytest.approx(
                others, rel=1e-2, abs=5e-2 if "bf16" in options else 1e-3
            )


def peak(largest):
    """Returns the GB that 8,192 tokens of a vocabulary of 151,936 take at most, in fp32."""
    output_head.LARGEST = largest
    size = dict(
        vocab_size=151_936, num_hidden_layers=1, hidden_size=64, max_position_embeddings=8200
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kit.tiny_config(**size))
    model.ends_with_head = output_head.ends_with_head(model)
    ids = torch.randint(0, 151_936, (1, 8193))
    layout = common.last_columns(ids, torch.ones_like(ids), 8192)
    common.response_logprobs(model, layout, torch.ones(1, 8192)).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


@pytest.mark.slow
def test_the_peak_of_memory_is_a_fraction():
    """The figures of docs/memory.md."""
    at_once, parts = (kit.on_ranks(peak, 1, many, limit=900)[0] for many in (2**60, 2**29))
    print(f"\npeak of a process, GB: all logits {at_once:.2f}, in parts {parts:.2f}")
    assert parts < at_once / 4


def test_few_logits_are_made_at_once(tiny_model):
    """The border is in bytes: a second product with the matrix costs time."""
    tiny_model.ends_with_head = True
    for tokens, expected in ((output_head.LARGEST // 4 // 542, False), (2**18, True)):
        wanted = torch.ones(1, tokens, dtype=torch.bool)
        assert output_head.too_many(tiny_model, wanted) == expected
