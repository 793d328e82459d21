"""Writes the file that a student fills in: twelve functions of the scripts, without their bodies.

    python course/assignment/make.py output/assignment/ada.py

Signatures, docstrings, and the loop around the gap in `sample` are those of the scripts today.
"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = {  # and the file that each is in, in the order of a run
    "sft_loss_sum": "sft",
    "pair_loss_sum": "reward",
    "token_logprobs": "common",
    "sample": "ppo",
    "kl_estimate": "ppo",
    "token_rewards": "ppo",
    "gae": "ppo",
    "whitened": "ppo",
    "policy_loss": "ppo",
    "value_loss": "ppo",
    "grpo": "ppo",
    "loss_weights": "ppo",
}
HEADER = '''"""Twelve functions of RLHF to fill in: course/assignment/README.md says how.

    make grade NAME={name}

Shapes are (B, R) unless a docstring says otherwise: B responses of at most R tokens. A mask is 1 on
real response tokens. M tokens of all responses together are looked at, b is how many responses a
rollout still decodes, V is the vocabulary. Other names (common.pad, args.temperature, --loss_mean)
are those of the scripts, where each function also has its neighbours. Do not import a function that
you are to write.
"""

import torch
import torch.nn.functional as F

import common
from common import scatter_to
from machinery import folders, ranks, rollout
from ppo import group_sum, next_logits
'''
# What token_logprobs and whitened are made of in the scripts
SOLVED = "from common import TokenLogprobs\nfrom machinery import metrics\n"
NOTES = {  # what a docstring leaves to the code
    "token_logprobs": """logits: (M, V). {response_logits}
        wanted: bool (B, R). layout: its ids and logit_places are drawn in common.Layout.
        {TokenLogprobs}, in fp32; all tokens at once, without chunks.""",
    "whitened": "The squared deviation is a mean over all n tokens; 1e-8 is added to the root.",
}
BLANK = "raise NotImplementedError"


@functools.cache
def definition(name, module):
    """Returns the syntax of a module's function or class, and the lines of its source."""
    text = (ROOT / f"{module}.py").read_text()
    node = next(node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    first = min(part.lineno for part in [node, *node.decorator_list])
    return node, text.splitlines()[first - 1 : node.end_lineno]


def solution(name):
    """Returns the lines of a function as it is in its script."""
    return definition(name, FUNCTIONS[name])[1]


def blank(name):
    """Returns the lines of a function without its body; of `sample`, without its draw."""
    node, lines = definition(name, FUNCTIONS[name])
    if name == "sample":
        start, end = (
            next(i for i, line in enumerate(lines) if line.strip().startswith(mark))
            for mark in ("# Draw.", "# Append")
        )
        words = [line for line in lines[start:end] if line.strip().startswith("#")]
        gap = f"        {BLANK}  # logits (b, V) -> token (b,), logprob (b,)"
        return [*lines[:start], *words, gap, "", *lines[end:]]
    said = {
        other: ast.get_docstring(definition(other, "common")[0]).splitlines()[0]
        for other in ("TokenLogprobs", "response_logits")
    }
    said["TokenLogprobs"] = said["TokenLogprobs"].split(",")[0]
    notes = NOTES.get(name, "").format(**said).splitlines()
    notes = [f"    # {line.strip()}" for line in notes]
    docstring_end = node.body[0].end_lineno - node.end_lineno  # counted from the last line
    return [*lines[:docstring_end], *notes, f"    {BLANK}"]


def assignment(name, body=blank):
    """Returns the text of a student's file; with `solution` as body, that of a finished one."""
    header = HEADER.format(name=name) + (SOLVED if body is solution else "")
    return "\n\n".join([header, *("\n".join(body(each)) + "\n" for each in FUNCTIONS)])


def write(file):
    """Writes a new student's file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "x") as out:
        out.write(assignment(file.stem))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]))
