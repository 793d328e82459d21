"""No run is ever lost: killed, starved of disk, hung, told to stop, or fed bad data, it goes on, or
says in words what is wrong.

kill.py plays the scenes, each a real run of sft.py on two ranks, in one launch of a minute or two.
`python tests/kill.py` by itself kills at 20 moments in all three scripts; docs/reliability.md has
what it found.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import sft
from machinery.base import ranks
from machinery.data import formats, rows, sources
from machinery.models import model_folders
from machinery.run import checkpoints, crash, launch, output_folder
from tests import workers

ROOT = workers.ROOT


@functools.cache
def scenes():
    """What kill.py saw: {scene: exit codes, output, checkpoints left, and whether it ended as the
    run that nothing befell}."""
    base = workers.shared_folder()
    code, log = workers.start_command(
        [sys.executable, ROOT / "tests/kill.py", base / "scenes.json"], base
    )
    assert code == 0, log[-6000:]
    return json.loads((base / "scenes.json").read_text())


# --------------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------------
def test_killed_three_times_and_resumed_it_is_the_same_run():
    """SIGKILL gives no time to tidy up. It comes here while the first checkpoint is written (none
    counts yet, the run starts anew), while an old checkpoint is removed (the new one counts
    already), and while the model is saved (no config.json yet, so nobody takes it for finished).
    After that weights, metrics and samples are the same to the bit."""
    seen = [
        scenes()[name]
        for name in (
            "killed in the first checkpoint",
            "killed in the second",
            "killed as the model is saved",
        )
    ]
    assert [scene["codes"] for scene in seen] == [[-9, -9]] * 3 and not any(
        scene["finished"] for scene in seen
    )
    assert [scene["checkpoints"] for scene in seen] == [
        ["unfinished"],
        ["step-2", "step-4"],
        ["step-4"],
    ]
    last = scenes()["resumed after three kills"]
    assert last["codes"] == [0, 0] and last["identical"], last["log"]
    assert last["checkpoints"] == ["step-4"]  # --keep_checkpoints 1


def test_after_seven_mishaps_it_is_still_the_same_run():
    """A rank that died, one that failed, one that hung, Ctrl-C twice, a full disk, a time limit,
    and a checkpoint cut short: whatever made it stop, the resumed run ends with the weights and
    metrics of the one that nothing befell."""
    last = scenes()["newest cut short"]
    assert last["codes"] == [0, 0] and last["identical"], last["log"]


# --------------------------------------------------------------------------------------------------
# Damaged checkpoints
# --------------------------------------------------------------------------------------------------
def test_a_damaged_checkpoint_is_passed_over_in_words():
    """Half a file is not half a checkpoint: it is none. The newest whole one is used, the message
    names the file that is not as it was written, and the damaged folder neither counts among
    --keep_checkpoints nor stands in the way."""
    scene = scenes()["newest cut short"]
    assert re.search(r"step-3 is not whole.*\.pt\n(.*\n)?resumed from .*step-2", scene["log"]), (
        scene["log"]
    )
    assert scene["checkpoints"] == ["step-4"]


def test_when_no_checkpoint_is_whole_nothing_is_touched():
    """Exit code 2, and the folders stay for whoever wants to look into them."""
    scene = scenes()["none whole"]
    assert scene["codes"] == [2, 2] and scene["checkpoints"] == ["step-2", "step-4"]
    assert "error: --resume: no checkpoint" in scene["log"] and "Traceback" not in scene["log"]


@pytest.mark.parametrize(
    "harm",
    ["nothing", "cut", "one byte", "removed", "manifest removed", "manifest cut"]
    + [f"manifest {text}" for text in ("[]", "3", "{}", "null", '{"model/state.pt": 3}')],
)
def test_every_kind_of_damage_is_seen(tmp_path, harm):
    """Sizes alone would miss an edited byte, and a list of files alone a file that is gone: the
    manifest has both."""
    folder, file = tmp_path / "step-2", tmp_path / "step-2/model/state.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(range(256)) * 8)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"model/state.pt": checkpoints.checksum(file)}))
    if harm == "one byte":
        file.write_bytes(file.read_bytes().replace(b"\x07", b"\x08", 1))
    elif harm[-1] in "]3}l":
        manifest.write_text(harm.removeprefix("manifest "))
    elif harm.endswith("cut"):
        os.truncate(manifest if "manifest" in harm else file, 20)
    elif harm != "nothing":
        (manifest if "manifest" in harm else file).unlink()
    expected = ["manifest.json"] if "manifest" in harm else ["model/state.pt"]
    expected = [] if harm == "nothing" else ["model/state.pt"] if "state" in harm else expected
    assert checkpoints.damage(folder) == expected


# --------------------------------------------------------------------------------------------------
# Disk full, told to stop, a rank gone
# --------------------------------------------------------------------------------------------------
def test_a_full_disk_costs_no_checkpoint():
    """The write of step 4's checkpoint fails. Step 2's is there still, the message says so without
    a traceback, exit code 1."""
    scene = scenes()["disk full"]
    assert (
        scene["codes"] == [1, 1]
        and "step-2" in scene["checkpoints"]
        and "step-4" not in scene["checkpoints"]
    )
    assert re.search(
        r"error: rank 0 of 2 stopped writing .*/step-4: .*\n.*GB are free there.*--resume",
        scene["log"],
    ), scene["log"]
    assert "Traceback" not in scene["log"]


@pytest.mark.parametrize("writing", ["run/checkpoints/step-4", "run", "run/critic"])
@pytest.mark.parametrize("kept", [True, False])
def test_resume_is_advised_only_where_there_is_a_checkpoint(tmp_path, capfd, writing, kept):
    """With --save_steps 0 a disk that is full at the last save leaves nothing to go on from."""
    (tmp_path / "run/checkpoints" / ("step-2" if kept else "unfinished")).mkdir(parents=True)
    phase, error = crash.Phase(), OSError(28, "No space left on device")
    phase.note(f"writing {tmp_path / writing}")
    phase.report(OSError, error, None)
    said = capfd.readouterr().err
    assert "GB are free there" in said and "No space left" in said
    assert ("go on with --resume" in said) == kept and ("no checkpoint" in said) != kept


def test_memory_and_other_ranks_are_no_matter_of_the_disk(capfd):
    """While a model is written, its weights are gathered: that may fail for other reasons."""
    for error in (torch.OutOfMemoryError("out of memory"), RuntimeError("gloo: timed out")):
        phase = crash.Phase()
        phase.note("writing output/sft")
        phase.report(type(error), error, None)
        assert "GB are free" not in capfd.readouterr().err


def in_process(folder, **flags):
    """Arguments and facts for checkpoints.save and load on one rank, without engines."""
    args = argparse.Namespace(output_dir=str(folder), keep_checkpoints=1, **flags)
    facts = {"rows": 1, "data_rows": 1, "data_fingerprint": "", "frozen_weights": 7}
    return args, facts


def test_an_old_checkpoint_that_cannot_be_removed_stops_nobody(tmp_path, monkeypatch, capfd):
    """Somebody may be copying it. The new one is there, and the next save tries again."""
    args, facts = in_process(tmp_path, offload_states=False)
    checkpoints.save(args, {}, 1, {"state": {}, **facts})
    monkeypatch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(16, "busy")))
    checkpoints.save(args, {}, 2, {"state": {}, **facts})
    assert "step-1 cannot be removed" in capfd.readouterr().out
    monkeypatch.undo()
    checkpoints.save(args, {}, 3, {"state": {}, **facts})
    assert [folder.name for folder in checkpoints.whole_checkpoints(args)] == ["step-3"]


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path, capfd):
    """--resume with a smaller --max_steps would save a later model as the one of that step."""
    args, facts = in_process(tmp_path, tensor_parallel_size=1)
    checkpoints.save(args, {}, 5, {"state": {}, **facts})
    assert checkpoints.load(args, {}, {}, facts, 5)[0] == 5
    with pytest.raises(SystemExit):
        checkpoints.load(args, {}, {}, facts, 4)
    assert "step-5 is beyond the run's last step, 4" in capfd.readouterr().err


def test_frozen_models_must_be_those_of_before(tmp_path, capfd):
    """A reward model that was trained again in its folder would change the reward in the middle of
    a run. A copy of the same weights elsewhere is the same model, and the hub's are not looked at.
    """
    for name, seed in (("one", 1), ("copy", 1), ("other", 2)):
        torch.manual_seed(seed)
        folder = tmp_path / name
        folder.mkdir()
        save_file({"weight": torch.randn(300, 300)}, folder / "model.safetensors")

    def digest(judge):
        actor = {"actor_model_name_or_path": "hub/name"}
        judges = {"reward_model_name_or_path": [str(tmp_path / judge)]}
        return checkpoints.frozen_weights(argparse.Namespace(**actor, **judges))

    assert digest("one") == digest("copy") != digest("other")
    assert checkpoints.frozen_weights(argparse.Namespace(model_name_or_path="x")) == 0
    args, facts = in_process(tmp_path, tensor_parallel_size=1)
    checkpoints.save(args, {}, 5, {"state": {}, **facts})
    with pytest.raises(SystemExit):
        checkpoints.load(args, {}, {}, {**facts, "frozen_weights": 8}, 5)
    assert "weights of the frozen models" in capfd.readouterr().err


def test_ranks_that_read_other_data_are_refused(monkeypatch, capfd):
    """A machine with an older copy would draw other rows, or stop in the middle of an epoch."""
    monkeypatch.setattr(ranks, "all_gather_objects", lambda items: [*items, {"data_rows": 9}])
    ranks.fail_unless_alike({"data_rows": 9}, "other data", "Advice.")
    with pytest.raises(SystemExit):
        ranks.fail_unless_alike({"data_rows": 8}, "other data", "Advice.")
    said = capfd.readouterr().err
    assert "rank 0 has {'data_rows': 8}, rank 1 {'data_rows': 9}.\n  Advice." in said


def test_a_folder_that_is_not_shared_is_refused(tmp_path, monkeypatch, capfd):
    """With node-local folders a run would fail at its first checkpoint only."""
    args = argparse.Namespace(output_dir=str(tmp_path), overwrite=False, resume=False, max_steps=1)
    monkeypatch.setattr(output_folder, "inputs", lambda args: [])
    monkeypatch.setattr(output_folder.monitors, "files", lambda args: [])
    folder = output_folder.OutputFolder(args)
    folder.lock.take()
    folder.refuse_unshared()
    folder.lock.release()
    monkeypatch.setattr(output_folder.time, "sleep", lambda seconds: None)
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr(output_folder.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(ranks, "all_gather_objects", lambda items: [True, *items])
    with pytest.raises(SystemExit):
        folder.refuse_unshared()
    assert "is not the same folder on all machines" in capfd.readouterr().err


def test_flags_that_may_change_are_named_when_they_do(capsys):
    """--resume takes another learning rate, and says so: args.json will hold the new one alone."""
    args = sft.get_args(["--preset", "toy", "--learning_rate", "0.5", "--resume"])
    flags = vars(sft.get_args(["--preset", "toy"])).items()
    before = json.loads(json.dumps({name: value for name, value in flags if name[0] != "_"}))
    output_folder.say_changes(args, before)
    said = (
        f"--resume with other flags than before: --learning_rate {before['learning_rate']} -> 0.5"
    )
    assert capsys.readouterr().out == said + "\n"
    output_folder.say_changes(sft.get_args(["--preset", "toy", "--resume"]), before)
    assert not capsys.readouterr().out


def test_srun_without_an_address_is_refused(monkeypatch, capfd):
    slurm = {"STEP_ID": "0", "PROCID": "0", "NTASKS": "2", "LOCALID": "0"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment["MASTER_ADDR"] = "host0"
    monkeypatch.setattr(os, "environ", environment)  # a rank's own is left behind in it
    with pytest.raises(SystemExit) as stop:
        launch.fill_environment()
    assert stop.value.code == 2 and "MASTER_PORT must be set" in capfd.readouterr().err
    environment["MASTER_PORT"] = "29500"
    launch.fill_environment()
    assert environment["WORLD_SIZE"] == "2" and environment["MASTER_ADDR"] == "host0"


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, capsys):
    """`datasets` reads one kind of file of a folder. An empty one, as a failed copy leaves, is an
    error beside full ones, too."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "Why?", "response": " So."}\n' * 3)
    assert len(sources.read_splits(str(tmp_path))[0]["train"]) == 6
    assert "not read" not in capsys.readouterr().out
    (tmp_path / "c.csv").write_text("prompt,response\nWhy?,So.\n")
    sources.read_splits(str(tmp_path))
    assert f"these files are not read: {tmp_path}/c.csv" in capsys.readouterr().out
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="b.jsonl is empty"):
        sources.read_splits(str(tmp_path))


