"""tools/look.py: what it computes and says, by hand-worked numbers; what it reads, broken or not;
and the page, in a browser where there is one."""

import base64
import contextlib
import hashlib
import html
import html.parser
import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pandas
import pytest

from machinery.run import folder_lock
from tests import kit
from tests.kit import ROOT
from tools import look
from tools.report import answers, numbers, page, pictures, runs, samples, text, verdicts

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
BROWSER = next(filter(None, BROWSERS), None)
NUMBERS = "logprob ref_logprob kl kl_k3 entropy reward value return advantage".split()


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- What it computes ----
def test_smoothing_by_hand():
    """Twenty values, weight 1/2: (2), (4 + 2/2) / (1 + 1/2), (1 + 4/2 + 2/4) / (1 + 1/2 + 1/4). The
    first value is its own mean: a curve does not start at 0. Up to ten values stay as they are."""
    found = pictures.smoothed(pandas.Series([2, 4, 1] + [0] * 17))
    assert list(found[:3]) == pytest.approx([2, 10 / 3, 2])
    assert list(pictures.smoothed(pandas.Series([2, 4, 1]))) == [2, 4, 1]


def pair(chosen, rejected, *lengths):
    names = ("chosen_score", "rejected_score", "chosen_length", "rejected_length")
    return dict(zip(names, (chosen, rejected, *(lengths or (5, 5)))))


def test_calibration_by_hand():
    """sigmoid(log 3) = 3/4: the judge gives its choice 3/4, be it right or wrong. Four such pairs,
    three of them right, are calibrated. sigmoid(0) = 1/2 counts one half. A huge difference: 1."""
    log3 = math.log(3)
    pairs = [pair(log3, 0), pair(1 + log3, 1), pair(0, -log3), pair(0, log3)]
    [found] = numbers.calibration(pairs)
    assert (found["low"], found["high"], found["count"]) == (0.7, 0.8, 4)
    assert (found["said"], found["share"]) == (pytest.approx(0.75), 0.75)
    # Wilson, z^2 = 3.8416: middle = (0.75 + 0.4802) / 1.9604, half = 1.96 / 1.9604 sqrt(0.107)
    assert found["interval"] == pytest.approx([0.3006, 0.9544], abs=2e-4)
    tie, sure = numbers.calibration([pair(2, 2), pair(900, 0)])
    assert (tie["said"], tie["share"]) == (0.5, 0.5) and (sure["said"], sure["share"]) == (1, 1)


def test_accuracy_by_length_by_hand():
    """Differences in length -4, -1, 0, 1, 3: the median of the sizes 1, 1, 3, 4 is 3. The judge is
    right where the chosen response is longer: it prefers length."""
    lengths = [(1, 5), (4, 5), (5, 5), (6, 5), (8, 5)]
    scores = [(0, 1), (0, 1), (1, 1), (1, 0), (1, 0)]
    pairs = [pair(*both, *sizes) for both, sizes in zip(scores, lengths)]
    found = numbers.by_length(pairs)
    names = ["3+ shorter", "shorter", "equal", "longer", "3+ longer"]
    assert [(one["name"], one["share"]) for one in found] == [*zip(names, (0, 0, 0.5, 1, 1))]
    longer = numbers.longer_wins(pairs)
    assert (longer["judge"], longer["people"], longer["count"]) == (1, 0.5, 4)
    assert "no more" in samples.prefers_longer(pairs[1::2])  # two pairs prove nothing
    assert "leans to long responses" in samples.prefers_longer(pairs * 20)
    assert numbers.longer_wins([pair(1, 0)]) is None


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
    found = numbers.changes(before, after)
    assert "".join(row["prompt"] for row in found) == "dcbaef"
    assert [row["gamed"] for row in found] == [True] * 3 + [False] * 3
    [row] = numbers.changes([sample("a", "x", 0, 1)], [sample("a", "y", 1), sample("b", "z")])
    assert not row["gamed"] and "gold_after" not in row  # without gold nobody knows


# ---- Verdicts ----
ONE_UPDATE = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
TWICE = {**ONE_UPDATE, "ppo_epochs": 4}


def ended(*values):
    return {"samples": [dict(step=1, ended=value) for value in values]}


def judged(share, *interval):
    return {"eval_accuracy": [share], "eval_accuracy_ci": [list(interval)]}


def update(loss, kl, clipped):
    return {"actor_loss": [loss] * 2, "approx_kl": [0, kl], "clip_fraction": [clipped] * 2}


