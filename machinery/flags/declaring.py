"""Declares the flags that all scripts share, fills them from a recipe, and checks them.

A script's `get_args` makes a parser, declares its own flags, adds these, and ends with `parse`.
"""

import argparse
import copy
import difflib
import os
import re
import sys
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator

from machinery.base.refused import Refused
from machinery.engine import config_file
from machinery.flags import recipes, rules
from machinery.flags.recipes import ROOT

FINITE = sys.float_info.max  # the largest finite number
STAGES = [0, 1, 2, 3]  # of ZeRO
LORA = "LoRA: train a product of this rank beside each matrix. 0: off"
LORA_RATE = "with LoRA about ten times that of full training [Schulman 2025]"


# ---- Declaring ----
def new_parser(doc):
    """Returns a parser whose --help opens with `doc`, and which raises Refused."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--flag value] ...",
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def error(text):
        near, known = ["--help"], parser._option_string_actions
        for flag in re.findall(r"--\w+", text):
            near += difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        raise Refused("wrong-flag", f"{text}\n  See {', '.join(near)}.")

    parser.error = error
    return parser


def flag_group(parser, title, skip=()):
    """Returns `arg`, which declares a flag in the group `title` of --help, unless in `skip`."""
    group = parser.add_argument_group(title)

    def arg(name, value=None, help="", least=0, most=FINITE, fixed=False, **options):
        """Declares --name.

        value: its default, which says its type; or a type, and the default is None.
        least, most: its range, or that of each number of a list. options: argparse's.
        fixed: --resume must find it unchanged.
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
        flag.least, flag.most, flag.fixed = least, most, fixed

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
    arg("preset", str, "a folder of recipes/, or toy; @FILE takes another flags file")
    arg("model_name_or_path", str, "hub name or folder; without weights: from scratch", fixed=True)
    files = "hub names (NAME:CONFIGURATION:X), .jsonl .json .csv .parquet files, folders of them"
    arg("data_path", str, files, nargs="+", fixed=True)
    arg("columns", column_names, "ours=theirs: prompt=question,response=answer", fixed=True)
    shares = "disjoint shares of rows: sft, reward, ppo. 2,4,4 [DeepSpeed-Chat]"
    arg("data_split", "2,4,4", shares, most=1e9, type=numbers, fixed=True)
    arg("output_dir", str, "the folder of the run")
    length = "tokens of prompt + response; a long prompt keeps its end, a long response is cut"
    arg("max_seq_len", int, length, least=2, fixed=True)
    arg("group_by_length", 1, "1: rows of like length together; 0: shuffled", most=1, fixed=True)
    # numpy takes no seed above
    arg("seed", 1234, "of all that is random. 1234 [DeepSpeed-Chat]", most=2**32 - 1, fixed=True)
    arg("lora_dim", 0, LORA, fixed=True)
    times = "LoRA's product is multiplied by lora_alpha / rank"
    arg("lora_alpha", 16, times, least=1e-6, type=float, fixed=True)
    arg("max_steps", -1, "in place of num_train_epochs; 0: evaluate and end; -1: not set", least=-1)
    arg("num_train_epochs", int, "passes over the data", least=1)
    arg("learning_rate", float, f"peak; {LORA_RATE}")
    arg("weight_decay", float, "decoupled (AdamW); matrices only")
    arg("dropout", float, "every dropout; None: what its config says", most=1)
    names = ["cosine", "linear", "constant", "constant_with_warmup"]
    arg("lr_scheduler_type", "cosine", "cosine [DeepSpeed-Chat]", choices=names, fixed=True)
    arg("num_warmup_steps", 0, "optimizer steps of linear warm-up")
    # in fp32 more is 1
    arg("adam_betas", "0.9,0.95", "AdamW's [DeepSpeed-Chat]", most=0.999999, type=numbers)
    arg("max_grad_norm", 1.0, "gradients are scaled down to it; 0: never. 1 [DeepSpeed-Chat]")
    arg("per_device_train_batch_size", int, "rows of one forward on one device", least=1)
    arg("gradient_accumulation_steps", 1, "micro-batches of one optimizer step", least=1)
    most = "limit for a forward's rows over all ranks: with many, each has fewer; None: off"
    arg("rows_of_all_ranks", int, most, least=1)
    arg = flag_group(parser, "flags of speed, memory, and what is written", own_forms)
    arg("per_device_eval_batch_size", int, "rows of one forward in evaluation", least=1)
    arg("zero_stage", int, "1 shards optimizer states, 2 gradients, too, 3 weights", choices=STAGES)
    split = "ranks that share each layer of a model in training (AutoTP), bf16 only"
    arg("tensor_parallel_size", 1, split, least=1, fixed=True)
    arg("offload", False, "weights (stage 3) wait in CPU memory between uses")
    arg("adam_offload", False, "optimizer states live and step on the CPU (DeepSpeedCPUAdam)")
    dtype = "of weights; None: bf16 where the hardware has it, else fp16, on a CPU fp32"
    arg("dtype", str, dtype, fixed=True, choices=["bf16", "fp16", "fp32"])
    arg("deepcompile", False, "compile the models that train (DeepCompile); GPUs only")
    arg("gradient_checkpointing", False, "recompute activations in backward: 4/3 the work")
    arg("ds_config", str(ROOT / "ds_config.json"), "DeepSpeed knobs without a flag")
    arg("local_rank", -1, "set by the deepspeed launcher", least=-1)
    arg("eval_steps", 0, "steps between evaluations; also at start and end; 0: each epoch")
    arg("log_steps", 1, "the screen shows every so many-th step; metrics.jsonl has all", least=1)
    arg("save_steps", 0, "steps between checkpoints; 0: only when interrupted")
    arg("keep_checkpoints", 1, "how many of the newest checkpoints to keep", least=1)
    metric = "a metric: keep the best model by it in best/ (eval_loss, eval_gold)"
    arg("keep_best", str, metric, fixed=True)
    arg("resume", False, "go on from the newest whole checkpoint in output_dir")
    arg("trust_remote_code", False, "run the Python code that comes with a model")
    arg("overwrite", False, "output_dir holds a run: move it to NAME.old-1")


