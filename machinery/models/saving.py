"""Saves a model so that stock transformers, or peft, loads the folder offline."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from transformers import GenerationConfig

from machinery.base import modules, progress, ranks
from machinery.engine import zero3
from machinery.models import lora, model_card, scoring_tokenizer

# The last file of a saved model, or of adapters, to come: it marks the folder as whole.
MARKS = ("config.json", lora.CONFIG)


def is_whole(folder):
    """Returns whether `folder` holds a model, or adapters, saved to the end."""
    return any((Path(folder) / name).exists() for name in MARKS)


def save_model(engine, tokenizer, folder, full_tensor=zero3.full_tensor, claim=None, card=None):
    """Writes config, weights (safetensors) and tokenizer to `folder`. All ranks call it.

    full_tensor(name, parameter) gathers one tensor at a time, to the CPU memory of rank 0.
    claim(files) is told before files move, the mark last. card(**facts): the text of README.md.
    """
    model, folder = modules.unwrap_model(engine), Path(folder)
    adapters = getattr(model, "peft_config", {}).get("default")
    plain = adapters is None
    state = {}
    zero3.release_early_gathers(engine)
    for name, parameter in progress.shown([*model.named_parameters()], "saving, weights"):
        if plain or parameter.requires_grad:
            state[name] = full_tensor(name, parameter)
    if ranks.get_rank() == 0:
        aside = folder / ".saving"
        shutil.rmtree(aside, ignore_errors=True)
        model.config.update(getattr(model, "own_dropout", {}))
        scores = hasattr(model.config, "value_head_prefix")
        note_tokens(model, tokenizer, scores)
        if plain:
            buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
            state |= {name: buffer.cpu() for name, buffer in buffers.items() if name in saved}
            model.save_pretrained(aside, state_dict=lora.merged(model, state))
        else:
            save_adapters(model, state, aside, adapters)
        appended = "none"
        if scores:
            appended = scoring_tokenizer.save(tokenizer, aside)
        else:
            tokenizer.save_pretrained(aside)
        if card and model_card.may_write(folder):
            base = None if plain else adapters.base_model_name_or_path
            write_card(card, aside, adapted=base, scores=scores, appended=appended)
        files = sorted(aside.iterdir(), key=lambda file: file.name in MARKS)
        if claim:
            claim([folder / file.name for file in files])
        move_files(files, folder)
        aside.rmdir()
    ranks.barrier()


def write_card(card, folder, **facts):
    """Writes card(**facts) to README.md. A card that fails does not cost the weights."""
    try:
        (folder / "README.md").write_bytes(card(**facts).encode())
    except Exception as error:  # of what the base's README.md, flags and logs may hold
        ranks.say(f"README.md, the model's card, could not be written: {error!r}")


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
        generation.update(**ids, pad_token_id=pad)
        model.generation_config = writable(generation)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.update({**ids, "pad_token_id": own_pad})


def writable(generation):
    """Returns a GenerationConfig that transformers writes: it loads some that it refuses to write.

    Many bases name a temperature or top_p, which mean something only with do_sample: they get it.
    """
    for change in ({}, {"do_sample": True}):
        generation.update(**change)
        with suppress(ValueError):
            generation.validate(strict=True)
            return generation
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(generation, name) for name in names})


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


def move_files(files, folder):
    """Moves files to `folder`, each when the ones before it are on the disk.

    They are as readable as umask says (safetensors' own are the owner's alone). A tokenizer with
    several chat templates has a folder of them.
    """
    for file in files:
        file.chmod(file.parent.stat().st_mode & (0o777 if file.is_dir() else 0o666))
        for path in (*file.rglob("*"), file, folder):
            sync(path)
        new = folder / file.name
        if new.is_dir() and not new.is_symlink():  # of a save that was killed: nothing replaces it
            shutil.rmtree(new)
        file.replace(new)
    sync(folder)


def sync(path):
    """Returns when a file, or a folder's list of names, is on the disk, safe from a power cut."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)
