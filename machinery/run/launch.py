"""Makes this process a rank of its run: environment, silence, cores, device, the other ranks."""

import contextlib
import io
import logging
import os
import socket
import warnings

import datasets
import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch.distributed.rendezvous import register_rendezvous_handler

from machinery.base import ranks
from machinery.base.refused import Refused
from machinery.engine import operators, patches


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
    operators.use_built()
    share_cores(args)
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    operators.do_without_all_reduce()
    patches.save_stages_as_numbers()
    patches.mend_attention()
    limit = patches.wait_at_most(ranks.WAIT_MINUTES)
    way = way_to_meet()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints once per rank
        deepspeed.init_distributed(verbose=False, timeout=limit, init_method=way)
    groups.set_tensor_model_parallel_world_size(args.tensor_parallel_size)  # ranks.py asks for it
