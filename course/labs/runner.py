"""What labs and variants share: runs over arms and seeds, what they showed, and how arms compare.

A run that was interrupted goes on where it was; one that is there is not made again, also if
another lab has made it. course/labs/pages.py makes tables and pictures of the results.
"""

import argparse
import functools
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
from math import comb, exp, inf, isnan, log, nan, sqrt
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
DECLARED = ROOT / "course/labs/declared"
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / "output/vllm/bin/python"))  # of `make vllm`
OF_LAST = ("fault", "variant")  # what an arm may say of its last run
START = time.time_ns()  # of this process; it names the copies of the code that only it uses
EVERY = 60  # seconds between two lines about runs that are being made
FINISHED = "finished.json"  # written into a run's folder when it has ended by itself
# Student's t for an interval of 95 %, with 1 to 12 degrees of freedom. With more it is smaller, by
# a tenth at most.
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179
REDUCERS = {"last": lambda v: v[-1], "first": lambda v: v[0], "max": max, "mean": statistics.mean}
CURVE = ("step", "eval_kl", "eval_gold", "eval_reward", "eval_response_length")  # of evaluations


@dataclass(frozen=True)
class Lab:
    """What is compared: runs of each arm and seed, the whole pipeline up to one script.

    An arm is a dict: {script: its flags, over those of `base`}, and for the last script also
    "fault" (of course/labs/faults.py), "variant" (of variants/, or several: "vllm+band"), "best_of"
    (samples of each prompt). "against" names the arm that it is compared with, which is
    the lab's first by default.
    """

    title: str
    base: dict  # {script: flags}, in order; {name} in flags is the folder of an earlier run
    arms: dict
    measures: dict  # {heading: (script, metric, how)}, see measured()
    shown: tuple = ()  # the measures that the picture shows
    logarithmic: tuple = ()
    until: str = "ppo"  # the last script
    then: dict = field(default_factory=dict)  # {name: (script, flags, fault[, variant])}, after it
    curves: tuple = ()  # or the picture shows these pairs of axes: ("sqrt kl", "gold")
    drawn: tuple = ()  # and only these arms
    limits: dict = field(default_factory=dict)  # {heading: the best that can be}
    hidden: tuple = ()  # metrics that mean something else in a run with a variant
    compared: tuple = ("gold",)  # measures; or pairs of measures of the same run
    plain: tuple = ()  # pairs: a declaration, and its arm that follows the plain recipe
    models: dict = field(default_factory=dict)  # runs before: {name: (script, flags[, variant])}
    given: dict = field(default_factory=dict)  # {name: a folder that is there}
    seeds: tuple = (1, 2, 3)
    chosen: tuple = ()  # or the runs of these arms alone are made
    predictions: tuple = ()  # dicts: see compare()
    commit: str = ""  # its flags have left the project: here it can be repeated
    earlier: tuple = ()  # results of runs before: predictions may be about these
    claim: str = ""
    topic: str = ""

    def chains(self):
        """Returns {(arm, seed): {name: Run}}, where each Run comes after its parents."""
        made, chains = {}, {}
        for name, (script, flags, *variant) in self.models.items():
            words = merged(flags)
            made[name] = Run(script, words, 1, self.parents(made, words), "", *variant)
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
                for key, (script, flags, *more) in self.then.items():
                    words = merged(flags)
                    runs[key] = Run(script, words, seed, self.parents(runs, words), *more)
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
    fault: str = ""  # of course/labs/faults.py
    variant: str = ""  # of variants/, applied to a copy of the code

    def folder(self, root):
        """Returns its output folder. Equal runs of several labs have the same.

        A variant's files are part of its name: when they have changed, it is another run.
        """
        parents = [str(place(parent, Path())) for _, parent in self.parents]
        variant = self.variant and sources(self.variant)
        text = repr((self.script, self.flags, self.fault, variant, parents))
        return root / f"{self.script}-{hashlib.sha1(text.encode()).hexdigest()[:10]}-{self.seed}"

    def command(self, root):
        """Returns the command's words, for the folder of the code with or without a variant."""
        at = {name: place(parent, root) for name, parent in self.parents}
        flags = [word.format(**at) if "{" in word else word for word in self.flags]
        fault = [str(ROOT / "course/labs/faults.py"), self.fault] if self.fault else []
        seed = [] if "--seed" in flags else ["--seed", str(self.seed)]
        start = [sys.executable, *fault, f"{self.script}.py"]
        return [*start, "--preset", "toy", *flags, *seed, "--output_dir", str(self.folder(root))]

    def is_made(self, root):
        return (self.folder(root) / FINISHED).exists()


