"""What a rollout and an evaluation of step 3 were like: their metrics, samples and FLOPs."""

import json
import time
from collections import Counter

import torch

import common
from machinery.base import ranks
from machinery.engine import throughput
from machinery.run import logs

COLUMNS = """step reward gold kl response_length eos_rate actor_loss critic_loss
             explained_variance entropy ratio_max eval_reward eval_gold seconds""".split()
EVALUATED = ("reward", "gold", "kl", "response_length")
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
def per_response(batch):
    """Returns {name: (B,)} of a micro-batch that is scored. A new metric is a line here.

    batch.responses holds the texts and the data's other columns.
    """
    metrics = {"reward": batch.scores.sum(-1), "kl": batch.kl["k1"].sum(-1)}
    metrics["kl_k3"] = batch.kl["k3"].sum(-1)
    metrics["response_length"] = batch.length
    metrics["eos_rate"] = batch.ended
    if batch.gold is not None:
        metrics["gold"] = batch.gold.sum(-1)
    return metrics


@torch.no_grad()
def of_all_ranks(args, micro_batches):
    """Returns the metrics of a rollout: means over the responses, and over their tokens."""
    columns = {}
    for batch in micro_batches:
        for name, values in per_response(batch).items():
            columns.setdefault(name, []).append(values.double())
    weight = torch.cat([batch.row_weight for batch in micro_batches])  # (n,) 0 for a filler row
    sums = [(torch.cat(values) * weight).sum() for values in columns.values()]
    count, *sums = ranks.all_sum(weight.sum(), *sums).tolist()
    means = {name: total / count for name, total in zip(columns, sums)}
    means["entropy"] = moments(micro_batches, lambda batch: batch.entropy)[0]
    means["advantage_std"] = moments(micro_batches, lambda batch: batch.raw_advantages)[1] ** 0.5
    if micro_batches[0].returns is not None:  # 1: foreseen; 0: no better than a constant
        errors = moments(micro_batches, lambda batch: batch.returns - batch.old_values)[1]
        variance = moments(micro_batches, lambda batch: batch.returns)[1]
        means["explained_variance"] = 1 - errors / max(variance, 1e-12)
    if args.compares_groups:
        means["equal_groups"] = equal_groups(micro_batches)
    gaps = [sampling_gap(batch) for batch in micro_batches if "sampled_logprobs" in batch.tokens]
    if gaps:
        means["sampling_gap"] = max(ranks.all_gather_objects([max(gaps)]))
    return means


def moments(micro_batches, of):
    """Returns mean and variance of of(batch), (B, R), over the response tokens of all ranks."""
    parts = [of(batch)[batch.response_mask > 0] for batch in micro_batches]
    x = torch.cat(parts).double()  # (M,)
    count, total, squares = ranks.all_sum(len(x), x.sum(), (x**2).sum()).tolist()
    mean = total / max(count, 1)
    return mean, max(squares / max(count, 1) - mean**2, 0.0)


def sampling_gap(batch):
    """Returns the largest difference between the log-probs of sampling and of scoring a token."""
    return token_gaps(batch).max().item()


def token_gaps(batch):
    """Returns that difference for each token, (B, R); 0 where it does not count."""
    gaps = (batch.tokens["sampled_logprobs"] - batch.old_logprobs).abs()
    return gaps * batch.response_mask


def equal_groups(micro_batches):
    """Returns the share of prompts whose responses all have the same score: they teach nothing."""
    groups = {}
    for batch in micro_batches:
        for row, score in zip(batch.responses, batch.scores.sum(-1).tolist()):
            if row["row_weight"]:
                groups.setdefault(row["group"], []).append(score)
    equal = sum(max(scores) - min(scores) <= 1e-6 for scores in groups.values())
    equal, count = ranks.all_sum(equal, len(groups)).tolist()
    return equal / max(count, 1)


def work(args, micro_batches, engines, reward_models, updates, one_pass):
    """Returns the tokens of a step of PPO and its FLOPs, over all ranks.

    engines: {name: engine}, the actor first. The rollout and the reference are a forward of the
    actor each. Each engine makes a forward that scores, unless one_pass makes it serve for both,
    and one with a backward in each epoch. A prompt that responses share counts for each of them.
    """
    tokens = rows = scored = 0.0
    for batch in micro_batches:
        prompts = torch.tensor([len(row["prompt_ids"]) for row in batch.responses])
        lengths = prompts + batch.length.cpu()
        tokens += (lengths * batch.row_weight.cpu()).sum()
        rows += batch.row_weight.sum()
        scored += batch.response_mask.sum()
    tokens, rows, scored = ranks.all_sum(tokens, rows, scored).tolist()

    def count(engine, trains=False):
        checkpointing = args.gradient_checkpointing
        return throughput.count_flops(engine, tokens, tokens / rows, scored, trains, checkpointing)

    flops = 2 * count(next(iter(engines.values())))
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
    absent = [] if args.has_critic else ["critic_loss", "explained_variance"]
    absent += [] if args.gold_fn else ["gold", "eval_gold"]
    return [name for name in COLUMNS if name not in absent]


def held_out_prompts(held_out, samples=1):
    """Returns this rank's share of the held-out rows, each `samples` times.

    Every rank has the same number: fillers complete the shares.
    """
    count = ranks.data_parallel_size()
    order = [*range(len(held_out)), *[-1] * (-len(held_out) % count)]
    dealt = common.Rows(held_out)
    mine = order[ranks.data_parallel_rank() :: count]
    each = enumerate(mine)
    return [{**dealt[i], "sample": n, "group": g} for g, i in each for n in range(samples)]


def note(batch):
    """Adds the metrics of each response to its dict."""
    for name, values in per_response(batch).items():
        for response, value in zip(batch.responses, values.tolist()):
            response[name] = value


def evaluate(run, step, answered, actor, average):
    """Returns the metrics of an evaluation: eval_..., and eval_ema_... of --eval_ema.

    answered: ppo.scored_rollout. average: ema.Ema.
    """
    metrics = summary(run, step, graded(run, answered))
    if run.args.eval_ema:
        with average.in_place_of(actor):
            metrics |= means_of(graded(run, answered), "eval_ema")
    return metrics


def graded(run, answered):
    """Returns all ranks' graded responses to the held-out prompts: dicts with text, reward, kl, ...

    They are sampled with the same random numbers each time: those of step 0.
    """
    size, responses = run.args.per_device_eval_batch_size, []
    for batch in answered(held_out_prompts(run.held_out), 0, size, size):
        note(batch)
        responses += batch.responses
    return gathered(responses)


def gathered(responses):
    """Returns all ranks' responses, in the order of their rows."""
    return sorted(ranks.each_once(responses), key=lambda row: (row["row"], row["sample"]))


def summary(run, step, responses):
    """Writes the responses of an evaluation down, shows two, and returns their means: eval_..."""
    names = [name for name in EVALUATED if name in responses[0]]
    lines = []
    for response in responses:
        line = {name: response[name] for name in ("row", "sample", "prompt", *names)}
        lines.append({"step": step, **line, "response": response["text"]})
    run.samples(lines)
    for response in responses[:2]:
        numbers = [f"{name} {response[name]:.4g}" for name in names]
        logs.show_sample(response, response["text"], f"  {', '.join(numbers)}")
    return means_of(responses, "eval")


def means_of(responses, prefix):
    """Returns {prefix_reward: mean, ...} of graded responses."""
    names = [name for name in EVALUATED if name in responses[0]]
    return {f"{prefix}_{n}": sum(r[n] for r in responses) / len(responses) for n in names}
