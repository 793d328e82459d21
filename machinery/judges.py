"""Who scores the responses: reward models, and functions of the user's (--reward_fn, --gold_fn).

A judge takes a micro-batch and returns scores (B, R). Functions are called beforehand, once for all
responses of a rollout, so that one with a pool of processes, or with requests to send, can work on
all of them at once. They are called as TRL calls them: f(prompts, completions, **columns), with the
data's other columns. What they return is checked: a wrong score would be trained on.
"""

import contextlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import torch

import common
from machinery import flags
from machinery.refused import Refused

LARGEST = 1e30  # of a score: sums over a step then stay finite in fp32
NO_LISTS = Mapping, Set, str, bytes, bytearray  # a loop over one gives keys, or characters


# ---- Judges ----
def load_models(args, batch_size, tokenizer):
    """Returns the frozen reward models of --reward_model_name_or_path, with the critic's flags."""
    models, critic_args = [], flags.of_role(args, "critic")
    for path in args.reward_model_name_or_path:
        judge_args = flags.with_flags(critic_args, model_name_or_path=path)
        models.append(common.frozen_model(judge_args, batch_size, tokenizer, "score"))
    return models


def sum_and_note(args, judges):
    """Returns one judge in place of several: it adds their scores up.

    It also notes what each says in the response dicts, by `names_of`, for the metrics.
    """
    names = names_of(args)

    def scores_of_all(batch):
        scores = torch.stack([judge(batch) for judge in judges])  # (judges, B, R)
        for name, each in zip(names, scores.sum(-1).tolist()) if len(judges) > 1 else ():
            for response, score in zip(batch.responses, each):
                response[name] = score
        return scores.sum(0)

    return scores_of_all


def names_of(args):
    """Returns what metrics call the scores of each judge: reward_1_NAME, ...; of one: reward."""
    judges = [*args.reward_fn, *args.reward_model_name_or_path]
    names = [Path(judge.rpartition(":")[2]).name for judge in judges]
    return [f"reward_{i}_{n}" for i, n in enumerate(names, 1)] if len(names) > 1 else ["reward"]


@torch.no_grad()  # a function may have a model of its own
def call_functions(functions, responses):
    """Calls each function once, for all of this rank's responses, and notes what it says of them.

    functions: from `load_functions`. responses: dicts; response["function_scores"][name] becomes a
    list, as `scores_of` returns it.
    """
    for name, function in functions.items():
        for response, score in zip(responses, scores_of(function, responses)):
            response["function_scores"] = {**response.get("function_scores", {}), name: score}


def function_scores(batch, name):
    """Returns the scores (B, R) that a function gave a micro-batch; a filler's are 0.

    One number for a response is placed on its last token; of a list, each number on its token.
    batch: .responses, a list of B dicts, .response_mask and .last, (B, R).
    """
    scores = torch.zeros(batch.response_mask.shape)
    last = batch.last.cpu()
    given = [response["function_scores"][name] for response in batch.responses]
    for i, (whole, *tokens) in enumerate(given):
        scores[i, : len(tokens)] = torch.tensor(tokens)
        scores[i] += whole * last[i]
    return (scores * (batch.response_mask.cpu() > 0)).to(batch.response_mask.device)


# ---- Functions of the user's ----
def load_functions(args):
    """Returns {name: function} of --reward_fn, by `names_of`, and of --gold_fn as "gold"."""
    named = zip(names_of(args), args.reward_fn)
    functions = {name: load_function(spec, "--reward_fn") for name, spec in named}
    gold = {"gold": load_function(args.gold_fn, "--gold_fn")} if args.gold_fn else {}
    return functions | gold


