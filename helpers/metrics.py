"""What a rollout and its updates were like, over all ranks: the numbers of a step of PPO."""

import time
from collections import Counter

import torch

from machinery.base import ranks

# What the screen shows of metrics.jsonl, where it is there. Add a metric of yours.
COLUMNS = """step reward gold kl response_length eos_rate explained_variance entropy
             eval_reward eval_gold seconds""".split()
EQUAL = 1e-6  # scores that differ by less are equal


def columns(args):
    """Returns the columns of the screen that this run has."""
    has = {"explained_variance": args.has_critic, "kl": args.has_reference}
    has |= {"gold": args.gold_fn, "eval_gold": args.gold_fn}
    return [name for name in COLUMNS if has.get(name, True)]


class Clock:
    """The seconds of each part of a step, from its `start`."""

    def start(self):
        """Starts a step."""
        self.laps, self.began = {}, time.monotonic()

    def lap(self, name):
        """Notes the seconds since the part before ended."""
        now = time.monotonic()
        self.laps[name], self.began = now - self.began, now


# ---- The updates ----
class TokenMeans:
    """Means over the response tokens of all ranks of what the updates of a step report."""

    def __init__(self):
        self.updates = 0
        self.last, self.ratio_max = Counter(), []  # this rank's, of the update being made; of all
        self.totals = Counter()

    @torch.no_grad()
    def add(self, batch, values):
        """Adds a micro-batch, and of it `values`: {name: (B, R)}."""
        mask = batch.response_mask
        self.ratio_max.append((batch.ratio * (mask > 0)).max())
        for name, value in {"tokens": mask, **values}.items():
            self.last[name] += (value * mask).sum().double()

    def end_update(self):
        """Ends an optimizer step: sums it up over all ranks, and returns its means."""
        sums = dict(zip(self.last, ranks.all_sum(*self.last.values()).tolist()))
        self.totals.update(sums)
        self.last = Counter()
        self.updates += 1
        return means_of_tokens(sums)

    def of_all_updates(self):
        """Returns {name: mean}, ratio_max, and the sum of the losses as `loss`."""
        means = means_of_tokens(self.totals)
        ratio_max = max(ranks.all_gather_objects([torch.stack(self.ratio_max).max().item()]))
        loss = means["actor_loss"] + means.get("critic_loss", 0)
        return {"loss": loss, **means, "ratio_max": ratio_max}


def means_of_tokens(totals):
    """Returns {name: mean} of {name: sum}, where one sum is the number of tokens."""
    count = max(totals["tokens"], 1)
    return {name: total / count for name, total in totals.items() if name != "tokens"}


# ---- The rollout ----
def per_response(batch):
    """Returns {name: (B,)}, once a micro-batch is scored: a metric's value for each response.

    Add your own metrics here: metrics.jsonl has their means, evaluations and samples.jsonl those
    whose names begin with reward or gold, and the screen what COLUMNS names. `batch.responses` hold
    the texts, the data's other columns, and what several judges said of them: reward_1_NAME, ...
    """
    found = {"reward": batch.scores.sum(-1)}  # the log's name for a response's score
    if batch.gold is not None:
        found["gold"] = batch.gold.sum(-1)
    for name in sorted(batch.responses[0]):
        if name.startswith("reward_"):
            of_judge = [response[name] for response in batch.responses]
            found[name] = found["reward"].new_tensor(of_judge)
    if batch.ref_logprobs is not None:
        found |= {"kl": batch.kl("k1").sum(-1), "kl_k3": batch.kl("k3").sum(-1)}
    return {**found, "response_length": batch.length, "eos_rate": batch.ended}


def response_means(micro_batches):
    """Returns {name: mean over the responses of all ranks} of what `per_response` says.

    And clip_reward_fraction, the share of the responses whose score --clip_reward changed.
    """
    each = [{**per_response(b), "clip_reward_fraction": b.score_clipped} for b in micro_batches]
    weight = torch.cat([batch.row_weight for batch in micro_batches])  # (n,) 0 for a filler row
    columns = [torch.cat([found[name].double() for found in each]) for name in each[0]]
    sums = [(values * weight).sum() for values in columns]
    count, *sums = ranks.all_sum(weight.sum(), *sums).tolist()
    return {name: total / count for name, total in zip(each[0], sums)}


