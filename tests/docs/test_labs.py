"""The labs: each run is a command that parses, each mistake does what it says, and a page shows
what its runs showed."""

import functools
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from statistics import mean, stdev

import pytest
from PIL import Image

from tests import kit, runs

LABS = kit.ROOT / "course/labs"
sys.path.insert(0, str(LABS))
import declared  # noqa: E402
import faults  # noqa: E402
import pages  # noqa: E402
import pictures  # noqa: E402
import runner  # noqa: E402

RUN = [name for name in declared.LABS if runner.results_of(name)]  # others are declared alone
each_lab = pytest.mark.parametrize("name", declared.LABS)


@functools.cache
def program():
    """Returns course/labs/run.py as a module. (There is a variants/run.py, too.)"""
    return kit.import_file(LABS / "run.py")


# --------------------------------------------------------------------------------------------------
# Declarations
# --------------------------------------------------------------------------------------------------
@functools.cache
def example():
    """Returns the text of the declaration that course/labs/README.md shows."""
    section = (LABS / "README.md").read_text().split("## A lab of your own")[1]
    return re.search(r"^    \{.*?^    \}$", section, re.M | re.S)[0]


def declare(file, **changed):
    """Writes the example with other fields (None: without), and returns the file."""
    fields = {**json.loads(example()), **changed}
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return file


def assert_whole(lab):
    """What an arm, a measure or a prediction names is there, and each run is a command that parses:
    a flag that was renamed would be found an hour into the lab."""
    assert {runner.baseline(lab, arm) for arm in lab.arms} <= set(lab.arms)
    assert len(lab.seeds) >= 3 and set(lab.shown) <= set(lab.measures) and lab.claim
    for what in lab.predictions:
        arms = what["arm"] if isinstance(what["arm"], list) else [what["arm"]]
        assert {*arms, what.get("than", arms[0])} <= set(lab.arms), what
        assert len(what.get("range", (None, 0))) == 2 and what["says"]
        if toy := what.get("toy"):  # else it would be missed when the runs are made
            there = runner.results_of(toy["lab"])
            assert len(runner.compare(declared.LABS[toy["lab"]], there, toy)) > 1
    commands = {run for chain in lab.chains().values() for run in chain.values()}
    assert len(commands) >= len(lab.arms) * len(lab.seeds)
    for run in commands if not lab.commit else ():  # else its flags have left
        assert run.fault in ("", *faults.FAULTS)
        if not run.variant:
            kit.parse(run)


@each_lab
def test_a_lab_is_whole_and_a_quick_one_is_an_arm_and_its_baseline(name):
    lab = declared.LABS[name]
    assert_whole(lab)
    quick = declared.quick(lab)
    one, other = quick.arms
    assert runner.baseline(lab, other) == one and len(quick.chains()) == 2


def test_the_example_of_the_page_is_a_lab(tmp_path):
    """Whoever copies it has runs with and without a variant. Its base may also be written out, and
    without "shown" the picture shows all measures: that is drawn when all runs are made."""
    file = tmp_path / "mine.json"
    file.write_text(example())
    lab = declared.load(file)
    assert_whole(lab)
    assert any("--policy_loss" in run["ppo"].flags for run in lab.chains().values())
    assert len(lab.shown) < len(lab.measures)
    base = declared.SHARED["bases"][json.loads(example())["base"]]
    other = declared.load(declare(file, base=base, shown=None))
    assert other == replace(lab, shown=[*lab.measures])


