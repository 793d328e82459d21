"""Where each token stands, which tokens count, and where a response ends, drawn by hand.

In every picture: x is a prompt's token, y a response's token, E the end-of-sequence token (EOS),
and - padding.
"""

from types import SimpleNamespace

import pytest
import torch

import common
import ppo
import reward
import sft
from machinery import shared_prompts

E = 1  # EOS


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------
def test_padding_goes_left_and_masks_come_from_lengths():
    """All rows end in the last column. A real token may have padding's id. Fractions stay: a loss
    mask may weigh a token by a half."""
    ids, mask = common.pad([[5, 6, 7], [8], [9, 0]], pad_value=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]] and mask.dtype == torch.long
    # Whatever comes first in a row
    weights, _ = common.pad([[0, 0.5], [0.25]], 0, dtype=torch.float)
    assert weights.tolist() == [[0.0, 0.5], [0.0, 0.25]]


def test_a_position_is_the_number_of_real_tokens_before():
    """However much padding stands there: or padding would change what a model says."""
    layout = common.last_columns(*common.pad([[5, 6, 7], [8, 9]], 0), count=2)
    assert layout.positions.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert layout.logit_places.tolist() == [[0, 1], [3, 4]]  # of a place in 2 x 3
    assert layout.real_tokens.tolist() == [3, 2]


# In R = 4 slots: (ids, response mask, the slot that the score is placed on).
RESPONSES = {
    "EOS at the end of a short response": ([5, 6, E], [1, 1, 1, 0], 2),
    "no EOS: cut off": ([5, 6, 7, 8], [1, 1, 1, 1], 3),
    "EOS first: an empty response": ([E], [1, 0, 0, 0], 0),
    "EOS in the last slot": ([5, 6, 7, E], [1, 1, 1, 1], 3),
}


def response(ids, prompt=(9, 9), row_weight=1, **more):
    row = {"row": 0, "prompt_ids": list(prompt), "response_ids": list(ids)}
    return {**row, "row_weight": row_weight, "ended": float(ids[-1] == E), **more}


def laid_out(*responses, pad=0, pack=ppo.plain_rows):
    """The one micro-batch of these responses."""
    tokenizer = SimpleNamespace(pad_token_id=pad)
    (batch,) = ppo.make_micro_batches(tokenizer, list(responses), len(responses), pack)
    return batch


@pytest.mark.parametrize("pad", [E, 0], ids=["pad is EOS", "pad is not EOS"])
def test_the_score_is_placed_on_eos_whatever_padding_is(pad):
    """Masks made by `ids != pad` lose the EOS where pad is EOS, and let the score be placed one
    after it where it is not. Ours come from lengths: response tokens up to and including EOS; the
    score is on the EOS, or on the last token of a response that was cut."""
    batch = laid_out(*(response(ids) for ids, _, _ in RESPONSES.values()), pad=pad)
    values = torch.full((4, 2 + 4), 7.0)  # what a reward model says at each token
    for row, (_, _, slot) in zip(values, RESPONSES.values()):
        row[2 + slot] = 2.0
    scores = ppo.reward_model_scores(lambda *layout: values, batch)
    rewards = ppo.token_rewards(scores, torch.zeros(4, 4), batch.response_mask, 0.1)
    for b, (name, (ids, mask, slot)) in enumerate(RESPONSES.items()):
        assert batch.ids[b].tolist() == [9, 9] + ids + [pad] * (4 - len(ids)), name
        assert batch.response_mask[b].tolist() == mask, name
        assert batch.mask[b].tolist() == [1, 1] + mask, name
        assert rewards[b].tolist() == [2.0 * (t == slot) for t in range(4)], name
    assert batch.ended.tolist() == [1, 0, 1, 1]


def test_prompts_are_padded_left_and_responses_right():
    """The picture in ppo.py's header: prompts end in one column, and responses start in the next.
    A response's first token is predicted at the prompt's last."""
    batch = laid_out(response([5, E], prompt=[7, 8, 9]), response([5, 6, E], prompt=[9]))
    assert batch.ids.tolist() == [[7, 8, 9, 5, E, 0], [0, 0, 9, 5, 6, E]]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 2, 3]]
    assert batch.logit_places.tolist() == [[2, 3, 4], [6 + 2, 6 + 3, 6 + 4]]
    assert batch.real_tokens.tolist() == [5, 4]


