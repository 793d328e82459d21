"""Tokens: which position predicts which token, which tokens count, and where an answer ends.

In every picture: x is a prompt token, y an answer token, E the end-of-sequence
token (EOS), - padding.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig

import common
import ppo
import reward
import sft
from machinery.data import rows
from machinery.rollout import ptx, samples, shared_prompts
from machinery.run import logs
from machinery.run.run import Run
from tests.conftest import generate

E = 1  # EOS


# --------------------------------------------------------------------------------------------------
# The shift by one
# --------------------------------------------------------------------------------------------------
def test_padding_goes_left_and_masks_come_from_lengths():
    """All rows end in the last column, so that "the last K tokens" is one
    slice. A real token may have padding's id."""
    ids, mask = common.pad([[5, 6, 7], [8], [9, 0]], pad_value=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_logits_are_shifted_by_one(tiny_model):
    """logits[:, t] score token t+1. The slow truth: for each token, feed only what stands before
    it, without padding, and read the last position. The batched, padded, sliced way must agree."""
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    ids, mask = common.pad(rows, 0)
    with torch.no_grad():
        wanted = torch.ones(2, 3, dtype=torch.bool)
        logits = common.last_logits(tiny_model, ids, mask, wanted).view(2, 3, -1)  # (2, 3, V)
        logprobs = common.last_logprobs(tiny_model, ids, mask, wanted)  # (2, 3)
        for b, row in enumerate(rows):
            for k in range(3):
                before = row[: len(row) - 3 + k]
                slow = tiny_model(torch.tensor([before])).logits[0, -1]
                assert torch.allclose(logits[b, k], slow, atol=1e-4)
                assert torch.allclose(
                    logprobs[b, k], slow.log_softmax(-1)[row[len(before)]], atol=1e-4
                )


def test_logprobs_are_of_the_distribution_at_the_sampling_temperature(tiny_model):
    """Sampling at temperature 2 draws from softmax(logits / 2), so the
    log-probs must be of softmax(logits / 2) too."""
    ids, mask = common.pad([[5, 6, 7, 8]], 0)
    with torch.no_grad():
        logits = common.last_logits(tiny_model, ids, mask, torch.ones(1, 2, dtype=torch.bool))
        logprobs = common.last_logprobs(tiny_model, ids, mask, torch.ones(1, 2), temperature=2.0)
    expected = (logits / 2).log_softmax(-1).gather(-1, ids[0, -2:, None]).T  # (1, 2)
    assert torch.allclose(logprobs, expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Where an answer ends: the golden table
# --------------------------------------------------------------------------------------------------
# In R = 4 slots: (ids, response mask, the slot that the score lands on).
ANSWERS = {
    "EOS at the end of a short answer": ([5, 6, E], [1, 1, 1, 0], 2),
    "no EOS: cut off": ([5, 6, 7, 8], [1, 1, 1, 1], 3),
    "EOS first: an empty answer": ([E], [1, 0, 0, 0], 0),
    "EOS in the last slot": ([5, 6, 7, E], [1, 1, 1, 1], 3),
}


def response(ids, prompt=(9, 9), row_weight=1):
    return {
        "row": 0,
        "prompt_ids": list(prompt),
        "response_ids": list(ids),
        "row_weight": row_weight,
        "ended": float(ids[-1] == E),
    }


def laid_out(responses, pad=0):
    """The one micro-batch of these responses."""
    tokenizer = SimpleNamespace(pad_token_id=pad)
    (batch,) = ppo.make_micro_batches(tokenizer, responses, len(responses))
    return batch


@pytest.mark.parametrize("pad", [E, 0], ids=["pad is EOS", "pad is not EOS"])
def test_the_score_lands_on_eos_whatever_padding_is(pad):
    """Masks made by `ids != pad` lose the EOS where pad is EOS, and let the score land
    one past it where it is not. Ours come from lengths: response tokens up to and
    including EOS; the score is on the EOS, or on the last token of a cut answer."""
    batch = laid_out([response(answer) for answer, _, _ in ANSWERS.values()], pad)
    values = torch.full((4, 2 + 4), 7.0)  # what a reward model says at each token
    for row, (_, _, slot) in zip(values, ANSWERS.values()):
        row[2 + slot] = 2.0
    scores = ppo.reward_model_scores(lambda ids, mask: values, batch)
    rewards = ppo.token_rewards(
        scores, torch.zeros(4, 4), batch.response_mask, kl_coef=0.1, clip_reward=5.0
    )
    for b, (name, (answer, mask, slot)) in enumerate(ANSWERS.items()):
        assert batch.ids[b].tolist() == [9, 9] + answer + [pad] * (4 - len(answer)), name
        assert batch.response_mask[b].tolist() == mask, name
        assert batch.mask[b].tolist() == [1, 1] + mask, name
        assert rewards[b].tolist() == [2.0 * (t == slot) for t in range(4)], name
    assert batch.ended.tolist() == [1, 0, 1, 1]


def test_filler_rows_are_seen_by_the_model_and_count_nowhere():
    """A short last batch is filled up so that all ranks make as many forwards.
    A filler's response mask is 0 everywhere, and its attention mask is not: a
    row that attends to nothing would give NaN."""
    batch = laid_out([response([5, E]), response([5, E], row_weight=0)])
    assert batch.response_mask.tolist() == [[1, 1], [0, 0]]
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.last.tolist() == [[0, 1], [0, 0]]
    assert batch.row_weight.tolist() == [1, 0]


def test_prompts_of_unlike_lengths_are_padded_left_and_answers_right():
    """The layout in ppo.py's header: prompts end in one column, answers start in the next."""
    batch = laid_out([response([5, E], prompt=[7, 8, 9]), response([5, 6, E], prompt=[9])])
    assert batch.ids.tolist() == [[7, 8, 9, 5, E, 0], [0, 0, 9, 5, 6, E]]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]


class Scripted(nn.Module):
    """A "model" that says what it is told: row b's r-th token is script[b][r].
    It goes on talking after its EOS.

    What it caches of each token is which row it belongs to, so it can tell who
    is still there when rows have left."""

    base_model, config = property(lambda self: self), LlamaConfig(num_hidden_layers=1)

    def __init__(self, script):
        super().__init__()
        self.script, self.positions, self.batch_sizes = torch.tensor(script), [], []

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        position_ids=None,
    ):
        self.positions.append(position_ids.tolist())
        self.batch_sizes.append(len(input_ids))
        rows, r = torch.arange(len(input_ids)), 0
        if past_key_values is not None and past_key_values.get_seq_length():
            rows, r = (
                past_key_values.layers[0].keys[:, 0, 0, 0],
                past_key_values.get_seq_length() - self.prompt + 1,
            )
        else:
            self.prompt = input_ids.shape[1]
        if use_cache:
            past_key_values.update(
                *[rows[:, None, None, None].expand(-1, 1, input_ids.shape[1], 1)] * 2, 0
            )
        logits = torch.full((*input_ids.shape, 12), -1e9)
        logits[:, -1].scatter_(1, self.script[rows, r, None], 0.0)
        return SimpleNamespace(logits=logits)


