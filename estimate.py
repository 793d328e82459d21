"""`--estimate`: will it fit? The memory of each phase of a step, counted from the models' configs; nothing is loaded.

    python ppo.py --preset opt-1.3b --estimate 8x80

Not needed to understand the three steps. docs/deepspeed.md compares its counts with measured peaks.
"""
import copy
import functools
import itertools
import os
import re
import sys
from pathlib import Path

import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import arguments
import common

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "buffers", "host")  # host: what offloading moves there

@functools.lru_cache
def sizes_of(path, head, tokens, dtype, dropout=None, lora_dim=0):
    """From a model's config alone -> weights, weights that train, bytes that autograd keeps of a row of `tokens`, layers,
    hidden size, vocabulary, numbers in the KV cache per token.

    The model is built and run in tensors that have shapes and no data, and what autograd saves for the backward is added up.
    """
    config, kept = copy.deepcopy(common.load(path)), {}

    def note(tensor):  # each storage once
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor
    config.num_labels = 1
    if dropout is not None:
        config.update({key: float(dropout) for key in common.own_dropout(config)})
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model = (AutoModelForSequenceClassification if head else AutoModelForCausalLM).from_config(config, dtype=common.DTYPES[dtype]).train()
        ids, own = torch.ones(1, tokens, dtype=torch.long), {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.base_model(ids, attention_mask=ids, use_cache=False, **common.extras(model.base_model, ids))
        adapted = [m.weight for name, m in model.base_model.named_modules() if getattr(m, "weight", None) is not None
                   and m.weight.dim() == 2 and not isinstance(m, nn.Embedding)] if lora_dim else []
        count, text, last = common.count_parameters(model), config.get_text_config(), list(model.parameters())[-1]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (count, lora_dim * sum(sum(weight.shape) for weight in adapted) + head * last.numel() if lora_dim else count,
            sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own),
            text.num_hidden_layers, text.hidden_size, text.vocab_size, 2 * text.num_hidden_layers * heads * width)

