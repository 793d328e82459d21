"""No run is lost: killed, starved of disk, hung or told to stop, it goes on where it stood.

Each scene is a real run of sft.py on two ranks under ZeRO 2: five steps, checkpoints after steps 2
and 4. What it ends with is compared with a run that nothing befell.
"""

import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch

from machinery import ranks
from tests import kit, runs
from tools import export

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
RUNS = {"sft_zero0": 0, "sft_zero3": 3, "reward_zero2": 2, "ppo_zero2": 2}


# --------------------------------------------------------------------------------------------------
# Scenes
# --------------------------------------------------------------------------------------------------
def no_more_disk():
    """From now on this process cannot write files longer than 20 kB: the kernel's own error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def hang_up():
    os.kill(os.getpid(), signal.SIGHUP)


def lose_reader():
    """From now on nobody reads what this process prints: `| head`, a closed terminal."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def ctrl_c_twice():
    ctrl_c()
    ctrl_c()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(60)


def fail():
    raise ValueError("a bug of the user's")


def act(script, argv, kill_at, step, fault, rank, wait):
    """Makes a run in one of its forked ranks.

    wait: ranks.WAIT_MINUTES, how long a rank waits for another.

    kill_at: SIGKILL for all ranks before rank 0's so many-th file operation in the output folder,
    or before the first that has all these words. fault: a function of this module that is called
    at the end of step `step`, in rank `rank` (None: in all).
    """
    from machinery import ranks
    from machinery.run import Run

    ranks.WAIT_MINUTES = wait
    if "nohup" in argv:
        argv.remove("nohup")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    count, here, log = 0, int(os.environ["RANK"]), Run.log

    def count_touches(event, details):
        nonlocal count
        if event in TOUCHES and str(details[0]).startswith(argv[-1]):
            count += 1
            words = kill_at.split() if isinstance(kill_at, str) else []
            named = words and all(word in f"{event} {details}" for word in words)
            if named or count == kill_at:
                os.killpg(0, signal.SIGKILL)

    def log_and_act(run, *args, **options):
        log(run, *args, **options)
        if fault and run.step == step and rank in (None, here):
            globals()[fault]()

    if here == 0:
        sys.addaudithook(count_touches)
    Run.log = log_and_act
    try:
        kit.call_main(script, argv)
    finally:
        if here == 0:
            Path(f"{argv[-1]}.touches").write_text(str(count))


def play(folder, *more, script="sft", zero=2, ranks=2, kill_at=None, step=0, fault=None, **who):
    """Makes a run in `folder`. who: `only` one rank is at fault, `wait` (as in act). Returns
    kit.Done."""
    options = runs.run(script, "--save_steps 2", zero=zero)["flags"]
    argv = [*runs.base_flags(script, runs.base()), *options, *map(str, more)]
    argv += ["--num_samples", "0"] if script == "sft" else []
    argv += ["--output_dir", str(folder)]
    who = who.get("only"), who.get("wait", 30)
    done = kit.fork(act, ranks, script, argv, kill_at, step, fault, *who, meet="")
    done.folder = Path(folder)
    return done


