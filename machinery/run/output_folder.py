"""The output folder: who writes there, what --resume accepts, what is removed, and args.json."""

import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import datasets
import deepspeed
import numpy as np
import torch
import transformers

from machinery.base import ranks, records, refused
from machinery.models import lora, model_card, saving
from machinery.run import checkpoints, folder_lock, logs

MODELS = ("ema", "critic", "best")  # folders of models, in an output folder
FOLDERS = (*MODELS, "checkpoints")
# What a run leaves there beside the files of its models, which args.json lists
FILES = (*logs.FILES, "judge.jsonl", "curves.png", "args.json")
LEFT = (*FILES, "nonfinite_rank*.jsonl", ".saving", *(f"{name}/.saving" for name in MODELS))
WRITTEN = (*FILES, ".args.json", ".lock")
CHECKPOINT = r"unfinished|(damaged-)?step-\d+"  # in checkpoints/; step-2-backup is not ours
MODEL = """config.json generation_config.json model*.safetensors* adapter_config.json
           model_config.json adapter_model.safetensors tokenizer.* tokenizer_config.json
           special_tokens_map.json added_tokens.json vocab.* merges.txt chat_template.*
           additional_chat_templates""".split()


# ---- What is there ----
def read_record(output):
    """Returns args.json in the folder `output`; {} if there is none, or none of ours, or half."""
    record = records.read(output)
    files = record.get("files", [])
    listed = isinstance(files, list) and all(isinstance(name, str) for name in files)
    return record if "data_fingerprint" in record and listed else {}


def removed(output):
    """Returns what a new run in the folder `output` removes: paths of ours, and other paths.

    Ours is what runs of ours have left. The others have names that a saved model would have. A
    README.md that the user has put in the place of ours stays.
    """
    record = read_record(output)
    folders = (output, *(output / name for name in MODELS))
    models = {file for folder in folders for name in MODEL for file in folder.glob(name)}
    left = {path for name in LEFT for path in output.glob(name)}.union(checkpoints_in(output))
    ours = {path for path in listed(output, record) if os.path.lexists(path)}
    ours = {path for path in ours if path.name != "README.md" or model_card.may_write(path.parent)}
    ours |= left if record else set()
    ours |= models if record and "files" not in record else set()  # of an older version
    return sorted(ours), sorted((models | left) - ours)


def listed(output, record):
    """Yields the paths in the folder `output` that its args.json, `record`, lists."""
    for name in map(Path, record.get("files", [])):
        if name.parts and not name.is_absolute() and ".." not in name.parts:
            yield output / name


def checkpoints_in(output):
    """Returns what has the name of a checkpoint of ours, whole or not."""
    return [path for path in output.glob("checkpoints/*") if re.fullmatch(CHECKPOINT, path.name)]


def holds_run(args):
    """Returns whether --output_dir holds a model that a run has saved, or a checkpoint."""
    saved = [saving.is_whole(Path(args.output_dir) / name) for name in ("", *FOLDERS)]
    return any(saved) or bool(checkpoints.whole_checkpoints(args))


# ---- What is refused ----
def check(args):
    """Ends the program if --output_dir cannot be had, or --resume cannot go on with its run.

    A run that stopped before its first checkpoint starts anew: args.resume becomes False.
    """
    if who := folder_lock.Lock(args.output_dir).holder():
        refuse_used(args, who)
    check_unlocked(args)


def check_unlocked(args):
    """Does what `check` does, but for the lock."""
    output = Path(args.output_dir)
    refuse_unusable(args, output)
    if args.max_steps == 0 and args.overwrite and holds_run(args):
        refused.fail(
            f"--max_steps 0 saves no model, and --overwrite would delete the one in {output}.\n"
            "  Take another --output_dir."
        )
    if not (args.overwrite or args.resume):
        refuse_taken(args, output)
    refuse_own_inputs(args, output)
    if args.resume:
        check_resume(args, output)


def refuse_used(args, who):
    """Ends the program because another run, `who` in words, is writing in --output_dir."""
    refused.fail(
        f"--output_dir {args.output_dir} is in use by {who}.\n"
        "  Wait for it, stop it, or take another --output_dir."
    )


