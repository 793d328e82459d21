"""Functions of the user's, which score responses (--reward_fn, --gold_fn FILE:FUNCTION).

They are called as TRL calls them: f(prompts, completions, **columns), with the data's other
columns. What they return is checked: a wrong score would be trained on.
"""

import contextlib
import importlib.util
import inspect
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import torch

from machinery.base.refused import Refused

LARGEST = 1e30  # of a score: sums over a step then stay finite in fp32
NO_LISTS = Mapping, Set, str, bytes, bytearray  # a loop over one gives keys, or characters


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


def scores_of(function, responses, prefix="reward"):
    """Returns a list for each response: its number, then those of its tokens, if it has them.

    responses: dicts of prompt, chat, text, extra, response_ids. What the function raises keeps its
    traceback, with the numbers of the rows; what is no score is refused.

    >>> answer = {"prompt": "Why?", "text": "So.", "chat": False, "extra": "{}"}
    >>> answers = [{**answer, "response_ids": [5, 1]} for _ in range(2)]
    >>> scores_of(lambda **columns: [1, 2], answers)
    [[1.0], [2.0]]
    >>> scores_of(lambda **columns: [{"short": 1, "tokens": [0, 3]}] * 2, answers)
    [[1.0, 0.0, 3.0], [1.0, 0.0, 3.0]]
    >>> answers[0]["reward_short"], answers[0]["reward_tokens"]
    (1.0, 3.0)
    """
    name = getattr(function, "__name__", repr(function))
    columns = columns_for(function, responses)
    rows = [*dict.fromkeys(response.get("row") for response in responses)]
    note = f"in {name}, for the responses to rows {rows}; columns: {', '.join(columns)}"
    with users_code(name, note):
        values = list_of(name, function(**columns))
        if len(values) != len(responses):
            words = f"{name} returned {len(values)} scores for {len(responses)} responses."
            raise Refused("function-returns", words)
        parts = {tuple(sorted(map(str, v))) if isinstance(v, dict) else () for v in values}
        if len(parts) > 1:
            words = f"{name} must return the same parts for all, not {parts}."
            raise Refused("function-returns", words)
        return [as_score(name, *pair, prefix) for pair in zip(values, responses)]


def list_of(name, returned):
    """Returns what a function returned as a list; refuses what is no sequence of scores."""
    if isinstance(returned, NO_LISTS) or not isinstance(returned, Iterable):
        words = f"{name} must return a list with one score for each response.\n  It returned a "
        words += f"{type(returned).__name__}: {str(returned)[:300]}"
        raise Refused("function-returns", words)
    return list(returned)


def as_score(name, value, response, prefix):
    """Returns a list as `scores_of` does. Notes the sum of each part of a dict in the response."""
    count, score = len(response["response_ids"]), []
    has_parts = isinstance(value, dict) and value
    for part, own in value.items() if has_parts else [("", value)]:
        try:
            numbers = torch.as_tensor(own, dtype=torch.float64)
        except Exception:  # of many kinds: None, text, lists of other lengths, a huge integer
            numbers = torch.tensor(torch.nan)
        fits = numbers.shape in [(), (count,)] and (numbers.abs() <= LARGEST).all()  # NaN is not
        is_name = isinstance(part, str) and part.isprintable() and part
        free = f"{prefix}_{part}" != "reward_std"  # in the log the deviation of all rewards
        if not (fits and (is_name and free or not has_parts)):
            raise Refused(
                "function-returns",
                f"{name} must return a finite number for a response, a list of one for each of its "
                f"tokens ({count}), or a dict of such parts, named by text, but not std.\n  It "
                f"returned {str(value)[:300]} for the prompt {response['prompt'][:200]!r}",
            )
        numbers = [0.0] * numbers.dim() + numbers.flatten().tolist()
        if has_parts:
            response[f"{prefix}_{part}"] = sum(numbers)
        score = [sum(pair) for pair in itertools.zip_longest(score, numbers, fillvalue=0.0)]
    return score


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
