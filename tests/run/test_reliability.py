"""No run is lost: killed, starved of disk, hung or told to stop, it goes on where it stood.

Each scene is a real run of sft.py on two ranks under ZeRO 2: five steps, checkpoints after steps 2
and 4. What it ends with is compared with a run that nothing befell.
"""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch

from machinery import ranks
from tests import kit, runs

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
RUNS = {"sft_zero0": 0, "sft_zero3": 3, "reward_zero2": 2, "ppo_zero2": 2}


# --------------------------------------------------------------------------------------------------
# Scenes
# --------------------------------------------------------------------------------------------------
def lose_reader():
    """From now on nobody reads what this process prints: `| head`, a closed terminal."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def hang():
    time.sleep(60)


def fail():
    raise ValueError("a bug of the user's")


FAULTS = {
    "lose_reader": lose_reader,
    "hang": hang,
    "fail": fail,
    "die": lambda: signal.raise_signal(signal.SIGKILL),
    "hang_up": lambda: signal.raise_signal(signal.SIGHUP),
    # a closed terminal in rank 0, Ctrl-C in rank 1
    "signals": lambda: signal.raise_signal((signal.SIGHUP, signal.SIGINT)[int(os.environ["RANK"])]),
    "ctrl_c_twice": lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)],
    # files longer than 20 kB cannot be written: the kernel's own error
    "no_more_disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
}


def act(script, argv, what):
    """Makes a run in one of its forked ranks.

    what: a dict of kill_at, SIGKILL for all ranks before rank 0's so many-th file operation in the
    output folder, or before the first that has all these words; of fault, one of FAULTS, at the end
    of step `step`, in rank `only` (else in all); of wait, ranks.WAIT_MINUTES; and of nohup.
    """
    from machinery import ranks
    from machinery.run import Run

    ranks.WAIT_MINUTES = what.get("wait", 30)
    # whatever the shell does that these tests are started from
    signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in what else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count, here, log = 0, int(os.environ["RANK"]), Run.log
    kill_at, only = what.get("kill_at"), what.get("only")

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
        if run.step == what.get("step") and only in (None, here):
            FAULTS[what["fault"]]()

    if here == 0:
        sys.addaudithook(count_touches)
    Run.log = log_and_act
    try:
        kit.call_main(script, argv)
    finally:
        if here == 0:
            Path(f"{argv[-1]}.touches").write_text(str(count))


def play(folder, *more, script="sft", zero=2, ranks=2, **what):
    """Makes a run in `folder`. what: as in act. Returns kit.Done."""
    options = runs.run(script, "--save_steps 2", zero=zero)["flags"]
    argv = [*runs.base_flags(script, runs.base()), *options, *map(str, more)]
    argv += ["--num_samples", "0"] if script == "sft" else []
    return kit.fork(act, ranks, script, [*argv, "--output_dir", str(folder)], what, meet="")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The run that nothing befell, with both of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = play(folder, "--keep_checkpoints", 2)
    assert done.codes == [0, 0], done
    return folder


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run, stopped after step 2."""
    left_out = shutil.ignore_patterns("config.json", "step-4")
    return shutil.copytree(whole, tmp_path / "run", ignore=left_out)


# --------------------------------------------------------------------------------------------------
# Whatever befalls it
# --------------------------------------------------------------------------------------------------
BEFALLS = [  # what: then both exit codes, the checkpoints, those that are done, and words
    # under nohup a closed terminal is nothing; killed before its first checkpoint, it starts anew
    (dict(fault="hang_up", step=1, nohup=1, kill_at="open step-2/done"), [-9, -9], "2", "", ""),
    (dict(fault="lose_reader", step=1, only=0), [1, 1], "2", "2", ""),
    (dict(fault="signals", step=3), [1, 1], "23", "23", "interrupted after step 3"),
    # who presses Ctrl-C again means it: nothing more is written
    (dict(fault="ctrl_c_twice", step=4, only=1), [1, -2], "23", "23", "resumed from .*step-3"),
    (dict(fault="no_more_disk", step=4), [1, 1], "234", "23", r"\[rank\d\]: .*checkpoints\.py"),
    # a rank that is gone says nothing: the other one says where it was
    (
        dict(fault="die", step=4, only=1),
        [1, -9],
        "234",
        "23",
        r"step-4 is passed over.*\[rank0\]: ",
    ),
    (dict(kill_at="shutil.rmtree step-2"), [-9, -9], "234", "34", "resumed from .*step-3"),
    (
        dict(fault="fail", step=5, only=1),
        [1, 1],
        "234",
        "34",
        r"step-2 is passed .*\[rank1\]: Value",
    ),
    (dict(kill_at="os.rename config.json"), [-9, -9], "234", "34", ""),
]


