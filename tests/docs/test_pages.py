"""README and docs are true today: commands parse; flags, files, functions and tests that they name
exist; links lead somewhere; figures are those of what they come from."""

import contextlib
import doctest
import functools
import importlib
import io
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from machinery import flags as declaring
from tests import kit

ROOT = kit.ROOT
sys.path[:0] = [str(ROOT / "recipes/toy"), str(ROOT / "tools")]
README = ROOT / "README.md"
PAGES = [README]
PAGES += [
    page for name in ("docs", "course", "recipes") for page in sorted((ROOT / name).rglob("*.md"))
]
PAGES += sorted((ROOT / "course").glob("*.ipynb"))
TOOLS = [f"tools/{name}.py" for name in ("talk", "look", "export", "estimate")]
PROGRAMS = ["sft.py", "reward.py", "ppo.py", *TOOLS]
MODULES = [ROOT / "common.py", *sorted((ROOT / "machinery").glob("*.py"))]
# flags of launchers and of other tools, which no parser of ours knows
OTHERS = set(
    """--num_gpus --nnodes --nproc_per_node --rdzv_backend --rdzv_endpoint --shutdown_timeout
       --master_port --hostfile --log_level --bind_cores_to_rank --nodes --ntasks --signal --gpus
       --cpus --requeue --enable --lora --max --model --model_args --tasks --exclude --index
       --help --no --depth --input_folder --output_folder --inject_missing_state""".split()
)
FOLDERS = "machinery|tools|tests|recipes|variants|course"


def module_of(file):
    """Returns a file as a module."""
    name = Path(file).relative_to(ROOT) if Path(file).is_absolute() else Path(file)
    return importlib.import_module(".".join(name.with_suffix("").parts))


def commands():
    """Yields program and arguments of each command in an indented block, or in the running text."""
    for page in PAGES:
        text = page.read_text()
        lines = re.findall(r"^    (\S.*\.py .*)$", text, re.M)
        for line in lines + re.findall(r"`([^`\n]+\.py [^`\n]+)`", text):
            if re.match(r"deepspeed |torchrun |python |[A-Z_]+=", line):
                words = shlex.split(re.split(r" {3,}[#a-z(]", line)[0])
                at = next(i for i, word in enumerate(words) if word.endswith(".py"))
                yield pytest.param(words[at], words[at + 1 :], id=f"{page.name}: {line[:60]}")


@pytest.mark.parametrize("program, words", commands())
def test_every_command_in_the_docs_parses(program, words, monkeypatch):
    """A command that a reader copies must be one that the program accepts. The models in output/
    are those of the commands before it."""
    monkeypatch.setenv("WORLD_SIZE", "1")  # estimate.py sets it
    made = {"preset": "qwen2.5-0.5b"}
    of_model = lambda model: made if model.startswith("output/") else {}  # noqa: E731
    monkeypatch.setattr(declaring, "record_of_model", of_model)
    assert (ROOT / program).is_file()
    if program in PROGRAMS:
        module_of(program).get_args([word for word in words if word != "FLAGS"])


