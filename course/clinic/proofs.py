"""The numbers that the clinic's pages say of its runs, recomputed from the files of the runs.

    python course/clinic/proofs.py        prints the numbers that are not what the files give

Beside each such number stands a comment that Markdown does not show, as in labs/cited.py. It says,
in Python, how the number comes from the case of the page:

    KL ends at 1.22<!-- v("kl") --> nats, and at 0.64<!-- h("kl") --> in the healthy run
"""

import functools
import json
import sys
from math import log
from pathlib import Path
from statistics import fmean as mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "labs")]
import cited  # noqa: E402
import runner  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tools.report.verdicts import beginnings  # noqa: E402

PAGES = [HERE / "README.md", *sorted(HERE.glob("[0-9]*/README.md"))]
PAGES += sorted(HERE.glob("solutions/*.md"))


lines_of = functools.cache(runner.lines_of)
TOKENIZER = Tokenizer.from_file(str(ROOT / "toy/model/tokenizer.json"))


def broken(sample):
    """Returns whether a response of the toy breaks off in the middle of a sentence."""
    return not sample["response"].rstrip().endswith((".", "!"))


def length(sample):
    """Returns the number of tokens of a sample's prompt."""
    return len(TOKENIZER.encode(sample["prompt"]).ids)


def every(metric, kind="", script=None):
    """Returns a metric's values in all steps of the three healthy seeds: of PPO, or "grpo/"."""
    seeds = [Case(f"healthy/{kind}{seed}").series(metric, script) for seed in (1, 2, 3)]
    return [value for values in seeds for value in values.values()]


def ends(metric, kind="", script=None):
    """Returns its last value in each of the three."""
    return [Case(f"healthy/{kind}{seed}").v(metric, None, script) for seed in (1, 2, 3)]


class Case:
    """What a comment may say of a case."""

    def __init__(self, name):
        self.name = name

    def series(self, metric, script=None):
        """The values of a metric by step, in a step of RLHF, or in the last one that has it."""
        for each in [script] if script else ("ppo", "reward", "sft"):
            run = HERE / self.name / each
            if run.is_dir():
                lines = lines_of(run, "metrics.jsonl")
                found = {x["step"]: x[metric] for x in lines if metric in x}
                if found:
                    return found
        raise KeyError(metric)

    def v(self, metric, step=None, script=None):
        """The value at a step, or the last one."""
        found = self.series(metric, script)
        return found[max(found) if step is None else step]

    def h(self, *what, of="1"):
        """The same of a healthy run."""
        return Case(f"healthy/{of}").v(*what)

    def top(self, metric):
        """The largest value."""
        return max(self.series(metric).values())

    def low(self, metric):
        """The smallest value."""
        return min(self.series(metric).values())

    def third(self, metric, number):
        """The mean of the first, second or last third of the steps."""
        values = list(self.series(metric).values())
        size = len(values) // 3
        return mean([values[:size], values[size:-size], values[-size:]][number - 1])

    def ties(self):
        """The pairs with equal scores."""
        return sum(x["chosen_score"] == x["rejected_score"] for x in self.pairs())

    def pairs(self):
        """The pairs that were judged."""
        return lines_of(HERE / self.name / "reward", "judge.jsonl")

    def samples(self, script="ppo", last=True):
        """The samples of the first evaluation or the last one."""
        found = lines_of(HERE / self.name / script, "samples.jsonl")
        step = (max if last else min)(x["step"] for x in found)
        return [x for x in found if x["step"] == step]

    def tokens(self, row, step=40):
        """The numbers of a response's tokens, its score and its kl_coef."""
        found = lines_of(HERE / self.name / "ppo", "tokens.jsonl")
        [line] = [x for x in found if (x["row"], x["step"], x["sample"]) == (row, step, 0)]
        return {**line["tokens"], "score": line["reward"], "kl_coef": line["kl_coef"]}

    def limit(self, script, metric):
        """The best that is possible on the toy."""
        return json.loads((ROOT / "toy/data/limits.json").read_text())[script][metric]

    def value(self, expression):
        """Returns what the text of a comment gives."""
        names = {"log": log, "mean": mean, "healthy": Case("healthy/1")}
        names |= {each.__name__: each for each in (Case, beginnings, broken, length, every, ends)}
        methods = {name: getattr(self, name) for name in dir(self) if name[0] != "_"}
        return eval(expression, {**names, **methods})


def wrong(page):
    """Yields the number of a line, a number in it and what it is by the files, if they differ."""
    case = Case(page.parent.name if page.name == "README.md" else page.stem)
    for at, line in enumerate(page.read_text().split("\n"), 1):
        for text, percent, _, expression in cited.CITED.findall(line):
            value = case.value(expression)
            if not cited.agrees(text, percent, value):
                yield f"{page}:{at}: {text}, by the files {value}: {expression}"


def main():
    for page in PAGES:
        print("".join(f"{line}\n" for line in wrong(page)), end="")


if __name__ == "__main__":
    main()
