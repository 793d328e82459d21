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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import comb, exp, log, sqrt
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- table -->"
FINISHED = "finished.json"  # written into a run's folder when it has ended by itself
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
    "fault" (of labs/faults.py), "variant" (of variants/), "best_of" (samples of each prompt).
    """

    title: str
    base: dict  # {script: flags}, in order; {name} in flags is the folder of an earlier run
    arms: dict
    measures: dict  # {heading: (script, metric, how)}, see measured()
    shown: tuple = ()  # the measures that the picture shows
    logarithmic: tuple = ()
    until: str = "ppo"  # the last script
    curves: tuple = ()  # or the picture shows these pairs of axes: ("sqrt kl", "gold")
    limits: dict = field(default_factory=dict)  # {heading: the best that can be}
    hidden: tuple = ()  # metrics that mean something else in a run with a variant
    models: dict = field(default_factory=dict)  # {name: (script, flags)}: runs before the others
    given: dict = field(default_factory=dict)  # {name: a folder that is there}
    seeds: tuple = (1, 2, 3)

    def chains(self):
        """Returns {(arm, seed): {name: Run}}, where each Run comes after its parents."""
        made, chains = {}, {}
        for name, (script, flags) in self.models.items():
            made[name] = Run(script, merged(flags), 1, tuple(self.given.items()))
        for seed in self.seeds:
            for name, arm in self.arms.items():
                runs = {**made}
                for script, flags in self.base.items():
                    last = script == self.until
                    own = {key: arm.get(key, "") for key in ("fault", "variant")} if last else {}
                    words = merged(flags, arm.get(script, ""))
                    known = {**self.given, **runs}.items()
                    parents = [pair for pair in known if f"{{{pair[0]}}}" in " ".join(words)]
                    runs[script] = Run(script, words, seed, tuple(parents), **own)
                    if last:
                        break
                chains[name, seed] = runs
        return chains


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

    def folder(self, root):
        """Returns its output folder. Equal runs of several labs have the same."""
        parents = [str(place(parent, Path())) for _, parent in self.parents]
        text = repr((self.script, self.flags, self.fault, self.variant, parents))
        return root / f"{self.script}-{hashlib.sha1(text.encode()).hexdigest()[:10]}-{self.seed}"

    def command(self, root):
        """Returns the command's words, for the folder of the code with or without a variant."""
        at = {name: place(parent, root) for name, parent in self.parents}
        flags = [word.format(**at) if "{" in word else word for word in self.flags]
        fault = [str(ROOT / "labs/faults.py"), self.fault] if self.fault else []
        seed = [] if "--seed" in flags else ["--seed", str(self.seed)]
        start = [sys.executable, *fault, f"{self.script}.py", "--preset", "toy"]
        return [*start, *flags, *seed, "--output_dir", str(self.folder(root))]

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
    saved = folder / "config.json"  # written when a run has ended
    if not saved.exists():
        with open(output, "a") as log:
            options = dict(stdout=log, stderr=subprocess.STDOUT, cwd=tree, env=env)
            code = subprocess.call(command, **options)
    stopped = not saved.exists() and (
        next(folder.glob("nonfinite_rank*.jsonl"), None) is not None
        or (code == 1 and "not finite" in output.read_text())
    )
    if not (stopped or saved.exists()):
        tail = output.read_text()[-1500:]
        raise SystemExit(f"{shlex.join(command)}\nended with code {code}:\n{tail}")
    seconds = time.time() - began
    record = {"seconds": None if resumed else round(seconds), "stopped": stopped}
    (folder / FINISHED).write_text(json.dumps(record))
    return seconds


def make_all(chains, root, jobs):
    """Makes the runs of a lab, `jobs` at a time: first those from which others start.

    chains: see Lab.chains.
    """
    depths = {run: i for runs in chains.values() for i, run in enumerate(runs.values())}
    left = [run for run in depths if not run.is_made(root)]
    print(f"{len(left)} runs to make, {jobs} at a time; {len(depths) - len(left)} are there")
    for variant in {run.variant for run in left} - {""}:
        apply(variant, root / f"tree-{variant}")
    took = []
    for depth in range(max(depths.values(), default=0) + 1):
        runs, pool = [run for run in left if depths[run] == depth], ThreadPoolExecutor(jobs)
        try:
            for run, seconds in zip(runs, pool.map(lambda run: make(run, root), runs)):
                took.append(seconds)
                minutes = statistics.mean(took) * (len(left) - len(took)) / jobs / 60
                what = f"{run.script} {run.seed} {run.variant}{run.fault} {' '.join(run.flags)}"
                times = f"{seconds:.0f} s; about {minutes:.0f} min left"
                print(f"[{len(took)}/{len(left)}] {what}: {times}", flush=True)
        except KeyboardInterrupt:
            raise SystemExit("\nstopped: the same command goes on where this one was") from None
        finally:
            pool.shutdown(cancel_futures=True)  # those that run end by themselves


