"""tools/look.py: what it computes and says, by hand-worked numbers; what it reads, broken or not;
and the page that it writes."""

import html.parser
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import pandas
import pytest

from tests import kit
from tools import look
from tools.report import answers, numbers, page, pictures, runs, samples, text, verdicts


# ---- What it computes ----
def pair(chosen, rejected, *lengths):
    names = "chosen_score", "rejected_score", "chosen_length", "rejected_length"
    return dict(zip(names, (chosen, rejected, *(lengths or (5, 5)))))


def test_calibration_by_hand():
    """sigmoid(log 3) = 3/4: the judge gives its choice 3/4, be it right or wrong. Four such pairs,
    three of them right, are calibrated. sigmoid(0) = 1/2 counts one half."""
    log3 = math.log(3)
    pairs = [pair(log3, 0), pair(1 + log3, 1), pair(0, -log3), pair(0, log3)]
    found = numbers.calibration(numbers.table_of([*pairs, pair(2, 2)]))
    (bins, tie), (between, found) = found.iterrows()
    assert (0.7 in between, 0.8 in between, found["count"]) == (False, True, 4)
    assert (found["said"], found["share"]) == (pytest.approx(0.75), 0.75)
    # Wilson, z^2 = 3.8416: middle = (0.75 + 0.4802) / 1.9604, half = 1.96 / 1.9604 sqrt(0.107)
    assert [found["low"], found["high"]] == pytest.approx([0.3006, 0.9544], abs=2e-4)
    assert (tie["said"], tie["share"], 0.5 in bins) == (0.5, 0.5, True)


def test_a_judge_is_surer_than_it_is_right_or_could_be_surer(tmp_path):
    """It says 0.95 and is right in half of the pairs; or 0.55, and is always right."""
    for pairs, over in (([pair(3, 0), pair(0, 3)] * 20, 1), ([pair(0.2, 0)] * 40, 0)):
        _, picture, _ = samples.judge(run_with(tmp_path, judged=pairs))
        assert (picture["over"], picture["under"]) == (over, 1 - over)


def test_accuracy_by_length_by_hand():
    """Differences in length -4, -1, 0, 1, 3: the median of the sizes 1, 1, 3, 4 is 3. The judge is
    right where the chosen response is longer: it prefers length."""
    given = (0, 1, 1, 5), (0, 1, 4, 5), (1, 1, 5, 5), (1, 0, 6, 5), (1, 0, 8, 5)
    pairs = numbers.table_of([pair(*each) for each in given])
    found = numbers.by_length(pairs)
    assert [*found.index] == "3+ shorter,shorter,equal,longer,3+ longer".split(",")
    assert [*found.share] == [0, 0, 0.5, 1, 1]
    longer = numbers.longer_wins(pairs)
    assert (longer["judge"], longer["chosen"], longer["count"]) == (1, 0.5, 4)


def sample(prompt, response, reward=1, gold=1, step=0):
    return dict(step=step, prompt=prompt, response=response, reward=reward, gold=gold)


def test_a_prompt_that_is_there_twice_keeps_its_responses_apart():
    """Else each of the first evaluation would stand beside each of the last one."""
    both = [[sample("?", x, i) for i, x in enumerate(texts)] for texts in ("ab", "cd")]
    found = numbers.changes(*both)
    assert [*found.response_before + found.response_after] == ["ac", "bd"]


def test_gamed_samples_come_first_the_worst_of_them_at_the_top():
    """Reward rose and gold fell: the judge was exploited. The deeper gold fell the higher the row,
    and of equal falls the higher rise of the reward. Others keep their order."""
    scores = dict(a=(1, 1), b=(1, 0.5), c=(2, 0), d=(3, 0), e=(-1, 0), f=(1, 2))
    after = [sample(name, "", *each) for name, each in scores.items()]
    before = [sample(name, "", 0) for name in scores]
    found = numbers.ordered(numbers.changes(before, after))
    assert "".join(found.prompt) == "dcbaef"
    assert [*found.gamed] == [True] * 3 + [False] * 3


