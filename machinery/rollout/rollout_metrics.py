"""What a rollout and an evaluation of step 3 were like: their metrics, samples and FLOPs."""

import json

import torch

import common
from machinery.base import ranks
from machinery.engine import throughput
from machinery.run import logs

COLUMNS = """step reward gold kl response_length eos_rate actor_loss critic_loss
             explained_variance entropy ratio_max eval_reward eval_gold seconds""".split()
EVALUATED = ("reward", "gold", "kl", "response_length")
STORED = ("old_logprobs", "ref_logprobs", "entropy", "scores", "old_values")


def per_response(batch):
    """Returns {name: (B,)} of a micro-batch that is scored. A new metric is a line here.

    batch.responses holds the texts and the data's other columns.
    """
    metrics = {"reward": batch.scores.sum(-1), "kl": batch.kl.sum(-1)}
    metrics["kl_k3"] = batch.kl_k3.sum(-1)
    metrics["response_length"] = batch.response_mask.sum(-1).long()
    metrics["eos_rate"] = batch.ended
    if batch.gold is not None:
        metrics["gold"] = batch.gold.sum(-1)
    return metrics


def of_all_ranks(micro_batches):
    """Returns the metrics of a rollout: means over the responses, and over their tokens."""
    columns = {}
    for batch in micro_batches:
        for name, values in per_response(batch).items():
            columns.setdefault(name, []).append(values.double())
    weight = torch.cat([batch.row_weight for batch in micro_batches])  # (N,) 0 for a filler row
    sums = [(torch.cat(values) * weight).sum() for values in columns.values()]
    count, *sums = ranks.all_sum(weight.sum(), *sums).tolist()
    means = {name: total / count for name, total in zip(columns, sums)}
    errors = moments(micro_batches, "raw_advantages")[1]  # A = returns - values: the critic's error
    entropy = moments(micro_batches, "entropy")[0]
    means.update(entropy=entropy, advantage_std=errors**0.5)
    if micro_batches[0].returns is not None:  # 1: foreseen; 0: no better than a constant
        variance = moments(micro_batches, "returns")[1]
        means["explained_variance"] = 1 - errors / max(variance, 1e-12)
    return means


def moments(micro_batches, name):
    """Returns mean and variance of a tensor (B, R) over the response tokens of all ranks."""
    parts = [getattr(batch, name)[batch.response_mask > 0] for batch in micro_batches]
    x = torch.cat(parts).double()  # (M,)
    count, total, squares = ranks.all_sum(len(x), x.sum(), (x**2).sum()).tolist()
    mean = total / count
    return mean, max(squares / count - mean**2, 0.0)


def log(run, kl_coef, means, times, passes, reward_models, micro_batches):
    """Logs a step of PPO, and returns its metrics: those of the update and of the rollout.

    times: when the step began, and when rollout, scores and updates were done. Each pass takes a
    forward to store, unless it is kept, and another in every epoch, with a backward if it trains.
    The rollout and the reference are a forward of the actor each. PTX's texts are not counted, and
    a prompt that responses share counts for each of them.
    """
    args = run.args
    metrics = {"kl_coef": kl_coef, **means.of_all_ranks(), **of_all_ranks(micro_batches)}
    for name, begin, end in zip(("generate", "score", "train"), times, times[1:]):
        metrics[f"{name}_seconds"] = end - begin
    if not args.has_critic:
        del metrics["critic_loss"]
    tokens = sum((batch.mask.sum(-1) * batch.row_weight).sum() for batch in micro_batches)
    rows = sum(batch.row_weight.sum() for batch in micro_batches)
    scored = sum(batch.response_mask.sum() for batch in micro_batches)
    tokens, rows, scored = ranks.all_sum(tokens, rows, scored).tolist()

    def count(engine, trains=False):
        checkpointing = args.gradient_checkpointing
        return throughput.count_flops(engine, tokens, tokens / rows, scored, trains, checkpointing)

    flops = 2 * count(passes[0].engine)
    epochs = means.updates * args.gradient_accumulation_steps / len(micro_batches)
    for each in passes:
        flops += epochs * count(each.engine, each.trains)
        flops += 0 if each.keeps else count(each.engine)
    flops += sum(map(count, reward_models))
    if run.step == 1:
        warn_of_equal_scores(micro_batches)
    run.log(metrics, tokens, flops)
    return metrics


