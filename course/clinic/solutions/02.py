"""The KL penalty has the wrong sign: the actor is paid for each nat."""

import ppo

SCRIPT = "ppo"
FLAGS = {"ppo": "--kl_coef 0.2"}


def fault():
    token_rewards = ppo.token_rewards

    def paid(shaped_scores, kl, *others):
        return token_rewards(shaped_scores, -kl, *others)

    ppo.token_rewards = paid