def test_a_name_that_nobody_knows_is_refused_and_takes_no_other_lab_away(
    tmp_path, monkeypatch, capsys
):
    """Before there are runs: a misspelt one would run the unchanged script, or fail at the end of
    all runs. What a field may name is said. None of ours is left out."""
    assert {file.stem for file in (LABS / "declared").glob("*.json")} == set(declared.LABS)
    (folder := tmp_path / "declared").mkdir()
    monkeypatch.setattr(declared, "HERE", tmp_path)
    declare(folder / "good.json")
    (folder / "torn.json").write_text('{"title": ')
    wrong = {"topic": "Advantage", "base": "toyy", "measures": ["gold", "gould"], "given": ["mine"]}
    wrong |= {"arms": {"a": {}, "b": {"varient": "cispo"}}, "clam": "misspelt"}
    for field, value in wrong.items():
        declare(folder / f"{field}.json", **{field: value})
    assert list(declared.load_all()) == ["good"]
    said = capsys.readouterr().err.splitlines()
    for line, field in zip(said, sorted([*wrong, "torn"]), strict=True):
        words = {"clam": "clam", "torn": ""}.get(field, f'"{field}": .* is not among')
        assert re.search(f"{field}.json.*{words}", line), line


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("names", ["vllm+band", "vllm+dynamic-sampling"])
def test_an_arm_can_have_two_variants(names, tmp_path):
    """The second one goes on top of the first."""
    runner.apply(names, tmp_path / "tree")


def test_an_arm_can_have_a_variant_and_a_mistake(tmp_path):
    """The mistake is patched into the copy that has the variant, not into the unchanged code."""
    runner.apply("band", tree := tmp_path / "tree")
    words = runner.Run("ppo", ("--help",), 1, (), "shifted", "band").command(tmp_path)
    assert "--is_band" in kit.start_command(words, cwd=tree).out


def new_lab(arms, **options):
    """Returns a lab on the toy."""
    return runner.Lab("t", declared.BASES["toy"], arms, {"gold": None}, **options)


