"""Judges how a run looks, by rows of "Healthy and sick" in docs/metrics.md.

Judged is what a reader of the log and of its curves would not notice, or not take for a fault. A
function measures, and names the case; verdicts.ini says how healthy a case is, and what to do. The
limits of what counts as healthy stand here, in the open. They are rules of thumb of ours, for
the toy's runs, and test_clinic.py holds them against fifteen healthy runs, against runs that were
broken on purpose, and against a pretrained model's. Where a run has too little to judge by, the
status is "not known".
"""

import configparser
import functools
import math
import os
import re
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev

from machinery.run import NOT_FINITE
from tools.report import numbers
from tools.report.runs import entries
from tools.report.text import is_number, number

HEALTHY, WATCH, SICK, UNKNOWN = "healthy", "watch", "sick", "not known"
NEAR = 1.0  # nats a response: so small a KL needs no reward to show for it
FAR = 0.25  # nats a token: KL in the last third; four times as much is sick
ZERO = 1e-5  # but for rounding
START = 0.1  # nats a response: KL at step 1, where actor and reference are one model
COLLAPSED = 0.05  # nats a token
MANY = 1.5  # nats a token: drawn as from four or five that are equally likely
LEAST = 8  # samples of SFT: the mean length of fewer says little
TAIL = 3  # characters: a shorter end that all prompts share is punctuation
OFF = dict(top_p=1.0, top_k=0, min_new_tokens=0)  # what sampling may leave out, scoring not
GAP = {"fp32": 0.01}  # largest, between the log-probs of sampling and scoring; of other types 3:
# sound runs of SmolLM2 in bf16 reached 1.4, with 2 % of the tokens outside of 0.8 .. 1.2
OUTSIDE = 0.05  # of the tokens, on average over the run


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
def sft_samples(run):
    """Whether greedy responses end, and differ."""
    answers = run.answers(last=True)
    different = {line["response"] for line in answers}
    if len(answers) > 3 and len(different) == 1:
        return "alike", f"all {len(answers)} greedy responses are one text"
    ended = [line["ended"] for line in answers if is_number(line.get("ended"))]
    if not ended:
        return "unsaid", "samples.jsonl does not say which responses ended"
    said = f"{sum(ended):g} of {len(ended)} greedy responses ended by themselves"
    case = "end" if mean(ended) >= 0.8 else "cut" if any(ended) else "endless"
    return case, f"{said}, and {len(different)} of them differ"


# ---- Step 2 ----
def accuracy(run):
    """Accuracy on held-out pairs, with its interval."""
    share, best = values_of(run, "eval_accuracy")[-1], run.limits.get("eval_accuracy")
    found = [line["eval_accuracy_ci"] for line in run.metrics if "eval_accuracy_ci" in line]
    if not found:
        return "bare", f"eval_accuracy is {share:.3f}, without an interval"
    low, high = found[-1]
    said = f"eval_accuracy is {share:.3f} [{low:.3f}, {high:.3f}]"
    said += f"; a judge who knows the rules reaches {best:.3f}" if best else ""
    ties = sum(pair["chosen_score"] == pair["rejected_score"] for pair in run.judged)
    if ties > 0.2 * len(run.judged):
        return "ties", f"{said}; {ties} of {len(run.judged)} pairs have equal scores"
    if low > (best or 0.98):
        return "leak", said
    if low <= 0.5 <= high:
        return "few" if high - low > 0.3 else "coin", said
    if share < 0.5:
        return "swapped", said
    return "good" if share > 0.6 and share - 0.5 > high - low else "low", said


# ---- Step 3 ----
def one_update(run):
    """Returns whether each rollout has one update."""
    get = run.args.get
    passes = get("ppo_epochs", 1) * get("generation_batches", 1)
    size = get("per_device_generation_batch_size")
    return passes == 1 and size == get("per_device_training_batch_size")


def ratio(run):
    """Whether sampling, scoring and training agree on the log-probs of the same tokens."""
    top, gap = max(values_of(run, "ratio_max")), max(run.values("sampling_gap"), default=0)
    many = mean(run.values("sampling_outside") or [0]) > OUTSIDE
    if (many or gap > GAP.get(run.args.get("dtype"), 3)) and not run.args.get("is_cap"):
        return "sampling", f"sampling_gap reached {gap:.2g}" + ", in many tokens" * many
    reached = f"ratio_max reached {top:.3g}"
    if top > 1.01 and one_update(run):
        return "scoring", reached
    args = {**OFF, **run.args}
    if filters := [f"--{name} {args[name]}" for name in OFF if args[name] != OFF[name]]:
        return "filtered", " ".join(filters)
    if top > 1.01:
        return "several", reached
    return "one", f"{reached}, sampling_gap {gap:.2g}"


