"""Refuses models that a step cannot use, in words, before anything is loaded or cleared.

Run calls `check` for each model of a script, and --estimate does.
"""

import functools
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from machinery.base import ranks, refused
from machinery.models import architecture, lora, model_folders
from machinery.rollout import decoding

ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def check(args, models):
    """Ends with an error if one of `models` (memory.Model) is not what its step needs.

    A step with a rollout begins where steps before have ended, so each of its models has weights.
    """
    after_others = any(model.generates for model in models)
    for model in models:
        path, trusted = model.args.model_name_or_path, args.trust_remote_code
        config = model_folders.load_config(path, trusted)
        refuse_other_kinds(path, config, model.head)
        if args.estimate is None:
            check_weights(path, config, after_others)
        samples = vars(args).get("num_samples") != 0
        decodes = model.generates or (samples and model.trains and not model.head)
        taken = try_out(path, trusted, decoding.way_of(args) if decodes else None)
        name = vars(args).get("value_head_prefix", "score")
        if not name.isidentifier() or (name != "score" and name in taken):
            rule = "It must be a name that the model does not use otherwise, such as score"
            refused.fail(f"--value_head_prefix '{name}' cannot name the value head.\n  {rule}.")


def refuse_other_kinds(path, config, head):
    """Ends with an error unless `path` is a causal LM that can have a value head, if it needs one.

    A model with code of its own says what it is in auto_map.
    """
    kind, own = f"a {config.model_type} model", getattr(config, "auto_map", None) or {}
    if type(config) not in AutoModelForCausalLM._model_mapping and not own:
        advice = "Take a decoder that writes text, such as OPT, Llama or Qwen."
        refused.fail(f"{path} is {kind}, and transformers has no causal LM of it.\n  {advice}")
    if not head and model_folders.is_scorer(config):
        advice = "Take its base, or what sft.py left (output/sft)."
        refused.fail(f"{path} is a reward model, which cannot write.\n  {advice}")
    if head and type(config) not in AutoModelForSequenceClassification._model_mapping:
        lacks = f"transformers has no sequence classification for {config.model_type}"
        refused.fail(f"{path}: {lacks}, so no reward model or critic.")


# ---- The files of a folder ----
def check_weights(path, config, needed):
    """Ends with an error if weights in a folder are incomplete, or `needed` and not there."""
    *adapters, base = lora.chain(path)
    files = model_folders.weight_files(base)
    if needed and not model_folders.has_weights(base):
        advice = "It starts from what sft.py and reward.py have saved."
        refused.fail(
            f"{base} holds no weights, and this step trains none from scratch.\n  {advice}"
        )
    for folder in adapters:
        found = [Path(folder) / name for name in ADAPTERS if (Path(folder) / name).is_file()]
        if not found:
            refused.fail(f"{folder} holds {lora.CONFIG_FILE} and no {ADAPTERS[0]}: no adapters.")
        files += found
    named = [names_in(file) for file in files if file.suffix == ".safetensors"]
    heads = tuple(f".{head}.weight" for head in ("score", model_folders.head_name(config)))
    has_head = any(f".{name}".endswith(heads) for names in named for name in names)
    if files and len(named) == len(files) and model_folders.is_scorer(config) and not has_head:
        refused.fail(model_folders.NO_HEAD.format(path))


def names_in(file):
    """Returns the names of the weights in a safetensors file, which must be whole, and no integers.

    (Masks of attention may be integers; old models hold some.)
    """
    try:
        with safe_open(file, "pt") as weights:
            kinds = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}
    except (SafetensorError, OSError) as error:
        refused.fail(f"{file} cannot be read: it may be cut short.\n  {error}")
    for name, kind in kinds.items():
        if name.endswith(".weight") and kind[0] in "IUB" and kind != "BF16":  # I64, U8, BOOL
            advice = "Take the model as it was before it was quantised."
            refused.fail(f"{file}: {name} holds integers ({kind}), no weights.\n  {advice}")
    return list(kinds)


# ---- The architecture ----
@functools.lru_cache
def try_out(path, trust_remote_code, way):
    """Ends with an error if the architecture of `path` cannot be trained here.

    way: how it must write responses (decoding.way_of), or None. Returns the attributes that such a
    model has, or () if that cannot be told.
    """
    config = model_folders.load_config(path, trust_remote_code)
    kind = f"{path}: a {config.model_type} model"
    try:
        small = architecture.small_copy(config, trust_remote_code)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        own_code = getattr(config, "auto_map", None)  # it may need a GPU
        if own_code or isinstance(error, architecture.CannotTell):
            ranks.say(f"warning: {kind} could not be tried out.\n  {reason}")
            return ()
        refused.fail(f"no model can be built from the config.json of {path}.\n  {reason}")
    advice = "Take another architecture, such as OPT, Llama or Qwen."
    if architecture.looks_ahead(small):
        why = "a later token changes the log-probs of earlier ones"
        refused.fail(f"{kind} is no causal language model: {why}.\n  {advice}")
    if architecture.sees_padding(small):
        why = "it changes a row's log-probs, so rows of different lengths make no batch"
        refused.fail(f"{kind} does not honour padding on the left: {why}.\n  {advice}")
    try:
        wrong = way and not architecture.decodes(small, way) and "other log-probs than a forward"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if wrong:
        refused.fail(f"{kind} cannot write responses token by token here.\n  {wrong}.\n  {advice}")
    return frozenset(dir(small))
