"""The labs: each run is a command that parses, each mistake does what it says, and what a page says
is what its runs showed."""

import functools
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import combinations
from math import log
from pathlib import Path
from statistics import mean

import pytest

from tests import kit, runs

LABS = kit.ROOT / "labs"
sys.path.insert(0, str(LABS))
import cited  # noqa: E402
import declared  # noqa: E402
import faults  # noqa: E402
import runner  # noqa: E402

# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------
OTHER = {"rates, on other data": declared.second(declared.again(declared.LABS["rates"]))}
COMMANDS = {**declared.LABS, **OTHER}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_runs_of_a_lab_are_commands_that_parse(name):
    """Each arm, each step: a flag that was renamed would be found an hour into the lab."""
    lab, commands = COMMANDS[name], set()
    assert {runner.baseline(lab, arm) for arm in lab.arms} <= set(lab.arms)
    assert len(lab.seeds) >= 3 and set(lab.shown) <= set(lab.measures)
    for chain in lab.chains().values():
        for run in chain.values():
            assert not run.fault or run.fault in faults.FAULTS
            if not run.variant:
                kit.parse(run)
            commands.add(run)
    assert len(commands) >= len(lab.arms) * len(lab.seeds)


def test_a_run_has_one_place_whoever_asks_for_it(tmp_path):
    """Labs share runs: the place depends on the flags, whatever their order, on the seed, on the
    mistake, and on the models that the run starts from."""

    def place(arm, seed=1):
        return declared.lab("t", {"a": arm}).chains()["a", seed]["ppo"].folder(tmp_path)

    plain = place({"ppo": "--clip 0.3 --lam 0.9"})
    assert place({"ppo": "--lam 0.9 --clip 0.3"}) == plain
    others = [place({"ppo": "--clip 0.3"}), place({"ppo": "--clip 0.3 --lam 0.9"}, 2)]
    others += [place({"ppo": "--clip 0.3 --lam 0.9", "fault": "none"})]
    others += [place({"ppo": "--clip 0.3 --lam 0.9", "sft": "--num_train_epochs 9"})]
    assert len({plain, *others}) == 5
    assert runner.merged("--a 1 --b 2 3", "--b 4 --c") == ("--a", "1", "--b", "4", "--c")


def test_on_other_data_no_step_sees_the_first():
    """Its models and also the four answers at the end are of the other rows: what was looked at
    before takes no part."""
    for chain in COMMANDS["rates, on other data"].chains().values():
        assert list(chain) == ["sft", "reward", "ppo", "ppo again"]
        for run in chain.values():
            words = run.command(Path("runs"))
            assert words[words.index("--data_path") + 1] == str(declared.SECOND / "data")


def test_some_arms_of_a_lab_can_be_run_alone():
    """More seeds where they decide: the other arms, and what they have shown, stay as they are."""
    lab = declared.lab("t", {"a": {}, "b": {"ppo": "--clip 0.3"}, "c": {}})
    some = replace(lab, chosen=("b",), seeds=(4,))
    assert some.chains() == {("b", 4): replace(lab, seeds=(4,)).chains()["b", 4]}
    found, earlier = results_of(b=[{"gold": 1.0}]), results_of(a=[{}], b=[{"gold": 0.0}], c=[{}])
    kept = runner.with_earlier(some, found, earlier)
    assert [(one["arm"], one["values"].get("gold")) for one in kept] == [
        ("a", None),
        ("b", 1.0),
        ("c", None),
    ]


def test_runs_are_skipped_resumed_and_their_end_is_noted(tmp_path, monkeypatch, capsys):
    """A run that is there costs nothing, one that was interrupted goes on with --resume, one that
    stopped at a NaN is a result, and any other failure ends the lab with the end of its log. How
    many runs there are is said at once, and Ctrl-C ends with one line."""
    run, calls = runner.Run("sft", ("--max_steps", "2"), 1), []
    folder = run.folder(tmp_path)

    def call(command, stdout, **_):
        calls.append(command)
        stdout.write("what it said")
        return 1

    monkeypatch.setattr(subprocess, "call", call)
    with pytest.raises(SystemExit, match="what it said"):
        runner.make(run, tmp_path)
    assert "--resume" not in calls[0] and not run.is_made(tmp_path)
    (folder / "args.json").write_text("{}")
    (folder / "nonfinite_rank0.jsonl").write_text("")
    runner.make(run, tmp_path)
    assert calls[1][-1] == "--resume"
    assert json.loads((folder / runner.FINISHED).read_text())["stopped"] is True
    assert runner.make(run, tmp_path) == 0 and len(calls) == 2

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make", interrupt)
    other = runner.Run("sft", (), 1)
    with pytest.raises(SystemExit):
        runner.make_all({("a", 1): {"sft": run}, ("b", 1): {"sft": other}}, tmp_path, jobs=1)
    said = capsys.readouterr().out.strip().splitlines()
    assert "1 runs to make, 1 at a time, about 1 min" in said[0] and "again to go on" in said[-1]


