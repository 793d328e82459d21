"""Walks through tests/promises.py, the table of all that is refused and all that is promised.

Every case is a command, started as a user starts it (kit.start), in a folder that holds right and
wrong things (tests/box.py). Nothing here looks inside: a change of the code passes the table and
this file as they are.
"""

import functools
import json
import os
import shutil
import sys
import time

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests import kit, promises
from tests.box import fill_box
from tests.held import HELD

SMALL = "--data_split 1,1,1 --max_steps 2 --num_warmup_steps 0 --per_device_eval_batch_size 2"
RIGHT = {  # flags that are right, before those of a case
    "sft": f"""--preset toy --data_path good --model_name_or_path actor {SMALL} --max_seq_len 64
        --per_device_train_batch_size 2 --num_samples 1 --max_answer_seq_len 4""",
    "reward": f"""--preset toy --data_path good --model_name_or_path actor {SMALL}
        --max_seq_len 64 --per_device_train_batch_size 2""",
    "ppo": f"""--preset toy --data_path good --actor_model_name_or_path actor {SMALL} --gold_fn=
        --critic_model_name_or_path judge --max_prompt_seq_len 16 --max_answer_seq_len 6
        --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --max_steps 1
        --num_eval_prompts 2""",
    "tools.talk": "--max_answer_seq_len 4 --dtype fp32",
}


# --------------------------------------------------------------------------------------------------
# The box
# --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def box(tmp_path_factory):
    """A folder with right and wrong things. No case may change it."""
    box = fill_box(tmp_path_factory.mktemp("box"))
    make_runs(box)
    return box


def make_runs(box):
    """Makes output folders: of runs that are finished, stopped and damaged; and a bare link."""
    (box / "link").symlink_to("gone")
    for script, name, flags in (
        ("sft", "finished", "--max_steps 2"),
        ("ppo", "ppo_stopped", ""),
        ("ppo", "judged", "--reward_fn score.py:length score.py:good"),
    ):
        flags += f" --output_dir {name} --save_steps 1 --keep_checkpoints 2"
        done = kit.start(f"{script} {flags}", RIGHT[script].split(), cwd=box)
        assert done.code == 0, done
    for name in ("ppo_stopped", "judged"):
        (box / name / "config.json").unlink()
    for name in ("damaged", "strange", "stopped"):
        shutil.copytree(box / "finished", box / name)
    (box / "damaged/args.json").write_text('{"seed": 1')
    (box / "strange/args.json").write_text('{"seed": [1], "files": 3}')
    (box / "stopped/config.json").unlink()
    for name in ("broken", "replaced", "alone"):
        shutil.copytree(box / "stopped", box / name)
    args = json.loads((box / "stopped/args.json").read_text())
    (box / "broken/checkpoints/step-2/done").unlink()
    os.truncate(box / "broken/checkpoints/step-1/model/state/mp_rank_00_model_states.pt", 1000)
    (box / "replaced/args.json").write_text(json.dumps({**args, "model_name_or_path": "deep"}))
    (box / "alone/args.json").unlink()
    (box / "older").mkdir()
    (box / "older/args.json").write_text(json.dumps({**args, "format": 1}))


@pytest.fixture(scope="session")
def untouched(box):
    return kit.tree(box)


def cases(table):
    """Returns pytest's parameters of a table, each named by its second cell."""
    found = promises.of(table)
    alike = len({case[1] for case in found}) < len(found)
    ids = [" ".join(case[:2] if alike else case[1:2])[:90] for case in found]
    return [pytest.param(*case, id=name) for case, name in zip(found, ids)]


# --------------------------------------------------------------------------------------------------
# Refused
# --------------------------------------------------------------------------------------------------
def assert_refused(done, rule, words):
    assert (done.code, done.rule) == (2, rule), done
    assert done.err.count("error: ") == 1 and "Traceback" not in done.out + done.err, done
    assert words in done.err, done


@pytest.mark.parametrize("rule, command, words", cases(promises.FLAGS))
def test_flags_are_refused(box, untouched, rule, command, words):
    """In words that name a flag that was given, and before anything is looked at."""
    own = "tools." in command or "@" in command  # which names its data itself
    right = [] if own else "--preset toy --data_path gone.jsonl".split()
    done = kit.start(command, right, cwd=box)
    assert_refused(done, rule, words)
    given = [word for word in command.split() if word.startswith("--")]
    assert not given or any(flag in done.err for flag in given), done
    assert done.loads == 0 and kit.tree(box) == untouched


@pytest.mark.parametrize("command", [case[0] for case in promises.of(promises.TAKEN)])
def test_the_neighbours_of_wrong_flags_are_taken(box, command):
    done = kit.start(command, "--preset toy --data_path gone.jsonl".split(), cwd=box)
    assert done.rule in ("unreadable-data", "no-such-model"), done


