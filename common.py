"""What all three steps must do in the same way, in five short sections.

    1  arguments     flags, presets, and how wrong input is refused
    2  DeepSpeed     one function that writes every engine's config
    3  models        load, value head, log-probs, generate, save
    4  data          read any known format, split, tokenise, batch
    5  the run       start, checkpoints, logging, curves

Losses and training loops are not here: each step's own file tells its whole story.

Shapes: B rows (sequences) of a micro-batch, T tokens, K the last tokens of a row that a loss looks at, V vocabulary.
"""
import argparse
import contextlib
import functools
import inspect
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # libraries stay quiet so that the lines that matter are read
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)  # DeepSpeed warns while it is imported that a CPU is a CPU

import datasets
import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn as nn
import transformers
from deepspeed.accelerator import get_accelerator
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

logging.disable(logging.NOTSET)
HERE = Path(__file__).resolve().parent
INTERRUPTED = []  # filled by SIGTERM / SIGINT; looked at between two steps


# ---------------------------------------------------------------------------------------------------------------------
# 1  Arguments
# ---------------------------------------------------------------------------------------------------------------------
def fail(message):
    """The user's input is wrong: one message on rank 0, exit code 2, no traceback."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # rank 0 speaks first: a launcher ends the whole run as soon as one rank has left
    sys.exit(2)


def new_parser(doc):
    """A parser whose --help starts with the script's header and whose errors are `fail`'s."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=120))
    parser.error = lambda message: fail(f"{message}\n  See `{parser.prog} --help` for every flag.")
    return parser


def add_common_arguments(parser, own_forms=()):
    """The flags of all three steps. `own_forms`: names that the script itself declares (ppo: actor_..., critic_...)."""
    def arg(name, *more, **options):
        if name not in own_forms:
            options["help"] += "" if options.get("action") else " [%(default)s]"
            group.add_argument(f"--{name}", *more, **options)

    group = parser.add_argument_group("flags that change the result")
    arg("preset", help="a named recipe; any flag overrides it. toy when no model is named, else opt-1.3b's numbers")
    arg("model_name_or_path", help="hub name or folder; a folder with config.json and no weights starts from scratch")
    arg("data_path", nargs="+", help="hub names, .jsonl/.json/.parquet files, or folders of them; several are blended")
    arg("data_split", type=numbers(float, 3), help="shares of the rows that steps 1, 2, 3 take, disjoint. DeepSpeed-Chat: 2,4,4")
    arg("output_dir", help="where everything that the run leaves behind goes")
    arg("seed", type=int, default=1234, help="initialisation, shuffling, sampling. DeepSpeed-Chat's")
    arg("max_steps", type=int, default=-1, help="stop after so many optimizer steps; -1: num_train_epochs decides")
    arg("num_train_epochs", type=int, help="passes over the data")
    arg("learning_rate", type=float, help="peak learning rate")
    arg("weight_decay", type=float, help="decoupled (AdamW); matrices only, not biases and norms")
    arg("dropout", type=float, help="every dropout of the model; None: what its config says")
    arg("lr_scheduler_type", default="cosine", help="any of transformers' schedules. DeepSpeed-Chat's")
    arg("num_warmup_steps", type=int, help="optimizer steps of linear warm-up")
    arg("adam_betas", type=numbers(float, 2), default=[0.9, 0.95], help="AdamW's betas. DeepSpeed-Chat's")
    arg("max_grad_norm", type=float, default=1.0, help="gradients are scaled down to this norm. DeepSpeed-Chat's")
    arg("per_device_train_batch_size", type=int, help="rows of one forward on one device")
    arg("gradient_accumulation_steps", type=int, default=1, help="micro-batches of one optimizer step on one device")
    arg("max_seq_len", type=int, help="tokens of prompt + answer; a long prompt keeps its end, a long answer is cut")
    arg("group_by_length", type=int, default=1, help="1: batches of rows of like length, little padding; 0: plain shuffle")
    group = parser.add_argument_group("flags that change only speed, memory, and what is written")
    arg("per_device_eval_batch_size", type=int, help="rows of one forward of the evaluation")
    arg("zero_stage", type=int, choices=[0, 1, 2, 3], help="ZeRO: 1 shards optimizer states, 2 gradients too, 3 weights too")
    arg("offload", action="store_true", help="weights (stage 3) wait in CPU memory between uses")
    arg("adam_offload", action="store_true", help="optimizer states live, and are stepped, on the CPU (DeepSpeedCPUAdam)")
    arg("dtype", choices=["bf16", "fp16", "fp32"], help="weights and activations; the optimizer keeps fp32 master weights")
    arg("gradient_checkpointing", action="store_true", help="recompute activations in backward: less memory, 4/3 the work")
    arg("eval_steps", type=int, default=0, help="evaluate every so many steps; 0: at the start and after each epoch")
    arg("log_steps", type=int, default=1, help="one line on the screen and in metrics.jsonl every so many steps")
    arg("save_steps", type=int, default=0, help="a checkpoint every so many steps; 0: only when interrupted")
    arg("keep_checkpoints", type=int, default=1, help="the newest so many checkpoints stay")
    arg("resume", action="store_true", help="go on from the newest checkpoint in output_dir")
    arg("overwrite", action="store_true", help="output_dir holds a run: replace it")
    arg("ds_config", default=str(HERE / "ds_config.json"), help="DeepSpeed knobs that have no flag here")
    arg("local_rank", type=int, default=-1, help="set by the deepspeed launcher")


def numbers(kind, count):
    """argparse type for '2,4,4': `count` numbers of `kind`, none negative, joined by commas or blanks."""
    def parse_numbers(text):
        values = [kind(x) for x in text.replace(",", " ").split()]
        if len(values) != count or min(values) < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not {count} non-negative numbers joined by commas")
        return values
    return parse_numbers


