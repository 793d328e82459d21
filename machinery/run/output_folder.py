"""The output folder: who may write there, what --resume accepts, and args.json."""

import itertools
import json
import os
import time
from importlib import metadata
from pathlib import Path

from machinery.base import locks, ranks, records
from machinery.base.refused import Refused
from machinery.models import saving
from machinery.run import checkpoints

LOCK = ".lock"
PARTS = {"best": "keep_best", "ema": "enable_ema", "critic": "has_critic"}  # a flag for each
OF_A_START = {"resume", "overwrite", "local_rank", "output_dir"}  # flags of one start of a run
LOGS = (".log", ".out", ".err", ".txt")  # what a launcher or a shell may have opened there before


# ---- What is there ----
def read_record(output):
    """Returns args.json in the folder `output`; {} if there is none, or none of ours, or half."""
    record = records.read(output)
    return record if "data_fingerprint" in record else {}


def taken(output):
    """Returns what is in the folder already: all but logs of launchers and hidden files."""
    return sorted(path.name for path in output.glob("[!.]*") if path.suffix not in LOGS)


def versions():
    """Returns {library: its version} of those on which a run's numbers depend."""
    libraries = "torch deepspeed transformers tokenizers datasets numpy".split()
    return {library: metadata.version(library) for library in libraries}


def started_with(args):
    """Returns the flags, but for OF_A_START, and the libraries' versions: {name: value}."""
    flags = {name: getattr(args, name) for name in args.declared.flags - OF_A_START}
    return {**flags, **versions()}


# ---- What is refused ----
def refuse_unusable(args):
    """Refuses --output_dir if it cannot be had, and --resume if it cannot go on with its run.

    A run that stopped before its first checkpoint starts anew: args.resume becomes False.
    """
    output = Path(args.output_dir)
    refuse_unwritable(output)
    if args.resume:
        refuse_resume(args, output)
    elif (found := taken(output)) and not (args.overwrite and read_record(output)):
        words = f"--output_dir {output} is not empty: it holds {found[0]}."
        advice = "If it is a run, --resume goes on, --overwrite moves it aside."
        raise Refused("output-taken", f"{words}\n  {advice}")


def refuse_in_use(args, who):
    """Refuses a folder in which another run, `who` in words, is writing."""
    if who:
        words = f"--output_dir {args.output_dir} is in use by {who}."
        raise Refused("output-in-use", f"{words}\n  Wait for it, stop it, or take another.")


def refuse_unwritable(output):
    """Refuses an --output_dir that cannot be written to."""
    above = (output, *output.absolute().parents)
    exists = next(path for path in above if os.path.lexists(path))
    if not (exists.is_dir() and os.access(exists, os.W_OK)):
        words = f"--output_dir {output}: {exists} is no folder, or cannot be written to."
        raise Refused("output-unusable", words)


# ---- --resume ----
def refuse_resume(args, output):
    """Refuses --resume if it cannot go on with the run in `output`."""
    whole, before = checkpoints.whole_checkpoints(args), read_record(output)
    if not before:
        words = f"--resume: {output} holds no run, or its args.json is missing or damaged."
        raise Refused("no-args-json", words)
    if whole:
        refuse_other_flags(args, before)
    if saving.is_whole(output):
        words = f"--resume: the run in {output} is finished. A new one can start from its model."
        parts = [part for part, flag in PARTS.items() if before.get(flag)]
        if lost := [part for part in parts if not saving.is_whole(output / part)]:
            words += f"\n  {', '.join(lost)} is gone: tools/export.py makes models of a checkpoint."
        raise Refused("run-finished", words)
    if not whole:
        ranks.say(f"the run in {output} stopped before its first checkpoint: it starts anew")
        args.resume, args.overwrite = False, True