def memory(args, models, ranks, cpu=False):
    """-> {phase: {part: bytes}} on the fullest of `ranks` devices.  P weights, T of them trained, w bytes each, on N devices:

        weights      w P, at stage 3 w P / N                     gradients  w T, / N from stage 2 (bf16: 2 T; 6 T; 4 T / N)
        optimizer    12 T: fp32 copy and two moments, / N from stage 1; at stage 0 in fp32 8 T    [Rajbhandari 2020] section 3
        activations  what autograd keeps; with checkpointing w * rows * tokens * hidden a layer and one layer whole [Chen 2016]
        logits       w * rows * tokens * vocabulary, and their gradient           KV cache  `sizes_of`'s numbers * w * rows * tokens
        buffers      reduction buckets; weights that stage 3 gathers; while the optimizer steps, copies of the gradients
    Gradients that come as activations go are counted in `update` only. models: dicts of path, stage, rows, tokens, trains, and
    head (a value model), answer (tokens with logits), cached (rows that generate), kept (scores and trains in one pass), ema.
    """
    w, out = common.DTYPES[args.dtype].itemsize, {}
    zero = {"reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9, "overlap_comm": True, **common.ds_config(args, 3, 1)["zero_optimization"]}
    phases = ("generate", "score", "train", "update") if any(m.get("cached") for m in models) else ("train", "update")
    for m, phase in itertools.product(models, phases):
        weights, trained, row, layers, hidden, vocab, cache = sizes_of(m["path"], m.get("head", False), m["tokens"], args.dtype,
                                                                       m.get("dropout"), m.get("lora_dim", 0))
        rows, cached, kept, trains, T = m["rows"], m.get("cached", 0), m.get("kept"), m["trains"], trained * m["trains"]
        stage = common.stage_of(args, m["stage"]) if trains else m["stage"]
        tp = args.tensor_parallel_size if trains else 1  # layers split over tp ranks, the rest of ZeRO over the groups of them
        weights, T, devices, here = weights / tp, T / tp, ranks // tp, dict.fromkeys(PARTS, 0)
        shards = lambda first: devices if stage >= first else 1
        early = stage == 3 or (stage == 1 and args.dtype == "bf16") or args.gradient_accumulation_steps > 1  # there before the backward
        here["weights"] = w * weights / shards(3)
        here["gradients"] = ({1: 6}.get(stage, 4) if args.dtype == "bf16" and stage else w) * T / shards(2) * (phase == "update" or early)
        here["optimizer"] = (12 if w < 4 or stage else 8) * T / shards(1)
        layer = rows * row / layers
        one_pass = {"logits": 0 if m.get("head") else (2 * rows * w * m.get("answer", m["tokens"]) + 8 * common.CHUNK) * vocab,
                    "activations": rows * w * m["tokens"] * hidden * layers + layer if args.gradient_checkpointing else rows * row}
        gathered = w * min(weights, zero["stage3_max_live_parameters"]) * (stage == 3)
        bucket = w * (min(zero["reduce_bucket_size"], T) if cpu else zero["reduce_bucket_size"] * trains)  # CPU: pages that are written
        here["buffers"] = bucket * (stage == 3)  # made once, and kept
        if phase == "generate" and cached:
            here.update({"KV cache": w * cached * cache * m["tokens"], "logits": cached * vocab * (w + 24), "activations": layer})
            here["buffers"] += w * weights * (stage == 3)
        elif phase == "score" and (kept or not trains or cached or m.get("head")):
            here.update(one_pass if kept else {**one_pass, "activations": layer})
            here["buffers"] += gathered
        elif phase == "train" and trains:
            here.update(one_pass)
            here["buffers"] += gathered + bucket * (1 + zero["overlap_comm"]) * (stage in (1, 2) and not cpu)
        elif phase == "update" and trains:
            here["buffers"] += 4 * T / devices if stage else max(8 * (w < 4) * T, w * min(5e8, T) * (ranks > 1))  # (the all-reduce's bucket)
        if args.adam_offload and stage:
            moved = ("optimizer", "gradients") if stage > 1 else ("optimizer",)
            here["host"] = sum(here[k] for k in moved) + 4 * T / devices
            here.update(dict.fromkeys(moved, 0), buffers=min(here["buffers"], bucket * (1 + zero["overlap_comm"]) + gathered) * (phase != "update"))
        if args.offload and stage == 3:
            here["host"], here["weights"] = here["host"] + here["weights"], 0
        if getattr(args, "offload_states", False) and not args.adam_offload and phase in ("generate", "score"):
            here["host"], here["optimizer"], here["gradients"] = here["host"] + here["optimizer"] + here["gradients"], 0, 0
        if m.get("ema"):
            here["optimizer"] += 4 * weights / ranks
        total = out.setdefault(phase, dict.fromkeys(PARTS, 0))
        for part, size in here.items():  # models work one after the other, and only a pass that is kept stays
            total[part] = max(total[part], size) if part in ("activations", "logits") and not (kept and phase != "generate") else total[part] + size
    return out

def estimate(args, models_of, refusal=arguments.refusal):
    """--estimate: print what a device holds in each phase and, where that is too much, the fewest flags that make it fit; exit 0.

    N devices: those given, else those launched. Their memory: what is given, else what is there. A tenth of it is left alone,
    for CUDA's context, NCCL, the allocator's gaps. A CPU's memory is shared by its ranks, and holds what is offloaded as well.
    """
    if not re.fullmatch(r"(\d*[1-9]\d*)?(x\d+(\.\d+)?)?", args.estimate):
        common.fail(f"--estimate {args.estimate}: give devices, and if you like their GiB.\n"
                    "  --estimate, --estimate 8, --estimate 8x80 or --estimate x80.")
    count, _, gib = args.estimate.partition("x")
    ranks, cpu = int(count or os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS", 1)), common.device().type == "cpu" and not gib
    if ranks % args.tensor_parallel_size:
        common.fail(f"--tensor_parallel_size {args.tensor_parallel_size} must divide the number of devices, {ranks}.\n"
                    "  --estimate 8x80 asks about 8.")
    room = 2 ** 30 * float(gib) if gib else common.get_accelerator().total_memory()
    room *= 0.9 / (int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks) if cpu else 1)
    peak = lambda phases: max(sum(parts.values()) - parts["host"] * (not cpu) for parts in phases.values())

    def changed(changes, devices=ranks):
        """-> args with the flags of all `changes`, and the peak with them, infinite where they contradict each other."""
        new = copy.copy(args)
        for flag, value in (item for change in changes for item in change.items()):
            for name in [flag] + [f"{role}_{flag}" for role in ("actor", "critic") if hasattr(args, f"{role}_{flag}")]:
                setattr(new, name, value)
        stages = [value for name, value in vars(new).items() if name.endswith("zero_stage")]
        fits_together = refusal(new) is None and not (new.offload and min(stages) < 3)
        return peak(memory(new, models_of(new), devices, cpu)) if fits_together else float("inf")

    common.say(f"{Path(sys.argv[0]).name} on {ranks} x {'device' if gib else common.get_accelerator().device_name()}, {args.dtype}"
        f"{', gradient checkpointing' * args.gradient_checkpointing}: GiB on the fullest one, by count, nothing was loaded")
    for m in models_of(args):
        weights = sizes_of(m["path"], m.get("head", False), m["tokens"], args.dtype)[0]
        common.say(f"  {weights / 1e6:10,.1f} M weights, {'trained' if m['trains'] else 'frozen '}, "
            f"ZeRO {common.stage_of(args, m['stage']) if m['trains'] else m['stage']}, {m['rows']} x {m['tokens']} tokens   {m['path']}")
    phases = memory(args, models_of(args), ranks, cpu)
    common.say(f"  {'':9}" + "".join(f"{part:>12}" for part in (*PARTS, "device")))
    for phase, parts in phases.items():
        common.say(f"  {phase:9}" + "".join(f"{size / 2 ** 30:12.2f}" for size in (*parts.values(), peak({phase: parts}))))
    verdict = f"the peak is {peak(phases) / 2 ** 30:.2f} GiB, and {room / 2 ** 30:.2f} GiB may be used (0.9 of {room / 0.9 / 2 ** 30:.2f})"
    if peak(phases) <= room:
        common.say(f"  It fits: {verdict}.")
        sys.exit(0)
    sizes = {name: value for name, value in vars(args).items() if re.fullmatch("per_device_(train|training|generation)_batch_size", name)}
    halves = [{**{name: value // 2 ** k for name, value in sizes.items()}, "gradient_accumulation_steps": args.gradient_accumulation_steps * 2 ** k}
              for k in range(1, 12) if all(value % 2 ** k == 0 for value in sizes.values())]
    options = [[{"gradient_checkpointing": True}], [{"zero_stage": s} for s in range(args.zero_stage + 1, 4)], halves,
               [{"adam_offload": True}], [{"offload": True}]]
    if args.dtype == "fp32":
        options.append([{"dtype": "bf16"}])
    if hasattr(args, "lora_dim"):
        options.append([{"lora_dim": 16}])
    options = [o for o in options if o and not all(getattr(args, k) == v for k, v in o[0].items())]

    def spell(changes):
        """-> as flags; by role where the command names a role's own, which goes before the one for both."""
        words = []
        for name, value in (item for change in changes for item in change.items()):
            own = [f"{role}_{name}" for role in ("actor", "critic") if any(a.startswith(f"--{role}_{name}") for a in sys.argv)]
            words += [f"--{n}" if value is True else f"--{n} {value}" for n in (own if len(own) == 2 else [name, *own])]
        return " ".join(words)
    common.say(f"  It does NOT fit: {verdict}. The fewest flags that make it fit, and its peak then:")
    for n in range(1, len(options) + 1):
        tried = ([(c, changed(c)) for c in itertools.product(*groups)] for groups in itertools.combinations(options, n))
        found = [fitting[0] for some in tried if (fitting := [(c, size) for c, size in some if size <= room])]
        if found or n == len(options):
            for changes, size in found:
                common.say(f"    {size / 2 ** 30:8.2f}   {spell(changes)}")
            break
    more = next((n for n in (ranks * 2 ** k for k in range(1, 12)) if changed([{"zero_stage": 3}], n) <= room), None)
    common.say(f"    {changed([{'zero_stage': 3}], more) / 2 ** 30:8.2f}   {spell([{'zero_stage': 3}])} on {more} devices" if more else
        "" if found else "    none, on any number of devices: shorter rows, or a smaller model")
    sys.exit(0)
