"""Counts the memory of each phase of a step from the models' configs alone. Nothing is loaded."""

import argparse
import functools
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
from machinery import folders, lora, output_head, patches, rollout, zero3

PASSING = ("activations", "logits")  # of one model at a time
PARTS = ("weights", "gradients", "optimizer", *PASSING, "KV cache", "buffers", "host")
# host: what offloading moves to the CPU


@dataclass
class Model:
    """One model of a step, and what it works on."""

    args: argparse.Namespace  # its flags: model_name_or_path, zero_stage, dropout, lora_dim, ...
    rows: int  # of one forward on one device
    trains: bool = True
    head: bool = False  # a value model
    with_logits: int | None = None  # tokens of a row that get logits; None: all
    generates: int = 0  # rows that write responses at a time

    @functools.cached_property
    def sizes(self):
        return sizes_of(self.args, self.head)

    def stage(self):
        return common.stage_of(self.args) if self.trains else self.args.zero_stage


def sizes_of(args, head=False):
    """Returns weights, trained (those that train), kept_by_row, shared (bytes), config of a model.

    And in_parts: whether many logits are made in parts (machinery/output_head.py).

    args: its flags. It is built and run on a row of max_seq_len tokens, in tensors that have shapes
    and no data, and what autograd saves for the backward is added up. shared: what all layers save,
    the mask and rotary tables; at least 4 times, as q, k and v save their common input 3 times.
    """
    path, tokens = args.model_name_or_path, args.max_seq_len
    config = folders.load_config(path, args.trust_remote_code)
    config.num_labels = 1
    if args.dropout is not None:
        config.update(dict.fromkeys(folders.own_dropout(config), float(args.dropout)))
    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    options = {"dtype": common.DTYPES[args.dtype], "trust_remote_code": args.trust_remote_code}
    patches.share_masks()
    saved, times = {}, Counter()

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # each once
        times[storage._cdata] += 1
        return tensor

    with torch._subclasses.fake_tensor.FakeTensorMode():
        model = kind.from_config(config, **options).train()
        ids = torch.ones(1, tokens, dtype=torch.long)
        takes = folders.accepted(model.base_model, position_ids=torch.arange(tokens)[None])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.base_model(ids, attention_mask=ids, use_cache=False, **takes)
        weights = zero3.count_parameters(model)
        for parameter in model.parameters():
            saved.pop(parameter.untyped_storage()._cdata, None)
    with torch.device("meta"):  # where peft can add adapters
        model = kind.from_config(config, **options)
        lora.add_adapters(model, args, path, "score" if head else None)
        whole = head or args.tensor_parallel_size > 1 or args.deepcompile
        in_parts = not whole and output_head.ends_with_head(model)
    trained = zero3.count_parameters(model, training=True)
    text = config.get_text_config()
    shared = [key for key in saved if times[key] >= max(text.num_hidden_layers, 4)]
    kept, shared = (sum(saved[key].nbytes() for key in keys) for keys in (saved, shared))
    counts = dict(weights=weights, trained=trained, kept_by_row=kept, shared=shared)
    return SimpleNamespace(**counts, in_parts=in_parts, config=text)


