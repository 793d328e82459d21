"""Makes token ids of prompts, chats and responses, and finds the assistant's turns in them."""

import re

from machinery.data.formats import ASSISTANT, HUMAN, LeftOut

NO_TEMPLATE = "the data holds chats, and the tokenizer has no chat template. Take a chat model's"
TURNS_UNKNOWN = "the chat template changes turns when others follow. Use --train_on last"
# Of rows, with their number in front:
CHANGED = "have turns that are not learned: the chat template changes earlier ones"
BARE = "keep the response as the data has it: the chat template opens a finished turn otherwise"


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


def tokenise_turn(tokenizer, prompt, response):
    """Returns the token ids of the response to a prompt, and EOS; and BARE or "".

    In a chat the response is what the template writes after its opening when it renders the whole
    chat: some templates write text before the content (Qwen3 an empty <think>, gpt-oss a channel)
    or before the end of turn. If a finished turn lacks that opening (R1's <think>), the response is
    the content by itself: BARE.
    """
    if not isinstance(prompt, list):
        return tokenise_response(tokenizer, response), ""
    messages, marks = protect(tokenizer, [*prompt, {"role": "assistant", "content": response}])
    opened = render(tokenizer, messages[:-1], opening=True)
    closed = render(tokenizer, messages)
    if not closed.startswith(opened):
        return tokenise_response(tokenizer, response), BARE
    text = closed[len(opened) :].rstrip()
    return with_eos(tokenizer, tokenise_rendered(tokenizer, text, marks)), ""


def tokenise_text(tokenizer, text, split=True):
    """Returns the token ids of a text that another one precedes.

    split: no token in it is special, whatever it spells.
    """
    return tokenizer(text, add_special_tokens=False, split_special_tokens=split).input_ids


def with_eos(tokenizer, ids):
    """Returns ids that end with EOS, which is appended nowhere else."""
    eos = [tokenizer.eos_token_id]
    return ids if ids[-1:] == eos else ids + eos


def keep_end(tokenizer, ids, count):
    """Returns the last `count` ids of a prompt. If it begins with BOS, they do so, too."""
    kept = ids[-count:]
    return ids[:1] + kept[1:] if ids[:1] == [tokenizer.bos_token_id] else kept


# ---- Every turn (--train_on all) ----
def tokenise_turns(tokenizer, prompt, response):
    """Returns a chat's ids up to its last turn, their mask, that turn's ids, and what was found.

    The mask is 1 on the assistant's turns. A turn is what the template adds to its opening when the
    message is there: the content and the end of turn. White space after that, which no turn has to
    predict, is left out. Each turn is tokenised apart from what precedes it, as a response is, and
    the last one ends with EOS. An earlier turn that is rendered otherwise when more messages follow
    (Qwen3's, without its reasoning) is not learned. If the last one cannot be told from the rest,
    either, it is the only one that is learned. What was found says so: CHANGED, BARE, or "".
    """
    messages, marks = protect(tokenizer, [*prompt, {"role": "assistant", "content": response}])
    whole = render(tokenizer, messages)
    ids, mask, turn, end, found = [], [], [], 0, ""
    for i, message in enumerate(messages):
        if i == 0 or message["role"] != "assistant":  # nothing to render before a first one
            continue
        opened = render(tokenizer, messages[:i], opening=True)
        closed = render(tokenizer, messages[: i + 1])
        if not (closed.startswith(opened) and whole.startswith(closed)):
            if message is messages[-1]:
                ids = tokenise_prompt(tokenizer, prompt)
                return ids, [0] * len(ids), *tokenise_turn(tokenizer, prompt, response)
            found = CHANGED
            continue
        text = closed[len(opened) :].rstrip()
        between = tokenise_rendered(tokenizer, whole[end : len(opened)], marks)
        ids += turn + between
        mask += [1] * len(turn) + [0] * len(between)
        turn = tokenise_rendered(tokenizer, text, marks)
        end = len(opened) + len(text)
    return ids, mask, with_eos(tokenizer, turn), found


def tokenise_dialogue(tokenizer, prompt, response):
    """Returns what tokenise_turns does of a dialogue that is text (formats.HUMAN, ASSISTANT).

    What pairs of dialogues do not share may itself hold several turns: the response is the last.
    """
    between, marker, last = response.rpartition(ASSISTANT)
    if marker and last.strip():
        prompt, response = prompt + between + marker, last
    turn = f"(?<={ASSISTANT})(.*?)(?={HUMAN.rstrip()})"
    first, *texts = re.split(turn, prompt, flags=re.DOTALL)  # every second one is a turn
    ids = tokenise_prompt(tokenizer, first)
    mask = [0] * len(ids)
    for i, text in enumerate(texts):
        part = tokenise_text(tokenizer, text)
        ids = ids + part
        mask += [1 - i % 2] * len(part)
    return ids, mask, tokenise_response(tokenizer, response), ""


# ---- Chat templates ----
def protect(tokenizer, messages):
    """Returns messages for the template, and {mark: the special token that it stands for}.

    The template may write special tokens, and users may not: where a message spells one, a private
    character stands for it in the template. Raises LeftOut if another field spells one. Tokens that
    are not special, such as <think>, and everything else reach the template unchanged.
    """
    others = [str(m[name]) for m in messages for name in m if name != "content"]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token in text for token in special for text in others):
        raise LeftOut("a field of a message beside its content spells a special token")
    whole = "".join([*others, *(message["content"] for message in messages)])
    spelled = sorted((token for token in special if token in whole), key=len, reverse=True)
    free = (mark for mark in map(chr, range(0xF0000, 0xFFFFE)) if mark not in whole)
    marks = dict(zip(free, spelled))
    for mark, token in marks.items():
        messages = [{**m, "content": m["content"].replace(token, mark)} for m in messages]
    return messages, marks


def render(tokenizer, messages, opening=False):
    """Returns what the chat template writes, with `opening` also that of the assistant's turn.

    Raises LeftOut if there is no template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise LeftOut(NO_TEMPLATE)
    try:
        out = tokenizer.apply_chat_template(messages, add_generation_prompt=opening, tokenize=False)
    except Exception as error:  # "roles must alternate", or whatever its code raises
        raise LeftOut(f"the chat template refuses it: {error}") from error
    eos = tokenizer.eos_token
    # Phi's ends a turn, and then the chat, for which EOS stands here once more
    return out if opening else re.sub(rf"({re.escape(eos)}\s*)+$", lambda _: eos, out)


def tokenise_rendered(tokenizer, text, marks):
    """Returns the token ids of what a template wrote. What a mark stands for is not special."""
    ids = []
    for piece in re.split(f"([{''.join(marks)}])", text) if marks else [text]:
        ids += tokenise_text(tokenizer, marks.get(piece, piece), split=piece in marks)
    return ids
