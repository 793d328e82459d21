"""The rules of the house, which keep a large program easy to change: who may import whom, where
state lives, how a flag is declared. And what was new when the code was put in order: --max_steps 0,
masks with fractions, rows that two ranks hold.

The rules are read from the code itself, so a new file or flag is held to them from its first day.
"""

import ast
import graphlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import common
import ppo
import reward
import sft
from machinery.base import ranks
from machinery.flags import declaring, refusals
from machinery.rollout import kept_pass
from machinery.run import output_folder

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
FILES = {"common": ROOT / "common.py", **{name: ROOT / f"{name}.py" for name in SCRIPTS}}
MACHINERY = {f"machinery.{f.stem}": f for f in sorted((ROOT / "machinery").glob("*.py"))}
PACKAGE = "machinery.__init__"
FILES |= MACHINERY
TOOLS = {f"tools.{f.stem}": f for f in sorted((ROOT / "tools").glob("*.py"))}  # they use the rest
TREES = {name: ast.parse(file.read_text()) for name, file in [*FILES.items(), *TOOLS.items()]}


# --------------------------------------------------------------------------------------------------
# Imports
# --------------------------------------------------------------------------------------------------
def imported(name):
    """The modules of ours that module `name` imports, also inside its functions."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if "machinery" in {module.split(".")[0] for module in found} and name != PACKAGE:
        found.add(PACKAGE)  # Python runs it first
    return found & set(FILES)


def test_the_machinery_knows_no_script():
    """A script is one of many that may be written on top: a fourth one, or a fork of ppo.py, must
    find all of the machinery at work without the other three."""
    tools = {name.removeprefix("tools.") for name in TOOLS}
    for name in FILES:
        assert not imported(name) & set(SCRIPTS), name
        text = FILES[name].read_text()
        assert not any(f"import {tool}" in text for tool in [*tools, "tools"]), name


def test_no_import_goes_in_a_circle():
    """In a circle it matters who is imported first, and one day a line that a tool has sorted
    breaks the program. An import inside a function would hide the circle, so it counts."""
    below = [name for name in FILES if name not in SCRIPTS]
    order = graphlib.TopologicalSorter({name: imported(name) for name in below}).static_order()
    assert set(order) == set(below)  # (a CycleError names the circle)


IMPORT_THEM = """
import importlib, random, sys
first, names = sys.argv[1], sys.argv[2:]
orders = [names]
if first == "each":
    orders = [[name, *random.Random(name).sample(names, len(names))] for name in names]
for order in orders:
    for ours in [name for name in sys.modules if name.split(".")[0] in ("machinery", *names)]:
        del sys.modules[ours]
    for name in order:
        importlib.import_module(name)