def count(args, models, ranks, cpu=False):
    """Returns {phase: {part: bytes}} on the fullest of `ranks` devices (cpu: they are CPUs).

    P weights, T of them trained, w bytes each, on N devices [Rajbhandari 2020, section 3]:

        weights      w P, at stage 3 w P / N
        gradients    w T, / N from stage 2 (summed in fp32: 4 T); those that come as
                     activations go are counted in `update` only
        optimizer    12 T: fp32 copy and two moments, / N from stage 1; at stage 0 in fp32 8 T
        activations  what autograd keeps; with checkpointing w * rows * tokens * hidden a layer,
                     one layer whole [Chen 2016], and what all layers share
        logits       w * rows * tokens * vocabulary, and their gradient; where these are many, of a
                     part of the tokens, and the matrix's gradient in fp32
        KV cache     its numbers of a token * w * rows * tokens
        buffers      of reduction; what stage 3 gathers; in `update` copies of gradients
    """
    zero = {"reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9, "overlap_comm": False}
    zero.update(common.ds_config(args, 1)["zero_optimization"])
    phases = ["generate", "score", "train", "update"]
    if not any(model.generates for model in models):
        del phases[:2]
    out = {phase: dict.fromkeys(PARTS, 0) for phase in phases}
    for model in models:
        for phase, total in out.items():
            for part, size in held_by(model, phase, ranks, cpu, zero).items():
                passes = part in PASSING
                total[part] = max(total[part], size) if passes else total[part] + size
    return out


def held_by(model, phase, ranks, cpu, zero):
    """Returns {part: bytes} that one model holds in a phase. P, T, w, N: see `count`."""
    args, sizes, stage = model.args, model.sizes, model.stage()
    config, rows, tokens = sizes.config, model.rows, model.args.max_seq_len
    w = common.DTYPES[args.dtype].itemsize
    bf16 = args.dtype == "bf16"
    split = args.tensor_parallel_size if model.trains else 1  # ranks that share each layer
    N, P = ranks // split, sizes.weights / split
    T = sizes.trained * model.trains / split
    parts = dict.fromkeys(PARTS, 0)
    parts["weights"] = w * P
    parts["optimizer"] = (12 if w < 4 or stage else 8) * T
    bucket = zero["reduce_bucket_size"]
    micro_steps = args.gradient_accumulation_steps
    summed = "data_types" in common.ds_config(args, 1, micro_steps)  # in fp32
    stays = stage == 3 or (stage == 1 and summed and not args.adam_offload)  # between steps, too
    whole = stage == 2 and summed and T > bucket and not cpu  # from the first reduction on
    early = phase == "train" and (micro_steps > 1 or whole)
    if phase == "update" or stays or early:
        parts["gradients"] = T * (4 if summed else w)
    for part in ("optimizer", "gradients", "weights")[:stage]:
        parts[part] /= N

    bucket = w * (min(bucket, T) if cpu else bucket * model.trains)  # CPU: pages that are written
    buckets = bucket * (1 + zero["overlap_comm"])
    gathered = w * min(P, zero["stage3_max_live_parameters"]) if stage == 3 else 0
    buffers = bucket if stage == 3 else 0  # made once, and kept
    own = (sizes.kept_by_row - sizes.shared) / config.num_hidden_layers
    layer = rows * (own + sizes.shared)
    if phase == "generate" and model.generates:
        parts["KV cache"] = w * rollout.numbers_of_a_token(config) * model.generates * tokens
        parts["logits"] = model.generates * config.vocab_size * (w + 24)
        parts["activations"] = layer * model.generates / rows
        buffers += w * P if stage == 3 else 0
    elif phase == "score" or (phase == "train" and model.trains):
        kept = rows * sizes.kept_by_row
        if args.gradient_checkpointing:
            kept = rows * w * tokens * config.hidden_size * config.num_hidden_layers + layer
        parts["activations"] = kept if phase == "train" else layer
        if not model.head:
            numbers = rows * (model.with_logits or tokens) * config.vocab_size
            if sizes.in_parts and 4 * numbers > output_head.LARGEST:
                numbers = output_head.LARGEST // 4
                learns = phase == "train" and not args.lora_dim
                parts["logits"] = 4 * config.vocab_size * config.hidden_size * learns
            chunk = common.CPU_CHUNK if cpu else common.GPU_CHUNK
            parts["logits"] += 2 * w * numbers + 2 * min(chunk, 4 * numbers)
        reduces = phase == "train" and stage in (1, 2) and not cpu
        buffers += gathered + (buckets if reduces else 0)
    elif phase == "update" and model.trains:
        buffers += copied_gradients(stage, bf16, T, N)

    if args.adam_offload and stage:
        parts["host"] = 4 * T / N
        buffers = 0 if phase == "update" else min(buffers, buckets + gathered)
    parts["buffers"] = buffers
    offload(args, parts, phase, stage, summed)
    if model.generates and args.enable_ema:
        parts["optimizer"] += 4 * T / N
    return parts


def copied_gradients(stage, bf16, T, N):
    """Returns the bytes of copies of the gradients that an update makes.

    Stage 0, in fp32, joins them for its all-reduce, 5e8 at most. In bf16 stage 1 is BF16_Optimizer:
    its all-reduce takes a bf16 copy of all, in one piece, below 5e8 weights of the joined ones.
    """
    if stage == 0:
        return 4 * min(5e8, T) if N > 1 else 0
    all_reduced = (2 if T > 5e8 else 6) * T if stage == 1 and bf16 and N > 1 else 0
    return max(4 * T / N, all_reduced)


def offload(args, parts, phase, stage, summed):
    """Moves to the host what the flags offload. `summed`: the gradients are, in fp32."""
    moved = []
    if args.adam_offload:
        moved = ["optimizer", "gradients"][: 1 if summed and stage < 3 else stage]
    elif phase in ("generate", "score") and args.offload_states:  # ppo.py's
        moved = ["optimizer", "gradients"]
    if args.offload and stage == 3:
        moved.append("weights")
    for part in moved:
        parts["host"] += parts[part]
        parts[part] = 0