SCRIPT = [[5, 6, E, 7], [5, 6, 7, 8], [E, 5, E, 6], [5, 6, 7, E]]


@pytest.mark.parametrize("pad", [E, 0], ids=["pad is EOS", "pad is not EOS"])
def test_generated_answers_end_at_their_first_eos(pad):
    """The same golden table from the other side: what a model says after its
    first EOS is never kept."""
    prompts, mask = common.pad([[9], [9, 9], [8], [7]], pad)
    answer, answer_mask = generate(
        Scripted(SCRIPT),
        prompts,
        mask,
        torch.full((4, 4), 0.5),
        SimpleNamespace(pad_token_id=pad, eos_token_id=E),
    )
    for b, (name, (ids, expected, _)) in enumerate(ANSWERS.items()):
        assert answer[b].tolist() == ids + [pad] * (4 - len(ids)), name
        assert answer_mask[b].tolist() == expected, name


def test_generation_stops_when_every_row_has_ended():
    """No forward is spent on rows that are done: the answer is as wide as the longest one."""
    prompts, mask = common.pad([[9], [8]], 0)
    answer, _ = generate(
        Scripted([[E, 5, 5, 5], [5, E, 5, 5]]),
        prompts,
        mask,
        torch.full((2, 4), 0.5),
        SimpleNamespace(pad_token_id=0, eos_token_id=E),
    )
    assert answer.tolist() == [[E, 0], [5, E]]


