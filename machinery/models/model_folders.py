"""What a model's folder, or its name on the hub, holds; or a clear error."""

import contextlib
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

from machinery.base import ranks
from machinery.base.modules import unwrap_model
from machinery.base.refused import Refused, nearest
from machinery.models import lora, scoring_tokenizer

PAD_NAMES = ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>")
# How files of weights end, also those that transformers does not read
WEIGHTS = tuple(".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .index.json".split())


# ---- Configs ----
def load(path, kind, trust_remote_code):
    """Returns what `kind` (AutoConfig, AutoTokenizer) loads from a hub name or folder."""
    local = Path(path)
    if not local.exists() and len(local.parts) > 1 and local.parent.is_dir():  # no hub name, then
        words = f"there is no {path} here. {nearest(local)}\n  Has the step that writes it ended?"
        raise Refused("no-such-model", words)
    try:
        return kind.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds: of the hub, of JSON, of config's or tokenizers' own
        raise Refused("no-such-model", f"{path} cannot be loaded: {error}") from error


def load_config(path, trust_remote_code=False):
    """Returns transformers' config of the model in `path`, or under the adapters there."""
    *adapters, base = lora.chain(path)
    own = [str(file) for folder in adapters for file in Path(folder).glob(lora.CONFIG)]
    return load([*own, base][0], AutoConfig, trust_remote_code)


def own_dropout(config):
    """Returns {name: probability} of every dropout that a model's config sets."""
    return {
        name: p
        for name, p in vars(config).items()
        if "drop" in name and name != "layerdrop" and isinstance(p, (int, float))
    }


def has_dropout(model):
    """Returns whether dropout acts on a model, or on that of an engine, in train mode."""
    return any(own_dropout(unwrap_model(model).config).values())


# ---- Value models ----
def is_scorer(config):
    """Returns whether a config is that of a reward model or critic."""
    return "SequenceClassification" in str(config.architectures)


def refuse_other_kind(path, config, scores):
    """Raises Refused if `path` is a reward model where a language model is needed (scores False).

    Or the other way round: a judge without a trained head would score at random.
    """
    if is_scorer(config) and not scores:
        raise Refused("cannot-write", f"{path} is a reward model, which cannot write.")
    if scores and not is_scorer(config):
        raise Refused("cannot-score", f"{path} is no reward model. Run reward.py on it.")


def prepare_head(config, tokenizer, name):
    """Makes `config` that of a value model. Returns the name of its head: its own, else `name`."""
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


# ---- Weights ----
def has_weights(path, needed=False):
    """Returns whether `path`, a hub name or a folder, holds weights.

    Where config.json and tokenizer stand alone it does not: such a model starts from scratch.
    With `needed` that is an error: nothing that is learned later would be worth anything.
    """
    base = Path(lora.chain(path)[-1])
    holds = not base.is_dir() or any(file.name.endswith(WEIGHTS) for file in base.iterdir())
    if needed and not holds:
        raise Refused("no-weights", f"{base} holds no weights: it must have been trained before.")
    return holds


def read_weights(kind, path, config, value_head, options):
    """Returns the model in `path`, and the names of the weights that it does not hold.

    kind: AutoModelForCausalLM, or AutoModelForSequenceClassification with the value head. Only
    the value head's weights may be missing. Weights that find no place are left out.
    """
    own_config = load_config(path, options["trust_remote_code"])
    if value_head not in (None, "score"):  # transformers calls it score
        options = {**options, "key_mapping": {rf"^{value_head}\.": "score."}}
    # A download may take an hour. But under ZeRO-3 the ranks wait for each other as they load.
    patience = contextlib.nullcontext() if is_deepspeed_zero3_enabled() else ranks.unhurried()
    options = {**options, "config": config, "output_loading_info": True}
    try:
        with patience:
            model, info = kind.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError, SafetensorError, RuntimeError) as error:
        # Unknown, broken, or a weight of another shape; short memory is a RuntimeError, too.
        if isinstance(error, RuntimeError) and "mismatched" not in str(error):
            raise
        raise Refused("unreadable-weights", f"the weights of {path}: {error}") from error
    missing = info["missing_keys"]
    may_be_new = {"score.weight"} if value_head and not is_scorer(own_config) else set()
    if strangers := sorted(set(missing) - may_be_new):
        why = f"{path} holds no weights for {', '.join(strangers[:3])}: they would be random."
        raise Refused("missing-weights", why)
    return model, missing


# ---- Tokenizers ----
def load_tokenizer(path, args=None, in_chats=False):
    """Returns the tokenizer in `path`, with EOS, and with a padding token that is not EOS.

    in_chats: the data are chats, so EOS is the token with which the chat template ends a turn. A
    response then ends in training as it does in use, and generation stops there.

    Our masks come from positions, so the id of padding never matters here. But stock transformers
    finds a response's last token by `ids != pad`, and would read the score one token early if pad
    were EOS: so it differs wherever it can. args: with max_seq_len, the longest row to come.
    """
    length, trust_remote_code = (args.max_seq_len, args.trust_remote_code) if args else (0, False)
    whole = load_config(path, trust_remote_code)
    config = whole.get_text_config()
    tokenizer = load(path, AutoTokenizer, trust_remote_code)
    inside = scoring_tokenizer.AS_TRAINED
    if tokenizer.init_kwargs.get(inside):
        options = {"config": whole, "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(path, subfolder=inside, **options)
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        long = f"--max_seq_len {length} (in step 3 --max_prompt_seq_len and --max_answer_seq_len)"
        raise Refused("too-long", f"{long} exceeds the {positions} positions of {path}.")
    if tokenizer.eos_token_id is None:
        raise Refused("no-eos", f"{path}/tokenizer_config.json names no eos_token.")
    if in_chats and (end := end_of_turn(tokenizer)) != tokenizer.eos_token:
        ranks.say(f"responses end with the chat template's {end}, not {tokenizer.eos_token}")
        tokenizer.eos_token = end
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": padding_token(tokenizer, config.vocab_size)})
    if len(tokenizer) > config.vocab_size:
        why = f"has {len(tokenizer)} tokens, and its model has rows for {config.vocab_size}"
        raise Refused("vocabulary-too-large", f"the tokenizer of {path} {why}.")
    tokenizer.padding_side = "left"
    return tokenizer


def end_of_turn(tokenizer):
    """Returns the special token with which the chat template ends the assistant's turn, else EOS.

    It is another than EOS for Gemma (<end_of_turn>) and the base models of Qwen (<|im_end|>).
    """
    turns, end = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}], ""
    with contextlib.suppress(Exception):  # there is no template, or it refuses such a chat
        end = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("ANSWER")[2].rstrip()
    known = [token for token in tokenizer.get_added_vocab() if end.endswith(token)]
    return max(known, key=len, default=tokenizer.eos_token)


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
