"""Flags that only variants have: --kl_target, --normalize_reward, --is_cap, --stop and
--compile_decoding."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import common
from machinery import metrics, ranks
from tests import kit
from tests.conftest import micro_batch
from tests.docs.test_variants import args_of, loss_of, patched, tiny_data
from tests.maths.test_against_loops import models_of_stubs
from tests.tiny_models import KINDS, config_of


# --------------------------------------------------------------------------------------------------
# adaptive-kl
# --------------------------------------------------------------------------------------------------
def test_the_kl_penalty_follows_its_target(tmp_path):
    """Target 6: 10 % above it raises the penalty by 1 %; the error is clipped to 20 %, so one step
    moves it by 2 % at most. Without a penalty there is nothing to adapt. (A run and its checkpoint:
    test_variants.py.)"""
    script = patched("adaptive-kl", tmp_path)
    for kl, expected in ((6.0, 0.1), (6.6, 0.101), (60.0, 0.102), (-1.0, 0.098)):
        assert script.adapted_kl_coef(0.1, kl, target=6.0) == pytest.approx(expected)
    with kit.refuses("wrong-flag"):
        args_of(script, "--kl_target 2 --kl_coef 0")


# --------------------------------------------------------------------------------------------------
# normalize-reward
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def normalizing(tmp_path):
    return patched("normalize-reward", tmp_path)


def scaled(script, *statistics):
    args = args_of(script, "--kl_coef 0 --whiten 0")
    args.normalize_reward, args.score_statistics = 1, statistics
    return args


def test_scores_can_be_put_on_the_scale_that_step_2_measured(normalizing):
    """Mean 1 and deviation 2 of the held-out responses make of 3 a 1, and of 30 more than the 5 at
    which it is clipped. Scores of single tokens keep their shares: 1 and 2 become 0.5 and
    (2 - 1) / 2."""
    scores, last = torch.tensor([[0.0, 3], [0, 30], [1, 2]]), torch.tensor([[0.0, 1]] * 3)
    batch = micro_batch(scores=scores, last=last, response_mask=1, ended=torch.ones(3))
    normalizing.set_rewards(scaled(normalizing, 1.0, 2.0), batch)
    assert batch.rewards.tolist() == [[0, 1], [0, 5], [0.5, 0.5]]
    assert batch.score_clipped.tolist() == [False, True, False]


def test_a_critic_learns_on_the_scale_of_the_rewards(normalizing, monkeypatch):
    """A mean of 1 and a deviation of 4: a value of 1 is 0 there, off by 3, and a step of 1 moves it
    by a quarter. A new head has no scale of its own."""
    values, ones = torch.ones(1, 1).requires_grad_(), torch.ones(1, 1)
    monkeypatch.setattr(common, "values_before_tokens", lambda *_: values)
    monkeypatch.setattr(normalizing, "actor_forward", lambda *_: (1 * values, values))
    models, args = models_of_stubs(), scaled(normalizing, 1.0, 4.0)
    models.critic.config = SimpleNamespace(score_statistics=[1.0, 4.0])
    batch = micro_batch([0], response_mask=ones, ended=torch.ones(1), advantages=0 * ones)
    batch.old_values, batch.returns = 0 * ones, 3 * ones
    means = normalizing.optimizer_step(args, models, [batch], metrics.TokenMeans())
    assert means["critic_loss"] == 0.5 * 3**2 and values.grad.item() == -3 / 4
    models.critic.config = SimpleNamespace()
    assert normalizing.critic_values(args, models.critic, batch).item() == 1


def test_a_judge_without_statistics_is_refused(normalizing):
    """It needs those of one reward model, which that model's config.json has."""
    flags = f"--normalize_reward 1 --critic_model_name_or_path {kit.base()}/models"
    assert args_of(normalizing, f"{flags}/measured").score_statistics == [0.1, 0.5]
    for more in ("/reward", "/measured --reward_fn recipes/toy/gold.py:gold"):
        with kit.refuses("wrong-flag"):
            args_of(normalizing, flags + more)


@pytest.mark.slow
def test_step_2_stores_what_step_3_scales_by(normalizing, tmp_path):
    """Mean and deviation of the last evaluation go into the reward model's config.json."""
    words = f"--preset toy --model_name_or_path {kit.base()}/models/actor --max_steps 2"
    given = [*words.split(), *tiny_data(), "--output_dir", f"{tmp_path}/judge"]
    tree = str(tmp_path / "tree")
    kit.fork(kit.call_of_tree, 1, tree, "reward", given, cwd=tmp_path, meet="")
    stored = json.loads((tmp_path / "judge/config.json").read_text())["score_statistics"]
    last = kit.read_lines(tmp_path / "judge/metrics.jsonl")[-1]
    assert stored == pytest.approx([last["eval_score_mean"], last["eval_score_std"]])


# --------------------------------------------------------------------------------------------------
# --is_cap, of async-1 and vllm
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["async-1", "vllm"])
def test_importance_weights_make_the_gradient_that_of_the_actors_own_responses(
    name, tmp_path, monkeypatch
):
    """Of one token each. Over all that mu can draw, by enumeration: with weights that no cap cuts
    the gradient is that of the expected advantage under pi; without them it is another. With a low
    cap they are too small."""
    monkeypatch.syspath_prepend(tmp_path / "tree")
    script, gaps = patched(name, tmp_path), []
    numbers = [1.0, 0.5, -1.0, 0.0], [0.1, 0.2, 0.3, 0.4], [2.0, -1.0, 0.5, 1.0]
    logits, mu, worth = torch.tensor(numbers, dtype=torch.float64)[..., None].unbind()
    logprobs = logits.requires_grad_().log_softmax(0)
    [wanted] = torch.autograd.grad(-(logprobs.exp() * worth).sum(), logits, retain_graph=True)
    given = dict(old_logprobs=logprobs.detach(), advantages=worth)
    for words in "--is_cap inf", "", "--is_cap 1.5":
        mus = {"sampled_logprobs": mu.log()}
        loss = loss_of(script, words, logprobs, per_token=mus, **given)[0]
        [found] = torch.autograd.grad((mu * loss).sum(), logits, retain_graph=True)
        gaps.append((found - wanted).abs().max())
    assert gaps[0] < 1e-9 and min(gaps[1:]) > 0.05


