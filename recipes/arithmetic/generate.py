"""Makes the toy for verifiable rewards: sums with two operations, worked out step by step.

    python recipes/arithmetic/generate.py      takes seconds; the same seed writes the same bytes

A row:  prompt    7 + 5 - 9 =
        response   12 - 9 = 3            a step does the first of the operations left
        answer    3

The responses are those of a pupil who has learned one thing wrong. When a step crosses ten, as
7 + 5 does, and he does it at once, the result is off by one more often than it is right (AT_ONCE).
Sometimes he goes through ten instead (THROUGH_TEN), which splits the step into two easy ones:

        response   7 + 3 + 2 - 9 = 10 + 2 - 9 = 12 - 9 = 3

Such responses are longer, but more often right, because easy steps mostly are (EASY). After a wrong
step he goes on with the wrong number. Two mistakes may cancel: then the answer is right, although
steps are wrong. That is luck, and a verifier that only reads the answer cannot see it.

Why a task like this? We wrote the data, so we know

    imitation   how often a perfect copy of the pupil is right: this is where SFT leads
    luck        the share of its right answers that have a wrong step
    limit       the share of the held-out sums that can be worked out with steps that the data shows
                done right: RL can reach it. (A verified reward is at most 1.)

What it writes (under --out):
    data/train.jsonl, data/test.jsonl    sums with two operations; those of the latter are held out
    longer/                              the same two files for sums with three operations, which
                                         are longer than any prompt in data/
    data/limits.json, longer/limits.json what is known of each test.jsonl
    model/                               the toy's Llama config (no weights), and a tokenizer in
                                         which each number and each sign is one token
"""

import argparse
import functools
import itertools
import json
import math
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "toy"))  # where the other toy's make.py is
from make import make_tokenizer, save_config

LARGEST = 20  # no right result is above this, and none is below 0
THROUGH_TEN = 0.3  # how often a step that crosses ten is split in two
# The probability of a result: the right one; one that stops short by one (like counting 7 + 5 as
# 7, 8, 9, 10, 11); one that goes too far by one.
AT_ONCE = {"right": 0.20, "short": 0.70, "far": 0.10}
EASY = {"right": 0.96, "short": 0.02, "far": 0.02}


# ---- 1. Sums -------------------------------------------------------------------------------------
# A sum is a number and its operations: (7, (("+", 5), ("-", 9))) is 7 + 5 - 9.


def written(number, operations):
    """Returns a sum as text.

    >>> written(7, (("+", 5), ("-", 9)))
    '7 + 5 - 9'
    """
    return " ".join([str(number), *(f"{sign} {operand}" for sign, operand in operations)])


def result_of(number, operation):
    """Returns the right result of one operation."""
    sign, operand = operation
    return number + operand if sign == "+" else number - operand


def results(number, operations):
    """Returns the number and the right result after each operation."""
    return list(itertools.accumulate(operations, result_of, initial=number))


def stays_in_range(number, operations):
    """Returns whether all intermediate results are between 0 and LARGEST."""
    return all(0 <= value <= LARGEST for value in results(number, operations))


def crosses_ten(number, operation):
    """Returns whether ten lies between a number and the right result."""
    return (number - 10) * (result_of(number, operation) - 10) < 0


def draw_operation(rng):
    """Returns an operation with an operand from 1 to 9."""
    return rng.choice("+-"), rng.randint(1, 9)


def draw_sums(count, how_many, rng):
    """Returns `how_many` different sums in range, with `count` operations by 1 to 9 each.

    Each crosses ten at least once: without that, nearly all of the pupil's answers would be right.
    """
    drawn = {}  # in the order in which they are drawn
    while len(drawn) < how_many:
        line = rng.randint(1, LARGEST), tuple(draw_operation(rng) for _ in range(count))
        befores = zip(results(*line), line[1])
        if stays_in_range(*line) and any(crosses_ten(*each) for each in befores):
            drawn[line] = True
    return list(drawn)


# ---- 2. The pupil --------------------------------------------------------------------------------


def through_ten(number, operations):
    """Returns the same sum, with its first operation split in two: to ten, and on from there.

    >>> written(*through_ten(7, (("+", 5), ("-", 9))))
    '7 + 3 + 2 - 9'
    """
    sign, operand = operations[0]
    to_ten = abs(10 - number)
    return number, ((sign, to_ten), (sign, operand - to_ten), *operations[1:])


def next_lines(number, operations):
    """Returns {sum: probability} for what the pupil writes next.

    He never makes a mistake that would take the rest of the sum out of range: its probability is
    added to that of the right result.

    >>> {written(*line): round(p, 2) for line, p in next_lines(7, (("+", 5),)).items()}
    {'7 + 3 + 2': 0.3, '12': 0.14, '11': 0.49, '13': 0.07}
    """
    operation, rest = operations[0], operations[1:]
    right = result_of(number, operation)
    crosses = crosses_ten(number, operation)
    habit, at_once = (AT_ONCE, 1 - THROUGH_TEN) if crosses else (EASY, 1.0)
    lines = {through_ten(number, operations): THROUGH_TEN} if crosses else {}
    towards = 1 if right > number else -1
    for name, value in (("right", right), ("short", right - towards), ("far", right + towards)):
        line = (value if stays_in_range(value, rest) else right), rest
        lines[line] = lines.get(line, 0.0) + at_once * habit[name]
    return lines


