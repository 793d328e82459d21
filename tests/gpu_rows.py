"""What only a GPU can show of attention and of decoding: rows of tools/gpu_check.py.

`attention` and `decoding` run in a rank, and yield (name of the row, {what was measured}).
"""

import math
import time
import warnings
from types import SimpleNamespace

import torch

from tests import kit  # isort: skip
import common
from machinery import patches, ranks

KERNELS = {  # cuDNN's is off in a run (patches.py): a NaN here is known
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}


def attention():
    """Yields for each of PyTorch's kernels its largest error against the plain products in fp32."""
    for name, kernel in KERNELS.items():
        worst, nans, cannot = 0.0, [], []
        for T in (63, 64, 192, 704):
            try:
                plain, found = (
                    attended(each, dtype, T, padded=name != "flash")
                    for each, dtype in (("MATH", torch.float32), (kernel, torch.bfloat16))
                )
            except RuntimeError as error:
                cannot.append(f"{T}: {str(error).splitlines()[0][:60]}")
                continue
            for expected, other in zip(plain, found):
                # not the number that shifts: -120 times a sum that is 0 but for rounding
                expected, other = expected[..., 1:], other[..., 1:].float()
                error = (other - expected).abs().max() / expected.abs().max().clamp(min=1)
                worst = max(worst, error.nan_to_num(0).item())
            if not all(x.isfinite().all() for x in found):
                nans.append(T)
        yield f"attention_{name}", {"worst": worst, "nans": nans, "cannot": cannot}


def check_attention(kernel, facts):
    """Returns (whether a kernel is as it must be, or None where that is not known; in words)."""
    words = f"largest relative error {facts['worst']:.1e}"
    if facts["nans"]:
        words += f", NaN at T = {facts['nans']}"
    if facts["cannot"]:
        return None, facts["cannot"][0]
    good = facts["worst"] < 0.05 and not facts["nans"]
    return None if kernel == "cudnn" and not good else good, words


def attended(kernel, dtype, T, padded):
    """Returns what a kernel makes of rows of T tokens, and the gradients of queries, keys, values.

    T is and is not a multiple of 64. There is padding on the left, but for flash, which takes no
    mask: padding sees nothing, and nobody looks at it. Queries are grouped; and one head's scores
    are all about -120, as those of a head of Qwen2.5-0.5B: pytorch#196678.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, groups, size, device = 4, 2, 64, ranks.device()
    torch.manual_seed(T)
    q, k, v, out = (torch.randn(2, heads, T, size, device=device) for _ in range(4))
    k, v = (x[:, ::groups].repeat_interleave(groups, 1) for x in (k, v))
    q[:, 0] *= 0.1
    k[:, 0] *= 0.1
    q[:, 0, :, 0], k[:, 0, :, 0] = 1.0, -120 * math.sqrt(size)
    given = [x.bfloat16().to(dtype).requires_grad_(True) for x in (q, k, v)]
    options, looked_at = {"is_causal": True}, 1
    if padded:
        mask = torch.ones(T, T, dtype=torch.bool, device=device).tril().repeat(2, 1, 1, 1)
        mask[1, :, :, : T // 3] = False
        options = {"attn_mask": patches.as_numbers(mask, dtype)}
        looked_at = mask.any(-1, keepdim=True)  # (2, 1, T, 1)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        y = torch.nn.functional.scaled_dot_product_attention(*given, **options)
    y.backward((out * looked_at).to(dtype))
    return [y * looked_at, *(x.grad for x in given)]


def decoding():
    """Yields decoding in fp32 and bf16, with grouped queries: waits of the host and milliseconds
    for each token, timed twice."""
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = kit.make_tiny_model(num_key_value_heads=2).to(ranks.device(), dtype)
        decoded(model, 24, 64)  # warms up
        milliseconds, waits = [], []
        for _ in range(2):
            (_, short, few), (_, long, many) = (decoded(model, 24, n) for n in (64, 128))
            milliseconds.append(1e3 * (long - short) / 64)
            waits.append((many - few) / 64)
        yield f"decoding_{name}", {"milliseconds": milliseconds, "waits": max(waits)}


def check_decoding(dtype, facts):
    """Returns the same two of decoding."""
    words = "{waits:.1f} waits, {milliseconds[0]:.2f} and {milliseconds[1]:.2f} ms a token"
    return facts["waits"] <= 2.5, words.format(**facts)


def decoded(model, longest, tokens):
    """Returns so many tokens after each of 8 prompts of unequal length, the seconds that they took,
    and how often the host waited."""
    cuda, device = ranks.device().type == "cuda", ranks.device()
    no_end = SimpleNamespace(pad_token_id=0, eos_token_id=-1)
    prompts = [[5 + row] * max(1, longest * (row + 1) // 8) for row in range(8)]
    ids, mask = (x.to(device) for x in common.pad(prompts, 0))
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        began = time.time()
        responses, _ = kit.generate(model, ids, mask, kit.uniforms(8, tokens), no_end)
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    waits = [one for one in waits if one.category is UserWarning]  # no library's FutureWarning
    return responses, time.time() - began, len(waits)
