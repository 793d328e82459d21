"""tools/look.py: what it computes and says, by hand-worked numbers; what it reads, broken or not;
the page in a real browser; and what runs write down for it: tokens.jsonl and judge.jsonl."""

import contextlib
import copy
import functools
import html
import html.parser
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import ROOT

import ppo
from machinery.base import ranks
from machinery.rollout import microscope, pair_scores, rollout_metrics
from machinery.run import folder_lock, logs, output_folder

sys.path.insert(0, str(ROOT / "tools"))
import look
import look_answers
import look_curves
import look_numbers
import look_page
import look_runs
import look_sections
import look_svg
import look_text
import look_verdicts

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
BROWSER = next(filter(None, BROWSERS), None)


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --------------------------------------------------------------------------------------------------
# What it computes
# --------------------------------------------------------------------------------------------------
def test_smoothing_by_hand():
    """Weight 1/2: (2), (4 + 2/2) / (1 + 1/2), (1 + 4/2 + 2/4) / (1 + 1/2 + 1/4). The first value is
    its own mean: a curve does not start at 0."""
    assert look_numbers.smoothed([2, 4, 1], 0.5) == pytest.approx([2, 10 / 3, 2])
    assert look_numbers.smoothed([2, 4, 1], 0.0) == [2, 4, 1]
    assert [look_numbers.weight_of(n) for n in (0, 1, 10, 20, 100)] == [0, 0, 0, 0.5, 0.9]


def pair(chosen, rejected, *lengths):
    names = ("chosen_score", "rejected_score", "chosen_length", "rejected_length")
    return dict(zip(names, (chosen, rejected, *(lengths or (5, 5)))))


def test_calibration_by_hand():
    """sigmoid(log 3) = 3/4: the judge gives its choice 3/4, be it right or wrong. Four such pairs,
    three of them right, are calibrated. sigmoid(0) = 1/2 counts one half. A huge difference: 1."""
    log3 = math.log(3)
    pairs = [pair(log3, 0), pair(1 + log3, 1), pair(0, -log3), pair(0, log3)]
    [found] = look_numbers.calibration(pairs)
    assert (found["low"], found["high"], found["count"]) == (0.7, 0.8, 4)
    assert (found["said"], found["share"]) == (pytest.approx(0.75), 0.75)
    # Wilson, z^2 = 3.8416: middle = (0.75 + 0.4802) / 1.9604, half = 1.96 / 1.9604 sqrt(0.107)
    assert found["interval"] == pytest.approx([0.3006, 0.9544], abs=2e-4)
    tie, sure = look_numbers.calibration([pair(2, 2), pair(900, 0)])
    assert (tie["said"], tie["share"]) == (0.5, 0.5) and (sure["said"], sure["share"]) == (1, 1)


def test_accuracy_by_length_by_hand():
    """Differences in length -4, -1, 0, 1, 3: the median of the sizes 1, 1, 3, 4 is 3. The judge is
    right where the chosen response is longer: it prefers length."""
    lengths = [(1, 5), (4, 5), (5, 5), (6, 5), (8, 5)]
    scores = [(0, 1), (0, 1), (1, 1), (1, 0), (1, 0)]
    pairs = [pair(*both, *sizes) for both, sizes in zip(scores, lengths)]
    found = look_numbers.by_length(pairs)
    assert [(one["name"], one["share"], one["count"]) for one in found] == [
        ("3+ shorter", 0, 1),
        ("shorter", 0, 1),
        ("equal", 0.5, 1),
        ("longer", 1, 1),
        ("3+ longer", 1, 1),
    ]
    longer = look_numbers.longer_wins(pairs)
    assert (longer["judge"], longer["people"], longer["count"]) == (1, 0.5, 4)
    assert "no more" in look_sections.prefers_longer(pairs[1::2])  # two pairs prove nothing
    assert "leans to long responses" in look_sections.prefers_longer(pairs * 20)
    assert look_numbers.longer_wins([pair(1, 0)]) is None
    assert [one["name"] for one in look_numbers.by_length([pair(1, 0)])] == ["equal"]


def test_a_histogram_holds_every_value():
    edges = look_numbers.even_edges([-1.0, 0.1, 0.7], count=3)
    assert len(edges) == 4 and sum(look_numbers.histogram([-1.0, 0.1, 0.7], edges)) == 3
    assert look_numbers.histogram([1, 1], look_numbers.even_edges([1, 1]))[0] == 2


def sample(prompt, response, reward=None, gold=None, step=0):
    scores = {"reward": reward, "gold": gold}
    held = {name: value for name, value in scores.items() if value is not None}
    return {"step": step, "prompt": prompt, "response": response, **held}


