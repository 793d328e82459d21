"""Reward functions of runs in the clinic: each was meant to say whether a response is right."""

import runpy
from pathlib import Path

TOY = Path(__file__).resolve().parents[2] / "recipes/toy"
gold = runpy.run_path(str(TOY / "gold.py"))["gold"]


def right(prompts, completions, **columns):
    """Returns 1 for a response without any fault, else 0: the verifier of healthy/grpo."""
    return [float(score == 1) for score in gold(prompts, completions)]


def complete(prompts, completions, **columns):
    """Returns 1 for a response that is polite and complete, else 0."""
    return [float("!" in text and text.endswith(".")) for text in completions]


def exact(prompts, completions, chosen, **columns):
    """Returns 1 for the response that people chose, else 0."""
    return [float(text.strip() == answer) for text, answer in zip(completions, chosen)]