@functools.cache
def known_flags():
    """Returns the flags of all our programs: of --help, or as they are declared."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for program in PROGRAMS:
            with pytest.raises(SystemExit):
                module_of(program).get_args(["--help"])
    known = set(re.findall(r"--[a-zA-Z_0-9]+", out.getvalue()))
    for folder in ("tools", "variants", "recipes", "course", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z_]+)["= ]', file.read_text()))
    return known | OTHERS


@functools.cache
def tests():
    """Returns the text of all tests."""
    return "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    """A page that names a flag, a file, a test or a function sends the reader there; names change,
    so they are looked up."""
    text = page.read_text()
    used = set(re.findall(r"(?<![\w-])--[a-z][a-zA-Z_0-9]+", text))
    assert not used - known_flags(), used - known_flags()
    gone = [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests()]
    # "`one`, `two` and `three` in `FILE.py`", also across the end of a line
    for names, file in re.findall(r"((?:`\w+`,?\s+(?:and\s+)?)+)in\s+`([\w/]+\.py)`", text):
        code = (ROOT / file).read_text()
        names = re.findall(r"`(\w+)`", names)
        gone += [f"{name} in {file}" for name in names if not re.search(rf"\b{name}\b", code)]
    # "tools/NAME.py at commit abc" names a program that has left
    files = re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w/.-]+\.\w+)\b(?! at commit)", text)
    gone += [name for name in files if not (ROOT / name).exists()]
    modules = "|".join(file.stem for file in MODULES if file.stem != "run")  # run: a Run
    for name in re.findall(rf"`((?:{modules})\.(?!py\b|json|md|png)[\w.]+)`", text):
        looked_up(name)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    gone += set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M)) - {*targets}
    assert not gone, gone


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """To a file that is there, and to a heading that it has."""
    for path, heading in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = page.parent / path if path else page
        assert file.exists(), path
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, f"{path}#{heading}"


@pytest.mark.parametrize("page", ["ppo", "grpo"])
def test_the_functions_of_a_page_are_there(page):
    """Its table names the function of each detail, and the test that holds it."""
    text = (ROOT / f"docs/{page}.md").read_text().split("## What is computed")[1].split("\n## ")[0]
    rows = re.findall(r"^\|[^|]+\|[^|]+\|([^|]+)\|([^|]+)\|[^|]+\|$", text, re.M)[2:]
    for functions, its_tests in rows:
        assert "test" in its_tests, functions
        for name in re.findall(r"`([\w.]+)", functions):
            assert callable(looked_up(name)), name
    assert len(rows) > 8


def looked_up(name):
    """Returns what a page calls `name`, of ppo.py, or `module.name`."""
    module, _, rest = name.partition(".")
    file = {file.stem: file for file in MODULES}.get(module)
    found = module_of(file or "ppo.py")
    return functools.reduce(getattr, (rest if file else name).split("."), found)


def test_the_readmes_lines_use_what_was_trained():
    """Five lines of Python with stock transformers."""
    code = re.search(r"((?:    .+\n)+)", README.read_text().split("## Use what you trained")[1])[1]
    code = textwrap.dedent(code)
    for name, ours in (("ppo", "actor"), ("reward", "reward")):
        code = code.replace(f"output/demo/{name}", str(kit.base() / "models" / ours))
    found = {}
    exec(code, found)
    assert isinstance(found["response"], str) and isinstance(found["score"], float)


def test_the_readmes_figures_are_counted():
    """The lines of each script, rounded. And each program is shown: an empty list of commands would
    pass the test above."""
    for name, lines in re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README.read_text(), re.M):
        counted = len((ROOT / name).read_text().splitlines())
        assert abs(int(lines) - counted) < 20, (name, counted)
    files = [*(ROOT / "machinery").glob("*.py")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    row = f"| `machinery/` | {round(lines, -2):,} | {len(files)} files"
    assert row in README.read_text()
    assert {command.values[0] for command in commands()} >= {*PROGRAMS}


def test_nothing_names_a_machine():
    """A path of somebody's home directory in a committed file helps nobody."""
    files = [*ROOT.glob("*.*")]
    for name in [*FOLDERS.split("|"), "docs"]:
        files += (ROOT / name).rglob("*.*")
    files = [file for file in files if file.suffix in ".py .md .ipynb .json .txt .toml".split()]
    home = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/\w")
    assert not [file for file in [ROOT / "Makefile", *files] if home.search(file.read_text())]


def test_examples_in_docstrings_run():
    """An example in a docstring is a promise, too."""
    files = [*MODULES, ROOT / "ppo.py", *sorted((ROOT / "tools").rglob("*.py"))]
    for folder in ("course", "recipes/toy", "recipes/arithmetic", "recipes/smollm2"):
        files += (ROOT / folder).glob("*.py")
    files = [file for file in files if ">>> " in file.read_text()]
    for file in files:
        result = doctest.testmod(module_of(file))
        assert result.attempted and not result.failed, file
    assert len(files) >= 3
