"""Four of sixteen ranks on two hosts, a process each: what a rank asks of the others, call by call.

    found = kit.on_ranks(sixteen.run, len(sixteen.HERE), ...)

PyTorch's fake backend says that there are sixteen ranks. It hands each rank its own numbers back:
no rank would hear of another's NaN, and go another way. So the ranks that are here exchange theirs
over gloo, and the absent ones after each of them are its copies. At a call they compare what it is:
the operation, the size of its group, shapes and dtypes. Ranks that differ end in Differ, where real
ones would hang, or take numbers for others.

What this cannot show: a collective's own time and order on a device; numbers (gradients are not
reduced, and shards of absent ranks are copies); what ranks of a smaller group exchange.
"""

import contextlib
import functools
import inspect
import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from machinery import ranks
from tests import kit, runs, two_devices

RANKS, OF_A_HOST = 16, 8
HERE = 0, 7, 8, 15  # of either host the first and the last; with few rows the last have none
CALLS = """all_reduce all_gather all_gather_into_tensor broadcast reduce reduce_scatter
           reduce_scatter_tensor gather scatter all_to_all_single barrier new_group""".split()
SIZE = 400  # bytes of a call in words


class Differ(RuntimeError):
    """Ranks ask different things of each other."""


class World:
    """One of the ranks that are here. `calls`: what it has asked of the others so far."""

    def __init__(self, folder):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        place = int(os.environ["RANK"])
        self.rank, self.calls = HERE[place], []
        self.copies = [stand_in(rank) for rank in range(RANKS)].count(place)
        numbers = dict(RANK=self.rank, WORLD_SIZE=RANKS)
        numbers |= dict(LOCAL_RANK=self.rank % OF_A_HOST, LOCAL_WORLD_SIZE=OF_A_HOST)
        os.environ.update({name: str(number) for name, number in numbers.items()})
        socket.gethostname = lambda: f"host{self.rank // OF_A_HOST}"
        meeting = dist.FileStore(str(folder / "meeting"), len(HERE))
        limit = timedelta(seconds=100)
        self.here = dist.ProcessGroupGloo(meeting, place, len(HERE), limit)
        for name in CALLS:
            own = getattr(dist, name)
            for module in (dist, dist.distributed_c10d):  # objects are gathered in the second
                setattr(module, name, self.noted(name, own))
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=RANKS)

    def noted(self, name, own):
        """Returns a function of torch.distributed that notes, compares and exchanges."""
        signature = inspect.signature(own)

        @functools.wraps(own)
        def call(*args, **options):
            given = signature.bind(*args, **options)
            given.apply_defaults()
            found = own(*args, **options)
            self.note(name, given.arguments)
            return found

        return call

    def note(self, name, given):
        group = given.get("group") or dist.group.WORLD
        tensors = [x for x in given.values() if torch.is_tensor(x)]
        shapes = [(tuple(x.shape), str(x.dtype)) for x in tensors]
        what = given.get("op"), given.get("src"), given.get("dst"), given.get("ranks")
        said = [str(x) for x in what if x is not None]
        self.calls.append((name, group.size(), *shapes, *said))
        if group.size() == RANKS:  # other groups' members are not all here
            self.compare(self.calls[-1])
            self.exchange(name, given)

    def compare(self, call):
        """Raises Differ unless all that are here make this call now."""
        words = f"{call}|{two_devices.place(__file__, ranks.__file__)}".encode()[:SIZE].ljust(SIZE)
        each = self.gathered(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        texts = [bytes(x.tolist()).decode(errors="ignore").strip() for x in each]
        if len({text.partition("|")[0] for text in texts}) > 1:
            lines = (f"rank {rank}: {text}" for rank, text in zip(HERE, texts))
            raise Differ("\n".join([f"call {len(self.calls)}", *lines]))

    def gathered(self, mine):
        """Returns a tensor of all that are here, a list."""
        each = [torch.zeros_like(mine) for _ in HERE]
        self.here.allgather([each], [mine.detach().contiguous()]).wait()
        return each

    def exchange(self, name, given):
        """Does for real, among those that are here, what the fake backend has done alone."""
        if name == "all_reduce":
            options = dist.AllreduceOptions()
            options.reduceOp = given["op"]
            if given["op"] == dist.ReduceOp.SUM:
                given["tensor"].detach().mul_(self.copies)
            self.here.allreduce([given["tensor"].detach()], options).wait()
        elif name == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = stand_in(given["src"])
            self.here.broadcast([given["tensor"].detach()], options).wait()
        elif name == "all_gather":
            each = self.gathered(given["tensor"])
            for rank, output in enumerate(given["tensor_list"]):
                output.detach().copy_(each[stand_in(rank)])
        elif name == "all_gather_into_tensor":
            each = self.gathered(given["input_tensor"])
            parts = given["output_tensor"].detach().view(RANKS, -1)
            for rank, output in enumerate(parts):
                output.copy_(each[stand_in(rank)].flatten())


def stand_in(rank):
    """Returns the place in HERE of who stands for a rank."""
    return max(place for place, other in enumerate(HERE) if other <= (rank or 0))


# --------------------------------------------------------------------------------------------------
# What is other on one rank: called in each, with whether it is the one
# --------------------------------------------------------------------------------------------------
def loses_its_scores(is_odd):
    """They are NaN, in its second rollout and in later ones."""
    import ppo

    score, roll_out, rollouts = ppo.score, ppo.roll_out, []

    def count(args, engine, tokenizer, requests, step, batch_size):
        rollouts.append(step)
        return roll_out(args, engine, tokenizer, requests, step, batch_size)

    def lose(args, models, batch, **options):
        score(args, models, batch, **options)
        if is_odd and rollouts[-1] == 2:
            batch.scores = batch.scores * torch.nan

    ppo.score, ppo.roll_out = lose, count


def loses_its_loss(is_odd):
    """It is NaN from the first step on."""
    import common

    logprobs = common.response_logprobs

    def lose(*given, **options):  # the checks before it see what is sound
        factor = torch.nan if is_odd and torch.is_grad_enabled() else 1
        return logprobs(*given, **options) * factor

    common.response_logprobs = lose


def has_no_room(is_odd):
    """The whole model does not fit on it beside its shard."""
    from machinery import zero3

    if is_odd:
        zero3.get_accelerator = lambda: SimpleNamespace(available_memory=lambda: 0)


def asks_once_more(is_odd):
    """A mistake: who has no response that counts asks the others something more."""
    import ppo

    set_advantages = ppo.set_advantages

    def and_ask(args, micro_batches):
        set_advantages(args, micro_batches)
        if not any(batch.row_weight.any() for batch in micro_batches):
            ranks.all_sum(1)

    ppo.set_advantages = and_ask


# --------------------------------------------------------------------------------------------------
# A run
# --------------------------------------------------------------------------------------------------
def run(base, folder, script, flags, what="", odd=None):
    """Makes a run in this rank. Returns its exit code, its calls, and its real rows of each step.

    what: the name of a function above, for the rank `odd`.
    """
    import deepspeed

    from machinery.run import Run

    world, rows, log = World(folder), [], Run.log
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # there are no neighbours

    def log_and_count(run, metrics, micro_batches, *given):
        rows.append(sum(batch.counts()[1].item() for batch in micro_batches))
        log(run, metrics, micro_batches, *given)

    Run.log = log_and_count
    if what:
        globals()[what](world.rank == odd)
    flags = [flag.replace("BASE", str(base)) for flag in flags]
    code = None
    with contextlib.suppress(SystemExit):
        try:
            kit.call_main(script, [*runs.base_flags(script, base), *flags])
        except SystemExit as stop:
            code = stop.code
            raise
    world.compare(("end", code))
    return code, world.calls, rows
