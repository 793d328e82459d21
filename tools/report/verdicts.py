"""Says in words how a run looks: each row of README's table of healthy and sick metrics.

A verdict is a pair (status, words). The limits of what counts as healthy stand here, in the open;
where a run has too little to judge by, the status is "not known".
"""

import math
from statistics import fmean as mean

from tools.report.runs import is_number

HEALTHY, WATCH, SICK, UNKNOWN = "healthy", "watch", "sick", "not known"
FLAT = 0.05  # of a loss: it changes by less between two evaluations
RISES = 0.02  # of a loss, above its best
SETTLED = 1.25  # times the mean of the middle third, plus 0.05 nats: KL in the last third
COLLAPSED = 0.05  # nats a token
ZERO = 1e-5  # but for rounding
IDLE = 0.5  # of the groups: no response to a prompt was better than another one


def thirds(values):
    """Returns the means of the first, middle and last third; None of fewer than six values.

    >>> thirds([0, 2, 4, 4, 5, 7])
    (1.0, 4.0, 6.0)
    """
    size = len(values) // 3
    if size < 2:
        return None
    parts = values[:size], values[size:-size], values[-size:]
    return tuple(mean(part) for part in parts)


def ends(run, name):
    """Returns how a metric began and ended: the means of the first and last third of it.

    Of fewer than six values, the first and the last one; None without any.
    """
    values = run.values(name)
    if not values:
        return None
    three = thirds(values)
    return (three[0], three[2]) if three else (values[0], values[-1])


# ---- Step 1 ----
def sft_loss(run):
    """Held-out loss against the loss of training."""
    losses = run.values("eval_loss")
    if len(losses) < 2:
        return UNKNOWN, "eval_loss: there is only one evaluation so far."
    best, last, before = min(losses), losses[-1], losses[-2]
    said = f"eval_loss went from {losses[0]:.3g} to {last:.3g}"
    floor = run.limits.get("eval_loss")
    if floor:
        said += f", {100 * (last / floor - 1):.0f} % above the known floor of {floor:.3g}"
    training = ends(run, "loss")
    if last > best * (1 + RISES) and training and training[1] < training[0]:
        return SICK, f"{said}: it rises while loss falls: overfitting. Read the samples."
    if last > best * (1 + RISES):
        return WATCH, f"{said}; its best was {best:.3g}."
    if abs(before - last) <= FLAT * abs(before):
        return HEALTHY, f"{said}, and is flat."
    return WATCH, f"{said}, and is still falling: more epochs may help."


def sft_samples(run):
    """Whether greedy responses end."""
    ended = [line["ended"] for line in run.answers(last=True) if is_number(line.get("ended"))]
    if not ended:
        return UNKNOWN, "samples.jsonl does not say which responses ended: read them."
    said = f"{sum(ended):g} of {len(ended)} greedy responses ended by themselves"
    if mean(ended) == 0:
        return SICK, f"{said}: EOS was not learned; look at how the data ends."
    return (HEALTHY if mean(ended) >= 0.8 else WATCH), f"{said}; read them, too."


# ---- Step 2 ----
def accuracy(run):
    """Accuracy on held-out pairs, with its interval."""
    lines = [line for line in run.metrics if "eval_accuracy" in line]
    if not lines:
        return UNKNOWN, "eval_accuracy: there is no evaluation so far."
    share = lines[-1]["eval_accuracy"]
    said, interval = f"eval_accuracy is {share:.3f}", lines[-1].get("eval_accuracy_ci")
    if not interval:
        return UNKNOWN, f"{said}, without an interval."
    low, high = interval
    said += f" [{low:.3f}, {high:.3f}]"
    if best := run.limits.get("eval_accuracy"):
        said += f"; a judge who knows the rules reaches {best:.3f}"
    if low <= 0.5 <= high and high - low > 0.3:
        return UNKNOWN, f"{said}: too few held-out pairs to tell."
    if low <= 0.5 <= high:
        wrong = "pairs became equal when cut, or the learning rate is wrong"
        return SICK, f"{said}: no better than a coin: {wrong}."
    if share < 0.5:
        return SICK, f"{said}: below one half: labels are swapped."
    if share > 0.6 and share - 0.5 > high - low:
        return HEALTHY, f"{said}."
    return WATCH, f"{said}: better than a coin, but not by much."


