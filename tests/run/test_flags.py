"""Flags: what a script runs, and what overrides what. What is refused is in tests/promises.py."""

import copy
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

import common
import ppo
import reward
import sft
from machinery import flags as declaring
from machinery import folders, ppo_flags
from machinery.refused import Refused, program
from tests import kit, promises
from variants.dpo import dpo

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
# What DeepSpeed-Chat's scripts hold, typed from them: flag, value for OPT (1.3B on one node, and
# 350M in step 2), and for Llama-2-7B, where "=" is the same. None: the model's own dropout, which
# is on for OPT. It has no flag for the batch of an evaluation in step 3.
DSC = {
    "sft": """
        learning_rate 9.65e-6 =|weight_decay 0 =|dropout None =|num_train_epochs 16 4
        num_warmup_steps 0 =|max_seq_len 512 =|zero_stage 2 3|gradient_accumulation_steps 1 =
        per_device_train_batch_size 8 4|per_device_eval_batch_size 8 4""",
    "reward": """
        learning_rate 5e-5 9.65e-6|weight_decay 0.1 =|dropout 0 =|num_train_epochs 1 =
        num_warmup_steps 0 =|max_seq_len 512 =|zero_stage 0 3|gradient_accumulation_steps 1 =
        per_device_train_batch_size 4 8|per_device_eval_batch_size 4 8""",
    "ppo": """
        actor_learning_rate 9.65e-6 =|critic_learning_rate 5e-6 =|actor_weight_decay 0 0.1
        critic_weight_decay 0 0.1|actor_dropout 0 =|critic_dropout None =|num_train_epochs 1 =
        num_warmup_steps 100 =|max_prompt_seq_len 256 =|max_answer_seq_len 256 =
        per_device_generation_batch_size 4 1|per_device_training_batch_size 4 1
        gradient_accumulation_steps 1 =|generation_batches 1 =|ppo_epochs 1 =
        actor_zero_stage 2 3|critic_zero_stage 2 3|enable_ema 1 0|ema_decay 0.992 =
        kl_coef 0.1 =|gamma 1 =|lam 0.95 =|clip 0.2 =|clip_value 0.2 =|clip_reward 5 =""",
}
DSC_ALL = dict(adam_betas=[0.9, 0.95], max_grad_norm=1.0, lr_scheduler_type="cosine", seed=1234)
DSC_ALL["data_split"] = [2, 4, 4]
DAHOAS = "Dahoas/rm-static"
BLEND = ["Dahoas/full-hh-rlhf", "Dahoas/synthetic-instruct-gptj-pairwise"]
BLEND = [DAHOAS, *BLEND, "yitingxie/rlhf-reward-datasets"]
DSC_DATA = {("ppo", 0): [DAHOAS], ("ppo", 1): [DAHOAS], ("reward", 1): [DAHOAS]}  # else BLEND
MOST = {"sft": 47, "reward": 47, "ppo": 96}  # flags


def get_args(script, flags="", preset="--preset toy "):
    return SCRIPTS[script].get_args(shlex.split(preset + flags))


def pretend(monkeypatch, deepspeed_is="0.19.8", device="cpu", **environment):
    """Answers where flags ask for the device, the version, or the launcher."""
    monkeypatch.setattr(deepspeed, "__version__", deepspeed_is)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: device)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def parser_of(script):
    """Returns the parser that a script declares its flags for."""
    found = []
    parse, declaring.parse = declaring.parse, lambda parser, *_, **__: found.append(parser) or 1 / 0
    try:
        {**SCRIPTS, "dpo": dpo}[script].get_args([])
    except ZeroDivisionError:
        return found[0]
    finally:
        declaring.parse = parse


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------
PLACES = ("*.py", "machinery/*.py", "tools/**/*.py", "variants/vllm/*.py")


def test_every_rule_is_in_the_table():
    """A guard without a line in tests/promises.py is lost unseen when code is written anew. And no
    line is of a rule that is gone."""
    code = "".join(file.read_text() for place in PLACES for file in kit.ROOT.glob(place))
    known = set(re.findall(r'(?:Refused\(|refusing\(|yield)\s*"([a-z0-9-]+)"', code))
    tables = "FLAGS FILES WEIGHTS BEGUN TYPED ELSEWHERE".split()
    held = {case[0] for name in tables for case in promises.of(getattr(promises, name))}
    assert held == known and len(known) > 60