def test_gamed_samples_come_first_the_worst_of_them_at_the_top():
    """Reward rose and gold fell: the judge was exploited. The deeper gold fell the higher the row,
    and of equal falls the higher rise of the reward. Others keep their order."""
    before = [sample(name, "", 0, 1) for name in "abcdef"]
    after = [(1, 1), (1, 0.5), (2, 0), (3, 0), (-1, 0), (1, 2)]
    after = [sample(name, "", *scores) for name, scores in zip("abcdef", after)]
    found = look_numbers.changes(before, after)
    assert [(row["prompt"], row["gamed"]) for row in found] == [
        ("d", True),
        ("c", True),
        ("b", True),
        ("a", False),
        ("e", False),
        ("f", False),
    ]
    [row] = look_numbers.changes([sample("a", "x", 0, 1)], [sample("a", "y", 1), sample("b", "z")])
    assert not row["gamed"] and "gold_after" not in row  # without gold nobody knows
    twice = look_numbers.changes(
        [sample("a", "1"), sample("a", "2")], [sample("a", "3"), sample("a", "4")]
    )
    assert [(row["before"], row["after"]) for row in twice] == [("1", "3"), ("2", "4")]


# --------------------------------------------------------------------------------------------------
# Verdicts
# --------------------------------------------------------------------------------------------------
ONE_UPDATE = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
PAIRS_CI = [{"eval_accuracy": 0.7, "eval_accuracy_ci": [0.66, 0.74]}]


def columns(**values):
    """Lines of metrics.jsonl from one list for each metric."""
    return [dict(zip(values, row)) for row in zip(*values.values())]


CASES = [  # (a row's function, metrics, other fields of the Run, status, words)
    (
        "sft_loss",
        columns(eval_loss=[6, 0.41, 0.4]),
        {"limits": {"eval_loss": 0.32}},
        "healthy",
        "25 %",
    ),
    ("sft_loss", columns(eval_loss=[2, 1, 1.2], loss=[2, 1, 0.5]), {}, "sick", "overfitting"),
    ("sft_loss", columns(eval_loss=[2, 1, 1.2], loss=[2, 2, 2.1]), {}, "watch", "its best was 1."),
    ("sft_loss", columns(eval_loss=[3, 2, 1]), {}, "watch", "still falling"),
    ("sft_loss", columns(eval_loss=[3]), {}, "not known", "only one"),
    (
        "sft_samples",
        [],
        {"samples": [dict(step=1, ended=e) for e in (1, 1, 1, 1, 0)]},
        "healthy",
        "4 of 5",
    ),
    ("sft_samples", [], {"samples": [dict(step=1, ended=0.0)] * 2}, "sick", "EOS was not learned"),
    ("sft_samples", [], {"samples": [dict(step=1)]}, "not known", "read them"),
    ("accuracy", PAIRS_CI, {"limits": {"eval_accuracy": 0.8}}, "healthy", "reaches 0.800"),
    ("accuracy", [{"eval_accuracy": 0.52, "eval_accuracy_ci": [0.48, 0.56]}], {}, "sick", "coin"),
    ("accuracy", [{"eval_accuracy": 1.0, "eval_accuracy_ci": [0.2, 1.0]}], {}, "not known", "few"),
    ("accuracy", [{"eval_accuracy": 0.3, "eval_accuracy_ci": [0.2, 0.4]}], {}, "sick", "swapped"),
    (
        "accuracy",
        [{"eval_accuracy": 0.58, "eval_accuracy_ci": [0.55, 0.61]}],
        {},
        "watch",
        "not by",
    ),
    ("accuracy", [{"eval_accuracy": 0.7, "eval_accuracy_ci": [0.55, 0.8]}], {}, "watch", "not by"),
    ("drift", columns(chosen_score=[1, 2], rejected_score=[1, -3]), {}, "healthy", "near 2,"),
    ("drift", columns(chosen_score=[1, 40], rejected_score=[1, 38]), {}, "sick", "--center_coef"),
    ("ratio", columns(ratio_max=[1, 1.001]), {}, "healthy", "1.0 throughout"),
    ("ratio", columns(ratio_max=[1, 1.5]), {"args": ONE_UPDATE}, "sick", "log-probs differ"),
    ("ratio", columns(ratio_max=[1, 1.5]), {"args": {"ppo_epochs": 2}}, "watch", "several updates"),
    (
        "updates",
        columns(actor_loss=[1e-9, -1e-8], approx_kl=[0, 0], clip_fraction=[0, 0]),
        {"args": ONE_UPDATE},
        "healthy",
        "at most actor_loss 1e-08",
    ),
    (
        "updates",
        columns(actor_loss=[0, 0], approx_kl=[0, 0.1], clip_fraction=[0, 0.2]),
        {"args": ONE_UPDATE},
        "watch",
        "should be about 0",
    ),
    (
        "updates",
        columns(actor_loss=[1, 1], approx_kl=[0.1, 0.1], clip_fraction=[0.4, 0.6]),
        {"args": {**ONE_UPDATE, "ppo_epochs": 4}},
        "watch",
        "50 % of tokens were clipped",
    ),
    ("kl", columns(kl=[0, 0, 2, 2, 2.4, 2.4]), {}, "healthy", "settles at 2.4 nats"),
    ("kl", columns(kl=[0, 0, 1, 1, 5, 5]), {}, "sick", "ever faster"),
    ("kl", columns(kl=[0, 0, 3, 3, 5, 5]), {}, "watch", "more slowly"),
    ("kl", columns(kl=[0, 1, 2, 3, 4]), {}, "not known", "fewer than six"),
    ("rising", columns(eval_reward=[0, 2], eval_gold=[0.5, 0.9]), {}, "healthy", "both rose"),
    ("rising", columns(eval_reward=[0, 2], eval_gold=[0.5, 0.4]), {}, "sick", "exploits"),
    ("rising", columns(eval_reward=[0, 2, 3], eval_gold=[0.5, 0.9, 0.7]), {}, "sick", "after 0.90"),
    ("rising", columns(eval_reward=[0, 2, 3], eval_gold=[0.5, 0.9, 0.88]), {}, "healthy", "both"),
    ("rising", columns(reward=[0, 2]), {}, "not known", "read the samples"),
    ("rising", columns(reward=[2, 0]), {}, "watch", "reward went from 2.00 to 0.00"),
    ("critic", columns(explained_variance=[0.1] * 3 + [0.8] * 3), {}, "healthy", "0.10 to 0.80"),
    (
        "critic",
        columns(explained_variance=[0.1] * 3 + [-0.2] * 3),
        {},
        "sick",
        "worse than a constant",
    ),
    ("critic", columns(explained_variance=[-1] * 3 + [0.2] * 3), {}, "watch", "little"),
    ("critic", columns(explained_variance=[-41, -41]), {}, "not known", "fewer than six"),
    ("critic", [], {}, "not known", "no critic"),
    (
        "variety",
        columns(entropy=[0.5, 0.4], response_length=[16, 15], eos_rate=[1, 1]),
        {},
        "healthy",
        "100 % ended",
    ),
    (
        "variety",
        columns(entropy=[0.5, 0.02], response_length=[16, 15], eos_rate=[1, 1]),
        {},
        "sick",
        "entropy fell to 0.02: collapse",
    ),
    (
        "variety",
        columns(entropy=[0.5, 0.5], response_length=[16, 47], eos_rate=[1, 0.1]),
        {"args": {"max_answer_seq_len": 48}},
        "sick",
        "no longer end",
    ),
    (
        "variety",
        columns(entropy=[0.5, 0.2], response_length=[16, 15], eos_rate=[1, 1]),
        {},
        "watch",
        "more than halved",
    ),
    ("finite", columns(kl=[1.0, math.nan]), {}, "sick", "not finite: kl"),
    ("finite", columns(kl=[1.0, math.inf]), {}, "sick", "not finite: kl"),
    ("finite", columns(kl=[1.0, 2.0]), {}, "healthy", "finite"),
    ("finite", [], {}, "not known", "nothing was logged"),
]


