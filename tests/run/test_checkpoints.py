"""Checkpoints, best/ and the cutting of logs in one process, without engines. Whole runs that are
killed and resumed are in test_reliability.py."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from machinery import checkpoints, saving
from machinery.run import EVALUATION, Run, cut_logs, improves
from tests import kit, runs

# --------------------------------------------------------------------------------------------------
# What --resume compares
# --------------------------------------------------------------------------------------------------
FACTS = {"rows_per_step": 8, "data_rows": 40, "data_fingerprint": 7}
FACTS |= {"frozen_models": {"judge/model.safetensors": 9}}
THIS = {**FACTS, "shape": {"ranks": 2, "model": 2}}
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
    checkpoints.refuse_others(Path("step-2"), THIS, THIS)
    with kit.refuses("resume-shape" if name == "shape" else "resume-another"):
        checkpoints.refuse_others(Path("step-2"), {**THIS, name: OTHERS[name]}, THIS)


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
# Saving and loading
# --------------------------------------------------------------------------------------------------
def save(folder, step, keep=1, state=()):
    """Writes a checkpoint. Returns the args."""
    args = SimpleNamespace(output_dir=str(folder), keep_checkpoints=keep)
    checkpoints.save(args, {}, step, {"state": dict(state), "facts": FACTS})
    return args


def names_in(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_is_on_the_disk_before_it_is_done(tmp_path, monkeypatch):
    """All that it holds is synced, then comes its mark, which is synced before an older one goes. A
    copy beside it, of the user's own, stays."""
    (tmp_path / "checkpoints/step-1-backup").mkdir(parents=True)
    save(tmp_path, 1)
    seen = []

    def sync():
        there = {path.name for path in (tmp_path / "checkpoints").rglob("*")}
        new = {path.name for path in (tmp_path / "checkpoints/step-2").iterdir()}
        seen.append((new, "step-1" in there))

    monkeypatch.setattr(os, "sync", sync)
    save(tmp_path, 2)
    assert seen == [({"rank0.pt"}, True), ({"rank0.pt", "done"}, True)]
    assert names_in(tmp_path) == ["step-1-backup", "step-2"]


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

    monkeypatch.setattr(os, "sync", lambda: done.append(("sync", "")))
    monkeypatch.setattr(Path, "replace", note_and_replace)
    monkeypatch.setattr(Path, "iterdir", mark_first)
    saving.move_files(aside, tmp_path)
    at = done.index(("move", "config.json"))
    assert done[at - 1] == ("sync", "")
    assert {*done[: at - 1]} == {("move", name) for name in ("a.json", "model.safetensors", "more")}


def test_before_a_checkpoint_is_deleted_it_counts_no_more(tmp_path, monkeypatch):
    """Whoever is killed while it is deleted leaves a folder that is passed over."""
    save(tmp_path, 1)
    left = []

    def note(folder, **_):
        left.append(sorted(path.name for path in folder.iterdir()))

    monkeypatch.setattr(checkpoints.shutil, "rmtree", note)
    save(tmp_path, 2)
    assert left == [["rank0.pt"]]


@pytest.mark.parametrize("step", [3, 4, 5])
def test_what_is_not_done_makes_room_for_the_next_checkpoint(tmp_path, capsys, monkeypatch, step):
    """The one of step 4 is half, so the run goes on from the one before. The next save removes it,
    and takes its place if it is of the same step: none of its files is left."""
    monkeypatch.setenv("RANK", "0")
    for each in (2, 4):
        args = save(tmp_path, each, keep=2)
    half = tmp_path / "checkpoints/step-4"
    (half / "done").unlink()
    (half / "rank9.pt").touch()
    assert checkpoints.load(args, {}, {}, FACTS, 9)[0] == 2
    assert f"{half} is passed over" in capsys.readouterr().out
    save(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["step-2", f"step-{step}"]
    left = {path.name for path in (tmp_path / f"checkpoints/step-{step}").iterdir()}
    assert left == {"done", "rank0.pt"} and checkpoints.load(args, {}, {}, FACTS, 9)[0] == step


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path):
    """It has a list of its files in the place of the mark. Taken for a half one it would be passed
    over, and its run would start anew."""
    args = save(tmp_path, 2)
    folder = tmp_path / "checkpoints/step-2"
    (folder / "done").rename(folder / "manifest.json")
    with kit.refuses("no-checkpoint-whole") as caught:
        checkpoints.whole_checkpoints(args)
    assert "older version" in str(caught.value)


