"""`make install` and `make demo` on machines that we do not have: commands that answer in their
place say which GPUs and compilers are there."""

import os
import re
import sys

import pytest

from tests import kit

CU126 = "https://download.pytorch.org/whl/cu126"


def answer(folder, command, gpus="", devices=""):
    """Returns what a command prints where nvidia-smi prints `gpus`."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    env = {"CUDA_VISIBLE_DEVICES": devices, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = kit.start_command(command, env, kit.ROOT)
    return done.out + done.err


@pytest.mark.parametrize(
    "gpus, says",
    [
        ("580.65.06, 9.0", ""),
        ("570.86.10, 9.0", CU126),  # PyPI's torch 2.13 is CUDA 13: "driver too old"
        ("590.10, 7.5\\n590.10, 7.0", CU126),  # CUDA 13 has T4, and no V100
    ],
)
def test_an_old_driver_or_gpu_is_told_which_torch_to_take(tmp_path, gpus, says):
    """Before anything is installed: else the first call of a run says so, after 3 GB."""
    found = answer(tmp_path, [sys.executable, "tools/wheel.py", "torch==2.13.0"], gpus)
    assert says in found and bool(found) == bool(says)


def test_make_takes_the_gpus_that_the_user_has_named(tmp_path):
    """`deepspeed --num_gpus 2` ignores CUDA_VISIBLE_DEVICES, says so in a line, and trains on 0, 1,
    where somebody else may work."""
    for devices, words in (("", "error --num_gpus 2 sft.py"), ("6,7", "error  sft.py")):
        assert words in answer(tmp_path, "make -n demo".split(), "0\\n1\\n", devices)


def test_the_container_runs_the_makefiles_commands():
    """What is installed, and what runs, has one home. The build of torch without CUDA is the one
    that README and Makefile name, and what is here already stays out of the image."""
    lines = (kit.ROOT / "tools/Dockerfile").read_text()
    makefile, readme = ((kit.ROOT / name).read_text() for name in ("Makefile", "README.md"))
    made = re.findall(r'^(?:RUN make |CMD \["make", ")([a-z]+)', lines, re.M)
    assert made == ["install", "demo"] and all(f"\n{name}: " in makefile for name in made)
    [cpu] = re.findall(r'ARG TORCH="(.*)"', lines)
    assert cpu in makefile and cpu in readme and f"TORCH ?= {cpu.split()[0]}\n" in makefile
    left_out = (kit.ROOT / ".dockerignore").read_text().split()
    assert {".venv", "output", ".git"} <= {*left_out}


@pytest.mark.slow
def test_each_operator_is_built_by_itself(tmp_path):
    """Where the first could not be built, the others were not tried. Each has a line."""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-compiler"}
    done = kit.start_command([sys.executable, kit.ROOT / "tools/operators.py"], env)
    assert done.code == 0 and "Traceback" not in done.out + done.err, done
    assert done.out.count("not built: ") == 3