def test_whatever_befalls_a_run_it_ends_as_one_that_nothing_befell(whole, tmp_path):
    """One run, which starts again after each. Its folder's name is no pattern, although DeepSpeed
    takes the path of a checkpoint for one."""
    folder, resume = tmp_path / "run[1]", []
    for what, codes, kept, marked, words in BEFALLS:
        done = play(folder, "--keep_checkpoints", 2, *resume, **what)
        found = "".join(sorted(path.name[-1] for path in folder.glob("checkpoints/*")))
        marks = "".join(sorted(path.parent.name[-1] for path in folder.glob("checkpoints/*/done")))
        assert (done.codes, found, marks) == (codes, kept, marked), (what, done)
        assert re.search(words, done.out + done.err, re.DOTALL), (what, done)
        told = what.get("fault") in ("lose_reader", "hang_up", "signals")
        assert not (told and "Traceback" in done.err or (folder / "config.json").exists()), done
        resume = ["--resume"]
    assert (tmp_path / "run[1].old-1/args.json").exists(), "what began anew was moved aside"
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
        assert kit.outcome(folder) == kit.outcome(tmp_path / "whole"), (kill_at, touches)


# --------------------------------------------------------------------------------------------------
# Told to stop while rows are made; waits
# --------------------------------------------------------------------------------------------------
def tokenise(folder):
    """Maps rows in four processes, which take their time and leave their numbers."""
    os.setpgid(0, 0)

    def take_long(row):
        (folder / str(os.getpid())).touch()
        time.sleep(60)

    with ranks.unhurried():
        datasets.Dataset.from_dict({"row": [*range(8)]}).map(take_long, num_proc=4)


def in_group(number):
    """Returns whether any process is in a group."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(true, seconds=20):
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late
        time.sleep(0.05)


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


@pytest.mark.slow
def test_when_a_rank_hangs_each_rank_prints_where_it_is(stopped):
    """Under NCCL a wait that is too long raises no error, but ends the process. So shortly before
    its end each rank prints its stack: one is not where the others are."""
    done = play(stopped, "--resume", fault="hang", step=3, only=1, wait=0.2)
    assert done.codes[0] == 1 and "[rank0]: " in done.err, done
    for seconds in ("09", "10"):  # a second apart, or the stacks mix
        assert done.err.count(f"Timeout (0:00:{seconds})!") == 1, done
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


# --------------------------------------------------------------------------------------------------
# Other ranks, other batches, other rates
# --------------------------------------------------------------------------------------------------
def test_a_run_goes_on_in_another_layout(whole, stopped):
    """Other micro-batches: as many rows a step, so the same run. Not to the bit, for sums are taken
    in another order. Other ranks are refused. (Another stage: tests/promises.py)"""
    before = kit.tree(stopped)
    done = play(stopped, "--resume", "--gradient_accumulation_steps", 4, ranks=1)
    assert (done.code, done.rule) == (2, "resume-shape") and kit.tree(stopped) == before, done
    sizes = ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 4]
    done = play(stopped, "--resume", *sizes)
    assert done.code == 0, done
    found, expected = kit.weights(stopped), kit.weights(whole)
    assert max((found[key] - expected[key]).abs().max() for key in expected) < 1e-6


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
