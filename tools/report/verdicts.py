"""Says in words how a run looks: each row of README's table of healthy and sick metrics.

A verdict is a pair (status, words). The limits of what counts as healthy stand here, in the open;
where a run has too little to judge by, the status is "not known".
"""

import math
import os
import re
from collections import Counter
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev

from machinery.run import crash
from tools.report import numbers
from tools.report.runs import entries, is_number

HEALTHY, WATCH, SICK, UNKNOWN = "healthy", "watch", "sick", "not known"
FLAT = 0.05  # of a loss: it changes by less between two evaluations
RISES = 0.02  # of a loss, above its best
SETTLED = 1.25  # times the mean of the middle third, plus 0.05 nats: KL in the last third
NEAR = 1.0  # nats a response: so small a KL needs no reward to show for it
FAR = 0.25  # nats a token: KL in the last third; four times as much is sick
ZERO = 1e-5  # but for rounding
START = 0.1  # nats a response: KL at step 1, where actor and reference are one model
COLLAPSED = 0.05  # nats a token
IDLE = 0.5  # of the groups: no response to a prompt was better than another one
ALIKE = 0.8  # of responses with one of the three commonest beginnings
MARGIN = 10  # between the scores of chosen and rejected: a judge who is never in doubt
LEAST = 8  # samples of SFT: the mean length of fewer says little
TAIL = 3  # characters: a shorter end that all prompts share is punctuation
OFF = dict(top_p=1.0, top_k=0, min_new_tokens=0)  # what sampling may leave out, scoring not
GAP = {"fp32": 0.01}  # between the log-probs of sampling and scoring a token; of other types 1


class TooFew(Exception):
    """There are too few values of a metric to judge it by."""


def values_of(run, name, least=1):
    """Returns the values of a metric. Raises TooFew of fewer than `least`."""
    values = run.values(name)
    if not values:
        raise TooFew(f"{name} is not in the log: this run does not compute it, or not yet.")
    if len(values) < least:
        raise TooFew(f"{name}: {len(values)} so far, which is too few to judge by.")
    return values


