"""The README's promises: its commands parse, its sizes are counted, its numbers are the presets'."""
import doctest
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import arguments
import checkpoint
import common
import estimate
import ppo
import reward
import sft

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "toy"))
import gold

SCRIPTS = {"sft.py": sft, "reward.py": reward, "ppo.py": ppo}
BUDGETS = {"sft.py": 300, "reward.py": 320, "ppo.py": 960, "common.py": 970, "arguments.py": 180, "checkpoint.py": 225, "estimate.py": 190,
           "lora.py": 70}  # lines, comments included; see the README
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    """Every line of an indented or fenced block of README and docs that starts one of the three scripts."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:    )?((?:deepspeed|torchrun|python|srun|[A-Z_]+=\S+) .*?\b(?:sft|reward|ppo)\.py.*)$", text, re.M):
            yield pytest.param(line.split("  #")[0], id=f"{page.name}: {line[:70]}")


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_docs_parses(line):
    """A command that a reader copies must be one that the scripts accept."""
    words = shlex.split(line, comments=True)
    script = next(w for w in words if w in SCRIPTS)
    SCRIPTS[script].get_args(words[words.index(script) + 1:])


def test_the_readme_shows_each_script():
    """An empty list of commands would pass the test above."""
    text = " ".join(str(p.values) for p in commands())
    assert all(script in text for script in SCRIPTS)


def test_every_flag_named_in_the_docs_exists():
    """A flag that was renamed in the code must not live on in the text."""
    known = set()
    for module in SCRIPTS.values():
        known |= set(re.findall(r"--[a-zA-Z_0-9]+", help_of(module)))
    known |= set(re.findall(r'"(--[a-z_]+)"', (ROOT / "tests/bench.py").read_text()))
    launchers = {"--num_gpus", "--num_nodes", "--nnodes", "--nproc_per_node", "--node_rank", "--rdzv_backend", "--rdzv_endpoint",
                 "--master_addr", "--master_port", "--hostfile", "--log_level", "--help", "--ntasks", "--index", "--gpus", "--nodes", "--include"}
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-zA-Z_0-9]+", page.read_text()))
        assert used <= known | launchers, f"{page.name}: {sorted(used - known - launchers)}"


def test_what_the_docs_name_is_there():
    """A page that names a test or a function sends the reader there; names change, so they are looked up."""
    tests = "".join(f.read_text() for f in sorted((ROOT / "tests").glob("*.py")))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name}: {name}"
    for row in re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \|$", (ROOT / "docs/ppo.md").read_text(), re.M)[2:]:
        for name in re.findall(r"`([\w.]+)", row):
            assert callable(getattr(common if "common." in name else ppo, name.removeprefix("common."))), name


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
    """--help opens with the script's header and explains each flag, with its default unless it is a mere switch."""
    text = help_of(SCRIPTS[script])
    assert SCRIPTS[script].__doc__.strip().splitlines()[0] in text
    explained = dict(re.findall(r"^  --(\w+)(.*?)(?=^  --|^\S|\Z)", text, re.M | re.S))
    for name, value in vars(SCRIPTS[script].get_args(["--preset", "toy"])).items():
        if name in explained:  # (not what get_args works out itself)
            assert len(explained[name].split()) > 3 and ("[" in explained[name] or isinstance(value, bool)), name
    assert {"preset", "data_path", "seed", "zero_stage", "dtype", "resume", "output_dir", "estimate"} <= set(explained)


@pytest.mark.parametrize("name", BUDGETS)
def test_line_budgets_hold(name):
    """The promise of the first screen: each file can be read in one sitting, comments included."""
    assert len((ROOT / name).read_text().splitlines()) <= BUDGETS[name]


@pytest.mark.parametrize("name", BUDGETS)
def test_the_size_table_is_counted(name):
    """The README's line count of each file is right to within 10 lines."""
    stated = re.search(rf"`{name}`\D*?(\d+)", (ROOT / "README.md").read_text())
    assert abs(int(stated.group(1)) - len((ROOT / name).read_text().splitlines())) <= 10


@pytest.mark.parametrize("module", [arguments, common, checkpoint, estimate, sft, reward, ppo, gold])
def test_examples_in_docstrings_run(module):
    """An example in a docstring is a promise, too."""
    result = doctest.testmod(module)
    assert result.failed == 0 and (result.attempted > 0 or module not in (reward, ppo, gold))


