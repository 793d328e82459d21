"""A hostile user, drawn at random: wrong flags and pairs of flags, damaged models, odd rows, output
folders in odd states, resumed runs. Each case is a real run of a script on one rank.

    python tests/hostile.py                          60 cases
    python tests/hostile.py --cases 500 --seed 3     other ones; --seconds bounds them
    python tests/hostile.py --seed 3 --only 17       the one that failed, with what it printed

What a run promises (docs/reliability.md) is looked at from outside: exit code 0, 1 or 2; one
message where it is not 0, and no traceback; what it was given and what is not its own is there as
before, to the byte; with exit code 2 all is as before; a resumed run ends as the one that was left
alone. This process imports all once, makes a finished run of each script, and forks each case.
"""

import argparse
import contextlib
import csv
import ctypes
import fcntl
import functools
import hashlib
import io
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from tests import kill  # first: it sets the environment

# isort: split
import conftest
import test_8_input as input_tests
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import ppo
import reward
import sft
from machinery.flags import declaring
from machinery.models import model_checks
from machinery.rollout import decoding
from machinery.run import logs

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
LIMIT = 120  # seconds of one run
MEMORY = 24 << 30  # bytes of address space of one run
BASE = """--preset toy --data_path data --data_split 1,1,1 --max_steps 4 --num_warmup_steps 0
    --per_device_eval_batch_size 4 --log_steps 1 --num_train_epochs 2""".split()
BASES = {
    "sft": """--model_name_or_path actor --num_samples 1 --max_answer_seq_len 3
        --per_device_train_batch_size 3""",
    "reward": "--model_name_or_path actor --per_device_train_batch_size 3",
    "ppo": """--actor_model_name_or_path actor --critic_model_name_or_path judge --gold_fn=
        --max_answer_seq_len 6 --num_eval_prompts 2 --eval_steps 100
        --per_device_generation_batch_size 4 --per_device_training_batch_size 4""",
}
SAVING = ["--save_steps", "1", "--keep_checkpoints", "9"]


# --------------------------------------------------------------------------------------------------
# One run, and how it is judged
# --------------------------------------------------------------------------------------------------
class Case:
    """What was drawn: flags behind those of BASES, in a folder of its own, and what must come."""

    def __init__(self, place, rng):
        self.place, self.rng = place, rng
        self.script = rng.choice(list(SCRIPTS))
        self.flags, self.notes = [], []
        self.codes = {0, 1, 2}  # that are right
        self.mine = []  # files that no run may touch, in the output folder
        self.parts = {"out"}  # of the place, that the run may change
        self.compared = {"weights", "metrics", "samples"}  # of a resumed run
        self.truth = None  # what a resumed run must leave
        self.locked = self.forbidden = False

    def argv(self):
        return [*BASE, *BASES[self.script].split(), "--output_dir", "out", *self.flags]

    def words(self):
        """What the case is, to be read."""
        did = f"   [{'; '.join(self.notes)}]" if self.notes else ""
        return f"{self.script}.py {shlex.join(self.flags)}{did}"


def run(case):
    """Returns (exit code, minus the signal that ended it; stdout; stderr)."""
    logs_of = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]
    child = os.fork()
    if not child:
        try:
            code = be_a_run(case, logs_of)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    until = time.time() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.time() > until:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    texts = []
    for log in logs_of:
        log.seek(0)
        texts.append(log.read())
        log.close()
    return os.waitstatus_to_exitcode(ended[1]), *texts


def be_a_run(case, logs_of):
    """In the child: runs the script's main() and returns its exit code."""
    for number, log in enumerate(logs_of, 1):
        os.dup2(log.fileno(), number)
    os.chdir(case.place)
    for name in [n for n in os.environ if n.startswith(("SLURM_", "MASTER_"))]:
        del os.environ[name]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if case.forbidden and not os.getuid():
        drop_rights()
    sys.argv = [f"{case.script}.py", *case.argv()]
    try:
        SCRIPTS[case.script].main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def drop_rights():
    """Takes root's right to write where permissions forbid it from this process (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, rights)
    for i in range(3):  # effective, permitted, inheritable
        rights[i] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, rights) == 0


def tree(place):
    """{path: what is there} of all below `place`: a digest, "folder", or where a link leads."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        elif path.name != ".lock":
            found[name] = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    return found