@pytest.mark.parametrize("name, metrics, others, status, words", CASES)
def test_verdicts_by_hand(name, metrics, others, status, words, tmp_path):
    metrics = [{"step": step, **line} for step, line in enumerate(metrics)]
    run = look_runs.Run(tmp_path, "run", "ppo", metrics=metrics, **others)
    found, said = getattr(look_verdicts, name)(run)
    assert found == status and words in said, said


def test_a_run_that_met_nan_is_sick(tmp_path):
    (tmp_path / "nonfinite_rank0.jsonl").touch()
    assert look_verdicts.finite(look_runs.Run(tmp_path, "run", "ppo"))[0] == "sick"


def test_every_row_of_the_readmes_table_has_a_verdict_and_every_verdict_a_case():
    """The README says what is healthy and what is sick; the page judges by the same rows."""
    text = (ROOT / "README.md").read_text().split("## What to look at")[1].split("## ")[0]
    scripts = {"SFT": "sft", "reward model": "reward", "PPO": "ppo"}
    cells = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text, re.M)[2:]
    stated = []
    for stage, metrics in cells:
        first = re.sub(r" \([^)]*\)", "", metrics).split(":")[0]  # "all: collapse, or ..."
        stated.append((scripts[stage], first.replace("`", "")))
    assert stated == [(script, metrics) for script, metrics, _ in look_verdicts.ROWS]
    assert {case[0] for case in CASES} == {function.__name__ for *_, function in look_verdicts.ROWS}


# --------------------------------------------------------------------------------------------------
# What it reads
# --------------------------------------------------------------------------------------------------
def make_run(folder, script="ppo", steps=12, text="So.", **args):
    """Writes the files of a run, as if two evaluations had been made; returns its folder."""
    record = {"script": script, "data_fingerprint": "x", "advantage": "gae", **ONE_UPDATE, **args}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps(record))
    rows = [
        dict(step=i, reward=i / 4, gold=i / 9, kl=i / 3, entropy=0.4, loss=1 / (i + 1))
        for i in range(steps)
    ]
    rows[0] |= {"eval_reward": 0.0, "eval_gold": 0.5}
    rows[-1] |= {"eval_reward": 2.0, "eval_gold": 0.9}
    write_lines(folder / "metrics.jsonl", rows)
    last = steps - 1
    ends = [(0, 0.1, 1.0), (last, 0.9, 0.5)]
    found = [sample(f"Why? {text}", text, reward, gold, step) for step, reward, gold in ends]
    found += [sample("How?", "By boat.", 0.2, 0.4, step) for step, *_ in ends]
    write_lines(folder / "samples.jsonl", found)
    numbers = {name: [0.5, -0.25, 0.125] for name in microscope.NUMBERS}
    tokens = {"text": [" So", text, "<eos>"], **numbers}
    lines = [{**one, "sample": 0, "kl_coef": 0.1, "tokens": tokens} for one in found]
    write_lines(folder / "tokens.jsonl", lines)
    return folder


