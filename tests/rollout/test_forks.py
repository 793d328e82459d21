"""What changes of six real forks met without a word: each trap is a property here.

That groups are found by draw, that credit crosses gaps of the mask, and that scores of single
tokens keep their shares is in tests/maths. The key of the random numbers is in test_sampling.py.
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
from machinery import checks, lora, metrics
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
    """row["per_token"] by name, (B, R) each, whatever order and micro-batches the rows come in, and
    also where a row begins with an int."""
    numbers = [[0.5, 1.5, 2.5], [7], [8, 9.5]]
    rows = [response([5] * (len(mine) - 1) + [1], per_token={"mine": mine}) for mine in numbers]
    batches = ppo.make_micro_batches(PAD, ppo.ordered(rows), 2)
    found = [batch.per_token["mine"].tolist() for batch in batches]
    assert found == [[[7, 0], [8, 9.5]], [[0.5, 1.5, 2.5]]]


# --------------------------------------------------------------------------------------------------
# A forward belongs to its batch
# --------------------------------------------------------------------------------------------------
def rollout(model, tokenizer):
    """Returns the responses of a model to prompts of unlike lengths."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
    rows = [{"prompt_ids": ids, "row": i, "sample": 0} for i, ids in enumerate(prompts)]
    rows = ppo.roll_out(ARGS, model, tokenizer, rows, 1, 4)
    return [{**row, "row_weight": 1} for row in rows]


@torch.no_grad()
def scored(model, tokenizer):
    """Returns a rollout's micro-batch, scored."""
    (batch,) = ppo.make_micro_batches(tokenizer, rollout(model, tokenizer), 4)
    models = ppo.Models(model, None, model, [], {}, lambda batch: batch.last, None)
    ppo.score(ARGS, models, batch)
    return batch


def test_entropy_has_a_graph_only_where_it_is_trained_on(tiny_model, tokenizer):
    """It is as large as the logits."""
    model = copy.deepcopy(tiny_model)
    batch = scored(model, tokenizer)
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
    batch = scored(tiny_model, tokenizer)
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


@pytest.mark.parametrize(
    "mistake, low, high, code", [(None, 0, 1e-4, []), (shifted, 1e-2, 99, [1])]
)
def test_a_rollout_that_is_sampled_otherwise_than_it_is_scored_is_stopped(
    tiny_model, tokenizer, monkeypatch, mistake, low, high, code
):
    """sampling_gap is rounding on a right model, whatever the padding. A position that is one too
    large from the second token on would train on other log-probs than those of the sampled policy:
    it is seen in the metric, and stops the first step."""
    monkeypatch.setattr(ppo, "next_logits", mistake or RIGHT)
    batch, codes = scored(tiny_model, tokenizer), []
    assert batch.response_mask.sum() > 8
    assert low <= metrics.sampling_means([batch])["sampling_gap"] < high
    run = SimpleNamespace(args=ARGS, step=1, finish=lambda code: codes.append(code))
    checks.stop_unless_sampled_as_scored(run, [batch])
    assert codes == code


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
def run_changed(argv):
    """A run of step 3 with parts of it replaced, as a fork would write it: a tool writes all
    responses, and main logs what its checks were given."""
    roll_out, rollout_means = ppo.roll_out, metrics.rollout_means
    mine = dict(finite=0, sampled=0)

    def of_a_tool(*given):
        rows = roll_out(*given)
        for row in rows:
            row["per_token"]["own"] = [0.0] * len(row["response_ids"])
        return rows

    def finite(run, micro_batches):
        mine["finite"] += len(micro_batches)

    def sampled(run, micro_batches):
        mine["sampled"] += len(micro_batches)

    ppo.roll_out = of_a_tool
    checks.stop_unless_rollout_is_finite = finite
    checks.stop_unless_sampled_as_scored = sampled
    metrics.rollout_means = lambda *given: {**rollout_means(*given), **mine}
    kit.call_main("ppo", argv)


def test_a_step_whose_responses_are_all_masked_trains_nothing(tmp_path):
    """There is no mean over no token. It does not divide by 0, and is no NaN that would be blamed
    on a learning rate. (This is a first step. Later, Adam's moments would still move weights.)

    The checks get the one micro-batch that is stored and compared with its sampling. (That padding
    is looked at: test_layouts.py; that engines skip together: test_environment.py.)
    """
    argv = [*runs.base_flags("ppo", runs.base()), "--max_steps", "1", "--critic_dropout", "0"]
    done = kit.fork(run_changed, 1, [*argv, "--output_dir", str(tmp_path / "out")], meet="never")
    assert done.code == 0, str(done)
    assert "warning: all rewards are equal (mean 0): nothing to learn from" in done.out
    line = kit.metrics(tmp_path / "out")[1]
    assert (line["finite"], line["sampled"]) == (1, 1)
    for folder, start in ((".", "actor"), ("critic", "reward")):
        before = kit.weights(runs.base() / "models" / start)
        after = kit.weights(tmp_path / "out" / folder)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_reference_without_adapters_of_its_own_does_not_sample(tiny_model, tokenizer):
    """With LoRA it is the actor, whose weights sampling takes as they are: adapters included."""
    with pytest.raises(AssertionError, match="adapters would be on"):
        rollout(lora.WithoutAdapters(tiny_model.eval()), tokenizer)