def judged(case, before, code, out, err):
    """Yields, in words, what was promised and is not so."""
    after = tree(case.place)
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    errors = len(re.findall(r"^(?:\[rank0\]: )?error: ", out + err, re.M))
    if code == -signal.SIGKILL:
        yield f"it hung for {LIMIT} seconds"
    elif code not in case.codes:
        yield f"exit code {code}, not {' or '.join(map(str, sorted(case.codes)))}"
    if "Traceback" in out + err:
        yield "a traceback"
    if code == 2 and changed:
        yield f"refused, and changed {', '.join(changed[:4])}"
    stopped = re.search("Go on with --resume", out)
    if code and errors != 1 and not (code == 1 and stopped and not errors):
        yield f"{errors} messages"
    if code == 0 and errors:
        yield "an error, and exit code 0"
    lost = [name for name in changed if name.split("/")[0] not in case.parts and name in before]
    lost += [path for path in case.mine if not path.is_file() or path.read_text() != "mine"]
    if lost and code != 2:
        yield f"lost or changed: {', '.join(map(str, lost[:4]))}"
    if code == 0 and case.truth and (found := difference(case, out)):
        yield f"resumed, and other than the run left alone: {found}"


def outcome(output, parts):
    """Returns those parts of `kill.outcome`, which needs the logs to be there."""
    whole = "metrics" in parts
    return kill.outcome(output) if whole else {"weights": kill.weights_in(output)}


def difference(case, out):
    """Returns what differs between a resumed run and the one left alone; "" if nothing does."""
    if "starts anew" in out:
        return ""
    now = outcome(case.place / "out", case.compared)
    for what in sorted(case.compared):
        whole = case.truth[what]
        if now[what] != whole:
            names = [n for n in whole if now[what].get(n) != whole[n]] if what == "weights" else []
            return f"{what} {', '.join(names[:3])}"
    return ""


# --------------------------------------------------------------------------------------------------
# Flags: from the parsers themselves
# --------------------------------------------------------------------------------------------------
class Parser(Exception):
    """Carries a script's parser out of its get_args."""


@functools.cache
def parser_of(script):
    """The flags that `script` declares, {name: argparse's action}."""

    def caught(parser, *args):
        raise Parser(parser)

    parse, declaring.parse = declaring.parse, caught
    try:
        SCRIPTS[script].get_args([])
    except Parser as stop:
        return {a.dest: a for a in stop.args[0]._actions if hasattr(a, "fixed")}
    finally:
        declaring.parse = parse


NAMES = """ nothing.jsonl good actor judge done done/old a b score.py score.py:length missing.py:f
    data data/train.jsonl . .. / ~ /dev/null columns.jsonl broken.jsonl bert no_eos small out out/x
    ds_list.json ds_bucket.json ds_zero.json --seed 0 <eos> model score {}""".split()
NAMES += ["ünïcode", "*.jsonl"]
NAMES += ["", " ", "\udcff", "data/\udc80.jsonl", "x" * 300, "x/" * 2100, "two words", "a\nb", "'"]
ENDLESS = {"max_steps", "num_train_epochs"}  # in range, their largest takes longer than we have