def test_only_rank_zero_speaks_at_once(monkeypatch, capsys):
    """Eight ranks read the same wrong flag, and eight messages would hide it: the others wait, and
    the launcher ends them. A rank that alone sees a mistake does say so."""
    waited = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr("time.sleep", lambda s: waited.append((s, capsys.readouterr().err)))
    with pytest.raises(SystemExit):
        program(lambda: get_args("sft", "--max_seq_len 1"))
    assert waited == [(20, "")]
    assert capsys.readouterr().err.startswith("error: rank 3: --max_seq_len")


# --------------------------------------------------------------------------------------------------
# What is taken
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("column, name", enumerate(["opt-1.3b", "llama-2-7b"]))
def test_the_recipe_is_deepspeed_chats_number_for_number(script, column, name):
    args = get_args(script, preset=f"--preset {name} ")
    expected = {**DSC_ALL, "data_path": DSC_DATA.get((script, column), BLEND)}
    for flag, *both in map(str.split, re.split(r"\||\n", DSC[script].strip())):
        value = both[0] if both[column] == "=" else both[column]
        expected[flag] = None if value == "None" else float(value)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("script, rows, stage", [("sft", 64, 2), ("reward", 32, 1), ("ppo", 32, 2)])
def test_eight_gpus_get_the_recipes_batches(script, rows, stage):
    """What docs/runs.md says. The recipe's stage 0 is 1 in bf16: docs/deepspeed.md."""
    args = get_args(script, "--dtype bf16", "--preset opt-1.3b ")
    name = "training" if script == "ppo" else "train"
    size = getattr(args, f"per_device_{name}_batch_size")
    config = common.ds_config(args, size, args.gradient_accumulation_steps)
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert batch * 8 == rows and config["zero_optimization"]["stage"] == stage


# --------------------------------------------------------------------------------------------------
# Recipes
# --------------------------------------------------------------------------------------------------
FILES = sorted(declaring.RECIPES.glob("*/*.flags"))


def flags_in(file):
    """Returns {flag: value} of a flags file, read by the script that it is named for."""
    return words_in(file.stem, [f"@{file}"])


def words_in(script, words):
    """Returns {flag: value} of what stands in `words`, read by a script."""
    parser = parser_of(script)
    parser.fromfile_prefix_chars = "@"
    return declaring.stated(parser, words)


def run_of(folder, script="sft", flags="", **facts):
    """Writes the args.json that a run leaves in `folder`. Returns its flags."""
    args = get_args(script, f"{flags} --output_dir {folder}")
    record = {**vars(args), "script": script, "format": declaring.FORMAT, "data_fingerprint": 1}
    record["left_open"] = args.declared.left_open
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps(record | facts))
    return args


def refusal_of(script, words):
    """Returns rule and words with which a command line is refused."""
    with pytest.raises(Refused) as caught:
        SCRIPTS[script].get_args(shlex.split(words))
    return caught.value.rule, caught.value.words


def test_the_recipes_are_these():
    found = {script: declaring.presets(script) for script in SCRIPTS}
    both = ["toy", "arithmetic", "llama-2-7b", "opt-1.3b", "qwen2.5-0.5b", "qwen2.5-0.5b-grpo"]
    small = ["hh", "sentiment"]  # all three steps with SmolLM2
    assert {name: set(of) for name, of in found.items()} == {
        "sft": {*both, *small},
        "ppo": {*both, *small, "smollm2"},
        "reward": {"toy", *both[2:5], *small},
    }
    others = {"toy", "__pycache__"}  # the toy's flags are a dict in each script
    folders = {folder for folder in declaring.RECIPES.iterdir() if folder.name not in others}
    assert {file.parent for file in FILES} == folders
    for folder in folders:
        text = (folder / "README.md").read_text()
        assert f"--preset {folder.name}" in text and "reached" in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_each_recipe_runs_as_it_is_written(file):
    """What the file shows is what runs: nothing multiplies a learning rate for adapters. And
    --preset NAME is short for @recipes/NAME/SCRIPT.flags. Its first line says what it is for."""
    script = {**SCRIPTS, "dpo": dpo}[file.stem]
    args = script.get_args(["--preset", file.parent.name])
    assert flags_in(file).items() <= vars(args).items()
    assert vars(script.get_args([f"@{file}"])) == vars(args)
    purpose = file.read_text().splitlines()[0]
    assert re.fullmatch(r"# [A-Z][^\n]{20,}\.", purpose), purpose


