"""What all three steps must do in the same way, in four sections. (Their flags: arguments.py)

    1  DeepSpeed     one function that writes every engine's config; engines; sums over ranks
    2  models        load, value head, log-probs, gather, save
    3  data          read any known format, split, tokenise, batch
    4  the run       start, the end and who caused it, logging, curves (its steps and checkpoints: checkpoint.py)

Losses and training loops are not here: each step's own file tells its whole story.
Shapes: B rows of a micro-batch, T tokens, K the last ones of a row, M those of them that a loss looks at (all rows'), V vocabulary.
"""
import contextlib, copy, datetime, difflib, functools, inspect, io, json
import logging, os, re, shutil, sys, time, warnings, zlib
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # libraries stay quiet so that the lines that matter are read
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)  # DeepSpeed warns, while it is imported, that a CPU is a CPU

import datasets
import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn as nn
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.module_inject.layers import LinearAllreduce
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils.cpp_extension import get_default_build_root
from jinja2 import TemplateError
from packaging import version
from torch.distributed.elastic.utils.distributed import get_free_port
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

import lora

logging.disable(logging.NOTSET)
HERE = Path(__file__).resolve().parent
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOGS = ("metrics.jsonl", "samples.jsonl")
CHUNK = 64  # tokens whose logits are in fp32 at a time: small, to stay in a CPU's cache (1,024 take twice as long), and large enough for a GPU
LAYOUT = {"tensor_parallel": 1}  # ranks that share each layer; `start` sets it
TRUST = {"trust_remote_code": False}  # what every from_pretrained gets; `parse` sets it
NOW = ["starting"]  # [0]: what this rank is at, see `phase`
SAME = ("data_split", "seed", "max_seq_len", "max_prompt_seq_len", "group_by_length", "tensor_parallel_size", "lora_dim", "actor_lora_dim",
        "critic_lora_dim", "lora_alpha", "lora_targets", "advantage", "samples_per_prompt", "enable_ema", "dtype", "train_on_prompt", "center_coef",
        "gamma", "lam", "temperature", "kl_in", "kl_estimator", "whiten", "normalize_reward")  # what --resume cannot change

def fail(message, this_rank=False):
    """The user's input is wrong: exit code 2, no traceback, one message, from rank 0 unless another rank alone has seen it."""
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if rank and not this_rank:
        time.sleep(20)  # had rank 0 seen it too, the launcher would have ended us by then: this rank alone has
    print("error: " + (f"rank {rank}: " if rank else "") + message, file=sys.stderr, flush=True)
    sys.exit(2)

# ---- 1  DeepSpeed ---------------------------------------------------------------------------------------------------
def world():
    """-> (rank, number of ranks); (0, 1) before `start`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def data_world():
    """-> (number, count) of this rank's share of the data. The ranks that share a model's layers train on the same rows."""
    rank, ranks = world()
    return rank // LAYOUT["tensor_parallel"], ranks // LAYOUT["tensor_parallel"]

def rows_per_step(batch_size, micro_steps):
    """-> rows of one step: of all its forwards, on all ranks that have a share of the data."""
    return batch_size * micro_steps * data_world()[1]

def device():
    """This rank's device, through DeepSpeed's accelerator abstraction: cuda:0, cpu, xpu:1, ..."""
    return torch.device(get_accelerator().current_device_name())

def inner(engine):
    """-> the transformers model inside a DeepSpeed engine, a ValueModel, or both."""
    model = getattr(engine, "module", engine)
    return model.model if isinstance(model, ValueModel) else model

def older_than(number):
    """-> whether the DeepSpeed that is installed is older than version `number`."""
    return version.parse(deepspeed.__version__) < version.parse(number)

def stage_of(args, stage):
    """-> the ZeRO stage of an engine that trains: 1 in place of 0 unless in fp32. The maths is the same, and at 0 DeepSpeed 0.19
    gets it wrong: it leaves fp16's loss scale out of backward(), and its steps in bf16 are not those of the other stages."""
    return max(stage, int(args.dtype != "fp32"))

def ds_config(args, stage, batch_size, micro_steps=1, train=True, main=True):
    """-> the DeepSpeed config (dict) of one engine: ds_config.json, and on top of it what the flags say.

    stage: ZeRO stage. batch_size: rows of one forward on one device. micro_steps: backwards per optimizer step.
    train False: a frozen engine (reference, reward model), which only shards and offloads weights.
    main False: it feeds no monitor (TensorBoard, W&B, CSV): the actor's engine does that for the critic.
    """
    try:
        config = json.loads(Path(args.ds_config).read_text())
    except (OSError, ValueError) as error:
        fail(f"--ds_config {args.ds_config}: {error}")
    zero = config.setdefault("zero_optimization", {})
    if taken := (set(config) | {f"zero_optimization.{key}" for key in zero}) & {
            "optimizer", "scheduler", "bf16", "fp16", "gradient_clipping", "train_batch_size", "zero_optimization.stage",
            "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}:
        fail(f"--ds_config {args.ds_config} sets {', '.join(sorted(taken))}.\n"
             "  Flags decide that (--learning_rate, --dtype, --zero_stage, --per_device_..., see --help). Take it out.")
    stage = stage_of(args, stage) if train else stage
    zero.update({"stage": stage, "reduce_scatter": True} if stage == 3 else {"stage": stage})
    if args.offload and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True, **zero.get("offload_param", {})}  # ds_config.json may say nvme
    if args.adam_offload and train and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **zero.get("offload_optimizer", {})}
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    if args.dtype == "bf16" and older_than("0.19"):  # 0.18.5's stage 1 else sums over the ranks before the last micro-batch is in
        config["bf16"]["immediate_grad_update"] = True
    if args.dtype == "bf16" and train:  # micro-batches' gradients are summed in fp32: bf16 would drop the small ones
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if args.tensor_parallel_size > 1:
        split_head = {"vocab_parallel_lm_head": False} if "vocab_parallel_lm_head" in TPTrainingConfig.model_fields else {}  # 0.19's
        config["tensor_parallel"] = {"autotp_size": args.tensor_parallel_size, **split_head}  # logits stay whole on every rank
    if train and args.deepcompile:  # never for an engine that only does inference
        config["compile"] = {"deepcompile": True}
    if train:
        config["gradient_clipping"] = args.max_grad_norm
    for monitor in {"tensorboard", "csv_monitor", "wandb"} & set(config):
        if not main:
            config[monitor] = {"enabled": False}
        elif monitor != "wandb":
            config[monitor]["output_path"] = args.output_dir
    return {**config, "train_micro_batch_size_per_gpu": batch_size, "gradient_accumulation_steps": micro_steps}

