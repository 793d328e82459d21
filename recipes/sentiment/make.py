"""Makes preferences whose truth is known, in English: pairs of a model's own responses.

    python recipes/sentiment/make.py output/sentiment/data --model output/real/model

The model answers each prompt twice. A labeller who likes positive sentences then chooses one of
the two: the more positive it is by gold.py, the more often, with probability

    sigmoid(STEEP * (gold of one - gold of the other))                         [Bradley 1952]

so that he errs where the two are close, as people do. The rows are pairs like any other:

    {"prompt": [{"role": "user", "content": "Write one sentence about rain."}],
     "chosen": [{"role": "assistant", "content": ...}], "rejected": [...]}

Each prompt is there once, so the shares of the three steps (--data_split) have no prompt in common.
The topics that are held out are in no prompt that is trained on. It takes some minutes on two
cores.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "smollm2")]
from gold import sentiment  # noqa: E402
from report import answers, asked  # noqa: E402

STEEP = 6.0  # a difference of 0.2 is labelled right in 77 of 100, one of 0.5 in 95
TEMPERATURE = 0.7  # the 4-bit model of recipes/smollm2 writes much nonsense at 1
TOKENS = 32  # the most of a response
TRIES = 8  # how often a response that was cut is drawn again
BATCH = 120
HELD_OUT = 20  # topics
TRAIN = 1920  # pairs, of 2,140 prompts: with --data_split an epoch of each step is whole batches
WAYS = (
    "Write one sentence about {}.",
    "Say something about {} in one sentence.",
    "Describe {} in one sentence.",
    "What do you think of {}? Answer in one sentence.",
    "What comes to mind when you hear of {}? One sentence, please.",
    "Begin a story about {} with one sentence.",
    "Tell a child in one sentence what {} can be like.",
    "Write one line of a diary about {}.",
    "In one sentence: how do people feel about {}?",
    "Finish in one sentence: when I think of {}, I",
)
TOPICS = (
    """
rain|snow|the sea|a river|a storm|the desert|a mountain|the moon|a forest|an island|the wind|fog
autumn|spring|a hot summer|a cold winter|the morning|the night|Monday|Sunday|a holiday
a birthday|a wedding|a funeral|a party|a concert|a film|a novel|a poem|a newspaper|a letter
a telephone|a radio|television|a computer|a robot|the internet|a password|a bicycle|a car
a train|a bus|an airport|a ship|a bridge|a tunnel|a road|a traffic jam|a city|a village|a farm
a garden|a park|a zoo|a museum|a library|a school|a teacher|an exam|homework|a university
a diploma|a job|an office|a meeting|a boss|a colleague|a strike|a salary|money|a bank|a tax
a bill|a market|a shop|a sale|a gift|a lottery|a debt|a doctor|a dentist|a nurse|a hospital
an operation|a fever|a headache|a broken leg|medicine|a scar|sleep|a dream|a nightmare|breakfast
bread|soup|an apple|a lemon|chocolate|coffee|tea|wine|fast food|a restaurant|a kitchen|a recipe
a knife|a chair|a bed|a window|a door|a key|a lock|a lamp|a mirror|a clock|a calendar
an umbrella|a coat|shoes|a hat|a ring|a photograph|a painting|a song|a piano|a guitar|a drum
dancing|singing|football|chess|swimming|running|climbing|fishing|hunting|a race|a trophy
a defeat|a referee|a fan|a friend|a neighbour|a stranger|a child|a baby|a grandmother|a father
a sister|a twin|a cousin|a guest|a king|a soldier|a thief|a judge|a lawyer|a prison|a law
an election|a president|a war|peace|a border|a flag|a statue|a temple|a promise|a lie|a secret
a mistake|an apology|a joke|a quarrel|a rumour|a question|an idea|a plan|a deadline|a delay
a crowd|silence|noise|a whisper|a smell|a colour|darkness|fire|smoke|ice|dust|mud|gold|iron
glass|paper|plastic|a dog|a cat|a horse|a cow|a sheep|a spider|a snake|a bee|a fly|a mosquito
a wolf|a bear|a lion|a whale|a shark|a bird|an owl|a fish|a rose|a tree|grass|a seed|a mushroom
a volcano|an earthquake|a flood|a comet|the sun|space|gravity|mathematics|history|a language
a dictionary|a number|a map|a compass
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def write_prompts(rng):
    """Returns the prompts of training, and the held-out ones, in random order."""
    topics = rng.sample(TOPICS, len(TOPICS))
    parts = topics[HELD_OUT:], topics[:HELD_OUT]
    both = [[way.format(topic) for topic in part for way in WAYS] for part in parts]
    for part in both:
        rng.shuffle(part)
    return both


def respond(model, tokenizer, prompts):
    """Returns {prompt: two sampled responses}, texts that the model has ended by itself.

    One that was cut is drawn again: steps 1 and 2 put EOS behind each response, and would teach the
    model to stop in the middle of a sentence. A prompt without two such responses is left out.
    """
    found = {prompt: [] for prompt in prompts}
    for _ in range(TRIES):
        missing = [prompt for prompt, texts in found.items() for _ in range(2 - len(texts))]
        for i in range(0, len(missing), BATCH):
            part = missing[i : i + BATCH]
            chats = [asked(prompt) for prompt in part]
            drawn = answers(model, tokenizer, chats, TOKENS, TEMPERATURE)
            for prompt, (text, ended) in zip(part, drawn):
                found[prompt] += [text] * ended
            count = sum(map(len, found.values()))
            print(f"\r{count:,} of {2 * len(prompts):,} responses", end="", flush=True)
    print()
    return {prompt: texts for prompt, texts in found.items() if len(texts) == 2}


def label(one, other, rng):
    """Returns two (gold, response) as the labeller orders them: chosen, rejected."""
    chance = 1 / (1 + math.exp(-STEEP * (one[0] - other[0])))
    return (one, other) if rng.random() < chance else (other, one)


def main():
    parser = argparse.ArgumentParser(description="Makes pairs of a model's own responses.")
    parser.add_argument("folder", type=Path, help="where train.jsonl and test.jsonl are written")
    parser.add_argument("--model", default="output/real/model", help="a chat model: folder or hub")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).eval()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in zip(("train", "test"), write_prompts(rng)):
        responses, grades, right, ties = respond(model, tokenizer, prompts), [], 0, 0
        if name == "train":
            responses = dict(list(responses.items())[:TRAIN])
            if len(responses) < TRAIN:
                raise SystemExit(
                    f"Of {len(prompts):,} prompts only {len(responses):,} have two responses that "
                    f"end within {TOKENS} tokens, and {TRAIN:,} are needed. Take another --model."
                )
        with open(args.folder / f"{name}.jsonl", "w") as file:
            for prompt, texts in responses.items():
                one, other = [(sentiment(text), text) for text in texts]
                pair = label(one, other, rng)
                better, worse = pair[0][0], pair[1][0]
                grades += [better, worse]
                right += better > worse
                ties += better == worse
                row = {"prompt": asked(prompt)}
                for column, (_, text) in zip(("chosen", "rejected"), pair):
                    row[column] = [{"role": "assistant", "content": text}]
                file.write(json.dumps(row) + "\n")
        count = len(responses)
        print(
            f"{name}: {count:,} pairs; mean gold of a response "
            f"{sum(grades) / len(grades):.3f}. The chosen one is the more positive in "
            f"{right / count:.3f} of the pairs, and equal in {ties / count:.3f}"
        )


if __name__ == "__main__":
    main()
