"""Flags: declares those that all scripts share, and gives each of them its value.

A script's `get_args` makes a parser, declares its own flags, adds these, and ends with `parse`.

A recipe says what the command line leaves out: the script's dict TOY, or with --preset NAME the
file recipes/NAME/SCRIPT.flags, one flag a line, where # begins a comment. Any other file of that
form may be given as @FILE. A recipe counts as standing first, and what stands later counts.
--resume takes all flags from the run's args.json instead.
"""

import argparse
import copy
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator

from machinery import config_file, ranks
from machinery.adam import lacks_nvcc
from machinery.refused import Refused, read_run, record_of_model
from machinery.zero3 import older_than

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
FORMAT = 2  # of a run's folder: --resume goes on with runs of this format alone
FINITE = sys.float_info.max  # the largest finite number
STAGES = [0, 1, 2, 3]  # of ZeRO
LORA = "LoRA: train a product of this rank beside each matrix. 0: off"
LORA_RATE = "with LoRA about ten times that of full training [Schulman 2025]"

MODEL = "model_name_or_path"
TRAINED = [f"{role}{MODEL}" for role in ("", "actor_", "critic_")]  # judges are not
OF_A_START = {"resume", "overwrite", "local_rank", "output_dir"}  # flags of one start of a run
# With another value of one of these, or of a model's name, --resume would make another run.
OF_ONE_RUN = {"seed", "data_path", "data_split", "columns", "reward_fn", "preset"}
# A flag that belongs to another one of its recipe: where that one alone is given, it is dropped.
GOES_WITH = {"gold_fn": "data_path", "columns": "data_path", "max_steps": "num_train_epochs"}
LEFT = {  # flags that the scripts do not have, and what there is in their place
    "kl_target": "see variants/adaptive-kl",
    "normalize_reward": "see variants/normalize-reward",
    "is_cap": "see variants/vllm and variants/async-1",
    "stop": "see variants/tool-turns",
    "compile_decoding": "see variants/compiled-decoding",
    "rows_of_all_ranks": "the banner says when a step has other rows than the recipe's",
}


# ---- Declaring ----
class Parser(argparse.ArgumentParser):
    """Raises Refused where argparse would end the program, and reads the lines of flags files."""

    def error(self, text):
        # of a flag that a variant declares argparse writes "--flag:"
        words = text.replace("=", " ").split()
        left = [f"--{flag} left: {LEFT[flag]}." for flag in LEFT if f"--{flag}" in words]
        raise Refused("wrong-flag", "\n  ".join([text, *left, "See --help."]))

    def convert_arg_line_to_args(self, line):
        """Returns the words of a line of a flags file."""
        return [in_project(word) for word in shlex.split(f" {line}".split(" #")[0])]


