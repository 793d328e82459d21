"""Makes the built-in toy: questions about animals, responses of mixed quality,
and the limits that no model can beat.

    python recipes/toy/make.py          about ten seconds; the same seed writes the same bytes

Why a toy at all? On real data you never find out how good your run is: nobody
knows the lowest loss that the text allows, or how often two annotators agree.
Here we wrote the language ourselves, so we can work out both and print them:

    SFT     the generator's loss on its own responses: only by luck does a model get below it
    reward  the accuracy of a judge who knows the gold score: far from 1, as the labels are noisy
    PPO     the largest gold score

What it writes (under --out):
    data/train.jsonl    prompt, response (for sft.py), chosen and rejected (for reward.py)
    data/test.jsonl     the same columns. Its (animal, place) pairs occur nowhere in train.jsonl, so
                        a model that only memorises fails here, and one that has learned to look at
                        the question does not
    data/limits.json    the limits above, by step and metric
    model/              a Llama config of 0.9 million parameters (no weights) and a tokenizer
                        trained on train.jsonl
"""

import argparse
import json
import math
import os
import random
import sys

# so that "from toy import make" finds gold.py as well
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gold import ANIMALS, FORMS, KIND, PLACES, RAMBLE, RUDE, gold

# How often a response goes wrong. Chosen so that the average response earns about half of the
# largest gold score: a model that imitates them well is mediocre, which leaves PPO work to do.
WRONG_ANIMAL, WRONG_PLACE = 0.15, 0.15
MANNERS = {"kind": 0.40, "plain": 0.30, "rude": 0.30}
# A response that strays goes to one of these, like people who would rather talk
# about their favourites. Why not to any of the 20 animals? Each wrong one would
# be so rare that a model learns its probability badly. SFT would then end further
# above its floor, for a reason that has nothing to do with reading the question.
FAVOURITE_ANIMALS = ["cat", "dog", "horse", "owl"]
FAVOURITE_PLACES = ["beach", "castle", "garden"]
SHAPE = {"brief": 0.40, "unfinished": 0.35, "rambling": 0.25}

# Bradley-Terry: P(a is preferred over b) = sigmoid(SCALE * (gold(a) - gold(b))).
# At 10, one fault more or less (0.25) decides 92 % of the comparisons.
# Then a share FLIP of all labels is flipped, as if by accident.
SCALE, FLIP = 10.0, 0.05

# 20 animals x 2 places = 40 of the 280 combinations are for test.jsonl only.
HELD_OUT_PER_ANIMAL = 2


# ---- 1. The language -----------------------------------------------------------------------------


def ask(form, animal, place):
    """Returns the prompt. It ends right after the colon. The response brings its own
    leading space, which byte-level BPE joins to the first word, so prompt and
    response can be tokenised separately and concatenated."""
    return FORMS[form][0].format(animal=animal, place=place) + "\nAnswer:"


def mix(right, others, wrong):
    """Returns a slot that holds `right`, or with probability `wrong` any one of the others."""
    others = [word for word in others if word != right]
    return [(1 - wrong, " " + right)] + [(wrong / len(others), " " + word) for word in others]


def slots(form, animal, place):
    """Returns the grammar of the responses to one question: a list of slots, filled from
    left to right, independently of each other.

    A slot is a list of (probability, text). So everything can be computed: the probability of
    a response is the product of those of its slots, and the entropy is the sum of theirs.
    """
    _, start, ends = FORMS[form]
    remark = [(MANNERS["plain"], "")]
    remark += [(MANNERS["kind"] / len(KIND), " " + text) for text in KIND]
    remark += [(MANNERS["rude"] / len(RUDE), " " + text) for text in RUDE]
    # The end of the sentence and what follows it share one slot, because nothing
    # can follow an unfinished sentence.
    babble = [f" {a} {b}" for a in RAMBLE for b in RAMBLE if a != b]
    end = [(SHAPE["unfinished"], "")]
    end += [(SHAPE["brief"] / len(ends), f" {word}.") for word in ends]
    end += [
        (SHAPE["rambling"] / len(ends) / len(babble), f" {word}.{more}")
        for word in ends
        for more in babble
    ]
    # "The {animal} goes to the {place} because", word by word; all but two of
    # these slots hold a single word.
    special = {
        "{animal}": mix(animal, FAVOURITE_ANIMALS, WRONG_ANIMAL),
        "{place}": mix(place, FAVOURITE_PLACES, WRONG_PLACE),
    }
    return [remark] + [special.get(word, [(1.0, " " + word)]) for word in start.split()] + [end]


