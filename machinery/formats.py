"""Reads a row of the data, in any of the known formats. Where rows come from: sources.py."""

import json
import os
import re
from typing import NamedTuple

HUMAN, ASSISTANT = "\n\nHuman: ", "\n\nAssistant:"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # of ShareGPT: our names
# A turn of any other role ("Assistant", "model") would be taken for a part of the question
SPEAKERS = ["system", "developer", "user", "assistant", "tool", "function", *ROLES]
FORMATS = {  # columns: the stages that can make their rows of them
    "prompt": "ppo",
    "prompt response": "sft ppo",
    "prompt completion": "sft ppo",
    # With a prompt: responses to it. Without: whole dialogues, as text (Anthropic HH) or messages.
    "chosen rejected": "sft reward ppo",
    "messages": "sft ppo",  # through the tokenizer's chat template
    "conversations": "sft ppo",  # ShareGPT: messages with `from` and `value`
    "instruction": "ppo",
    "instruction output": "sft ppo",  # Alpaca. `input` is optional
    "text": "sft",  # learned whole
}
NOT_LEARNED = "weight", "loss", "train", "trainable"  # of a message that says 0 or false there
NAMES = {  # --columns of sets in our presets' blends, which need not be given
    "Dahoas/synthetic-instruct-gptj-pairwise": {"instruction": "prompt"},
}


class BadRow(ValueError):
    """Says what is wrong with a row that has a value of a wrong type, or no clear meaning."""


class LeftOut(ValueError):
    """Says why a row is left out, and counted: there is nothing to learn from it."""


class Begun(list):
    """Chat messages of which the response continues the last one, the assistant's."""


class Example(NamedTuple):
    """What a row holds. What it does not have is None.

    A prompt is text or a list of chat messages, a Begun if the response continues the last one. A
    response is text, or the assistant's message if it has more than a content (reasoning_content).
    `question` is the prompt of step 3 where that is another one: a chat that goes on after its last
    response. train_on: what --train_on means where it is not given. Where it is "everything", the
    prompt is a text to be learned whole.
    """

    prompt: str | list | None = None
    response: str | dict | None = None
    chosen: str | dict | None = None
    rejected: str | dict | None = None
    question: list | None = None
    train_on: str = "last"


def as_text(prompt):
    """Returns a prompt as text; chat messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def content(response):
    """Returns the text of a response of an Example."""
    return response["content"] if isinstance(response, dict) else response


def as_chat(prompt, texts):
    """Returns a dialogue that is text as chat messages, and its responses without outer spaces.

    All else comes back unchanged, also what lacks a response. Where there is one response and it
    holds further turns, as in dialogues that part early, the last turn is the response.

    >>> as_chat("\\n\\nHuman: Hm?\\n\\nAssistant:", [" So."])
    ([{'role': 'user', 'content': 'Hm?'}], ['So.'])
    """
    if not (isinstance(prompt, str) and all(texts)):
        return prompt, texts
    whole = prompt + texts[0] if len(texts) == 1 else prompt
    first, *turns = re.split("\n\n(Human|Assistant):", f"\n\n{whole.strip()}")
    *asked, speaker, last = turns or ["", ""]
    if first or not asked or speaker != "Assistant" or (last and whole is prompt):
        return prompt, texts
    said = zip(asked[::2], asked[1::2])
    chat = [{"role": ROLES.get(who.lower(), "assistant"), "content": t.strip()} for who, t in said]
    return chat, [text.strip() for text in (texts if whole is prompt else [last])]


def read_row(row):
    """Returns the Example of a row, a dict in one of FORMATS. Raises BadRow.

    Prompts and messages are checked here; the other texts by `check_text` where they are used.
    """
    for name in ("messages", "conversations"):
        if has(row, name) and row[name] != [] and not isinstance(row.get("chosen"), list):
            return read_chat(name, row[name])
    if has(row, "instruction"):
        if has(row, "prompt"):
            raise BadRow("there are a prompt and an instruction: take one of the columns out")
        row = as_dialogue(row)
    elif "prompt" not in row and isinstance(row.get("chosen"), str):
        row = cut_dialogues(row)
    elif "prompt" not in row and has(row, "text"):
        return Example(check_text("text", row["text"]), response="", train_on="everything")
    return read_responses(row)


def has(row, name):
    """Returns whether a row has a value in a column: anything but null and empty text."""
    return row.get(name) not in (None, "")


def read_chat(name, messages):
    """Reads messages: the response is the assistant's last one that is learned, if there is one.

    Step 3 asks for the last one of all, or for what would come next.
    """
    messages = read_messages(name, messages)
    learned = [i for i, message in enumerate(messages) if is_learned(message)]
    last = learned[-1] if learned else len(messages)
    response = answer(name, messages[last]) if learned else None
    question = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return Example(messages[:last], response, question=question, train_on="all")


def is_learned(message):
    """Returns whether a message is the assistant's, and does not say that it is not learned."""
    kept = not any(message.get(name) in (0, False) for name in NOT_LEARNED)
    return kept and message["role"] == "assistant"


