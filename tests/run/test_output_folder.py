"""The output folder has one owner, the run that holds its lock. No run is ever deleted."""

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sft
from machinery.base import locks, ranks
from machinery.base.refused import Refused
from machinery.models import saving
from machinery.run import best, checkpoints, logs, output_folder
from machinery.run.run import Run
from tests import kit, runs

FACTS = {"data_rows": 8, "data_fingerprint": 7}
fork = multiprocessing.get_context("fork")


def get_args(output, *flags):
    return sft.get_args(["--preset", "toy", "--output_dir", str(output), *flags])


def begin(output, *flags):
    """Returns the folder of a run that has begun."""
    folder = output_folder.OutputFolder(get_args(output, *flags))
    folder.take(FACTS)
    return folder


def finish(output, *flags):
    """Leaves what a finished run leaves."""
    begin(output, *flags).lock.close()
    checkpoint(output)
    for name in ("model.safetensors", "config.json", "metrics.jsonl"):
        (output / name).write_text("old")


def checkpoint(output, step=2):
    folder = output / f"checkpoints/step-{step}"
    folder.mkdir(parents=True)
    (folder / "rank0.pt").write_text("state")


# --------------------------------------------------------------------------------------------------
# The lock. (A second run beside a living one, and folders that are refused: tests/promises.py)
# --------------------------------------------------------------------------------------------------
def test_the_check_is_repeated_under_the_lock(tmp_path):
    """Two runs may start at the same time, and load their models for minutes: whoever comes second
    finds the lock, or the run that has ended meanwhile."""
    first, second, third = (output_folder.OutputFolder(get_args(tmp_path)) for _ in range(3))
    first.take(FACTS)
    with kit.refuses("output-in-use"):
        second.take(FACTS)
    first.lock.close()
    with kit.refuses("output-taken"):
        third.take(FACTS)


def test_a_helper_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    """A reward function may fork a process, which gets a copy of every open file."""
    lock = locks.take(tmp_path / output_folder.LOCK)
    assert locks.is_held(tmp_path / output_folder.LOCK)
    helper = fork.Process(target=time.sleep, args=(60,))
    helper.start()
    time.sleep(0.5)  # it has closed its copy
    lock.close()
    assert not locks.is_held(tmp_path / output_folder.LOCK)
    helper.kill()
    helper.join()


