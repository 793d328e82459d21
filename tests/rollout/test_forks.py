"""What changes of six real forks met without a word: each trap is a property here.

Groups are found by draw, credit crosses gaps of the mask, and scores of single tokens keep their
shares: these are in maths/test_gae.py. The key of the random numbers is in test_sampling.py, and
explained variance with another estimator in test_metrics.py.
"""

import copy
import functools
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers

import common
import ppo
from machinery import checks, lora, metrics, patches
from tests import kit, runs
from tests.rollout.test_layouts_by_hand import response
from tests.rollout.test_sampling import FLAGS

PAD = SimpleNamespace(pad_token_id=0)
FLAGS = {**FLAGS, "temperature": 0.7}
ARGS = SimpleNamespace(seed=1, max_answer_seq_len=8, entropy_coef=0.0, dtype="fp32", **FLAGS)
ARGS.allow_mismatch = 0


# --------------------------------------------------------------------------------------------------
# Tokens that the actor has not written
# --------------------------------------------------------------------------------------------------
def test_lengths_and_ends_never_come_from_a_mask():
    """A tool wrote the tokens where `own` is 0: two in the middle of the first response, and the
    end of the second. Models see them, nothing is learned from them, and the score is placed on the
    last token that the actor wrote. Length and end are those of the whole response."""
    own = [[1, 0, 0, 1], [1, 1, 0], [1, 1]]
    ids = [[5, 6, 7, 1], [5, 6, 7], [5, 1]]
    rows = [response(ids[i], per_token={"own": own[i]}, ended=[1.0, 0.0, 1.0][i]) for i in range(3)]
    (batch,) = ppo.make_micro_batches(PAD, rows, 3)
    assert batch.response_mask.tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert batch.last.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert batch.length.tolist() == [4, 3, 2] and batch.ended.tolist() == [1, 0, 1]
    assert batch.mask.sum(-1).tolist() == [2 + 4, 2 + 3, 2 + 2]
    # A reward model's score is that of the whole response, also where a tool wrote its end.
    scores = ppo.reward_model_scores(lambda ids, mask, positions: positions.float(), batch)
    assert scores.tolist() == [[0, 0, 0, 5], [0, 4, 0, 0], [0, 3, 0, 0]]


def test_a_samplers_numbers_of_each_token_reach_the_micro_batch():
    """row["per_token"] by name, (B, R) each, whatever order and micro-batches the rows come in."""
    rows = [
        response([5, 6, 1], per_token={"mine": [0.5, 1.5, 2.5], "sampled_logprobs": [-1, -2, -3]})
    ]
    rows += [response([1], per_token={"mine": [7], "sampled_logprobs": [-4]})]
    rows += [response([5, 1], per_token={"mine": [8, 9.5], "sampled_logprobs": [-5, -6]})]
    first, second = ppo.make_micro_batches(PAD, ppo.ordered(rows), 2)
    # Also where a row begins with an int
    assert first.per_token["mine"].tolist() == [[7, 0], [8, 9.5]]
    assert first.per_token["sampled_logprobs"].tolist() == [[-4, 0], [-5, -6]]
    assert second.per_token["mine"].tolist() == [[0.5, 1.5, 2.5]]


# --------------------------------------------------------------------------------------------------
# A forward belongs to its batch
# --------------------------------------------------------------------------------------------------
def rollout(model, tokenizer, count=4):
    """Returns the responses of a model to prompts of unlike lengths."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]][:count]
    rows = [{"prompt_ids": ids, "row": i, "sample": 0} for i, ids in enumerate(prompts)]
    rows = ppo.roll_out(ARGS, model, tokenizer, rows, 1, count)
    return [{**row, "row_weight": 1} for row in rows]


@torch.no_grad()
def scored(model, tokenizer, responses, size):
    batches = ppo.make_micro_batches(tokenizer, responses, size)
    for batch in batches:
        models = ppo.Models(model, None, model, [], {}, lambda batch: batch.last, None)
        ppo.score(ARGS, models, batch)
    return batches


def test_entropy_has_a_graph_only_where_it_is_trained_on(tiny_model, tokenizer):
    """It is as large as the logits."""
    model = copy.deepcopy(tiny_model)
    (batch,) = scored(model, tokenizer, rollout(model, tokenizer), 4)
    for coef in (0.0, 0.1):
        args = SimpleNamespace(**{**vars(ARGS), "entropy_coef": coef})
        logprobs, entropy = ppo.actor_forward(args, model, batch)
        assert logprobs.requires_grad and entropy.requires_grad == bool(coef)
        with torch.no_grad():
            assert not any(each.requires_grad for each in ppo.actor_forward(args, model, batch))


# --------------------------------------------------------------------------------------------------
# Sampled as scored; padding
# --------------------------------------------------------------------------------------------------
def test_the_reference_and_the_entropy_are_of_the_policy_at_its_temperature(tiny_model, tokenizer):
    """T is 0.7. An actor that is its own reference has a KL of 0, by each estimator, only if both
    are at one temperature; and the bonus is for the entropy of what is sampled from."""
    (batch,) = scored(tiny_model, tokenizer, rollout(tiny_model, tokenizer), 4)
    assert not any(batch.kl(kind).any() for kind in ppo.KL_ESTIMATORS)
    wanted = batch.response_mask > 0
    logits = common.response_logits(tiny_model, batch, wanted).detach().double()
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    assert torch.allclose(batch.entropy[wanted].double(), expected, atol=1e-4)


RIGHT = ppo.next_logits


def shifted(model, inputs, cache):
    """next_logits with response positions that are 1 too large."""
    positions, cache.positions = cache.positions, cache.positions + (cache.length > 0)
    logits = RIGHT(model, inputs, cache)
    cache.positions = positions
    return logits


class Bare(torch.nn.Module):
    """The stand-in of an engine: a model in `module`."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *given, **options):
        return self.module(*given, **options)


