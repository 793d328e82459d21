"""What a model's folder, or its name on the hub, holds; or a clear error. What forwards take."""

import contextlib
import dataclasses
import inspect
import os
import re
import sys
from pathlib import Path

from tokenizers import processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from machinery import patches, ranks, zero3
from machinery.refused import Refused, nearest, read_json
from machinery.zero3 import unwrap_model

# peft's config of adapters names what they sit on. transformers' config lies beside it under a
# name of ours: as config.json it would have stock tools look for whole weights there.
ADAPTER_CONFIG, CONFIG_BESIDE_ADAPTERS = "adapter_config.json", "model_config.json"
PAD_NAMES = ("<pad>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|pad|>")
# How files of weights end, also those that transformers does not read
WEIGHTS = tuple(".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .index.json".split())

# Of a file: buffers, which older transformers saved, too (GPT-Neo's masks), and Qwen3.5's tower for
# images
LEFT_OUT = r"\.masked_bias$|\.attn\.attention\.bias$|\.visual\."


# ---- Where a model comes from ----
@dataclasses.dataclass
class Source:
    """What the name of a model stands for, looked up once."""

    path: str  # a folder, or a name on the hub
    base: str  # where the weights are: `path`, or what lies under the adapters there
    adapters: list  # folders of adapters, the outermost first
    has_weights: bool
    config: PreTrainedConfig
    own_dropout: dict  # {name: probability} as the model came: --dropout is this run's alone
    head: str | None  # the name of the value head; None: a language model

    def read(self, kind, **options):
        """Returns what `kind`, a class of transformers, reads from the folder.

        transformers calls a value head `score`, whatever its name in the file is.
        """
        names = {rf"^{self.head}\.": "score."} if self.head else None
        return kind.from_pretrained(self.base, config=self.config, key_mapping=names, **options)

    def missing_weights(self, kind, **options):
        """Returns the names of the weights that `kind` needs and the folder lacks: a new head's.

        All others are refused, and so are weights that the model has no place for, or of another
        shape. They are read to `meta`, a device without memory: so every rank finds what is wrong,
        and before anything is loaded. (transformers 5.24 compares nothing while it partitions
        weights for ZeRO-3.) With weights or without, `kind` must have a decoder for the config.
        """
        own_code = getattr(self.config, "auto_map", None) or {}
        known = type(self.config) in kind._model_mapping or kind.__name__ in own_code
        # What scores may begin with an encoder, as T5 does: each token would see what follows.
        if not known or (self.head and self.config.is_encoder_decoder):
            words = f"{self.path}: {kind.__name__} has no decoder for {self.config.model_type}."
            raise Refused("no-class", f"{words}\n  Take a causal model, such as Llama or Qwen.")
        if not self.has_weights:
            return {"score.weight"}
        options.update(device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True)
        words = f"the weights of {self.base} do not load"
        with refusing("unreadable-weights", words), ranks.unhurried():  # a download takes its time
            model, info = self.read(kind, **options)
        for name, found, wanted in sorted(info["mismatched_keys"]):
            sizes = f"{name} has the shape {[*found]} there, and {[*wanted]} in the model"
            one = " A value head gives one number." if self.head else ""
            raise Refused("unreadable-weights", f"{words}: {sizes}.{one}")
        missing, unused = info["missing_keys"], info["unexpected_keys"]
        head_is_new = self.head and (self.adapters or not is_scorer(self.config))
        wanted = missing - {"score.weight"} if head_is_new else missing
        # another kind of head, such as the output matrix, may be left out
        backbone = {model.base_model_prefix, *dict(model.base_model.named_children())}
        unused = {n for n in unused if n.split(".")[0] in backbone and not re.search(LEFT_OUT, n)}
        refuse_misfits(self.base, wanted, unused)
        return missing


