"""What a model's folder, or its name on the hub, holds; or a clear error."""

import copy
import functools
import json
import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer

from machinery.base import refused
from machinery.models import lora, scoring_tokenizer
from machinery.run import crash

PAD_NAMES = ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>")
# Files of weights, in the order in which transformers looks for them; and what others write
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
WEIGHTS += ("pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_WEIGHTS = ".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .index.json".split()
LOAD_ERRORS = OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError
NO_HEAD = "{} is a reward model by its config.json, and holds no value head: it would be random."


@functools.lru_cache
def load(path, kind, trust_remote_code):
    """Returns what `kind` (AutoConfig, AutoTokenizer) loads from a hub name or folder."""
    folder = Path(path)
    among_outputs = folder.parent != Path(".") and any(folder.parent.glob("*/args.json"))
    if not folder.exists() and (str(path)[0] in "./~" or among_outputs):  # no name on the hub
        hint = "Has the step before been run? A flag that ends in model_name_or_path names another."
        refused.fail(f"{path}: no such folder. {hint}\n  {refused.nearest(folder)}")
    try:
        return kind.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds: of the hub, of JSON, of config's or tokenizers' own
        why = ""
        if not folder.is_dir():
            why = "It is no folder here; has the step before been run? Looked up on the hub:"
        elif (folder / "args.json").exists() and not (folder / "config.json").exists():
            why = "The run in it has not ended; --resume goes on with it."
        elif "trust_remote_code" in str(error):
            why = "Read its Python code, then let it run with --trust_remote_code."
        why += f"\n  {' '.join(str(error).split())[:300]}"
        refused.fail(f"no {kind.__name__[4:].lower()} could be loaded from {path}.\n  {why}")


def load_config(path, trust_remote_code=False):
    """Returns transformers' config of the model in `path`, or under the adapters there."""
    *adapters, base = lora.chain(path)
    own = [file for folder in adapters for file in lora.configs(folder)]
    return copy.deepcopy(load(str([*own, base][0]), AutoConfig, trust_remote_code))


def is_scorer(config):
    """Returns whether a config is that of a reward model or critic."""
    return "SequenceClassification" in str(config.architectures)


def head_name(config, name="score"):
    """Returns the name of a value model's head: its own, else `name`."""
    return getattr(config, "value_head_prefix", name)


def prepare_head(config, tokenizer, name):
    """Makes `config` that of a value model. Returns the name of its head: its own, else `name`."""
    name = head_name(config, name)
    config.update({"num_labels": 1, "value_head_prefix": name})
    own_pad = tokenizer.pad_token_id != tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id if own_pad else None
    return name


def name_head(model, name):
    """Renames the value head, which transformers calls score."""
    if name not in (None, "score"):
        setattr(model, name, model.score)
        del model.score


def has_weights(path, lora_dim=0):
    """Returns whether `path`, a hub name or a folder, holds weights. With lora_dim it must."""
    if not Path(path).is_dir() or weight_files(path):
        return True
    if lora_dim:
        why = f"{path} holds no weights for adapters to sit on"
        refused.fail(f"--lora_dim {lora_dim}: {why}.\n  --lora_dim 0 trains from scratch.")
    return False


def weight_files(path):
    """Returns the files with the weights of a folder; [] of a hub name.

    [] also where config.json and tokenizer stand alone: such a model starts from scratch. Anything
    else that looks like weights, and cannot be read, is an error.
    """
    folder = Path(path)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    held = [file.name for file in files if file.name.endswith(tuple(OTHER_WEIGHTS))]
    if not held:
        return []
    first = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if not first:
        advice = "Save it by transformers' save_pretrained."
        refused.fail(f"{path} holds {held[0]}, and no {WEIGHTS[0]} to load.\n  {advice}")
    if first.suffix != ".json":
        return [first]
    try:
        shards = sorted(set(json.loads(first.read_text())["weight_map"].values()))
        missing = [name for name in shards if not (folder / name).is_file()]
    except (ValueError, LookupError, TypeError, AttributeError):
        refused.fail(f"{first} is no index of weights.\n  Fetch or save the model anew.")
    if missing:
        count = f"{len(missing)} of {len(shards)} files that {first.name} names"
        refused.fail(f"{path} lacks {count}: {missing[0]}.\n  Fetch or save the model anew.")
    return [folder / name for name in shards]


def read_weights(kind, path, config, value_head, options):
    """Returns the model in `path`, and the names of the weights that it does not hold.

    kind: AutoModelForCausalLM, or AutoModelForSequenceClassification with the value head. Only
    the value head's weights may be missing.
    """
    own_config = load_config(path, options["trust_remote_code"])  # an error in words if it is gone
    if value_head not in (None, "score"):  # transformers calls it score
        options = {**options, "key_mapping": {rf"^{value_head}\.": "score."}}
    try:
        model, info = kind.from_pretrained(path, config=config, output_loading_info=True, **options)
    except LOAD_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError) or crash.waited_in_vain(error):
            raise
        reason = f"{error} ".splitlines()[0]  # cut short, of other shapes, not there, not safe
        refused.fail(f"the weights of {path} cannot be loaded.\n  {reason}")
    missing = info["missing_keys"]
    if strangers := sorted(set(missing) - ({"score.weight"} if value_head else set())):
        hint = "A reward model has no head that writes; step 1 begins with a language model."
        names = ", ".join(strangers[:3])
        refused.fail(f"{path} holds no weights for {names}: they would be random.\n  {hint}")
    if missing and is_scorer(own_config):
        refused.fail(NO_HEAD.format(path))
    refuse_cut_layers(path, model, info["unexpected_keys"])
    return model, missing