# ---- What it draws ----
def test_a_thinned_curve_keeps_the_one_step_that_went_wrong_and_the_last():
    """10,000 steps have 300 points on the page; a ratio of 5 in one of them is among these. The
    page says what a metric is at the last step, and so it must be the last."""
    values = pandas.Series(1.0, index=range(10_000))
    values[4321] = 5
    shown = pictures.thinned(values)
    assert len(shown) <= pictures.POINTS and shown.index.is_monotonic_increasing
    assert shown[4321] == 5 and shown.index[-1] == 9_999


def test_two_steps_have_no_axis_in_common(tmp_path):
    """SFT's 480 steps and PPO's 40 are other steps, and their losses have other units. Two runs of
    PPO lie over each other, each to its own last step."""
    for name, script, steps in (("sft", "sft", 48), ("a", "ppo", 9), ("b", "ppo", 12)):
        make_run(tmp_path / name, script, steps)
    drawn = {one["title"]: one for one in pictures.curves(runs.find([tmp_path]))[0][1]}
    curves = [(c["name"], c["steps"][-1]) for c in drawn["PPO: loss"]["curves"]]
    assert curves == [("a: loss", 8), ("b: loss", 11)] and drawn["SFT: loss"]["curves"]
    assert [drawn[f"{s}: loss"]["unit"] for s in ("SFT", "PPO")] == ["nats a token", "no unit"]


def test_two_runs_are_compared_prompt_by_prompt(tmp_path):
    """Of the last evaluations: what differs comes first."""
    for name, why in (("a", "So."), ("b", "Thus.")):
        make_run(tmp_path / name, response=why)
    _, found = samples.tables(runs.find([tmp_path]))
    assert found["names"] == ["a", "b"] and found["differ"] == 1
    texts = [(row["response_before"], row["response_after"]) for row in found["rows"]]
    assert texts == [("So.", "Thus."), ("By boat.", "By boat.")]


# ---- Verdicts ----
ONCE = dict(per_device_generation_batch_size=4, per_device_training_batch_size=4)
TWICE = dict(ONCE, ppo_epochs=2)
HALF = dict(ONCE, dtype="bf16")
GROUPED = dict(ONCE, advantage="grpo")
FUNCTION, LIMIT = dict(reward_fn=["f"]), dict(max_answer_seq_len=48)
RISING = [0, 0, 1, 1, 2, 2]


def answered(*texts, reward=(0, 0), gold=(0, 0)):
    """Returns samples of two evaluations: the same texts, with a reward and a gold score each."""
    both = zip(reward, gold, (0, 9))
    return [sample(str(i), t, *scores) for scores in both for i, t in enumerate(texts)]


def token(reward, kl=(0.0, 0.0), logprobs=(-1.0, -1.0)):
    """Returns a line of tokens.jsonl of a response of two tokens: reward 1, kl_coef 0.1."""
    numbers = dict(text=["a", "b"], reward=reward, logprob=logprobs) | (dict(kl=kl) if kl else {})
    return dict(tokens=numbers, reward=1.0, kl_coef=0.1, ended=1.0)


# gold rose by 1, and by 0: 1/2 on average, with a standard error of 1/2
NOISY = answered("a", gold=(0, 1)) + [sample("b", "b", 0, 0, at) for at in (0, 9)]
SHAKY = answered("a", reward=(0, 1)) + [sample("b", "b", 0, 0, at) for at in (0, 9)]

