"""What people reported of other projects: responses that never ended, or that lost words."""

import copy
import json
import random
from types import SimpleNamespace

import pytest
import torch

import ppo
from machinery import evaluation, folders, saving
from tests import kit
from tests.tiny_models import TOKENIZER

IT, END, THOUGHT = " It", "<|im_end|>", "[/THINK]"


@pytest.fixture(scope="module")
def tokenizer():
    """The toy's, with a second end, and a special token that ends nothing."""
    made = copy.deepcopy(TOKENIZER)
    made.add_special_tokens({"extra_special_tokens": [END, THOUGHT]})
    return made


def chain(tokenizer, *texts):
    """Returns a model that writes these tokens in turn after the first of them, again and again."""
    ids = [tokenizer(text, add_special_tokens=False).input_ids[-1] for text in texts]
    model = kit.make_tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    rows = torch.eye(model.config.hidden_size)[: len(ids)]
    with torch.no_grad():
        for layer in model.model.layers:  # the next token depends on the last one alone
            layer.self_attn.o_proj.weight.zero_(), layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[ids] = rows
        model.lm_head.weight.zero_()[ids[1:] + ids[:1]] = 9 * rows
    return model


def asked(tokenizer, text, count=2):
    ids = tokenizer(text).input_ids[-1:]
    return [dict(prompt_ids=ids, row=i, sample=0, turn=0) for i in range(count)]


ARGS = "--max_answer_seq_len 6 --rollout_batch_size 2 --max_prompt_seq_len 8".split()


@pytest.mark.parametrize("named", [[1, 542], [542], 542, 1, None])
def test_any_end_of_the_model_ends_a_response_everywhere(tokenizer, tmp_path, named):
    """TRL#7039: Llama 3, Qwen and Gemma 3 name several in generation_config.json. Stock generate()
    stops at each; rollouts went on, counted the response as cut off, and the saved model knew one
    end. No special token: no end (a config that nobody adapted has Llama's 2)."""
    assert tokenizer.convert_tokens_to_ids(END) == 542
    model, ends = chain(tokenizer, " The", IT, END), named not in (1, None)
    model.generation_config.eos_token_id = named
    args = ppo.get_args(["--preset", "toy", *ARGS])
    for row in ppo.roll_out(args, model, tokenizer, asked(tokenizer, " The"), 1, 2):
        assert row["ended"] == ends and len(row["response_ids"]) == (2 if ends else 6)
        assert row["text"] == (IT if ends else f"{IT}{END} The" * 2)
    args.max_seq_len, prompts = 16, [row["prompt_ids"] for row in asked(tokenizer, " The")]
    for answer in evaluation.answer_greedily(args, model, tokenizer, prompts):
        assert answer == {"response": IT if ends else f"{IT}{END} The" * 2, "ended": ends}
    saving.save_model(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert saved == ([1, 542] if ends else 1)
    model.generation_config.eos_token_id = [2, 5]
    assert folders.ends_of(model, tokenizer) == [1]
    with_more = copy.deepcopy(tokenizer)
    with_more.add_tokens(["<|eot|>"])  # no special token, and no ordinary one
    model.generation_config.eos_token_id = [5, len(tokenizer)]
    assert folders.ends_of(model, with_more) == [1, len(tokenizer)]


def test_functions_see_what_the_model_wrote(tokenizer):
    """Special tokens of the model's own ([/THINK], the names of channels) were cut out of it: a
    reward for the form was 0 for ever. Only ends and padding are cut."""
    model = chain(tokenizer, " The", THOUGHT, IT, "<eos>")
    args = ppo.get_args(["--preset", "toy", *ARGS])
    [row, _] = ppo.roll_out(args, model, tokenizer, asked(tokenizer, " The"), 1, 2)
    assert row["text"] == f"{THOUGHT}{IT}" and row["ended"]
    args.max_seq_len = 16
    [answer] = evaluation.answer_greedily(args, model, tokenizer, [row["prompt_ids"]])
    assert answer["response"] == f"{THOUGHT}{IT}"


def test_ids_without_a_token_are_never_drawn_and_all_others_are(tokenizer):
    """tokenizers#900, verl#1398: a vocabulary may have holes, so that its largest id is above the
    number of tokens. Such ids, often EOS, could never be drawn. Here against a loop."""
    rng, model = random.Random(0), kit.make_tiny_model()
    ids = torch.tensor([[5, 6, 7]] * 40)
    probs = torch.softmax(model(ids[:1]).logits[0, -1].double(), -1).tolist()
    for _ in range(5):
        known = sorted(rng.sample(range(len(probs)), 9))
        drawn = torch.rand(40, 1, generator=torch.Generator().manual_seed(9)).double()
        found, _ = kit.generate(model, ids, torch.ones_like(ids), drawn, tokenizer, known=known)
        total = sum(probs[i] for i in known)
        for u, token in zip(drawn[:, 0].tolist(), found[:, 0].tolist()):
            reached = [sum(probs[i] for i in known[: n + 1]) > u * total for n in range(9)]
            assert token == known[reached.index(True)]


def test_a_new_padding_token_fits_behind_the_largest_id():
    """Where there are holes, fewer tokens than rows do not mean that a row is free."""
    names = dict(eos_token="<eos>", eos_token_id=9, bos_token_id=None, unk_token=None)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "<eos>": 9}, **names)
    assert folders.padding_token(tokenizer, 10) == "<eos>"
    assert folders.padding_token(tokenizer, 11) == "<|pad|>"