def refuse_other_flags(args, before):
    """Refuses --resume if a fixed flag was another in args.json's `before`.

    Of what is named by a path the last part is compared: folders may have moved. None, 0, False
    and empty lists are alike.
    """
    for name in sorted(args.declared.fixed & before.keys()):
        old, new = before[name], getattr(args, name)
        if comparable(args, name, old) != comparable(args, name, new):
            words = f"--resume: the run was begun with --{name} {old}, and now it is {new}."
            raise Refused("flag-changed", words)


def comparable(args, name, value):
    """Returns the value of a flag, or of what it names the last part of each path."""
    if name not in args.declared.names or not value:
        return value or None
    return [Path(str(text)).name for text in (value if isinstance(value, list) else [value])]


def say_changed_flags(args, before):
    """Says which flags are others than in args.json's `before`: one may have been forgotten."""
    now = json.loads(json.dumps(vars(args), default=str))
    for name in sorted(args.declared.flags & before.keys() - OF_A_START):
        if before[name] != now[name]:
            ranks.say(f"--{name} was {before[name]} and is now {now[name]}")


# ---- The run's own ----
class OutputFolder:
    """The folder of a run, which alone writes there from `take` to `release`."""

    def __init__(self, args):
        self.args, self.path, self.record = args, Path(args.output_dir), {}
        self.lock = locks.Lock(self.path / LOCK)
        refuse_in_use(args, self.lock.holder())
        resumed = args.resume  # also of a run that must start anew
        refuse_unusable(args)
        if resumed:
            say_changed_flags(args, read_record(self.path))

    def take(self, facts):
        """Locks the folder, checks it again, and moves aside what --overwrite replaces.

        Other runs may have been there while models were loaded. From here on nothing is refused but
        a checkpoint. facts: a dict for args.json, beside flags and versions.
        """
        who, args = None, self.args
        if ranks.get_rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            who = self.lock.take()
        refuse_in_use(args, ranks.all_gather_objects([who])[0])
        self.refuse_unshared()
        refuse_unusable(args)
        ranks.barrier()  # rank 0 writes below: all must have seen the folder as it was
        if ranks.get_rank() == 0 and not args.resume and taken(self.path):
            self.move_aside()
        self.record = {
            **vars(args),
            "script": args.declared.script,
            "versions": versions(),
            "world_size": ranks.get_world_size(),
            "device": str(ranks.device()),
            **facts,
        }
        if not args.resume:
            self.note()

    def refuse_unshared(self):
        """Refuses a folder in which a rank does not see, within a minute, rank 0's lock.

        Else each machine would keep its own part of every checkpoint.
        """
        late = time.monotonic() + 60  # over NFS a new file may come into sight after a while
        while not self.lock.path.exists() and time.monotonic() < late:
            time.sleep(1)
        why = f"--output_dir {self.path} is not the same folder on all machines"
        advice = "It must be on storage that all of them share."
        ranks.fail_unless_alike({".lock is there": self.lock.path.exists()}, why, advice)

    def move_aside(self):
        """Moves the folder to NAME.old-1, or the next free number, and makes a new one. On rank 0.

        The lock moves with the old folder, and another run may take the new one's first.
        """
        here = self.path.resolve()  # of a link, what it points to
        names = (here.with_name(f"{here.name}.old-{number}") for number in itertools.count(1))
        aside = next(path for path in names if not os.path.lexists(path))
        here.rename(aside)
        here.mkdir(exist_ok=True)
        self.lock.release()
        self.lock = locks.Lock(self.path / LOCK)
        refuse_in_use(self.args, self.lock.take())
        ranks.say(f"what was in {self.path} is now in {aside}")

    def note(self):
        """Writes args.json, whole or not at all: at the start, and when a checkpoint is loaded."""
        if ranks.get_rank() == 0:
            aside = self.path / ".args.json"
            aside.write_text(json.dumps(self.record, indent=1, default=str) + "\n")
            saving.sync(aside)
            aside.replace(self.path / "args.json")
            saving.sync(self.path)
