"""From text to tokens: EOS, special tokens, and what is cut where a row is too long."""

import copy
import random
from types import SimpleNamespace

from tokenizers import processors

from machinery import rows, tokens

TEXTS = ["Why?", " It is warm.", "é\n\n", "say <eos> twice", "<pad><pad> hello", "\n\nHuman:<eos>"]


def test_eos_is_appended_once_and_the_text_comes_back(tokenizer):
    """One function appends EOS: the token, not the text "<eos>", which would split into pieces. Who
    writes "<eos>" must not end a response, nor blank out a word with "<pad>": text is data. (In a
    chat such a row is dropped: test_chats.py.)"""
    eos = tokenizer.eos_token_id
    for text in TEXTS:
        row = {"prompt": text, "response": text, "chosen": text, "rejected": " No."}
        for stage in ("sft", "reward"):
            made = rows.tokenise_row(row, tokenizer, stage, limit=64)
            prompt, response = made["prompt_ids"], made["responses"][0]
            assert tokenizer.decode(prompt) == text and response == [*prompt, eos]
            assert not set(prompt) & set(tokenizer.all_special_ids)


def test_a_tokenizer_that_appends_eos_by_itself_does_so_nowhere(tokenizer):
    """Some do after a fine-tuning (add_eos_token): each prompt would end with EOS."""
    own = copy.deepcopy(tokenizer)
    appends = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    own.backend_tokenizer.post_processor = appends
    assert own("Why?").input_ids[-1] == 1
    assert tokens.tokenise_prompt(own, "Why?") == tokens.tokenise_prompt(tokenizer, "Why?")
    assert tokens.tokenise_response(own, " So.").count(1) == 1


def test_prompt_and_response_are_tokenised_apart(tokenizer):
    """Joined text can merge across the border (" bec" + "ause" is one token): then the prompt's
    last token would hold a piece of the response, and a rollout would begin with a prompt that the
    model never saw."""
    word, merged = " because", 0
    for i in range(2, len(word)):
        parts = [tokenizer(part).input_ids for part in (word[:i], word[i:])]
        merged += sum(parts, []) != tokenizer(word).input_ids
        row = {"prompt": word[:i], "response": word[i:]}
        made = rows.tokenise_row(row, tokenizer, "sft", limit=64)
        assert [made["prompt_ids"], made["responses"][0][:-1]] == parts
    assert merged


def test_what_is_cut_where_a_row_is_too_long():
    """A prompt keeps its end, which holds the question, and half of the limit or more; and its BOS,
    without which the model has never seen a text. A pair keeps one prompt, or a reward model could
    tell chosen from rejected by it. A response that is cut has no EOS, which would teach to stop in
    the middle of a sentence. Here token by token."""
    rng = random.Random(0)
    for _ in range(500):
        limit, bos = rng.randint(2, 12), rng.choice([None, 0, 11])
        prompt = list(range(rng.randint(1, 14)))
        responses = [[*range(20, rng.randint(20, 34)), 1] for _ in range(rng.randint(0, 2))]
        kept, left = list(prompt), [list(ids) for ids in responses]
        longest = max(map(len, responses), default=0)
        while len(kept) > limit // 2 and len(kept) + longest > limit:
            del kept[int(bos == 0) if len(kept) > 1 else 0]
        for ids in left:
            while len(kept) + len(ids) > limit:
                del ids[-1]
        found = rows.cut(SimpleNamespace(bos_token_id=bos), prompt, responses, limit)
        assert found == (kept, left) and kept and all(left)
