"""Reads data of every known format: a file, folder or hub dataset, and each of its rows."""

import contextlib
import json
import os
from pathlib import Path

from machinery import errors

import datasets

HUMAN, ASSISTANT = "\n\nHuman: ", "\n\nAssistant:"
NOTHING = (None, None, None, None)
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
KNOWN_FORMATS = """
    prompt + response, or prompt + chosen + rejected   Dahoas/*; prompt alone is enough for ppo
    chosen + rejected, whole dialogues                 Anthropic HH: cut at the last turn in common
    messages; chosen + rejected as lists of messages   chat, through the tokenizer's chat template
    instruction + output, input optional               Alpaca"""


def as_text(prompt):
    """Returns a prompt as text; chat messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def read_row(row):
    """Returns prompt, response, chosen, rejected of a row in one of KNOWN_FORMATS.

    What the row does not have is None. The prompt is text or a list of chat messages.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list):  # of messages: the prompt is all but the last
        prompt = chosen[:-1] or row.get("prompt")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        chosen, rejected = (turns[-1]["content"] if turns else None for turns in (chosen, rejected))
        return prompt, chosen, chosen, rejected
    if messages := row.get("messages"):  # the response is the assistant's last, if there is one
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        last = turns[-1] if turns else len(messages)
        return messages[:last], messages[last]["content"] if turns else None, None, None
    if row.get("instruction"):
        question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        output = row.get("output")
        return f"{HUMAN}{question}{ASSISTANT}", output and f" {output}", None, None
    if "prompt" in row:
        return read_prompt(row["prompt"], [row.get("response") or chosen, chosen, rejected])
    return read_dialogues(chosen or "", rejected or "")


def read_prompt(prompt, responses):
    """Moves the assistant's marker from the responses to the prompt (rlhf-reward-datasets)."""
    marker = ASSISTANT.strip()
    if isinstance(responses[1], str) and responses[1].startswith(marker):
        prompt = prompt + marker  # (a TypeError where the prompt is a list)
        responses = [text and text.removeprefix(marker) for text in responses]
    return prompt, *responses


def read_dialogues(chosen, rejected):
    """Cuts two whole dialogues at the last opening of the assistant that they share."""
    prompt, marker, _ = os.path.commonprefix([chosen, rejected]).rpartition(ASSISTANT)
    if not marker:
        return NOTHING
    prompt += marker
    chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return prompt, chosen, chosen, rejected


def read_row_safely(row):
    """Returns `read_row`, or NOTHING where a value has a wrong type."""
    with contextlib.suppress(TypeError, KeyError, AttributeError, IndexError):
        prompt, *responses = read_row(row)
        messages = prompt if isinstance(prompt, list) else []
        if all(isinstance(message.get("content") or "", str) for message in messages):
            return prompt, *responses
    return NOTHING


def read_source(path, flag="--data_path"):
    """Returns {"train": Dataset} of a hub name, file or folder, and "test" if it has one.

    Ends with an error that names `flag` if it cannot be read.
    """
    local = Path(path)
    kind = KINDS.get(local.suffix)
    if not local.exists() and (kind or path[0] in "./~"):
        errors.fail(f"{flag} {path}: no such file or folder.\n  {errors.nearest(local)}")
    if local.is_file() and not kind:
        errors.fail(f"{flag} {path}: unknown kind of file.\n  Known: {', '.join(KINDS)}.")
    try:
        if local.is_file():
            splits = datasets.load_dataset(kind, data_files=path)
        else:
            splits = datasets.load_dataset(path)
        for rows in splits.values():
            rows.data.validate(full=True)  # broken UTF-8 would else show when the row is read
        source = {"train": splits["train"]}
    except Exception as error:  # of many kinds: offline, unknown name, no access, broken file
        empty = local.is_file() and not local.read_bytes().strip() and "The file is empty."
        why = empty or find_bad_line(local) or error.__cause__ or error
        errors.fail(f"{flag} {path} cannot be read.\n  {why}")
    if tests := [splits[name] for name in ("test", "validation") if name in splits]:
        source["test"] = tests[0]
    if path == "Dahoas/synthetic-instruct-gptj-pairwise":
        source = {name: rows.map(add_markers) for name, rows in source.items()}
    return source


def add_markers(row):
    """Marks who speaks, as the datasets do that are blended with this one."""
    responses = {name: " " + row[name] for name in ("chosen", "rejected")}
    return {"prompt": HUMAN + row["prompt"] + ASSISTANT, **responses}


def find_bad_line(path, wrong=lambda row: not isinstance(row, dict) and "no JSON object"):
    """Returns 'FILE, line N: what is wrong' for the first bad line of .jsonl files, or None.

    path: a file or a folder. A line is bad if it is no JSON and not blank, or `wrong` says why.
    """
    files = [path] if path.suffix == ".jsonl" else []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else files:
        for number, line in enumerate(open(file, "rb"), 1):
            try:
                row = json.loads(line.strip() or "null")
                json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
                why = row is not None and wrong(row)
            except ValueError as error:
                why = error
            if why:
                return f"{file}, line {number}: {why}"
    return None
