"""The first minutes: what a run says when it cannot start, while it works, and when it is told to
stop; and the picture that it leaves."""

import ast
import datetime
import json
import re
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import common
import ppo
import reward
import sft
from machinery.base import progress
from machinery.data import rows
from machinery.flags import declaring
from machinery.models import saving
from machinery.rollout import rollout_metrics
from machinery.run import launch, logs, plots

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}


# --------------------------------------------------------------------------------------------------
# What cannot start
# --------------------------------------------------------------------------------------------------
FINDER = """
import sys
sys.path.insert(0, {root!r})
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "datasets":
            raise {error}
sys.meta_path.insert(0, Finder)
sys.version_info = {version}
import machinery
"""


@pytest.mark.parametrize(
    "version, error, code, said",
    [
        ((3, 10, 9), "None", 2, "this Python is 3.10, and transformers needs 3.11 or newer"),
        ((3, 11, 0), "ModuleNotFoundError(name=name)", 2, "`source .venv/bin/activate` first"),
        ((3, 11, 0), "KeyboardInterrupt", 1, "interrupted while the libraries"),
    ],
)
def test_a_python_that_lacks_something_is_told_so_in_one_line(version, error, code, said):
    """An old Python, a virtual environment that was not activated, Ctrl-C while imports take their
    seconds: none of them is a traceback."""
    text = FINDER.format(root=str(ROOT), version=version, error=error)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["sft.py", "reward.py", "ppo.py", "common.py"])
def test_an_old_python_gets_as_far_as_the_check(name):
    """It reads a script and common.py, and imports nothing that may be missing, before it comes to
    the check in machinery/__init__.py."""
    for file in (ROOT / name, ROOT / "machinery/__init__.py", ROOT / "machinery/base/refused.py"):
        ast.parse(file.read_text(), feature_version=(3, 10))
    names = re.findall(r"^(?:import|from) (\w+)", (ROOT / name).read_text(), re.M)
    first_of_ours = min(names.index(own) for own in ("common", "machinery") if own in names)
    assert set(names[:first_of_ours]) <= sys.stdlib_module_names


def test_a_port_in_use_is_said_with_the_flag(monkeypatch, capsys):
    """Two runs on one machine are common, and each needs a port of its own."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        there = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**there, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stop:
            launch.meet_ranks(datetime.timedelta(seconds=20))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"port {port} is in use" in said and "--master_port" in said


@pytest.mark.parametrize(
    "script, given, meant",
    [
        ("sft", "--lr", "--learning_rate"),
        ("sft", "--learning-rate", "--learning_rate"),
        ("sft", "--epochs", "--num_train_epochs"),
        ("reward", "--batch_size", "--per_device_train_batch_size"),
        ("ppo", "--lr", "--actor_learning_rate"),
        ("ppo", "--model", "--actor_model_name_or_path"),
    ],
)
def test_a_flag_by_its_usual_name_suggests_ours(capsys, script, given, meant):
    """Other tools' short names are what people type first."""
    with pytest.raises(SystemExit):
        SCRIPTS[script].get_args([given, "1"])
    nearest = capsys.readouterr().err.splitlines()[1]
    assert nearest.startswith(f"  Nearest: {meant}"), nearest


# --------------------------------------------------------------------------------------------------
# A folder remembers its preset
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, given, recorded, expected",
    [
        ("reward", "--model_name_or_path RUN", "toy", "toy"),
        ("reward", "--model_name_or_path=RUN", "toy", "toy"),
        ("reward", "--model_name_or_path RUN/ema", "toy", "toy"),
        ("ppo", "--actor_model_name_or_path RUN", "toy", "toy"),
        ("ppo", "--critic_model_name_or_path RUN", "toy", "toy"),
        ("ppo", "--actor_model_name_or_path else --critic_model_name_or_path RUN", "toy", "toy"),
        ("reward", "--model_name_or_path RUN --preset opt-1.3b", "toy", "opt-1.3b"),
        (
            "reward",
            "--model_name_or_path RUN",
            "mine",
            "qwen2.5-0.5b",
        ),  # this script has none so named
        ("reward", "--model_name_or_path RUN", ["toy"], "qwen2.5-0.5b"),
        ("reward", "--model_name_or_path else", "toy", "qwen2.5-0.5b"),
        ("ppo", "--reward_model_name_or_path RUN", "toy", "qwen2.5-0.5b"),
    ],
)
def test_a_folder_of_ours_remembers_its_preset(tmp_path, script, given, recorded, expected):
    """Naming the SFT model of a toy run must not ask for rows of 512 tokens: its model has 128
    positions. What is given on the command line holds, as ever."""
    (tmp_path / "ema").mkdir()
    (tmp_path / "args.json").write_text(json.dumps({"preset": recorded}))
    args = SCRIPTS[script].get_args(given.replace("RUN", str(tmp_path)).split())
    assert args.preset == expected
    remembered = expected == recorded and "--preset" not in given
    assert (args._preset_from is not None) == remembered
    lengths = {"toy": 64 if script == "reward" else 80, "opt-1.3b": 512}
    assert args.max_seq_len == lengths.get(expected, 1024 if script == "reward" else 768)


