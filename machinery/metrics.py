"""The numbers of a step: what a rollout and its updates were like, how fast it was, and intervals.

All are over all ranks.
"""

import math
import time
from collections import Counter
from statistics import fmean, pstdev

import torch

from machinery import ranks, zero3

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
        ratio_max = ranks.largest(torch.stack(self.ratio_max).max())
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
    that evaluation.reported names, and the screen what COLUMNS names. `batch.responses` hold the
    texts, the data's other columns, and what several judges said of them: reward_1_NAME, ...
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
    x = torch.cat([value[weight > 0] for value, weight in zip(values, weights)]).double()  # (M,)
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
    gap = torch.stack([token_gaps(batch).max() for batch in micro_batches]).max()
    return {
        "sampling_gap": ranks.largest(gap),
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


# ---- Speed ----
def work(args, engines, micro_batches):
    """Returns the tokens of a step and its FLOPs, over all ranks, without padding and fillers.

    Counted is one forward and one backward of each engine. What else a step of PPO does (the
    rollout, forwards that only score, further epochs) takes time and counts nothing.

    micro_batches: with counts(), see common.Layout.
    """
    counts = zip(*(batch.counts() for batch in micro_batches))
    tokens, rows = ranks.all_sum(*map(sum, counts)).tolist()
    return tokens, tokens * sum(flops_per_token(args, each, tokens / rows) for each in engines)


def flops_per_token(args, engine, length):
    """Returns the FLOPs of a forward and a backward, for a token in a row of `length` tokens.

        forward    2 N + 4 * layers * hidden * length     (PaLM, Chowdhery et al. 2022, appendix B)
        backward   twice that, so 6 N in all; with LoRA only adapters have gradients of their own

    N: the weights, without an input embedding that is looked up only. With gradient checkpointing
    the forward is made twice.
    """
    model = zero3.unwrap_model(engine)
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    tied = output is not None and output.weight is embedding
    looked_up = 0 if tied else zero3.size_of(embedding)
    size = zero3.count_parameters(model) - looked_up
    trained = zero3.count_parameters(model, training=True) - looked_up * embedding.requires_grad
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    forwards = 2 if args.gradient_checkpointing else 1
    return 2 * (forwards + 1) * (size + attention) + 2 * (trained + attention)


def grad_norm(args, engine):
    """Returns the norm of the gradient before clipping, or None where fp16 skipped the step."""
    norm = engine.get_global_grad_norm()
    skipped = args.dtype == "fp16" and not engine.was_step_applied()
    return None if norm is None or skipped else float(norm)


def learning_rate(engine):
    """Returns the rate of the step just made."""
    schedule = engine.lr_scheduler
    # its schedule has moved on, unless fp16 skipped the step
    step = max(0, schedule.last_epoch - engine.was_step_applied())
    return float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step))


def speed(tokens, flops, seconds):
    """Returns the metrics of a step that took `seconds`.

    tokens, without padding, and flops are of all ranks; "tflops" is per device.
    """
    return {
        "tokens_per_second": tokens / seconds,
        "tflops": flops / seconds / ranks.get_world_size() / 1e12,
        "seconds": seconds,
    }


# ---- Statistics ----
def wilson_interval(share, count, z=1.96):
    """Returns the 95 % confidence interval [low, high] of a share in `count` trials: Wilson 1927.

    As R's prop.test(correct=FALSE) prints it. Half of ten says next to nothing, half of a thousand
    "a coin"; ten of ten is not certainty: the plain normal interval would say [1, 1].

    >>> for share, count in ((0.5, 10), (0.5, 1000), (1, 10), (0, 10)):
    ...     print([round(x, 4) for x in wilson_interval(share, count)])
    [0.2366, 0.7634]
    [0.4691, 0.5309]
    [0.7225, 1.0]
    [0.0, 0.2775]
    """
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return [abs(middle - half), middle + half]  # below 0 it is only by rounding


def mean_interval(values):
    """Returns the 95 % confidence interval [low, high] of a mean: mean -+ 1.96 s / sqrt(n).

    s divides by n - 1. It is too narrow for few values, and says nothing where all are equal.

    >>> [round(x, 3) for x in mean_interval([0.0, 1.0] * 50)]
    [0.402, 0.598]
    """
    mean, count = fmean(values), len(values)
    half = 1.96 * pstdev(values) / max(count - 1, 1) ** 0.5
    return [mean - half, mean + half]


def best_of(values, k):
    """Returns the expected largest of k of these n values, drawn without replacement. k <= n

        sum over i of  C(i, k - 1) / C(n, k) * v_i        v_0 <= v_1 <= ... <= v_{n-1}

    C(i, k - 1) of the C(n, k) draws have v_i as their largest. As an estimate for k new samples it
    is unbiased. Of values that are 0 or 1, c of them 1, it is pass@k, 1 - C(n - c, k) / C(n, k)
    [Chen 2021] eq. 1.

    >>> best_of([0.0, 1.0, 0.0, 0.0], 2), 1 - math.comb(3, 2) / math.comb(4, 2)
    (0.5, 0.5)
    >>> abs(best_of([1.0] * 2 + [0.0] * 4, 3) - (1 - math.comb(6 - 2, 3) / math.comb(6, 3))) < 1e-12
    True
    """
    chances = [math.comb(i, k - 1) / math.comb(len(values), k) for i in range(len(values))]
    return sum(chance * value for chance, value in zip(chances, sorted(values)))