# a row's function: the case that it names, and of which Run: its metrics and other fields
VERDICTS = """
sft_samples
end: samples="abcd."
cut: samples="a."
endless: samples=".."
alike: samples="aaaa"
unsaid: samples=answered("a")
accuracy
good: eval_accuracy=[0.7], eval_accuracy_ci=[[0.66, 0.74]]
bare: eval_accuracy=[0.7]
coin: eval_accuracy=[0.52], eval_accuracy_ci=[[0.48, 0.56]]
swapped: eval_accuracy=[0.3], eval_accuracy_ci=[[0.2, 0.4]]
few: eval_accuracy=[0.6], eval_accuracy_ci=[[0.2, 1.0]]
low: eval_accuracy=[0.58], eval_accuracy_ci=[[0.55, 0.61]]
leak: eval_accuracy=[1.0], eval_accuracy_ci=[[0.99, 1.0]]
ties: eval_accuracy=[0.7], eval_accuracy_ci=[[0.6, 0.8]], judged=[pair(1, 1)]
ratio
one: ratio_max=[1, 1.001]
scoring: ratio_max=[1, 1.5], args=ONCE
several: ratio_max=[1, 1.5], args=TWICE
filtered: ratio_max=[1], args=dict(ONCE, top_p=0.9)
sampling: ratio_max=[1], sampling_gap=[0.3], args=dict(TWICE, dtype="fp32")
# SmolLM2 in bf16: a sound run's largest gap and share, and the share at temperature 0.95
one: ratio_max=[1], sampling_gap=[1.36], sampling_outside=[0.036], args=HALF
sampling: ratio_max=[1], sampling_gap=[0.9], sampling_outside=[0.1], args=HALF
sampling: ratio_max=[1], sampling_gap=[5], sampling_outside=[0.04], args=HALF
# another policy may sample
one: ratio_max=[1], sampling_gap=[0.3], args=dict(ONCE, dtype="fp32", is_cap=2.0)
several: ratio_max=[1, 1.5], args=dict(ONCE, generation_batches=2)
several: ratio_max=[1, 1.5], args=dict(ONCE, per_device_training_batch_size=2)
updates
zero: actor_loss=[1e-9], approx_kl=[0], clip_fraction=[0], args=ONCE
moved: actor_loss=[0], approx_kl=[0.1], clip_fraction=[0.2], args=ONCE
clips: actor_loss=[1], approx_kl=[0.1], clip_fraction=[0.5], args=TWICE
several: actor_loss=[1], approx_kl=[0.1], clip_fraction=[0.1], args=TWICE
mask: actor_loss=[1], approx_kl=[0], clip_fraction=[0], args=ONCE
other: actor_loss=[1], approx_kl=[0], clip_fraction=[0], args=GROUPED
other: actor_loss=[1], approx_kl=[0], clip_fraction=[0], args=dict(ONCE, is_cap=2.0)
kl
near: kl=[0, 0, 2, 2, 2.4, 2.4]
negative: kl=[0, 0, -3, -6, -8, -8]
start: kl=[0, 0.5, 1, 1, 1, 1]
near: kl=[0, 0, 1, 1, 3, 3], reward=RISING, response_length=[16] * 6
vain: kl=[0, 0, 36, 36, 36, 36], reward=[0] * 6
far: kl=[0, 0, 9, 9, 9, 9], reward=RISING, response_length=[16] * 6
too_far: kl=[0, 0, 27, 27, 27, 27], reward=RISING, response_length=[16] * 6
reference: kl=[0] * 6, grad_norm=[0.3] * 6
still: kl=[0] * 6, grad_norm=[0] * 6
rising
both: eval_reward=[0, 2, 3], eval_gold=[0.5, 0.9, 0.88]
exploits_model: eval_reward=[0, 2], eval_gold=[0.5, 0.4]
exploits_function: eval_reward=[0, 2], eval_gold=[0.5, 0.4], args=FUNCTION
exploits_model: eval_reward=[0, 2, 3], eval_gold=[0.5, 0.9, 0.7]
reward_noise: eval_reward=[2, 2.1], eval_gold=[0.5, 0.9], samples=SHAKY
gold_noise: eval_reward=[0, 1], eval_gold=[0.5, 0.51], samples=NOISY
gold_noise: eval_reward=[0, 1], eval_gold=[0.5, 0.49], samples=NOISY
ungraded: reward=[0, 2]
unrewarded: reward=[2, 0]
constant: reward=[0, 0, 0]
# a verifier's rewards are gold
verified: eval_reward=[0, 1], samples=answered("a", reward=(0, 1))
rejected: eval_reward=[1, 0], samples=answered("a", reward=(1, 0))
critic
good: explained_variance=[0.1] * 3 + [0.8] * 3
worse: explained_variance=[0.1] * 3 + [-0.2] * 3
little: explained_variance=[-1] * 3 + [0.2] * 3
variety
slow: entropy=[0.5, 0.4], response_length=[16, 15], eos_rate=[1, 1]
collapse: entropy=[0.5, 0.02], response_length=[16, 15], eos_rate=[1, 1]
endless: entropy=[1, 1], response_length=[9, 48], eos_rate=[1, 0.1], args=LIMIT
many: entropy=[1.8, 1.6], response_length=[16, 15], eos_rate=[1, 1]
slow: entropy=[1.8, 0.9], response_length=[16, 15], eos_rate=[1, 1]
tokens
right: tokens=[token([-0.2, 0.9], kl=(2.0, 1.0))]
# no reference, as in `make grpo`; --clip_reward 5; a response that was cut
right: tokens=[token([0.0, 1.0], kl=None)]
right: tokens=[{**token([0.0, 5.0]), "reward": 8.9}]
none: tokens=[{**token([0.0, 0.0]), "response_length": 600}]
# the penalty's sign; the score is lost; so is EOS
sum: tokens=[token([0.2, 1.1], kl=(2.0, 1.0))]
sum: tokens=[token([-0.2, -0.1], kl=(2.0, 1.0))]
eos: tokens=[token([1.0, 0.0], logprobs=(-1.0, 0.0))]
none: tokens=[token([0.0, 9.0])], args=dict(kl_in="loss")
none: tokens=[token([0.0, 9.0])], args=dict(kl_estimator="k3")
none: tokens=[token([0.0, 9.0])], args=dict(normalize_reward=1)
none: tokens=[token([0.0, 9.0])], args=dict(missing_eos_penalty=1)
finite
finite: kl=[1.0, 2.0]
bad: kl=[1.0, math.nan]
stopped: kl=[1.0, 1.0], stopped=["kl"]
"""