def test_a_runner_shows_that_it_lives(tmp_path, monkeypatch, capsys):
    """While runs are made, however long, a line says how many are left."""
    monkeypatch.setattr(runner, "EVERY", 0.05)
    ended = threading.Event()
    monkeypatch.setattr(runner, "make", lambda *_: ended.wait(5) and 3.0)
    monkeypatch.setattr(runner, "heartbeat", lambda left, *_: ended.set() or f"{len(left)} left")
    runner.make_all({("a", 1): {"sft": runner.Run("sft", (), 1)}}, tmp_path, jobs=1)
    _, *lines, last = capsys.readouterr().out.splitlines()
    assert set(lines) == {"    1 left"} and last == "[1/1] sft 1  : 3 s"


def test_minutes_are_those_of_the_longest_way():
    """Two SFT models side by side, and then their judges: 68 + 77 seconds, not twice as much. A
    flag that asks for more takes longer, and a slow machine is believed from the first run on."""
    first = [runner.Run("sft", (), seed) for seed in (1, 2)]
    judges = [runner.Run("reward", ("--num_train_epochs", "4"), seed) for seed in (1, 2)]
    depths = {**dict.fromkeys(first, 0), **dict.fromkeys(judges, 1)}
    for jobs, times in ((2, 1), (1, 2)):
        assert runner.minutes_of([*depths], depths, jobs) == times * (68 + 2 * 77) / 60
    said = runner.heartbeat(judges, first, depths, 2, began=time.time() - 3 * 68)  # slow
    assert said == "3 min so far, 2 runs left, about 8 min more"
    depths = {runner.Run("ppo", ("--max_steps", "0"), 1): 0}  # --again: no step, and yet a start
    assert "0 runs left" in runner.heartbeat([], [*depths], depths, 1, time.time())


@pytest.mark.parametrize("name", declared.LABS)
def test_a_quick_lab_is_an_arm_and_its_baseline(name):
    """On two cores in about five minutes, by the times of single runs."""
    lab = declared.quick(declared.LABS[name])
    (one, other), chains = lab.arms, lab.chains()
    assert runner.baseline(lab, other) == one and len(chains) == 2
    depths = {run: i for runs in chains.values() for i, run in enumerate(runs.values())}
    assert runner.minutes_of([*depths], depths, 2) <= 6


@pytest.mark.slow
def test_a_lab_at_two_steps_from_its_runs_to_its_picture(tmp_path, monkeypatch):
    """Four runs of two steps each, and each actor answers four times at its end; the second call
    makes none of them again."""
    few = "--max_steps 2 --log_steps 1"
    models = "--actor_model_name_or_path {sft} --critic_model_name_or_path {reward}"
    base = {
        "sft": f"{few} --num_samples 0",
        "reward": f"--model_name_or_path {{sft}} {few}",
        "ppo": f"{models} {few} --num_eval_prompts 4",
    }
    arms = {"ours": {}, "shifted": {"fault": "shifted"}}
    lab = declared.again(runner.Lab("t", base, arms, declared.GOLD, ("gold",), seeds=(1,)))
    places = [tmp_path / name for name in ("results.json", "page.md", "lab.png")]
    places[1].write_text(runner.MARK * 2)
    runner.study(lab, tmp_path, 2, *places, False)
    found = runner.read(places[0])
    assert [result["arm"] for result in found] == ["ours", "shifted"]
    assert all(0 <= result["values"]["gold"] <= 1 for result in found)
    [*_, again] = lab.chains()["shifted", 1].values()
    answers = runner.lines_of(again.folder(tmp_path), "samples.jsonl")
    assert len(answers) == 1120 and len({line["prompt"] for line in answers[:4]}) == 1
    monkeypatch.setattr(subprocess, "call", None)
    runner.study(lab, tmp_path, 2, *places, False)
    assert runner.table(lab, found) in places[1].read_text()


