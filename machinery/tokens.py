"""Makes token ids of prompts, chats and responses, and finds the assistant's turns in them."""

import copy
import json
import re

from machinery.formats import ASSISTANT, HUMAN, BadRow, Begun, LeftOut, content, is_learned
from machinery.refused import Refused

# Of rows, with their number in front:
CHANGED = "have turns that are not learned: the chat template changes earlier ones"
BARE = "keep the response as the data has it: the chat template opens a finished turn otherwise"
UNWRITTEN = "have a part that the chat template leaves out or changes: "
THOUGHTS = "reasoning_content", "reasoning", "thinking"  # fields of a message beside its content


def tokenise_prompt(tokenizer, prompt):
    """Returns the token ids of a prompt: text, or a list of chat messages.

    Of chat messages it ends with the opening of the assistant's next turn; of a Begun, with its
    last message, whose turn is still open. Text that spells a special token is data: it is split
    like any other text.
    """
    if isinstance(prompt, list):
        return tokenise_text(tokenizer, render(tokenizer, prompt, opening=True), split=False)
    ids = tokenizer(prompt, split_special_tokens=True).input_ids
    ended = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id  # some tokenizers append it
    return ids[:-1] if ended else ids


def tokenise_response(tokenizer, response):
    """Returns the token ids of a response, and EOS.

    Prompt and response are tokenised apart and joined: joined text could merge across the border.
    """
    return with_eos(tokenizer, tokenise_text(tokenizer, response))


def tokenise_turn(tokenizer, prompt, response):
    """Returns the token ids of the response to a prompt, and EOS; and BARE or "".

    response: text, or a message. In a chat the response is what the template writes after its
    opening when it renders the whole chat: some templates write text before the content (Qwen3 an
    empty <think>, gpt-oss a channel) or before the end of turn. If a finished turn lacks that
    opening (R1's <think>), the response is the content by itself: BARE.
    """
    if not isinstance(prompt, list):
        return tokenise_response(tokenizer, response), ""
    opened = render(tokenizer, prompt, opening=True)
    closed = render(tokenizer, answered(prompt, response))
    if not closed.startswith(opened):
        return tokenise_response(tokenizer, content(response)), BARE
    text = closed[len(opened) :].rstrip()
    return with_eos(tokenizer, tokenise_text(tokenizer, text, split=False)), ""


def tokenise_text(tokenizer, text, split=True):
    """Returns the token ids of a text that another one precedes.

    split: no token in it is special, whatever it spells.
    """
    return tokenizer(text, add_special_tokens=False, split_special_tokens=split).input_ids


def with_eos(tokenizer, ids):
    """Returns ids that end with EOS, which is appended nowhere else."""
    eos = [tokenizer.eos_token_id]
    return ids if ids[-1:] == eos else ids + eos


def as_text(tokenizer, ids, ends):
    """Returns the text of a response as the model wrote it, without `ends` and padding.

    Other special tokens stay: a reward function may look for them ("[/THINK]").
    """
    left_out = {*ends, tokenizer.pad_token_id}
    return tokenizer.decode([token for token in ids if token not in left_out])


def keep_end(tokenizer, ids, count):
    """Returns the last `count` ids of a prompt. If it begins with BOS, they do so, too."""
    kept = ids[-count:]
    return ids[:1] + kept[1:] if ids[:1] == [tokenizer.bos_token_id] else kept


# ---- Every turn (--train_on all) ----
def tokenise_turns(tokenizer, prompt, response):
    """Returns a chat's ids up to its last turn, their mask, that turn's ids, and what was found.

    The mask is 1 on the assistant's turns, except those that say that they are not learned. A turn
    is what the template adds to its opening when the message is there: the content and the end of
    turn. White space after that, which no turn has to predict, is left out. Each turn is tokenised
    apart from what precedes it, as a response is, and the last one ends with EOS. An earlier turn
    that is rendered otherwise when more messages follow (Qwen3's, without its reasoning) is not
    learned. If the last one cannot be told from the rest, it is the only one that is learned. What
    was found says so: CHANGED, BARE, or "".
    """
    last, found = tokenise_turn(tokenizer, prompt, response)
    rendered = render(tokenizer, prompt, opening=True)
    parts, end, bare = [], 0, found
    for i, message in enumerate(prompt[:-1] if isinstance(prompt, Begun) else prompt):
        # There is nothing to render before a first message.
        if bare or i == 0 or not is_learned(message):
            continue
        opened = render(tokenizer, prompt[:i], opening=True)
        closed = render(tokenizer, prompt[: i + 1])
        if not (closed.startswith(opened) and rendered.startswith(closed)):
            found = CHANGED
            continue
        turn = closed[len(opened) :].rstrip()
        parts += [(rendered[end : len(opened)], 0), (turn, 1)]
        end = len(opened) + len(turn)
    parts.append((rendered[end:], 0))
    parts = [(tokenise_text(tokenizer, text, split=False), learned) for text, learned in parts]
    return *joined(parts), last, found


