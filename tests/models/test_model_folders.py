"""What a folder must hold, and what is refused: never random weights in place of learned ones."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    CLOSE,
    RAGGED,
    TOKENIZER,
    config_of,
    folder_of,
    get_args,
    value_model_of,
    values,
)
from tokenizers import AddedToken
from transformers import AutoTokenizer, GPTNeoConfig

import common
from machinery import folders, saving, tokens
from machinery.refused import Refused
from tests.kit import load_model

SIZE = len(TOKENIZER)


def rule_of(function, *args, **options):
    """Returns the rule that is broken."""
    with pytest.raises(Refused) as caught:
        function(*args, **options)
    return caught.value.rule


def edit(file, **changes):
    """Changes keys of a JSON file; None takes one out."""
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------
def cut_short(folder):
    os.truncate(folder / "model.safetensors", 1000)


def index_without_shards(folder):
    (folder / "model.safetensors").unlink()
    named = {"metadata": {}, "weight_map": {"lm_head.weight": "model-1-of-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(named))


def index_without_a_map(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def another_format(folder):
    (folder / "model.safetensors").rename(folder / "model.gguf")


def no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text("404: Not Found")


def a_wider_model(folder):
    edit(folder / "config.json", hidden_size=64)


def change_weights(file, change):
    """Calls change(weights) on what a file of weights holds."""
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def without_lm_head(folder):
    change_weights(folder / "model.safetensors", lambda weights: weights.pop("lm_head.weight"))


def fewer_layers(folder):
    edit(folder / "config.json", num_hidden_layers=1)


HARM = {
    cut_short: "unreadable-weights",
    index_without_shards: "unreadable-weights",
    index_without_a_map: "unreadable-weights",
    another_format: "unreadable-weights",
    no_weights_at_all: "unreadable-weights",
    a_wider_model: "unreadable-weights",
    without_lm_head: "missing-weights",
    fewer_layers: "unused-weights",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("stage", [0, 3])
def test_no_weight_is_random_where_others_were_meant(harm, stage, tmp_path):
    """From scratch is only what nothing else can be meant by: config and tokenizer alone. And no
    weight is left out in silence: a model of half its layers loads, and writes nonsense. Under
    ZeRO-3, where transformers compares nothing, this is found as well, before any weight is read
    (no rank has met another here)."""
    folder = folder_of(tmp_path, config_of("llama"), weights=True)
    harm(tmp_path)
    assert rule_of(load_model, folder, get_args(), stage) == HARM[harm]


def test_the_masks_of_an_old_gpt_neo_are_no_weights(tmp_path):
    """Its files hold two for each layer, which transformers does not leave out by itself."""
    shape = dict(vocab_size=SIZE, hidden_size=32, num_heads=4, num_layers=2, window_size=8)
    config = GPTNeoConfig(attention_types=[[["global", "local"], 1]], **shape)
    folder = folder_of(tmp_path, config, weights=True)
    masks = {
        f"transformer.h.{i}.attn.attention.{name}": torch.ones(1)
        for i, name in ((0, "bias"), (0, "masked_bias"), (1, "masked_bias"))
    }
    change_weights(tmp_path / "model.safetensors", lambda weights: weights.update(masks))
    assert load_model(folder, get_args(), 0).lm_head.weight.std() > 0
    another = {"transformer.h.7.ln_1.bias": torch.ones(1)}
    change_weights(tmp_path / "model.safetensors", lambda weights: weights.update(another))
    assert rule_of(load_model, folder, get_args(), 0) == "unused-weights"


def test_a_tower_for_images_is_left_out(tmp_path):
    """Qwen3.5's is in the files of the base that adapters of its text model sit on. transformers
    leaves it out for a language model, but not for one with a value head."""
    folder = folder_of(tmp_path, config_of("llama"), weights=True)
    tower = {"model.visual.blocks.0.attn.proj.weight": torch.ones(1)}
    change_weights(tmp_path / "model.safetensors", lambda weights: weights.update(tower))
    assert value_model_of(folder).model.score.weight.std() > 0


def test_a_head_of_another_kind_is_left_out(tmp_path):
    """TRL saves the language model that PPO trained with a value head beside it."""
    folder = folder_of(tmp_path, config_of("llama"), weights=True)
    add = {"v_head.summary.weight": torch.ones(1, 32)}
    change_weights(tmp_path / "model.safetensors", lambda weights: weights.update(add))
    assert load_model(folder, get_args(), 0).lm_head.weight.std() > 0


def drop_a_layer(weights):
    for name in [name for name in weights if "layers.1." in name]:
        del weights[name]


def of_one_layer(folder):
    change_weights(folder / "adapter_model.safetensors", drop_a_layer)


def of_a_deeper_model(folder):
    fewer_layers(folder.parent / "base")
    change_weights(folder.parent / "base/model.safetensors", drop_a_layer)


def of_a_wider_model(folder):
    folder_of(folder.parent / "base", config_of("llama", hidden_size=64), weights=True)


def of_another_architecture(folder):
    folder_of(folder.parent / "base", config_of("bloom"), weights=True)


def without_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


def adapters_cut_short(folder):
    os.truncate(folder / "adapter_model.safetensors", 1000)


def on_themselves(folder):
    edit(folder / "adapter_config.json", base_model_name_or_path=str(folder))


def on_random_weights(folder):
    (folder.parent / "base/model.safetensors").unlink()


ADAPTER_HARM = {
    of_one_layer: "missing-weights",
    of_a_deeper_model: "unused-weights",
    of_a_wider_model: "unreadable-weights",
    of_another_architecture: "unreadable-weights",
    without_weights: "unreadable-weights",
    adapters_cut_short: "unreadable-weights",
    on_themselves: "no-weights",
    on_random_weights: "no-weights",
}


@pytest.mark.parametrize("harm", ADAPTER_HARM, ids=lambda harm: harm.__name__)
def test_adapters_are_held_to_what_they_sit_on(harm, tmp_path):
    """peft only warns of adapters that are missing, or that find no layer. These lie as peft saves
    them, without a config of their own."""
    base = folder_of(tmp_path / "base", config_of("llama"), weights=True)
    folder = tmp_path / "adapters"
    model = load_model(base, get_args(), 0, lora_dim=4)
    saving.save_model(model, TOKENIZER, folder)
    (folder / "model_config.json").unlink()
    load_model(str(folder), get_args(), 0)
    harm(folder)
    assert rule_of(load_model, str(folder), get_args(), 0) == ADAPTER_HARM[harm]


def test_what_must_have_learned_something_has_weights(tmp_path):
    """LoRA's frozen weights, and all models of step 3."""
    assert folders.has_weights("some/hub-name")
    folder = folder_of(tmp_path, config_of("llama"))
    assert not folders.has_weights(folder)
    assert rule_of(folders.has_weights, folder, needed=True) == "no-weights"
    assert rule_of(load_model, folder, get_args(), 0, lora_dim=4) == "no-weights"


