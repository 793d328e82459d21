"""--estimate: will it fit? Prints the memory of each phase of a step, and what would make it fit.

docs/deepspeed.md compares the counts with measured peaks.
"""

import itertools
import os
import re
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from machinery.base import ranks, refused
from machinery.flags import declaring, refusals
from machinery.rollout import kept_pass
from tools import estimate_memory as memory

GIB = 2**30
POWERS = [2**k for k in range(1, 12)]
ROLES = ("actor_", "critic_")  # flags have forms for one of them


# ---- The models of each script, and what they work on ------------------------------------------
def language_model(args):
    """Returns the models of sft.py: one that trains."""
    return [memory.Model(args, args.per_device_train_batch_size)]


def value_model(args):
    """Returns the models of reward.py: one that trains, on two responses for each prompt."""
    return [memory.Model(args, 2 * args.per_device_train_batch_size, head=True)]


def four_models(args):
    """Returns the models of ppo.py. With LoRA the actor without its adapters is the reference."""
    rows, kept = args.per_device_training_batch_size, kept_pass.roles(args)
    logits = {"with_logits": args.max_answer_seq_len}
    actor = memory.Model(declaring.of_role(args, "actor"), rows, kept="actor" in kept, **logits)
    actor.generates = args.rollout_batch_size
    models = [actor]
    if args.has_critic:
        critic = declaring.of_role(args, "critic")
        models.append(memory.Model(critic, rows, head=True, kept="critic" in kept))
    if not args.actor_lora_dim:
        reference = declaring.of_role(args, "actor", dropout=0.0)
        models.append(memory.Model(reference, rows, trains=False, **logits))
    for path in args.reward_model_name_or_path:
        judge = declaring.of_role(args, "critic", model_name_or_path=path, dropout=None, lora_dim=0)
        models.append(memory.Model(judge, rows, trains=False, head=True))
    return models


# ---- The report --------------------------------------------------------------------------------
def estimate(args, models_of, refusal=refusals.refusal):
    """Prints what a device holds in each phase and, where that is too much, what would make it fit.

    Ends the program. refusal(args) returns why flags do not go together, or None.
    """
    devices = Devices(args)

    def peak_with(changes, count=devices.count):
        """Returns the peak with all changes; inf where flags contradict each other."""
        new = declaring.of_role(args)
        for (flag, value), role in itertools.product(changes.items(), ("", *ROLES)):
            if role + flag in args:
                setattr(new, role + flag, value)
        stages = [value for name, value in vars(new).items() if name.endswith("zero_stage")]
        if refusal(new) is not None or (new.offload and min(stages) < 3):
            return float("inf")
        return devices.peak(memory.count(new, models_of(new), count, devices.cpu))

    phases = memory.count(args, models_of(args), devices.count, devices.cpu)
    print_table(args, models_of(args), devices, phases)
    peak, room = devices.peak(phases), devices.room
    verdict = (
        f"the peak is {peak:.2f} GiB, and {room:.2f} GiB may be used (0.9 of {room / 0.9:.2f})"
    )
    if peak <= room:
        ranks.say(f"  It fits: {verdict}.")
        sys.exit(0)
    ranks.say(
        f"  It does NOT fit: {verdict}. The fewest flags that make it fit, and its peak then:"
    )
    found = fewest_changes(options_of(args), peak_with, room)
    for changes, size in found:
        ranks.say(f"    {size:8.2f}   {spell(changes)}")
    stage_3 = {"zero_stage": 3}
    for count in (devices.count * power for power in POWERS):
        size = peak_with(stage_3, count)
        if size <= room:
            ranks.say(f"    {size:8.2f}   {spell(stage_3)} on {count} devices")
            sys.exit(0)
    none = "    none, on any number of devices: shorter rows, or a smaller model"
    ranks.say("" if found else none)
    sys.exit(0)


