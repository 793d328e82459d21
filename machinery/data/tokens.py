"""Makes token ids of prompts, chats and responses, and finds the assistant's turns in them."""

import re
from contextlib import suppress

from jinja2 import TemplateError

from machinery.base import ranks
from machinery.data.formats import ASSISTANT, HUMAN, LeftOut
from machinery.models import model_folders

NO_TEMPLATE = "the data holds chats, and the tokenizer has no chat template. Take a chat model's"
TURNS_UNKNOWN = """the chat template writes a turn in another way when it is opened, or has messages
  after it: the assistant's tokens cannot be told from the others. Use --train_on last"""


def tokenise_prompt(tokenizer, prompt):
    """Returns the token ids of a prompt: text, or a list of chat messages.

    Of chat messages it ends with the opening of the assistant's next turn. Text that spells a
    special token is data: it is split like any other text.
    """
    if isinstance(prompt, list):
        messages, marks = protect(tokenizer, prompt)
        return tokenise_rendered(tokenizer, render(tokenizer, messages, opening=True), marks)
    ids = tokenizer(prompt, split_special_tokens=True).input_ids
    ended = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id  # some tokenizers append it
    return ids[:-1] if ended else ids


def tokenise_response(tokenizer, response):
    """Returns the token ids of a response, and EOS.

    Prompt and response are tokenised apart and joined: joined text could merge across the border.
    """
    return with_eos(tokenizer, tokenise_text(tokenizer, response))


def tokenise_text(tokenizer, text):
    """Returns the token ids of a text that another one precedes."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def with_eos(tokenizer, ids):
    """Returns ids that end with EOS, which is appended nowhere else."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else ids + [tokenizer.eos_token_id]


# ---- Every turn (--train_on all) ----
def tokenise_turns(tokenizer, prompt, response):
    """Returns a prompt's ids, its mask, 1 on the assistant's turns, and the ids of the last turn.

    Each turn is tokenised apart from what precedes it, as a response is. In a chat it is what the
    template makes of it, with the end of turn that the template writes. The last one ends with EOS.
    """
    if isinstance(prompt, list):
        parts = chat_turns(tokenizer, [*prompt, {"role": "assistant", "content": response}])
    else:
        parts = dialogue_turns(tokenizer, prompt, response)
    *parts, (last, _) = parts
    ids = [token for part, _ in parts for token in part]
    mask = [covered for part, covered in parts for _ in part]
    return ids, mask, with_eos(tokenizer, last)


def dialogue_turns(tokenizer, prompt, response):
    """Returns a dialogue in parts: [(ids, whether the assistant says it)].

    The last part is the response. What pairs of dialogues do not share may itself hold several
    turns: the response is the last of them.
    """
    between, marker, last = response.rpartition(ASSISTANT)
    if marker and last.strip():
        prompt, response = prompt + between + marker, last
    turn = f"(?<={ASSISTANT})(.*?)(?={HUMAN.rstrip()})"
    first, *texts = re.split(turn, prompt, flags=re.DOTALL)  # every second one is a turn
    parts = [(tokenise_prompt(tokenizer, first), 0)]
    parts += [(tokenise_text(tokenizer, text), 1 - i % 2) for i, text in enumerate(texts)]
    return parts + [(tokenise_text(tokenizer, response), 1)]


def chat_turns(tokenizer, messages):
    """Returns what `dialogue_turns` does, of chat messages.

    A turn is what the template adds to its opening when the message is there: the content and the
    end of turn. White space after that, which no turn has to predict, is left out. Raises LeftOut
    unless what is rendered stays as it is when more messages follow.
    """
    messages, marks = protect(tokenizer, messages)
    whole = render(tokenizer, messages)
    parts, end = [], 0
    for i, message in enumerate(messages):
        if i == 0 or message["role"] != "assistant":  # nothing to render before a first one
            continue
        opened = render(tokenizer, messages[:i], opening=True)
        closed = render(tokenizer, messages[: i + 1])
        if not (closed.startswith(opened) and whole.startswith(closed)):
            raise LeftOut(TURNS_UNKNOWN)
        turn = closed[len(opened) :].rstrip()
        parts += [(whole[end : len(opened)], 0), (turn, 1)]
        end = len(opened) + len(turn)
    return [(tokenise_rendered(tokenizer, text, marks), covered) for text, covered in parts]


# ---- Chat templates ----
def end_of_turn(tokenizer):
    """Returns the special token with which the chat template ends the assistant's turn, else EOS.

    It is another than EOS for Gemma (<end_of_turn>) and the base models of Qwen (<|im_end|>).
    """
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    known = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    with suppress(LeftOut):  # the template refuses such a chat, or there is none
        end = render(tokenizer, turns).rpartition("ANSWER")[2].rstrip()
        return next((token for token in known if end.endswith(token)), tokenizer.eos_token)
    return tokenizer.eos_token


def end_as_in_chats(tokenizer):
    """Makes `end_of_turn` the tokenizer's EOS: what ends responses, stops them, and is saved.

    So a response in training ends as a turn does in use, and generation stops there.
    """
    token = end_of_turn(tokenizer)
    if token != tokenizer.eos_token:
        ranks.say(f"responses end with the chat template's {token}, not {tokenizer.eos_token}")
        tokenizer.eos_token = token
        if tokenizer.pad_token == token:  # it was another's, and must not end responses
            tokenizer.pad_token = model_folders.padding_token(tokenizer, len(tokenizer))


def protect(tokenizer, messages):
    """Returns messages for the template, and {mark: the content that it stands for}.

    The template may write special tokens, and users may not: where a message spells one, a private
    character stands for each message in the template.
    """
    texts = [message["content"] for message in messages]
    special = tokenizer.get_added_vocab()
    if not any(token in text for token in special for text in texts):
        return messages, {}
    marks = {chr(0xE000 + i): text for i, text in enumerate(texts)}
    return [{**message, "content": mark} for message, mark in zip(messages, marks)], marks


def render(tokenizer, messages, opening=False):
    """Returns what the chat template writes, with `opening` also that of the assistant's turn.

    Raises LeftOut if there is no template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise LeftOut(NO_TEMPLATE)
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=opening, tokenize=False
        )
    except TemplateError as error:  # "roles must alternate", "no system role"
        raise LeftOut(f"the chat template refuses it: {error}") from error


def tokenise_rendered(tokenizer, text, marks):
    """Returns the token ids of what a template wrote. In a marked content none is special."""
    ids = []
    for piece in re.split(f"([{''.join(marks)}])", text) if marks else [text]:
        options = {"add_special_tokens": False, "split_special_tokens": piece in marks}
        ids += tokenizer(marks.get(piece, piece), **options).input_ids
    return ids
