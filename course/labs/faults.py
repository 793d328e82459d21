"""Runs one of the scripts with a mistake in it:  python course/labs/faults.py FAULT ppo.py FLAGS

For the labs that ask what a mistake does, and for the clinic (course/clinic), whose mistakes have a
file: FAULT is a name in FAULTS below, or FILE:CASE, of a file with CASES. The mistake is patched
in from outside, so the scripts hold none of it. Every run of the lab "mismatch", also that without
a fault, has two passes, one that scores and one that trains: a pass that is both would be compared
with itself. No such run is stopped by what ppo.py checks in its first step.
"""

import collections
import copy
import functools
import os
import runpy
import sys
from pathlib import Path

# A copy of the code that has a variant, or else the code
sys.path[:0] = [os.getcwd(), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402

import common  # noqa: E402
import ppo  # noqa: E402
import reward  # noqa: E402
import sft  # noqa: E402
from machinery import batching  # noqa: E402
from machinery.refused import program  # noqa: E402


def nothing(*_, **__):
    """Takes the place of a function that should do nothing."""


def two_passes():
    """Scores and trains in two forwards, and lets the run go on where it would stop."""
    score = ppo.score
    ppo.score = lambda args, models, batch, actor=True: score(args, models, batch)
    ppo.checks.stop_unless_one = nothing
    ppo.checks.stop_unless_sampled_as_scored = nothing


def in_training(name, change):
    """Wraps a function of ppo.py in training: change(function, *its arguments).

    Evaluations are left alone: they measure, and are to measure all runs alike. The responses that
    the microscope shows are no evaluation: they are made as in training.
    """
    function, answered = getattr(ppo, name), ppo.roll_out_and_score
    few = ppo.evaluation.microscope_requests
    shown, evaluating = None, False

    def noted(*args):
        nonlocal shown
        shown = few(*args)
        return shown

    def answered_alike(args, models, tokenizer, requests):
        nonlocal evaluating
        evaluating = requests is not shown
        micro_batches = answered(args, models, tokenizer, requests)
        evaluating = False
        return micro_batches

    def changed(*args):
        return function(*args) if evaluating else change(function, *args)

    ppo.evaluation.microscope_requests, ppo.roll_out_and_score = noted, answered_alike
    setattr(ppo, name, changed)


def around_forward(change):
    """Wraps ppo.actor_forward in training: change(forward, args, actor, batch, scores).

    scores: whether the forward is the one that scores, and not the one that trains.
    """
    two_passes()

    def changed(forward, args, actor, batch):
        return change(forward, args, actor, batch, not torch.is_grad_enabled())

    in_training("actor_forward", changed)


def dropout_scores():
    """The pass that scores has dropout, and the pass that trains has none."""

    def change(forward, args, actor, batch, scores):
        training = actor.module.training
        actor.module.train(scores)
        out = forward(args, actor, batch)
        actor.module.train(training)
        return out

    around_forward(change)


def bf16(in_scores):
    """One of the two passes computes its matrix products in bf16."""

    def change(forward, args, actor, batch, scores):
        device = batch.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=scores == in_scores):
            return forward(args, actor, batch)

    around_forward(change)


def shifted():
    """The stored log-prob of each token is that of the token before."""

    def change(forward, args, actor, batch, scores):
        logprobs, entropy = forward(args, actor, batch)
        return (logprobs.roll(1, -1) if scores else logprobs), entropy

    around_forward(change)


def shifted_ratio():
    """The ratio alone is to the log-prob of the token before; the KL penalty is right."""
    two_passes()
    policy_loss = ppo.policy_loss

    def change(logprobs, old_logprobs, advantages, *clips):
        return policy_loss(logprobs, old_logprobs.roll(1, -1), advantages, *clips)

    ppo.policy_loss = change


def shifted_penalty():
    """The KL penalty alone is that of the log-probs of the tokens before; the ratio is right."""
    two_passes()
    set_rewards = ppo.set_rewards

    def change(args, batch, *others):
        logprobs = batch.old_logprobs
        batch.old_logprobs = logprobs.roll(1, -1)
        set_rewards(args, batch, *others)
        batch.old_logprobs = logprobs

    ppo.set_rewards = change


def no_eos():
    """The mask of the losses ends one token early: EOS is never trained on."""
    two_passes()
    trained_mask = ppo.trained_mask

    def change(args, batch):
        # whitening comes before there are advantages, and is as it was
        return trained_mask(args, batch) * (1 - batch.last * (batch.advantages is not None))

    ppo.trained_mask = change


def whitened_by_halves():
    """Advantages are whitened over each half of the batch, as on two ranks that do not talk."""
    two_passes()
    whiten = ppo.whitened

    def change(advantages, masks):
        halves = [zip(a.chunk(2), m.chunk(2)) for a, m in zip(advantages, masks)]
        return [torch.cat([whiten([a], [m])[0] for a, m in half]) for half in halves]

    ppo.whitened = change


