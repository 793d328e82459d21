"""The notebooks of course/: what they show is of a whole run, and each of their cells runs."""

import ast
import sys
import threading
import types
from multiprocessing import connection
from pathlib import Path

import pytest

from course import notebooks
from tests import kit

each = pytest.mark.parametrize("name", notebooks.NAMES)


@each
def test_a_notebook_shows_a_whole_run(name):
    """Who reads it on a page, without a kernel, sees what each cell gives: in order, no error."""
    cells = notebooks.code_cells(notebooks.read(name))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(cell.outputs for cell in cells)
    kinds = {out.get("name", out.output_type) for cell in cells for out in cell.outputs}
    assert kinds <= {"stdout", "display_data", "execute_result"}
    assert (notebooks.FOLDER / f"{name}.ipynb").stat().st_size < 300_000


@each
def test_what_a_notebook_imports_has_the_names_that_it_uses(name):
    """Minutes may pass before a cell finds out that a function has another name now."""
    cells = notebooks.code_cells(notebooks.read(name))
    tree = ast.parse("\n".join(cell.source for cell in cells))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {}
    exec(compile(ast.Module(imports, []), name, "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = names.get(ast.unparse(node.value))
            assert not isinstance(owner, types.ModuleType) or hasattr(owner, node.attr), node.attr


CLIENT = """import sys
from multiprocessing import connection

with connection.Client(sys.argv[1]) as server:
    server.send(sys.argv[2:])
    code, said = server.recv()
print(said)
sys.exit(code)
"""


def answer(listener):
    """Makes each run that a client asks for, in a forked rank, and tells it what came of it."""
    while True:
        with listener.accept() as client:
            script, *argv = client.recv()
            few = ["--num_eval_prompts", "8"] * (script == "ppo.py")  # a notebook's own come after
            given = Path(script).stem, [*few, *argv]
            done = kit.fork(kit.call_main, 1, *given, cwd=kit.ROOT, meet="never")
            client.send((done.code, done.out + done.err))


@pytest.mark.slow
@each
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    """Two steps teach a model nothing. Every cell must hold with what it writes then. Its runs are
    forked, which saves the seconds of their imports."""
    (tmp_path / "client.py").write_text(CLIENT)
    listener = connection.Listener(family="AF_UNIX")
    threading.Thread(target=answer, args=[listener], daemon=True).start()
    more = "--max_steps 2" + " --max_answer_seq_len 8" * (name == "grpo")  # reward.py has no such
    start = f"{sys.executable} {tmp_path}/client.py {listener.address}"
    sizes = f'OUT, MORE, DEEPSPEED = "{tmp_path}", "{more}", "{start}"'
    notebooks.execute(notebooks.read(name), sizes)