def run_with(folder, **fields):
    """Returns the Run of an empty folder, with fields as if it had been read."""
    run = runs.Run(folder, "run")
    vars(run).pop("table")
    vars(run).update(script="ppo", **fields)
    return run


FIELDS = "args tokens judged limits".split()


def run_of_words(folder, given):
    """Returns the Run of a line of VERDICTS. Of samples in short a dot is a response that did not
    end."""
    fields = {name: given.pop(name) for name in [*given] if name in FIELDS}
    samples, stopped = given.pop("samples", []), given.pop("stopped", None)
    if isinstance(samples, str):
        samples = [dict(step=1, response=c, ended=float(c != ".")) for c in samples]
    lines = [dict(zip(given, row), step=step) for step, row in enumerate(zip(*given.values()))]
    lines += [{"step": len(lines), "not_finite": stopped}] if stopped else []
    return run_with(folder, metrics=lines, samples=samples, **fields)


def test_verdicts_by_hand(tmp_path):
    """Each way to judge a row of the table of metrics, and what is said of a run without a log. No
    case of verdicts.ini is missing here."""
    reached = {function: set() for *_, function in verdicts.ROWS}
    named = {function.__name__: function for function in reached}
    for line in VERDICTS.strip().splitlines():
        case, _, given = line.partition(": ")
        if line in named:
            function = named[line]
        elif line[0] != "#":
            run = run_of_words(tmp_path, eval(f"dict({given})"))
            assert function(run)[0] == case, line
            reached[function].add(case)
            status = verdicts.cases()[function.__name__][case].partition(",")[0]
            assert verdicts.judged(function, run)[0] == status
    empty = run_with(tmp_path, metrics=[], tokens=[], samples=[])
    for function, found in reached.items():
        assert verdicts.judged(function, empty)[0] == "not known"
        assert found == {*verdicts.cases()[function.__name__]}


