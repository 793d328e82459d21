"""Shared prompts (--share_prompt): the prompt of a pair of responses is computed once for both.

The second response in a row does not see the first. reward.py draws the layout.
[Wang & Hegde 2024] do so for DPO.
"""

import functools
import inspect

from machinery import ranks

import torch
from torch.nn.utils.rnn import pad_sequence

PADDING, PROMPT, CHOSEN, REJECTED = 0, 1, 2, 3  # what a token belongs to


def permitted(args, model):
    """Returns whether pairs share their prompt: --share_prompt, if the architecture permits it."""
    shares = args.share_prompt and can_share_prompt(model, args.max_seq_len)
    if args.share_prompt and not shares:
        kind = f"a {model.config.model_type} model"
        ranks.say(f"--share_prompt: {kind} does not permit it; each response has a row of its own")
    return bool(shares)


def can_share_prompt(model, length):
    """Returns whether a ValueModel takes a mask and positions as they are given.

    Its attention must be PyTorch's, and look back over `length` tokens, and at nothing else.
    """
    stock = model.model
    option = functools.partial(getattr, stock.config.get_text_config())
    windows = option("sliding_window", None), option("attention_chunk_size", None)
    kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    conditions = (
        "position_ids" in inspect.signature(stock.base_model.forward).parameters,
        not stock._is_stateful,
        not option("alibi", None),
        option("_attn_implementation", None) == "sdpa",
        not option("use_bidirectional_attention", None),
        option("is_causal", True),
        all((window or length) >= length for window in windows),
        set(option("layer_types", None) or ()) <= kinds,
    )
    return all(conditions)


def lay_out(rows, pad_id):
    """Lays out B rows (dicts of prompt_ids, responses) as a dict of ids, mask, parts, all (B, T).

    They are padded on the left. parts: PROMPT, CHOSEN, REJECTED or PADDING, for each token.
    """
    ids, parts = [], []
    for row in rows:
        texts = [row["prompt_ids"], *row["responses"]]
        sizes = torch.tensor([len(text) for text in texts])
        ids.append(torch.tensor(sum(texts, [])))
        parts.append(torch.arange(PROMPT, REJECTED + 1).repeat_interleave(sizes))
    ids = pad_sequence(ids, True, pad_id, "left")
    parts = pad_sequence(parts, True, PADDING, "left")
    return {"ids": ids, "mask": (parts != PADDING).long(), "parts": parts}


def who_sees_whom(parts):
    """Returns the attention mask and the positions of rows with shared prompts.

    parts: (B, T) -> allowed: (B, 1, T, T), whether token q (row) attends to token k (column), and
    positions: (B, T). Both responses go on from the prompt's last position.
    """
    at = torch.arange(parts.shape[1], device=parts.device)
    real = parts != PADDING  # (B, T)
    chosen = parts == CHOSEN
    rejected = parts == REJECTED
    apart = rejected[:, :, None] & chosen[:, None]  # (B, T, T)
    allowed = (at[:, None] >= at) & real[:, None] & ~apart
    allowed |= at[:, None] == at  # padding sees itself: a softmax over nothing would be NaN
    positions = real.cumsum(-1) - 1 - rejected * chosen.sum(-1, keepdim=True)
    return allowed[:, None], positions.clamp(min=0)


def end_of_chosen(parts):
    """Returns the slot of each chosen response's last token.  (B, T) -> (B, 1)"""
    return parts.shape[1] - 1 - (parts == REJECTED).sum(-1, keepdim=True)
