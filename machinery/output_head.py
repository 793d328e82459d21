"""Log-probs and entropies of many tokens, without all of their logits (M, V) at once."""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from machinery import folders
from machinery.zero3 import unwrap_model

# Logits of more bytes than this, counted in fp32, are made in parts of this size. That takes longer
# than all at once, up to 1.7 times in a trial on two cores (vocabularies of 49,152 and 151,936,
# 2,048 and 4,096 tokens). Smaller parts would take longer: each of them reads and writes the
# gradient of the whole matrix.
LARGEST = 2**29


def too_many(model, wanted):
    """Returns whether the wanted tokens have too many logits to make at once.

    False also where the model cannot make them in parts. wanted: bool (B, R). To count those that
    are True, the host would have to wait for the device, so all B * R are counted.
    """
    plain = unwrap_model(model)
    head = plain.get_output_embeddings() if getattr(plain, "ends_with_head", False) else None
    # With adapters, or split among ranks by DeepSpeed, the matrix is another kind of layer.
    able = type(head) is nn.Linear and folders.picks_positions(model)
    return able and 4 * wanted.numel() * head.out_features > LARGEST


@contextlib.contextmanager
def in_parts(model, wanted, numbers_of):
    """Has the model return numbers_of(logits, wanted) in place of logits, which it makes in parts.

    numbers_of: takes the logits (m, V) of m of the wanted tokens, and a bool (B, R) that says
    which. It returns (..., B, R): numbers for these tokens, 0 elsewhere. It is called for each
    part, in the forward and again in the backward, and must return the same both times. A token's
    numbers must depend on its own logits alone. No gradient reaches anything else that it uses.
    All this acts within the output matrix's own forward, so ZeRO-3 gathers the weights as always.
    """
    head = unwrap_model(model).get_output_embeddings()

    def forward(hidden):  # (M, H)
        return InParts.apply(hidden, head.weight, head.bias, wanted, numbers_of)

    with mock.patch.object(head, "forward", forward):
        yield


class InParts(torch.autograd.Function):
    """What `numbers_of` makes of the logits h W^T + b: each part gives the numbers of its tokens.

    The backward makes the logits of a part anew. The gradients of W that the parts give are added
    up in fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, wanted, numbers_of):
        """hidden: (M, H), weight: (V, H), bias: (V,) or None; wanted, numbers_of: see in_parts."""
        step = max(1, LARGEST // (4 * len(weight)))
        order = wanted.flatten().cumsum(0).view_as(wanted)  # (B, R) counts wanted tokens, from 1
        ctx.parts = [
            (slice(start, start + step), wanted & (start < order) & (order <= start + step))
            for start in range(0, max(1, len(hidden)), step)
        ]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.numbers_of = numbers_of
        return sum(
            numbers_of(nn.functional.linear(hidden[rows], weight, bias), tokens)
            for rows, tokens in ctx.parts
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """With g = d loss / d logits of a part, (m, V):  dh = g W,  dW = sum of g^T h."""
        hidden, weight, bias = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight, grad_bias = None, None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        for rows, tokens in ctx.parts:
            logits = nn.functional.linear(hidden[rows], weight, bias).requires_grad_()
            with torch.enable_grad():
                numbers = ctx.numbers_of(logits, tokens)
            [grad_logits] = torch.autograd.grad(numbers, logits, grad)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            del logits, numbers, grad_logits  # before the next part is made
        return grad_hidden, grad_weight, grad_bias, None, None  # autograd rounds to W's dtype


def ends_with_head(model):
    """Returns whether a model returns what its output matrix gives: no soft cap, no scale.

    Its forward is run without the backbone and the matrix, so no weight has to be there. Where that
    fails, for whatever reason, the answer is no, and the logits are made at once.
    """
    head, logits = model.get_output_embeddings(), torch.zeros(1, 1, 1)
    if head is None:
        return False
    with contextlib.ExitStack() as patched:
        for backbone in {model.base_model, model.get_decoder()}:
            patched.enter_context(mock.patch.object(backbone, "forward", mock.MagicMock()))
        patched.enter_context(mock.patch.object(head, "forward", lambda _: logits))
        with contextlib.suppress(Exception):
            same = model(torch.zeros(1, 1, dtype=torch.long)).logits is logits
            return same and logits._version == 0  # not changed in place either
    return False
