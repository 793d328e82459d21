"""Wrong input: exit code 2 and one message that says what was given, what the
rule is, and what would do instead.

Every case runs a script's own main() in this process, in an empty folder. No traceback, no second
message, nothing written, and no model loaded: a typo must not cost ten minutes of loading.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig

import common
import ppo
import reward
import sft
from machinery.base import refused
from machinery.models import model_checks, model_folders
from machinery.rollout import reward_functions, samples
from machinery.run.run import Run
from tools import estimate

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
MODEL = str(ROOT / "toy/model")
TOY_GOLD = f"{ROOT}/toy/gold.py:gold"
RESPONSE = {"chat": False, "extra": "{}", "response_ids": [5, 1]}
PAIR = {"prompt": "Why?", "response": " So.", "chosen": " So.", "rejected": " No."}


def rows(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )


def model(folder, **changes):
    """A copy of the toy's model folder whose JSON files, named by their first word, are changed."""
    shutil.copytree(MODEL, folder)
    for word, change in changes.items():
        file = folder / {"config": "config.json", "tokenizer": "tokenizer_config.json"}[word]
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


# JSON files of model folders, as changes to the toy's, that no script can use
UNFIT = {
    "t5": {"model_type": "t5"},
    "llava": {"model_type": "llava"},
    "bert": {"model_type": "bert"},
    "bart": {"model_type": "bart"},
    "mamba": {"model_type": "mamba"},
    "no_act": {"hidden_act": "nope"},
    "no_heads": {"num_key_value_heads": 3},
}
# what stands in a file of a model folder beside config.json and tokenizer
DAMAGED = {
    "no_shards": ("model.safetensors.index.json", {"weight_map": {"a": "one.safetensors"}}),
    "no_index": ("model.safetensors.index.json", [1]),
    "torch_only": ("weights.pt", "x"),
    "keras_only": ("tf_model.h5", "x"),
    "cut_short": ("model.safetensors", "x"),
    "no_adapters": ("adapter_config.json", {"base_model_name_or_path": "actor"}),
    "no_base": ("adapter_config.json", {"base_model_name_or_path": None}),
    "cut_adapters": ("adapter_config.json", '{"base'),
    "cut_tokenizer": ("tokenizer.json", '{"version'),
}