def warn_of_equal_scores(micro_batches):
    """Warns if all responses have the same score, as with a function that does not fit them."""
    scores = [batch.scores.sum(-1)[batch.row_weight > 0] for batch in micro_batches]
    scores = ranks.all_gather_objects(torch.cat(scores).tolist())
    if len(set(scores)) == 1 and len(scores) > 1:
        ranks.say(
            f"warning: all {len(scores)} scores of the first step are {scores[0]:g}: there is "
            "nothing to learn from them. Does the judge fit the responses?"
        )


def stop_unless_finite(run, micro_batches):
    """Stops the run if anything that was stored for the update is NaN or infinite."""
    sums = {}
    for name in STORED:
        if getattr(micro_batches[0], name) is not None:
            sums[name] = sum(getattr(batch, name).sum() for batch in micro_batches)
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
    """Returns this rank's share of the held-out rows, as many on every rank, `samples` of each."""
    count = ranks.data_parallel_size()
    order = [*range(len(held_out)), *[-1] * (-len(held_out) % count)]
    dealt = common.Rows(held_out)
    mine = order[ranks.data_parallel_rank() :: count]
    return [{**dealt[i], "sample": sample} for i in mine for sample in range(samples)]


def note(batch):
    """Adds the metrics of each response to its dict."""
    for name, values in per_response(batch).items():
        for response, value in zip(batch.responses, values.tolist()):
            response[name] = value


def evaluate(run, step, parts, models, actor, average, text_mix):
    """Returns the metrics of an evaluation: eval_..., eval_ema_... and eval_text_loss.

    parts: the functions of ppo.py that answer, lay out and score, and others. models: what `score`
    takes. average: ema.Ema.
    """
    metrics = summary(run, step, answered(run, parts, models, actor))
    if run.args.eval_ema:
        with average.in_place_of(actor):
            metrics |= means_of(firsts(answered(run, parts, models, actor)), "eval_ema")
    return metrics | text_mix.evaluate(actor)


def answered(run, parts, models, actor):
    """Returns all ranks' graded responses to the held-out prompts: dicts with text, reward, kl, ...

    They are sampled with the same random numbers each time: those of step 0.
    """
    args, tokenizer, size = run.args, run.tokenizer, run.args.per_device_eval_batch_size
    roll_out, make_micro_batches, score, *_ = parts
    prompts = held_out_prompts(run.held_out, args.eval_best_of)
    responses = roll_out(args, actor, tokenizer, prompts, 0, size)
    responses.sort(key=lambda response: len(response["response_ids"]))
    for batch in make_micro_batches(tokenizer, responses, size):
        score(batch, *models)
        note(batch)
    return gathered(responses)


def gathered(responses):
    """Returns all ranks' responses, in the order of their rows."""
    return sorted(ranks.each_once(responses), key=lambda row: (row["row"], row["sample"]))


def summary(run, step, responses):
    """Writes the responses of an evaluation down, shows two, and returns their means: eval_...

    Those are of the first response to each prompt; with --eval_best_of the means of the responses
    of the highest reward come with it, as eval_best_of_...
    """
    names = [name for name in EVALUATED if name in responses[0]]
    lines = []
    for response in responses:
        line = {"step": step, "row": response["row"], "sample": response["sample"]}
        line |= {"prompt": response["prompt"], "response": response["text"]}
        lines.append({**line, **{name: response[name] for name in names}})
    run.samples(lines)
    for response in responses[:2]:
        numbers = ", ".join(
            f"{name} {response[name]:.4g}" for name in names if name != "response_length"
        )
        logs.show_sample(response, response["text"], f"  {numbers}")
    first = firsts(responses)
    metrics = means_of(first, "eval")
    if len(first) < len(responses):
        ascending = sorted(responses, key=lambda response: response["reward"])
        best = {response["row"]: response for response in ascending}
        metrics |= means_of([*best.values()], "eval_best_of")
    return metrics


def firsts(responses):
    """Returns the first response to each prompt."""
    return [response for response in responses if not response.get("sample")]


def means_of(responses, prefix):
    """Returns {prefix_reward: mean, ...} of graded responses."""
    names = [name for name in EVALUATED if name in responses[0]]
    return {f"{prefix}_{n}": sum(r[n] for r in responses) / len(responses) for n in names}
