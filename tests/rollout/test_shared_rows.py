"""--share_prompt: in one row responses get what each of them gets in a row of its own."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny_models import KINDS, RAGGED, TOKENIZER, config_of, folder_of, get_args, random_ids
from transformers import AutoModelForCausalLM

import common
import ppo
import reward
import sft
from machinery import shared_prompts
from tests.kit import load_model

every_model = pytest.mark.parametrize("name", [name for name in KINDS if name != "bloom"])


def assert_same(model, outputs_of, apart, shared):
    """Asserts that both ways to lay rows out give the same numbers, and the same gradients."""
    found = []
    for pack in (apart, shared):
        model.zero_grad()
        outputs = outputs_of(pack)
        slopes = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
        sum((output * slopes).sum() for output in outputs).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([*outputs, *grads])
    assert found[0][0].std() > 1e-4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=3e-5)


def group_rollout():
    """Three responses of ragged lengths to each of four prompts; the last three are fillers."""
    rows, lengths = [], ((3, 1, 6), (2, 2, 4), (1, 5, 1), (2, 3, 1))
    for number, (size, three) in enumerate(zip((5, 1, 9, 4), lengths)):
        prompt = random_ids(size, seed=size).tolist()
        for length in three:
            text = random_ids(length, seed=7 * size + length).tolist()
            row = {"prompt_ids": prompt, "response_ids": text, "row": number, "ended": 1.0}
            rows.append({**row, "row_weight": float(number < 3)})
    return rows


def test_responses_to_different_prompts_cannot_share_a_row():
    """A fork that keeps some responses of each group must keep whole rows: otherwise a response
    would be scored and trained after another one's prompt, without an error."""
    with pytest.raises(AssertionError, match="one prompt"):
        shared_prompts.shared_rows(group_rollout()[2:6], 0, 2)


@every_model
@pytest.mark.parametrize("head", [None, "score"])
def test_a_shared_prompt_changes_no_score_and_no_gradient(name, head, tmp_path):
    """prompt | y_1 | y_2 | y_3, with a response that is EOS alone, a prompt of one token, fillers,
    and two responses that are equal: no log-prob, no value and no score is another one. Nor are the
    scores of step 2, which computes the prompt of a pair once."""
    tokenizer = TOKENIZER if head else None
    folder = folder_of(tmp_path, config_of(name))
    model = load_model(folder, get_args(), 0, None, tokenizer, head).eval()
    args = SimpleNamespace(temperature=0.7, entropy_coef=0.1)

    def outputs(pack):
        pad = SimpleNamespace(pad_token_id=0)
        (batch,) = ppo.make_micro_batches(pad, group_rollout(), 12, pack)
        if not head:
            return ppo.actor_forward(args, model, batch)
        values = common.values_before_tokens(model, batch) * batch.response_mask
        return values, ppo.reward_model_scores(model, batch)

    in_one_row = partial(shared_prompts.shared_rows, together=3)
    assert_same(model, outputs, ppo.plain_rows, in_one_row)
    assert shared_prompts.can_share_prompt(model, 64)
    if not head:
        return
    pairs = []
    for prompt, chosen, rejected in zip(RAGGED, (3, 7, 2, 1), (5, 1, 2, 8)):
        both = [random_ids(size, seed=size).tolist() for size in (chosen, rejected)]
        pairs.append({"prompt_ids": prompt, "responses": both, "row_weight": 1})
    scores = lambda pack: reward.score_pairs(model, reward.collate(pairs, 0, pack))  # noqa: E731
    assert_same(model, scores, reward.plain_rows, shared_prompts.pair_rows)