class Devices:
    """The devices that --estimate names, else those that were launched, with `room` GiB on each.

    A tenth is left to CUDA's context, NCCL, the allocator's gaps. Ranks share the memory of a CPU,
    and it holds what is offloaded as well.
    """

    def __init__(self, args):
        if not re.fullmatch(r"(\d*[1-9]\d*)?(x\d+(\.\d+)?)?", args.estimate):
            refused.fail(
                f"--estimate {args.estimate}: give devices, their GiB, both or none:\n"
                "  --estimate 8, --estimate x80, --estimate 8x80, --estimate."
            )
        count, _, gib = args.estimate.partition("x")
        launched = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS", 1)
        self.count = int(count or launched)
        if self.count % args.tensor_parallel_size:
            refused.fail(
                f"--tensor_parallel_size {args.tensor_parallel_size} must divide the number of "
                f"devices, {self.count}.\n  --estimate 8x80 asks about 8."
            )
        self.name = "device" if gib else get_accelerator().device_name()
        self.cpu = ranks.device().type == "cpu" and not gib
        self.room = 0.9 * (float(gib) if gib else get_accelerator().total_memory() / GIB)
        if self.cpu:
            here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
            self.room /= int(here or self.count)

    def held(self, parts):
        """Returns the GiB on a device in one phase."""
        return (sum(parts.values()) - (0 if self.cpu else parts["host"])) / GIB

    def peak(self, phases):
        """Returns the GiB in the fullest phase."""
        return max(self.held(parts) for parts in phases.values())


def print_table(args, models, devices, phases):
    """Prints a line for the run, one for each model, and one for each phase."""
    checkpointing = ", gradient checkpointing" if args.gradient_checkpointing else ""
    ranks.say(
        f"{Path(sys.argv[0]).name} on {devices.count} x {devices.name}, {args.dtype}"
        f"{checkpointing}: GiB on the fullest one, by count, nothing was loaded"
    )
    for model in models:
        lora = getattr(model.args, "lora_dim", 0) if model.trains else 0
        state = f"LoRA {lora} on it trains" if lora else "trained" if model.trains else "frozen"
        ranks.say(
            f"  {model.sizes().weights / 1e6:10,.1f} M weights, {state}, ZeRO {model.stage()}, "
            f"{model.rows} x {args.max_seq_len} tokens   {model.args.model_name_or_path}"
        )
    ranks.say(f"  {'':9}" + "".join(f"{part:>12}" for part in (*memory.PARTS, "device")))
    for phase, parts in phases.items():
        sizes = (*(size / GIB for size in parts.values()), devices.held(parts))
        ranks.say(f"  {phase:9}" + "".join(f"{size:12.2f}" for size in sizes))


# ---- What would make it fit: changes, {flag: value} ---------------------------------------------
def options_of(args):
    """Returns the options, mildest first: each a list of changes, of which one is made."""
    pattern = re.compile("per_device_(train|training|generation)_batch_size")
    batches = {name: size for name, size in vars(args).items() if pattern.fullmatch(name)}
    smaller = []  # batches, of which more are accumulated
    for power in POWERS:
        if not any(size % power for size in batches.values()):
            changes = {name: size // power for name, size in batches.items()}
            accumulation = args.gradient_accumulation_steps * power
            smaller.append({**changes, "gradient_accumulation_steps": accumulation})
    together = getattr(args, "rollout_batch_size", 1)
    options = [
        [{"rollout_batch_size": together // power} for power in POWERS if together >= power],
        [{"gradient_checkpointing": True}],
        [{"zero_stage": stage} for stage in range(args.zero_stage + 1, 4)],
        smaller,
        [{"adam_offload": True}],
        [{"offload": True}],
        [{"dtype": "bf16"}] if args.dtype == "fp32" else [],
        [{"lora_dim": 16}] if "lora_dim" in args else [],
    ]
    given = vars(args).items()
    return [option for option in options if option and not option[0].items() <= given]


def fewest_changes(options, peak_with, room):
    """Returns [(changes, peak)]: of each smallest set of options the mildest that fits."""
    found, count = [], 0
    while not found and count < len(options):
        count += 1
        for some in itertools.combinations(options, count):
            for parts in itertools.product(*some):
                changes = {}
                for part in parts:
                    changes.update(part)
                peak = peak_with(changes)
                if peak <= room:
                    found.append((changes, peak))
                    break
    return found


def spell(changes):
    """Returns changes as one writes them on the command line.

    Where the command names the flag of one role, that goes before the flag for both.
    """
    words = []
    for flag, value in changes.items():
        own = [role + flag for role in ROLES if f"--{role}{flag}" in " ".join(sys.argv)]
        for name in own if len(own) == 2 else (flag, *own):
            words.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(words)
