"""Will it fit? Prints the memory of each phase of a step on each device, by count.

    python tools/estimate.py ppo.py --preset opt-1.3b --devices 8x80
    python tools/estimate.py sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --devices x24

The flags are the script's own. --devices says how many there are and how many GiB each has: 8x80;
what it leaves out (8, x80, or no --devices) is taken from this machine. Nothing is loaded but the
models' config.json. docs/memory.md compares the counts with measured peaks.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas
from deepspeed.accelerator import get_accelerator

import ppo
import reward
import sft
from machinery import flags as declaring
from machinery import refused
from tools import estimate_memory as memory

GIB = 2**30


# ---- The models of each script, and what they work on ------------------------------------------
def language_model(args):
    """Returns the models of sft.py: one that trains."""
    return [memory.Model(args, args.per_device_train_batch_size)]


def value_model(args):
    """Returns the models of reward.py: one that trains, on two responses for each prompt."""
    return [memory.Model(args, 2 * args.per_device_train_batch_size, head=True)]


def four_models(args):
    """Returns the models of ppo.py. With LoRA the reference takes no memory of its own."""
    rows, logits = args.per_device_training_batch_size, args.max_answer_seq_len
    actor_args, critic_args = declaring.of_role(args, "actor"), declaring.of_role(args, "critic")
    actor = memory.Model(actor_args, rows, with_logits=logits, generates=args.rollout_batch_size)
    models = [actor]
    if args.has_critic:
        models.append(memory.Model(critic_args, rows, head=True))
    if args.has_reference and not args.actor_lora_dim:
        own = declaring.with_flags(actor_args, dropout=0.0)
        models.append(memory.Model(own, rows, trains=False, with_logits=logits))
    for path in args.reward_model_name_or_path:
        changes = dict(model_name_or_path=path, dropout=None, lora_dim=0)
        own = declaring.with_flags(critic_args, **changes)
        models.append(memory.Model(own, rows, trains=False, head=True))
    return models


SCRIPTS = {"sft": (sft, language_model), "reward": (reward, value_model), "ppo": (ppo, four_models)}


# ---- The devices -------------------------------------------------------------------------------
class Devices:
    """`count` devices, with `room` GiB to use on each.

    A tenth is left to CUDA's context, NCCL, the allocator's gaps. Ranks share the memory of a CPU,
    and it holds what is offloaded as well.
    """

    def __init__(self, text):
        """text: what --devices says. Raises a ValueError, of which argparse makes a refusal."""
        here = get_accelerator()
        count, _, gib = text.partition("x")
        self.count = int(count or here.device_count())
        if self.count < 1:
            raise ValueError
        self.gib = float(gib) if gib else here.total_memory() / GIB
        self.name = "device" if gib else here.device_name()
        self.cpu = self.name == "cpu"
        if self.cpu:
            self.gib /= self.count
        self.room = 0.9 * self.gib

    def held(self, parts):
        """Returns the GiB on a device in one phase."""
        return (sum(parts.values()) - (0 if self.cpu else parts["host"])) / GIB


# ---- The report --------------------------------------------------------------------------------
def get_args(argv=None):
    """Returns the name of the script, its flags, and the Devices."""
    parser = declaring.new_parser(__doc__)
    parser.add_argument("script", type=lambda text: Path(text).stem, choices=SCRIPTS)
    number = "number and GiB of each: 8x80, 8 or x80"
    parser.add_argument("--devices", type=Devices, default="", help=number)
    own, flags = parser.parse_known_args(argv)
    if own.devices.name == "device":  # a GPU, then: bf16, unless a flag after it says otherwise
        flags = ["--dtype", "bf16", *flags]
    # flags are checked as the launcher's ranks would
    os.environ["WORLD_SIZE"] = str(own.devices.count)
    args = SCRIPTS[own.script][0].get_args(flags)
    return own.script, args, own.devices


def main(argv=None):
    """Prints a line for the run, one for each model and one for each phase, and if it fits."""
    script, args, devices = get_args(argv)
    models = SCRIPTS[script][1](args)
    phases = memory.count(args, models, devices.count, devices.cpu)
    print(
        f"{script}.py on {devices.count} x {devices.name}, {args.dtype}: "
        "GiB on the fullest one, by count, nothing was loaded"
    )
    for model in models:
        trained = model.sizes.trained * model.trains / 1e6
        print(
            f"  {model.sizes.weights / 1e6:10,.1f} M weights, {trained:,.1f} M train, "
            f"ZeRO {model.stage()}, {model.rows} x {args.max_seq_len} tokens   "
            f"{model.args.model_name_or_path}"
        )
    table = pandas.DataFrame(phases) / GIB
    held = [devices.held(parts) for parts in phases.values()]
    table.loc["device"] = held
    print(table.T.to_string(float_format="{:.2f}".format, col_space=11))
    peak = max(held)
    fits = "fits" if peak <= devices.room else "does NOT fit (what to try: docs/memory.md)"
    room = f"{devices.room:.2f} GiB may be used (0.9 of {devices.gib:.2f})"
    print(f"  It {fits}: the peak is {peak:.2f} GiB, and {room}.")


if __name__ == "__main__":
    refused.program(main)
