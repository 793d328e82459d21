"""Declares the flags that all scripts share, fills them from a preset, and checks their ranges.

A script's `get_args` makes a parser, declares its own flags, adds these, and ends with `parse`.
"""

import argparse
import contextlib
import copy
import difflib
import functools
import json
import re
import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from machinery.base import records, refused
from machinery.data import formats
from machinery.flags import refusals
from machinery.models import lora

ROOT = Path(__file__).resolve().parents[2]
FINITE = sys.float_info.max  # the largest finite number
INTEGER = 2**31 - 1  # the largest that fits everywhere
RANK = 2**16  # of LoRA: matrices are no wider
STAGES = [0, 1, 2, 3]  # of ZeRO


# ---- Declaring ----
def new_parser(doc):
    """Returns a parser whose --help opens with `doc`; its errors are `refused.fail`'s."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, width=120)
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False, formatter_class=layout)

    def error(text):
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        unknown = re.findall(r"--[\w-]+", text) if "unrecognized" in text else []
        near = dict.fromkeys(name for flag in unknown for name in nearest_flags(flag, known))
        hint = f"Nearest: {', '.join(near)}. " if near else ""
        refused.fail(f"{text}\n  {hint}`{parser.prog} --help` lists every flag.")

    parser.error = error
    return parser


def nearest_flags(flag, known):
    """Returns the flags of `known` that `flag` may stand for, three at most.

    They are spelled like it, have its initials (--lr), or contain it (--epochs).
    """
    name, names = flag[2:].replace("-", "_"), [other[2:] for other in known]
    initials = [n for n in names if name in "".join(word[0] for word in n.split("_"))]
    containing = [other for other in names if name in other]
    near = [*difflib.get_close_matches(name, names, 2), *initials, *containing]
    return [f"--{other}" for other in near[:3]]


def flag_group(parser, title, skip=()):
    """Returns `arg`, which declares a flag in the group `title` of --help, unless in `skip`."""
    group = parser.add_argument_group(title)

    def arg(name, value=None, help="", least=0, most=None, fixed=False, **options):
        """Declares --name.

        value: its default, which says its type; or a type, and the default is None.
        least, most: its range, or that of each number of a list; None: INTEGER or FINITE, by type.
        `most=math.inf` allows infinity. options: argparse's.
        fixed: --resume must find it unchanged.
        """
        if name in skip:
            return
        if value is False:
            options["action"] = "store_true"
        elif isinstance(value, list):
            options.update(nargs="+", default=value)
        elif callable(value):
            options["type"] = value
        elif value is not None:
            options = {"type": type(value), "default": value, **options}
        if most is None:
            most = INTEGER if options.get("type") is int else FINITE
        default = "" if "action" in options else " [%(default)s]"
        flag = group.add_argument(f"--{name}", help=help + default, **options)
        flag.least, flag.most, flag.fixed = least, most, fixed

    return arg


def numbers(count):
    """argparse type: with count 3 "2,4,4" becomes [2.0, 4.0, 4.0], as does a default of text."""

    def parsed(text):
        with contextlib.suppress(ValueError):
            values = list(map(float, text.split(",")))
            if len(values) == count:
                return values
        raise argparse.ArgumentTypeError(f"{text!r} is not {count} numbers joined by commas")

    return parsed


def column_names(text):
    """argparse type: "prompt=question,response=answer" becomes a dict."""
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not like prompt=question,response=answer")
    for name, _ in pairs:
        if name not in formats.COLUMNS:
            known = ", ".join(formats.COLUMNS)
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {known}")
    return dict(pairs)


def add_common_flags(parser, own_forms=()):
    """Declares the flags of all scripts, except those named in `own_forms`."""
    parser.usage = "%(prog)s [--flag value] ..."
    parser.description += "\nThe last [ ] of a flag is its value here, from the preset."
    add_result_flags(flag_group(parser, "flags that change the result", own_forms))
    title = "flags that change only speed, memory, and what is written"
    add_speed_flags(flag_group(parser, title, own_forms))


def add_result_flags(arg):
    """Declares what a run starts from, and what trains, how long, and how fast."""
    arg("preset", str, "a named recipe. toy when no model is named, else the script's first")
    start = "hub name or folder; one without weights starts from scratch"
    arg("model_name_or_path", str, start, fixed=True)
    files = "hub names, .jsonl .json .csv .parquet files, folders of them"
    arg("data_path", str, files, nargs="+", fixed=True)
    names = "which columns of data_path are ours: prompt=question,response=answer"
    arg("columns", column_names, names, fixed=True)
    split = "shares of the rows that sft, reward, ppo take, disjoint. 2,4,4 [DeepSpeed-Chat]; "
    split += "None: all rows, or 2,4,4 if steps share your data"
    arg("data_split", numbers(3), split, most=1e9, fixed=True)
    arg("output_dir", str, "where everything that the run leaves behind goes")
    length = "tokens of prompt + response; a long prompt keeps its end, a long response is cut"
    arg("max_seq_len", int, length, least=2, fixed=True)
    arg("strict", False, "a row to be dropped (empty, pair of equals, ...) is an error")
    together = "1: rows of like length together; 0: plain shuffle"
    arg("group_by_length", 1, together, most=1, fixed=True)
    seed = "initialisation, shuffling, sampling. 1234 [DeepSpeed-Chat]"
    arg("seed", 1234, seed, most=2**32 - 1, fixed=True)  # numpy takes no more
    thin = "LoRA: train a product of this rank beside each matrix. 0: off"
    arg("lora_dim", 0, thin, most=RANK, fixed=True)
    times = "LoRA's product is multiplied by lora_alpha / rank"
    arg("lora_alpha", 16, times, least=1e-6, type=float, fixed=True)
    arg("lora_targets", ["all-linear"], "modules that LoRA adapts, as peft names them", fixed=True)
    arg("max_steps", -1, "stop there; 0: evaluate and end; -1: as num_train_epochs says", least=-1)
    arg("num_train_epochs", int, "passes over the data", least=1)
    arg("learning_rate", float, "peak; with LoRA ten times the preset's")
    arg("weight_decay", float, "decoupled (AdamW); matrices only, not biases and norms")
    arg("dropout", float, "every dropout of the model; None: what its config says", most=1)
    names = ["cosine", "linear", "constant", "constant_with_warmup"]
    schedule = "of transformers. cosine [DeepSpeed-Chat]"
    arg("lr_scheduler_type", "cosine", schedule, choices=names, fixed=True)
    arg("num_warmup_steps", 0, "optimizer steps of linear warm-up")
    betas = "AdamW's betas. 0.9,0.95 [DeepSpeed-Chat]"
    arg("adam_betas", "0.9,0.95", betas, most=0.999999, type=numbers(2))  # fp32: more is 1
    arg("max_grad_norm", 1.0, "gradients are scaled down to it; 0: never. 1 [DeepSpeed-Chat]")
    arg("per_device_train_batch_size", int, "rows of one forward on one device", least=1)
    arg("gradient_accumulation_steps", 1, "micro-batches of one optimizer step", least=1)


def add_speed_flags(arg):
    """Declares how the devices share the work, what the run writes, and when it stops."""
    arg("per_device_eval_batch_size", int, "rows of one forward of the evaluation", least=1)
    arg("zero_stage", int, "1 shards optimizer states, 2 gradients, too, 3 weights", choices=STAGES)
    split = "ranks that share each layer of a model in training (AutoTP), bf16 only"
    arg("tensor_parallel_size", 1, split, least=1, fixed=True)
    arg("offload", False, "weights (stage 3) wait in CPU memory between uses")
    arg("adam_offload", False, "optimizer states live and step on the CPU (DeepSpeedCPUAdam)")
    dtype = "of weights; None: bf16 where the hardware has it, else fp16, on a CPU fp32"
    arg("dtype", str, dtype, fixed=True, choices=["bf16", "fp16", "fp32"])
    arg("deepcompile", False, "compile the models that train (DeepCompile); GPUs only")
    arg("gradient_checkpointing", False, "recompute activations in backward: 4/3 the work")
    arg("ds_config", str(ROOT / "ds_config.json"), "DeepSpeed knobs that have no flag here")
    arg("local_rank", -1, "set by the deepspeed launcher", least=-1)
    arg("merge_lora", False, "save a plain model, LoRA added in, not peft's adapters")
    arg("eval_steps", 0, "steps between evaluations, also at the ends; 0: after each epoch")
    arg("log_steps", 1, "steps between two lines on the screen and in metrics.jsonl", least=1)
    arg("save_steps", 0, "steps between checkpoints; 0: only when interrupted")
    arg("keep_checkpoints", 1, "how many of the newest checkpoints to keep", least=1)
    arg("keep_best", str, "a metric: keep the best model by it in best/ (eval_loss, eval_gold)")
    arg("max_hours", 0, "then stop, with a checkpoint; 0: no limit", type=float)
    wait = "how long a rank waits for another before it gives up, and says for which"
    arg("timeout_minutes", 30, wait, least=1e-6, most=60 * 24 * 365, type=float)
    arg("resume", False, "go on from the newest whole checkpoint in output_dir")
    arg("trust_remote_code", False, "run the Python code that comes with a model")
    arg("overwrite", False, "output_dir holds a run: replace it")


# ---- Reading ----
def parse(parser, presets, argv=None, script=""):
    """Returns the Namespace of all flags: from `argv`, else a preset, else their defaults.

    presets: {name: {flag: value}} of the script, to which its toy is added. Where a folder of ours
    is named, its preset is meant; else the first when a model is named, and the toy when none is.
    `_fixed`: what --resume must find as it was; `_given`: the flags in `argv`; `_preset`: the
    preset's values; `_preset_from`: the folder that it is from, or None; `_names`: flags that name
    what is read or written; `_script`: `script`.
    """
    argv = sys.argv[1:] if argv is None else argv
    presets = dict(presets)
    if toy := toy_preset(script):
        presets.setdefault("toy", toy)
    names_model = any("model_name_or_path" in word for word in argv)
    first = next(iter(presets))
    default = first if names_model else "toy" if "toy" in presets else first
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.error = parser.error
    named.add_argument("--preset")
    for model in ("", "actor_", "critic_"):
        named.add_argument(f"--{model}model_name_or_path", nargs="?")
    given = vars(named.parse_known_args(argv)[0])
    preset, folder = given.pop("preset"), None
    if preset is None:
        preset, folder = preset_of_folders(given.values(), presets) or (default, None)
    if preset not in presets:
        refused.fail(f"--preset {preset} is not known.\n  Known: {', '.join(presets)}.")
    parser.set_defaults(**presets[preset], preset=preset)
    args = parser.parse_args(argv)
    args.dtype = args.dtype or fast_dtype()
    flags = [action for action in parser._actions if hasattr(action, "fixed")]
    args._script = script
    args._fixed = frozenset(flag.dest for flag in flags if flag.fixed)
    args._given = {word[2:].partition("=")[0] for word in argv if word.startswith("--")}
    args._preset, args._preset_from = presets[preset], folder
    lora.raise_rates(args)
    texts = [flag for flag in flags if flag.type is str and not flag.choices]
    args._names = frozenset(flag.dest for flag in texts)  # of files, folders, models
    groups = [group for group in parser._action_groups if "only speed" in group.title]
    args._speed = frozenset(flag.dest for group in groups for flag in group._group_actions)
    check_names(args)
    check_numbers(args, flags)
    if not any(args.data_split):
        refused.fail("--data_split: one of its numbers must be above 0.")
    if why_not := refusals.refusal(args):
        refused.fail(why_not)
    if "data_path" in args._given and not args._given & {"data_split", "preset"}:
        args.data_split = None  # data_split.default decides, once the data is read
        args._fixed -= {"data_split"}
    return args


def preset_of_folders(paths, presets):
    """Returns (preset, folder) of the first of the paths that a run of ours has left, or None."""
    for path in filter(None, paths):
        preset = records.of_model(path).get("preset")
        if isinstance(preset, str) and preset in presets:
            return preset, path


def toy_preset(script):
    """Returns the toy's values for the flags of `script` ("sft", ...); {} if there are none.

    TOY in toy/presets.json stands for the path of that folder.
    """
    file = ROOT / "toy/presets.json"
    path = json.dumps(str(file.parent))[1:-1]  # with the escapes of JSON
    text = file.read_text() if file.exists() else "{}"
    return json.loads(text.replace("TOY", path)).get(script, {})


def fast_dtype():
    """Returns "bf16" if the hardware computes in it; if not, "fp32" on a CPU and else "fp16"."""
    kind = get_accelerator().device_name()
    if kind == "cpu":
        return "bf16" if refusals.cpu_has_bf16() else "fp32"
    if kind == "cuda":  # V100 and T4 emulate it. To ask about that would take memory of device 0
        in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        in_hardware = get_accelerator().is_bf16_supported()
    return "bf16" if in_hardware else "fp16"


def check_numbers(args, flags):
    """Refuses a number out of its flag's range. NaN is in no range."""
    for flag in flags:
        given = getattr(args, flag.dest)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, (int, float)) and not flag.least <= value <= flag.most:
                most = f", and {flag.most} or less" if flag.most < FINITE else ""
                finite = "finite, " if flag.most == FINITE else ""
                rule = f"It must be {finite}{flag.least} or more{most}."
                refused.fail(f"--{flag.dest} {value} is out of range.\n  {rule}")


def check_names(args):
    """Refuses a name that is no UTF-8, or too long for file systems: 255 bytes a part."""
    for flag in sorted(args._names):
        value = getattr(args, flag)
        for text in value if isinstance(value, list) else [value or ""]:
            if text != text.encode(errors="ignore").decode():
                refused.fail(f"--{flag} {text!r} is no UTF-8.\n  Rename it.")
            if max(map(len, text.encode().split(b"/"))) > 255 or len(text.encode()) > 4095:
                refused.fail(f"--{flag} {text[:40]}... is a name of {len(text)} characters.")


def of_role(args, role="", **changes):
    """Returns a copy of the flags for one model, with `changes`.

    role: "actor" (lora_dim is then actor_lora_dim, etc.), "critic", or "" for flags as they are.
    """
    new = copy.copy(args)
    for name, value in vars(args).items():
        if role and name.startswith(f"{role}_"):
            setattr(new, name.removeprefix(f"{role}_"), value)
    vars(new).update(changes)
    return new