def train_engine(model, args, stage, batch_size, micro_steps, steps, learning_rate, weight_decay, main=True):
    """-> the DeepSpeed engine that trains `model` for `steps` optimizer steps; its step() also moves the schedule."""
    if args.gradient_checkpointing:
        inner(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.tensor_parallel_size > 1 and older_than("0.19"):  # later initialize does it
        deepspeed.tp_model_init(inner(model), tp_size=args.tensor_parallel_size, dtype=DTYPES[args.dtype])
    is_matrix = {p: len(getattr(p, "ds_shape", p.shape)) > 1 for p in model.parameters() if p.requires_grad}  # a shard is 1-d
    groups = [{"params": [p for p in is_matrix if is_matrix[p] == decays], "weight_decay": weight_decay * decays} for decays in (True, False)]
    groups = [group for group in groups if group["params"]]
    options = dict(lr=learning_rate, betas=tuple(args.adam_betas))
    adam, mode = (DeepSpeedCPUAdam, "adamw_mode") if args.adam_offload else (FusedAdam, "adam_w_mode")
    try:
        optimizer = adam(groups, **options, **{mode: True})
    except Exception as error:  # compiled on first use: there may be no compiler, no ninja, no headers
        if args.adam_offload:
            fail(f"DeepSpeedCPUAdam could not be built: {error}\n  Install a C++ compiler (g++) and ninja, or leave --adam_offload out.")
        if getattr(args, "offload_states", False) and stage == 3:
            fail(f"--offload_states under stage 3 needs FusedAdam, which could not be built: {error}\n  Install a C++ compiler (g++) and ninja.")
        say(f"FusedAdam could not be built, torch's AdamW takes its place: {str(error).splitlines()[0]}")
        optimizer = torch.optim.AdamW(groups, **options)
    schedule = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, steps)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule,
                                  config=ds_config(args, stage, batch_size, micro_steps, main=main))[0]
    if args.deepcompile:
        engine.compile()
    if stage == 0 and args.dtype == "fp32":  # here alone DeepSpeed clips without keeping the norm, which we log
        def clip_and_note():
            engine._global_grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        engine.clip_fp32_gradients = clip_and_note
    engine.train()  # from_pretrained hands models over in eval mode
    return engine

def loss_scale(token_count, micro_steps):
    """Factor that turns a micro-batch's loss SUM into its share of the exact mean over the whole optimizer step.

    token_count: tokens that count, over all ranks and micro-batches. DeepSpeed divides every loss by the accumulation
    steps and averages gradients over the ranks: both are undone here, and nowhere else.
    """
    return data_world()[1] * micro_steps / max(token_count, 1)

def all_sum(*values):
    """-> float64 tensor on the CPU: each value (number or 0-d tensor) summed over all ranks.
    Ranks that share a model's layers have the same rows, which count once."""
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device())
    if world()[1] > 1:
        dist.all_reduce(total)
    return total.cpu() / LAYOUT["tensor_parallel"]

# ---- 2  Models ------------------------------------------------------------------------------------------------------
def linear_under_zero3(x, weight, bias=None):
    """F.linear under ZeRO-3. DeepSpeed's own has the backward gather the weight anew; without a backward, the plain product gives the
    same bits, sooner."""
    if torch.is_grad_enabled():
        return deepspeed.runtime.zero.linear.zero3_linear_wrap(x, weight, bias)
    if x.dim() == 2 and bias is not None:
        return torch.addmm(bias, x, weight.t())
    return x.matmul(weight.t()) if bias is None else x.matmul(weight.t()).add_(bias)

def ease_zero3(model, whole_layers):
    """Use the product above; and a decoder layer is gathered in one go, not matrix by matrix, if it is not too large to be there whole."""
    deepspeed.zero.partition_parameters.zero3_linear_wrap = linear_under_zero3
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    if whole_layers and layers and max(map(count_parameters, layers)) <= 1e9:
        deepspeed.utils.set_z3_leaf_modules(model, list(set(map(type, layers))))

class ValueModel(nn.Module):
    """A backbone and a linear head that gives one number per token: the reward model and the critic.

    It wraps stock transformers' sequence-classification model, so what is saved is what stock transformers loads; only
    the forward differs: the head is read at every token instead of at the last one.
    """
    def __init__(self, model, head_name):
        super().__init__()
        self.model, self.head_name, self.config = model, head_name, model.config

    def forward(self, ids, mask, positions=None):
        """ids: (B, T); mask: (B, T), or with positions (B, T) a mask of who attends to whom, (B, 1, T, T) -> values: (B, T), fp32."""
        more = extras(self.model.base_model, mask) if positions is None else {"position_ids": positions}
        hidden = self.model.base_model(ids, attention_mask=mask, use_cache=False, **more)[0]
        return getattr(self.model, self.head_name)(hidden).squeeze(-1).float()  # (B, T, H) -> (B, T)

def nearest(path):
    """-> in words, the names beside `path` that are most like it."""
    names = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*")], cutoff=0.0)
    return f"Nearest in {path.parent}: {', '.join(names) or 'nothing'}."

@functools.lru_cache
def load(path, kind=AutoConfig):
    """-> transformers' config, or AutoTokenizer's tokenizer, of a hub name or folder; a clear error if there is none."""
    local = Path(path)
    if not local.exists() and (str(path)[0] in "./~" or any(local.parent.glob("*/args.json"))):  # among our outputs: no hub name
        fail(f"{path}: no such folder. Has the step before been run?\n  {nearest(local)}")
    try:
        return kind.from_pretrained(path, **TRUST)
    except (OSError, ValueError) as error:
        why = ("It is no folder here; has the step before been run? Looked up on the hub:" if not Path(path).is_dir() else
               "The run in it has not ended; --resume goes on with it." if (Path(path) / "args.json").exists() else
               "Read its Python code, then let it run with --trust_remote_code." if "trust_remote_code" in str(error) else "")
        fail(f"no {kind.__name__[4:].lower()} could be loaded from {path}.\n  {why}\n  {str(error).splitlines()[0]}")

def load_tokenizer(path, length=0):
    """-> the tokenizer in `path`, with an EOS token, and a padding token that is not EOS wherever one can be had.

    Our masks come from positions, so padding's id never matters here. Stock transformers finds an answer's last token by
    `ids != pad`, and would read the score one token early if pad were EOS. `length`: tokens of the longest row to come.
    """
    config, tokenizer = load(path).get_text_config(), copy.deepcopy(load(path, AutoTokenizer))
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        fail(f"rows of {length} tokens do not fit {path}, which knows {positions} positions.\n"
             f"  Lower --max_seq_len {length} (in step 3 --max_prompt_seq_len and --max_answer_seq_len) to {positions} in all; "
             "for the toy's model, --preset toy.")
    if tokenizer.eos_token_id is None:
        fail(f"the tokenizer of {path} has no EOS token, so no answer could end.\n  Set eos_token in its tokenizer_config.json.")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        known, used = tokenizer.get_vocab(), (None, tokenizer.eos_token_id, tokenizer.bos_token_id)
        names = ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>", tokenizer.unk_token)
        new = "<|pad|>" if len(tokenizer) < config.vocab_size else tokenizer.eos_token  # in a row of the embedding that no token uses
        tokenizer.add_special_tokens({"pad_token": next((name for name in names if known.get(name) not in used), new)})
    if len(tokenizer) > config.vocab_size:
        fail(f"the tokenizer of {path} has {len(tokenizer)} tokens, its model has rows for {config.vocab_size}.")
    tokenizer.padding_side = "left"
    return tokenizer