def refuse_unusable(args, output):
    """Ends the program if --output_dir is empty, no folder, a link to nothing, or read-only.

    Likewise if a part of it is, or if a folder has the name of a file that the run writes.
    """
    if not args.output_dir.strip():
        refused.fail("--output_dir is empty.\n  Name a folder.")
    above = (output, *output.absolute().parents)
    exists = next(path for path in above if os.path.lexists(path))
    parts = [output / name for name in (*FOLDERS, ".saving")]
    folders = [path for path in parts if os.path.lexists(path)]
    folders += checkpoints_in(output)
    for path in (exists, *folders):
        if not (path.is_dir() and os.access(path, os.W_OK)):
            refused.fail(f"--output_dir {output}: {path} is not a folder that can be written to.")
    if folder := next((name for name in WRITTEN if (output / name).is_dir()), None):
        why = f"{folder} is a folder there, and the run writes a file of that name"
        refused.fail(f"--output_dir {output}: {why}.\n  Take another --output_dir.")


def refuse_taken(args, output):
    """Ends the program if `output` holds a run, or files that no run of ours has left there."""
    if holds_run(args):
        refused.fail(
            f"--output_dir {output} holds a run.\n  --overwrite replaces it, --resume goes on with "
            "an unfinished one, another --output_dir leaves it alone."
        )
    if foreign := removed(output)[1]:
        name = foreign[0].relative_to(output)
        refused.fail(
            f"--output_dir {output} holds {name}, which no run of ours has left there, "
            "and would delete it.\n  Take another --output_dir, or --overwrite."
        )


def refuse_own_inputs(args, output):
    """Ends the program if the run would delete, replace or read back what it starts from."""
    whole = output.resolve()
    models = [whole / name for name in ("", *MODELS)]
    lost = [] if args.resume else [path.resolve() for paths in removed(output) for path in paths]
    for flag, text, part in inputs(args):
        inside = Path(part).resolve()
        above = (inside, *inside.parents)
        base = " (its base)" if part != text else ""
        advice = "Take another --output_dir"
        if flag.endswith("model_name_or_path") and inside in models:
            why = f"is also --{flag}{base}: the run would delete what it starts from"
        elif flag.endswith("data_path") and inside in (whole, *whole.parents):
            why = f"is inside --{flag} {text}: what the run writes would be read as data"
        elif any(path in above or inside in path.parents for path in lost):
            why = f"holds --{flag} {text}: the run would delete it, or part of it"
            advice = "Move it, or take another --output_dir"
        else:
            continue
        refused.fail(f"--output_dir {output} {why}.\n  {advice}.")


def inputs(args):
    """Yields (flag, its text, path) for every path that a flag names and that exists.

    Of adapters also what they sit on. Of FILE:FUNCTION it is the file.
    """
    for flag in sorted(args.declared.names - {"output_dir", "preset"}):
        value = getattr(args, flag)
        for text in value if isinstance(value, list) else [value] if value else []:
            for part in (*lora.chain(text), text.rpartition(":")[0]):
                if part and Path(part).exists():
                    yield flag, text, part


# ---- --resume ----
def check_resume(args, output):
    """Ends the program if --resume cannot go on with the run in `output`."""
    whole, before = checkpoints.whole_checkpoints(args), read_record(output)
    finished = saving.is_whole(output)
    if whole and not before:
        refused.fail(
            f"--resume: {output}/args.json is missing or damaged, and it says how the run was "
            "begun.\n  Put it back, or begin anew in another --output_dir."
        )
    if whole:
        refuse_other_flags(args, before)
    if finished:
        refused.fail(
            f"--resume: {output} holds a finished run, so there is nothing to go on with.\n"
            "  --overwrite replaces it. To train on, start a new run from its model."
        )
    if not whole and (not before or holds_run(args)):
        empty = checkpoints.folder_of(args)
        refused.fail(
            f"--resume: there is no checkpoint in {empty}.\n  Leave it out to start anew "
            "(--overwrite, if the folder holds models)."
        )
    if not whole:
        ranks.say(f"the run in {output} stopped before its first checkpoint: it starts anew")
        args.resume = False


def refuse_other_flags(args, before):
    """Ends the program if a fixed flag was another in args.json's `before`.

    Of what is named by a path the last part is compared: folders may have moved. None, 0, False
    and empty lists are alike.
    """
    was = "--resume: the run was begun with"
    if before.get("script", args.declared.script) != args.declared.script:
        refused.fail(
            f"{was} {before['script']}.py, and this is {args.declared.script}.py.\n"
            "  Take another --output_dir."
        )
    for name, old, new in differing(args, before, args.declared.fixed):
        refused.fail(
            f"{was} --{name} {old}, and now it is {new}.\n"
            "  Give it as it was, or begin anew in another --output_dir."
        )