def draw(rng, grammar):
    """Returns one response, and the log of its probability."""
    picks = [rng.choices(slot, weights=[p for p, _ in slot])[0] for slot in grammar]
    return "".join(text for _, text in picks), sum(math.log(p) for p, _ in picks)


def log_prob(grammar, response):
    """Returns log p(response) from its text alone, summed over all ways the slots can spell it.

    It walks the slots and keeps, for each position in the text, the probability of
    having arrived there. In this grammar there is never more than one way, so the
    sum is what draw() returned, but the limits do not rely on that.
    """
    arrived = {0: 1.0}
    for slot in grammar:
        here, arrived = arrived, {}
        for at, so_far in here.items():
            for p, text in slot:
                if response.startswith(text, at):
                    arrived[at + len(text)] = arrived.get(at + len(text), 0.0) + so_far * p
    return math.log(arrived[len(response)])


# ---- 2. The rows ---------------------------------------------------------------------------------


def split_combinations(rng):
    """Returns the (animal, place) pairs for training, and those held out: some places of each
    animal. Training still has each of these animals and places, but never the two together."""
    held_out = [
        (animal, place) for animal in ANIMALS for place in rng.sample(PLACES, HELD_OUT_PER_ANIMAL)
    ]
    train = [
        (animal, place) for animal in ANIMALS for place in PLACES if (animal, place) not in held_out
    ]
    return train, held_out


def make_pair(rng, prompt, grammar):
    """Returns (chosen, rejected): two responses of the same kind as those for SFT,
    labelled by Bradley-Terry, with noise on top."""
    a = b = draw(rng, grammar)[0]
    while a == b:  # a pair of equal texts teaches nothing
        b = draw(rng, grammar)[0]
    gold_a, gold_b = gold([prompt, prompt], [a, b])
    a_wins = rng.random() < 1 / (1 + math.exp(-SCALE * (gold_a - gold_b)))
    if rng.random() < FLIP:
        a_wins = not a_wins
    return (a, b) if a_wins else (b, a)


def make_rows(rng, combinations, rows):
    """Yields (row, grammar). It goes through the questions in turn and shuffles them, so that
    all of them occur about equally often."""
    questions = [(form, *combination) for form in range(len(FORMS)) for combination in combinations]
    questions = questions * (rows // len(questions) + 1)
    rng.shuffle(questions)
    for question in questions[:rows]:
        prompt, grammar = ask(*question), slots(*question)
        chosen, rejected = make_pair(rng, prompt, grammar)
        yield (
            {
                "prompt": prompt,
                "response": draw(rng, grammar)[0],
                "chosen": chosen,
                "rejected": rejected,
            },
            grammar,
        )


# ---- 3. Tokenizer and model ----------------------------------------------------------------------


def make_tokenizer(texts, vocab_size=576):
    """Returns a byte-level BPE: all 256 bytes, so that every text survives encode
    and decode, and then merges.

    The language is so small that merging ends before vocab_size is reached: by then
    each of its words is one token. pad is not eos: a pad is masked everywhere,
    while eos is an action that the model has to learn.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<eos>"],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def save_config(tokenizer, folder):
    """Writes `make_config`'s config without transformers' version, which does not describe it."""
    make_config(tokenizer).save_pretrained(folder)
    file = os.path.join(folder, "config.json")
    with open(file) as text:
        config = json.load(text)
    del config["transformers_version"]
    with open(file, "w") as text:
        text.write(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_config(tokenizer):
    """Returns the config of a toy-sized Llama: 4 layers of width 128. Embeddings are tied,
    as in most small models.

    initializer_range: 0.02 suits models that are thousands wide; at width 128 it makes every
    layer's output very small. Measured on an earlier draft of this data (batch 64, lr 2e-3,
    one seed): with 0.02 the loss is 20 % above the floor after 448 steps, because the model
    does not yet copy the animal from the question. With 0.05 (half of 1/sqrt(128)) it is 3 %
    above after 280 steps.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_dropout=0.0,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


