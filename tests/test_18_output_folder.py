"""The output folder has one owner: the run that holds its lock. What lies there is removed late,
and only if it is ours; what is refused is refused before anything is touched."""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from conftest import ROOT

import ppo
import reward
import sft
from machinery.data import rows
from machinery.engine import monitors, throughput
from machinery.models import model_card, model_folders, saving
from machinery.run import checkpoints, folder_lock, logs, output_folder
from machinery.run.run import Run

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
FACTS = {"data_rows": 8, "data_fingerprint": 7}
HOLD = "import sys, time\nsys.path.insert(0, sys.argv[1])\nimport folder_lock\n"
HOLD += "lock = folder_lock.Lock(sys.argv[2])\nprint(lock.take(), flush=True)\ntime.sleep(600)"


def get_args(output, *flags, script="sft"):
    return SCRIPTS[script].get_args(["--preset", "toy", "--output_dir", str(output), *flags])


def refused(capsys, words, function, *inputs):
    """The call ends the program with code 2 and one message, which holds all of `words`."""
    with pytest.raises(SystemExit) as stop:
        function(*inputs)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("error: ") == 1, said
    assert not [word for word in words.split(", ") if word not in said], said


def begin(output, *flags, script="sft"):
    """A run that has made its first step, and no more."""
    folder = output_folder.OutputFolder(get_args(output, *flags, script=script))
    folder.take(FACTS)
    folder.settle()
    return folder


def end(folder, *parts):
    """Saves a model, and one in each of the folders `parts`, as run.save does; the run is over."""
    for part in (*parts, "."):
        place = folder.path / part
        (place / ".saving").mkdir(parents=True)
        files = [place / ".saving" / name for name in ("model.safetensors", "config.json")]
        for file in files:
            file.write_text("weights")
        folder.claim([place / file.name for file in files])
        saving.move_files(files, place)
        (place / ".saving").rmdir()
    folder.release()


def checkpoint(output, step=2):
    folder = output / f"checkpoints/step-{step}"
    folder.mkdir(parents=True)
    (folder / "rank0.pt").write_text("state")


def tree(folder):
    """Everything below `folder`, {path: text}."""
    files = [path for path in folder.rglob("*") if path.name != ".lock"]
    return {str(f.relative_to(folder)): f.is_file() and f.read_text() for f in files}


