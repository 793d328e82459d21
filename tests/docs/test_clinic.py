"""The clinic: its broken runs are whole and small, look.py's verdicts name the faults and call no
healthy run sick, and what the pages say is what the files of the runs give."""

import sys

import pytest

from tests import kit
from tools.report import runs, verdicts

CLINIC = kit.ROOT / "course/clinic"
sys.path[:0] = [str(CLINIC), str(kit.ROOT / "course/labs")]
import cases as clinic  # noqa: E402
import figures  # noqa: E402
import pages  # noqa: E402

CASES = (CLINIC / "cases.md").read_text()
ALL = [*clinic.CASES, *clinic.HEALTHY]
NAMED = {  # the row of docs/metrics.md whose verdict names the fault, or its family
    "01": "samples",
    "02": "tokens.jsonl",
    "03": "ratio_max, sampling_gap",
    "04": "eval_accuracy, eval_accuracy_ci",
    "05": "kl, kl_k3",
    "06": "actor_loss, approx_kl, clip_fraction",
    "07": "ratio_max, sampling_gap",
    "08": "samples of SFT and PPO",
    "09": "ratio_max, sampling_gap",
    "10": "eval_accuracy, eval_accuracy_ci",
    "11": "explained_variance",
    "13": "reward, gold",
    "14": "tokens.jsonl",
    "15": "tokens.jsonl",
    "16": "kl, kl_k3",
    "17": "eval_accuracy, eval_accuracy_ci",
    "18": "reward, gold",
    "19": "ratio_max, sampling_gap",
    "20": "ratio_max, sampling_gap",
}


def verdicts_of(folder):
    """Returns {(script, metrics): (status, words)} of the runs in a folder."""
    found = runs.find([CLINIC / folder])
    return {(run.script, row[0]): row[1:] for run in found for row in verdicts.of(run, found)}


@pytest.mark.parametrize("case", NAMED)
def test_a_verdict_names_the_fault(case):
    """The row is sick, or to be watched, and that of the healthy run with the same seed is not."""
    healthy, found = verdicts_of("healthy/1"), verdicts_of(case)
    rows = [row for row in found if row[1] == NAMED[case]]
    assert any(
        found[row][0] in (verdicts.SICK, verdicts.WATCH) and healthy[row][0] == verdicts.HEALTHY
        for row in rows
    )


@pytest.mark.parametrize("name", clinic.HEALTHY)
def test_no_healthy_run_is_called_sick(name):
    """Three seeds through all stages, PPO's and GRPO's, and another architecture."""
    found = verdicts_of(name.replace("-", "/"))
    assert {script for script, _ in found} == set(clinic.case(name))
    assert [words for status, words in found.values() if status == verdicts.SICK] == []


def test_a_pretrained_models_run_is_not_called_sick():
    """GRPO with SmolLM2, which gained what it could. Its entropy and length of responses are
    not the toy's, for which the limits of the verdicts were written."""
    run, _ = runs.find([kit.ROOT / "recipes/smollm2/results"])  # beside it, with another seed
    found = verdicts.of(run, [run])
    named = {metrics: status for metrics, status, _ in found}
    # args.json is not there: no flags are known
    assert named.pop("actor_loss, approx_kl, clip_fraction") == verdicts.WATCH
    assert not {verdicts.SICK, verdicts.WATCH} & {*named.values()}


@pytest.mark.parametrize("recipe", ["hh", "sentiment"])
def test_nonsense_of_a_pretrained_model_is_to_be_watched(recipe):
    """At temperature 1 a token is drawn from many, from the first step to the last."""
    found = runs.find([kit.ROOT / f"recipes/{recipe}/results"])
    run = next(run for run in found if run.script == "ppo")
    status, words = verdicts.judged(verdicts.variety, run)
    assert status == verdicts.WATCH and "drawn from many" in words


@pytest.mark.parametrize("case", clinic.CASES)
def test_a_cases_figures_are_those_of_its_files(case):
    """A symptom, and a solution whose table is made again; a small file, in which no path of a
    machine stands."""
    solution = (CLINIC / f"solutions/{case}.md").read_text()
    assert f"{pages.BEGIN}\n{figures.of_case(case)}\n{pages.END}" in solution
    assert f"\n## {case}: " in CASES and f"](solutions/{case}.md)" in CASES
    [file] = [file for file in (CLINIC / case).rglob("*.*") if file.name != "report.html"]
    assert file.stat().st_size < 60_000 and '"/' not in file.read_text()


@pytest.mark.parametrize("case", ALL)
def test_a_case_has_all_of_its_steps_and_what_is_healthy_is_stored_once(case):
    """look.py finds a step that a healthy run has, too, in that run's place (runs.json). Its runs
    are commands that parse, each after those that it starts from."""
    own, kept = clinic.folder_of(case), clinic.kept_as(case)
    found = runs.find([own])
    assert {run.script: run.path.resolve() for run in found} == kept
    held = {run.script for run in found if runs.packed(own / run.script)}
    assert held == {script for script, folder in kept.items() if folder.parent == own}
    made = clinic.with_parents(clinic.case(case).values())
    for number, run in enumerate(made):
        assert {parent for _, parent in run.parents} <= {*made[:number]}
        kit.parse(run)


def test_what_is_kept_of_a_run_is_what_it_wrote(tmp_path):
    """Packed by cases.py and read by look.py, the lines are those of the files, but for clocks,
    digits, and those beyond the first of both ends."""
    run, lines = clinic.runner.Run("ppo", (), 1), [{"step": i, "loss": 1 / 3} for i in range(3)]
    folder = run.folder(tmp_path)
    folder.mkdir()
    lines[0] |= {"eval_gold": 0.5}
    answers = [{"step": i, "prompt": "?", "response": f"{n}"} for i in (0, 1, 2) for n in range(30)]
    kit.write_lines(folder / "metrics.jsonl", [{**line, "seconds": 1.0} for line in lines])
    kit.write_lines(folder / "samples.jsonl", answers)
    (folder / "args.json").write_text('{"script": "ppo", "kl_coef": 0.05}')
    (tmp_path / "case").mkdir()
    (tmp_path / "case/runs.json").write_text(clinic.spread({"ppo": clinic.kept(run, tmp_path)}))
    [read] = runs.find([tmp_path / "case"])
    assert read.args == {"script": "ppo", "kl_coef": 0.05}
    assert read.metrics == [{**line, "loss": 0.33333} for line in lines]
    assert read.samples == answers[:28] + answers[60:88]


def test_the_ranges_of_healthy_runs_are_those_of_their_files():
    """They are made from the runs, as the tables of the solutions are."""
    ranges = f"{pages.BEGIN}\n{figures.of_healthy()}\n{pages.END}"
    assert ranges in (CLINIC / "README.md").read_text()


def patch():
    import common
    import ppo
    from machinery import checks, rollout

    places = common, ppo, checks, rollout
    before = [{*vars(place)} for place in places]
    for case in clinic.CASES:
        (clinic.solution_of(case)["fault"] or int)()
    assert [{*vars(place)} for place in places] == before, "it sets what nobody has"


def test_every_fault_finds_what_it_patches():
    """A function that was renamed would be found when somebody runs the case again."""
    kit.on_ranks(patch, 1, meet="never")