@every_model
def test_packed_rows_change_no_logprob_and_no_gradient(name, tmp_path):
    """--packing of sft.py: rows of 12, 9, 5, 4, 3, 3 and 2 tokens, of which one is a filler and one
    is learned whole, stand in four rows of 12 at most. What they look like: each token goes on from
    its own first one, and padding is only what no row fits into."""
    rows = []
    for prompt, response in ((9, 3), (4, 5), (1, 4), (3, 1), (1, 2), (2, 1), (1, 1)):
        ids = random_ids(prompt + response, seed=10 * prompt + response).tolist()
        row = {"prompt_ids": ids[:prompt], "responses": [ids[prompt:]], "row_weight": 1}
        rows.append({**row, "prompt_loss_mask": [int(prompt == 4)] * prompt})
    rows[-2]["row_weight"] = 0
    model = load_model(folder_of(tmp_path, config_of(name)), get_args(), 0).eval()
    lengths = [len(row["prompt_ids"] + row["responses"][0]) for row in rows]
    in_order = [rows[i] for part in shared_prompts.bins(lengths) for i in part]
    found = {False: sft.collate(in_order, 0), True: sft.collate_packed(rows, 0)}
    assert len(found[False].ids) == 7 and found[True].ids.shape == (4, 12)
    assert [x.tolist() for x in found[False].counts()] == [x.tolist() for x in found[True].counts()]

    def outputs(packed):
        batch = found[packed]
        return (common.response_logprobs(model, batch, batch.loss_mask),)

    assert_same(model, outputs, False, True)
    alone = sft.collate_packed(rows[:2], 0)  # no two fit into one row: as without packing
    assert alone.mask.tolist() == sft.collate(rows[:2], 0).mask.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_packing_loses_no_token(seed):
    """Of random lengths: each sequence stands in one piece, with positions from 0, and is seen by
    itself alone. There are no more rows than sequences, and two rows that are at most half full
    never stay apart."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 12))]
    sequences = [[100 * (i + 1) + j for j in range(n)] for i, n in enumerate(lengths)]
    count = max(lengths) - 1
    bins = shared_prompts.bins(lengths)
    packed = [[sequences[i] for i in part] for part in bins]
    sequences = sum(packed, [])
    batch = shared_prompts.packed_rows(packed, 0, count)
    flat, positions, T = batch.ids.flatten(), batch.positions.flatten(), batch.ids.shape[1]
    assert T == max(lengths) and sorted(flat[flat > 0].tolist()) == sorted(sum(sequences, []))
    for i, ids in enumerate(sequences):
        start = flat.tolist().index(ids[0])
        assert flat[start : start + len(ids)].tolist() == ids
        assert positions[start : start + len(ids)].tolist() == [*range(len(ids))]
        seen = batch.mask[start // T, 0, start % T + len(ids) - 1].nonzero()[:, 0] + start // T * T
        assert flat[seen].tolist() == ids
        scored = batch.logit_places[i][max(0, count - len(ids) + 1) :]
        assert flat[scored + 1].tolist() == ids[1:][-count:]
    filled = (batch.ids > 0).sum(1)
    assert (filled <= T // 2).sum() <= 1


@pytest.mark.parametrize("seed", [None, 1])
def test_responses_that_share_a_row_stay_together(seed):
    """Whether they are sorted by length or shuffled, and whatever their own lengths are."""
    rows = [row["row"] for row in ppo.ordered(group_rollout(), 3, seed)]
    assert rows[0::3] == rows[1::3] == rows[2::3] and sorted(rows[::3]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "longest, size, expected", [(8, 8, 4), (64, 8, 2), (512, 8, 1), (8, 6, 2), (8, 3, 1)]
)
def test_as_many_responses_share_a_row_as_are_cheapest(longest, size, expected):
    """T (6 H + T) / n, with H = 32 and T = 64 + n * longest. For n = 1, 2, 4 and responses of 64
    tokens it is 40960, 36864, 40960. A row lies within one micro-batch."""
    args = SimpleNamespace(samples_per_prompt=4, share_prompt=1)
    args.per_device_training_batch_size = size
    args.max_prompt_seq_len, args.max_answer_seq_len, args.max_seq_len = 64, longest, 64 + longest
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    assert shared_prompts.responses_per_row(args, [model]) == expected


@pytest.mark.parametrize(
    "name, setting, value",
    [
        ("mistral", "sliding_window", 63),  # shorter than a row: the model's own mask
        ("mistral", "_attn_implementation_internal", "eager"),  # which adds masks up
        ("mistral", "is_causal", False),
        ("llama", "use_bidirectional_attention", True),
        ("llama", "alibi", True),  # makes its own distances
        ("llama", "attention_chunk_size", 63),
        ("llama", "layer_types", ["conv"]),  # LFM2's convolutions see what came before
        ("llama", "_is_stateful", True),  # of the model: it carries a state from token to token
        ("bloom", None, None),  # takes no positions
    ],
)
def test_attention_of_another_kind_does_not_share_the_prompt(name, setting, value):
    model = AutoModelForCausalLM.from_config(config_of(name))
    if name == "mistral":
        model.config.sliding_window = 64
    assert shared_prompts.can_share_prompt(model, 64) == bool(setting)
    if setting:
        setattr(model if setting == "_is_stateful" else model.config, setting, value)
    assert not shared_prompts.can_share_prompt(model, 64)
