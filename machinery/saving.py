"""Saves a model so that stock transformers, or peft, loads the folder offline."""

import copy
import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers import GenerationConfig

from machinery import folders, lora, ranks, zero3

# The last file of a saved model, or of adapters, to come: it marks the folder as whole.
MARKS = ("config.json", folders.CONFIG_BESIDE_ADAPTERS)


def is_whole(folder):
    """Returns whether `folder` holds a model, or adapters, saved to the end."""
    return any((Path(folder) / name).exists() for name in MARKS)


def save_model(engine, tokenizer, folder, full_tensor=zero3.full_tensor, notes=None, merge=False):
    """Writes config, weights (safetensors) and tokenizer to `folder`. All ranks call it.

    full_tensor(name, parameter) gathers one tensor at a time, to the CPU memory of rank 0. notes: a
    dict of what else goes into the config. merge: adapters are added to their weights. All files
    are written aside, in .saving, and then moved.
    """
    model, folder = zero3.unwrap_model(engine), Path(folder)
    adapters = not merge and getattr(model, "peft_config", {}).get("default")
    state = {}
    zero3.release_early_gathers(engine)
    for name, tensor in ranks.shown(saved_tensors(model), "saving, weights"):
        if not adapters or tensor.requires_grad:
            state[name] = full_tensor(name, tensor)
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
            note_ties(model)
            model.save_pretrained(aside, state_dict=lora.merge_state(model, state))
        model.config = training
        if scores:
            save_appending(tokenizer, aside)
        else:
            tokenizer.save_pretrained(aside)
        move_files(aside, folder)
    ranks.barrier()


def saved_tensors(model):
    """Returns the pairs of name and tensor that are in a saved model: no buffer that is derived."""
    saved = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]
    return [pair for pair in named if pair[0] in saved]


def note_tokens(model, tokenizer, scores):
    """Writes the ids of the tokenizer's special tokens, with which it was trained, to the configs.

    Else stock generate() waits for another EOS. config.pad_token_id freezes that token's embedding
    when the model is loaded to train, so a language model gets it for a token of its own only.
    """
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    taken = {*ids.values(), tokenizer.unk_token_id}
    pad = tokenizer.pad_token_id
    own_pad = None if pad in taken else pad
    if scores:
        own_pad = tokenizer.convert_tokens_to_ids(pad_token(tokenizer))
        # the pipeline adds a sigmoid to a single score, but not in a regression
        model.config.update({"problem_type": "regression", "function_to_apply": "none"})
    elif generation := getattr(model, "generation_config", None):
        ends = folders.ends_of(model, tokenizer)
        special = {**ids, "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": pad}
        generation.update(**special)
        try:
            generation.validate(strict=True)
        except ValueError:  # transformers loads some that it refuses to write: top_p, but greedy
            model.generation_config = GenerationConfig(**special)
    folders.update_config(model.config, {**ids, "pad_token_id": own_pad})


def note_ties(model):
    """Writes to the configs that the output matrix is not tied, if the model has one of its own.

    The config that it came with may say otherwise, and vLLM, for one, then drops the matrix.
    """
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        folders.update_config(model.config, {"tie_word_embeddings": False})


def pad_token(tokenizer):
    """Returns a token that stock transformers can tell from EOS: any other special one, else any.

    It takes a score at the last token that is not padding, and that is EOS.
    """
    last = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))[::-1]
    tokens = [tokenizer.pad_token, *tokenizer.all_special_tokens, *last]
    return next(token for token in tokens if token not in (None, tokenizer.eos_token))


def save_appending(tokenizer, folder):
    """Saves a reward model's tokenizer, which appends EOS: the score is read there.

    Stock callers append none. Where they ask for no special tokens they have to: then nothing is
    added. Our own scripts append it themselves, and load a tokenizer that does not
    (folders.load_tokenizer).

    Stock tools load it by the class that takes tokenizer.json as it is: GPTNeoXTokenizer drops what
    appends EOS (transformers 5.24). A tokenizer that has no such file is saved as it is.
    """
    own = copy.deepcopy(tokenizer)
    own.pad_token, own.padding_side = pad_token(tokenizer), "right"
    if not tokenizer.is_fast:
        ranks.say("warning: this tokenizer cannot append EOS: who scores with stock tools has to")
        own.save_pretrained(folder)
        return
    folders.put_after_texts(own, [own.eos_token_id])
    own.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(config, indent=2))


def save_adapters(model, state, folder, adapters):
    """Writes LoRA's adapters and their config, `adapters`, as peft does."""
    adapters.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(folder / folders.CONFIG_BESIDE_ADAPTERS)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    named = {f"base_model.model.{name.replace('.default.', '.')}": state[name] for name in state}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def move_files(aside, folder):
    """Moves the files of `aside` to `folder`, the mark last, when all else is on the disk.

    The mark of a model that is replaced goes first. The files are as readable as umask says
    (safetensors' own are the owner's alone). A tokenizer with several chat templates has a folder
    of them.
    """
    for mark in MARKS:
        (folder / mark).unlink(missing_ok=True)
    for file in aside.glob("*.safetensors"):
        file.chmod(aside.stat().st_mode & 0o666)
    for file in sorted(aside.iterdir(), key=lambda file: file.name in MARKS):
        if file.name in MARKS:
            os.sync()  # what it vouches for is safe from a power cut before it is there
        shutil.rmtree(folder / file.name, ignore_errors=True)  # nothing replaces a folder
        file.replace(folder / file.name)
    aside.rmdir()