def varied(entropy, length, ended):
    return {"entropy": [0.5, entropy], "response_length": [16, length], "eos_rate": [1, ended]}


def explained(first, last):
    return {"explained_variance": [first] * 3 + [last] * 3}


CASES = [  # (a row's function, metrics, other fields of the Run, status): one for each way out
    ("sft_loss", {"eval_loss": [6, 0.41, 0.4]}, {"limits": {"eval_loss": 0.32}}, "healthy"),
    ("sft_loss", {"eval_loss": [2, 1, 1.2], "loss": [2, 1, 0.5]}, {}, "sick"),
    ("sft_loss", {"eval_loss": [2, 1, 1.2], "loss": [2, 2, 2.1]}, {}, "watch"),
    ("sft_loss", {"eval_loss": [3, 2, 1]}, {}, "watch"),
    ("sft_loss", {"eval_loss": [3]}, {}, "not known"),
    ("sft_samples", {}, ended(1, 1, 1, 1, 0), "healthy"),
    ("sft_samples", {}, ended(1, 0), "watch"),
    ("sft_samples", {}, ended(0.0, 0.0), "sick"),
    ("sft_samples", {}, ended("yes"), "not known"),
    ("accuracy", judged(0.7, 0.66, 0.74), {}, "healthy"),
    ("accuracy", judged(0.52, 0.48, 0.56), {}, "sick"),  # a coin
    ("accuracy", judged(0.6, 0.2, 1.0), {}, "not known"),  # too few
    ("accuracy", judged(0.3, 0.2, 0.4), {}, "sick"),  # labels are swapped
    ("accuracy", judged(0.58, 0.55, 0.61), {}, "watch"),
    ("accuracy", judged(0.7, 0.55, 0.8), {}, "watch"),
    ("drift", {"chosen_score": [1, 2], "rejected_score": [1, -3]}, {}, "healthy"),
    ("drift", {"chosen_score": [1, 40], "rejected_score": [1, 38]}, {}, "sick"),
    ("ratio", {"ratio_max": [1, 1.001]}, {}, "healthy"),
    ("ratio", {"ratio_max": [1, 1.5]}, {"args": ONE_UPDATE}, "sick"),
    ("ratio", {"ratio_max": [1, 1.5]}, {"args": TWICE}, "watch"),
    ("updates", update(1e-9, 0, 0), {"args": ONE_UPDATE}, "healthy"),
    ("updates", update(0, 0.1, 0.2), {"args": ONE_UPDATE}, "watch"),
    ("updates", update(1, 0.1, 0.5), {"args": TWICE}, "watch"),
    ("kl", {"kl": [0, 0, 2, 2, 2.4, 2.4]}, {}, "healthy"),
    ("kl", {"kl": [0, 0, 1, 1, 5, 5]}, {}, "sick"),  # ever faster
    ("kl", {"kl": [0, 0, 3, 3, 5, 5]}, {}, "watch"),
    ("kl", {"kl": [0, 1, 2, 3, 4]}, {}, "not known"),
    ("rising", {"eval_reward": [0, 2], "eval_gold": [0.5, 0.9]}, {}, "healthy"),
    ("rising", {"eval_reward": [0, 2], "eval_gold": [0.5, 0.4]}, {}, "sick"),  # exploits the judge
    ("rising", {"eval_reward": [0, 2, 3], "eval_gold": [0.5, 0.9, 0.7]}, {}, "sick"),
    ("rising", {"eval_reward": [0, 2, 3], "eval_gold": [0.5, 0.9, 0.88]}, {}, "healthy"),
    ("rising", {"reward": [0, 2]}, {}, "not known"),  # without gold
    ("rising", {"reward": [2, 0]}, {}, "watch"),
    ("critic", explained(0.1, 0.8), {}, "healthy"),
    ("critic", explained(0.1, -0.2), {}, "sick"),  # worse than a constant
    ("critic", explained(-1, 0.2), {}, "watch"),
    ("critic", {"explained_variance": [-41, -41]}, {}, "not known"),
    ("variety", varied(0.4, 15, 1), {}, "healthy"),
    ("variety", varied(0.02, 15, 1), {}, "sick"),  # collapse
    ("variety", varied(0.5, 47, 0.1), {"args": {"max_answer_seq_len": 48}}, "sick"),
    ("variety", varied(0.2, 15, 1), {}, "watch"),
    ("finite", {"kl": [1.0, math.nan]}, {}, "sick"),
    ("finite", {"kl": [1.0, math.inf]}, {}, "sick"),
    ("finite", {"kl": [1.0, 2.0]}, {}, "healthy"),
]


