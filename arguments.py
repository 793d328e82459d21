"""The flags that all three steps share: declared, filled from a preset, checked, and refused in words where they cannot work.

A script's `get_args` calls `new_parser`, declares its own flags, adds these, and ends with `parse`. `--help` shows them all.
"""
import argparse
import difflib
import functools
import importlib.util
import math
import os
import re
import sys

import common  # first: it quietens the libraries while they are imported
from common import fail, older_than

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

def new_parser(doc):
    """A parser whose --help opens with the script's header, and whose errors are `fail`'s."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, width=120)
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False, formatter_class=layout)
    def wrong(text):
        unknown = re.findall("--[a-z_]+", text) if "unrecognized" in text else []
        near = [known for flag in unknown for known in difflib.get_close_matches(flag, parser._option_string_actions, 2)]
        fail(f"{text}\n  {'Nearest: ' + ', '.join(near) + '. ' if near else ''}`{parser.prog} --help` lists every flag.")
    parser.error = wrong
    return parser

def flags(parser, title, skip=()):
    """-> arg(name, ...), which adds a flag to the group `title`, with its default in the help."""
    group = parser.add_argument_group(title)
    def arg(name, **options):
        if name not in skip:
            group.add_argument(f"--{name}", **{**options, "help": options["help"] + ("" if options.get("action") else " [%(default)s]")})
    return arg

def numbers(text):
    """argparse type: '2,4,4' -> [2.0, 4.0, 4.0]. (A default that is text goes through it, too.)"""
    return [float(x) for x in text.split(",")]

def add_common_arguments(parser, own_forms=()):
    """The flags of all three steps. own_forms: names that the script itself declares (ppo: actor_..., critic_...)."""
    arg = flags(parser, "flags that change the result", own_forms)
    arg("preset", help="a named recipe; any flag overrides it. toy when no model is named, else opt-1.3b's numbers")
    arg("model_name_or_path", help="hub name or folder; a folder with config.json and no weights starts from scratch")
    arg("data_path", nargs="+", help="hub names, .jsonl/.json/.parquet files, or folders of them; several are blended")
    arg("data_split", type=numbers, help="shares of the rows that steps 1, 2, 3 take, disjoint. 2,4,4 [DeepSpeed-Chat]")
    arg("output_dir", help="where everything that the run leaves behind goes")
    arg("lora_dim", type=int, default=0, help="LoRA: freeze the weights, train a product of this rank beside each. 0: off")
    arg("lora_alpha", type=float, default=16, help="that product counts lora_alpha / lora_dim times")
    arg("lora_targets", nargs="+", default=["all-linear"], help="names of the modules that get one, as peft takes them")
    arg("seed", type=int, default=1234, help="initialisation, shuffling, sampling. 1234 [DeepSpeed-Chat]")
    arg("max_steps", type=int, default=-1, help="stop after so many steps; -1: num_train_epochs decides")
    arg("num_train_epochs", type=int, help="passes over the data")
    arg("learning_rate", type=float, help="peak learning rate")
    arg("weight_decay", type=float, help="decoupled (AdamW); matrices only, not biases and norms")
    arg("dropout", type=float, help="every dropout of the model; None: what its config says")
    arg("lr_scheduler_type", default="cosine", choices=["cosine", "linear", "constant", "constant_with_warmup"],
        help="transformers' schedule of that name. cosine [DeepSpeed-Chat]")
    arg("num_warmup_steps", type=int, help="optimizer steps of linear warm-up")
    arg("adam_betas", type=numbers, default="0.9,0.95", help="AdamW's betas. 0.9,0.95 [DeepSpeed-Chat]")
    arg("max_grad_norm", type=float, default=1.0, help="gradients are scaled down to this norm; 0: not at all. 1 [DeepSpeed-Chat]")
    arg("per_device_train_batch_size", type=int, help="rows of one forward on one device")
    arg("gradient_accumulation_steps", type=int, default=1, help="micro-batches of one optimizer step on one device")
    arg("max_seq_len", type=int, help="tokens of prompt + answer; a long prompt keeps its end, a long answer is cut")
    arg("strict", action="store_true", help="a row that would be dropped (empty, no text, pair of equals, ...) is an error")
    arg("group_by_length", type=int, default=1, help="1: steps of rows of like length, little padding; 0: plain shuffle")
    arg = flags(parser, "flags that change only speed, memory, and what is written", own_forms)
    arg("per_device_eval_batch_size", type=int, help="rows of one forward of the evaluation")
    arg("zero_stage", type=int, choices=[0, 1, 2, 3], help="ZeRO: 1 shards optimizer states, 2 gradients too, 3 weights too")
    arg("tensor_parallel_size", type=int, default=1, help="ranks that share each layer of a model in training (AutoTP), bf16 only")
    arg("offload", action="store_true", help="weights (stage 3) wait in CPU memory between uses")
    arg("adam_offload", action="store_true", help="optimizer states live, and are stepped, on the CPU (DeepSpeedCPUAdam)")
    arg("dtype", choices=["bf16", "fp16", "fp32"],
        help="of weights and activations; optimizers keep fp32 master weights. None: bf16 where the hardware has it, else fp16")
    arg("deepcompile", action="store_true", help="compile forward and backward of the models that train (DeepCompile); GPUs only")
    arg("gradient_checkpointing", action="store_true", help="recompute activations in backward: less memory, 4/3 the work")
    arg("merge_lora", action="store_true", help="save a plain model, LoRA added to its weights, not peft's adapters")
    arg("eval_steps", type=int, default=0, help="evaluate every so many steps, 0: after each epoch; always at the start and at the end")
    arg("log_steps", type=int, default=1, help="one line on the screen and in metrics.jsonl every so many steps")
    arg("save_steps", type=int, default=0, help="a checkpoint every so many steps; 0: only when interrupted")
    arg("keep_checkpoints", type=int, default=1, help="how many of the newest checkpoints to keep")
    arg("max_hours", type=float, default=0, help="after so many hours finish the step, save a checkpoint and stop; 0: no limit")
    arg("timeout_minutes", type=float, default=30, help="a rank that waits so long for another gives up, and says for which")
    arg("resume", action="store_true", help="go on from the newest whole checkpoint in output_dir")
    arg("trust_remote_code", action="store_true", help="run the Python code that comes with a model; without it no model's code is run")
    arg("overwrite", action="store_true", help="output_dir holds a run: replace it")
    arg("ds_config", default=str(common.HERE / "ds_config.json"), help="DeepSpeed knobs that have no flag here")
    arg("estimate", nargs="?", const="", metavar="NxGIB", help="will it fit? Count the memory on N devices of GIB each, load no weights, and end")
    arg("local_rank", type=int, default=-1, help="set by the deepspeed launcher")

def parse(parser, presets, argv=None):
    """argv -> Namespace. What the preset leaves open comes from the flags' defaults; any flag overrides the preset."""
    argv = sys.argv[1:] if argv is None else argv
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.error = parser.error
    named.add_argument("--preset", default="opt-1.3b" if any("model_name_or_path" in a for a in argv) else "toy")
    preset = named.parse_known_args(argv)[0].preset
    if preset not in presets:
        fail(f"--preset {preset} is not known.\n  Known: {', '.join(presets)}.")
    parser.set_defaults(**{**presets[preset], "preset": preset})
    args = parser.parse_args(argv)
    emulated = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)  # V100, T4
    args.dtype = args.dtype or ("bf16" if get_accelerator().is_bf16_supported() and not emulated else "fp16")
    for name, value in vars(args).items():  # a flag's name says its range: a new flag gets one by how it ends
        if not isinstance(value, (int, float)) or (name, value) in (("max_steps", -1), ("local_rank", -1)):
            continue
        least, most = 0, float("inf")
        if name.endswith(("max_steps", "log_steps", "accumulation_steps", "_epochs", "_batches", "_size", "_checkpoints", "_prompts", "_per_prompt")):
            least = 1
        elif name.endswith("_len"):
            least = 2
        elif name in ("temperature", "top_p", "timeout_minutes"):
            least = 1e-6
        if name.endswith(("dropout", "gamma", "lam", "ema_decay", "top_p")):
            most = 1
        endless = value == float("inf") and not name.startswith("clip")
        if endless or not least <= value <= most:  # (NaN is within no range)
            fail(f"--{name} {value} is out of range.\n  It must be finite, {least} or more{', and 1 or less' if most == 1 else ''}.")
    for name, count in (("data_split", 3), ("adam_betas", 2)):
        if len(getattr(args, name)) != count or min(getattr(args, name)) < 0 or sum(getattr(args, name)) == 0:
            fail(f"--{name} takes {count} numbers joined by commas, none negative, not all 0.")
    if max(args.adam_betas) >= 1:
        fail("--adam_betas must be below 1: at 1 an average never moves.\n  0.9,0.95 is usual.")
    if why_not := refusal(args):
        fail(why_not)
    common.ds_config(args, 0, 1)  # refuses a wrong --ds_config now, not after the model is loaded
    common.TRUST["trust_remote_code"] = args.trust_remote_code
    return args