def test_a_folder_in_any_state_is_read(tmp_path):
    """Lines that are half written, no JSON, no dict or without a step are left out and counted; so
    are numbers that are none. Any other file may be missing."""
    folder = make_run(tmp_path / "ppo")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            '[1]\nnull\n{"kl": 3}\n{"step": NaN}\n\n{"step": 12, "kl": NaN, "reward": "x"}\n'
        )
        file.write('{"step": 13, "kl": 2')
    (folder / "samples.jsonl").write_bytes(
        b'\xff\xfe{}\n{"step": 0}\n{"prompt": 1, "response": 2}\n'
    )
    (folder / "tokens.jsonl").write_text('{"tokens": {"text": ["a"], "kl": []}}\n' + "[" * 99_999)
    (folder / "judge.jsonl").write_text('{"chosen_score": 1}\n')
    [run] = look_runs.find([tmp_path])
    assert run.broken == {"metrics.jsonl": 5, "samples.jsonl": 1, "tokens.jsonl": 1}
    assert [step for step, _ in run.series("kl")] == list(range(12)) and run.series("eval_x") == []
    assert run.samples == run.tokens == run.judged == []
    for name in ("args.json", "samples.jsonl", "tokens.jsonl", "judge.jsonl"):
        (folder / name).unlink()
        [run] = look_runs.find([folder])
        assert run.script == "ppo" and look_page.page("t", [run], [], [])
    (folder / "args.json").write_text('{"data_fingerprint": 1, "script": "ppo"}')
    (folder / "metrics.jsonl").unlink()  # it has just begun
    [run] = look_runs.find([folder])
    assert "saved no model" in run.state and look_page.page("t", [run], [], [])


def test_the_state_of_a_run_is_said(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "checkpoints/step-4").mkdir(parents=True)
    assert "stopped at step 11" in look_runs.find([folder])[0].state
    lock = folder_lock.Lock(folder)
    lock.take()
    assert "running, at step 11 (process " in look_runs.find([folder])[0].state
    lock.release()
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text("{}")
    assert look_runs.find([folder])[0].state == "finished, 11 steps"


def test_runs_are_found_below_a_folder_each_once(tmp_path):
    """A step's own parts (ema/, checkpoints/) are no runs; the steps come in their order."""
    for name in ("demo/ppo", "demo/sft", "other/ppo"):
        make_run(tmp_path / name, script=Path(name).name)
    make_run(tmp_path / "demo/ppo/ema")
    found = look_runs.find([tmp_path / "demo", tmp_path / "demo/ppo", tmp_path])
    assert [run.name for run in found] == ["demo/sft", "demo/ppo", "other/ppo"]


@pytest.mark.parametrize("there, said", [(True, "holds no run"), (False, "is no folder")])
def test_a_folder_without_a_run_is_refused(there, said, tmp_path, capsys):
    folder = tmp_path / "x"
    folder.mkdir() if there else None
    with pytest.raises(SystemExit) as stop:
        look_runs.find([folder])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def run_look(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["look.py", *map(str, argv)])
    look.main()


def test_the_page_replaces_a_page_and_nothing_else(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "ppo")
    for _ in range(2):
        run_look(monkeypatch, tmp_path)
    assert "report.html: 1 run. Open it" in capsys.readouterr().out
    (tmp_path / "report.html").write_text("my report")
    with pytest.raises(SystemExit) as stop:
        run_look(monkeypatch, tmp_path)
    assert stop.value.code == 2 and (tmp_path / "report.html").read_text() == "my report"
    with pytest.raises(SystemExit):
        run_look(monkeypatch, folder, "--out", tmp_path / "gone/page.html")
    run_look(monkeypatch, folder, "--out", tmp_path / "page.html")


def test_ema_answers_as_the_run_would_have(trained, tokenizer, tmp_path, monkeypatch):
    """With the random numbers of the run's evaluations: a model that is the actor itself gives what
    samples.jsonl has. Its reward is the reward model's; the base model's is that of its text."""
    actor, judge = trained / "actor", trained / "judge"
    flags = ["--preset", "toy", "--max_answer_seq_len", "6", "--temperature", "0.7"]
    args = ppo.get_args(flags)
    model = look_answers.talk_models.Writer(
        look.look_answers.talk.get_args([str(actor)]), str(actor)
    )
    prompts = ["When?\nAnswer:", "Who?\nAnswer:"]
    rows = [{**model.prompt(args, i, text), "row": i} for i, text in enumerate(prompts)]
    answers = ppo.roll_out(args, model.model, tokenizer, rows, 0, 2)
    folder = make_run(
        tmp_path / "ppo",
        reward_model_name_or_path=[str(judge)],
        gold_fn=None,
        max_answer_seq_len=6,
        temperature=0.7,
        seed=args.seed,
    )
    lines = [sample(r["prompt"], r["text"], 1.0, 1.0, step) for step in (0, 9) for r in answers]
    write_lines(folder / "samples.jsonl", lines)
    shutil.copytree(actor, folder / "ema")
    sft = make_run(tmp_path / "sft", script="sft")
    write_lines(sft / "samples.jsonl", [sample(text, " base", step=0) for text in prompts])
    asked, notes = look_answers.asked(look_runs.find([tmp_path]), None)
    assert notes == [] and [one["prompt"] for one in asked] == prompts
    for one, row in zip(asked, answers):
        assert [answer["name"] for answer in one["answers"]] == ["base", "SFT", "PPO", "EMA"]
        base, _, _, last = one["answers"]
        assert last["text"] == row["text"] and math.isfinite(base["reward"] + last["reward"])
    monkeypatch.setattr(look_answers, "SMALL", 10)
    assert "--ask 1" in look_answers.asked(look_runs.find([tmp_path]), None)[1][0]
    (folder / "ema/model.safetensors").write_text("no weights")
    assert "could not be asked" in look_answers.asked(look_runs.find([tmp_path]), 1)[1][0]


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------
HOSTILE = (
    "</script><script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"
    "<!-- ${1} {{x}} \u2028\u2029 \x00\x1b[2J\u202e\x85\ud800 &lt; </style></textarea>"
)


