"""What labs and variants share: runs over arms and seeds, then their results, table and picture.

A run that was interrupted goes on where it was; one that is there is not made again, also if
another lab has made it.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from math import comb, exp, isnan, log, nan, sqrt
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- table -->"
MARKERS = "os^Dv<>PX*"  # of the seeds
EDGE = 4.2  # of the axis of sqrt(KL) where a run may go far
OF_LAST = ("fault", "variant", "ranks")  # what an arm may say of its last run
EVERY = 60  # seconds between two lines about runs that are being made
# Seconds of a run on an idle core, at so much of a flag: labs/README.md
TYPICAL = {
    "sft": (68, "--num_train_epochs", 3),
    "reward": (77, "--num_train_epochs", 2),
    "ppo": (35, "--max_steps", 40),
}
FINISHED = "finished.json"  # written into a run's folder when it has ended by itself
# Student's t for an interval of 95 %, with 1 to 9 degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
REDUCERS = {"last": lambda v: v[-1], "first": lambda v: v[0], "max": max, "mean": statistics.mean}
CURVE = ("step", "kl", "gold", "reward", "response_length")  # kept of each evaluation
LABELS = {
    "kl": "KL to the SFT model, nats a response",
    "sqrt kl": "sqrt(KL to the SFT model)",
    "gold": "gold score of held-out prompts",
    "reward": "reward of held-out prompts",
}


@dataclass(frozen=True)
class Lab:
    """What is compared: runs of each arm and seed, the whole pipeline up to one script.

    An arm is a dict: {script: its flags, over those of `base`}, and for the last script also
    "fault" (of labs/faults.py), "variant" (of variants/), "best_of" (samples of each prompt),
    "ranks". "against" names the arm that it is compared with, which is the lab's first by default.
    """

    title: str
    base: dict  # {script: flags}, in order; {name} in flags is the folder of an earlier run
    arms: dict
    measures: dict  # {heading: (script, metric, how)}, see measured()
    shown: tuple = ()  # the measures that the picture shows
    logarithmic: tuple = ()
    until: str = "ppo"  # the last script
    then: dict = field(default_factory=dict)  # {name: (script, flags, fault)}: runs after it
    curves: tuple = ()  # or the picture shows these pairs of axes: ("sqrt kl", "gold")
    panels: bool = False  # or there is one panel for each arm, gold against sqrt(KL)
    limits: dict = field(default_factory=dict)  # {heading: the best that can be}
    hidden: tuple = ()  # metrics that mean something else in a run with a variant
    compared: tuple = ("gold",)  # measures; or pairs of measures of the same run
    plain: tuple = ()  # pairs: a file of results, and its arm that follows the plain recipe
    models: dict = field(default_factory=dict)  # runs before: {name: (script, flags[, variant])}
    given: dict = field(default_factory=dict)  # {name: a folder that is there}
    seeds: tuple = (1, 2, 3)
    chosen: tuple = ()  # or the runs of these arms alone are made

    def chains(self):
        """Returns {(arm, seed): {name: Run}}, where each Run comes after its parents."""
        made, chains = {}, {}
        for name, (script, flags, *variant) in self.models.items():
            given = tuple(self.given.items())
            made[name] = Run(script, merged(flags), 1, given, variant="".join(variant))
        for seed in self.seeds:
            for name in self.chosen or self.arms:
                arm, runs = self.arms[name], {**made}
                for script, flags in self.base.items():
                    last = script == self.until
                    own = {key: arm[key] for key in OF_LAST if key in arm} if last else {}
                    words = merged(flags, arm.get(script, ""))
                    runs[script] = Run(script, words, seed, self.parents(runs, words), **own)
                    if last:
                        break
                for key, (script, flags, fault) in self.then.items():
                    words = merged(flags)
                    runs[key] = Run(script, words, seed, self.parents(runs, words), fault)
                chains[name, seed] = runs
        return chains

    def parents(self, runs, words):
        """Returns those of the given folders and of the runs before that flags name."""
        known = {**self.given, **runs}.items()
        return tuple(pair for pair in known if f"{{{pair[0]}}}" in " ".join(words))


# ---- Runs ----
@dataclass(frozen=True)
class Run:
    """One run of a script: its flags, and the runs whose models it starts from."""

    script: str  # "ppo"
    flags: tuple  # words, in which {name} is the folder of a parent
    seed: int
    parents: tuple = ()  # pairs: name, and a Run or a path
    fault: str = ""  # of labs/faults.py
    variant: str = ""  # of variants/, applied to a copy of the code
    ranks: int = 1

    def folder(self, root):
        """Returns its output folder. Equal runs of several labs have the same."""
        parents = [str(place(parent, Path())) for _, parent in self.parents]
        several = (self.ranks,) if self.ranks > 1 else ()
        text = repr((self.script, self.flags, self.fault, self.variant, parents, *several))
        return root / f"{self.script}-{hashlib.sha1(text.encode()).hexdigest()[:10]}-{self.seed}"

    def command(self, root):
        """Returns the command's words, for the folder of the code with or without a variant."""
        at = {name: place(parent, root) for name, parent in self.parents}
        flags = [word.format(**at) if "{" in word else word for word in self.flags]
        fault = [str(ROOT / "labs/faults.py"), self.fault] if self.fault else []
        seed = [] if "--seed" in flags else ["--seed", str(self.seed)]
        several = ["-m", "torch.distributed.run", f"--nproc_per_node={self.ranks}"]
        start = [sys.executable, *(several if self.ranks > 1 else []), *fault, f"{self.script}.py"]
        return [*start, "--preset", "toy", *flags, *seed, "--output_dir", str(self.folder(root))]

    def is_made(self, root):
        return (self.folder(root) / FINISHED).exists()


