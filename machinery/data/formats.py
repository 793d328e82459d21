"""Reads a row of the data, in any of the known formats. Where rows come from: sources.py."""

import contextlib
import json
import os
import re
from typing import NamedTuple

HUMAN, ASSISTANT = "\n\nHuman: ", "\n\nAssistant:"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # of ShareGPT: our names
WEBGPT = {"question", "answer_0", "answer_1", "score_0", "score_1"}
SHP = {"history", "human_ref_A", "human_ref_B", "labels"}
COLUMNS = """prompt response completion chosen rejected messages conversations
             instruction input output""".split()
KNOWN_FORMATS = """
    prompt + response, or completion, or chosen + rejected   Dahoas/*; prompt alone for ppo
    chosen + rejected, whole dialogues                 Anthropic HH: cut at the last turn in common
    messages; chosen + rejected as lists of messages   chat, through the tokenizer's chat template
    conversations, of from + value                     ShareGPT
    instruction + output, input optional               Alpaca
    question + answer_0, score_0, ...                  openai/webgpt_comparisons
    history + human_ref_A, human_ref_B, labels         stanfordnlp/SHP
Other names: --columns prompt=question,response=answer"""


class BadRow(ValueError):
    """Says what is wrong with a row that has a value of a wrong type, or no clear meaning."""


class Example(NamedTuple):
    """What a row holds. What it does not have is None.

    A prompt is text or a list of chat messages. `question` is the prompt of step 3 where that is
    another one: a chat that goes on after its last response. every_turn: what --train_on means
    where it is not given, all or last.
    """

    prompt: str | list | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    question: list | None = None
    every_turn: bool = False


