"""LoRA in a rollout: what a merge loses in half precision, and what each form of it costs.

    python bench/lora_merge.py

A merged weight is rounded to its dtype: what the adapters add is lost wherever it is smaller than
half a step between two numbers of that dtype. Here a random Llama's adapters train by AdamW, in
fp32, on random tokens. "lost" is the norm of (rounded merge - exact merge) over the norm of what
the adapters add, for all adapted matrices together; "unchanged" the share of weights that are the
same numbers in bf16 after the merge.

Then 8 rows of 32 tokens are sampled by this model, with its adapters as peft computes them, merged,
and fused (variants/lora-rollout), in turn. "calls" are the operators a layer and token that compute
or copy, where a GPU would have a launch each; "speed" is peft's CPU time over the form's, the
median of all rounds; "gap" is abs(log(pi / mu)) of the tokens, pi by peft's forward over whole
rows, mu by the sampler. "not restored" is the share of weights that are others once what was merged
has been subtracted again. All of it takes a minute or two on one core.
"""

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "variants/lora-rollout")]

import lora_rollout
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import ppo
from machinery.models import lora

UPDATES = (1, 10, 50, 200)
ROWS, PROMPT, ANSWER, ROUNDS = 8, 16, 32, 8


def build(size, rank, dtype):
    """Returns a random Llama with adapters, whose weights have the deviation that Llama's have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    lora.add_adapters(model, argparse.Namespace(lora_dim=rank, lora_alpha=16, seed=0), "random")
    return model


@torch.no_grad()
def merges(model, dtype):
    """Yields of each adapted matrix in fp64 itself, what the adapters add, and both in `dtype`."""
    for layer in lora.adapted_layers(model).values():
        a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        change = layer.scaling["default"] * (b @ a)
        weight = layer.base_layer.weight.double()
        yield weight, change, (weight + change).to(dtype).double()


def lost(model, dtype):
    """Returns what a merge in `dtype` loses of the adapters' change, as a share of it."""
    errors = changes = 0.0
    for weight, change, merged in merges(model, dtype):
        errors += (merged - weight - change).square().sum().item()
        changes += change.square().sum().item()
    return (errors / changes) ** 0.5


def unchanged(model, dtype):
    """Returns the share of weights that are in `dtype` what they were before the merge."""
    same = count = 0
    for weight, _, merged in merges(model, dtype):
        same += (merged == weight.to(dtype).double()).sum().item()
        count += weight.numel()
    return same / count


# ---- Rollouts ----
class Calls(TorchDispatchMode):
    """Counts operators, less those that only look at a tensor in another shape."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operator, types, given=(), options=None):
        views = operator.is_view or operator in (
            torch.ops.aten._unsafe_view.default,
            torch.ops.aten.detach.default,
        )
        self.found["views" if views else "calls"] += 1
        return operator(*given, **(options or {}))


class NoEnd:
    """A tokenizer without an end, so that all rows have all tokens."""

    eos_token_id, pad_token_id = -1, 0

    def __len__(self):
        return 512


def forms(model, dtype):
    """Returns {form: the model with its adapters in it}, each a copy, and what was not restored."""
    peft, merged, fused = (copy.deepcopy(model).to(dtype).eval() for _ in range(3))
    lora_rollout.fuse(fused)
    others = count = 0
    for layer in lora.adapted_layers(merged).values():
        weight = layer.base_layer.weight
        before = weight.clone()
        layer.merge()
        after = weight.clone()
        layer.unmerge()
        others += (weight != before).sum().item()
        count += weight.numel()
        weight.data = after
        layer.merged_adapters.append("default")
    return {"peft": peft, "merged": merged, "fused": fused}, others / count


def rollout(model, scorer):
    """Returns a rollout's seconds of CPU time, and mean and largest gap of its tokens to scorer."""
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 512, (ROWS, PROMPT), generator=random)
    uniforms = torch.rand(ROWS, ANSWER, generator=random, dtype=torch.float64)
    args = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[])
    sample = lora_rollout.with_fused_adapters(ppo.sample)
    began = time.process_time()
    given = args, model, NoEnd(), ids, torch.ones_like(ids), uniforms
    responses, sampled, *_ = sample(*given)
    seconds = time.process_time() - began
    whole = torch.cat([ids, responses], 1)
    logits = scorer(whole).logits[:, PROMPT - 1 : -1].float()
    scored = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    gaps = (scored - sampled).abs()
    return seconds, gaps.mean().item(), gaps.max().item()


def calls_of_a_layer(model):
    """Returns the calls of one decoder layer for a token."""
    layer, hidden = model.model.layers[0], torch.zeros(ROWS, 1, model.config.hidden_size)
    hidden = hidden.to(model.dtype)
    turned = model.model.rotary_emb(hidden, torch.zeros(1, 1).long())
    calls = Calls()

    @lora_rollout.with_fused_adapters
    def forward(args, model):
        with calls:
            layer(hidden, position_embeddings=turned)

    forward(None, model)
    return calls.found["calls"]


@torch.no_grad()
def compare(model):
    """Prints the table of rollouts."""
    print("\n           calls      speed   mean gap   largest gap   not restored")
    for dtype in (torch.float32, torch.bfloat16):
        models, others = forms(model, dtype)
        rounds = [
            {form: rollout(each, models["peft"]) for form, each in models.items()}
            for _ in range(ROUNDS)
        ]
        print(str(dtype).removeprefix("torch."))
        for form, each in models.items():
            ratio = statistics.median(found["peft"][0] / found[form][0] for found in rounds[1:])
            _, mean, largest = rounds[0][form]
            lost = f"{others:15.2%}" if form == "merged" else ""
            calls = calls_of_a_layer(each)
            print(f"  {form:8}{calls:6}{ratio:11.2f}{mean:11.1e}{largest:14.1e}{lost}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="hidden size [%(default)s]")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters [%(default)s]")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="[%(default)s]")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so that CPU time is what the work took, on a busy machine, too
    print(f"hidden size {args.size}, rank {args.rank}, rate {args.learning_rate:g}, AdamW")
    print("updates   bf16 lost  unchanged   fp16 lost   fp32 lost")
    model = build(args.size, args.rank, torch.float32)
    for layer in lora.adapted_layers(model).values():  # frozen weights that bf16 can hold
        layer.base_layer.weight.data = layer.base_layer.weight.bfloat16().float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(1)
    for update in range(1, max(UPDATES) + 1):
        ids = torch.randint(512, (4, 32), generator=random)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update in UPDATES:
            shares = [lost(model, t) for t in (torch.bfloat16, torch.float16, torch.float32)]
            same = unchanged(model, torch.bfloat16)
            print(
                f"{update:7}   {shares[0]:9.1%}  {same:9.1%}  {shares[1]:10.2%}  {shares[2]:10.4%}",
                flush=True,
            )
    compare(model)


if __name__ == "__main__":
    main()
