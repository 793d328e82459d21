"""What a model's folder, or its name on the hub, holds; or a clear error."""

import copy
import functools
from pathlib import Path

from machinery import crash, errors, ranks

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

PAD_NAMES = ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>")


@functools.lru_cache
def load(path, kind, trust_remote_code):
    """Returns what `kind` (AutoConfig, AutoTokenizer) loads from a hub name or folder."""
    folder = Path(path)
    among_outputs = any(folder.parent.glob("*/args.json"))
    if not folder.exists() and (str(path)[0] in "./~" or among_outputs):  # no name on the hub
        hint = f"Has the step before been run?\n  {errors.nearest(folder)}"
        errors.fail(f"{path}: no such folder. {hint}")
    try:
        return kind.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        why = ""
        if not folder.is_dir():
            why = "It is no folder here; has the step before been run? Looked up on the hub:"
        elif (folder / "args.json").exists() and not (folder / "config.json").exists():
            why = "The run in it has not ended; --resume goes on with it."
        elif "trust_remote_code" in str(error):
            why = "Read its Python code, then let it run with --trust_remote_code."
        why += f"\n  {str(error).splitlines()[0]}"
        errors.fail(f"no {kind.__name__[4:].lower()} could be loaded from {path}.\n  {why}")


def load_config(path, trust_remote_code=False):
    """Returns transformers' config of the model in `path`."""
    return copy.deepcopy(load(path, AutoConfig, trust_remote_code))


def prepare_head(path, config, tokenizer, name):
    """Makes `config` that of a value model. Returns the name of its head: its own, else `name`."""
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        lacks = f"transformers has no sequence classification for {config.model_type}"
        errors.fail(f"{path}: {lacks}, so no reward model or critic.")
    name = getattr(config, "value_head_prefix", name)
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
    folder = Path(path)
    if not folder.is_dir() or any(f.suffix in (".safetensors", ".bin") for f in folder.iterdir()):
        return True
    if lora_dim:
        why = f"{path} holds no weights for adapters to sit on"
        errors.fail(f"--lora_dim {lora_dim}: {why}.\n  Leave it out to train from scratch.")
    return False


def read_weights(kind, path, config, value_head, options):
    """Returns the model in `path`, and the names of the weights that it does not hold.

    kind: AutoModelForCausalLM, or AutoModelForSequenceClassification with the value head. Only
    the value head's weights may be missing.
    """
    load_config(path, options["trust_remote_code"])  # an error in words if it is gone
    if value_head not in (None, "score"):  # transformers calls it score
        options = {**options, "key_mapping": {rf"^{value_head}\.": "score."}}
    try:
        model, info = kind.from_pretrained(path, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError) or crash.waited_in_vain(error):
            raise
        reason = str(error).strip().splitlines()[0]  # cut short, of other shapes, not there
        errors.fail(f"the weights of {path} cannot be loaded.\n  {reason}")
    missing = info["missing_keys"]
    if strangers := sorted(set(missing) - ({"score.weight"} if value_head else set())):
        hint = "A reward model has no head that writes; step 1 begins with a language model."
        names = ", ".join(strangers[:3])
        errors.fail(f"{path} holds no weights for {names}: they would be random.\n  {hint}")
    return model, missing


def load_tokenizer(path, args=None):
    """Returns the tokenizer in `path`, with EOS, and with a padding token that is not EOS.

    Our masks come from positions, so the id of padding never matters here. But stock transformers
    finds a response's last token by `ids != pad`, and would read the score one token early if pad
    were EOS: so it differs wherever it can. args: with max_seq_len, the longest row to come.
    """
    length, trust_remote_code = (args.max_seq_len, args.trust_remote_code) if args else (0, False)
    config = load_config(path, trust_remote_code).get_text_config()
    tokenizer = copy.deepcopy(load(path, AutoTokenizer, trust_remote_code))
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        long = f"--max_seq_len {length} (in step 3 --max_prompt_seq_len and --max_answer_seq_len)"
        advice = f"Lower it to {positions} in all; for the toy's model, --preset toy."
        errors.fail(f"{long} exceeds the {positions} positions of {path}.\n  {advice}")
    if tokenizer.eos_token_id is None:
        advice = "Set eos_token in its tokenizer_config.json."
        errors.fail(f"the tokenizer of {path} has no EOS, so no response could end.\n  {advice}")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": padding_token(tokenizer, config.vocab_size)})
    if len(tokenizer) > config.vocab_size:
        why = f"has {len(tokenizer)} tokens, its model has rows for {config.vocab_size}"
        errors.fail(f"the tokenizer of {path} {why}.")
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


def unwrap_model(engine):
    """Returns the transformers model inside a DeepSpeed engine, a ValueModel, or both."""
    model = getattr(engine, "module", engine)
    return model.model if hasattr(model, "value_head_name") else model


def count_parameters(model):
    """Returns how many weights the model has, on however many ranks they are spread."""
    count = 0
    for parameter in model.parameters():
        split = hasattr(parameter, "gather_params")  # by tensor parallelism
        size = getattr(parameter, "ds_numel", parameter.numel())
        count += size * (ranks.tensor_parallel_size() if split else 1)
    return count
