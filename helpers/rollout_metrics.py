"""What a rollout and an evaluation of step 3 were like: their metrics, samples and FLOPs."""

import json
import time
from collections import Counter
from statistics import fmean

import torch

from machinery.base import ranks, statistics
from machinery.base.refused import Refused
from machinery.data import batching
from machinery.engine import throughput
from machinery.run import logs

COLUMNS = """step reward gold kl response_length eos_rate explained_variance entropy
             eval_reward eval_gold seconds""".split()
STORED = ("old_logprobs", "ref_logprobs", "entropy", "scores", "old_values")


class Clock:
    """The seconds of each part of a step."""

    def __init__(self):
        self.start()

    def start(self):
        """Starts a step."""
        self.laps, self.began = {}, time.time()

    def lap(self, name):
        """Notes the seconds since the part before ended. An evaluation's are thrown away."""
        now = time.time()
        self.laps[name], self.began = now - self.began, now


class TokenMeans:
    """Means over the response tokens of all ranks of what the updates of a step report."""

    def __init__(self):
        self.updates, self.ratio_max = 0, 0.0
        self.sums, self.totals = Counter(), Counter()  # this rank's of one update; all of all

    @torch.no_grad()
    def add(self, mask, ratio, **values):
        """Adds a micro-batch. mask, ratio and values: (B, R)"""
        self.ratio_max = max(self.ratio_max, (ratio * (mask > 0)).max().item())
        self.sums["tokens"] += mask.sum().item()
        for name, value in values.items():
            self.sums[name] += (value * mask).sum().double().item()

    def end_update(self):
        """Ends an optimizer step, and sums it up over all ranks."""
        totals = dict(zip(self.sums, ranks.all_sum(*self.sums.values()).tolist()))
        self.totals.update(totals)
        self.sums.clear()
        self.updates += 1
        self.of_last_update = means_of_tokens(totals)

    def of_all_updates(self, has_critic=True):
        """Returns {name: mean}, ratio_max, and the sum of the losses as `loss`."""
        means = means_of_tokens(self.totals)
        ratio_max = max(ranks.all_gather_objects([self.ratio_max]))
        loss = means["actor_loss"] + means["critic_loss"]
        if not has_critic:
            del means["critic_loss"]
        return {"loss": loss, **means, "ratio_max": ratio_max}


def means_of_tokens(totals):
    """Returns {name: mean} of {name: sum}, where one sum is the number of tokens."""
    count = max(totals["tokens"], 1)
    return {name: total / count for name, total in totals.items() if name != "tokens"}


# ---- A rollout ----
def response_means(micro_batches):
    """Returns {name: mean over the responses of all ranks} of what MicroBatch.per_response says."""
    each = [batch.per_response() for batch in micro_batches]
    if len(kinds := {*ranks.all_gather_objects([tuple(metrics) for metrics in each])}) > 1:
        raise Refused("function-returns", f"rewards have other parts for other rows: {kinds}.")
    weight = torch.cat([batch.row_weight for batch in micro_batches])  # (n,) 0 for a filler row
    columns = [torch.cat([metrics[name].double() for metrics in each]) for name in each[0]]
    sums = [(values * weight).sum() for values in columns]
    count, *sums = ranks.all_sum(weight.sum(), *sums).tolist()
    return {name: total / count for name, total in zip(each[0], sums)}


def moments(micro_batches, of, where=lambda batch: batch.response_mask):
    """Returns mean and variance of of(batch) where where(batch) is above 0, over all ranks.

    By default of numbers (B, R) at response tokens.
    """
    x = torch.cat([of(batch)[where(batch) > 0] for batch in micro_batches]).double()  # (M,)
    count, total, squares = ranks.all_sum(len(x), x.sum(), (x**2).sum()).tolist()
    mean = total / max(count, 1)
    return mean, max(squares / max(count, 1) - mean**2, 0.0)


def token_gaps(batch):
    """Returns how far the log-probs of sampling and of scoring are apart, (B, R); 0 in padding."""
    gaps = (batch.tokens["sampled_logprobs"] - batch.old_logprobs).abs()
    return gaps * batch.response_mask


def work(args, micro_batches, engines, reward_models, updates, one_pass):
    """Returns the tokens of a step of PPO and its FLOPs, over all ranks.

    engines: {name: engine}, the actor first. The rollout and the reference are a forward of the
    actor each. Each engine makes a forward that scores, unless one_pass makes it serve for both,
    and one with a backward in each epoch. A prompt that responses share counts for each of them.
    """
    tokens = rows = scored = 0.0
    for batch in micro_batches:
        prompts = [len(row["prompt_ids"]) for row in batch.responses]
        tokens += batch.row_weight @ (batch.length + batch.length.new_tensor(prompts)).float()
        rows += batch.row_weight.sum()
        scored += batch.response_mask.sum()
    tokens, rows, scored = ranks.all_sum(tokens, rows, scored).tolist()

    def count(engine, trains=False):
        checkpointing = args.gradient_checkpointing
        return throughput.count_flops(engine, tokens, tokens / rows, scored, trains, checkpointing)

    flops = (1 + args.has_reference) * count(next(iter(engines.values())))
    epochs = updates * args.gradient_accumulation_steps / len(micro_batches)
    for engine in engines.values():
        flops += epochs * count(engine, True) + (0 if one_pass else count(engine))
    return tokens, flops + sum(map(count, reward_models))


