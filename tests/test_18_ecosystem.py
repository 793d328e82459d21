"""Other people's tools on what a run leaves: each line of docs/ecosystem.md, as its users do it.

The base models are not ours: a config without EOS, or with another one, a vocabulary with no room
for a padding token, tied embeddings, a tokenizer that puts BOS first, and Qwen2's class.
"""

import csv
import functools
import importlib.util
import json
import os
import stat
import struct
import subprocess
import sys

import pytest
import torch
import transformers
import yaml
from conftest import ROOT, load_model
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    pipeline,
)

import ppo
import reward
import sft
from machinery.data import rows
from machinery.models import model_card, model_folders, saving, scoring_tokenizer

TOY = AutoTokenizer.from_pretrained(ROOT / "toy/model")
VOCAB = len(TOY)
TINY = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.3,
    max_position_embeddings=256,
)
CHAT = "{% for m in messages %}<turn>{{ m['content'] }}<eos>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<turn>{% endif %}"
NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
BASES = {
    "no EOS": (Qwen2Config(**TINY, vocab_size=VOCAB + 9, num_key_value_heads=2, **NONE), {}),
    "another EOS": (
        LlamaConfig(**TINY, vocab_size=VOCAB + 9, bos_token_id=7, eos_token_id=9, pad_token_id=3),
        {"chat_template": CHAT},
    ),
    "full": (
        LlamaConfig(**TINY, vocab_size=VOCAB, tie_word_embeddings=True, **NONE),
        {"pad_token": "<eos>"},
    ),
    "BOS first": (LlamaConfig(**TINY, vocab_size=VOCAB, **NONE), {"bos_token": "<pad>"}),
    "OPT": (
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            init_std=0.3,
            max_position_embeddings=256,
        ),
        {},
    ),
    "GPT-2": (
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
        {},
    ),
}
every_base = pytest.mark.parametrize("name", BASES)
PAIRS = [
    ("Where is the fox?", " At the camp, in the summer.", " I do not know."),
    ("When?", " In the evening.", " You can see the fox at the camp, or in the hills, at noon."),
    ("Human: hi\n\nAssistant:", " Hello!  How are you?\n", " No."),
]

RECORD = dict(data_rows=40, versions={"torch": "2.0"}, world_size=2, device="cpu")


def base_folder(path, name):
    """A folder as from the hub: config and tokenizer, and weights at random."""
    config, special = BASES[name]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/model")
    for key, value in special.items():
        setattr(tokenizer, key, value)
    if special.get("bos_token"):
        ids = [(tokenizer.bos_token, tokenizer.bos_token_id)]
        first = processors.TemplateProcessing(single="<pad> $A", special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = first
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def get_args(*flags):
    return sft.get_args(["--preset", "toy", "--dtype", "fp32", *flags])


def saved(tmp_path, name, head=None, lora_dim=0, args=()):
    """A base as one of our scripts loads and saves it. Returns folder, model and tokenizer."""
    base = base_folder(tmp_path / "base", name)
    args = get_args("--model_name_or_path", base, *args)
    tokenizer = model_folders.load_tokenizer(base)
    model = load_model(base, args, 0, None, tokenizer, head, lora_dim).eval()
    if head:
        with torch.no_grad():
            (model.model.score if head else model).weight.normal_()
    title = "step 2: reward model"
    card = functools.partial(model_card.text, args, RECORD, title, tmp_path / "out")
    saving.save_model(model, tokenizer, tmp_path / "out", card=card)
    return str(tmp_path / "out"), model, tokenizer


def our_scores(model, tokenizer):
    """Scores of PAIRS as reward.py's evaluation takes them: chosen, then rejected."""
    made = []
    for prompt, *responses in PAIRS:
        ids = [rows.tokenise_response(tokenizer, text) for text in responses]
        prompt = rows.tokenise_prompt(tokenizer, prompt)
        made.append({"prompt_ids": prompt, "responses": ids, "row_weight": 1})
    with torch.no_grad():
        scores = reward.score_pairs(model, reward.collate(made, tokenizer.pad_token_id, False))
    return torch.cat(scores)


TEXTS = [pair[0] + pair[i] for i in (1, 2) for pair in PAIRS]
close = dict(rtol=1e-3, atol=1e-3)


# --------------------------------------------------------------------------------------------------
# Language models
# --------------------------------------------------------------------------------------------------
@every_base
def test_stock_generate_stops_where_training_ended_a_response(name, tmp_path):
    """The tokenizer's EOS is the one that was trained. Stock generate() reads generation_config,
    pipelines too, and other tools config.json: both name it, and padding."""
    folder, model, tokenizer = saved(tmp_path, name)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for config in (loaded.config, loaded.generation_config):
        assert config.eos_token_id == 1 and config.bos_token_id == tokenizer.bos_token_id
    assert loaded.generation_config.pad_token_id == tokenizer.pad_token_id
    head = loaded.get_output_embeddings()
    with torch.no_grad():  # an EOS that is the likeliest token whatever comes before it
        head.weight[1] = 0
        bias = torch.zeros(head.weight.shape[0])
        bias[1] = 1e4
        head.bias = torch.nn.Parameter(bias)
    found = loaded.generate(**tokenizer("Where?", return_tensors="pt"), max_new_tokens=9)
    assert found[0, -1] == 1 and (found == 1).sum() == 1
    writer = pipeline("text-generation", model=folder)
    assert writer.model.generation_config.eos_token_id == 1
    assert (AutoTokenizer.from_pretrained(folder).chat_template is not None) == (
        name == "another EOS"
    ), "the chat template comes along"


def test_files_are_as_readable_as_umask_says(tmp_path):
    """safetensors makes files that only their owner can read: in a shared folder nobody else's
    run could start from them."""
    before = os.umask(0o027)
    try:
        folder, *_ = saved(tmp_path, "full", "score")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o640}, modes
    assert "model.safetensors" in modes