def new_parser(doc):
    """Returns a parser whose --help opens with `doc`, and which raises Refused."""
    return Parser(
        usage="%(prog)s [--flag value] ...",
        description=doc,
        allow_abbrev=False,
        fromfile_prefix_chars="@",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def flag_group(parser, title, skip=()):
    """Returns `arg`, which declares a flag in the group `title` of --help, unless in `skip`."""
    group = parser.add_argument_group(title)

    def arg(name, value=None, help="", least=0, most=FINITE, needed=False, **options):
        """Declares --name.

        value: its default, which says its type; or a type, and the default is None.
        least, most: its range, or that of each number of a list. options: argparse's.
        needed: without a value of it the script cannot run.
        """
        if name in skip:
            return
        if value is False:
            options["action"] = "store_true"
        elif callable(value):
            options["type"] = value
        else:
            options = {"type": type(value), "default": value, **options}
        flag = group.add_argument(f"--{name}", help=f"{help} [%(default)s]", **options)
        flag.least, flag.most, flag.needed = least, most, needed

    return arg


def numbers(text):
    """argparse type: "2,4,4" becomes [2.0, 4.0, 4.0], as does a default of text."""
    return [float(part) for part in text.split(",")]


def column_names(text):
    """argparse type: "prompt=question,response=answer" becomes a dict."""
    return dict(pair.split("=") for pair in text.split(","))


def add_common_flags(parser, own_forms=()):
    """Declares the flags of all scripts, except those named in `own_forms`."""
    arg = flag_group(parser, "flags that change the result", own_forms)
    arg("preset", str, "a folder of recipes/, or toy; @FILE is another flags file")
    arg("model_name_or_path", str, "hub name or folder; no weights: from scratch", needed=True)
    arg("data_path", str, "hub names, files, folders: docs/data.md", nargs="+", needed=True)
    arg("columns", column_names, "ours=theirs: prompt=question,response=answer")
    shares = "shares of rows: sft, reward, ppo. 2,4,4 [DeepSpeed-Chat]"
    arg("data_split", "2,4,4", shares, most=1e9, type=numbers)
    arg("output_dir", str, "the folder of the run", needed=True)
    cut = "tokens of a row; a long prompt keeps its end, a long response is cut"
    arg("max_seq_len", int, cut, least=2, needed=True)
    arg("group_by_length", 1, "1: rows of like length together; 0: shuffled", most=1)
    # numpy takes no seed above
    arg("seed", 1234, "of all that is random. 1234 [DeepSpeed-Chat]", most=2**32 - 1)
    arg("lora_dim", 0, LORA)
    arg("lora_alpha", 16, "LoRA's product times this / rank", least=1e-6, type=float)
    arg("max_steps", -1, "in place of num_train_epochs; 0: evaluate and end; -1: off", least=-1)
    arg("num_train_epochs", int, "passes over the data", least=1, needed=True)
    arg("learning_rate", float, f"peak; {LORA_RATE}", needed=True)
    arg("weight_decay", float, "decoupled (AdamW); matrices only", needed=True)
    arg("dropout", float, "every dropout; None: what its config says", most=1)
    names = ["cosine", "linear", "constant", "constant_with_warmup"]
    arg("lr_scheduler_type", "cosine", "cosine [DeepSpeed-Chat]", choices=names)
    arg("num_warmup_steps", 0, "optimizer steps of linear warm-up")
    # in fp32 more is 1
    arg("adam_betas", "0.9,0.95", "AdamW's [DeepSpeed-Chat]", most=0.999999, type=numbers)
    arg("max_grad_norm", 1.0, "gradients are scaled down to it; 0: off. 1 [DeepSpeed-Chat]")
    arg("per_device_train_batch_size", int, "rows of a forward on a device", least=1, needed=True)
    arg("gradient_accumulation_steps", 1, "micro-batches of one optimizer step", least=1)
    arg("recipe_rows", int, "rows of a step of all ranks that the recipe is tuned for", least=1)
    arg = flag_group(parser, "flags of speed, memory, and what is written", own_forms)
    arg("per_device_eval_batch_size", int, "the same in evaluation", least=1, needed=True)
    shards = "1 shards optimizer states, 2 gradients, too, 3 weights"
    arg("zero_stage", int, shards, choices=STAGES, needed=True)
    arg("tensor_parallel_size", 1, "ranks that share each layer in training, bf16 only", least=1)
    arg("offload", False, "weights (stage 3) wait in CPU memory between uses")
    arg("adam_offload", False, "optimizer states live and step on the CPU")
    dtype = "of weights; None: bf16 where the hardware has it, else fp16, on a CPU fp32"
    arg("dtype", str, dtype, choices=["bf16", "fp16", "fp32"])
    arg("deepcompile", False, "compile the models that train; GPUs only")
    arg("gradient_checkpointing", False, "recompute activations in backward: 4/3 the work")
    arg("ds_config", str(ROOT / "ds_config.json"), "DeepSpeed knobs without a flag")
    arg("local_rank", -1, "set by the deepspeed launcher", least=-1)
    arg("eval_steps", 0, "steps between evaluations; also at start and end; 0: each epoch")
    arg("log_steps", 1, "the screen shows every so many-th step; metrics.jsonl has all", least=1)
    arg("save_steps", 0, "steps between checkpoints; 0: only when interrupted")
    arg("keep_checkpoints", 1, "how many of the newest checkpoints to keep", least=1)
    arg("keep_best", str, "keep the best model by this metric in best/: eval_loss, eval_gold")
    arg("resume", False, "go on with the run in output_dir, by its own flags")
    arg("trust_remote_code", False, "run the Python code that comes with a model")
    arg("overwrite", False, "output_dir holds a run: move it to NAME.old-1")


# ---- Reading ----
class Flags(argparse.Namespace):
    """The flags as attributes, and `declared`, which is not in vars(args).

    It says what is known of them beside their values: `script` ("sft", "reward", "ppo"), and the
    names of those that are `given` on the command line, and of those that are `left_open`: None,
    until the script fills them in.
    """

    __slots__ = ["declared"]


def parse(parser, toy, argv=None, script=""):
    """Returns Flags: each from `argv`, else its recipe, else its own default; all are checked.

    toy: {flag: value} of the script's own recipe. Which one is taken: see `recipe_of`.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser._option_string_actions["--preset"].choices = presets(script)
    own, of_toy = vars(parser.parse_args([])), stated(parser, words_of(toy))
    parser.set_defaults(**of_toy)  # which --help shows
    given = stated(parser, argv)
    if given.get("resume"):
        given.setdefault("output_dir", of_toy["output_dir"])
        values = resumed(script, given["output_dir"], given, own.keys())
        changed = {flag for flag, value in given.items() if values.get(flag) != value}
        layers = [changed - OF_ONE_RUN]
    else:
        typed = [word for word in argv if not word.startswith("@")]
        layers = [given, stated(parser, typed)]
        name = recipe_of(script, given, files=typed != argv)
        file = [f"@{RECIPES / name / script}.flags"] if name else []
        values = {**(of_toy if name == "toy" else stated(parser, file)), "preset": name}
    args = Flags(**{**own, **values, **given})
    for flag, other in GOES_WITH.items():
        if flag in own and any(other in layer and flag not in layer for layer in layers):
            setattr(args, flag, own[flag])
    refuse_values(parser, args)
    args.dtype = args.dtype or fast_dtype()
    args.output_dir = os.path.expanduser(args.output_dir)  # of --output_dir=~/x no shell does it
    left_open = [name for name, value in vars(args).items() if value is None]
    args.declared = SimpleNamespace(script=script, given={*given}, left_open=left_open)
    refuse_broken(args, rules_of_all)
    config_file.read_config(args)
    return args


def stated(parser, words):
    """Returns {flag: value} of the flags that stand in `words` and in their @FILEs, no defaults."""
    unset = argparse.Namespace(**{flag.dest: parser for flag in parser._actions})
    try:
        found = vars(parser.parse_args(words, unset))
    except ValueError as error:  # of a file: a quotation without end, or no text
        parser.error(str(error))
    return {name: value for name, value in found.items() if value is not parser}


def refuse_values(parser, args):
    """Refuses a needed flag without a value, and a number out of its flag's range, as NaN is."""
    absent = []
    for flag in [flag for flag in parser._actions if flag.dest in args]:
        value = getattr(args, flag.dest)
        if flag.needed and value is None:
            absent.append(f"--{flag.dest}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not flag.least <= number <= flag.most:
                bound = "most" if number > flag.most else "least"
                words = f"--{flag.dest} {number} must be at {bound} {getattr(flag, bound)}."
                raise Refused("out-of-range", words)
    if absent:
        parser.error(f"no recipe gives {', '.join(absent)}: they need a value, or a --preset")


# ---- Recipes ----
def in_project(word):
    """Returns a path of a recipe: what begins with recipes/ lies in this project."""
    return str(ROOT / word) if word.startswith("recipes/") else word


def words_of(toy):
    """Returns what one would type for a TOY, {flag: value}; a list is several words, True none."""
    words = []
    for flag, value in toy.items():
        values = value if isinstance(value, list) else [value] * (value is not True)
        words += [f"--{flag}", *(in_project(str(one)) for one in values)]
    return words


def presets(script):
    """Returns {what --preset may be for a script: what that recipe is for}, its first comment."""
    files = sorted(RECIPES.glob(f"*/{script}.flags"))
    found = {file.parent.name: file.read_text().split("\n")[0].strip("# ") for file in files}
    return {"toy": f"what {script}.py runs without flags", **found}


def recipe_of(script, given, files):
    """Returns the name of the recipe that is taken: the toy where no model is named.

    For a model that a run of ours has made, that run's. None where `files`, @FILEs, take its place.
    Any other model is refused: nobody has said which numbers suit it.
    """
    named = [flag for flag in TRAINED if flag in given]
    if "preset" in given or not named:
        return given.get("preset", "toy")
    if files:
        return None
    known = presets(script)
    for flag in named:
        name = record_of_model(given[flag]).get("preset")
        if name in known:
            return name
    words = f"--{flag} {given[flag]}: no run with a recipe has made it. Say which recipe to take:"
    lines = [f"--preset {name}: {purpose}" for name, purpose in known.items()]
    raise Refused("no-recipe", "\n  ".join([words, *lines, "@FILE: a flags file of your own"]))


def rows_note(args, rows_per_step):
    """Returns words for a run's first lines if a step has other rows than its recipe is tuned for.

    With several responses to a prompt --recipe_rows counts them all, and rows_per_step does not.
    """
    tuned = args.recipe_rows and args.recipe_rows / getattr(args, "samples_per_prompt", 1)
    if tuned in (None, rows_per_step):
        return ""
    return f" (the recipe is tuned for {tuned:g}: docs/runs.md)"


# ---- --resume ----
def resumed(script, output, given, known):
    """Returns {flag: value} of the run in the folder `output`, which goes on; says what differs.

    given: {flag: value} beside --resume. known: the names of all flags. Refuses to go on where
    there is no such run, or where what makes it this run is given otherwise.
    """
    output = os.path.expanduser(output)
    record = read_run(output)
    if not record:
        words = f"--resume: {output} holds no run, or its args.json is missing or damaged."
        raise Refused("no-args-json", words)
    if (record.get("script"), record.get("format")) != (script, FORMAT):
        began = record.get("script")
        how = f"by {began}.py" if began != script else "with another version of this project"
        raise Refused("resume-another", f"--resume: the run in {output} was begun {how}.")
    for name in sorted(given.keys() - OF_A_START):
        was, now = record.get(name), given[name]
        words = f"--{name} was {was} and is now {now}"
        of_one_run = name in OF_ONE_RUN or name.endswith(MODEL)
        if of_one_run and last_parts(was) != last_parts(now):
            raise Refused("flag-changed", f"--resume: {words}, which would be another run.")
        if was != now:
            ranks.say(words)
    began = {name: record[name] for name in known & record.keys() - OF_A_START}
    return began | dict.fromkeys(record["left_open"])


def last_parts(value):
    """Returns the value of a flag as text, of paths their last parts: folders may have moved."""
    return [Path(str(one)).name for one in (value if isinstance(value, list) else [value])]


# ---- Rules: each has a name, whether it is broken, and what to say then ----
def refuse_broken(args, rules):
    """Raises Refused if the flags break one of the rules, such as `rules_of_all`.

    A rule is one that would be broken in silence, or with an error from deep inside a library after
    minutes. In the words {seed} becomes "--seed 7": the flag as it was given.
    """
    for name, broken, words in rules(args):
        if broken:
            shown = {flag: f"--{flag} {value}" for flag, value in vars(args).items()}
            raise Refused(name, words.format(**shown))


def stages_of(args, role=""):
    """Returns the set of ZeRO stages of the models that train, or of that of one role."""
    of_roles = [value for name, value in vars(args).items() if name.endswith(f"{role}_zero_stage")]
    return {args.zero_stage if stage is None else stage for stage in of_roles or [None]}


def rules_of_all(args):
    """Yields the rules of all scripts."""
    stages = stages_of(args)
    lora = any(value for name, value in vars(args).items() if name.endswith("lora_dim"))
    split = args.tensor_parallel_size > 1  # ranks share layers

    counts = len(args.data_split), len(args.adam_betas)
    yield "how-many", counts != (3, 2), "--data_split has 3 numbers, --adam_betas 2."
    on_cpu = get_accelerator().device_name() == "cpu"
    no_gpu = on_cpu and (args.dtype == "fp16" or args.deepcompile)
    words = "--dtype fp16 and --deepcompile need a GPU, the latter with nvcc in $CUDA_HOME/bin."
    yield "gpu-only", no_gpu or args.deepcompile and lacks_nvcc(), words
    needs_zero = (args.adam_offload or args.deepcompile) and 0 in stages
    words = "--adam_offload and --deepcompile need --zero_stage 1, 2 or 3, --offload needs 3."
    yield "zero-only", needs_zero or args.offload and 3 not in stages, words
    words = "{tensor_parallel_size} must divide the ranks, and works in bf16, without --lora_dim."
    uneven = ranks.launched() % args.tensor_parallel_size
    yield "tensor-parallel", split and (lora or args.dtype != "bf16" or uneven), words
    needed = "0.18.5"  # of DeepSpeed
    # with these flags 0.18.5 gave a gradient norm of 8.7 instead of 6.1
    if split or args.adam_offload and args.dtype == "bf16" and 1 in stages:
        needed = "0.19"
    if lora and args.gradient_checkpointing and 3 in stages:
        needed = "0.19.3"  # 0.19.2 ends in a CheckpointError
    words = (
        "A run needs DeepSpeed 0.18.5. --tensor_parallel_size, and --adam_offload in bf16 at stage "
        "1, need 0.19, --lora_dim with --gradient_checkpointing at stage 3 needs 0.19.3."
    )
    yield "old-deepspeed", older_than(needed), words


# ---- Flags of one model, and for the hardware ----
def fast_dtype():
    """Returns "fp32" on a CPU, "bf16" on other hardware that computes in it, and else "fp16"."""
    if get_accelerator().device_name() == "cpu":
        return "fp32"
    # V100 and T4 emulate it. DeepSpeed would ask with a tensor on device 0.
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def with_flags(args, **changes):
    """Returns a copy of the flags, with `changes`."""
    new = copy.copy(args)
    vars(new).update(changes)
    return new


def of_role(args, role):
    """Returns a copy of the flags in which those of one model have the names of the other scripts.

    role: "actor" (lora_dim is then actor_lora_dim, and so on) or "critic"; "" where there is one
    model alone.
    """
    own = {k.removeprefix(f"{role}_"): v for k, v in vars(args).items() if k.startswith(f"{role}_")}
    return with_flags(args, **own)
