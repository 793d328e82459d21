"""No response may end before its 24th token; log-probs are those of the policy that may end."""

SCRIPT = "ppo"
COMMIT = "c47c7bb"  # its flag has left the project since
FLAGS = {"ppo": "--min_new_tokens 24"}
