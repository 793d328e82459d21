"""Shared prompts (--share_prompt): a prompt is computed once for several responses to it.

The same layout, without a prompt, packs sequences into rows (--packing of sft.py).

A row is  prompt | y_1 | ... | y_n,  and no response sees another, as in [Wang & Hegde 2024]. What
comes out is a common.Layout like any other: `mask`, `positions` and `logit_places` differ.
Two pairs of reward.py, T = 9 ('-' is padding), y chosen and z rejected:

    place in the row       0    1    2    3    4    5    6    7    8
    row 0                  -    -    x0   x1 | y0   y1   eos| z0   eos    scores at both eos
    row 1                  x0   x1   x2   x3 | y0   y1   eos| z0   eos
    positions, row 1       0    1    2    3    4    5    6    4    5      z goes on where x ended,
    row 1: z0 sees         x0   x1   x2   x3                  z0          and does not see y
"""

import dataclasses
import functools
import math

import torch
import torch.nn as nn

import common
from machinery import folders, ranks
from machinery.zero3 import unwrap_model

PADDING, PROMPT, FIRST = 0, 1, 2  # what a token belongs to; responses: FIRST, FIRST + 1, ...


def permitted(args, *models, flag="share_prompt"):
    """Returns the flag's value, or False, and says so, if an architecture does not permit it."""
    asked = bool(getattr(args, flag))
    for model in models if asked else ():
        if not can_share_prompt(model, args.max_seq_len):
            kind = f"a {unwrap_model(model).config.model_type} model"
            ranks.say(f"--{flag}: {kind} does not permit it; no row is shared")
            return False
    return asked


def can_share_prompt(model, length):
    """Returns whether a model takes a mask and positions as they are given.

    Its attention must be PyTorch's, and look back over `length` tokens, and at nothing else.
    """
    stock = unwrap_model(model)
    option = functools.partial(getattr, stock.config.get_text_config())
    windows = option("sliding_window", None), option("attention_chunk_size", None)
    kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    conditions = (
        folders.accepted(stock.base_model, position_ids=None),
        not stock._is_stateful,
        not option("alibi", None),
        option("_attn_implementation", None) == "sdpa",
        not option("use_bidirectional_attention", None),
        option("is_causal", True),
        all((window or length) >= length for window in windows),
        set(option("layer_types", None) or ()) <= kinds,
    )
    return all(conditions)


def lay_out(texts, pad_id):
    """Returns ids (N, T) and `parts` (N, T): which part of its row each token belongs to.

    texts: for each row the prompt's ids and those of each response. Padding is on the left.
    """
    ids = [[token for text in row for token in text] for row in texts]
    parts = [[part for part, text in enumerate(row, PROMPT) for _ in text] for row in texts]
    return common.pad(ids, pad_id)[0], common.pad(parts, PADDING)[0]


def who_sees_whom(parts):
    """Returns the attention mask and the positions of rows with shared prompts.

    parts: (N, T) -> allowed: (N, 1, T, T), whether token q (row) attends to token k (column), and
    positions: (N, T), the number of tokens that it attends to before itself. So each response goes
    on from the prompt's last position.
    """
    at = torch.arange(parts.shape[1], device=parts.device)
    query, key = parts[:, :, None], parts[:, None]
    allowed = (at[:, None] >= at) & ((key == PROMPT) | (key == query))  # (N, T, T)
    # Padding sees itself alone: a softmax over nothing would be NaN.
    allowed = allowed & (key != PADDING) | (at[:, None] == at)
    return allowed[:, None], allowed.sum(-1) - 1


def layout(ids, parts, logit_places):
    """Returns the common.Layout of rows with shared prompts.

    The mask, the one large tensor of a micro-batch, is made on this rank's device.
    """
    allowed, positions = who_sees_whom(parts.to(ranks.device()))
    real_tokens = (parts != PADDING).sum(-1)
    return common.Layout(ids, allowed, positions, real_tokens, logit_places)


# ---- Step 1: rows that share no prompt (--packing) ----
def bins(lengths):
    """Returns which sequences share a row: a list of their numbers for each row.

    Each goes into the first row that has room for it, the long ones first. No row is longer than
    the longest sequence.
    """
    rows, room = [], []  # the numbers of each row's sequences, and how many tokens still fit
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = next((n for n, left in enumerate(room) if left >= lengths[i]), len(rows))
        if n == len(rows):
            rows.append([])
            room.append(max(lengths))
        rows[n].append(i)
        room[n] -= lengths[i]
    return rows


