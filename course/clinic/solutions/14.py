"""The score is placed one token after EOS, where the mask is 0."""

import ppo

SCRIPT = "ppo"


def fault():
    set_rewards = ppo.set_rewards

    def shifted(args, batch, *others):
        scores = batch.scores
        batch.scores = scores.roll(1, -1)
        batch.scores[:, 0] = 0  # the longest response has no such place
        set_rewards(args, batch, *others)
        batch.scores = scores

    ppo.set_rewards = shifted