def new_fork():
    """Returns what a fork may keep in its state, and an optimizer and an object that hold it, too.

    A Lagrange multiplier, a number, tensors in dicts and lists.
    """
    multiplier = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([multiplier], lr=0.5)
    state = {"multiplier": multiplier, "coef": 0.1, "noted": {}, "history": []}
    state["baselines"] = {"why?": torch.zeros(2), "how?": [torch.zeros(3), 0]}
    return state, optimizer, state["baselines"]["how?"][0], state["history"]


def resume_a_fork(folder):
    """Saves the state of a fork after two steps, and makes a third step: at once, and after it was
    loaded into a new fork. Returns both."""
    from machinery import ranks

    rank = ranks.get_rank()
    args = SimpleNamespace(output_dir=folder, keep_checkpoints=1)

    def step(state, optimizer, baseline, history):
        state["multiplier"].grad = torch.tensor([1.0 + rank])
        optimizer.step()
        state["coef"] *= 2 + rank
        state["noted"][f"why {len(history)}?"] = torch.tensor(state["coef"])
        baseline += 1 + rank
        history.append(state["coef"])

    def numbers(state):
        of = state["baselines"]
        noted = {name: value.item() for name, value in state["noted"].items()}
        tensors = (state["multiplier"], of["why?"], of["how?"][0])
        return [state["coef"], noted, state["history"], *(each.tolist() for each in tensors)]

    first = new_fork()
    for _ in range(2):
        step(*first)
    checkpoints.save(args, {}, 2, {"state": first[0], "facts": FACTS})
    step(*first)
    second = new_fork()
    checkpoints.load(args, {}, second[0], FACTS, 9)
    step(*second)
    assert second[0]["multiplier"].requires_grad and second[0]["multiplier"].is_leaf
    return numbers(first[0]), numbers(second[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_state_of_a_fork_is_restored_in_place_on_each_rank(tmp_path, ranks):
    """Each rank has its own back. An optimizer that holds the multiplier moves the one that was
    restored, and whoever holds a tensor or a list of the state sees what is in it."""
    ends = kit.on_ranks(resume_a_fork, ranks, str(tmp_path))
    for whole, resumed in ends:
        assert resumed == whole
    assert ends[0][0][3] == [-0.5] and (ranks == 1 or ends[1][0][3] == [-2.0])


def test_a_tensor_of_another_shape_is_taken_as_it_was_saved():
    """A buffer that has grown, say; and what a fork has added since its run began."""
    own = {"grown": torch.zeros(1), "kept": 3, "cast": torch.zeros(2, dtype=torch.float64)}
    saved = {"grown": torch.ones(4), "new": {"x": torch.ones(1)}, "cast": torch.ones(2)}
    found = checkpoints.restore(own, saved)
    assert found is own and own["grown"].tolist() == [1] * 4 and own["new"]["x"].item() == 1
    assert own["kept"] == 3 and own["cast"].dtype is torch.float64 and own["cast"].sum() == 2


# --------------------------------------------------------------------------------------------------
# best/
# --------------------------------------------------------------------------------------------------
class Killed(BaseException):
    pass


class BestRun(Run):
    """A run that saves `weights` when keep_best asks it to."""

    def __init__(self, folder, weights, before=None):
        self.args = SimpleNamespace(output_dir=str(folder), keep_best="eval_loss")
        self.weights, self.engine, self.tokenizer, self.best = weights, None, None, {}
        if before:
            self.find_best(before)

    def save(self, engine, tokenizer, place):
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.safetensors").write_text(self.weights)
        (place / "config.json").write_text("{}")


@pytest.mark.parametrize("name", "loss perplexity kl accuracy reward gold".split())
def test_less_is_better_of_a_loss_a_perplexity_and_a_kl(name):
    name, better = f"eval_{name}", 1.0 if name in ("loss", "perplexity", "kl") else 3.0
    found = [improves(2.0, name, value) for value in (better, 4 - better, 2.0)]
    assert found == [True, False, False] and improves(None, name, better)


def test_the_best_model_is_whole_or_not_there(tmp_path, monkeypatch):
    """Killed before any of the operations on files that replace it, best/ holds a model and its own
    evaluation, or it is not whole; and what comes next replaces it. What a user has put there
    stays."""
    worth, moments = {"first": 3.0, "second": 2.0, "worse": 9.0}, 0

    def evaluation_in(best):
        if not (saving.is_whole(best) and (best / EVALUATION).exists()):
            return None
        value = json.loads((best / EVALUATION).read_text())["eval_loss"]
        assert worth[(best / "model.safetensors").read_text()] == value
        return value

    BestRun(tmp_path / "run", "first").keep_best({"step": 1, "eval_loss": 3.0})
    (tmp_path / "run/best/notes.txt").write_text("mine")
    seen = []
    while moments < 99:
        folder, left = tmp_path / f"killed-{moments}", moments
        shutil.copytree(tmp_path / "run", folder)
        run, before = BestRun(folder, "second", {"step": 1}), {"step": 1, "eval_loss": 3.0}

        def count(function):
            def counted(*args, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return function(*args, **options)

            return counted

        with monkeypatch.context() as patch:
            for name in ("unlink", "write_text"):
                patch.setattr(Path, name, count(getattr(Path, name)))
            try:
                run.keep_best({"step": 2, "eval_loss": 2.0})
                ended = True
            except Killed:
                ended = False
        seen.append(evaluation_in(folder / "best"))
        again = BestRun(folder, "worse", before)
        assert again.best.get("eval_loss") == seen[-1]
        again.keep_best({"step": 3, "eval_loss": 9.0})
        assert evaluation_in(folder / "best") == (seen[-1] or 9.0)
        assert (folder / "best/notes.txt").read_text() == "mine"
        if ended:
            break
        moments += 1
    assert seen[0] == 3.0 and seen[-1] == 2.0 and seen.count(None) == len(seen) - 2 > 3


def test_a_best_model_that_was_lost_is_said(tmp_path, capsys, monkeypatch):
    """A resumed run can only keep the best of what comes now, which may be worse. An evaluation
    that cannot be read any more is no reason to stop either."""
    monkeypatch.setenv("RANK", "0")
    run = BestRun(tmp_path, "first")
    run.keep_best({"step": 1, "eval_loss": 3.0})
    run.keep_best({"step": 2, "eval_loss": 4.0})
    assert run.best == {"step": 1, "eval_loss": 3.0} and "warning" not in capsys.readouterr().out
    for damage in ("{}", "3", '{"eval_loss": null}', '{"eval_'):
        (tmp_path / "best" / EVALUATION).write_text(damage)
        run = BestRun(tmp_path, "second", run.best)
        run.keep_best({"step": 3, "eval_loss": 9.0})
        assert json.loads((tmp_path / "best" / EVALUATION).read_text())["eval_loss"] == 9
    capsys.readouterr()
    shutil.rmtree(tmp_path / "best")
    BestRun(tmp_path, "third", run.best).keep_best({"step": 4, "eval_loss": 10.0})
    assert "warning: best/ of step 3 is gone" in capsys.readouterr().out
    run.keep_best({"step": 5, "eval_kl": 1.0})  # as pass_at_k, once a reward is neither 0 nor 1
    assert "this evaluation has no eval_loss" in capsys.readouterr().out


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


# --------------------------------------------------------------------------------------------------
# Logs
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "now, size, left",
    [(b"a\nb\nc", 6, b"a\nb\n"), (b"a\nb\nc\n", 4, b"a\nb\n"), (b"a\nlong\n", 4, b"a\n")],
)
def test_a_log_is_cut_where_a_line_ends(tmp_path, now, size, left, capsys, monkeypatch):
    """What was written after a checkpoint goes. Where somebody has shortened the file, or changed
    it, the next line would be joined to what is left of one."""
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "metrics.jsonl").write_bytes(now)
    cut_logs(SimpleNamespace(output_dir=str(tmp_path)), {"metrics.jsonl": size})
    assert (tmp_path / "metrics.jsonl").read_bytes() == left
    assert ("lines are missing" in capsys.readouterr().out) == (len(left) < size)


def test_a_log_that_is_gone_begins_anew(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    cut_logs(SimpleNamespace(output_dir=str(tmp_path)), {"samples.jsonl": 9})
    assert (tmp_path / "samples.jsonl").read_bytes() == b""
    assert "samples.jsonl was changed" in capsys.readouterr().out
