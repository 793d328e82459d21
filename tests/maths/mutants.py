"""Small changes to ppo.py's maths, one at a time: does a fast test see each of them?

    python tests/maths/mutants.py                        200 changes, drawn with seed 0
    python tests/maths/mutants.py --seed 1 --count 50    other ones
    python tests/maths/mutants.py --only 17              one of them, with what its tests print

A change that no test sees survives, and is printed with its line. It needs a test, or a reason in
EQUIVALENT: some changes make no difference, or only to speed. The tests run in a fork of a process
that has imported everything, so a change takes seconds; tests that start runs are skipped.
"""

import argparse
import ast
import copy
import os
import random
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FILES = """maths/test_against_loops maths/test_by_hand maths/test_one_step maths/test_logprobs
    rollout/test_layouts_by_hand rollout/test_metrics rollout/test_forks rollout/test_sampling
    rollout/test_checks rollout/test_microscope""".split()
MATHS = """Sizes kl_estimate token_rewards gae reinforce rloo grpo group_sum
    whitened policy_loss actor_loss value_loss gae_advantages
    reinforce_advantages
    ADVANTAGES MicroBatch plain_rows make_micro_batches sample ordered actor_forward
    reward_model_scores score set_rewards set_advantages minibatches
    trained_mask loss_weights optimizer_step""".split()
# Changes that no test can see, or that none should: "function: before -> after", and why.
EQUIVALENT = {
    "optimizer_step: batch.advantages > 0 -> batch.advantages >= 0 in clipped & "
    "(batch.advantages > 0)": "with an advantage of 0 nothing is clipped",
    "make_micro_batches: (torch.arange(length.max()) < length[:, None]).float() -> "
    "torch.arange(length.max()) < length[:, None] in real = "
    "(torch.arange(length.max()) < length[:, None]).float()": "row_weight is a float",
    "optimizer_step: logprobs.detach() -> logprobs in kl_estimate(batch.old_logprobs, "
    "logprobs.detach(), 'k3')": "TokenMeans.add makes no graph",
    "reinforce: 0 -> 1 in gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]": "with "
    "values of 0 the returns are the advantages",
}

LIMIT = 120  # seconds for the tests of one change
SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "max": "min", "zeros_like": "ones_like", "ones_like": "zeros_like"}
NAMES |= {"index_add": "index_copy", "cumsum": "cumprod", "exp": "log", "log": "exp"}
DROPPED = {"detach", "double", "float", "clamp", "reversed", "sqrt", "abs", "log", "sum"}


# --------------------------------------------------------------------------------------------------
# Changes
# --------------------------------------------------------------------------------------------------
def changes_of(node):
    """Yields what may stand in the place of an expression or a statement: nodes like it."""
    op = getattr(node, "op", None)
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(op) in SWAPS:
        yield changed(node, op=SWAPS[type(op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield changed(node, ops=[SWAPS[type(node.ops[0])]()])
    # -x, not x, ~x; but of (B, R) the last dimension, -1, is dimension 1
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield changed(node, value=node.value + 1)
        if node.value:
            yield changed(node, value=node.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield changed(node, value=not node.value)
    if isinstance(node, (ast.If, ast.IfExp)):
        yield changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.If) and not node.orelse and not isinstance(node.body[-1], ast.Return):
        yield ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()
    name = getattr(node, "attr", getattr(node, "id", ""))
    if name in NAMES:
        field = "attr" if isinstance(node, ast.Attribute) else "id"
        yield changed(node, **{field: NAMES[name]})
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in DROPPED and isinstance(node.func, ast.Attribute):
            yield node.func.value
        elif called in DROPPED and node.args:
            yield node.args[0]
        if called == "where" and len(node.args) == 2:
            yield node.func.value
    # x = f(x, ...): without it
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        if any(getattr(n, "id", "") == node.targets[0].id for n in ast.walk(node.value)):
            yield ast.Pass()


def changed(node, **fields):
    """Returns a copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def children(node):
    """Yields (node that holds it, field, place or None, child) of all below, but no docstrings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            words = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not words and not isinstance(child, ast.Assert):
                yield node, field, place if isinstance(value, list) else None, child
                yield from children(child)


def all_changes(source):
    """Returns [(line, "function: before -> after", source after it), ...] of the maths."""
    found = []
    tree = ast.parse(source)
    for part in tree.body:
        names = [getattr(part, "name", ""), *(t.id for t in getattr(part, "targets", ()))]
        for name in set(names) & set(MATHS):
            for holder, field, place, child in children(part):
                for new in changes_of(child):
                    ast.copy_location(new, child)
                    before = ast.unparse(child).splitlines()[0]
                    after = ast.unparse(new).splitlines()[0] if new.__class__ else ""
                    put(holder, field, place, new)
                    text = ast.unparse(ast.fix_missing_locations(tree))
                    put(holder, field, place, child)
                    where = ast.unparse(holder).splitlines()[0]
                    found.append((child.lineno, f"{name}: {before} -> {after} in {where}", text))
    return found


def put(holder, field, place, node):
    """Puts a node in the place of another one."""
    if place is None:
        setattr(holder, field, node)
    else:
        getattr(holder, field)[place] = node


# --------------------------------------------------------------------------------------------------
# Tests
# --------------------------------------------------------------------------------------------------
def survives(text, shown=False):
    """Returns whether all tests pass with ppo.py as `text`. They run in a fork of this process."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        signal.alarm(LIMIT)
        code = 1
        try:
            if not shown:
                for number in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            code = run_tests(text)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_tests(text):
    """Makes `text` the code of the module ppo, and runs the tests. Returns pytest's exit code."""
    import pytest

    import ppo
    from tests import kit

    def no_runs(*args, **options):
        pytest.skip("it starts a run")

    kit.server = kit.start_command = no_runs
    exec(compile(text, "ppo.py", "exec"), vars(ppo))
    files = [str(ROOT / f"tests/{name}.py") for name in FILES]
    quick = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header"]
    return pytest.main([*quick, *files])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    words = "the numbers of changes; of one alone with its tests' words"
    parser.add_argument("--only", type=int, nargs="+", help=words)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch

    torch.set_num_threads(1)  # a fork has no threads of a pool

    from tests import conftest  # noqa: F401

    source = (ROOT / "ppo.py").read_text()
    assert survives(ast.unparse(ast.parse(source)), shown=True), "tests fail as the code stands"
    drawn = all_changes(source)
    total, began = len(drawn), time.monotonic()
    random.Random(given.seed).shuffle(drawn)
    chosen = given.only or range(min(given.count, total))
    left = known = 0
    for number in chosen:
        line, what, text = drawn[number]
        if not survives(text, shown=len(chosen) == 1):
            continue
        known += what in EQUIVALENT
        left += what not in EQUIVALENT
        print(f"{number:4} ppo.py:{line} {what}   {EQUIVALENT.get(what, 'SURVIVES')}", flush=True)
    words = f"{len(chosen)} of {total} changes, seed {given.seed}: {left} survive without a reason"
    print(f"{words}, {known} with one ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