# --------------------------------------------------------------------------------------------------
# The lock
# --------------------------------------------------------------------------------------------------
def test_a_folder_has_one_run_at_a_time(tmp_path, capsys):
    """A second run, and a --resume beside a living one, would delete the first one's checkpoint.
    The message names host and process. Killed, a run leaves the file behind and locks nobody out.
    """
    begin(tmp_path).release()
    command = [sys.executable, "-c", HOLD, str(ROOT / "machinery"), str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "None\n"
        words = f"in use, process {other.pid} on {socket.gethostname()}"
        for flags in ([], ["--resume"], ["--overwrite"]):
            refused(capsys, words, output_folder.check, get_args(tmp_path, *flags))
    finally:
        other.kill()
        other.wait()
    assert (tmp_path / ".lock").exists()
    begin(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


def test_the_check_is_repeated_under_the_lock(tmp_path, capsys):
    """Two runs may start at the same time, and load their models for minutes: whoever comes second
    finds the lock, or the run that has ended meanwhile."""
    first, second, third = (output_folder.OutputFolder(get_args(tmp_path)) for _ in range(3))
    first.take(FACTS)
    refused(capsys, f"in use, process {os.getpid()}", second.take, FACTS)
    end(first)
    before = tree(tmp_path)
    refused(capsys, "holds a run, --overwrite", third.take, FACTS)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "host, process, free", [("", 1, False), ("", 2**22 + 1, True)] + [("elsewhere", 1, False)]
)
def test_without_locks_of_the_kernel_the_words_count(tmp_path, monkeypatch, host, process, free):
    """Some network file systems have no locks. There a run of this host that is gone is seen
    through; of another host nobody can know, so its file must be deleted by hand."""

    def no_locks(*options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    words = f"process {process} on {host or socket.gethostname()} since 2026-01-01 00:00"
    (tmp_path / ".lock").write_text(words)
    lock = folder_lock.Lock(tmp_path)
    words += f" (or, if that process has ended, delete {tmp_path / '.lock'})"
    assert lock.holder() == lock.take() == (None if free else words)


# --------------------------------------------------------------------------------------------------
# What is removed, and when
# --------------------------------------------------------------------------------------------------
def test_old_results_go_when_the_new_run_has_made_a_step(tmp_path):
    """Whatever fails before (loading, a reward function, memory) costs nothing. What the run has
    logged until then follows."""
    end(begin(tmp_path), "ema", "critic")
    checkpoint(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("old")
    before = tree(tmp_path)
    args = get_args(tmp_path, "--overwrite", "--seed", "5")
    folder = output_folder.OutputFolder(args)
    folder.take(FACTS)
    logs.append(args, "metrics.jsonl", [{"step": 0}])
    assert tree(tmp_path) == before
    folder.settle()
    logs.append(args, "metrics.jsonl", [{"step": 1}])
    after = tree(tmp_path)
    assert after.keys() == {"args.json", "metrics.jsonl"}
    assert json.loads(after["args.json"])["seed"] == 5
    assert after["metrics.jsonl"] == '{"step": 0}\n{"step": 1}\n'
    folder.release()


def test_a_run_settles_at_the_end_of_its_first_step(monkeypatch, tmp_path):
    """The step has been made, its numbers are finite, its evaluation (which may call the user's
    function) has worked: now there is something to put in the old run's place."""
    order, run = [], Run.__new__(Run)
    for name in ("stop_unless_finite", "write"):
        setattr(run, name, lambda *values, name=name: order.append(name))
    run.evaluate = lambda step: order.append("evaluate") or {}
    run.folder = SimpleNamespace(settle=lambda: order.append("settle"))
    run.args, run.engine, run.engines, run.started = get_args(tmp_path), None, {}, 0
    run.step = run.last_step = run.steps_per_epoch = 1
    monkeypatch.setattr(throughput, "speed", lambda *values: {})
    monkeypatch.setattr(logs, "draw_curves", lambda args: order.append("draw"))
    run.log({"loss": 1.0}, tokens=1, flops=1)
    assert order == ["stop_unless_finite", "evaluate", "settle", "write", "draw"]


def test_a_refused_resume_leaves_args_json_as_it_was(tmp_path):
    """It is written when the run is accepted, after the checkpoint has been compared and loaded."""
    begin(tmp_path).release()
    checkpoint(tmp_path)
    before = tree(tmp_path)
    folder = output_folder.OutputFolder(get_args(tmp_path, "--resume", "--learning_rate", "1"))
    folder.take(FACTS)
    assert tree(tmp_path) == before
    folder.settle()
    assert tree(tmp_path).keys() == before.keys() != tree(tmp_path)["args.json"]
    assert json.loads((tmp_path / "args.json").read_text())["learning_rate"] == 1
    folder.release()


def test_only_what_is_ours_is_removed(tmp_path, capsys):
    """args.json lists the files of the models. Others stay, also with --overwrite, and one whose
    name the run itself will write is a reason to refuse."""
    end(begin(tmp_path), "ema")
    kept = ["notes.txt", "my_model.safetensors", "ema/notes.txt", "checkpoints/step-by-step.md"]
    kept += ["checkpoints/step-2-backup/rank0.pt", "checkpoints/step-2.txt"]
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    begin(tmp_path, "--overwrite").release()
    assert {name for name, text in tree(tmp_path).items() if text == "mine"} == set(kept)
    assert not (tmp_path / "ema/config.json").exists()
    for name in ("model.safetensors", "ema/tokenizer.json"):
        (tmp_path / name).write_text("mine")
        refused(capsys, f"{name}, no run of ours", output_folder.check, get_args(tmp_path))
        (tmp_path / name).unlink()
    output_folder.check(get_args(tmp_path))


@pytest.mark.parametrize("text, stays", [("my own words", True), (model_card.MARK, False)])
def test_a_readme_of_the_users_stays(tmp_path, text, stays):
    """It may have been put in the place of our card, which args.json lists."""
    folder = begin(tmp_path)
    folder.claim([tmp_path / "README.md"])
    end(folder)
    (tmp_path / "README.md").write_text(text)
    begin(tmp_path, "--overwrite").release()
    assert (tmp_path / "README.md").exists() == stays


@pytest.mark.parametrize("text", ["{}", '{"learning_rate": 1}', '{"data_fingerprint": 7'])
def test_an_args_json_of_another_program_is_not_overwritten(tmp_path, capsys, text):
    """Nor is a damaged one of ours, which cannot be told from it. --overwrite takes both."""
    (tmp_path / "args.json").write_text(text)
    refused(capsys, "holds args.json, --overwrite", output_folder.check, get_args(tmp_path))
    folder = output_folder.OutputFolder(get_args(tmp_path, "--overwrite"))
    folder.take(FACTS)
    assert (tmp_path / "args.json").read_text() == text, "before the first step"
    folder.settle()
    assert output_folder.read_record(tmp_path)["data_rows"] == 8
    folder.release()


def test_a_run_killed_while_it_clears_the_folder_is_not_resumed(tmp_path, monkeypatch, capsys):
    """The old checkpoint would be resumed in the name of the new run. First go the marks, so that
    a half of a model is no finished run, then args.json, then the rest."""
    end(begin(tmp_path), "ema")
    checkpoint(tmp_path)
    folder = output_folder.OutputFolder(get_args(tmp_path, "--overwrite", "--learning_rate", "1"))
    folder.take(FACTS)
    paths = [str(path.relative_to(tmp_path)) for path in folder.going()]
    assert paths[:3] == ["config.json", "ema/config.json", "args.json"]
    monkeypatch.setattr(shutil, "rmtree", lambda path: 1 / 0)  # the first is the checkpoint
    with pytest.raises(ZeroDivisionError):
        folder.settle()
    folder.release()
    words = "args.json is missing"
    refused(capsys, words, output_folder.check, get_args(tmp_path, "--resume"))


def test_files_of_monitors_go_with_the_run(tmp_path, monkeypatch):
    """Else a CSV file would go on with the next run's steps. It is fed when the old one is gone,
    and what TensorBoard has open since the engines were made stays. So do the user's files."""
    config = json.loads((ROOT / "ds_config.json").read_text())
    monkeypatch.setitem(monitors.PACKAGES, "tensorboard", "")  # it need not be installed
    config["csv_monitor"]["enabled"] = config["tensorboard"]["enabled"] = True
    (tmp_path / "ds.json").write_text(json.dumps(config))
    output, place = tmp_path / "output", tmp_path / "output/run"
    flags = ["--ds_config", str(tmp_path / "ds.json")]
    begin(output, *flags).release()
    (place / "more").mkdir(parents=True)
    names = ["loss.csv", "events.out.tfevents.1.old", "notes.txt", "more/mine.csv"]
    for name in names:
        (place / name).write_text("old")
    args = get_args(output, "--overwrite", *flags)
    folder = output_folder.OutputFolder(args)
    (place / "events.out.tfevents.2.new").write_text("")
    folder.take(FACTS)
    logs.call(args, (place / "loss.csv").write_text, "new")
    assert (place / "loss.csv").read_text() == "old"
    folder.settle()
    kept = {"loss.csv": "new", "events.out.tfevents.2.new": "", "more": False}
    assert tree(place) == {**kept, "notes.txt": "old", "more/mine.csv": "old"}
    folder.release()


def test_a_list_of_files_leads_nowhere_else(tmp_path):
    """args.json may have been edited: nothing outside the folder is ever removed for it."""
    output, outside = tmp_path / "output", tmp_path / "outside"
    begin(output).release()
    outside.write_text("not ours")
    record = json.loads((output / "args.json").read_text())
    record["files"] = ["../outside", str(outside), "gone", ".", "../*.csv"]
    (output / "args.json").write_text(json.dumps(record))
    begin(output, "--overwrite").release()
    assert outside.read_text() == "not ours"


def test_links_are_followed_with_care(tmp_path):
    """checkpoints/ may be a link to a larger disk: what lies behind it goes, the link stays. A
    link in the place of a file or a checkpoint goes, and what it points to stays."""
    output, disk = tmp_path / "output", tmp_path / "disk"
    disk.mkdir()
    end(begin(output))
    (output / "checkpoints").symlink_to(disk)
    checkpoint(output, 2)
    checkpoint(tmp_path / "else", 4)
    (disk / "step-4").symlink_to(tmp_path / "else/checkpoints/step-4")
    (output / "model.safetensors").rename(tmp_path / "weights")
    (output / "model.safetensors").symlink_to(tmp_path / "weights")
    begin(output, "--overwrite").release()
    assert (output / "checkpoints").is_symlink() and not any(disk.iterdir())
    assert (tmp_path / "weights").exists() and not (output / "model.safetensors").is_symlink()
    assert (tmp_path / "else/checkpoints/step-4/rank0.pt").exists()


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------
def finished_parts(output):
    """A run of step 3 that was killed between two of its models."""
    end(begin(output), "ema", "critic")
    (output / "config.json").unlink()


UNUSABLE = {  # what lies there: (function that makes it, flags, words)
    "no name": (None, ["--output_dir", ""], "--output_dir is empty"),
    "blanks": (None, ["--output_dir", " "], "--output_dir is empty"),
    "a link to nothing": (lambda o: o.symlink_to("gone"), [], "not a folder"),
    "below a link to nothing": (
        lambda o: o.symlink_to("gone"),
        ["--output_dir", "OUTPUT/more"],
        "not a folder",
    ),
    "checkpoints to nowhere": (
        lambda o: o.mkdir() or (o / "checkpoints").symlink_to("gone"),
        [],
        "checkpoints is not a folder",
    ),
    "a file for a checkpoint": (
        lambda o: (
            (o / "checkpoints").mkdir(parents=True) or (o / "checkpoints/step-2").write_text("")
        ),
        ["--overwrite"],
        "step-2 is not a folder",
    ),
    **{
        f"a folder {name}": (lambda o, name=name: (o / name).mkdir(parents=True), [flag], name)
        for name, flag in (
            ("args.json", "--overwrite"),
            (".lock", "--overwrite"),
            ("metrics.jsonl", "--resume"),
        )
    },
    "a file .saving": (
        lambda o: o.mkdir() or (o / ".saving").write_text(""),
        ["--overwrite"],
        ".saving is not a folder",
    ),
    "finished parts": (finished_parts, [], "holds a run, --overwrite"),
    "finished parts, resumed": (finished_parts, ["--resume"], "no checkpoint, --overwrite"),
    "a checkpoint, no args.json": (checkpoint, ["--resume"], "args.json is missing or damaged"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_folder_that_cannot_be_had_is_refused(tmp_path, capsys, name):
    make, flags, words = UNUSABLE[name]
    output = tmp_path / "output"
    if make:
        make(output)
    before = tree(tmp_path)
    args = get_args(output, *(flag.replace("OUTPUT", str(output)) for flag in flags))
    refused(capsys, words, output_folder.check, args)
    assert tree(tmp_path) == before


LISTS = [b'{"data_fingerprint": 1, "files": %s}' % files for files in (b"3", b"null", b"[1]")]


@pytest.mark.parametrize("text", [b"", b'{"seed": 1', b"\xff\xfe\x00", b"[1]", b"3", b"{}", *LISTS])
def test_a_broken_args_json_is_no_record(tmp_path, capsys, text):
    """Empty, cut, binary, no object, no list of files: a resume has nothing to compare with.
    --overwrite still begins anew."""
    checkpoint(tmp_path)
    (tmp_path / "args.json").write_bytes(text)
    words = "args.json is missing or damaged"
    refused(capsys, words, output_folder.check, get_args(tmp_path, "--resume"))
    output_folder.check(get_args(tmp_path, "--overwrite"))


@pytest.mark.parametrize("flag", "output_dir data_path model_name_or_path ds_config".split())
def test_a_name_that_no_file_can_have_is_refused(capsys, flag):
    long = "a" * 300
    refused(capsys, f"--{flag}, 304 characters", sft.get_args, [f"--{flag}", f"./x/{long}"])
    refused(capsys, f"--{flag}, characters", sft.get_args, [f"--{flag}", "a/" * 2100])
    refused(capsys, f"--{flag}, no UTF-8", sft.get_args, [f"--{flag}", "caf\udce9"])


INPUTS = [  # script, flag, the path in the output folder, words
    ("sft", "data_path", "nonfinite_rank0.jsonl", "holds --data_path, Move it"),
    ("sft", "data_path", "checkpoints/step-2/rows.jsonl", "holds --data_path, Move it"),
    ("sft", "data_path", ".", "--data_path"),
    ("sft", "data_path", "..", "is inside --data_path"),
    ("ppo", "unsup_data_path", "samples.jsonl", "holds --unsup_data_path, Move it"),
    ("ppo", "reward_fn", "checkpoints/step-2/f.py:f", "holds --reward_fn, Move it"),
    ("ppo", "gold_fn", "ema/config.json:f", "holds --gold_fn, Move it"),
    ("ppo", "ds_config", "config.json", "holds --ds_config, Move it"),
    ("ppo", "reward_model_name_or_path", "critic", "--reward_model_name_or_path"),
]


@pytest.mark.parametrize(
    "script, flag, name, words", INPUTS, ids=[f"{i[1]} {i[2]}" for i in INPUTS]
)
def test_what_a_run_reads_is_not_what_it_removes(tmp_path, capsys, script, flag, name, words):
    """After a loss that was not finite the message points to nonfinite_rank*.jsonl: who gives it to
    --data_path, with --overwrite, would have it deleted. And an output folder in the data folder
    would be read as data by the next run."""
    output = tmp_path / "runs/output"
    end(begin(output), "ema", "critic")
    checkpoint(output)
    for file in ("nonfinite_rank0.jsonl", "samples.jsonl", "checkpoints/step-2/rows.jsonl"):
        (output / file).write_text("{}")
    (output / "checkpoints/step-2/f.py").write_text("")
    args = get_args(output, "--overwrite", f"--{flag}", f"{output}/{name}", script=script)
    before = tree(tmp_path)
    refused(capsys, words, output_folder.check, args)
    assert tree(tmp_path) == before


# --------------------------------------------------------------------------------------------------
# What --resume compares
# --------------------------------------------------------------------------------------------------
CHANGES = """top_p 0.9 | top_k 5 | stop x | min_new_tokens 2 | reward_fn b.py:f | reward_fn a.py:g |
    reward_combine min | unsup_data_path x | critic_warmup_steps 3 | lr_scheduler_type linear |
    reward_model_name_or_path other | enable_ema 1 | seed 3 | advantage rloo""".split("|")
SAME = """enable_ema 0 | learning_rate 1 | per_device_training_batch_size 1 | zero_stage 1 |
    reward_fn moved/a.py:f | save_steps 7 | reward_model_name_or_path moved/judge""".split("|")


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
def test_resume_compares_what_shapes_the_run(tmp_path, capsys, change):
    """Another sampling, judge or schedule is another run; another rate or layout, or a folder that
    has moved, is not. (Several prompts' flags at once, so that both sides pass PPO's own rules.)"""
    flag, value = change.split()
    rest = ["--enable_ema", "1"] if flag == "enable_ema" and value == "0" else []
    rest += ["--reward_fn", "a.py:f", "--reward_model_name_or_path", "judge"]
    rest += ["--samples_per_prompt", "2", "--allow_unstable", "1", "--enable_ema", "0"]
    begin(tmp_path, *rest, script="ppo").release()
    checkpoint(tmp_path)
    if flag == "learning_rate":
        flag = "actor_learning_rate"
    now = [*rest, f"--{flag}", value, "--resume"]
    if flag == "enable_ema" and value == "0":  # None in the record means the same
        record = json.loads((tmp_path / "args.json").read_text())
        (tmp_path / "args.json").write_text(json.dumps({**record, "enable_ema": None}))
    args = get_args(tmp_path, *now, script="ppo")
    if change in SAME:
        return output_folder.check(args)
    refused(capsys, f"begun with --{flag}, {value}", output_folder.check, args)


def test_another_scripts_run_is_not_resumed(tmp_path, capsys):
    begin(tmp_path, script="sft").release()
    checkpoint(tmp_path)
    args = get_args(tmp_path, "--resume", script="reward")
    refused(capsys, "begun with sft.py, reward.py", output_folder.check, args)


THIS = {"rows": 8, "data_rows": 40, "data_fingerprint": 7, "shape": {"ranks": 2, "model": 2}}
THIS |= {"weights": {"model a": (2, 3), "model b": (4,)}, "optimizers": {"model": "FusedAdam"}}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"data_fingerprint": 8}, "as many rows, other texts"),
        ({"weights": {"model a": (2, 3)}}, "another model, model b is missing, (4,)"),
        ({"weights": {**THIS["weights"], "model a": (3, 3)}}, "model a is (3, 3), (2, 3)"),
        ({"weights": {"actor a": (2, 3)}}, "another model, actor a is (2, 3), missing"),
        ({"optimizers": {"model": "AdamW"}}, "AdamW, FusedAdam, compiler, step numbers"),
    ],
)
def test_a_checkpoint_says_what_it_belongs_to(capsys, change, words):
    """Edited data with as many rows, one more layer, another script's model: one message in the
    place of pages of keys. And FusedAdam keeps its step number where torch's AdamW does not look:
    it would go on from step 0, in silence."""
    args = get_args("nowhere")
    checkpoints.refuse_others(args, Path("step-2"), THIS, THIS)
    refused(
        capsys, words, checkpoints.refuse_others, args, Path("step-2"), {**THIS, **change}, THIS
    )


def test_the_fingerprint_is_that_of_the_contents():
    """Not of how a dataset was made: a data folder may have moved, and libraries hash their own
    state. A changed token changes it, and so does another order."""
    table = {"prompt": ["a", "b"], "responses": [[[1, 2]], [[3]]]}
    made = datasets.Dataset.from_dict(table)
    longer = datasets.Dataset.from_dict({name: [*v, v[0]] for name, v in table.items()})
    assert rows.fingerprint(made) == rows.fingerprint(longer.select([0, 1]))
    edited = datasets.Dataset.from_dict({**table, "responses": [[[1, 2]], [[4]]]})
    found = {rows.fingerprint(each) for each in (made, edited, made.select([1, 0]))}
    assert len(found) == 3


def test_a_plain_file_is_no_checkpoint(tmp_path):
    checkpoint(tmp_path, 2)
    (tmp_path / "checkpoints/step-4").write_text("")
    found = checkpoints.whole_checkpoints(get_args(tmp_path))
    assert [folder.name for folder in found] == ["step-2"]


# --------------------------------------------------------------------------------------------------
# Around it
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("finished", [False, True])
def test_only_an_unfinished_run_is_called_so(tmp_path, capsys, finished):
    """A model folder may be broken in many ways; --resume helps if its run has not ended."""
    folder = begin(tmp_path)
    end(folder) if finished else folder.release()
    with pytest.raises(SystemExit):
        model_folders.load_config(str(tmp_path))
    assert ("--resume" in capsys.readouterr().err) == (not finished)