def test_where_there_are_no_locks_nobody_is_locked_out(tmp_path, monkeypatch):
    def flock(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    assert all([locks.take(tmp_path / output_folder.LOCK) for _ in range(2)])
    assert not locks.is_held(tmp_path / output_folder.LOCK)


def test_a_folder_that_is_not_shared_is_refused(tmp_path, monkeypatch):
    """With node-local folders each machine would keep its own part of every checkpoint."""
    folder = output_folder.OutputFolder(get_args(tmp_path))
    with pytest.MonkeyPatch.context() as quick, kit.refuses("ranks-differ"):
        quick.setattr(output_folder.time, "monotonic", itertools.count(step=99).__next__)
        quick.setattr(
            ranks, "all_gather_objects", lambda items: [{output_folder.LOCK: True}, *items]
        )
        folder.refuse_unshared()  # by a rank that does not see it
    folder.lock = locks.take(tmp_path / output_folder.LOCK)
    folder.refuse_unshared()
    monkeypatch.setattr(
        ranks, "all_gather_objects", lambda items: [*items, {output_folder.LOCK: False}]
    )
    with kit.refuses("ranks-differ"):
        folder.refuse_unshared()
    folder.lock.close()


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


# --------------------------------------------------------------------------------------------------
# --overwrite
# --------------------------------------------------------------------------------------------------
def test_overwrite_moves_the_old_run_aside_when_all_is_loaded(tmp_path):
    """Whatever fails before (loading, memory) has changed nothing. The lock is the new folder's."""
    output = tmp_path / "run"
    finish(output)
    for number in (1, 2):
        old = kit.tree(output)
        folder = output_folder.OutputFolder(get_args(output, "--overwrite"))
        assert kit.tree(output) == old
        folder.take(FACTS)
        assert kit.tree(tmp_path / f"run.old-{number}") == old
        assert kit.tree(output).keys() == {"args.json"}
        with kit.refuses("output-in-use"):
            output_folder.OutputFolder(get_args(output, "--overwrite"))
        folder.lock.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run", "run.old-1", "run.old-2"]


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
    begin(tmp_path).lock.close()
    assert (tmp_path / "run.log").read_text() == "words"


# --------------------------------------------------------------------------------------------------
# What --resume compares
# --------------------------------------------------------------------------------------------------
DATA_FACTS = {"rows_per_step": 8, "data_rows": 40, "data_fingerprint": 7}
DATA_FACTS |= {"frozen_models": {"judge/model.safetensors": 9}}
THIS = {**DATA_FACTS, "shape": {"ranks": 2, "model": 2}}
THIS |= {"model a": (2, 3), "model b": (4,), "model optimizer": "FusedAdam"}
OTHERS = {
    "rows_per_step": 4,
    "data_fingerprint": 8,
    "frozen_models": {"judge/model.safetensors": 10},
    "model b": (5,),
    "model c": (4,),
    "model optimizer": "AdamW",
    "shape": {"ranks": 2, "model": 3},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_says_what_it_belongs_to(name):
    """Edited data with as many rows, one more layer, another script's model. And FusedAdam keeps
    its step number where torch's AdamW does not look: it would go on from step 0, in silence."""
    args = SimpleNamespace(tensor_parallel_size=1)
    checkpoints.refuse_others(args, Path("step-2"), THIS, THIS)
    moved = {**THIS, "shape": {"ranks": 4, "model": 1}}  # DeepSpeed reshapes that
    checkpoints.refuse_others(args, Path("step-2"), moved, THIS)
    with kit.refuses("resume-shape" if name == "shape" else "resume-another"):
        checkpoints.refuse_others(args, Path("step-2"), {**THIS, name: OTHERS[name]}, THIS)


# --------------------------------------------------------------------------------------------------
# Checkpoints in one process, without engines
# --------------------------------------------------------------------------------------------------
def save(folder, step, keep=1):
    """Writes a checkpoint. Returns (args, facts), which `checkpoints.load` needs."""
    args = SimpleNamespace(output_dir=str(folder), keep_checkpoints=keep, tensor_parallel_size=1)
    checkpoints.save(args, {}, step, {"state": {}, "facts": DATA_FACTS})
    return args, DATA_FACTS


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Each file and each folder's list. A copy beside it, of the user's own, stays."""
    (tmp_path / "checkpoints/step-1-backup").mkdir(parents=True)
    synced, late, rename = set(), [], Path.rename

    def note_and_rename(path, target):
        late.append({path, *path.rglob("*")} - synced)
        return rename(path, target)

    monkeypatch.setattr(saving, "sync", synced.add)
    monkeypatch.setattr(Path, "rename", note_and_rename)
    save(tmp_path, 2)
    assert late == [set()] and tmp_path / "checkpoints" in synced
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-1-backup", "step-2"]


HARMS = ["cut", "removed", "manifest removed", "manifest cut", "manifest empty"]


@pytest.mark.parametrize("harm", HARMS)
def test_every_kind_of_damage_is_seen(tmp_path, harm):
    args, facts = save(tmp_path, 1)
    save(tmp_path, 2, keep=2)
    folder = tmp_path / "checkpoints/step-2"
    assert checkpoints.damage(folder) == []
    file = folder / ("manifest.json" if "manifest" in harm else "rank0.pt")
    file.unlink() if "removed" in harm else os.truncate(file, 10)
    if "empty" in harm:  # of a checkpoint of no files
        file.write_text("{}")
    assert checkpoints.damage(folder) == [file.name]
    assert checkpoints.load(args, {}, {}, facts, 9)[0] == 1
    (tmp_path / "checkpoints/step-1/rank0.pt").unlink()
    with kit.refuses("no-checkpoint-whole"):
        checkpoints.load(args, {}, {}, facts, 9)


def test_a_damaged_checkpoint_is_not_kept_in_the_place_of_whole_ones(tmp_path):
    """The last one is damaged, so the run goes on from the one before. Where it saves then, the
    damaged one is of a later step."""
    save(tmp_path, 2, keep=2)
    save(tmp_path, 4, keep=2)
    os.truncate(tmp_path / "checkpoints/step-4/rank0.pt", 10)
    args, facts = save(tmp_path, 3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
    assert checkpoints.load(args, {}, {}, facts, 9)[0] == 3


def test_a_saved_model_is_on_the_disk_before_its_mark_is_there(tmp_path, monkeypatch):
    """A config.json says that a folder is whole. After a power cut it must not lie beside weights
    that never left the cache."""
    aside, done, replace, listed = tmp_path / ".saving", [], Path.replace, Path.iterdir
    (aside / "more").mkdir(parents=True)
    for name in ("config.json", "a.json", "model.safetensors", "more/b.json"):
        (aside / name).write_text("x")

    def note_and_replace(path, to):
        done.append(("move", path.name))
        return replace(path, to)

    def mark_first(path):
        return iter(sorted(listed(path), key=lambda file: file.name != "config.json"))

    monkeypatch.setattr(saving, "sync", lambda path: done.append(("sync", path.name)))
    monkeypatch.setattr(Path, "replace", note_and_replace)
    monkeypatch.setattr(Path, "iterdir", mark_first)
    saving.move_files(aside, tmp_path)
    at = done.index(("move", "config.json"))
    names = "config.json", "a.json", "model.safetensors", "more", "b.json"
    assert {("sync", name) for name in names} <= {*done[:at]}
    assert {("move", name) for name in names[1:4]} <= {*done[:at]}
    assert done[at - 1] == done[-1] == ("sync", tmp_path.name)


def test_shards_are_joined_and_cut_anew_for_other_ranks():
    """The EMA of five weights, padded to equal shares: on two ranks, and then on three."""
    shards = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 0])
    more = {"of_prompts": {"why?": 0.5}}  # what a fork has noted in a dict that was empty at first
    parts = [{"kl_coef": 0.1, "ema": {"w": shard}, "noted": more} for shard in shards]
    own = {"kl_coef": 0.5, "ema": {"w": torch.zeros(2)}, "noted": {}}
    found = [checkpoints.laid_out(own, parts, place) for place in range(3)]
    assert [state["ema"]["w"].tolist() for state in found] == [[1, 2], [3, 4], [5, 0]]
    assert all(state["kl_coef"] == 0.1 and state["noted"] == more for state in found)


def test_frozen_models_are_known_by_their_files(tmp_path):
    """A reward model that was trained again, with another shape, would change the reward in the
    middle of a run. A copy elsewhere is the same model, and the hub's are not looked at."""
    found = []
    for place, size in (("a", 9), ("b", 9), ("c", 10)):
        (tmp_path / place / "judge").mkdir(parents=True)
        (tmp_path / place / "judge/model.safetensors").write_bytes(bytes(size))
        judges = [str(tmp_path / place / "judge")]
        args = SimpleNamespace(actor_model_name_or_path="hub/x", reward_model_name_or_path=judges)
        found.append(checkpoints.frozen_models(args))
    assert found == [{"judge/model.safetensors": size} for size in (9, 9, 10)]
    for dim, expected in ((0, {}), (4, found[0])):  # adapters go on upon what they began on
        args = SimpleNamespace(model_name_or_path=str(tmp_path / "a/judge"), lora_dim=dim)
        assert checkpoints.frozen_models(args) == expected


# --------------------------------------------------------------------------------------------------
# best/
# --------------------------------------------------------------------------------------------------
class Killed(BaseException):
    pass


def best_run(folder, weights):
    """Returns a run that saves `weights` when best.keep asks it to."""
    folder.mkdir(exist_ok=True)
    args = SimpleNamespace(output_dir=str(folder), keep_best="eval_loss")

    def save(engine, tokenizer, place):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_text(weights)
        (place / "config.json").write_text("{}")

    return SimpleNamespace(args=args, save=save, engine=None, tokenizer=None, best_step=None)


@pytest.mark.parametrize("name", "loss perplexity kl accuracy reward gold".split())
def test_less_is_better_of_a_loss_a_perplexity_and_a_kl(tmp_path, name):
    name, better = f"eval_{name}", 1.0 if name in ("loss", "perplexity", "kl") else 3.0
    (tmp_path / "evaluation.json").write_text(json.dumps({name: 2.0}))
    found = [best.improves(tmp_path, name, value) for value in (better, 4 - better, 2.0)]
    assert found == [True, False, False]


def test_the_best_model_is_whole_at_every_moment(tmp_path, monkeypatch):
    """Killed before any of the operations on files that replace it, best/ or a folder beside it
    holds a model and its evaluation; and what comes next finds it again. What a user has put there,
    or beside it, stays."""
    best.keep(best_run(tmp_path / "run", "first"), {"step": 1, "eval_loss": 3.0})
    for mine in ("best", "best.old"):
        (tmp_path / "run" / mine).mkdir(exist_ok=True)
        (tmp_path / "run" / mine / "notes.txt").write_text("mine")
    moments = 0
    while moments < 99:
        folder = tmp_path / f"killed-{moments}"
        shutil.copytree(tmp_path / "run", folder)
        left = moments

        def count(function):
            def counted(*args, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return function(*args, **options)

            return counted

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (best.shutil, "rmtree"), (saving, "sync")):
                patch.setattr(owner, name, count(getattr(owner, name)))
            try:
                best.keep(best_run(folder, "second"), {"step": 2, "eval_loss": 2.0})
                ended = True
            except Killed:
                ended = False
        whole = [part for part in folder.rglob("best") if (part / "evaluation.json").exists()]
        assert any(saving.is_whole(part) for part in whole)
        best.keep(best_run(folder, "worse"), {"step": 3, "eval_loss": 9.0})
        there = (folder / "best/model.safetensors").read_text()
        assert json.loads((folder / "best/evaluation.json").read_text())["eval_loss"] in (2, 3)
        assert there in ("first", "second") and saving.is_whole(folder / "best")
        assert {part.parent.name for part in folder.glob("best*/notes.txt")} == {"best", "best.old"}
        if ended:
            assert there == "second" and [*folder.rglob("best")] == [folder / "best"]
            break
        moments += 1
    assert moments > 6


def test_a_best_model_that_was_lost_is_said(tmp_path, capsys, monkeypatch):
    """A resumed run can only keep the best of what comes now, which may be worse. An evaluation
    that cannot be read any more is no reason to stop either."""
    monkeypatch.setenv("RANK", "0")
    run = best_run(tmp_path, "first")
    best.keep(run, {"step": 1, "eval_loss": 3.0})
    best.keep(run, {"step": 2, "eval_loss": 4.0})
    assert run.best_step == 1 and "warning" not in capsys.readouterr().out
    for damage in ("{}", "3", '{"eval_loss": null}', '{"eval_'):
        (tmp_path / "best/evaluation.json").write_text(damage)
        best.keep(run, {"step": 3, "eval_loss": 9.0})
        assert json.loads((tmp_path / "best/evaluation.json").read_text())["eval_loss"] == 9
    shutil.rmtree(tmp_path / "best")
    best.keep(run, {"step": 4, "eval_loss": 10.0})
    assert "warning: best/ of step 3 is gone" in capsys.readouterr().out
    best.keep(run, {"step": 5, "eval_kl": 1.0})  # as pass_at_k, once a reward is neither 0 nor 1
    assert "this evaluation has no eval_loss" in capsys.readouterr().out
    assert run.best_step == 4


def test_a_resumed_run_knows_that_it_had_a_best_model(tmp_path):
    """Its checkpoint says so."""
    flags = f"{runs.BEST} --max_steps 2".split()
    argv = [*runs.base_flags("reward", runs.base()), *flags]
    done = kit.run("reward", *argv, folder=tmp_path / "run")
    for name in ("best", "checkpoints/step-2"):
        shutil.rmtree(done.folder / name)
    (done.folder / "config.json").unlink()
    done = kit.run("reward", *argv, "--resume", folder=tmp_path / "run")
    assert "warning: best/ of step 1 is gone" in done.out, done
    assert (done.folder / "best/evaluation.json").exists()


@pytest.mark.parametrize(
    "now, size, left",
    [(b"a\nb\nc", 6, b"a\nb\n"), (b"a\nb\nc\n", 4, b"a\nb\n"), (b"a\nlong\n", 4, b"a\n")],
)
def test_a_log_is_cut_where_a_line_ends(tmp_path, now, size, left, capsys, monkeypatch):
    """What was written after a checkpoint goes. Where somebody has shortened the file, or changed
    it, the next line would be joined to what is left of one."""
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "metrics.jsonl").write_bytes(now)
    logs.cut(SimpleNamespace(output_dir=str(tmp_path)), {"metrics.jsonl": size})
    assert (tmp_path / "metrics.jsonl").read_bytes() == left
    assert ("lines are missing" in capsys.readouterr().out) == (len(left) < size)


def test_a_log_that_is_gone_begins_anew(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    logs.cut(SimpleNamespace(output_dir=str(tmp_path)), {"samples.jsonl": 9})
    assert (tmp_path / "samples.jsonl").read_bytes() == b""
    assert "samples.jsonl was changed" in capsys.readouterr().out
