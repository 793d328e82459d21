"""Runs one of the scripts with a mistake in it:  python labs/faults.py FAULT ppo.py FLAGS

For the labs that ask what a mistake does. The mistake is patched in from outside, so the scripts
hold none of it. Every run of the lab "mismatch", also that without a fault, has two passes, one
that scores and one that trains: a pass that is kept would be compared with itself.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

import common  # noqa: E402
import ppo  # noqa: E402
import reward  # noqa: E402
from machinery.rollout import kept_pass  # noqa: E402

BF16 = functools.partial(torch.autocast, get_accelerator().device_name(), torch.bfloat16)


def two_passes():
    kept_pass.roles = lambda args: ()


def around_forward(change):
    """Wraps ppo.actor_forward in training: change(forward, args, actor, batch, stores).

    Evaluations are left alone: they measure, and are to measure all runs alike.
    """
    two_passes()
    forward, begin, now = ppo.actor_forward, kept_pass.KeptPass.begin, {}

    def begun(self, step, trains):
        now["step"] = step  # None: an evaluation
        begin(self, step, trains)

    def changed(args, actor, batch, stores):
        if now["step"] is None:
            return forward(args, actor, batch, stores)
        return change(forward, args, actor, batch, stores)

    kept_pass.KeptPass.begin, ppo.actor_forward = begun, changed


def dropout_scores():
    """The pass that scores has dropout, and the pass that trains has none."""

    def change(forward, args, actor, batch, stores):
        training = actor.module.training
        actor.module.train(stores)
        out = forward(args, actor, batch, stores)
        actor.module.train(training)
        return out

    around_forward(change)


def bf16(scores):
    """One of the two passes computes its matrix products in bf16."""

    def change(forward, args, actor, batch, stores):
        with BF16(enabled=stores == scores):
            return forward(args, actor, batch, stores)

    around_forward(change)


def shifted():
    """The stored log-prob of each token is that of the token before."""

    def change(forward, args, actor, batch, stores):
        logprobs, entropy = forward(args, actor, batch, stores)
        return (logprobs.roll(1, -1) if stores else logprobs), entropy

    around_forward(change)


def no_eos():
    """The mask of the losses ends one token early: EOS is never trained on."""
    two_passes()

    def weigh(minibatch):
        for batch in minibatch:
            batch.loss_weight = batch.response_mask - batch.last
        return sum(batch.loss_weight.sum() for batch in minibatch).item()  # of one rank

    ppo.set_loss_weights = weigh


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

    ppo.ADVANTAGES["grpo"] = ppo.Estimator(errors, compares_groups=True)


def head(std):
    """A new head's weights are drawn with this deviation; std(width) gives it."""

    def init(module, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            module.weight.normal_(0, std(module.in_features), generator=generator)

    common.init_value_head = init


def head_library():
    """A new head is left as transformers leaves it; the run is to have --zero_stage 3."""
    common.init_value_head = lambda module, seed: None


FAULTS = {
    "none": two_passes,
    "dropout_scores": dropout_scores,
    "bf16_scores": lambda: bf16(True),
    "bf16_trains": lambda: bf16(False),
    "shifted": shifted,
    "no_eos": no_eos,
    "whitened_by_halves": whitened_by_halves,
    "offset_2": lambda: offset(2.0),
    "grpo_no_deviation": grpo_no_deviation,
    "head_0.02": lambda: head(lambda width: 0.02),
    "head_root": lambda: head(lambda width: (width + 1) ** -0.5),
    "head_zero": lambda: head(lambda width: 0.0),
    "head_library": head_library,
}


def main():
    fault, script = sys.argv[1:3]
    FAULTS[fault]()
    sys.argv = sys.argv[2:]
    {"ppo.py": ppo, "reward.py": reward}[script].main()


if __name__ == "__main__":
    main()
