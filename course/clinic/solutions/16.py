"""Both learning rates are ten times too high."""

SCRIPT = "ppo"
FLAGS = {"ppo": "--actor_learning_rate 2e-3 --critic_learning_rate 4e-3"}
