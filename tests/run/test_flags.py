"""Flags: what a script runs, and what overrides what. What is refused is in tests/promises.py."""

import json
import re
import shlex
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator

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


def get_args(script, flags="", preset="--preset toy "):
    return {**SCRIPTS, "dpo": dpo}[script].get_args(shlex.split(preset + flags))


def refusal_of(script, flags, preset=""):
    """Returns rule and words with which a command line is refused."""
    with pytest.raises(Refused) as caught:
        get_args(script, flags, preset)
    return caught.value.rule, caught.value.words


def parser_of(script):
    """Returns the parser that a script declares its flags for."""
    found = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(declaring, "parse", lambda parser, *_, **__: found.append(parser) or 1 / 0)
        get_args(script)
    return found[0]


def read(script, words):
    """Returns {flag: value} of what stands in `words`, without defaults."""
    return declaring.stated(parser_of(script), words)


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
    monkeypatch.setattr("time.sleep", lambda s: waited.append((s, capsys.readouterr().err)))
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank, where in (("3", "rank 3: "), ("0", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            program(lambda: get_args("sft", "--max_seq_len 1"))
        assert capsys.readouterr().err.startswith(f"error: {where}--max_seq_len")
    assert waited == [(20, "")]


def test_a_flag_that_left_is_refused_with_its_place():
    for flag, place in declaring.LEFT.items():
        for words in (f"--seed 1 --{flag} 1", f"--{flag}=1"):
            rule, said = refusal_of("sft", words)
            assert rule == "wrong-flag" and f"--{flag} left: {place}" in said


# --------------------------------------------------------------------------------------------------
# Recipes
# --------------------------------------------------------------------------------------------------
FILES = sorted(declaring.RECIPES.glob("*/*.flags"))
OPT = (declaring.RECIPES / "opt-1.3b/sft.flags").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("column, name", enumerate(["opt-1.3b", "llama-2-7b"]))
def test_the_recipe_is_deepspeed_chats_number_for_number(script, column, name):
    args = get_args(script, preset=f"--preset {name} ")
    expected = {**DSC_ALL, "data_path": DSC_DATA.get((script, column), BLEND)}
    for flag, *both in map(str.split, re.split(r"\||\n", DSC[script].strip())):
        value = both[0] if both[column] == "=" else both[column]
        expected[flag] = None if value == "None" else float(value)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_each_recipe_runs_as_it_is_written(file):
    """What the file shows is what runs: nothing multiplies a learning rate for adapters. And
    --preset NAME is short for @recipes/NAME/SCRIPT.flags."""
    name, script = file.parent.name, file.stem
    args = vars(get_args(script, preset=f"--preset {name}"))
    assert read(script, [f"@{file}"]).items() <= args.items()
    assert vars(get_args(script, preset=f"@{file}")) == args


POOL = {  # flags of sft.py, and values that are none of a recipe
    "preset": ["toy", "opt-1.3b", "qwen2.5-0.5b-grpo"],
    "model_name_or_path": ["some/model", "other/model"],
    "seed": [0, 6],
    "learning_rate": [0.0, 0.2],
    "gold_fn": ["f.py:f", "g.py:g"],
    "data_path": [["my data.jsonl"], ["a.jsonl", "b.jsonl"]],
    "columns": ["prompt=a", "prompt=b"],
    "num_train_epochs": [1, 2],
    "max_steps": [0, 4],
}
PAIRS = {"gold_fn": "data_path", "columns": "data_path", "max_steps": "num_train_epochs"}


def some_of(random, pool):
    """Returns {flag: value} of some flags."""
    return {flag: random.choice(pool[flag]) for flag in pool if random.random() < 0.35}


def line_of(flags):
    return shlex.join(declaring.words_of(flags))


@pytest.mark.parametrize("seed", range(60))
def test_any_flag_overrides_its_recipe(seed, tmp_path):
    """A recipe counts as standing first, wherever it is named, and what stands later counts. No
    number comes from a recipe that nobody has named: where a model is named and no recipe, a file
    stands alone, and what it leaves out has the flag's own default, or is refused by its name.
    What is said beside the data or the epochs (PAIRS) goes with them: a gold score knows its own
    questions only."""
    random = Random(seed)
    typed, file = some_of(random, POOL), random.choice([{}, *4 * [some_of(random, POOL)]])
    lines = [line_of(typed), f"@{tmp_path}/mine.flags" if file else ""]
    (tmp_path / "mine.flags").write_text(line_of(file).replace(" --", "\n\n--"))
    given = typed | file
    if random.random() < 0.5:
        lines, given = lines[::-1], file | typed

    own, (_, *flags) = vars(parser_of("sft").parse_args([])), parser_of("sft")._actions
    name = given.get("preset", None if "model_name_or_path" in given else "toy")
    if not name and not file:
        assert refusal_of("sft", " ".join(lines))[0] == "no-recipe"
        return
    recipe = declaring.words_of(sft.TOY) * (name == "toy")
    recipe = recipe or [f"@{declaring.RECIPES / name / 'sft.flags'}"] if name else []
    expected = {**own, **read("sft", recipe), **given, "preset": name}
    for flag, other in PAIRS.items():
        for layer in (given, typed):
            if other in layer and flag not in layer:
                expected[flag] = own[flag]
    if isinstance(expected["columns"], str):
        expected["columns"] = {"prompt": expected["columns"][-1]}
    absent = [flag.dest for flag in flags if flag.needed and expected[flag.dest] is None]
    if absent:
        said = refusal_of("sft", " ".join(lines))[1]
        assert {*re.findall(r"--(\w+)", said)} == {*absent, "preset", "help"}
        return
    args = get_args("sft", " ".join(lines), "")
    assert vars(args) == {**expected, "dtype": args.dtype}
    assert args.declared.given == given.keys()


def test_a_home_is_no_folder_of_that_name(monkeypatch):
    """Of --output_dir=~/x shells do not expand the ~, and who deletes a folder ~ deletes much."""
    monkeypatch.setenv("HOME", "/somewhere/ada")
    assert get_args("sft", "--output_dir=~/x").output_dir == "/somewhere/ada/x"


def test_a_file_of_ones_own(tmp_path, monkeypatch):
    """A line is a flag, as one types it, and `#` begins a comment."""
    monkeypatch.chdir(tmp_path)
    Path("mine.flags").write_text(
        """# what I change
        --learning_rate 1e-4   # it's ten times DeepSpeed-Chat's
        --data_path "my data.jsonl" part#2.jsonl Ada\\'s  # don't "quote" me
        --model_name_or_path=recipes/toy/model"""
    )
    args = get_args("sft", "@mine.flags")
    assert args.data_path == ["my data.jsonl", "part#2.jsonl", "Ada's"]
    assert args.learning_rate == 1e-4
    Path("mine.flags").write_text("--output_dir 'a")
    assert refusal_of("sft", "@mine.flags") == ("wrong-flag", "No closing quotation\n  See --help.")


def test_a_forks_toy_is_read_as_a_flags_file_is(monkeypatch):
    """Of any type that a flag has. A flag that does not exist would change nothing, in silence."""
    more = dict(offload=True, zero_stage=3, group_by_length=0, columns="prompt=a b")
    monkeypatch.setattr(sft, "TOY", {**sft.TOY, **more})
    args = get_args("sft")
    assert {name: getattr(args, name) for name in more} == {**more, "columns": {"prompt": "a b"}}
    monkeypatch.setattr(sft, "TOY", {"learning_rat": 1})
    assert "--learning_rat 1" in refusal_of("sft", "")[1]


def test_the_toy_runs_if_no_model_is_named_and_from_any_folder(tmp_path, monkeypatch):
    """Its files lie in this project; output/ is where one stands."""
    monkeypatch.chdir(tmp_path)
    args = get_args("sft", preset="")
    assert args.preset == "toy" and args.output_dir == "output/sft"
    assert (declaring.ROOT / "recipes/toy/data").samefile(args.data_path[0])


def test_a_model_without_a_recipe_is_refused_with_the_list():
    """Another recipe would bring other rates, LoRA, another batch: who names the model says which.
    Each line of the list says what a recipe is for."""
    words = refusal_of("sft", "--model_name_or_path some/model")[1]
    listed = dict(re.findall(r"^  --preset (\S+): (.+)", words, re.M))
    assert listed == declaring.presets("sft") and {"toy", "opt-1.3b"} <= listed.keys()
    assert listed["qwen2.5-0.5b"].startswith("SFT with LoRA") and "@FILE" in words
    for role in ("actor", "critic"):
        flag = f"--{role}_model_name_or_path some/{role}"
        rule, words = refusal_of("ppo", f"--reward_fn recipes/toy/gold.py:gold {flag}")
        assert rule == "no-recipe" and words.startswith(f"{flag}: ")
    assert get_args("ppo", "--reward_model_name_or_path a/judge", "").preset == "toy"


def test_the_next_step_takes_the_preset_of_the_folder_that_it_starts_from(tmp_path):
    """Also of best/, ema/ and critic/, which lie in the run's folder."""
    begin(tmp_path / "run", preset="opt-1.3b")
    for place in ("run", "run/best"):
        model = f"--model_name_or_path {tmp_path / place} "
        assert get_args("reward", model, "").preset == "opt-1.3b"
        assert get_args("reward", model).preset == "toy"
    begin(tmp_path / "run", preset="arithmetic")  # which has no reward model
    assert refusal_of("reward", model)[0] == "no-recipe"


@pytest.mark.parametrize("script, rows", [("sft", 48), ("reward", 32), ("ppo", 64)])
def test_the_banner_says_when_a_step_has_other_rows_than_the_recipes(script, rows):
    """The toy's numbers are those of two ranks. Several responses to a prompt count as one row."""
    args = get_args(script)
    for samples in (1, 4):
        args.samples_per_prompt = samples
        few, same, many = (declaring.rows_note(args, n * rows // samples) for n in (0.5, 1, 2))
        assert same == "" and f"tuned for {rows // samples}:" in few == many
    assert declaring.rows_note(get_args("sft", preset="--preset opt-1.3b "), 5) == ""


# --------------------------------------------------------------------------------------------------
# --resume
# --------------------------------------------------------------------------------------------------
def begin(folder, script="sft", flags="", **facts):
    """Writes the args.json that a run leaves in `folder`. Returns its flags."""
    args = get_args(script, f"{flags} --output_dir {folder}")
    record = {**vars(args), "script": script, "format": declaring.FORMAT, "data_fingerprint": 1}
    record["left_open"] = args.declared.left_open
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps(record | facts))
    return args


OF_RUN = {  # with another value it would be another run; folders may have moved
    "preset": ["toy", "arithmetic"],
    "actor_model_name_or_path": ["a/actor", "b/actor", "a/other"],
    "reward_model_name_or_path": [["a/judge"], ["b/judge"], ["a/judge", "a/other"]],
    "reward_fn": [["a/f.py:f"], ["b/f.py:f"], ["a/f.py:g"]],
    "data_path": [["a/my.jsonl"], ["b/my.jsonl"], ["other.jsonl"]],
    "data_split": ["2,4,4", "4,4,2"],
    "columns": ["prompt=a", "prompt=b"],
    "seed": [0, 6],
}
MOVED = [flag for flag in OF_RUN if len(OF_RUN[flag]) == 3]
FREE = {
    "kl_coef": [0.0, 0.3],
    "lam": [0.0, 0.5],
    "zero_stage": [1, 2],
    "actor_dropout": [0.0, 0.1],
    "whiten": [0, 1],
    "gold_fn": ["f.py:f", "g.py:g"],
}


@pytest.mark.parametrize("seed", range(60))
def test_a_resumed_run_has_the_flags_that_it_was_begun_with(seed, tmp_path, capsys):
    """A resumed run has the flags that it was begun with, neither the toy's nor a preset's: 0 stays
    0, and what was left open follows from the others. What stands on its line, or in its file,
    overrides, and is named. Of a path the last part is compared: folders may have moved."""
    random, go_on = Random(seed), f"--resume --output_dir {tmp_path} "
    began = {flag: values[0] for flag, values in OF_RUN.items()} | some_of(random, FREE)
    more = some_of(random, FREE) | some_of(random, {flag: OF_RUN[flag][:2] for flag in MOVED})
    if random.random() < 0.5:
        flag = random.choice([*OF_RUN])
        more[flag] = OF_RUN[flag][-1]
    before = vars(begin(tmp_path, "ppo", f"{line_of(began)} --overwrite"))
    (tmp_path / "more.flags").write_text(line_of(more))
    go_on += random.choice([line_of(more), f"@{tmp_path}/more.flags"])
    if any(more.get(flag) == values[-1] for flag, values in OF_RUN.items()):
        rule, words = refusal_of("ppo", go_on)
        assert rule == "flag-changed" and f"--{flag} was" in words
        return
    capsys.readouterr()
    args = get_args("ppo", go_on, "")
    named = re.findall(r"^--(\w+) was", capsys.readouterr().out, re.M)
    given = read("ppo", shlex.split(line_of(more)))
    assert named == sorted(flag for flag in given if given[flag] != before[flag])
    afresh = get_args("ppo", f"{line_of(began | more)} --output_dir {tmp_path}")
    assert vars(args) == {**vars(afresh), "resume": True}
    assert args.declared.left_open == afresh.declared.left_open


def test_a_resumed_run_is_as_long_as_it_was_or_as_is_said(tmp_path, monkeypatch):
    go_on = f"--resume --output_dir {tmp_path}/run"
    begin(tmp_path / "run", flags="--max_steps 9 --num_train_epochs 3")
    assert get_args("sft", go_on, "").max_steps == 9
    # epochs that are asked for are made; a flag that is said again changes nothing
    assert get_args("sft", f"{go_on} --num_train_epochs 2", "").max_steps == -1
    assert get_args("sft", f"{go_on} --num_train_epochs 3", "").max_steps == 9
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "output/sft", flags="--max_steps 7")  # the toy's folder
    assert (
        vars(get_args("sft", "--resume", "")).items()
        >= {"max_steps": 7, "output_dir": "output/sft"}.items()
    )


# --------------------------------------------------------------------------------------------------
# What follows from flags
# --------------------------------------------------------------------------------------------------
def test_one_model_of_ppo_has_flags_as_other_scripts_have_them():
    """What is declared is beside the flags, and not among them."""
    args = get_args("ppo", "--critic_zero_stage 1 --critic_lora_dim 4")
    critic = declaring.with_flags(declaring.of_role(args, "critic"), dropout=None)
    assert (critic.zero_stage, critic.lora_dim, critic.dropout) == (1, 4, None)
    assert critic.learning_rate == args.critic_learning_rate and "dropout" not in vars(args)
    assert declaring.of_role(args, "actor").zero_stage == args.zero_stage == 2
    assert declaring.stages_of(args) == {1, 2}
    assert "declared" not in vars(args)


def test_a_critic_may_have_another_eos(monkeypatch):
    """In chats the actor's is the end of turn. A critic is trained on; a judge is refused, and so
    is either with another vocabulary: tests/promises.py."""
    actor, other = (SimpleNamespace(get_vocab=dict, eos_token=end) for end in ("<end>", "</s>"))
    found = dict(has_weights=True, load_config=None, load_tokenizer=other, refuse_other_kind=None)
    for name, value in found.items():
        monkeypatch.setattr(folders, name, lambda *args, value=value, **options: value)
    flags = "--critic_model_name_or_path C --reward_fn recipes/toy/gold.py:gold"
    ppo_flags.check_models(get_args("ppo", flags), actor)


GROUPS = "--samples_per_prompt 4 --advantage"
FOLLOWS = {  # flags, and what they leave open: whiten, has_critic, has_reference, kl_estimator
    "--gradient_accumulation_steps 2": (1, True, True, "k1"),
    "--whiten 0 --kl_coef 0": (0, True, False, "k1"),
    "--advantage reinforce --kl_coef 0 --log_kl 1": (1, False, True, "k1"),
    f"{GROUPS} rloo": (0, False, True, "k1"),
    f"{GROUPS} grpo --whiten 1 --kl_in loss": (1, False, True, "k3"),
}


@pytest.mark.parametrize("flags", FOLLOWS)
def test_what_ppos_flags_leave_open_follows_from_others(flags):
    """Only GAE has a critic. Where no KL is asked for there is no reference."""
    args = get_args("ppo", flags)
    found = args.whiten, args.has_critic, args.has_reference, args.kl_estimator
    assert found == FOLLOWS[flags] and args.compares_groups == (GROUPS in flags)
    assert args.reward_model_name_or_path == [args.critic_model_name_or_path]
    assert args.max_seq_len == 32 + 48


def test_the_sizes_and_judges_of_a_rollout_follow():
    assert get_args("ppo", "--gradient_accumulation_steps 2").rollout_batch_size == 64
    assert get_args("ppo", "--reward_fn f.py:f").reward_model_name_or_path == []
    # states that live on the CPU do not move
    assert not get_args("ppo", "--offload_states --adam_offload").offload_states


@pytest.mark.parametrize("script, most", [("sft", 47), ("reward", 47), ("ppo", 86)])
def test_help_opens_with_the_header_and_explains_every_flag(script, most, capsys):
    with pytest.raises(SystemExit) as stop:
        get_args(script, "--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and SCRIPTS[script].__doc__.splitlines()[0] in text
    _, *known = parser_of(script)._actions
    assert all(f"--{flag.dest}" in text and len(flag.help) > 15 for flag in known)
    assert len(known) <= most


# --------------------------------------------------------------------------------------------------
# The default dtype is what is fast on the hardware at hand
# --------------------------------------------------------------------------------------------------
def test_a_cpu_computes_in_fp32(tmp_path):
    """Most CPUs emulate bf16, many times slower. DeepSpeed says of every CPU that it has it."""
    (tmp_path / "mine.flags").write_text(re.sub("--dtype.*", "", OPT))
    assert get_args("sft", f"@{tmp_path}/mine.flags", "").dtype == "fp32"


@pytest.mark.parametrize("emulated, dtype", [(False, "bf16"), (True, "fp16")])
def test_asking_a_gpu_for_bf16_puts_nothing_on_it(monkeypatch, emulated, dtype):
    """V100 and T4 emulate it. DeepSpeed asks with a tensor on device 0, in every rank."""

    def supported(including_emulation=True):
        assert not including_emulation, "this makes a tensor"
        return not emulated

    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert declaring.fast_dtype() == dtype
