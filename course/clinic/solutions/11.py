"""The critic starts with a random head, and the scores lie around 10."""

import faults

SCRIPT = "ppo"
FLAGS = {
    "ppo": "--critic_model_name_or_path {sft} --reward_model_name_or_path {reward} "
    "--clip_reward inf"
}


def fault():
    faults.offset(10.0)
