"""The ranks of a run: which one this is, and what they tell each other.

With tensor parallelism neighbouring ranks share each layer of a model. They work on the same rows,
so for the data they count as one.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from tqdm import tqdm

from machinery.refused import Refused

# How long a rank waits for another before it gives up: PyTorch's own limit with gloo. With NCCL it
# is 10, which a rank that writes a large model may need for itself.
WAIT_MINUTES = 30
NOTED_EVERY = 60  # seconds between two notes that long work makes progress
PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when its parent ends


def get_rank():
    """Returns the number of this rank, 0 before the ranks have met."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size():
    """Returns the number of ranks, 1 before they have met."""
    return dist.get_world_size() if dist.is_initialized() else 1


def launched():
    """Returns how many ranks were started, by what the launcher says: they need not have met."""
    srun = os.environ.get("SLURM_NTASKS", 1) if "SLURM_STEP_ID" in os.environ else 1
    return int(os.environ.get("WORLD_SIZE", srun))


def tensor_parallel_size():
    """Returns the number of ranks that share each layer: what launch.join_ranks told DeepSpeed."""
    try:
        return groups.get_tensor_model_parallel_world_size()
    except AssertionError:  # nobody has told it anything: these are no ranks of a run
        return 1


def data_parallel_rank():
    """Returns the number of this rank's share of the data."""
    return get_rank() // tensor_parallel_size()


def data_parallel_size():
    """Returns the number of shares that the data is dealt into."""
    return get_world_size() // tensor_parallel_size()


def device():
    """Returns this rank's device as DeepSpeed's accelerator names it: cuda:0, cpu, xpu:1, ..."""
    return torch.device(get_accelerator().current_device_name())


def all_sum(*values):
    """Sums each value (a number or a 0-d tensor) over all ranks: a float64 tensor on the CPU.

    Ranks that share a model's layers have the same rows, which count once. The host waits for the
    device once, when all is summed.
    """
    options = {"dtype": torch.float64, "device": device()}
    total = torch.stack(
        [v.to(**options) if torch.is_tensor(v) else torch.full((), v, **options) for v in values]
    )
    if get_world_size() > 1:
        dist.all_reduce(total)
    return total.cpu() / tensor_parallel_size()


def all_gather_objects(items):
    """Returns the items of all ranks' lists, in one list, on every rank."""
    lists = [items] * get_world_size()
    if get_world_size() > 1:
        torch.distributed.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def largest(number):
    """Returns the largest of all ranks' numbers (0-d tensors), infinity if one is NaN."""
    return max(all_gather_objects([number.nan_to_num(nan=torch.inf).item()]))


def each_once(rows):
    """Returns all ranks' rows (dicts with row_weight) on every rank, each once, without fillers."""
    first = get_rank() % tensor_parallel_size() == 0
    return all_gather_objects([row for row in rows if row["row_weight"] and first])


def fail_unless_alike(value, what):
    """Refuses the run unless all ranks have the same `value`, a dict. All ranks call it."""
    first, *others = all_gather_objects([value])
    for rank, theirs in enumerate(others, 1):
        if differ := [name for name in first if theirs[name] != first[name]]:
            mine, other = ({name: one[name] for name in differ} for one in (first, theirs))
            words = f"{what}: rank 0 has {mine}, rank {rank} {other}."
            advice = "All machines must have the same command, libraries and files."
            raise Refused("ranks-differ", f"{words}\n  {advice}")


def ranks_on_this_host():
    """Returns how many of the ranks share this host's memory. All ranks call it."""
    return all_gather_objects([socket.gethostname()]).count(socket.gethostname())


# ---- Waiting ----
def barrier():
    """Waits for all ranks."""
    if get_world_size() > 1:
        dist.barrier()


def go_on():
    """Notes that this rank makes progress: at each step, and while long work goes on.

    A rank that does not note it again for three quarters of WAIT_MINUTES prints where it is in its
    code: under NCCL a wait that is too long is no error in Python, but the end of the process. The
    ranks of a host print a second apart; otherwise they would write into each other's lines.
    """
    if get_world_size() > 1:
        faulthandler.dump_traceback_later(WAIT_MINUTES * 45 + int(os.environ["LOCAL_RANK"]))


@contextlib.contextmanager
def unhurried():
    """For work during which no rank waits for another: long as it may take, nothing is wrong.

    The processes that share the work (`datasets` forks them) end with this one, also where a signal
    ends it. They would wait for more work forever.
    """
    working = True

    def end_with_parent():
        if working:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(after_in_child=end_with_parent)
    faulthandler.cancel_dump_traceback_later()
    try:
        yield
    finally:
        working = False
    go_on()


def shown(pieces, what, **options):
    """Yields the pieces of long work, and shows in a terminal how many are done, on rank 0.

    options: tqdm's total and initial, where `pieces` has no length.
    """
    noted, hidden = time.monotonic(), True if os.environ.get("RANK", "0") != "0" else None
    for piece in tqdm(pieces, what, leave=False, delay=1, disable=hidden, **options):
        yield piece
        if time.monotonic() > noted + NOTED_EVERY:  # at each piece it would take as long as a token
            noted = time.monotonic()
            go_on()


def say(text):
    """Prints on rank 0 only, above the progress bar.

    Where nobody reads it any more (a closed terminal, `| head`), it is a SIGTERM to this run.
    """
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            signal.raise_signal(signal.SIGTERM)
