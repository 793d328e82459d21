"""The README's promises: its commands parse, its sizes are counted, its numbers
are the presets'."""

import ast
import doctest
import functools
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import common
import ppo
import reward
import sft
from machinery.base import statistics
from machinery.models import saving
from machinery.rollout import kl_controller

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "toy"), str(ROOT / "tools")]
import gold
import look
import talk

SCRIPTS = {"sft.py": sft, "reward.py": reward, "ppo.py": ppo}
MACHINERY = sorted((ROOT / "machinery").glob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))
# What a file may have, comments included: bytes, and syntax nodes a statement (what a statement
# asks of its reader: nanoGPT's train.py has 9.5, TRL's ppo_trainer.py 11.9)
BUDGETS = {
    "sft.py": (7_500, 12.5),
    "reward.py": (9_500, 12.5),
    "ppo.py": (27_000, 12.5),
    "common.py": (18_000, 12.5),
    **{str(file.relative_to(ROOT)): (16_000, 13.5) for file in [*MACHINERY, *TOOLS]},
    "machinery/flags/presets.py": (16_000, 50),  # tables of numbers
}
WIDEST_LINE = 100  # columns, in every .py file of the project
BYTES_A_LINE = 52  # on average: lines may be wide, and a page of wide lines is tiring
# lines, in machinery; main() of a script tells its whole story, and may be longer
LONGEST_FUNCTION = 60
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "labs").glob("*.md"))


def commands():
    """Every line of an indented or fenced block of README and docs that starts
    one of the three scripts, or a tool."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(
            r"^(?:    )?((?:deepspeed|torchrun|python|srun|[A-Z_]+=\S+) "
            r".*?\b(?:sft|reward|ppo|talk|look)\.py.*)$",
            text,
            re.M,
        ):
            yield pytest.param(line.split("  #")[0], id=f"{page.name}: {line[:70]}")


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_docs_parses(line):
    """A command that a reader copies must be one that the scripts accept."""
    words = shlex.split(line, comments=True)
    programs = {**SCRIPTS, "tools/talk.py": talk, "tools/look.py": look}
    script = next(w for w in words if w in programs)
    programs[script].get_args(words[words.index(script) + 1 :])


def test_the_readme_shows_each_script():
    """An empty list of commands would pass the test above."""
    text = " ".join(str(p.values) for p in commands())
    assert all(script in text for script in SCRIPTS)


def test_every_flag_named_in_the_docs_exists():
    """A flag that was renamed in the code must not live on in the text."""
    known = set()
    for module in [*SCRIPTS.values(), talk, look]:
        known |= set(re.findall(r"--[a-zA-Z_0-9]+", help_of(module)))
    known |= set(re.findall(r'"(--[a-z_]+)"', (ROOT / "tests/bench.py").read_text()))
    launchers = {
        "--num_gpus",
        "--num_nodes",
        *("--model", "--model_args", "--tasks", "--exclude"),  # other tools'
        "--cpu",  # of gpu_check.py
        *("--cases", "--only", "--seconds"),  # of hostile.py
        *("--plot", "--jobs", "--runs"),  # of labs/run.py
        *("--nnodes", "--shutdown_timeout", "--signal"),  # of torchrun and Slurm
        "--nproc_per_node",
        "--node_rank",
        "--rdzv_backend",
        "--rdzv_endpoint",
        "--master_addr",
        "--master_port",
        "--hostfile",
        "--log_level",
        "--bind_cores_to_rank",
        "--help",
        "--ntasks",
        "--index",
        "--gpus",
        "--nodes",
        "--include",
    }
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-zA-Z_0-9]+", page.read_text()))
        assert used <= known | launchers, f"{page.name}: {sorted(used - known - launchers)}"


def test_what_the_docs_name_is_there():
    """A page that names a test or a function sends the reader there; names
    change, so they are looked up."""
    tests = "".join(f.read_text() for f in sorted((ROOT / "tests").glob("*.py")))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name}: {name}"
    row_of_five = r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \|$"
    for row in re.findall(row_of_five, (ROOT / "docs/ppo.md").read_text(), re.M)[2:]:
        for name in re.findall(r"`([\w.]+)", row):
            assert callable(looked_up(name)), name
    modules = "|".join(["common", *(file.stem for file in MACHINERY)])
    for page in PAGES:
        for name in re.findall(rf"`((?:{modules})\.(?!py\b|json)[\w.]+)`", page.read_text()):
            looked_up(name)
        for name, file in re.findall(r"`(\w+)`,? in `([\w/]+\.py)`", page.read_text()):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{page.name}: {name}"


def looked_up(name):
    """What a page calls `name`, of ppo.py, or `module.name`, of common.py or machinery."""
    module, _, rest = name.partition(".")
    if module == "common":
        return functools.reduce(getattr, rest.split("."), common)
    if (ROOT / f"machinery/{module}.py").exists():
        module = importlib.import_module(f"machinery.{module}")
        return functools.reduce(getattr, rest.split("."), module)
    return functools.reduce(getattr, name.split("."), ppo)


def help_of(module):
    """The text of --help."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        module.get_args(["--help"])
    return out.getvalue()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches_every_flag(script):
    """--help opens with the script's header and explains each flag, with its
    default unless it is a mere switch."""
    text = help_of(SCRIPTS[script])
    assert SCRIPTS[script].__doc__.strip().splitlines()[0] in text
    explained = dict(re.findall(r"^  --(\w+)(.*?)(?=^  --|^\S|\Z)", text, re.M | re.S))
    for name, value in vars(SCRIPTS[script].get_args(["--preset", "toy"])).items():
        if name in explained:  # (not what get_args works out itself)
            assert len(explained[name].split()) > 3 and (
                "[" in explained[name] or isinstance(value, bool)
            ), name
    assert {
        "preset",
        "data_path",
        "seed",
        "zero_stage",
        "dtype",
        "resume",
        "output_dir",
        "estimate",
    } <= set(explained)