@pytest.mark.parametrize("lora_dim", [0, 4])
@pytest.mark.parametrize(
    "wrong, kept",
    [
        ({"temperature": 0.6}, {"temperature": 0.6, "do_sample": True}),
        ({"top_p": 0.9}, {"top_p": 0.9, "do_sample": True}),
        ({"output_scores": True}, {"output_scores": None}),
    ],
)
def test_a_generation_config_that_transformers_refuses_costs_nothing(
    wrong, kept, lora_dim, tmp_path
):
    """It loads many a base that it would not save again, and says so after all training."""
    base = base_folder(tmp_path / "base", "another EOS")
    (tmp_path / "base/generation_config.json").write_text(json.dumps(wrong))
    tokenizer = model_folders.load_tokenizer(base)
    args = get_args("--model_name_or_path", base)
    model = load_model(base, args, 0, None, tokenizer, None, lora_dim)
    saving.save_model(model, tokenizer, tmp_path / "out")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert found.eos_token_id == 1
    assert {name: getattr(found, name) or None for name in kept} == kept


def test_a_tokenizer_with_several_chat_templates_is_saved_again_and_again(tmp_path):
    """They lie in a folder, which a save that was killed leaves behind: nothing replaces it."""
    base = base_folder(tmp_path / "base", "another EOS")
    tokenizer = model_folders.load_tokenizer(base)
    tokenizer.chat_template = {"default": CHAT, "tools": CHAT}
    model = load_model(base, get_args("--model_name_or_path", base), 0, None, tokenizer)
    for _ in range(2):
        saving.save_model(model, tokenizer, tmp_path / "out")
        assert stat.S_IMODE((tmp_path / "out/additional_chat_templates").stat().st_mode) & 0o100
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