def say_changes(args, before):
    """Prints the flags that may change with --resume, and are not those of args.json's `before`."""
    names = vars(args).keys() - args.declared.fixed - {"resume", "overwrite", "output_dir"}
    said = [f"--{name} {old} -> {new}" for name, old, new in differing(args, before, names)]
    if said:
        ranks.say(f"--resume with other flags than before: {', '.join(said)}")


def differing(args, before, names):
    """Yields (name, its value in `before`, its value now), as typed, of each flag that differs."""
    for name in sorted(names & before.keys()):
        old, new = before[name], getattr(args, name)
        if comparable(args, name, old) != comparable(args, name, new):
            yield name, in_words(old), in_words(new)


def comparable(args, name, value):
    """Returns the value of a flag, or of what it names the last part of each path."""
    if name not in args.declared.names or not value:
        return value or None
    return [Path(str(text)).name for text in (value if isinstance(value, list) else [value])]


def in_words(value):
    """Returns the value of a flag as it is typed."""
    if isinstance(value, dict):
        return ",".join(f"{name}={other}" for name, other in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else value


# ---- The run's own ----
class OutputFolder:
    """The folder of a run, which alone writes there from `take` to `release`.

    What runs before it have left is removed by `settle`, when this run has made its first step.
    What it logs before that waits in memory (args._held).
    """

    def __init__(self, args):
        check(args)
        self.args, self.path = args, Path(args.output_dir)
        self.lock, self.record, args._held = folder_lock.Lock(self.path), {}, None
        self.before = sum(removed(self.path), [])

    def take(self, facts):
        """Locks the folder and checks it again, for other runs may have been there meanwhile.

        facts: a dict for args.json, beside flags and versions.
        """
        who = None
        if ranks.get_rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            who = self.lock.take()
        if who := ranks.all_gather_objects([who])[0]:
            refuse_used(self.args, who)
        self.refuse_unshared()
        check_unlocked(self.args)
        ranks.barrier()  # rank 0 writes below: all must have seen the folder as it was
        record = {name: value for name, value in vars(self.args).items() if name[0] != "_"}
        record |= {"script": self.args.declared.script, "world_size": ranks.get_world_size()}
        libraries = (torch, deepspeed, transformers, datasets, np)
        record["versions"] = {library.__name__: library.__version__ for library in libraries}
        record |= {"device": str(ranks.device()), **facts, "files": []}
        self.record, self.args._held = record, []
        if self.args.resume:
            before = read_record(self.path)
            record["files"] = before.get("files", [])
            say_changes(self.args, before)
        elif not any(removed(self.path)):
            self.settle()

    def refuse_unshared(self):
        """Ends the program if a rank does not see, within a minute, what rank 0 has written."""
        late = time.monotonic() + 60  # over NFS a new file may come into sight after a while
        while not self.lock.path.exists() and time.monotonic() < late:
            time.sleep(1)
        seen = self.lock.path.exists()
        why = f"--output_dir {self.path} is not the same folder on all machines: .lock is there"
        ranks.fail_unless_alike(seen, why, "It must be on storage that all of them share.")

    def settle(self):
        """Removes what was there before, if it has not, and writes args.json and what is held."""
        held, self.args._held = self.args._held, None
        if held is None or ranks.get_rank() != 0:
            return
        for old in [] if self.args.resume else self.going():
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        for name in FOLDERS:
            with suppress(OSError):  # it holds something else, or is a link, or is not there
                (self.path / name).rmdir()
        for function, inputs in held:
            function(*inputs)

    def going(self):
        """Returns what `settle` removes, in order, but not a file that a monitor now has open."""
        paths = sum(removed(self.path), [])
        paths = [path for path in paths if "tfevents" not in path.name or path in self.before]
        # The marks first: a folder that is half cleared is no finished run. Then args.json, so that
        # --resume does not go on with the old run in the name of the new one.
        order = (*saving.MARKS, "args.json")
        place = {name: number for number, name in enumerate(order)}
        return sorted(paths, key=lambda path: place.get(path.name, len(order)))

    def claim(self, files):
        """Lists files of the folder, which are about to be written, in args.json. On rank 0."""
        inside = [file for file in files if file.is_relative_to(self.path)]
        names = {str(file.relative_to(self.path)) for file in inside}
        self.record["files"] = sorted(names.union(self.record["files"]))
        aside = self.path / ".args.json"
        aside.write_text(json.dumps(self.record, indent=1, default=str) + "\n")
        saving.sync(aside)
        aside.replace(self.path / "args.json")
        saving.sync(self.path)

    def release(self):
        """Drops the lock: the run has ended."""
        self.lock.release()