def load_model(path, args, stage, dropout=None, tokenizer=None, value_head=None, lora_dim=0):
    """-> a causal LM, or with `value_head` (the head's attribute name) a ValueModel, in --dtype, on the CPU or sharded.

    Under ZeRO-3 HfDeepSpeedConfig makes transformers partition every weight while it loads, so that no rank ever holds
    the whole model. A model from scratch is small here: every rank builds it whole from the same seed.
    Adapters in `path` are added to its base's weights; lora_dim > 0 then puts new ones beside them, and those train.
    """
    config, kind, options = AutoConfig.from_pretrained(path, **TRUST), AutoModelForCausalLM, {"dtype": DTYPES[args.dtype], **TRUST}
    text, size = config.get_text_config(), args.tensor_parallel_size
    heads = [getattr(text, name, None) or size for name in ("num_attention_heads", "num_key_value_heads")]
    if size > 1 and (not text.base_model_tp_plan or any(count % size for count in heads)):
        fail(f"--tensor_parallel_size {size} does not work for {path}.\n  It must divide the model's attention heads and key-value heads "
             f"({', '.join(map(str, heads))}), and transformers must know how to split a {config.model_type} model.")
    own = own_dropout(config)
    if dropout is not None:
        config.update({key: float(dropout) for key in own})
    if value_head:
        kind, value_head = AutoModelForSequenceClassification, getattr(config, "value_head_prefix", value_head)
        if type(config) not in kind._model_mapping:
            fail(f"{path}: transformers has no sequence classification for {config.model_type}, so no reward model or critic.")
        config.num_labels, config.value_head_prefix = 1, value_head
        config.pad_token_id = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
    source = path
    *adapters, path = lora.chain(path)
    load(path)  # an error in words if the base is gone
    torch.manual_seed(args.seed)
    zero3 = None
    if not Path(path).is_dir() or [f for f in Path(path).iterdir() if f.suffix in (".safetensors", ".bin")]:
        knobs = {k: v for k, v in ds_config(args, 3, 1).items() if k != "tensor_parallel"}  # transformers loads whole layers only
        zero3 = HfDeepSpeedConfig(knobs) if stage == 3 else None  # must be alive while the model loads
        renamed = {"key_mapping": {rf"^{value_head}\.": "score."}} if value_head not in (None, "score") else {}
        try:
            model, info = kind.from_pretrained(path, config=config, output_loading_info=True, **options, **renamed)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # cut short, of other shapes, not there
            if isinstance(error, torch.OutOfMemoryError) or waited_in_vain(error):
                raise
            fail(f"the weights of {path} cannot be loaded.\n  {str(error).strip().splitlines()[0]}")
        missing = info["missing_keys"]
        if strangers := [key for key in missing if not (value_head and key == "score.weight")]:
            fail(f"{path} holds no weights for {', '.join(sorted(strangers)[:3])}: they would be random.\n"
                 "  A reward model has no head that writes, for example; step 1 begins with a language model.")
    elif lora_dim:
        fail(f"--lora_dim {lora_dim}: {path} holds no weights for adapters to sit on.\n  Leave it out to train from scratch.")
    else:
        model, missing = kind.from_config(config, **options), ["score.weight"]
    model.own_dropout = own  # save_model writes it back: this run's --dropout is not the next step's
    if value_head and "score.weight" in missing:
        init_value_head(model.score, args.seed)
    if value_head not in (None, "score"):  # before adapters come: a head that was saved with them has this name
        setattr(model, value_head, model.score)
        del model.score
    for folder in reversed(adapters):
        lora.merge_adapters(model, folder)
    del zero3  # (transformers and peft hold only a weak reference to it)
    if lora_dim:
        lora.add_adapters(model, args, source, lora_dim, value_head)
    if stage == 3 and not args.deepcompile:
        ease_zero3(model, whole_layers=not lora_dim)  # with adapters DeepSpeed 0.19.8 lets go of whole layers too early
    return ValueModel(model, value_head) if value_head else model

def own_dropout(config):
    """-> {name: probability} of every dropout that a model's config sets."""
    return {k: v for k, v in vars(config).items() if "drop" in k and k != "layerdrop" and isinstance(v, (int, float))}

def init_value_head(head, seed):
    """Weights ~ normal, mean 0, std 1 / (d + 1), d the head's input width.  [Stiennon 2020], as in OpenRLHF

    (The paper prints N(0, 1/(d+1)); OpenAI's released code used std 1/sqrt(d+1).) Only for a head that is new: a trained
    one is never touched. ZeRO-3 partitions weights as modules are built and does not initialise a layer added on top; left
    alone it would hold whatever was in memory. So it is gathered, written on rank 0, and partitioned again from there.
    """
    with deepspeed.zero.GatheredParameters([head.weight], modifier_rank=0), torch.no_grad():
        if world()[0] == 0 or not hasattr(head.weight, "ds_id"):
            drawn = torch.empty_like(head.weight, device="cpu")  # a generator draws on its own device only
            head.weight.copy_(drawn.normal_(0, 1 / (head.in_features + 1), generator=torch.Generator().manual_seed(seed)))

def extras(model, mask, keep=None):
    """-> what a forward needs beside ids and mask, if the model takes it: position ids counted over real tokens (B, T), so
    that padding moves nothing (BLOOM has none); logits at the last `keep` positions only, or at those that it lists or marks."""
    takes = inspect.signature(inner(model).forward).parameters
    options = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "logits_to_keep": keep}
    return {name: value for name, value in options.items() if name in takes and value is not None}