class Tags(html.parser.HTMLParser):
    """Counts a page's tags, and collects its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.handlers, self.text, self.json = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        self.handlers += [name for name, _ in attributes if name in ("src", "xlink:href")]

    def handle_data(self, data):
        self.text += data
        if self.tags[-1:] == ["script"] and self.tags.count("script") == 1:
            self.json += data


def test_what_a_model_writes_is_text(tmp_path):
    """Whatever stands in a prompt, a response, a token, a name of a metric, a run or a folder: no
    tag, no handler, no script, and nothing that cannot be seen."""
    name = "ppo <img src=x onerror=alert(1)>"
    folder = make_run(tmp_path / name, text=HOSTILE, advantage=HOSTILE)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 12, f"eval_<b>{HOSTILE}": 1.0}) + "\n")
    runs = look_runs.find([tmp_path])
    asked, _ = look_answers.asked(runs, 0)
    text = look_page.page(HOSTILE, runs, asked, [HOSTILE])
    assert text.encode()  # no half of a surrogate is left
    page, plain = (
        Tags(text),
        Tags(look_page.page("t", look_runs.find([make_run(tmp_path / "b")]), [], [])),
    )
    assert page.handlers == [] and page.tags.count("script") == 2
    assert set(page.tags) - set(plain.tags) <= {"article", "option", "select"}
    assert "</script><script>document.title" in page.text
    assert not any(hidden in text for hidden in "\u2028\u2029\x00\x1b\u202e\x85")
    tokens = json.loads(page.json)["runs"][0]["lines"][0]["tokens"]["text"]
    assert (
        tokens[1] == look_text.visible(HOSTILE) and r"\u2028\u2029 \x00\x1b[2J\u202e" in tokens[1]
    )
    assert "http" not in re.sub(r"Content-Security-Policy|http-equiv", "", text)  # no network


def test_the_page_of_large_runs_is_small(tmp_path):
    """Two runs of 5,000 steps with long responses and 32 of them magnified: below 3 MB."""
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, steps=5_000)
        text = "Long. " * 400
        lines = [sample(f"{i}? {text}", text, 1, 1, s) for s in (0, 9) for i in range(500)]
        write_lines(folder / "samples.jsonl", lines)
        row = {"text": ["word"] * 512, **{name: [0.12345678] * 512 for name in microscope.NUMBERS}}
        lines = [{**sample("?", "", step=s), "tokens": row} for s in (0, 5, 11) for _ in range(16)]
        write_lines(folder / "tokens.jsonl", lines)
        write_lines(folder / "judge.jsonl", [pair(i % 7, i % 5, i % 9, 3) for i in range(2_000)])
    runs = look_runs.find([tmp_path])
    text = look_page.page("large", runs, look_answers.asked(runs, 0)[0], [])
    assert 300_000 < len(text.encode()) < 3_000_000
    lines = look_sections.bounded(runs[0].tokens, 4_500)
    assert {0, 11} <= {line["step"] for line in lines} and len(lines) <= 9


def test_curves_of_several_runs_lie_over_each_other_in_their_groups(tmp_path):
    """Colours are those of the runs; a limit is drawn once; a metric of one's own has a panel."""
    for name in ("a", "b"):
        make_run(tmp_path / name)
    runs = look_runs.find([tmp_path])
    runs[0].limits = runs[1].limits = {"eval_gold": 1.0, "gold": 1.0}
    runs[0].metrics[1]["mine"], runs[0].metrics[2]["mine"] = 1, 2
    groups = look_curves.panels_of(runs)
    assert list(groups) == ["learning", "stability", "others"]
    text = look_curves.curves(runs)
    assert re.findall(r"<h3>(\w+)", text) == ["Learning", "Stability", "Others"]
    first = text.split("<figure>")[1]
    assert first.count('<path class="limit"') == 1 and "limit 1" in first
    keys = re.findall(r'data-series="([^"]+)"', first)
    assert keys == re.findall(r'data-toggle="([^"]+)"', first)
    assert keys[:2] == ["0:reward", "0:eval_reward"] and "1:eval_gold" in keys
    assert "entropy" not in text  # it did not change
    alone = look_curves.curves(runs[:1]).split("<figure>")[1]
    assert "c1" in alone and "c1" in first  # metrics, or runs