def updates(run):
    """What clipping and the update itself did."""
    found = {name: values_of(run, name) for name in ("actor_loss", "approx_kl", "clip_fraction")}
    tops = loss, *others = [max(map(abs, values)) for values in found.values()]
    said = "at most " + ", ".join(f"{name} {top:.2g}" for name, top in zip(found, tops))
    if not one_update(run):
        many = mean(found["clip_fraction"])
        said += f", and on average {100 * many:.0f} % of the tokens clipped"
        return "several" if many < 0.3 else "clips", said
    if max(others) > 1e-3:
        return "moved", said
    get = run.args.get
    whitens = get("advantage", "gae") == "gae" and get("whiten", True)
    if not whitens or get("is_cap") or get("entropy_coef") or get("kl_in") == "loss":
        return "other", said
    return "mask" if loss > 1e-3 else "zero", said


def kl(run):
    """How far the actor is from the reference: the sign, the scale, and what it got for it."""
    values = values_of(run, "kl", 6)
    start = run.series("kl").get(1, 0)
    if abs(start) > START:
        said = f"KL is {start:.2g} at step 1, where actor and reference are the same model"
        return "start", said
    first, middle, last = thirds(values)
    said = f"KL was {first:.2g}, {middle:.2g}, {last:.2g} nats a response in the thirds of the run"
    if max(map(abs, values)) < ZERO:
        trains = max(run.values("grad_norm"), default=0) > ZERO
        return "reference" if trains else "still", said
    if last < min(-0.05, -2 * error(last_third(values))):
        return "negative", said
    if last > NEAR and has_gained(run) is False:
        return "vain", said
    length = mean(run.values("response_length") or [math.inf])
    if last > FAR * length:  # (a larger --kl_coef would make a wrong sign worse)
        return "too_far" if last > 4 * FAR * length else "far", said, tokens_first(run)
    return "near", said


def rising(run):
    """Whether reward and gold rise together."""
    scores = run.values("reward") + run.values("eval_reward")
    if len(scores) > 1 and len(set(scores)) == 1:
        return "constant", f"reward is {scores[0]:g}"
    kind = "eval_" if len(run.values("eval_reward")) > 1 else ""
    rewards, golds = values_of(run, f"{kind}reward", 2), run.values(f"{kind}gold")
    said = f"{kind}reward went from {rewards[0]:.2f} to {rewards[-1]:.2f}"
    answers = run.answers(last=True)
    both = numbers.changes(run.answers(last=False), answers)
    noises = [2 * error(numbers.rise(both, n).dropna().tolist()) for n in ("reward", "gold")]
    rose = rewards[-1] - rewards[0] > noises[0]
    if len(golds) != len(rewards):
        if answers and all(line.get("reward") in (0, 1) for line in answers):  # a verifier's
            return "verified" if rose else "rejected", said
        return "ungraded" if rose else "unrewarded", said
    top, gain = golds.index(max(golds)), golds[-1] - golds[0]
    said += f", {kind}gold from {golds[0]:.2f} to {golds[-1]:.2f}"
    if rose and gain < -noises[1]:
        return exploits(run), said, tokens_first(run)
    fall, spread = golds[top] - golds[-1], max(golds) - min(golds)
    if fall > max(0.2 * spread, noises[1]) and rewards[-1] > rewards[top]:
        return exploits(run), f"{said}, after {golds[top]:.2f}", tokens_first(run)
    if not rose:
        return "reward_noise", f"{said} (noise {noises[0]:.2f})"
    return ("both", said) if gain > noises[1] else ("gold_noise", f"{said} (noise {noises[1]:.2f})")


def tokens_first(run):
    """Returns what to do first where the rewards of the tokens are wrong, which explains much."""
    wrong = judged(tokens, run)[0] == SICK
    return "see the verdict on tokens.jsonl first." if wrong else None


def exploits(run):
    """Returns the case of an actor whose reward rises while gold falls."""
    return "exploits_function" if run.args.get("reward_fn") else "exploits_model"


def critic(run):
    """How well the critic foresees returns."""
    first, _, last = thirds(values_of(run, "explained_variance", 6))  # none without a critic
    said = f"explained_variance went from {first:.2f} to {last:.2f}"
    return "worse" if last < 0 else "little" if last < 0.3 else "good", said


def variety(run):
    """Entropy, length, and how many responses end."""
    entropy, length, ended = (ends(run, n) for n in ("entropy", "response_length", "eos_rate"))
    said = f"entropy went from {entropy[0]:.2f} to {entropy[1]:.2g} nats a token, length from "
    said += f"{length[0]:.0f} to {length[1]:.0f} tokens, {100 * ended[1]:.0f} % ended"
    if entropy[1] < COLLAPSED < entropy[0]:
        return "collapse", said
    most = run.args.get("max_answer_seq_len")
    if most and length[1] > 0.9 * most and ended[1] < 0.5:
        return "endless", said
    return "many" if min(entropy) > MANY else "slow", said


