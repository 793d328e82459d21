"""Ten architectures, two random layers of each, with the toy's tokenizer; and how they are run."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import common
import sft
from tests.kit import ROOT, load_model

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "recipes/toy/model")
SPARE = 8  # rows of the embedding that no token uses, as most models have
SHAPE = dict(
    vocab_size=len(TOKENIZER) + SPARE,
    hidden_size=32,
    intermediate_size=64,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    initializer_range=0.2,
    init_std=0.2,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
KINDS = {
    "opt": dict(word_embed_proj_dim=32),
    # the backbone puts out 16, not 32
    "opt-350m": dict(model_type="opt", word_embed_proj_dim=16, do_layer_norm_before=False),
    "gpt2": {},
    "gpt_neox": {},
    "llama": dict(num_key_value_heads=2),
    "qwen2": dict(num_key_value_heads=2),
    "qwen3": dict(num_key_value_heads=2, head_dim=8),
    "gemma": dict(num_key_value_heads=1, head_dim=8),
    "mistral": dict(num_key_value_heads=2),
    "bloom": {},
}
# prompts, or texts, of different lengths
CLOSE = dict(rtol=1e-4, atol=2e-5)  # what fp32 rounds to in other shapes


def config_of(name, **changes):
    """Returns the config of one of KINDS, or of another kind."""
    return AutoConfig.for_model(**{"model_type": name, **SHAPE, **KINDS.get(name, {}), **changes})


class StandIn(torch.nn.Module):
    """What ppo.sample asks of a model beside its forward."""

    base_model, config = property(lambda self: self), config_of("llama", num_hidden_layers=1)
    dtype = torch.float32


def folder_of(path, config, weights=False, tokenizer=TOKENIZER):
    """Makes a folder as the toy's model is one: config.json and a tokenizer. Returns its name.

    weights: as from the hub, with random ones.
    """
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config) if weights else config
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def get_args(*flags):
    return sft.get_args(["--preset", "toy", "--dtype", "fp32", *flags])


def value_model_of(folder, *flags, tokenizer=TOKENIZER, head="score"):
    return load_model(folder, get_args(*flags), 0, None, tokenizer, head).eval()


def random_ids(*shape, seed=0):
    return torch.randint(2, len(TOKENIZER), shape, generator=torch.Generator().manual_seed(seed))


RAGGED = [random_ids(n, seed=n).tolist() for n in (9, 4, 1, 6)]


def logprobs(model, ids, mask, count, temperature=1.0):
    """Returns the log-probs of the last `count` tokens of each row, as our scripts compute them."""
    layout = common.last_columns(ids, mask, count)
    return common.response_logprobs(model, layout, torch.ones(len(ids), count), temperature)


def values(model, ids, mask):
    """Returns a ValueModel's value at each token, (B, T), as our scripts compute it."""
    return model(ids, mask, common.position_ids(mask))