print(len(orders), "orders")
"""


@pytest.mark.parametrize("first, orders", [("last", 1), ("each", len(FILES) - 1)])
def test_modules_are_imported_in_any_order(first, orders):
    """Whoever uses one module by itself, in a notebook or a test, starts where he likes: here from
    the last of the alphabet in a fresh Python, and once from each, the others shuffled."""
    names = sorted((name for name in FILES if name != PACKAGE), reverse=True)
    command = [sys.executable, "-c", IMPORT_THEM, first, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{orders} orders\n"  # and quietly


# --------------------------------------------------------------------------------------------------
# State
# --------------------------------------------------------------------------------------------------
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
CHANGES = set(
    """append extend insert remove pop clear sort reverse update setdefault popitem add
                 discard appendleft popleft difference_update intersection_update""".split()
)


def containers(name):
    """The names at the top of a module that are bound to something that can be changed."""
    found = set()
    for node in TREES[name].body:
        value = getattr(node, "value", None)
        maker = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MAKERS
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (maker or isinstance(value, DISPLAYS)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def changed(name):
    """Yields what module `name` changes, as text: what it sets or deletes an item of, adds to in
    place, or calls a changing method of; and `x.` where it sets an attribute of x."""
    for node in ast.walk(TREES[name]):
        targets = getattr(node, "targets", [])
        if isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target)
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES:
                yield ast.unparse(node.func.value)
        for target in targets:
            if isinstance(target, (ast.Subscript, ast.Attribute)):
                yield ast.unparse(target.value) + "." * isinstance(target, ast.Attribute)


@pytest.mark.parametrize("name", [*FILES, *TOOLS])
def test_nothing_is_kept_at_the_top_of_a_module(name):
    """What a module keeps between two calls is seen by nobody who reads the call: a second run in
    the same Python would start from what the first has left. State lives in objects that are handed
    on (Run, Phase, KeptPass, `state`). Constants may be lists and dicts, if nobody changes them.
    (A cache of what a function returns is none: functools.lru_cache.)"""
    assert not any(isinstance(node, ast.Global) for node in ast.walk(TREES[name]))
    own, short = containers(name), name.removeprefix("machinery.")
    for other in [*FILES, *TOOLS]:
        forbidden = {f"{short}.{constant}" for constant in own} | {f"{short}."}
        if other == name:
            forbidden = own
        elif name not in imported(other):  # what is called so there is a variable
            forbidden = set()
        assert not forbidden & set(changed(other)), f"{other} changes {name}"


def test_the_search_for_changes_finds_them(monkeypatch):
    """A rule that is never broken may be one that is never looked at."""
    code = "A, = [], \nB = {}\nC = dict()\nD = ('a',)\nE: list = [1]\ndef f():\n"
    code += "    B['x'] = 1\n    C.update(x=1)\n    del E[0]\n    common.LIST.append(1)\n"
    code += "    ranks.SIZE = 2\n    E += [2]\n"
    monkeypatch.setitem(TREES, "bad", ast.parse(code))
    assert containers("bad") == {"B", "C", "E"}
    assert set(changed("bad")) == {"B", "C", "E", "common.LIST", "ranks."}


@pytest.mark.parametrize("name", [*MACHINERY, *TOOLS])
def test_every_module_says_its_job(name):
    """Who looks for something reads the folder's names and first lines."""
    assert len(ast.get_docstring(TREES[name]).splitlines()[0].split()) >= 4


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------
class Parser(Exception):
    """Carries a script's parser out of its get_args."""


