"""Step 3 answers held-out prompts and scores them: samples.jsonl, and what the log says of them."""

from statistics import fmean

from helpers import metrics
from machinery.base import ranks, statistics
from machinery.data import batching
from machinery.run.run import append, show_sample


def requests(held_out, samples=1):
    """Returns this rank's share of the held-out rows as requests: each row `samples` times.

    Every rank has the same number: fillers complete the shares.
    """
    count = ranks.data_parallel_size()
    order = [*range(len(held_out)), *[-1] * (-len(held_out) % count)]
    dealt = batching.Rows(held_out)
    mine = order[ranks.data_parallel_rank() :: count]
    each = enumerate(mine)
    return [{**dealt[i], "sample": n, "group": g} for g, i in each for n in range(samples)]


def report(run, step, responses, samples=1):
    """Writes the scored responses of all ranks down, shows two, and returns their means: eval_...

    responses: from `gathered`. samples: how many there are to each prompt.
    """
    append(run.args, "samples.jsonl", [line_of(each, step=step) for each in responses])
    for response in responses[::samples][:2]:
        numbers = [f"{name} {response[name]:.4g}" for name in reported(response)]
        show_sample(response, response["text"], f"  {', '.join(numbers)}")
    return means_of(responses, samples)


def line_of(response, **about):
    """Returns what samples.jsonl and tokens.jsonl say of a scored response, after `about`."""
    names = ("row", "sample", "prompt", "ended", *reported(response))
    return {**about, **{name: response[name] for name in names}, "response": response["text"]}


def gathered(micro_batches):
    """Returns all ranks' responses, in the order of their rows, each with its metrics.

    Refuses functions whose parts are others for other responses, also on another rank.
    """
    responses = []
    for batch in micro_batches:
        for name, values in metrics.per_response(batch).items():
            for response, value in zip(batch.responses, values.tolist()):
                response[name] = value
        responses += batch.responses
    responses = sorted(ranks.each_once(responses), key=lambda row: (row["row"], row["sample"]))
    metrics.refuse_unlike_parts(tuple(sorted(reported(row))) for row in responses)
    return responses


def reported(response):
    """Returns the names of the metrics in a scored response that an evaluation reports.

    Those that go on after reward_ and gold_ are of several judges, or of a function's dict.
    """
    others = ("kl", "response_length")
    return [name for name in response if name.startswith(("reward", "gold")) or name in others]


def means_of(responses, samples):
    """Returns {eval_reward: mean, ...} of scored responses, `samples` to each prompt.

    If these are several, also the share of prompts that one of k solves, pass_at_k with k = 1, 2,
    4, ..., and its 95 % interval over the prompts, pass_at_k_ci. Where the rewards are not all 0 or
    1 it is the largest reward of k: best_of_k.
    """
    means = {name: fmean(each[name] for each in responses) for name in reported(responses[0])}
    rewards = [response.get("reward") for response in responses]
    what = "pass_at" if {*rewards} <= {0.0, 1.0} else "best_of"
    for k in [2**i for i in range(samples.bit_length())] if samples > 1 else ():
        starts = range(0, len(rewards), samples)
        values = [statistics.best_of(rewards[i : i + samples], k) for i in starts]
        means[f"{what}_{k}"] = fmean(values)
        means[f"{what}_{k}_ci"] = statistics.mean_interval(values)
    return {f"eval_{name}": value for name, value in means.items()}
