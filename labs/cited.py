"""The numbers that pages say of the labs, recomputed from the committed results.

    python labs/cited.py        prints the numbers that are not what the results give

Beside each such number stands a comment that Markdown does not show. It says, in Python, how the
number comes from labs/results/NAME.json:

    gold ends at 0.785<!-- m("ours") --> after 40 steps

NAME is the lab of the page, or of the row in labs/README.md, or stands before a colon:
<!-- critic: d("from SFT, new head") -->. On the page of a variant it is the variant, whose numbers
come from variants/NAME/results.json. `class` is the class's own run, whose files are in
course/clinic/healthy/1: <!-- class: v("eval_gold") -->, in the words of course/clinic/proofs.py.
A beginning of an arm's name is enough if no other arm has it. A number without a sign is compared
with the absolute value. `asked` is any number of the page's hypothesis. What is in backticks is a
setting, and no result.
"""

import functools
import importlib
import importlib.util
import json
import re
import sys
from math import isnan, log
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "course/clinic")]
import runner  # noqa: E402
from declared import LABS  # noqa: E402

WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()
NUMBER = rf"[+-]?\d[\d,]*(?:\.\d+)?|\b(?:{'|'.join(WORDS)})\b"
CITED = re.compile(rf"({NUMBER})( %)?<!-- (?:([a-z0-9-]+): )?(.+?) -->", re.I)
PAGES = [*sorted(HERE.glob("*.md")), *sorted(HERE.parent.glob("docs/*.md"))]
PAGES += sorted(HERE.parent.glob("course/*.md"))
PAGES += sorted(HERE.parent.glob("recipes/*/README.md"))
PAGES += [HERE.parent / "README.md", HERE.parent / "toy/README.md"]
VARIANTS = HERE.parent / "variants"
PAGES += sorted(VARIANTS.glob("*/README.md"))


@functools.cache
def numbers_of(name):
    """Returns the Numbers of a lab or a variant, read once, or the case of the class's own run."""
    if name == "class":
        return importlib.import_module("proofs").Case("healthy/1")
    lab = name.removesuffix("-again")
    if lab in LABS:
        page = (HERE / f"{lab}.md").read_text()
        hypothesis = re.search(r"\*\*The hypothesis.*?\n\n", page, re.S)[0]
        return Numbers(LABS[lab], HERE / f"results/{name}.json", hypothesis)
    return Numbers(runner_of_variants().lab_of(name, Path()), VARIANTS / name / "results.json")