@pytest.mark.parametrize("script", SCRIPTS)
def test_any_flag_overrides_its_recipe(script):
    known = parser_of(script)._option_string_actions
    others = "--allow_unstable 1 --per_device_training_batch_size 1 --advantage reinforce "
    others = (others + "--samples_per_prompt 1") * (script == "ppo")
    for name in declaring.presets(script):
        file = declaring.RECIPES / name / f"{script}.flags"
        toy = declaring.words_of(SCRIPTS[script].TOY)
        for flag, value in words_in(script, toy if name == "toy" else [f"@{file}"]).items():
            if isinstance(value, int | float):
                new = max(known[f"--{flag}"].least, 1)
                args = get_args(script, f"{others} --{flag} {new}", f"--preset {name} ")
                assert getattr(args, flag) == new


def test_a_flags_file_may_begin_with_a_byte_order_mark(tmp_path):
    """As some editors write it: the first flag would be an unknown one, which looks like it."""
    (tmp_path / "my.flags").write_bytes(b"\xef\xbb\xbf--seed 7\r\n")
    assert get_args("sft", f"@{tmp_path}/my.flags").seed == 7


def test_a_home_is_no_folder_of_that_name(monkeypatch):
    """Of --output_dir=~/x shells do not expand the ~, and who deletes a folder ~ deletes much."""
    monkeypatch.setenv("HOME", "/somewhere/ada")
    assert get_args("sft", "--output_dir=~/x").output_dir == "/somewhere/ada/x"


def test_a_file_of_ones_own(tmp_path, monkeypatch):
    """A flag a line, `#` begins a comment, and what stands later counts. A preset counts as
    standing first, wherever it is named."""
    monkeypatch.chdir(tmp_path)
    mine = Path("mine.flags")
    mine.write_text(
        """# what I change
        --preset opt-1.3b

        --learning_rate 1e-4   # it's ten times DeepSpeed-Chat's
        --data_path "my data.jsonl" part#2.jsonl 'take #3.jsonl' Ada\\'s  # don't "quote" me
        --seed=5"""
    )
    args = sft.get_args(["@mine.flags", "--seed", "6"])
    assert (args.preset, args.seed, args.learning_rate) == ("opt-1.3b", 6, 1e-4)
    assert args.data_path == ["my data.jsonl", "part#2.jsonl", "take #3.jsonl", "Ada's"]
    assert args.num_train_epochs == 16
    assert sft.get_args(["--seed", "6", "@mine.flags"]).seed == 5
    Path("more.flags").write_text("--seed 7\n--max_steps 3")
    args = sft.get_args(["@mine.flags", "@more.flags", "--max_steps", "4", "--preset", "toy"])
    assert (args.seed, args.max_steps, args.preset) == (7, 4, "toy")
    assert args.learning_rate == 1e-4 and args.num_train_epochs == 5
    copied = (declaring.RECIPES / "opt-1.3b/sft.flags").read_text()
    Path("copy.flags").write_text(re.sub("--zero_stage.*", "--zero_stage 1", copied))
    args, named = sft.get_args(["@copy.flags"]), sft.get_args(["--preset", "opt-1.3b"])
    assert vars(args) == {**vars(named), "zero_stage": 1}