def derivation(line, rng):
    """Returns one of the pupil's responses to a sum."""
    text = []
    while line[1]:
        following = next_lines(*line)
        line = rng.choices(list(following), weights=following.values())[0]
        text.append(written(*line))
    return " " + " = ".join(text)


def responses(line, text="", chance=1.0):
    """Yields (response, probability) for everything that the pupil may write."""
    if not line[1]:
        yield text.removeprefix(" ="), chance
        return
    for following, p in next_lines(*line).items():
        yield from responses(following, f"{text} = {written(*following)}", chance * p)


@functools.cache
def answers(line):
    """Returns {answer: probability} for the pupil's answers to a sum."""
    if not line[1]:
        return {line[0]: 1.0}
    found = {}
    for following, p in next_lines(*line).items():
        for answer, chance in answers(following).items():
            found[answer] = found.get(answer, 0.0) + p * chance
    return found


@functools.cache
def all_right(line):
    """Returns the probability that the pupil makes no mistake in a sum."""
    if not line[1]:
        return 1.0
    lines = next_lines(*line).items()
    return sum(p * all_right(each) for each, p in lines if value_of(each) == value_of(line))


def value_of(line):
    """Returns the value of a sum."""
    return results(*line)[-1]


# ---- 3. Rows and limits --------------------------------------------------------------------------


def rows_of(sums, rng):
    """Returns the data's rows for some sums."""
    return [
        {
            "prompt": f"{written(*line)} =",
            "response": derivation(line, rng),
            "answer": value_of(line),
            "operations": len(line[1]),
        }
        for line in sums
    ]


def read(text):
    """Returns the sum that a text spells.

    >>> read("7 + 5 - 9")
    (7, (('+', 5), ('-', 9)))
    """
    number, *words = text.split()
    return int(number), tuple(zip(words[::2], map(int, words[1::2])))


def steps_in(row):
    """Yields (line, next line) for the steps of a row's derivation, as sums."""
    yield from itertools.pairwise(map(read, (row["prompt"] + row["response"]).split(" = ")))


def fact(line, following):
    """Returns what a step does, without the rest of the sum: (7, "+", 5, "at once")."""
    kind = "at once" if len(following[1]) < len(line[1]) else "through ten"
    return line[0], *line[1][0], kind


def can_be_done(line, shown):
    """Returns whether a sum can be worked out with nothing but facts from the set `shown`.

    One way is enough, at once or through ten, but all of its steps must be in the set.

    >>> line, easy = read("7 + 5"), {(7, "+", 3, "at once"), (10, "+", 2, "at once")}
    >>> can_be_done(line, easy), can_be_done(line, easy | {(7, "+", 5, "through ten")})
    (False, True)
    """
    if not line[1]:
        return True
    right = [each for each in next_lines(*line) if value_of(each) == value_of(line)]
    return any(fact(line, each) in shown and can_be_done(each, shown) for each in right)


def limits_of(rows, shown):
    """Returns what is known of held-out rows. shown: the facts that the data shows done right.

    eval_loss is the generator's own loss on these responses, the floor for SFT. length is the
    mean number of tokens in a response.
    """
    sums = [read(row["prompt"].removesuffix(" =")) for row in rows]
    right = [answers(line)[value_of(line)] for line in sums]
    loss = -sum(math.log(next_lines(*a)[b]) for row in rows for a, b in steps_in(row))
    tokens = sum(len(row["response"].split()) + 1 for row in rows)  # 1 for EOS
    return {
        "limit": sum(can_be_done(line, shown) for line in sums) / len(sums),
        "imitation": sum(right) / len(sums),
        "imitation_pass_at_8": sum(1 - (1 - p) ** 8 for p in right) / len(sums),
        "luck": 1 - sum(map(all_right, sums)) / sum(right),
        "eval_loss": loss / tokens,
        "length": tokens / len(rows),
    }


def main():
    parser = argparse.ArgumentParser(description="Makes the data, tokenizer and model config.")
    parser.add_argument("--seed", type=int, default=1234, help="the same seed, the same bytes")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for what it writes")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    two, three = draw_sums(2, 1800, rng), draw_sums(3, 400, rng)
    sets = {
        "data/train": two[200:] * 8,  # each sum eight times, with different derivations
        "data/test": two[:200],
        "longer/train": three[200:],
        "longer/test": three[:200],
    }
    rows = {}
    for name, sums in sets.items():
        rng.shuffle(sums)
        rows[name] = rows_of(sums, rng)
        file = args.out / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", newline="\n") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows[name])

    tokenizer = make_tokenizer([row["prompt"] + row["response"] for row in rows["data/train"]])
    tokenizer.save_pretrained(args.out / "model")
    save_config(tokenizer, args.out / "model")

    steps = [step for row in rows["data/train"] for step in steps_in(row)]
    shown = {fact(a, b) for a, b in steps if value_of(a) == value_of(b)}
    for folder in ("data", "longer"):
        known = limits_of(rows[f"{folder}/test"], shown)
        print(folder, *(f"  {name} {value:.4f}" for name, value in known.items()))
        limits = {
            "sft": {"eval_loss": known["eval_loss"]},
            "ppo": {"eval_reward": known["limit"], "eval_pass_at_1": known["limit"]},
            "pupil": known,
        }
        text = json.dumps(limits, indent=2) + "\n"
        (args.out / folder / "limits.json").write_text(text, newline="\n")


if __name__ == "__main__":
    main()
