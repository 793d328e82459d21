"""Grades the assignment. A file that is not there is written, with all functions blank.

    python course/assignment/grade.py output/assignment/ada.py
    python course/assignment/grade.py collected/*.py               a line for each

The numbers and names of the cases depend on the file's name: each student has others.
"""

import json
import os
import random
import runpy
import signal
import sys
import traceback
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402

import ppo  # noqa: E402, F401 (here, as students' files import it, and each is run in processes)
from course.assignment import expected, make  # noqa: E402
from course.assignment.checks import CHECKS  # noqa: E402

LIMIT = 20  # seconds for all checks of a function
ANIMALS = "badger crane dormouse eagle ferret goose heron ibex lynx marten newt otter".split()
BLANK = "not written yet"
DONE = """
All of them are right. The whole demo with your own functions (about 4 minutes), and its table:

    make own-demo NAME={}"""


class Wrong(Exception):
    """What a function returned is not what it should return."""


# ---- One check ----
def kind(value):
    """Returns in words what a function returned."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    parts = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    return f"{type(value).__name__}{parts}"


def matched(found, right):
    """Returns pairs of tensors. If kinds or shapes differ, raises Wrong."""
    if isinstance(right, (list, tuple)):
        if isinstance(found, (list, tuple)) and len(found) == len(right):
            return [pair for parts in zip(found, right) for pair in matched(*parts)]
    elif isinstance(found, (torch.Tensor, float, int)):
        found = torch.as_tensor(found)
        if found.shape == right.shape:
            return [(found, right)]
    raise Wrong(f"it returns {kind(found)}, where {kind(right)} is expected")


def tensors(value):
    """Yields copies of the tensors in an argument, which a function must leave as they are."""
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif hasattr(value, "__dict__"):
        yield from tensors([*vars(value).values()])


def shown(value):
    """Returns an argument in short."""
    if isinstance(value, torch.Tensor):
        value = torch.where(value.isfinite(), (value.double() * 1e4).round() / 1e4, value).tolist()
    elif isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    elif hasattr(value, "__dict__"):
        return ", ".join(f"{name} {shown(part)}" for name, part in vars(value).items())
    return str(value)


def gradient(out, leaf):
    """Returns the gradient of an output's sum."""
    total = out.sum()
    if not total.requires_grad:
        raise Wrong("no gradient comes back")
    return torch.autograd.grad(total, leaf, materialize_grads=True)[0]


def gradient_by_differences(function, case, check):
    """Returns the same of a function of expected.py, which knows no gradients."""

    def total(x):
        return check.look(function(**{**case, check.slope: x}), case).sum()

    x = case[check.slope].detach().double()
    steps = 1e-4 * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return torch.stack([(total(x + step) - total(x - step)) / 2e-4 for step in steps]).view_as(x)


def run(check, function, right_function, rng):
    """Runs a check. If the function fails it, raises Wrong, or whatever the function raises."""
    case, names = check.case(rng), rng.sample(ANIMALS, 6)
    if check.slope:
        case[check.slope].requires_grad_()
    words = "; ".join(f"{name} {shown(value)}" for name, value in case.items())
    before = [*tensors([*case.values()])]
    found = function(*case.values())
    if not all(map(torch.equal, before, tensors([*case.values()]))):
        raise Wrong("it changes its arguments, which its caller goes on using")
    right = right_function(*case.values())
    matched(found, right)
    found, right = check.look(found, case), check.look(right, case)
    if check.slope:
        found = gradient(found, case[check.slope])
        right = gradient_by_differences(right_function, case, check)
    for part, (one, other) in enumerate(matched(found, right)):
        one, other = one.detach().double(), other.double()
        wrong = ~torch.isclose(one, other, rtol=1e-4, atol=1e-5)
        for place in wrong.nonzero()[:1].tolist():
            where = "".join(f", the {names[i]}'s response" for i in place[:1])
            where += "".join(f", number {i}" for i in place[1:])
            where = f", part {part}{where}" if isinstance(right, (list, tuple)) else where
            numbers = f"yours {one[*place]:.6g}, right {other[*place]:.6g}{where}"
            raise Wrong(f"{check.symptom}\n{numbers}" + f"\n{words}" * (len(words) < 700))


def crash(error, file):
    """Returns in one line what a student's code raised, and where."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return f"{words} (line {lines[-1]})" if lines else words


def grade(name, function, student, file=""):
    """Returns [points, hint] of each check of a function; a hint is "" where the points are won."""
    results = []
    for number, check in enumerate(CHECKS[name]):
        rng, hint = random.Random(f"{student} {name} {number}"), ""
        try:
            for _ in range(3):  # other numbers each time: none is right by luck
                run(check, function, getattr(expected, name), rng)
        except NotImplementedError:
            hint = BLANK
        except Wrong as error:
            hint = str(error)
        except (Exception, SystemExit) as error:
            hint = crash(error, file)
        results.append([check.points, hint])
    return results


# ---- One file ----
def load(file, name=None):
    """Returns the results of a function of a file. No name: "", or why the file does not run."""
    sys.stdin = open(os.devnull)
    try:
        functions = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        return crash(error, file)
    if name is None:
        return ""
    function = functions.get(name)
    if getattr(function, "__module__", None) != "<run_path>":  # runpy's name for the file
        return [[sum(check.points for check in CHECKS[name]), "is not defined in the file"]]
    return grade(name, function, file.stem, file)


def in_process(file, name=None):
    """Returns load(file, name) from a process of its own, or why that has not ended by itself."""
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)  # ends the process
        try:
            text = json.dumps(load(file, name))
            sys.stdout.flush()
            with os.fdopen(write, "w") as out:
                out.write(text)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if text:
        return json.loads(text)
    slow = code == -signal.SIGALRM
    why = f"stopped after {LIMIT} seconds: it does not end" if slow else "it ended the program"
    return [[sum(check.points for check in CHECKS[name]), why]] if name else why


def report(file):
    """Prints what a file gets, function by function."""
    if error := in_process(file):
        print(f"{file} does not run: {error}\n{'total':16} 0 of 100")
        return
    total = 0
    for name in CHECKS:
        results = in_process(file, name)
        points = sum(points for points, hint in results if not hint)
        most, total = sum(points for points, _ in results), total + points
        hints = {hint: sum(p for p, h in results if h == hint) for _, hint in results if hint}
        alone = [hint for hint in hints if hints[hint] == most and "\n" not in hint]
        print(f"{name:16}{points:3} of {most:2}", *alone, sep="  ")
        for number, (hint, lost) in enumerate(hints.items() if not alone else ()):
            if number == 1:
                print("    and then, perhaps for the same reason:")
            print(f"    -{lost}  " + hint.replace("\n", "\n        "))
    print(f"{'total':16}{total:3} of 100")
    if total == 100:
        print(DONE.format(file.stem))


def line(file):
    """Returns the points of a file in one line: all of them, and each function's."""
    if error := in_process(file):
        return f"{file.stem:16}{0:4}  does not run: {error}"
    points = [sum(p for p, hint in in_process(file, name) if not hint) for name in CHECKS]
    return f"{file.stem:16}{sum(points):4}  " + " ".join(f"{n:2}" for n in points)


def main(files):
    if len(files) == 1 and not files[0].exists():
        make.write(files[0])
        print(f"{files[0]} is new: fill in its functions, in any order, and run this again.\n")
    if len(files) == 1:
        report(files[0])
    else:
        print(*(line(file) for file in files), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main([*map(Path, sys.argv[1:])])
