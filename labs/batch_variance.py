"""Where does the gap between sampling and scoring come from? One row alone, and among others.

    python labs/batch_variance.py MODEL [--rows 64]        a minute; MODEL: an actor's folder

The log-probs of each row's response are computed alone, and in batches of 8 and 64 rows, padded as
in training: per dtype and per attention kernel. And token by token with a cache, as sampling does
it. What is printed is how far each is from the row alone in the same dtype and kernel, and from
fp32: the largest difference of a token, and the mean. Rows are those of the toy's held-out data.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import common  # noqa: E402

DTYPES = torch.float32, torch.bfloat16, torch.float16
KERNELS = "eager", "sdpa"


def read_rows(tokenizer, count):
    """Returns (prompt ids, response ids) of held-out rows, EOS included."""
    lines = (ROOT / "toy/data/test.jsonl").read_text().splitlines()[:count]
    return [
        (
            tokenizer(row["prompt"])["input_ids"],
            [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id],
        )
        for row in map(json.loads, lines)
    ]


@torch.no_grad()
def together(model, rows):
    """Returns the log-probs of the responses, a tensor for each row, of one padded forward."""
    ids, mask = common.pad([prompt + response for prompt, response in rows], 0)
    logits = model(ids, attention_mask=mask, position_ids=common.position_ids(mask)).logits
    logprobs = logits[:, :-1].float().log_softmax(-1)
    taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0]  # (B, T - 1)
    return [line[-len(response) :] for line, (_, response) in zip(taken, rows)]


@torch.no_grad()
def one_by_one(model, row):
    """Returns the log-probs of one response, token by token on a cache."""
    prompt, response = row
    inputs, past, found = torch.tensor([prompt]), None, []
    for token in response:
        out = model(inputs, past_key_values=past, use_cache=True)
        found.append(out.logits[0, -1].float().log_softmax(-1)[token])
        inputs, past = torch.tensor([[token]]), out.past_key_values
    return torch.stack(found)


def gap(found, expected):
    """Returns the largest and the mean difference of a token."""
    gaps = (torch.cat(found) - torch.cat(expected)).abs()
    return gaps.max().item(), gaps.mean().item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    rows = read_rows(AutoTokenizer.from_pretrained(args.model), args.rows)
    exact = None
    print("| dtype | kernel | rows | largest, to the row alone | mean | largest, to fp32 | mean |")
    print("| --- " * 7 + "|")
    for dtype in DTYPES:
        for kernel in KERNELS:
            model = AutoModelForCausalLM.from_pretrained(
                args.model, dtype=dtype, attn_implementation=kernel
            ).eval()
            alone = [together(model, [row])[0] for row in rows]
            exact = exact or alone
            made = {"1": alone, "1, with a cache": [one_by_one(model, row) for row in rows]}
            for size in (8, 64):
                starts = range(0, len(rows), size)
                made[size] = [x for at in starts for x in together(model, rows[at : at + size])]
            for size, found in made.items():
                numbers = [f"{x:.1e}" for x in (*gap(found, alone), *gap(found, exact))]
                print(f"| {str(dtype)[6:]} | {kernel} | {size} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