# --------------------------------------------------------------------------------------------------
# While it works
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank, lines", [("0", 4), ("1", 0)])
def test_long_work_shows_itself_without_a_terminal(monkeypatch, capsys, rank, lines):
    """A job's log gets a line in every interval, on rank 0; work that is shorter than one gets
    none, also inside of a longer one."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "EVERY", 0.05)
    for _ in progress.starts(range(10), 3):
        for _ in progress.shown(range(3), "tokens"):
            time.sleep(0.02 if lines else 0)
    said = capsys.readouterr()
    found = re.findall(r"^    responses: (\d+) of 10, \d\d:\d\d left$", said.out, re.M)
    assert len(found) == lines and found == sorted(found, key=int) and said.err == ""
    assert not re.search("[\r\x1b]", said.out)


@pytest.mark.parametrize(
    "row, response, expected",
    [
        ({"prompt": "Why?", "chat": False}, " So.", "    Why? -> So."),
        (
            {"prompt": "\n\nHuman: Why?\n\nAssistant:", "chat": False},
            " So.\n\nHuman: And?",
            "    Human: Why? Assistant: -> So. Human: And?",
        ),
        (
            {
                "prompt": '[{"role": "system", "content": "Be\\nkind."}, '
                '{"role": "user", "content": "Why?"}]',
                "chat": True,
            },
            "So.",
            "    system: Be kind. user: Why? -> So.",
        ),
        (
            {"prompt": "x" * 300 + "the end", "chat": False},
            "So " * 300,
            f"    ...{'x' * 24}the end -> {'So ' * 22}S...",
        ),
        (
            {"prompt": "Why?", "chat": False},
            "y" * 300,
            f"    Why? -> {'y' * 97}...",
        ),
    ],
)
def test_a_sample_on_the_screen_is_one_line(monkeypatch, capsys, row, response, expected):
    """A prompt of 400 tokens would fill the screen at every evaluation; samples.jsonl has all."""
    monkeypatch.setenv("COLUMNS", "113")
    monkeypatch.setenv("RANK", "0")
    logs.show_sample(row, response)
    said = capsys.readouterr().out
    assert said == f"{expected}\n" and len(said) <= 114


def test_an_evaluation_shows_two_of_its_responses_with_their_numbers(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("RANK", "0")
    kept = []
    numbers = {"reward": 0.25, "kl": 1.0, "response_length": 3}
    response = {"prompt": "Why? " * 40, "chat": False, "text": "So. " * 40, **numbers}
    response |= {"row": 0, "sample": 0}
    rollout_metrics.summary(SimpleNamespace(samples=kept.extend), 7, [response] * 3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and len(kept) == 3
    assert all(len(line) <= 120 for line in lines)
    assert lines[0].endswith("   reward 0.25, kl 1")
    assert kept[0]["response"] == "So. " * 40


# --------------------------------------------------------------------------------------------------
# curves.png
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Returns a function that draws rows of metrics.jsonl: {title of a panel: its axes}."""

    def draw(rows, limits=()):
        text = "".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows))
        (tmp_path / "metrics.jsonl").write_text(text)
        found = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
        plots.draw(tmp_path, "a title", dict(limits))
        axes = [axis for axis in found[0].axes if isinstance(axis, Axes) and axis.get_visible()]
        assert all(axis.get_xlabel() == "step" and axis.get_ylabel() for axis in axes)
        groups = [part.get_suptitle() for part in found[0].subfigs]
        assert found[0].get_suptitle() == "a title" and all(groups)
        return {axis.get_title(): axis for axis in axes}, groups

    return draw


