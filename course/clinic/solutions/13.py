"""The verifier looks at the form of a response, and not at what it says."""

SCRIPT = "ppo"
FLAGS = {
    "ppo": "--advantage grpo --samples_per_prompt 4 --reward_fn course/clinic/verifiers.py:complete"
}