@pytest.mark.parametrize("low, high", [(0, 0), (-1e-9, 1e-9), (1e6, 1e6 + 1), (-3, 4e8), (0.5, 1)])
def test_axes_have_round_numbers_inside(low, high):
    low, high = look_svg.span([low, high])
    found = look_svg.ticks(low, high)
    assert 2 <= len(found) <= 9 and all(low - 1e-9 <= x <= high + 1e-9 for x in found)


# ---- In a browser ----
PROBE = """<script>
addEventListener("load", () => {
  const $ = (s) => document.querySelector(s), $$ = (s) => [...document.querySelectorAll(s)];
  const cells = () => $$("[data-number]").map((c) => [c.dataset.number, c.textContent]);
  const numbers = () => Object.fromEntries(cells());
  const found = {title: document.title, tokens: $$(".token").map((t) => t.textContent)};
  $$(".token")[1].dispatchEvent(new MouseEvent("mouseenter"));
  found.hovered = numbers();
  $$(".token")[1].focus();
  const press = (key) => {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  };
  press("ArrowRight");
  found.focused = [numbers(), document.activeElement.textContent];
  press("Home");
  found.home = document.activeElement === $$(".token")[0];
  const paint = () => $$(".token")[1].style.backgroundColor;
  const before = paint(), measure = $('[data-choice="colour"]');
  measure.value = "entropy";
  measure.dispatchEvent(new Event("change"));
  found.repainted = [before, paint()];
  const box = $('[data-switch="run:0"]'), curve = $("[data-series]");
  found.curve = [getComputedStyle(curve).display];
  box.click();
  found.curve.push(getComputedStyle(curve).display);
  box.click();
  $("[data-toggle]").click();
  found.curve.push(getComputedStyle(curve).display);
  found.curve.push($("[data-toggle]").getAttribute("aria-pressed"));
  $("#search").value = "BOAT";
  $("#search").dispatchEvent(new Event("input"));
  const seen = $$("#rows tbody tr").filter((r) => r.offsetParent);
  found.searched = [$("#found").textContent, seen.length];
  $("#search").value = "";
  $("#search").dispatchEvent(new Event("input"));
  const rewards = () => $$('#rows [data-name="reward"]').map((cell) => cell.dataset.value);
  found.sorted = [rewards()];
  for (const _ of [1, 2]) { $('[data-sort="3"]').click(); found.sorted.push(rewards()); }
  found.sort = $("[aria-sort]").getAttribute("aria-sort");
  found.wide = document.documentElement.scrollWidth - innerWidth;
  document.body.replaceChildren(JSON.stringify(found));
});
</script></head>"""


def browse(page, width=1400):
    """Returns the page's document after its scripts have run, in a real browser, as text."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={page.parent}/profile", "--dump-dom", page.as_uri()]
    file = page.with_suffix(".found")
    with open(file, "w") as out:
        options = dict(stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        browser = subprocess.Popen(command, **options)
    try:
        assert browser.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)  # it has children
    return file.read_text()


@pytest.mark.skipif(not BROWSER, reason="no chromium")
@pytest.mark.parametrize("width", [1400, 500])
def test_the_page_in_a_browser(width, tmp_path):
    """Hovering or focusing a token shows the numbers that tokens.jsonl holds; arrow keys walk;
    colours, curves and the table switch; a hostile text does nothing; nothing is wider than the
    screen. (The probe is a script of the test's own: for it the page's ban on scripts is off.)"""
    folder = make_run(tmp_path / "ppo", text=HOSTILE)
    lines = [json.loads(line) for line in open(folder / "tokens.jsonl")]
    for place, line in enumerate(lines):
        for number, name in enumerate(microscope.NUMBERS):
            line["tokens"][name] = [round(place + number + i / 8, 4) for i in range(3)]
        line["step"] = 11
    write_lines(folder / "tokens.jsonl", lines)
    runs = look_runs.find([tmp_path])
    text = look_page.page("a run", runs, look_answers.asked(runs, 0)[0], [])
    page = tmp_path / "page.html"
    page.write_text(
        re.sub(r'<meta http-equiv="Content-Sec[^>]*>', "", text).replace("</head>", PROBE, 1)
    )
    body = re.search(r"<body>(.*)</body>", browse(page, width), re.S)[1]
    found = json.loads(html.unescape(body))
    assert found["title"] == "a run"
    assert found["tokens"][:3] == [" So", look_text.visible(HOSTILE), "<eos>"]
    tokens = lines[0]["tokens"]
    for shown, place in ((found["hovered"], 1), (found["focused"][0], 2)):
        assert {n: float(x) for n, x in shown.items()} == {
            n: tokens[n][place] for n in microscope.NUMBERS
        }
    assert found["focused"][1] == "<eos>" and found["home"]
    assert len(set(found["repainted"])) == 2 and all(found["repainted"])
    assert found["curve"] == ["inline", "none", "none", "false"]
    assert found["searched"] == ["1 of 2", 1]
    assert found["sorted"] == [["0.9", "0.2"], ["0.9", "0.2"], ["0.2", "0.9"]]
    assert found["sort"] == "ascending" and found["wide"] <= 0


@pytest.mark.skipif(not BROWSER, reason="no chromium")
def test_the_page_bans_scripts_that_are_not_its_own(tmp_path):
    """If a text did get through unescaped, the browser would still not run it."""
    text = look_page.page("a run", look_runs.find([make_run(tmp_path / "ppo")]), [], [])
    hurt = "<script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"
    page = tmp_path / "page.html"
    page.write_text(text.replace("<main>", f"<main>{hurt}"))
    said = browse(page)
    assert "<title>a run</title>" in said and 'class="token"' in said


# --------------------------------------------------------------------------------------------------
# What runs write for it
# --------------------------------------------------------------------------------------------------
PARTS = ppo.roll_out, ppo.make_micro_batches, ppo.score, ppo.set_rewards, ppo.set_advantages


@pytest.fixture
def looked(tiny_model, tokenizer, tmp_path):
    """Returns a function that magnifies held-out prompts with these flags: tokens.jsonl's lines,
    and the responses of the evaluation that ppo.py makes beside it. Judges are plain functions."""

    def run_it(*flags, count=3):
        base = ["--preset", "toy", "--max_answer_seq_len", "6", "--per_device_eval_batch_size", "2"]
        base += ["--kl_coef", "0.5", "--output_dir", str(tmp_path)]
        args = ppo.get_args([*base, *flags])
        texts = [f"{'Who? ' * i}\nAnswer:" for i in range(1, count + 1)]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        rows = [dict(prompt=t, prompt_ids=i, chat=False, extra="{}") for t, i in zip(texts, ids)]
        held_out = datasets.Dataset.from_list(rows)

        def judge(batch):  # 2 for each response; with --reward_fn 1 for each token
            return 1.0 * batch.response_mask if "--reward_fn" in flags else 2.0 * batch.last

        def forward(batch):
            return ppo.actor_forward(args, tiny_model, batch, stores=True)

        policy = SimpleNamespace(engine=tiny_model, before=lambda batch: forward(batch))
        critic = SimpleNamespace(before=lambda batch: 0.25 * batch.response_mask + 0.5)
        passes = [policy, critic] if args.has_critic else [policy]
        reference = functools.partial(ppo.response_logprobs, args, reference_model(tiny_model))
        models = policy, reference, judge, None
        run = SimpleNamespace(args=args, tokenizer=tokenizer, held_out=held_out)
        (tmp_path / "tokens.jsonl").unlink(missing_ok=True)
        microscope.look(run, 7, PARTS, passes, models, 0.5, None)
        found = rollout_metrics.answered(run, PARTS, models, tiny_model)
        file = tmp_path / "tokens.jsonl"
        return [json.loads(line) for line in open(file)] if file.exists() else [], found, args

    return run_it


def reference_model(model):
    """A copy of a model that finds every token a little less likely, or more."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(0.8)
    return other


