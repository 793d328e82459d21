"""The rules of the house: who may import whom, what a room weighs, and where state lives.

They are read from the code itself, so that a new file is held to them from its first day.
"""

import ast
import graphlib
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["sft", "reward", "ppo"]
WEIGHTS = {  # bytes of code
    "machinery": 164_900,
    "tools": 150_700,
    "course/labs": 44_200,
}
MACHINERY = sorted((ROOT / "machinery").rglob("*.py"))
PROGRAMS = "bench bench_inside bench_trl fork gpu_check gpu_run operators wheel".split()
TOOLS = sorted(f for f in (ROOT / "tools").rglob("*.py") if f.stem not in PROGRAMS)
STORY = [ROOT / f"{name}.py" for name in ["common", *SCRIPTS]]


def dotted(file):
    """Returns a file's name as a module: machinery.ranks."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {dotted(file): ast.parse(file.read_text()) for file in [*MACHINERY, *TOOLS, *STORY]}
PRODUCT = [dotted(file) for file in [*MACHINERY, *STORY]]
IN_HOUSE = [name for name in PRODUCT if name not in ["machinery", *SCRIPTS]]
DOOR = ast.get_docstring(TREES["machinery"])


# --------------------------------------------------------------------------------------------------
# Imports
# --------------------------------------------------------------------------------------------------
def imported(tree, modules):
    """Returns those of `modules` that a tree imports, also inside its functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(modules)


def imported_in_all(name):
    """Returns the modules of the house that a module imports, directly or through others."""
    found, todo = set(), [name]
    while todo:
        new = imported(TREES[todo.pop()], IN_HOUSE) - found
        found |= new
        todo += new
    return found


def on_common():
    """Returns the modules that stand on common.py, as the docstring of machinery/ names them."""
    names = re.search(r"On common.py stand: ([\w, ]+)\.", DOOR)[1]
    return {f"machinery.{name}" for name in names.split(", ")}


def test_common_imports_nothing_that_stands_on_it():
    """Also not by way of other files: what a script of one's own needs of common.py stays small."""
    assert not imported_in_all("common") & on_common()
    using = {name for name in IN_HOUSE if "common" in imported(TREES[name], ["common"])}
    assert using == on_common()


def test_the_readme_says_how_many_files_a_script_imports():
    """Of machinery/, its __init__.py included."""
    counts = [len(imported_in_all(name) & {*map(dotted, MACHINERY)}) + 1 for name in SCRIPTS]
    assert counts[0] == counts[1] and counts[2] == len(MACHINERY)
    words = f"`ppo.py` imports all of them, the other two {counts[0]}"
    assert words in (ROOT / "README.md").read_text()


def test_nobody_imports_a_script_or_a_tool():
    """A script is one of many that may be written on top: a fork of ppo.py finds all of the
    machinery at work without the other three."""
    above = [*SCRIPTS, "tools", *map(dotted, TOOLS), *(file.stem for file in TOOLS)]
    for name in PRODUCT:
        assert not imported(TREES[name], above), name


def test_no_import_goes_in_a_circle():
    """In a circle it matters who is imported first. An import inside a function would hide the
    circle, so it counts."""
    graph = {name: imported(TREES[name], IN_HOUSE) for name in IN_HOUSE}
    order = graphlib.TopologicalSorter(graph).static_order()
    assert set(order) == set(IN_HOUSE)  # (a CycleError names the circle)


def test_modules_are_imported_in_any_order_and_in_silence():
    """Whoever uses one module by itself, in a notebook or a test, starts where he likes."""
    names = sorted(PRODUCT, reverse=True)
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stdout) == (0, b""), run.stderr.decode()


# --------------------------------------------------------------------------------------------------
# Sizes and names
# --------------------------------------------------------------------------------------------------
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.ClassDef)


def code_bytes(text):
    """Returns how many bytes of a module are code: no comment, no docstring, no empty line."""
    lines = dict(enumerate(text.splitlines(), 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = lines[token.start[0]][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            words = node.body[0]
            for number in range(words.lineno, words.end_lineno + 1):
                lines[number] = ""
    return sum(len(line.rstrip().encode()) + 1 for line in lines.values() if line.strip())


@pytest.mark.parametrize("room", WEIGHTS)
def test_a_room_is_not_too_heavy(room):
    """Minimal is the first word of what this project is. Comments and docstrings are free."""
    files = (ROOT / room).rglob("*.py")
    assert sum(code_bytes(file.read_text()) for file in files) <= WEIGHTS[room]


@pytest.mark.parametrize("name", TREES)
def test_every_module_says_its_job(name):
    """Who looks for something reads the folder's names and first lines."""
    assert len(ast.get_docstring(TREES[name]).splitlines()[0].split()) >= 4


def test_the_room_lists_its_files():
    """The list at its door names all of them, and none that has left."""
    files = {file.stem for file in MACHINERY} - {"__init__"}
    assert set(re.findall(r"^(\w+)  +\S", DOOR, re.M)) == files


def test_ds_config_holds_no_number_that_is_also_a_flag():
    """Each number has one home: batch sizes, stage, dtype and learning rates come from flags."""
    config = json.loads((ROOT / "ds_config.json").read_text())
    flags = {"optimizer", "scheduler", "bf16", "fp16", "gradient_clipping", "train_batch_size"}
    assert not flags & set(config) and "stage" not in config["zero_optimization"]


# --------------------------------------------------------------------------------------------------
# State
# --------------------------------------------------------------------------------------------------
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "defaultdict", "deque", "Counter"}
CHANGES = {"append", "extend", "insert", "remove", "pop", "clear", "update", "setdefault", "add"}


def containers(tree):
    """Returns the names at the top of a module that are bound to something that can be changed."""
    found = set()
    for node in tree.body:
        value = getattr(node, "value", None)
        made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MAKERS
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (made or isinstance(value, DISPLAYS)):
            found |= {n.id for n in ast.walk(node) if isinstance(getattr(n, "ctx", 0), ast.Store)}
    return found


def changed(tree):
    """Returns what a module changes, as text: what it sets or deletes an item of, adds to in place,
    or calls a changing method of; and `x.` where it sets an attribute of x."""
    found = set()
    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.AugAssign):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES:
                found.add(ast.unparse(node.func.value))
        for target in targets:
            if isinstance(target, (ast.Subscript, ast.Attribute)):
                found.add(ast.unparse(target.value) + "." * isinstance(target, ast.Attribute))
    return found


@pytest.mark.parametrize("name", TREES)
def test_nothing_is_kept_at_the_top_of_a_module(name):
    """What a module keeps between two calls is seen by nobody who reads the call: a second run in
    the same Python would start from what the first has left. State lives in objects that are handed
    on. Constants may be lists and dicts, if nobody changes them."""
    own, short = containers(TREES[name]), name.split(".")[-1]
    assert not any(isinstance(node, ast.Global) for node in ast.walk(TREES[name]))
    assert not own & changed(TREES[name])
    forbidden = {f"{short}.{constant}" for constant in own} | {f"{short}."}
    for other, tree in TREES.items():
        if imported(tree, [name]) and short != "run":  # there it is an object, a Run
            assert not forbidden & changed(tree), f"{other} changes {name}"