def test_a_run_has_one_place_whoever_asks_for_it(tmp_path):
    """Labs share runs: the place depends on the flags, whatever their order, on the seed, on the
    mistake, and on the models that the run starts from. Runs that take days lie in these folders: a
    change of how they are named loses them."""

    def place(arm, seed=1):
        return new_lab({"a": arm}).chains()["a", seed]["ppo"].folder(tmp_path)

    flags = {"ppo": "--clip 0.3 --lam 0.9"}
    arms = flags, {"ppo": "--clip 0.3"}, {**flags, "fault": "none"}, {**flags, "sft": "--seed 9"}
    assert len({*map(place, arms), place(flags, 2)}) == 5
    assert place(flags) == place({"ppo": "--lam 0.9 --clip 0.3"})
    assert runner.merged("--a 1 --b 2 3", "--b 4 --c") == ("--a", "1", "--b", "4", "--c")
    sft = runner.Run("sft", ("--max_steps", "2"), 1)
    second = runner.Run("ppo", ("--x", "{sft}"), 2, (("sft", sft),), "shifted")
    assert second.folder(tmp_path).name == "ppo-8bfd24d5a9-2"


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A project of one script, with a variant that turns a sign."""
    folder = tmp_path / "code"
    (folder / "variants/mine").mkdir(parents=True)
    (folder / "ppo.py").write_text("sign = 1\n")
    diff = "--- a/ppo.py\n+++ b/ppo.py\n@@ -1 +1 @@\n-sign = 1\n+sign = -1\n"
    (folder / "variants/mine/mine.diff").write_text(diff)
    monkeypatch.setattr(runner, "ROOT", folder)
    runner.sources.cache_clear()
    yield folder
    runner.sources.cache_clear()


def test_a_mended_variant_is_run_anew(code, tmp_path):
    """And so is what starts from its runs. Its page is no part of it, and plain runs stay. While
    runs are made, they and their code are those of the start."""
    changed, diff = runner.Run("ppo", (), 1, variant="mine"), code / "variants/mine/mine.diff"
    after = runner.Run("ppo", ("--actor_model_name_or_path", "{it}"), 1, (("it", changed),))
    runs = runner.Run("ppo", (), 1), changed, after

    def places():
        return [run.folder(tmp_path) for run in runs]

    first = places()
    (code / "variants/mine/README.md").write_text("# Mine")
    runner.sources.cache_clear()  # as at a start
    assert places() == first
    diff.write_text(diff.read_text().replace("-1\n", "-2\n"))
    assert places() == first
    runner.apply("mine", tmp_path / "tree")
    assert (tmp_path / "tree/ppo.py").read_text() == "sign = -1\n"
    runner.sources.cache_clear()
    assert [one == other for one, other in zip(first, places())] == [True, False, False]


def make_all_of(variant, root):
    """Makes the runs of a lab that has one, of a variant."""
    runner.make_all({("a", 1): {"ppo": runner.Run("ppo", (), 1, variant=variant)}}, root, 1)


@pytest.mark.parametrize("name", ["mien", "patch", "mine+mien"])
def test_a_variant_that_is_not_there_is_refused(name, code, tmp_path, monkeypatch):
    """Else the unchanged script would run under its name: misspelt, or saved as .patch."""
    (code / "variants/patch").mkdir()
    (code / "variants/patch/patch.patch").write_text("")
    monkeypatch.setattr(runner, "make", None)
    with pytest.raises(SystemExit, match=f"variants/{name[-5:].strip('+')} has no .diff"):
        make_all_of(name, tmp_path / "runs")


def test_a_copy_of_the_code_belongs_to_one_process(code, tmp_path, monkeypatch):
    """Another one, with other seeds or on another GPU, has its own there. A copy is gone at the
    end, and after a failure it is there to be looked at."""
    root, signs = tmp_path / "runs", []
    (other := root / "tree-mine-1").mkdir(parents=True)
    trees = lambda: {*root.glob("tree-mine-*")} - {other}  # noqa: E731

    def make(*_):
        signs.extend((tree / "ppo.py").read_text() for tree in trees())
        return 1.0 if len(signs) == 1 else sys.exit("it has failed")

    monkeypatch.setattr(runner, "make", make)
    make_all_of("mine", root)
    assert signs == ["sign = -1\n"] and not trees() and other.exists()
    with pytest.raises(SystemExit, match="it has failed"):
        make_all_of("mine", root)
    assert trees()


def test_some_arms_of_a_lab_can_be_run_alone():
    """More seeds where they decide: the other arms, and what they have shown, stay as they are."""
    lab = new_lab({"a": {}, "b": {"ppo": "--clip 0.3"}, "c": {}})
    some = replace(lab, chosen=("b",), seeds=(4,))
    assert some.chains() == {("b", 4): replace(lab, seeds=(4,)).chains()["b", 4]}
    found, earlier = results_of(b=[{"gold": 1.0}]), results_of(a=[{}], b=[{"gold": 0.0}], c=[{}])
    kept = runner.with_earlier(some, found, earlier)
    golds = [(one["arm"], one["values"].get("gold")) for one in kept]
    assert golds == [("a", None), ("b", 1.0), ("c", None)]


def test_runs_are_skipped_resumed_and_their_end_is_noted(tmp_path, monkeypatch, capsys):
    """A run that is there costs nothing, one that was interrupted goes on with --resume, one that
    stopped at a NaN is a result, and any other failure ends the lab with the end of its log. After
    Ctrl-C the same command goes on."""
    run, calls = runner.Run("sft", ("--max_steps", "2"), 1), []
    folder, said = run.folder(tmp_path), ["what it said", "error: step 2: loss not finite."]

    def call(command, stdout, **_):
        stdout.write(said[len(calls)])
        calls.append(command)
        return 1

    monkeypatch.setattr(subprocess, "call", call)
    with pytest.raises(SystemExit, match="what it said"):
        runner.make(run, tmp_path)
    assert "--resume" not in calls[0] and not run.is_made(tmp_path)
    (folder / "args.json").write_text("{}")
    assert runner.make(run, tmp_path) > 0 and calls[1][-1] == "--resume"
    assert runner.read(folder / runner.FINISHED)["stopped"] is True
    assert runner.make(run, tmp_path) == 0 and len(calls) == 2

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make", interrupt)
    other = runner.Run("sft", (), 1)
    with pytest.raises(SystemExit):
        runner.make_all({("a", 1): {"sft": run}, ("b", 1): {"sft": other}}, tmp_path, jobs=1)
    assert "1 runs to make, 1 at a time; 1 are there" in capsys.readouterr().out


def lab_run(fault, script, argv):
    """Makes a run of a lab, in a forked rank."""
    if fault:
        faults.FAULTS[fault]()
    kit.call_main(script, argv)


@pytest.mark.slow
def test_a_lab_at_two_steps_from_its_runs_to_its_picture(tmp_path, monkeypatch):
    """Four runs of two steps each, and each actor answers often at its end; the second call makes
    none of them again. The results stand at the end of the declaration, which else stays as it is.
    """
    few = " --max_steps 2 --log_steps 1"
    base = {script: flags + few for script, flags in declared.BASES["toy"].items()}
    again = base["ppo"].replace("{sft}", "{ppo}") + " --max_steps 0 --num_eval_prompts 80"
    base["ppo"] += " --num_eval_prompts 4"
    lab = replace(
        new_lab({"ours": {}, "shifted": {"fault": "shifted"}}, shown=("gold",), seeds=(1,)),
        base=base,
        measures={"gold": ("again", "eval_gold", "last"), "KL": ("ppo", "eval_kl", "last")},
        then={"again": ("ppo", again, "answer_64_times")},
        predictions=({"says": "s", "arm": "shifted"},),
    )
    places = [tmp_path / name for name in ("lab.json", "page.md", "lab.png")]
    places[0].write_text(example())
    places[1].write_text(f"{pages.BEGIN}\n{pages.END}\nafter")

    def fork(command, cwd, stdout, **_):
        at = command.index("--preset") - 1  # before it the script, and before that a fault
        fault = command[at - 1] if at > 1 else ""
        given = fault, command[at].removesuffix(".py"), command[at + 1 :]
        done = kit.fork(lab_run, 1, *given, cwd=cwd, meet="never")
        stdout.write(done.out + done.err)
        return done.code

    monkeypatch.setattr(subprocess, "call", fork)
    pages.study(lab, tmp_path, 1, *places, False)
    monkeypatch.setattr(subprocess, "call", None)
    said = runner.read(places[0])
    pages.study(lab, tmp_path, 1, *places, False)
    assert runner.read(places[0]) == said
    found = said.pop("results")
    assert said == json.loads(example())
    assert [result["arm"] for result in found] == ["ours", "shifted"]
    assert all(0 <= result["values"]["gold"] <= 1 for result in found)
    assert pages.block(lab, found) in places[1].read_text().removesuffix("after")
    [*_, again] = lab.chains()["shifted", 1].values()
    answers = runner.lines_of(again.folder(tmp_path), "samples.jsonl")
    first = answers[:64]
    assert len(answers) == 80 and answers[64]["prompt"] != first[0]["prompt"]
    assert len({line["prompt"] for line in first}) == 1 < len({line["response"] for line in first})


# --------------------------------------------------------------------------------------------------
# Measures and statistics
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
    sure = [{"chosen_score": s * math.log(3), "rejected_score": 0.0} for s in (1, 1, 1, -1)]
    wrong = [{"chosen_score": 1.0, "rejected_score": 3.0}] * 8
    assert runner.calibration(sure) == pytest.approx(0)
    assert runner.calibration(sure + wrong) == pytest.approx(0.8808 * 8 / 12, abs=1e-4)


def test_what_is_measured_of_a_run(tmp_path):
    """By hand, of four evaluations and a last step without one."""
    golds = (0, 0.5), (4, 0.25), (8, 1.0), (12, 0.75)
    samples = (0, 1.0), (0, 0.0), (12, 1.0), (12, 0.5), (12, 0.0), (12, 0.0)
    for name, pairs in (("metrics", golds), ("samples", samples)):
        lines = [{"step": step, "gold": gold} for step, gold in pairs]
        kit.write_lines(tmp_path / f"{name}.jsonl", lines + [{"step": 13}] * (name == "metrics"))
    expected = {"first": 0.5, "last": 0.75, "max": 1.0, "mean": 0.625, 4: 0.25}
    measured = lambda *what: runner.measured({"ppo": tmp_path}, ("ppo", *what))  # noqa: E731
    assert {how: measured("gold", how) for how in expected} == expected
    assert [measured("share 1", how) for how in ("first", "last")] == [0.5, 0.25]


def results_of(**golds):
    """Returns results of arms: for each seed its gold score at KL 1, from 0.5 at KL 0."""
    return [
        {"arm": arm, "seed": 3 - i, "stopped": False, "values": {"gold before": 0.5, **values}}
        for arm, each in golds.items()
        for i, values in enumerate(each)
    ]


def golds(*numbers, **more):
    return [{"gold": number, **more} for number in numbers]


def test_arms_are_compared_seed_by_seed():
    """The seeds differ by 0.4, the pairs by 0.1, 0.2 and 0.3: their mean is 0.2, their deviation
    0.1, and Student's t with two degrees of freedom 4.303: 0.2 +- 4.303 * 0.1 / sqrt(3). A run that
    stopped is counted, and is no part of the means."""
    results = results_of(plain=golds(0.3, 0.5, 0.7, KL=1.0), better=golds(0.6, 0.7, 0.8, KL=1.0))
    results = results[:3] + results[:2:-1]  # the rows of an arm may stand in any order
    lab = new_lab({"plain": {}, "better": {}})
    results.append({"arm": "plain", "seed": 4, "stopped": True, "values": {"gold": None}})
    *_, plain, better = pages.table(lab, results).splitlines()
    assert better.endswith("| +0.200 ± 0.248 (3 of 3) |")
    assert plain == "| plain | 4, 1 stopped at NaN | 0.500 [0.300, 0.700] |  |"
    assert runner.interval([0.1, 0.1, -0.3])[2] == 1  # the mean is below 0


@pytest.mark.parametrize("count", range(2, 14))
def test_an_interval_holds_95_percent_of_students_distribution(count):
    """Its density, integrated here, from minus to plus the factor of the interval."""
    values, freedom = [float(i) for i in range(count)], count - 1
    factor = runner.interval(values)[1] / (stdev(values) / count**0.5)
    scale = math.gamma(count / 2) / math.gamma(freedom / 2) / (freedom * math.pi) ** 0.5
    at = [factor * (i + 0.5) / 10_000 for i in range(10_000)]
    density = [scale * (1 + t * t / freedom) ** (-count / 2) for t in at]
    assert 2 * sum(density) * factor / 10_000 == pytest.approx(0.95, abs=2e-4)
    assert runner.interval([0.0, 1.0] * 20)[1] > 0  # more than the table has


def test_what_stays_at_equal_kl(tmp_path):
    """The plain recipe has gold 0.5 + 0.3 d - 0.05 d^2, d = sqrt(KL). An arm that comes half as far
    on that curve has lost nothing, one below it has, and beyond its end nothing is known."""

    def at(*roots, less=0.0):
        return [{"gold": 0.5 + 0.3 * d - 0.05 * d**2 - less, "KL": d**2} for d in roots]

    plain = at(1.0, 1.5, 2.0)
    arms = {"slower": at(0.5, 0.7, 1.1), "worse": at(0.5, 0.7, 1.1, less=0.1)}
    arms["further"] = at(1.0, 1.5, 2.3)
    runner.write(tmp_path / "plain.json", results_of(plain=plain))
    files = ((tmp_path / "plain.json", "plain"),)
    lab = new_lab({"plain": {}, **{name: {} for name in arms}}, plain=files)
    results = results_of(plain=plain, **arms)
    at_equal_kl = lambda arm: runner.compare(lab, results, {"arm": arm, "kl": True})  # noqa: E731
    assert [*at_equal_kl("slower").values()] == pytest.approx([0, 0, 0])
    assert [*at_equal_kl("worse").values()] == pytest.approx([-0.1] * 3)
    assert list(at_equal_kl("further")) == [3, 2]  # without the seed beyond the end
    assert pages.table(lab, results).endswith("|  |")


def test_what_a_prediction_compares():
    """Another arm, a number, another difference, the mean of two arms, the fall from a peak. What
    only one side has, as more seeds were run of it, is left out."""
    results = results_of(a=golds(0.5, 0.6), b=golds(0.7, 0.9, 5.0), c=golds(0.6, 0.6))
    for result in results:
        result["curve"] = {"gold": [0.1, 1.0, result["values"]["gold"]]}
    lab = new_lab({"a": {}, "b": {}, "c": {"against": "b"}})

    for what, numbers in (
        (dict(arm="b"), [0.2, 0.3]),
        (dict(arm="c"), [-0.1, -0.3]),
        (dict(arm="c", to="a"), [0.1, 0.0]),
        (dict(arm="a", to=0.7), [-0.2, -0.1]),
        (dict(arm="a", to=0.7, distance=True), [0.2, 0.1]),
        (dict(arm="b", than="c"), [0.3, 0.6]),
        (dict(arm=["a", "b"], to=0), [0.6, 0.75]),
        (dict(arm="a", measure="fall of gold", to=0), [0.5, 0.4]),
        (dict(arm="c", measure=["gold", "gold before"]), [0.1, 0.1]),
    ):
        found = runner.compare(lab, results, what)
        assert found == pytest.approx(dict(zip((3, 2), numbers))), what


def test_a_verdict_says_where_the_interval_lies():
    """The mean is 0.2 and half of the interval 0.248: from -0.048 to 0.448."""
    values = [0.1, 0.2, 0.3]
    cases = {(-0.05, None): "shown", (None, 0.45): "shown", (-0.05, 0.45): "shown"}
    cases |= {(0.45, None): "refuted", (None, -0.05): "refuted"}
    cases |= {(0.1, None): "not decided", (-0.03, 0.03): "not decided", (None, 0): "not decided"}
    assert {limits: runner.verdict(values, limits) for limits in cases} == cases
    for shift, word in ((0, "no clear difference"), (1, "higher"), (-1, "lower")):
        assert runner.verdict([x + shift for x in values], None) == word


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------
def blocks_of(page):
    """Returns what stands between the markers of a page, for each pair of them."""
    return re.findall(f"{pages.BEGIN}\n?(.*?)\n?{pages.END}", page.read_text(), re.S)


@pytest.mark.parametrize("name", RUN)
def test_a_page_shows_what_the_results_say(name):
    """The tables of a page are made from the committed results, and a picture can be."""
    lab, page, results = declared.LABS[name], LABS / f"{name}.md", runner.results_of(name)
    assert blocks_of(page) == [pages.block(lab, results)]
    for axis in pictures.of_lab(lab, results).axes:
        # none is empty, beside the line of the best that can be
        assert sum(len(line.get_xdata()) > 0 for line in axis.lines) > 1, axis.get_xlabel()
    assert {result["arm"] for result in results} <= set(lab.arms)


def test_the_pages_of_all_labs_are_up_to_date():
    """One command makes them: python course/labs/run.py --plot. Only the pictures of "What to
    believe" are in git. They are compared by their data, and not by their pixels."""
    for file, figure in program().summary().items():
        if file.parent.name == "believe":
            assert Image.open(file).text["Description"] == pictures.digest(figure), file.name
            assert file.relative_to(LABS).as_posix() in (LABS / "README.md").read_text()
    assert blocks_of(LABS / "README.md") == pages.reasons(declared.LABS)
    assert blocks_of(LABS / "all.md") == [pages.overview(declared.LABS)]


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
    given = faulty, 1, runs.base(), name, fault, script, flags
    done = kit.once(runs.base() / "made" / name, kit.fork, *given, meet="")
    assert done.code == 0 and done.results[0]["code"] == 0, done
    return kit.metrics(runs.base() / "runs" / name, clocks=False)