def tokenise_dialogue(tokenizer, prompt, response):
    """Returns what tokenise_turns does of a dialogue that is text (formats.HUMAN, ASSISTANT).

    What pairs of dialogues do not share may itself hold several turns: the response is the last.
    """
    between, marker, last = response.rpartition(ASSISTANT)
    if marker and last.strip():
        prompt, response = prompt + between + marker, last
    turn = f"(?<={ASSISTANT})(.*?)(?={HUMAN.rstrip()})"
    first, *texts = re.split(turn, prompt, flags=re.DOTALL)  # every second one is a turn
    parts = [(tokenise_prompt(tokenizer, first), 0)]
    parts += [(tokenise_text(tokenizer, text), 1 - i % 2) for i, text in enumerate(texts)]
    return *joined(parts), tokenise_response(tokenizer, response), ""


def joined(parts):
    """Returns the ids of all parts, and their mask; parts: pairs of ids, and 1 if learned, or 0."""
    ids = [token for part, _ in parts for token in part]
    return ids, [learned for part, learned in parts for _ in part]


# ---- Chat templates ----
def with_options(tokenizer, options):
    """Returns a tokenizer whose chat template finds options set: {name: value}, as of JSON."""
    if not options or not tokenizer.chat_template:
        return tokenizer
    if not (isinstance(options, dict) and all(map(str.isidentifier, options))):
        raise BadRow(f"chat_template_kwargs must be a JSON object of names, and is {options!r:.60}")
    made = copy.copy(tokenizer)
    given = {name: value for name, value in options.items() if value is not None}
    lines = [f"{{%- set {name} = {json.dumps(value)} %}}" for name, value in given.items()]
    made.chat_template = "".join(lines) + tokenizer.chat_template
    return made


def answered(prompt, response):
    """Returns a chat with the response to it, text or a message: a further turn, or a Begun's."""
    last = response if isinstance(response, dict) else {"role": "assistant", "content": response}
    if not isinstance(prompt, Begun):
        return [*prompt, last]
    *before, start = prompt
    return [*before, {**start, **last, "content": start["content"] + last["content"]}]


def unwritten(tokenizer, prompt, responses, bare):
    """Returns what of a chat the template does not write: the role of a turn, a field, or "".

    Qwen's templates know no `developer`, for example. That some drop the thoughts of the
    assistant's earlier turns is their design. bare: a response is its content by itself.
    """
    opened = render(tokenizer, prompt, opening=True)
    for message in prompt:
        if message["role"] != "assistant" and message["content"].strip() not in opened:
            return f"a turn of {message['role']}"
    for message in responses:
        if isinstance(message, dict):  # text has no other fields
            closed = "" if bare else render(tokenizer, answered(prompt, message))
            for name in THOUGHTS:
                if str(message.get(name) or "").strip() not in closed:
                    return name
    return ""


def render(tokenizer, messages, opening=False):
    """Returns what the chat template writes, with `opening` also that of the assistant's turn.

    With `opening` the last turn of a Begun is not ended.
    Raises LeftOut if the template refuses the messages, or if one of them spells a special token:
    in what a template writes it would be that token, and could end a turn. Tokens that are not
    special, such as <think>, are left to the template. Refuses the run if there is no template.
    """
    if tokenizer.chat_template is None:
        words = "a prompt is a chat, and the tokenizer has no chat template."
        raise Refused("chat-template", f"{words} Take a chat model's.")
    begun = opening and isinstance(messages, Begun)
    # Tables fill up with null what only other rows have.
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    said = "\0".join(str(value) for message in messages for value in message.values())
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    if any(token in said for token in special):
        raise LeftOut("a message spells a special token, which in a chat would be that token")
    try:
        options = {"add_generation_prompt": opening and not begun, "continue_final_message": begun}
        out = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # "roles must alternate", or whatever its code raises
        raise LeftOut(f"the chat template refuses it: {error}") from error
    eos = tokenizer.eos_token
    # Phi's ends a turn, and then the chat, for which EOS stands here once more
    return out if opening else re.sub(rf"({re.escape(eos)}\s*)+$", lambda _: eos, out)