@pytest.mark.parametrize("name", BUDGETS)
def test_size_budgets_hold(name):
    """The promise of the first screen: each file can be read in one sitting, comments included. Its
    bytes are counted and not only its lines: those can be bought by making lines denser, so what a
    line and a statement hold is bounded, too."""
    text, (most_bytes, most_nodes) = (ROOT / name).read_text(), BUDGETS[name]
    nodes = list(ast.walk(ast.parse(text)))
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    size, lines = len(text.encode()), len(text.splitlines())
    assert size <= most_bytes
    assert round(size / lines) <= BYTES_A_LINE
    assert round(len(nodes) / statements, 1) <= most_nodes


def test_the_budgets_are_of_all_files():
    """A new file at the top, or a folder in machinery, would else have no budget."""
    product = [*ROOT.glob("*.py"), *ROOT.glob("machinery/**/*.py"), *ROOT.glob("tools/**/*.py")]
    assert {str(file.relative_to(ROOT)) for file in product} == set(BUDGETS)


def test_no_line_is_too_wide():
    """What does not fit beside a second window is not read. The tests' and the toy's lines count,
    too."""
    files = [*ROOT.glob("*.py")]
    for folder in ("machinery", "tools", "tests", "toy", "docs", "labs", "variants"):
        files += (ROOT / folder).rglob("*.py")
    wide = [
        f"{file.relative_to(ROOT)}, line {number}: {len(line)}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if len(line) > WIDEST_LINE
    ]
    assert wide == []


@pytest.mark.parametrize("file", [*MACHINERY, *TOOLS], ids=lambda file: file.name)
def test_no_function_of_the_machinery_is_long(file):
    """A function that does one job fits a screen; one of 100 lines does several."""
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert long == []


@pytest.mark.parametrize("name", [*SCRIPTS, "common.py", "machinery/", "tools/"])
def test_the_size_table_is_counted(name):
    """The README's size of each file, and of the folder, in thousands of bytes, is right to within
    one of them, or a fiftieth."""
    stated = re.search(rf"`{name}` \| ([\d.]+) \|", (ROOT / "README.md").read_text())
    files = {"machinery/": MACHINERY, "tools/": TOOLS}.get(name, [ROOT / name])
    size = sum(file.stat().st_size for file in files) / 1000
    assert float(stated[1]) == pytest.approx(size, abs=1, rel=0.02)


WITH_EXAMPLES = [statistics, kl_controller, gold]


@pytest.mark.parametrize(
    "module",
    [common, sft, reward, ppo, gold]
    + [importlib.import_module(f"machinery.{file.stem}") for file in MACHINERY[1:]]
    + [importlib.import_module(file.stem) for file in TOOLS],
    ids=lambda module: module.__name__,
)
def test_examples_in_docstrings_run(module):
    """An example in a docstring is a promise, too."""
    result = doctest.testmod(module)
    assert result.failed == 0 and (result.attempted > 0 or module not in WITH_EXAMPLES)


