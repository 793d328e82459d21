"""How much of LoRA's change is lost where adapters are merged into weights of half precision.

    python bench/lora_merge.py

A merged weight is rounded to its dtype: what the adapters add is lost wherever it is smaller than
half a step between two numbers of that dtype. Here a random Llama's adapters train by AdamW, in
fp32, on random tokens. "lost" is the norm of (rounded merge - exact merge) over the norm of what
the adapters add, for all adapted matrices together; "unchanged" the share of weights that are the
same numbers in bf16 after the merge. It takes half a minute on one core.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from machinery.models import lora

UPDATES = (1, 10, 50, 200)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="hidden size [%(default)s]")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters [%(default)s]")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="[%(default)s]")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