def place(parent, root):
    """Returns the path of a run's parent."""
    return parent.folder(root) if isinstance(parent, Run) else parent


def merged(*texts):
    """Returns the words of several texts of flags; a later text's flag replaces an earlier's."""
    flags = {}
    for word in shlex.split(" ".join(texts)):
        if word.startswith("--"):
            flags[word] = own = [word]
        else:
            own.append(word)
    return tuple(word for name in sorted(flags) for word in flags[name])


@functools.cache  # an edit counts from the next start on: the runs of this one have their folders
def sources(variant):
    """Returns names and contents of the files of a variant, or of several: "vllm+band"."""
    found = []
    for folder in [ROOT / "variants" / name for name in variant.split("+") if name]:
        own = sorted([*folder.glob("*.py"), *folder.glob("*.diff")])
        if not own:
            raise SystemExit(f"{folder} has no .diff and no .py file")
        found += [(file.name, file.read_bytes()) for file in own]
    return found


def apply(variant, folder):
    """Copies the code to a new folder, and applies a variant there, or several."""
    if ROOT in folder.parents and "output" not in folder.relative_to(ROOT).parts:
        raise SystemExit(f"--runs {folder.parent}: inside the project, take a folder in output/")
    skipped = shutil.ignore_patterns(".git", ".venv", "output", "__pycache__", "variants", "course")
    shutil.copytree(ROOT, folder, ignore=skipped)
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # of our repository
    for name, content in sources(variant):
        if name.endswith(".py"):
            (folder / name).write_bytes(content)
        else:
            subprocess.run(["git", "apply"], cwd=folder, env=outside, input=content, check=True)


def make(run, root):
    """Makes a run unless it is there. Returns the seconds that it took, 0 if it was there."""
    folder, began = run.folder(root), time.time()
    if run.is_made(root):
        return 0
    command, output = run.command(root), Path(f"{folder}.log")
    command += ["--resume"] if (folder / "args.json").exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    tree = root / f"tree-{run.variant}-{START}" if run.variant else ROOT
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    code = 0
    if not (folder / "config.json").exists():  # written when a run has ended
        with open(output, "a") as log:
            code = subprocess.call(command, cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT)
    stopped = code == 1 and "not finite" in output.read_text()
    if code != 0 and not stopped:
        tail = output.read_text()[-1500:]
        raise SystemExit(f"{shlex.join(command)}\nended with code {code}:\n{tail}")
    replace_text(folder / FINISHED, json.dumps({"stopped": stopped}))
    return time.time() - began


def depths_of(chains):
    """Returns {run: how many runs it comes after}. chains: see Lab.chains."""
    return {run: i for runs in chains.values() for i, run in enumerate(runs.values())}