def packed_rows(rows, pad_id, count):
    """The Layout of rows that hold B sequences, each row a list of them, one after another.

    logit_places: (B, count), for the last `count` tokens of each sequence, as common.last_columns
    has it. Where a sequence is shorter, the first of its places belong to another, and masks leave
    them out. real_tokens: (B,).
    """
    ids, parts = lay_out([[[], *row] for row in rows], pad_id)  # (N, T)
    lengths = torch.tensor([len(sequence) for row in rows for sequence in row])  # (B,)
    last = (parts != PADDING).flatten().nonzero()[lengths.cumsum(0) - 1]  # (B, 1) flat places
    logit_places = last + torch.arange(-count, 0)  # (B, count)
    packed = layout(ids, parts, logit_places.clamp(min=0))
    return dataclasses.replace(packed, real_tokens=lengths)


# ---- Step 2: pairs ----
def pair_rows(rows, pad_id):
    """The Layout of a row for each pair, as reward.plain_rows makes it of two rows for each.

    logit_places: (2B, 1), first of the chosen responses, then of the rejected ones: one place
    before the last token of each.
    """
    assert all(len(row["responses"]) == 2 for row in rows), "a pair has two responses"
    ids, parts = lay_out([[row["prompt_ids"], *row["responses"]] for row in rows], pad_id)
    T = ids.shape[1]
    rejected = T * torch.arange(len(rows)) + T - 2  # (B,)
    chosen = rejected - (parts > FIRST).sum(-1)
    return layout(ids, parts, torch.cat([chosen, rejected])[:, None])


# ---- Step 3: the responses of a micro-batch ----
def packing(args, models, plain_rows):
    """Returns what lays responses out, and how many responses to a prompt have one row.

    models: ppo.Models, those that will take these rows. Where prompts are not shared, these are
    `plain_rows` and 1.
    """
    takers = [*models.engines.values(), *models.reward_models]
    together = responses_per_row(args, takers)
    if together == 1:
        return plain_rows, 1
    return functools.partial(shared_rows, together=together), together


def responses_per_row(args, models):
    """Returns how many responses to a prompt have one row in ppo.py: 1 if prompts are not shared.

    Fewer tokens are computed the more there are, but each looks at the whole row: attention costs
    T^2 of a row of T tokens, all else about 6 H T with hidden size H. The number with the smallest
    sum is taken, for prompts and responses that are as long as the flags permit.
    """
    count = math.gcd(args.samples_per_prompt, args.per_device_training_batch_size)
    possible = [n for n in range(2, count + 1) if count % n == 0]
    if not (possible and folders.picks_positions(models[0]) and permitted(args, *models)):
        return 1
    sizes = [unwrap_model(model).config.get_text_config().hidden_size for model in models]
    width = 6 * sum(sizes) / len(sizes)

    def cost(n):
        tokens = args.max_prompt_seq_len + n * args.max_answer_seq_len
        return tokens * (width + tokens) / n

    return min([1, *possible], key=cost)


def shared_rows(responses, pad_id, together):
    """The Layout of rows  prompt[:-1] | x y_1 | ... | x y_n,  n = together.

    x is the prompt's last token. Each response has a copy of it, at which the response's first
    token is predicted. So every response token has a place of its own where it is predicted.

    responses: B dicts, those to a prompt side by side.
    """
    texts = []
    for start in range(0, len(responses), together):
        part = responses[start : start + together]
        assert all(row["prompt_ids"] == part[0]["prompt_ids"] for row in part), "one prompt a row"
        *prompt, last = part[0]["prompt_ids"]
        texts.append([prompt, *([last, *row["response_ids"]] for row in part)])
    ids, parts = lay_out(texts, pad_id)
    begins = (parts >= FIRST) & (parts != nn.functional.pad(parts[:, :-1], (1, 0)))  # at each x
    firsts = begins.flatten().nonzero()[:, 0]  # (B,) flat places, in the order of the responses
    lengths = torch.tensor([len(row["response_ids"]) for row in responses])  # (B,)
    r = torch.arange(lengths.max())
    # (B, R) after a response's end: its last token's place, in range, and never looked at
    logit_places = firsts[:, None] + r.minimum(lengths[:, None] - 1)
    return layout(ids, parts, logit_places)