def as_dialogue(row):
    """Returns an instruction and its responses as a dialogue, so that it blends with dialogues."""
    parts = [check_text(name, row.get(name)) for name in ("instruction", "input")]
    made = {"prompt": HUMAN + "\n".join(filter(None, parts)) + ASSISTANT}
    for name in ("output", "chosen", "rejected"):
        text = row.get(name)
        made[name] = f" {text}" if text and isinstance(text, str) else text
    return {**made, "response": made["output"]}


def cut_dialogues(row):
    """Cuts two whole dialogues at the last opening of the assistant that they share."""
    pair = {name: check_text(name, row.get(name)) or "" for name in ("chosen", "rejected")}
    prompt, marker, _ = os.path.commonprefix([*pair.values()]).rpartition(ASSISTANT)
    start = prompt + marker
    return {"prompt": start, **{name: text[len(start) :] for name, text in pair.items()}}


def read_responses(row):
    """Reads a prompt, and responses to it: texts, or messages of which the last one is it.

    A marker of the assistant that opens responses (rlhf-reward-datasets) moves to the prompt.
    """
    prompt, texts, starts = row.get("prompt"), [], []
    if prompt == []:  # responses may be whole chats
        prompt = None
    read = read_messages if isinstance(prompt, list) else check_text
    prompt = asked = read("prompt", prompt)
    for name in ("response", "completion", "chosen", "rejected"):
        text = row[name] if has(row, name) else None
        if isinstance(text, list):
            *start, last = read_messages(name, text)
            starts.append(start)
            text = answer(name, last)
        elif isinstance(text, dict):
            text = [text]  # no message: `check_text` refuses it where it is used
        texts.append(text)
    response, completion, chosen, rejected = texts
    if starts:
        start = starts[0]
        if any(spoken(other) != spoken(start) for other in starts):
            raise BadRow("chosen and rejected differ before their last messages: two prompts")
        if not isinstance(asked, list):
            asked = [{"role": "user", "content": asked}] if asked else []
        prompt = continued(asked, start)
    if isinstance(asked, list) and asked and prompt[-1] == asked[-1]:
        prompt = begun(prompt)
    first = next((text for text in (response, completion, chosen) if text is not None), None)
    texts, marker = [first, chosen, rejected], ASSISTANT.strip()
    if isinstance(prompt, str) and isinstance(chosen, str) and chosen.startswith(marker):
        prompt += marker
        texts = [t.removeprefix(marker) if isinstance(t, str) else t for t in texts]
    return Example(prompt, *texts)


def begun(prompt):
    """Returns a chat as Begun if it ends with words of the assistant's.

    An empty last message of the assistant's is only the opening of its turn, and left out.
    """
    last = prompt[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return prompt
    return Begun(prompt) if last["content"].strip() else prompt[:-1]


def continued(asked, start):
    """Returns the chat of a prompt, messages, and of what comes before a response, messages, too.

    Messages that begin with the assistant's go on from the prompt. Others hold it, or repeat its
    end, or go on from it.
    """
    turns, began = spoken(asked), spoken(start)
    whole = start and start[0]["role"] != "assistant"
    if whole and all(turn in began for turn in turns):
        return start
    most = min(len(turns), len(began))
    repeated = max((n for n in range(1, most + 1) if turns[-n:] == began[:n]), default=0)
    return asked[: len(asked) - repeated] + start


def answer(name, message):
    """Returns a last turn: its content, or the message if it has more. None if it is not learned.

    Raises BadRow if it calls a tool, or is not the assistant's.
    """
    if message["role"] != "assistant":
        raise BadRow(f"{name} does not end with a message of the assistant")
    if message.get("tool_calls"):
        raise BadRow(f"{name}: the last turn's tool_calls would not be learned: write them as text")
    if not is_learned(message):
        return None
    fields = [value for value in message.values() if value is not None]
    return message if len(fields) > 2 else message["content"]


# ---- Values ----
def check_text(name, value):
    """Returns a value that is text, or None; raises BadRow if it is anything else."""
    if value is None or isinstance(value, str):
        return value
    raise BadRow(f"{name} must be text, and is {value!r:.60}")


def spoken(messages):
    """Returns (role, content) of each message."""
    return [(message["role"], message["content"].strip()) for message in messages]


def read_messages(name, messages):
    """Returns chat messages; ShareGPT's {"from": ..., "value": ...} become messages, too."""
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{name} must be a list of messages, and is {messages!r:.60}")
    read = []
    for number, message in enumerate(messages, 1):
        said = dict(message) if isinstance(message, dict) else {}
        role = said.pop("from", said.get("role"))
        content = said.pop("value", said.get("content"))
        if not (role in SPEAKERS and isinstance(content, str)):  # calls of tools, images, ...
            what = f"role {role!r} must be one of {SPEAKERS}, with text as content"
            raise BadRow(f"{name}, {number}: {what}: {message!r:.80}")
        if said.get("weight") not in (None, 0, 1):
            raise BadRow(f"{name}, {number}: a message's weight must be 0 or 1: {message!r:.80}")
        read.append({**said, "role": ROLES.get(role, role), "content": content})
    return read
