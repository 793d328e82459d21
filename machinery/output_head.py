"""What is wanted of many logits (M, V), without all of them: a part of the tokens at a time."""

import contextlib
from unittest import mock

import torch
from torch import nn

from machinery import folders
from machinery.zero3 import unwrap_model

# Bytes in fp32 of the logits that are made at a time. More are made in parts of this size, which
# takes 1.2 to 1.7 times as long as all at once (a trial on two cores: vocabularies of 49,152 and
# 151,936, 2,048 and 4,096 tokens). Smaller parts would take longer: each adds to the gradient of
# the whole matrix.
LARGEST = 2**29


@contextlib.contextmanager
def in_parts(model, wanted, numbers_of):
    """Has the output matrix give numbers_of(logits, wanted) where the logits would be many.

    wanted: bool (B, R), M of them True. numbers_of: a function of logits (m, V) and of m of these
    tokens, again as bool (B, R); it returns a tensor with a number for each token, 0 elsewhere.
    Yields whether it does so. It acts within the matrix's own forward, so ZeRO-3 gathers the
    weights as always.
    """
    plain = unwrap_model(model)
    head = plain.get_output_embeddings() if getattr(plain, "ends_with_head", False) else None
    # With adapters, or split among ranks by DeepSpeed, the matrix is another kind of layer.
    able = type(head) is nn.Linear and folders.picks_positions(model)
    # To count the tokens, the host would have to wait for the device.
    if not able or 4 * wanted.numel() * head.out_features <= LARGEST:
        yield False
        return

    def forward(hidden):  # (M, H)
        return InParts.apply(hidden, head.weight, head.bias, wanted, numbers_of)

    with mock.patch.object(head, "forward", forward):
        yield True


class InParts(torch.autograd.Function):
    """The sum of what `numbers_of` makes of each part of the logits h W^T + b.

    The backward makes the logits of a part anew. The gradient of W is summed in fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, wanted, numbers_of):
        """hidden: (M, H), weight: (V, H), bias: (V,) or None; wanted, numbers_of: see in_parts."""
        step = max(1, LARGEST // (4 * len(weight)))
        order = wanted.flatten().cumsum(0).view_as(wanted)  # (B, R) 1 at the first wanted token
        ctx.parts = [
            (slice(start, start + step), wanted & (start < order) & (order <= start + step))
            for start in range(0, max(1, len(hidden)), step)
        ]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.numbers_of = numbers_of
        logits = (nn.functional.linear(hidden[m], weight, bias) for m, _ in ctx.parts)
        return sum(numbers_of(part, tokens) for part, (_, tokens) in zip(logits, ctx.parts))

    @staticmethod
    def backward(ctx, grad):
        """With g = d loss / d logits of a part, (m, V):  dh = g W,  dW = sum of g^T h."""
        hidden, weight, bias = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight, of_bias = None, None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None:
            of_bias = torch.zeros_like(bias, dtype=torch.float32)
        for m, tokens in ctx.parts:
            logits = nn.functional.linear(hidden[m], weight, bias).requires_grad_()
            with torch.enable_grad():
                numbers = ctx.numbers_of(logits, tokens)
            [of_logits] = torch.autograd.grad(numbers, logits, grad)
            of_hidden[m] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.T @ hidden[m]
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None


def ends_with_head(model):
    """Returns whether a model returns what its output matrix gives: no soft cap, no scale.

    Its forward is run without the backbone and the matrix, so no weight has to be there. A model
    that needs more than that makes its logits at once.
    """
    head, logits = model.get_output_embeddings(), torch.zeros(1, 1, 1)
    if head is None:
        return False
    with contextlib.ExitStack() as patched:
        for backbone in {model.base_model, model.get_decoder()}:
            patched.enter_context(mock.patch.object(backbone, "forward", mock.MagicMock()))
        patched.enter_context(mock.patch.object(head, "forward", lambda _: logits))
        with contextlib.suppress(Exception):
            return model(torch.zeros(1, 1, dtype=torch.long)).logits is logits
    return False
