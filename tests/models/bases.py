"""Base models that are not ours: a config without EOS, or with another one, a vocabulary with no
room for a padding token, tied embeddings, tokenizers that put BOS or more first, and the classes
that transformers has for Qwen2's tokenizer and for GPT-NeoX's."""

import torch
from tiny_models import TOKENIZER, config_of, folder_of, get_args, values
from tokenizers import processors
from transformers import AutoTokenizer

from machinery import folders, saving, tokens
from tests.kit import ROOT, load_model

VOCAB = len(TOKENIZER)
CHAT = "{% for m in messages %}<turn>{{ m['content'] }}<eos>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<turn>{% endif %}"
NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.3)
FULL = dict(vocab_size=VOCAB, **NONE)
OTHERS = dict(bos_token_id=7, eos_token_id=9, pad_token_id=3, initializer_range=0.3)
BASES = {
    "no EOS": (config_of("qwen2", **NONE), {}),
    "another EOS": (config_of("llama", **OTHERS), {"chat_template": CHAT}),
    "full": (config_of("llama", tie_word_embeddings=True, **FULL), {"pad_token": "<eos>"}),
    "padding is EOS": (config_of("llama", **NONE), {"pad_token": "<eos>"}),
    "BOS first": (config_of("llama", **FULL), {"bos_token": "<pad>"}),
    "more first": (config_of("llama", **FULL), {"first": "? <pad>"}),
    "Qwen2's class": (config_of("qwen2", **FULL), {"tokenizer_class": "Qwen2Tokenizer"}),
    "GPT-NeoX's class": (config_of("gpt_neox", **FULL), {"tokenizer_class": "GPTNeoXTokenizer"}),
    "OPT": (config_of("opt", vocab_size=VOCAB, init_std=0.3, bos_token_id=2, eos_token_id=2), {}),
    "GPT-2": (config_of("gpt2", **FULL), {}),
}
PAIRS = [
    ("Where is the fox?", " At the camp, in the summer.", " I do not know."),
    ("When?", " In the evening.", " You can see the fox at the camp, or in the hills, at noon."),
    ("Human: hi\n\nAssistant:", " Hello!  How are you?\n", " No."),
]
TEXTS = [pair[0] + pair[i] for i in (1, 2) for pair in PAIRS]


def base_folder(path, name):
    """Makes a folder as from the hub, of a base or of any architecture, with random weights."""
    config, special = BASES.get(name) or (config_of(name), {})
    folder = folder_of(path, config, weights=True)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/toy/model")
    for key in special.keys() - {"first", "tokenizer_class"}:
        setattr(tokenizer, key, special[key])
    first = special.get("first", special.get("bos_token"))
    if first:
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in first.split()]
        first = processors.TemplateProcessing(single=f"{first} $A", special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = first
    tokenizer.save_pretrained(path)
    if "tokenizer_class" in special:
        file = path / "tokenizer_config.json"
        file.write_text(file.read_text().replace("TokenizersBackend", special["tokenizer_class"]))
    if name == "full":  # and no token to pad with but EOS
        for file in (path / "tokenizer.json", path / "tokenizer_config.json"):
            file.write_text(file.read_text().replace("<pad>", "<other>"))
    return folder


def saved(tmp_path, name, head=None, lora_dim=0, flags=()):
    """A base as one of our scripts loads and saves it. Returns folder, model and tokenizer."""
    base = base_folder(tmp_path / "base", name)
    args = get_args("--model_name_or_path", base, *flags)
    tokenizer = folders.load_tokenizer(base)
    model = load_model(base, args, 0, None, tokenizer, head, lora_dim).eval()
    if head:
        with torch.no_grad():
            model.model.score.weight.normal_()
    saving.save_model(model, tokenizer, tmp_path / "out")
    return str(tmp_path / "out"), model, tokenizer


@torch.no_grad()
def our_scores(model, tokenizer):
    """Scores of PAIRS as our scripts read them: those of all chosen responses, then the others."""
    scores = []
    for i in (1, 2):
        for pair in PAIRS:
            ids = tokens.tokenise_prompt(tokenizer, pair[0])
            ids = torch.tensor([[*ids, *tokens.tokenise_response(tokenizer, pair[i])]])
            scores.append(values(model, ids, torch.ones_like(ids))[0, -1])
    return torch.stack(scores)