def test_the_opt_preset_is_deepspeed_chats_recipe():
    """Number for number, as DeepSpeed-Chat's training scripts and READMEs have them."""
    a, b, c = (m.get_args(["--preset", "opt-1.3b"]) for m in (sft, reward, ppo))
    assert (a.model_name_or_path, b.model_name_or_path) == (
        "facebook/opt-1.3b",
        "facebook/opt-350m",
    )
    assert (a.learning_rate, b.learning_rate, c.actor_learning_rate, c.critic_learning_rate) == (
        9.65e-6,
        5e-5,
        9.65e-6,
        5e-6,
    )
    assert (a.weight_decay, b.weight_decay, c.actor_weight_decay, c.critic_weight_decay) == (
        0.0,
        0.1,
        0.0,
        0.0,
    )
    assert (a.num_train_epochs, b.num_train_epochs, c.num_train_epochs) == (16, 1, 1)
    # None: the model's own, on
    assert (a.dropout, b.dropout, c.actor_dropout, c.critic_dropout) == (None, 0.0, 0.0, None)
    assert (a.max_seq_len, b.max_seq_len, c.max_prompt_seq_len, c.max_answer_seq_len) == (
        512,
        512,
        256,
        256,
    )
    assert (a.per_device_train_batch_size, b.per_device_train_batch_size) == (8, 4)
    assert (
        c.per_device_generation_batch_size,
        c.per_device_training_batch_size,
        c.generation_batches,
        c.ppo_epochs,
    ) == (4, 4, 1, 1)
    assert (a.zero_stage, b.zero_stage, c.actor_zero_stage, c.critic_zero_stage) == (2, 0, 2, 2)
    assert (c.kl_coef, c.gamma, c.lam, c.clip, c.clip_value, c.clip_reward) == (
        0.1,
        1.0,
        0.95,
        0.2,
        0.2,
        5.0,
    )
    assert (c.enable_ema, c.ema_decay, c.unsup_coef, c.num_warmup_steps) == (1, 0.992, 27.8, 100)
    four = [
        "Dahoas/rm-static",
        "Dahoas/full-hh-rlhf",
        "Dahoas/synthetic-instruct-gptj-pairwise",
        "yitingxie/rlhf-reward-datasets",
    ]
    assert a.data_path == b.data_path == four and c.data_path == ["Dahoas/rm-static"]
    for x in (a, b, c):
        assert (x.adam_betas, x.max_grad_norm, x.lr_scheduler_type, x.seed, x.data_split) == (
            [0.9, 0.95],
            1.0,
            "cosine",
            1234,
            [2, 4, 4],
        )


def test_the_llama_preset_is_deepspeed_chats_recipe():
    """What its llama2/run_llama2_7b.sh have in other numbers than OPT's scripts, and no more."""
    differ = {
        sft: "num_train_epochs 4, per_device_train_batch_size 4, per_device_eval_batch_size 4",
        reward: """learning_rate 9.65e-06, per_device_train_batch_size 8,
                   per_device_eval_batch_size 8, data_path ['Dahoas/rm-static']""",
        ppo: """actor_weight_decay 0.1, critic_weight_decay 0.1, enable_ema 0, actor_zero_stage 3,
                per_device_generation_batch_size 1, per_device_training_batch_size 1,
                per_device_eval_batch_size 1, critic_zero_stage 3, rollout_batch_size 1""",
    }
    model = "model_name_or_path meta-llama/Llama-2-7b-hf"
    for script, words in differ.items():
        opt, llama = (
            vars(script.get_args(["--preset", name])) for name in ("opt-1.3b", "llama-2-7b")
        )
        names = [name for name in opt if name[0] != "_" and opt[name] != llama[name]]
        found = {f"{name} {llama[name]}" for name in names}
        expected = {" ".join(part.split()) for part in words.split(",")}
        own = {"preset llama-2-7b", "zero_stage 3", *([model] if script is not ppo else [])}
        assert found == expected | own


@pytest.mark.parametrize(
    "script, given, rates",
    [
        (sft, "", [2e-4]),
        (sft, "--lora_dim 0", [2e-5]),
        (sft, "--learning_rate 7e-5", [7e-5]),
        (reward, "--lora_dim 1", [1e-4]),
        (reward, "--preset opt-1.3b", [5e-5]),
        (reward, "--preset opt-1.3b --lora_dim 8", [5e-4]),
        (ppo, "", [3e-5, 3e-5]),
        (ppo, "--critic_lora_dim 0", [3e-5, 3e-6]),
        (ppo, "--preset llama-2-7b --actor_lora_dim 8", [9.65e-5, 5e-6]),
    ],
)
def test_naming_a_model_takes_todays_recipe(script, given, rates):
    """A chat model with LoRA, a few epochs, and the learning rates published for it;
    DeepSpeed-Chat's 16 epochs only by name. Adapters want ten times the rate of all weights
    [Schulman 2025], whatever the preset; a rate that is given is the user's."""
    role = "actor_" if script is ppo else ""
    args = script.get_args([f"--{role}model_name_or_path", "hub/model", *given.split()])
    names = [name for name in sorted(vars(args)) if name.endswith("learning_rate")]
    assert [getattr(args, name) for name in names if getattr(args, name)] == rates
    if "--preset" not in given:
        assert args.preset == "qwen2.5-0.5b" and args.num_train_epochs <= 3


