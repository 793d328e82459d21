"""Tokens: which position predicts which token, which tokens count, and where an answer ends.

In every picture: x is a prompt token, y an answer token, E the end-of-sequence token (EOS), - padding.
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

E = 1  # EOS


# ---------------------------------------------------------------------------------------------------------------------
# The shift by one
# ---------------------------------------------------------------------------------------------------------------------
def test_padding_goes_left_and_masks_come_from_lengths():
    """All rows end in the last column, so that "the last K tokens" is one slice. A real token may have padding's id."""
    ids, mask = common.pad([[5, 6, 7], [8], [9, 0]], pad_id=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_logits_are_shifted_by_one(tiny_model):
    """logits[:, t] score token t+1. The slow truth: for each token, feed only what stands before it, without padding,
    and read the last position. The batched, padded, sliced way must agree."""
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    ids, mask = common.pad(rows, pad_id=0)
    with torch.no_grad():
        wanted = torch.ones(2, 3, dtype=torch.bool)
        logits = common.last_logits(tiny_model, ids, mask, wanted).view(2, 3, -1)  # (2, 3, V)
        logprobs = common.last_logprobs(tiny_model, ids, mask, wanted)             # (2, 3)
        for b, row in enumerate(rows):
            for k in range(3):
                before = row[:len(row) - 3 + k]
                slow = tiny_model(torch.tensor([before])).logits[0, -1]
                assert torch.allclose(logits[b, k], slow, atol=1e-4)
                assert torch.allclose(logprobs[b, k], slow.log_softmax(-1)[row[len(before)]], atol=1e-4)


def test_logprobs_are_of_the_distribution_at_the_sampling_temperature(tiny_model):
    """Sampling at temperature 2 draws from softmax(logits / 2), so the log-probs must be of softmax(logits / 2) too."""
    ids, mask = common.pad([[5, 6, 7, 8]], pad_id=0)
    with torch.no_grad():
        logits = common.last_logits(tiny_model, ids, mask, torch.ones(1, 2, dtype=torch.bool))
        logprobs = common.last_logprobs(tiny_model, ids, mask, torch.ones(1, 2), temperature=2.0)
    expected = (logits / 2).log_softmax(-1).gather(-1, ids[0, -2:, None]).T  # (1, 2)
    assert torch.allclose(logprobs, expected, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Where an answer ends: the golden table
# ---------------------------------------------------------------------------------------------------------------------
ANSWERS = {                          # R = 4 slots  ids             response mask    the score lands on slot
    "EOS at the end of a short answer": ([5, 6, E],    [1, 1, 1, 0], 2),
    "no EOS: cut off":                  ([5, 6, 7, 8], [1, 1, 1, 1], 3),
    "EOS first: an empty answer":       ([E],          [1, 0, 0, 0], 0),
    "EOS in the last slot":             ([5, 6, 7, E], [1, 1, 1, 1], 3),
}


def sequence(answer, prompt=(9, 9), real=1):
    return {"row": 0, "prompt_ids": list(prompt), "answer_ids": list(answer), "real": real, "ended": float(answer[-1] == E)}


@pytest.mark.parametrize("pad", [E, 0], ids=["pad is EOS", "pad is not EOS"])
def test_the_score_lands_on_eos_whatever_padding_is(pad):
    """Masks made by `ids != pad` lose the EOS where pad is EOS, and let the score land one past it where it is not.
    Ours come from lengths: response tokens up to and including EOS; the score is on the EOS, or on the last token of a cut answer."""
    batch = ppo.collate_answers([sequence(answer) for answer, _, _ in ANSWERS.values()], pad)
    rewards = ppo.token_rewards(torch.full((4,), 2.0), torch.zeros(4, 4), batch["response_mask"], kl_coef=0.1, clip_reward=5.0)
    for b, (name, (answer, mask, slot)) in enumerate(ANSWERS.items()):
        assert batch["ids"][b].tolist() == [9, 9] + answer + [pad] * (4 - len(answer)), name
        assert batch["response_mask"][b].tolist() == mask, name
        assert batch["mask"][b].tolist() == [1, 1] + mask, name
        assert rewards[b].tolist() == [2.0 * (t == slot) for t in range(4)], name
    assert batch["ended"].tolist() == [1, 0, 1, 1]


def test_filler_rows_are_seen_by_the_model_and_count_nowhere():
    """A short last batch is filled up so that all ranks make as many forwards. A filler's response mask is 0 everywhere,
    and its attention mask is not: a row that attends to nothing would give NaN."""
    batch = ppo.collate_answers([sequence([5, E]), sequence([5, E], real=0)], pad_id=0)
    assert batch["response_mask"].tolist() == [[1, 1], [0, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch["real"].tolist() == [1, 0]


def test_prompts_of_unlike_lengths_are_padded_left_and_answers_right():
    """The layout in ppo.py's header: prompts end in one column, answers start in the next."""
    batch = ppo.collate_answers([sequence([5, E], prompt=[7, 8, 9]), sequence([5, 6, E], prompt=[9])], pad_id=0)
    assert batch["ids"].tolist() == [[7, 8, 9, 5, E, 0], [0, 0, 9, 5, 6, E]]
    assert batch["mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]


class Scripted(nn.Module):
    """A "model" that says what it is told: row b's r-th token is script[b][r]. It goes on talking after its EOS.

    What it caches of each token is which row it belongs to, so it can tell who is still there when rows have left."""
    base_model, config = property(lambda self: self), LlamaConfig(num_hidden_layers=1)

    def __init__(self, script):
        super().__init__()
        self.script, self.positions, self.batch_sizes = torch.tensor(script), [], []

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, position_ids=None):
        self.positions.append(position_ids.tolist())
        self.batch_sizes.append(len(input_ids))
        rows, r = torch.arange(len(input_ids)), 0
        if past_key_values is not None and past_key_values.get_seq_length():
            rows, r = past_key_values.layers[0].keys[:, 0, 0, 0], past_key_values.get_seq_length() - self.prompt + 1
        else:
            self.prompt = input_ids.shape[1]
        if use_cache:
            past_key_values.update(*[rows[:, None, None, None].expand(-1, 1, input_ids.shape[1], 1)] * 2, 0)
        logits = torch.full((*input_ids.shape, 12), -1e9)
        logits[:, -1].scatter_(1, self.script[rows, r, None], 0.0)
        return SimpleNamespace(logits=logits)


SCRIPT = [[5, 6, E, 7], [5, 6, 7, 8], [E, 5, E, 6], [5, 6, 7, E]]


@pytest.mark.parametrize("pad", [E, 0], ids=["pad is EOS", "pad is not EOS"])
def test_generated_answers_end_at_their_first_eos(pad):
    """The same golden table from the other side: what a model says after its first EOS is never kept."""
    prompts, mask = common.pad([[9], [9, 9], [9], [9]], pad)
    answer, answer_mask = ppo.generate(Scripted(SCRIPT), prompts, mask, torch.full((4, 4), 0.5),
                                          SimpleNamespace(pad_token_id=pad, eos_token_id=E))
    for b, (name, (ids, expected, _)) in enumerate(ANSWERS.items()):
        assert answer[b].tolist() == ids + [pad] * (4 - len(ids)), name
        assert answer_mask[b].tolist() == expected, name


def test_generation_stops_when_every_row_has_ended():
    """No forward is spent on rows that are done: the answer is as wide as the longest one."""
    prompts, mask = common.pad([[9], [9]], 0)
    answer, _ = ppo.generate(Scripted([[E, 5, 5, 5], [5, E, 5, 5]]), prompts, mask, torch.full((2, 4), 0.5),
                                SimpleNamespace(pad_token_id=0, eos_token_id=E))
    assert answer.tolist() == [[E, 0], [5, E]]


def test_positions_count_real_tokens():
    """The first real token has position 0 however much padding stands before it, in generation as in training: or
    padding would change what the model says."""
    prompts, mask = common.pad([[9, 9, 9], [9]], 0)
    model = Scripted([[5, 5], [5, 5]])
    common.last_logits(model, prompts, mask, torch.ones(2, 1, dtype=torch.bool))
    ppo.generate(model, prompts, mask, torch.full((2, 2), 0.5), SimpleNamespace(pad_token_id=0, eos_token_id=E))
    assert model.positions == [[[0, 1, 2], [0, 0, 0]], [[0, 1, 2], [0, 0, 0]], [[3], [1]]]


def test_rollouts_end_with_the_tokenizers_eos_or_are_marked_as_cut(tokenizer):
    """Step 3 counts an answer as ended by the id that steps 1 and 2 appended; the text that is scored has no EOS in it."""
    args = SimpleNamespace(seed=1, max_answer_seq_len=4, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[])
    rows = [{"prompt_ids": [9], "row": i, "real": 1} for i in range(4)]
    out = ppo.roll_out(args, Scripted(SCRIPT), tokenizer, rows, 1, batch_size=4)
    assert [s["answer_ids"] for s in out] == [answer for answer, _, _ in ANSWERS.values()]
    assert [s["ended"] for s in out] == [1, 0, 1, 1]
    assert [s["text"] for s in out] == [tokenizer.decode(ids) for ids in ([5, 6], [5, 6, 7, 8], [], [5, 6, 7])]


def test_a_models_own_generation_config_never_leaks_in(tiny_model, tokenizer, monkeypatch, tmp_path):
    """A hub model's generation_config.json may hold a repetition penalty, or tokens that it must not say. Then what is
    generated is not what the model would say, and in step 3 the scored distribution is not the sampled one."""
    row = {"prompt": "Why?", "prompt_ids": [5, 6, 7], "row": 0, "real": 1}

    def answers(name):
        args = SimpleNamespace(max_seq_len=64, seed=1, max_answer_seq_len=6, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[], output_dir=str(tmp_path / name))
        (tmp_path / name).mkdir()
        sft.answer_prompts(args, tiny_model, tokenizer, [row], step=0)
        return (tmp_path / name / "samples.jsonl").read_text(), ppo.roll_out(args, tiny_model, tokenizer, [row], 1, batch_size=1)

    plain = answers("plain")
    monkeypatch.setattr(tiny_model, "generation_config", GenerationConfig(
        repetition_penalty=50.0, suppress_tokens=list(range(2, 300)), eos_token_id=1, pad_token_id=0))
    assert answers("own") == plain


# ---------------------------------------------------------------------------------------------------------------------
# What the losses of steps 1 and 2 look at
# ---------------------------------------------------------------------------------------------------------------------
ROWS = [{"prompt_ids": [5, 6, 7], "answers": [[8, 9, E]], "real": 1},   # x x x | y y E
        {"prompt_ids": [5, 6, 7], "answers": [[8, E]], "real": 1},      # - x x x | y E
        {"prompt_ids": [5, 6, 7], "answers": [[8, 9, E]], "real": 0}]   # a filler


def test_sft_loss_covers_the_answer_and_its_eos():
    """Not the prompt, not the padding, no filler, and EOS yes: a model that is never taught to stop never stops."""
    assert sft.collate(ROWS, pad_id=0)["loss_mask"].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 0]]


def test_train_on_prompt_covers_all_tokens_but_the_first():
    """The first token has nothing before it to be predicted from. 6 and 5 tokens: 5 and 4 of them can be predicted."""
    assert sft.collate(ROWS, pad_id=0, train_on_prompt=True)["loss_mask"].tolist() == [[1] * 5, [0] + [1] * 4, [0] * 5]


def test_padding_that_is_eos_does_not_change_the_sft_loss(tiny_model):
    """Where pad is EOS, a mask made by `ids != pad` would never teach EOS. Here padding's id changes nothing at all."""
    losses = []
    for pad in (0, E):
        batch = sft.collate(ROWS, pad)
        with torch.no_grad():
            logprobs = common.last_logprobs(tiny_model, batch["ids"], batch["mask"], batch["loss_mask"])
        losses.append(sft.sft_loss_sum(logprobs, batch["loss_mask"]).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0


PAIRS = [{"prompt_ids": [5], "answers": [[6, 7, E], [8, E]], "real": 1}, {"prompt_ids": [5, 5], "answers": [[6, E], [7, E]], "real": 0}]


def test_without_a_shared_prompt_pairs_are_stacked_chosen_first_and_scored_at_the_last_column():
    """One forward for both answers; every row ends in the last column, so the score is values[:, -1]."""
    batch = reward.collate(PAIRS, pad_id=0, share_prompt=False)
    assert batch["ids"].tolist() == [[5, 6, 7, E], [5, 5, 6, E], [0, 5, 8, E], [5, 5, 7, E]]
    assert (batch["real"].tolist(), batch["tokens"].item()) == ([1, 0], 7)
    chosen, rejected = reward.score_pairs(lambda ids, mask: ids.cumsum(1).float(), batch)  # a "model": sum of the ids so far
    assert chosen.tolist() == [19, 17] and rejected.tolist() == [14, 18]


def test_a_shared_prompt_stands_once_and_each_answer_is_read_at_its_own_end():
    """Both answers follow the prompt in one row; the second goes on at the position where the prompt ended."""
    batch = reward.collate(PAIRS, pad_id=0)
    assert batch["ids"].tolist() == [[5, 6, 7, E, 8, E], [5, 5, 6, E, 7, E]]
    assert batch["parts"].tolist() == [[1, 2, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3]]
    assert (batch["real"].tolist(), batch["tokens"].item()) == ([1, 0], 6)
    positions = reward.who_sees_whom(batch["parts"])[1]
    assert positions.tolist() == [[0, 1, 2, 3, 1, 2], [0, 1, 2, 3, 2, 3]]
    chosen, rejected = reward.score_pairs(lambda ids, mask, positions: ids.float() * 10 + positions, batch)
    assert chosen.tolist() == [10 * E + 3] * 2 and rejected.tolist() == [10 * E + 2, 10 * E + 3]


def test_who_attends_to_whom_in_a_shared_row():
    """By hand: padding, two prompt tokens, one chosen, two rejected. The rejected answer never sees the chosen one."""
    allowed = reward.who_sees_whom(torch.tensor([[0, 1, 1, 2, 3, 3]]))[0]
    assert allowed.int().tolist() == [[[[1, 0, 0, 0, 0, 0],
                                        [0, 1, 0, 0, 0, 0],
                                        [0, 1, 1, 0, 0, 0],
                                        [0, 1, 1, 1, 0, 0],
                                        [0, 1, 1, 0, 1, 0],
                                        [0, 1, 1, 0, 1, 1]]]]


# ---------------------------------------------------------------------------------------------------------------------
# From text to tokens
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [1, 2])
def test_eos_is_appended_once_and_the_text_comes_back(tokenizer, step):
    """One function appends EOS for all steps: the token, not the text "<eos>", which would split into pieces. (Step 3's
    answers are generated: the test above shows that they end with the same token.)"""
    row = {1: {"prompt": "Why?", "response": " It is warm."}, 2: {"prompt": "Why?", "chosen": " It is warm.", "rejected": " No."}}[step]
    made = common.tokenise_row(row, tokenizer, step, limit=64)
    assert tokenizer.decode(made["answers"][0][:-1]) == " It is warm."
    assert tokenizer.eos_token_id not in made["prompt_ids"]
    for ids in made["answers"]:
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1


def test_plain_text_for_ptx_ends_with_the_same_eos(tokenizer, tmp_path):
    """Step 3's pretraining mix is one text a row: EOS once, unless the text was cut."""
    (tmp_path / "text.jsonl").write_text('{"text": "It is warm."}\n{"text": "It is warm. It is warm. It is warm."}\n')
    whole, cut = ppo.read_text(SimpleNamespace(unsup_data_path=[str(tmp_path / "text.jsonl")], max_seq_len=8), tokenizer)
    assert tokenizer.decode(whole[:-1]) == "It is warm." and whole[-1] == tokenizer.eos_token_id
    assert len(cut) == 8 and tokenizer.eos_token_id not in cut


def test_text_that_spells_a_special_token_is_data(tokenizer):
    """A user who writes "<eos>" must not end the answer, nor one who writes "<pad>" blank out a word."""
    for text in ("say <eos> twice", "<pad><pad> hello"):
        prompt, answer = common.tokenise_prompt(tokenizer, text), common.tokenise_answer(tokenizer, text)
        assert not set(prompt) & set(tokenizer.all_special_ids)
        assert answer == prompt + [tokenizer.eos_token_id]
        assert tokenizer.decode(prompt) == text


def test_prompt_and_answer_are_tokenised_apart(tokenizer):
    """Joined text can merge across the border (" bec" + "ause" is one token): then the prompt's last token would hold a
    piece of the answer, and at generation time the model would meet a prompt that it never saw."""
    prompt, answer = next((word[:i], word[i:]) for word in (" because", " there", " Answer") for i in range(2, len(word))
                          if tokenizer(word).input_ids != tokenizer(word[:i]).input_ids + tokenizer(word[i:]).input_ids)
    made = common.tokenise_row({"prompt": prompt, "response": answer}, tokenizer, 1, limit=64)
    assert made["prompt_ids"] == tokenizer(prompt).input_ids
    assert made["answers"][0] == tokenizer(answer).input_ids + [tokenizer.eos_token_id]


# ---------------------------------------------------------------------------------------------------------------------
# Too long
# ---------------------------------------------------------------------------------------------------------------------
def test_a_long_prompt_keeps_its_end():
    """The end holds the question, and the words "Answer:" that the model waits for.  6 + 3 tokens in 8."""
    assert common.fit([11, 12, 13, 14, 15, 16], [[5, 6, E]], 8) == ([12, 13, 14, 15, 16], [[5, 6, E]])


def test_a_cut_answer_has_no_eos():
    """EOS on a text that was cut would teach the model to stop in the middle of a sentence.  3 + 7 tokens in 8."""
    assert common.fit([11, 12, 13], [[2, 3, 4, 5, 6, 7, E]], 8) == ([11, 12, 13], [[2, 3, 4, 5, 6]])


def test_both_too_long_share_the_room():
    """The prompt is sure of half of it.  6 + 7 tokens in 8."""
    assert common.fit([11, 12, 13, 14, 15, 16], [[2, 3, 4, 5, 6, 7, E]], 8) == ([13, 14, 15, 16], [[2, 3, 4, 5]])


def test_both_answers_of_a_pair_see_the_same_prompt():
    """Or the reward model could tell chosen from rejected by the prompt alone. The longer answer decides the cut."""
    prompt, (chosen, rejected) = common.fit([11, 12, 13, 14, 15, 16], [[2, E], [3, 4, 5, 6, E]], 9)
    assert (prompt, chosen, rejected) == ([13, 14, 15, 16], [2, E], [3, 4, 5, 6, E])


@pytest.mark.parametrize("limit", [2, 3, 8, 9, 64])
def test_nothing_is_ever_longer_than_the_limit(limit):
    """And at least one prompt token is left: an answer's first token needs something before it."""
    for p in (1, 5, 20):
        for a in (1, 5, 20):
            prompt, answers = common.fit(list(range(p)), [list(range(a)), [E]], limit)
            assert 1 <= len(prompt) and all(1 <= len(x) and len(prompt) + len(x) <= limit for x in answers)