@pytest.mark.parametrize("rule, command, words", cases(promises.FILES))
def test_what_is_named_is_refused_before_a_model_is_loaded(
    box, untouched, tmp_path, rule, command, words
):
    done = start(command, box, tmp_path)
    assert_refused(done, rule, words)
    assert done.loads == 0 and kit.tree(box) == untouched and not list(tmp_path.iterdir())


@pytest.mark.parametrize("rule, command, words", cases(promises.WEIGHTS + promises.BEGUN))
def test_what_shows_when_a_run_has_begun_is_refused(box, untouched, tmp_path, rule, command, words):
    done = start(command, box, tmp_path)
    assert_refused(done, rule, words)
    assert kit.tree(box) == untouched and not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize(
    "flag", ["--output_dir N", "--model_name_or_path N", "--data_path N.jsonl", "--gold_fn N.py:f"]
)
def test_a_name_that_is_too_long_is_refused(box, untouched, tmp_path, flag):
    done = start(f"sft {flag.replace('N', 300 * 'n')}", box, tmp_path)
    assert_refused(done, done.rule, "nnn")
    assert kit.tree(box) == untouched


def start(command, box, tmp_path):
    """Starts a case with right flags before its own; its output folder is tmp_path/out."""
    program = next(word for word in command.split() if "=" not in word)
    right = RIGHT.get(program, "").split()
    if program in kit.SCRIPTS:
        right += ["--output_dir", tmp_path / "out"]
    return kit.start(command, right, cwd=box)


def test_a_dialogue_goes_on_after_what_it_refuses(box, untouched):
    """Each mistyped command is answered by one message, and a question after them by the model."""
    table = promises.of(promises.TYPED)
    typed = "".join(f"{command}\n" for _, command, _ in table)
    talk = RIGHT["tools.talk"].split()
    done = kit.start("tools.talk actor", talk, cwd=box, stdin=f"{typed}Still there?\n")
    said = done.err.split("error: ")[1:]
    assert done.code == 0 and len(said) == len(table), done
    for (_, command, words), message in zip(table, said):
        assert words in message, (command, message)
    assert "tokens" in done.out.split("actor")[-1] and kit.tree(box) == untouched, done