def parser_of(script, monkeypatch):
    def parse(parser, *args):
        raise Parser(parser)

    with monkeypatch.context() as patch:
        patch.setattr(flags, "parse", parse)
        with pytest.raises(Parser) as caught:
            SCRIPTS[script].get_args([])
    return caught.value.args[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_declared_once(script, monkeypatch):
    """With `arg`, which takes its default, its help, its range and whether --resume may change it:
    one line to read, and to change. Two flags of one name would silently share a value."""
    actions = [a for a in parser_of(script, monkeypatch)._actions if a.dest != "help"]
    assert [action.dest for action in actions if not hasattr(action, "fixed")] == []
    names = [option for action in actions for option in action.option_strings]
    assert sorted(set(names)) == sorted(names) and len(names) > 40
    assert names == [f"--{action.dest}" for action in actions]


def outside(flag):
    """Texts of numbers just outside the range of a flag."""
    step = 1 if flag.type is int else 0.5
    least, most = flag.least, flag.most
    texts = [least / 2 if 0 < least < step else least - step]
    texts += [most + step] if most < declaring.FINITE else []
    if flag.type is float:
        texts += ["nan", "-inf", *(["inf"] if most < math.inf else [])]
    return texts


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_outside_its_range_is_refused(script, monkeypatch, capsys):
    """Each numeric flag has a range where it is declared, 0 or more unless said otherwise. Just
    outside is refused, by the name of the flag; both ends of the range are taken."""
    numeric = [f for f in parser_of(script, monkeypatch)._actions if f.type in (int, float)]
    assert len(numeric) > 20
    for flag in numeric:
        assert -1 <= flag.least < flag.most, flag.dest
        for text in outside(flag):
            with pytest.raises(SystemExit) as stop:
                SCRIPTS[script].get_args([f"--{flag.dest}={text}"])
            said = capsys.readouterr().err
            assert stop.value.code == 2 and f"--{flag.dest}" in said, said
            assert "is out of range" in said or flag.choices, said
        ends = [flag.least, *([flag.most] if flag.most < declaring.FINITE else [])]
        for text in [flag.type(end) for end in ends] + ["inf"] * (flag.most == math.inf):
            try:
                SCRIPTS[script].get_args([f"--{flag.dest}={text}"])
            except SystemExit:  # two flags may not go together
                assert "out of range" not in capsys.readouterr().err, (flag.dest, text)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_of_ones_own_starts_from_the_first_preset(script, monkeypatch):
    """By its place and not by its name: a recipe that is put in front of the others is the one that
    runs go by from then on. The toy is for those who name nothing."""
    module = SCRIPTS[script]
    names_model = [f"--{'actor_' if script == 'ppo' else ''}model_name_or_path", "somewhere"]
    first = next(iter(module.PRESETS))
    assert module.get_args(names_model).preset == first
    assert module.get_args([]).preset == "toy"
    mine = {**module.PRESETS[first], "num_warmup_steps": 7}
    monkeypatch.setattr(module, "PRESETS", {"mine": mine, **module.PRESETS})
    args = module.get_args(names_model)
    assert (args.preset, args.num_warmup_steps) == ("mine", 7)
    assert module.get_args([*names_model, "--preset", first]).preset == first


@pytest.mark.parametrize("script", SCRIPTS)
def test_presets_name_flags_that_exist(script, monkeypatch):
    """A preset fills in defaults, and argparse takes any name for one: a typo would do nothing."""
    known = {action.dest for action in parser_of(script, monkeypatch)._actions}
    for preset in [*SCRIPTS[script].PRESETS.values(), declaring.toy_preset(script)]:
        assert set(preset) <= known, set(preset) - known


def test_max_steps_0_evaluates_and_ends(trained, tmp_path):
    """How good is this model, on this data? The line of step 0, the samples and exit code 0; no
    step is made, so no model and no checkpoint is saved: the folder is no finished run."""
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("train", 8), ("test", 4)):
        pairs = [{"prompt": f"{name} {i}?", "response": " So."} for i in range(count)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    models = {
        "sft": ["--num_samples", "1"],
        "ppo": ["--actor_model_name_or_path", str(trained / "actor"), "--num_eval_prompts", "4"]
        + ["--critic_model_name_or_path", str(trained / "judge")],
    }
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    # torch's AdamW: nothing is optimized here, so nothing need be compiled
    env |= {"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    same = ["--preset", "toy", "--data_path", str(data), "--data_split", "1,1,1"]
    same += ["--max_steps", "0", "--max_answer_seq_len", "4"]
    options = dict(cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    runs = {}
    for script, own in models.items():
        command = [sys.executable, f"{script}.py", *same, *own, "--output_dir", tmp_path / script]
        runs[script] = subprocess.Popen(command, **options)
    for script, metric in (("sft", "eval_loss"), ("ppo", "eval_reward")):
        said, _ = runs[script].communicate(timeout=300)
        folder = tmp_path / script
        assert runs[script].returncode == 0, said
        assert (", from scratch\n" in said) == (script == "sft")
        lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
        assert [line["step"] for line in lines] == [0] and metric in lines[0]
        left = {file.name for file in folder.iterdir()} - {"curves.png"}
        own = {"tokens.jsonl"} if script == "ppo" else set()
        assert left == {"args.json", "metrics.jsonl", "samples.jsonl"} | own, said


# --------------------------------------------------------------------------------------------------
# Two seams
# --------------------------------------------------------------------------------------------------
def test_padding_keeps_fractions():
    """A loss mask may weigh a token by a half; as whole numbers that would be 0, in silence."""
    values, mask = common.pad([[0.5, 1.0, 0.25], [0.75]], 0)
    assert values.tolist() == [[0.5, 1.0, 0.25], [0.0, 0.0, 0.75]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]] and mask.dtype == torch.long
    values, _ = common.pad([[0.5], [0.25, 1.0]], 0, "right")
    assert values.tolist() == [[0.5, 0.0], [0.25, 1.0]]


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_all_ranks_are_each_there_once(size, monkeypatch):
    """An evaluation counts each held-out prompt once: no filler, which is there so that all ranks
    make as many forwards, and no second copy from a rank that shares its layers, and so its rows,
    with another."""
    monkeypatch.setenv("RLHF_TENSOR_PARALLEL", str(size))
    monkeypatch.setattr(ranks, "get_world_size", lambda: 4)
    held = {}  # rank: its rows. The last share has a filler
    for rank in range(4):
        share = rank // size
        filler = share == 4 // size - 1
        held[rank] = [{"row": share, "row_weight": 1}, {"row": -1, "row_weight": 0}]
        held[rank] = (
            held[rank] if filler else [*held[rank][:1], {"row": share + 9, "row_weight": 1}]
        )
    given = []
    for rank in range(4):
        monkeypatch.setattr(ranks, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(ranks, "all_gather_objects", lambda items: given.extend(items) or given)
        everyones = ranks.each_once(held[rank])
    shares = 4 // size
    assert [row["row"] for row in everyones if row["row"] < 9] == list(range(shares))
    assert len(everyones) == 2 * shares - 1 and all(row["row_weight"] for row in everyones)


def test_an_evaluation_leaves_what_trains_as_it_was(monkeypatch):
    """During --critic_warmup_steps the actor waits. An evaluation in such a step must not make it
    look as if it trained: --kl_target would adapt its penalty to a policy that stands still."""
    monkeypatch.setattr(kept_pass, "roles", lambda args: ("actor",))
    policy = kept_pass.KeptPass(None, "actor", torch.nn.Linear(1, 1), forward=print)
    policy.begin(1, trains=False)
    policy.begin(None, trains=True)
    assert (policy.trains, policy.keeps) == (False, False)
    policy.begin(2, trains=True)
    assert (policy.trains, policy.keeps) == (True, True)


def test_weights_are_set_in_frozen_models_only():
    """A model that trains has fp32 master weights, which would write the old values back."""
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    common.set_weights(model, lambda name: torch.ones_like(dict(model.named_parameters())[name]))
    assert model.weight.tolist() == [[1, 1]] and model.bias.tolist() == [1]
    with pytest.raises(ValueError, match="frozen"):
        common.set_weights(model.requires_grad_(True), lambda name: None)


@pytest.mark.parametrize(
    "script, given, other",
    [
        ("sft", "--zero_stage 3", "ZeRO stage 3; the preset toy has 2"),
        ("reward", "--preset opt-1.3b --zero_stage 2", "ZeRO stage 2; the preset opt-1.3b has 0"),
        ("ppo", "--zero_stage 1", "ZeRO stage 1; the preset toy has 2"),
        ("ppo", "--critic_zero_stage 3", "ZeRO stage 3; the preset toy has 2"),
        ("sft", "", None),
        ("reward", "--zero_stage 2", None),
        ("ppo", "--preset opt-1.3b", None),
    ],
)
def test_another_zero_stage_than_the_presets_is_warned_of(capsys, script, given, other):
    """Presets are what is known to work; in step 3 other stages are a known cause of divergence."""
    refusals.warn_of_stages(SCRIPTS[script].get_args(given.split()))
    said = capsys.readouterr().out
    assert f"warning: {other}" in said if other else said == ""


def test_an_evaluation_alone_deletes_no_model(tmp_path, capsys):
    """--max_steps 0 saves no model, so that --overwrite would leave nothing in its place."""
    (tmp_path / "config.json").write_text("{}")
    flags = ["--max_steps", "0", "--overwrite", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        output_folder.check(sft.get_args(flags))
    assert "saves no model" in capsys.readouterr().err
