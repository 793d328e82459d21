"""Runs one of the scripts with a student's functions in the place of its own.

    deepspeed --num_gpus 2 course/assignment/run.py output/assignment/ada.py sft.py --preset toy

`make own-demo` runs all three. What the file does not define stays the script's own.
"""

import dataclasses
import importlib
import runpy
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import ppo  # noqa: E402
from course.assignment import make  # noqa: E402
from machinery import ranks  # noqa: E402
from machinery.refused import program  # noqa: E402


def put(functions):
    """Sets functions, {name: function}, where the scripts look them up. Returns their names."""
    own = [name for name in make.FUNCTIONS if name in functions]
    for name in own:
        setattr(importlib.import_module(make.FUNCTIONS[name]), name, functions[name])
    if "grpo" in own:  # main() finds this one in the table of --advantage
        ppo.ADVANTAGES["grpo"] = dataclasses.replace(ppo.ADVANTAGES["grpo"], of_groups=ppo.grpo)
    return own


def main(words):
    launchers = [word for word in words if word.startswith("--local_rank")]  # it puts them first
    file, script, *flags = [word for word in words if word not in launchers]
    names = put(runpy.run_path(file))
    ranks.say(f"with these functions of {file}: {', '.join(names)}")
    sys.argv = [script, *flags, *launchers]
    program(importlib.import_module(Path(script).stem).main)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