def test_a_file_stands_alone_where_a_model_is_named_and_no_preset(tmp_path):
    """No number comes from a recipe that nobody has named: what the file leaves out has the flag's
    own default, and what has none is refused by its name."""
    mine = tmp_path / "mine.flags"
    whole = flags_in(declaring.RECIPES / "opt-1.3b/sft.flags").keys() - {"preset"}
    text = re.sub("--preset.*", "", (declaring.RECIPES / "opt-1.3b/sft.flags").read_text())
    mine.write_text(text)
    args = sft.get_args([f"@{mine}"])
    assert args.preset is None and args.num_train_epochs == 16
    own = {flag.dest: flag.default for flag in parser_of("sft")._actions}
    assert all(
        getattr(args, name) == own[name] for name in own.keys() & {"lora_dim", "num_samples"}
    )
    assert args.declared.given == whole
    mine.write_text("--model_name_or_path my/model\n--learning_rate 1e-4")
    rule, words = refusal_of("sft", f"@{mine}")
    assert rule == "wrong-flag" and "--num_train_epochs" in words and "--data_path" in words
    assert "--learning_rate" not in words and "--seed" not in words
    mine.write_text("--learning_rate 1e-4")  # no model: over the toy
    args = sft.get_args([f"@{mine}"])
    assert (args.preset, args.learning_rate, args.num_train_epochs) == ("toy", 1e-4, 5)


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "No such file.*mine.flags"),
        ("--seed 1\n--learning_rat 1", "unrecognized arguments: --learning_rat 1"),
        ("--seed x", "--seed.*invalid int"),
        ("--preset nope", "nope.*opt-1.3b"),
        ("--output_dir 'a", "No closing quotation"),
        ("learning_rate 1", "unrecognized arguments: learning_rate 1"),
        ("--kl_target 6", "--kl_target left: see variants/adaptive-kl"),
    ],
)
def test_what_is_wrong_in_a_flags_file_is_refused_in_argparses_words(
    tmp_path, monkeypatch, text, said
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.flags").write_text(text)
    found = refusal_of("sft", "@mine.flags --seed 3")
    assert found[0] == "wrong-flag" and re.search(said, found[1], re.S), found


def test_a_flag_that_left_is_refused_with_its_place():
    for flag, place in declaring.LEFT.items():
        rule, words = refusal_of("sft", f"--preset toy --{flag} 1")
        assert rule == "wrong-flag" and f"--{flag} left: {place}" in words


def test_a_forks_toy_is_read_as_a_flags_file_is(monkeypatch):
    """Of any type that a flag has. A flag that does not exist would change nothing, in silence."""
    more = dict(offload=True, zero_stage=3, group_by_length=0)
    monkeypatch.setattr(sft, "TOY", {**sft.TOY, **more, "columns": "prompt=a b"})
    args = get_args("sft")
    assert (args.offload, args.zero_stage, args.group_by_length) == (True, 3, 0)
    assert args.columns == {"prompt": "a b"}
    monkeypatch.setattr(sft, "TOY", {"learning_rat": 1})
    assert "--learning_rat 1" in refusal_of("sft", "--preset toy")[1]


def test_the_toy_runs_if_no_model_is_named_and_from_any_folder(tmp_path, monkeypatch):
    """Its files lie in this project; output/ is where one stands."""
    monkeypatch.chdir(tmp_path)
    args = get_args("sft", preset="")
    assert args.preset == "toy" and args.output_dir == "output/sft"
    assert (declaring.ROOT / "recipes/toy/data").samefile(args.data_path[0])
    assert (declaring.ROOT / "recipes/toy/model").samefile(args.model_name_or_path)
    assert declaring.recipe_note(args) == ""


def test_a_model_without_a_recipe_is_refused_with_the_list():
    """Another recipe would bring other rates, LoRA, another batch: who names the model says which.
    Each line of the list says what a recipe is for."""
    rule, words = refusal_of("sft", "--model_name_or_path some/model --learning_rate 1e-4")
    assert rule == "no-recipe" and words.startswith("--model_name_or_path some/model: ")
    listed = dict(re.findall(r"^  --preset (\S+): (.+)", words, re.M))
    assert listed == declaring.presets("sft") and len(listed) == 8
    assert listed["qwen2.5-0.5b"].startswith("SFT with LoRA") and "@FILE" in words
    flags = "--reward_fn recipes/toy/gold.py:gold --critic_model_name_or_path some/critic"
    rule, words = refusal_of("ppo", flags)
    assert rule == "no-recipe" and "--critic_model_name_or_path some/critic" in words
    args = get_args("sft", "--model_name_or_path some/model", "--preset qwen2.5-0.5b ")
    assert args.model_name_or_path == "some/model" and args.lora_dim == 32


def test_the_next_step_takes_the_preset_of_the_folder_that_it_starts_from(tmp_path):
    """Also of best/, ema/ and critic/, which lie in the run's folder."""
    run_of(tmp_path / "run", preset="opt-1.3b", lora_dim=4)
    for place in ("run", "run/best"):
        model = tmp_path / place
        args = get_args("reward", f"--model_name_or_path {model}", "")
        assert args.preset == "opt-1.3b" and args.learning_rate == 5e-5
        assert f"{model}, trained with --preset opt-1.3b\n" in declaring.recipe_note(args)
    args = get_args("reward", f"--model_name_or_path {model} --preset toy", "")
    assert args.preset == "toy"
    run_of(tmp_path / "run", preset="arithmetic")  # which has no reward model
    assert refusal_of("reward", f"--model_name_or_path {model}")[0] == "no-recipe"


# --------------------------------------------------------------------------------------------------
# --resume
# --------------------------------------------------------------------------------------------------
def test_a_resumed_run_has_the_flags_that_it_was_begun_with(tmp_path, capsys):
    """Neither the toy's nor a preset's: 0 stays 0, and None stays to be filled in by the script."""
    more = "--kl_coef 0 --actor_learning_rate 1e-3 --num_eval_prompts 7 --lam 0 --log_kl 1"
    began = run_of(tmp_path / "run", "ppo", f"{more} --data_path mine.jsonl --zero_stage 1")
    args = ppo.get_args(["--resume", "--output_dir", str(tmp_path / "run")])
    assert vars(args) == {**vars(began), "resume": True}
    assert (args.kl_coef, args.lam, args.gold_fn) == (0, 0, None)
    assert args.declared.left_open == began.declared.left_open
    assert capsys.readouterr().out == ""


def test_a_flag_on_the_line_of_resume_overrides_and_is_named(tmp_path, capsys):
    """Also one of a file. What follows from a flag follows from the new one."""
    (tmp_path / "more.flags").write_text("--kl_coef 0")
    began = run_of(tmp_path / "run", "ppo", "--zero_stage 1 --seed 5")
    words = ["--resume", "--output_dir", str(tmp_path / "run"), "--actor_learning_rate", "1e-4"]
    args = ppo.get_args([*words, "--zero_stage", "2", f"@{tmp_path}/more.flags", "--seed", "5"])
    assert (args.kl_coef, args.actor_learning_rate, args.zero_stage) == (0, 1e-4, 2)
    assert (args.actor_zero_stage, args.gold_fn) == (2, began.gold_fn)
    assert capsys.readouterr().out.splitlines() == [
        "--actor_learning_rate was 0.0002 and is now 0.0001",
        "--kl_coef was 0.05 and is now 0.0",
        "--zero_stage was 1 and is now 2",
    ]
    args = ppo.get_args([*words, "--num_train_epochs", "2"])
    assert (args.num_train_epochs, args.max_steps) == (2, -1)  # epochs that are asked for are made


OTHERS = {
    "seed": "--seed 6",
    "data_path": "--data_path other.jsonl",
    "data_split": "--data_split 4,5,2",
    "columns": "--columns prompt=question",
    "actor_model_name_or_path": "--actor_model_name_or_path other",
    "reward_model_name_or_path": "--reward_model_name_or_path judge other",
    "reward_fn": "--reward_fn score.py:words",
    "preset": "--preset arithmetic",
}


@pytest.mark.parametrize("flag", OTHERS)
def test_what_makes_a_run_this_run_is_refused_if_it_is_another(tmp_path, flag):
    """Of a path the last part is compared: folders may have moved."""
    flags = "--data_path a/my.jsonl --reward_fn a/score.py:length --reward_model_name_or_path judge"
    began = run_of(tmp_path / "run", "ppo", f"{flags} --actor_model_name_or_path a/actor")
    go_on = f"--resume --output_dir {tmp_path}/run "
    rule, words = refusal_of("ppo", go_on + OTHERS[flag])
    assert rule == "flag-changed" and f"--{flag} was" in words
    args = get_args("ppo", go_on + flags.replace("a/", "b/"), "")
    assert args.data_path == ["b/my.jsonl"] and args.reward_fn == ["b/score.py:length"]
    assert args.gold_fn == began.gold_fn and args.actor_model_name_or_path == "a/actor"


def test_a_run_of_another_script_or_version_is_not_resumed(tmp_path):
    run_of(tmp_path / "run")
    go_on = f"--resume --output_dir {tmp_path}/run"
    assert sft.get_args(go_on.split()).resume
    assert refusal_of("reward", go_on)[0] == "resume-another"
    for facts in (dict(format=1), dict(format=None)):
        run_of(tmp_path / "run", **facts)
        rule, words = refusal_of("sft", go_on)
        assert rule == "resume-another" and "another version of this project" in words
    assert "--output_dir" in refusal_of("sft", "--resume")[1]


def test_what_is_declared_is_beside_the_flags_and_not_among_them():
    args = get_args("ppo", "--seed=7 --lam 0.5")
    assert "declared" not in vars(args) and not any(name[0] == "_" for name in vars(args))
    declared = copy.deepcopy(args).declared
    assert declaring.of_role(args, "actor").declared == declared
    assert declared.script == "ppo" and declared.given == {"preset", "seed", "lam"}
    assert "whiten" in declared.left_open and args.whiten == 1


def test_one_model_of_ppo_has_flags_as_other_scripts_have_them():
    args = get_args("ppo", "--critic_zero_stage 1 --critic_lora_dim 4")
    critic = declaring.with_flags(declaring.of_role(args, "critic"), dropout=None)
    assert (critic.zero_stage, critic.lora_dim, critic.dropout) == (1, 4, None)
    assert critic.learning_rate == args.critic_learning_rate
    assert declaring.of_role(args, "actor").zero_stage == args.zero_stage == 2


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("", True),
        ("--data_path mine.jsonl", False),
        ("--data_path mine.jsonl --gold_fn GOLD", True),
    ],
)
def test_a_presets_gold_score_goes_with_its_data(flags, kept):
    """It knows the toy's questions only: with other data it stays only if it is asked for."""
    gold = f"{declaring.ROOT}/recipes/toy/gold.py:gold"
    assert get_args("ppo", flags.replace("GOLD", gold)).gold_fn == (gold if kept else None)


