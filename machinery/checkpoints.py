"""Checkpoints: a run that stops goes on exactly where it stood (docs/reliability.md).

checkpoints/step-4/actor/state/    DeepSpeed's own files of an engine
                   rank0.pt        what else a rank needs: random numbers, the script's state
                   done            empty, and written last: without it the folder does not count
"""

import contextlib
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from machinery import folders, ranks, zero3
from machinery.refused import Refused

DONE = "done"


def step_of(folder):
    """Returns the step of a checkpoint."""
    return int(folder.name[5:])


def all_checkpoints(args):
    """Returns the folders step-N, done or not, oldest first."""
    found = Path(args.output_dir).glob("checkpoints/step-*/")
    return sorted((folder for folder in found if folder.name[5:].isdecimal()), key=step_of)


def whole_checkpoints(args):
    """Returns the checkpoints that are done, oldest first."""
    return [folder for folder in all_checkpoints(args) if (folder / DONE).exists()]


# ---- Saving ----
def save(args, engines, step, saved):
    """Saves everything needed to go on exactly. All ranks call it.

    engines: {name: engine}. saved: this rank's own, a dict of anything that torch.save takes, and
    "facts" of the data. An older checkpoint is removed when this one is done, and no earlier.
    Returns the folder.
    """
    folder, rank = Path(args.output_dir, f"checkpoints/step-{step}"), ranks.get_rank()
    if rank == 0:
        for path in all_checkpoints(args):
            if not (path / DONE).exists():
                remove(path)
        folder.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    for name, engine in engines.items():
        zero3.drop_offload_buffers(engine)
        options = {"save_latest": False, "exclude_frozen_parameters": True}  # LoRA's base
        engine.save_checkpoint(folder / name, tag="state", **options)
    # Dropout uses torch's two generators, a --reward_fn may use Python's and numpy's.
    of_torch = torch.get_rng_state(), get_accelerator().get_rng_state()
    rng = (*of_torch, random.getstate(), np.random.get_state())
    torch.save({"rng": rng, "layout": layout(engines), **saved}, folder / f"rank{rank}.pt")
    os.sync()  # what this machine has written is on the disk, safe from a power cut
    ranks.barrier()
    if rank == 0:
        (folder / DONE).touch()
        os.sync()
        for path in whole_checkpoints(args)[: -args.keep_checkpoints]:
            remove(path)
    ranks.barrier()
    return folder


def remove(folder):
    """Deletes a checkpoint. It does not count from the first moment on."""
    (folder / DONE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # what is in use is left to the next save


def layout(engines):
    """Returns what the layout of a checkpoint follows.

    "shape": ranks, and each engine's ZeRO stage. The class of each optimizer: another one would
    find no step number where it looks, and begin from 0. The shape of each weight.
    """
    stages = {name: int(engine.zero_optimization_stage()) for name, engine in engines.items()}
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
    under = [Path(part) for path in filter(None, paths) for part in folders.chain(path)]
    files = [file for folder in under for file in sorted(folder.glob("*.safetensors"))]
    return {f"{file.parent.name}/{file.name}": file.stat().st_size for file in files}


# ---- Loading ----
def load(args, engines, state, facts, last_step):
    """Restores engines, random numbers and `state` from the newest checkpoint that is done.

    Returns (step, what this rank saved). state: what `save` got as saved["state"], a dict; it is
    restored in place. facts: rows_per_step, data_rows, data_fingerprint and frozen_models, which
    must be as they were.
    """
    folder = newest(args)
    step = step_of(folder)
    if step > last_step:
        words = f"--resume: {folder} is beyond the run's last step, {last_step}."
        raise Refused("beyond-last-step", f"{words}\n  Give --max_steps {step} or more.")
    with reading(folder):
        first = read(folder / "rank0.pt")
    refuse_others(folder, {**first["layout"], **first["facts"]}, {**layout(engines), **facts})
    with reading(folder):
        saved = read(folder / f"rank{ranks.get_rank()}.pt")
        for name, engine in engines.items():
            load_engine(engine, folder / name)
    restore(state, saved["state"])
    on_cpu, on_device, python, numpy = saved["rng"]
    torch.set_rng_state(on_cpu)
    get_accelerator().set_rng_state(on_device)
    random.setstate(python)
    np.random.set_state(numpy)
    ranks.say(f"resumed from {folder}")
    return step, saved


def newest(args):
    """Returns the newest checkpoint that is done, and says which folders are passed over."""
    mine = all_checkpoints(args), whole_checkpoints(args)
    found, done = ranks.all_gather_objects([mine])[0]  # over NFS another rank's may be of before
    for folder in found:
        if folder not in done:
            ranks.say(f"{folder} is passed over: it has no file `{DONE}`, so it is not whole")
    return done[-1]


@contextlib.contextmanager
def reading(folder):
    """Refuses a checkpoint of which something cannot be read inside."""
    try:
        yield
    except Exception as error:  # of many kinds: a file is missing, or cut, or somebody else's
        words = f"--resume: {folder} cannot be read: {error}"
        advice = f"If it is damaged, delete its file `{DONE}`: then the one before it is taken."
        raise Refused("no-checkpoint-whole", f"{words}\n  {advice}") from error


def read(file):
    """Returns what a rank has saved. (It is unpickled: see docs/reliability.md on trust.)

    Tensors stay in the file until they are looked at.
    """
    return torch.load(file, weights_only=False, map_location="cpu", mmap=True)


def refuse_others(folder, there, here):
    """Refuses --resume if the run in `folder` had other rows or another model than this one.

    there, here: `layout` and the facts of `load`, then and now.
    """
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            words = f"--resume: in {folder} {name} is {there.get(name)}, and here {here.get(name)}."
            if name == "shape":
                advice = "Start it on as many ranks, at the same stages: docs/reliability.md."
                raise Refused("resume-shape", f"{words}\n  {advice}")
            advice = "Give the same models, data and flags as before."
            raise Refused("resume-another", f"{words}\n  {advice}")


def load_engine(engine, folder):
    """Restores an engine, with the rates, weight decay and betas of this run's own flags."""
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    names = {"initial_lr", "weight_decay", "betas"}  # some optimizers have no betas
    own = [{name: group[name] for name in names & {*group}} for group in optimizer.param_groups]
    with contextlib.chdir(folder):  # DeepSpeed would take a path with [ for a pattern
        loaded, _ = engine.load_checkpoint(".", tag="state", load_module_strict=False)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed could not read {folder}")
    schedule.base_lrs = [settings["initial_lr"] for settings in own]
    for group, settings, factor in zip(optimizer.param_groups, own, schedule.lr_lambdas):
        group.update(settings, lr=settings["initial_lr"] * factor(schedule.last_epoch))
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = engine.gradient_clipping()


@torch.no_grad()
def restore(own, saved):
    """Returns `saved`, but where `own` has a dict, a list or a tensor of that shape: that, filled.

    A tensor is filled in place, because an optimizer, or another object, may hold it, too.
    """
    if isinstance(own, dict) and isinstance(saved, dict):
        own.update({key: restore(own.get(key), value) for key, value in saved.items()})
        return own
    if isinstance(own, list) and isinstance(saved, list):
        own[:] = [*map(restore, own, saved), *saved[len(own) :]]
        return own
    if torch.is_tensor(own) and torch.is_tensor(saved) and own.shape == saved.shape:
        return own.copy_(saved)
    return saved
