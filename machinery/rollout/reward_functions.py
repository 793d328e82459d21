"""Reward functions (--reward_fn, --gold_fn FILE:FUNCTION): the user's own code gives the scores.

It is called as TRL calls one: f(prompts, completions, **columns), with the data's other columns.
"""

import functools
import importlib.util
import inspect
import json
import math
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from machinery.base import refused

RAISED = (Exception, SystemExit)  # what the user's code may end with; Ctrl-C is not among them
UNORDERED = (str, bytes, dict, set, frozenset)  # a loop over it gives something, but no scores
LARGEST = 1e30  # of a score: sums over a step then stay finite in fp32


def load(args):
    """Returns the judges of --reward_fn, if there is that flag, and that of --gold_fn or None.

    Each takes a micro-batch and returns scores (B, R).
    """
    specs = [(spec, "--reward_fn") for spec in vars(args).get("reward_fn", [])]
    specs += [(args.gold_fn, "--gold_fn")] if args.gold_fn else []
    judges = [functools.partial(call_function, load_function(*spec)) for spec in specs]
    gold = judges.pop() if args.gold_fn else None
    return judges, gold


def load_function(spec, flag):
    """Runs the user's file of 'FILE:FUNCTION' and returns the function."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if Path(spec).is_file():
        refused.fail(f"{flag} {spec} names no function.\n  Give it as {spec}:FUNCTION.")
    if not file:
        refused.fail(f"{flag} {spec} names no file.\n  Give it as FILE.py:{spec}.")
    if not path.is_file() or path.suffix != ".py":
        refused.fail(f"{flag} {spec}: {file!r} is no Python file.\n  Give it as FILE.py:FUNCTION.")
    module_spec = importlib.util.spec_from_file_location(path.stem, file)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except RAISED as error:
        traceback.print_exc()
        refused.fail(f"{flag} {spec}: {file} cannot be run: {error!r}.")
    if not callable(getattr(module, name, None)):
        refused.fail(f"{flag} {spec}: there is no function {name} in {file}.")
    function = getattr(module, name)
    try:
        inspect.signature(function)
    except ValueError:  # of some that are written in C
        refused.fail(f"{flag} {spec}: its parameters cannot be known. Wrap it in a function.")
    return function


def call_function(function, batch):
    """Returns scores (B, R) for the responses of a micro-batch, on its device; a filler's are 0.

    One number for a response stands on its last token; one for each token stands on that token.
    batch: .responses, a list of B dicts, and .response_mask (B, R).
    """
    mask = batch.response_mask
    scores = torch.zeros(mask.shape)
    values = scores_of(function, batch.responses)
    for row, response, value in zip(scores, batch.responses, values):
        end = len(response["response_ids"])
        row[end - 1 if isinstance(value, float) else 0 : end] = torch.tensor(value)
    return scores.to(mask.device).where(mask > 0, 0)


def scores_of(function, responses):
    """Returns for each response a number, or a list of one number a token.

    responses: dicts of prompt, chat, text, extra, response_ids. If the function raises, or returns
    anything else, or ends the program, there is a clear error.
    """
    name, count = name_of(function), len(responses)
    columns = columns_for(function, responses)
    try:
        returned = call(function, columns)
    except RAISED as error:
        traceback.print_exc()
        find_culprit(function, responses, columns)
        together = f"for {count} responses at once, and for none of them alone."
        refused.fail(f"{name} raised {error!r} {together}", this_rank=True)
    try:
        scores = [as_numbers(value) for value in ordered(returned)]
    except (TypeError, ValueError, OverflowError):  # it returned None, or something else
        scores = []
    wrong = [line for pair in zip(responses, scores) for line in what_is_wrong(*pair)]
    if wrong or len(scores) != count:
        refused.fail(
            f"{name} must return one finite number for each of {count} responses, or a list for "
            f"each, with one for each token.\n  It returned {type(returned).__name__} "
            f"{str(returned)[:300]}"
            f"{''.join(wrong[:1])}",
            this_rank=True,
        )
    return scores


def name_of(function):
    """Returns the name of a function, also of one in a functools.partial; else its text."""
    return getattr(getattr(function, "func", function), "__name__", repr(function))


def what_is_wrong(response, score):
    """Yields a line about a score out of range, or with too many or too few numbers."""
    tokens = len(response["response_ids"])
    numbers = score if isinstance(score, list) else [score]
    for number in [number for number in numbers if not abs(number) <= LARGEST]:
        why = "Not finite" if not math.isfinite(number) else f"{number} is beyond {LARGEST}"
        yield f"\n  {why} for the prompt {response['prompt']!r}"
    if isinstance(score, list) and len(score) != tokens:
        yield f"\n  {len(score)} numbers for the {tokens} tokens of {response['text']!r}"


def as_numbers(value):
    """Returns a float, or a list of floats where `value` holds several numbers."""
    try:
        return float(ordered(value))
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return [float(number) for number in ordered(value)]


def ordered(value):
    """Returns `value`, or raises a TypeError if it is text, a dict or a set."""
    if isinstance(value, UNORDERED):
        raise TypeError(value)
    return value


def columns_for(function, responses):
    """Returns what a function is given: texts, or in chat data lists of messages, and all columns.

    A column holds None where a row has none. `completion_ids` are the responses' tokens, for a
    function that has a parameter of that name.
    """
    prompts, completions, rows = [], [], []
    for response in responses:
        prompt, text, chat = response["prompt"], response["text"], response["chat"]
        prompts.append(json.loads(prompt) if chat else prompt)
        completions.append([{"role": "assistant", "content": text}] if chat else text)
        rows.append(json.loads(response["extra"]))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns.update(prompts=prompts, completions=completions)
    if "completion_ids" in inspect.signature(function).parameters:
        columns["completion_ids"] = [response["response_ids"] for response in responses]
    refuse_missing_columns(function, columns, names)
    return columns


def call(function, columns):
    """Returns what the function returns; of a generator, what it yields."""
    returned = function(**columns)
    return list(returned) if isinstance(returned, Iterator) else returned


def refuse_missing_columns(function, given, names):
    """Ends the program if the function has a parameter without default that is no column."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    lacking = [p.name for p in named if p.default is p.empty and p.name not in given]
    if lacking:
        has = ", ".join(names) or "none beside its texts"
        what = f"has parameters that are no columns of the data: {', '.join(lacking)}"
        advice = "Give such a parameter a default, or rename a column with --columns."
        refused.fail(f"{name_of(function)} {what}.\n  Columns: {has}. {advice}", this_rank=True)


def find_culprit(function, responses, columns):
    """Ends the program with the first response for which the function raises alone."""
    name = name_of(function)
    for i, response in enumerate(responses):
        try:
            call(function, {column: values[i : i + 1] for column, values in columns.items()})
        except RAISED as error:
            refused.fail(
                f"{name} raised {error!r}.\n"
                f"  The prompt: {response['prompt']!r}\n  The response: {response['text']!r}",
                this_rank=True,
            )