def test_positions_count_real_tokens():
    """The first real token has position 0 however much padding stands before it,
    in generation as in training: or padding would change what the model says."""
    prompts, mask = common.pad([[9, 9, 9], [9]], 0)
    model = Scripted([[5, 5], [5, 5]])
    common.last_logits(model, prompts, mask, torch.ones(2, 1, dtype=torch.bool))
    generate(
        model,
        prompts,
        mask,
        torch.full((2, 2), 0.5),
        SimpleNamespace(pad_token_id=0, eos_token_id=E),
    )
    assert model.positions == [[[0, 1, 2], [0, 0, 0]], [[0, 1, 2], [0, 0, 0]], [[3], [1]]]


def test_rollouts_end_with_the_tokenizers_eos_or_are_marked_as_cut(tokenizer):
    """Step 3 counts an answer as ended by the id that steps 1 and 2 appended;
    the text that is scored has no EOS in it."""
    args = SimpleNamespace(
        seed=1, max_answer_seq_len=4, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[]
    )
    prompts = [{"prompt_ids": [5 + i], "row": i, "sample": 0, "row_weight": 1} for i in range(4)]
    out = ppo.roll_out(args, Scripted(SCRIPT), tokenizer, prompts, 1, 99)
    assert [s["response_ids"] for s in out] == [answer for answer, _, _ in ANSWERS.values()]
    assert [s["ended"] for s in out] == [1, 0, 1, 1]
    assert [s["text"] for s in out] == [
        tokenizer.decode(ids) for ids in ([5, 6], [5, 6, 7, 8], [], [5, 6, 7])
    ]


def test_a_models_own_generation_config_never_leaks_in(
    tiny_model, tokenizer, monkeypatch, tmp_path
):
    """A hub model's generation_config.json may hold a repetition penalty, or
    tokens that it must not say. Then what is generated is not what the model
    would say, and in step 3 the scored distribution is not the sampled one."""
    row = {"prompt": "Why?", "prompt_ids": [5, 6, 7], "row": 0, "sample": 0, "row_weight": 1}
    row["chat"] = False

    def answers(name):
        args = SimpleNamespace(
            max_seq_len=64,
            num_samples=1,
            seed=1,
            max_answer_seq_len=6,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=0,
            stop=[],
            output_dir=str(tmp_path / name),
        )
        (tmp_path / name).mkdir()
        run = SimpleNamespace(
            args=args, samples=lambda lines: logs.append(args, "samples.jsonl", lines)
        )
        samples.answer_and_keep(run, tiny_model, tokenizer, [row], step=0)
        rollouts = ppo.roll_out(args, tiny_model, tokenizer, [row], 1, 1)
        return (tmp_path / name / "samples.jsonl").read_text(), rollouts

    plain = answers("plain")
    monkeypatch.setattr(
        tiny_model,
        "generation_config",
        GenerationConfig(
            repetition_penalty=50.0,
            suppress_tokens=list(range(2, 300)),
            eos_token_id=1,
            pad_token_id=0,
        ),
    )
    assert answers("own") == plain


# --------------------------------------------------------------------------------------------------
# What the losses of steps 1 and 2 look at
# --------------------------------------------------------------------------------------------------
ROWS = [
    {"prompt_ids": [5, 6, 7], "responses": [[8, 9, E]], "row_weight": 1},  # x x x | y y E
    {"prompt_ids": [5, 6, 7], "responses": [[8, E]], "row_weight": 1},  # - x x x | y E
    {"prompt_ids": [5, 6, 7], "responses": [[8, 9, E]], "row_weight": 0},  # a filler
]


def lay_out(pad_id=0, train_on_prompt=0):
    """sft.collate of ROWS, of which step 1's loss covers the prompt or does not."""
    return sft.collate([{**row, "prompt_loss_mask": [train_on_prompt] * 3} for row in ROWS], pad_id)


def test_sft_loss_covers_the_answer_and_its_eos():
    """Not the prompt, not the padding, no filler, and EOS yes: a model that is
    never taught to stop never stops."""
    assert lay_out()["loss_mask"].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 0]]


def test_train_on_everything_covers_all_tokens_but_the_first():
    """The first token has nothing before it to be predicted from. 6 and 5
    tokens: 5 and 4 of them can be predicted."""
    assert lay_out(train_on_prompt=1)["loss_mask"].tolist() == [
        [1] * 5,
        [0] + [1] * 4,
        [0] * 5,
    ]