def parse(parser, presets, argv=None):
    """argv -> Namespace. What the preset leaves open comes from the flags' defaults; any flag overrides the preset."""
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    preset = first.parse_known_args(argv)[0].preset
    preset = preset or ("opt-1.3b" if any("model_name_or_path" in a for a in argv) else "toy")
    if preset not in presets:
        fail(f"--preset {preset} is not known.\n  Known: {', '.join(presets)}.")
    parser.set_defaults(**presets[preset], preset=preset)
    args = parser.parse_args(argv)
    if args.dtype is None:
        args.dtype = "bf16" if get_accelerator().is_bf16_supported() else "fp16"
    for name, value in vars(args).items():
        if value is not None and value != -1 and name.endswith(("_steps", "_epochs", "batch_size", "_len")) and value < (
                0 if name in ("eval_steps", "save_steps", "num_warmup_steps") else 1):
            fail(f"--{name} {value} is too small: it must be at least 1.")
    if get_accelerator().device_name() == "cpu" and args.dtype == "fp16":
        fail("--dtype fp16 needs a GPU: half precision has no fast CPU kernels.\n  Use --dtype bf16 or fp32.")
    if args.offload and args.zero_stage != 3:
        fail(f"--offload moves sharded weights, and --zero_stage {args.zero_stage} does not shard them.\n"
             "  Use --zero_stage 3, or --adam_offload to move the optimizer only.")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# 2  DeepSpeed
# ---------------------------------------------------------------------------------------------------------------------
def world():
    """-> (rank, number of ranks); (0, 1) before `start`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def device():
    """This rank's device, through DeepSpeed's accelerator abstraction: cuda:0, cpu, xpu:1, ..."""
    return torch.device(get_accelerator().current_device_name())


def torch_dtype(args):
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]


def ds_config(args, stage, batch_size, micro_steps=1, train=True):
    """-> the DeepSpeed config (dict) of one engine.

    stage: ZeRO stage. batch_size: rows of one forward on one device. micro_steps: backwards per optimizer step.
    train False: a frozen engine (reference, reward model), which only shards and offloads weights.
    """
    try:
        config = json.loads(Path(args.ds_config).read_text())
    except (OSError, ValueError) as error:
        fail(f"--ds_config {args.ds_config}: {error}")
    flags = {"optimizer", "scheduler", "bf16", "fp16", "gradient_clipping", "train_batch_size",
             "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} & set(config)
    if flags:
        fail(f"--ds_config {args.ds_config} sets {', '.join(sorted(flags))}.\n"
             "  Those come from the flags (--learning_rate, --dtype, --per_device_..., see --help). Take them out.")
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = stage
    if stage == 3:
        zero["reduce_scatter"] = True
    if args.offload and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if args.adam_offload and train and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config["train_micro_batch_size_per_gpu"] = batch_size
    config["gradient_accumulation_steps"] = micro_steps
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    if train:
        config["gradient_clipping"] = args.max_grad_norm
    return config


def train_engine(model, args, stage, batch_size, micro_steps, steps, learning_rate, weight_decay):
    """-> the DeepSpeed engine that trains `model` for `steps` optimizer steps; its `step()` also moves the schedule."""
    if args.gradient_checkpointing:
        inner = getattr(model, "model", model) if isinstance(model, ValueModel) else model
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    groups = {True: [], False: []}
    for parameter in model.parameters():
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)  # matrices decay
    groups = [{"params": p, "weight_decay": weight_decay * decays} for decays, p in groups.items() if p]
    options = dict(lr=learning_rate, betas=tuple(args.adam_betas))
    if args.adam_offload:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    else:
        optimizer = deepspeed.ops.adam.FusedAdam(groups, adam_w_mode=True, **options)
    schedule = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, steps)
    config = ds_config(args, stage, batch_size, micro_steps)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def frozen_engine(model, args, stage, batch_size):
    """-> `model` for inference only: a sharded engine under ZeRO-3, else the module itself on this rank's device."""
    model.requires_grad_(False)
    if stage == 3:
        model = deepspeed.initialize(model=model, config=ds_config(args, 3, batch_size, train=False))[0]
        model.eval()
        return model
    return model.to(device()).eval()


def all_max(value):
    """-> the largest of all ranks' numbers."""
    total = torch.tensor(float(value), device=device())
    if world()[1] > 1:
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return total.item()


def unwrap(engine):
    """-> the nn.Module inside a DeepSpeed engine (or the module itself)."""
    return engine.module if isinstance(engine, deepspeed.DeepSpeedEngine) else engine


def loss_scale(token_count, micro_steps):
    """Factor that turns a micro-batch's loss SUM into its share of the exact mean over the whole optimizer step.

    token_count: tokens that count, over all ranks and micro-batches. DeepSpeed divides every loss by the accumulation
    steps and averages gradients over the ranks: both are undone here, and nowhere else.
    """
    return world()[1] * micro_steps / max(token_count, 1)


def all_sum(*values):
    """-> a float64 tensor: each value (number or 0-d tensor) summed over all ranks."""
    total = torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in values])
    if world()[1] > 1:
        total = total.to(device())
        dist.all_reduce(total)
    return total.cpu()


# ---------------------------------------------------------------------------------------------------------------------
# 3  Models
# ---------------------------------------------------------------------------------------------------------------------
class ValueModel(nn.Module):
    """A backbone and a linear head that gives one number per token: the reward model and the critic.

    It wraps stock transformers' sequence-classification model, so what is saved is what stock transformers loads; only
    the forward differs: the head is read at every token instead of at the last one.
    """

    def __init__(self, model, head_name):
        super().__init__()
        self.model, self.head_name = model, head_name

    def forward(self, ids, mask):
        """ids, mask: (B, T) -> values: (B, T), fp32."""
        hidden = self.model.base_model(ids, attention_mask=mask, use_cache=False, **position_ids(self.model, mask))[0]
        return getattr(self.model, self.head_name)(hidden).squeeze(-1).float()  # (B, T, H) -> (B, T)


