"""Checkpoints: a run that stops goes on exactly where it stood (docs/reliability.md)."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator

from machinery.base import ranks
from machinery.base.refused import Refused, read_json
from machinery.engine import state_offload
from machinery.models import model_folders, saving
from machinery.run import logs


def folder_of(args):
    """Returns the folder of all checkpoints."""
    return Path(args.output_dir) / "checkpoints"


def whole_checkpoints(args):
    """Returns the checkpoints that got their name, step-N, for being complete, oldest first."""
    folders = folder_of(args).glob("step-*/")
    return sorted((each for each in folders if each.name[5:].isdecimal()), key=step_of)


def step_of(folder):
    """Returns the step of a checkpoint."""
    return int(folder.name[5:])


# ---- Saving ----
def save(args, engines, step, state):
    """Saves everything needed to go on exactly. All ranks call it.

    engines: {name: engine}. state: this rank's own, a dict of anything that torch.save takes, and
    "facts" of the data. All is written aside, synced, listed with sizes (manifest.json) and then
    renamed.
    """
    output, folder, rank = Path(args.output_dir), folder_of(args), ranks.get_rank()
    # A new name each time: over NFS another host may take one that it knows for what was renamed.
    aside = folder / f"unfinished-{step}"
    if rank == 0:
        for path in folder.glob("unfinished*"):
            shutil.rmtree(path, ignore_errors=True)
        aside.mkdir(parents=True)
    ranks.barrier()
    for name, engine in engines.items():
        state_offload.drop_buffers(engine)
        options = {"save_latest": False, "exclude_frozen_parameters": True}  # LoRA's base
        engine.save_checkpoint(aside / name, tag="state", **options)
    paths = [output / name for name in logs.FILES if (output / name).exists()]
    sizes = {path.name: path.stat().st_size for path in paths}
    # Dropout uses torch's two generators, a --reward_fn may use Python's and numpy's.
    of_torch = torch.get_rng_state(), get_accelerator().get_rng_state()
    rng = (*of_torch, random.getstate(), np.random.get_state())
    saved = {"rng": rng, "logs": sizes, "layout": layout(engines), **state}
    torch.save(saved, aside / f"rank{rank}.pt")
    ranks.barrier()
    if rank == 0:
        (aside / "manifest.json").write_text(json.dumps(sizes_in(aside)))
        for path in (*paths, *aside.rglob("*"), aside):
            saving.sync(path)
        for path in whole_checkpoints(args):
            if step_of(path) >= step:  # damaged: the run was resumed from one before it
                shutil.rmtree(path)
        aside.rename(folder / f"step-{step}")
        saving.sync(folder)
        for path in whole_checkpoints(args)[: -args.keep_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)  # if one is in use, the next save tries
    ranks.barrier()


def layout(engines):
    """Returns what the layout of a checkpoint follows.

    "shape": ranks, and each engine's ZeRO stage. The class of each optimizer: another one would
    find no step number where it looks, and begin from 0. The shape of each weight.
    """
    stages = {name: engine.zero_optimization_stage() for name, engine in engines.items()}
    found = {"shape": {"ranks": ranks.get_world_size(), **stages}}
    for name, engine in engines.items():
        found[f"{name} optimizer"] = type(engine.basic_optimizer).__name__
        for key, weight in engine.module.named_parameters():
            found[f"{name} {key}"] = tuple(getattr(weight, "ds_shape", weight.shape))
    return found


def frozen_models(args):
    """Returns the files of weights that are frozen, which no checkpoint holds.

    They are those of step 3's frozen models, and of what adapters train on. A dict
    {"folder/file": size}, by the last parts of the paths. Models of the hub have none here.
    """
    known = vars(args)
    paths = [known.get("actor_model_name_or_path"), *known.get("reward_model_name_or_path", [])]
    adapted = [role for role in ("", "critic_") if known.get(f"{role}lora_dim")]
    paths += [known[f"{role}model_name_or_path"] for role in adapted]
    folders = [Path(part) for path in filter(None, paths) for part in model_folders.chain(path)]
    files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
    return {f"{file.parent.name}/{file.name}": file.stat().st_size for file in files}


# ---- Loading ----
def load(args, engines, state, facts, last_step):
    """Restores engines, random numbers and .jsonl files from the newest whole checkpoint.

    Returns (step, what this rank saved), "state" in it laid out like `state`. facts: rows_per_step,
    data_rows, data_fingerprint and frozen_models, which must be as they were.
    """
    folder = newest_whole(args)
    step = step_of(folder)
    if step > last_step:
        words = f"--resume: {folder} is beyond the run's last step, {last_step}."
        raise Refused("beyond-last-step", f"{words}\n  Give --max_steps {step} or more.")
    files = [folder / f"rank{number}.pt" for number in range(len([*folder.glob("rank*.pt")]))]
    saved = read(files[ranks.get_rank() % len(files)])
    there, here = {**saved["layout"], **saved["facts"]}, {**layout(engines), **facts}
    refuse_others(args, folder, there, here)
    before, now = there["shape"], here["shape"]
    for name, engine in engines.items():
        load_engine(engine, folder / name, reshape=before != now and now[name] > 0)
    parts, place = [saved["state"]], 0
    if before == now:
        on_cpu, on_device, python, numpy = saved["rng"]
        torch.set_rng_state(on_cpu)
        get_accelerator().set_rng_state(on_device)
        random.setstate(python)
        np.random.set_state(numpy)
    else:
        ranks.say(f"from {before} to {now}: the same except for rounding and dropout")
        torch.manual_seed(args.seed + ranks.get_rank() + 1_000_000 * step)
        parts, place = [read(file)["state"] for file in files], ranks.get_rank()
    saved["state"] = laid_out(state, parts, place)
    logs.cut(args, saved["logs"])
    ranks.barrier()
    ranks.say(f"resumed from {folder}")
    return step, saved


def read(file):
    """Returns what a rank has saved. (It is unpickled: see docs/reliability.md on trust.)

    Tensors stay in the file until they are looked at, so that all ranks' can be read in turn.
    """
    return torch.load(file, weights_only=False, map_location="cpu", mmap=True)


def newest_whole(args):
    """Returns the newest checkpoint that is whole. The next save removes those after it."""
    folders = []
    if ranks.get_rank() == 0:  # over NFS the list of another rank may be of before
        folders = [(folder, damage(folder)) for folder in whole_checkpoints(args)]
    for folder, files in reversed(ranks.all_gather_objects(folders)):
        if not files:
            return folder
        ranks.say(f"{folder} is not whole, and is left aside. Missing or cut: {', '.join(files)}")
    found = f"--resume: no checkpoint in {folder_of(args)} is whole."
    raise Refused("no-checkpoint-whole", f"{found}\n  --overwrite starts anew.")


def damage(folder):
    """Returns the files of a checkpoint that are missing, or of another size than they had."""
    files, there = read_json(folder, "manifest.json"), sizes_in(folder)
    wrong = [name for name, size in files.items() if there.get(name) != size]
    return wrong if files else ["manifest.json"]


def sizes_in(folder):
    """Returns {name: bytes} of all files below a folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def refuse_others(args, folder, there, here):
    """Refuses --resume if the run in `folder` had other rows or another model than this one.

    there, here: `layout` and the facts of `load`, then and now.
    """
    for name in (there.keys() | here.keys()) - {"shape"}:
        if there.get(name) != here.get(name):
            words = f"--resume: in {folder} {name} is {there.get(name)}, and here {here.get(name)}."
            advice = "Give the models, the data, the flags and the script of before."
            raise Refused("resume-another", f"{words}\n  {advice}")
    before, now = there["shape"], here["shape"]
    stages = [{before[name], now[name]} for name in now if name != "ranks"]
    convertible = all(len(pair) == 1 or pair == {1, 2} for pair in stages)
    if before != now and (args.tensor_parallel_size > 1 or not convertible):
        raise Refused(
            "resume-shape",
            f"--resume: {folder} was written by ranks and ZeRO stages {before}, and here: {now}.\n"
            "  Ranks may change, and stage 1 to 2 and back; with --tensor_parallel_size nothing.",
        )