def place(parent, root):
    """Returns the path of a run's parent."""
    return parent.folder(root) if isinstance(parent, Run) else parent


def merged(*texts):
    """Returns the words of several texts of flags; a later text's flag replaces an earlier's."""
    flags, name = {}, None
    for word in shlex.split(" ".join(texts)):
        if word.startswith("--"):
            name = word
            flags[name] = []
        else:
            flags[name].append(word)
    return tuple(word for name in sorted(flags) for word in [name, *flags[name]])


def apply(variant, folder):
    """Copies the code to `folder`, and applies a variant there."""
    shutil.rmtree(folder, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", ".venv", "output", "__pycache__", "variants", "labs")
    shutil.copytree(ROOT, folder, ignore=skipped)
    for file in (ROOT / "variants" / variant).glob("*.py"):
        shutil.copy(file, folder)
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # of our repository
    for diff in (ROOT / "variants" / variant).glob("*.diff"):
        subprocess.run(["git", "apply", diff], cwd=folder, env=outside, check=True)


def make(run, root):
    """Makes a run unless it is there. Returns the seconds that it took, 0 if it was there."""
    folder, began = run.folder(root), time.time()
    if run.is_made(root):
        return 0
    command, output = run.command(root), Path(f"{folder}.log")
    resumed = (folder / "args.json").exists()
    command += ["--resume"] if resumed else []
    folder.mkdir(parents=True, exist_ok=True)
    tree = root / f"tree-{run.variant}" if run.variant else ROOT
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    code = 0
    if not (folder / "config.json").exists():  # written when a run has ended
        with open(output, "a") as log:
            options = dict(stdout=log, stderr=subprocess.STDOUT, cwd=tree, env=env)
            code = subprocess.call(command, **options)
    stopped = code != 0 and (
        next(folder.glob("nonfinite_rank*.jsonl"), None) is not None
        or (code == 1 and "not finite" in output.read_text())
    )
    if code != 0 and not stopped:
        tail = output.read_text()[-1500:]
        raise SystemExit(f"{shlex.join(command)}\nended with code {code}:\n{tail}")
    seconds = time.time() - began
    record = {"seconds": None if resumed else round(seconds), "stopped": stopped}
    (folder / FINISHED).write_text(json.dumps(record))
    return seconds


def expected(run):
    """Returns about how many seconds a run takes on an idle core.

    A run of no steps, as those of --again, starts and evaluates all the same.
    """
    seconds, flag, usual = TYPICAL.get(run.script, TYPICAL["ppo"])
    given = dict(zip(run.flags, run.flags[1:])).get(flag, usual)
    return seconds * max(float(given) / usual, 0.25)


def depths_of(chains):
    """Returns {run: how many runs it comes after}. chains: see Lab.chains."""
    return {run: i for runs in chains.values() for i, run in enumerate(runs.values())}


def minutes_of(runs, depths, jobs):
    """Returns about how many minutes runs take, `jobs` at a time; those of one depth go together.

    depths: see depths_of().
    """
    seconds = 0
    for depth in {depths[run] for run in runs}:
        each = [expected(run) for run in runs if depths[run] == depth]
        seconds += max(max(each), sum(each) / jobs)
    return seconds / 60


def make_all(chains, root, jobs):
    """Makes the runs of a lab, `jobs` at a time: first those from which others start.

    chains: see Lab.chains. After Ctrl-C a run saves a checkpoint, and a second one ends it at once.
    """
    depths = depths_of(chains)
    left = [run for run in depths if not run.is_made(root)]
    said = f"about {minutes_of(left, depths, jobs):.0f} min on {jobs} idle cores"
    there = len(depths) - len(left)
    print(f"{len(left)} runs to make, {jobs} at a time, {said}; {there} are there", flush=True)
    for variant in {run.variant for run in left} - {""}:
        apply(variant, root / f"tree-{variant}")
    count, began, done = len(left), time.time(), []
    for depth in range(max(depths.values(), default=0) + 1):
        pool = ThreadPoolExecutor(jobs)
        waiting = {pool.submit(make, run, root): run for run in left if depths[run] == depth}
        try:
            while waiting:
                for future in wait(waiting, EVERY, FIRST_COMPLETED).done:
                    run, seconds = waiting.pop(future), future.result()
                    done.append(run)
                    left.remove(run)
                    what = f"{run.script} {run.seed} {run.variant}{run.fault} {' '.join(run.flags)}"
                    print(f"[{len(done)}/{count}] {what}: {seconds:.0f} s", flush=True)
                if waiting:
                    print(f"    {heartbeat(left, done, depths, jobs, began)}", flush=True)
        except KeyboardInterrupt:
            print("\nstopping: run the same command again to go on where it is now", flush=True)
            with suppress(KeyboardInterrupt):
                pool.shutdown(cancel_futures=True)
            raise SystemExit(1) from None
        finally:
            pool.shutdown(cancel_futures=True)  # those that run end by themselves


def heartbeat(left, done, depths, jobs, began):
    """Returns how long runs have taken, and about how long the others take at this pace."""
    passed = (time.time() - began) / 60
    said = f"{passed:.0f} min so far"
    if not done:
        return f"{said}, none of {len(left)} runs has ended yet"
    pace = max(passed / minutes_of(done, depths, jobs), 1)
    ahead = pace * minutes_of([*done, *left], depths, jobs) - passed
    return f"{said}, {len(left)} runs left, about {max(ahead, 0):.0f} min more"


# ---- Results ----
def lines_of(folder, name):
    """Returns the dicts of a .jsonl file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def measured(folders, spec, curve=None):
    """Returns the number that `spec` = (script, metric, how) names, or None.

    how: a key of REDUCERS, or the step. The script "curve" is the curve of best-of-n, and how is n.
    A metric "share X" is the share of the last evaluation's samples whose gold is X. "gold at EMA"
    is the actor's gold score where it was as far from the SFT model as its average is at the end,
    between two evaluations in proportion. "calibration" is that of the scores of the held-out
    pairs.
    """
    script, metric, how = spec
    if script == "curve":
        return curve[metric][curve["n"].index(how)]
    if metric == "calibration":
        return calibration(lines_of(folders[script], "judge.jsonl"))
    if metric.startswith("share "):
        samples = lines_of(folders[script], "samples.jsonl")
        step = samples[-1 if how == "last" else 0]["step"]
        golds = [line["gold"] for line in samples if line["step"] == step]
        return sum(gold == float(metric[6:]) for gold in golds) / len(golds)
    lines = lines_of(folders[script], "metrics.jsonl")
    if metric == "gold at EMA":
        lines = [line for line in lines if "eval_ema_kl" in line]
        kls, golds = ([line[key] for line in lines] for key in ("eval_kl", "eval_gold"))
        return gold_at(kls, golds, lines[-1]["eval_ema_kl"])
    records = [line for line in lines if metric in line]
    if isinstance(how, int):
        records, how = [line for line in records if line["step"] == how], "last"
    return REDUCERS[how]([line[metric] for line in records]) if records else None


def calibration(pairs):
    """Returns how far a judge's confidence is from the share of pairs in which it is right.

    Its confidence in a pair is sigmoid(abs(difference of the scores)). Pairs are put into ten bins,
    and each bin's difference has the weight of its pairs (expected calibration error [Guo 2017]).
    """
    bins = [[] for _ in range(10)]
    for pair in pairs:
        difference = pair["chosen_score"] - pair["rejected_score"]
        confidence = 1 / (1 + exp(-abs(difference)))
        bins[min(int((confidence - 0.5) * 20), 9)].append((difference > 0) - confidence)
    return sum(abs(sum(each)) for each in bins) / len(pairs)


def gold_at(kls, golds, wanted):
    """Returns the gold score with which a run first passes a KL, from its evaluations."""
    for i in range(len(kls) - 1):
        if kls[i] <= wanted <= kls[i + 1]:
            part = (wanted - kls[i]) / (kls[i + 1] - kls[i] or 1)
            return golds[i] + part * (golds[i + 1] - golds[i])
    return None


def best_of(folder, size):
    """Returns the curve of best-of-n, n = 1, 2, 4, ...: columns n, kl, gold, reward.

    Of a prompt's N = `size` samples the one with the (i+1)-th smallest reward is the best of n that
    are drawn with probability C(i, n-1) / C(N, n).  KL = log n - (n-1)/n [Gao 2022]
    """
    samples = [(line["reward"], line["gold"]) for line in lines_of(folder, "samples.jsonl")]
    ranked = [sorted(samples[i : i + size]) for i in range(0, len(samples), size)]
    curve, n = {"n": [], "kl": [], "gold": [], "reward": []}, 1
    while n <= size:
        chances = [comb(i, n - 1) / comb(size, n) for i in range(size)]
        for column, name in enumerate(("reward", "gold")):
            means = [sum(c * a[column] for c, a in zip(chances, each)) for each in ranked]
            curve[name].append(statistics.mean(means))
        curve["n"].append(n)
        curve["kl"].append(log(n) - (n - 1) / n)
        n *= 2
    return curve


def curve_of(folder, hidden):
    """Returns {name of CURVE: its value at each evaluation}, of those that the run has."""
    lines = [line for line in lines_of(folder, "metrics.jsonl") if "eval_gold" in line]
    keys = {name: name if name == "step" else f"eval_{name}" for name in CURVE}
    known = {n: key for n, key in keys.items() if key in lines[0] and key not in hidden}
    return {name: [line[key] for line in lines] for name, key in known.items()}


def rounded(value, digits=6):
    """Returns numbers with so many digits, in lists and dicts, too."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def collect(lab, chains, root):
    """Returns what the finished runs of a lab showed: a dict for each arm and seed."""
    found = []
    for (name, seed), runs in chains.items():
        run, arm = [*runs.values()][-1], lab.arms[name]
        if not run.is_made(root):
            continue
        folders = {script: each.folder(root) for script, each in runs.items()}
        hidden = lab.hidden if run.variant else ()
        ended = json.loads((run.folder(root) / FINISHED).read_text())
        result = {"arm": name, "seed": seed, "stopped": ended["stopped"]}
        if "best_of" in arm:
            result["curve"] = best_of(run.folder(root), arm["best_of"])
        elif lab.curves or lab.panels:
            result["curve"] = curve_of(run.folder(root), hidden)
        known = {head: spec for head, spec in lab.measures.items() if spec[1] not in hidden}
        values = {
            head: measured(folders, spec, result.get("curve")) for head, spec in known.items()
        }
        found.append(rounded({**result, "values": values}))
    return found


def write(file, results):
    """Writes results, a line for each run."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("[\n{}\n]\n".format(",\n".join(map(json.dumps, results))))


def read(file):
    """Returns the results in a file, [] if there is none."""
    return json.loads(file.read_text()) if file.exists() else []


# ---- Statistics ----
def by_arm(results):
    """Returns {arm: its results}, in the order of the lab."""
    arms = {}
    for result in results:
        arms.setdefault(result["arm"], []).append(result)
    return arms


def by_seed(results, measure):
    """Returns {seed: its value} of an arm's results, where there is one.

    measure: a heading, or a pair of them: then the first's value less the second's.
    """
    if isinstance(measure, tuple):
        first, second = (by_seed(results, head) for head in measure)
        return {seed: first[seed] - second[seed] for seed in first if seed in second}
    values = {result["seed"]: result["values"].get(measure) for result in results}
    return {seed: value for seed, value in values.items() if value is not None}


def baseline(lab, arm):
    """Returns the arm with which an arm is compared."""
    return lab.arms[arm].get("against", next(iter(lab.arms)))


def differences(lab, results, arm, measure, curve=None):
    """Returns {seed: by how much an arm is above its baseline}, of the seeds that both have.

    A seed's runs share their SFT model and their random numbers as far as the arms permit, so that
    pairs differ by less than seeds do. Of a pair of measures: by how much the first is above the
    second, in the same run. curve: of plain_curve(); it is subtracted from each of the two.
    """
    found = by_arm(results)
    if isinstance(measure, tuple):
        return by_seed(found.get(arm, []), measure)

    def values(name):
        each = found.get(name, [])
        own, kls = by_seed(each, measure), by_seed(each, "KL") if curve else {}
        return {seed: own[seed] - curve(kls[seed]) for seed in kls} if curve else own

    own, other = values(arm), values(baseline(lab, arm))
    return {seed: own[seed] - other[seed] for seed in own if seed in other}


def plain_curve(lab):
    """Returns gold as a function of KL, as the plain recipe has it, or None if no run shows it.

    A parabola in sqrt(KL), as in [Gao 2022], fitted on all evaluations of lab.plain. Further than
    a twentieth beyond the largest sqrt(KL) of these it is NaN: nothing is known there.
    """
    points = [
        point
        for file, arm in lab.plain
        for result in by_arm(read(file)).get(arm, [])
        for point in points_of(result)
    ]
    if not points:
        return None
    roots, golds = zip(*points)
    parabola = numpy.polyfit(roots, golds, 2)

    def gold(kl):
        root = sqrt(max(kl, 0))
        return float(numpy.polyval(parabola, root)) if root <= 1.05 * max(roots) else nan

    return gold


def points_of(result):
    """Returns the pairs sqrt(KL), gold of a run's evaluations that were kept."""
    if "curve" in result and "kl" in result["curve"]:
        return list(zip(along("sqrt kl", result["curve"]), result["curve"]["gold"]))
    values = result["values"]
    if "KL" not in values or "gold before" not in values:
        return []
    return [(0.0, values["gold before"]), (sqrt(max(values["KL"], 0)), values["gold"])]


def interval(values):
    """Returns the mean of a list, half its 95 % interval, and how many have the mean's sign.

    Student's t with one degree of freedom less than there are values.
    """
    mean = statistics.mean(values)
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / sqrt(len(values))
    return mean, half, sum(value * mean > 0 for value in values)


# ---- Table and picture ----
def table(lab, results):
    """Returns the table in Markdown.

    Of each measure the mean, with the smallest and largest in brackets. Then how far an arm is
    above its baseline, seed by seed: the mean of the differences, half of their 95 % interval, and
    how many of them have the mean's sign. At equal KL: what is left of that when the curve of the
    plain recipe is subtracted (empty where one of the runs is beyond its end).
    """
    columns, found = columns_of_differences(lab), by_arm(results)
    several = len({baseline(lab, arm) for arm in lab.arms}) > 1 and columns
    heads = ["arm", "runs", *lab.measures, *(["baseline"] if several else []), *columns]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for arm in lab.arms:
        each, other = found.get(arm, []), baseline(lab, arm)
        stopped = sum(result["stopped"] for result in each)
        runs = str(len(each) or "not run yet") + (f", {stopped} stopped at NaN" if stopped else "")
        cells = [arm, runs, *(cell(each, head) for head in lab.measures)]
        cells += [other if other != arm else ""] if several else []
        for measure, curve in columns.values():
            own = arm == other and isinstance(measure, str)
            cells.append("" if own else above(differences(lab, results, arm, measure, curve)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_earlier(rows):
    """Returns the table of runs of which mean, smallest and largest were kept, and no more."""
    texts = [
        [str(c) if not isinstance(c, list) else "{:.3f} [{:.3f}, {:.3f}]".format(*c) for c in row]
        for row in (row.values() for row in rows)
    ]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *texts]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns_of_differences(lab):
    """Returns {heading: measure, curve} of the table's last columns; curve: see differences()."""
    curve, columns = plain_curve(lab), {}
    names = {baseline(lab, arm) for arm in lab.arms}
    other = f'"{names.pop()}"' if len(names) == 1 else "its baseline"
    for measure in lab.compared:
        name = " above ".join([measure, other] if isinstance(measure, str) else measure)
        columns[name] = measure, None
        if measure == "gold" and curve:
            columns["the same at equal KL"] = measure, curve
    return columns


def above(found):
    """Returns the text of a cell of such a column: "+0.039 ± 0.021 (3 of 3)"."""
    values = list(found.values())
    if len(values) < 2 or any(map(isnan, values)):
        return ""
    mean, half, alike = interval(values)
    return f"{mean:+.3f} ± {half:.3f} ({alike} of {len(values)})"


def values_of(results, head):
    """Returns the values of a measure in those of the results that have one."""
    values = [result["values"].get(head) for result in results]
    return [value for value in values if value is not None]


def cell(results, head):
    """Returns the text of a cell of the table."""
    values = values_of(results, head)
    if not values:
        return ""
    numbers = statistics.mean(values), min(values), max(values)
    plain = [x == 0 or 0.0005 <= abs(x) < 1000 for x in numbers]
    texts = [f"{x:.3f}" if ok else f"{x:.1e}" for x, ok in zip(numbers, plain)]
    return "{} [{}, {}]".format(*texts)


def draw(lab, results, file):
    """Draws the picture: curves, or the measures shown and gold against sqrt(KL)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    if lab.panels:
        draw_panels(figure, lab, results)
    elif lab.curves:
        draw_curves(figure, lab, results)
    else:
        draw_points(figure, lab, results)
    figure.get_layout_engine().set(w_pad=0.1)
    figure.suptitle(lab.title)
    figure.savefig(file, dpi=80)


def draw_points(figure, lab, results):
    """Draws a row for each arm and a point for each run; a line joins the runs of one seed.

    The mark says which seed. Measures of one kind have one axis. The last panel shows gold against
    sqrt(KL), an arm in the colour of its name, beside the curve of the plain recipe.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    arms = list(by_arm(results).items())[::-1]
    seeds = sorted({result["seed"] for result in results})
    many = [[0.8 * x for x in colormaps["turbo"](i / len(arms))[:3]] for i in range(len(arms))]
    colours = many if len(arms) > 10 else [f"C{i}" for i in range(len(arms))]
    has_kl = {"KL", "gold"} <= set(lab.measures)
    figure.set_size_inches(2.6 * (len(lab.shown) + has_kl) + 3, max(0.28 * len(arms) + 1.8, 3.6))
    axes = figure.subplots(1, len(lab.shown) + has_kl, squeeze=False)[0]
    for axis, head in zip(axes, lab.shown):
        rows = [by_seed(each, head) for _, each in arms]
        for seed, marker in zip(seeds, MARKERS):
            line = [(own[seed], row) for row, own in enumerate(rows) if seed in own]
            axis.plot(*zip(*line), "-", color="gray", alpha=0.4, linewidth=0.8)
            for x, row in line:
                axis.plot(x, row, marker, color=colours[row], alpha=0.8)
        alike = [other for other in lab.shown if kind_of(other) == kind_of(head)]
        numbers = [x for other in alike for _, each in arms for x in by_seed(each, other).values()]
        if head in lab.logarithmic:
            axis.set_xscale("log")
        elif len(alike) > 1:
            edge = 0.05 * (max(numbers) - min(numbers))
            axis.set_xlim(min(numbers) - edge, max(numbers) + edge)
        if head in lab.limits:
            axis.axvline(lab.limits[head], linestyle="--", color="gray")
        axis.set_xlabel(head)
        axis.grid(axis="x", alpha=0.3)
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.set_yticks(range(len(arms)), [name for name, _ in arms])
        axis.tick_params(labelleft=axis is axes[0])
    for label, colour in zip(axes[0].get_yticklabels(), colours):
        label.set_color(colour)
    if has_kl:
        for (_, each), colour in zip(arms, colours):
            for result in each:
                marker = MARKERS[seeds.index(result["seed"])]
                x, y = points_of(result)[-1]
                axes[-1].plot(x, y, marker, color=colour, alpha=0.8)
        draw_plain(axes[-1], lab)
    marks = [Line2D([], [], color="gray", marker=m, linewidth=0) for m in MARKERS[: len(seeds)]]
    names = [f"seed {seed}" for seed in seeds]
    figure.legend(marks, names, loc="outside lower center", fontsize="small", ncols=10)


def kind_of(head):
    """Returns what a measure measures: gold scores are drawn on one axis, wherever they are."""
    return "gold" if "gold" in head else head


def draw_plain(axis, lab):
    """Draws the plain recipe's gold against sqrt(KL), up to where it is known; names the axes."""
    curve = plain_curve(lab)
    roots = [root / 100 for root in range(1000)]
    known = [(root, curve(root**2)) for root in roots if curve and not isnan(curve(root**2))]
    if known:
        axis.plot(*zip(*known), "--", color="gray", label="plain recipe")
    axis.set(xlabel="sqrt(KL)", ylabel="gold")
    axis.grid(alpha=0.3)


def draw_panels(figure, lab, results):
    """Draws a panel for each arm, all with the same axes: gold and reward against sqrt(KL).

    Each seed has a colour. What lies beyond the right edge is said in the panel.
    """
    arms = by_arm(results)
    columns = min(len(arms), 5)
    rows = -(-len(arms) // columns)
    figure.set_size_inches(2.6 * columns, 2.7 * rows + 0.6)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axis, (arm, each) in zip(grid, arms.items()):
        draw_plain(axis, lab)
        for number, result in enumerate(each):
            curve, colour = result["curve"], f"C{number}"
            roots, seed = along("sqrt kl", curve), result["seed"]
            axis.plot(roots, curve["gold"], ".-", color=colour, label=f"gold, seed {seed}")
            axis.plot(roots, curve["reward"], ":", color=colour, label=f"reward, seed {seed}")
        end = max(max(along("sqrt kl", result["curve"])) for result in each)
        if end > EDGE:
            axis.text(EDGE, -0.15, f"on to {end:.1f} at most ", ha="right", fontsize="small")
        axis.set_title(arm, fontsize="small")
        axis.set(xlim=(0, EDGE), ylabel="", ylim=(-0.25, 2.4))
    figure.axes[0].set_ylabel("gold, and reward (dotted)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)


def draw_curves(figure, lab, results):
    """Draws lab.curves: each seed thin, the mean of the seeds thick."""
    for axis, (x, y) in zip(figure.subplots(1, len(lab.curves)), lab.curves):
        for number, (arm, each) in enumerate(by_arm(results).items()):
            colour, curves = f"C{number}", []
            for curve in [result["curve"] for result in each]:
                if x.removeprefix("sqrt ") in curve and y in curve:
                    curves.append((along(x, curve), curve[y]))
                    axis.plot(*curves[-1], color=colour, alpha=0.3, linewidth=0.8)
            length = min([len(xs) for xs, _ in curves], default=0)
            mean = [
                [statistics.mean(c[i][t] for c in curves) for t in range(length)] for i in (0, 1)
            ]
            axis.plot(*mean, ".-", color=colour, label=arm)
        axis.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(y, y))
        axis.grid(alpha=0.3)
        if y in lab.limits:
            axis.axhline(lab.limits[y], linestyle="--", color="gray")
    figure.axes[0].legend(fontsize="x-small")


def along(x, curve):
    """Returns the numbers along the axis x; "sqrt kl" is the root of the KL."""
    if x.startswith("sqrt "):
        return [sqrt(max(value, 0)) for value in curve[x.removeprefix("sqrt ")]]
    return curve[x]


# ---- All of it ----
def with_earlier(lab, found, earlier):
    """Returns results beside those of other seeds and arms that were there before."""
    made = {(result["arm"], result["seed"]) for result in found}
    kept = [old for old in earlier if (old["arm"], old["seed"]) not in made]
    order = list(lab.arms)
    return sorted(found + kept, key=lambda one: (order.index(one["arm"]), one["seed"]))


def show(chains, root, jobs):
    """Prints the commands of a lab's runs, and about how long those take that are not there."""
    depths = depths_of(chains)
    for run in depths:
        print(shlex.join(map(str, run.command(root))))
    left = [run for run in depths if not run.is_made(root)]
    said = f"{len(depths)} runs, {len(depths) - len(left)} of them are there; the others take"
    print(f"{said} about {minutes_of(left, depths, jobs):.0f} min on {jobs} idle cores")


def study(lab, root, jobs, results, page, picture, plot_only):
    """Makes the runs (unless plot_only), writes results, picture, and the table into the page.

    The table stands between the page's two markers. What there is after Ctrl-C is written, too.
    """
    if not plot_only:
        chains = lab.chains()
        try:
            make_all(chains, root, jobs)
        finally:
            if found := collect(lab, chains, root):
                write(results, with_earlier(lab, found, read(results)))
    found = read(results)
    if not found:
        raise SystemExit(f"{results} is not there: there were no runs yet")
    draw(lab, found, picture)
    print(f"{table(lab, found)}\n\nThe picture is {picture}")
    if page.exists():
        put_table(page, table(lab, found))


def put_table(page, text):
    """Writes a table between the two markers of a page."""
    before, _, after = page.read_text().split(MARK)
    page.write_text(f"{before}{MARK}\n{text}\n{MARK}{after}")


def new_parser(doc, names, runs):
    """Returns the parser of the command line that labs and variants share."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=list(names))
    parser.add_argument("--plot", action="store_true", help="make no runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--runs", type=Path, default=ROOT / runs, help="where the runs are kept")
    return parser