def load_tokenizer(path):
    """-> the tokenizer in `path`, with an EOS token, and a padding token that is not EOS wherever one can be had.

    Our masks come from positions, so padding's id never matters here. Stock transformers finds an answer's last token by
    `ids != pad`, and would read the score one token early if pad were EOS.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        size = load_config(path).vocab_size
    except (OSError, ValueError) as error:
        fail(f"no tokenizer could be loaded from {path}.\n  {str(error).splitlines()[0]}")
    if tokenizer.eos_token_id is None:
        fail(f"the tokenizer of {path} has no EOS token, so no answer could ever end.\n  Set eos_token in its tokenizer_config.json.")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        vocabulary = tokenizer.get_vocab()
        spare = [t for t in vocabulary if t in ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>")]
        spare += [t for t in [tokenizer.unk_token] if t]
        spare = [t for t in spare if vocabulary[t] not in (tokenizer.eos_token_id, tokenizer.bos_token_id)]
        if not spare and len(tokenizer) < size:  # the embedding has rows that no token uses
            spare = ["<|pad|>"]
            tokenizer.add_special_tokens({"pad_token": spare[0]})
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    if len(tokenizer) > size:
        fail(f"the tokenizer of {path} has {len(tokenizer)} tokens, its model has rows for {size}.")
    tokenizer.padding_side = "left"
    return tokenizer


@functools.lru_cache
def load_config(path):
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        hint = "" if Path(path).is_dir() else "\n  It is not a folder here, so it was looked up on the hub."
        fail(f"no model config could be loaded from {path}.{hint}\n  {str(error).splitlines()[0]}")


def load_model(path, args, stage, dropout=None, tokenizer=None, value_head=None):
    """-> a causal LM, or with `value_head` (the head's attribute name) a ValueModel, in --dtype, on the CPU or sharded.

    Under ZeRO-3 HfDeepSpeedConfig makes transformers partition every weight while it loads, so that no rank ever holds
    the whole model. A model from scratch is small here: every rank builds it whole from the same seed.
    """
    config = AutoConfig.from_pretrained(path)
    for key, value in vars(config).items():
        if dropout is not None and "drop" in key and key != "layerdrop" and isinstance(value, (int, float)):
            setattr(config, key, float(dropout))
    cls, options = AutoModelForCausalLM, {}
    if value_head:
        value_head = getattr(config, "value_head_prefix", value_head)
        config.num_labels, config.value_head_prefix = 1, value_head
        config.pad_token_id = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
        cls = AutoModelForSequenceClassification
        if value_head != "score":
            options["key_mapping"] = {rf"^{value_head}\.": "score."}
    config.torch_dtype = torch_dtype(args)
    torch.manual_seed(args.seed)
    missing = {"score.weight"}
    if not Path(path).is_dir() or any(Path(path).glob("*.safetensors")) or any(Path(path).glob("*.bin")):
        zero3 = HfDeepSpeedConfig(ds_config(args, 3, 1)) if stage == 3 else None  # must be alive while the model loads
        model, info = cls.from_pretrained(path, config=config, dtype=torch_dtype(args), output_loading_info=True, **options)
        missing = set(info["missing_keys"])
        del zero3
    else:
        model = cls.from_config(config, dtype=torch_dtype(args))
    if not value_head:
        return model
    if "score.weight" in missing:
        init_value_head(model.score, args.seed)
    if value_head != "score":
        setattr(model, value_head, model.score)
        del model.score
    return ValueModel(model, value_head)


def init_value_head(head, seed):
    """Weights ~ N(0, 1/(d+1)), d the head's input width.  Stiennon et al. 2020, appendix B.1; OpenRLHF.

    (OpenAI's released code used std 1/sqrt(d+1) instead.) Only for a head that is new: a trained one is never touched.
    ZeRO-3 partitions weights as modules are built and does not initialise a layer added on top, so the head is gathered,
    written on rank 0, and partitioned again from there.
    """
    with deepspeed.zero.GatheredParameters([head.weight], modifier_rank=0), torch.no_grad():
        if world()[0] == 0 or not hasattr(head.weight, "ds_id"):
            noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
            head.weight.copy_(noise / (head.in_features + 1))


def position_ids(model, mask):
    """(B, T) mask -> {'position_ids': (B, T)} counted over real tokens, for models that take them (BLOOM does not)."""
    inner = getattr(model, "base_model", model)
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[target] in fp32, a row at a time: no (B, K, V) fp32 copy, forward or backward."""

    @staticmethod
    def forward(ctx, logits, targets):
        logsumexp = torch.stack([row.float().logsumexp(-1) for row in logits])              # (B, K)
        ctx.save_for_backward(logits, targets, logsumexp)
        return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).float() - logsumexp     # (B, K)

    @staticmethod
    def backward(ctx, grad):
        logits, targets, logsumexp = ctx.saved_tensors
        out = torch.empty_like(logits)
        for b in range(len(logits)):  # d logp / d logits = onehot(target) - softmax
            row = (logits[b].float() - logsumexp[b, :, None]).exp_().mul_(-grad[b, :, None])
            row.scatter_add_(-1, targets[b, :, None], grad[b, :, None].to(row.dtype))
            out[b] = row
        return out, None


def last_logits(model, ids, mask, count):
    """-> logits (B, K, V) that predict the last K = `count` tokens of each row.

    logits[:, t] score token t+1, so the last K tokens are scored by positions T-K-1 .. T-2. Only those are computed.
    """
    keep = {"logits_to_keep": count + 1} if "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters else {}
    logits = model(ids, attention_mask=mask, use_cache=False, **position_ids(unwrap(model), mask), **keep).logits
    return logits[:, -count - 1:-1]


def last_logprobs(model, ids, mask, count, temperature=1.0):
    """-> log-probs (B, K), fp32, of the last K = `count` tokens of each row under softmax(logits / temperature)."""
    logits = last_logits(model, ids, mask, count)
    return TokenLogprobs.apply(logits if temperature == 1 else logits / temperature, ids[:, -count:])


@contextlib.contextmanager
def gathered(engine):
    """Eval mode, and under ZeRO-3 all weights gathered once: `with gathered(engine) as (model, synced): generate(...)`.

    Gathering module by module for every token costs 4x the time. DeepSpeed's hooks would gather and release at each
    module, so they come off meanwhile. If the whole model does not fit beside what is there, hooks stay on, and `synced`
    tells generate() that all ranks must make the same number of forwards.
    """
    model = unwrap(engine)
    was_training = model.training
    model.eval()
    sharded = [p for p in model.parameters() if hasattr(p, "ds_id")]
    need = sum(p.ds_numel * p.element_size() for p in sharded)
    fits = all_sum(need < 0.8 * get_accelerator().available_memory())[0] == world()[1]
    try:
        if not (sharded and fits):
            yield model, bool(sharded)
            return
        with deepspeed.zero.GatheredParameters(sharded):
            hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in model.modules()]
            for m in model.modules():
                m._forward_pre_hooks, m._forward_hooks = type(m._forward_hooks)(), type(m._forward_hooks)()
            try:
                yield model, False
            finally:
                for m, before, after in hooks:
                    m._forward_pre_hooks, m._forward_hooks = before, after
    finally:
        model.train(was_training)