def test_where_ppo_begins_by_hand(tmp_path):
    """With the SFT model's prompts, and responses like its own: of 2 words, with a gold of 1. What
    all prompts of a step end with is its template."""

    def begun(end="\nAnswer:", response="So so.", gold=1, step=0):
        found = [sample(f"Why {i}?{end}", response, 1, gold, step) for i in range(8)]
        return run_with(tmp_path, metrics=[], samples=found)

    sft, reached = begun(step=9), set()
    for status, run in (
        ("healthy", begun()),
        ("watch", begun(gold=0)),  # worse
        ("watch", begun(response="So so so so so.")),  # longer
        ("watch", begun(end="")),  # another template
        ("not known", begun(step=5)),  # no samples of the start
    ):
        assert verdicts.judged(verdicts.beginning, run, sft)[0] == status, run.samples[0]
        reached.add(verdicts.beginning(run, sft)[0])
    sft.samples = sft.samples[:3]
    assert verdicts.judged(verdicts.beginning, begun(), sft)[0] == "not known"
    reached.add(verdicts.beginning(begun(), sft)[0])
    assert reached == {*verdicts.cases()["beginning"]}


def test_where_the_rewards_of_tokens_are_wrong_that_comes_first(tmp_path):
    """They explain why gold falls while the reward rises."""
    run = run_of_words(tmp_path, dict(eval_reward=[0, 2], eval_gold=[0.5, 0.4], tokens=[]))
    assert verdicts.judged(verdicts.rising, run)[1].endswith("the reward model's errors.")
    run.tokens = [token([0.2, 1.1], kl=(2.0, 1.0))]
    assert verdicts.judged(verdicts.rising, run)[1].endswith("the verdict on tokens.jsonl first.")


def test_every_verdict_is_a_row_of_the_table_of_metrics():
    """docs/metrics.md says what is healthy and what is sick; the page judges by some rows."""
    words = (kit.ROOT / "docs/metrics.md").read_text()
    words = words.split("## Healthy and sick")[1].split("## ")[0]
    scripts = {"SFT": "sft", "reward model": "reward", "PPO": "ppo"}
    stated = []
    for stage, metrics in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", words, re.M)[2:]:
        first = re.sub(r" \([^)]*\)", "", metrics).split(":")[0]  # "all: collapse, or ..."
        stated.append((scripts[stage], first.replace("`", "")))
    judged = [(script, metrics) for script, metrics, _ in verdicts.ROWS]
    assert [row for row in stated if row in judged] == judged


# ---- What it reads ----
def make_run(folder, script="ppo", steps=12, response="So."):
    """Writes the files of a run, as if two evaluations had been made; returns its folder."""
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(dict(script=script, data_fingerprint="x")))
    rows = [dict(step=i, reward=i / 4, gold=i / 9, loss=1 / (i + 1)) for i in range(steps)]
    kit.write_lines(folder / "metrics.jsonl", rows)
    ends = (0.1, 1.0, 0), (0.9, 0.5, steps - 1)
    found = [sample("Why?", response, *scores) for scores in ends]
    found += [sample("How?", "By boat.", 0.2, 0.4, at) for *_, at in ends]
    kit.write_lines(folder / "samples.jsonl", found)
    tokens = dict(text=[" So", response, "<eos>"], logprob=[0.5, -0.25, 0.125])
    kit.write_lines(folder / "tokens.jsonl", [dict(one, sample=0, tokens=tokens) for one in found])
    return folder


def test_before_and_after_are_the_first_and_the_last_evaluation(tmp_path):
    """Of the samples, and of the table of metrics, which has the limit beside them."""
    folder = make_run(tmp_path / "ppo")
    lines = [sample("Why?", f"{step}", 1, 1, step) for step in (0, 5, 10, 15)]
    kit.write_lines(folder / "samples.jsonl", lines)
    assert [line["response"] for line in runs.find([folder])[0].samples] == ["0", "15"]
    run = run_of_words(tmp_path, dict(eval_gold=[0.25, 0.5, 0.75], limits={"eval_gold": 1.0}))
    row = page.page("t", [run], []).split('<th scope="row">eval_gold</th>')[1].split("</tr>")[0]
    assert re.findall(r">([\d.]+)<", row) == ["0.25", "0.75", "1"]