def load_engine(engine, folder, reshape):
    """Restores an engine, with the rates, weight decay and betas of this run's own flags.

    reshape: other ranks, or stage 1 or 2 for 2 or 1, wrote it. It is then first turned into
    DeepSpeed's universal form, a file for each weight.
    """
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    names = {"initial_lr", "weight_decay", "betas"}  # some optimizers have no betas
    own = [{name: group[name] for name in names & {*group}} for group in optimizer.param_groups]
    if reshape:
        write_universal(folder)
    engine._config.load_universal_checkpoint = reshape
    tag = "universal" if reshape else "state"
    with contextlib.chdir(folder):  # DeepSpeed would take a path with [ for a pattern
        loaded, _ = engine.load_checkpoint(".", tag=tag, load_module_strict=False)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed could not read {folder}")
    # The checkpoint brought the settings of before, and under stage 3 in the universal form it gave
    # every group those of the first.
    schedule.base_lrs = [settings["initial_lr"] for settings in own]
    for group, settings, factor in zip(optimizer.param_groups, own, schedule.lr_lambdas):
        group.update(settings, lr=settings["initial_lr"] * factor(schedule.last_epoch))
    # In that form DeepSpeed gives all weights one number of steps: one tensor, and on the CPU.
    # torch's AdamW counts in it for each of them, on a GPU by a kernel.
    for weight, kept in engine.basic_optimizer.state.items():
        if torch.is_tensor(step := kept.get("step")):
            kept["step"] = step.to(weight.device, copy=True)
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = engine.gradient_clipping()
    ranks.barrier()
    if ranks.get_rank() == 0:
        shutil.rmtree(folder / "universal", ignore_errors=True)


def write_universal(folder):
    """Turns an engine's checkpoint into DeepSpeed's universal form. All ranks call it.

    folder: the engine's, with state/; universal/ comes to be beside it. A process that rank 0
    starts does it, so that the ranks can meet meanwhile: it takes longer than one may wait for
    another where the model is large. Its memory is free again at the end.
    """
    process, log = None, tempfile.TemporaryFile()
    if ranks.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += "--input_folder state --output_folder universal --inject_missing_state".split()
        command += "--num_extract_workers 1 --num_merge_workers 1".split()  # memory for one
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    ranks.wait_while(
        lambda: process is not None and process.poll() is None,
        f"rewriting {folder} for other ranks or another ZeRO stage",
    )
    if process and process.returncode:
        log.seek(0)
        raise RuntimeError(log.read()[-3000:].decode(errors="replace"))


def laid_out(own, parts, place):
    """Returns a state in the layout of `own`: the share number `place` of the joined `parts`.

    parts: states as ranks have saved them. Their tensors are shards (1-d, padded at the end to
    equal shares), which are joined and cut anew. All else is alike on all ranks.
    """
    if isinstance(own, dict):
        keys = {**own, **parts[0]}  # a fork may have added some after its run began
        found = {key: [part[key] for part in parts if key in part] for key in keys}
        return {key: laid_out(own.get(key), found[key], place) for key in keys}
    if not torch.is_tensor(own):
        return parts[0]
    mine = torch.cat(parts)[place * len(own) :][: len(own)]
    return nn.functional.pad(mine, (0, len(own) - len(mine))).to(own.device)