@functools.cache
def runner_of_variants():
    """Returns variants/run.py as a module. (There is a labs/run.py, too.)"""
    spec = importlib.util.spec_from_file_location("run_of_variants", VARIANTS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compared(kl=False):
    """Returns interval() of gold above its baseline, for each arm of all labs; kl: at equal KL."""
    found = []
    for numbers in map(numbers_of, LABS):
        lab = numbers.lab
        others = [arm for arm in lab.arms if runner.baseline(lab, arm) != arm]
        for arm in others if "gold" in lab.compared and (lab.plain or not kl) else []:
            values = numbers.differences(arm, kl=kl)
            if not any(map(isnan, values)):
                found.append(runner.interval(values))
    return found


def exclude_zero(found):
    """Returns how many of the intervals do not hold 0."""
    return sum(abs(middle) > half for middle, half, _ in found)


FOUR = ("gae", "rloo", "grpo", "reinforce")
NAMES = {  # what a comment may use beside the methods of Numbers
    "exclude_zero": exclude_zero,
    "compared": compared,
    "interval": runner.interval,
    "log": log,
    "mean": mean,
    "of": numbers_of,
    "EMA": ("EMA gold", "gold at the EMA's KL"),
    "TEXT": ("text loss", "text loss before"),
    "FOUR": FOUR,
    "FREE": [f"{name}, kl_coef 0".removeprefix("gae, ") for name in FOUR],  # in overoptimisation
}


class Numbers:
    """What a comment may say of a lab's results. `head` is a measure, or a pair of them."""

    def __init__(self, lab, file, hypothesis=""):
        self.lab = lab
        self.results = runner.read(file)
        self.found = runner.by_arm(self.results)
        self.asked = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", hypothesis)}

    def arm(self, name):
        """Returns the arm of which a name is the beginning."""
        names = [arm for arm in self.lab.arms if arm.startswith(name)]
        [found] = [name] if name in names else names
        return found

    def each(self, arm, head="gold"):
        """The values of an arm, in the order of the seeds."""
        return list(runner.by_seed(self.found[self.arm(arm)], head).values())

    def m(self, arm, head="gold"):
        """The mean over the seeds."""
        return mean(self.each(arm, head))

    def s(self, arm, seed, head="gold"):
        """The value of one seed."""
        return runner.by_seed(self.found[self.arm(arm)], head)[seed]

    def differences(self, arm, head="gold", kl=False):
        """By how much the arm is above its baseline, a number for each seed; kl: at equal KL."""
        curve = runner.plain_curve(self.lab) if kl else None
        return [*runner.differences(self.lab, self.results, self.arm(arm), head, curve).values()]

    def d(self, *what, **options):
        """The mean of these differences."""
        return runner.interval(self.differences(*what, **options))[0]

    def h(self, *what, **options):
        """Half of its 95 % interval."""
        return runner.interval(self.differences(*what, **options))[1]

    def n(self, *what, **options):
        """How many of the seeds have its sign."""
        return runner.interval(self.differences(*what, **options))[2]

    def above_curve(self, arm):
        """By how much each seed is above the curve of the plain recipe, at its own KL."""
        curve = runner.plain_curve(self.lab)
        return [gold - curve(kl) for gold, kl in zip(self.each(arm), self.each(arm, "KL"))]

    def curves(self, arm, head="gold"):
        """The curves of an arm's seeds: a list of numbers each."""
        return [result["curve"][head] for result in self.found[self.arm(arm)]]

    def e(self, judge, arm, head="gold"):
        """Mean, smallest and largest of the runs of which no more was kept."""
        rows = json.loads((HERE / "results/estimators-earlier.json").read_text())
        [row] = [row for row in rows if (row["judge"], row["arm"]) == (judge, arm)]
        return row[head]

    def peaks(self, arm, head="gold"):
        """The largest of each seed's evaluations."""
        return [max(curve) for curve in self.curves(arm, head)]

    def against(self, arm, what):
        """Of each seed of an arm without a penalty, in overoptimisation, and of the same estimator
        with one: `what`(curve of the first, values of the second)."""
        other = numbers_of("estimators").found[arm.removesuffix("kl_coef 0").strip(", ") or "gae"]
        with_penalty = {result["seed"]: result["values"] for result in other}
        return [what(one["curve"], with_penalty[one["seed"]]) for one in self.found[arm]]

    def ends(self, arm):
        """The end of the run with a penalty for each seed of the arm without one."""
        return self.against(arm, lambda curve, values: values["gold"])

    def passing(self, arm):
        """The gold score with which each seed passes the KL at which the other run ends."""
        return self.against(
            arm, lambda curve, values: runner.gold_at(curve["kl"], curve["gold"], values["KL"])
        )

    def fall(self, arm, head="gold"):
        """How far each seed ends below the largest of its evaluations."""
        return [max(curve) - curve[-1] for curve in self.curves(arm, head)]

    def falls(self):
        """The mean fall() of each seed over the arms without a penalty, in overoptimisation."""
        arms = [arm for arm in self.lab.arms if arm.endswith("kl_coef 0")]
        return [mean(each) for each in zip(*(self.fall(arm) for arm in arms))]

    def value(self, expression):
        """Returns what the text of a comment gives."""
        methods = {name: getattr(self, name) for name in dir(self) if name[0] != "_"}
        return eval(expression, {**NAMES, **methods})


def agrees(text, percent, value):
    """Returns whether a number in a text is a value, to the digits that it has."""
    if text.lower() in WORDS:
        return WORDS.index(text.lower()) == value
    digits, number = len(text.partition(".")[2]), float(text.replace(",", ""))
    if isinstance(value, set):
        return number in value
    value = value * (100 if percent else 1)
    value = value if text[0] in "+-" else abs(value)
    return abs(number - value) <= 0.5 * 10**-digits + 1e-9


def wrong(page):
    """Yields the line of a page, a number in it and what it is by the results, if they differ."""
    for at, line in enumerate(page.read_text().split("\n"), 1):
        row = re.match(r"\| \[([a-z0-9-]+)\]", line)
        for text, percent, name, expression in CITED.findall(line):
            own = page.parent.name if page.parent.parent == VARIANTS else page.stem
            numbers = numbers_of(name or (row[1] if row else own))
            value = numbers.value(expression)
            if not agrees(text, percent, value):
                yield f"{page.name}:{at}: {text}, by the results {value}: {expression}"


def uncited(text):
    """Returns the numbers of a text that have no comment: decimals, and counts of nats."""
    plain = CITED.sub("", text)
    plain = re.sub(r"0\.9 million|`[^`]*`|\]\([^)]*\)|<[^>]*>", "", plain)
    return re.findall(r"\d+\.\d+|\d+ nats", plain)


def main():
    for page in PAGES:
        print("".join(f"{line}\n" for line in wrong(page)), end="")


if __name__ == "__main__":
    main()