# ---- Results ----
def lines_of(folder, name):
    """Returns the dicts of a .jsonl file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def measured(folders, spec):
    """Returns the number that `spec` = (script, metric, how) names, or None.

    how: a key of REDUCERS, or the step. A metric "share X" is the share of the last evaluation's
    samples whose gold is X. "gold at EMA" is the actor's gold score where it was as far from the
    SFT model as its average is at the end, between two evaluations in proportion. "calibration" is
    that of the scores of the held-out pairs.
    """
    script, metric, how = spec
    if metric == "calibration":
        return calibration(lines_of(folders[script], "judge.jsonl"))
    if metric.startswith("share "):
        samples = lines_of(folders[script], "samples.jsonl")
        step = samples[-1 if how == "last" else 0]["step"]
        golds = [line["gold"] for line in samples if line["step"] == step]
        return sum(gold == float(metric[6:]) for gold in golds) / len(golds)
    lines = lines_of(folders[script], "metrics.jsonl")
    if metric == "gold at EMA":
        return gold_at([line for line in lines if "eval_ema_kl" in line])
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


def gold_at(lines):
    """Returns the actor's gold score at the KL that its average has in the last of `lines`."""
    wanted = lines[-1]["eval_ema_kl"]
    for before, after in zip(lines, lines[1:]):
        if before["eval_kl"] <= wanted <= after["eval_kl"]:
            part = (wanted - before["eval_kl"]) / (after["eval_kl"] - before["eval_kl"] or 1)
            return before["eval_gold"] + part * (after["eval_gold"] - before["eval_gold"])
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


def rounded(value):
    """Returns numbers with six digits, in lists and dicts, too."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


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
        if lab.curves and "best_of" in arm:
            result["curve"] = best_of(run.folder(root), arm["best_of"])
        elif lab.curves:
            result["curve"] = curve_of(run.folder(root), hidden)
        known = {head: spec for head, spec in lab.measures.items() if spec[1] not in hidden}
        values = {head: measured(folders, spec) for head, spec in known.items()}
        found.append(rounded({**result, "values": values}))
    return sorted(found, key=lambda result: list(lab.arms).index(result["arm"]))


def write(file, results):
    """Writes results, a line for each run."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("[\n{}\n]\n".format(",\n".join(map(json.dumps, results))))


def read(file):
    """Returns the results in a file, [] if there is none."""
    return json.loads(file.read_text()) if file.exists() else []


# ---- Table and picture ----
def by_arm(results):
    """Returns {arm: its results}, in the order of the lab."""
    arms = {}
    for result in results:
        arms.setdefault(result["arm"], []).append(result)
    return arms


def table(lab, results):
    """Returns the table in Markdown: the mean, with the smallest and largest in brackets."""
    lines = ["| arm | runs | " + " | ".join(lab.measures) + " |"]
    lines.append("| --- " * (len(lab.measures) + 2) + "|")
    found = by_arm(results)
    for arm in lab.arms:
        each = found.get(arm, [])
        stopped = sum(result["stopped"] for result in each)
        runs = str(len(each) or "not run yet") + (f", {stopped} stopped at NaN" if stopped else "")
        cells = [cell(each, head) for head in lab.measures]
        lines.append(f"| {arm} | {runs} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
    texts = [f"{x:.3f}" if abs(x) < 1000 else f"{x:.1e}" for x in numbers]
    return "{} [{}, {}]".format(*texts)


def draw(lab, results, file):
    """Draws the picture: for each measure shown a dot for every seed and a bar at the mean."""
    from matplotlib.figure import Figure

    if lab.curves:
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        draw_curves(figure, lab, results)
    else:
        arms = list(by_arm(results).items())[::-1]
        figure = Figure(figsize=(4 * len(lab.shown) + 2, 0.32 * len(arms) + 1.4))
        figure.set_layout_engine("constrained")
        axes = figure.subplots(1, len(lab.shown), squeeze=False, sharey=True)[0]
        for axis, head in zip(axes, lab.shown):
            for row, (_, each) in enumerate(arms):
                if values := values_of(each, head):
                    axis.plot(values, [row] * len(values), "o", color="C0", alpha=0.6)
                    axis.plot(statistics.mean(values), row, "|", color="k", markersize=14)
            if head in lab.logarithmic:
                axis.set_xscale("log")
            if head in lab.limits:
                axis.axvline(lab.limits[head], linestyle="--", color="gray")
            axis.set_xlabel(head)
            axis.grid(axis="x", alpha=0.3)
        axes[0].set_yticks(range(len(arms)), [name for name, _ in arms])
        axes[0].set_ylim(-0.6, len(arms) - 0.4)
    figure.suptitle(lab.title)
    figure.savefig(file, dpi=80)


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
                write(results, found)
    found = read(results)
    if not found:
        raise SystemExit(f"{results} is not there: there were no runs yet")
    draw(lab, found, picture)
    print(f"{table(lab, found)}\n\nThe picture is {picture}")
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