def resolve(args, tokenizer=None, value_head=None):
    """Returns the Source of the model that the flags name, or refuses it.

    args, tokenizer, value_head: those of common.load_model. The config becomes that of the model
    to load: with --dropout, and of a value model if `value_head` names the head.
    """
    path = args.model_name_or_path
    config = load_config(path, args.trust_remote_code)
    zero3.refuse_unless_split(path, config, args)
    beside_logits = {"output_attentions": False, "output_hidden_states": False}
    update_config(config, {**beside_logits, "return_dict": True})
    dropout = own_dropout(config)
    if args.dropout is not None:
        config.update(dict.fromkeys(dropout, float(args.dropout)))
    if value_head:
        value_head = getattr(config, "value_head_prefix", value_head)  # its own name, if it has one
        config.update({"num_labels": 1, "value_head_prefix": value_head})
        pad = tokenizer.pad_token_id
        config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
    else:
        refuse_other_kind(path, config, scores=False)
    *adapters, base = chain(path)
    weights = has_weights(base, needed=adapters or args.lora_dim)
    return Source(path, base, adapters, weights, config, dropout, value_head)


def chain(path):
    """Returns [path], and where it holds adapters what they sit on, and so on, down to weights."""
    found = [path]
    while (file := Path(found[-1]) / ADAPTER_CONFIG).is_file():
        base = read_json(found[-1], ADAPTER_CONFIG).get("base_model_name_or_path")
        if base is None or base in found:
            words = f"{file} cannot be read, names no base, or adapters on themselves."
            raise Refused("no-weights", words)
        found.append(base)
    return found


def has_weights(path, needed=False):
    """Returns whether `path`, a hub name or a folder, holds weights.

    Where config.json and tokenizer stand alone it does not: such a model starts from scratch.
    With `needed` that is an error: nothing that is learned later would be worth anything.
    """
    base = Path(chain(path)[-1])
    holds = not base.is_dir() or any(file.name.endswith(WEIGHTS) for file in base.iterdir())
    if needed and not holds:
        raise Refused("no-weights", f"{base} holds no weights: it must have been trained before.")
    return holds


def refuse_misfits(path, missing, unused):
    """Raises Refused if `path` lacks weights that the model has, or has some that it lacks."""
    names = ", ".join(sorted(missing or unused)[:3])
    if missing:
        raise Refused("missing-weights", f"{path} lacks {names}: these weights would be random.")
    if unused:
        raise Refused("unused-weights", f"{path} has weights that its model lacks: {names}.")


@contextlib.contextmanager
def refusing(rule, words):
    """Turns any error raised inside into a Refused: `words`, and the error's first words.

    What a library raises on broken files is of many kinds: of the hub, of JSON, of pickle, ...
    """
    try:
        yield
    except Exception as error:
        found = " ".join(str(error).split()[:60])  # one may go on for pages
        raise Refused(rule, f"{words}. {type(error).__name__}: {found}") from error


# ---- Configs ----
def load_or_refuse(path, kind, **options):
    """Returns what `kind` (AutoConfig, AutoTokenizer) loads from a hub name or folder."""
    local = Path(path)
    # output/ is where our runs write: it may not be there yet, and is no name on the hub
    here = local.parent.is_dir() or local.parts[:1] == ("output",)
    if len(local.parts) > 1 and here and not local.exists():
        raise Refused("no-such-model", f"there is no {path} here. {nearest(local)}")
    with refusing("no-such-model", f"{path} does not load"):
        return kind.from_pretrained(path, **options)


def load_config(path, trust_remote_code=False):
    """Returns transformers' config of the model in `path`, or under the adapters there."""
    *adapters, base = chain(path)
    own = [str(file) for folder in adapters for file in Path(folder).glob(CONFIG_BESIDE_ADAPTERS)]
    config = load_or_refuse([*own, base][0], AutoConfig, trust_remote_code=trust_remote_code)
    by_peft = read_json(path, ADAPTER_CONFIG)
    if by_peft.get("task_type") == "SEQ_CLS" and "score" in (by_peft.get("modules_to_save") or ()):
        # a reward model, though the base, whose config this is, writes
        config.update({"architectures": ["SequenceClassification"], "value_head_prefix": "score"})
    refuse_encoder(path, config)
    return config


