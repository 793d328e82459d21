"""Reads the labs: labs/declared/NAME.json says which runs are compared, by what, and what was
predicted before they were made.

A declaration has the fields of runner.Lab; "base" and "measures" are names of labs/declared.json,
or written out. Unless an arm says otherwise, a run has one rank. A seed goes through the whole
pipeline: its own SFT model, reward model and PPO. Where a lab names a commit, flags of it have left
the project since; it can be repeated there.
"""

import json
from dataclasses import replace

import runner

HERE = runner.ROOT / "labs"
OUTPUT = runner.ROOT / "output/labs"
GIVEN = {  # data that run.py makes for those labs that name them
    "text": OUTPUT / "text.jsonl",
    "second": OUTPUT / "second/data",  # the toy's data with another seed
    "half": OUTPUT / "half",  # by course/swapped.py
    "sums": OUTPUT / "sums",  # sums with three operations
    "real": OUTPUT / "real",  # SmolLM2 and its sums, by recipes/smollm2/make.py
    "vllm": runner.VLLM,
}
SHARED = json.loads((HERE / "declared.json").read_text())
BASES = {name: base["flags"] for name, base in SHARED["bases"].items()}


def load(file):
    """Returns the Lab that a file declares."""
    said = json.loads(file.read_text())
    base, measures = SHARED["bases"][said["base"]], said["measures"]
    if isinstance(measures, list):
        measures = {head: SHARED["measures"].get(head) for head in measures}
    plain = said.get("plain", base["plain"]).items()
    others = {
        "base": base["flags"],
        "limits": base["limits"],
        "measures": measures,
        "given": {name: GIVEN[name] for name in base["given"] + said.get("given", [])},
        "models": base["models"] | said.get("models", {}),
        "plain": tuple((runner.RESULTS / f"{name}.json", arm) for name, arm in plain),
    }
    return runner.Lab(**{**said, **others})


def load_all():
    """Returns {name: Lab} of all labs, by topic and then by name."""
    labs = {file.stem: load(file) for file in sorted((HERE / "declared").glob("*.json"))}
    return dict(sorted(labs.items(), key=lambda item: SHARED["topics"].index(item[1].topic)))


def quick(lab):
    """Returns a lab of some minutes, to see how labs work: one seed, an arm and its baseline.

    The arm is the first that is compared with another one.
    """
    arm = next(arm for arm in lab.arms if runner.baseline(lab, arm) != arm)
    names = runner.baseline(lab, arm), arm
    return replace(lab, seeds=(1,), arms={name: lab.arms[name] for name in names})


LABS = load_all()