def make_all(chains, root, jobs):
    """Makes the runs of a lab, `jobs` at a time: first those from which others start.

    chains: see Lab.chains. After Ctrl-C a run saves a checkpoint, and a second one ends it at once.
    """
    depths = depths_of(chains)
    left = [run for run in depths if not run.is_made(root)]
    there = len(depths) - len(left)
    print(f"{len(left)} runs to make, {jobs} at a time; {there} are there", flush=True)
    for variant in {run.variant for run in left} - {""}:
        apply(variant, root / f"tree-{variant}-{START}")
    count, began, done = len(left), time.time(), 0
    for depth in range(max(depths.values(), default=0) + 1):
        pool = ThreadPoolExecutor(jobs)
        waiting = {pool.submit(make, run, root): run for run in left if depths[run] == depth}
        try:
            while waiting:
                for future in wait(waiting, EVERY, FIRST_COMPLETED).done:
                    run, seconds = waiting.pop(future), future.result()
                    done += 1
                    what = f"{run.script} {run.seed} {run.variant}{run.fault} {' '.join(run.flags)}"
                    print(f"[{done}/{count}] {what}: {seconds:.0f} s", flush=True)
                if waiting:
                    minutes = (time.time() - began) / 60
                    print(f"    {minutes:.0f} min so far, {count - done} runs left", flush=True)
        except KeyboardInterrupt:
            print("\nstopping: run the same command again to go on where it is now", flush=True)
            with suppress(KeyboardInterrupt):
                pool.shutdown(cancel_futures=True)
            remove_trees(root)
            raise SystemExit(1) from None
        finally:
            pool.shutdown(cancel_futures=True)  # those that run end by themselves
    remove_trees(root)  # after a failure they are there to be looked at


def remove_trees(root):
    """Removes this process's copies of the code."""
    for tree in root.glob(f"tree-*-{START}"):
        shutil.rmtree(tree)


# ---- Results ----
def lines_of(folder, name):
    """Returns the dicts of a .jsonl file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def measured(folders, spec, curve=None):
    """Returns the number that `spec` = (script, metric, how) names, or None.

    how: a key of REDUCERS, or the step. The script "curve" is the curve of best-of-n, and how is n.
    A metric "share X" is the share of the last evaluation's samples whose gold is X, "calibration"
    that of the scores of the held-out pairs.
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
    records = [line for line in lines_of(folders[script], "metrics.jsonl") if metric in line]
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


def best_of(folder, size):
    """Returns the curve of best-of-n, n = 1, 2, 4, ...: columns n, kl, gold, reward.

    Of a prompt's N = `size` samples the one with the (i+1)-th smallest reward is the best of n that
    are drawn with probability C(i, n-1) / C(N, n).  KL = log n - (n-1)/n [Gao 2022]
    """
    samples = [(line["reward"], line["gold"]) for line in lines_of(folder, "samples.jsonl")]
    ranked = [sorted(samples[i : i + size]) for i in range(0, len(samples), size)]
    rewards, golds = numpy.mean(ranked, axis=0).T  # by rank: of the worst sample of a prompt first
    counts = [2**k for k in range(size.bit_length())]
    chances = [[comb(i, n - 1) / comb(size, n) for i in range(size)] for n in counts]
    return {
        "n": counts,
        "kl": [log(n) - (n - 1) / n for n in counts],
        "gold": (chances @ golds).tolist(),
        "reward": (chances @ rewards).tolist(),
    }


def curve_of(folder, hidden):
    """Returns {name of CURVE, without eval_: its value at each evaluation} that the run has."""
    lines = [line for line in lines_of(folder, "metrics.jsonl") if "eval_gold" in line]
    known = [key for key in CURVE if key in lines[0] and key not in hidden]
    return {key.removeprefix("eval_"): [line[key] for line in lines] for key in known}


def rounded(value, digits=6):
    """Returns numbers with so many digits, in lists and dicts, too."""
    return json.loads(json.dumps(value), parse_float=lambda x: float(f"{float(x):.{digits}g}"))