def test_padding_that_is_eos_does_not_change_the_sft_loss(tiny_model):
    """Where pad is EOS, a mask made by `ids != pad` would never teach EOS. Here
    padding's id changes nothing at all."""
    losses = []
    for pad in (0, E):
        batch = lay_out(pad)
        with torch.no_grad():
            logprobs = common.last_logprobs(
                tiny_model, batch["ids"], batch["mask"], batch["loss_mask"]
            )
        losses.append(sft.sft_loss_sum(logprobs, batch["loss_mask"]).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0


PAIRS = [
    {"prompt_ids": [5], "responses": [[6, 7, E], [8, E]], "row_weight": 1},
    {"prompt_ids": [5, 5], "responses": [[6, E], [7, E]], "row_weight": 0},
]


def tokens_that_count(batch):
    """The rows' weights, and the tokens of the rows that are no fillers, as a run counts them."""
    tokens, *_ = Run.count_tokens(SimpleNamespace(micro_batches=[batch]))
    return batch["row_weight"].tolist(), tokens


def test_without_a_shared_prompt_pairs_are_stacked_chosen_first_and_scored_at_the_last_column():
    """One forward for both answers; every row ends in the last column, so the
    score is values[:, -1]."""
    batch = reward.collate(PAIRS, pad_id=0, share_prompt=False)
    assert batch["ids"].tolist() == [[5, 6, 7, E], [5, 5, 6, E], [0, 5, 8, E], [5, 5, 7, E]]
    assert tokens_that_count(batch) == ([1, 0], 7)
    # The "model" sums up the ids so far.
    chosen, rejected = reward.score_pairs(lambda ids, mask: ids.cumsum(1).float(), batch)
    assert chosen.tolist() == [19, 17] and rejected.tolist() == [14, 18]


def test_a_shared_prompt_stands_once_and_each_answer_is_read_at_its_own_end():
    """Both answers follow the prompt in one row; the second goes on at the
    position where the prompt ended."""
    batch = reward.collate(PAIRS, pad_id=0)
    assert batch["ids"].tolist() == [[5, 6, 7, E, 8, E], [5, 5, 6, E, 7, E]]
    assert batch["parts"].tolist() == [[1, 2, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3]]
    assert tokens_that_count(batch) == ([1, 0], 6)
    positions = shared_prompts.who_sees_whom(batch["parts"])[1]
    assert positions.tolist() == [[0, 1, 2, 3, 1, 2], [0, 1, 2, 3, 2, 3]]
    chosen, rejected = reward.score_pairs(
        lambda ids, mask, positions: ids.float() * 10 + positions, batch
    )
    assert chosen.tolist() == [10 * E + 3] * 2 and rejected.tolist() == [10 * E + 2, 10 * E + 3]


def test_who_attends_to_whom_in_a_shared_row():
    """By hand: padding, two prompt tokens, one chosen, two rejected. The
    rejected answer never sees the chosen one."""
    allowed = shared_prompts.who_sees_whom(torch.tensor([[0, 1, 1, 2, 3, 3]]))[0]
    assert allowed.int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0, 0],
                [0, 1, 0, 0, 0, 0],
                [0, 1, 1, 0, 0, 0],
                [0, 1, 1, 1, 0, 0],
                [0, 1, 1, 0, 1, 0],
                [0, 1, 1, 0, 1, 1],
            ]
        ]
    ]


# --------------------------------------------------------------------------------------------------
# From text to tokens
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", ["sft", "reward"], ids=["1", "2"])
def test_eos_is_appended_once_and_the_text_comes_back(tokenizer, stage):
    """One function appends EOS for all steps: the token, not the text "<eos>",
    which would split into pieces. (Step 3's answers are generated: the test
    above shows that they end with the same token.)"""
    row = {
        "sft": {"prompt": "Why?", "response": " It is warm."},
        "reward": {"prompt": "Why?", "chosen": " It is warm.", "rejected": " No."},
    }[stage]
    made = rows.tokenise_row(row, tokenizer, stage, limit=64)
    assert tokenizer.decode(made["responses"][0][:-1]) == " It is warm."
    assert tokenizer.eos_token_id not in made["prompt_ids"]
    for ids in made["responses"]:
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1