def gate(model, batches):
    """Returns the exit code of the gate at the first step, None if it lets the run go on."""
    run = SimpleNamespace(args=ARGS, step=1, engine=Bare(model), codes=[None])
    run.finish = lambda code: run.codes.append(code)
    checks.stop_unless_sampled_as_scored(run, batches)
    return run.codes[-1]


def test_a_rollout_that_is_sampled_otherwise_than_it_is_scored_is_stopped(
    tiny_model, tokenizer, monkeypatch
):
    """sampling_gap is rounding on a right model, whatever the padding. A position that is one too
    large from the second token on would train on other log-probs than those of the sampled policy:
    it is seen in the metric, and stops the first step."""
    batches = scored(tiny_model, tokenizer, rollout(tiny_model, tokenizer), 4)
    assert batches[0].response_mask.sum() > 8
    assert metrics.sampling_means(batches)["sampling_gap"] < 1e-4
    assert gate(tiny_model, batches) is None

    monkeypatch.setattr(ppo, "next_logits", shifted)
    batches = scored(tiny_model, tokenizer, rollout(tiny_model, tokenizer), 4)
    assert metrics.sampling_means(batches)["sampling_gap"] > 1e-2
    assert gate(tiny_model, batches) == 1


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask", "order"])
@pytest.mark.parametrize("kind", ["language", "value"])
def test_a_model_that_ignores_positions_or_the_mask_is_refused(monkeypatch, kind, ignored):
    """A row alone and the same row with padding on its left, and with more tokens behind it, must
    have the same numbers. GPT-2 has learned positions, which padding shifts. Who ignores the order
    sees all real tokens from everywhere, also those that are to be predicted."""
    shape = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, num_labels=1)
    ends = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    config = transformers.GPT2Config(**shape, **ends, initializer_range=0.3)
    torch.manual_seed(0)
    if kind == "value":
        model = transformers.GPT2ForSequenceClassification(config)
        model, careless = common.ValueModel(model, "score"), model.base_model
    else:
        careless = model = transformers.GPT2LMHeadModel(config)
    engine = torch.nn.Module()
    engine.module, engine.forward = model, model.__call__
    row = {"prompt_ids": list(range(5, 15)), "responses": [[20, 21, 22, 1]]}
    train = datasets.Dataset.from_list([{**row, "length": 14}])
    run = SimpleNamespace(args=ARGS, train=train, tokenizer=SimpleNamespace(pad_token_id=0))
    checks.refuse_if_padding_matters(run, engine)
    honest = careless.forward

    def forward(ids, attention_mask, use_cache, position_ids, **options):
        if ignored == "position_ids":
            position_ids = torch.arange(ids.shape[1])[None]
        elif ignored == "attention_mask":
            attention_mask = torch.ones_like(ids)
        else:
            attention_mask = attention_mask[:, None, None].bool().expand(-1, 1, ids.shape[1], -1)
        options.update(attention_mask=attention_mask, position_ids=position_ids)
        return honest(ids, use_cache=use_cache, **options)

    monkeypatch.setattr(careless, "forward", functools.wraps(honest)(forward))
    with kit.refuses("padding-changes-a-row"):
        checks.refuse_if_padding_matters(run, engine)


