"""Tokens are drawn at a temperature that scoring does not have."""

import ppo
from machinery.flags import declaring

SCRIPT = "ppo"
TEMPERATURE = 1.4


def fault():
    sample = ppo.sample

    def hot(args, *others):
        return sample(declaring.with_flags(args, temperature=TEMPERATURE), *others)

    ppo.sample = hot
    ppo.checks.stop_unless_sampled_as_scored = lambda run, micro_batches: None