def test_plain_text_for_ptx_ends_with_the_same_eos(tokenizer, tmp_path):
    """Step 3's pretraining mix is one text a row: EOS once, unless the text was cut."""
    (tmp_path / "text.jsonl").write_text(
        '{"text": "It is warm."}\n{"text": "It is warm. It is warm. It is warm."}\n'
    )
    whole, cut = ptx.read_text(
        SimpleNamespace(unsup_data_path=[str(tmp_path / "text.jsonl")], max_seq_len=8), tokenizer
    )
    assert tokenizer.decode(whole[:-1]) == "It is warm." and whole[-1] == tokenizer.eos_token_id
    assert len(cut) == 8 and tokenizer.eos_token_id not in cut


def test_text_that_spells_a_special_token_is_data(tokenizer):
    """A user who writes "<eos>" must not end the answer, nor one who writes
    "<pad>" blank out a word."""
    for text in ("say <eos> twice", "<pad><pad> hello"):
        prompt = rows.tokenise_prompt(tokenizer, text)
        answer = rows.tokenise_response(tokenizer, text)
        assert not set(prompt) & set(tokenizer.all_special_ids)
        assert answer == prompt + [tokenizer.eos_token_id]
        assert tokenizer.decode(prompt) == text


def test_prompt_and_answer_are_tokenised_apart(tokenizer):
    """Joined text can merge across the border (" bec" + "ause" is one token):
    then the prompt's last token would hold a piece of the answer, and at
    generation time the model would meet a prompt that it never saw."""
    prompt, answer = next(
        (word[:i], word[i:])
        for word in (" because", " there", " Answer")
        for i in range(2, len(word))
        if tokenizer(word).input_ids
        != tokenizer(word[:i]).input_ids + tokenizer(word[i:]).input_ids
    )
    made = rows.tokenise_row({"prompt": prompt, "response": answer}, tokenizer, "sft", limit=64)
    assert made["prompt_ids"] == tokenizer(prompt).input_ids
    assert made["responses"][0] == tokenizer(answer).input_ids + [tokenizer.eos_token_id]


# --------------------------------------------------------------------------------------------------
# Too long
# --------------------------------------------------------------------------------------------------
def cut(prompt, answers, limit):
    """rows.cut: the prompt's mask is as long as what is left of the prompt, and of the same."""
    prompt, mask, answers = rows.cut(prompt, [2 * token for token in prompt], answers, limit)
    assert mask == [2 * token for token in prompt]
    return prompt, answers


def test_a_long_prompt_keeps_its_end():
    """The end holds the question, and the words "Answer:" that the model waits
    for. 6 + 3 tokens in 8."""
    assert cut([11, 12, 13, 14, 15, 16], [[5, 6, E]], 8) == (
        [12, 13, 14, 15, 16],
        [[5, 6, E]],
    )


def test_a_cut_answer_has_no_eos():
    """EOS on a text that was cut would teach the model to stop in the middle of
    a sentence. 3 + 7 tokens in 8."""
    assert cut([11, 12, 13], [[2, 3, 4, 5, 6, 7, E]], 8) == ([11, 12, 13], [[2, 3, 4, 5, 6]])


def test_both_too_long_share_the_room():
    """The prompt is sure of half of it.  6 + 7 tokens in 8."""
    assert cut([11, 12, 13, 14, 15, 16], [[2, 3, 4, 5, 6, 7, E]], 8) == (
        [13, 14, 15, 16],
        [[2, 3, 4, 5]],
    )


def test_both_answers_of_a_pair_see_the_same_prompt():
    """Or the reward model could tell chosen from rejected by the prompt alone.
    The longer answer decides the cut."""
    prompt, (chosen, rejected) = cut([11, 12, 13, 14, 15, 16], [[2, E], [3, 4, 5, 6, E]], 9)
    assert (prompt, chosen, rejected) == ([13, 14, 15, 16], [2, E], [3, 4, 5, 6, E])


@pytest.mark.parametrize("limit", [2, 3, 8, 9, 64])
def test_nothing_is_ever_longer_than_the_limit(limit):
    """And at least one prompt token is left: an answer's first token needs something before it."""
    for p in (1, 5, 20):
        for a in (1, 5, 20):
            prompt, answers = cut(list(range(p)), [list(range(a)), [E]], limit)
            assert 1 <= len(prompt) and all(
                1 <= len(x) and len(prompt) + len(x) <= limit for x in answers
            )