def load_function(spec, flag):
    """Runs the user's file of 'FILE:FUNCTION' and returns the function.

    It is the module of the file's name, as `import` in its folder would find it: processes that
    are not forked import it again, to look for its functions.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        words = f"{flag} {spec}: there is no Python file {file!r}.\n  Give it as FILE.py:FUNCTION."
        raise Refused("function-file", words)
    sys.path.append(str(path.parent.absolute()))  # a process that the function spawns has it, too
    source = importlib.util.find_spec(path.stem) if "." not in path.stem else None
    if source is None or source.origin != str(path.absolute()):  # another module has its name
        source = importlib.util.spec_from_file_location(spec.replace(".", "_"), file)
    if source.name not in sys.modules:  # where dataclasses look for it, and pickle
        sys.modules[source.name] = module = importlib.util.module_from_spec(source)
        with users_code(spec, f"in the file of {flag}"):
            source.loader.exec_module(module)
    function = getattr(sys.modules[source.name], name, None)
    if not callable(function) or inspect.getfullargspec(function).varkw is None:
        words = f"{flag} {spec}: {file} must have {name}(prompts, completions, **columns)."
        raise Refused("function-columns", words)
    return function


@contextlib.contextmanager
def users_code(name, note):
    """Adds a note to what the code of a user's function raises, which keeps its own traceback.

    If that code changes the working folder, it is changed back: the run's own paths are relative.
    """
    try:
        with contextlib.chdir("."):
            yield
    except SystemExit as error:  # a run that ends with its exit code would look finished
        raise RuntimeError(f"{name} ended the program ({error.code})") from error
    except Exception as error:
        error.add_note(note)
        raise


def scores_of(function, responses):
    """Returns a list for each response: its number, then those of its tokens, if it has them.

    responses: dicts of prompt, chat, text, extra, response_ids. What the function raises keeps its
    traceback, with the numbers of the rows; what is no score is refused.

    >>> answer = {"prompt": "Why?", "text": "So.", "chat": False, "extra": "{}"}
    >>> answers = [{**answer, "response_ids": [5, 1]} for _ in range(2)]
    >>> scores_of(lambda **columns: [1, 2], answers)
    [[1.0], [2.0]]
    >>> scores_of(lambda **columns: [[0, 3]] * 2, answers)
    [[0.0, 0.0, 3.0], [0.0, 0.0, 3.0]]
    """
    name = getattr(function, "__name__", repr(function))
    columns = columns_for(function, responses)
    rows = [*dict.fromkeys(response.get("row") for response in responses)]
    note = f"in {name}, for the responses to rows {rows}; columns: {', '.join(columns)}"
    with users_code(name, note):
        returned = function(**columns)
        listed = isinstance(returned, Iterable) and not isinstance(returned, NO_LISTS)
        values = list(returned) if listed else []
        if len(values) != len(responses):
            words = f"{name} must return a list of {len(responses)} scores for the responses."
            what = f"a {type(returned).__name__}" + f" of {len(values)}" * listed
            raise Refused("function-returns", f"{words}\n  It returned {what}: {returned!s:.300}")
        return [as_score(name, *pair) for pair in zip(values, responses)]


def as_score(name, value, response):
    """Returns what a function says of one response as a list, as `scores_of` has it."""
    count = len(response["response_ids"])
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64)
    except Exception:  # of many kinds: None, text, a dict, a list of lists, a huge integer
        numbers = torch.tensor(torch.nan)
    if numbers.shape not in [(), (count,)] or not (numbers.abs() <= LARGEST).all():  # NaN is not
        words = (
            f"{name} must return a finite number for a response, or a list of one for each of its "
            f"tokens ({count}).\n  It returned {str(value)[:300]} for the prompt "
            f"{response['prompt'][:200]!r}"
        )
        if isinstance(value, dict):
            words += "\n  Of several parts write one function a part: --reward_fn a.py:f a.py:g."
        raise Refused("function-returns", words)
    return [0.0] * numbers.dim() + numbers.flatten().tolist()


def columns_for(function, responses):
    """Returns what a function is given: texts, or in chat data lists of messages, and all columns.

    A column holds None where a row has none. `completion_ids` are the responses' tokens, for a
    function that has a parameter of that name. All are copies: a function may change them.
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
        columns["completion_ids"] = [[*response["response_ids"]] for response in responses]
    return columns