def offset(number):
    """The reward model's scores are all larger by a number."""
    score = ppo.reward_model_scores
    ppo.reward_model_scores = lambda model, batch: score(model, batch) + number * batch.last


def grpo_no_deviation():
    """GRPO without the division by the deviation of the prompt's rewards."""

    def errors(totals, groups):
        count = ppo.group_sum(torch.ones_like(totals), groups)
        return totals - ppo.group_sum(totals, groups) / count

    ppo.ADVANTAGES["grpo"] = ppo.Estimator(of_groups=errors)


def dual_clip(bound):
    """The loss of a bad token that became likely is bounded, too.  [Ye 2020]"""
    policy_loss = ppo.policy_loss

    def change(logprobs, old_logprobs, advantages, *clips):
        loss, *others = policy_loss(logprobs, old_logprobs, advantages, *clips)
        bounded = torch.min(loss, -bound * advantages)
        return torch.where(advantages < 0, bounded, loss), *others

    ppo.policy_loss = change


# ---- Another policy samples ----
def stale_sampler(steps, old_is_sampled=False):
    """Samples with the weights of so many steps ago; in the first steps, with those of the start.

    old_is_sampled: the ratio is to the policy that sampled, and not to the one that scored.
    """
    kept = collections.deque(maxlen=steps + 1)

    def change(sample, args, model, *others):
        now = copy.deepcopy(model.state_dict())
        if not kept or any(not now[name].equal(kept[-1][name]) for name in now):
            kept.append(now)  # else it is the same step: the microscope's responses, or more rows
        model.load_state_dict(kept[0])
        sampled = sample(args, model, *others)
        model.load_state_dict(now)
        return sampled

    ppo.checks.stop_unless_sampled_as_scored = nothing
    in_training("sample", change)
    if old_is_sampled:
        two_passes()
        optimizer_step = ppo.optimizer_step

        def clipped(args, models, minibatch, *others):
            scored = [batch.old_logprobs for batch in minibatch]
            for batch in minibatch:
                batch.old_logprobs = batch.per_token["sampled_logprobs"]
            means = optimizer_step(args, models, minibatch, *others)
            for batch, logprobs in zip(minibatch, scored):  # of which metrics are to be
                batch.old_logprobs = logprobs
            return means

        ppo.optimizer_step = clipped


STALE = 0, 1, 2, 4, 8  # steps


def answer_64_times():
    """Each held-out prompt stands there 64 times: as many samples of it in an evaluation."""
    load_rows = ppo.load_rows

    def change(*args):
        train, held_out = load_rows(*args)
        return train, held_out.select([i for i in range(len(held_out)) for _ in range(64)])

    ppo.load_rows = change


def in_order():
    """Training takes its rows in the order of the file, on one rank."""

    def batches(lengths, seed, epoch, batch_size, micro_steps, group_by_length):
        starts = range(0, len(lengths) - batch_size + 1, batch_size)
        return [[*range(start, start + batch_size)] for start in starts]

    batching.epoch_batches = batches


def head(std):
    """A new head's weights are drawn with this deviation; std(width) gives it."""

    def init(module, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            module.weight.normal_(0, std(module.in_features), generator=generator)

    common.init_value_head = init


def head_library():
    """A new head is left as transformers leaves it; the run is to have --zero_stage 3."""
    common.init_value_head = nothing


BY_NAME = [dropout_scores, shifted, shifted_ratio, shifted_penalty, no_eos, whitened_by_halves]
BY_NAME += [grpo_no_deviation, answer_64_times, in_order, head_library]
FAULTS = {
    **{fault.__name__: fault for fault in BY_NAME},
    "none": two_passes,
    "bf16_scores": lambda: bf16(True),
    "bf16_trains": lambda: bf16(False),
    "offset_2": lambda: offset(2.0),
    "dual_clip_3": lambda: dual_clip(3.0),
    **{f"stale_{n}": functools.partial(stale_sampler, n) for n in STALE},
    **{f"stale_{n}_clipped": functools.partial(stale_sampler, n, True) for n in STALE},
    "head_0.02": lambda: head(lambda width: 0.02),
    "head_root": lambda: head(lambda width: (width + 1) ** -0.5),
    "head_zero": lambda: head(lambda width: 0.0),
}


def main():
    fault, script = sys.argv[1:3]
    file, _, case = fault.partition(":")
    (FAULTS.get(fault) or runpy.run_path(file)["CASES"][case]["fault"])()
    sys.argv = sys.argv[2:]
    program({"sft.py": sft, "reward.py": reward, "ppo.py": ppo}[script].main)


if __name__ == "__main__":
    main()
