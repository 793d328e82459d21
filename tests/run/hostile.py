"""A hostile user, drawn at random: wrong flags and pairs of flags, damaged models, odd rows, output
folders in odd states. Each case is a real run of a script on one rank.

    python tests/run/hostile.py                          60 cases
    python tests/run/hostile.py --cases 500 --seed 3     other ones; --seconds bounds them
    python tests/run/hostile.py --seed 3 --only 17       the one that failed, with its output

What a run promises (docs/reliability.md) is looked at from outside: exit code 0, 1 or 2; one
message where it is not 0, and no traceback; what it was given and what is not its own is there as
before, to the byte; with exit code 2 all is as before; a resumed run ends as the one that was left
alone.
"""

import argparse
import functools
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from tests import kit, promises, runs
from tests.box import PAIR, UNFIT, fill_box
from tests.run.test_flags import parser_of

LIMIT = 120  # seconds of one run
BASE = """--preset toy --data_path data --data_split 1,1,1 --max_steps 4 --num_warmup_steps 0
    --per_device_eval_batch_size 4 --log_steps 1 --num_train_epochs 2 """
BASES = {
    "sft": """--model_name_or_path actor --num_samples 1 --max_answer_seq_len 3
        --per_device_train_batch_size 3""",
    "reward": "--model_name_or_path actor --per_device_train_batch_size 3",
    "ppo": """--actor_model_name_or_path actor --critic_model_name_or_path judge --gold_fn=
        --max_answer_seq_len 6 --num_eval_prompts 2 --eval_steps 100
        --per_device_generation_batch_size 4 --per_device_training_batch_size 4""",
}
SAVING = ["--save_steps", "1", "--keep_checkpoints", "9"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


# --------------------------------------------------------------------------------------------------
# One run, and how it is judged
# --------------------------------------------------------------------------------------------------
class Case:
    """What was drawn: flags behind those of BASES, in a folder of its own, and what must come."""

    def __init__(self, place, rng):
        self.place, self.rng = place, rng
        self.output = place / "out"
        self.script = rng.choice(kit.SCRIPTS)
        self.flags, self.notes = [], []
        self.codes = {0, 1, 2}  # that are right
        self.mine = []  # names in the output folder that no run may touch
        self.truth = None  # what a resumed run must leave

    def words(self):
        return f"{self.script}.py {shlex.join(self.flags)}   [{'; '.join(self.notes)}]"


def run(case):
    argv = [*shlex.split(BASE + BASES[case.script]), *case.flags]
    return kit.run(case.script, *argv, folder=case.output, cwd=case.place, limit=LIMIT, expect=None)


def judged(case, before, done):
    """Yields, in words, what was promised and is not so."""
    after, code, printed = kit.tree(case.place), done.code, done.out + done.err
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    changed = [name for name in changed if "__pycache__" not in name]  # Python's, of score.py
    errors = len(re.findall(r"^error: ", printed, re.M))
    if code not in case.codes:
        yield f"exit code {code}, not {' or '.join(map(str, sorted(case.codes)))}"
    if "Traceback" in printed:
        yield "a traceback"
    if code == 2 and changed:
        yield f"refused, and changed {', '.join(changed[:4])}"
    if code == 2 and errors != 1 or code == 0 and errors:
        yield f"{errors} messages and exit code {code}"
    lost = [name for name in changed if not name.startswith("out") and name in before]
    for name in case.mine:  # --overwrite moves the old run, and what lies in it
        places = [case.output / name, case.place / "out.old-1" / name]
        lost += [name] * (not any(p.is_file() and p.read_text() == "mine" for p in places))
    if lost:
        yield f"lost or changed: {', '.join(lost[:4])}"
    if code == 0 and case.truth and "starts anew" not in done.out:
        now = kit.outcome(case.output)
        for what in [what for what in case.truth if now.get(what) != case.truth[what]]:
            yield f"resumed, and {what} is not that of the run left alone"


# --------------------------------------------------------------------------------------------------
# Flags: from the parsers themselves, and tests/promises.py
# --------------------------------------------------------------------------------------------------
NAMES = """nothing.jsonl good actor judge done score.py score.py:length missing.py:f data . .. /
    /dev/null columns.jsonl cut.jsonl no_base out/x decided.json --seed 0 {} ünïcode""".split()
NAMES += ["", " ", "\udcff", "two words", "a\nb", "'"]


def edges(rng, flag):
    """Returns texts to give to a flag, and whether they must be refused."""
    if flag.nargs == 0:
        return rng.choice([([], False)] * 4 + [(["1"], True)])
    if flag.choices:
        right = str(rng.choice(list(flag.choices)))
        return rng.choice([([right], False)] * 3 + [([""], True), ([right + "x"], True)])
    if flag.type in (int, float):
        wrong = ["", "x", "nan", "1,5", "--seed", str(flag.least - 1), "-inf"]
        least, most = flag.least, min(flag.most, 2**32)
        right = [number for number in (least, 1, 2, 3, flag.most) if least <= number <= most]
        right = [str(flag.type(number)) for number in right]
        return rng.choice([([rng.choice(right)], False)] * 2 + [([rng.choice(wrong)], True)])
    if flag.type not in (str, None):  # numbers joined by commas
        return [rng.choice("0,0,0 1,2 1,2,3 -1,1,1 nan,1,1 ,, 0.5,0.5 0,0 nan,nan".split())], False
    words = [rng.choice(NAMES) for _ in range(rng.choice([1, 1, 1, 2]) if flag.nargs else 1)]
    return words, any(word.startswith("--") for word in words[1:])


def draw_flags(case):
    """One to three flags of the script at the edges of what they take, or a broken rule."""
    rng = case.rng
    commands = [command.partition(" ") for _, command, _ in promises.of(promises.FLAGS)]
    broken = [flags for script, _, flags in commands if script == case.script]
    if rng.random() < 0.2 and broken:
        case.flags += shlex.split(rng.choice(broken))
        return
    flags = parser_of(case.script)._actions
    known = {flag.dest: flag for flag in flags if hasattr(flag, "needed")}
    for name in rng.sample(sorted(known.keys() - {"output_dir"}), rng.choice([1, 2, 2, 2, 3])):
        words, refused = edges(rng, known[name])
        case.flags += [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
        if refused:
            case.codes = {2}


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------
ODD = [None, True, -1, 0, 3, 2**40, 0.5, "", "x", [], [1], {}, {"a": 1}]


def put(path, content):
    """Writes a file anew: what was there is a hard link to a file of all cases."""
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def damage_file(case, path):
    rng, content = case.rng, path.read_bytes()
    ways = {
        "cut": content[: rng.randrange(len(content) + 1)],
        "empty": b"",
        "noise": rng.randbytes(200),
        "gone": None,
    }
    way = rng.choice(sorted(ways))
    case.notes.append(f"{path.relative_to(case.place)}: {way}")
    put(path, ways[way] or b"")
    if ways[way] is None:
        path.unlink()


def damage_json(case, path):
    """Changes one or two values of a JSON object."""
    rng, values = case.rng, json.loads(path.read_text())
    for key in rng.sample(sorted(values), rng.choice([1, 1, 2])):
        values[key] = rng.choice(ODD)
        case.notes.append(f"{path.name}: {key} = {json.dumps(values[key])}")
    put(path, json.dumps(values))


def draw_model(case):
    """An unfit model folder, or a good one with some damage."""
    rng = case.rng
    role = rng.choice(["actor_", "critic_", "reward_"]) if case.script == "ppo" else ""
    name = rng.choice([*UNFIT, "instruct"])
    if rng.random() < 0.75:
        name = "judge" if role in ("critic_", "reward_") else "actor"
        kinds = {damage_file: "*", damage_json: "*.json"}
        way = rng.choice([*kinds])
        way(case, rng.choice(sorted((case.place / name).glob(kinds[way]))))
    case.flags += [f"--{role}model_name_or_path", name]


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------
TEXTS = ["", " ", "\n", "a", "\0", "\u202e\u200b", "\U0001f993" * 40, "\r\n", "\u2028", "\ufeff"]
TEXTS += ["\\ud800", "\ud800", "<eos>", "<pad>", "\n\nHuman: a", "2024-01-08", "NaN", "\ue000"]
TEXTS += ["{{ x }}{% raw %}", "x" * 50_000]
VALUES = [None, 0, -1, 2**70, 0.5, math.nan, True, [], {}, [[]], ["a"], {"a": "b"}]
GOOD = {  # a row of each format, to be told apart by {}
    "plain": {name: text + "{}" for name, text in PAIR.items()},
    "dialogues": {n: f"\n\nHuman: {{}}?\n\nAssistant: {n}" for n in ("chosen", "rejected")},
    "alpaca": {"instruction": "Say {}", "input": "", "output": "{}."},
    "chat": {
        name: [{"role": "user", "content": "{}?"}, {"role": "assistant", "content": name}]
        for name in ("chosen", "rejected", "messages")
    },
}


def hard_row(rng, row):
    """Returns a row, some of whose values, or of the values in its messages, are hard."""
    row = json.loads(json.dumps(row))
    for name in rng.sample(sorted(row), rng.choice([1, 1, len(row)])):
        value = rng.choice(TEXTS if rng.random() < 0.75 else VALUES)
        if isinstance(row[name], list) and rng.random() < 0.7:
            rng.choice(row[name])[rng.choice(["role", "content"])] = value
        else:
            row[name] = value
    if rng.random() < 0.2:
        row[rng.choice(["prompts", "completions", "extra", "row", "drop", "é"])] = "a"
    return row


def draw_rows(case):
    """A file of rows, good and hard, in one of the formats and kinds of files."""
    rng = case.rng
    kind, suffix = rng.choice(sorted(GOOD)), rng.choice(["jsonl", "jsonl", "json"])
    text = json.dumps(GOOD[kind])
    rows = [json.loads(text.replace("{}", str(i))) for i in range(rng.choice([0, 24, 24, 24]))]
    hard = [hard_row(rng, GOOD[kind]) for _ in range(rng.choice([1, 1, 2, 6]))]
    rows += hard * rng.choice([1, 1, 3])  # duplicates
    rng.shuffle(rows)
    lines = [json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows]
    content = "\n".join(lines)
    if suffix == "json":
        content = f"[{', '.join(lines)}]"
    content = content.encode(errors="surrogatepass")
    if rng.random() < 0.2:
        content += rng.choice([b"\n[1]", b"\n3", b"\xff\xfe", b'\n{"prompt": "a', b"\n\n", b'"'])
    (case.place / "mine").mkdir()
    (case.place / f"mine/train.{suffix}").write_bytes(content)
    case.notes.append(f"{suffix} of {len(rows)} rows, {kind}: {json.dumps(hard)[:300]}")
    case.flags += ["--data_path", f"mine/train.{suffix}"]
    if case.script == "ppo" and rng.random() < 0.5:
        case.flags += ["--reward_fn", "score.py:length"]


# --------------------------------------------------------------------------------------------------
# Output folders, and resumed runs
# --------------------------------------------------------------------------------------------------
FOREIGN = """notes.txt my_model.safetensors ema/notes.txt critic/x/y.json checkpoints/notes/a.txt
    checkpoints/step-2-copy/rank0.pt checkpoints/step-x/a.pt .hidden README.md""".split()


def draw_output(case):
    """An output folder in some odd state, and flags that go on with it, or move it aside."""
    rng, output = case.rng, case.output
    state = rng.choice(["finished", "unfinished", "unfinished", "unfinished", "new"])
    case.notes.append(state)
    if state == "new":
        output.mkdir()
    else:
        case.flags += SAVING
        case.truth = kit.outcome(finished(case.script))
    if state == "finished":
        shutil.copytree(finished(case.script), output)
    if state == "unfinished":
        for step in range(rng.choice([4, 1, 2, 3])):
            runs.copy_checkpoint(finished(case.script), step + 1, output)
    files = sorted(p for p in (output / "checkpoints").rglob("*") if p.is_file())
    if files and rng.random() < 0.4:
        damage_file(case, rng.choice(files))
    if (output / "args.json").is_file() and rng.random() < 0.2:
        rng.choice([damage_file, damage_json])(case, output / "args.json")
    name = rng.choice(FOREIGN)
    if not (output / name).exists() and rng.random() < 0.6:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("mine")
        case.mine.append(name)
        case.notes.append(f"a file of mine: {name}")
    case.flags += rng.choice([[], ["--overwrite"], ["--resume"], ["--resume"], ["--resume"]])
    if "--resume" not in case.flags:
        case.truth = None


# --------------------------------------------------------------------------------------------------
# All cases
# --------------------------------------------------------------------------------------------------
SHARES = [draw_flags] * 6 + [draw_model] * 5 + [draw_rows] * 5 + [draw_output] * 6


@functools.cache
def full_box():
    """Returns the folder with what every case finds in its own."""
    box = fill_box(kit.base() / "hostile/box")
    for name in ("actor", "judge"):
        (box / name / "chat_template.jinja").write_text(TEMPLATE)
    (box / "decided.json").write_text('{"zero_optimization": {"stage": 2}}')
    shutil.copytree(kit.base() / "data", box / "data")
    return box


@functools.cache
def finished(script):
    """Returns the output folder of a run that ended well."""
    case = Case(full_box().parent / script, random.Random(0))
    shutil.copytree(full_box(), case.place)
    case.script, case.flags = script, SAVING
    done = run(case)
    assert done.code == 0, done
    return case.output


def try_case(seed, number):
    """Draws and runs a case. Returns it, what its run printed, and what is wrong."""
    rng = random.Random(f"{seed} {number}")
    place = Path(tempfile.mkdtemp(dir=full_box().parent))
    shutil.copytree(full_box(), place, copy_function=os.link, dirs_exist_ok=True)
    case, done = Case(place, rng), None
    try:
        rng.choice(SHARES)(case)
        before = kit.tree(place)
        done = run(case)
        wrong = list(judged(case, before, done))
    except Exception:
        wrong = [f"this program failed: {traceback.format_exc()}"]
    shutil.rmtree(place, ignore_errors=True)
    return case, done, wrong


def try_cases(numbers, seed, seconds):
    """Tries cases for so long. Returns how many, and says what is wrong in a list of texts."""
    until, tried, failures = time.time() + seconds, 0, []
    for number in numbers:
        if time.time() > until:
            break
        case, done, wrong = try_case(seed, number)
        tried += 1
        if wrong:
            repeat = f"python tests/run/hostile.py --seed {seed} --only {number}"
            failures.append(f"{case.words()}\n  WRONG: {'; '.join(wrong)}\n  {repeat}")
            print(failures[-1], flush=True)
        if len(numbers) == 1:
            print(done)
    return tried, failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case, printed whole")
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    chosen = range(given.cases) if given.only is None else [given.only]
    count, failed = try_cases(chosen, given.seed, given.seconds)
    print(f"{count} cases, seed {given.seed}, {len(failed)} wrong")
    sys.exit(1 if failed else 0)