def kept(folder):
    return sorted(path.name for path in folder.glob("checkpoints/*"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The run that nothing befell, with both of its checkpoints."""
    done = play(tmp_path_factory.mktemp("whole") / "run", "--keep_checkpoints", 2)
    assert done.codes == [0, 0], done
    return done.folder


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run, stopped after step 2."""
    left_out = shutil.ignore_patterns("config.json", "step-4")
    return shutil.copytree(whole, tmp_path / "run", ignore=left_out)


# --------------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------------
def test_killed_three_times_and_resumed_it_is_the_same_run(whole, tmp_path):
    """SIGKILL gives no time to tidy up. It comes here while the first checkpoint is written (none
    counts yet, so the run starts anew), while an old checkpoint is removed (the new one counts
    already), and while the model is saved (no config.json yet, so nobody takes it for finished)."""
    folder = tmp_path / "run"
    moments = [  # and what is there then, and counts
        ("open step-2/done", ["step-2"], []),
        ("shutil.rmtree step-2", ["step-2", "step-4"], ["step-4"]),
        ("os.rename config.json", ["step-2", "step-4"], ["step-4"]),
    ]
    for kill_at, left, count in moments:
        done = play(folder, *["--resume"] * folder.exists(), kill_at=kill_at)
        assert done.codes == [-9, -9] and kept(folder) == left, done
        assert sorted(path.parent.name for path in folder.glob("checkpoints/*/done")) == count
        assert not (folder / "config.json").exists()
    assert (tmp_path / "run.old-1/args.json").exists(), "what began anew was moved aside"
    done = play(folder, "--resume")
    assert done.codes == [0, 0] and kit.outcome(folder) == kit.outcome(whole), done
    assert "and is now" not in done.out, "no flag has changed"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_any_moment_it_is_the_same_run(name, tmp_path):
    """Five moments of each of four runs, spread over all that rank 0 does in the output folder."""
    script, zero = name.split("_")[0], RUNS[name]
    whole = play(tmp_path / "whole", script=script, zero=zero)
    assert whole.codes == [0, 0], whole
    touches = int((tmp_path / "whole.touches").read_text())
    for number in range(5):
        folder = tmp_path / str(number)
        kill_at = 2 + round((touches - 3) * (4 * number + list(RUNS).index(name)) / 19)
        assert -9 in play(folder, script=script, zero=zero, kill_at=kill_at).codes
        resume = ["--resume"] * (folder / "args.json").exists()
        done = play(folder, *resume, script=script, zero=zero)
        over = "is finished" in done.err  # killed when config.json was in its place
        assert done.codes == [0, 0] or over, (kill_at, touches, done)
        assert kit.outcome(folder) == kit.outcome(whole.folder), (kill_at, touches)


# --------------------------------------------------------------------------------------------------
# Damaged checkpoints, a full disk, told to stop
# --------------------------------------------------------------------------------------------------
def test_a_checkpoint_that_is_not_done_is_passed_over_in_words(whole, tmp_path):
    """The one before is used, the message names the folder, and the next save takes its place."""
    ignored = shutil.ignore_patterns("config.json")
    folder = shutil.copytree(whole, tmp_path / "run", ignore=ignored)
    (folder / "checkpoints/step-4/done").unlink()
    done = play(folder, "--resume")
    assert done.codes == [0, 0] and kit.outcome(folder) == kit.outcome(whole), done
    assert re.search(r"step-4 is passed over: .*\n(.*\n)*resumed from .*step-2", done.out), done
    assert kept(folder) == ["step-2", "step-4"]  # it keeps two, as it was told at its start
    assert (folder / "checkpoints/step-4/done").exists()


@pytest.mark.parametrize("file", ["rank0.pt", "model/state/mp_rank_00_model_states.pt"])
def test_a_checkpoint_that_cannot_be_read_is_refused_in_words(whole, tmp_path, file):
    """What a disk has lost of a checkpoint that was done is seen. The message says how the one
    before it is taken."""
    ignored = shutil.ignore_patterns("config.json")
    folder = shutil.copytree(whole, tmp_path / "run", ignore=ignored)
    file = folder / "checkpoints/step-4" / file
    os.truncate(file, file.stat().st_size // 2)
    before = kit.tree(folder)
    done = play(folder, "--resume")
    assert 2 in done.codes and "Traceback" not in done.err, done
    assert "step-4 cannot be read" in done.err and "delete its file `done`" in done.err, done
    assert kit.tree(folder) == before


def test_a_full_disk_costs_no_checkpoint(stopped):
    """The write of step 4's checkpoint fails. Step 2's is there still, and step 4's does not count.
    The traceback shows what was being written."""
    done = play(stopped, "--resume", fault="no_more_disk", step=4)
    assert done.codes == [1, 1], done
    assert (stopped / "checkpoints/step-2/done").exists()
    assert not (stopped / "checkpoints/step-4/done").exists()
    assert re.search(r"\[rank\d\]: .*checkpoints\.py", done.err), done
    done = play(stopped, "--resume")  # there is room again
    assert done.codes == [0, 0], done


def test_a_signal_saves_a_checkpoint_and_a_second_ctrl_c_does_not(stopped):
    """To tell one rank is enough: all agree, save after the same step, and leave with code 1. Who
    presses Ctrl-C again means it: nothing more is written. (test_resumed_runs.py has a SIGTERM.)"""
    more = ["--keep_checkpoints", 2, "--resume"]
    done = play(stopped, *more, fault="ctrl_c_twice", step=3, only=1)
    assert 1 in done.codes and kept(stopped) == ["step-2"], done
    done = play(stopped, *more, fault="ctrl_c", step=3, only=1)
    assert done.codes == [1, 1] and kept(stopped) == ["step-2", "step-3"], done
    assert "interrupted after step 3" in done.out and not (stopped / "config.json").exists()


def test_a_closed_terminal_saves_a_checkpoint(stopped):
    """It sends SIGHUP, which `nohup` has a run ignore."""
    more = ["--keep_checkpoints", 2, "--resume"]
    done = play(stopped, *more, fault="hang_up", step=3)
    assert done.codes == [1, 1] and kept(stopped) == ["step-2", "step-3"], done
    done = play(stopped, *more, "nohup", fault="hang_up", step=4)
    assert done.codes == [0, 0] and (stopped / "config.json").exists(), done


def test_when_nobody_reads_what_it_prints_a_run_saves_a_checkpoint(stopped):
    """As in `| head`. It is noticed at the next line that rank 0 prints."""
    shutil.rmtree(stopped / "checkpoints/step-2")
    done = play(stopped, "--overwrite", fault="lose_reader", step=2, only=0)
    assert done.codes == [1, 1] and kept(stopped) == ["step-3"], done
    assert "Traceback" not in done.err and "error: " not in done.err, done
    done = play(stopped, "--resume")
    assert done.codes == [0, 0], done


def tokenise(folder):
    """Maps rows in four processes, which take their time and leave their numbers."""
    os.setpgid(0, 0)

    def take_long(row):
        (folder / str(os.getpid())).touch()
        time.sleep(60)

    with ranks.unhurried():
        datasets.Dataset.from_dict({"row": [*range(8)]}).map(take_long, num_proc=4)


@pytest.mark.parametrize("tell", [os.kill, os.killpg])
def test_who_is_told_to_stop_while_rows_are_tokenised_leaves_no_process(tmp_path, tell):
    """Neither those that share the work nor the one that they tell of it; also where all are told,
    as DeepSpeed's launcher does."""
    process = multiprocessing.get_context("fork").Process(target=tokenise, args=(tmp_path,))
    process.start()
    wait_until(lambda: len([*tmp_path.iterdir()]) == 4)
    tell(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == -signal.SIGTERM
    wait_until(lambda: not in_group(process.pid))


def wait_until(true, seconds=20):
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late
        time.sleep(0.05)


def in_group(number):
    """Returns whether any process is in a group."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# A rank that is gone
# --------------------------------------------------------------------------------------------------
def test_when_a_rank_is_gone_the_others_stop(stopped):
    """Killed by the kernel for its memory, a rank says nothing: the others say where they were."""
    done = play(stopped, "--resume", fault="die", step=3, only=1)
    assert done.codes == [1, -9], done
    assert "[rank0]: " in done.err and "gloo" in done.err and "[rank1]: " not in done.err, done


def test_a_rank_that_fails_shows_its_own_traceback(stopped):
    """torch marks each of its lines with the number of the rank."""
    done = play(stopped, "--resume", fault="fail", step=3, only=1)
    assert '[rank1]:     raise ValueError("a bug of the user\'s")' in done.err, done
    assert "[rank1]: ValueError: a bug of the user's" in done.err


@pytest.mark.slow
def test_when_a_rank_hangs_each_rank_prints_where_it_is(stopped):
    """Under NCCL a wait that is too long raises no error, but ends the process. So shortly before
    its end each rank prints its stack: one is not where the others are."""
    done = play(stopped, "--resume", fault="hang", step=3, only=1, wait=0.2)
    assert done.codes[0] == 1 and "[rank0]: " in done.err, done
    assert done.err.count("Timeout (0:00:09)!") == 1, done  # a second apart, or the stacks mix
    assert done.err.count("Timeout (0:00:10)!") == 1, done
    assert " in hang\n" in done.err and " in all_reduce\n" in done.err


def take_long(minutes):
    """Takes longer than a rank may wait for another, in all ways in which nothing is wrong, and in
    one in which something is. Returns what a barrier raises then, on the ranks that wait."""
    import deepspeed

    from machinery import patches, ranks

    ranks.WAIT_MINUTES, ranks.NOTED_EVERY = minutes, 0.1
    deepspeed.init_distributed(verbose=False, timeout=patches.wait_at_most(minutes))
    seconds = minutes * 60
    ranks.go_on()
    for _ in ranks.shown(range(10), "evaluation"):  # no piece takes long
        time.sleep(seconds / 5)
    with ranks.unhurried():  # nobody waits
        time.sleep(1.5 * seconds)
    print("a wait begins", file=sys.stderr, flush=True)
    if ranks.get_rank() == 0:
        time.sleep(2 * seconds)
        return None
    with pytest.raises(RuntimeError) as caught:
        ranks.barrier()
    return str(caught.value)


@pytest.mark.slow
def test_what_takes_long_is_no_hang():
    """An evaluation of an hour, or a download, ends no run, and no rank prints stacks. Only who
    waits in one piece is told of, and the wait then ends."""
    done = kit.fork(take_long, 2, 0.1, meet="")
    before, after = done.err.split("a wait begins", 1)
    assert done.code == 0 and "Timeout" not in before, done
    stacks = [after.count(f"Timeout (0:00:0{seconds}.5") for seconds in (4, 5)]  # 4.5, then 1 more
    assert stacks == [1, 1], done
    assert done.results[0] is None and "gloo" in done.results[1].lower()


def test_a_port_that_is_taken_is_named(tmp_path):
    """No other rank has died: they were looking for each other."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = runs.base_flags("sft", runs.base())
        env = {"MASTER_PORT": str(port)}
        done = kit.run("sft", *flags, folder=tmp_path / "run", env=env, ranks=2, expect=None)
    assert done.codes[0] == 1, done
    assert "ddress already in use" in done.err and str(port) in done.err, done


# --------------------------------------------------------------------------------------------------
# Other ranks, other batches, other rates
# --------------------------------------------------------------------------------------------------
def test_a_run_goes_on_in_another_layout(whole, stopped):
    """Other micro-batches: as many rows a step, so the same run. Not to the bit, for sums are taken
    in another order."""
    sizes = ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 4]
    done = play(stopped, "--resume", *sizes)
    assert done.code == 0, done
    found, expected = kit.weights(stopped), kit.weights(whole)
    assert max((found[key] - expected[key]).abs().max() for key in expected) < 1e-6


@pytest.mark.parametrize("ranks, steps, zero", [(1, 4, 2), (4, 1, 2), (2, 2, 1)])
def test_other_ranks_or_another_stage_are_refused(stopped, ranks, steps, zero):
    """With as many rows a step. The message names DeepSpeed's tool."""
    before, sizes = kit.tree(stopped), ["--gradient_accumulation_steps", steps]
    done = play(stopped, "--resume", *sizes, ranks=ranks, zero=zero)
    assert 2 in done.codes and "ds_to_universal" in done.err, done
    assert done.rule == "resume-shape" and kit.tree(stopped) == before, done


def test_torchs_adam_goes_on_from_its_step(tmp_path):
    """Where DeepSpeed's own is not built."""
    flags = runs.run("sft", "--save_steps 2", zero=3)["flags"]
    words = [*runs.base_flags("sft", runs.base()), *flags, "--num_samples", "0"]
    words = shlex.join(map(str, words))
    whole, run = tmp_path / "whole", tmp_path / "run"
    first = f"COMPILER=0 RANKS=2 sft {words} --keep_checkpoints 2 --output_dir {whole}"
    assert kit.start(first).codes == [0, 0]
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("config.json", "step-4"))
    done = kit.start(f"COMPILER=0 RANKS=2 sft {words} --resume --output_dir {run}")
    assert done.code == 0 and "torch's AdamW" in done.out, done
    assert kit.outcome(run) == kit.outcome(whole)


def test_a_folders_name_is_no_pattern(stopped):
    """DeepSpeed takes the path of a checkpoint for one: that of a folder with a [ matches none."""
    folder = stopped.rename(stopped.with_name("run[1]"))
    done = play(folder, "--resume")
    assert done.codes == [0, 0], done
    export.export(folder / "checkpoints/step-4", folder / "exported")


def test_a_resumed_run_takes_the_settings_that_it_is_given(stopped):
    """Who resumes with a lower rate must not train on with the old one, which schedule and
    optimizer had kept: the weights stay where the checkpoint has them. Weight decay, betas and the
    largest norm are the new ones, too, as the next checkpoint shows. The run says which flags have
    changed, and no others: who forgets one on the line of --resume sees that, also where it was
    --dropout 0, which is not what is taken without it."""
    more = "--weight_decay 0.3 --adam_betas 0.5,0.6 --max_grad_norm 0.7 --dropout 0".split()
    done = play(stopped, "--resume", "--learning_rate", 1e-9, *more)
    assert done.codes == [0, 0], done
    said = re.findall(r"--(\w+) was .+ and is now (.+)", done.out)
    betas, decay = ("adam_betas", "[0.5, 0.6]"), ("weight_decay", "0.3")
    rate, norm = ("learning_rate", "1e-09"), ("max_grad_norm", "0.7")
    assert said == [betas, ("dropout", "0.0"), rate, norm, decay], done
    rates = [line["learning_rate"] for line in kit.metrics(stopped)[1:]]
    assert min(rates[:2]) > 1e-3 and max(rates[2:]) <= 1e-9
    file = stopped / "checkpoints/step-4/model/state/mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)["module"]
    now = kit.weights(stopped)
    assert max((saved[key] - now[key]).abs().max() for key in now) < 1e-6
    file = file.with_name("zero_pp_rank_0_mp_rank_00_optim_states.pt")
    saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
    (group, _) = saved["base_optimizer_state"]["param_groups"]
    assert (group["weight_decay"], [*group["betas"]], saved["clip_grad"]) == (0.3, [0.5, 0.6], 0.7)
