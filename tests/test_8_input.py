"""Wrong input: exit code 2 and one message that says what was given, what the
rule is, and what would do instead.

Every case runs a script's own main() in this process, in an empty folder. No traceback, no second
message, nothing written, and no model loaded: a typo must not cost ten minutes of loading.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import common
import ppo
import reward
import sft
from machinery import errors, estimate, model_folders, reward_functions, samples
from machinery.run import Run

import pytest
from conftest import ROOT
from transformers import GPT2Config

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
MODEL = str(ROOT / "toy/model")
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


@pytest.fixture
def box(tmp_path, monkeypatch):
    """An empty working folder with the wrong things in it that the table below names."""
    monkeypatch.chdir(tmp_path)
    many = [{**PAIR, "prompt": f"Why {i}?"} for i in range(8)]
    rows(tmp_path / "good/train.jsonl", *many)
    rows(tmp_path / "good/test.jsonl", PAIR)
    rows(tmp_path / "columns.jsonl", {"question": "a", "reply": "b"})
    rows(tmp_path / "half.jsonl", *({"prompt": r["prompt"], "response": " So."} for r in many))
    rows(tmp_path / "empty.jsonl")
    rows(tmp_path / "broken.jsonl", PAIR, PAIR, '{"prompt": "Why?", "response": ')
    rows(tmp_path / "gap.jsonl", PAIR, "", PAIR, '{"prompt": "Why?", "response": ')
    rows(tmp_path / "broken.parquet", "this is not parquet")
    rows(tmp_path / "table.csv", "prompt,response", "a,b")
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
    rows(
        tmp_path / "adapted/adapter_config.json",
        {"base_model_name_or_path": str(tmp_path / "done")},
    )
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
    (tmp_path / "nothing").mkdir()
    size = json.loads((ROOT / "toy/model/config.json").read_text())["vocab_size"]
    model(tmp_path / "no_eos", tokenizer={"eos_token": None})
    model(tmp_path / "small", config={"vocab_size": 10})
    model(tmp_path / "short")
    model(tmp_path / "judge", config={"architectures": ["LlamaForSequenceClassification"]})
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
    model(tmp_path / "no_tokenizer")
    (tmp_path / "no_tokenizer/tokenizer.json").unlink()
    (tmp_path / "no_tokenizer/tokenizer_config.json").unlink()
    return tmp_path


def command(script, flags):
    """The case's flags on top of flags that would be right: tiny data, the
    toy's models. What comes last wins."""
    paths = {
        "sft": ["--model_name_or_path", MODEL],
        "reward": ["--model_name_or_path", MODEL],
        "ppo": [
            "--actor_model_name_or_path",
            MODEL,
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
    ("sft", "--data_split 2,-4,4", "--data_split, 3"),
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
    ("sft", "--adam_betas 0.9,1", "--adam_betas, below 1"),
    (
        "sft",
        "--model_name_or_path done/old --output_dir done --overwrite",
        "done, --model_name_or_path, delete",
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
    # data
    ("sft", "--data_path colums.jsonl", "colums.jsonl, columns.jsonl"),  # what is there instead
    ("sft", "--data_path some/name", "some/name"),  # neither here nor on the hub, which is offline
    ("sft", "--data_path table.csv", "table.csv, .jsonl, .parquet"),
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
    ("sft", "--data_path number", "number"),
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
    # functions
    ("ppo", "--reward_fn missing.py:length", "--reward_fn missing.py:length"),
    ("ppo", "--reward_fn score.py:lenght", "--reward_fn score.py:lenght, score.py"),
    ("ppo", "--reward_fn score.py:limit", "--reward_fn score.py:limit"),
    ("ppo", "--reward_fn score.py", "--reward_fn score.py, FILE"),
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
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *command(script, flags.split())])
    # this process is no rank
    monkeypatch.setattr("deepspeed.init_distributed", lambda **options: None)
    monkeypatch.setattr(common, "load_model", loaded)
    before = sorted(box.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[script].main()
    assert stop.value.code == 2
    refused(capfd.readouterr().err, words)
    assert sorted(box.rglob("*")) == before


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
    ],
)
def test_weights_that_are_not_there_are_an_error(tiny_model, tmp_path, capsys, harm, words):
    """A file cut short by a full disk; a reward model where a language model
    belongs. Neither may train from random numbers."""
    tiny_model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if harm == "cut short":
        os.truncate(file, 1000)
    else:
        from safetensors.torch import load_file, save_file

        save_file(
            {k: v for k, v in load_file(file).items() if "lm_head" not in k},
            file,
            metadata={"format": "pt"},
        )
    with pytest.raises(SystemExit) as stop:
        flags = ["--preset", "toy", "--model_name_or_path", str(tmp_path), "--zero_stage", "0"]
        common.load_model(sft.get_args(flags))
    assert stop.value.code == 2
    refused(capsys.readouterr().err, words)


def test_the_constraints_can_be_lifted_knowingly():
    """Several PPO epochs, more rollout batches and unequal batch sizes: a
    researcher says so, and is believed."""
    args = ppo.get_args(
        "--allow_unstable 1 --ppo_epochs 2 --generation_batches 2 "
        "--per_device_generation_batch_size 8 --per_device_training_batch_size 4".split()
    )
    assert (args.ppo_epochs, args.generation_batches) == (2, 2)


@pytest.mark.parametrize(
    "returned", [None, 1.0, [1.0], [1.0, float("nan")], [1.0, None], ["good", "bad"]]
)
def test_a_reward_function_must_return_one_number_an_answer(returned, capsys):
    """The user's own code is input, too: what it returned is shown, by the rank
    that saw it, in place of a traceback."""
    responses = [{**RESPONSE, "prompt": "Why?", "text": " So."}] * 2
    with pytest.raises(SystemExit) as stop:
        reward_functions.scores_of(lambda prompts, completions: returned, responses)
    assert stop.value.code == 2
    refused(capsys.readouterr().err, f"one finite number, 2 responses, {str(returned)[:4]}")


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


def test_a_reward_file_that_does_not_run_is_an_error(tmp_path, capsys):
    (tmp_path / "judge.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(SystemExit) as stop:
        reward_functions.load_function(f"{tmp_path}/judge.py:f", "--reward_fn")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    refused(
        message[message.rindex("error: ") :], "--reward_fn, cannot be run, nothing_of_that_name"
    )


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