def test_a_folder_in_any_state_is_read(tmp_path):
    """Lines that are half written, no JSON, no dict or without a step are left out and counted; so
    are numbers that are none, or huge. Any other file may be missing."""
    folder = make_run(tmp_path / "ppo")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1]\nnull\n{"gold": 3}\n{"step": NaN}\n\n{"step": 12, "gold": NaN}\n')
        file.write('{"step": 13, "gold": "x", "reward": 1e300, "eval_accuracy_ci": [1]}\n')
        file.write('{"step": 14, "gold": 2')
    (folder / "samples.jsonl").write_bytes(b'\xff{}\n{"step": 0}\n{"prompt": 1, "response": 2}\n')
    (folder / "tokens.jsonl").write_text('{"tokens": {"text": ["a"], "kl": []}}\n' + "[" * 99_999)
    [run] = runs.find([tmp_path])
    assert run.broken == {"metrics.jsonl": 5, "samples.jsonl": 3, "tokens.jsonl": 2}
    assert [*run.series("gold").index] == [*range(12)]
    assert run.samples == run.tokens == [] and page.page("t", [run], ["a note"])
    named = "step, " + ", ".join(names for script, names, _ in verdicts.ROWS if script == "ppo")
    for value in ("x", None, [1], 10**400, {}):  # args.json and samples, too, may hold anything
        run.args = dict.fromkeys([*TWICE, "generation_batches", "max_answer_seq_len"], value)
        row = dict(dict.fromkeys(numbers.NUMBERS, value), prompt="Why?", response="So.")
        run.samples = [dict(row, step=0), dict(row, step=9)]
        vars(run).pop("table", None)
        run.metrics = [dict.fromkeys(named.split(", "), 7)]
        assert page.page("t", [run], [])
    for name in ("samples", "tokens", "metrics"):
        (folder / f"{name}.jsonl").unlink()  # it has just begun
    assert page.page("t", runs.find([folder]), [])


def test_runs_are_found_below_a_folder_each_once(tmp_path):
    """A step's own parts (ema/, checkpoints/) are no runs, and what --overwrite moved aside is left
    out; the steps come in their order."""
    for name in ("demo/ppo", "demo/sft", "other/ppo", "demo/ppo/ema", "demo/sft.old-1"):
        make_run(tmp_path / name, script=Path(name).name)
    found = runs.find([tmp_path / "demo", tmp_path / "demo/ppo", tmp_path])
    assert [run.name for run in found] == ["demo/sft", "demo/ppo", "other/ppo"]


def test_a_run_that_lies_elsewhere_is_named_in_a_file(tmp_path):
    """So several experiments share one SFT run, which is read once; that PPO began from it is known
    as if it lay beside it. A name of nothing, or of the folder itself, does no harm."""
    made = [make_run(tmp_path / name, script=name[-3:]) for name in ("a/sft", "b/ppo", "c/ppo")]
    for folder in ("b", "c"):
        places = {"sft": "../a/sft", "x": "../gone", "y": ".", "z": "\0", "n": 1, "m": ""}
        (tmp_path / folder / runs.PACKED).write_text(json.dumps(places))
    found = runs.find([tmp_path / "b", tmp_path / "c"])
    assert [run.path.resolve() for run in found] == made
    found[1].args = {"actor_model_name_or_path": "somewhere/sft"}
    rows = verdicts.of(found[1], found)
    assert rows[-1][0] == "samples of SFT and PPO" and rows[:-1] == verdicts.of(found[1])


def test_the_page_replaces_a_page_and_nothing_else(tmp_path, capsys):
    """A report.html that somebody else wrote stays. What is not healthy is printed, too. A picture
    that cannot be drawn costs no page."""
    folder = make_run(tmp_path / "ppo")
    kit.write_lines(folder / "metrics.jsonl", [dict(step=i, reward=0.0) for i in range(9)])
    for _ in range(2):
        look.main([str(tmp_path)])
    assert (tmp_path / "ppo/curves.png").read_bytes().startswith(b"\x89PNG")
    assert "ppo: sick: reward, gold: reward is 0: all responses " in capsys.readouterr().out
    (tmp_path / "report.html").write_text("my report")
    with kit.refuses("foreign-page"):
        look.main([str(tmp_path)])
    assert (tmp_path / "report.html").read_text() == "my report"
    (tmp_path / "ppo/curves.png").unlink()
    (tmp_path / "ppo/curves.png").mkdir()
    look.main([str(tmp_path), "--out", str(tmp_path / "other.html")])
    assert "curves.png could not be drawn" in capsys.readouterr().out
    assert (tmp_path / "other.html").exists()


