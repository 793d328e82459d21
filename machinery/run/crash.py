"""How a run ends: in order, at a number that is not finite, or by an error that names its rank."""

import json
import math
import os
import sys
import time
from pathlib import Path

import deepspeed.comm as dist
import torch

from machinery.base import ranks

# In this order. What to look at elsewhere, and why: course/clinic/README.md
NOT_FINITE = "Look at: learning rate; --allow_unstable 1; on a GPU --dtype, attention kernel."


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


def stop_if_not_finite(args, record, rows=()):
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
    what = f"error: step {step}: {', '.join(wrong)} not finite. Stopped"
    ranks.say(f"{what}; the last checkpoint is untouched.\n  {NOT_FINITE}{where}")
    finish(args, code=1)


class Phase:
    """What this rank is doing, in words: an error that ends the run says it."""

    text = "starting"

    def note(self, text):
        """Notes what begins now."""
        self.text = text
        ranks.go_on()

    def report(self, kind, error, trace):
        """Says which rank stopped, what it was doing, and why: a sys.excepthook.

        There is no traceback where another rank, a port or Ctrl-C is to blame.
        """
        why = f"{kind.__name__}: {error}"
        of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
        of_others = of_gloo or isinstance(error, torch.distributed.DistError)
        taken = "ddress already in use" in why
        if not (of_others or taken or kind is KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        if taken:
            port = os.environ.get("MASTER_PORT")
            why = f"port {port} is taken, by another run perhaps: give the launcher --master_port N"
            why += '\n  (with make: RANKS="--num_gpus 2 --master_port 29501")'
        elif of_others and ranks.launched() > 1:
            why += "\n  Another rank has died, failed or hangs: look for what it has printed."
        elif self.text.startswith("writing ") or "[Errno 28]" in why:
            why += "\n  If the disk is full, make room and --resume."
        which = f"rank {os.environ.get('RANK', 0)} of {ranks.launched()}"
        print(f"error: {which} stopped {self.text}: {why}", file=sys.stderr, flush=True)
