"""What the functions of the assignment should return, computed with numbers and loops.

They share no line with the scripts. Arguments are in the scripts' order; masks are 0 or 1.
"""

from math import exp, log, log1p

import torch


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def each(function, *tensors):
    """Returns function(number, number, ...) at every place of tensors of one shape."""
    numbers = zip(*(x.double().flatten().tolist() for x in tensors))
    return tensor([function(*of_place) for of_place in numbers]).view(tensors[0].shape)


def rows(*tensors):
    return zip(*(x.tolist() for x in tensors))


def sft_loss_sum(logprobs, loss_mask):
    return -each(lambda p, m: p if m else 0.0, logprobs, loss_mask).sum()


def pair_loss_sum(chosen, rejected, row_weight, center_coef=0.0):
    def loss(good, bad, weight):
        wrong_by = bad - good
        surprise = max(wrong_by, 0) + log1p(exp(-abs(wrong_by)))  # log(1 + exp(wrong_by))
        return weight * (surprise + center_coef * (good + bad) ** 2)

    return each(loss, chosen, rejected, row_weight).sum()


def token_logprobs(logits, layout, wanted, temperature=1.0):
    ids, found = layout.ids.flatten().tolist(), iter(logits.double().tolist())

    def of_place(place, is_wanted):
        if not is_wanted:
            return 0.0
        row = [x / temperature for x in next(found)]
        highest = max(row)
        return row[ids[int(place) + 1]] - highest - log(sum(exp(x - highest) for x in row))

    return each(of_place, layout.logit_places, wanted)


def sample(args, model, tokenizer, ids, mask, uniforms):
    responses = []  # lists of (token, log-prob)
    for prompt, numbers in rows(ids, uniforms):
        token, response = prompt[-1], []
        for number in numbers:
            weights = [exp(x / args.temperature) for x in model.table[token].tolist()]
            allowed = weights[: len(tokenizer)]
            if args.top_k:
                least = sorted(allowed)[-args.top_k]
                allowed = [w if w >= least else 0.0 for w in allowed]
            reached = [sum(allowed[: i + 1]) > number * sum(allowed) for i in range(len(allowed))]
            token = reached.index(True)
            response.append((token, log(weights[token] / sum(weights))))
            if token == tokenizer.eos_token_id:
                break
        responses.append(response)
    width = max(map(len, responses))
    padded = [r + [(tokenizer.pad_token_id, 0.0)] * (width - len(r)) for r in responses]
    pairs = tensor(padded)
    ended = tensor([float(r[-1][0] == tokenizer.eos_token_id) for r in responses])
    return pairs[..., 0], pairs[..., 1], tensor([float(len(r)) for r in responses]), ended


def kl_estimate(logprobs, ref_logprobs, estimator):
    kinds = {
        "k1": lambda p, ref: p - ref,
        "k2": lambda p, ref: (p - ref) ** 2 / 2,
        "k3": lambda p, ref: exp(ref - p) - 1 + p - ref,
    }
    return each(kinds[estimator], logprobs, ref_logprobs)


def token_rewards(shaped_scores, kl, mask, kl_coef):
    return each(lambda s, k, m: s - kl_coef * k if m else 0.0, shaped_scores, kl, mask)


def gae(rewards, values, mask, gamma, lam):
    advantages, returns = torch.zeros_like(mask).double(), torch.zeros_like(mask).double()
    for b in range(len(mask)):
        real = [t for t, m in enumerate(mask[b].tolist()) if m]
        r, v = rewards[b, real].tolist(), [*values[b, real].tolist(), 0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
        for i, t in enumerate(real):
            later = range(len(delta) - i)
            advantages[b, t] = sum((gamma * lam) ** k * delta[i + k] for k in later)
            returns[b, t] = advantages[b, t] + v[i]
    return advantages, returns


def whitened(advantages, masks):
    pairs = [p for x, m in zip(advantages, masks) for p in rows(x.flatten(), m.flatten())]
    real = [x for x, m in pairs if m]
    mean = sum(real) / len(real)
    deviation = (sum((x - mean) ** 2 for x in real) / len(real)) ** 0.5 + 1e-8
    white = [
        each(lambda x, m: (x - mean) / deviation if m else 0.0, *of_batch)
        for of_batch in zip(advantages, masks)
    ]
    return white


def policy_loss(logprobs, old_logprobs, advantages, clip, clip_high=None):
    high = clip if clip_high is None else clip_high

    def loss(new, old, advantage):
        ratio = exp(new - old)
        middle = sorted([1 - clip, ratio, 1 + high])[1]
        return max(-ratio * advantage, -middle * advantage)

    def stopped(new, old, advantage):
        ratio = exp(new - old)
        outside = ratio > 1 + high if advantage > 0 else ratio < 1 - clip
        return outside and advantage != 0

    ratio = each(lambda new, old: exp(new - old), logprobs, old_logprobs)
    moved = logprobs, old_logprobs, advantages
    return each(loss, *moved), ratio, each(stopped, *moved)


def value_loss(values, old_values, returns, clip_value):
    def loss(value, old, target):
        middle = sorted([old - clip_value, value, old + clip_value])[1]
        return max((value - target) ** 2, (middle - target) ** 2) / 2

    return each(loss, values, old_values, returns)


def grpo(totals, groups):
    def advantage(total, group):
        own = [x for x, g in rows(totals, groups) if g == group]
        mean = sum(own) / len(own)
        variance = sum((x - mean) ** 2 for x in own) / (len(own) - 1)
        return (total - mean) / (variance**0.5 + 1e-4)

    return each(advantage, totals, groups)


def loss_weights(args, masks):
    responses = [row for mask in masks for row in mask.tolist() if any(row)]
    tokens = sum(map(sum, responses))
    if args.loss_mean == "tokens":
        return [mask.double() for mask in masks], tensor(tokens)
    weights = []
    for mask in masks:
        divisors = [
            args.max_answer_seq_len if args.loss_mean == "constant" else max(sum(row), 1)
            for row in mask.tolist()
        ]
        weights.append(mask.double() / tensor(divisors)[:, None])
    return weights, tensor(float(len(responses)))