def refusal(args):
    """-> in words, what this machine, this DeepSpeed, or two flags together cannot do; None if all is well."""
    asked = args.estimate is not None  # about other devices
    of_roles = [v for name, v in vars(args).items() if name.endswith("_zero_stage")]  # ppo's actor and critic
    stages = [args.zero_stage if stage is None else stage for stage in of_roles] or [args.zero_stage]
    cpu, adapted = get_accelerator().device_name() == "cpu", any(v for name, v in vars(args).items() if name.endswith("lora_dim"))
    size, ranks = args.tensor_parallel_size, int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
    split, installed = f"--tensor_parallel_size {size}", f"and {deepspeed.__version__} is installed.\n  Upgrade, or"
    for broken, message in (
            (cpu and args.dtype == "fp16" and not asked,
             "--dtype fp16 needs a GPU: there are no half-precision kernels worth the name on a CPU.\n  Use bf16 or fp32."),
            (cpu and args.deepcompile,
             "--deepcompile needs a GPU: DeepSpeed's compiler passes are written in CUDA.\n  Leave it out."),
            (args.deepcompile and 0 in stages,
             "--deepcompile works on ZeRO's communication, and there is none at --zero_stage 0.\n  Use --zero_stage 1, 2 or 3."),
            ((args.offload and 3 not in stages) or (args.adam_offload and 0 in stages),
             "--offload moves sharded weights and needs --zero_stage 3; --adam_offload, sharded optimizer states: 1, 2 or 3."),
            (args.adam_offload and 1 in stages and args.dtype == "bf16" and older_than("0.19"),  # 0.18.5: a gradient norm of 8.7 for 6.1
             f"--adam_offload with --zero_stage 1 in bf16 needs DeepSpeed 0.19, {installed} take --zero_stage 2."),
            (adapted and not importlib.util.find_spec("peft"),
             "--lora_dim needs the package peft.\n  pip install peft, or leave it out."),
            (adapted and args.gradient_checkpointing and 3 in stages and older_than("0.19"),
             f"LoRA with --gradient_checkpointing and --zero_stage 3 needs DeepSpeed 0.19, {installed} leave one of them out."),
            (size > 1 and args.dtype != "bf16",
             f"{split} works in bf16 only, and --dtype is {args.dtype}.\n  Leave it out, or take --dtype bf16."),
            (ranks % size and not asked,
             f"{split} must divide the number of ranks, {ranks}.\n  Take {math.gcd(ranks, size)}."),
            (size > 1 and adapted,
             f"{split} and LoRA do not go together.\n  Leave one of them out."),
            (size > 1 and older_than("0.16.4"),
             f"{split} needs DeepSpeed 0.16.4, {installed} leave it out."),
            (size > 1 and 3 in stages and older_than("0.19"),
             f"{split} with --zero_stage 3 needs DeepSpeed 0.19, {installed} take --zero_stage 2.")):
        if broken:
            return message