@torch.no_grad()
def stop_unless_finite(run, micro_batches):
    """Stops the run if anything that was stored for the update is NaN or infinite."""
    names = [name for name in STORED if getattr(micro_batches[0], name) is not None]
    sums = {name: sum(getattr(batch, name).sum() for batch in micro_batches) for name in names}
    for name in micro_batches[0].tokens:  # sampled_logprobs, and what a sampler of yours adds
        sums[name] = sum(batch.tokens[name].sum() for batch in micro_batches)
    totals = dict(zip(sums, ranks.all_sum(*sums.values()).tolist()))
    rows = (row for batch in micro_batches for row in batch.responses if row["row_weight"])
    run.stop_unless_finite(totals, map(as_data, rows))


def as_data(row):
    """Returns a response as a row that --data_path takes."""
    prompt = json.loads(row["prompt"]) if row["chat"] else row["prompt"]
    return {"prompt": prompt, "completion": row["text"], **json.loads(row["extra"])}


def columns(args):
    """Returns the columns of the screen that this run has."""
    absent = [] if args.has_critic else ["explained_variance"]
    absent += [] if args.gold_fn else ["gold", "eval_gold"]
    absent += [] if args.has_reference else ["kl"]
    return [name for name in COLUMNS if name not in absent]


def held_out_prompts(held_out, samples=1):
    """Returns this rank's share of the held-out rows, each `samples` times.

    Every rank has the same number: fillers complete the shares.
    """
    count = ranks.data_parallel_size()
    order = [*range(len(held_out)), *[-1] * (-len(held_out) % count)]
    dealt = batching.Rows(held_out)
    mine = order[ranks.data_parallel_rank() :: count]
    each = enumerate(mine)
    return [{**dealt[i], "sample": n, "group": g} for g, i in each for n in range(samples)]


def evaluate(run, step, rollout, actor, average):
    """Returns the metrics of an evaluation: eval_..., and eval_ema_... of --eval_ema.

    rollout: ppo.scored_rollout. average: ema.Ema.
    """
    samples = run.args.eval_samples
    metrics = summary(run, step, graded(run, rollout), samples)
    if run.args.eval_ema:
        with average.in_place_of(actor):
            metrics |= means_of(graded(run, rollout), samples, "eval_ema")
    return metrics


def graded(run, rollout):
    """Returns all ranks' graded responses to the held-out prompts: dicts with text, reward, kl, ...

    They are sampled with the same random numbers each time: those of step 0.
    """
    size = run.args.per_device_eval_batch_size
    prompts = held_out_prompts(run.held_out, run.args.eval_samples)
    return gathered(rollout(prompts, 0, size, size))


def gathered(micro_batches):
    """Returns all ranks' responses, in the order of their rows, each with its metrics."""
    responses = []
    for batch in micro_batches:
        for name, values in batch.per_response().items():
            for response, value in zip(batch.responses, values.tolist()):
                response[name] = value
        responses += batch.responses
    return sorted(ranks.each_once(responses), key=lambda row: (row["row"], row["sample"]))


def evaluated(response):
    """Returns the names of the metrics in a graded response that an evaluation reports.

    Those that go on after reward_ and gold_ are of several judges, or of a function's dict.
    """
    others = ("kl", "response_length")
    return [name for name in response if name.startswith(("reward", "gold")) or name in others]


def summary(run, step, responses, samples=1):
    """Writes the responses of an evaluation down, shows two, and returns their means: eval_..."""
    names = evaluated(responses[0])
    lines = []
    for response in responses:
        line = {name: response[name] for name in ("row", "sample", "prompt", *names)}
        lines.append({"step": step, **line, "response": response["text"]})
    run.samples(lines)
    for response in responses[::samples][:2]:
        numbers = [f"{name} {response[name]:.4g}" for name in names]
        logs.show_sample(response, response["text"], f"  {', '.join(numbers)}")
    return means_of(responses, samples, "eval")


def means_of(responses, samples, prefix):
    """Returns {prefix_reward: mean, ...} of graded responses, `samples` to each prompt.

    If these are several, also the share of prompts that one of k solves, pass_at_k with k = 1, 2,
    4, ..., and its 95 % interval over the prompts, pass_at_k_ci. Where the rewards are not all 0 or
    1 it is the largest reward of k: best_of_k.
    """
    names, count = evaluated(responses[0]), len(responses)
    means = {name: sum(response[name] for response in responses) / count for name in names}
    rewards = [response.get("reward") for response in responses]
    what = "pass_at" if {*rewards} <= {0.0, 1.0} else "best_of"
    for k in [2**i for i in range(samples.bit_length())] if samples > 1 else ():
        starts = range(0, len(rewards), samples)
        values = [statistics.best_of(rewards[i : i + samples], k) for i in starts]
        means[f"{what}_{k}"] = fmean(values)
        means[f"{what}_{k}_ci"] = statistics.mean_interval(values)
    return {f"{prefix}_{name}": value for name, value in means.items()}
