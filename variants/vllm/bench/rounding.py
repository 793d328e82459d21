"""Why a model that trains in fp32 is sampled so differently in bf16: what does rounding hide?

    python variants/vllm/bench/rounding.py output/before output/run

`output/run` is a run of ppo.py with --dtype fp32 that began with the model `output/before`, which
was saved in bf16. Its last held-out responses are scored by the trained weights, and by others in
their place. All of these compute in fp32, so that only the weights differ:

    rounded to the nearest bf16    what a sampler in bf16 is given
    rounded up or down at random   a larger error, but right on average: an update that is a
                                   tenth of the step between two bf16 numbers moves a tenth of the
                                   weights by a whole step
    those before training          what nothing but hidden updates would leave

If the size of the rounding error is what matters, the first two are alike. If it is the updates
that rounding to the nearest hides, the first is like the third, and the second is closer. Takes
some minutes.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder):
    """Returns a folder's model, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights_of(model):
    """Returns a model's weights by name, each once, also where layers share them."""
    return {name: weight.data for name, weight in model.named_parameters()}


def rounded_at_random(weight):
    """Returns fp32 weights as one of the two bf16 numbers around each, on average the weight.

    bf16 is fp32 without its last 16 bits. A random number below 2**16 that is added to them carries
    into the next bit as often as those bits are large. (Stochastic rounding [Gupta 2015].)
    """
    bits = weight.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -(2**16)).view(torch.float32)


def texts_of(folder):
    """Returns the (chat, response) pairs of a run's last evaluation."""
    lines = [json.loads(line) for line in open(folder / "samples.jsonl")]
    last = max(line["step"] for line in lines)
    return [(json.loads(s["prompt"]), s["response"]) for s in lines if s["step"] == last]


@torch.no_grad()
def logprobs(model, tokenizer, texts):
    """Returns the log-probs of the responses' text, tokenised again, without EOS: (tokens,)."""
    found = []
    for chat, response in texts:
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        end = tokenizer(response, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([start + end])).logits[0, len(start) - 1 : -1]
        found.append(logits.log_softmax(-1)[torch.arange(len(end)), end])
    return torch.cat(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the model that the run began with")
    parser.add_argument("run", type=Path, help="a run of ppo.py with --dtype fp32")
    parser.add_argument("--responses", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.run)
    texts = texts_of(args.run)[: args.responses]
    model, before = load(args.run), weights_of(load(args.before))
    trained = {name: weight.clone() for name, weight in weights_of(model).items()}
    moved = {name: weight != before[name] for name, weight in trained.items()}
    nearest = {name: weight.bfloat16().float() for name, weight in trained.items()}
    hidden = sum((moved[name] & (nearest[name] == before[name])).sum() for name in trained)
    count = sum(mask.sum() for mask in moved.values())
    print(f"{count:,} weights moved; bf16 hides that of {hidden / count:.3f} of them")
    others = {
        "to the nearest bf16": nearest,
        "up or down at random": {name: rounded_at_random(trained[name]) for name in trained},
        "before training": before,
    }
    truth = logprobs(model, tokenizer, texts)
    print(f"\n{len(truth):,} tokens of {len(texts)} responses\n")
    print("| weights | mean abs gap | log-prob lost, nats a token | outside 0.8 .. 1.2 |")
    print("| --- | --- | --- | --- |")
    for name, weights in others.items():
        model.load_state_dict(weights, strict=False)  # a tied head has no weights of its own
        gap = logprobs(model, tokenizer, texts) - truth
        outside = ((gap.exp() < 0.8) | (gap.exp() > 1.2)).float().mean()
        print(f"| {name} | {gap.abs().mean():.3f} | {-gap.mean():.4f} | {outside:.3f} |")


if __name__ == "__main__":
    main()
