"""DeepSpeed's compiled operators: FusedAdam, DeepSpeedCPUAdam, and an all-reduce for CPU ranks.

`make install` builds them (bench/operators.py). A run then loads the files, and compiles nothing.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

CPU_FLAGS = r"\b(?:avx|fma|f16c|bmi|amx|sve|asimd)\w*"  # what -march=native may make use of


def use_built():
    """Makes DeepSpeed load its operators by `load`, from a folder of this virtual environment.

    TORCH_EXTENSIONS_DIR names the folder; if the user has set it, it stands.
    """
    root = f"{sys.prefix}/torch_extensions"
    if sys.prefix == sys.base_prefix:
        root = cpp_extension.get_default_build_root()
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{root}/{get_accelerator().device_name()}")
    OpBuilder.jit_load = load


def load(builder, verbose=False, build=OpBuilder.jit_load):
    """Returns the module of one of DeepSpeed's operators; builds it if no file fits this machine.

    It takes the place of DeepSpeed's jit_load (0.19.8), in which torch asks ninja at each start
    what is out of date: another version of ninja, or another path to the same environment, compiles
    everything anew. And torch's lock is a file: a process that is killed leaves it behind, and all
    later ones wait for it. Here the kernel holds the lock, and drops it however a process ends.
    What is built appears in one move, so a file that is there is whole.
    """
    file = Path(os.environ["TORCH_EXTENSIONS_DIR"], f"{builder.name}-{made_for()}.so")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.parent / "building.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():  # nor has another process built it meanwhile
                return build_into(file, builder, build)
    spec = importlib.util.spec_from_file_location(builder.name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[builder.name] = module
    return module


def build_into(file, builder, build):
    """Builds an operator in an empty folder, and moves it to `file`. Returns its module."""
    folder = file.parent / "building"
    shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed has left
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # this environment's ninja
    with mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(folder), PATH=path):
        module = build(builder, verbose=False)
    os.replace(module.__file__, file)
    module.__file__ = str(file)
    shutil.rmtree(folder)
    return module


def made_for():
    """Returns, as part of a file's name, what an operator is built for.

    FusedAdam has one name for CPUs and GPUs, so the accelerator is named. The checksum is of the
    instructions that the processor has and, on CUDA, of the GPU's version.
    """
    device = get_accelerator().device_name()
    hardware = re.findall(CPU_FLAGS, Path("/proc/cpuinfo").read_text().partition("\n\n")[0])
    if device == "cuda":
        hardware.append(torch.cuda.get_device_capability())
    software = torch.__version__, deepspeed.__version__, sys.implementation.cache_tag
    return "-".join([*software, device, f"{zlib.crc32(repr(hardware).encode()):08x}"])


def do_without_all_reduce():
    """Makes DeepSpeed use gloo alone on a CPU where its shared-memory all-reduce cannot be built.

    0.19.8 builds it when the ranks meet, and ends in a traceback where there is no C++ compiler.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")  # None on GPUs
    try:
        if builder:
            builder.load()
    except Exception:  # there may be no compiler, no ninja, no headers
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
