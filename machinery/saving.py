"""Saves a model so that stock transformers, or peft, loads the folder offline."""

import os
import shutil
from pathlib import Path

from machinery import lora, model_card, model_folders, progress, ranks, scoring_tokenizer, zero3

from safetensors.torch import save_file

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
    model, folder = model_folders.unwrap_model(engine), Path(folder)
    adapters = getattr(model, "peft_config", {}).get("default")
    plain = adapters is None or model.merge_lora
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
            text = card(adapted=base, scores=scores, appended=appended)
            (aside / "README.md").write_text(text)
        files = sorted(aside.iterdir(), key=lambda file: file.name in MARKS)
        if claim:
            claim([folder / file.name for file in files])
        move_files(files, folder)
        aside.rmdir()
    ranks.barrier()


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
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.update({**ids, "pad_token_id": own_pad})


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

    They are as readable as umask says (safetensors' own are the owner's alone).
    """
    for file in files:
        file.chmod(file.parent.stat().st_mode & 0o666)
        sync(file)
        sync(folder)
        file.replace(folder / file.name)
    sync(folder)


def sync(path):
    """Returns when a file, or a folder's list of names, is on the disk, safe from a power cut."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)