# --------------------------------------------------------------------------------------------------
# Tokenizers: with, without, and with an unhelpful padding token
# --------------------------------------------------------------------------------------------------
def tokenizer_folder(path, vocab_size=SIZE + 8, pad_name="<pad>", **special):
    """The toy's tokenizer with other special tokens, beside a model of `vocab_size` rows."""
    folder_of(path, config_of("llama", vocab_size=vocab_size))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_text((path / file).read_text().replace("<pad>", pad_name))
    edit(path / "tokenizer_config.json", **{"pad_token": None, "eos_token": None, **special})
    return str(path)


def test_a_padding_token_that_is_not_eos_is_found(tmp_path):
    """Other tools find the end of a text by padding: where there is none, another token than EOS is
    taken if the vocabulary has one to spare."""
    tokenizer = folders.load_tokenizer(tokenizer_folder(tmp_path, eos_token="<eos>"))
    assert tokenizer.pad_token == "<pad>" and tokenizer.eos_token == "<eos>"
    assert len(tokenizer) == SIZE, "nothing was added"


@pytest.mark.parametrize(
    "token, fits",
    [(AddedToken("<image>", special=True), True), (AddedToken("word", special=False), False)],
    ids=["nobody writes it", "data write it"],
)
def test_only_tokens_that_can_occur_need_a_row(token, fits, tmp_path):
    """Gemma 3's tokenizer has the token of an image beyond the rows of its models for text."""
    folder = tokenizer_folder(tmp_path, SIZE, eos_token="<eos>", pad_token="<pad>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([token])
    tokenizer.save_pretrained(folder)
    if fits:
        assert len(folders.load_tokenizer(folder)) == SIZE + 1
    else:
        assert rule_of(folders.load_tokenizer, folder) == "vocabulary-too-large"


def test_the_embedding_of_padding_learns(tmp_path):
    """In many chat models it is EOS, which stands after each turn of a prompt. transformers gives
    the row of config.pad_token_id no gradient; our masks leave padding out."""
    folder = folder_of(tmp_path, config_of("llama", vocab_size=SIZE), weights=True)
    ids, mask = torch.tensor([[1, 1, 5, 1, 6]]), torch.tensor([[0, 1, 1, 1, 1]])
    grads = []
    for pad in (None, 1):
        edit(tmp_path / "config.json", pad_token_id=pad, eos_token_id=1)
        model = load_model(folder, get_args("--model_name_or_path", folder), 0)
        model(ids, attention_mask=mask).logits[:, 1:].logsumexp(-1).sum().backward()
        grads.append(model.get_input_embeddings().weight.grad)
    assert grads[0][1].abs().max() > 0 and grads[0].equal(grads[1])


@pytest.mark.parametrize("spare", [8, 0])
def test_a_padding_token_is_added_only_where_the_embedding_has_room(spare, tmp_path):
    """A new <|pad|> gets an unused row of the embedding. With none, padding is EOS: the model is
    never resized. stock transformers must be able to tell the two apart, or be told that it
    cannot; our own scores, whose masks come from lengths, are the same in a padded batch."""
    folder = tokenizer_folder(tmp_path, SIZE + spare, pad_name="<other>", eos_token="<eos>")
    tokenizer = folders.load_tokenizer(folder)
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id < SIZE + spare
    assert tokenizer.pad_token == ("<|pad|>" if spare else "<eos>")
    assert tokens.tokenise_response(tokenizer, " yes")[-1] == tokenizer.eos_token_id
    model = value_model_of(folder, tokenizer=tokenizer)
    assert model.model.config.pad_token_id == (tokenizer.pad_token_id if spare else None)
    texts = [[*row, 1] for row in RAGGED]
    together = values(model, *common.pad(texts, tokenizer.pad_token_id))[:, -1]
    alone = torch.cat([values(model, *common.pad([text], 0))[:, -1] for text in texts])
    torch.testing.assert_close(together, alone, **CLOSE)
