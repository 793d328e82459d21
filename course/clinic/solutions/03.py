"""Dropout is on in the forward that scores a rollout."""

import faults

SCRIPT = "ppo"
FLAGS = {"ppo": "--actor_dropout 0.1"}
fault = faults.dropout_scores