def update_config(config, changes):
    """Changes keys of a config, and of the one of its text part, if it has one."""
    for part in (config, config.get_text_config()):
        part.update(changes)


def refuse_encoder(path, config):
    """Raises Refused if the model attends to what follows a token, as BERT does.

    transformers loads many encoders as causal language models, and only warns if their config does
    not say is_decoder. Such a model sees the tokens that it is trained to predict.
    """
    text = config.get_text_config()
    masked = config.model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "xlnet")
    causal = getattr(text, "is_decoder", False) or getattr(text, "causal", False)  # causal: XLM's
    # BART and its like have a decoder, which is loaded alone. True is EmbeddingGemma's.
    encodes = masked and not causal and not config.is_encoder_decoder
    if encodes or getattr(text, "use_bidirectional_attention", False) is True:
        words = f"{path} is an encoder ({config.model_type}): its tokens see what follows."
        raise Refused("encoder", f"{words}\n  Take a causal model, such as OPT, Llama or Qwen.")


def own_dropout(config):
    """Returns {name: probability} of every dropout that a model's config sets."""
    return {
        name: p
        for name, p in vars(config).items()
        if "drop" in name and name != "layerdrop" and isinstance(p, (int, float))
    }


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


# ---- Tokenizers ----
def load_tokenizer(path, args=None, in_chats=False):
    """Returns the tokenizer in `path`, with EOS and a padding token.

    in_chats: the data are chats, so EOS is the token with which the chat template ends a turn. A
    response then ends in training as it does in use, and generation stops there.

    Our masks come from positions, so the id of padding never matters here: the model's own stays,
    also where it is EOS. If there is none, a token other than EOS is taken where possible: other
    tools mask a response's end by `ids != pad`. args: with max_seq_len, the longest row to come.
    """
    length, trust_remote_code = (args.max_seq_len, args.trust_remote_code) if args else (0, False)
    config = load_config(path, trust_remote_code)
    # mistral-common's own tokenizer has no chat template
    options = {"config": config, "trust_remote_code": trust_remote_code, "mistral_format": False}
    # Reward models of older versions keep their tokenizer in as_trained/. The other one, for stock
    # tools, appends EOS to each text.
    own = Path(path, "as_trained")
    tokenizer = load_or_refuse(own if own.is_dir() else path, AutoTokenizer, **options)
    if is_scorer(config) and tokenizer.is_fast:
        put_after_texts(tokenizer, [])  # not EOS, for stock tools: our scripts append it
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        long = f"--max_seq_len {length} (in step 3 --max_prompt_seq_len and --max_answer_seq_len)"
        raise Refused("too-long", f"{long} exceeds the {positions} positions of {path}.")
    if tokenizer.eos_token_id is None:
        raise Refused("no-eos", f"{path}/tokenizer_config.json names no eos_token.")
    if in_chats and (end := end_of_turn(tokenizer)) != tokenizer.eos_token:
        ranks.say(f"responses end with the chat template's {end}, not {tokenizer.eos_token}")
        token = tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids(end)]
        token.special = True  # so that a text that spells it is text
        tokenizer.add_special_tokens({"eos_token": token})
        if tokenizer.pad_token == end:  # others would take the end of a turn for padding
            tokenizer.pad_token = None
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": padding_token(tokenizer, config.vocab_size)})
    # Data write no special token (machinery/tokens.py), so others than EOS and padding need no
    # row: Gemma 3's models for text lack that of an image.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    used = {*tokenizer.get_vocab().values()} - special
    rows = 1 + max(*used, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if rows > config.vocab_size:
        words = f"the tokenizer of {path} needs {rows} rows, its model has {config.vocab_size}."
        raise Refused("vocabulary-too-large", words)
    tokenizer.padding_side = "left"
    return tokenizer


def put_after_texts(tokenizer, end):
    """Makes a fast tokenizer put the ids `end` after a text. What it puts before it, BOS, stays."""
    text, ids = (tokenizer("1 one", add_special_tokens=on).input_ids for on in (False, True))
    around = {"START": ids[: ids.index(text[0])], "END": end}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="START $A END",
        special_tokens=[
            {"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)}
            for name, ids in around.items()
        ],
    )


def end_of_turn(tokenizer):
    """Returns the special token with which the chat template ends the assistant's turn, else EOS.

    It is another than EOS for Gemma (<end_of_turn>) and the base models of Qwen (<|im_end|>). What
    a template writes only where nothing follows is the end of the chat: Phi's <|endoftext|>. Where
    the tokenizer lacks the template's token, the end is text, and the screen says so.
    """
    turns, ends = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}], []
    with contextlib.suppress(Exception):  # there is no template, or it refuses such a chat
        for more in (0, 1):
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=more, tokenize=False)
            ends.append(text.rpartition("ANSWER")[2])
    end = os.path.commonprefix(ends)
    known = [t for t in tokenizer.get_added_vocab() if t in end]
    if end.strip() and not known:
        ranks.say(f"warning: {end.strip()!r} ends a turn, and is no token: responses hold it")
    return max(known, key=lambda t: end.rfind(t) + len(t), default=tokenizer.eos_token)