ESTIMATORS = [
    ("gae",),
    ("reinforce",),
    ("rloo", "--samples_per_prompt", "2"),
    ("grpo", "--samples_per_prompt", "2"),
    ("gae", "--reward_fn", "f.py:f"),
]


@pytest.mark.parametrize("flags", ESTIMATORS, ids=" ".join)
def test_tokens_jsonl_holds_what_training_sees(looked, flags, monkeypatch):
    """The responses are those of samples.jsonl. The reward is minus the KL penalty, and the score
    on the last token (or what a function gave each token); advantages are the estimator's, before
    whitening: with GAE and lambda 1 what is to come, less the critic's guess."""
    estimator, *others = flags
    group = 2 if "--samples_per_prompt" in flags else 1
    monkeypatch.setattr(ppo.flags, "check_names", lambda args: None)
    given = ["--advantage", estimator, *others, "--lam", "1", "--microscope", "2"]
    lines, evaluated, args = looked(*given)
    expected = [(row, place) for row in (0, 1) for place in range(group)]
    assert [(line["row"], line["sample"]) for line in lines] == expected
    for line in lines:
        tokens = line["tokens"]
        count = len(tokens["text"])
        assert line["step"] == 7 and line["kl_coef"] == 0.5 and count == line["response_length"]
        text = "".join(tokens["text"]).removesuffix("<eos>")
        assert text == line["response"] or "\ufffd" in text  # a character of several tokens
        assert all(len(values) == count for values in tokens.values())
        kl = [a - b for a, b in zip(tokens["logprob"], tokens["ref_logprob"])]
        assert tokens["kl"] == pytest.approx(kl, abs=1e-4) and max(map(abs, kl)) > 1e-3
        assert sum(tokens["kl"]) == pytest.approx(line["kl"], abs=1e-4)
        k3 = [math.exp(-x) - 1 + x for x in kl]
        assert tokens["kl_k3"] == pytest.approx(k3, abs=1e-4) and min(tokens["entropy"]) > 0
        per_token = "--reward_fn" in flags
        scores = [1] * count if per_token else [0] * (count - 1) + [2]
        rewards = [s - 0.5 * x for s, x in zip(scores, kl)]
        assert tokens["reward"] == pytest.approx(rewards, abs=1e-4)
        to_come = [sum(rewards[i:]) for i in range(count)]
        if estimator == "gae":
            assert tokens["value"] == [0.75] * count
            assert tokens["return"] == pytest.approx(to_come, abs=1e-4)
            assert tokens["advantage"] == pytest.approx([x - 0.75 for x in to_come], abs=1e-4)
        else:
            assert "value" not in tokens and "return" not in tokens
        if estimator == "reinforce":
            assert tokens["advantage"] == pytest.approx(to_come, abs=1e-4)
    if group == 2:  # one number for all tokens of a response; two to a prompt cancel out
        for one, other in zip(lines[::2], lines[1::2]):
            first, second = set(one["tokens"]["advantage"]), set(other["tokens"]["advantage"])
            assert len(first) == len(second) == 1
            assert first.pop() == pytest.approx(-second.pop(), abs=1e-4)
    for line, row in zip(lines[::group], evaluated):  # samples.jsonl has the first of each
        assert line["response"] == row["text"] and line["kl"] == pytest.approx(row["kl"], abs=1e-5)