def tokens(run):
    """Whether a response's rewards are its score less its penalty, and whether its EOS counts."""
    usual = dict(kl_estimator="k1", kl_in="reward", normalize_reward=0, missing_eos_penalty=0)
    other = any(run.args.get(name, value) != value for name, value in usual.items())
    whole = [x for x in run.tokens if len(x["tokens"]["reward"]) >= x.get("response_length", 0)]
    if other or not whole:
        return "none", "tokens.jsonl: none, or with other rewards than score - kl_coef * KL"
    most, off, ends_at = run.args.get("clip_reward", 5.0), 0, []
    for line in whole:
        row, score = line["tokens"], line["reward"]
        paid = sum(row["reward"]) + line["kl_coef"] * sum(row.get("kl", []))  # no reference: none
        due = score, min(max(score, -most), most)  # each token's own scores may sum to more
        off += min(abs(paid - each) for each in due) > 0.01 * max(1, abs(score))
        ends_at += [row["logprob"][-1] or row["reward"][-1]] if line["ended"] else []
    if ends_at and not any(ends_at):
        return "eos", "EOS has log-prob and reward 0 in all responses"
    sums = "sum to the score" + " - kl_coef * KL" * any(line["kl_coef"] for line in whole)
    if off > len(whole) / 4:
        return "sum", f"in {off} of {len(whole)} responses the rewards do not {sums}"
    return "right", f"the rewards of the tokens {sums}" + ", and EOS counts" * bool(ends_at)


def beginning(run, sft):
    """Whether PPO begins where SFT ended: with its prompts, and with responses like its own.

    SFT's are greedy and PPO's are drawn, so that these may be somewhat longer and worse.
    """
    both = before, after = sft.answers(last=True), run.answers(last=False)
    if len(before) < LEAST:
        said = f"samples.jsonl: SFT ended with {len(before)} samples, too few to compare"
        return "few", f"{said} (at least {LEAST})"
    if not after or after[0]["step"] != 0:
        return "none", f"samples.jsonl: no samples at step 0 of {run.title()}"
    tails = [tail([line["prompt"] for line in lines]) for lines in both]
    short, long = sorted(tails, key=len)
    if len(long.strip()) >= TAIL and not (short and long.endswith(short)):
        ends_with = f"the prompts of SFT end with {tails[0]!r}, those of {run.title()} with"
        return "template", f"{ends_with} {tails[1]!r}"
    words = [mean(len(line["response"].split()) for line in lines) for lines in both]
    golds = [[x["gold"] for x in lines if is_number(x.get("gold"))] for lines in both]
    said = f"SFT ended with {words[0]:.0f} words a response, {run.title()} begins with "
    said += f"{words[1]:.0f}"
    worse = max(words) > 2 * max(min(words), 1)
    if all(golds):
        noise = math.hypot(*map(error, golds))
        worse |= mean(golds[0]) - mean(golds[1]) > max(3 * noise, stdev(golds[0]) / 2)
        said += f"; gold was {mean(golds[0]):.2f}, and is {mean(golds[1]):.2f}"
    return "worse" if worse else "alike", said


def tail(texts):
    """Returns the end that all texts share, from its first white space on.

    >>> tail(["Why? Answer:", "How? Answer:"])
    ' Answer:'
    """
    shared = os.path.commonprefix([text[::-1] for text in texts])[::-1]
    return re.sub(r"^\S+", "", shared)


def finite(run):
    """Whether the run met NaN or infinity, and has not gone beyond that step since."""
    if run.metrics and run.metrics[-1].get("not_finite"):
        where = f"at step {number(run.metrics[-1]['step'])}"
        return "stopped", f"stopped at NaN or infinity, {where}", NOT_FINITE
    floats = [(n, x) for line in run.metrics for n, x in line.items() if isinstance(x, float)]
    if bad := {name for name, value in floats if not math.isfinite(value)}:
        return "bad", f"not finite: {', '.join(sorted(bad))}"
    if not run.metrics:
        raise TooFew("nothing is in the log so far.")
    return "finite", "every logged number is finite"


# (script, the metrics of the row in docs/metrics.md, function), in the order of that table
ROWS = [
    ("sft", "samples", sft_samples),
    ("reward", "eval_accuracy, eval_accuracy_ci", accuracy),
    ("ppo", "ratio_max, sampling_gap", ratio),
    ("ppo", "actor_loss, approx_kl, clip_fraction", updates),
    ("ppo", "kl, kl_k3", kl),
    ("ppo", "reward, gold", rising),
    ("ppo", "explained_variance", critic),
    ("ppo", "entropy, response_length, eos_rate", variety),
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


@functools.cache
def cases():
    """Returns {name of a function: {case: its status and words}} of verdicts.ini."""
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.read(Path(__file__).with_suffix(".ini"), encoding="utf-8")
    return parser


def judged(verdict, *of_runs):
    """Returns status and words of a verdict: what it measured, and what verdicts.ini says of it.

    "not known" where args.json or the log holds other kinds of values: a damaged file must not
    cost the page.
    """
    try:
        case, said, *instead = verdict(*of_runs)
        status, _, words = " ".join(cases()[verdict.__name__][case].split()).partition(", ")
        words = next(filter(None, instead), words)
        return status, f"{said}: {words}" if words else f"{said}."
    except TooFew as why:
        return UNKNOWN, str(why)
    except Exception as error:
        return UNKNOWN, f"args.json or metrics.jsonl holds what is no such number: {error}."
