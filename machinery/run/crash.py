"""How a run ends: in order, at a number that is not finite, or by an error that names its rank."""

import errno
import faulthandler
import json
import math
import shutil
import sys
import time
from pathlib import Path

import deepspeed.comm as dist
import torch
from safetensors import SafetensorError

from machinery.base import ranks

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # full, or read-only
ROOM = "Older checkpoints are as they were: make room, and go on with --resume."
NO_CHECKPOINT = "There is no checkpoint to go on from; --save_steps N writes them."
WAITED = "Another rank has died, failed or hangs: look for what it has printed."
FP16 = "Gradients overflow fp16 even unscaled: use --dtype bf16 or fp32, or a lower rate."
NOT_FINITE = "Likely: a learning rate too high, or fp16 where the model was trained in bf16."
NOT_FINITE_PPO = """Check in this order: equal generation and training batch sizes, --ppo_epochs 1,
  --generation_batches 1; ZeRO stage 2; --dtype bf16 or fp32; then the learning rates."""


def finish(args, code=0):
    """Leaves the group of ranks in order, and then the program."""
    if code == 0:
        ranks.say(f"done: {args.output_dir}")
    ranks.barrier()
    dist.destroy_process_group()
    # gloo's threads now drop their last tensors. If they did so while Python shuts down, a run that
    # has ended well would abort (PyTorch #179291).
    time.sleep(0.1)
    sys.exit(code)


def stop_unless_finite(args, record, rows=()):
    """Stops the run if a number of `record`, the same on all ranks, is NaN or infinite.

    Each rank then writes its `rows`, an iterable of dicts that is read only then. Those of step 3
    can be given to --data_path.
    """
    numbers = {name: value for name, value in record.items() if isinstance(value, float)}
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    if not wrong:
        return
    step, where = record["step"], ""
    if lines := [json.dumps({**row, "step": step}) + "\n" for row in rows]:
        file = Path(args.output_dir) / f"nonfinite_rank{ranks.get_rank()}.jsonl"
        file.write_text("".join(lines))
        where = "\n  The step's rows are in nonfinite_rank*.jsonl."
    advice = NOT_FINITE_PPO if hasattr(args, "ppo_epochs") else NOT_FINITE
    what = f"error: step {step}: {', '.join(wrong)} not finite. Stopped"
    ranks.say(f"{what}; the last checkpoint is untouched.\n  {advice}{where}")
    finish(args, code=1)


def waited_in_vain(error):
    """Returns whether an error says that another rank did not answer."""
    return "gloo" in str(error) or isinstance(error, torch.distributed.DistError)


class Phase:
    """What this rank is doing, in words: an error that ends the run says it."""

    def __init__(self, minutes):
        """minutes: --timeout_minutes, after which a rank gives up waiting for another."""
        self.text, self.seconds = "starting", minutes * 60 - min(60, minutes * 15)

    def note(self, text):
        """Notes what begins now.

        If nothing else is noted for almost `minutes`, every rank prints where it is in its code:
        under NCCL a wait that is too long is no error in Python, but the end of the process.
        """
        self.text = text
        if ranks.get_world_size() > 1:
            faulthandler.dump_traceback_later(self.seconds)

    def report(self, kind, error, trace):
        """Says which rank stopped, what it was doing, and why: a sys.excepthook.

        There is no traceback where another rank, the disk or Ctrl-C is to blame.
        """
        why = f"{kind.__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if waited_in_vain(error):
            why += f"\n  {WAITED}"
        elif self.is_of_disk(error):
            why += f"\n  {advice_for_disk(Path(self.text.partition('writing ')[2] or '.'))}"
        elif "loss scale already at minimum" in str(error):
            why += f"\n  {FP16}"
        elif kind is not KeyboardInterrupt:
            sys.__excepthook__(kind, error, trace)
        which = f"rank {ranks.get_rank()} of {ranks.get_world_size()}"
        print(f"error: {which} stopped {self.text}: {why}", file=sys.stderr, flush=True)

    def is_of_disk(self, error):
        """Returns whether the disk is to blame: torch and safetensors raise errors of their own."""
        if isinstance(error, torch.OutOfMemoryError):  # a RuntimeError, too
            return False
        writing = self.text.startswith("writing ")
        own = writing and isinstance(error, (OSError, RuntimeError, SafetensorError))
        return own or (isinstance(error, OSError) and error.errno in DISK_ERRORS)


def advice_for_disk(folder):
    """Returns, in words, how much room is left, and how to go on. folder: what was written."""
    above = (folder.absolute(), *folder.absolute().parents)
    free = shutil.disk_usage(next(path for path in above if path.exists())).free / 1e9
    kept = any(any(path.glob("checkpoints/step-*")) for path in above[:3])
    return f"{free:,.1f} GB are free there. {ROOM if kept else NO_CHECKPOINT}"