def as_text(prompt):
    """Returns a prompt as text; chat messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def read_row(row):
    """Returns the Example of a row, a dict in one of KNOWN_FORMATS. Raises BadRow.

    Prompts and messages are checked here; the other texts by `check_text` where they are used.
    """
    if isinstance(row.get("chosen"), list):
        return read_chat_pair(row)
    for name in ("messages", "conversations"):
        if row.get(name):
            return read_chat(name, row[name])
    if row.get("instruction"):
        return read_instruction(row)
    if "prompt" in row:
        return read_prompt_and_responses(row)
    if row.get("question") and WEBGPT <= row.keys():
        return read_webgpt(row)
    if row.get("history") and SHP <= row.keys():
        return read_shp(row)
    return read_dialogues(row)


# ---- Formats ----
def read_chat_pair(row):
    """Reads two lists of messages: the responses are the last ones, the prompt is the others."""
    pair = {name: read_messages(name, row.get(name) or []) for name in ("chosen", "rejected")}
    for name, messages in pair.items():
        check_end(name, messages)
    starts = [spoken(messages[:-1]) for messages in pair.values() if messages]
    if starts[1:] not in ([], starts[:1]):
        raise BadRow("chosen and rejected differ before their last messages: two prompts")
    prompt = pair["chosen"][:-1] or as_messages(read_prompt(row))
    chosen, rejected = (turns[-1]["content"] if turns else None for turns in pair.values())
    return Example(prompt, chosen, chosen, rejected)


def read_chat(name, messages):
    """Reads messages: the response is the last one of the assistant, if there is one."""
    messages = read_messages(name, messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    last = answers[-1] if answers else len(messages)
    response = messages[last]["content"] if answers else None
    question = messages if last < len(messages) - 1 else None
    return Example(messages[:last], response, question=question, every_turn=True)


def read_instruction(row):
    """Wraps an instruction as a dialogue, so that it blends with dialogues."""
    parts = [check_text(name, row.get(name)) for name in ("instruction", "input")]
    question, output = "\n".join(filter(None, parts)), row.get("output")
    response = f" {output}" if output and isinstance(output, str) else output
    return Example(f"{HUMAN}{question}{ASSISTANT}", response)


def read_prompt_and_responses(row):
    """Reads a prompt and what there is of response, chosen, rejected.

    A marker of the assistant that opens responses (rlhf-reward-datasets) moves to the prompt.
    """
    prompt, chosen, rejected = read_prompt(row), row.get("chosen"), row.get("rejected")
    response = row.get("response") or row.get("completion")
    if response and isinstance(response, list):
        *between, last = check_end("completion", read_messages("completion", response))
        prompt, response = [*as_messages(prompt), *between], last["content"]
    texts = [response or chosen, chosen, rejected]
    marker = ASSISTANT.strip()
    if isinstance(prompt, str) and isinstance(chosen, str) and chosen.startswith(marker):
        prompt += marker
        texts = [t.removeprefix(marker) if isinstance(t, str) else t for t in texts]
    return Example(prompt, *texts)


def read_dialogues(row):
    """Cuts two whole dialogues at the last opening of the assistant that they share."""
    chosen, rejected = (check_text(name, row.get(name)) or "" for name in ("chosen", "rejected"))
    prompt, marker, _ = os.path.commonprefix([chosen, rejected]).rpartition(ASSISTANT)
    if not marker:
        return Example()
    prompt += marker
    chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return Example(prompt, chosen, chosen, rejected)


def read_webgpt(row):
    """Reads a question and two scored answers, without their citations, such as [1]."""
    question, scores = row["question"], [read_number(row, f"score_{i}") for i in (0, 1)]
    if isinstance(question, dict):
        question = question.get("full_text")
    answers = [check_text(name, row[name]) or "" for name in ("answer_0", "answer_1")]
    answers = [re.sub(r" ?\[[\d, ]+\]", "", text) for text in answers]
    return read_comparison("question", question, answers, scores[0] - scores[1])


def read_shp(row):
    """Reads a post and two comments, A and B; labels is 1 where A has more votes, else 0."""
    answers = [check_text(name, row[name]) or "" for name in ("human_ref_A", "human_ref_B")]
    return read_comparison("history", row["history"], answers, read_number(row, "labels") - 0.5)


def read_comparison(name, question, answers, better):
    """Wraps a question and two answers as a dialogue. better: above 0 if the first is.

    At 0 nobody chose: both are then the first one, and step 2 drops a pair of equals.
    """
    question = check_text(name, question)
    prompt = question and f"{HUMAN}{question}{ASSISTANT}"
    first, second = (text and f" {text}" for text in answers)
    chosen, rejected = (second, first) if better < 0 else (first, second if better else first)
    return Example(prompt, chosen, chosen, rejected)


# ---- Values ----
def check_text(name, value):
    """Returns a value that is text, or None; raises BadRow if it is anything else."""
    if value is None or isinstance(value, str):
        return value
    raise BadRow(f"{name} must be text, and is {value!r:.60}")


def read_number(row, name):
    """Returns a column as a float; raises BadRow if it is no number."""
    with contextlib.suppress(TypeError, ValueError):
        return float(row[name])
    raise BadRow(f"{name} must be a number, and is {row[name]!r:.60}")


def read_prompt(row):
    """Returns the column `prompt`: text, a list of messages, or None."""
    prompt = row.get("prompt")
    read = read_messages if isinstance(prompt, list) else check_text
    return read("prompt", prompt)


def as_messages(prompt):
    """Returns a prompt as a list of messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []


def check_end(name, messages):
    """Returns messages; raises BadRow if the last one is not the assistant's."""
    if messages and messages[-1]["role"] != "assistant":
        raise BadRow(f"{name} does not end with a message of the assistant")
    return messages


def read_messages(name, messages):
    """Returns chat messages with their contents as text: a content in parts is joined.

    ShareGPT's {"from": ..., "value": ...} become messages, too.
    """
    if not isinstance(messages, list):
        raise BadRow(f"{name} must be a list of messages, and is {messages!r:.60}")
    read = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, dict) and {"from", "value"} <= message.keys():
            role = ROLES.get(str(message["from"]), message["from"])
            message = {"role": role, "content": message["value"]}
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise BadRow(f"{name}, {number}: no message with a role and a content: {message!r:.60}")
        content = message.get("content")
        if isinstance(content, list) and all(map(is_text_part, content)):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            tools = ". Calls of tools are not supported" if message.get("tool_calls") else ""
            raise BadRow(f"{name}, {number}: content must be text, and is {content!r:.60}{tools}")
        read.append({**message, "content": content})
    return read


def is_text_part(part):
    """Returns whether a part of a content is {"type": "text", "text": ...}."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part["text"], str)


def spoken(messages):
    """Returns (role, content) of each message."""
    return [(message["role"], message["content"]) for message in messages]
