"""Files that a run replaces, in one process and without engines: checkpoints, saved models,
args.json, output folders that are moved aside, logs. Whole runs that are killed and resumed are in
test_reliability.py."""

import itertools
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

import sft
from machinery import checkpoints, output_folder, saving
from machinery.refused import read_run
from machinery.run import cut_logs, improves
from tests import kit, runs

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
FACTS = {"rows_per_step": 8, "data_rows": 40, "data_fingerprint": 7}
FACTS |= {"frozen_models": {"judge/model.safetensors": 9}}


def save(folder, step, keep=1, state=()):
    """Writes a checkpoint. Returns the args."""
    args = SimpleNamespace(output_dir=str(folder), keep_checkpoints=keep)
    checkpoints.save(args, {}, step, {"state": dict(state), "facts": FACTS})
    return args


def load(folder, state=None):
    args = SimpleNamespace(output_dir=str(folder))
    return checkpoints.load(args, {}, {} if state is None else state, FACTS, 99)


# --------------------------------------------------------------------------------------------------
# Killed before any operation on files
# --------------------------------------------------------------------------------------------------
def killed_before(moment, work, folder):
    """Does work(folder) in a process that is killed before its so many-th operation on files in
    `folder` or beside it; at -1 its disk is full instead. Returns whether it did not end well."""
    left = moment

    def count(event, details):
        nonlocal left
        if event in TOUCHES and str(details[0]).startswith(str(folder.parent)):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            if moment < 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))
            else:
                sys.addaudithook(count)
            work(folder)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    full = (1, -signal.SIGTERM)  # an error, or nobody can read what it prints
    assert code in (full if moment < 0 else (0, -signal.SIGKILL))
    return code != 0


def first_checkpoint(folder):
    save(folder, 10, keep=2, state={"n": 10})
    save(folder, 9, keep=2, state={"n": 9})  # older, though its name comes later
    (folder / "checkpoints/step-9-backup").mkdir()  # the user's own


def second_checkpoint(folder):
    save(folder, 11, state={"n": 11})


def newest_is_whole(folder):
    """What counts can be loaded, and is of its step; what does not count is what was killed."""
    step, saved = load(folder)
    assert saved["state"]["n"] == step and (folder / "checkpoints/step-9-backup").exists()
    return step == 11


def first_model(folder):
    write_model(folder, "first")
    (folder / "notes.txt").write_text("mine")


def write_model(folder, content):
    (folder / "chat_templates").mkdir(parents=True)
    names = "a.json", "config.json", "model.safetensors", "z.json", "chat_templates/b.jinja"
    for name in names:
        (folder / name).write_text(content)


def second_model(folder):
    shutil.rmtree(folder / ".saving", ignore_errors=True)  # as save_model does
    write_model(folder / ".saving", "second")
    saving.move_files(folder / ".saving", folder)


def model_is_whole(folder):
    """It is the one or the other, or not there."""
    assert (folder / "notes.txt").read_text() == "mine"
    if saving.is_whole(folder):
        files = [f for f in folder.rglob("*") if f.is_file() and ".saving" not in f.parts]
        found = {file.read_text() for file in files} - {"mine"}
        assert len(found) == 1
        return found == {"second"}
    return False


def note(folder, rows):
    args = sft.get_args(["--preset", "toy", "--output_dir", str(folder)])
    output_folder.note(args, {"data_fingerprint": 7, "data_rows": rows})


def args_are_whole(folder):
    return {1: False, 2: True}[read_run(folder)["data_rows"]]


def first_run(folder):
    note(folder, 1)
    first_checkpoint(folder)
    write_model(folder / "best", "first")


def overwrite(folder):
    args = sft.get_args(["--preset", "toy", "--output_dir", str(folder), "--overwrite"])
    output_folder.take(args)
    note(folder, 2)


def old_run_is_somewhere(folder):
    """All of it, in its place or beside it."""
    aside, new = folder.with_name("run.old-1"), folder.with_name("expected")
    if not new.exists():
        new.mkdir()
        first_run(new)
    old = aside if aside.exists() else folder
    assert kit.tree(old).keys() == kit.tree(new).keys() and read_run(old)["data_rows"] == 1
    return read_run(folder).get("data_rows") == 2


