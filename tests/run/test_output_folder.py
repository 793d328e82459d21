"""The output folder has one owner, the run that holds its lock. No run is ever deleted.

(That a run is whole at every moment while it is moved aside: test_checkpoints.py. A second run
beside a living one, and folders that are refused: tests/promises.py)
"""

import errno
import itertools
import multiprocessing
import os
import time

import pytest

import sft
from machinery import output_folder, ranks
from machinery.refused import Refused
from machinery.run import Run
from tests import kit, runs

fork = multiprocessing.get_context("fork")


def get_args(output, *flags):
    return sft.get_args(["--preset", "toy", "--output_dir", str(output), *flags])


def begin(output, *flags):
    """Begins a run in a folder. Returns its lock."""
    args = get_args(output, *flags)
    output_folder.refuse_unusable(args)
    lock = output_folder.take(args)
    output_folder.note(args, {"data_fingerprint": 7})
    return lock


def test_the_check_is_repeated_under_the_lock(tmp_path):
    """Two runs may start at the same time, and load their models for minutes: whoever comes second
    finds the lock, or the run that has ended meanwhile."""
    lock = begin(tmp_path)
    for flags in ([], ["--overwrite"]):
        with kit.refuses("output-in-use"):
            output_folder.take(get_args(tmp_path, *flags))
        with kit.refuses("output-in-use"):
            output_folder.refuse_unusable(get_args(tmp_path, *flags))
    lock.close()
    with kit.refuses("output-taken"):
        output_folder.take(get_args(tmp_path))


def test_a_helper_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    """A reward function may fork a process, which gets a copy of every open file."""
    lock = output_folder.take_lock(tmp_path / output_folder.LOCK)
    assert output_folder.is_held(tmp_path / output_folder.LOCK)
    helper = fork.Process(target=time.sleep, args=(60,))
    helper.start()
    time.sleep(0.5)  # it has closed its copy
    lock.close()
    assert not output_folder.is_held(tmp_path / output_folder.LOCK)
    helper.kill()
    helper.join()


def test_where_there_are_no_locks_nobody_is_locked_out(tmp_path, monkeypatch):
    def flock(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_folder.fcntl, "flock", flock)
    assert all([output_folder.take_lock(tmp_path / output_folder.LOCK) for _ in range(2)])
    assert not output_folder.is_held(tmp_path / output_folder.LOCK)


@pytest.mark.parametrize("sees", [False, True])
def test_a_folder_that_is_not_shared_is_refused(tmp_path, monkeypatch, sees):
    """With node-local folders each machine would keep its own part of every checkpoint. It is
    refused by a rank that does not see the lock, and by one that does."""
    monkeypatch.setattr(output_folder.time, "monotonic", itertools.count(step=99).__next__)
    gather, other = ranks.all_gather_objects, {output_folder.LOCK: not sees}
    monkeypatch.setattr(ranks, "all_gather_objects", lambda items: [*gather(items), other])
    monkeypatch.setattr(ranks, "get_rank", lambda: 0 if sees else 1)
    with kit.refuses("ranks-differ"):
        output_folder.take(get_args(tmp_path))


def start_with_own_seed(output):
    args = get_args(output, "--seed", os.environ["RANK"])
    with pytest.raises(Refused) as refused:
        Run(args, "step 1")
    return str(refused.value)


def test_ranks_that_were_started_otherwise_are_refused(tmp_path):
    """Typed on each machine by hand, a command may have another flag. At stage 0 the weights would
    drift apart. Only what differs is named."""
    for words in kit.on_ranks(start_with_own_seed, 2, str(tmp_path / "run"), meet=""):
        assert "rank 0 has {'seed': 0}, rank 1 {'seed': 1}" in words
    assert not (tmp_path / "run").exists()


def test_overwrite_moves_the_old_run_aside_when_all_is_loaded(tmp_path):
    """Whatever fails before (loading, memory) has changed nothing. The lock is the new folder's."""
    output = tmp_path / "run"
    begin(output).close()
    for number in (1, 2):
        (output / "checkpoints").mkdir()
        (output / "checkpoints/state").write_text(str(number))
        old = kit.tree(output)
        output_folder.refuse_unusable(get_args(output, "--overwrite"))
        assert kit.tree(output) == old
        lock = begin(output, "--overwrite")
        assert kit.tree(tmp_path / f"run.old-{number}") == old
        assert kit.tree(output).keys() == {"args.json"}
        assert output_folder.is_held(output / output_folder.LOCK)
        lock.close()


def test_the_monitors_write_into_the_new_folder(tmp_path):
    """DeepSpeed's engines would open their files while models are loaded, in the folder that is
    then moved aside. Each holds metrics.jsonl, step for step: DeepSpeed's own events count samples,
    and W&B drops what comes at a lower number than the last."""
    knobs = kit.knobs(tmp_path / "ds.json", "csv_monitor", enabled=True)
    flags = [*runs.base_flags("sft", kit.base()), "--ds_config", knobs]
    flags += ["--max_steps", 2, "--eval_steps", 1, "--num_samples", 0]
    for _ in range(2):
        kit.run("sft", *flags, "--overwrite", folder=tmp_path / "run")
    for folder in ("run", "run.old-1"):
        found, lines = {}, kit.metrics(tmp_path / folder)
        for file in (tmp_path / folder / "run").glob("*.csv"):
            rows = [row.split(",") for row in file.read_text().splitlines()[1:]]
            found[file.stem] = {int(step): float(value) for step, value in rows}
        assert not any("Samples" in name for name in found) and len(lines) == 3
        for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
            logged = {line["step"]: line[name] for line in lines if name in line}
            assert found[f"train_{name}"] == pytest.approx(logged, rel=1e-5)


def test_logs_of_a_launcher_may_be_there_before(tmp_path):
    """Slurm and `tee` open their file before the run begins."""
    for name in ("slurm.out", "run.log", ".hidden"):
        (tmp_path / name).write_text("words")
    begin(tmp_path).close()
    assert (tmp_path / "run.log").read_text() == "words"
