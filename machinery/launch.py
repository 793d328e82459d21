"""Makes this process a rank of its run: environment, silence, cores, device, the other ranks.

And loads DeepSpeed's compiled operators: FusedAdam, DeepSpeedCPUAdam, and an all-reduce for CPU
ranks. `make install` builds them (tools/operators.py); a run loads the files, and compiles nothing.
"""

import contextlib
import fcntl
import importlib.util
import io
import logging
import os
import re
import shutil
import socket
import sys
import warnings
import zlib
from pathlib import Path
from unittest import mock

import datasets
import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.utils import groups
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.utils import cpp_extension

from machinery import patches, ranks
from machinery.refused import Refused

CPU_FLAGS = r"\b(?:avx|fma|f16c|bmi|amx|sve|asimd)\w*"  # what -march=native may make use of


def fill_environment():
    """Sets what torchrun and DeepSpeed's launcher set, under srun and under plain python.

    srun starts one task a device, and there the user sets MASTER_ADDR. Plain python is one rank.
    """
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    for name, theirs in slurm.items():
        if theirs in os.environ and "SLURM_STEP_ID" in os.environ:
            os.environ.setdefault(name, os.environ[theirs])
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        os.environ.update(alone | os.environ)
    elif missing := alone.keys() - os.environ.keys():
        words = f"{', '.join(sorted(missing))} must be set: the first machine and a free port."
        raise Refused("no-master-address", words)


def ranks_here():
    """Returns how many ranks the launcher started on this host, 1 where it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def way_to_meet():
    """Returns how ranks meet, as torch.distributed wants it: by loopback where all are on one host.

    By default rank 0 listens on all interfaces. An interface that the environment names for gloo is
    kept, and so is torchrun's store, which another process holds.
    """
    if int(os.environ["WORLD_SIZE"]) > ranks_here() or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.suppress(RuntimeError):  # it is known already
        register_rendezvous_handler("loopback", meet_on_loopback)
    return "loopback://"


def meet_on_loopback(url, timeout, **_):
    """Yields a store, this rank and how many there are. One rank alone opens no port."""
    rank, count, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    here, store = ("127.0.0.1", port), torch.distributed.HashStore()
    if count > 1:
        opened = None if rank else socket.create_server(here).detach()
        options = {"is_master": not rank, "timeout": timeout, "master_listen_fd": opened}
        store = torch.distributed.TCPStore(*here, count, **options)
    yield store, rank, count


def share_cores(args):
    """Gives this rank a share of the cores where a CPU computes: CPU ranks, --adam_offload.

    More threads than cores slow each other down. OMP_NUM_THREADS stands, except for CPU Adam the 1
    that torchrun sets when the user has set nothing.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    if args.adam_offload and given == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        given = None
    if given is None and (args.adam_offload or ranks.device().type == "cpu"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here()))


def silence_libraries():
    """Turns off the libraries' progress bars, and the warnings that they raise about themselves.

    What a script or a user's own function warns of is shown.
    """
    warnings.filterwarnings("ignore", module=r"(torch|transformers|deepspeed)(\.|$)")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # no report of a new value head, for example
    for name in ("DeepSpeed", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def join_ranks(args):
    """Silences the libraries, takes this rank's cores and device, and meets the other ranks."""
    silence_libraries()
    use_built()
    share_cores(args)
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    do_without_all_reduce()
    patches.save_stages_as_numbers()
    patches.mend_attention()
    limit = patches.wait_at_most(ranks.WAIT_MINUTES)
    way = way_to_meet()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints once per rank
        deepspeed.init_distributed(verbose=False, timeout=limit, init_method=way)
    groups.set_tensor_model_parallel_world_size(args.tensor_parallel_size)  # ranks.py asks for it


# ---- DeepSpeed's operators ----
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
        aside = file.parent / "building"
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.parent / "building.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():  # nor has another process built it meanwhile
                shutil.rmtree(aside, ignore_errors=True)  # a process that was killed left it
                path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # our own ninja
                with mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(aside), PATH=path):
                    module = build(builder, verbose=False)
                os.replace(module.__file__, file)
                return module
    spec = importlib.util.spec_from_file_location(builder.name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[builder.name] = module
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