class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] in fp32, CHUNK tokens at a time: no fp32 copy of all logits, forward or backward."""
    @staticmethod
    def forward(ctx, logits, targets, temperature=1.0):  # (M, V), (M,) -> (M,)
        logsumexp = torch.cat([in_fp32(part, temperature).logsumexp(-1) for part in logits.split(CHUNK)])
        ctx.save_for_backward(logits, targets, logsumexp)
        ctx.temperature = temperature
        return in_fp32(logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1), temperature) - logsumexp

    @staticmethod
    def backward(ctx, grad):
        logits, targets, logsumexp = ctx.saved_tensors
        out, grad = torch.empty_like(logits), (grad / ctx.temperature).unsqueeze(-1)  # (M, V), (M, 1)
        for start in range(0, len(logits), CHUNK):  # d logp / d logits = (onehot(target) - softmax) / temperature
            part = slice(start, start + CHUNK)
            softmax = (in_fp32(logits[part], ctx.temperature) - logsumexp[part, None]).exp_()  # (CHUNK, V)
            out[part] = softmax.mul_(-grad[part]).scatter_add_(-1, targets[part, None], grad[part])
        return out, None, None

def in_fp32(logits, temperature):
    """The rollout samples from softmax(logits.float() / temperature). Divided in bf16, logits would be those of another policy."""
    return logits.float() if temperature == 1 else logits.float() / temperature

def last_logits(model, ids, mask, wanted):
    """-> logits (M, V) that predict the M tokens which `wanted`, bool (B, K), marks among the last K of each row.

    logits[:, t] score token t+1, so the last K tokens are scored by positions T-K-1 .. T-2. Of these, only the wanted ones are
    computed: a short answer pays for its own tokens. (All K for a model's own code, or a compiled one: more memory, other rounding.)
    """
    count = wanted.shape[1]
    stock = "slice_logits_to_keep" in vars(sys.modules[type(inner(model)).__module__])  # what transformers' own models pick tokens with
    if stock and not getattr(model, "is_compiled", False):
        keep = nn.functional.pad(wanted, (ids.shape[1] - count - 1, 1))  # (B, T) bool
    else:
        keep = torch.arange(-count - 1, -1, device=ids.device)  # (K,) positions
    logits = model(ids, attention_mask=mask, use_cache=False, **extras(model, mask, keep)).logits
    if logits.dim() == 2:  # (M, V): it took the mask
        return logits
    if logits.shape[1] > count:  # (B, T, V): it took neither
        logits = logits[:, -count - 1:-1]
    return logits[wanted]  # (B, K, V) -> (M, V)

def last_logprobs(model, ids, mask, wanted, temperature=1.0):
    """-> log-probs (B, K), fp32, of the last K tokens of each row under softmax(logits / temperature), 0 where not `wanted` (B, K)."""
    wanted = wanted > 0
    logprobs = TokenLogprobs.apply(last_logits(model, ids, mask, wanted), ids[:, -wanted.shape[1]:][wanted], temperature)  # (M,)
    return spread(logprobs, wanted)

def spread(values, wanted):
    """(M,) values -> (B, K): each where `wanted` (B, K) is True, 0 elsewhere."""
    return values.new_zeros(wanted.shape).masked_scatter(wanted, values)

@contextlib.contextmanager
def all_gathered(parameters, **options):
    """DeepSpeed's GatheredParameters. One by one with 0.18.5: of several gathers it awaits the last alone, and on a CPU they may overtake."""
    with contextlib.ExitStack() as stack:
        for part in [[p] for p in parameters] if older_than("0.19") else [parameters]:
            stack.enter_context(deepspeed.zero.GatheredParameters(part, **options))
        yield

@contextlib.contextmanager
def gathered(engine):
    """Eval mode, and under ZeRO-3 all weights gathered once: `with gathered(engine) as (model, synced): ...generate...`

    Gathering anew for every token cost 4x the time. DeepSpeed's hooks would do that, so they come off meanwhile.
    If the model does not fit beside what is there, they stay, and `synced` says that all ranks must make as many forwards.
    """
    model = inner(engine)
    was_training, sharded = model.training, [p for p in model.parameters() if hasattr(p, "ds_id")]
    need = sum(p.ds_numel * p.element_size() for p in sharded)
    free = get_accelerator().available_memory() / (world()[1] if device().type == "cpu" else 1)  # ranks share a CPU's memory
    if device().type == "cuda":  # what the allocator holds and does not use is free as well
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    fits = all_sum(need < 0.8 * free)[0] == data_world()[1]  # on every rank
    hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in model.modules()] if sharded and fits else []
    try:
        with all_gathered(sharded, enabled=bool(hooks)):
            for m, before, after in hooks:
                m._forward_pre_hooks, m._forward_hooks = type(before)(), type(after)()
            yield model.eval(), bool(sharded) and not fits
    finally:
        for m, before, after in hooks:
            m._forward_pre_hooks, m._forward_hooks = before, after
        model.train(was_training)

def whole(name, parameter):
    """-> a copy of a weight on rank 0's CPU (None on other ranks), gathered if ZeRO-3 has sharded it; all ranks call it."""
    with deepspeed.zero.GatheredParameters([parameter]):
        tensor = join_tensor_parallel(parameter, parameter.detach())
        return tensor.cpu().clone() if world()[0] == 0 else None

def join_tensor_parallel(parameter, tensor):
    """-> `tensor`, a rank's part of a tensor-parallel weight (or of its EMA), put together from the ranks that share the layer."""
    gather, box = getattr(parameter, "gather_params", None), [tensor.clone()]
    if gather and not (tensor.dim() == 1 and isinstance(gather.__self__, LinearAllreduce)):  # a row-parallel layer's bias is not split
        gather(box)
    return box[0]

