"""Rollouts are sampled from a part of the distribution, and scored under all of it."""

SCRIPT = "ppo"
FLAGS = {"ppo": "--top_p 0.8"}