def test_the_opt_preset_is_deepspeed_chats_recipe():
    """Number for number, as DeepSpeed-Chat's training scripts and READMEs have them."""
    a, b, c = (m.get_args(["--preset", "opt-1.3b"]) for m in (sft, reward, ppo))
    assert (a.model_name_or_path, b.model_name_or_path) == ("facebook/opt-1.3b", "facebook/opt-350m")
    assert (a.learning_rate, b.learning_rate, c.actor_learning_rate, c.critic_learning_rate) == (9.65e-6, 5e-5, 9.65e-6, 5e-6)
    assert (a.weight_decay, b.weight_decay, c.actor_weight_decay, c.critic_weight_decay) == (0.0, 0.1, 0.0, 0.0)
    assert (a.num_train_epochs, b.num_train_epochs, c.num_train_epochs) == (16, 1, 1)
    assert (a.dropout, b.dropout, c.actor_dropout, c.critic_dropout) == (None, 0.0, 0.0, None)  # None: the model's own, on
    assert (a.max_seq_len, b.max_seq_len, c.max_prompt_seq_len, c.max_answer_seq_len) == (512, 512, 256, 256)
    assert (a.per_device_train_batch_size, b.per_device_train_batch_size) == (8, 4)
    assert (c.per_device_generation_batch_size, c.per_device_training_batch_size, c.generation_batches, c.ppo_epochs) == (4, 4, 1, 1)
    assert (a.zero_stage, b.zero_stage, c.actor_zero_stage, c.critic_zero_stage) == (2, 0, 2, 2)
    assert (c.kl_coef, c.gamma, c.lam, c.clip, c.clip_value, c.clip_reward) == (0.1, 1.0, 0.95, 0.2, 0.2, 5.0)
    assert (c.enable_ema, c.ema_decay, c.unsup_coef, c.num_warmup_steps) == (1, 0.992, 27.8, 100)
    four = ["Dahoas/rm-static", "Dahoas/full-hh-rlhf", "Dahoas/synthetic-instruct-gptj-pairwise", "yitingxie/rlhf-reward-datasets"]
    assert a.data_path == b.data_path == four and c.data_path == ["Dahoas/rm-static"]
    for x in (a, b, c):
        assert (x.adam_betas, x.max_grad_norm, x.lr_scheduler_type, x.seed, x.data_split) == ([0.9, 0.95], 1.0, "cosine", 1234, [2, 4, 4])


def test_the_readmes_eight_gpu_commands_down_to_the_resolved_config():
    """`--preset opt-1.3b --data_path Dahoas/rm-static` on 8 GPUs, as far as it can be followed without the weights."""
    args = sft.get_args("--preset opt-1.3b --data_path Dahoas/rm-static".split())
    config = common.ds_config(args, args.zero_stage, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert args.data_path == ["Dahoas/rm-static"]
    assert config["zero_optimization"]["stage"] == 2 and config["bf16"] == {"enabled": True}
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 8 == 64
    assert config["gradient_clipping"] == 1.0
    args = reward.get_args("--preset opt-1.3b --data_path Dahoas/rm-static".split())
    config = common.ds_config(args, args.zero_stage, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert args.model_name_or_path == "facebook/opt-350m" and config["train_micro_batch_size_per_gpu"] * 8 == 32
    assert config["zero_optimization"]["stage"] == 1, "the recipe's 0, in bf16"
    args = ppo.get_args("--preset opt-1.3b --data_path Dahoas/rm-static".split())
    for stage, train in ((args.actor_zero_stage, True), (args.critic_zero_stage, True)):
        config = common.ds_config(args, stage, args.per_device_training_batch_size, args.gradient_accumulation_steps)
        assert config["zero_optimization"]["stage"] == 2 and config["train_micro_batch_size_per_gpu"] * 8 == 32
    args = ppo.get_args("--preset opt-1.3b --data_path Dahoas/rm-static --zero_stage 3 --offload --adam_offload".split())
    config = common.ds_config(args, args.actor_zero_stage, args.per_device_training_batch_size)
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_scatter"] is True
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    frozen = common.ds_config(args, 3, 4, train=False)
    assert "offload_optimizer" not in frozen["zero_optimization"] and "gradient_clipping" not in frozen


def test_nothing_names_a_machine():
    """A path of somebody's home directory in a committed file helps nobody."""
    for file in [*ROOT.glob("*.py"), *ROOT.glob("toy/*.py"), *ROOT.glob("tests/*.py"), *PAGES, ROOT / "Makefile", ROOT / "requirements.txt"]:
        text = file.read_text()
        assert not re.search(r"(?<![\w.])/(?:home|root|Users|work)/\w", text) or file.name == "test_9_readme.py", file


def test_ds_config_holds_no_number_that_is_also_a_flag():
    """Each number has one home: batch sizes, stage, dtype and learning rates come from flags."""
    config = json.loads((ROOT / "ds_config.json").read_text())
    assert not {"optimizer", "scheduler", "bf16", "fp16", "gradient_clipping", "train_batch_size"} & set(config)
    assert "stage" not in config["zero_optimization"]


def test_turning_dropout_off_for_a_step_does_not_turn_it_off_for_the_next(tmp_path, tokenizer):
    """Step 2 trains with dropout 0; the config that it saves keeps the model's own, because step 3's critic has it on."""
    from transformers import OPTConfig
    OPTConfig(vocab_size=576, hidden_size=16, num_hidden_layers=1, ffn_dim=16, num_attention_heads=2, max_position_embeddings=64,
              dropout=0.1, word_embed_proj_dim=16).save_pretrained(tmp_path / "opt")
    args = sft.get_args(["--model_name_or_path", str(tmp_path / "opt"), "--dtype", "fp32"])
    model = common.load_model(args.model_name_or_path, args, 0, dropout=0.0, tokenizer=tokenizer, value_head="score")
    assert model.model.config.dropout == 0.0
    common.save_model(model, tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["dropout"] == 0.1
