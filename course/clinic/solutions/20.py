"""No response may end before its 24th token; log-probs are those of the policy that may end."""

SCRIPT = "ppo"
FLAGS = {"ppo": "--min_new_tokens 24"}