# --------------------------------------------------------------------------------------------------
# Measures
# --------------------------------------------------------------------------------------------------
def test_best_of_n_is_the_mean_over_all_choices_of_n(tmp_path):
    """Four samples to each of two prompts; the best of every pair, by hand."""
    prompts = [[(0.3, 1.0), (0.1, 0.0), (0.9, 0.5), (0.2, 0.25)], [(4, 1), (3, 0), (2, 1), (1, 0)]]
    lines = [{"reward": r, "gold": g} for each in prompts for r, g in each]
    kit.write_lines(tmp_path / "samples.jsonl", lines)
    curve = runner.best_of(tmp_path, 4)
    assert curve["n"] == [1, 2, 4] and curve["kl"][0] == 0
    for n, reward_mean, gold in zip(*(curve[key] for key in ("n", "reward", "gold"))):
        best = [max(chosen) for each in prompts for chosen in combinations(each, n)]
        assert reward_mean == pytest.approx(mean(r for r, _ in best))
        assert gold == pytest.approx(mean(g for _, g in best))
    assert runner.measured({}, ("curve", "gold", 2), curve) == curve["gold"][1]


def test_calibration_by_hand():
    """Four pairs of which three are right, at a confidence of 3/4: no error. Eight at 0.8808, all
    wrong: 0.8808. Together each bin has the weight of its pairs."""
    sure = [{"chosen_score": s * log(3), "rejected_score": 0.0} for s in (1, 1, 1, -1)]
    wrong = [{"chosen_score": 1.0, "rejected_score": 3.0}] * 8
    assert runner.calibration(sure) == pytest.approx(0)
    assert runner.calibration(sure + wrong) == pytest.approx(0.8808 * 8 / 12, abs=1e-4)


def test_the_actor_is_compared_at_the_averages_kl():
    """The average is at 1.5 nats. The actor was at 1 and at 2: its gold score is in the middle."""
    assert runner.gold_at((0, 1, 2, 4), (0.5, 0.6, 0.8, 0.7), 1.5) == pytest.approx(0.7)


def test_an_unfinished_measure_is_left_out_of_the_mean():
    results = [
        {"arm": "a", "seed": 1, "stopped": True, "values": {"gold": None}},
        {"arm": "a", "seed": 2, "stopped": False, "values": {"gold": 0.5}},
    ]
    lab = declared.lab("t", {"a": {}}, {"gold": None})
    assert "| a | 2, 1 stopped at NaN | 0.500 [0.500, 0.500] |" in runner.table(lab, results)


# --------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------
def results_of(**golds):
    """Returns results of arms: for each seed its gold score at KL 1, from 0.5 at KL 0."""
    return [
        {"arm": arm, "seed": 3 - i, "stopped": False, "values": {"gold before": 0.5, **values}}
        for arm, each in golds.items()
        for i, values in enumerate(each)
    ]


def test_arms_are_compared_seed_by_seed():
    """The seeds differ by 0.4, the pairs by 0.1, 0.2 and 0.3: their mean is 0.2, their deviation
    0.1, and Student's t with two degrees of freedom 4.303: 0.2 +- 4.303 * 0.1 / sqrt(3)."""
    plain = [{"gold": g, "KL": 1.0} for g in (0.3, 0.5, 0.7)]
    better = [{"gold": g, "KL": 1.0} for g in (0.6, 0.7, 0.8)]
    results = results_of(plain=plain, better=better)[::-1]
    lab = declared.lab("t", {"plain": {}, "better": {}}, plain=())
    assert runner.table(lab, results).endswith("| +0.200 ± 0.248 (3 of 3) |")
    assert runner.interval([0.1, 0.1, -0.3])[2] == 1  # the mean is below 0