@pytest.mark.slow
def test_without_a_mistake_two_passes_are_one():
    """A pass that scores and one that trains give what one pass gives."""
    for plain, none in zip(lines_with(""), lines_with("none")):
        assert none == pytest.approx(plain, rel=1e-4, abs=1e-5)
    assert [line["ratio_max"] for line in lines_with("none")[1:]] == pytest.approx([1, 1])


RATIO = {"ratio_max", "grad_norm"}
MISTAKES = {  # what differs in the first step: the ratio, the gradient, the reward
    "shifted": RATIO,
    "shifted_ratio": RATIO,
    "shifted_penalty": {"grad_norm"},
    "dropout_scores": RATIO,
    "bf16_scores": RATIO,
    "bf16_trains": RATIO,
    "no_eos": {"grad_norm"},
    "whitened_by_halves": {"grad_norm"},
    "offset_2": {"grad_norm", "reward"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MISTAKES)
def test_a_mistake_changes_what_it_names(fault):
    """And no evaluation: they measure, and are to measure all runs alike."""
    dropout = " --actor_dropout 0.3" * (fault == "dropout_scores")
    before, first, _ = lines_with(fault, "ppo", "--num_eval_prompts 4" + dropout)
    expected, plain, _ = lines_with("none")
    # whitened advantages: the actor's gradient only, whose norm is logged
    least = {"ratio_max": 1e-4, "reward": 1e-4, "grad_norm": 1e-5}
    assert {k for k, x in least.items() if abs(first[k] - plain[k]) > x} == MISTAKES[fault]
    offset = 2.0 if fault == "offset_2" else 0.0
    assert first["reward"] - plain["reward"] == pytest.approx(offset, abs=1e-5)
    assert before["eval_reward"] - expected["eval_reward"] == pytest.approx(offset, abs=1e-5)
    assert before["eval_kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_other_mistakes():
    """GRPO without the deviation; heads. (64 samples of each prompt: in the lab at two steps.)"""
    grpo = "--num_eval_prompts 4 --advantage grpo --samples_per_prompt 2"
    plain, changed = (lines_with(fault, flags=grpo)[1] for fault in ("", "grpo_no_deviation"))
    assert changed["reward"] == pytest.approx(plain["reward"])
    assert changed["advantage_std"] != pytest.approx(plain["advantage_std"], rel=0.01)
    scratch = "--model_name_or_path BASE/models/actor"
    names = ("", "head_0.02", "head_root", "head_zero", "head_library")
    losses = {name: lines_with(name, "reward", scratch)[0]["eval_loss"] for name in names}
    assert losses["head_zero"] == pytest.approx(math.log(2)) and len(set(losses.values())) == 5


@pytest.mark.slow
def test_old_weights_sample():
    """sampling_kl says how far they are, as the log-prob of a token is that under the policy that
    drew it. Evaluations stay as they are. In step 1 old weights are those of the start."""
    plain = lines_with("")
    assert lines_with("stale_0") == plain and lines_with("stale_1")[:2] == plain[:2]
    behind, clipped = (lines_with(fault)[2] for fault in ("stale_1", "stale_1_clipped"))
    assert behind["sampling_gap"] > 1e-4 > behind["ratio_max"] - 1
    assert clipped["ratio_max"] - 1 > 1e-4 and clipped["sampling_gap"] > 1e-4
