"""A calculator for the sums of recipes/arithmetic, and a pupil who uses it: data for step 1.

    python variants/tool-turns/calculator.py output/tool-turns             the data; seconds
    python variants/tool-turns/calculator.py --when RUN/samples.jsonl      when a run's actor calls

Both run at the top of the tree. A response with two calls; what stands after a "]" is inserted:

    13 + 1 - 6 =  [13 + 1] 14 - 6 = [14 - 6] 8 = 8

The pupil is that of recipes/arithmetic/generate.py, with the same held-out sums. But he makes a
step with the calculator in CALLS of all cases, whether it is hard or easy for him; the others he
makes in his head, with the mistakes that he makes there. So a copy of the pupil does not know when
to call, and a perfect actor is right always: it calls in every step that it cannot do by itself.

What it writes: sft/, chats in which the calculator has a role of its own, so that step 1 learns
none of its tokens; ppo/, the prompts; model/, a config without weights, and a tokenizer.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, "recipes/arithmetic")
import generate  # noqa: E402
import verifier  # noqa: E402

CALLS = 0.3
PRICE = 0.1  # of a call, for `thrifty`
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


# ---- The tool, for --tool_fn ----
def calculate(prompts, completions, **columns):
    """Returns a result, where a text ends with a call of one operation, and " ?" after another.

    >>> calculate([""] * 4, [" [7 + 5]", " [7 + 5] 12", " [7 + 5] 12 - 9 = [12 - 9]", " [7 +]"])
    [' 12', None, ' 3', ' ?']
    """
    calls = [re.search(r"\[([^][]*)\]$", text) for text in completions]
    return [call and result(call[1]) for call in calls]


def result(call):
    """Returns the text that the calculator inserts after a call."""
    if not re.fullmatch(r"\d+ [+-] \d+", call):
        return " ?"
    return f" {generate.value_of(generate.read(call))}"


def after_e(prompts, completions, **columns):
    """A tool for models that know no call: inserts a dash where a text ends with an e."""
    return [" -" if text.endswith("e") else None for text in completions]


# ---- Verifiers, for --reward_fn ----
def thrifty(prompts, completions, answer, **columns):
    """Returns 1 for a right answer, and PRICE less for each call."""
    right = verifier.correct(prompts, completions, answer)
    calls = [text.count("[") for text in completions]
    return [r - PRICE * n for r, n in zip(right, calls)]


# ---- The pupil with a calculator ----
def chat(line, rng):
    """Returns a sum and the pupil's response as messages. The answer stands after the last =.

    >>> [message["content"] for message in chat(generate.read("7 + 5 - 9"), random.Random(2))]
    ['7 + 5 - 9 =', ' 13 - 9 = [13 - 9]', ' 4', ' = 4']
    """
    messages = [{"role": "user", "content": f"{generate.written(*line)} ="}]
    text = ""
    while line[1]:
        if rng.random() < CALLS:
            (number, operations), call = line, generate.written(line[0], line[1][:1])
            line = generate.result_of(number, operations[0]), operations[1:]
            messages.append({"role": "assistant", "content": f"{text} [{call}]"})
            messages.append({"role": "tool", "content": f" {line[0]}"})
            text = generate.written(*line).removeprefix(str(line[0]))
            text = f"{text} =" if line[1] else f" = {line[0]}"
        else:
            following = generate.next_lines(*line)
            line = rng.choices(list(following), weights=following.values())[0]
            text += f" {generate.written(*line)}" + " =" * bool(line[1])
    return [*messages, {"role": "assistant", "content": text}]


def write(folder, seed=1234):
    """Writes the data, the tokenizer and the model's config."""
    rng = random.Random(seed)
    sums = generate.draw_sums(2, 1800, rng)  # those of recipes/arithmetic
    parts = {"train": sums[200:], "test": sums[:200]}
    texts = []
    for name, part in parts.items():
        lines = part * 6 if name == "train" else part  # each six times, with other responses
        chats = [chat(line, rng) for line in lines]
        texts += ["".join(message["content"] for message in each) for each in chats]
        answers = map(generate.value_of, lines)
        right = sum(verifier.correct(lines, texts[-len(lines) :], answers)) / len(lines)
        print(f"{name}: the pupil is right in {right:.3f} of {len(lines)} responses")
        prompts = [
            {"prompt": f"{generate.written(*line)} =", "answer": generate.value_of(line)}
            for line in part
        ]
        for kind, rows in {"sft": [{"messages": each} for each in chats], "ppo": prompts}.items():
            file = folder / kind / f"{name}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), newline="\n")
    tokenizer = generate.make_tokenizer(texts)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    generate.save_config(tokenizer, folder / "model")


# ---- When does an actor call? ----
def steps_of(text):
    """Yields (whether a step crosses ten, whether it is made by a call) of a prompt and response.

    >>> list(steps_of("13 + 4 - 9 = [13 + 4] 17 - 9 = 17 - 7 - 2 = 10 - 2 = [10 - 2] 8 = 8"))
    [(False, True), (True, False), (False, False), (False, True)]
    """
    lines = text.split(" = ")
    for line, following in zip(lines, lines[1:]):
        line = re.sub(r"\[.*\] ?", "", line)  # what is left to do after a call
        if re.fullmatch(r"\d+( [+-] \d+)+", line):
            number, operations = generate.read(line)
            yield generate.crosses_ten(number, operations[0]), following.startswith("[")


def when(file):
    """Prints, for each evaluation of a run, how many of the hard and easy steps are calls."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    for at in sorted({line["step"] for line in lines}):
        texts = [line["prompt"] + line["response"] for line in lines if line["step"] == at]
        steps = [step for text in texts for step in steps_of(text)]
        for name, kind in {"cross ten": True, "others": False}.items():
            calls = [called for crosses, called in steps if crosses == kind]
            share = sum(calls) / max(len(calls), 1)
            print(f"step {at:4d}  {name:10} {len(calls):5d} steps, {share:.3f} of them by a call")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the data, or reads a run's samples.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("output/tool-turns"))
    parser.add_argument("--when", type=Path, metavar="SAMPLES.jsonl")
    options = parser.parse_args()
    if options.when:
        when(options.when)
    else:
        write(options.folder)