def test_the_readmes_eight_gpu_commands_down_to_the_resolved_config():
    """`--preset opt-1.3b --data_path Dahoas/rm-static` on 8 GPUs, as far as it
    can be followed without the weights."""
    args = sft.get_args("--preset opt-1.3b --data_path Dahoas/rm-static".split())
    config = common.ds_config(
        args, args.zero_stage, args.per_device_train_batch_size, args.gradient_accumulation_steps
    )
    assert args.data_path == ["Dahoas/rm-static"]
    assert config["zero_optimization"]["stage"] == 2 and config["bf16"] == {"enabled": True}
    assert (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 8 == 64
    )
    assert config["gradient_clipping"] == 1.0
    args = reward.get_args("--preset opt-1.3b --data_path Dahoas/rm-static".split())
    config = common.ds_config(
        args, args.zero_stage, args.per_device_train_batch_size, args.gradient_accumulation_steps
    )
    assert (
        args.model_name_or_path == "facebook/opt-350m"
        and config["train_micro_batch_size_per_gpu"] * 8 == 32
    )
    assert config["zero_optimization"]["stage"] == 1, "the recipe's 0, in bf16"
    args = ppo.get_args("--preset opt-1.3b --data_path Dahoas/rm-static".split())
    for stage in (args.actor_zero_stage, args.critic_zero_stage):
        config = common.ds_config(
            args, stage, args.per_device_training_batch_size, args.gradient_accumulation_steps
        )
        assert (
            config["zero_optimization"]["stage"] == 2
            and config["train_micro_batch_size_per_gpu"] * 8 == 32
        )
    args = ppo.get_args(
        "--preset opt-1.3b --data_path Dahoas/rm-static --zero_stage 3 "
        "--offload --adam_offload".split()
    )
    config = common.ds_config(args, args.actor_zero_stage, args.per_device_training_batch_size)
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_scatter"] is True
    assert (
        zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    )
    frozen = common.ds_config(args, 3, 4, train=False)
    assert (
        "offload_optimizer" not in frozen["zero_optimization"] and "gradient_clipping" not in frozen
    )


def test_nothing_names_a_machine():
    """A path of somebody's home directory in a committed file helps nobody."""
    for file in [
        *ROOT.glob("*.py"),
        *MACHINERY,
        *TOOLS,
        *ROOT.glob("toy/*.py"),
        *ROOT.glob("labs/*.py"),
        *ROOT.glob("toy/*.json"),
        *ROOT.glob("tests/*.py"),
        *PAGES,
        ROOT / "Makefile",
        ROOT / "requirements.txt",
    ]:
        text = file.read_text()
        assert (
            not re.search(r"(?<![\w.])/(?:home|root|Users|work)/\w", text)
            or file.name == "test_9_readme.py"
        ), file


def test_ds_config_holds_no_number_that_is_also_a_flag():
    """Each number has one home: batch sizes, stage, dtype and learning rates come from flags."""
    config = json.loads((ROOT / "ds_config.json").read_text())
    assert not {
        "optimizer",
        "scheduler",
        "bf16",
        "fp16",
        "gradient_clipping",
        "train_batch_size",
    } & set(config)
    assert "stage" not in config["zero_optimization"]


def test_turning_dropout_off_for_a_step_does_not_turn_it_off_for_the_next(tmp_path, tokenizer):
    """Step 2 trains with dropout 0; the config that it saves keeps the model's
    own, because step 3's critic has it on."""
    from transformers import OPTConfig

    OPTConfig(
        vocab_size=576,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=16,
        num_attention_heads=2,
        max_position_embeddings=64,
        dropout=0.1,
        word_embed_proj_dim=16,
    ).save_pretrained(tmp_path / "opt")
    flags = "--dtype fp32 --zero_stage 0 --dropout 0 --lora_dim 0 --model_name_or_path".split()
    args = sft.get_args([*flags, str(tmp_path / "opt")])
    model = common.load_model(args, tokenizer=tokenizer, value_head="score")
    assert model.model.config.dropout == 0.0
    saving.save_model(model, tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["dropout"] == 0.1
