"""Reads the labs: declared/NAME.json says which runs are compared, by what, and what was predicted
before they were made. It ends with their results.

A declaration has the fields of runner.Lab; "base" and "measures" are names of declared.json, or
written out as there. Without "shown" the picture shows all measures. A run has one rank. A seed
goes through the whole pipeline: its own SFT model, reward model and PPO. Where a lab names a
commit, flags of it have left the project since; it can be repeated there. README.md shows how to
write one.
"""

import json
import sys
from dataclasses import replace
from itertools import chain

import runner

HERE = runner.ROOT / "course/labs"
OUTPUT = runner.ROOT / "output/labs"
GIVEN = {  # data that run.py makes for those labs that name them
    "text": OUTPUT / "text.jsonl",
    "half": OUTPUT / "half",  # by course/exercises.py
    "sums": OUTPUT / "sums",  # sums with three operations
    "real": OUTPUT / "real",  # SmolLM2 and its sums, by recipes/smollm2/make.py
    "vllm": runner.VLLM,
}
SHARED = json.loads((HERE / "declared.json").read_text())
BASES = {name: base["flags"] for name, base in SHARED["bases"].items()}


def check(field, names, known):
    """Refuses what a field names and nobody knows. Else it would be missed after the runs."""
    if unknown := set(names) - set(known):
        raise ValueError(f'"{field}": {unknown} is not among {[*known]}')


def load(file):
    """Returns the Lab that a file declares."""
    said = json.loads(file.read_text())
    base, measures = said["base"], said["measures"]
    if isinstance(base, str):
        check("base", [base], BASES)
        base = SHARED["bases"][base]
    if isinstance(measures, list):
        check("measures", measures, measures if "commit" in said else SHARED["measures"])
        measures = {head: SHARED["measures"].get(head) for head in measures}
    check("topic", [said["topic"]], SHARED["topics"])
    keys = ["against", "best_of", *runner.OF_LAST, *base["flags"]]
    check("arms", chain(*said["arms"].values()), keys)
    check("given", said.get("given", []), GIVEN)
    plain = said.get("plain", base["plain"])
    others = {
        "shown": said.get("shown", [*measures]),
        "base": base["flags"],
        "limits": base["limits"],
        "measures": measures,
        "given": {name: GIVEN[name] for name in base["given"] + said.get("given", [])},
        "models": base["models"] | said.get("models", {}),
        "plain": tuple((runner.DECLARED / f"{name}.json", arm) for name, arm in plain.items()),
    }
    said.pop("results", None)  # runner.results_of() has them
    return runner.Lab(**{**said, **others})


def load_all():
    """Returns {name: Lab} of all labs, by topic and then by name. One that is wrong is left out."""
    labs = {}
    for file in sorted((HERE / "declared").glob("*.json")):
        try:
            labs[file.stem] = load(file)
        except Exception as error:
            print(f"{file} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return dict(sorted(labs.items(), key=lambda item: SHARED["topics"].index(item[1].topic)))


def quick(lab):
    """Returns a lab of some minutes, to see how labs work: one seed, an arm and its baseline.

    The arm is the first that is compared with another one.
    """
    arm = next(arm for arm in lab.arms if runner.baseline(lab, arm) != arm)
    names = runner.baseline(lab, arm), arm
    return replace(lab, seeds=(1,), arms={name: lab.arms[name] for name in names})


LABS = load_all()