def ends_of(model, tokenizer):
    """Returns the ids that end a response: EOS, and others that end one in stock generate().

    Those stand in generation_config.json, and chat models have two or three. Ids of ordinary tokens
    are ignored: configs that nobody has adapted to the tokenizer name just any id.
    """
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    others = {*(own if isinstance(own, list) else [own])} - {tokenizer.eos_token_id, None}
    return [tokenizer.eos_token_id, *sorted(others.intersection(tokenizer.added_tokens_decoder))]


def known_ids(model, tokenizer):
    """Returns the ids, ascending, that have a token and a row of the output matrix.

    There may be holes between them: len(tokenizer) then is not the largest id plus 1.
    """
    rows = model.config.get_text_config().vocab_size
    return sorted(i for i in {*tokenizer.get_vocab().values()} if i < rows)


def padding_token(tokenizer, vocab_size):
    """Returns a token to pad with: one that is there, else a new one, else EOS.

    A new one takes a row of the embedding that no token uses.
    """
    known = tokenizer.get_vocab()
    taken = (None, tokenizer.eos_token_id, tokenizer.bos_token_id)
    for name in (*PAD_NAMES, tokenizer.unk_token):
        if known.get(name) not in taken:
            return name
    return "<|pad|>" if max(known.values()) + 1 < vocab_size else tokenizer.eos_token


# ---- Forwards: models differ in what they take beside ids and a mask ----
def accepted(model, **options):
    """Returns those of the options that the model's forward takes. (BLOOM takes no position ids.)

    A model that cannot give logits at single places takes a number of last columns, or nothing.
    What is `cache` in transformers 5.24 was `past_key_values` before. No script uses the loss of
    balance that a mixture of experts computes from its routers' logits.
    """
    takes = inspect.signature(unwrap_model(model).forward).parameters
    options.setdefault("past_key_values", options.get("cache"))
    options.setdefault("output_router_logits", False)
    return {name: value for name, value in options.items() if name in takes}


def mask_for(model, mask):
    """Returns the mask of a Layout as the model takes it: one (N, 1, T, T) as numbers to add."""
    return patches.as_numbers(mask, unwrap_model(model).dtype) if mask.dim() == 4 else mask


def picks_positions(model):
    """Returns whether the model computes logits at the positions that a mask (N, T) marks.

    transformers' own do (5.23), by `slice_logits_to_keep`, unless they are compiled.
    """
    library = vars(sys.modules[type(unwrap_model(model)).__module__])
    return "slice_logits_to_keep" in library and not getattr(model, "is_compiled", False)
