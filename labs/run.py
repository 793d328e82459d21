"""Makes a lab's runs, then its results, table and picture.

    python labs/run.py NAME              makes the runs that are not there yet, and draws
    python labs/run.py NAME --plot       table and picture from labs/results/NAME.json alone
    python labs/run.py                   lists the labs

A lab is declared in labs/declared.py. A run that was interrupted goes on where it was; one that is
there is not made again, also if another lab has made it.
"""

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import comb, exp, log, sqrt
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from declared import BASE, LABS, SCRIPTS  # noqa: E402

FINISHED = "lab.json"  # written into a run's folder when it has ended by itself
REDUCERS = {"last": lambda v: v[-1], "first": lambda v: v[0], "max": max, "mean": statistics.mean}


# ---- Runs ----
@dataclass(frozen=True)
class Run:
    """One run of a script: its flags, and the runs whose models it starts from."""

    script: str  # "sft", "reward", "ppo"
    flags: tuple  # words
    seed: int
    fault: str = ""  # of labs/faults.py
    parents: tuple = ()

    def folder(self, root):
        """Returns its output folder. Equal runs of several labs have the same."""
        text = repr((self.script, self.flags, self.fault, [p.folder(root) for p in self.parents]))
        name = hashlib.sha1(text.replace(str(root), "").encode()).hexdigest()[:10]
        return root / f"{self.script}-{name}-{self.seed}"

    def command(self, root):
        """Returns the command's words."""
        at = {run.script: str(run.folder(root)) for run in self.parents}
        at["text"] = str(root / "text.jsonl")
        models = {
            "sft": [],
            "reward": ["--model_name_or_path", "{sft}"],
            "ppo": ["--actor_model_name_or_path", "{sft}"]
            + ["--critic_model_name_or_path", "{reward}"],
        }[self.script]
        words = [f"{self.script}.py", "--preset", "toy", *models, *self.flags]
        words = [word.format(**at) if "{" in word else word for word in words]
        wrapped = [str(HERE / "faults.py"), self.fault] if self.fault else []
        place = ["--seed", str(self.seed), "--output_dir", str(self.folder(root))]
        return [sys.executable, *wrapped, *words, *place]


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


def chain(lab, arm, seed):
    """Returns {script: Run} of an arm: the whole pipeline, up to the lab's last script."""
    runs = {}
    for script in SCRIPTS[: SCRIPTS.index(lab.until) + 1]:
        flags = merged(BASE[script], arm.get(script, ""))
        fault = arm.get("fault", "") if script == lab.until else ""
        runs[script] = Run(script, flags, seed, fault, tuple(runs.values()))
    return runs


def make(run, root):
    """Makes a run unless it is there. Returns the seconds that it took, 0 if it was there."""
    folder = run.folder(root)
    if (folder / FINISHED).exists():
        return 0
    command, began = run.command(root), time.time()
    resumed = (folder / "args.json").exists()
    command += ["--resume"] if resumed else []
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "a") as output:
        options = dict(stdout=output, stderr=subprocess.STDOUT, cwd=HERE.parent)
        ended = (folder / "config.json").exists()  # this program was stopped before it noted that
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        code = 0 if ended else subprocess.call(command, env=env, **options)
    stopped = next(folder.glob("nonfinite_rank*.jsonl"), None) is not None
    stopped |= code == 1 and "not finite" in Path(f"{folder}.log").read_text()
    if code and not stopped:
        tail = Path(f"{folder}.log").read_text()[-1500:]
        raise SystemExit(f"{shlex.join(command)}\nended with code {code}:\n{tail}")
    seconds = time.time() - began
    record = {"seconds": None if resumed else round(seconds), "stopped": stopped}
    (folder / FINISHED).write_text(json.dumps(record))
    return seconds


def write_text(file):
    """Writes plain text for --unsup_data_path: the questions of the toy with their responses."""
    rows = (HERE.parent / "toy/data/train.jsonl").read_text().splitlines()[:2000]
    texts = [{"text": row["prompt"] + row["response"]} for row in map(json.loads, rows)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))


def make_all(lab, root, jobs):
    """Makes the runs of a lab, script by script, seed by seed, `jobs` at a time."""
    chains = [chain(lab, arm, seed) for seed in lab.seeds for arm in lab.arms.values()]
    stages = [dict.fromkeys(runs[s] for runs in chains if s in runs) for s in SCRIPTS]
    left = [
        [run for run in stage if not (run.folder(root) / FINISHED).exists()] for stage in stages
    ]
    write_text(root / "text.jsonl")
    count, took = sum(map(len, left)), []
    for runs in left:
        with ThreadPoolExecutor(jobs) as pool:
            for run, seconds in zip(runs, pool.map(lambda run: make(run, root), runs)):
                took.append(seconds)
                minutes = statistics.mean(took) * (count - len(took)) / jobs / 60
                print(
                    f"[{len(took)}/{count}] {run.script} seed {run.seed} {run.fault} "
                    f"{shlex.join(run.flags)}: {seconds:.0f} s; about {minutes:.0f} min left",
                    flush=True,
                )


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