def refuse_cut_layers(path, model, unexpected):
    """Ends with an error if weights of `path` belong to layers that its config leaves out."""
    as_layer_0 = functools.partial(re.sub, r"\d+", "0")
    known = {as_layer_0(name) for name, _ in model.named_parameters()}
    if cut := sorted(name for name in unexpected if as_layer_0(name) in known):
        why = f"its config.json has no place for {len(cut)} of its weights, such as {cut[-1]}"
        refused.fail(f"{path}: {why}.\n  Is num_hidden_layers right?")


def load_tokenizer(path, args=None):
    """Returns the tokenizer in `path`, with EOS, and with a padding token that is not EOS.

    Our masks come from positions, so the id of padding never matters here. But stock transformers
    finds a response's last token by `ids != pad`, and would read the score one token early if pad
    were EOS: so it differs wherever it can. args: with max_seq_len, the longest row to come.
    """
    length, trust_remote_code = (args.max_seq_len, args.trust_remote_code) if args else (0, False)
    config = load_config(path, trust_remote_code).get_text_config()
    tokenizer = copy.deepcopy(load(path, AutoTokenizer, trust_remote_code))
    tokenizer = scoring_tokenizer.as_trained(tokenizer)
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        long = f"--max_seq_len {length} (in step 3 --max_prompt_seq_len and --max_answer_seq_len)"
        advice = f"Lower it to {positions} in all; for the toy's model, --preset toy."
        refused.fail(f"{long} exceeds the {positions} positions of {path}.\n  {advice}")
    if tokenizer.eos_token_id is None:
        advice = "Set eos_token in its tokenizer_config.json."
        refused.fail(f"the tokenizer of {path} has no EOS, so no response could end.\n  {advice}")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": padding_token(tokenizer, config.vocab_size)})
    if len(tokenizer) > config.vocab_size:
        why = f"has {len(tokenizer)} tokens, its model has rows for {config.vocab_size}"
        refused.fail(f"the tokenizer of {path} {why}.")
    tokenizer.padding_side = "left"
    return tokenizer


def padding_token(tokenizer, vocab_size):
    """Returns a token to pad with: one that is there, else a new one, else EOS.

    A new one takes a row of the embedding that no token uses.
    """
    known = tokenizer.get_vocab()
    taken = (None, tokenizer.eos_token_id, tokenizer.bos_token_id)
    for name in (*PAD_NAMES, tokenizer.unk_token):
        if known.get(name) not in taken:
            return name
    return "<|pad|>" if len(tokenizer) < vocab_size else tokenizer.eos_token


def own_dropout(config):
    """Returns {name: probability} of every dropout that a model's config sets."""
    dropouts = {name: p for name, p in vars(config).items() if isinstance(p, (int, float))}
    return {name: p for name, p in dropouts.items() if "drop" in name and name != "layerdrop"}
