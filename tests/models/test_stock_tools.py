"""Other people's tools on what a run leaves: each line of docs/ecosystem.md, as its users do it."""

import json
import os
import stat

import peft
import pytest
import torch
import transformers
from bases import BASES, CHAT, TEXTS, base_folder, our_scores, saved
from tiny_models import get_args, value_model_of, values
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from machinery import folders, lora, ranks, saving, tokens
from tests.kit import load_model

every_base = pytest.mark.parametrize("name", BASES)
close = dict(rtol=1e-3, atol=1e-3)
OTHERS = ["opt-350m", "gpt_neox", "qwen3", "gemma", "mistral", "bloom"]


# --------------------------------------------------------------------------------------------------
# Language models
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*BASES, *OTHERS])
def test_stock_generate_stops_where_training_ended_a_response(name, tmp_path):
    """The tokenizer's EOS is the one that was trained. Stock generate() reads generation_config,
    pipelines too, and other tools config.json: both name it, and padding. That is as it came: some
    models pad with EOS, and our masks come from lengths. The logits are the same to the bit,
    offline (kit.ENVIRONMENT)."""
    folder, model, tokenizer = saved(tmp_path, name)
    came, own = (AutoTokenizer.from_pretrained(place) for place in (tmp_path / "base", folder))
    assert own.pad_token == came.pad_token and own.chat_template == came.chat_template
    assert (came.pad_token == "<eos>") == (name in ("full", "padding is EOS"))
    writer = pipeline("text-generation", model=folder)
    inputs = tokenizer("Where?", return_tensors="pt")
    assert torch.equal(writer.model(**inputs).logits, model(**inputs).logits)
    assert not list((tmp_path / "out").glob(".*")), "nothing half-written is left"
    for config in (writer.model.config, writer.model.generation_config):
        assert config.eos_token_id == 1 and config.bos_token_id == tokenizer.bos_token_id
    assert writer.model.generation_config.pad_token_id == tokenizer.pad_token_id
    head = writer.model.get_output_embeddings()
    head.weight.data[1] = 0  # an EOS that is the likeliest token whatever comes before it
    head.bias = torch.nn.Parameter(1e4 * (torch.arange(len(head.weight)) == 1))
    found = writer.model.generate(**inputs, max_new_tokens=9)
    assert found[0, -1] == 1 and (found == 1).sum() == 1


def test_files_are_as_readable_as_umask_says(tmp_path):
    """safetensors makes files that only their owner can read: in a shared folder nobody else's
    run could start from them."""
    before = os.umask(0o027)
    try:
        saved(tmp_path, "full", "score")
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}
    assert tmp_path / "out/model.safetensors" in files


@pytest.mark.parametrize("wrong, value", [("top_p", 0.9), ("output_scores", True)])
def test_a_generation_config_that_transformers_refuses_costs_nothing(wrong, value, tmp_path):
    """It loads many a base that it would not save again, and says so after all training. Several
    chat templates lie in a folder, which a save that was killed leaves behind: nothing replaces
    it."""
    base = base_folder(tmp_path / "base", "another EOS")
    (tmp_path / "base/generation_config.json").write_text(json.dumps({wrong: value}))
    tokenizer = folders.load_tokenizer(base)
    tokenizer.chat_template = {"default": CHAT, "tools": CHAT}
    model = load_model(base, get_args(), 0, None, tokenizer)
    for _ in range(2):
        saving.save_model(model, tokenizer, tmp_path / "out")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert found.eos_token_id == 1 and not getattr(found, wrong)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


# --------------------------------------------------------------------------------------------------
# Reward models
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*BASES, *OTHERS])
def test_stock_tools_give_a_reward_models_scores(name, tmp_path):
    """A score is read at EOS, which stock callers do not append: the tokenizer in the folder does.
    Who asks for no special tokens appends it, after what the tokenizer puts first. A batch of
    several texts needs a padding token that is not EOS, on either side."""
    folder, model, tokenizer = saved(tmp_path, name, "score")
    ours = our_scores(model, tokenizer)
    assert ours.std() > 0.1
    judge = pipeline("text-classification", model=folder)
    piped = [found["score"] for found in judge(TEXTS, batch_size=3)]
    torch.testing.assert_close(torch.tensor(piped), ours, **close)
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    own = AutoTokenizer.from_pretrained(folder)
    assert own.pad_token_id == stock.config.pad_token_id != own.eos_token_id
    sides = ["right"] if name == "GPT-2" else ["left", "right"]  # its stock positions count padding
    first = tokenizer.decode(tokenizer("").input_ids)
    for side in sides:
        for special, texts in ((True, TEXTS), (False, [f"{first}{text}<eos>" for text in TEXTS])):
            options = dict(padding=True, padding_side=side, add_special_tokens=special)
            batch = own(texts, return_tensors="pt", **options)
            with torch.no_grad():
                torch.testing.assert_close(stock(**batch).logits[:, 0], ours, **close)