def second_run(box, folder):
    """Rank 0 is a run that waits, and rank 1 starts others in its folder, one after the other.

    Returns their exit codes; the run goes on then.
    """
    first = os.environ["RANK"] == "0"
    for name in kit.RANK_NAMES:
        del os.environ[name]
    right = f"""{RIGHT["ppo"].replace("good", f"{box}/good")} --reward_fn {box}/score.py:waits
        --actor_model_name_or_path {box}/actor --critic_model_name_or_path {box}/judge
        --output_dir {folder}""".split()
    if first:
        return kit.call_main("ppo", right)
    codes = []
    while not os.path.exists(f"{folder}/args.json"):
        time.sleep(0.05)
    for more in ([], ["--resume"], ["--overwrite"]):
        child = os.fork()
        if not child:
            try:
                kit.call_main("ppo", [*right, *more])
            except SystemExit as stop:
                sys.stderr.flush()
                os._exit(stop.code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    open("go", "w").close()
    return codes


def test_a_living_run_keeps_its_folder(box, tmp_path):
    """A second run is refused, also with --resume and --overwrite. The first goes on to its end."""
    done = kit.fork(second_run, 2, str(box), str(tmp_path / "out"), meet="", cwd=tmp_path)
    assert done.codes == [0, 0] and done.results[1] == [2, 2, 2], done
    assert done.err.count("is in use by another run") == 3, done
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    assert (tmp_path / "out/config.json").exists()


# --------------------------------------------------------------------------------------------------
# Stopped
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what, command, words", cases(promises.STOPPED))
def test_what_cannot_go_on_stops(box, untouched, tmp_path, what, command, words):
    """With exit code 1, and no model is saved: nobody takes the run for a finished one."""
    done = start(command, box, tmp_path)
    assert done.code == 1 and words in done.out + done.err, done
    assert kit.tree(box) == untouched and not (tmp_path / "out/config.json").exists()


# --------------------------------------------------------------------------------------------------
# Promised
# --------------------------------------------------------------------------------------------------
SHORT = "--data_split 1,1,1 --per_device_eval_batch_size 2"
STEPS = {
    "sft": f"{SHORT} --max_steps 2 --num_samples 1 --per_device_train_batch_size 2",
    "reward": f"{SHORT} --max_steps 2 --per_device_train_batch_size 2",
    "ppo": f"""{SHORT} --max_steps 1 --num_eval_prompts 2 --microscope 1
        --per_device_generation_batch_size 2 --per_device_training_batch_size 2""",
}


@pytest.fixture(scope="session")
def steps(box, tmp_path_factory):
    """{step: kit.Done} of the three steps of the toy, in an empty folder, without names of models
    and of output folders."""
    here, steps = tmp_path_factory.mktemp("steps"), {}
    for script, flags in STEPS.items():
        flags += f" --data_path {box}/good"
        flags += f" --gold_fn {box}/score.py:length" if script == "ppo" else ""
        steps[script] = kit.start(f"{script} {flags}", cwd=here)
        steps[script].folder = here / "output" / script
    return steps


@pytest.mark.parametrize("script", kit.SCRIPTS)
def test_each_step_finds_the_one_before(steps, script):
    """In output/: a bare command is all that one types. The exit code is 0, and the last line says
    where everything is. Nothing is left unfinished: what is hidden afterwards is the lock alone."""
    done = steps[script]
    assert done.code == 0 and done.out.splitlines()[-1] == f"done: output/{script}", done
    assert "Traceback" not in done.err and "error: " not in done.err, done
    assert {path.name for path in done.folder.rglob(".*")} == {".lock"}


@pytest.mark.parametrize("script, place, names", cases(promises.LEFT))
def test_a_step_leaves_its_files(steps, script, place, names):
    there = {path.name for path in (steps[script].folder / place).iterdir()}
    assert set(names.split()) <= there, there


@pytest.mark.parametrize("script, file, names", cases(promises.KEYS))
def test_a_file_of_a_step_has_its_keys(steps, script, file, names):
    folder = steps[script].folder
    if file == "args.json":
        lines = [json.loads((folder / file).read_text())]
    elif file.endswith(".jsonl"):
        lines = kit.read_lines(folder / file)
    else:
        lines = kit.metrics(folder)[{"step": 1, "evaluation": -1}[file] :]
        lines += kit.metrics(folder)[:1] * (file == "evaluation")
    assert lines and all(set(names.split()) <= line.keys() for line in lines), lines[0].keys()


@pytest.mark.parametrize(
    "script, place, writes",
    [("sft", ".", 1), ("ppo", ".", 1), ("ppo", "ema", 1), ("reward", ".", 0), ("ppo", "critic", 0)],
)
def test_stock_transformers_loads_what_is_saved(steps, script, place, writes):
    """Offline, with every weight; and the tokenizer lies beside."""
    folder = steps[script].folder / place
    kind = AutoModelForCausalLM if writes else AutoModelForSequenceClassification
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id
    assert writes or model.config.num_labels == 1


def test_the_steps_are_one_page(steps, tmp_path):
    """tools/look.py: a page of all three, and of a bare folder of them."""
    output = steps["ppo"].folder.parent
    done = kit.start(f"tools.look {output} --out {tmp_path}/report.html")
    assert done.code == 0, done
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in kit.SCRIPTS)


@pytest.mark.parametrize("command, words", [case[:2] for case in promises.of(promises.RESUMED)])
def test_what_does_not_shape_a_run_may_change(box, tmp_path, command, words):
    """A stopped run goes on from its newest checkpoint with what it is given now, and says so."""
    script, _, name = command.split()[:3]
    shutil.copytree(box / name, tmp_path / name)
    flags = command.replace(f"--output_dir {name}", f"--output_dir {tmp_path / name}")
    done = kit.start(flags, RIGHT[script].split(), cwd=box)
    assert done.code == 0 and "resumed from" in done.out and words in done.out, done
    assert (tmp_path / name / "config.json").exists()


@pytest.mark.parametrize("command, words", [case[:2] for case in promises.of(promises.RUNS)])
def test_what_is_right_runs(box, untouched, tmp_path, command, words):
    done = start(command, box, tmp_path)
    assert done.code == 0 and words in done.out, done
    assert "error: " not in done.out + done.err and kit.tree(box) == untouched


PROMISED = [case[0] for case in promises.of(promises.PROMISED)]
PROMISED += [what for _, what, _ in promises.of(promises.ELSEWHERE)]


@pytest.mark.parametrize("promise", PROMISED)
def test_a_promise_has_its_test(promise):
    [test] = [HELD[words] for words in HELD if promise.startswith(words)]
    assert f"def {test}(" in all_tests()


def test_no_test_holds_what_nobody_promises():
    unheld = [words for words in HELD if not any(p.startswith(words) for p in PROMISED)]
    assert not unheld and len(PROMISED) == len(HELD)


@functools.cache
def all_tests():
    return "".join(file.read_text() for file in kit.ROOT.glob("tests/**/test_*.py"))