def make_wrong_things(tmp_path, trained):
    """Makes the wrong things that the table below names (tests/hostile.py draws from them, too)."""
    many = [{**PAIR, "prompt": f"Why {i}?"} for i in range(8)]
    rows(tmp_path / "good/train.jsonl", *many)
    rows(tmp_path / "good/test.jsonl", PAIR)
    rows(tmp_path / "columns.jsonl", {"question": "a", "reply": "b"})
    rows(tmp_path / "half.jsonl", *({"prompt": r["prompt"], "response": " So."} for r in many))
    rows(tmp_path / "empty.jsonl")
    rows(tmp_path / "broken.jsonl", PAIR, PAIR, '{"prompt": "Why?", "response": ')
    rows(tmp_path / "gap.jsonl", PAIR, "", PAIR, '{"prompt": "Why?", "response": ')
    rows(tmp_path / "broken.parquet", "this is not parquet")
    rows(tmp_path / "table.txt", "prompt,response", "a,b")
    rows(tmp_path / "cells.csv", "prompt,response", "a,b", "c")
    rows(tmp_path / "twice.csv", "prompt,prompt", "a,b")
    rows(tmp_path / "held_out/test.jsonl", PAIR)
    rows(tmp_path / "a[1]/train.jsonl", PAIR)
    for name, row in {
        "blank": {**PAIR, "response": " "},
        "number": {"prompt": 1, "response": 2},
        "chat": {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        },
    }.items():
        rows(tmp_path / name / "train.jsonl", *[row] * 8)
        rows(tmp_path / name / "test.jsonl", row)
    rows(tmp_path / "done/config.json", "{}")
    model(tmp_path / "done/old")
    rows(tmp_path / "foreign/model.safetensors", "not ours")
    rows(tmp_path / "theirs/args.json", {"model": "another tool's"})
    rows(tmp_path / "theirs/adapter_config.json", "{}")
    model(tmp_path / "adapted")
    rows(tmp_path / "adapted/adapter_config.json", {"base_model_name_or_path": "done"})
    for one, other in ("ab", "ba"):
        rows(tmp_path / one / "adapter_config.json", {"base_model_name_or_path": other})
    rows(
        tmp_path / "score.py",
        "def length(prompts, completions, **columns):",
        "    return [float(len(c)) for c in completions]",
        "limit = 3",
    )
    rows(tmp_path / "ds_lr.json", {"optimizer": {"type": "Adam"}})
    rows(tmp_path / "ds_stage.json", {"zero_optimization": {"stage": 2}})
    rows(tmp_path / "ds_broken.json", "{")
    rows(tmp_path / "ds_list.json", "[]")
    rows(tmp_path / "ds_zero.json", {"zero_optimization": 3})
    rows(tmp_path / "ds_bucket.json", {"zero_optimization": {"reduce_bucket_size": "big"}})
    rows(tmp_path / "ds_enabled.json", {"tensorboard": {"enabled": "perhaps"}})
    rows(tmp_path / "ds_print.json", {"steps_per_print": "never"})
    rows(tmp_path / "ds_comet.json", {"comet": {"enabled": True}})
    (tmp_path / "nothing").mkdir()
    size = json.loads((ROOT / "toy/model/config.json").read_text())["vocab_size"]
    model(tmp_path / "no_eos", tokenizer={"eos_token": None})
    model(tmp_path / "small", config={"vocab_size": 10})
    model(tmp_path / "short")
    shutil.copytree(trained / "judge", tmp_path / "judge")
    shutil.copytree(trained / "actor", tmp_path / "actor")
    for name, config in UNFIT.items():
        model(tmp_path / name, config=config)
    for name, (file, content) in DAMAGED.items():
        model(tmp_path / name)
        rows(tmp_path / name / file, content)
    scorer = {"architectures": ["LlamaForSequenceClassification"]}
    model(tmp_path / "empty_judge", config=scorer)
    model(tmp_path / "headless", config=scorer)
    shutil.copy(trained / "actor/model.safetensors", tmp_path / "headless")
    model(tmp_path / "integers")
    save_file({"lm_head.weight": torch.ones(2, 2).long()}, tmp_path / "integers/model.safetensors")
    shutil.copytree(trained / "judge", tmp_path / "instruct")
    tokenizer = model_folders.load_tokenizer(MODEL)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(99)
    tokenizer.save_pretrained(tmp_path / "instruct")
    GPT2Config(
        vocab_size=size,
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        eos_token_id=1,
        bos_token_id=1,
    ).save_pretrained(tmp_path / "short")
    model(tmp_path / "other", config={"vocab_size": size + 1})
    tokenizer = model_folders.load_tokenizer(MODEL)
    tokenizer.add_tokens(["zebra-crossing"])
    tokenizer.save_pretrained(tmp_path / "other")
    shutil.copy(trained / "judge/model.safetensors", tmp_path / "other")
    model(tmp_path / "no_tokenizer")
    (tmp_path / "no_tokenizer/tokenizer.json").unlink()
    (tmp_path / "no_tokenizer/tokenizer_config.json").unlink()
    return tmp_path


@pytest.fixture(scope="session")
def wrong_things(trained, tmp_path_factory):
    return make_wrong_things(tmp_path_factory.mktemp("things"), trained)


@pytest.fixture
def box(wrong_things, tmp_path, monkeypatch):
    """A working folder with those things in it, and nothing else."""
    shutil.copytree(wrong_things, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "comet_ml", None)  # as if it were not installed
    return tmp_path


def command(script, flags):
    """The case's flags on top of flags that would be right: tiny data, the
    toy's models. What comes last wins."""
    paths = {
        "sft": ["--model_name_or_path", MODEL],
        "reward": ["--model_name_or_path", MODEL],
        "ppo": [
            "--actor_model_name_or_path",
            "actor",
            "--critic_model_name_or_path",
            "judge",
            "--gold_fn",
            "",
        ],
    }[script]
    return ["--preset", "toy", "--data_path", "good", "--output_dir", "out", *paths, *flags]


