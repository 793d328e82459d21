"""Talk to models, ours or not, and compare them.

    python tools/talk.py output/sft output/ppo output/ppo/ema --reward output/reward
    python tools/talk.py output/sft output/ppo --reward output/reward --prompts FILE --out FILE
    python tools/talk.py --reward output/reward --score FILE

The first asks what you type, and shows the models' responses side by side with their scores; /help
lists the commands. The second does so with a file of prompts, and ends with a table: means, and how
often each model is better than the first. The third scores the responses of a file. FILE is a hub
name, file or folder in any format that --data_path of ppo.py takes.

A model is a folder or a name on the hub: a causal LM, or adapters. It runs in one process, on a GPU
if there is one. Responses are sampled as ppo.py samples them, with the same random numbers for all
models.
"""

import argparse
import functools
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo
from machinery.base import modules, refused
from machinery.base.refused import Refused
from machinery.data import rows, sources
from machinery.engine import patches
from machinery.rollout import judging
from machinery.run import launch
from tools.chat import session, tables
from tools.chat.models import CHAT, DIALOGUE, Judge, Writer

# What is passed on to ppo.py's own flags, which say what each means, and its values here
PASSED = {name: None for name in session.SAMPLING} | {
    "max_answer_seq_len": "256",
    "per_device_eval_batch_size": "16",
    "dtype": None,
}


# ---- Flags ----
def get_args(argv=None):
    """Returns flags, checked before anything is loaded.

    flags(words) returns all of ppo.py's flags, with talk.py's own beside them, and words such as
    --temperature 0.7 on top of what was given.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    arg = parser.add_argument
    arg("models", nargs="*", metavar="MODEL", help="folders or hub names")
    arg("--reward", help="a reward model, which scores the responses")
    function = "a function that scores them, too: f(prompts, completions, **columns)"
    arg("--gold_fn", help=function, metavar="FILE:FUNCTION")
    arg("--prompts", help="answer these prompts, and compare", metavar="FILE")
    arg("--score", help="score the responses there by --reward", metavar="FILE")
    arg("--num", type=int, default=100, help="the first so many rows there [100]; 0: all")
    arg("--out", help="a new .jsonl file for every response and its scores", metavar="FILE")
    wrapped = r"what a question is put in: text with {}, \n a line break; or chat [as in the "
    wrapped += "model's samples.jsonl, else its chat template, else Human: ..., Assistant:]"
    arg("--template", help=wrapped)
    arg("--trust_remote_code", action="store_true", help="run the code that comes with a model")
    group = parser.add_argument_group("as in ppo.py, whose --help says what they mean")
    for name, value in PASSED.items():
        count = "+" if name == "stop" else 1
        group.add_argument(
            f"--{name}", nargs=count, default=value and [value], help=value and f"[{value}]"
        )
    own = parser.parse_args(argv)
    if own.template is not None:
        own.template = read_template(own.template)
    check(own)
    flags = functools.partial(all_flags, own)
    flags()
    return flags


def all_flags(own, words=()):
    """Returns ppo.py's flags, as talk.py needs them; own: what was given to talk.py."""
    passed = []
    for name in PASSED:
        if value := getattr(own, name):
            passed += [f"--{name}", *value]
    args = ppo.get_args([*passed, *["--trust_remote_code"] * own.trust_remote_code, *words])
    for name, value in vars(own).items():
        if name not in PASSED:
            setattr(args, name, value)
    args.own_dtype = own.dtype and own.dtype[0]  # None: the model's
    return args


def read_template(text):
    r"""Returns the template that a person typed, where \n is a line break."""
    if text != CHAT and text.count("{}") != 1:
        example = r"'Question: {}\nAnswer:'"
        words = f"--template {text!r}: it is chat, or text with one {{}}.\n  Like {example}."
        raise Refused("template", words)
    return text.replace("\\n", "\n")


def check(own):
    """Refuses flags that make no job together."""
    if own.prompts and own.score:
        raise Refused("two-jobs", "--prompts and --score are two jobs: give one of them.")
    if own.score and (own.models or own.gold_fn or not own.reward):
        words = "--score takes --reward alone: no models that write, no --gold_fn."
        raise Refused("score-needs-reward", words)
    if not own.score and not own.models:
        raise Refused("no-model", "name a model, such as output/sft.\n  `--help` shows how.")
    if own.out and not (own.prompts or own.score):
        words = "--out goes with --prompts or --score.\n  In a dialogue, /save writes it down."
        raise Refused("out-without-job", words)
    if own.out and (Path(own.out).exists() or not Path(own.out).parent.is_dir()):
        words = f"--out {own.out}: name a file that is not there, in a folder that is."
        raise Refused("out-file", words)