def drift(run):
    """How far scores are from 0."""
    found = [ends(run, f"{prefix}_score") for prefix in ("chosen", "rejected")]
    if None in found:
        return UNKNOWN, "chosen_score, rejected_score: none so far."
    chosen, rejected = (last for _, last in found)
    said = f"chosen_score is near {chosen:.3g}, rejected_score near {rejected:.3g}"
    if max(abs(chosen), abs(rejected)) >= 10:
        return SICK, f"{said}: tens away from 0: use --center_coef."
    return HEALTHY, f"{said}: both near 0."


# ---- Step 3 ----
def one_update(run):
    """Returns whether each rollout has one update."""
    args = run.args
    passes = args.get("ppo_epochs", 1) * args.get("generation_batches", 1)
    names = [f"per_device_{kind}_batch_size" for kind in ("generation", "training")]
    return passes == 1 and args.get(names[0]) == args.get(names[1])


def ratio(run):
    """The largest ratio of new to old probabilities."""
    values = run.values("ratio_max")
    if not values:
        return UNKNOWN, "ratio_max: none so far."
    top = max(values)
    if top <= 1.01:
        return HEALTHY, f"ratio_max is 1.0 throughout (at most {top:.4g})."
    if not one_update(run):
        return WATCH, f"ratio_max reached {top:.3g}; above 1 is usual with several updates."
    return SICK, f"ratio_max reached {top:.3g}: old and new log-probs differ (dropout, shift)."


def updates(run):
    """What clipping and the update itself did."""
    found = {name: run.values(name) for name in ("actor_loss", "approx_kl", "clip_fraction")}
    if not all(found.values()):
        return UNKNOWN, "actor_loss, approx_kl, clip_fraction: none so far."
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
        fits = tops["actor_loss"] < 1e-3
        return (HEALTHY if fits else WATCH), f"{said}: with one update all should be about 0."
    return HEALTHY, f"{said}: the first is not 0 with these flags."


def kl(run):
    """Whether KL to the reference settles."""
    three = thirds(run.values("kl"))
    if not three:
        return UNKNOWN, "KL: fewer than six logged steps so far, or --kl_coef 0 without --log_kl 1."
    first, middle, last = three
    if last <= SETTLED * middle + 0.05:
        return HEALTHY, f"KL settles at {last:.2g} nats a response."
    grows = f"KL grows: {first:.2g}, {middle:.2g}, {last:.2g} nats in the thirds of the run"
    if last - middle > middle - first:
        return SICK, f"{grows}, ever faster: raise --kl_coef, or set --kl_target."
    return WATCH, f"{grows}, more slowly at the end: it has not settled yet."


def rising(run):
    """Whether reward and gold rise together."""
    held_out = len(run.values("eval_reward")) > 1
    names = ("eval_reward", "eval_gold") if held_out else ("reward", "gold")
    rewards, golds = map(run.values, names)
    if len(rewards) < 2:
        return UNKNOWN, "reward: too few values so far."
    said = f"{names[0]} went from {rewards[0]:.2f} to {rewards[-1]:.2f}"
    if len(golds) != len(rewards):
        rose = rewards[-1] > rewards[0]
        advice = "no --gold_fn was given, so read the samples: are they better?"
        return (UNKNOWN if rose else WATCH), f"{said}; {advice}"
    said += f", {names[1]} from {golds[0]:.2f} to {golds[-1]:.2f}"
    top = max(range(len(golds)), key=golds.__getitem__)
    fall, spread = golds[top] - golds[-1], max(golds) - min(golds)
    if rewards[-1] > rewards[0] and golds[-1] < golds[0]:
        return SICK, f"{said}: the actor exploits the reward model's errors."
    if fall > 0.2 * spread and rewards[-1] > rewards[top]:
        return SICK, f"{said}, after {golds[top]:.2f}: it now exploits the reward model's errors."
    if rewards[-1] > rewards[0] and golds[-1] > golds[0]:
        return HEALTHY, f"{said}: both rose."
    return WATCH, f"{said}: they do not both rise."


