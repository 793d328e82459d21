"""EOS may not be among the first 24 tokens; log-probs are those of the policy that may end."""

import itertools

import ppo
from helpers import rollout

SCRIPT = "ppo"
LEAST = 24


def fault():
    sample, restricted = ppo.sample, rollout.restricted

    def longer(args, model, tokenizer, *others):
        drawn = itertools.count()

        def without_end(args, probs):
            probs = restricted(args, probs).clone()  # (b, V)
            if next(drawn) < LEAST:
                probs[:, tokenizer.eos_token_id] = 0
            return probs

        rollout.restricted = without_end
        return sample(args, model, tokenizer, *others)

    ppo.sample = longer
