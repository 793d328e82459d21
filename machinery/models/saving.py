"""Saves a model so that stock transformers, or peft, loads the folder offline."""

import copy
import os
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from transformers import GenerationConfig

from machinery.base import modules, progress, ranks
from machinery.engine import zero3
from machinery.models import lora, scoring_tokenizer

# The last file of a saved model, or of adapters, to come: it marks the folder as whole.
MARKS = ("config.json", lora.CONFIG)


def is_whole(folder):
    """Returns whether `folder` holds a model, or adapters, saved to the end."""
    return any((Path(folder) / name).exists() for name in MARKS)


def save_model(engine, tokenizer, folder, full_tensor=zero3.full_tensor, notes=None, merge=False):
    """Writes config, weights (safetensors) and tokenizer to `folder`. All ranks call it.

    full_tensor(name, parameter) gathers one tensor at a time, to the CPU memory of rank 0. notes: a
    dict of what else goes into the config. merge: adapters are added to their weights. All files
    are written aside, in .saving, and then moved.

    Returns on rank 0 what the model's card says of it. adapted: what LoRA's adapters were trained
    on, None for a whole model; scores: whether it is a reward model or critic; appended: for whom
    its tokenizer appends EOS (scoring_tokenizer.save).
    """
    model, folder = modules.unwrap_model(engine), Path(folder)
    adapters = None if merge else getattr(model, "peft_config", {}).get("default")
    state = {}
    zero3.release_early_gathers(engine)
    for name, parameter in progress.shown([*model.named_parameters()], "saving, weights"):
        if not adapters or parameter.requires_grad:
            state[name] = full_tensor(name, parameter)
    if ranks.get_rank() == 0:
        aside = folder / ".saving"
        shutil.rmtree(aside, ignore_errors=True)
        training, model.config = model.config, copy.deepcopy(model.config)  # it may train on
        model.config.update({**getattr(model, "own_dropout", {}), **(notes or {})})
        scores = hasattr(model.config, "value_head_prefix")
        note_tokens(model, tokenizer, scores)
        if adapters:
            save_adapters(model, state, aside, adapters)
        else:
            buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
            state |= {name: buffer.cpu() for name, buffer in buffers.items() if name in saved}
            model.save_pretrained(aside, state_dict=lora.merged(model, state))
        model.config = training
        appended = "none"
        if scores:
            appended = scoring_tokenizer.save(tokenizer, aside)
        else:
            tokenizer.save_pretrained(aside)
        move_files(aside, folder)
    ranks.barrier()
    if ranks.get_rank() == 0:
        base = adapters.base_model_name_or_path if adapters else None
        return {"adapted": base, "scores": scores, "appended": appended}


def note_tokens(model, tokenizer, scores):
    """Writes the ids of the tokenizer's special tokens, with which it was trained, to the configs.

    Else stock generate() waits for another EOS. config.pad_token_id freezes that token's embedding
    when the model is loaded to train, so a language model gets it for a token of its own only.
    """
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    taken = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
    pad = tokenizer.pad_token_id
    own_pad = None if pad in taken else pad
    if scores:
        own_pad = tokenizer.convert_tokens_to_ids(scoring_tokenizer.pad_token(tokenizer))
        # the pipeline adds a sigmoid to a single score, but not in a regression
        model.config.update({"problem_type": "regression", "function_to_apply": "none"})
    elif generation := getattr(model, "generation_config", None):
        model.generation_config = writable(generation, {**ids, "pad_token_id": pad})
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.update({**ids, "pad_token_id": own_pad})


def writable(generation, ids):
    """Returns a GenerationConfig that transformers writes: it loads some that it refuses to write.

    Such a one names a temperature or top_p without do_sample, which does nothing: it is left out.
    """
    generation.update(**ids)
    with suppress(ValueError):
        generation.validate(strict=True)
        return generation
    return GenerationConfig(**ids)


def save_adapters(model, state, folder, adapters):
    """Writes LoRA's adapters and their config, `adapters`, as peft does."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "config.json").rename(folder / lora.CONFIG)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    adapters.save_pretrained(folder)
    named = {f"base_model.model.{name.replace('.default.', '.')}": state[name] for name in state}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def move_files(aside, folder):
    """Moves the files of `aside` to `folder`, the mark last, when all are on the disk.

    They are as readable as umask says (safetensors' own are the owner's alone). A tokenizer with
    several chat templates has a folder of them.
    """
    files = sorted(aside.iterdir(), key=lambda file: file.name in MARKS)
    for file in files:
        file.chmod(aside.stat().st_mode & (0o777 if file.is_dir() else 0o666))
        for path in (*file.rglob("*"), file):
            sync(path)
    for file in files:
        if file.name in MARKS:
            sync(folder)  # what it vouches for is there before it
        if (folder / file.name).is_dir():  # of a save that was killed: nothing replaces it
            shutil.rmtree(folder / file.name)
        file.replace(folder / file.name)
    aside.rmdir()
    sync(folder)


def sync(path):
    """Returns when a file, or a folder's list of names, is on the disk, safe from a power cut."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)