# --------------------------------------------------------------------------------------------------
# Reward models
# --------------------------------------------------------------------------------------------------
@every_base
def test_stock_tools_give_a_reward_models_scores(name, tmp_path):
    """A score is read at EOS, which stock callers do not append, whether they ask for special
    tokens (pipelines) or not (TRL's GRPO): the tokenizer in the folder does, once. A batch of
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
    for side in ("left", "right"):
        if side == "left" and name == "GPT-2":  # its stock positions count padding
            continue
        for special in (True, False):
            options = dict(padding=True, padding_side=side, add_special_tokens=special)
            batch = own(TEXTS, return_tensors="pt", **options)
            with torch.no_grad():
                torch.testing.assert_close(stock(**batch).logits[:, 0], ours, **close)
    again = own([text + "<eos>" for text in TEXTS]).input_ids
    assert again == own(TEXTS).input_ids, "an EOS that is there is not doubled"


@every_base
def test_our_scripts_read_a_reward_models_folder_as_before(name, tmp_path):
    """They append EOS themselves, and must not get two; padding is as it was when trained."""
    folder, model, before = saved(tmp_path, name, "score")
    after = model_folders.load_tokenizer(folder)
    assert after.get_vocab() == before.get_vocab()
    assert after.pad_token == before.pad_token and after.padding_side == before.padding_side
    for text in (*TEXTS, "a<eos>b", " No <pad> here"):
        assert rows.tokenise_prompt(after, text) == rows.tokenise_prompt(before, text)
        assert rows.tokenise_response(after, text) == rows.tokenise_response(before, text)
        assert after(text).input_ids == before(text).input_ids
    loaded = load_model(folder, get_args(), 0, None, after, "score").eval()
    assert torch.equal(our_scores(loaded, after), our_scores(model, before))


def test_a_chat_ends_where_our_scripts_end_it(tmp_path):
    """Chat templates write a line break after the last EOS, which training never saw."""
    folder, _, tokenizer = saved(tmp_path, "another EOS", "score")
    own = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    text = own.apply_chat_template(turns, tokenize=False)
    assert text.endswith("<eos>\n")
    expected = rows.tokenise_prompt(tokenizer, turns[:1])
    expected += rows.tokenise_response(tokenizer, "Yes.")
    assert own(text, add_special_tokens=False).input_ids == expected


def test_what_appends_eos_is_found_out_when_it_is_saved(tmp_path, monkeypatch):
    """Where another class of tokenizer drops the normaliser, a post-processor serves those who ask
    for special tokens, and the card tells the others."""
    monkeypatch.setattr(scoring_tokenizer, "add_rules", lambda *args: None)
    folder, model, tokenizer = saved(tmp_path, "BOS first", "score")
    own = AutoTokenizer.from_pretrained(folder)
    expected = [*tokenizer("one").input_ids, 1]
    assert own("one").input_ids == expected and expected[0] == tokenizer.bos_token_id
    assert "add_special_tokens=False" in (tmp_path / "out/README.md").read_text()
    assert model_folders.load_tokenizer(folder)("one").input_ids == expected[:-1]


@pytest.mark.parametrize("broken", ["appending", "appends"])
def test_a_tokenizer_that_takes_no_normaliser_is_saved_as_it_is(
    broken, tmp_path, monkeypatch, capsys
):
    """An error of another library must not cost the weights, at the end of a run."""
    monkeypatch.setattr(scoring_tokenizer, broken, lambda *args: 1 / 0)
    folder, _, tokenizer = saved(tmp_path, "full", "score")
    assert saving.is_whole(folder) and "could not be made to append EOS" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(folder)("one").input_ids == tokenizer("one").input_ids
    assert "Append EOS to each text" in (tmp_path / "out/README.md").read_text()
    assert not (tmp_path / "out/scoring_tokenizer.py").exists()


# --------------------------------------------------------------------------------------------------
# LoRA
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", [None, "score"])
def test_stock_transformers_loads_adapters(head, tmp_path):
    """With a config.json beside them, stock tools would look for whole weights there. So it has
    another name, and is the last to come: it marks the folder as whole."""
    pytest.importorskip("peft")
    folder, model, tokenizer = saved(tmp_path, "another EOS", head, lora_dim=4)
    assert saving.is_whole(folder) and not (tmp_path / "out/config.json").exists()
    own = AutoTokenizer.from_pretrained(folder)
    if head:
        stock = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        stock.config.pad_token_id = own.pad_token_id
        with torch.no_grad():
            found = stock.eval()(**own(TEXTS, padding=True, return_tensors="pt")).logits[:, 0]
        torch.testing.assert_close(found, our_scores(model, tokenizer), **close)
    else:
        stock = pipeline("text-generation", model=folder).model
        ids = torch.tensor([tokenizer("Where is it?").input_ids])
        for other in (stock, AutoModelForCausalLM.from_pretrained(folder)):
            torch.testing.assert_close(other(ids).logits, model(ids).logits, **close)
        kept = transformers.GenerationConfig.from_pretrained(folder)
        assert kept.eos_token_id == 1
    config = model_folders.load_config(folder)
    assert config.eos_token_id == 1 and hasattr(config, "value_head_prefix") == bool(head)


@pytest.mark.parametrize("marks, whole", [((), False), *(((m,), True) for m in saving.MARKS)])
def test_what_marks_a_folder_as_whole(marks, whole, tmp_path):
    """The last file that is moved there; an adapter_config.json may be anybody's."""
    for name in ("model.safetensors", "adapter_config.json"):
        (tmp_path / name).touch()
    for name in marks:
        (tmp_path / name).touch()
    assert saving.is_whole(tmp_path) == whole