def test_max_hours_saves_and_says_so():
    """One rank's clock is enough: all agree, save after the same step, and leave with a message of
    its own."""
    scene = scenes()["time is over"]
    assert (
        scene["codes"] == [1, 1]
        and scene["checkpoints"] == ["step-2", "step-3"]
        and not scene["finished"]
    )
    assert "--max_hours 1 are over after step 3" in scene["log"] and "--resume" in scene["log"]


def test_a_second_ctrl_c_leaves_at_once():
    """The first one saves, and saving can take long: who presses again means it. No checkpoint of
    step 3 is written."""
    scene = scenes()["ctrl-c twice"]
    assert scene["codes"] == [1, 1] and scene["checkpoints"] == ["step-2"]


@pytest.mark.parametrize(
    "name, code, words",
    [
        ("a rank dies", -9, "last heard of at step 3"),
        ("a rank hangs", 7, "last heard of at step 3, now in "),
        ("a rank fails", 1, "last heard of at step 3, stopped by ValueError: a bug of the user's"),
    ],
)
def test_when_a_rank_is_gone_the_others_say_which(name, code, words):
    """A rank that is killed (out of memory), that hangs, or that fails leaves the others waiting.
    They give up, after --timeout_minutes at the latest, and name the rank and what it was doing:
    that is where to look."""
    scene = scenes()[name]
    assert scene["codes"] == [1, code]
    assert (
        "rank 0 of 2 stopped at step 3: " in scene["log"] and f"rank 1 was {words}" in scene["log"]
    ), scene["log"]


