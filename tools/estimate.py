"""Will it fit? Prints the memory of each phase of a step on each device, by count.

    python tools/estimate.py ppo.py --preset opt-1.3b --devices 8x80
    python tools/estimate.py sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --devices x24

The flags are the script's own. --devices says how many there are and how many GiB each has: 8x80;
what it leaves out (8, x80, or no --devices) is taken from this machine. Nothing is loaded but the
models' config.json. docs/memory.md compares the counts with measured peaks.
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deepspeed.accelerator import get_accelerator

import ppo
import reward
import sft
from machinery.base import refused
from machinery.base.refused import Refused
from machinery.flags import declaring
from machinery.models import model_folders
from tools import estimate_memory as memory

GIB = 2**30
# What to try, in this order. docs/memory.md says what each costs.
ADVICE = """--zero_stage 1, 2, 3
  smaller per-device batches, and more --gradient_accumulation_steps
  --rollout_batch_size (PPO)
  --gradient_checkpointing
  --adam_offload
  --offload (with --zero_stage 3)
  --offload_states (PPO)
  --lora_dim 16 (PPO: --actor_lora_dim, --critic_lora_dim)
  --tensor_parallel_size 2
  more devices (with --zero_stage 3)"""


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
    own = declaring.of_role(args, "actor")
    actor = memory.Model(own, rows, with_logits=logits, kept=one_pass(args, own))
    actor.generates = args.rollout_batch_size
    models = [actor]
    if args.has_critic:
        own = declaring.of_role(args, "critic")
        models.append(memory.Model(own, rows, head=True, kept=one_pass(args, own)))
    if args.has_reference and not args.actor_lora_dim:
        own = declaring.of_role(args, "actor", dropout=0.0)
        models.append(memory.Model(own, rows, trains=False, with_logits=logits))
    for path in args.reward_model_name_or_path:
        own = declaring.of_role(args, "critic", model_name_or_path=path, dropout=None, lora_dim=0)
        models.append(memory.Model(own, rows, trains=False, head=True))
    return models


def one_pass(args, own):
    """Returns whether the forward that scores a rollout also trains on it.

    That is so where the rollout is one micro-batch with one update, and no dropout acts.
    own: the flags of the model.
    """
    steps = args.gradient_accumulation_steps * args.generation_batches * args.ppo_epochs
    rows, generated = args.per_device_training_batch_size, args.per_device_generation_batch_size
    dropout = own.dropout
    if dropout is None:
        config = model_folders.load_config(own.model_name_or_path, own.trust_remote_code)
        dropout = max(model_folders.own_dropout(config).values(), default=0)
    return steps == 1 and rows == generated and not dropout


SCRIPTS = {"sft": (sft, language_model), "reward": (reward, value_model), "ppo": (ppo, four_models)}


# ---- The devices -------------------------------------------------------------------------------
class Devices:
    """`count` devices, with `room` GiB to use on each.

    A tenth is left to CUDA's context, NCCL, the allocator's gaps. Ranks share the memory of a CPU,
    and it holds what is offloaded as well.
    """

    def __init__(self, text):
        """text: what --devices says."""
        if not re.fullmatch(r"(\d*[1-9]\d*)?(x\d+(\.\d+)?)?", text):
            words = f"--devices {text}: give their number, their GiB, or both: 8, x80, 8x80."
            raise Refused("devices", words)
        here = get_accelerator()
        count, _, gib = text.partition("x")
        self.count = int(count or here.device_count())
        self.gib = float(gib) if gib else here.total_memory() / GIB
        self.cpu = here.device_name() == "cpu" and not gib
        if self.cpu:
            self.gib /= self.count
        self.name = "device" if gib else here.device_name()
        self.room = 0.9 * self.gib

    def held(self, parts):
        """Returns the GiB on a device in one phase."""
        return (sum(parts.values()) - (0 if self.cpu else parts["host"])) / GIB


# ---- The report --------------------------------------------------------------------------------
def get_args(argv=None):
    """Returns the name of the script, its flags, and the Devices."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.add_argument("script", type=lambda text: Path(text).stem, choices=SCRIPTS)
    parser.add_argument("--devices", default="", help="8x80, 8 or x80: number and GiB of each")
    own, flags = parser.parse_known_args(argv)
    devices = Devices(own.devices)
    if "x" in own.devices:  # a GPU, then: in bf16, unless a flag after it says otherwise
        flags = ["--dtype", "bf16", *flags]
    os.environ["WORLD_SIZE"] = str(devices.count)  # flags are checked as the launcher's ranks would
    return own.script, SCRIPTS[own.script][0].get_args(flags), devices


def main(argv=None):
    script, args, devices = get_args(argv)
    models = SCRIPTS[script][1](args)
    phases = memory.count(args, models, devices.count, devices.cpu)
    print_table(script, args, models, devices, phases)
    peak = max(devices.held(parts) for parts in phases.values())
    sizes = f"{peak:.2f} GiB, and {devices.room:.2f} GiB may be used (0.9 of {devices.gib:.2f})"
    if peak <= devices.room:
        print(f"  It fits: the peak is {sizes}.")
    else:
        print(f"  It does NOT fit: the peak is {sizes}. What to try, in this order:\n  {ADVICE}")


def print_table(script, args, models, devices, phases):
    """Prints a line for the run, one for each model, and one for each phase."""
    checkpointing = ", gradient checkpointing" if args.gradient_checkpointing else ""
    print(
        f"{script}.py on {devices.count} x {devices.name}, {args.dtype}{checkpointing}: "
        "GiB on the fullest one, by count, nothing was loaded"
    )
    for model in models:
        lora = model.args.lora_dim if model.trains else 0
        state = f"LoRA {lora} on it trains" if lora else "trained" if model.trains else "frozen"
        print(
            f"  {model.sizes().weights / 1e6:10,.1f} M weights, {state}, ZeRO {model.stage()}, "
            f"{model.rows} x {args.max_seq_len} tokens   {model.args.model_name_or_path}"
        )
    print(f"  {'':9}" + "".join(f"{part:>12}" for part in (*memory.PARTS, "device")))
    for phase, parts in phases.items():
        sizes = (*(size / GIB for size in parts.values()), devices.held(parts))
        print(f"  {phase:9}" + "".join(f"{size:12.2f}" for size in sizes))


if __name__ == "__main__":
    refused.program(main)
