"""The tokenizer in a reward model's folder, which puts BOS and EOS around a text by itself.

A reward model reads its score at EOS, and other tools append none: pipelines take the text alone,
and TRL's GRPO even asks for no special tokens. So a normaliser writes both, whatever the caller
asks for, where the text has none yet. (`add_eos_token` in tokenizer_config.json is not read where
there is a tokenizer.json: transformers 5.21 to 5.24.) Our own scripts append EOS themselves: the
tokenizer as it was in training is saved, too, in the folder `as_trained`, and they load that one.
"""

import copy
import json
import re
import shutil

from transformers import AutoTokenizer

from machinery.base import ranks

AS_TRAINED = "as_trained"  # a folder, and the key in tokenizer_config.json that says it is there
PROBES = ("Human: What is it?\n\nAssistant: It is a test.", "one", " two  spaces\n")
# It loads tokenizer.json as it is. AutoTokenizer builds some classes (Qwen2's) anew and drops the
# normaliser, but not one that is named here. Nothing runs this code unless trust_remote_code is on.
OWN_CLASS = """from transformers import PreTrainedTokenizerFast


class ScoringTokenizer(PreTrainedTokenizerFast):
    pass
"""


def pad_token(tokenizer):
    """Returns a token that stock transformers can tell from EOS: any other special one, else any.

    It takes a score at the last token that is not padding, and that is EOS.
    """
    last = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))[::-1]
    tokens = [tokenizer.pad_token, *tokenizer.all_special_tokens, *last]
    return next(token for token in tokens if token not in (None, tokenizer.eos_token))


def save_appending(tokenizer, folder):
    """Makes the tokenizer that is saved in `folder`, beside the model's config, append EOS.

    Returns whether it does so for all callers. If it cannot, it is saved as it is, with a padding
    token that is not EOS.
    """
    trained, code = folder / AS_TRAINED, folder / "scoring_tokenizer.py"
    tokenizer.save_pretrained(trained)
    code.write_text(OWN_CLASS)
    try:
        write_rules(tokenizer, folder)
        if appends_eos(AutoTokenizer.from_pretrained(folder), tokenizer):
            return True
    except Exception as error:  # of many kinds. It must not cost the weights
        ranks.say(f"the tokenizer could not be made to append EOS: {error!r}")
    code.unlink()
    shutil.rmtree(trained)
    plain = copy.deepcopy(tokenizer)
    plain.pad_token = pad_token(tokenizer)
    plain.save_pretrained(folder)
    return False


def write_rules(tokenizer, folder):
    """Makes what is saved in `folder` append EOS, and put BOS first if `tokenizer` does."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    state = json.loads(file.read_text())
    starts = tokenizer("one").input_ids[0] == tokenizer.bos_token_id
    add_rules(state, tokenizer.bos_token if starts else None, tokenizer.eos_token)
    file.write_text(json.dumps(state, ensure_ascii=False))
    config = json.loads(settings.read_text()) | {
        "auto_map": {"AutoTokenizer": [None, "scoring_tokenizer.ScoringTokenizer"]},
        "tokenizer_class": "PreTrainedTokenizerFast",
        AS_TRAINED: True,
        "pad_token": pad_token(tokenizer),
        "padding_side": "right",
    }
    settings.write_text(json.dumps(config, indent=2))


def appends_eos(new, tokenizer):
    """Returns whether `new` splits texts as training did with `tokenizer`, and appends EOS."""
    inside = [f"one{token}two" for token in tokenizer.get_added_vocab()]
    for text in (*PROBES, *inside):
        ids = tokenizer(text).input_ids
        if ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        if any(new(text, add_special_tokens=special).input_ids != ids for special in (True, False)):
            return False
    return True


def add_rules(state, bos, eos):
    """Adds to tokenizer.json's dict a normaliser that writes BOS (or None) and EOS around a text.

    It leaves a text that ends with EOS, or begins with BOS, as it is, but for the line break that
    chat templates write after EOS. A lone special token stays as it is: these are normalised, too.
    """
    known = {token["content"] for token in state["added_tokens"]} | {eos}
    last, others = re.escape(eos), "|".join(rf"\A{re.escape(token)}" for token in known - {eos})
    found = {rf"(?:{last}\s*)?\z" + (f"(?<!{others})" if others else ""): eos}
    if bos:
        alone = "|".join(map(re.escape, known))
        found[rf"\A(?!{re.escape(bos)}|(?:{alone})\z)"] = bos
    steps = [state["normalizer"]] if state["normalizer"] else []
    for pattern, content in found.items():
        steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    state["normalizer"] = {"type": "Sequence", "normalizers": steps}
    state["post_processor"] = None  # it would put BOS before the one that is there
    for token in state["added_tokens"]:  # found after the normaliser, which so sees a whole text
        token["normalized"] = True