def rounded(value):
    """Returns numbers with four digits, in lists and dicts, too."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def collect(lab, root):
    """Returns what the finished runs of a lab showed: a dict for each arm and seed."""
    found = []
    for name, arm in lab.arms.items():
        for seed in lab.seeds:
            runs = chain(lab, arm, seed)
            folders = {script: run.folder(root) for script, run in runs.items()}
            if not (folders[lab.until] / FINISHED).exists():
                continue
            ended = json.loads((folders[lab.until] / FINISHED).read_text())
            result = {"arm": name, "seed": seed, "stopped": ended["stopped"]}
            values = {head: measured(folders, spec) for head, spec in lab.measures.items()}
            flags = runs[lab.until].flags
            if lab.curve and "--eval_best_of" in flags:
                size = int(flags[flags.index("--eval_best_of") + 1])
                result["curve"] = best_of(folders[lab.until], size)
            elif lab.curve:
                lines = lines_of(folders[lab.until], "metrics.jsonl")
                lines = [line for line in lines if "eval_kl" in line]
                names = ("kl", "gold", "reward")
                result["curve"] = {n: [line[f"eval_{n}"] for line in lines] for n in names}
            found.append(rounded({**result, "values": values}))
    return found


def write_results(lab_name, results):
    """Writes labs/results/NAME.json, a line for each run."""
    lines = ",\n".join(json.dumps(result) for result in results)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{lab_name}.json").write_text(f"[\n{lines}\n]\n")


def read_results(lab_name, results=HERE / "results"):
    """Returns the results of a lab, [] if it was not run."""
    file = results / f"{lab_name}.json"
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
        cells = [cell([result["values"][head] for result in each]) for head in lab.measures]
        lines.append(f"| {arm} | {runs} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(values):
    """Returns the text of a cell."""
    values = [value for value in values if value is not None]
    if not values:
        return ""
    numbers = statistics.mean(values), min(values), max(values)
    texts = [f"{x:.3f}" if abs(x) < 1000 else f"{x:.1e}" for x in numbers]
    return "{} [{}, {}]".format(*texts)


def draw(lab, results, file):
    """Draws the picture: for each measure shown a dot for every seed and a bar at the mean."""
    from matplotlib.figure import Figure

    if lab.curve:
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        draw_curves(figure, results)
    else:
        arms = list(by_arm(results).items())[::-1]
        figure = Figure(figsize=(4 * len(lab.shown) + 2, 0.32 * len(arms) + 1.4))
        figure.set_layout_engine("constrained")
        axes = figure.subplots(1, len(lab.shown), squeeze=False, sharey=True)[0]
        for axis, head in zip(axes, lab.shown):
            for row, (_, each) in enumerate(arms):
                values = [result["values"][head] for result in each]
                values = [value for value in values if value is not None]
                if values:
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


def draw_curves(figure, results):
    """Draws gold, and reward, against sqrt(KL): each seed thin, the mean of the seeds thick."""
    for axis, name in zip(figure.subplots(1, 2), ("gold", "reward")):
        for number, (arm, each) in enumerate(by_arm(results).items()):
            colour, curves = f"C{number}", []
            for result in each:
                x = [sqrt(max(kl, 0)) for kl in result["curve"]["kl"]]
                curves.append((x, result["curve"][name]))
                axis.plot(*curves[-1], color=colour, alpha=0.3, linewidth=0.8)
            length = min(len(x) for x, _ in curves)
            mean = [
                [statistics.mean(c[i][t] for c in curves) for t in range(length)] for i in (0, 1)
            ]
            axis.plot(*mean, ".-", color=colour, label=arm)
        axis.set(xlabel="sqrt(KL to the SFT model)", ylabel=f"{name} (held out)")
        axis.grid(alpha=0.3)
    figure.axes[0].axhline(1, linestyle="--", color="gray")
    figure.axes[0].legend(fontsize="x-small")


def plot(name, lab):
    """Writes labs/NAME.png, and the table into labs/NAME.md between its two markers."""
    results = read_results(name)
    if not results:
        raise SystemExit(f"labs/results/{name}.json is not there: python labs/run.py {name}")
    draw(lab, results, HERE / f"{name}.png")
    print(f"{table(lab, results)}\n\nThe picture is {HERE / name}.png")
    page = HERE / f"{name}.md"
    if page.exists() and page.read_text().count("<!-- table -->") == 2:
        before, _, after = page.read_text().split("<!-- table -->")
        mark = "<!-- table -->"
        page.write_text(f"{before}{mark}\n{table(lab, results)}\n{mark}{after}")


def get_args(argv=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=list(LABS))
    parser.add_argument("--plot", action="store_true", help="make no runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--runs", default="output/labs", help="where the runs are kept")
    return parser.parse_args(argv)


def main():
    args = get_args()
    if args.name is None:
        for name, lab in LABS.items():
            known = "results here" if read_results(name) else "not run yet"
            print(f"{name:16} {lab.title} ({known})")
        return
    lab, root = LABS[args.name], Path(args.runs).resolve()
    if not args.plot:
        try:
            make_all(lab, root, args.jobs)
        finally:
            if results := collect(lab, root):
                write_results(args.name, results)
    plot(args.name, lab)


if __name__ == "__main__":
    main()