def edges(rng, name, flag):
    """Returns texts to give to a flag: (words, whether they must be refused)."""
    if flag.nargs == 0:
        return rng.choice([([], False)] * 4 + [(["1"], True)])
    if flag.choices:
        right = rng.choice([str(choice) for choice in flag.choices])
        return rng.choice([([right], False)] * 3 + [([""], True), ([right + "x"], True)])
    number = flag.type in (int, float)
    if not number and flag.type is not str and flag.type is not None:  # numbers joined by commas
        texts = "0,0,0 1,2 1,2,3 -1,1,1 nan,1,1 1e308,1e308,1e308 ,, 0.5,0.5 0,0 1,1 nan,nan 0,1,0"
        return [rng.choice(texts.split())], False
    if not number:
        count = rng.choice([1, 1, 1, 2, 0]) if flag.nargs else 1
        words = [rng.choice(NAMES) for _ in range(count)]
        return words, not words or any(word.startswith("--") for word in words)
    wrong = ["", "x", "nan", "1,5", "0x10", "1e", "--seed"] + ["1.5", "1e3"] * (flag.type is int)
    wrong += [str(flag.least - 1), "-inf"]
    wrong += [str(flag.most + 1), "inf"] if flag.most < declaring.FINITE else []
    right = [flag.type(max(flag.least, value)) for value in (flag.least, 1, 2, 3)]
    if flag.most < math.inf and name not in ENDLESS:
        right += [flag.type(flag.most), flag.type(flag.most)]
    right += [1e-30, 1e30] if flag.type is float and flag.least <= 1e-30 < 1e30 <= flag.most else []
    return rng.choice([([str(rng.choice(right))], False)] * 2 + [([rng.choice(wrong)], True)])