CASES = [  # script, flags, what the message must say
    # the command line
    ("sft", "--preset nope", "nope, toy, opt-1.3b"),
    ("sft", "--preset", "--preset, expected one argument"),
    ("sft", "--learning_speed 1", "--learning_speed, --help"),
    ("sft", "--learning 1", "--learning, --help"),  # no guessing from abbreviations
    ("sft", "--learning_rate fast", "--learning_rate, fast"),
    ("reward", "--dtype int4", "int4, bf16, fp32"),
    ("reward", "--zero_stage 4", "--zero_stage, 4, 3"),
    ("ppo", "--kl_estimator k4", "k4, k1, k3"),
    # step 3 has two: actor's and critic's
    ("ppo", "--learning_rate 1e-5", "--learning_rate, --help"),
    # numbers out of range
    ("sft", "--per_device_train_batch_size 0", "--per_device_train_batch_size 0, 1"),
    ("sft", "--per_device_train_batch_size -1", "--per_device_train_batch_size -1, 1"),
    ("sft", "--num_train_epochs -1", "--num_train_epochs -1, 1"),
    ("sft", "--max_steps -2", "--max_steps -2, -1"),  # 0 evaluates and ends
    ("sft", "--save_steps -1", "--save_steps -1, 0"),
    ("sft", "--keep_checkpoints 0", "--keep_checkpoints 0, 1"),
    # a prompt token and a response token are the least
    ("sft", "--max_seq_len 1", "--max_seq_len 1"),
    ("sft", "--seed -1", "--seed -1"),
    ("sft", "--learning_rate=-1e-5", "--learning_rate -1e-05"),
    ("sft", "--dropout 1.5", "--dropout 1.5"),
    ("sft", "--lr_scheduler_type zigzag", "zigzag, cosine, linear"),
    ("sft", "--data_split 2,4", "--data_split, 3"),
    ("sft", "--data_split 2,-4,4", "--data_split -4.0, 0 or more"),
    ("sft", "--data_split a,b,c", "--data_split, a,b,c"),
    ("sft", "--data_split 0,0,0", "--data_split"),
    ("reward", "--gradient_accumulation_steps 0", "--gradient_accumulation_steps 0"),
    ("ppo", "--max_answer_seq_len 0", "--max_answer_seq_len 0"),
    ("ppo", "--num_eval_prompts 0", "--num_eval_prompts 0"),
    ("ppo", "--top_p 0", "--top_p 0"),
    ("ppo", "--top_p 1.5", "--top_p 1.5"),
    ("ppo", "--top_k -1", "--top_k -1"),
    ("ppo", "--lam 1.5", "--lam 1.5"),
    ("ppo", "--ema_decay 1.5", "--ema_decay 1.5"),
    ("ppo", "--temperature 0", "--temperature 0, out of range"),
    (
        "sft",
        "--model_name_or_path ./good/modle",
        "good/modle, no such folder, step before, train.jsonl",
    ),
    ("ppo", "--samples_per_prompt 0", "--samples_per_prompt 0, out of range"),
    ("sft", "--learning_rate inf", "--learning_rate inf, finite"),
    ("sft", "--lora_dim 2147483647", "--lora_dim, out of range, 65536 or less"),
    ("ppo", "--critic_lora_dim 2147483647", "--critic_lora_dim, out of range, 65536 or less"),
    ("sft", "--lora_alpha 0", "--lora_alpha 0.0, out of range"),  # adapters that never act
    ("sft", "--adam_betas 0.9,1", "--adam_betas 1.0, 0.999999 or less"),
    ("sft", "--adam_betas nan,0.9", "--adam_betas nan, out of range"),
    ("sft", "--adam_betas 0.9", "--adam_betas, 2 numbers joined by commas"),
    ("sft", "--seed 4294967296", "--seed 4294967296, 4294967295 or less"),
    ("sft", "--timeout_minutes 1e15", "--timeout_minutes 1000000000000000.0, 525600 or less"),
    ("sft", f"--per_device_train_batch_size {10**30}", "out of range, 2147483647 or less"),
    ("sft", f"--keep_checkpoints {10**30}", "--keep_checkpoints, out of range"),
    ("reward", f"--gradient_accumulation_steps {10**30}", "--gradient_accumulation_steps"),
    ("ppo", f"--ppo_epochs {10**30}", "--ppo_epochs, out of range"),
    # in range, and more filler rows than memory
    ("sft", "--per_device_train_batch_size 2000000000", "2000000000 rows, the data has, Lower"),
    ("sft", "--gradient_accumulation_steps 2000000000", "2000000000 a step, the data has, Lower"),
    (
        "ppo",
        "--per_device_generation_batch_size 2000000000 --per_device_training_batch_size 2000000000",
        "2000000000 rows, the data has, Lower",
    ),
    ("ppo", "--enable_ema 2", "--enable_ema 2, 1 or less"),
    ("ppo", "--stop ''", "--stop, empty"),
    ("ppo", "--min_new_tokens 48", "--min_new_tokens 48, --max_answer_seq_len 48, EOS"),
    (
        "sft",
        "--model_name_or_path done/old --output_dir done/old --overwrite",
        "done/old, --model_name_or_path, delete",
    ),
    ("ppo", "--reward_fn broken.jsonl:f", "--reward_fn broken.jsonl:f"),
    # what this machine or this combination cannot do
    ("sft", "--dtype fp16", "--dtype fp16, GPU, bf16, fp32"),
    ("sft", "--offload", "--offload, --zero_stage 3, --adam_offload"),
    (
        "ppo",
        "--per_device_generation_batch_size 8 --per_device_training_batch_size 4",
        "8, 4, --gradient_accumulation_steps, --allow_unstable",
    ),
    ("ppo", "--ppo_epochs 2", "--ppo_epochs 2, --allow_unstable"),
    ("ppo", "--generation_batches 2", "--generation_batches 2, --allow_unstable"),
    (
        "ppo",
        "--allow_unstable 1 --per_device_generation_batch_size 8 "
        "--per_device_training_batch_size 3",
        "3, 8, divi",
    ),
    ("ppo", "--advantage rloo", "--samples_per_prompt 1, rloo, 2 or more"),
    (
        "ppo",
        "--samples_per_prompt 5",
        "--samples_per_prompt 5, --per_device_generation_batch_size 32",
    ),
    ("ppo", "--kl_in loss --kl_estimator k1", "k1, k3"),
    ("ppo", "--normalize_reward 1 --reward_fn score.py:length", "--normalize_reward, --reward_fn"),
    ("ppo", "--normalize_reward 1", "--normalize_reward, score_statistics, reward.py"),
    (
        "ppo",
        "--normalize_reward 1 --reward_model_name_or_path judge judge",
        "--normalize_reward, one reward model, several",
    ),
    ("ppo", "--reward_model_name_or_path judge other", "vocabular, other"),
    ("ppo", "--reward_fn score.py:length missing.py:f", "--reward_fn missing.py:f"),
    ("ppo", "--dual_clip 0.5", "--dual_clip 0.5, 1"),
    ("ppo", "--clip_high 0.1", "--clip_high 0.1, --clip 0.2"),
    ("ppo", "--critic_warmup_steps 3 --advantage reinforce", "--critic_warmup_steps 3, gae"),
    ("ppo", "--kl_target 2 --kl_coef 0", "--kl_target 2, --kl_coef"),
    # DeepSpeed's config
    ("sft", "--ds_config missing.json", "--ds_config missing.json"),
    ("sft", "--ds_config ds_broken.json", "--ds_config ds_broken.json"),
    ("sft", "--ds_config ds_lr.json", "ds_lr.json, optimizer, --learning_rate"),
    ("sft", "--ds_config ds_stage.json", "ds_stage.json, stage, --zero_stage"),
    ("sft", "--ds_config ds_list.json", "ds_list.json, no JSON object"),
    ("sft", "--ds_config ds_zero.json", "ds_zero.json, DeepSpeed does not take it"),
    ("sft", "--ds_config ds_bucket.json", "ds_bucket.json, reduce_bucket_size, valid integer"),
    ("sft", "--ds_config ds_enabled.json", "ds_enabled.json, tensorboard.enabled, boolean"),
    ("sft", "--ds_config ds_print.json", "ds_print.json, steps_per_print 'never', integer"),
    ("reward", "--ds_config ds_comet.json", "ds_comet.json, comet, pip install comet_ml"),
    # data
    ("sft", "--data_path colums.jsonl", "colums.jsonl, columns.jsonl"),  # what is there instead
    ("sft", "--data_path ''", "--data_path is empty, Name a file"),
    ("ppo", "--unsup_data_path ' '", "--unsup_data_path is empty"),
    ("sft", "--data_path some/name", "some/name"),  # neither here nor on the hub, which is offline
    ("sft", "--data_path table.txt", "table.txt, .jsonl, .csv, .parquet"),
    ("sft", "--data_path cells.csv", "cells.csv, line 3, cells"),
    ("sft", "--data_path twice.csv", "twice.csv, line 1, same name"),
    ("sft", "--data_path held_out", "held_out, no part train, only test"),
    ("ppo", "--unsup_data_path held_out", "--unsup_data_path held_out, no part train"),
    ("sft", "--data_path a[1]", "a[1], Rename it"),
    ("sft", "--data_path empty.jsonl", "empty.jsonl"),
    ("sft", "--data_path nothing", "nothing"),
    ("sft", "--data_path good empty.jsonl", "empty.jsonl"),
    (
        "sft",
        "--data_path columns.jsonl",
        "question, reply, prompt + response, instruction + output",
    ),
    ("sft", "--data_path broken.jsonl", "broken.jsonl, line 3"),
    ("sft", "--data_path gap.jsonl", "gap.jsonl, line 4"),  # the blank line 2 is no error
    ("sft", "--data_path broken.parquet", "broken.parquet"),
    ("sft", "--data_path blank", "blank, no train"),
    ("sft", "--data_path number", "number, train.jsonl, line 1, prompt must be text, 1"),
    ("sft", "--data_path chat", "chat template"),
    ("sft", "--data_split 0,4,4", "--data_split"),
    ("reward", "--data_path half.jsonl", "half.jsonl, prompt, response, chosen + rejected"),
    ("ppo", "--unsup_data_path half.jsonl", "--unsup_data_path half.jsonl, text"),
    ("ppo", "--unsup_data_path missing.jsonl", "missing.jsonl"),
    # models
    ("sft", "--model_name_or_path missing/model", "missing/model"),
    ("sft", "--model_name_or_path no_tokenizer", "no_tokenizer"),
    ("sft", "--model_name_or_path no_eos", "no_eos, EOS"),
    ("sft", "--model_name_or_path small", "small, 10"),
    # positions that were never learned
    ("sft", "--model_name_or_path short --max_seq_len 128", "--max_seq_len 128, 64"),
    ("ppo", "--actor_model_name_or_path missing/actor", "missing/actor"),
    ("ppo", "--critic_model_name_or_path missing/critic", "missing/critic"),
    ("ppo", "--critic_model_name_or_path other", "vocabular, other"),
    ("ppo", "--reward_model_name_or_path other", "vocabular, other"),
    # folders whose weights are not all there, or not to be read
    ("sft", "--model_name_or_path no_shards", "no_shards, lacks 1 of 1, one.safetensors"),
    ("sft", "--model_name_or_path no_index", "model.safetensors.index.json, no index"),
    ("sft", "--model_name_or_path torch_only", "weights.pt, model.safetensors"),
    ("reward", "--model_name_or_path keras_only", "tf_model.h5, model.safetensors"),
    ("sft", "--model_name_or_path cut_short", "cut_short/model.safetensors, cut short"),
    ("sft", "--model_name_or_path integers", "integers/model.safetensors, lm_head.weight, I64"),
    ("sft", "--model_name_or_path no_adapters", "no_adapters, adapter_model.safetensors"),
    ("sft", "--model_name_or_path no_base", "no_base/adapter_config.json, base_model_name"),
    ("sft", "--model_name_or_path cut_adapters", "cut_adapters/adapter_config.json"),
    ("sft", "--model_name_or_path cut_tokenizer", "no tokenizer, cut_tokenizer"),
    ("ppo", f"--actor_model_name_or_path {MODEL}", f"{MODEL}, no weights, from scratch"),
    ("ppo", f"--critic_model_name_or_path {MODEL}", f"{MODEL}, no weights, from scratch"),
    ("ppo", "--reward_model_name_or_path empty_judge", "empty_judge, no weights, from scratch"),
    ("ppo", "--reward_model_name_or_path headless", "headless, no value head, random"),
    ("ppo", "--reward_model_name_or_path actor", "actor, no reward model, random"),
    ("ppo", "--reward_model_name_or_path instruct", "instruct, ends responses with"),
    # architectures that do not do what the scripts rely on
    ("sft", "--model_name_or_path t5", "t5, no causal LM"),
    ("sft", "--model_name_or_path t5 --estimate", "t5, no causal LM"),
    ("reward", "--model_name_or_path llava --estimate", "llava, no causal LM"),
    ("sft", "--model_name_or_path bert", "bert, later token, no causal language model"),
    ("reward", "--model_name_or_path bart", "bart, padding on the left"),
    ("sft", "--model_name_or_path mamba", "mamba, token by token"),
    ("reward", "--model_name_or_path mamba", "mamba, no sequence classification"),
    ("sft", "--model_name_or_path no_act", "no_act, config.json, nope"),
    ("sft", "--model_name_or_path no_heads", "no_heads, config.json"),
    ("reward", "--value_head_prefix=", "--value_head_prefix ''"),
    ("reward", "--value_head_prefix model", "--value_head_prefix 'model'"),
    ("reward", "--value_head_prefix forward", "--value_head_prefix 'forward'"),
    ("reward", "--value_head_prefix config", "--value_head_prefix 'config'"),
    # functions
    ("ppo", "--reward_fn missing.py:length", "--reward_fn missing.py:length"),
    ("ppo", "--reward_fn score.py:lenght", "--reward_fn score.py:lenght, score.py"),
    ("ppo", "--reward_fn score.py:limit", "--reward_fn score.py:limit"),
    ("ppo", "--reward_fn score.py", "--reward_fn score.py names no function, score.py:FUNCTION"),
    ("ppo", "--gold_fn missing.py:length", "--gold_fn missing.py:length"),
    # where the run would go
    ("sft", "--output_dir done", "done, --overwrite, --resume"),
    ("sft", "--output_dir score.py", "score.py"),  # a file
    # not left by a run of ours
    ("sft", "--output_dir foreign", "foreign, model.safetensors, --overwrite"),
    ("sft", "--output_dir theirs", "theirs, adapter_config.json, --overwrite"),
    # adapters that sit on it
    ("sft", "--model_name_or_path adapted --output_dir done --overwrite", "done, its base, delete"),
    ("sft", "--model_name_or_path a", "a on b on a"),  # adapters without an end
    ("reward", "--resume", "--resume, checkpoints"),
]


