"""How a run ends: in order, at a number that is not finite, or by an error that names its rank."""

import json
import math
import shutil
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path

import deepspeed.comm as dist
import torch
from safetensors import SafetensorError

from machinery.base import ranks

NO_NOTES = "The other ranks' notes are gone with who held them: rank 0, or the launcher."
ROOM = "Older checkpoints are as they were: make room, and go on with --resume."
NO_CHECKPOINT = "There is no checkpoint to go on from; --save_steps N writes them."
FP16 = (
    "Gradients overflow fp16 even unscaled, so no scale helps: the model was trained in bf16 "
    "(--dtype bf16, or fp32),\n  the learning rate is too high, or the data holds a NaN."
)
NOT_FINITE = "Likely: a learning rate too high, or fp16 where the model was trained in bf16."
NOT_FINITE_PPO = (
    "Check in this order: equal --per_device_generation_batch_size and "
    "--per_device_training_batch_size, --ppo_epochs 1,\n  --generation_batches 1; then ZeRO stage "
    "(2) and --dtype (bf16 or fp32 in place of fp16); then the learning rates."
)


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
    ranks.say(
        f"error: step {step}: {', '.join(wrong)} not finite. "
        f"Stopped; the last checkpoint is untouched.\n  {advice}{where}"
    )
    finish(args, code=1)


def waited_in_vain(error):
    """Returns whether an error says that another rank did not answer."""
    return "gloo" in str(error) or isinstance(error, torch.distributed.DistError)


def store():
    """Returns the ranks' key-value store."""
    return torch.distributed.distributed_c10d._get_default_store()


class Phase:
    """What this rank is doing, in words. The other ranks read it if this one dies or hangs."""

    def __init__(self):
        self.text, self.noted = "starting", time.monotonic()

    def note(self, text):
        self.text, self.noted = text, time.monotonic()
        if ranks.get_world_size() > 1:
            store().set(f"phase{ranks.get_rank()}", text)

    def watch(self, minutes):
        """Starts a thread that says where the ranks are, if nothing is noted for almost `minutes`.

        Under NCCL it is the last word: a wait that is too long is no error in Python, but the end
        of the process, and meanwhile no signal is handled.
        """
        early = min(60, minutes * 15)  # seconds

        def keep_watch():
            told = None
            while True:
                time.sleep(min(1, early / 4))
                quiet = time.monotonic() - self.noted
                if quiet > minutes * 60 - early and told != self.noted:
                    told = self.noted
                    self.say_where_all_are(quiet, early / 2)

        self.note(self.text)
        if ranks.get_world_size() > 1:
            threading.Thread(target=keep_watch, daemon=True).start()

    def say_where_all_are(self, quiet, patience):
        """Prints where each rank is in its code, on the first rank that can.

        quiet: seconds since this rank's last note. patience: seconds in which the others write
        down where they are. One that does not has died, or hangs outside of Python.
        """
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        calls = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in stack[-4:])
        rank, mark, found = ranks.get_rank(), ", now in ", defaultdict(list)
        try:
            store().set(f"phase{rank}", f"{self.text}{mark}{calls}")
            time.sleep(patience)
            doing = [store().get(f"phase{i}").decode() for i in range(ranks.get_world_size())]
        except Exception:  # the store is gone with who held it
            return
        if any(mark in text for text in doing[:rank]):
            return  # that rank says it
        for number, text in enumerate(doing):
            found[text].append(str(number))
        lines = [f"\n  rank {', '.join(numbers)}: {text}" for text, numbers in found.items()]
        what = f"warning: rank {rank} has come no further for {quiet / 60:.1f} minutes"
        print(f"{what}.{''.join(lines)}", file=sys.stderr, flush=True)

    def report(self, kind, error, trace):
        """Says which rank stopped, what it was doing, and for whom it waited: a sys.excepthook.

        There is no traceback where other ranks, the disk or Ctrl-C are to blame.
        """
        doing, waited = self.text, waited_in_vain(error)
        first_line = (str(error).strip().splitlines() or [""])[0]
        why = self.blame_others(f"{kind.__name__}: {first_line}", waited)
        writing = doing.startswith("writing ") and not waited
        of_disk = isinstance(error, (OSError, RuntimeError, SafetensorError))
        of_memory = isinstance(error, torch.OutOfMemoryError)  # a RuntimeError, too
        if writing and of_disk and not of_memory:
            time.sleep(5 if ranks.get_rank() else 0)  # the launcher ends the run when one has left
            place = Path(doing.removeprefix("writing ")).absolute()
            above = place.parents
            free = shutil.disk_usage(next(path for path in above if path.exists())).free / 1e9
            kept = any(any(f.glob("checkpoints/step-*")) for f in (place, *above[:2]))
            why += f"\n  {free:,.1f} GB are free there. {ROOM if kept else NO_CHECKPOINT}"
        elif "loss scale already at minimum" in str(error):
            why += f"\n  {FP16}"
        elif not (waited or isinstance(error, (OSError, KeyboardInterrupt))):
            sys.__excepthook__(kind, error, trace)
        which = f"rank {ranks.get_rank()} of {ranks.get_world_size()}"
        print(f"error: {which} stopped {doing}: {why}", file=sys.stderr, flush=True)

    def blame_others(self, why, waited):
        """Tells the other ranks why this one stops. Returns `why`, and who was waited for."""
        try:
            if not waited:
                self.note(f"{self.text}, stopped by {why}")
                return why
            self.note(f"{self.text}, and waits")
            # The others that wait give up now, too. One that does not say so has died or hangs.
            time.sleep(2)
            others = sorted(set(range(ranks.get_world_size())) - {ranks.get_rank()})
            doing = {rank: store().get(f"phase{rank}").decode() for rank in others}
            heard = [f"rank {rank} was last heard of {text}" for rank, text in doing.items()]
            return "\n  ".join([why, *(line for line in heard if not line.endswith("waits"))])
        except Exception:  # without torchrun it is rank 0 that holds the store
            return f"{why}\n  {NO_NOTES}"