def collect(lab, chains, root):
    """Returns what the finished runs of a lab showed: a dict for each arm and seed."""
    found = []
    for (name, seed), runs in chains.items():
        run, arm = [*runs.values()][-1], lab.arms[name]
        ended = read(run.folder(root) / FINISHED)
        if not ended:
            continue
        folders = {script: each.folder(root) for script, each in runs.items()}
        hidden = lab.hidden if run.variant else ()
        result = {"arm": name, "seed": seed, "stopped": ended["stopped"]}
        if "best_of" in arm:
            result["curve"] = best_of(run.folder(root), arm["best_of"])
        elif lab.curves:
            result["curve"] = curve_of(run.folder(root), hidden)
        result["values"] = {
            head: measured(folders, spec, result.get("curve"))
            for head, spec in lab.measures.items()
            if spec[1] not in hidden
        }
        found.append(rounded(result))
    return found


def write(file, results):
    """Writes results at the end of a declaration, a line for each run; --quick has none."""
    said = file.read_text() if file.exists() else '{"quick": true}'
    head, before, _ = said.partition('"results": [')
    head = head.rstrip().removesuffix("," if before else "}").rstrip()
    lines = ",\n".join(map(json.dumps, results))
    replace_text(file, f'{head},\n  "results": [\n{lines}\n  ]\n}}\n')