@torch.no_grad()
def generate(model, ids, mask, uniforms, tokenizer, temperature=1.0, top_k=0, top_p=1.0, synced=False):
    """Sample answers, token by token, with a key-value cache.

    ids, mask: (B, P), left-padded prompts. uniforms: (B, R) in [0, 1): the r-th token of row b is the inverse of the
    cumulative distribution at uniforms[b, r], so an answer depends on its own row only, not on its neighbours or rank.
    -> answer: (B, R'), answer_mask: (B, R'), R' <= R; the mask is 1 up to and including the first EOS.
    """
    batch, limit = uniforms.shape
    answer = torch.full((batch, limit), tokenizer.pad_token_id, device=ids.device)
    answer_mask = torch.zeros_like(answer)
    alive = torch.ones(batch, dtype=torch.bool, device=ids.device)
    cache, new = None, ids
    uniforms = uniforms.to(ids.device).double()
    for r in range(limit):
        positions = {k: v[:, -new.shape[1]:] for k, v in position_ids(model, mask).items()}
        out = model(new, attention_mask=mask, past_key_values=cache, use_cache=True, **positions)
        cache = out.past_key_values
        probs = filter_top(torch.softmax(out.logits[:, -1].float() / temperature, -1), top_k, top_p)  # (B, V)
        cdf = probs.double().cumsum(-1)
        token = (cdf <= uniforms[:, r, None] * cdf[:, -1:]).sum(-1)  # (B,) the first token whose cdf exceeds u
        answer[alive, r] = token[alive]
        answer_mask[:, r] = alive
        alive = alive & (token != tokenizer.eos_token_id)
        # Without `synced` ranks stop on their own. With ZeRO-3's hooks on, a rank that stopped would hang the others.
        if not (all_sum(alive.any())[0] if synced else alive.any()):
            break
        new = answer[:, r, None]
        mask = torch.cat([mask, torch.ones_like(new)], 1)
    return answer[:, :r + 1], answer_mask[:, :r + 1]


def filter_top(probs, top_k, top_p):
    """(B, V) probabilities with all but the `top_k` largest, and all beyond cumulative `top_p`, set to 0 (0 and 1: off)."""
    if top_k:
        probs = probs.where(probs >= probs.topk(min(top_k, probs.shape[-1])).values[:, -1:], 0)
    if top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        ordered = ordered.where(ordered.cumsum(-1) - ordered < top_p * ordered.sum(-1, keepdim=True), 0)
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return probs


def row_uniforms(seed, step, rows, count):
    """-> (B, count) numbers in [0, 1); line b depends on (seed, step, rows[b]) and nothing else."""
    return torch.stack([torch.from_numpy(np.random.default_rng([seed, step, row]).random(count, np.float32)) for row in rows])