def save_model(engine, tokenizer, folder, whole=whole):
    """Write config, safetensors and tokenizer so that stock transformers loads `folder` offline. All ranks call it.

    Weights are gathered one at a time, to rank 0's CPU memory. config.json comes last: it marks the folder whole.
    whole(name, parameter) -> the tensor to save; ppo.py gives its own, for the EMA.
    """
    model, folder = inner(engine), Path(folder)
    phase(f"writing {folder}")
    adapters = getattr(model, "peft_config", {}).get("default")
    plain = adapters is None or model.merge_lora
    state = {name: whole(name, parameter) for name, parameter in model.named_parameters() if plain or parameter.requires_grad}
    if world()[0] == 0:
        state.update({name: buffer.cpu() for name, buffer in model.named_buffers() if plain and name in model.state_dict()})
        shutil.rmtree(folder / ".saving", ignore_errors=True)
        model.config.update(getattr(model, "own_dropout", {}))
        if plain:
            model.save_pretrained(folder / ".saving", state_dict=lora.merged(model, state))
        else:
            model.config.architectures = [type(model).__name__]
            for part in (model.config, adapters):
                part.save_pretrained(folder / ".saving")
            save_file({f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in state.items()},
                      folder / ".saving/adapter_model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder / ".saving")
        for file in sorted((folder / ".saving").iterdir(), key=lambda f: f.name == "config.json"):
            sync(file)
            sync(folder)  # all that came before is there when config.json appears
            file.replace(folder / file.name)
        sync(folder)
        (folder / ".saving").rmdir()
    barrier()

# ---- 3  Data --------------------------------------------------------------------------------------------------------
HUMAN, ASSISTANT = "\n\nHuman: ", "\n\nAssistant:"

def read_row(row):
    """One row of any known format -> (prompt, answer, chosen, rejected), None for what it does not have:

    prompt + response, or prompt + chosen + rejected   Dahoas/*; prompt alone is enough for ppo
    chosen + rejected, whole dialogues                 Anthropic HH: cut after the last turn of the assistant begun in both
    messages; chosen + rejected as lists of messages   chat, through the tokenizer's chat template
    instruction + output, input optional               Alpaca
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list):
        prompt = chosen[:-1] or row.get("prompt")
        best, worst = (turns[-1]["content"] if turns else None for turns in (chosen, rejected))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, best, best, worst
    if row.get("messages"):
        last = max((i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"), default=None)  # None: not answered yet
        return row["messages"][:last], None if last is None else row["messages"][last]["content"], None, None
    if row.get("instruction"):
        question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        return f"{HUMAN}{question}{ASSISTANT}", row.get("output") and f" {row['output']}", None, None
    if "prompt" in row:
        prompt, answers = row["prompt"], (row.get("response") or chosen, chosen, rejected)
        if isinstance(chosen, str) and chosen.startswith(ASSISTANT.strip()):  # rlhf-reward-datasets: the marker is the prompt's
            prompt, answers = prompt + ASSISTANT.strip(), [a and a.removeprefix(ASSISTANT.strip()) for a in answers]
        return prompt, *answers
    prompt, marker, _ = os.path.commonprefix([chosen or "", rejected or ""]).rpartition(ASSISTANT)
    cut = len(prompt + marker)
    return (prompt + marker, chosen[cut:], chosen[cut:], rejected[cut:]) if marker else (None,) * 4

def read_row_safely(row):
    """`read_row`, or four times None where a value is of another type than its format says: such a row is dropped, in words."""
    with contextlib.suppress(TypeError, KeyError, AttributeError, IndexError):
        parts = read_row(row)
        if not isinstance(parts[0], list) or all(isinstance(m.get("content") or "", str) for m in parts[0]):
            return parts
    return (None,) * 4

def tokenise_prompt(tokenizer, prompt):
    """Text or chat messages -> token ids. Text that spells a special token is data: it is split like any other text."""
    if isinstance(prompt, list):
        if tokenizer.chat_template is None:
            fail("the data holds chat messages, and the tokenizer has no chat template.\n"
                 "  Use a chat model's tokenizer, or columns of plain text (prompt, response, chosen, rejected).")
        if not any(special in (m["content"] or "") for special in tokenizer.get_added_vocab() for m in prompt):
            return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        contents = {chr(0xE000 + i): m["content"] or "" for i, m in enumerate(prompt)}  # the template may write special tokens, users not
        marked = [{**m, "content": mark} for m, mark in zip(prompt, contents)]
        text = tokenizer.apply_chat_template(marked, add_generation_prompt=True, tokenize=False)
        pieces = [(contents.get(x, x), x in contents) for x in re.split(f"([{''.join(contents)}])", text)]
        return [i for x, user in pieces for i in tokenizer(x, add_special_tokens=False, split_special_tokens=user).input_ids]
    ids = tokenizer(prompt, split_special_tokens=True).input_ids
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids

def tokenise_answer(tokenizer, answer):
    """Text -> token ids and EOS: the one place where EOS is appended, for all three steps.

    Prompt and answer are tokenised apart and joined: joined text tokenised anew could merge across the border.
    """
    return tokenizer(answer, add_special_tokens=False, split_special_tokens=True).input_ids + [tokenizer.eos_token_id]

def fit(prompt, answers, limit):
    """Cut ids to `limit` tokens. A long prompt keeps its end (half of `limit` or more); then a long answer is cut, and so
    loses its EOS. The room is that of the longest answer: a pair keeps the same prompt."""
    room = max(limit // 2, limit - max(map(len, answers), default=0))
    prompt = prompt[max(0, len(prompt) - room):]
    return prompt, [a[:limit - len(prompt)] for a in answers]

def as_text(prompt):
    """A prompt as text; chat messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)

def tokenise_row(row, tokenizer, step, limit):
    """One row of a source -> one row of `load_rows`, and `drop`: '' or the reason to leave the row out."""
    prompt, answer, chosen, rejected = read_row_safely(row)
    answers = {1: [answer], 2: [chosen, rejected], 3: []}[step]
    extra = json.dumps({k: v for k, v in row.items() if k != "prompt"}, default=str) if step == 3 else ""
    out = dict(prompt=as_text(prompt), chat=isinstance(prompt, list), prompt_ids=[], answers=[], length=0, extra=extra, drop="")
    texts = answers if isinstance(prompt, list) else [prompt, *answers]
    if not prompt or not all(isinstance(x, str) and x.strip() for x in texts):
        return {**out, "drop": "empty prompt or answer"}
    try:
        prompt_ids = tokenise_prompt(tokenizer, prompt)
    except TemplateError as error:  # "roles must alternate", "no system role"
        return {**out, "drop": f"the chat template refuses it: {error}"}
    prompt_ids, ids = fit(prompt_ids, [tokenise_answer(tokenizer, a) for a in answers], limit)
    if step == 2 and ids[0] == ids[1]:
        return {**out, "drop": "chosen equals rejected" if chosen == rejected else "chosen equals rejected once cut"}
    return {**out, "prompt_ids": prompt_ids, "answers": ids, "length": len(prompt_ids) + sum(map(len, ids))}

def read_source(path, flag="--data_path"):
    """Hub name, file or folder -> {'train': Dataset, and 'test': Dataset if there is one}, by the files' names."""
    kinds, local = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}, Path(path)
    if not local.exists() and (local.suffix in kinds or path[0] in "./~"):
        fail(f"{flag} {path}: no such file or folder.\n  {nearest(local)}")
    if local.is_file() and local.suffix not in kinds:
        fail(f"{flag} {path}: unknown kind of file.\n  Known: {', '.join(kinds)}.")
    try:
        source = datasets.load_dataset(kinds[local.suffix], data_files=path) if local.is_file() else datasets.load_dataset(path)
        for rows in source.values():
            rows.data.validate(full=True)  # finds broken UTF-8, which else would only show when the row is read
        test = next((source[name] for name in ("test", "validation") if name in source), None)
        return {"train": source["train"], **({"test": test} if test else {})}
    except Exception as error:  # the libraries below raise many kinds: offline, unknown name, no access, broken file
        empty = local.is_file() and not local.read_bytes().strip()
        fail(f"{flag} {path} cannot be read.\n  {'The file is empty.' if empty else find_bad_line(local) or error.__cause__ or error}")

def find_bad_line(path, wrong=lambda row: None if isinstance(row, dict) else "no JSON object"):
    """-> 'FILE, line N: what is wrong' for the first line of a .jsonl file (or of a folder of them) that is `wrong`, or not JSON."""
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.suffix == ".jsonl" else []:
        for number, line in enumerate(open(file, "rb"), 1):
            try:
                row = json.loads(line.strip() or "null")
                json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no text
                why = row is not None and wrong(row)
            except ValueError as error:
                why = error
            if why:
                return f"{file}, line {number}: {why}"

