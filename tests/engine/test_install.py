"""`make install` and `make demo` on machines that we do not have: commands that answer in their
place say which GPUs and compilers are there."""

import os
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


@pytest.mark.slow
def test_each_operator_is_built_by_itself(tmp_path):
    """Where the first could not be built, the others were not tried. Each has a line."""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-compiler"}
    done = kit.start_command([sys.executable, kit.ROOT / "tools/operators.py"], env)
    assert done.code == 0 and "Traceback" not in done.out + done.err, done
    assert done.out.count("not built: ") == 3