@pytest.mark.parametrize(
    "script, flags, dropped",
    [
        ("ppo", "--num_train_epochs 1", "max_steps"),
        ("ppo", "--preset smollm2 --num_train_epochs 1", "max_steps"),
        ("sft", "--preset qwen2.5-0.5b-grpo --data_path mine.jsonl", "columns"),
        ("sft", f"@{declaring.RECIPES}/qwen2.5-0.5b-grpo/sft.flags --data_path a.jsonl", "columns"),
    ],
)
def test_what_a_recipe_says_beside_a_flag_goes_with_it(script, flags, dropped):
    """Epochs that somebody asks for are made, and other data have other columns."""
    preset = flags.partition("--num")[0].partition("--data")[0]
    assert getattr(get_args(script, preset), dropped) not in (None, -1)
    assert getattr(get_args(script, flags), dropped) in (None, -1)


def test_only_a_judge_needs_the_actors_eos(monkeypatch):
    """In chats that is the end of turn. A critic's folder may name another: it is trained on."""
    actor, other = (SimpleNamespace(get_vocab=dict, eos_token=end) for end in ("<end>", "</s>"))
    found = dict(has_weights=True, load_config=None, load_tokenizer=other, refuse_other_kind=None)
    for name, value in found.items():
        monkeypatch.setattr(folders, name, lambda *args, value=value, **options: value)
    args = get_args("ppo", "--critic_model_name_or_path C --reward_fn recipes/toy/gold.py:gold")
    ppo_flags.check_models(args, actor)
    args.reward_model_name_or_path = ["C"]
    with pytest.raises(Refused, match="C has another vocabulary or EOS"):
        ppo_flags.check_models(args, actor)


