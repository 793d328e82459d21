"""Makes this process a rank of its run: environment, silence, cores, device, the other ranks."""

import contextlib
import io
import logging
import os
import time
from pathlib import Path

from machinery import patches, ranks

import datasets
import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils.cpp_extension import get_default_build_root


def fill_environment():
    """Sets what torchrun and DeepSpeed's launcher set, under srun and under plain python.

    srun starts one task a device, and there the user sets MASTER_ADDR. Plain python is one rank.
    """
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    for name, theirs in slurm.items():
        if theirs in os.environ and "SLURM_STEP_ID" in os.environ:
            os.environ.setdefault(name, os.environ[theirs])
    alone = os.environ.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in os.environ
    if alone or "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()))


def warn_of_locks():
    """Warns of locks, some minutes old, of a killed compiler: a run would wait for them forever."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(root).rglob("lock"):
        minutes = (time.time() - lock.parent.stat().st_mtime) / 60
        if minutes > 5:
            ranks.say(
                f"warning: {lock} is there, and for {minutes:.0f} minutes nothing was written "
                "beside it. If nothing compiles, delete it: this run waits."
            )


def join_ranks(args):
    """Silences the libraries, takes this rank's cores and device, and meets the other ranks."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    for name in ("DeepSpeed", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ranks.device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # a share of the cores: more threads than cores slow each other down
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(here)))
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    patches.do_without_compiler()
    limit = patches.wait_at_most(args.timeout_minutes)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints once per rank
        deepspeed.init_distributed(verbose=False, timeout=limit)
    os.environ["RLHF_TENSOR_PARALLEL"] = str(args.tensor_parallel_size)  # read in ranks.py