def groups(run):
    """Whether rewards tell responses apart; from which step on they do not, and why that may be."""
    shares = run.series("equal_groups")
    if not shares:  # without groups all responses of a step are compared
        shares = [(step, float(std <= ZERO)) for step, std in run.series("reward_std")]
    if not shares:
        return UNKNOWN, "reward_std, equal_groups: none so far."
    reward = ends(run, "reward")
    why = "too easy, too hard, or the verifier"
    why += f" (on average the reward is {reward[1]:.3g})" if reward else ""
    apart = [step for step, share in shares if share < 1]
    if not apart:
        return SICK, f"no reward of the whole run was better than another one to its prompt: {why}."
    if sum(step > apart[-1] for step, _ in shares) > 1:
        return SICK, f"since step {apart[-1] + 1:g} no response was better than another one: {why}."
    part = (thirds([share for _, share in shares]) or [shares[-1][1]])[-1]
    said = f"no gradient from {100 * part:.0f} % of the groups"
    if part >= IDLE:
        return (SICK if part >= 0.9 else WATCH), f"{said}: {why}."
    if not run.values("equal_groups"):
        said = f"the rewards of a step differ, by {ends(run, 'reward_std')[1]:.2g}"
    return HEALTHY, f"{said}."


def critic(run):
    """How well the critic foresees returns."""
    both = ends(run, "explained_variance")
    if both is None:
        none = "explained_variance: there is no critic, or no step so far."
        return UNKNOWN, none
    said = f"explained_variance went from {both[0]:.2f} to {both[1]:.2f}"
    if len(run.values("explained_variance")) < 6:
        return UNKNOWN, f"{said}: fewer than six logged steps so far."
    if both[1] < 0:
        return SICK, f"{said}: worse than a constant; raise the critic's learning rate."
    if both[1] < 0.3:
        return WATCH, f"{said}: the critic foresees little."
    return HEALTHY, f"{said} (1: it foresees every return)."


def variety(run):
    """Entropy, length, and how many responses end."""
    entropy, length, ended = (ends(run, n) for n in ("entropy", "response_length", "eos_rate"))
    if None in (entropy, length, ended):
        return UNKNOWN, "entropy, response_length, eos_rate: none so far."
    said = f"entropy went from {entropy[0]:.2f} to {entropy[1]:.2f} nats a token, length from "
    said += f"{length[0]:.0f} to {length[1]:.0f} tokens, {100 * ended[1]:.0f} % ended"
    if entropy[1] < COLLAPSED < entropy[0]:
        return SICK, f"{said}: entropy fell to {entropy[1]:.2g}: collapse."
    most = run.args.get("max_answer_seq_len")
    if most and length[1] > 0.9 * most and ended[1] < 0.5:
        return SICK, f"{said}: responses no longer end."
    if ended[1] < 0.9 and ended[1] < ended[0]:
        return WATCH, f"{said}: fewer end than at the start."
    if entropy[1] < entropy[0] / 2:
        return WATCH, f"{said}: entropy has more than halved."
    return HEALTHY, f"{said}."


def finite(run):
    """Whether the run met a number that is none."""
    if any(run.path.glob("nonfinite_rank*.jsonl")):
        return SICK, "the run stopped at NaN or infinity: see its nonfinite_rank*.jsonl."
    floats = [(n, x) for line in run.metrics for n, x in line.items() if isinstance(x, float)]
    bad = {name for name, value in floats if not math.isfinite(value)}
    if bad:
        return SICK, f"not finite: {', '.join(sorted(bad))}."
    if not run.metrics:
        return UNKNOWN, "nothing was logged so far."
    return HEALTHY, "every logged number is finite."


# (script, the metrics of the row in README's table, function), in the order of that table
ROWS = [
    ("sft", "eval_loss, eval_perplexity", sft_loss),
    ("sft", "samples", sft_samples),
    ("reward", "eval_accuracy, eval_accuracy_ci", accuracy),
    ("reward", "chosen_score, rejected_score", drift),
    ("ppo", "ratio_max", ratio),
    ("ppo", "actor_loss, approx_kl, clip_fraction", updates),
    ("ppo", "kl, kl_k3", kl),
    ("ppo", "reward, gold", rising),
    ("ppo", "reward_std, equal_groups", groups),
    ("ppo", "explained_variance", critic),
    ("ppo", "entropy, response_length, eos_rate", variety),
    ("ppo", "all", finite),
]


def of(run):
    """Returns (metrics, status, words) for each row of the table that speaks of this run's step."""
    rows = [row for row in ROWS if row[0] == run.script]
    return [(metrics, *judged(verdict, run)) for _, metrics, verdict in rows]


def judged(verdict, run):
    """Returns the verdict, or "not known" where args.json or the log holds other kinds of values.

    A damaged file must not cost the page.
    """
    try:
        return verdict(run)
    except Exception as error:
        return UNKNOWN, f"args.json or metrics.jsonl holds what is no such number: {error}."