# --------------------------------------------------------------------------------------------------
# --stop, of tool-turns
# --------------------------------------------------------------------------------------------------
def test_a_stop_text_ends_a_response(tmp_path, tiny_model, tokenizer):
    """A response ends with the token that completes the text, though it took two tokens to write,
    and it has ended, not been cut. Its neighbour, which never writes it, goes on."""
    script = patched("tool-turns", tmp_path)
    prompts = [dict(prompt_ids=ids, row=i, sample=0) for i, ids in enumerate(([5, 6, 7], [8, 9]))]

    def responses(*stop):
        args = args_of(script, "--max_answer_seq_len 10 --seed 1")
        args.stop = stop
        rows = script.roll_out(args, tiny_model, tokenizer, prompts, 1, 2)
        return [(row["response_ids"], row["ended"]) for row in rows]

    first, other = (ids for ids, _ in responses())
    text = tokenizer.decode(first[2:4])
    assert len(first) == len(other) == 10 and text not in tokenizer.decode(first[:3])
    assert responses(text) == [(first[:4], 1), (other, 0)]
    text = "zq7-" * 9  # of many tokens
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = script.at_stop(SimpleNamespace(stop=[text]), tokenizer, torch.tensor([ids]), len(ids))
    assert len(ids) > 16 and found.tolist() == [True]
    with kit.refuses("wrong-flag"):
        script.get_args(["--preset", "toy", "--stop", ""])


# --------------------------------------------------------------------------------------------------
# compiled-decoding
# --------------------------------------------------------------------------------------------------
VOCAB = 100


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    """ppo.py of the variant, and compiled.py. What it changes in transformers is changed back."""
    monkeypatch.syspath_prepend(tmp_path / "tree")
    monkeypatch.delitem(sys.modules, "compiled", raising=False)
    script = patched("compiled-decoding", tmp_path)
    script.flags_of_tests = args_of(script, "--compile_decoding 1 --rollout_batch_size 4")
    attention = script.compiled.sdpa_attention
    for attribute in ("is_torchdynamo_compiling", "use_gqa_in_sdpa"):
        monkeypatch.setattr(attention, attribute, getattr(attention, attribute))
    yield script
    sys.modules.pop("compiled")


def tried(script, kind):
    """Returns a model that has static caches."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, vocab_size=VOCAB)).eval()
    script.compiled.try_it(script.flags_of_tests, model, no_end(), script.sample)
    return model


def no_end(eos=-1):
    return kit.Knowing(SimpleNamespace(pad_token_id=0, eos_token_id=eos), range(VOCAB))


@pytest.mark.parametrize("kind", [kind for kind in ("llama", "gpt2", "opt") if kind in KINDS])
def test_a_static_cache_gives_the_same_tokens(kind, compiling):
    """Without a compiler: prompts padded to 64 slots, all rows and an empty one to the end, twice
    in the one cache that was tried at the start."""
    model = tried(compiling, kind)
    [_], caches = model.static_caches, model.static_caches
    ids, mask = common.pad([[5, 6, 7, 8, 9], [10], [11, 12, 13]], 0)
    for step, eos in ((0, -1), (1, 7)):
        given, found = (no_end(eos), ids, mask, kit.uniforms(3, 16, step)), []
        for model.static_caches in ({}, caches):
            found.append(compiling.sample(compiling.flags_of_tests, model, *given)[0].tolist())
        assert found[0] == found[1] and len({*map(tuple, found[0])}) == 3


def test_a_compiled_step_that_is_wrong_is_refused_on_all_ranks(compiling, monkeypatch):
    """Tokens are drawn with a static cache and scored without one. One rank's failure is
    everybody's, as a rank that went on alone would wait forever."""
    right = compiling.compiled.next_logits
    wrong = lambda model, inputs, cache: right(model, inputs.roll(1, 0), cache)  # noqa: E731
    with monkeypatch.context() as changed, kit.refuses("compile-decoding") as caught:
        changed.setattr(compiling.compiled, "next_logits", wrong)
        tried(compiling, "gpt2")
    assert "nats a token" in str(caught.value)
    monkeypatch.setattr(ranks, "all_gather_objects", lambda errors: [*errors, "no memory there"])
    with kit.refuses("compile-decoding"):
        tried(compiling, "gpt2")


def test_what_was_not_tried_is_decoded_without_a_static_cache(compiling):
    """More rows than --rollout_batch_size, longer prompts, or longer responses. And a sharded actor
    is refused."""
    model, args = tried(compiling, "llama"), compiling.flags_of_tests
    width, most = max(model.static_caches), args.max_answer_seq_len
    for more in (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1):
        rows, length, count = (x + y for x, y in zip((4, width, most), more))
        ids = torch.arange(rows * length).view(rows, length)
        cache = compiling.compiled.new_cache(args, model, ids, torch.ones_like(ids), count)
        assert isinstance(cache, compiling.compiled.Cache) == (not any(more))
    with kit.refuses("compile-decoding-shards"):
        args_of(compiling, "--compile_decoding 1 --zero_stage 3")
