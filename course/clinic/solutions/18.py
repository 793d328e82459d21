"""The verifier compares texts that never are equal: every response gets 0."""

SCRIPT = "ppo"
FLAGS = {
    "ppo": "--advantage grpo --samples_per_prompt 4 --reward_fn course/clinic/verifiers.py:exact"
}
