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

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import talk_session
import talk_tables
from talk_models import CHAT, DIALOGUE, Judge, Writer

from machinery.base import modules, refused
from machinery.data import formats, rows, sources
from machinery.flags import declaring, ppo_flags, ppo_rules
from machinery.rollout import reward_functions
from machinery.run import launch


def new_parser():
    """Returns the parser of the flags."""
    parser = declaring.new_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folders or hub names")
    arg = declaring.flag_group(parser, "what is done")
    arg("reward", str, "a reward model, which scores the responses")
    function = "a function that scores them, too: f(prompts, completions, **columns)"
    arg("gold_fn", str, function, metavar="FILE:FUNCTION")
    arg("prompts", str, "answer these prompts, and compare", metavar="FILE")
    arg("score", str, "score the responses there by --reward", metavar="FILE")
    arg("num", 100, "the first so many rows of --prompts or --score; 0: all")
    arg("out", str, "a new .jsonl file for every response and its scores", metavar="FILE")
    wrapped = r"what a question is put in: text with {}, \n a line break; or chat. None: as in the "
    wrapped += "model's samples.jsonl, else its chat template, else Human: ..., Assistant:"
    arg("template", str, wrapped)
    arg = declaring.flag_group(parser, "sampling, as in ppo.py", skip=["num_eval_prompts"])
    arg("temperature", 1.0, "of sampling", least=1e-6)
    arg("max_answer_seq_len", 256, "tokens of a response; half of a short model's", least=2)
    arg("max_prompt_seq_len", int, "tokens; a longer one keeps its end. None: what fits", least=2)
    arg("seed", 1234, "of the random numbers", most=2**32 - 1)
    ppo_flags.add_sampling_flags(arg)
    arg = declaring.flag_group(parser, "how models are run")
    arg("per_device_eval_batch_size", 16, "responses sampled or scored at a time", least=1)
    kinds = ["bf16", "fp16", "fp32"]
    arg("dtype", str, "None: fp32 if it was saved so, else what is fast here", choices=kinds)
    arg("trust_remote_code", False, "run the Python code that comes with a model")
    return parser


def get_args(argv=None):
    """Returns the flags, checked before anything is loaded."""
    parser = new_parser()
    args = parser.parse_args(argv)
    declaring.check_numbers(
        args, [action for action in parser._actions if hasattr(action, "least")]
    )
    args._names = frozenset(["models", "reward", "gold_fn", "prompts", "score", "out"])
    declaring.check_names(args)
    if args.template is not None:
        args.template = talk_session.read_template(args.template, "--template")
    if broken := next(broken_rules(args), None):
        refused.fail(broken)
    return args


def broken_rules(args):
    """Yields, in words, what is wrong with the flags together."""
    yield from ppo_rules.sampling_rules(args)
    if args.prompts and args.score:
        yield "--prompts and --score are two jobs: give one of them."
    if args.score and not args.reward:
        yield "--score needs --reward, the reward model that scores."
    if args.score and (args.models or args.gold_fn):
        yield "--score takes --reward alone: no models that write, no --gold_fn."
    if not args.score and not args.models:
        yield "name a model, such as output/sft.\n  `--help` shows how."
    if args.out and not (args.prompts or args.score):
        yield "--out goes with --prompts or --score.\n  In a dialogue, /save writes it down."
    if args.out and (Path(args.out).exists() or not Path(args.out).parent.is_dir()):
        yield f"--out {args.out}: name a file that is not there, in a folder that is."


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
        try:
            made = kept(row, columns, stage)
        except formats.BadRow as error:
            rows.refuse(row, f"{path}, row {number}", error)
        if made == rows.NO_TEMPLATE:
            refused.fail(made)
        if isinstance(made, str):
            dropped[made] += 1
        else:
            found.append(made)
    for why, count in dropped.items():
        print(f"{path}: dropped {count} rows: {why}")
    return found or refused.fail(f"{flag} {path}: no rows are left.")


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
            self.file.write(json.dumps(line) + "\n")
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
            for row, score in zip(found, reward_functions.scores_of(gold, found)):
                row["gold"] = sum(score) if isinstance(score, list) else score
        for row in found:
            scores = {name: row[name] for name in talk_tables.METRICS if name in row}
            line = {"model": writer.name, "prompt": row["prompt"], "response": row["text"]}
            out.write({**line, **scores})
        name = writer.name if writer.name not in answers else f"{writer.name} ({number + 1})"
        answers[name] = found
        cut = sum(row["cut"] for row in found)
        cut = f", {cut} of them without the beginning: too long" if cut else ""
        print(f"{name}: {len(found)} prompts answered{cut}", flush=True)
    print("\n".join(["", *talk_tables.comparison(answers)]))


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
        out.write({**row, **own})
        if not args.out:
            print("  ".join(f"{name} {value:8.3f}" for name, value in own.items()))
    print("\n".join(["", *talk_tables.scored(scored)]))


def main(argv=None):
    args = get_args(argv)
    launch.silence_libraries()
    launch.warn_of_bf16(args)
    gold = args.gold_fn and reward_functions.load_function(args.gold_fn, "--gold_fn")
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
    print("Ask something. /help lists the commands.")
    talk_session.Session(args, new_parser(), writers, judge, gold).run()


if __name__ == "__main__":
    main()