def draw_flags(case):
    """One to three flags of the script, at the edges of what they take."""
    rng, known = case.rng, parser_of(case.script)
    for name in rng.sample(sorted(known), rng.choice([1, 2, 2, 2, 3])):
        words, refused = edges(rng, name, known[name])
        case.flags += [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
        if refused:
            case.codes = {2}


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------
ODD = [None, True, False, -1, 0, 1, 3, 2**40, 0.5, 1e30, "", "x", "0", [], [1], {}, {"a": 1}]


def put(path, content):
    """Writes a file anew: what was there is a hard link to a file of all cases."""
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def damage_file(case, path):
    """Damages one file, in one of many ways."""
    rng, content = case.rng, path.read_bytes()
    way = rng.choice(["cut", "empty", "noise", "gone", "a folder", "a dead link", "a byte"])
    case.notes.append(f"{path.relative_to(case.place)}: {way}")
    if way == "cut":
        put(path, content[: rng.randrange(len(content) + 1)])
    elif way == "empty":
        put(path, b"")
    elif way == "noise":
        put(path, rng.randbytes(200))
    elif way == "a byte":
        at = rng.randrange(len(content) + 1)
        put(path, content[:at] + rng.randbytes(1) + content[at + 1 :])
    else:
        path.unlink()
        if way == "a folder":
            path.mkdir()
        elif way == "a dead link":
            path.symlink_to("gone")


def damage_json(case, path):
    """Changes one or two values of a JSON object, or takes them out."""
    rng, values = case.rng, json.loads(path.read_text())
    for key in rng.sample(sorted(values), rng.choice([1, 1, 2])):
        if rng.random() < 0.15:
            del values[key]
            case.notes.append(f"{path.name}: no {key}")
        else:
            values[key] = rng.choice(ODD)
            case.notes.append(f"{path.name}: {key} = {json.dumps(values[key])}")
    put(path, json.dumps(values))


def damage_weights(case, path):
    """Changes what model.safetensors holds."""
    rng, weights = case.rng, load_file(path)
    name = rng.choice(sorted(weights))
    way = rng.choice(["gone", "renamed", "another shape", "NaN", "integers", "float64", "more"])
    case.notes.append(f"{path.relative_to(case.place)}: {name}: {way}")
    tensor = weights[name]
    if way in ("gone", "renamed"):
        del weights[name]
    if way == "renamed":
        weights["x" + name] = tensor
    elif way == "another shape":
        weights[name] = torch.cat([tensor, tensor])
    elif way == "NaN":
        weights[name] = tensor * math.nan
    elif way == "integers":
        weights[name] = tensor.long()
    elif way == "float64":
        weights[name] = tensor.double()
    elif way == "more":
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    if way in ("gone", "renamed", "another shape", "integers", "more"):
        case.codes = {2}
    file = io.BytesIO()  # not in place: a hard link
    save_file(weights, path.with_suffix(".new"), metadata={"format": "pt"})
    file.write(path.with_suffix(".new").read_bytes())
    path.with_suffix(".new").unlink()
    put(path, file.getvalue())


def draw_model(case):
    """A model folder from the box of test_8_input.py, or a good one with some damage."""
    rng = case.rng
    roles = ["actor_", "critic_", "reward_"] if case.script == "ppo" else [""]
    role = rng.choice(roles)
    name = rng.choice(sorted([*input_tests.UNFIT, *input_tests.DAMAGED, "instruct", "integers"]))
    if rng.random() < 0.75:
        name = "judge" if role in ("critic_", "reward_") or rng.random() < 0.1 else "actor"
        folder = case.place / name
        files = sorted(path for path in folder.iterdir() if path.is_file())
        way = rng.random()
        if way < 0.35:
            damage_file(case, rng.choice(files))
        elif way < 0.75:
            words = ["config.json"] * 3 + ["tokenizer_config.json", "tokenizer.json"]
            damage_json(case, folder / rng.choice(words))
        else:
            damage_weights(case, folder / "model.safetensors")
            if name == "judge" and not role and case.script == "sft":
                case.codes = {2}
    case.flags += [f"--{role}model_name_or_path", name]
    if role == "critic_":  # judged by it, too
        case.flags += rng.choice([[], ["--reward_fn", "score.py:length"]])


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------
TEXTS = [
    "",
    " ",
    "\n",
    "a",
    "So.",
    "\u0000",
    "\u202e\u200b",
    "\U0001f993" * 40,
    "e\u0301" * 9,
    "\r\n",
]
TEXTS += ["\u2028", "\ufeff", "\\ud800", "\ud800", "<eos>", "<pad>", "<|endoftext|>", "</s>"]
TEXTS += [
    "\n\nHuman: a\n\nAssistant:",
    "\n\nAssistant:",
    "2024-01-08",
    "NaN",
    "null",
    "1e999",
    "{}",
]
TEXTS += ["{{ x }}{% raw %}", "[INST]", "\ue000", "\ue001\ue000", "x" * 50_000, "word " * 9_000]
VALUES = [None, 0, -1, 2**70, 0.5, 1e308, math.nan, math.inf, True, [], {}, [[]], ["a"], {"a": "b"}]
ROLES = ["user", "assistant", "user", "assistant", "system", "tool", "", None, 3]


def hard_value(rng):
    return rng.choice(TEXTS) if rng.random() < 0.75 else rng.choice(VALUES)


def hard_chat(rng):
    """Chat messages, well formed or not."""
    roles = ["user", "assistant"] * rng.choice([0, 1, 1, 2]) + ["user"] * rng.choice([0, 0, 1])
    messages = [{"role": role, "content": rng.choice(TEXTS)} for role in roles]
    if messages and rng.random() < 0.5:
        message = rng.choice(messages)
        change = rng.choice(["role", "content", "gone", "parts", "tool_calls", "none"])
        if change == "role":
            message["role"] = rng.choice(ROLES)
        elif change == "content":
            message["content"] = hard_value(rng)
        elif change == "gone":
            del message[rng.choice(["role", "content"])]
        elif change == "parts":
            part = {"type": rng.choice(["text", "image", 3]), "text": hard_value(rng)}
            message["content"] = [part, {"type": "text", "text": "b"}]
        elif change == "tool_calls":
            message.update(content=None, tool_calls=[{"function": "f"}])
        else:
            messages[messages.index(message)] = hard_value(rng)
    return messages


def hard_row(rng, kind):
    """A row of a format, with some of its values hard."""
    if kind == "chat":
        row = {name: hard_chat(rng) for name in ("chosen", "rejected", "messages")}
        return {name: row[name] for name in rng.sample(sorted(row), rng.choice([1, 2, 2, 3]))}
    row = {"prompt": "Why?", "response": " So.", "chosen": " So.", "rejected": " No."}
    if kind == "dialogues":
        start = "\n\nHuman: a\n\nAssistant:"
        row = {"chosen": f"{start} yes", "rejected": f"{start} no"}
    elif kind == "alpaca":
        row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    for name in rng.sample(sorted(row), rng.choice([1, 1, 2, len(row)])):
        row[name] = hard_value(rng)
    if rng.random() < 0.2:
        del row[rng.choice(sorted(row))]
    if rng.random() < 0.2:
        row[rng.choice(["prompts", "completions", "extra", "row", "drop", "é"])] = hard_value(rng)
    return row


def draw_rows(case):
    """A file of rows, good and hard, in one of the formats and kinds of files."""
    rng = case.rng
    kind = rng.choice(["plain", "plain", "dialogues", "alpaca", "chat"])
    suffix = rng.choice(["jsonl", "jsonl", "json", "csv"])
    good = {
        "plain": lambda i: {n: f"{v} {i}" for n, v in input_tests.PAIR.items()},
        "dialogues": lambda i: {
            n: f"\n\nHuman: {i}?\n\nAssistant: {n}" for n in ("chosen", "rejected")
        },
        "alpaca": lambda i: {"instruction": f"Say {i}", "input": "", "output": f"{i}."},
        "chat": lambda i: {
            name: [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": name}]
            for name in ("chosen", "rejected", "messages")
        },
    }[kind]
    rows = [good(i) for i in range(rng.choice([0, 24, 24, 24]))]
    hard = [hard_row(rng, kind) for _ in range(rng.choice([1, 1, 2, 6]))]
    rows += hard * rng.choice([1, 1, 3])  # duplicates
    rng.shuffle(rows)
    file = case.place / f"mine/train.{suffix}"
    file.parent.mkdir()
    if suffix == "csv":
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
        table.writeheader()
        table.writerows(rows)
        content = text.getvalue().encode(errors="surrogatepass")
    else:
        ascii_only = rng.random() < 0.5
        lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
        if suffix == "json":
            lines = [f"[{', '.join(lines)}]"]
        content = "\n".join(lines).encode(errors="surrogatepass")
    if rng.random() < 0.2:
        extra = [
            b"[1]",
            b"3",
            b"\xff\xfe",
            b'{"prompt": "a',
            b"\n\n",
            b"\xef\xbb\xbf",
            b"null",
            b'"',
        ]
        extra = rng.choice(extra)
        content = rng.choice([content + b"\n" + extra, extra + b"\n" + content])
        case.notes.append(f"and {extra!r}")
    file.write_bytes(content)
    case.notes.append(f"{suffix} of {len(rows)} rows, {kind}: {json.dumps(hard)[:300]}")
    case.flags += ["--data_path", f"mine/train.{suffix}"]
    if kind == "chat":
        roles = ["actor_", "critic_"] if case.script == "ppo" else [""]
        for role in roles:
            name = "chat_judge" if role == "critic_" else "chat_actor"
            case.flags += [f"--{role}model_name_or_path", name]
    if case.script == "ppo" and rng.random() < 0.5:
        case.flags += ["--reward_fn", "score.py:length"]
    case.flags += rng.choice([[], [], ["--strict"]])


# --------------------------------------------------------------------------------------------------
# Output folders
# --------------------------------------------------------------------------------------------------
def unfinish(output, last):
    """Makes a finished run one that was killed before it saved its model, after step `last`."""
    record = json.loads((output / "args.json").read_text())
    for name in record["files"]:
        (output / name).unlink()
    put(output / "args.json", json.dumps({**record, "files": []}))
    for name in ("ema", "critic"):
        if (output / name).is_dir():
            (output / name).rmdir()
    for folder in (output / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > last:
            shutil.rmtree(folder)


def change_args(case, output):
    """Damages args.json, or changes one of its values."""
    file = output / "args.json"
    if file.is_file():
        case.rng.choice([damage_file, damage_json])(case, file)


def change_checkpoint(case, output):
    """Damages a file of a checkpoint."""
    files = sorted(p for p in (output / "checkpoints").rglob("*") if p.is_file())
    if not files:
        return
    if case.rng.random() < 0.4:
        files = [path for path in files if path.name == "manifest.json"] or files
        path = case.rng.choice(files)
        content = case.rng.choice(
            ["[]", "3", "{}", '{"a": [1, 2]}', '{"a": 1}', "null", '{"/etc/passwd": [1, 2]}']
        )
        case.notes.append(f"{path.relative_to(case.place)}: {content}")
        put(path, content)
    else:
        damage_file(case, case.rng.choice(files))


def add_foreign(case, output):
    """Puts a file of the user's own there."""
    names = """notes.txt my_model.safetensors ema/notes.txt critic/x/y.json metrics.csv config.yaml
        checkpoints/step-by-step.md checkpoints/notes/a.txt checkpoints/step-2-copy/rank0.pt .hidden
        checkpoints/step-2.txt checkpoints/step-x/a.pt model/model.safetensors samples.txt"""
    name = case.rng.choice(names.split())
    path = output / name
    if path.exists() or not all(p.is_dir() for p in path.parents if p.exists()):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    case.mine.append(path.resolve())
    case.notes.append(f"a file of mine: {name}")


def add_link(case, output):
    """Moves a part of the folder elsewhere, and puts a link in its place."""
    parts = [output, *sorted(output.iterdir())] if output.is_dir() else []
    parts = [p for p in parts if not p.is_symlink()]
    if not parts:
        return
    part, elsewhere = case.rng.choice(parts), case.place / "elsewhere"
    if elsewhere.exists():
        return
    if part.is_dir() or part.suffix == ".jsonl":  # what lies behind such a link is the run's
        case.parts.add("elsewhere")
    part.rename(elsewhere)
    case.mine = [elsewhere / p.relative_to(part) if part in p.parents else p for p in case.mine]
    target = case.rng.choice([elsewhere, "gone"]) if part.suffix else elsewhere
    part.symlink_to(target)
    if part.suffix == ".jsonl":
        case.compared = {"weights"}
    case.notes.append(f"{part.relative_to(case.place)}: a link to {Path(target).name}")


def add_odd(case, output):
    """Puts something there that has the name of a part, and is none."""
    rng = case.rng
    name = rng.choice(
        """checkpoints/step-3 checkpoints/step-99 checkpoints/step-007 checkpoints/unfinished .lock
        metrics.jsonl samples.jsonl curves.png .saving ema critic checkpoints .args.json args.json
        nonfinite_rank0.jsonl checkpoints/damaged-step-1 ema/.saving checkpoints/step-²""".split()
    )
    path = output / name
    if not all(p.is_dir() for p in path.parents if p.exists()):
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = rng.choice(["a folder", "a file", "a dead link", "an empty file"])
    if path.suffix == ".jsonl":
        case.compared = {"weights"}
    case.notes.append(f"{name}: {kind}")
    if kind == "a folder":
        path.mkdir()
    elif kind == "a dead link":
        path.symlink_to("gone")
    else:
        path.write_text("x" * (kind == "a file"))


def forbid(case, output):
    """Makes the folder or a part of it read-only, also for root."""
    case.forbidden = True
    folders = [p for p in (output, *output.rglob("*")) if p.is_dir() and not p.is_symlink()]
    if folders:
        folder = case.rng.choice(folders[:4])
        folder.chmod(0o555)
        case.notes.append(f"{folder.relative_to(case.place)}: read-only")


def lock(case, output):
    """Another run is alive in the folder. (Closed when this process ends the case.)"""
    if output.is_dir() and not (output / ".lock").exists():
        case.locked = open(output / ".lock", "w")
        case.locked.write(f"process {os.getpid()} on here since today")
        case.locked.flush()
        fcntl.flock(case.locked, fcntl.LOCK_EX)
        case.codes = {2}
        case.notes.append("a living run's lock")


def draw_output(case):
    """An output folder in some odd states, and flags that go on with it, or replace it."""
    rng, output = case.rng, case.place / "out"
    state = rng.choice(["finished", "unfinished", "unfinished", "unfinished", "new"])
    case.notes.append(state)
    ways = [change_args, change_checkpoint, change_checkpoint, add_foreign, add_link, add_odd, lock]
    if state == "new":
        output.mkdir()
        ways = [add_foreign, add_link, add_odd, add_odd]
    else:
        shutil.copytree(case.place / f"../runs/{case.script}/out", output)
        case.truth = outcome_of(case.place.parent / f"runs/{case.script}")
        case.flags += SAVING
    if state == "unfinished":
        unfinish(output, rng.choice([4, 1, 2, 3]))
    for way in rng.sample(ways, rng.choice([1, 1, 2, 2, 3])):
        way(case, output)
    if rng.random() < 0.12 and not case.locked:
        forbid(case, output)
    case.flags += rng.choice([[], ["--overwrite"], ["--resume"], ["--resume"], ["--resume"]])
    if "--resume" not in case.flags:
        case.truth = None
    if rng.random() < 0.15:
        draw_flags(case)
        case.truth = None


# --------------------------------------------------------------------------------------------------
# Resumed runs
# --------------------------------------------------------------------------------------------------
FINE = {  # values that may be drawn together, of flags that shape a run
    "all": """seed 0 7|dropout 0 0.1 0.5|lr_scheduler_type linear constant|weight_decay 0 0.3|
        num_warmup_steps 0 3|max_grad_norm 0 0.1|group_by_length 0 1|adam_betas 0.9,0.999 0.5,0.5|
        zero_stage 0 1 2 3|gradient_accumulation_steps 1 2|dtype fp32 bf16|eval_steps 0 1 3|
        gradient_checkpointing|log_steps 1 3|num_train_epochs 1 3|adam_offload|lora_dim 0 2|
        data_split 1,1,1 0.2,0.2,0.2|learning_rate 1e-5 1e-2|keep_checkpoints 1 9""",
    "sft": "train_on everything|num_samples 0 2|max_seq_len 8 40|merge_lora",
    "reward": "center_coef 0 0.1|share_prompt 0 1|value_head_prefix score v_head|max_seq_len 9 40",
    "ppo": """temperature 0.5 2|advantage reinforce rloo grpo|samples_per_prompt 2 4|top_k 3|
        top_p 0.5|min_new_tokens 2|enable_ema 0 1|ema_decay 0.5|kl_target 1|critic_warmup_steps 2|
        entropy_coef 0.01|unsup_data_path data/text.jsonl|clip_high 0.3|dual_clip 3|offload_states|
        missing_eos_penalty 1|reward_fn score.py:length score.py:dice|kl_in loss|kl_estimator k2 k3|
        whiten 0 1|actor_zero_stage 0 3|critic_zero_stage 1 3|critic_dropout 0.2|stop e|
        rollout_batch_size 2|share_prompt 0 1|actor_lora_dim 2|critic_lora_dim 2|target_kl 1e-6|
        allow_unstable 1|ppo_epochs 2|generation_batches 2|gamma 0.9|lam 0.5|normalize_reward 0""",
}


def draw_resumed(case):
    """Flags that go together; the run left alone is made here, and then one of its steps is taken
    as the last before it was killed."""
    rng = case.rng
    table = dict(
        line.split(" ", 1) if " " in line else (line, "")
        for line in re.split(r"\s*\|\s*", f"{FINE['all']}|{FINE[case.script]}".strip())
    )
    known = parser_of(case.script)
    names = [name for name in sorted(table) if name in known]
    for name in rng.sample(names, rng.choice([1, 2, 2, 3, 4])):
        case.flags += [f"--{name}", *([rng.choice(table[name].split())] if table[name] else [])]
    case.flags = [*SAVING, *case.flags]
    code, out, err = run(case)
    if code == 2:  # flags that do not go together: judged as such
        return
    if code:
        case.notes.append(f"the run left alone ended with {code}: {err[-300:]}")
        case.codes = {1, 2} if "not finite" in out + err else {0}
        shutil.rmtree(case.place / "out", ignore_errors=True)
        return
    case.truth = kill.outcome(case.place / "out")
    steps = sorted(int(f.name[5:]) for f in (case.place / "out/checkpoints").glob("step-*"))
    last = rng.choice(steps[:-1] or steps)
    unfinish(case.place / "out", last)
    case.notes.append(f"killed after step {last}")
    case.flags.append("--resume")
    case.codes = {0}


# --------------------------------------------------------------------------------------------------
# All cases
# --------------------------------------------------------------------------------------------------
KINDS = {"flags": draw_flags, "model": draw_model, "rows": draw_rows, "output": draw_output}
KINDS |= {"resumed": draw_resumed}
SHARES = ["flags"] * 6 + ["model"] * 5 + ["rows"] * 5 + ["output"] * 6 + ["resumed"] * 2
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
JUDGES = """
import random
def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]
def dice(prompts, completions, **columns):
    return [random.random() for c in completions]
limit = 3
"""


def make_box(base):
    """Makes what every case finds in its folder: base/box, and finished runs, base/runs."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # its thread would be lost in a fork, with a lock
    logs.draw_curves = lambda args: None
    (base / "trained").mkdir()
    (base / "box").mkdir()
    trained = conftest.save_trained(base / "trained", conftest.make_tiny_model())
    box = input_tests.make_wrong_things(base / "box", trained)
    for name in ("actor", "judge"):
        shutil.copytree(trained / name, box / f"chat_{name}")
        (box / f"chat_{name}/chat_template.jinja").write_text(TEMPLATE)
    put(box / "score.py", JUDGES)
    (box / "data").mkdir()
    for name, count in (("train", 36), ("test", 5)):
        lines = (conftest.ROOT / f"toy/data/{name}.jsonl").read_text().splitlines(keepends=True)
        (box / f"data/{name}.jsonl").write_text("".join(lines[:count]))
    (box / "text.jsonl").write_text('{"text": "To be, or not to be."}\n' * 9)
    model_checks.try_out(f"{box}/actor", False, decoding.leaving)  # imports that all runs need
    for script in SCRIPTS:
        place = base / "runs" / script
        shutil.copytree(box, place, copy_function=os.link)
        case = Case(place, random.Random(0))
        case.script, case.flags = script, SAVING
        code, out, err = run(case)
        assert code == 0, out + err


@functools.cache
def outcome_of(place):
    return kill.outcome(place / "out")


def try_case(base, seed, number):
    """Draws and runs a case. Returns (Case, its kind, exit code, output, what is wrong)."""
    rng = random.Random(f"{seed} {number}")
    place = base / f"case{number}"
    shutil.copytree(base / "box", place, copy_function=os.link, symlinks=True)
    case, kind = Case(place, rng), rng.choice(SHARES)
    try:
        KINDS[kind](case)
        before = tree(place)
        code, out, err = run(case)
        wrong = list(judged(case, before, code, out, err))
    except Exception:  # of this file
        code, out, err, wrong = None, "", traceback.format_exc(), ["the test itself failed"]
    if case.locked:
        case.locked.close()
    shutil.rmtree(place, ignore_errors=True)
    return case, kind, code, out + err, wrong


def said(printed):
    """Returns the message of a run, or its last line."""
    lines = [line for line in printed.splitlines() if line.strip()] or [""]
    at = next((i for i, line in enumerate(lines) if line.startswith("error: ")), len(lines) - 1)
    return " / ".join(lines[at : at + 4])[:400]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case, printed whole")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no case after so many"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    args = parser.parse_args()
    base, began, failed, codes = Path(tempfile.mkdtemp(prefix="rlhf-hostile-")), time.time(), 0, {}
    os.environ["HF_DATASETS_CACHE"] = str(base / "datasets")
    base.chmod(0o755)
    try:
        make_box(base)
        numbers = range(args.cases) if args.only is None else [args.only]
        for number in numbers:
            if time.time() - began > args.seconds:
                break
            start = time.time()
            case, kind, code, printed, wrong = try_case(base, args.seed, number)
            codes[kind, code] = codes.get((kind, code), 0) + 1
            if wrong or args.verbose or args.only is not None:
                took = f"exit code {code}, {time.time() - start:.0f} s"
                print(f"{number} {kind}: {took}: {case.words()}", flush=True)
                print(f"    {said(printed) if code else ''}", flush=True)
            if wrong:
                failed += 1
                repeat = f"python tests/hostile.py --seed {args.seed} --only {number}"
                print(f"    WRONG: {'; '.join(wrong)}\n    {repeat}", flush=True)
            if args.only is not None or (wrong and args.verbose):
                print(printed[-6000:], flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    tried = sum(codes.values())
    counts = ", ".join(f"{k} {c}: {n}" for (k, c), n in sorted(codes.items(), key=str))
    print(f"{tried} cases, seed {args.seed}, {failed} wrong   ({counts})")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