# ---- 4. The limits -------------------------------------------------------------------------------


def find_limits(test, tokenizer):
    """Returns {name: limit}, worked out on the held-out rows.  test: list of (row, grammar)."""

    def tokens(text):
        return len(tokenizer(text)["input_ids"])

    entropy = expected_tokens = oracle = actual_tokens = agreed = 0.0
    for row, grammar in test:
        # In expectation over what the generator writes. Token counts add up over
        # slots, because BPE never merges across a space.
        entropy += sum(-p * math.log(p) for slot in grammar for p, _ in slot)
        # 1 for eos
        expected_tokens += 1 + sum(p * tokens(text) for slot in grammar for p, text in slot)
        # On exactly the responses and pairs that the scripts will be tested on.
        oracle += -log_prob(grammar, row["response"])
        actual_tokens += 1 + tokens(row["response"])
        chosen, rejected = gold([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
        agreed += 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0
    return {
        "entropy": entropy / expected_tokens,
        "eval_loss": oracle / actual_tokens,
        "eval_accuracy": agreed / len(test),
        "gold": 1.0,
        "eval_gold": 1.0,
    }


def main():
    parser = argparse.ArgumentParser(description="Make the toy data, tokenizer and model config.")
    parser.add_argument(
        "--seed", type=int, default=1234, help="the same seed writes the same bytes"
    )
    parser.add_argument("--rows", type=int, default=9600, help="rows of train.jsonl")
    parser.add_argument("--test_rows", type=int, default=560, help="rows of test.jsonl")
    parser.add_argument(
        "--out",
        default=os.path.dirname(os.path.abspath(__file__)),
        help="folder for data/ and model/",
    )
    parser.add_argument(
        "--margins", action="store_true", help="with a column of how far apart the gold scores are"
    )
    args = parser.parse_args()

    rng = random.Random(args.seed)
    train_combinations, test_combinations = split_combinations(rng)
    train = list(make_rows(rng, train_combinations, args.rows))
    test = list(make_rows(rng, test_combinations, args.test_rows))
    for row, _ in train + test if args.margins else ():
        chosen, rejected = gold([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
        row["margin"] = abs(chosen - rejected)  # of a pair that was labelled wrongly, too
    os.makedirs(os.path.join(args.out, "data"), exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        with open(
            os.path.join(args.out, "data", name + ".jsonl"), "w", encoding="utf-8", newline="\n"
        ) as file:
            file.writelines(json.dumps(row) + "\n" for row, _ in rows)

    tokenizer = make_tokenizer([row["prompt"] + row["response"] for row, _ in train])
    tokenizer.save_pretrained(os.path.join(args.out, "model"))
    save_config(tokenizer, os.path.join(args.out, "model"))

    limits = find_limits(test, tokenizer)
    mean_gold = sum(
        gold([row["prompt"] for row, _ in test], [row["response"] for row, _ in test])
    ) / len(test)
    for name, value, meaning in (
        (
            "entropy",
            limits["entropy"],
            "nats per token of a response, eos included, in expectation over the generator",
        ),
        (
            "eval_loss",
            limits["eval_loss"],
            "the generator's own loss on the held-out responses: the floor for sft.py",
        ),
        (
            "eval_accuracy",
            limits["eval_accuracy"],
            "gold as the judge of the noisy held-out pairs: the ceiling for reward.py",
        ),
        ("eval_gold", limits["eval_gold"], "the largest gold score: the ceiling for ppo.py"),
        (
            "mean gold",
            mean_gold,
            "of the held-out responses: where a model that imitates them starts",
        ),
    ):
        print(f"{name:13s} {value:.4f}   {meaning}")
    steps = {"sft": ["eval_loss"], "reward": ["eval_accuracy"], "ppo": ["gold", "eval_gold"]}
    limits = {
        step: {name: round(limits[name], 6) for name in names} for step, names in steps.items()
    }
    with open(
        os.path.join(args.out, "data", "limits.json"), "w", encoding="utf-8", newline="\n"
    ) as file:
        json.dump(limits, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
