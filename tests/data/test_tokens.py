"""From text to tokens: EOS, special tokens, and what is cut where a row is too long."""

import copy
from types import SimpleNamespace

import pytest
from tokenizers import processors

from machinery import rows, tokens

E = 1  # EOS


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_eos_is_appended_once_and_the_text_comes_back(tokenizer, stage):
    """One function appends EOS: the token, not the text "<eos>", which would split into pieces."""
    row = {
        "sft": {"prompt": "Why?", "response": " It is warm."},
        "reward": {"prompt": "Why?", "chosen": " It is warm.", "rejected": " No."},
    }[stage]
    made = rows.tokenise_row(row, tokenizer, stage, limit=64)
    assert tokenizer.decode(made["responses"][0][:-1]) == " It is warm."
    assert tokenizer.eos_token_id not in made["prompt_ids"]
    for ids in made["responses"]:
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1


def test_a_tokenizer_that_appends_eos_by_itself_does_so_nowhere(tokenizer):
    """Some do after a fine-tuning (add_eos_token): each prompt would end with EOS."""
    tokenizer = copy.deepcopy(tokenizer)
    plain = tokens.tokenise_prompt(tokenizer, "Why?")
    appends = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", E)])
    tokenizer.backend_tokenizer.post_processor = appends
    assert tokenizer("Why?").input_ids[-1] == E
    assert tokens.tokenise_prompt(tokenizer, "Why?") == plain
    assert tokens.tokenise_response(tokenizer, " So.").count(E) == 1


def test_text_that_spells_a_special_token_is_data(tokenizer):
    """A user who writes "<eos>" must not end the response, nor "<pad>" blank out a word. In what a
    chat template writes the text would be that token: such a row is dropped (test_chats.py)."""
    for text in ("say <eos> twice", "<pad><pad> hello"):
        prompt = tokens.tokenise_prompt(tokenizer, text)
        assert not set(prompt) & set(tokenizer.all_special_ids)
        assert tokens.tokenise_response(tokenizer, text) == prompt + [tokenizer.eos_token_id]
        assert tokenizer.decode(prompt) == text
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for text in ("say <eos> twice", "<pad>"):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "So."}]
        made = rows.tokenise_row({"messages": messages}, tokenizer, "sft", 64)
        assert made["prompt_ids"] == made["responses"] == [] and "special token" in made["drop"]


def test_prompt_and_response_are_tokenised_apart(tokenizer):
    """Joined text can merge across the border (" bec" + "ause" is one token): then the prompt's
    last token would hold a piece of the response, and a rollout would begin with a prompt that the
    model never saw."""
    word = " because"
    merged, cuts = tokenizer(word).input_ids, range(2, len(word))
    apart = {i: [tokenizer(part).input_ids for part in (word[:i], word[i:])] for i in cuts}
    i, parts = next((i, parts) for i, parts in apart.items() if sum(parts, []) != merged)
    row = {"prompt": word[:i], "response": word[i:]}
    made = rows.tokenise_row(row, tokenizer, "sft", limit=64)
    assert made["prompt_ids"] == parts[0]
    assert made["responses"][0] == parts[1] + [tokenizer.eos_token_id]


PROMPT = [11, 12, 13, 14, 15, 16]
NO_BOS = SimpleNamespace(bos_token_id=None)


@pytest.mark.parametrize(
    "prompt, responses, limit, kept, left",
    [
        # a long prompt keeps its end: it holds the question, and the words that ask for the answer
        (PROMPT, [[5, 6, E]], 8, PROMPT[1:], [[5, 6, E]]),
        # a response that is cut has no EOS, which would teach to stop in the middle of a sentence
        (PROMPT[:3], [[2, 3, 4, 5, 6, 7, E]], 8, PROMPT[:3], [[2, 3, 4, 5, 6]]),
        # both too long: the prompt is sure of half of the room
        (PROMPT, [[2, 3, 4, 5, 6, 7, E]], 8, PROMPT[2:], [[2, 3, 4, 5]]),
        # a pair has one prompt, or a reward model could tell chosen from rejected by it
        (PROMPT, [[2, E], [3, 4, 5, 6, E]], 9, PROMPT[2:], [[2, E], [3, 4, 5, 6, E]]),
    ],
)
def test_what_is_cut_where_a_row_is_too_long(prompt, responses, limit, kept, left):
    """The mask that says which tokens of the prompt count is cut with it."""
    found = rows.cut(NO_BOS, prompt, [2 * token for token in prompt], responses, limit)
    assert found == (kept, [2 * token for token in kept], left)


def test_a_prompt_that_is_cut_keeps_its_bos():
    """A model that was trained with BOS before every text would else see its first prompt without.
    The rest is the prompt's end, and no longer than before. Token 11 elsewhere is a token."""
    starts = SimpleNamespace(bos_token_id=11)
    assert rows.cut(starts, PROMPT, [1, 0, 0, 0, 0, 0], [[5, 6, E]], 7)[0] == [11, 14, 15, 16]
    assert rows.cut(starts, PROMPT, [1, 0, 0, 0, 0, 0], [[5, 6, E]], 9)[0] == PROMPT
    others = [12, *PROMPT]
    assert rows.cut(starts, others, [0] * 7, [[5, 6, E]], 7)[0] == [13, 14, 15, 16]
    assert tokens.keep_end(starts, PROMPT, 1) == [11]


def test_nothing_is_ever_longer_than_the_limit():
    """And at least one prompt token is left: a response's first token is predicted from it."""
    for limit in (2, 3, 8, 64):
        for p, r in ((1, 1), (1, 20), (5, 5), (20, 1), (20, 20)):
            whole = list(range(r))
            prompt, _, found = rows.cut(NO_BOS, list(range(p)), [0] * p, [whole, [E]], limit)
            assert prompt and all(found)
            assert all(len(prompt) + len(ids) <= limit for ids in found)