# --------------------------------------------------------------------------------------------------
# The model card
# --------------------------------------------------------------------------------------------------
def test_the_card_says_what_the_hub_and_its_readers_ask(tmp_path, monkeypatch):
    """Base model, data and its share, flags, metrics at the end, limits, how to load it, versions;
    no path of this machine, and no license that nobody chose. Its Python loads the folder."""
    (tmp_path / "out").mkdir()
    lines = [{"step": 0, "eval_loss": 6.0}, {"step": 8, "eval_loss": 2.5}, {"step": 9, "loss": 1.0}]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "out/metrics.jsonl").write_text(text)
    flags = ["--output_dir", str(tmp_path / "out"), "--learning_rate", "0.125"]
    flags += ["--data_path", str(ROOT / "toy/data"), "Some/hub-data"]
    saved(tmp_path, "another EOS", "score", args=flags)
    text = (tmp_path / "out/README.md").read_text()
    _, head, body = text.split("---\n", 2)
    head = yaml.safe_load(head)
    assert head["datasets"] == ["Some/hub-data"] and head["pipeline_tag"] == "text-classification"
    assert head["library_name"] == "transformers" and "license" not in head
    for words in ("| eval_loss | 2.5 |", "| --learning_rate | 0.125 |", "40 rows", "torch 2.0"):
        assert words in body, words
    assert str(tmp_path) not in text and str(ROOT) not in text and "--save_steps" not in text
    monkeypatch.chdir(tmp_path)
    exec(body.split("```python")[1].split("```")[0])


@pytest.mark.parametrize(
    "written, base",
    [
        (f"---\nbase_model: Qwen/Some\n---\n{model_card.MARK}\n", "Qwen/Some"),
        ("---\nbase_model: Qwen/Older\n---\n", None),
        (None, None),
    ],
)
def test_the_card_finds_the_base_on_the_hub(written, base, tmp_path):
    """Step 3 starts from a folder of step 2's: its card says where that began."""
    if written:
        (tmp_path / "README.md").write_text(written)
    assert model_card.base_model(str(tmp_path)) == base
    assert model_card.base_model("Qwen/Some") == "Qwen/Some"
    own = written is None or model_card.MARK in written
    assert model_card.may_write(tmp_path) == own, "another's README.md stays"


def test_no_card_costs_the_weights(tmp_path, monkeypatch, capsys):
    """The base's README.md may be in any encoding; whatever else fails, the model is saved."""
    (tmp_path / "README.md").write_bytes(b"caf\xe9")
    assert model_card.base_model(str(tmp_path)) is None
    monkeypatch.setattr(model_card, "last_evaluation", lambda file: 1 / 0)
    folder, *_ = saved(tmp_path, "full")
    assert saving.is_whole(folder) and not (tmp_path / "out/README.md").exists()
    assert "README.md, the model's card, could not be written" in capsys.readouterr().out


def test_a_table_of_the_card_has_one_line_for_a_value():
    lines = model_card.table({"--stop": "a|b\nc", "loss": 0.5}).splitlines()
    assert lines[2:] == [r"| --stop | a\|b\nc |", "| loss | 0.5 |"]


def test_the_card_lists_no_flag_that_changes_only_speed():
    args = ppo.get_args(["--preset", "toy", "--output_dir", "nowhere"])
    found = {name[2:] for name in model_card.result_flags(args)}
    assert not found & {"share_prompt", "offload_states", "rollout_batch_size", "save_steps"}
    assert not found & {"actor_zero_stage", "critic_zero_stage", "zero_stage", "resume"}
    assert {"kl_coef", "actor_learning_rate", "seed"} <= found


# --------------------------------------------------------------------------------------------------
# TRL and lm-evaluation-harness, where they are installed
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["another EOS", "no EOS", "BOS first"])
def test_trl_trains_on_what_we_leave_with_our_reward_model(name, tmp_path):
    """GRPO from our SFT model, our reward model as its reward_funcs, by name: the mean reward that
    it logs is our mean score of the responses that it sampled."""
    trl = pytest.importorskip("trl")
    import datasets

    (tmp_path / "judge").mkdir()
    judge, model, tokenizer = saved(tmp_path / "judge", name, "score")
    actor, *_ = saved(tmp_path, name)
    seen = []

    def note(prompts, completions, **_):
        seen.extend(zip(prompts, completions))
        return [0.0] * len(prompts)

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
    trainer = trl.GRPOTrainer(actor, reward_funcs=[judge, note], args=config, train_dataset=data)
    trainer.train()
    own = AutoTokenizer.from_pretrained(judge)
    ids = [own(prompt + text).input_ids for prompt, text in seen]
    trained = [rows.tokenise_prompt(tokenizer, prompt + text) + [1] for prompt, text in seen]
    assert ids == trained and len(seen) == 4
    with torch.no_grad():
        ours = [model(torch.tensor([row]), torch.ones(1, len(row)))[0, -1].item() for row in ids]
    logged = [log for log in trainer.state.log_history if "rewards/out/mean" in log][0]
    assert logged["rewards/out/mean"] == pytest.approx(sum(ours) / 4, abs=1e-3)


