"""The output folder: whether a run may have it, what --resume accepts, and args.json."""

import json
import os
import shutil
from pathlib import Path

from machinery import checkpoints, errors, logs, lora, ranks

import datasets
import deepspeed
import numpy as np
import torch
import transformers

REPLACED = """checkpoints config.json curves.png ema critic adapter_config.json
              *model*.safetensors* nonfinite_rank*""".split()


def replaced(output):
    """Returns what a new run in the folder `output` would remove."""
    return [path for pattern in (*logs.FILES, *REPLACED) for path in output.glob(pattern)]


def check(args):
    """Ends the program if --output_dir cannot be had, or --resume cannot go on with its run.

    A run that stopped before its first checkpoint starts anew: args.resume becomes False.
    """
    output = Path(args.output_dir)
    exists = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        errors.fail(f"--output_dir {output}: {exists} is not a folder that can be written to.")
    whole, finished = checkpoints.whole(args), (output / "config.json").exists()
    if args.max_steps == 0 and args.overwrite and (finished or whole):
        errors.fail(
            f"--max_steps 0 saves no model, and --overwrite would delete the one in {output}.\n"
            "  Take another --output_dir."
        )
    if not (args.overwrite or args.resume):
        refuse_taken(output, finished or whole)
    refuse_own_models(args, output)
    if not args.resume:
        return
    record = output / "args.json"
    begun = record.exists()
    if whole and begun:
        refuse_other_flags(args, json.loads(record.read_text()))
    if finished:
        errors.fail(
            f"--resume: {output} holds a finished run, so there is nothing to go on with.\n"
            "  --overwrite replaces it."
        )
    if not whole and not begun:
        empty = checkpoints.folder_of(args)
        errors.fail(f"--resume: there is no checkpoint in {empty}.\n  Leave it out to start anew.")
    if not whole:
        ranks.say(f"the run in {output} stopped before its first checkpoint: it starts anew")
        args.resume = False


def refuse_taken(output, holds_run):
    """Ends the program if `output` holds a run, or files that no run of ours has left there."""
    if holds_run:
        errors.fail(
            f"--output_dir {output} holds a run.\n  --overwrite replaces it, --resume goes on with "
            "an unfinished one, another --output_dir leaves it alone."
        )
    record, foreign = output / "args.json", replaced(output)
    if foreign and not (record.is_file() and "data_fingerprint" in record.read_text()):
        errors.fail(
            f"--output_dir {output} holds {foreign[0].name}, which no run of ours has left there, "
            "and would delete it.\n  Take another --output_dir, or --overwrite."
        )


def refuse_own_models(args, output):
    """Ends the program if `output` is, or is above, a model that the run starts from."""
    for flag, value in vars(args).items():
        if not flag.endswith("model_name_or_path") or not value:
            continue
        paths = value if isinstance(value, list) else [value]
        # adapters, and what they sit on
        for model, part in ((path, part) for path in paths for part in lora.chain(path)):
            inside = Path(part).resolve()
            if Path(part).exists() and output.resolve() in (inside, *inside.parents):
                base = " (its base)" if part != model else ""
                errors.fail(
                    f"--output_dir {output} is also --{flag}{base}: the run would delete what "
                    "it starts from.\n  Take another --output_dir."
                )


def refuse_other_flags(args, before):
    """Ends the program if a fixed flag was another in args.json's `before`.

    Of data the names are compared, not the paths: folders may have moved.
    """
    was = "--resume: the run was begun with"
    for name in [name for name in vars(args) if name in args._fixed and name in before]:
        if before[name] != (now := getattr(args, name)):
            errors.fail(
                f"{was} --{name} {before[name]}, and now it is {now}.\n"
                "  Give it as it was, or begin anew in another --output_dir."
            )
    old, new = before["data_path"], args.data_path
    if [Path(path).name for path in old] != [Path(path).name for path in new]:
        errors.fail(f"{was} --data_path {' '.join(old)}, and now it is {' '.join(new)}.")


def take(args, train):
    """Removes what a run before has left, and writes args.json (rank 0). train: the dataset."""
    if ranks.get_rank() != 0:
        return
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        for old in replaced(output):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    record = {name: value for name, value in vars(args).items() if not name.startswith("_")}
    record |= {"world_size": ranks.get_world_size(), "device": str(ranks.device())}
    libraries = (torch, deepspeed, transformers, datasets, np)
    record["versions"] = {library.__name__: library.__version__ for library in libraries}
    record |= {"data_rows": len(train), "data_fingerprint": train._fingerprint}
    text = json.dumps(record, indent=1, default=str)
    (output / "args.json").write_text(text + "\n")