def test_a_filler_is_seen_by_the_model_and_counts_nowhere():
    """A short last batch is filled up so that all ranks make the same number of forwards. A
    filler's response mask is 0 everywhere, and its attention mask is not: attending to nothing
    gives NaN."""
    batch = laid_out(response([5, E]), response([5, E], row_weight=0))
    assert batch.response_mask.tolist() == [[1, 1], [0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.last.tolist() == [[0, 1], [0, 0]]
    assert batch.row_weight.tolist() == [1, 0]
    assert [count.item() for count in batch.counts()] == [2 + 2, 1]  # tokens, rows


# --------------------------------------------------------------------------------------------------
# Rows whose prompt is shared
# --------------------------------------------------------------------------------------------------
def test_who_attends_to_whom_in_a_shared_row():
    """Padding, two prompt tokens, one token of a response, two of another, which never sees it."""
    allowed, positions = shared_prompts.who_sees_whom(torch.tensor([[0, 1, 1, 2, 3, 3]]))
    assert allowed[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 1, 0],
        [0, 1, 1, 0, 1, 1],
    ]
    assert positions[0, 1:].tolist() == [0, 1, 2, 2, 3]


PAIRS = [
    {"prompt_ids": [5], "responses": [[6, 7, E], [8, E]], "row_weight": 1},
    {"prompt_ids": [5, 5], "responses": [[6, E], [7, E]], "row_weight": 0},
]
LAID_OUT = [
    # two rows a pair, chosen first; all end in the last column
    (reward.plain_rows, [[5, 6, 7, E], [5, 5, 6, E], [0, 5, 8, E], [5, 5, 7, E]], 7),
    # one row a pair: the rejected response goes on at the position where the prompt ended
    (shared_prompts.pair_rows, [[5, 6, 7, E, 8, E], [5, 5, 6, E, 7, E]], 6),
]


@pytest.mark.parametrize("pack, ids, tokens", LAID_OUT)
def test_a_pair_is_scored_at_both_ends(pack, ids, tokens):
    """Here a "model" says 100 times the id plus its position, so 100 at E and how many tokens it
    has before it. The second pair is a filler, whose tokens are not counted."""
    batch = reward.collate(PAIRS, 0, pack)
    assert batch.ids.tolist() == ids and batch.row_weight.tolist() == [1, 0]
    scores = reward.score_pairs(lambda ids, mask, positions: ids * 100 + positions, batch)
    assert [part.tolist() for part in scores] == [[103, 103], [102, 103]]
    assert batch.counts()[0] == tokens


# --------------------------------------------------------------------------------------------------
# What the loss of step 1 looks at
# --------------------------------------------------------------------------------------------------
ROWS = [
    {"prompt_ids": [5, 6, 7], "responses": [[8, 9, E]], "row_weight": 1},  # x x x | y y E
    {"prompt_ids": [5, 6, 7], "responses": [[8, E]], "row_weight": 1},  # - x x x | y E
    {"prompt_ids": [5, 6, 7], "responses": [[8, 9, E]], "row_weight": 0},  # a filler
]


def collated(covered=(0, 0, 0), pad=0):
    return sft.collate([{**row, "prompt_loss_mask": list(covered)} for row in ROWS], pad)


def test_sft_covers_the_response_and_its_eos():
    """Not the prompt, not the padding, no filler, and EOS yes: a model that is never taught to stop
    never stops. With --train_on everything the prompt, too, but never the first token: nothing
    stands before it to predict it from. With --train_on all the answers in it, and no question."""
    for pad in (0, E):  # a mask made by `ids != pad` would never teach EOS
        batch = collated(pad=pad)
        assert batch.loss_mask.tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 0]]
        assert batch.ids.flatten()[batch.logit_places + 1].tolist() == batch.ids[:, -3:].tolist()
    assert [*batch.counts()] == [6 + 5, 2]  # tokens and rows
    assert collated((1, 1, 1)).loss_mask.tolist() == [[1] * 5, [0] + [1] * 4, [0] * 5]
    assert collated((0, 1, 0)).loss_mask.tolist() == [[1, 0, 1, 1, 1], [0, 1, 0, 1, 1], [0] * 5]