@pytest.mark.parametrize("name, metrics, others, status", CASES)
def test_verdicts_by_hand(name, metrics, others, status, tmp_path):
    lines = [dict(zip(metrics, row)) for row in zip(*metrics.values())]
    lines = [{"step": step, **line} for step, line in enumerate(lines)]
    run = runs.Run(tmp_path, "run", "ppo", metrics=lines, **others)
    found, said = getattr(verdicts, name)(run)
    assert found == status, said


def test_nothing_is_said_of_a_run_without_a_log(tmp_path):
    run = runs.Run(tmp_path, "run", "ppo")
    assert {verdict(run)[0] for *_, verdict in verdicts.ROWS} == {"not known"}
    (tmp_path / "nonfinite_rank0.jsonl").touch()  # it stopped at NaN
    assert verdicts.finite(run)[0] == "sick"


def test_every_row_of_the_readmes_table_has_a_verdict_and_every_verdict_a_case():
    """The README says what is healthy and what is sick; the page judges by the same rows."""
    words = (ROOT / "README.md").read_text().split("## What to look at")[1].split("## ")[0]
    scripts = {"SFT": "sft", "reward model": "reward", "PPO": "ppo"}
    stated = []
    for stage, metrics in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", words, re.M)[2:]:
        first = re.sub(r" \([^)]*\)", "", metrics).split(":")[0]  # "all: collapse, or ..."
        stated.append((scripts[stage], first.replace("`", "")))
    assert stated == [(script, metrics) for script, metrics, _ in verdicts.ROWS]
    assert {case[0] for case in CASES} == {function.__name__ for *_, function in verdicts.ROWS}


# ---- What it reads ----
def make_run(folder, script="ppo", steps=12, response="So.", **args):
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
    ends = [(0, 0.1, 1.0), (steps - 1, 0.9, 0.5)]
    found = [sample(f"Why? {response}", response, reward, gold, at) for at, reward, gold in ends]
    found += [sample("How?", "By boat.", 0.2, 0.4, at) for at, *_ in ends]
    write_lines(folder / "samples.jsonl", found)
    tokens = {"text": [" So", response, "<eos>"], **dict.fromkeys(NUMBERS, [0.5, -0.25, 0.125])}
    lines = [{**one, "sample": 0, "kl_coef": 0.1, "tokens": tokens} for one in found]
    write_lines(folder / "tokens.jsonl", lines)
    return folder


