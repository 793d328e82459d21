"""The reference is the actor itself, and moves with it."""

import common

SCRIPT = "ppo"


def fault():
    common.reference_of = lambda actor, args, batch_size: actor.module