# --------------------------------------------------------------------------------------------------
# Changes of main, made from outside
# --------------------------------------------------------------------------------------------------
def run_changed(change, argv):
    """A run of step 3 with one part of it replaced, as a fork would write it."""
    if change == "masked":
        roll_out = ppo.roll_out

        def of_a_tool(*given):
            rows = roll_out(*given)
            for row in rows:
                row["per_token"]["own"] = [0.0] * len(row["response_ids"])
            return rows

        ppo.roll_out = of_a_tool
    if change == "number":
        rollout_means = metrics.rollout_means
        mine = dict(checked=0, finite=0, sampled=0, together=0)

        def check(run, *engines):
            mine["checked"] += len(engines)

        def finite(run, micro_batches):
            mine["finite"] += len(micro_batches)

        def sampled(run, micro_batches):
            mine["sampled"] += len(micro_batches)

        def skip_together(args, engines):
            mine["together"] += sum(engine.global_steps == 0 for engine in engines)

        checks.refuse_if_padding_matters, patches.skip_together = check, skip_together
        checks.stop_unless_rollout_is_finite = finite
        checks.stop_unless_sampled_as_scored = sampled
        metrics.rollout_means = lambda *given: {**rollout_means(*given), **mine}
    kit.call_main("ppo", argv)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """{change: the folder of a run of one step with it}"""
    folders = {}
    for change in ("number", "weights", "masked"):
        folder = folders[change] = tmp_path_factory.mktemp("forks") / change
        argv = [*runs.base_flags("ppo", runs.base()), "--max_steps", "1", "--critic_dropout", "0"]
        argv += ["--output_dir", str(folder)]
        argv += ["--loss_mean", "responses"] if change == "weights" else []
        done = kit.fork(run_changed, 1, change, argv, meet="never")
        assert done.code == 0, str(done)
    return folders


PLAIN_AND_WEIGHTED = "number", "weights"


def test_a_weight_of_the_actors_loss_reaches_nothing_else(changed):
    """loss_weights: the actor's gradient is another one. The critic trains as before, to the bit,
    and what is logged are means over tokens."""
    plain, weighted = (kit.metrics(changed[name], clocks=False)[1] for name in PLAIN_AND_WEIGHTED)
    assert abs(weighted["grad_norm"] / plain["grad_norm"] - 1) > 1e-3
    same = [name for name in weighted if name != "grad_norm" and not name.startswith("eval_")]
    assert {name: plain[name] for name in same} == {name: weighted[name] for name in same}
    assert {"critic_loss", "critic_grad_norm", "actor_loss", "explained_variance"} <= {*same}
    critics = [kit.weights(changed[name] / "critic") for name in PLAIN_AND_WEIGHTED]
    assert all(torch.equal(critics[0][name], critics[1][name]) for name in critics[0])
    actors = [kit.weights(changed[name]) for name in PLAIN_AND_WEIGHTED]
    assert not all(torch.equal(actors[0][name], actors[1][name]) for name in actors[0])


def test_main_logs_numbers_of_its_own(changed):
    """Here what its checks were given: actor and critic when the run begins, the one micro-batch
    that is stored and compared with its sampling, and both models, to skip together, before either
    has made its step."""
    line = kit.metrics(changed["number"])[1]
    names = "checked", "finite", "sampled", "together"
    assert [line[name] for name in names] == [2, 1, 1, 2]


def test_a_step_whose_responses_are_all_masked_trains_nothing(changed):
    """There is no mean over no token. It does not divide by 0, and is no NaN that would be blamed
    on a learning rate. (This is a first step. Later, Adam's moments would still move weights.)"""
    for folder, start in ((".", "actor"), ("critic", "reward")):
        before = kit.weights(runs.base() / "models" / start)
        after = kit.weights(changed["masked"] / folder)
        assert all(torch.equal(before[name], after[name]) for name in before)


# --------------------------------------------------------------------------------------------------
# What would train another policy, or on less, without a word
# --------------------------------------------------------------------------------------------------
def test_a_reference_without_adapters_of_its_own_does_not_sample(tiny_model, tokenizer):
    """With LoRA it is the actor, whose weights sampling takes as they are: adapters included."""
    with pytest.raises(AssertionError, match="adapters would be on"):
        rollout(lora.WithoutAdapters(tiny_model.eval()), tokenizer)


def test_responses_fill_whole_minibatches():
    """A part of one adds gradients, moves no weight, and so ends up in the next step."""
    assert [len(some) for some in ppo.minibatches([1, 2, 3, 4], 2, 0)] == [2, 2]
    with pytest.raises(AssertionError, match="whole minibatches"):
        list(ppo.minibatches([1, 2, 3], 2, 0))