# ---- Files ----
def read_rows(args, path, flag, stages, kept):
    """Returns what kept(row, columns, stage) makes of the first --num rows of a source.

    The stage is the first of `stages` that can make its rows of the columns. A folder's rows are
    its test split, if it has one. kept returns a text for a row to leave out: why.
    """
    source, columns = sources.read_source(path, flag)
    able = [one for one in stages if rows.serves(columns, one)]
    stage = [*able, stages[-1]][0]
    rows.check_columns(path, columns, stage, flag)
    found, dropped = [], Counter()
    for number, row in enumerate(source.get("test", source["train"]), 1):
        if args.num and len(found) == args.num:
            break
        with rows.reading(row, f"{path}, row {number}"):
            made = kept(row, columns, stage)
        if isinstance(made, str) and made in rows.FATAL:
            raise Refused("chat-template", f"{path}: {made}.")
        if isinstance(made, str):
            dropped[made] += 1
        else:
            found.append(made)
    for why, count in dropped.items():
        print(f"{path}: dropped {count} rows: {why}")
    if not found:
        raise Refused("no-rows", f"{flag} {path}: no rows are left.")
    return found


def read_prompts(args):
    """Returns (prompt, other columns as JSON) of the rows of --prompts."""

    def kept(row, columns, stage):
        row = sources.parse(row)
        prompt, _, _ = rows.read_row(row, stage)
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            return "empty prompt"
        others = {**dict.fromkeys(columns), **row}
        others.pop("prompt", None)
        if args.template and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, json.dumps(others, default=str)

    return read_rows(args, args.prompts, "--prompts", ["ppo"], kept)


class Output:
    """The file of --out, or nothing."""

    def __init__(self, path):
        self.file = open(path, "x") if path else None

    def write(self, line):
        """Writes a dict as a line of JSON."""
        if self.file:
            self.file.write(json.dumps(line, default=str) + "\n")
            self.file.flush()


# ---- The three jobs ----
def compare(args, prompts, writers, judge, gold):
    """Answers the prompts with each model, writes --out, and prints the table."""
    answers, out = {}, Output(args.out)
    for number, writer in enumerate(writers):
        made = [writer.prompt(args, i, *prompt) for i, prompt in enumerate(prompts)]
        found = writer.answers(args, made, step=0)
        for row in found:
            row["response_length"] = len(row["response_ids"])
        if judge:
            for row, score in zip(found, judge.scores(args, writer, found)):
                row["reward"] = score
        if gold:
            for row, score in zip(found, judging.scores_of(gold, found)):
                row["gold"] = sum(score) if isinstance(score, list) else score
        for row in found:
            scores = {name: row[name] for name in tables.METRICS if name in row}
            line = {"model": writer.name, "prompt": row["prompt"], "response": row["text"]}
            out.write({**line, **scores})
        name = writer.name if writer.name not in answers else f"{writer.name} ({number + 1})"
        answers[name] = found
        cut = sum(row["cut"] for row in found)
        cut = f", {cut} of them without the beginning: too long" if cut else ""
        print(f"{name}: {len(found)} prompts answered{cut}", flush=True)
    print("\n".join(["", *tables.comparison(answers)]))


def score(args, judge):
    """Scores the responses of --score, writes --out, and prints means and accuracy."""

    def kept(row, columns, stage):
        options = {"train_on": "last", "columns": columns}  # as a reward model reads a response
        made = rows.tokenise_row(row, judge.tokenizer, stage, judge.positions, **options)
        return made["drop"] or (sources.parse(row), made)

    found = read_rows(args, args.score, "--score", ["reward", "sft"], kept)
    pairs = []
    for _, made in found:
        pairs += [(made["prompt_ids"], response) for response in made["responses"]]
    scores = iter(judge.score_ids(args, pairs))
    out, scored = Output(args.out), []
    for row, made in found:
        names = ["chosen_score", "rejected_score"] if len(made["responses"]) > 1 else ["score"]
        own = {name: next(scores) for name in names}
        scored.append(own)
        line = dict(row)
        for name, value in own.items():
            while name in row:  # a column of the data keeps its name
                name = f"reward_model_{name}"
            line[name] = value
        out.write(line)
        if not args.out:
            print("  ".join(f"{name} {value:8.3f}" for name, value in own.items()))
    print("\n".join(["", *tables.scored(scored)]))


def main(argv=None):
    flags = get_args(argv)
    args = flags()
    launch.silence_libraries()
    patches.do_without_cudnn_attention()
    gold = args.gold_fn and judging.load_function(args.gold_fn, "--gold_fn")
    prompts = read_prompts(args) if args.prompts else None
    judge = Judge(args, args.reward) if args.reward else None
    if args.score:
        return score(args, judge)
    writers = [Writer(args, path) for path in args.models]
    if prompts:
        return compare(args, prompts, writers, judge, gold)
    for writer in writers:
        count = f"{modules.count_parameters(writer.model):,} weights"
        forms = {DIALOGUE: "Human: ..., Assistant:", CHAT: "its chat template has it"}
        form = forms.get(writer.template, repr(writer.template))
        print(f"{writer.name}: {count}, {writer.dtype}; questions are written as {form}")
    known = next((writer.questions for writer in writers if writer.questions), [])
    print("Ask something. /help lists the commands.")
    if known:
        print("\n  ".join(["Held-out questions of the run:", *known[:3]]))
    sys.stdin.reconfigure(errors="replace")  # what is typed may be no UTF-8
    session.Session(flags, writers, judge, gold).run()


if __name__ == "__main__":
    refused.program(main)