@every_base
def test_our_scripts_read_a_reward_models_folder_as_before(name, tmp_path):
    """They append EOS themselves, and must not get two. Vocabulary and EOS are those of the actor,
    to which step 3 compares them. What is saved once more is the same."""
    folder, model, before = saved(tmp_path, name, "score")
    after = folders.load_tokenizer(folder)
    assert after.get_vocab() == before.get_vocab()
    for setting in ("eos_token", "padding_side", "chat_template"):
        assert getattr(after, setting) == getattr(before, setting)
    for text in (*TEXTS, "a<eos>b", " No <pad> here", ""):
        for tokenise in (
            tokens.tokenise_prompt,
            tokens.tokenise_response,
            transformers.PreTrainedTokenizerBase.encode,
        ):
            assert tokenise(after, text) == tokenise(before, text)
    loaded = value_model_of(folder, tokenizer=after)
    torch.testing.assert_close(our_scores(loaded, after), our_scores(model, before))
    saving.save_model(loaded, after, tmp_path / "again")
    own, again = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "again"))
    assert own(TEXTS).input_ids == again(TEXTS).input_ids and own.pad_token == again.pad_token


def test_a_chat_ends_where_our_scripts_end_it(tmp_path):
    """Chat templates write EOS, and a line break after it, which training never saw: who scores a
    chat strips that, and asks for no special tokens (docs/ecosystem.md)."""
    folder, model, tokenizer = saved(tmp_path, "another EOS", "score")
    own = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    text = own.apply_chat_template(turns, tokenize=False)
    assert text.endswith("<eos>\n")
    expected = tokens.tokenise_prompt(tokenizer, turns[:1])
    expected += tokens.tokenise_response(tokenizer, "Yes.")
    assert own(text.rstrip(), add_special_tokens=False).input_ids == expected
    judge, row = pipeline("text-classification", model=folder), torch.tensor([expected])
    with torch.no_grad():
        ours = values(model, row, torch.ones_like(row))[0, -1].item()
    assert judge(text.rstrip(), add_special_tokens=False)[0]["score"] == pytest.approx(ours, 1e-3)


@pytest.mark.parametrize("name", ["BOS first", "padding is EOS"])
def test_a_tokenizer_that_cannot_append_is_saved_as_it_is(name, tmp_path, monkeypatch):
    """One that is written in Python has no file of rules. It pads with another token than EOS, and
    the run says who appends EOS: then the scores are ours."""
    said = []
    monkeypatch.setattr(ranks, "say", said.append)
    monkeypatch.setattr(transformers.TokenizersBackend, "is_fast", False)
    folder, model, tokenizer = saved(tmp_path, name, "score")
    monkeypatch.undo()
    assert saving.is_whole(folder) and "EOS" in said[-1]
    own = AutoTokenizer.from_pretrained(folder)
    for after in (own, folders.load_tokenizer(folder)):
        assert after("one").input_ids == tokenizer("one").input_ids
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = own([f"{text}<eos>" for text in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = stock(**batch).logits[:, 0]
    torch.testing.assert_close(found, our_scores(model, tokenizer), **close)


# --------------------------------------------------------------------------------------------------
# LoRA
# --------------------------------------------------------------------------------------------------
def test_stock_tools_load_adapters(tmp_path):
    """With a config.json beside them, stock tools would look for whole weights there. So it has
    another name, and is the last to come: it marks the folder as whole. (Of a language model:
    test_environment.py.)"""
    folder, model, tokenizer = saved(tmp_path, "another EOS", "score", lora_dim=4)
    assert saving.is_whole(folder) and not (tmp_path / "out/config.json").exists()
    own = AutoTokenizer.from_pretrained(folder)
    stock = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    stock.config.pad_token_id = own.pad_token_id
    with torch.no_grad():
        found = stock.eval()(**own(TEXTS, padding=True, return_tensors="pt")).logits[:, 0]
    torch.testing.assert_close(found, our_scores(model, tokenizer), **close)
    config = folders.load_config(folder)
    assert config.eos_token_id == 1 and config.value_head_prefix == "score"


def test_adapters_chain(tmp_path):
    """Adapters of adapters: below lie weights, and loading adds all of them; so do peft's own lines
    (docs/ecosystem.md). LoRA's B begins at 0, so each of the two is first made to say something."""
    inner, model, tokenizer = saved(tmp_path / "inner", "another EOS", lora_dim=4)
    ids = torch.tensor([tokenizer("Where is it?").input_ids])
    folder, seen = inner, [model(ids).logits]
    for name in ("first", "second"):
        model = load_model(folder, get_args(), 0, None, tokenizer, None, lora_dim=4).eval()
        for layer in lora.adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
        folder = str(tmp_path / name)
        saving.save_model(model, tokenizer, folder)
        seen.append(model(ids).logits)
        loaded = load_model(folder, get_args(), 0, None, tokenizer).eval()
        torch.testing.assert_close(loaded(ids).logits, seen[-1], **close)
        assert (seen[-1] - seen[-2]).abs().max() > 0.01
    assert len(folders.chain(folder)) == 4
    *adapters, base = folders.chain(folder)
    plain = AutoModelForCausalLM.from_pretrained(base)
    for each in reversed(adapters):
        plain = peft.PeftModel.from_pretrained(plain, each).merge_and_unload()
    torch.testing.assert_close(plain.eval()(ids).logits, seen[-1], **close)