def replace_text(file, text):
    """Writes a file whole, or not at all if it is interrupted or the disk is full."""
    aside = file.with_name(f".{file.name}-{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)


def read(file):
    """Returns what a JSON file holds, {} if there is no file."""
    return json.loads(file.read_text()) if file.exists() else {}


def results_in(file):
    """Returns the results at the end of a declaration, [] if there are none."""
    return read(file).get("results", [])


def results_of(name):
    """Returns the committed results of a lab."""
    return results_in(DECLARED / f"{name}.json")


# ---- Statistics ----
def by_arm(results):
    """Returns {arm: its results}, in the order of the lab."""
    arms = {}
    for result in results:
        arms.setdefault(result["arm"], []).append(result)
    return arms


def minus(own, other):
    """Returns {seed: by how much a value is above another}, of the seeds that have both."""
    return {seed: own[seed] - other[seed] for seed in own if seed in other}


def by_seed(results, measure):
    """Returns {seed: its value} of an arm's results, where there is one.

    measure: a heading; a pair of them: then the first's value less the second's; or "fall of X":
    how far X ends below the largest of its evaluations.
    """
    if isinstance(measure, list | tuple):
        return minus(*(by_seed(results, head) for head in measure))
    if measure.startswith("fall of "):
        curves = {result["seed"]: result["curve"][measure[8:]] for result in results}
        return {seed: max(curve) - curve[-1] for seed, curve in curves.items()}
    values = {result["seed"]: result["values"].get(measure) for result in results}
    return {seed: value for seed, value in values.items() if value is not None}


def baseline(lab, arm):
    """Returns the arm with which an arm is compared."""
    return lab.arms[arm].get("against", next(iter(lab.arms)))


def values_of(results, arm, measure, curve=None):
    """Returns {seed: value} of an arm, or the mean of a list of arms. curve: it is subtracted."""
    if isinstance(arm, list):
        each = [values_of(results, name, measure, curve) for name in arm]
        seeds = set.intersection(*map(set, each))
        return {seed: statistics.mean(own[seed] for own in each) for seed in seeds}
    found = by_arm(results).get(arm, [])
    own, kls = by_seed(found, measure), by_seed(found, "KL") if curve else {}
    return {seed: own[seed] - curve(kls[seed]) for seed in kls} if curve else own


def differences(lab, results, arm, measure="gold", curve=None, to=None):
    """Returns {seed: by how much an arm is above its baseline}, of the seeds that both have.

    A seed's runs share their SFT model and their random numbers as far as the arms permit, so that
    pairs differ by less than seeds do. Of a pair of measures: by how much the first is above the
    second, in the same run. curve: of plain_curve(); it is subtracted from each of the two.
    to: another arm in place of the baseline, or a number.
    """
    own = values_of(results, arm, measure, curve)
    if isinstance(measure, list | tuple):
        return own
    if isinstance(to, int | float):
        return {seed: value - to for seed, value in own.items()}
    other = values_of(results, to or baseline(lab, arm), measure, curve)
    return minus(own, other)


def plain_curve(lab):
    """Returns gold as a function of KL, as the plain recipe has it, or None if no run shows it.

    A parabola in sqrt(KL), as [Gao 2022] has for best-of-n, fitted on all evaluations of lab.plain.
    Further than a twentieth beyond the largest sqrt(KL) of these it is NaN: nothing is known there.
    """
    points = [
        point
        for file, arm in lab.plain
        for result in by_arm(results_in(file)).get(arm, [])
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
    if not {"KL", "gold before"} <= values.keys():
        return []
    return [(0.0, values["gold before"]), (sqrt(max(values["KL"], 0)), values["gold"])]


def along(x, curve):
    """Returns the numbers along the axis x; "sqrt kl" is the root of the KL."""
    if x == "sqrt kl":
        return [sqrt(max(kl, 0)) for kl in curve["kl"]]
    return curve[x]


def interval(values):
    """Returns the mean of a list, half its 95 % interval, and how many have the mean's sign.

    Student's t with one degree of freedom less than there are values.
    """
    mean = statistics.mean(values)
    half = STUDENT[min(len(values), 13) - 2] * statistics.stdev(values) / sqrt(len(values))
    return mean, half, sum(value * mean > 0 for value in values)


def compare(lab, results, what):
    """Returns {seed: difference} of a prediction, or of a question.

    what: "says"; "arm"; "measure" and "to", as in differences(); "kl": at equal KL, without the
    seeds that are beyond the plain recipe's curve; "than": less the difference of this arm;
    "distance": without its sign; "earlier": of lab.earlier. A prediction has a "range" [low, high]
    in which it holds (None: no end); a question has none. "toy": see pages.questions().
    """
    found = lab.earlier if what.get("earlier") else results
    curve = plain_curve(lab) if what.get("kl") else None
    how = {"measure": what.get("measure", "gold"), "curve": curve}
    own = differences(lab, found, what["arm"], to=what.get("to"), **how)
    if "than" in what:
        own = minus(own, differences(lab, found, what["than"], **how))
    if what.get("distance"):
        own = {seed: abs(value) for seed, value in own.items()}
    return {seed: value for seed, value in own.items() if not isnan(value)}


def verdict(values, limits):
    """Returns where the 95 % interval of differences lies to a prediction's range: in it (shown),
    outside of it (refuted), or across one of its ends (not decided). Without a range: to 0."""
    mean, half, _ = interval(values)
    if limits is None:
        return "lower" if mean < -half else "higher" if mean > half else "no clear difference"
    low, high = (end if x is None else x for x, end in zip(limits, (-inf, inf)))
    if low <= mean - half and mean + half <= high:
        return "shown"
    return "refuted" if mean + half < low or mean - half > high else "not decided"


def decided(labs):
    """Yields a lab's name, each of its predictions or questions, its differences, its verdict().

    Not those whose arms have not been run with two seeds or more.
    """
    for name, lab in labs.items():
        results = results_of(name)
        for what in lab.predictions:
            values = [*compare(lab, results, what).values()]
            if len(values) > 1:
                yield name, what, values, verdict(values, what.get("range"))


def with_earlier(lab, found, earlier):
    """Returns results beside those of other seeds and arms that were there before."""
    order = list(lab.arms)
    known = {(order.index(one["arm"]), one["seed"]): one for one in earlier + found}
    return [known[key] for key in sorted(known)]


# ---- Commands ----
def show(chains, root):
    """Prints the commands of a lab's runs, and how many of them are to be made."""
    runs = depths_of(chains)
    for run in runs:
        print(shlex.join(map(str, run.command(root))))
    print(f"{len(runs)} runs, {sum(run.is_made(root) for run in runs)} of them are there")


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