def test_what_stays_at_equal_kl(tmp_path):
    """The plain recipe has gold 0.5 + 0.3 d - 0.05 d^2, d = sqrt(KL). An arm that comes half as far
    on that curve has lost nothing, one below it has, and beyond its end nothing is known."""

    def at(roots, less=0.0):
        golds = [0.5 + 0.3 * root - 0.05 * root**2 - less for root in roots]
        return [{"gold": gold, "KL": root**2} for gold, root in zip(golds, roots)]

    plain = at([1.0, 1.5, 2.0])
    arms = {"slower": at([0.5, 0.7, 1.1]), "worse": at([0.5, 0.7, 1.1], 0.1)}
    arms["further"] = at([1.0, 1.5, 2.3])
    (tmp_path / "plain.json").write_text(json.dumps(results_of(plain=plain)))
    files = ((tmp_path / "plain.json", "plain"),)
    lab = declared.lab("t", {"plain": {}, **{name: {} for name in arms}}, plain=files)
    results = results_of(plain=plain, **arms)
    left = {
        name: runner.differences(lab, results, name, "gold", runner.plain_curve(lab))
        for name in arms
    }
    assert list(left["slower"].values()) == pytest.approx([0, 0, 0])
    assert list(left["worse"].values()) == pytest.approx([-0.1] * 3)
    assert runner.table(lab, results).endswith("|  |")


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", cited.PAGES, ids=lambda page: page.name)
def test_each_number_beside_a_cell_is_that_of_the_cell(page):
    """A verdict is as good as its numbers: each names where it comes from, and is recomputed."""
    assert list(cited.wrong(page)) == []


def row_of(name):
    """Returns the row of a lab in the index of the labs."""
    return re.search(rf"^\| \[{name}\].*$", (LABS / "README.md").read_text(), re.M)[0]


@pytest.mark.parametrize("name", declared.LABS)
def test_no_number_of_a_verdict_stands_by_itself(name):
    """Each decimal, and each count of nats, names its cell; a setting is in backticks."""
    verdict = (LABS / f"{name}.md").read_text().split("**Verdict.**")[1]
    assert cited.uncited(verdict) + cited.uncited(row_of(name).split(" | ")[3]) == []


def test_a_wrong_number_is_found(tmp_path):
    """The offset costs gold, so +0.039 is wrong, and 3 nats say nothing of where they come from."""
    page = tmp_path / "constants.md"
    number, offset = '0.785<!-- m("ours") -->', '039<!-- d("scores + 2") -->'
    page.write_text(f"gold {number}, -0.{offset} or 0.{offset}, +0.{offset}, 3 nats\n")
    [line] = cited.wrong(page)
    assert line.startswith("constants.md:1: +0.039, by the results -0.038")
    assert cited.uncited(page.read_text()) == ["3 nats"]


@pytest.mark.parametrize("name", declared.LABS)
def test_a_page_says_what_the_results_say(name):
    """The table of a page is made from the committed results, and so is its picture."""
    page, results = (LABS / f"{name}.md").read_text(), runner.read(LABS / f"results/{name}.json")
    for part in ("**The claim.**", "**The hypothesis", "**Verdict.**", f"run.py {name} --plot"):
        assert part in page, part
    assert runner.table(declared.LABS[name], results) in page
    if name == "estimators":
        rows = json.loads((LABS / f"results/{name}-earlier.json").read_text())
        assert runner.table_of_earlier(rows) in page
    assert (LABS / f"{name}.png").exists() and f"{name}.png" in row_of(name)
    assert {result["arm"] for result in results} <= set(declared.LABS[name].arms)