def refused(message, words):
    """One message, without a traceback, that says all of `words`."""
    assert len(re.findall("^error: ", message, re.M)) == 1 and "Traceback" not in message, message
    missing = [word for word in words.split(", ") if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize(
    "script, flags, words", CASES, ids=[f"{script} {flags}" for script, flags, _ in CASES]
)
def test_wrong_input_is_refused_in_words(box, monkeypatch, capfd, script, flags, words):
    """Exit code 2, one message, before any model is loaded, and the folder as it was."""

    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded before the input was checked")

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *command(script, shlex.split(flags))])
    # this process is no rank
    monkeypatch.setattr("deepspeed.init_distributed", lambda **options: None)
    monkeypatch.setattr(common, "load_model", loaded)
    before = sorted(box.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[script].main()
    assert stop.value.code == 2
    refused(capfd.readouterr().err, words)
    assert sorted(box.rglob("*")) == before


def test_a_name_on_the_hub_is_no_folder_without_weights():
    """Step 3 wants weights. Those of a name on the hub are not here yet, and not looked for."""
    model_checks.check_weights("some/name", LlamaConfig(), needed=True)


def test_the_right_input_passes_all_checks(box, monkeypatch):
    """The flags that every case above starts from are fine: the run goes on to load its model."""

    class Loaded(Exception):
        pass

    def loaded(*args, **kwargs):
        raise Loaded

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("deepspeed.init_distributed", lambda **options: None)
    monkeypatch.setattr(common, "load_model", loaded)
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *command(script, [])])
        with pytest.raises(Loaded):
            SCRIPTS[script].main()