def test_one_prompt_is_answered_by_all_models(tmp_path):
    """From what the runs have written down: base is SFT's step 0, SFT is PPO's step 0. A model of
    other data has no place beside them. A chat, which is logged as JSON, is read turn by turn."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Who "he"?'}]
    for script, texts in (("ppo", ["SFT's", "PPO's"]), ("sft", ["base's"])):
        lines = [sample(json.dumps(chat), text, step=9 * i) for i, text in enumerate(texts)]
        kit.write_lines(make_run(tmp_path / script, script) / "samples.jsonl", lines)
    for data, names in ((None, ["base", "SFT", "PPO"]), (["other"], ["SFT", "PPO"])):
        args = dict(script="sft", data_fingerprint="x", data_path=data)
        (tmp_path / "sft/args.json").write_text(json.dumps(args))
        [one] = answers.asked(runs.find([tmp_path]))
        found = {answer["name"]: answer["response"] for answer in one["answers"]}
        assert [*found.items()] == [(name, f"{name}'s") for name in names]
        assert one["prompt"] == 'system: Be brief.\n\nuser: Who "he"?'
    for words in ("[3]", "[", "[]", "{}", '"user"', "null", '[{"role": "user"}]'):
        assert text.spoken(words) == words


def test_out_may_be_any_name_and_nothing_is_read_from_a_pipe(tmp_path, monkeypatch):
    """It would hang. Names and texts are printed in whatever characters the terminal has."""
    make_run(tmp_path / "ppo é")
    os.mkfifo(tmp_path / "pipe")
    with kit.refuses("foreign-page"):
        look.main([str(tmp_path), "--out", str(tmp_path / "pipe")])
    plain = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    look.main([str(tmp_path / "ppo é")])
    plain.flush()
    assert b"ppo \\xe9/report.html: 1 run" in plain.buffer.getvalue()


# ---- The page ----
HOSTILE = (
    "</script><script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"
    "<!-- ${1} {{x}} $x$ \u2028\u2029 \x00\x1b[2J\u202e\x85\ud800 &lt; </style></textarea>"
)


class Tags(html.parser.HTMLParser):
    """Collects a page's tags, their attributes, and the text of its first script."""

    def __init__(self, words):
        super().__init__()
        self.tags, self.attributes, self.json = [], [], ""
        self.feed(words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        if self.tags[-1:] == ["script"] and self.tags.count("script") == 1:
            self.json += data


def test_what_a_model_writes_is_text_and_the_page_opens_offline(tmp_path):
    """Whatever stands in a prompt, a response, a token, a name of a metric, a run or a folder: no
    tag, no handler, no script, and nothing that cannot be seen. Nothing is fetched."""
    folder = make_run(tmp_path / "ppo <img src=x onerror=alert(1)> $x$", response=HOSTILE)
    with open(folder / "metrics.jsonl", "a") as file:
        for step in (12, 13):
            file.write(json.dumps({"step": step, "eval_<b>" + HOSTILE.replace(" ", ""): step}))
            file.write("\n")
    make_run(tmp_path / "b")
    words = page.page(HOSTILE, runs.find([tmp_path]), [HOSTILE])
    assert words.encode()  # no half of a surrogate is left
    found, plain = Tags(words), Tags(page.page("t", runs.find([tmp_path / "b"]), []))
    assert found.tags.count("script") == 2
    assert set(found.tags) - set(plain.tags) <= {"input", "label"}  # switches of two runs
    for name, value in found.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href", "xlink:href") or value.startswith("#")
    assert not any(hidden in words for hidden in "\u2028\u2029\x00\x1b\u202e\x85")
    assert "url(http" not in words and "@import" not in words
    tokens = json.loads(found.json)["runs"][1]["lines"][0]["tokens"]["text"]
    assert tokens[1] == text.visible(HOSTILE) and r"\x00\x1b[2J\u202e" in tokens[1]