HUNG = """
import datetime, os, signal, sys, time
from machinery.base import ranks
from machinery.run import crash
import torch
child = os.fork()
rank = int(child > 0)
ranks.get_rank, ranks.get_world_size = lambda: rank, lambda: 2
place = dict(init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(hours=1), **place)
phase = crash.Phase()
phase.watch(minutes=0.05)
phase.note("at step 3")
def reward_function():
    time.sleep(6)
if rank:
    reward_function()
    os.kill(child, signal.SIGKILL)
else:
    torch.distributed.all_reduce(torch.ones(1))
"""


def test_where_all_ranks_are_is_said_before_the_time_is_over(tmp_path):
    """Under NCCL a wait that is too long raises no error: the process is ended. So shortly before
    --timeout_minutes a thread prints where each rank is. Here rank 0 waits in a sum whose own limit
    is an hour, and rank 1 does not come. It is said once, by one rank."""
    command = [sys.executable, "-c", HUNG, tmp_path / "store"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = [line for line in run.stderr.splitlines() if re.match("warning:|  rank", line)]
    first, *others = lines
    assert "rank 0 has come no further for 0.0 minutes" in first, run.stderr
    assert len(others) == 2 and others[0].startswith("  rank 0: at step 3, now in ")
    assert others[0].endswith(" all_reduce") and others[1].endswith(" reward_function")


def test_a_bug_keeps_its_traceback():
    """Only what the environment does (disk, other ranks) is told in a line; an error in the code
    shows where it is."""
    assert 'raise ValueError("a bug of the user\'s")' in scenes()["a rank fails"]["log"]


# --------------------------------------------------------------------------------------------------
# Other ranks, other stages
# --------------------------------------------------------------------------------------------------
def test_a_run_goes_on_with_another_number_of_ranks():
    """Two ranks wrote the checkpoint, one goes on with twice the accumulation: the same rows in
    each step, so the same run. Not to the bit, for sums are taken in another order: fp32 weights
    end within 1e-6."""
    scene = scenes()["one rank"]
    print("largest difference of a weight:", scene["difference"])
    assert scene["codes"] == [0] and scene["difference"] < 1e-6, scene["log"]


@pytest.mark.parametrize("name", ["smaller batches", "larger batches"])
def test_out_of_memory_a_run_goes_on_with_smaller_batches(name):
    """Half the rows of a forward, twice the accumulation, on the same ranks: as many rows a step,
    so the same run. The loader's own position counts micro-batches, which are others now; taken at
    its word it dealt rows twice, or never ended."""
    scene = scenes()[name]
    assert scene["codes"] == [0, 0] and scene["difference"] < 1e-6, scene["log"]


def test_a_resumed_run_takes_the_learning_rate_that_it_is_given():
    """Who resumes with a lower one, because the loss went up, must not train on with the old one,
    which schedule and optimizer had kept: the weights stay, from the first step on, where the
    checkpoint has them."""
    scene = scenes()["other rate"]
    assert (
        scene["codes"] == [0, 0]
        and min(scene["rates"][:2]) > 1e-3
        and max(scene["rates"][2:]) <= 1e-9
    ), scene["log"]
    assert scene["moved"] < 1e-6 < 1e-3 < scenes()["one rank"]["moved"]


@pytest.mark.parametrize("mmap", [True, False])
def test_other_ranks_files_are_not_read_into_memory(tmp_path, mmap):
    """On another number of ranks, a rank puts its share together from all ranks' files. For 7B and
    8 ranks each would hold 28 GB of averages; mapped, a file takes memory only while it is used."""

    torch.save({"state": {"ema": torch.ones(2**24)}}, tmp_path / "rank1.pt")  # 64 MB
    saved = checkpoints.read(tmp_path / "rank1.pt", mmap=mmap)["state"]
    mapped = str(tmp_path / "rank1.pt") in open("/proc/self/maps").read()
    assert mapped == mmap, "the file's pages are the tensor's, or not"
    share = checkpoints.reshaped({"ema": torch.zeros(5)}, [saved])["ema"]
    assert share.tolist() == [1] * 5 and share.untyped_storage().nbytes() == 20


def test_what_comes_back_goes_where_it_lay():
    """A checkpoint is read into CPU memory; the average of weights that are on a GPU belongs there.
    (`meta` plays the GPU.)"""
    own = {"ema": {"w": torch.zeros(2, device="meta")}, "kl_coef": 0.1, "none": None}
    found = checkpoints.placed(own, {"ema": {"w": torch.ones(2)}, "kl_coef": 0.2, "none": None})
    assert (
        found["ema"]["w"].device.type == "meta"
        and found["kl_coef"] == 0.2
        and found["none"] is None
    )


def test_what_cannot_be_reshaped_is_refused_in_words():
    """Other rows in a step, or more data, would be another run, and DeepSpeed does not turn stage 2
    into 3: exit code 2, nothing touched."""
    for name, words in (
        ("one rank, other batch", "8 rows a step, and would now take 4"),
        ("other stage", "ZeRO stage 2, and this run has 3"),
        ("other rows", "had 22 rows, and now it has 25"),
    ):
        scene = scenes()[name]
        assert (
            scene["codes"] == [2] and words in scene["log"] and scene["checkpoints"] == ["step-2"]
        ), scene["log"]


# --------------------------------------------------------------------------------------------------
# Bad data: one bad line, number 6 of 40
# --------------------------------------------------------------------------------------------------
ROW = {"prompt": "Why?", "response": " So.", "chosen": " So.", "rejected": " No."}
EMPTY = "empty prompt or response"  # or one that is no text
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
# kind: (the line; its fate in step 1; its fate in step 2). A fate is 'error', 'kept', or the reason
# for which it is dropped.
LINES = {
    "broken JSON": ('{"prompt": "Why?", "response": ', "error", "error"),
    "JSON, but no object": ("[1, 2]", "error", "error"),
    "invalid UTF-8": (
        b'{"prompt": "Wh\xff\xfey?", "response": " So.", "chosen": " So.", "rejected": " No."}',
        "error",
        "error",
    ),
    "half a surrogate pair": (
        r'{"prompt": "Wh\ud800y?", "response": " So.", "chosen": " So.", "rejected": " No."}',
        "error",
        "error",
    ),
    "a control character as it is": (
        '{"prompt": "Wh\x01y?", "response": " So.", "chosen": " So.", "rejected": " No."}',
        "error",
        "error",
    ),
    "control characters, escaped": ({**ROW, "prompt": "Wh\x00\x01\x1by?"}, "kept", "kept"),
    "missing column": ({"prompt": "Why?", "chosen": " So."}, "kept", EMPTY),
    "null": ({**ROW, "prompt": None}, EMPTY, EMPTY),
    "numbers": ({**ROW, "prompt": 7, "response": 8, "chosen": 9}, "error", "error"),
    "a list of numbers": ({**ROW, "response": [1], "chosen": [2]}, "error", "error"),
    "an object": ({**ROW, "prompt": {"text": "Why?"}}, "error", "error"),
    "a number where only SFT looks": ({**ROW, "response": 8}, "error", "kept"),
    "text that looks like a date": ({**ROW, "prompt": "2024-01-08"}, "kept", "kept"),
    "empty prompt": ({**ROW, "prompt": ""}, EMPTY, EMPTY),
    "empty answer": ({**ROW, "response": "", "chosen": ""}, EMPTY, EMPTY),
    "nothing but whitespace": ({**ROW, "prompt": " \n\t\u2003"}, EMPTY, EMPTY),
    "chosen equal to rejected": ({**ROW, "rejected": " So."}, "kept", "chosen equals rejected"),
    "special tokens typed": ({**ROW, "prompt": "<eos><pad>?", "chosen": " <eos>"}, "kept", "kept"),
    "a long line": ({**ROW, "prompt": "word " * 50_000}, "kept", "kept"),
}


def load(tmp_path, capfd, monkeypatch, line, step, *flags):
    """Returns (exit code or None, what was said, prompts that are left) of the file with `line` in
    it."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    line = (
        line
        if isinstance(line, bytes)
        else line.encode()
        if isinstance(line, str)
        else json.dumps(line).encode()
    )
    good = [json.dumps({**ROW, "prompt": f"Why {i}?"}).encode() for i in range(39)]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join([*good[:5], line, *good[5:]]) + b"\n")
    (tmp_path / "test.jsonl").write_text(json.dumps({**ROW, "prompt": "When?"}) + "\n")
    args = sft.get_args(
        ["--data_path", str(tmp_path), "--data_split", "1,0,0" if step == 1 else "0,1,0", *flags]
    )
    prompts, code = [], None
    try:
        tokenizer = model_folders.load_tokenizer(str(ROOT / "toy/model"))
        stage = rows.STAGES[step - 1]
        prompts = rows.load_rows(args, tokenizer, stage, limit=64)[0]["prompt"]
    except SystemExit as stop:
        code = stop.code
    captured = capfd.readouterr()
    return code, captured.out + captured.err, list(prompts)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_an_error_or_dropped_and_counted(tmp_path, capfd, monkeypatch, kind, step):
    """A file that cannot be read stops the run, with file and line; so does a value that is no text
    where text belongs. A row that can be read and has nothing to learn from is dropped and counted,
    or with --strict an error. What merely looks odd is data."""
    line, *fates = LINES[kind]
    fate = fates[step - 1]
    code, said, prompts = load(tmp_path, capfd, monkeypatch, line, step)
    if fate == "error":
        assert code == 2 and "train.jsonl, line 6: " in said and "Traceback" not in said, said
        return
    assert code is None and len(prompts) == (40 if fate == "kept" else 39), said
    assert (f"train: dropped 1 of 40 rows: {fate}" in said) == (fate != "kept"), said
    code, said, _ = load(tmp_path, capfd, monkeypatch, line, step, "--strict")
    assert code == (None if fate == "kept" else 2)
    assert ("--strict" in said and f"train.jsonl, line 6: {fate}" in said) == (fate != "kept"), said


MALFORMED = {
    "no list": ({"messages": "Why?"}, "messages must be a list of messages, and is 'Why?'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages, 1: content must be text"),
    "no messages": ({"messages": ["Why?", "So."]}, "messages, 1: no message with a role"),
    "numbers": ({"chosen": [1], "rejected": [2]}, "chosen, 1: no message with a role"),
    "no text": (
        {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "So."}]},
        "messages, 1: content must be text, and is 7",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]},
        "messages, 1: content must be text, and is [{'type': 'image'",
    ),
    "a call of a tool before the last turn": (
        {
            "messages": [
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "content": "7"},
                {"role": "assistant", "content": "So."},
            ]
        },
        "messages, 2: content must be text, and is None. Calls of tools are not supported",
    ),
    "a pair with the user's turn last": (
        {"chosen": [*CHAT, {"role": "user", "content": "Hm?"}], "rejected": CHAT},
        "chosen does not end with a message of the assistant",
    ),
    "a pair with two prompts": (
        {"chosen": CHAT, "rejected": [{"role": "user", "content": "When?"}, CHAT[1]]},
        "chosen and rejected differ before their last messages",
    ),
    "a pair of a chat and a text": (
        {"chosen": CHAT, "rejected": "No."},
        "rejected must be a list of messages, and is 'No.'",
    ),
    "a prompt of texts": ({"prompt": ["Why?"]}, "prompt, 1: no message with a role"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_chat_is_refused(tmp_path, capfd, monkeypatch, kind):
    """Guessing what such a row means would train on the wrong text. The message names the file and
    the line; no stage takes the row."""
    row, words = MALFORMED[kind]
    for stage in rows.STAGES:
        with pytest.raises(formats.BadRow, match=re.escape(words)):
            rows.tokenise_row(row, None, stage, limit=64)
    code, said, _ = load(tmp_path, capfd, monkeypatch, row, 1)
    assert code == 2 and f"train.jsonl, line 6: {words}" in said and "Traceback" not in said, said


# --------------------------------------------------------------------------------------------------
# Trust
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("trusted", [False, True])
def test_code_that_comes_with_a_model_runs_only_when_asked_for(
    tmp_path, monkeypatch, capsys, trusted
):
    """A model folder may hold Python. Loading it runs that code as you: so --trust_remote_code is
    off, and the refusal names it."""
    monkeypatch.setenv("PROOF", str(tmp_path / "it_ran"))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}})
    )
    (tmp_path / "mine.py").write_text(
        "import os\nfrom transformers import PretrainedConfig\n"
        "open(os.environ['PROOF'], 'w').close()\n"
        "class MineConfig(PretrainedConfig):\n    model_type = 'mine'\n"
    )
    if trusted:
        assert model_folders.load_config(str(tmp_path), trusted).model_type == "mine"
    else:
        with pytest.raises(SystemExit) as stop:
            model_folders.load_config(str(tmp_path), trusted)
        assert stop.value.code == 2 and "--trust_remote_code" in capsys.readouterr().err
    assert (tmp_path / "it_ran").exists() == trusted
