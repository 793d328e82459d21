"""Other people's tools on what a run leaves: each line of docs/ecosystem.md, as its users do it."""

import json
import os
import stat

import datasets
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


# --------------------------------------------------------------------------------------------------
# Language models
# --------------------------------------------------------------------------------------------------
@every_base
def test_stock_generate_stops_where_training_ended_a_response(name, tmp_path):
    """The tokenizer's EOS is the one that was trained. Stock generate() reads generation_config,
    pipelines too, and other tools config.json: both name it, and padding."""
    folder, _, tokenizer = saved(tmp_path, name)
    writer = pipeline("text-generation", model=folder)
    for config in (writer.model.config, writer.model.generation_config):
        assert config.eos_token_id == 1 and config.bos_token_id == tokenizer.bos_token_id
    assert writer.model.generation_config.pad_token_id == tokenizer.pad_token_id
    head = writer.model.get_output_embeddings()
    with torch.no_grad():  # an EOS that is the likeliest token whatever comes before it
        head.weight[1] = 0
        head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
        head.bias[1] = 1e4
    inputs = tokenizer("Where?", return_tensors="pt")
    found = writer.model.generate(**inputs, max_new_tokens=9)
    assert found[0, -1] == 1 and (found == 1).sum() == 1
    template = AutoTokenizer.from_pretrained(folder).chat_template
    assert template == BASES[name][1].get("chat_template"), "the chat template comes along"


@every_base
def test_padding_is_as_it_came(name, tmp_path):
    """Some models pad with EOS. Our masks come from lengths, so nothing here needs another token,
    and nobody who pads with the saved tokenizer is to find another one than the model had."""
    folder, *_ = saved(tmp_path, name)
    came = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert AutoTokenizer.from_pretrained(folder).pad_token == came.pad_token
    assert (came.pad_token == "<eos>") == (name in ("full", "padding is EOS"))


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
    """It loads many a base that it would not save again, and says so after all training."""
    base = base_folder(tmp_path / "base", "another EOS")
    (tmp_path / "base/generation_config.json").write_text(json.dumps({wrong: value}))
    tokenizer = folders.load_tokenizer(base)
    model = load_model(base, get_args(), 0, None, tokenizer)
    saving.save_model(model, tokenizer, tmp_path / "out")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert found.eos_token_id == 1 and not getattr(found, wrong)


def test_a_tokenizer_with_several_chat_templates_is_saved_again_and_again(tmp_path):
    """They lie in a folder, which a save that was killed leaves behind: nothing replaces it."""
    base = base_folder(tmp_path / "base", "another EOS")
    tokenizer = folders.load_tokenizer(base)
    tokenizer.chat_template = {"default": CHAT, "tools": CHAT}
    model = load_model(base, get_args(), 0, None, tokenizer)
    for _ in range(2):
        saving.save_model(model, tokenizer, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


# --------------------------------------------------------------------------------------------------
# Reward models
# --------------------------------------------------------------------------------------------------
OTHERS = ["opt-350m", "gpt_neox", "qwen3", "gemma", "mistral", "bloom"]


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
    assert after.get_vocab() == before.get_vocab() and after.eos_token == before.eos_token
    assert after.padding_side == before.padding_side
    assert after.chat_template == before.chat_template
    for text in (*TEXTS, "a<eos>b", " No <pad> here", ""):
        assert tokens.tokenise_prompt(after, text) == tokens.tokenise_prompt(before, text)
        assert tokens.tokenise_response(after, text) == tokens.tokenise_response(before, text)
        assert after(text).input_ids == before(text).input_ids
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


# --------------------------------------------------------------------------------------------------
# TRL and lm-evaluation-harness, where they are installed
# --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["another EOS", "no EOS", "BOS first"])
def test_trl_trains_on_what_we_leave_with_our_reward_model(name, tmp_path):
    """GRPO from our SFT model, our reward model in a pipeline as its reward_funcs: the mean reward
    that it logs is our mean score of the responses that it sampled."""
    trl = pytest.importorskip("trl")
    (tmp_path / "judge").mkdir()
    folder, model, tokenizer = saved(tmp_path / "judge", name, "score")
    actor, *_ = saved(tmp_path, name)
    judge, seen = pipeline("text-classification", model=folder), []

    def score(prompts, completions, **_):
        texts = [prompt + text for prompt, text in zip(prompts, completions)]
        seen.extend(texts)
        return [found["score"] for found in judge(texts)]

    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    data = datasets.Dataset.from_dict({"prompt": ["Where is the fox?"] * 4})
    trainer = trl.GRPOTrainer(actor, reward_funcs=score, args=config, train_dataset=data)
    trainer.train()
    rows = [torch.tensor([[*tokens.tokenise_prompt(tokenizer, text), 1]]) for text in seen]
    with torch.no_grad():
        ours = [values(model, row, torch.ones_like(row))[0, -1].item() for row in rows]
    logged = [log for log in trainer.state.log_history if "rewards/score/mean" in log][0]
    assert len(seen) == 4
    assert logged["rewards/score/mean"] == pytest.approx(sum(ours) / 4, abs=1e-3)


@pytest.mark.slow
def test_the_evaluation_harness_takes_our_folder(tmp_path):
    """lm-evaluation-harness's own model class loads it, and its log-likelihood is ours."""
    harness = pytest.importorskip("lm_eval.models.huggingface")
    folder, model, tokenizer = saved(tmp_path, "another EOS")
    stock = harness.HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    prompt, response = tokenizer("Where?").input_ids, tokenizer(" At home.").input_ids
    [(found, _)] = stock._loglikelihood_tokens([(("", ""), prompt, response)])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    ours = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum().item()
    assert found == pytest.approx(ours, abs=1e-3)