# ---- Reading ----
class Flags(argparse.Namespace):
    """The flags as attributes, and `declared`, which is not in vars(args).

    It says what is known of them beside their values: `script` ("sft", "reward", "ppo"), `why` the
    recipe was taken (see recipes.choose), and in sets of names all `flags`, which are `given` on
    the command line itself, which are `fixed` (--resume must find them unchanged), and which hold
    `names` of files, folders, models, functions.
    """

    __slots__ = ["declared"]


def parse(parser, toy, argv=None, script=""):
    """Returns Flags: each from `argv`, else its recipe, else its own default; all are checked.

    toy: {flag: value} of the script's own recipe. Which one is taken: recipes.choose.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser._option_string_actions["--preset"].choices = recipes.names(script)
    words = [word for word in argv if not word.startswith("@")]
    given = recipes.stated(parser, [word for word in words if word not in ("-h", "--help")])
    read = [recipes.read(parser, word[1:]) for word in argv if word.startswith("@")]
    name, why = recipes.choose(script, recipes.merged([*read, given]))
    named = toy if name == "toy" else recipes.FOLDER / name / f"{script}.flags"
    values = recipes.merged([recipes.read(parser, named), *read, given])
    parser.set_defaults(**{**values, "preset": name})
    args = parser.parse_args(words, Flags())
    args.dtype = args.dtype or fast_dtype()
    args.output_dir = os.path.expanduser(args.output_dir)  # of --output_dir=~/x no shell does it
    recipes.divide_rows(args)
    flags = [action for action in parser._actions if hasattr(action, "fixed")]
    args.declared = SimpleNamespace(
        script=script,
        flags={flag.dest for flag in flags},
        given={*given},
        fixed={flag.dest for flag in flags if flag.fixed},
        names={flag.dest for flag in flags if flag.type is str and not flag.choices} - {"stop"},
        why=why,
    )
    rules.refuse_broken(args, rules.of_all)
    config_file.read_config(args)
    return args


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
