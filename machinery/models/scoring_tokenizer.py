"""The tokenizer in a reward model's folder, which puts BOS and EOS around a text by itself.

A reward model reads its score at EOS, and other tools append none: pipelines take the text alone,
and TRL's GRPO even asks for no special tokens. So a normaliser writes both, whatever the caller
asks for, where the text has none yet. Our own scripts append EOS, and load it without that.
"""

import copy
import json
import re

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from machinery.base import ranks

CHANGED = ("normalizer", "post_processor", "added_tokens")  # in tokenizer.json
ADDS = ("add_bos_token", "add_eos_token")  # in tokenizer_config.json
PROBES = ("Human: What is it?\n\nAssistant: It is a test.", "one", " two  spaces\n")
# AutoTokenizer builds some classes (Qwen2's) anew and drops the normaliser, but not one that is
# named here. Nothing runs this code unless trust_remote_code is on.
OWN_CLASS = """from transformers import PreTrainedTokenizerFast


class ScoringTokenizer(PreTrainedTokenizerFast):
    \"\"\"Loads tokenizer.json as it is, with the normaliser that appends EOS.\"\"\"
"""


def pad_token(tokenizer):
    """Returns a token that stock transformers can tell from EOS: any other special one, else any.

    It takes a score at the last token that is not padding, and that is EOS.
    """
    if tokenizer.pad_token != tokenizer.eos_token:
        return tokenizer.pad_token
    by_number = reversed(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    tokens = [*tokenizer.all_special_tokens, *by_number]
    return next(token for token in tokens if token not in (None, tokenizer.eos_token))


def save(tokenizer, folder):
    """Writes to `folder`, which holds the model's config, a tokenizer that appends EOS.

    Returns for whom it does so: "all" callers; "special", those that ask for special tokens; or
    "none", where it is no fast tokenizer. `as_trained` takes it back.
    """
    code = folder / "scoring_tokenizer.py"
    own_class = {"auto_map": {"AutoTokenizer": [None, "scoring_tokenizer.ScoringTokenizer"]}}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    ways = [("all", fast), ("all", fast | own_class), ("special", {})]
    for whom, settings in ways if isinstance(tokenizer, PreTrainedTokenizerFast) else []:
        try:
            write(appending(tokenizer, whom), folder, settings)
            code.unlink(missing_ok=True)
            if "auto_map" in settings:
                code.write_text(OWN_CLASS)
            if appends(AutoTokenizer.from_pretrained(folder), tokenizer, whom):
                return whom
        except Exception as error:  # of many kinds. It must not cost the weights
            ranks.say(f"the tokenizer could not be made to append EOS ({whom}): {error!r}")
    code.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return "none"


def write(tokenizer, folder, settings):
    """Writes a tokenizer to `folder`, with the dict `settings` in tokenizer_config.json."""
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | settings
    config.write_text(json.dumps(settings, indent=2) + "\n")


def appends(new, tokenizer, whom):
    """Returns whether `new` splits texts as training did with `tokenizer`, and appends EOS."""
    inside = [f"one{token}two" for token in tokenizer.get_added_vocab()]
    for text in (*PROBES, *inside):
        ids = tokenizer(text).input_ids
        ids = ids[: len(ids) - (ids[-1] == tokenizer.eos_token_id)] + [tokenizer.eos_token_id]
        asked = [True, False] if whom == "all" else [True]
        if any(new(text, add_special_tokens=special).input_ids != ids for special in asked):
            return False
    return True


def appending(tokenizer, whom):
    """Returns a copy that appends EOS (and puts BOS first, if `tokenizer` does) for `whom`."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {key: state[key] for key in CHANGED} | {"pad_token": tokenizer.pad_token}
    kept |= {name: tokenizer.init_kwargs.get(name) for name in ADDS}
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    if tokenizer("one").input_ids[0] != tokenizer.bos_token_id:
        bos = None
    template, around = ["$A"], [token for token in (bos, eos) if token]
    if whom == "all":
        add_rules(state, bos, eos)
    else:
        template = [token for token in (bos, "$A", eos) if token]
    new = with_state(tokenizer, state)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {*around}]
    pair = [*template, *(piece.replace("$A", "$B") for piece in template)]
    processor = TemplateProcessing(single=template, pair=pair, special_tokens=ids)
    new.backend_tokenizer.post_processor = processor
    written = whom == "special"
    new.init_kwargs |= {"as_trained": kept, "add_bos_token": bool(bos) and written}
    new.init_kwargs["add_eos_token"] = written
    new.pad_token, new.padding_side = pad_token(tokenizer), "right"
    return new


def add_rules(state, bos, eos):
    """Adds to tokenizer.json's dict a normaliser that writes BOS (or None) and EOS around a text.

    It leaves a text that ends with EOS, or begins with BOS, as it is, but for the line break that
    chat templates write after EOS. It also leaves a special token alone as it is, which it sees.
    """
    known = {token["content"] for token in state["added_tokens"]} | {eos}
    last, others = re.escape(eos), "|".join(rf"\A{re.escape(token)}" for token in known - {eos})
    found = {rf"(?:{last}\s*)?\z" + (f"(?<!{others})" if others else ""): eos}
    if bos:
        alone = "|".join(map(re.escape, known))
        found[rf"\A(?!{re.escape(bos)}|(?:{alone})\z)"] = bos
    steps = [state["normalizer"]] if state["normalizer"] else []
    for pattern, content in found.items():
        pattern = {"Regex": pattern}
        steps.append({"type": "Replace", "pattern": pattern, "content": content})
    state["normalizer"] = {"type": "Sequence", "normalizers": steps}
    for token in state["added_tokens"]:  # found after the normaliser, which so sees a whole text
        token["normalized"] = True


def with_state(tokenizer, state):
    """Returns a copy of the tokenizer with the dict `state` as its tokenizer.json."""
    new = copy.deepcopy(tokenizer)
    new._tokenizer = Tokenizer.from_str(json.dumps(state))
    return new


def as_trained(tokenizer):
    """Returns the tokenizer as it was before `save`; any other as it is."""
    kept = tokenizer.init_kwargs.pop("as_trained", None)
    if kept is None:
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    new = with_state(tokenizer, state | {key: kept[key] for key in CHANGED})
    new.init_kwargs.pop("auto_map", None)
    new.init_kwargs |= {name: kept[name] for name in ADDS}
    new.pad_token = kept["pad_token"]
    return new
