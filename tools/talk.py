"""Talk to models, ours or not, and compare them.

    python tools/talk.py output/sft output/ppo output/ppo/ema --reward output/reward
    python tools/talk.py output/sft output/ppo --reward output/reward --prompts FILE --out FILE
    python tools/talk.py --reward output/reward --score FILE

The first asks what you type, and shows the models' responses side by side with their scores; /help
lists the commands. The second does so with a file of prompts, and ends with a table: means, and how
often each model is better than the first. The third scores the responses of a file, and each
`subset` by itself where the data has that column (RewardBench). FILE is a file in any format that
--data_path of ppo.py takes, or a folder or hub name with a part `train`; its `test` is taken where
it has one. Of data with other parts, such as RewardBench's `filtered`, save one part as a file.

A model is a folder or a name on the hub: a causal LM, or adapters. It runs in one process, on a GPU
if there is one. Responses are sampled as ppo.py samples them, with the same random numbers for all
models.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas

import ppo
from machinery import flags, formats, judges, launch, patches, rows, sources, zero3
from machinery.refused import Refused, program
from tools.chat import session, tables
from tools.chat.models import CHAT, Judge, Writer

# Flags that are passed on to ppo.py's own, which say what each means, and those that are set here
PASSED = (*session.SAMPLING, "per_device_eval_batch_size", "dtype")
SET = "--max_answer_seq_len 256 --per_device_eval_batch_size 16"


# ---- Flags ----
def get_args(argv, words=()):
    """Returns ppo.py's flags, with talk.py's own beside them, checked before anything is loaded.

    words: such as --temperature 0.7, on top of those in argv.
    """
    parser = flags.new_parser(__doc__)
    arg = parser.add_argument
    arg("models", nargs="*", metavar="MODEL", help="folders or hub names")
    arg("--reward", help="a reward model, which scores the responses")
    function = "a function that scores them, too: f(prompts, completions, **columns)"
    arg("--gold_fn", help=function, metavar="FILE:FUNCTION")
    job = parser.add_mutually_exclusive_group().add_argument
    job("--prompts", help="answer these prompts, and compare", metavar="FILE")
    job("--score", help="score the responses there by --reward", metavar="FILE")
    arg("--num", type=int, default=100, help="the first so many rows there [100]; 0: all")
    arg("--out", help="a new .jsonl file for every response and its scores", metavar="FILE")
    wrapped = r"what a question is put in: text with {}, \n a line break; or chat [as in the "
    wrapped += "model's samples.jsonl, else its chat template, else Human: ..., Assistant:]"
    arg("--template", type=read_template, help=wrapped)
    arg("--trust_remote_code", action="store_true", help="run the code that comes with a model")
    group = parser.add_argument_group(f"as in ppo.py, whose --help says what they mean [{SET}]")
    for name in PASSED:
        group.add_argument(f"--{name}", nargs=1)
    own = vars(parser.parse_args([*argv, *words]))
    passed = SET.split()
    for name in PASSED:
        if value := own.pop(name):
            passed += [f"--{name}", *value]
    args = ppo.get_args(passed)
    vars(args).update(own)
    check(args)
    return args


def read_template(text):
    r"""argparse type: returns the template that a person typed, where \n is a line break."""
    if text != CHAT and text.count("{}") != 1:
        raise argparse.ArgumentTypeError(r"chat, or text with one {}: 'Question: {}\nAnswer:'")
    return text.replace("\\n", "\n")


def check(args):
    """Refuses flags that make no job together."""
    if bool(args.models) == bool(args.score):
        raise Refused("no-model", "give models, such as output/sft, or --score FILE.")
    if args.score and (args.gold_fn or not args.reward):
        raise Refused("score-needs-reward", "--score takes --reward, and no --gold_fn.")
    job = args.prompts or args.score
    if args.out and (not job or Path(args.out).exists() or not Path(args.out).parent.is_dir()):
        words = f"--out {args.out}: it takes a new file in a folder that is there, and goes with"
        raise Refused("out-file", f"{words}\n  --prompts or --score. A dialogue has /save.")


# ---- Files ----
def read_rows(args, path, flag, stages, read):
    """Returns what read(row, columns, stage) makes of the first --num rows of a source: dicts.

    The stage is the first of `stages` that can make its rows of the columns. A folder's rows are
    its test split, if it has one. `drop` of a dict is "", or why the row is left out.
    """
    source, columns = sources.read_source(path, flag)
    stage = next((one for one in stages if rows.serves(columns, one)), stages[-1])
    rows.refuse_unknown_columns(path, columns, stage, flag)
    found = []
    part = itertools.islice(source.get("test", source["train"]), args.num or None)
    for number, row in enumerate(part, 1):
        with rows.reading(row, f"{path}, row {number}"):
            found.append(read(row, columns, stage))
    for why, count in Counter(row["drop"] for row in found if row["drop"]).items():
        print(f"{path}: dropped {count} rows: {why}")
    kept = [row for row in found if not row["drop"]]
    if not kept:
        raise Refused("no-rows", f"{flag} {path}: no rows are left.")
    return kept


def read_prompts(args):
    """Returns the rows of --prompts: dicts of prompt, and of the other columns as JSON, `extra`."""

    def read(row, columns, stage):
        row = sources.parse(row)
        prompt, _, _ = rows.read_row(row, stage)
        drop = "" if formats.as_text(prompt or "").strip() else "empty prompt"
        others = {name: row.get(name) for name in [*columns, *row] if name != "prompt"}
        if args.template and isinstance(prompt, str):
            chat, _ = formats.as_chat(prompt, [])  # of a dialogue that is text
            prompt = [{"role": "user", "content": prompt}] if chat is prompt else chat
        return {"prompt": prompt, "extra": json.dumps(others, default=str), "drop": drop}

    return read_rows(args, args.prompts, "--prompts", ["ppo"], read)


def new_file(args):
    """Opens the file of --out, or nothing; each line is in it as soon as it is printed."""
    return open(args.out or os.devnull, "a", buffering=1)


# ---- The three jobs ----
def compare(args, prompts, writers, judge, gold):
    """Answers the prompts with each model, writes --out, and prints the table."""
    answers, out = [], new_file(args)
    for writer in writers:
        made = [writer.prompt(args, i, p["prompt"], p["extra"]) for i, p in enumerate(prompts)]
        found = writer.answers(args, made, step=0)
        table = pandas.DataFrame(found)[["prompt", "text", "ended"]]
        table = table.rename(columns={"text": "response"})
        if judge:
            table["reward"] = judge.scores(args, writer, found)
        if gold:
            table["gold"] = [float(np.sum(score)) for score in judges.scores_of(gold, found)]
        table["response_length"] = [len(row["response_ids"]) for row in found]
        for line in table.to_dict("records"):
            print(json.dumps({"model": writer.name, **line}), file=out)
        answers.append((writer.name, table))
        cut = f"{sum(row['cut'] for row in found)} of them cut at the beginning: too long"
        print(f"{writer.name}: {len(found)} prompts answered, {cut}", flush=True)
    print("", *tables.comparison(answers), sep="\n")


def score(args, judge):
    """Scores the responses of --score, writes --out, and prints means and accuracy."""

    def read(row, columns, stage):
        options = {"train_on": "last", "columns": columns}  # as a reward model reads a response
        made = rows.tokenise_row(row, judge.tokenizer, stage, judge.positions, **options)
        return {**made, "row": sources.parse(row)}

    found = read_rows(args, args.score, "--score", ["reward", "sft"], read)
    pairs = [(row["prompt_ids"], response) for row in found for response in row["responses"]]
    scores = iter(judge.score_ids(args, pairs))
    out, scored = new_file(args), []
    for made in found:
        names = ["chosen_score", "rejected_score"] if len(made["responses"]) > 1 else ["score"]
        own = {name: next(scores) for name in names}
        scored.append(own)
        line = dict(made["row"])
        for name, value in own.items():
            while name in made["row"]:  # a column of the data keeps its name
                name = f"reward_model_{name}"
            line[name] = value
        print(json.dumps(line, default=str), file=out)
        if not args.out:
            print("  ".join(f"{name} {value:8.3f}" for name, value in own.items()))
    named = all("subset" in made["row"] for made in found)
    subsets = [str(made["row"]["subset"]) for made in found] if named else []
    print("", *tables.scored(scored, subsets), sep="\n")


def main(argv=None):
    flags = functools.partial(get_args, sys.argv[1:] if argv is None else argv)
    args = flags()
    launch.silence_libraries()
    patches.do_without_cudnn_attention()
    gold = args.gold_fn and judges.load_function(args.gold_fn, "--gold_fn")
    prompts = read_prompts(args) if args.prompts else None
    judge = Judge(args, args.reward) if args.reward else None
    if args.score:
        return score(args, judge)
    writers = [Writer(args, path) for path in args.models]
    if prompts:
        return compare(args, prompts, writers, judge, gold)
    for writer in writers:
        count = f"{zero3.count_parameters(writer.model):,} weights"
        print(f"{writer.name}: {count}, {writer.dtype}, --template {writer.template!r}")
    known = next((writer.questions for writer in writers if writer.questions), [])
    print("Ask something. /help lists the commands.")
    if known:
        print("\n  ".join(["Held-out questions of the run:", *known[:3]]))
    sys.stdin.reconfigure(errors="replace")  # what is typed may be no UTF-8
    session.Session(flags, writers, judge, gold).run()


if __name__ == "__main__":
    program(main)