def test_every_picture_can_be_drawn_again(tmp_path):
    """From the committed results alone: dots, and curves."""
    for name in ("ptx", "overoptimisation"):
        results = runner.read(LABS / f"results/{name}.json")
        runner.draw(declared.LABS[name], results, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


# --------------------------------------------------------------------------------------------------
# Mistakes
# --------------------------------------------------------------------------------------------------
def faulty(base, name, fault, script, flags):
    """Makes a run of two steps with a mistake in it, in a rank of its own."""
    if fault:
        faults.FAULTS[fault]()
    run = runs.run(script, f"--max_steps 2 {flags}", rows=8, accumulation=1)
    return runs.make_run(base, name, script, run["flags"])


@functools.cache
def lines_with(fault, script="ppo", flags="--num_eval_prompts 4"):
    """Returns the metrics of such a run: of the evaluation before, and of the two steps."""
    name = f"fault_{fault}_{script}_{flags.replace(' ', '')}"
    done = kit.fork(faulty, 1, runs.base(), name, fault, script, flags, meet="")
    assert done.code == 0 and done.results[0]["code"] == 0, done
    return kit.metrics(runs.base() / "runs" / name, clocks=False)


def test_without_a_mistake_two_passes_are_one():
    """A pass that scores and one that trains give what one pass gives."""
    for plain, none in zip(lines_with(""), lines_with("none")):
        assert none == pytest.approx(plain, rel=1e-4, abs=1e-5)
    assert [line["ratio_max"] for line in lines_with("none")[1:]] == pytest.approx([1, 1])


DROPOUT = "--num_eval_prompts 4 --actor_dropout 0.3"
MISTAKES = {  # what differs in the first step: the ratio, the gradient, the reward
    "shifted": ("", {"ratio_max", "grad_norm"}),
    "shifted_ratio": ("", {"ratio_max", "grad_norm"}),
    "shifted_penalty": ("", {"grad_norm"}),
    "dropout_scores": (DROPOUT, {"ratio_max", "grad_norm"}),
    "bf16_scores": ("", {"ratio_max", "grad_norm"}),
    "bf16_trains": ("", {"ratio_max", "grad_norm"}),
    "no_eos": ("", {"grad_norm"}),
    "whitened_by_halves": ("", {"grad_norm"}),
    "offset_2": ("", {"grad_norm", "reward"}),
}


@pytest.mark.parametrize("fault", MISTAKES)
def test_a_mistake_changes_what_it_names(fault):
    """And no evaluation: they measure, and are to measure all runs alike."""
    flags, changed = MISTAKES[fault]
    before, first, _ = lines_with(fault, flags=flags) if flags else lines_with(fault)
    expected, plain, _ = lines_with("none")
    different = {k for k in ("ratio_max", "reward") if abs(first[k] - plain[k]) > 1e-4}
    # whitened advantages: the actor's gradient only, whose norm is logged
    different |= {"grad_norm"} if abs(first["grad_norm"] - plain["grad_norm"]) > 1e-5 else set()
    assert different == changed
    offset = 2.0 if fault == "offset_2" else 0.0
    assert first["reward"] - plain["reward"] == pytest.approx(offset, abs=1e-5)
    assert before["eval_reward"] - expected["eval_reward"] == pytest.approx(offset, abs=1e-5)
    assert before["eval_kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_other_mistakes():
    """GRPO without the deviation; 64 samples of each prompt; heads."""
    grpo = "--num_eval_prompts 4 --advantage grpo --samples_per_prompt 2"
    plain, changed = (lines_with(fault, flags=grpo)[1] for fault in ("", "grpo_no_deviation"))
    assert changed["reward"] == pytest.approx(plain["reward"])
    assert changed["advantage_std"] != pytest.approx(plain["advantage_std"], rel=0.01)
    lines_with("answer_64_times", flags="--num_eval_prompts 128")
    [name] = (runs.base() / "runs").glob("fault_answer*")
    samples = kit.read_lines(name / "samples.jsonl")
    first = samples[:64]
    assert len({line["prompt"] for line in first}) == 1 < len({line["response"] for line in first})
    assert samples[64]["prompt"] != first[0]["prompt"]
    scratch = "--model_name_or_path BASE/models/actor"
    names = ("", "head_0.02", "head_root", "head_zero", "head_library")
    losses = {name: lines_with(name, "reward", scratch)[0]["eval_loss"] for name in names}
    assert losses["head_zero"] == pytest.approx(log(2)) and len(set(losses.values())) == 5


@pytest.mark.slow
def test_another_policy_samples():
    """sampling_kl says how far it is, as the log-prob of a token is that under the policy that drew
    it. Evaluations stay as they are. Weights of a step ago are those of the start in step 1."""
    plain = lines_with("")
    for fault in ("top_p", "top_k", "temperature", "bf16", "fp8", "eager"):
        before, first, _ = lines_with(f"sampler_{fault}")
        assert before == plain[0] and (first["sampling_gap"] > 1e-4) == (fault != "eager"), fault
        assert first["sampling_kl"] > 1e-3 or fault in ("bf16", "eager"), fault
        assert first["sampling_gap"] != plain[1]["sampling_gap"], fault
    assert lines_with("stale_0") == plain and lines_with("stale_1")[:2] == plain[:2]
    behind, clipped = (lines_with(fault)[2] for fault in ("stale_1", "stale_1_clipped"))
    assert behind["sampling_gap"] > 1e-4 > behind["ratio_max"] - 1
    assert clipped["ratio_max"] - 1 > 1e-4 and clipped["sampling_gap"] > 1e-4