def test_trl_sft_goes_on_from_our_model(tmp_path):
    """SFTTrainer takes our folder by name."""
    trl = pytest.importorskip("trl")
    import datasets

    folder, *_ = saved(tmp_path, "another EOS")
    data = [{"prompt": pair[0], "completion": pair[1]} for pair in PAIRS]
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), max_steps=1, report_to=[], use_cpu=True, bf16=False
    )
    trainer = trl.SFTTrainer(folder, args=config, train_dataset=datasets.Dataset.from_list(data))
    assert trainer.train().training_loss > 0


def test_the_evaluation_harness_takes_our_folder(tmp_path):
    """lm-evaluation-harness's own model class loads it, and its log-likelihood is ours."""
    lm_eval = pytest.importorskip("lm_eval.models.huggingface")
    folder, model, tokenizer = saved(tmp_path, "another EOS")
    harness = lm_eval.HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    prompt, response = tokenizer("Where?").input_ids, tokenizer(" At home.").input_ids
    [(found, _)] = harness._loglikelihood_tokens([(("", ""), prompt, response)])
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    ours = logprobs.gather(1, torch.tensor(response)[:, None]).sum().item()
    assert found == pytest.approx(ours, abs=1e-3)


# --------------------------------------------------------------------------------------------------
# Monitors
# --------------------------------------------------------------------------------------------------
def wandb_history(file):
    """{metric: {step: value}} in W&B's offline file, whose blocks are those of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, place, record, found = file.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            row = wandb_internal_pb2.Record.FromString(record)
            record = b""
            for item in row.history.item:
                name = item.key or ".".join(item.nested_key)
                found.setdefault(name, {})[row.history.step.num] = json.loads(item.value_json)
    return found


def tensorboard_history(folder):
    """{metric: {step: value}} in TensorBoard's event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def csv_history(folder):
    """{metric: {step: value}} in DeepSpeed's CSV files."""
    found = {}
    for file in folder.glob("*.csv"):
        (_, name), *lines = csv.reader(file.read_text().splitlines())
        found[f"train/{name}"] = {int(step): float(value) for step, value in lines}
    return found


def test_every_monitor_holds_every_metric_at_its_step(tmp_path):
    """DeepSpeed's own events count samples, and W&B drops what comes at a lower number than the
    last: all of ours, once. What each tool's file holds is metrics.jsonl, step for step; the place
    is output_path, or the run's folder. Two rows a step and four steps: samples are not steps."""
    settings = json.loads((ROOT / "ds_config.json").read_text())
    packages = {"csv_monitor": "csv", "tensorboard": "tensorboard", "wandb": "wandb"}
    there = [name for name, module in packages.items() if importlib.util.find_spec(module)]
    for name in there:
        settings[name]["enabled"] = True
    settings["tensorboard"]["output_path"] = str(tmp_path / "elsewhere")
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    pairs = [{"prompt": f"{i}?", "response": f" {i}."} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = """--data_path rows.jsonl --data_split 1,0,0 --ds_config ds.json --output_dir out
                --max_steps 4 --eval_steps 2 --log_steps 1 --num_samples 0
                --per_device_train_batch_size 2"""
    command = [sys.executable, str(ROOT / "sft.py"), "--preset", "toy", *flags.split()]
    command += ["--model_name_or_path", str(ROOT / "toy/model")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"WANDB_MODE": "offline"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    readers = {
        "csv_monitor": lambda: csv_history(tmp_path / "out/run"),
        "tensorboard": lambda: tensorboard_history(tmp_path / "elsewhere/run"),
        "wandb": lambda: wandb_history(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))),
    }
    logged = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert [row["step"] for row in logged] == [0, 1, 2, 3, 4]
    for monitor in there:
        found = readers[monitor]()
        assert not any("Samples" in name for name in found)
        for row in logged:
            for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
                if name in row:
                    value = found[f"train/{name}"][row["step"]]
                    assert value == pytest.approx(row[name], rel=1e-5), (monitor, name)