def local_shard(parameter):
    """-> this rank's equal share (padded, 1-d) of a weight: ZeRO-3's own partition, else a slice of the whole weight."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    rank, ranks = world()
    flat = parameter.detach().flatten()
    share = -(-len(flat) // ranks)
    return nn.functional.pad(flat, (0, share * ranks - len(flat)))[rank * share:(rank + 1) * share]


def whole(parameter, shard):
    """-> the weight whose `local_shard`s the ranks hold, on the CPU. The inverse of local_shard; all ranks call it."""
    shards = [shard.to(device()).contiguous()]
    if world()[1] > 1:
        shards = [torch.empty_like(shards[0]) for _ in range(world()[1])]
        torch.distributed.all_gather(shards, shard.to(device()).contiguous())
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return torch.cat(shards).cpu()[:shape.numel()].view(shape).to(parameter.dtype)


def save_model(engine, tokenizer, folder, shards=None):
    """Write config, safetensors and tokenizer so that stock transformers loads `folder` offline. All ranks call it.

    Weights are gathered one tensor at a time, to rank 0's CPU memory. config.json comes last: it marks the folder whole.
    shards: {name: local shard} to save in place of the weights (the EMA).
    """
    model = unwrap(engine)
    model = model.model if isinstance(model, ValueModel) else model
    rank, state = world()[0], {}
    for name, parameter in model.named_parameters():
        tensor = whole(parameter, local_shard(parameter) if shards is None else shards[name])
        if rank == 0:
            state[name] = tensor
    if rank == 0:
        state.update({name: buffer.cpu() for name, buffer in model.named_buffers() if name in model.state_dict()})
        folder, aside = Path(folder), Path(folder) / ".saving"
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside, state_dict=state)
        tokenizer.save_pretrained(aside)
        for file in sorted(aside.iterdir(), key=lambda f: f.name == "config.json"):
            file.replace(folder / file.name)
        aside.rmdir()
    barrier()


# ---------------------------------------------------------------------------------------------------------------------
# 4  Data
# ---------------------------------------------------------------------------------------------------------------------
FORMATS = """prompt + response and/or chosen + rejected    (Dahoas/*; prompt alone is enough for ppo)
    chosen + rejected, whole dialogues            (Anthropic HH; or lists of chat messages)
    messages                                      (chat; through the tokenizer's chat template)
    instruction + output, input optional          (Alpaca)
    text                                          (unsupervised, for --unsup_data_path)"""


def read_row(row):
    """One row of any known format -> (prompt, answer or None, chosen or None, rejected or None).

    A prompt is text, or a list of chat messages. Rows of whole dialogues are split where chosen and rejected part, at the
    last "\\n\\nAssistant:" before that.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if "messages" in row:
        last = max((i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"), default=None)
        return (row["messages"], None, None, None) if last is None else (
            row["messages"][:last], row["messages"][last]["content"], None, None)
    if isinstance(chosen, list):
        prompt = row.get("prompt") or chosen[:-1]
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return prompt, chosen[-1]["content"], chosen[-1]["content"], rejected[-1]["content"]
    if "instruction" in row:
        question = row["instruction"] + ("\n" + row["input"] if row.get("input") else "")
        return f"\n\nHuman: {question}\n\nAssistant:", " " + row["output"], None, None
    if "prompt" in row:
        return row["prompt"], row.get("response") or chosen, chosen, rejected
    if "chosen" in row:
        same = os.path.commonprefix([chosen, rejected])
        cut = same.rfind("\n\nAssistant:") + len("\n\nAssistant:")
        if cut < len("\n\nAssistant:"):
            return "", None, None, None
        return chosen[:cut], chosen[cut:], chosen[cut:], rejected[cut:]
    return "", row["text"], None, None


def tokenise_prompt(tokenizer, prompt):
    """Text or chat messages -> token ids. Text that spells a special token is data: it is split like any other text."""
    if isinstance(prompt, list):
        if tokenizer.chat_template is None:
            fail("the data holds chat messages, and the tokenizer has no chat template.\n"
                 "  Use a chat model's tokenizer, or prompt/response columns of plain text.")
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    ids = tokenizer(prompt, split_special_tokens=True).input_ids
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and len(ids) > 1 else ids


def tokenise_answer(tokenizer, answer):
    """Text -> token ids and EOS: the one place where EOS is appended, for all three steps.

    Prompt and answer are tokenised apart and joined: joined text tokenised anew could merge across the border.
    """
    return tokenizer(answer, add_special_tokens=False, split_special_tokens=True).input_ids + [tokenizer.eos_token_id]


def fit(prompt, answers, limit):
    """Cut ids to `limit` tokens: a long prompt keeps its end, and at least half of `limit` if it needs that; then a long
    answer is cut, and so loses its EOS. The room is that of the longest answer, so that a pair keeps the same prompt."""
    room = max(limit // 2, limit - max((len(a) for a in answers), default=0))
    prompt = prompt[max(0, len(prompt) - room):]
    return prompt, [a[:limit - len(prompt)] for a in answers]


def load_rows(args, tokenizer, step, limit, paths=None):
    """-> (train, held-out) datasets for step 1, 2 or 3 of columns prompt (text), prompt_ids, answers (lists of ids),
    length, extra (the row's other columns, as JSON).

    Each step takes its own share of every source's rows (--data_split). The held-out rows are the source's own test
    split; without one, the rows of every twentieth prompt by hash. Neither depends on --seed: two steps run with
    different seeds must not share rows.
    """
    parts = {"train": [], "test": []}
    for path in paths or args.data_path:
        source = read_source(path)
        columns = source["train"].column_names
        wanted = {1: "prompt and answer", 2: "prompt, chosen and rejected", 3: "prompt", "text": "text"}[step]
        known = [{"prompt"}, {"chosen", "rejected"}, {"messages"}, {"instruction", "output"}, {"text"}]
        have = next((k for k in known if k <= set(columns)), set())
        if not have or (step == 2 and "rejected" not in columns) or (step == "text") != (have == {"text"}) or (
                step == 1 and have == {"prompt"} and not {"response", "chosen"} & set(columns)):
            fail(f"{path} has the columns {', '.join(columns)}.\n  This step needs {wanted}. Known formats:\n    {FORMATS}")
        if "test" not in source:
            held = [zlib.crc32(str(read_row(row)[0]).encode()) % 20 == 0 for row in source["train"]]
            source = {"train": source["train"].select([i for i, h in enumerate(held) if not h]),
                      "test": source["train"].select([i for i, h in enumerate(held) if h])}
        if step != "text":
            rows = np.random.default_rng(0).permutation(len(source["train"]))
            cuts = np.cumsum([0] + args.data_split) / sum(args.data_split) * len(rows)
            source["train"] = source["train"].select(sorted(rows[round(cuts[step - 1]):round(cuts[step])]))
        for name, rows in parts.items():
            made = source[name].map(tokenise_row, fn_kwargs=dict(tokenizer=tokenizer, step=step, limit=limit),
                                    remove_columns=columns, load_from_cache_file=False)
            dropped = Counter(made["drop"])
            if set(dropped) - {""}:
                say(f"{path}, {name}: dropped " + ", ".join(f"{n} rows ({why})" for why, n in dropped.items() if why))
            rows.append(made.filter(lambda row: not row["drop"], load_from_cache_file=False).remove_columns("drop"))
    train, test = (datasets.concatenate_datasets(rows) for rows in parts.values())
    seen = set(train["prompt"])
    fresh = [i for i, prompt in enumerate(test["prompt"]) if prompt not in seen or step == "text"]
    if len(fresh) < len(test):
        say(f"held-out: dropped {len(test) - len(fresh)} rows whose prompt is also trained on")
        test = test.select(fresh)
    for name, rows in {"training": train, "held-out": test}.items():
        if not len(rows) and (name == "training" or step != "text"):
            fail(f"no {name} rows are left of {', '.join(map(str, args.data_path))}.\n  See the counts above; add data, "
                 "or give this step a share in --data_split.")
    return train, test


def tokenise_row(row, tokenizer, step, limit):
    """One row of a source -> one row of `load_rows`, with `drop`: '' or the reason to leave it out."""
    prompt, answer, chosen, rejected = read_row(row)
    answers = {1: [answer], 2: [chosen, rejected], 3: [], "text": [answer]}[step]
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    out = dict(prompt=text, prompt_ids=[], answers=[], length=0, drop="",
               extra=json.dumps({k: v for k, v in row.items() if k != "prompt"}, default=str) if step == 3 else "")
    if (step != "text" and not text.strip()) or any(a is None or not a.strip() for a in answers):
        return {**out, "drop": "empty prompt or answer"}
    prompt_ids, ids = fit(tokenise_prompt(tokenizer, prompt), [tokenise_answer(tokenizer, a) for a in answers], limit)
    if step == "text":
        prompt_ids, ids = ids[0][:1], [ids[0][1:]]  # the first token has nothing before it that could predict it
    if step == 2 and ids[0] == ids[1]:
        return {**out, "drop": "chosen equals rejected" if chosen == rejected else "chosen equals rejected once cut"}
    return {**out, "prompt_ids": prompt_ids, "answers": ids, "length": len(prompt_ids) + max(map(len, ids), default=0)}


def read_source(path):
    """Hub name, file or folder -> {'train': Dataset, 'test': Dataset if there is one}."""
    path = str(path)
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    if os.path.isdir(path):
        files = sorted(f for f in Path(path).iterdir() if f.suffix in kinds and f.name != "limits.json")
        test = [str(f) for f in files if any(word in f.stem for word in ("test", "valid", "eval"))]
        files = {"train": [str(f) for f in files if str(f) not in test], "test": test}
        if not files["train"]:
            fail(f"--data_path {path} is a folder without .jsonl, .json or .parquet files to train on.")
    elif os.path.isfile(path):
        files = {"train": [path]}
        if Path(path).suffix not in kinds:
            fail(f"--data_path {path}: unknown kind of file.\n  Known: {', '.join(kinds)}.")
    else:
        if path.count("/") != 1 or path.startswith(("/", ".", "~")):
            fail(f"--data_path {path}: no such file or folder.\n  In {Path(path).parent}: "
                 f"{', '.join(sorted(f.name for f in Path(path).parent.glob('*'))[:8]) or 'nothing'}.")
        try:
            source = datasets.load_dataset(path)
        except Exception as error:  # the hub client raises many kinds: offline, unknown name, no access
            fail(f"--data_path {path} is no file or folder here, and it could not be loaded from the hub.\n  {error}")
        test = [source[name] for name in ("test", "validation") if name in source][:1]
        return {"train": source["train"], **({"test": test[0]} if test else {})}
    kind = kinds[Path(files["train"][0]).suffix]
    try:
        source = dict(datasets.load_dataset(kind, data_files={k: v for k, v in files.items() if v}))
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        fail(f"--data_path {path}: {find_bad_line(sum(files.values(), [])) or error}")
    if not len(source["train"]):
        fail(f"--data_path {path} is empty.")
    return source


def find_bad_line(files):
    """-> 'FILE, line N: what is wrong' for the first line that is not a JSON object, or None."""
    for file in files:
        for number, line in enumerate(open(file, "rb") if file.endswith(".jsonl") else [], 1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"{file}, line {number}: not a JSON object"
            except ValueError as error:
                return f"{file}, line {number}: {error}"


class Rows(torch.utils.data.Dataset):
    """The rows of `load_rows` by number. A negative number is a filler: row 0 again, with `real` 0, to be masked out."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {**self.rows[max(i, 0)], "row": i, "real": int(i >= 0)}


def epoch_batches(lengths, seed, epoch, batch_size, micro_steps, group_by_length):
    """-> this rank's micro-batches of one epoch (lists of row numbers), `micro_steps` of them per optimizer step.

    The rows of each optimizer step depend on (seed, epoch) and on how many rows a step takes, not on how those are laid
    out over ranks and micro-batches: results do not change with the number of GPUs. A short last step is filled with -1
    so that every rank makes the same number of forwards: nothing is ever dropped on one rank alone.
    """
    rank, ranks = world()
    size = batch_size * micro_steps * ranks
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths)) if seed is not None else np.arange(len(lengths))
    if group_by_length:  # sort within windows of 32 steps, then shuffle the steps: like lengths together, order random
        windows = [order[i:i + 32 * size] for i in range(0, len(order), 32 * size)]
        order = np.concatenate([w[np.argsort(-lengths[w], kind="stable")] for w in windows])
    steps = [order[i:i + size] for i in range(0, len(order), size)]
    if group_by_length:
        steps = [steps[i] for i in rng.permutation(len(steps))]
    batches = []
    for rows in steps:
        rows = rows[np.argsort(-lengths[rows], kind="stable")].tolist() + [-1] * (size - len(rows))
        for micro in range(micro_steps):
            start = (micro * ranks + rank) * batch_size
            batches.append(rows[start:start + batch_size])
    return batches


def count_steps(args, rows, batch_size, micro_steps):
    """-> optimizer steps of the run: --max_steps, or --num_train_epochs passes over `rows`."""
    per_epoch = -(-len(rows) // (batch_size * micro_steps * world()[1]))
    return args.max_steps if args.max_steps > 0 else per_epoch * args.num_train_epochs


def eval_loader(args, rows, collate):
    """Yield this rank's batches of `rows`, in order, filled up so that all ranks make as many forwards."""
    rank, ranks = world()
    size = args.per_device_eval_batch_size
    order = list(range(len(rows))) + [-1] * (-len(rows) % (size * ranks))
    for start in range(rank * size, len(order), size * ranks):
        yield from to_device([collate([Rows(rows)[i] for i in order[start:start + size]])])


def to_device(batches):
    """Yield dicts of tensors with their tensors on this rank's device."""
    for batch in batches:
        yield {k: v.to(device(), non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}


def pad_left(sequences, pad_id):
    """Lists of ids -> ids, mask: (B, T), all ending in the last column. Masks come from lengths, never from `ids != pad`."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[pad_id] * (longest - len(s)) + list(s) for s in sequences])
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
    return ids, mask


# ---------------------------------------------------------------------------------------------------------------------
# 5  The run
# ---------------------------------------------------------------------------------------------------------------------
def start(args):
    """Join the other ranks, quieten the libraries, seed, refuse an output folder in use. First call of every main()."""
    if "SLURM_PROCID" in os.environ and "RANK" not in os.environ:  # srun: one task a device, MASTER_ADDR set by the user
        os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"],
                          LOCAL_RANK=os.environ["SLURM_LOCALID"])
    if "RANK" not in os.environ:  # plain python: a world of one, on a free port
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    output = Path(args.output_dir)
    if not args.overwrite and not args.resume and ((output / "config.json").exists() or newest_checkpoint(args)):
        fail(f"--output_dir {output} holds a run.\n  --overwrite replaces it, --resume goes on with an unfinished one, "
             f"another --output_dir leaves it alone.")
    if args.resume and not newest_checkpoint(args):
        fail(f"--resume: there is no checkpoint in {output / 'checkpoints'}.\n  Leave --resume out to start anew.")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ:  # ranks must not fight for cores
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    deepspeed.init_distributed(verbose=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, frame: INTERRUPTED.append(n))
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def barrier():
    if world()[1] > 1:
        dist.barrier()


def say(text):
    """Print on rank 0 only, above the progress bar."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(text)
        sys.stdout.flush()


def count_parameters(model):
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def train_flops(model, tokens, length, checkpointing):
    """FLOPs of forward + backward on `tokens` tokens in rows of `length`: 3 x the forward, 4 x with checkpointing.

    Forward per token: 2 per weight in a matrix product + 4 * layers * hidden * length in attention.
    PaLM, Chowdhery et al. 2022, appendix B. The input embedding is a look-up, unless it is also the output matrix.
    """
    inner = model.model if isinstance(model, ValueModel) else model
    config, weights = inner.config.get_text_config(), count_parameters(inner)
    if isinstance(model, ValueModel) or not config.tie_word_embeddings:
        embedding = inner.get_input_embeddings().weight
        weights -= getattr(embedding, "ds_numel", embedding.numel())
    forward = 2 * weights + 4 * config.num_hidden_layers * config.hidden_size * length
    return tokens * forward * (4 if checkpointing else 3)


def begin(args, title, engine, rows, batch_size, micro_steps, steps):
    """Take the output folder (with --overwrite clear what a run before left), write args.json, print the banner."""
    output, (rank, ranks) = Path(args.output_dir), world()
    if rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        for name in () if args.resume else ("config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "checkpoints", "ema", "critic"):
            shutil.rmtree(output / name) if (output / name).is_dir() else (output / name).unlink(missing_ok=True)
        versions = {m.__name__: m.__version__ for m in (torch, deepspeed, transformers, datasets, np)}
        record = {**vars(args), "world_size": ranks, "device": str(device()), "versions": versions,
                  "data_rows": len(rows), "data_fingerprint": rows._fingerprint}
        (output / "args.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    say(f"{title}   (preset {args.preset}, seed {args.seed}, output in {output})\n"
        f"  model    {count_parameters(unwrap(engine)) / 1e6:,.2f} M parameters, {args.dtype}, ZeRO stage {args.zero_stage}, "
        f"{ranks} x {get_accelerator().device_name()}\n"
        f"  batch    {batch_size} per device x {micro_steps} accumulation x {ranks} ranks = {batch_size * micro_steps * ranks} rows per step\n"
        f"  data     {len(rows):,} rows, {steps:,} steps")
    barrier()


def training_steps(args, engines, state, rows, batch_size, micro_steps, steps, collate):
    """Yield (step, epoch, evaluate_now, micro_batches) for each step of the run, 1 .. `steps`, and keep the run safe.

    Resumes in the middle of an epoch; after each step's body, saves when due or when told to stop. `state`: a dict of
    what the script itself must keep (EMA), restored in place.
    """
    lengths = np.asarray(rows["length"])
    per_epoch = -(-len(rows) // (batch_size * micro_steps * world()[1]))
    step, saved = load_checkpoint(args, engines) if args.resume else (0, {})
    state.update(saved.get("state", {}))
    with tqdm(total=steps, initial=step, unit="step", leave=False, disable=True if world()[0] else None) as bar:
        while step < steps:
            batches = epoch_batches(lengths, args.seed, step // per_epoch, batch_size, micro_steps, args.group_by_length)
            loader = StatefulDataLoader(Rows(rows), batch_sampler=batches, collate_fn=collate)
            if step % per_epoch:
                loader.load_state_dict(saved["loader"])
            iterator = iter(loader)
            while step < steps and (micro_batches := list(itertools.islice(iterator, micro_steps))):
                step += 1
                every = args.eval_steps or per_epoch
                yield step, step / per_epoch, step == steps or step % every == 0, micro_batches
                bar.update()
                stop = all_sum(len(INTERRUPTED))[0] > 0  # on any rank
                if stop or (args.save_steps and step % args.save_steps == 0):
                    save_checkpoint(args, engines, step, {"loader": loader.state_dict(), "state": state})
                if stop:
                    say(f"interrupted after step {step}: saved to {newest_checkpoint(args)}. Go on with --resume.")
                    finish(args, code=1)


def speed(args, engine, tokens, started, flops=None):
    """-> metrics that every step logs. tokens: real ones, over all ranks. flops: of the step; tflops: per device."""
    seconds = time.time() - started
    norm = engine.get_global_grad_norm()
    flops = flops or train_flops(unwrap(engine), tokens, args.max_seq_len, args.gradient_checkpointing)
    return {"learning_rate": float(engine.get_lr()[0]), "grad_norm": None if norm is None else float(norm),
            "tokens_per_second": tokens / seconds, "tflops": flops / seconds / world()[1] / 1e12, "seconds": seconds}


def check_finite(args, record):
    """A NaN or infinite number stops the run, on all ranks (the numbers are reduced over them)."""
    bad = [k for k, v in record.items() if isinstance(v, float) and not np.isfinite(v)]
    if bad:
        say(f"error: step {record['step']}: {', '.join(bad)} not finite. Stopped; the last checkpoint is untouched.\n"
            "  Likely: a learning rate too high, or fp16 where the model was trained in bf16.")
        finish(args, code=1)


def limits(args):
    """{metric: best reachable value}, from a limits.json beside the data (the toy knows its own limits), else {}."""
    file = Path(args.data_path[0]) / "limits.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def log(args, record, columns, engine=None):
    """One line in metrics.jsonl; the `columns` of it in fixed columns on the screen; events for DeepSpeed's monitor."""
    if world()[0] != 0:
        return
    record = {k: round(v, 8) if isinstance(v, float) else v for k, v in record.items()}
    with open(Path(args.output_dir) / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
    if columns:
        if not getattr(log, "header", None):
            log.header = say("".join(f"{c:>15}" if i else f"{c:>7}" for i, c in enumerate(columns))) or True
        say("".join(("" if record.get(c) is None else f"{record[c]:.4g}" if isinstance(record[c], float) else str(record[c])
                     ).rjust(15 if i else 7) for i, c in enumerate(columns)))
    if engine is not None and engine.monitor.enabled:
        engine.monitor.write_events([(f"train/{k}", v, record["step"]) for k, v in record.items() if isinstance(v, float)])


def write_samples(args, rows):
    """Append dicts to samples.jsonl (rank 0)."""
    if world()[0] == 0:
        with open(Path(args.output_dir) / "samples.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def draw_curves(args):
    """metrics.jsonl -> curves.png, one panel a metric, with the known limit where there is one (rank 0)."""
    if world()[0] != 0:
        return
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in open(Path(args.output_dir) / "metrics.jsonl")]
    hidden = {"step", "epoch", "seconds"}
    names = [k for k in dict.fromkeys(k for r in records for k in r) if k not in hidden and not k.endswith("_ci")]
    width = 4
    figure, axes = plt.subplots(-(-len(names) // width), width, figsize=(4 * width, 2.6 * -(-len(names) // width)), squeeze=False)
    for axis in axes.flat[len(names):]:
        axis.remove()
    for axis, name in zip(axes.flat, names):
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        axis.plot(*zip(*points), marker="o" if len(points) < 20 else None, markersize=3)
        if name in limits(args):
            axis.axhline(limits(args)[name], linestyle="--", color="gray", linewidth=1)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(args.output_dir) / "curves.png", dpi=80)
    plt.close(figure)


def newest_checkpoint(args):
    """-> the newest whole checkpoint of --output_dir, or None. A folder gets its step-N name only once it is complete."""
    found = (Path(args.output_dir) / "checkpoints").glob("step-*")
    return max(found, key=lambda f: int(f.name.split("-")[1]), default=None)


def save_checkpoint(args, engines, step, state):
    """Everything needed to go on exactly. engines: {name: engine}. state: this rank's own, anything torch.save takes."""
    folder = Path(args.output_dir) / "checkpoints"
    aside, rank = folder / "unfinished", world()[0]
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(aside / name, tag="state", save_latest=False)
    rng = dict(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state(),
               device=get_accelerator().get_rng_state())
    torch.save({"rng": rng, "world_size": world()[1], **state}, aside / f"rank{rank}.pt")
    barrier()
    if rank == 0:
        shutil.rmtree(folder / f"step-{step}", ignore_errors=True)
        aside.rename(folder / f"step-{step}")
        for old in sorted(folder.glob("step-*"), key=lambda f: int(f.name.split("-")[1]))[:-args.keep_checkpoints]:
            shutil.rmtree(old)
    barrier()


def load_checkpoint(args, engines):
    """Restore `engines`, RNGs and metrics.jsonl from the newest checkpoint -> (step, this rank's state)."""
    folder = newest_checkpoint(args)
    step, rank = int(folder.name.split("-")[1]), world()[0]
    file = folder / f"rank{rank}.pt"
    saved = torch.load(file, weights_only=False) if file.exists() else {"world_size": 0}  # our own file: RNG states are pickled
    if saved["world_size"] != world()[1]:
        ranks = len(list(folder.glob("rank*.pt")))
        fail(f"{folder} was written by {ranks} ranks, and this run has {world()[1]}.\n  Resume with {ranks}.")
    for name, engine in engines.items():
        engine.load_checkpoint(folder / name, tag="state")
    rng = saved.pop("rng")
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    get_accelerator().set_rng_state(rng["device"])
    for name in ("metrics.jsonl", "samples.jsonl") if rank == 0 else ():  # lines written after the checkpoint go
        file = Path(args.output_dir) / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        file.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    say(f"resumed from {folder}")
    return step, saved


def finish(args, code=0):
    """Leave the group of ranks in order, and the program."""
    if code == 0:
        say(f"done: {args.output_dir}")
    barrier()
    dist.destroy_process_group()
    sys.exit(code)
