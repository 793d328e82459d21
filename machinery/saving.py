"""Saves a model so that stock transformers, or peft, loads the folder offline."""

import os
import shutil
from pathlib import Path

from machinery import lora, model_folders, ranks, zero3

from safetensors.torch import save_file


def save_model(engine, tokenizer, folder, full_tensor=zero3.full_tensor, claim=None):
    """Writes config, weights (safetensors) and tokenizer to `folder`. All ranks call it.

    full_tensor(name, parameter) gathers one tensor at a time, to the CPU memory of rank 0.
    config.json comes last: it marks the folder as whole. claim(files) is told before files move.
    """
    model, folder = model_folders.unwrap_model(engine), Path(folder)
    adapters = getattr(model, "peft_config", {}).get("default")
    plain = adapters is None or model.merge_lora
    state = {}
    zero3.release_early_gathers(engine)
    for name, parameter in model.named_parameters():
        if plain or parameter.requires_grad:
            state[name] = full_tensor(name, parameter)
    if ranks.get_rank() == 0:
        aside = folder / ".saving"
        shutil.rmtree(aside, ignore_errors=True)
        model.config.update(getattr(model, "own_dropout", {}))
        if plain:
            buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
            state |= {name: buffer.cpu() for name, buffer in buffers.items() if name in saved}
            model.save_pretrained(aside, state_dict=lora.merged(model, state))
        else:
            save_adapters(model, state, aside, adapters)
        tokenizer.save_pretrained(aside)
        files = sorted(aside.iterdir(), key=lambda file: file.name == "config.json")
        if claim:
            claim([folder / file.name for file in files])
        move_files(files, folder)
        aside.rmdir()
    ranks.barrier()


def save_adapters(model, state, folder, adapters):
    """Writes LoRA's adapters and their config, `adapters`, as peft does."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    adapters.save_pretrained(folder)
    named = {f"base_model.model.{name.replace('.default.', '.')}": state[name] for name in state}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def move_files(files, folder):
    """Moves files to `folder`, each when the ones before it are on the disk."""
    for file in files:
        sync(file)
        sync(folder)
        file.replace(folder / file.name)
    sync(folder)


def sync(path):
    """Returns when a file, or a folder's list of names, is on the disk, safe from a power cut."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)