def load_rows(args, tokenizer, step, limit):
    """-> (train, held-out) datasets for step 1, 2 or 3: columns prompt (text; messages as JSON where chat is true), prompt_ids,
    answers (lists of ids), length, extra (the row's other columns, as JSON).

    Each step takes its own share of every source's rows (--data_split). The held-out rows are the source's own test
    split; without one, a twentieth of the prompts, by hash. Neither depends on --seed: two steps run with different
    seeds must not share rows.
    """
    needs = {1: [{"prompt", "response"}, {"chosen"}, {"messages"}, {"instruction", "output"}], 2: [{"chosen", "rejected"}],
             3: [{"prompt"}, {"chosen", "rejected"}, {"messages"}, {"instruction"}]}[step]
    parts, seen = {"train": [], "test": []}, set()  # seen: what any step trains on, in any source
    for path in args.data_path:
        source = read_source(path)
        if path == "Dahoas/synthetic-instruct-gptj-pairwise":  # its rows lack the markers of those it is blended with
            source = {k: v.map(lambda r: {"prompt": HUMAN + r["prompt"] + ASSISTANT, "chosen": " " + r["chosen"], "rejected": " " + r["rejected"]})
                      for k, v in source.items()}
        columns = source["train"].column_names
        if not any(need <= set(columns) for need in needs):
            fail(f"--data_path {path} has the columns {', '.join(columns) or '(none: it is empty)'}.\n"
                 f"  This step needs {' or '.join(' + '.join(sorted(n)) for n in needs)}. Known formats:\n    "
                 + read_row.__doc__.split("\n", 2)[2].strip())
        prompts = [as_text(read_row_safely(row)[0]) for row in source["train"]]
        if "test" not in source:
            by_hash = sorted(set(prompts), key=lambda prompt: zlib.crc32(prompt.encode()))
            chosen = set(by_hash[:max(1, len(by_hash) // 20)])
            held = np.array([prompt in chosen for prompt in prompts], bool)
            source = {"train": source["train"].select(np.flatnonzero(~held)), "test": source["train"].select(np.flatnonzero(held))}
            prompts = [prompt for prompt, out in zip(prompts, held) if not out]
        seen.update(prompts)
        order = np.random.default_rng(0).permutation(len(source["train"]))
        cuts = (np.cumsum([0, *args.data_split]) / sum(args.data_split) * len(order)).round().astype(int)
        source["train"] = source["train"].select(np.sort(order[cuts[step - 1]:cuts[step]]))
        if not len(source["train"]):
            continue
        for name, rows in parts.items():
            made = source[name].map(tokenise_row, fn_kwargs=dict(tokenizer=tokenizer, step=step, limit=limit),
                                    remove_columns=source[name].column_names, keep_in_memory=True)
            reasons = list(made["drop"]) if len(made) else []  # '' for a row that is kept
            kept = [i for i, why in enumerate(reasons) if not why]
            for why, count in Counter(filter(None, reasons)).items():
                if args.strict:
                    line = find_bad_line(Path(path), lambda row: tokenise_row(row, tokenizer, step, limit)["drop"])
                    fail(f"--strict: {path}, {name}: {count} of {len(made)} rows would be dropped: {why}.\n"
                         f"  {line or 'The first has the prompt ' + repr(made[reasons.index(why)]['prompt'][:80])}")
                say(f"{path}, {name}: dropped {count} of {len(made)} rows: {why}")
            if kept:
                rows.append(made.select(kept).remove_columns("drop"))
    for name, rows in parts.items():
        if not rows:
            fail(f"no {name} rows are left of {', '.join(args.data_path)}.\n  Add data, or give this step a larger share in --data_split.")
    train, test = (datasets.concatenate_datasets(rows) for rows in parts.values())
    fresh = [i for i, prompt in enumerate(test["prompt"]) if prompt not in seen]
    if len(fresh) < len(test):
        say(f"held-out: dropped {len(test) - len(fresh)} of {len(test)} rows, whose prompts are also trained on")
        if args.strict:
            fail("--strict: held-out rows would be dropped, see above.")
        if not fresh:
            fail("every held-out prompt is also trained on.\n  Give the data a test split of its own.")
        test = test.select(fresh)
    return train, test

class Rows(torch.utils.data.Dataset):
    """The rows of `load_rows` by number. A negative number is a filler: row 0 again, with `real` 0, to be masked out."""
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, i):
        return {**self.rows[max(i, 0)], "row": i, "real": int(i >= 0)}

def epoch_batches(lengths, seed, epoch, batch_size, micro_steps, group_by_length):
    """-> this rank's micro-batches of one epoch (lists of row numbers), `micro_steps` of them per optimizer step.

    The rows of each optimizer step depend on (seed, epoch) and on how many rows a step takes, not on how those are laid
    out over ranks and micro-batches: results do not change with the number of GPUs. A short last step is filled with -1
    so that every rank makes the same number of forwards: nothing is ever dropped on one rank alone.
    """
    (rank, ranks), rng = data_world(), np.random.default_rng([seed, epoch])
    size, order = batch_size * micro_steps * ranks, rng.permutation(len(lengths))
    if group_by_length:  # sort within windows of 32 steps, then shuffle the steps: like lengths together, order random
        windows = [order[i:i + 32 * size] for i in range(0, len(order), 32 * size)]
        order = np.concatenate([w[np.argsort(-lengths[w], kind="stable")] for w in windows])
    steps = [order[i:i + size] for i in range(0, len(order), size)]
    if group_by_length:
        steps = [steps[i] for i in rng.permutation(len(steps))]
    batches = []
    for rows in steps:
        rows = rows[np.argsort(-lengths[rows], kind="stable")].tolist() + [-1] * (size - len(rows))
        batches += [rows[start:start + batch_size] for start in range(rank * batch_size, size, ranks * batch_size)]
    return batches

def count_steps(args, rows, batch_size, micro_steps):
    """-> steps of the run's loop (in ppo.py one is a rollout): --max_steps, or --num_train_epochs passes over `rows`."""
    per_epoch = -(-len(rows) // rows_per_step(batch_size, micro_steps))
    return args.max_steps if args.max_steps > 0 else per_epoch * args.num_train_epochs

def eval_loader(args, rows, collate):
    """Yield this rank's batches of `rows`, in order, filled up so that all ranks make as many forwards."""
    (rank, ranks), size = data_world(), args.per_device_eval_batch_size
    order = list(range(len(rows))) + [-1] * (-len(rows) % (size * ranks))
    for start in range(rank * size, len(order), size * ranks):
        yield to_device(collate([Rows(rows)[i] for i in order[start:start + size]]))

def to_device(batch):
    """-> the dict, with its tensors on this rank's device."""
    return {k: v.to(device(), non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}

def texts(tokenizer, micro_batches):
    """-> {"text"} of each row, one by one, for `check_finite`."""
    return ({"text": tokenizer.decode(ids[mask > 0])} for batch in micro_batches for ids, mask in zip(batch["ids"], batch["mask"]))

def pad(sequences, pad_id, side="left"):
    """Lists of ids -> ids, mask: (B, T). Masks come from lengths, never from `ids != pad`."""
    rows = [torch.tensor(s, dtype=torch.long) for s in sequences]
    return (nn.utils.rnn.pad_sequence(rows, True, pad_id, side),
            nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0, side))

# ---- 4  The run -----------------------------------------------------------------------------------------------------
def start(args):
    """Join the other ranks, quieten the libraries, seed, refuse an output folder in use. First call of every main()."""
    for name, slurm in {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID"}.items():
        if f"SLURM_{slurm}" in os.environ and "SLURM_STEP_ID" in os.environ:  # srun: one task a device; the user sets MASTER_ADDR
            os.environ.setdefault(name, os.environ[f"SLURM_{slurm}"])
    alone = os.environ.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in os.environ
    if alone or "RANK" not in os.environ:  # plain python: a world of one
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()))
    output, saved = Path(args.output_dir), checkpoints(args)
    exists = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        fail(f"--output_dir {output}: {exists} is not a folder that can be written to.")
    if not args.overwrite and not args.resume and ((output / "config.json").exists() or saved):
        fail(f"--output_dir {output} holds a run.\n  --overwrite replaces it, --resume goes on with an unfinished one, "
             "another --output_dir leaves it alone.")
    ours = (output / "args.json").is_file() and "data_fingerprint" in (output / "args.json").read_text()
    if not (args.overwrite or args.resume or ours) and (foreign := replaced(output)):
        fail(f"--output_dir {output} holds {foreign[0].name}, which no run of ours has left there; this run would delete it.\n"
             "  Take another --output_dir, or --overwrite.")
    for name, path in vars(args).items():
        for part in lora.chain(path) if name.endswith("model_name_or_path") and path else ():  # adapters, and what they sit on
            if Path(part).exists() and output.resolve() in (Path(part).resolve(), *Path(part).resolve().parents):
                fail(f"--output_dir {output} is also --{name}{' (its base)' if part != path else ''}: the run would delete what it starts from.\n"
                     "  Take another --output_dir.")
    if args.resume and saved and (output / "args.json").exists():
        before = json.loads((output / "args.json").read_text())
        for name in SAME:
            if name in before and name in args and before[name] != getattr(args, name):
                fail(f"--resume: the run was begun with --{name} {before[name]}, and now it is {getattr(args, name)}.\n"
                     "  Give it as it was, or begin anew in another --output_dir.")
        if [Path(path).name for path in before["data_path"]] != [Path(path).name for path in args.data_path]:  # (folders may have moved)
            fail(f"--resume: the run was begun with --data_path {' '.join(before['data_path'])}, and now it is {' '.join(args.data_path)}.")
    if args.resume and (output / "config.json").exists():
        fail(f"--resume: {output} holds a finished run, so there is nothing to go on with.\n  --overwrite replaces it.")
    if args.resume and not saved:
        if not (output / "args.json").exists():
            fail(f"--resume: there is no checkpoint in {output / 'checkpoints'}.\n  Leave it out to start anew.")
        say(f"the run in {output} stopped before its first checkpoint: it starts anew")
        args.resume = False
    sys.excepthook = crashed
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).rglob("lock"):
        if (minutes := (time.time() - lock.parent.stat().st_mtime) / 60) > 5:  # (runs started side by side hold it for a moment)
            say(f"warning: {lock} is there, and for {minutes:.0f} minutes nothing was written beside it. "
                "If nothing compiles, delete it: this run waits.")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    for name in ("DeepSpeed", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ:  # ranks must not fight for cores
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not shutil.which(os.environ.get("CXX", "c++")):  # no compiler: DeepSpeed does without its shared-memory all-reduce
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    limit = datetime.timedelta(minutes=args.timeout_minutes)
    c10d = torch.distributed.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit  # of the groups that DeepSpeed makes of its own, too
    with contextlib.redirect_stdout(io.StringIO()):  # it prints once per rank
        deepspeed.init_distributed(verbose=False, timeout=limit)
    LAYOUT["tensor_parallel"] = args.tensor_parallel_size
    transformers.set_seed(args.seed)  # python's, numpy's and torch's generators
    phase("reading data, loading models")

def store():
    """-> the key-value store that the ranks met in. What each is at stands there, for the others to read should it die or hang."""
    return torch.distributed.distributed_c10d._get_default_store()

def phase(text):
    """Note what this rank is at."""
    NOW[0] = text
    if world()[1] > 1:
        store().set(f"phase{world()[0]}", text)

def waited_in_vain(error):
    """-> whether it says that another rank did not answer."""
    return "gloo" in str(error) or isinstance(error, torch.distributed.DistError)

def crashed(kind, error, trace):
    """sys.excepthook: say which rank stopped, at what, and if it waited for others in vain, for which. No traceback when a write failed."""
    (rank, ranks), at, why = world(), NOW[0], f"{kind.__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    waited = waited_in_vain(error)
    try:
        phase(f"{at}, and waits" if waited else f"{at}, stopped by {why}")
        time.sleep(2 if waited else 0)  # the others that wait give up now, too; who does not say so is the one that died or hangs
        others = {r: store().get(f"phase{r}").decode() for r in range(ranks) if waited and r != rank}
        why = "\n  ".join([why, *(f"rank {r} was last heard of {text}" for r, text in others.items() if not text.endswith("waits"))])
    except Exception:  # without torchrun it is rank 0 that holds the store
        why += "\n  The other ranks' notes cannot be read: who held them (rank 0, or the launcher) is gone."
    if at.startswith("writing ") and isinstance(error, (OSError, RuntimeError, SafetensorError)):
        time.sleep(5 if rank else 0)  # as in `fail`: the launcher ends the run when one rank has left
        there = next(folder for folder in Path(at[8:]).absolute().parents if folder.exists())
        why += (f"\n  {shutil.disk_usage(there).free / 1e9:,.1f} GB are free there. Checkpoints written before are as they were: "
                "make room, and go on with --resume.")
    elif "loss scale already at minimum" in str(error):
        why += ("\n  Gradients overflow fp16 even unscaled: the model was trained in bf16 (--dtype bf16, or fp32), the learning rate is too "
                "high,\n  or the data holds a NaN. No setting of the scale helps.")
    elif not (waited or isinstance(error, (OSError, KeyboardInterrupt))):
        sys.__excepthook__(kind, error, trace)
    print(f"error: rank {rank} of {ranks} stopped {at}: {why}", file=sys.stderr, flush=True)

def finish(args, code=0):
    """Leave the group of ranks in order, and the program."""
    if code == 0:
        say(f"done: {args.output_dir}")
    barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop their last tensors; while Python shuts down that would abort a run that has ended well (PyTorch #179291)
    sys.exit(code)

def barrier():
    if world()[1] > 1:
        dist.barrier()

def say(text):
    """Print on rank 0 only, above the progress bar."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(text)
        sys.stdout.flush()

def replaced(output):
    """-> what is in the folder that a new run there would remove."""
    names = (*LOGS, "checkpoints", "config.json", "curves.png", "ema", "critic", "adapter_config.json", "*model*.safetensors*", "nonfinite_rank*")
    return [path for name in names for path in output.glob(name)]

def begin(args, title, path, engine, rows, held_out, batch_size, micro_steps, steps):
    """Take the output folder (with --overwrite clear what a run before left), write args.json, print the banner."""
    output, (rank, ranks) = Path(args.output_dir), world()
    if rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            for old in replaced(output):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        versions = {m.__name__: m.__version__ for m in (torch, deepspeed, transformers, datasets, np)}
        record = {**vars(args), "world_size": ranks, "device": str(device()), "versions": versions,
                  "data_rows": len(rows), "data_fingerprint": rows._fingerprint}
        (output / "args.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    known = ", ".join(f"{name} {value}" for name, value in limits(args).items())
    say(f"{title}   (preset {args.preset}, seed {args.seed}, output in {output})\n"
        f"  model    {path}: {count_parameters(inner(engine)) / 1e6:,.2f} M parameters, {args.dtype}, ZeRO stage {engine.zero_optimization_stage()}, "
        f"{ranks} x {get_accelerator().device_name()}\n"
        f"  batch    {batch_size} per device x {micro_steps} accumulation x {data_world()[1]} ranks "
        f"= {rows_per_step(batch_size, micro_steps)} rows per step\n"
        f"  data     {len(rows):,} rows (this step's share, --data_split), {len(held_out):,} held out, {steps:,} steps"
        + (f"\n  limits   {known}: no model can do better on this data" if known else ""))
    torch.manual_seed(args.seed + data_world()[0])  # dropout differs between ranks
    barrier()

def count_parameters(model):
    return sum(getattr(p, "ds_numel", p.numel()) * (LAYOUT["tensor_parallel"] if hasattr(p, "gather_params") else 1) for p in model.parameters())

def train_flops(engine, tokens, length, checkpointing):
    """FLOPs of forward + backward on `tokens` tokens in rows of `length`: 3 x the forward, 4 x with checkpointing.

    Forward per token: 2 per weight in a matrix product + 4 * layers * hidden * length in attention.
    PaLM, Chowdhery et al. 2022, appendix B. The input embedding is a look-up, unless it is also the output matrix.
    """
    model = inner(engine)
    config, weights = model.config.get_text_config(), count_parameters(model)
    if model.get_output_embeddings() is None or not config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= getattr(embedding, "ds_numel", embedding.numel())
    forward = 2 * weights + 4 * config.num_hidden_layers * config.hidden_size * length
    return tokens * forward * (4 if checkpointing else 3)

def grad_norm(args, engine):
    """-> the gradient's norm before clipping; None where fp16 skipped the step, as it may. Elsewhere inf is a reason to stop."""
    norm = engine.get_global_grad_norm()
    return None if norm is None or (args.dtype == "fp16" and not engine.was_step_applied()) else float(norm)

def speed(args, engine, tokens, flops, started):
    """-> metrics that every step logs. tokens: real ones, over all ranks. flops: of the whole step; tflops: per device."""
    seconds, schedule = time.time() - started, engine.lr_scheduler  # which has moved on, unless fp16 skipped the step
    rate = schedule.base_lrs[0] * schedule.lr_lambdas[0](max(0, schedule.last_epoch - engine.was_step_applied()))
    return {"learning_rate": float(rate), "grad_norm": grad_norm(args, engine),
            "tokens_per_second": tokens / seconds, "tflops": flops / seconds / world()[1] / 1e12, "seconds": seconds}

def check_finite(args, record, rows=()):
    """A NaN or infinite number stops the run, on all ranks (the numbers are reduced over them); each leaves its `rows` behind,
    an iterable of dicts that is looked at only then. Step 3's can be given to --data_path again."""
    if bad := [k for k, v in record.items() if isinstance(v, float) and not np.isfinite(v)]:
        if lines := [json.dumps({**row, "step": record["step"]}) + "\n" for row in rows]:
            (Path(args.output_dir) / f"nonfinite_rank{world()[0]}.jsonl").write_text("".join(lines))
        say(f"error: step {record['step']}: {', '.join(bad)} not finite. Stopped; the last checkpoint is untouched.\n"
            "  Likely: a learning rate too high, or fp16 where the model was trained in bf16."
            + ("\n  The step's rows are in nonfinite_rank*.jsonl." if lines else ""))
        finish(args, code=1)

def log(args, record, columns, engine=None):
    """One line in metrics.jsonl; its `columns`, fixed, on the screen; events for DeepSpeed's monitor (TensorBoard, ...)."""
    check_finite(args, record)  # an evaluation may be what it finds
    append(args, "metrics.jsonl", [{k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in record.items()}])
    widths = [max(12, len(c) + 2) for c in columns]
    if record["step"] == 0 or not hasattr(log, "legend"):
        say("".join(c.rjust(w) for c, w in zip(columns, widths)))
        log.legend = True  # once
    cells = ["" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in map(record.get, columns)]
    say("".join(c.rjust(w) for c, w in zip(cells, widths)))
    if engine is not None and world()[0] == 0 and engine.monitor.enabled:
        engine.monitor.write_events([(f"train/{k}", v, record["step"]) for k, v in record.items() if isinstance(v, float)])

def append(args, name, rows):
    """Append dicts to a .jsonl file of the output folder (rank 0)."""
    if world()[0] == 0:
        with open(Path(args.output_dir) / name, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

def limits(args):
    """{metric: best reachable value} of this step, from a limits.json beside the data (the toy knows its own), else {}."""
    file = Path(args.data_path[0]) / "limits.json"
    return json.loads(file.read_text()).get(Path(sys.argv[0]).stem, {}) if file.is_file() else {}

def draw_curves(args):
    """metrics.jsonl -> curves.png, a panel for each metric that changed, its known limit dashed where there is one (rank 0)."""
    if world()[0] != 0:
        return
    try:
        import matplotlib, pandas
        matplotlib.use("Agg")
        metrics = pandas.read_json(Path(args.output_dir) / "metrics.jsonl", lines=True).set_index("step").select_dtypes("number")
        metrics = metrics.drop(columns=["epoch", "seconds"], errors="ignore").dropna(axis="columns", how="all")
        metrics = metrics.interpolate("index", limit_area="inside")
        if (changed := metrics.nunique() > 1).any():
            metrics = metrics.loc[:, changed]
        size = (16, 0.7 * metrics.shape[1] + 2)
        axes = metrics.plot(subplots=True, layout=(-1, 4), figsize=size, title=list(metrics), legend=False, xlabel="").flat
        for axis, limit in zip(axes, map(limits(args).get, metrics)):
            if limit is not None:
                axis.axhline(limit, linestyle="--", color="gray")
        axes[0].figure.tight_layout()
        axes[0].figure.savefig(Path(args.output_dir) / "curves.png", dpi=80)
        matplotlib.pyplot.close("all")
    except Exception as error:  # a picture is not worth a run: the model is saved after this
        say(f"curves.png could not be drawn: {error!r}")

def checkpoints(args):
    """-> the whole checkpoints of --output_dir, oldest first. A folder gets its step-N name only once it is complete."""
    folders = [f for f in (Path(args.output_dir) / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name)]
    return sorted(folders, key=lambda f: int(f.name.split("-")[1]))

def sync(path):
    """A file, or a folder's list of names, is on the disk when this returns: else a power cut may keep a rename and lose what it named."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)

def everyones(items):
    """-> the items of all ranks' lists, in one list, on every rank."""
    lists = [items] * world()[1]
    if world()[1] > 1:
        torch.distributed.all_gather_object(lists, items)
    return sum(lists, [])