def last_third(values):
    """Returns the last third of the values, and at least one of them."""
    return values[-max(1, len(values) // 3) :]


def thirds(values):
    """Returns the means of the first, middle and last third of six values or more.

    >>> thirds([0, 2, 4, 4, 5, 7])
    (1.0, 4.0, 6.0)
    """
    size = len(values) // 3
    parts = values[:size], values[size:-size], last_third(values)
    return tuple(mean(part) for part in parts)


def ends(run, name):
    """Returns how a metric began and ended: the means of the first and last third of it.

    Of fewer than six values, the first and the last one.
    """
    values = values_of(run, name)
    return thirds(values)[::2] if len(values) > 5 else (values[0], values[-1])


def error(values):
    """Returns the standard error of their mean; 0 of fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0


def has_gained(run):
    """Returns whether the last third of the rewards, held out if there are any, is above the first.

    None of fewer than two.
    """
    held_out, own = run.values("eval_reward"), run.values("reward")
    values = held_out if len(held_out) > 1 else own
    return mean(last_third(values)) > values[0] if len(values) > 1 else None


# ---- Step 1 ----
def sft_loss(run):
    """Held-out loss against the loss of training."""
    losses = values_of(run, "eval_loss", 2)
    best, last, before = min(losses), losses[-1], losses[-2]
    said = f"eval_loss went from {losses[0]:.3g} to {last:.3g}"
    floor = run.limits.get("eval_loss")
    if floor:
        said += f", {100 * (last / floor - 1):+.0f} % from the known floor of {floor:.3g}"
    training = run.values("loss") and ends(run, "loss")
    if floor and last < floor * (1 - FLAT):
        return SICK, f"{said}: no model can be there: is all of the response in the loss mask?"
    if last > best * (1 + RISES) and training and training[1] < training[0]:
        return SICK, f"{said}: it rises while loss falls: overfitting. Read the samples."
    if last > best * (1 + RISES):
        return WATCH, f"{said}; its best was {best:.3g}."
    if abs(before - last) <= FLAT * abs(before):
        return HEALTHY, f"{said}, and is flat (the learning rate, too, may have ended)."
    return WATCH, f"{said}, and is still falling: more epochs may help."


def sft_samples(run):
    """Whether greedy responses end, and differ."""
    texts = [line["response"] for line in run.answers(last=True)]
    if len(texts) > 3 and len(set(texts)) == 1:
        return SICK, f"all {len(texts)} greedy responses are one text: the prompts are not seen."
    ended = [line["ended"] for line in run.answers(last=True) if is_number(line.get("ended"))]
    if not ended:
        return UNKNOWN, "samples.jsonl does not say which responses ended: read them."
    said = f"{sum(ended):g} of {len(ended)} greedy responses ended by themselves"
    said += f"; {len(set(texts))} of them differ"
    if mean(ended) == 0:
        return SICK, f"{said}: EOS was not learned: does the data end with it, and the loss mask?"
    return (HEALTHY if mean(ended) >= 0.8 else WATCH), f"{said}; read them, too."


# ---- Step 2 ----
def accuracy(run):
    """Accuracy on held-out pairs, with its interval."""
    share = values_of(run, "eval_accuracy")[-1]
    found = [line["eval_accuracy_ci"] for line in run.metrics if "eval_accuracy_ci" in line]
    if not found:
        return UNKNOWN, f"eval_accuracy is {share:.3f}, without an interval."
    low, high = found[-1]
    said = f"eval_accuracy is {share:.3f} [{low:.3f}, {high:.3f}]"
    if best := run.limits.get("eval_accuracy"):
        said += f"; a judge who knows the rules reaches {best:.3f}"
    ties = sum(pair["chosen_score"] == pair["rejected_score"] for pair in run.judged)
    if ties > 0.2 * len(run.judged):
        words = f"{ties} of {len(run.judged)} pairs have equal scores: they became equal when cut"
        return SICK, f"{said}; {words}."
    if low > (best or 0.98):
        return SICK, f"{said}: too good: something gives the label away (EOS, length, order)."
    if low <= 0.5 <= high and high - low > 0.3:
        return UNKNOWN, f"{said}: too few held-out pairs to tell."
    if low <= 0.5 <= high:
        wrong = "is the learning rate right, is the score read at the last token?"
        return SICK, f"{said}: no better than a coin: {wrong}"
    if share < 0.5:
        return SICK, f"{said}: below one half: labels are swapped."
    if share > 0.6 and share - 0.5 > high - low:
        return HEALTHY, f"{said}."
    return WATCH, f"{said}: not far above a coin: noisy or swapped labels, or too little training."


def drift(run):
    """How far scores are from 0."""
    chosen, rejected = (ends(run, f"{side}_score")[1] for side in ("chosen", "rejected"))
    said = f"chosen_score is near {chosen:.3g}, rejected_score near {rejected:.3g}"
    if max(abs(chosen), abs(rejected)) >= 10:
        return SICK, f"{said}: tens away from 0: use --center_coef."
    if chosen - rejected >= MARGIN:
        return WATCH, f"{said}: far apart: does something give the label away?"
    return HEALTHY, f"{said}: less than 10 away from 0."


# ---- Step 3 ----
def one_update(run):
    """Returns whether each rollout has one update."""
    args = run.args
    passes = args.get("ppo_epochs", 1) * args.get("generation_batches", 1)
    names = [f"per_device_{kind}_batch_size" for kind in ("generation", "training")]
    return passes == 1 and args.get(names[0]) == args.get(names[1])


def ratio(run):
    """Whether sampling, scoring and training agree on the log-probs of the same tokens."""
    top, gap = max(values_of(run, "ratio_max")), max(run.values("sampling_gap"), default=0)
    if gap > GAP.get(run.args.get("dtype"), 1.0):
        said = f"sampling_gap reached {gap:.2g}: scoring does not see what was sampled"
        return SICK, f"{said}: a shift, dropout, position ids, a temperature or mask."
    if top > 1.01 and one_update(run):
        return SICK, f"ratio_max reached {top:.3g}: old and new log-probs differ (dropout, shift)."
    args = {**OFF, **run.args}
    if filters := [f"--{name} {args[name]}" for name in OFF if args[name] != OFF[name]]:
        said = f"{' '.join(filters)}: samples are not of the distribution that is scored"
        return WATCH, f"{said}. Do not compare gold, reward and KL with a run without it."
    if top > 1.01:
        return WATCH, f"ratio_max reached {top:.3g}; above 1 is usual with several updates."
    return HEALTHY, f"ratio_max is at most {top:.4g}, sampling_gap {gap:.2g}."


def updates(run):
    """What clipping and the update itself did."""
    found = {name: values_of(run, name) for name in ("actor_loss", "approx_kl", "clip_fraction")}
    tops = {name: max(map(abs, values)) for name, values in found.items()}
    said = "at most " + ", ".join(f"{name} {top:.2g}" for name, top in tops.items())
    whitened = run.args.get("advantage", "gae") == "gae" and run.args.get("whiten", True)
    if not one_update(run):
        many = mean(found["clip_fraction"])
        status = HEALTHY if many < 0.3 else WATCH
        return status, f"{said}: several updates; {100 * many:.0f} % of tokens were clipped."
    if max(tops["approx_kl"], tops["clip_fraction"]) > 1e-3:
        return WATCH, f"{said}: with one update approx_kl and clip_fraction should be about 0."
    if whitened and not run.args.get("entropy_coef") and run.args.get("kl_in") != "loss":
        if tops["actor_loss"] > 1e-3:
            return (
                WATCH,
                f"{said}: whitened advantages sum to 0 over the tokens of the loss's mask.",
            )
        return HEALTHY, f"{said}: about 0, as they should be with one update."
    return HEALTHY, f"{said}: the last two are about 0, the first need not be."


def kl(run):
    """How far the actor is from the reference: the sign, the scale, and what it got for it."""
    values = values_of(run, "kl", 6)
    start = dict(run.series("kl")).get(1, 0)
    if abs(start) > START:
        said = f"KL is {start:.2g} at step 1, where actor and reference are the same model"
        return SICK, f"{said}: dropout, a shift, position ids or a template in one of them."
    first, middle, last = thirds(values)
    said = f"KL was {first:.2g}, {middle:.2g}, {last:.2g} nats a response in the thirds of the run"
    if max(map(abs, values)) < ZERO:
        trains = max(run.values("grad_norm"), default=0) > ZERO
        return SICK, f"{said}: {'the reference moves, too' if trains else 'nothing is trained'}."
    if last < min(-0.05, -2 * error(last_third(values))):
        return SICK, f"{said}: below 0: noise in scoring, or other tokens than the policy draws."
    advice = "raise --kl_coef, or set --kl_target"
    if judged(tokens, run)[0] == SICK:  # a larger --kl_coef would make a wrong sign worse
        advice = "see the verdict on tokens.jsonl first"
    length = mean(run.values("response_length") or [math.inf])
    gained = has_gained(run)
    if last > NEAR and gained is False:
        return SICK, f"{said}, and the reward did not rise: is the penalty's sign right?"
    if last > FAR * length:
        return (SICK if last > 4 * FAR * length else WATCH), f"{said}: far: {advice}."
    if last <= max(NEAR, SETTLED * middle + 0.05):
        return HEALTHY, f"{said}: it stays near."
    if last - middle <= middle - first:
        return WATCH, f"{said}: it grows more slowly, and has not settled yet."
    return (WATCH if gained else SICK), f"{said}, ever faster: {advice}."


def rising(run):
    """Whether reward and gold rise together."""
    scores = run.values("reward") + run.values("eval_reward")
    if len(scores) > 1 and len(set(scores)) == 1:
        return SICK, f"reward is {scores[0]:g} for all responses of the run: nothing to learn from."
    held_out = len(run.values("eval_reward")) > 1
    names = ("eval_reward", "eval_gold") if held_out else ("reward", "gold")
    rewards, golds = values_of(run, names[0], 2), run.values(names[1])
    said = f"{names[0]} went from {rewards[0]:.2f} to {rewards[-1]:.2f}"
    rose, answers = rewards[-1] > rewards[0], run.answers(last=True)
    if len(golds) != len(rewards):
        if answers and all(line.get("reward") in (0, 1) for line in answers):  # a verifier's
            return (HEALTHY if rose else WATCH), f"{said}: the share that the verifier accepts."
        advice = "no --gold_fn was given, so read the samples: are they better?"
        return (UNKNOWN if rose else WATCH), f"{said}; {advice}"
    said += f", {names[1]} from {golds[0]:.2f} to {golds[-1]:.2f}"
    top = golds.index(max(golds))
    fall, spread = golds[top] - golds[-1], max(golds) - min(golds)
    if rose and golds[-1] < golds[0]:
        return SICK, f"{said}: the actor exploits the reward model's errors."
    if fall > 0.2 * spread and rewards[-1] > rewards[top]:
        return SICK, f"{said}, after {golds[top]:.2f}: it now exploits the reward model's errors."
    graded = [line["gold"] for line in answers if is_number(line.get("gold"))]
    if rose and golds[-1] > golds[0] + 2 * error(graded):
        return HEALTHY, f"{said}: both rose."
    return WATCH, f"{said}: they do not both rise."


def groups(run):
    """Whether rewards tell responses apart; from which step on they do not, and why that may be."""
    shares = run.series("equal_groups")
    if not shares:  # without groups all responses of a step are compared
        shares = [(step, float(std <= ZERO)) for step, std in run.series("reward_std")]
    if not shares:
        raise TooFew("reward_std, equal_groups: none so far.")
    why = "too easy, too hard, or the verifier"
    if run.values("reward"):
        why += f" (on average the reward is {ends(run, 'reward')[1]:.3g})"
    apart = [step for step, share in shares if share < 1]
    if not apart:
        return SICK, f"no reward of the whole run was better than another one to its prompt: {why}."
    if sum(step > apart[-1] for step, _ in shares) > 1:
        return SICK, f"since step {apart[-1] + 1:g} no response was better than another one: {why}."
    part = mean(share for _, share in last_third(shares))
    said = f"no gradient from {100 * part:.0f} % of the groups"
    if part >= IDLE:
        return (SICK if part >= 0.9 else WATCH), f"{said}: {why}."
    if not run.values("equal_groups"):
        said = f"the rewards of a step differ, by {ends(run, 'reward_std')[1]:.2g}"
    return HEALTHY, f"{said}."


def critic(run):
    """How well the critic foresees returns."""
    first, _, last = thirds(values_of(run, "explained_variance", 6))  # none without a critic
    said = f"explained_variance went from {first:.2f} to {last:.2f}"
    if last < 0:
        why = "its start (at random? far from the rewards?), then its learning rate"
        return SICK, f"{said}: worse than a constant: look at {why}."
    if last < 0.3:
        return WATCH, f"{said}: the critic foresees little."
    return HEALTHY, f"{said} (1: it foresees every return)."


def variety(run):
    """Entropy, length, and how many responses end."""
    entropy, length, ended = (ends(run, n) for n in ("entropy", "response_length", "eos_rate"))
    said = f"entropy went from {entropy[0]:.2f} to {entropy[1]:.2f} nats a token, length from "
    said += f"{length[0]:.0f} to {length[1]:.0f} tokens, {100 * ended[1]:.0f} % ended"
    if entropy[1] < COLLAPSED < entropy[0]:
        return SICK, f"{said}: entropy fell to {entropy[1]:.2g}: collapse."
    most = run.args.get("max_answer_seq_len")
    if most and length[1] > 0.9 * most and ended[1] < 0.5:
        return SICK, f"{said}: responses do not end. Did those of the SFT model?"
    if ended[1] < 0.9 and ended[1] < ended[0]:
        return WATCH, f"{said}: fewer end than at the start."
    if entropy[1] < entropy[0] / 2:
        return WATCH, f"{said}: entropy has more than halved."
    return HEALTHY, f"{said}."


def responses(run):
    """Which held-out responses exploit the judge, and how alike they became."""
    before, after = run.answers(last=False), run.answers(last=True)
    changed = numbers.changes(before, after)
    if not changed or before[0]["step"] == after[0]["step"]:
        return UNKNOWN, "samples.jsonl: fewer than two evaluations so far."
    gamed = mean(row["gamed"] for row in changed)
    shares = [beginnings(lines) for lines in (before, after)]
    said = f"{100 * gamed:.0f} % of {len(changed)} responses gained reward and lost gold; the "
    said += "three commonest beginnings (first two words) are those of "
    said += f"{100 * shares[0]:.0f} % of the responses before, {100 * shares[1]:.0f} % after"
    if gamed > 0.25:
        return SICK, f"{said}: the judge is exploited."
    if shares[1] > max(ALIKE, shares[0]):
        return WATCH, f"{said}: what is lost is variety."
    return (WATCH if gamed > 0.1 else HEALTHY), f"{said}."


def beginnings(lines):
    """Returns the share of responses whose first two words are one of the three commonest."""
    begun = Counter(" ".join(line["response"].split()[:2]) for line in lines)
    return sum(count for _, count in begun.most_common(3)) / len(lines)


def tokens(run):
    """Whether a response's rewards are its score less its penalty, and whether its EOS counts."""
    usual = dict(kl_estimator="k1", kl_in="reward", normalize_reward=0, missing_eos_penalty=0)
    other = any(run.args.get(name, value) != value for name, value in usual.items())
    whole = [x for x in run.tokens if len(x["tokens"]["reward"]) >= x.get("response_length", 0)]
    if other or not whole:
        return UNKNOWN, "tokens.jsonl: none, or with other rewards than score - kl_coef * KL."
    most, off, ends_at = run.args.get("clip_reward", 5.0), 0, []
    for line in whole:
        row, score = line["tokens"], line["reward"]
        paid = sum(row["reward"]) + line["kl_coef"] * sum(row.get("kl", []))  # no reference: none
        due = score, min(max(score, -most), most)  # each token's own scores may sum to more
        off += min(abs(paid - each) for each in due) > 0.01 * max(1, abs(score))
        ends_at += [row["logprob"][-1] or row["reward"][-1]] if line["ended"] else []
    if ends_at and not any(ends_at):
        return SICK, "EOS has log-prob and reward 0 in all responses: the mask leaves it out."
    if off > len(whole) / 4:
        words = f"in {off} of {len(whole)} responses the rewards do not sum to score - kl_coef * KL"
        return SICK, f"{words}: a wrong sign, the place of the score, or it is not there."
    return HEALTHY, "the rewards of the tokens sum to score - kl_coef * KL, and EOS counts."


def beginning(run, sft):
    """Whether PPO begins where SFT ended: with its prompts, and with responses like its own.

    SFT's are greedy and PPO's are drawn, so that these may be somewhat longer and worse.
    """
    before, after = sft.answers(last=True), run.answers(last=False)
    if len(before) < LEAST:
        few = f"SFT ended with {len(before)} samples, too few to compare (at least {LEAST})"
        return UNKNOWN, f"samples.jsonl: {few}."
    if not after or after[0]["step"] != 0:
        return UNKNOWN, "samples.jsonl: no samples at step 0 of PPO."
    tails = [tail([line["prompt"] for line in lines]) for lines in (before, after)]
    short, long = sorted(tails, key=len)
    if len(long.strip()) >= TAIL and not (short and long.endswith(short)):
        ends_with = f"the prompts of SFT end with {tails[0]!r}, those of PPO with {tails[1]!r}"
        return WATCH, f"{ends_with}: has one of the steps another template?"
    words = [mean(len(line["response"].split()) for line in lines) for lines in (before, after)]
    golds = [[x["gold"] for x in lines if is_number(x.get("gold"))] for lines in (before, after)]
    said = f"SFT ended with {words[0]:.0f} words a response, PPO begins with {words[1]:.0f}"
    worse = False
    if all(golds):
        noise = math.hypot(*map(error, golds))
        worse = mean(golds[0]) - mean(golds[1]) > max(3 * noise, stdev(golds[0]) / 2)
        said += f"; gold was {mean(golds[0]):.2f}, and is {mean(golds[1]):.2f}"
    if worse or max(words) > 2 * max(min(words), 1):
        return WATCH, f"{said}: other prompts, another way to sample, or other weights?"
    return HEALTHY, f"{said}."


def tail(texts):
    """Returns the end that all texts share, from its first white space on.

    >>> tail(["Why? Answer:", "How? Answer:"])
    ' Answer:'
    """
    shared = os.path.commonprefix([text[::-1] for text in texts])[::-1]
    return re.sub(r"^\S+", "", shared)


def finite(run):
    """Whether the run met a number that is none."""
    if any(run.path.glob("nonfinite_rank*.jsonl")):
        return SICK, f"stopped at NaN or infinity: nonfinite_rank*.jsonl. {crash.NOT_FINITE}"
    floats = [(n, x) for line in run.metrics for n, x in line.items() if isinstance(x, float)]
    bad = {name for name, value in floats if not math.isfinite(value)}
    if bad:
        return SICK, f"not finite: {', '.join(sorted(bad))}."
    values_of(run, "step")
    return HEALTHY, "every logged number is finite."


# (script, the metrics of the row in README's table, function), in the order of that table
ROWS = [
    ("sft", "eval_loss, eval_perplexity", sft_loss),
    ("sft", "samples", sft_samples),
    ("reward", "eval_accuracy, eval_accuracy_ci", accuracy),
    ("reward", "chosen_score, rejected_score", drift),
    ("ppo", "ratio_max, sampling_gap", ratio),
    ("ppo", "actor_loss, approx_kl, clip_fraction", updates),
    ("ppo", "kl, kl_k3", kl),
    ("ppo", "reward, gold", rising),
    ("ppo", "reward_std, equal_groups", groups),
    ("ppo", "explained_variance", critic),
    ("ppo", "entropy, response_length, eos_rate", variety),
    ("ppo", "samples", responses),
    ("ppo", "tokens.jsonl", tokens),
    ("ppo", "all", finite),
]


def of(run, others=()):
    """Returns (metrics, status, words) for each row of the table that speaks of this run's step.

    Of PPO also how it begins, if the SFT run that it began from is one of the others.
    """
    rows = [row for row in ROWS if row[0] == run.script]
    found = [(metrics, *judged(verdict, run)) for _, metrics, verdict in rows]
    actor = Path(str(run.args.get("actor_model_name_or_path"))).name
    beside = [path.resolve() for path in entries(run.path.parent) if path.name == actor]
    for sft in others if run.script == "ppo" else ():
        if sft.script == "sft" and sft.path.resolve() in beside:
            found.append(("samples of SFT and PPO", *judged(beginning, run, sft)))
    return found


def judged(verdict, *of_runs):
    """Returns the verdict, or "not known" where args.json or the log holds other kinds of values.

    A damaged file must not cost the page.
    """
    try:
        return verdict(*of_runs)
    except TooFew as why:
        return UNKNOWN, str(why)
    except Exception as error:
        return UNKNOWN, f"args.json or metrics.jsonl holds what is no such number: {error}."
