"""DeepSpeed's operators (machinery/launch.py): a run loads what was built, compiles
nothing, and waits for nobody who is dead.

What is built here is a module of three lines, so that it takes a second."""

import os
import signal
import threading
import time
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from machinery import launch
from tests import kit

SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&module); }
"""


class TinyBuilder(CPUOpBuilder):
    """A builder as DeepSpeed has them. `folder` holds the source."""

    def __init__(self, folder):
        super().__init__(name="tiny")
        self.source = Path(folder, "tiny.cpp")

    def absolute_name(self):
        return "tiny_op"

    def sources(self):
        return [str(self.source)]

    def include_paths(self):
        return []

    def cxx_args(self):
        return []


def loaded(folder, prefix=None):
    """Loads the operator as a run does it. Returns the path of what is loaded.

    prefix: the virtual environment; else it lies in `folder`.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    if prefix:
        del os.environ["TORCH_EXTENSIONS_DIR"]
        launch.sys.prefix = str(prefix)
    launch.use_built()
    return TinyBuilder(folder).load().__file__


def fake(folder, name, script):
    """Makes a command. Returns its path."""
    folder.mkdir(exist_ok=True)
    command = folder / name
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return command


@pytest.fixture
def compiler(tmp_path):
    """A source in tmp_path, and a compiler, as an environment, that notes its calls in a file."""
    (tmp_path / "tiny.cpp").write_text(SOURCE)
    script = f'case "$*" in *" -c "*) echo >> {tmp_path}/calls;; esac; exec c++ "$@"'
    return {"CXX": str(fake(tmp_path / "counts", "cxx", script))}


def calls(tmp_path):
    """Returns how many files the `compiler` has compiled."""
    file = tmp_path / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_what_is_built_is_loaded_without_a_compiler(tmp_path, compiler):
    """Also where there is none, with another ninja, and by another path to the environment: asked
    what is out of date, ninja would compile everything anew, for minutes. Of ranks that start at
    once one builds, and the others wait for it."""
    environment, link = tmp_path / "environment", tmp_path / "link"
    environment.mkdir()
    link.symlink_to(environment)
    kit.on_ranks(loaded, 3, tmp_path, environment, env=compiler, meet="never")
    [built] = (environment / "torch_extensions/cpu").glob("*.so")
    for name in ("ninja", "c++", "g++", "cc"):
        fake(tmp_path / "none", name, f"echo >> {tmp_path}/asked; exit 1")
    nothing = {"PATH": str(tmp_path / "none"), "CXX": "no-compiler"}
    [found] = kit.on_ranks(loaded, 1, tmp_path, link, env=nothing, meet="never")
    assert found != str(built) and os.path.samefile(found, built)
    assert calls(tmp_path) == 1 and not (tmp_path / "asked").exists()


def is_killed(folder, began):
    """Is killed as soon as the compiler runs."""

    def kill():
        while not began.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    loaded(folder)


def test_nobody_waits_for_a_build_that_was_killed(tmp_path, compiler):
    """It leaves files behind, a lock of torch's among them. Its compiler may even be running."""
    slow = {"CXX": str(fake(tmp_path / "slow", "cxx", f"touch {tmp_path}/began; sleep 5; exit 1"))}
    done = kit.fork(is_killed, 1, tmp_path, tmp_path / "began", env=slow, meet="never")
    assert done.code and (tmp_path / "building/tiny/lock").exists(), done
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/lock").touch()  # where torch would look
    kit.on_ranks(loaded, 1, tmp_path, env=compiler, meet="never", limit=120)
    assert [*tmp_path.glob("*.so")] and calls(tmp_path) == 1


def test_a_build_that_fails_leaves_nothing_to_load(tmp_path):
    done = kit.fork(loaded, 1, tmp_path, env={"CXX": "false"}, meet="never")
    assert done.code and not [*tmp_path.glob("*.so")], done


def test_an_operator_is_for_one_software_and_one_machine(monkeypatch):
    """FusedAdam has the same name for CPUs and GPUs, and -march=native makes code that another
    processor may not have. So all of that is in the file's name."""
    names = {launch.made_for()}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for holder, name, value in (
        (launch, "CPU_FLAGS", "no such flag"),
        (launch.get_accelerator(), "device_name", lambda: "cuda"),
        (torch.cuda, "get_device_capability", lambda: (9, 0)),
        (torch, "__version__", "3.0"),
        (deepspeed, "__version__", "1.0"),
        (launch.sys, "implementation", type("Other", (), {"cache_tag": "cpython-399"})),
    ):
        monkeypatch.setattr(holder, name, value)
        names.add(launch.made_for())
    assert len(names) == 7 and not any("/" in name for name in names)


def test_a_folder_of_the_users_stands(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "mine")
    launch.use_built()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "mine"


# --------------------------------------------------------------------------------------------------
# The all-reduce of CPU ranks
# --------------------------------------------------------------------------------------------------


def offers_all_reduce(folder, loaded):
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    if not loaded:  # the process that forks ranks has loaded it, where there is a compiler
        launch.OpBuilder._loaded_ops.clear()
    launch.use_built()
    launch.do_without_all_reduce()
    return deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


@pytest.mark.parametrize("loaded", [False, True])
def test_without_a_compiler_gloo_alone_takes_over(tmp_path, loaded):
    """Unless the all-reduce is there."""
    nothing = {"CXX": "no-compiler"}
    found = kit.on_ranks(offers_all_reduce, 1, tmp_path, loaded, env=nothing, meet="never")
    assert found == [loaded]
