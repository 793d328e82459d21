"""How a run starts, what it shows while it works, the picture that it leaves, and exit codes."""

import contextlib
import os
import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

import reward
import sft
from helpers import metrics
from machinery.base import progress, ranks
from machinery.run import launch, logs, plots
from tests import kit, runs


# --------------------------------------------------------------------------------------------------
# Starting
# --------------------------------------------------------------------------------------------------
def test_srun_without_an_address_is_refused(monkeypatch):
    slurm = {"STEP_ID": "0", "PROCID": "0", "NTASKS": "2", "LOCALID": "0"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment["MASTER_ADDR"] = "host0"
    monkeypatch.setattr(os, "environ", environment)
    with kit.refuses("no-master-address"):
        launch.fill_environment()
    environment["MASTER_PORT"] = "29500"
    launch.fill_environment()
    assert environment["WORLD_SIZE"] == "2" and environment["RANK"] == "0"


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
    meet = "" if count > 1 else "never"
    for rank, found in enumerate(kit.on_ranks(listens_on, count, args, meet=meet)):
        assert found <= {"0100007F"}, f"rank {rank} listens on {found}"
        assert found or count == 1 or rank > 0, "rank 0 of two has the store"


def test_ranks_of_several_hosts_meet_as_pytorch_has_them_meet(monkeypatch):
    """And so do those of torchrun, whose own process holds the store."""
    for name, value in dict(WORLD_SIZE="4", LOCAL_SIZE="2").items():
        monkeypatch.setenv(name, value)
    assert launch.way_to_meet() is None
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert launch.way_to_meet() == "loopback://"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert launch.way_to_meet() is None


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
def test_long_work_shows_itself_without_a_terminal(monkeypatch, capsys):
    """A job's log gets a line in every interval, also of work inside of other work."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(progress, "EVERY", 0.05)
    for _ in progress.shown(range(0, 10, 3), "batches"):
        for _ in progress.shown(range(3), "tokens"):
            time.sleep(0.02)
    said = capsys.readouterr()
    assert len(re.findall(r"^    batches: \d of 4, \d\d:\d\d left$", said.out, re.M)) == 4
    assert said.err == ""


def test_a_line_of_the_log_is_of_all_its_steps():
    """The mean of 0, 0 and 1: a reward that is rarely 1 would else be seen at every third step at
    most. A gradient norm that fp16 has skipped is in no mean. A ratio that was too large once, and
    a gap, are not to be lost in a mean; rates and penalties are those of the last step."""
    names = "step epoch reward grad_norm ratio_max sampling_gap learning_rate kl_coef".split()
    steps = [(4, 0.1, 0.0, 2.0, 1.5, 0.1, 3e-4, 0.3), (5, 0.2, 0.0, None, 1.0, 0.4, 2e-4, 0.2)]
    records = [dict(zip(names, row)) for row in [*steps, (6, 0.3, 1.0, 4.0, 1.0, 0.2, 1e-4, 0.1)]]
    records[2] |= {"eval_reward": 0.5, "eval_accuracy_ci": [0.1, 0.2]}
    expected = (6, 0.3, pytest.approx(1 / 3), 3.0, 1.5, 0.4, 1e-4, 0.1, 0.5, [0.1, 0.2])
    assert tuple(logs.joined(records).values()) == expected
    assert all(logs.joined([record]) == record for record in records)


@pytest.mark.parametrize("rows, said", [(20, "; one step of each epoch has 2 rows\n"), (8, "\n")])
def test_a_step_of_few_rows_is_named_in_the_first_lines(rows, said):
    """22 rows: at a step of 20 two are left, which make an update like any other. At a step of 8
    six are left, and nothing is said."""
    flags = ["--per_device_train_batch_size", rows, "--num_samples", 0, "--max_steps", 3]
    done = kit.run("sft", *runs.base_flags("sft", kit.base()), *flags)
    assert f"of warm-up){said}" in done.out, done


@pytest.mark.parametrize("columns", [sft.COLUMNS, reward.COLUMNS, metrics.COLUMNS])
def test_a_line_of_the_screen_fits_120_columns(tmp_path, capsys, columns):
    """Legend and numbers stand under each other, and no two numbers run together."""
    args = SimpleNamespace(output_dir=str(tmp_path))
    record = dict(dict.fromkeys(columns, -0.0123456), step=100_000, epoch=12.5)
    logs.write_record(args, record, columns, legend=True)
    legend, line = capsys.readouterr().out.splitlines()
    assert legend.split() == columns and len(line.split()) == len(columns)
    assert len(legend) == len(line) <= 120


# --------------------------------------------------------------------------------------------------
# curves.png
# --------------------------------------------------------------------------------------------------
def test_what_belongs_together_is_in_one_panel(tmp_path, monkeypatch):
    """Reward with gold, chosen with rejected, each with what is held out, and one limit a panel. A
    metric of one's own has a panel, too; whitened advantages, which sum to 0 but for rounding, have
    none. A small learning rate is no noise."""
    rows = [{"reward": i, "gold": i / 2, "chosen_score": i, "rejected_score": -i} for i in range(3)]
    rows[0] |= {"eval_reward": 0, "eval_gold": 0, "eval_rejected_score": 0}
    rows[2] |= {"eval_reward": 2, "eval_gold": 1, "eval_rejected_score": 1, "mine": 1}
    rows[1] |= {"mine": 2}
    for i, (row, noise) in enumerate(zip(rows, (7e-9, -5e-9, 1e-8))):
        row |= {"step": i, "learning_rate": 1e-7 * (1 + i % 2), "actor_loss": noise}
    kit.write_lines(tmp_path / "metrics.jsonl", rows)
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    plots.draw(tmp_path, "a title", {"gold": 1.0, "eval_gold": 1.0})
    panels = {axis.get_title(): axis for axis in found[0].axes if axis.get_visible()}
    drawn = {
        title: [text.get_text() for text in axis.get_legend().get_texts()]
        for title, axis in panels.items()
    }
    assert drawn["reward and gold"] == ["reward", "eval_reward", "gold", "eval_gold", "limit 1"]
    assert drawn["scores of chosen and rejected"][::2] == ["chosen_score", "eval_rejected_score"]
    assert drawn["mine"] == ["mine"] and "learning rate" in drawn and len(drawn) == 4
    assert all(axis.get_xlabel() == "step" for axis in panels.values())