def test_a_folder_in_any_state_is_read(tmp_path):
    """Lines that are half written, no JSON, no dict or without a step are left out and counted; so
    are numbers that are none, or huge. Any other file may be missing."""
    folder = make_run(tmp_path / "ppo", data_path=[str(tmp_path)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1]\nnull\n{"kl": 3}\n{"step": NaN}\n\n{"step": 12, "kl": NaN}\n')
        file.write('{"step": 13, "kl": "x", "reward": 1e300, "eval_accuracy_ci": [1]}\n')
        file.write('{"step": 14, "kl": 2')
    (folder / "samples.jsonl").write_bytes(b'\xff{}\n{"step": 0}\n{"prompt": 1, "response": 2}\n')
    (folder / "tokens.jsonl").write_text('{"tokens": {"text": ["a"], "kl": []}}\n' + "[" * 99_999)
    (folder / "judge.jsonl").write_text('{"chosen_score": 1}\n')
    (tmp_path / "limits.json").write_text('{"ppo": {"gold": 1.0, "kl": "low"}}')
    [run] = runs.find([tmp_path])
    assert run.broken == {"metrics.jsonl": 5, "samples.jsonl": 1, "tokens.jsonl": 1}
    assert [step for step, _ in run.series("kl")] == list(range(12)) and run.series("eval_x") == []
    assert run.samples == run.tokens == run.judged == [] and run.limits == {"gold": 1.0}
    assert page.page("t", [run], ["a note"])
    for name in ("samples.jsonl", "tokens.jsonl", "judge.jsonl", "metrics.jsonl"):
        (folder / name).unlink()  # it has just begun
    [run] = runs.find([folder])
    assert "saved no model" in run.state and page.page("t", [run], [])


def test_the_state_of_a_run_is_said(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "checkpoints/step-4").mkdir(parents=True)
    assert "stopped at step 11" in runs.find([folder])[0].state
    lock = folder_lock.Lock(folder)
    lock.take()
    assert "running, at step 11 (process " in runs.find([folder])[0].state
    lock.release()
    (folder / "config.json").write_text("{}")
    assert runs.find([folder])[0].state == "finished, 11 steps"


def test_runs_are_found_below_a_folder_each_once(tmp_path):
    """A step's own parts (ema/, checkpoints/) are no runs, and what --overwrite moved aside is left
    out; the steps come in their order."""
    for name in ("demo/ppo", "demo/sft", "other/ppo", "demo/ppo/ema", "demo/sft.old-1"):
        make_run(tmp_path / name, script=Path(name).name)
    found = runs.find([tmp_path / "demo", tmp_path / "demo/ppo", tmp_path])
    assert [run.name for run in found] == ["demo/sft", "demo/ppo", "other/ppo"]
    for folder, rule in ((tmp_path / "gone", "no-folder"), (tmp_path / "demo/ppo/ema", None)):
        with kit.refuses(rule) if rule else contextlib.nullcontext():
            runs.find([folder])


def test_the_page_replaces_a_page_and_nothing_else(tmp_path, capsys):
    make_run(tmp_path / "ppo")
    for _ in range(2):
        look.main([str(tmp_path)])
    assert "report.html: 1 run. Open it" in capsys.readouterr().out
    (tmp_path / "report.html").write_text("my report")
    with kit.refuses("foreign-page"):
        look.main([str(tmp_path)])
    assert (tmp_path / "report.html").read_text() == "my report"


def test_one_prompt_is_answered_by_all_models(tmp_path):
    """From what the runs have written down: base is SFT's step 0, SFT is PPO's step 0."""
    make_run(tmp_path / "ppo", response="After.")
    sft = make_run(tmp_path / "sft", script="sft")
    write_lines(sft / "samples.jsonl", [sample("How?", "By")])
    [asked] = answers.asked(runs.find([tmp_path]))
    assert asked["prompt"] == "How?"
    found = [(answer["name"], answer["response"]) for answer in asked["answers"]]
    assert found == [("base", "By"), ("SFT", "By boat."), ("PPO", "By boat.")]


# ---- The page ----
HOSTILE = (
    "</script><script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"
    "<!-- ${1} {{x}} $x$ \u2028\u2029 \x00\x1b[2J\u202e\x85\ud800 &lt; </style></textarea>"
)


class Tags(html.parser.HTMLParser):
    """Counts a page's tags, and collects its text."""

    def __init__(self, words):
        super().__init__()
        self.tags, self.handlers, self.links, self.text, self.json = [], [], [], "", ""
        self.feed(words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        self.links += [v for name, v in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text += data
        if self.tags[-1:] == ["script"] and self.tags.count("script") == 1:
            self.json += data


def test_what_a_model_writes_is_text_and_the_page_opens_offline(tmp_path):
    """Whatever stands in a prompt, a response, a token, a name of a metric, a run or a folder: no
    tag, no handler, no script, and nothing that cannot be seen. Nothing is fetched."""
    folder = make_run(tmp_path / "ppo <img src=x onerror=alert(1)> $x$", response=HOSTILE)
    with open(folder / "metrics.jsonl", "a") as file:
        for value in (1.0, 2.0):
            name = "eval_<b>" + HOSTILE.replace(" ", "")
            file.write(json.dumps({"step": 12 + value, name: value}) + "\n")
    make_run(tmp_path / "b")
    words = page.page(HOSTILE, runs.find([tmp_path]), [HOSTILE])
    assert words.encode()  # no half of a surrogate is left
    found, plain = Tags(words), Tags(page.page("t", runs.find([tmp_path / "b"] * 2), []))
    assert found.handlers == [] and found.tags.count("script") == 2
    assert set(found.tags) - set(plain.tags) <= {"input", "label"}  # switches of two runs
    assert all(link.startswith("#") for link in found.links)
    assert "</script><script>document.title" in found.text
    assert not any(hidden in words for hidden in "\u2028\u2029\x00\x1b\u202e\x85")
    tokens = json.loads(found.json)["runs"][1]["lines"][0]["tokens"]["text"]
    assert tokens[1] == text.visible(HOSTILE) and r"\x00\x1b[2J\u202e" in tokens[1]
    assert "url(http" not in words and "@import" not in words
    # the browser runs no script but the one whose digest the page names
    script = words.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in words and "magnify" in script


def test_the_page_of_large_runs_is_small(tmp_path):
    """Two runs of 20,000 steps with long responses and 32 of them magnified: below 3 MB."""
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, steps=20_000)
        long = "Long. " * 400
        lines = [sample(f"{i}? {long}", long, 1, 1, s) for s in (0, 9) for i in range(500)]
        write_lines(folder / "samples.jsonl", lines)
        row = {"text": ["word"] * 512, **dict.fromkeys(NUMBERS, [0.12345678] * 512)}
        lines = [{**sample("?", "", step=s), "tokens": row} for s in (0, 5, 11) for _ in range(16)]
        write_lines(folder / "tokens.jsonl", lines)
        write_lines(folder / "judge.jsonl", [pair(i % 7, i % 5, i % 9, 3) for i in range(2_000)])
    found = runs.find([tmp_path])
    assert 300_000 < len(page.page("large", found, []).encode()) < 3_000_000
    lines = samples.bounded(found[0].tokens, 4_500)
    assert {0, 11} <= {line["step"] for line in lines} and len(lines) <= 9


def test_curves_of_several_runs_lie_over_each_other_in_their_groups(tmp_path):
    """Each curve is in a group that says whose it is; a metric of one's own has a panel."""
    for name in ("a", "b"):
        make_run(tmp_path / name)
    found = runs.find([tmp_path])
    found[0].metrics[1]["mine"], found[0].metrics[2]["mine"] = 1, 2
    groups = {group: first for group, _, first, _ in pictures.curves(found)}
    assert list(groups) == ["learning", "stability", "others"]
    titles = [one["title"] for one in groups["learning"]]
    assert titles == ["gold", "reward", "ppo: loss"]  # each metric, where there are two runs
    whose = re.findall(r'id="run(\d)\.\d+"', groups["learning"][0]["svg"])
    assert {*whose} == {"0", "1"} and "entropy" not in str(groups)  # which did not change
    alone = pictures.curves(found[:1])[0][2]
    assert alone[0]["title"] == "reward, gold"


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
  document.activeElement.dispatchEvent(
    new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
  found.focused = numbers();
  const box = $('[data-run="0"]'), curve = $('[id^="run0."]');
  found.curve = [getComputedStyle(curve).display];
  box.click();
  found.curve.push(getComputedStyle(curve).display);
  $("#search").value = "BOAT";
  $("#search").dispatchEvent(new Event("input"));
  found.searched = $$("#rows tbody tr").filter((r) => r.offsetParent).length;
  found.wide = document.documentElement.scrollWidth - innerWidth;
  document.body.replaceChildren(JSON.stringify(found));
});
</script></head>"""


def browse(file, width=1400):
    """Returns the page's document after its scripts have run, in a real browser, as text."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={file.parent}/profile", "--dump-dom", file.as_uri()]
    seen = file.with_suffix(".found")
    with open(seen, "w") as out:
        options = dict(stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        browser = subprocess.Popen(command, **options)
    try:
        assert browser.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)  # it has children
    return seen.read_text()


@pytest.mark.skipif(not BROWSER, reason="no chromium")
@pytest.mark.parametrize("width", [1400, 500])
def test_the_page_in_a_browser(width, tmp_path):
    """Pointing at a token, or walking with the arrow keys, shows the numbers that tokens.jsonl
    holds; curves and the table switch; a hostile text does nothing; nothing is wider than the
    screen. (The probe is a script of the test's own: for it the page's ban on scripts is off.)"""
    folder = make_run(tmp_path / "ppo", response=HOSTILE)
    make_run(tmp_path / "ppo-2")
    lines = [json.loads(line) for line in open(folder / "tokens.jsonl")]
    for place, line in enumerate(lines):
        for number, name in enumerate(NUMBERS):
            line["tokens"][name] = [round(place + number + i / 8, 4) for i in range(3)]
        line["step"] = 11
    write_lines(folder / "tokens.jsonl", lines)
    words = page.page("a run", runs.find([tmp_path]), [])
    words = re.sub(r'<meta http-equiv="Content-Sec[^>]*>', "", words)
    file = tmp_path / "page.html"
    file.write_text(words.replace("</head>", PROBE, 1))
    body = re.search(r"<body>(.*)</body>", browse(file, width), re.S)[1]
    found = json.loads(html.unescape(body))
    assert found["title"] == "a run" and found["tokens"][1] == text.visible(HOSTILE)
    tokens = lines[0]["tokens"]
    for shown, place in ((found["hovered"], 1), (found["focused"], 2)):
        assert {n: float(x) for n, x in shown.items()} == {n: tokens[n][place] for n in NUMBERS}
    assert found["curve"] == ["inline", "none"]
    assert found["searched"] == 2 and found["wide"] <= 0