@torch.no_grad()
def rollout_means(args, micro_batches):
    """What a rollout was like, over all ranks: {name: number}. Your own metrics: `per_response`.

    reward_std            deviation of all responses' shaped scores. 0: nothing to learn from
    truncated_reward      mean score of the responses that were cut off, if any were
    entropy               mean over the tokens
    advantage_std         deviation over the tokens, before whitening
    explained_variance    1: the critic foresaw each return; 0: no better than a constant
    sampling_...          how far the policy mu that sampled is from the one that scored, pi: see
                          sampling_means
    """
    means = response_means(micro_batches)

    def each(name):
        return [getattr(batch, name) for batch in micro_batches]  # (B, R) each, weights (B,)

    real, weights = each("response_mask"), each("row_weight")
    totals = [scores.sum(-1) for scores in each("shaped_scores")]  # (B,) each
    means["reward_std"] = moments(totals, weights)[1] ** 0.5
    if means["eos_rate"] < 1:
        cut = [batch.row_weight * (1 - batch.ended) for batch in micro_batches]
        means["truncated_reward"] = moments([scores.sum(-1) for scores in each("scores")], cut)[0]
    means["entropy"] = moments(each("entropy"), real)[0]
    means["advantage_std"] = moments(each("raw_advantages"), real)[1] ** 0.5
    if args.has_critic:
        errors = [batch.returns - batch.old_values for batch in micro_batches]
        variance = moments(each("returns"), real)[1]
        means["explained_variance"] = 1 - moments(errors, real)[1] / max(variance, 1e-12)
    if args.compares_groups:
        means |= group_means(micro_batches)
    return means | sampling_means(micro_batches)


def moments(values, weights):
    """Returns mean and variance of the values where the weights are above 0, over all ranks.

    Lists of tensors, one of each micro-batch.
    """
    parts = [value[weight > 0] for value, weight in zip(values, weights)]
    x = torch.cat(parts).double()  # (M,)
    count, total, squares = ranks.all_sum(len(x), x.sum(), (x**2).sum()).tolist()
    mean = total / max(count, 1)
    return mean, max(squares / max(count, 1) - mean**2, 0.0)


def sampling_means(micro_batches):
    """How far the policy mu that sampled is from the one that scored, pi: {name: number}.

    sampling_gap        largest abs(log(pi / mu)) of a token
    sampling_kl         mean of log(mu / pi) over the tokens: KL(mu || pi), nats a token
    sampling_outside    share of the tokens with pi / mu outside of 0.8 .. 1.2

    All are 0 but for rounding where a model samples and scores in the same way: a cache sums in
    another order. {} where a fork's sampler tells no log-probs.
    """
    if any("sampled_logprobs" not in batch.per_token for batch in micro_batches):
        return {}
    real = [batch.response_mask for batch in micro_batches]
    # log(pi / mu), (B, R) each
    log_ratios = [b.old_logprobs - b.per_token["sampled_logprobs"] for b in micro_batches]
    outside = [((log_ratio.exp() - 1).abs() > 0.2).float() for log_ratio in log_ratios]
    gap = torch.stack([token_gaps(batch).max() for batch in micro_batches]).max().item()
    return {
        "sampling_gap": max(ranks.all_gather_objects([gap])),
        "sampling_kl": -moments(log_ratios, real)[0],
        "sampling_outside": moments(outside, real)[0],
    }


def token_gaps(batch):
    """Returns how far the log-probs of sampling and of scoring are apart, (B, R); 0 in padding."""
    gaps = (batch.per_token["sampled_logprobs"] - batch.old_logprobs).abs()
    return gaps * batch.response_mask


def group_means(micro_batches):
    """How much the responses to one prompt differ in shaped score: what RLOO and GRPO learn from.

    equal_groups    share of prompts whose responses all have the same one. Without a KL penalty in
                    the reward their advantages are 0, so they teach nothing
    group_std       deviation of a prompt's scores, which divides by n - 1: mean over the prompts
    """
    groups = {}
    for batch in micro_batches:
        for row, score in zip(batch.responses, batch.shaped_scores.double().sum(-1)):
            if row["row_weight"]:
                groups.setdefault(row["group"], []).append(score)
    scores = [torch.stack(group) for group in groups.values()]  # (n,) of each prompt
    equal = sum(group.max() - group.min() <= EQUAL for group in scores)
    deviations = sum(group.std() for group in scores)
    equal, deviations, count = ranks.all_sum(equal, deviations, len(scores)).tolist()
    return {"equal_groups": equal / max(count, 1), "group_std": deviations / max(count, 1)}
