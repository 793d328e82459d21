"""How a run starts, and what it shows while it works."""

import contextlib
import datetime
import os
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import sft
from machinery import launch, ranks
from tests import kit, runs


# --------------------------------------------------------------------------------------------------
# Starting
# --------------------------------------------------------------------------------------------------
def test_srun_tells_each_rank_its_place(monkeypatch):
    """(Without an address it is refused: tests/promises.py.)"""
    slurm = {"STEP_ID": "0", "PROCID": "1", "NTASKS": "2", "LOCALID": "0"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    monkeypatch.setattr(os, "environ", environment)
    launch.fill_environment()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    assert [environment[name] for name in names] == ["1", "2", "0"]


def listens_on(args):
    """Meets the other ranks, exchanges a number with them, and returns the addresses on which this
    process listens then."""
    launch.fill_environment()
    launch.join_ranks(args)
    assert ranks.all_sum(1).item() == ranks.get_world_size()
    mine, found = set(), set()
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this loop
            mine.add(os.readlink(number).removeprefix("socket:[").rstrip("]"))
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in mine:  # it listens
                found.add(cells[1].partition(":")[0])
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_of_one_host_listen_to_nobody_else(count):
    """By itself PyTorch's store listens on all interfaces, where it would run what it is sent by
    whoever reaches the machine. One rank alone needs none."""
    args = SimpleNamespace(adam_offload=False, tensor_parallel_size=1)
    found = kit.on_ranks(listens_on, count, args, meet="" if count > 1 else "never")
    assert set().union(*found) <= {"0100007F"} and (found[0] or count == 1)  # gloo's, and the store


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_PORT=port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match=f"ddress already in use.*{port}"):
            next(launch.meet_on_loopback("", datetime.timedelta(1)))


def test_ranks_of_several_hosts_meet_as_pytorch_has_them_meet(monkeypatch):
    """And so do those of torchrun, whose own process holds the store."""
    for name, value, way in (
        ("LOCAL_SIZE", "2", None),
        ("LOCAL_SIZE", "4", "loopback://"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True", None),
    ):
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv(name, value)
        assert launch.way_to_meet() == way


def test_only_the_libraries_are_silenced():
    """What a fork, or a user's reward function, warns of is shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch.silence_libraries()
        for name in ("torch.optim.lr_scheduler", "deepspeed.x", "my_torch", "reward"):
            warnings.warn_explicit("words", UserWarning, f"{name}.py", 1, module=name)
    assert [str(each.filename) for each in caught] == ["my_torch.py", "reward.py"]


# --------------------------------------------------------------------------------------------------
# While it works
# --------------------------------------------------------------------------------------------------
def test_every_step_is_a_line_and_the_screen_shows_some(tmp_path):
    """Every third step here, and the two that are evaluated, each with its own numbers."""
    flags = "--max_steps 5 --log_steps 3 --eval_steps 4 --num_samples 0".split()
    done = kit.run("sft", *runs.base_flags("sft", kit.base()), *flags)
    lines = kit.metrics(done.folder)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 4, 5]
    at = sft.COLUMNS.index("loss")
    shown = [words for words in map(str.split, done.out.splitlines()) if words[:1] != ["step"]]
    shown = {int(words[0]): words for words in shown if words and words[0].isdecimal()}
    assert [*shown] == [0, 3, 4, 5]
    assert all(shown[step][at] == f"{lines[step]['loss']:.4g}" for step in (3, 4, 5))