@pytest.mark.parametrize(
    "before, work, is_done",
    [
        (first_checkpoint, second_checkpoint, newest_is_whole),
        (first_model, second_model, model_is_whole),
        (lambda folder: note(folder, 1), lambda folder: note(folder, 2), args_are_whole),
        (first_run, overwrite, old_run_is_somewhere),
    ],
    ids=["checkpoint", "model", "args", "overwrite"],
)
def test_killed_before_any_operation_on_files_nothing_is_lost(
    tmp_path, monkeypatch, before, work, is_done
):
    """At every moment there is the old or the new, or it does not count; and whoever does the work
    again succeeds. So it is where the disk is full."""
    monkeypatch.setattr(os, "sync", lambda: None)  # quicker
    for moment in itertools.count(-1):
        folder = tmp_path / str(moment) / "run"
        folder.mkdir(parents=True)
        before(folder)
        if not killed_before(moment, work, folder):
            break
        if not is_done(folder) and work is not overwrite:
            work(folder)
            assert is_done(folder)
    assert is_done(folder) and moment > 1
    left = {path.name for path in folder.glob("checkpoints/*")}
    assert not left or work is overwrite or left == {"step-11", "step-9-backup"}


def test_a_mark_comes_when_what_it_vouches_for_is_on_the_disk(tmp_path, monkeypatch):
    """After a power cut it must not lie beside files that never left the cache. An older checkpoint
    goes when the mark itself is on the disk."""
    save(tmp_path, 1)
    write_model(tmp_path / ".saving", "new")
    seen = []

    def sync():
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        seen.append({str(path.relative_to(tmp_path)) for path in files})

    monkeypatch.setattr(os, "sync", sync)
    saving.move_files(tmp_path / ".saving", tmp_path)
    assert seen[0] >= {"a.json", "z.json", "model.safetensors", "chat_templates/b.jinja"}
    assert "config.json" not in seen.pop()
    save(tmp_path, 2)
    new = [{name for name in files if "step-2" in name} for files in seen]
    rank, done = "checkpoints/step-2/rank0.pt", "checkpoints/step-2/done"
    assert new == [{rank}, {rank, done}]
    assert all("checkpoints/step-1/done" in files for files in seen)


@pytest.mark.parametrize("step", [4, 5])
def test_what_is_not_done_makes_room_for_the_next_checkpoint(tmp_path, step):
    """The next save removes it, and takes its place if it is of the same step: none of its files is
    left. (That a run passes it over, and says so: test_reliability.py.)"""
    save(tmp_path, 2, keep=2)
    folder = tmp_path / "checkpoints"
    (folder / "step-4").mkdir()
    (folder / "step-4/rank9.pt").touch()
    save(tmp_path, step, keep=2)
    left = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert left == {f"step-{n}/{name}" for n in (2, step) for name in ("done", "rank0.pt")}


# --------------------------------------------------------------------------------------------------
# What --resume compares
# --------------------------------------------------------------------------------------------------
def test_a_checkpoint_says_what_it_belongs_to():
    """Also where one side has what the other has not, as another layer. (tests/promises.py has all
    that is compared.)"""
    here, more = FACTS, {**FACTS, "model c": (2, 3)}
    checkpoints.refuse_others(Path("step-2"), here, here)
    for there, now in ((here, more), (more, here)):
        with kit.refuses("resume-another"):
            checkpoints.refuse_others(Path("step-2"), there, now)


def test_frozen_models_are_known_by_their_files(tmp_path):
    """A copy elsewhere is the same model, the hub's are not looked at, and adapters go on upon what
    they began on. (One that was trained again is refused: tests/promises.py.)"""
    for place in "ab":
        (tmp_path / place / "judge").mkdir(parents=True)
        (tmp_path / place / "judge/model.safetensors").write_bytes(bytes(9))
        judge = str(tmp_path / place / "judge")
        args = SimpleNamespace(actor_model_name_or_path="x", reward_model_name_or_path=[judge])
        assert checkpoints.frozen_models(args) == {"judge/model.safetensors": 9}
    for dim, expected in ((0, {}), (4, {"judge/model.safetensors": 9})):
        args = SimpleNamespace(model_name_or_path=judge, lora_dim=dim)
        assert checkpoints.frozen_models(args) == expected