@pytest.mark.parametrize("script, rows", [("sft", 48), ("reward", 32), ("ppo", 64)])
def test_the_banner_says_when_a_step_has_other_rows_than_the_recipes(script, rows):
    """The toy's numbers are those of two ranks."""
    args = get_args(script)
    for found, said in ((rows, ""), (rows // 2, f"tuned for {rows}:"), (2 * rows, f"for {rows}:")):
        assert said in declaring.rows_note(args, found)
        assert bool(said) == bool(declaring.rows_note(args, found))
    assert declaring.rows_note(get_args("sft", preset="--preset opt-1.3b "), 5) == ""
    group = get_args("ppo", "--samples_per_prompt 4")
    assert declaring.rows_note(group, 16) == ", 4 responses to each"
    assert "tuned for 16:" in declaring.rows_note(group, 8)


def test_a_recipe_that_turns_lora_on_again_says_so(tmp_path):
    """Where SFT trained all weights, a forgotten --lora_dim 0 is LoRA, at the rate given for all
    weights perhaps."""
    run_of(tmp_path / "run", preset="qwen2.5-0.5b", lora_dim=0)
    model = tmp_path / "run"
    args = get_args("reward", f"--model_name_or_path {model}", "")
    assert "without LoRA: --lora_dim 0 goes on so" in declaring.recipe_note(args)
    flags = f"--actor_model_name_or_path {model} --critic_model_name_or_path some/model"
    for others, count in (("", 1), (" --actor_lora_dim 0", 0)):
        said = declaring.recipe_note(get_args("ppo", flags + others, ""))
        assert said.count("without LoRA: --actor_lora_dim 0") == count


def test_what_ppos_flags_leave_open_follows_from_others():
    args = get_args("ppo", "--advantage grpo --samples_per_prompt 4 --kl_in loss")
    assert (args.has_critic, args.compares_groups, args.kl_estimator) == (False, True, "k3")
    args = get_args("ppo", "--gradient_accumulation_steps 2")
    assert (args.has_critic, args.kl_estimator, args.whiten) == (True, "k1", 1)
    assert args.reward_model_name_or_path == [args.critic_model_name_or_path]
    assert args.max_seq_len == 32 + 48 and args.rollout_batch_size == 64
    assert get_args("ppo", "--reward_fn f.py:f").reward_model_name_or_path == []
    sizes = ppo.Sizes(args)
    assert (sizes.prompts, sizes.batches_per_step, sizes.responses) == (32, 2, 64)
    assert (sizes.micro_batches, sizes.updates) == (2, 1)


def test_a_group_may_be_larger_than_a_micro_batch():
    """Of 16 long responses a device may not hold the logits of more than one. The step is the same:
    two prompts, 32 responses, one update."""
    for rows, accumulation in ((32, 1), (16, 2), (8, 4), (1, 32)):
        flags = "--advantage grpo --samples_per_prompt 16"
        flags += f" --gradient_accumulation_steps {accumulation}"
        for batch in ("generation", "training"):
            flags += f" --per_device_{batch}_batch_size {rows}"
        sizes = ppo.Sizes(get_args("ppo", flags))
        assert sizes.prompts * sizes.batches_per_step == 2, rows
        assert (sizes.responses, sizes.micro_batches, sizes.updates) == (32, accumulation, 1)
        drawn = [[{"row": 0}] * sizes.prompts] * sizes.batches_per_step
        groups = [request["group"] for request in sizes.requests(drawn)]
        assert groups == [0] * 16 + [1] * 16


def test_filters_of_sampling_say_what_they_do_to_kl(capsys, tmp_path):
    """Also those of a recipe."""
    (tmp_path / "mine.flags").write_text("--top_p 0.9")
    for flags in ("--top_p 0.9", f"@{tmp_path}/mine.flags"):
        get_args("ppo", flags)
        assert "--top_p or --top_k: KL" in capsys.readouterr().out
    get_args("ppo", "--top_p 1")
    assert capsys.readouterr().out == ""


def test_kl_in_the_reward_of_grpo_is_warned_of(capsys):
    """GRPO divides it by the group's deviation: SmolLM2 learned nothing with it (course/keys.md),
    and does learn with KL in the loss, or with RLOO."""
    grpo, rloo = (f"--advantage {name} --samples_per_prompt 2" for name in ("grpo", "rloo"))
    cases = {grpo: True, f"{grpo} --kl_in loss": False, f"{grpo} --kl_coef 0": False, rloo: False}
    for flags, warned in cases.items():
        get_args("ppo", flags)
        assert ("grpo scales up KL" in capsys.readouterr().out) == warned


def test_states_that_live_on_the_cpu_do_not_move():
    """Whatever DeepSpeed can do: --adam_offload has them there already."""
    assert not get_args("ppo", "--offload_states --adam_offload").offload_states


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_opens_with_the_header_and_explains_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stop:
        get_args(script, "--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and SCRIPTS[script].__doc__.splitlines()[0] in text
    known = {action.dest: action for action in parser_of(script)._actions}
    for name, action in known.items():
        assert name == "help" or f"--{name}" in text
        assert len(action.help) > 15
    assert len(known) - 1 <= MOST[script]


# --------------------------------------------------------------------------------------------------
# The default dtype is what is fast on the hardware at hand
# --------------------------------------------------------------------------------------------------
def test_a_cpu_computes_in_fp32():
    """Most CPUs emulate bf16, many times slower. DeepSpeed says of every CPU that it has it."""
    assert declaring.fast_dtype() == "fp32"


@pytest.mark.parametrize("emulated, dtype", [(False, "bf16"), (True, "fp16")])
def test_asking_a_gpu_for_bf16_puts_nothing_on_it(monkeypatch, emulated, dtype):
    """V100 and T4 emulate it. DeepSpeed asks with a tensor on device 0, in every rank."""
    pretend(monkeypatch, device="cuda")

    def supported(including_emulation=True):
        assert not including_emulation, "this makes a tensor"
        return not emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert declaring.fast_dtype() == dtype
