"""Forwards that serve twice: to score a rollout, and to train on it.

Where a rollout is one micro-batch that is trained on once, nothing changes between the forward that
stores old log-probs (or values) and the one that trains. One forward is both: 2 of 11 are spared.
"""

import contextlib
import functools

import torch

from machinery.base import ranks
from machinery.engine import patches, state_offload
from machinery.models import model_folders

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # 0.0 was seen with fp32 and bf16 on CPUs


def roles(args):
    """Returns which of "actor" and "critic" are spared a forward.

    One with dropout is not: what is stored is computed without dropout, and trained with it.
    """
    passes = args.gradient_accumulation_steps, args.generation_batches, args.ppo_epochs
    rows, generated = args.per_device_training_batch_size, args.per_device_generation_batch_size
    if max(passes) > 1 or rows != generated:
        return ()
    there = ("actor", "critic") if args.has_critic else ("actor",)
    return tuple(role for role in there if not has_dropout(args, role))


def has_dropout(args, role):
    """Returns whether that model trains with dropout: by its flag, else by its config."""
    dropout = getattr(args, f"{role}_dropout")
    if dropout is not None:
        return dropout > 0
    path = getattr(args, f"{role}_model_name_or_path")
    config = model_folders.load_config(path, args.trust_remote_code)
    return any(model_folders.own_dropout(config).values())


class KeptPass:
    """The forward of one engine in step 3: `before` the update, and `now`, in it.

    forward(args, engine, batch, stores) returns tensors (or one), (B, R). stores: for `before`.
    """

    def __init__(self, args, role, engine, forward):
        self.engine, self.forward = engine, functools.partial(forward, args, engine)
        self.may_keep = role in roles(args)
        self.first_step = self.kept = None
        self.trains, self.keeps, self.recorded = True, False, False

    def begin(self, step, trains):
        """Starts the scoring of one step (None: of an evaluation), without dropout.

        In the first step of a run no pass is kept, so that first_pass_gate has two to compare. An
        evaluation leaves `trains` as the step has it.
        """
        self.kept, self.keeps = None, False
        if step is not None:
            self.first_step = self.first_step or step
            self.trains = trains
            self.keeps = trains and self.may_keep and step > self.first_step
        self.engine.train(self.keeps)  # a pass that is kept has no dropout that could act

    def before(self, batch):
        """Returns what the forward gives, to be stored: without a graph."""
        with torch.set_grad_enabled(self.keeps):
            out = self.forward(batch, stores=True)
        self.kept = out if self.keeps else None
        if isinstance(out, tuple):
            return tuple(tensor.detach() for tensor in out)
        return out.detach()

    def now(self, batch):
        """Returns the same with a graph, to train on."""
        if self.keeps:
            return self.kept
        if self.trains and not self.recorded:
            patches.record_backward(self.engine)
            self.recorded = True
        with torch.set_grad_enabled(self.trains):
            return self.forward(batch, stores=False)


@contextlib.contextmanager
def collecting(args, passes, step=None):
    """While responses are written and scored: no dropout, and states that can wait on the CPU.

    During --critic_warmup_steps the actor does not train. step None: for an evaluation.
    """
    with state_offload.states_on_cpu(args, [each.engine for each in passes]):
        warms_up = step is not None and step <= args.critic_warmup_steps
        for each in passes:
            each.begin(step, trains=each is not passes[0] or not warms_up)
        yield
        for each in passes:
            each.engine.train()


def first_pass_gate(run, policy, ratio, mask):
    """Stops the run if the ratio is not 1 before a rollout's first update.

    The weights, the tokens and the function are the same, so only a mistake can move it.
    ratio, mask: (B, R). A pass that was kept would be compared with itself, and is not.
    --first_pass_gate 0 lifts it.
    """
    if policy.keeps or not run.args.first_pass_gate:
        return
    drift = ((ratio.detach() - 1).abs() * mask).max().nan_to_num(nan=float("inf"))
    drift = max(ranks.all_gather_objects([drift.item()]))  # approx_kl is below drift^2
    dtype = run.args.dtype
    if drift > TOLERANCE[dtype]:
        ranks.say(
            f"error: step {run.step}: before the first update the ratio is off by {drift:.4g} "
            f"(allowed with {dtype}: {TOLERANCE[dtype]}).\n  The pass that trains does not see the "
            "policy that was scored. Likely: dropout in the actor (--actor_dropout 0),\n  a mask "
            "or temperature used in one pass only, or a kernel that is not deterministic."
        )
        run.finish(code=1)
