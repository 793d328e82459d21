"""Shared prompts (--share_prompt): a prompt is computed once for several responses to it.

A row is  prompt | y_1 | ... | y_n,  and no response sees another. reward.py draws it for two.
[Wang & Hegde 2024] do so for DPO.
"""

import functools
import inspect

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

from machinery.base import ranks
from machinery.base.modules import unwrap_model
from machinery.models.forwards import picks_positions

PADDING, PROMPT, FIRST = 0, 1, 2  # what a token belongs to; responses: FIRST, FIRST + 1, ...


def permitted(args, *models):
    """Returns whether prompts are shared: --share_prompt, if all architectures permit it."""
    for model in models if args.share_prompt else ():
        if not can_share_prompt(model, args.max_seq_len):
            kind = f"a {unwrap_model(model).config.model_type} model"
            rows = "each response has a row of its own"
            ranks.say(f"--share_prompt: {kind} does not permit it; {rows}")
            return False
    return bool(args.share_prompt)


def can_share_prompt(model, length):
    """Returns whether a model takes a mask and positions as they are given.

    Its attention must be PyTorch's, and look back over `length` tokens, and at nothing else.
    """
    stock = unwrap_model(model)
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
    """Lays out rows (dicts of prompt_ids, responses) as a dict of ids, mask, parts, all (B, T).

    They are padded on the left. parts: what each token belongs to, PROMPT for example.
    """
    ids, parts = [], []
    for row in rows:
        texts = [row["prompt_ids"], *row["responses"]]
        sizes = torch.tensor([len(text) for text in texts])
        ids.append(torch.tensor(sum(texts, [])))
        parts.append(torch.arange(PROMPT, PROMPT + len(texts)).repeat_interleave(sizes))
    ids = pad_sequence(ids, True, pad_id, "left")
    parts = pad_sequence(parts, True, PADDING, "left")
    return {"ids": ids, "mask": (parts != PADDING).long(), "parts": parts}


def who_sees_whom(parts):
    """Returns the attention mask and the positions of rows with shared prompts.

    parts: (B, T) -> allowed: (B, 1, T, T), whether token q (row) attends to token k (column), and
    positions: (B, T), the number of tokens that it attends to before itself. So each response goes
    on from the prompt's last position.
    """
    at = torch.arange(parts.shape[1], device=parts.device)
    query, key = parts[:, :, None], parts[:, None]
    allowed = (at[:, None] >= at) & ((key == PROMPT) | (key == query))  # (B, T, T)
    # Padding sees itself alone: a softmax over nothing would be NaN.
    allowed = allowed & (key != PADDING) | (at[:, None] == at)
    return allowed[:, None], allowed.sum(-1) - 1


def end_of_chosen(parts):
    """Returns the slot of each chosen response's last token.  (B, T) -> (B, 1)"""
    return parts.shape[1] - 1 - (parts > FIRST).sum(-1, keepdim=True)


# ---- Step 3: the responses of a micro-batch ----
def responses_a_row(args, *models):
    """Returns how many responses to a prompt have one row in ppo.py: 1 if prompts are not shared.

    Fewer tokens are computed the more there are, but each looks at the whole row: attention costs
    T^2 of a row of T tokens, all else about 6 H T with hidden size H. The number with the smallest
    sum is taken, for prompts and responses that are as long as the flags permit.
    """
    count = args.samples_per_prompt
    possible = [n for n in range(2, count + 1) if count % n == 0]
    possible = [n for n in possible if args.per_device_training_batch_size % n == 0]
    if not (possible and picks_positions(models[0]) and permitted(args, *models)):
        return 1
    sizes = [unwrap_model(model).config.get_text_config().hidden_size for model in models]
    width = 6 * sum(sizes) / len(sizes)

    def cost(n):
        tokens = args.max_prompt_seq_len + n * args.max_answer_seq_len
        return tokens * (width + tokens) / n

    return min([1, *possible], key=cost)


class SharedRows:
    """The responses of a micro-batch, `size` to a row:  prompt[:-1] | x y_1 | ... | x y_size.

    x is the prompt's last token. Each response has a copy, which predicts the response's first
    token. So tokens that predict are as many, and in the same order, as tokens that are predicted.
    """

    def __init__(self, responses, size, real, pad_id):
        """responses: B dicts, those to a prompt together. real: (B, R), 1 on their tokens."""
        rows, first = [], []
        for start in range(0, len(responses), size):
            part = responses[start : start + size]
            *prompt, last = part[0]["prompt_ids"]
            texts = [[last, *response["response_ids"]] for response in part]
            first += [start + texts.index(text) for text in texts]
            rows.append({"prompt_ids": prompt, "responses": texts})
        laid_out, device = lay_out(rows, pad_id), ranks.device()
        self.ids, self.parts = laid_out["ids"].to(device), laid_out["parts"].to(device)
        self.real, self.first = real.to(device) > 0, first  # (B, R), (B,)

    def logits(self, model, wanted):
        """Returns the logits (M, V) that predict the tokens marked in `wanted`, bool (B, R)."""
        ends = nn.functional.pad(self.parts[:, :-1] != self.parts[:, 1:], (0, 1), value=True)
        predicts = (self.parts >= FIRST) & ~ends  # (rows, T)
        keep = torch.zeros_like(predicts).masked_scatter(predicts, wanted[self.real])
        mask, positions = who_sees_whom(self.parts)
        options = dict(position_ids=positions, logits_to_keep=keep, use_cache=False)
        return model(self.ids, attention_mask=mask, **options).logits

    def equal(self, values):
        """Returns values (B, ...) with those of the first one for equal responses to a prompt.

        Rounding depends on the place in a row: GRPO would make differences of 1 of it.
        """
        return values[self.first]

    def values(self, model):
        """Returns a ValueModel's values, (B, R + 1), from the prompt's last token on."""
        values = model(self.ids, *who_sees_whom(self.parts))  # (rows, T)
        slots = nn.functional.pad(self.real, (1, 0), value=True)  # (B, R + 1)
        chosen = values[self.parts >= FIRST]
        return self.equal(values.new_zeros(slots.shape).masked_scatter(slots, chosen))
