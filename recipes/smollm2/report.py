"""What `make real` achieved: a table before and after, ten responses, and other questions.

    python recipes/smollm2/report.py output/real/grpo

The first table reads the run's own evaluations and log. For the second, stock transformers loads
both models, the one that the run began with and the one that it left, and asks them otherwise:
greedily, with more room, with worked examples before the question. That shows how much of the gain
is form. It takes two minutes on two cores.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent))

from verifier import last_number

ASKED_OTHERWISE = 100  # of the held-out sums
EXAMPLES = (
    ("What is 41 + 17?", "41 + 17 = 58."),
    ("What is 64 - 29?", "64 - 29 = 35."),
    ("What is 35 + 48?", "35 + 48 = 83."),
    ("What is 90 - 12?", "90 - 12 = 78."),
)
WAYS = {  # how they are asked: tokens of a response, the temperature, examples
    "sampled, 64 tokens": (64, 1.0, ()),
    "greedy, 24 tokens": (24, 0, ()),
    "greedy, 64 tokens": (64, 0, ()),
    "greedy, 64 tokens, 4 examples": (64, 0, EXAMPLES),
}
OTHER_QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that can swim.",
    "Write one sentence about the sea.",
    "What is the opposite of hot?",
    "Why is the sky blue?",
    "What is 3 times 12?",
)


def read(file):
    """Returns the dicts of a .jsonl file."""
    return [json.loads(line) for line in open(file)]


def question_of(line):
    """Returns the question in a line of samples.jsonl, whose prompt is a chat as JSON."""
    return json.loads(line["prompt"])[-1]["content"]


def print_row(name, *values):
    """Prints a line of a table: a name, and numbers before and after."""
    print(f"  {name:32}" + "".join(f"{value:>9.3f}" for value in values), flush=True)


# ---- What the run wrote ----
def print_table(folder):
    """Prints the run's first and last evaluation, and its first and last steps.

    Returns the samples of both evaluations: two lists of lines.
    """
    lines = read(folder / "metrics.jsonl")
    evaluations = [line for line in lines if "eval_reward" in line]
    ends = evaluations[0], evaluations[-1]
    samples = read(folder / "samples.jsonl")
    found = [[line for line in samples if line["step"] == end["step"]] for end in ends]
    title = f"held-out sums, sampled, {len(found[0])} responses"
    print(f"\n{title:34}{'before':>9}{'after':>9}")
    print_row("pass@1", *(end["eval_pass_at_1"] for end in ends))
    for kind, sign in (("additions", "+"), ("subtractions", "-")):
        of_kind = [[one for one in part if sign in question_of(one)] for part in found]
        print_row(f"  {kind}", *(fmean(one["reward"] for one in part) for part in of_kind))
    print_row("pass@2", *(end["eval_pass_at_2"] for end in ends))
    print_row("tokens a response", *(end["eval_response_length"] for end in ends))
    steps = [line for line in lines if "entropy" in line]
    print(f"rollouts: step 1, and the mean of the last 5 of {len(steps)}")
    for name, words in (("eos_rate", "ended"), ("entropy", "entropy, nats a token")):
        print_row(words, steps[0][name], fmean(line[name] for line in steps[-5:]))
    return found


def print_samples(found, count=10):
    """Prints the first sample of the first held-out sums, before and after, as they come."""
    before, after = ([line for line in part if line["sample"] == 0] for part in found)
    print(f"\nThe first {count} held-out sums, the first of 2 samples (1: right):")
    for pair in list(zip(before, after))[:count]:
        print(f"\n  {question_of(pair[0])}")
        for name, line in zip(("before", "after"), pair):
            print(f"    {name:7}{line['reward']:.0f}  {line['response']!r}")


# ---- What stock transformers makes of both models ----
@torch.no_grad()
def answers(model, tokenizer, chats, tokens, temperature):
    """Returns a pair (text, ended) for each of `chats`, which are lists of messages.

    tokens: the most of a response. What is longer is cut, and has not ended.
    temperature: of sampling; 0: greedily. recipes/sentiment/make.py calls it, too.
    """
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    special = {"add_special_tokens": False}  # the template has written them
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", **special)
    inputs = inputs.to(model.device)
    # top_k and top_p: off, so that the model's own generation_config does not change the question
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    how = sampled if temperature else {"do_sample": False}
    ends = model.generation_config.eos_token_id or tokenizer.eos_token_id  # of some models several
    ends = torch.tensor(ends, device=model.device).view(-1)
    how |= {"max_new_tokens": tokens, "pad_token_id": int(ends[0]), "eos_token_id": ends.tolist()}
    out = model.generate(**inputs, **how)[:, inputs.input_ids.shape[1] :]
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    return list(zip(texts, torch.isin(out, ends).any(1).tolist()))


def asked(question, examples=()):
    """Returns a chat that asks a question, after examples with their answers."""
    turns = [text for pair in examples for text in pair] + [question]
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]


def ask_otherwise(models, rows):
    """Prints the share of right answers by WAYS, and how both answer other questions."""
    loaded = []
    for path in models:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded.append((model.to(device).eval(), AutoTokenizer.from_pretrained(path)))
    print(f"\n{f'asked otherwise, {len(rows)} sums':34}{'before':>9}{'after':>9}")
    for name, (tokens, temperature, examples) in WAYS.items():
        chats = [asked(row["prompt"][0]["content"], examples) for row in rows]
        shares = []
        for model, tokenizer in loaded:
            torch.manual_seed(0)
            found = answers(model, tokenizer, chats, tokens, temperature)
            shares.append([last_number(t) == row["answer"] for (t, _), row in zip(found, rows)])
        print_row(name, *map(fmean, shares))
        for kind, sign in (("additions", "+"), ("subtractions", "-")):
            chosen = [i for i, row in enumerate(rows) if sign in row["prompt"][0]["content"]]
            print_row(f"  {kind}", *(fmean(share[i] for i in chosen) for share in shares))
    print("\nOther questions, answered greedily:")
    chats = [asked(question) for question in OTHER_QUESTIONS]
    texts = [answers(*one, chats, 40, 0) for one in loaded]
    for question, *pair in zip(OTHER_QUESTIONS, *texts):
        print(f"\n  {question}")
        for name, (text, _) in zip(("before", "after"), pair):
            print(f"    {name:7}{text!r}")


def main(folder):
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = print_table(folder)
    print_samples(found)
    args = json.loads((folder / "args.json").read_text())
    rows = read(Path(args["data_path"][0]) / "test.jsonl")[:ASKED_OTHERWISE]
    ask_otherwise([args["actor_model_name_or_path"], folder], rows)
    print(f"""
Curves: {folder}/curves.png. Every step and all samples: {folder}/report.html.
Read next: recipes/smollm2/README.md, what these numbers say and what they do not;
course/pretrained.md, a lesson with three exercises on this run.""")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "output/real/grpo"))