def test_what_belongs_together_is_in_one_panel(drawn):
    """Reward with gold, chosen with rejected, each with what is held out, and one limit a panel. A
    metric of one's own has a panel, too."""
    rows = [{"reward": i, "gold": i / 2, "chosen_score": i, "rejected_score": -i} for i in range(3)]
    rows[0] |= {"eval_reward": 0, "eval_gold": 0, "eval_rejected_score": 0}
    rows[2] |= {"eval_reward": 2, "eval_gold": 1, "eval_rejected_score": 1, "mine": 1}
    rows[1] |= {"tflops": 1, "mine": 2}
    rows[2] |= {"tflops": 2}
    axes, groups = drawn(rows, {"gold": 1.0, "eval_gold": 1.0})

    def labels(title):
        return [text.get_text() for text in axes[title].get_legend().get_texts()]

    assert labels("reward, gold") == ["reward", "eval_reward", "gold", "limit 1", "eval_gold"]
    assert labels("scores of chosen, rejected")[::2] == ["chosen_score", "eval_rejected_score"]
    assert labels("mine") == ["mine"] and groups == ["learning", "cost", "others"]


@pytest.mark.parametrize(
    "values, scale",
    [
        ([5.0, 1.0, 0.4], "log"),
        ([0.1, 5.0, 1.0, 0.4], "log"),
        ([5.0, 1.0, 0.6], "linear"),
        ([0.1, 5.0], "linear"),  # it rises
        ([5.0, 0.0], "linear"),  # 0 has no place on a log scale
        ([5.0, -1.0], "linear"),
    ],
)
def test_what_falls_by_more_than_ten_times_has_a_log_scale(drawn, values, scale):
    axes, _ = drawn([{"loss": value} for value in values])
    assert axes["loss"].get_yscale() == scale


@pytest.mark.parametrize(
    "name, values, shown",
    [
        (
            "actor_loss",
            [7e-9, -5e-9, 1e-8],
            False,
        ),  # whitened advantages sum to 0, but for rounding
        ("ratio_max", [1.0, 1.0000002, 1.0], False),
        ("approx_kl", [0.0, 1e-14, 0.0], False),
        ("kl_coef", [0.05, 0.05, 0.05], False),
        ("approx_kl", [0.0, 1e-5, 0.0], True),
        ("learning_rate", [1e-7, 2e-7, 1e-7], True),
    ],
)
def test_rounding_noise_has_no_panel(drawn, name, values, shown):
    axes, _ = drawn([{"reward": i, name: value} for i, value in enumerate(values)])
    assert len(axes) == 1 + shown


def test_an_evaluation_alone_is_drawn_as_points(drawn):
    """--max_steps 0 leaves one line, where nothing can change."""
    axes, _ = drawn([{"eval_loss": 2.0, "eval_perplexity": 7.4}])
    assert len(axes) == 2


# --------------------------------------------------------------------------------------------------
# What was trained, in use
# --------------------------------------------------------------------------------------------------
def test_the_readmes_five_lines_give_our_score(trained, tokenizer, tmp_path):
    """The score is that of prompt, response and EOS, although the lines append none."""
    text = (ROOT / "README.md").read_text().split("## Use what you trained")[1].split("## ")[0]
    lines = re.findall("^    (.+)$", text, re.M)
    assert len(lines) == 5
    args = declaring.of_role(sft.get_args(["--dtype", "fp32", "--zero_stage", "0"]))
    args.model_name_or_path, args.dropout = str(trained / "judge"), None
    judge = common.load_model(args, tokenizer, "score").eval()
    saving.save_model(judge, tokenizer, tmp_path / "judge")
    code = "\n".join(lines).replace("output/demo/ppo", str(trained / "actor"))
    found = {}
    exec(code.replace("output/demo/reward", str(tmp_path / "judge")), found)
    ids = rows.tokenise_prompt(tokenizer, found["prompt"])
    ids = torch.tensor([ids + rows.tokenise_response(tokenizer, found["response"])])
    ours = judge(ids, torch.ones_like(ids))[0, -1].item()
    assert found["score"] == pytest.approx(ours, rel=1e-4, abs=1e-6)