def test_off_the_microscope_costs_nothing(looked, monkeypatch):
    monkeypatch.setattr(microscope, "prompts", None)  # it is not even asked for
    lines, evaluated, _ = looked("--microscope", "0")
    assert lines == [] and len(evaluated) == 3


def test_the_microscope_is_bounded(looked, monkeypatch):
    """More prompts than there are, and fewer tokens than a response has."""
    monkeypatch.setattr(microscope, "MOST_TOKENS", 2)
    lines, _, _ = looked("--microscope", "99")
    assert len(lines) == 3 and max(line["response_length"] for line in lines) > 2
    assert all(len(values) == 2 for line in lines for values in line["tokens"].values())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_magnifies_as_many_prompts(size, monkeypatch):
    """Three prompts: on two ranks one of them has a filler, so that both make as many forwards. All
    responses to a prompt are on one rank."""
    held_out = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(9)])
    args = SimpleNamespace(microscope=3, samples_per_prompt=2, compares_groups=True)
    monkeypatch.setattr(ranks, "get_world_size", lambda: size)
    found = []
    for rank in range(size):
        monkeypatch.setattr(ranks, "get_rank", lambda rank=rank: rank)
        found.append([(row["row"], row["sample"]) for row in microscope.prompts(args, held_out)])
    assert len(set(map(len, found))) == 1
    dealt = sorted(pair for pair in sum(found, []) if pair[0] >= 0)
    assert dealt == [(row, place) for row in range(3) for place in (0, 1)]
    args.compares_groups = False
    assert {row["sample"] for row in microscope.prompts(args, held_out)} == {0}


class Spaced:
    """A tokenizer that writes a space only between tokens, as SentencePiece ones do."""

    def decode(self, ids):
        return " ".join({3: "a", 4: "b"}[i] for i in ids)


def test_tokens_are_decoded_with_their_spaces(tokenizer):
    """Joined they are the response, also where a tokenizer drops the first space. A character of
    several tokens is shown as halves."""
    ids = tokenizer.encode(" The fox, at the camp.", add_special_tokens=False)
    found = microscope.texts(tokenizer, [9], ids)
    assert "".join(found) == " The fox, at the camp." and len(found) == len(ids)
    assert microscope.texts(Spaced(), [3], [4, 3]) == [" b", " a"]
    assert microscope.texts(Spaced(), [], [4, 3]) == ["b", " a"]
    half = tokenizer.encode("é☃", add_special_tokens=False)
    assert all(half) and len(microscope.texts(tokenizer, [9], half)) == len(half)
    assert microscope.texts(tokenizer, [9], []) == []


def test_judge_jsonl_has_every_pair_once(tmp_path, monkeypatch):
    """Of all ranks, without fillers, in the order of the rows; each evaluation replaces the one
    before. Lengths are those of the tokens. It is bounded."""
    args = SimpleNamespace(output_dir=str(tmp_path))
    held_out = [{"responses": [[0] * i, [0]]} for i in range(1, 4)]
    for chosen in (9.0, 1.0):
        pair_scores.keep(args, held_out, [(2, 0.5, 0.0), (-1, 0.0, 0.0), (0, chosen, 2.0)])
    lines = [json.loads(line) for line in open(tmp_path / "judge.jsonl")]
    assert lines[0] == {"row": 0, **pair(1.0, 2.0, 1, 1)}
    assert lines[1] == {"row": 2, **pair(0.5, 0.0, 3, 1)}
    monkeypatch.setattr(pair_scores, "MOST", 1)
    pair_scores.keep(args, held_out, [(2, 0.5, 0.0), (0, 1.0, 2.0)])
    assert len((tmp_path / "judge.jsonl").read_text().splitlines()) == 1
    pair_scores.keep(SimpleNamespace(output_dir=str(tmp_path / "gone")), held_out, [(0, 1.0, 2.0)])


def test_the_runs_own_files_are_known_to_it(tmp_path):
    """--overwrite removes them, a folder of someone else's that holds one is refused, and --resume
    cuts tokens.jsonl back to the checkpoint as it does with the other logs."""
    for name in ("tokens.jsonl", "judge.jsonl"):
        (tmp_path / name).touch()
        assert output_folder.removed(tmp_path) == ([], [tmp_path / name])
        (tmp_path / "args.json").write_text('{"data_fingerprint": "x", "files": []}')
        assert tmp_path / name in output_folder.removed(tmp_path)[0]
        for file in tmp_path.iterdir():
            file.unlink()
    assert "tokens.jsonl" in logs.FILES