@pytest.mark.parametrize(
    "before, now, words",
    [
        (["--seed", "1"], ["--seed", "2"], "--seed 1, 2"),
        (["--lora_dim", "4"], [], "--lora_dim 4, 0"),
        (["--data_path", "old/good"], ["--data_path", "bad"], "--data_path, good, bad"),
    ],
)
def test_a_run_is_resumed_as_it_was_begun(tmp_path, monkeypatch, capsys, before, now, words):
    """Another seed, other data, other adapters: another run. It is refused
    before anything is touched; a data folder that has only moved is not."""
    output = ["--preset", "toy", "--output_dir", str(tmp_path)]
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    begun = sft.get_args([*output, *before])
    (tmp_path / "args.json").write_text(
        json.dumps({**vars(begun), "data_fingerprint": 1}, default=str)
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        Run(sft.get_args([*output, "--resume", *now]), "", estimate.language_model)
    assert stop.value.code == 2
    refused(capsys.readouterr().err, words)
    monkeypatch.setattr(
        "deepspeed.init_distributed", lambda **options: sys.exit("all checks passed")
    )
    with pytest.raises(SystemExit, match="all checks passed"):
        moved = [f.replace("old/", "new/") for f in before]
        Run(sft.get_args([*output, "--resume", *moved]), "", estimate.language_model)


@pytest.mark.parametrize(
    "harm, words",
    [
        ("cut short", "cannot be loaded"),
        ("without a head", "no weights for lm_head.weight, random"),
        ("a layer less", "no place for 9 of its weights, layers.1, num_hidden_layers"),
        ("code", "cannot be loaded"),
    ],
)
def test_weights_that_are_not_there_are_an_error(tiny_model, tmp_path, capsys, harm, words):
    """A file cut short by a full disk; a reward model where a language model
    belongs. Neither may train from random numbers, nor a model that has lost a layer to its config.
    And no code in a .bin is run."""
    tiny_model.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights = load_file(file)
    if harm == "cut short":
        os.truncate(file, 1000)
    elif harm == "without a head":
        del weights["lm_head.weight"]
        save_file(weights, file, metadata={"format": "pt"})
    elif harm == "a layer less":
        one = {**json.loads(config.read_text()), "num_hidden_layers": 1}
        config.write_text(json.dumps(one))
    else:
        file.unlink()
        torch.save({"lm_head.weight": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SystemExit) as stop:
        flags = ["--preset", "toy", "--model_name_or_path", str(tmp_path), "--zero_stage", "0"]
        common.load_model(sft.get_args(flags))
    assert stop.value.code == 2
    refused(capsys.readouterr().err, words)
    assert not os.path.exists("harmed")


class Harm:
    """Runs code when it is unpickled by somebody careless."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_the_constraints_can_be_lifted_knowingly():
    """Several PPO epochs, more rollout batches and unequal batch sizes: a
    researcher says so, and is believed."""
    args = ppo.get_args(
        "--allow_unstable 1 --ppo_epochs 2 --generation_batches 2 "
        "--per_device_generation_batch_size 8 --per_device_training_batch_size 4".split()
    )
    assert (args.ppo_epochs, args.generation_batches) == (2, 2)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        1.0,
        [1.0],
        [1.0, float("nan")],
        [1.0, 10**400],
        [1.0, None],
        ["good", "bad"],
        "12",  # two characters, and two keys: a loop over them would give two numbers
        {1: "good", 2: "bad"},
        {1.0, 2.0},  # in no order
        [{1: 1, 2: 2}, "12"],  # likewise two for the two tokens of a response
    ],
)
def test_a_reward_function_must_return_one_number_an_answer(returned, capsys):
    """The user's own code is input, too: what it returned is shown, by the rank
    that saw it, in place of a traceback."""
    responses = [{**RESPONSE, "prompt": "Why?", "text": " So."}] * 2
    with pytest.raises(SystemExit) as stop:
        reward_functions.scores_of(lambda prompts, completions: returned, responses)
    assert stop.value.code == 2
    shown = f"{type(returned).__name__} {str(returned)[:4]}".split(", ")[0]
    refused(capsys.readouterr().err, f"one finite number, 2 responses, {shown}")


def doubled(prompts, completions, factor=2, **columns):
    return (factor * len(text) for text in completions)  # a generator, when it is called


@pytest.mark.parametrize("function", [doubled, functools.partial(doubled, factor=3)])
def test_any_callable_will_do_and_a_generator_is_read_to_its_end(function):
    responses = [{**RESPONSE, "prompt": "Why?", "text": text} for text in (" So.", " No")]
    factor = 3 if function is not doubled else 2
    assert reward_functions.scores_of(function, responses) == [4 * factor, 3 * factor]


def leaves(prompts, completions, **columns):
    sys.exit(0)


def leaves_later(prompts, completions, **columns):
    for text in completions:
        yield len(text)
        sys.exit(0)


def divides(prompts, completions, **columns):
    return (1 / (len(text) - 4) for text in completions)


@pytest.mark.parametrize(
    "function, words",
    [
        (leaves, "leaves raised SystemExit(0), 'Why?', ' So.'"),
        (functools.partial(leaves), "leaves raised SystemExit(0), 'Why?', ' So.'"),
        (leaves_later, "leaves_later raised SystemExit(0), 'Why?', ' So.'"),
        (divides, "divides raised ZeroDivisionError, 'Why?', ' So.'"),
    ],
)
def test_a_reward_function_cannot_end_the_run_as_if_all_were_well(function, words, capsys):
    """sys.exit(0) in the middle of step 3 would be a success to whoever started it. What a
    generator raises comes when it is read."""
    with pytest.raises(SystemExit) as stop:
        reward_functions.scores_of(function, [{**RESPONSE, "prompt": "Why?", "text": " So."}])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    refused(message[message.rindex("error: ") :], words)


def test_a_function_whose_parameters_cannot_be_known_is_refused_at_the_start(tmp_path, capsys):
    (tmp_path / "my.py").write_text("f = max\n")
    with pytest.raises(SystemExit) as stop:
        reward_functions.load_function(f"{tmp_path}/my.py:f", "--reward_fn")
    assert stop.value.code == 2 and "Wrap it in a function" in capsys.readouterr().err


def test_a_column_that_is_missing_is_no_fault_of_the_function(capfd):
    """One message, without a traceback; the function has not been called."""

    def judge(prompts, completions, answer):
        raise AssertionError

    with pytest.raises(SystemExit) as stop:
        reward_functions.scores_of(judge, [{**RESPONSE, "prompt": "Why?", "text": " So."}])
    said = capfd.readouterr().err
    assert stop.value.code == 2 and said.count("error: ") == 1 and "Traceback" not in said
    assert "no columns of the data: answer" in said and "--columns" in said


@pytest.mark.parametrize("score", [1e300, [0.0, -1e31], float(10**38)])
def test_a_score_that_fp32_cannot_sum_up_is_refused(score, capsys):
    """It would become infinite later, and be taken for a learning rate that is too high."""
    responses = [{**RESPONSE, "prompt": f"Why {n}?", "text": " So."} for n in range(2)]

    def judge(prompts, completions, **columns):
        return [1.0, score]

    with pytest.raises(SystemExit) as stop:
        reward_functions.scores_of(judge, responses)
    assert stop.value.code == 2
    number = score[1] if isinstance(score, list) else score
    refused(capsys.readouterr().err, f"judge, {number} is beyond 1e+30, 'Why 1?'")


def test_a_reward_function_that_raises_names_the_prompt(capsys):
    """Of many thousand prompts one broke the user's parser: the message says
    which, and what the response was."""

    def judge(completions, prompts, **columns):  # by keyword, in any order, as TRL calls it
        return [float(text) for text in completions]

    responses = [
        {**RESPONSE, "prompt": f"{n} + 1 =", "text": text}
        for n, text in enumerate((" 1", " two", " 3"))
    ]
    with pytest.raises(SystemExit) as stop:
        reward_functions.scores_of(judge, responses)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    # (its traceback is above)
    refused(message[message.rindex("error: ") :], "judge raised ValueError, '1 + 1 =', ' two'")
    with pytest.raises(SystemExit):
        returned = [1.0, float("nan"), 3.0]
        reward_functions.scores_of(lambda completions, **columns: returned, responses)
    refused(capsys.readouterr().err, "Not finite for the prompt '1 + 1 ='")


@pytest.mark.parametrize(
    "text, words",
    [
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("import sys; sys.exit(0)\n", "SystemExit(0)"),
    ],
)
def test_a_reward_file_that_does_not_run_is_an_error(tmp_path, capsys, text, words):
    (tmp_path / "judge.py").write_text(text)
    with pytest.raises(SystemExit) as stop:
        reward_functions.load_function(f"{tmp_path}/judge.py:f", "--reward_fn")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    refused(message[message.rindex("error: ") :], f"--reward_fn, cannot be run, {words}")


@pytest.mark.parametrize("given, kept", [([], None), (["--gold_fn", TOY_GOLD], TOY_GOLD)])
def test_a_gold_function_that_is_given_is_taken(given, kept):
    """The toy's is dropped with other data, because it knows the toy's questions only: but not if
    it was asked for, by whatever path."""
    args = ppo.get_args(["--preset", "toy", "--data_path", "mine.jsonl", *given])
    assert args.gold_fn == kept
    assert ppo.get_args(["--preset", "toy"]).gold_fn == TOY_GOLD


def test_an_evaluation_takes_no_more_rows_at_a_time_than_there_are():
    """A large --per_device_eval_batch_size means "all at once", and not as many filler rows."""
    args = SimpleNamespace(per_device_eval_batch_size=2**31 - 1)
    batches = common.eval_loader(args, [{}, {}], lambda rows: {"rows": [r["row"] for r in rows]})
    assert list(batches) == [{"rows": [0, 1]}]


def test_no_samples_are_a_fair_wish(tiny_model, tokenizer):
    """--num_samples 0 means that nothing is answered at evaluations: no error, and no file."""
    run = SimpleNamespace(args=sft.get_args(["--num_samples", "0", "--output_dir", "nowhere"]))
    samples.answer_and_keep(run, tiny_model, tokenizer, [], step=0)
    assert not os.path.exists("nowhere")


def test_only_rank_zero_speaks(monkeypatch, capsys):
    """Eight ranks read the same wrong flag. Eight messages would hide the one that
    matters: the others wait, and the launcher ends them meanwhile. Where one rank
    alone sees the mistake (a file that its machine lacks), it does say so."""
    waited = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(
        errors.time, "sleep", lambda seconds: waited.append((seconds, *capsys.readouterr()))
    )
    with pytest.raises(SystemExit) as stop:
        sft.get_args(["--preset", "nope"])
    assert stop.value.code == 2
    assert waited == [(20, "", "")] and capsys.readouterr().err.startswith(
        "error: rank 3: --preset nope"
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_lesson(script, capsys):
    """--help opens with the script's header, and every flag says what it is for."""
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[script].get_args(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert SCRIPTS[script].__doc__.splitlines()[0] in text
    flags = re.findall(r"^  (--\w+.*(?:\n {4,}.*)*)", text, re.M)
    assert len(flags) > 30
    assert [flag for flag in flags if not re.search(r"(  |\n) +\S+ \S", flag)] == []


def test_from_the_shell_it_is_the_same(box):
    """The three scripts as a user starts them, side by side: exit code 2, one
    message on stderr, nothing on stdout."""
    cases = [
        ("sft", "--data_path broken.jsonl", "broken.jsonl, line 3"),
        ("reward", "--data_path half.jsonl", "chosen + rejected"),
        ("ppo", "--ppo_epochs 2", "--allow_unstable"),
    ]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    before = sorted(box.rglob("*"))
    runs = [
        subprocess.Popen(
            [sys.executable, str(ROOT / f"{script}.py"), *command(script, flags.split())],
            cwd=box,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for script, flags, _ in cases
    ]
    try:
        for run, (_, _, words) in zip(runs, cases):
            out, err = run.communicate(timeout=600)
            assert run.returncode == 2, err
            refused(err, words)
            assert err.startswith("error: ") and out == ""
    finally:
        for run in runs:
            run.kill()
    assert sorted(box.rglob("*")) == before