# --------------------------------------------------------------------------------------------------
# The state of a fork
# --------------------------------------------------------------------------------------------------
def new_fork():
    """Returns what a fork may keep in its state, and an optimizer and a tensor that hold it."""
    multiplier = nn.Parameter(torch.tensor([1.0]))
    state = {"multiplier": multiplier, "coef": 0.1, "baselines": {"how?": {"long": torch.zeros(3)}}}
    optimizer = torch.optim.SGD([multiplier], lr=0.5)
    return state, optimizer, state["baselines"]["how?"]["long"]


def resume_a_fork(folder):
    """Saves the state of a fork after two steps, and makes a third step: at once, and after it was
    loaded into a new fork. Returns both."""
    from machinery import ranks

    rank = ranks.get_rank()

    def step(state, optimizer, baseline):
        state["multiplier"].grad = torch.tensor([1.0 + rank])
        optimizer.step()
        state["coef"] *= 2 + rank
        state[f"new {state['coef']}"] = torch.tensor(state["coef"])
        baseline += 1 + rank

    first, second = new_fork(), new_fork()
    step(*first), step(*first)
    save(folder, 2, state=first[0])
    step(*first)
    load(folder, second[0])
    step(*second)
    assert second[0]["multiplier"].requires_grad and second[0]["multiplier"].is_leaf
    return repr(first[0]), repr(second[0]), second[0]["multiplier"].item()


def test_the_state_of_a_fork_is_restored_in_place_on_each_rank(tmp_path):
    """Each rank has its own back. An optimizer that holds the multiplier moves the one that was
    restored, and whoever holds a tensor of the state sees what is in it."""
    ends = kit.on_ranks(resume_a_fork, 2, str(tmp_path))
    assert all(whole == resumed for whole, resumed, _ in ends)
    assert [multiplier for *_, multiplier in ends] == [-0.5, -2.0]


def test_a_tensor_of_another_shape_is_taken_as_it_was_saved():
    """A buffer that has grown, say; and what a fork has added since its run began."""
    held = torch.zeros(1)
    own = {"grown": torch.zeros(1), "kept": 3, "cast": torch.zeros(2, dtype=torch.float64)}
    own["listed"] = [held]
    saved = {"grown": torch.ones(4), "new": {"x": torch.ones(1)}, "cast": torch.ones(2)}
    found = checkpoints.restore(own, {**saved, "listed": [torch.ones(1), 5]})
    assert found is own and own["grown"].tolist() == [1] * 4 and own["new"]["x"].item() == 1
    assert own["listed"][0] is held and held.item() == 1 and own["listed"][1] == 5
    assert own["kept"] == 3 and own["cast"].dtype is torch.float64 and own["cast"].sum() == 2


# --------------------------------------------------------------------------------------------------
# best/, logs
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", "loss perplexity kl accuracy reward gold".split())
def test_less_is_better_of_a_loss_a_perplexity_and_a_kl(name):
    name, better = f"eval_{name}", 1.0 if name in ("loss", "perplexity", "kl") else 3.0
    found = [improves(2.0, name, value) for value in (better, 4 - better, 2.0)]
    assert found == [True, False, False] and improves(None, name, better)


def test_a_resumed_run_knows_that_it_had_a_best_model(tmp_path):
    """Its checkpoint says so. From now on it keeps the best again, be it a worse one."""
    argv = [*runs.base_flags("reward", runs.base()), *f"{runs.BEST} --max_steps 2".split()]
    done = kit.run("reward", *argv, folder=tmp_path / "run")
    for name in ("best", "checkpoints/step-2"):
        shutil.rmtree(done.folder / name)
    (done.folder / "config.json").unlink()
    done = kit.run("reward", *argv, "--resume", folder=tmp_path / "run")
    assert "warning: best/ is gone" in done.out, done
    assert json.loads((done.folder / "best/evaluation.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    "now, size, left",
    [
        (b"a\nb\nc", 6, b"a\nb\n"),
        (b"a\nb\nc\n", 4, b"a\nb\n"),
        (b"a\nlong\n", 4, b"a\n"),
        (b"", 9, b""),
    ],
)
def test_a_log_is_cut_where_a_line_ends(tmp_path, now, size, left):
    """What was written after a checkpoint goes. Where somebody has shortened the file, or changed
    it, the next line would be joined to what is left of one. One that is gone begins anew."""
    if now:
        (tmp_path / "metrics.jsonl").write_bytes(now)
    cut_logs(SimpleNamespace(output_dir=str(tmp_path)), {"metrics.jsonl": size})
    assert (tmp_path / "metrics.jsonl").read_bytes() == left
