"""What a model's folder may hold beside what it must, and which token its rows are padded with.

What is refused stands in tests/promises.py.
"""

import json

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
from transformers import AutoTokenizer

import common
from machinery import folders, tokens
from tests import kit
from tests.kit import load_model

SIZE = len(TOKENIZER)


def edit(file, **changes):
    """Changes keys of a JSON file; None takes one out."""
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "name, head, fits",
    [
        ("v_head.summary.weight", None, True),  # TRL's: of a language model that PPO trained
        ("model.visual.blocks.0.attn.proj.weight", "score", True),  # Qwen3.5's tower for images
        ("model.layers.0.attn.attention.bias", None, True),  # an old GPT-Neo's mask
        ("model.layers.7.input_layernorm.weight", None, False),
    ],
)
def test_what_a_file_may_hold_beside_the_weights(name, head, fits, stage, tmp_path):
    """Parts of another kind, and buffers of an older transformers. Other weights are not left out
    in silence: a model of half its layers loads, and writes nonsense. Under ZeRO-3, where
    transformers compares nothing, this is found as well, before any weight is read (no rank has met
    another here)."""
    folder = folder_of(tmp_path, config_of("llama"), weights=True)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(1)}, file, metadata={"format": "pt"})
    given = folder, get_args(), stage, None, TOKENIZER, head
    if not fits:
        with kit.refuses("unused-weights"):
            load_model(*given)
    elif stage == 0:
        assert next(load_model(*given).parameters()).std() > 0


# --------------------------------------------------------------------------------------------------
# Tokenizers: with, without, and with an unhelpful padding token
# --------------------------------------------------------------------------------------------------
def tokenizer_folder(path, vocab_size=SIZE + 8, pad_name="<pad>"):
    """The toy's tokenizer without a padding token, beside a model of `vocab_size` rows."""
    folder_of(path, config_of("llama", vocab_size=vocab_size))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_text((path / file).read_text().replace("<pad>", pad_name))
    edit(path / "tokenizer_config.json", pad_token=None)
    return str(path)


@pytest.mark.parametrize(
    "spare, name, found",
    [(8, "<pad>", "<pad>"), (8, "<other>", "<|pad|>"), (0, "<other>", "<eos>")],
)
def test_a_padding_token_that_is_not_eos_is_found(spare, name, found, tmp_path):
    """Other tools find the end of a text by padding. Where there is none, another token than EOS is
    taken: one that is there, else a new one in an unused row of the embedding. With none, padding
    is EOS: the model is never resized. stock transformers must be able to tell the two apart, or be
    told that it cannot; our own scores, whose masks come from lengths, are the same in a padded
    batch."""
    folder = tokenizer_folder(tmp_path, SIZE + spare, name)
    tokenizer = folders.load_tokenizer(folder)
    assert (tokenizer.pad_token, tokenizer.eos_token_id) == (found, 1)
    assert tokenizer.pad_token_id < SIZE + spare and len(tokenizer) == SIZE + (found == "<|pad|>")
    assert tokens.tokenise_response(tokenizer, " yes")[-1] == tokenizer.eos_token_id
    model = value_model_of(folder, tokenizer=tokenizer)
    assert model.model.config.pad_token_id == (tokenizer.pad_token_id if spare else None)
    texts = [[*row, 1] for row in RAGGED]
    together = values(model, *common.pad(texts, tokenizer.pad_token_id))[:, -1]
    alone = torch.cat([values(model, *common.pad([text], 0))[:, -1] for text in texts])
    torch.testing.assert_close(together, alone, **CLOSE)


@pytest.mark.parametrize("special", [True, False])
def test_only_tokens_that_can_occur_need_a_row(special, tmp_path):
    """Gemma 3's tokenizer has the token of an image beyond the rows of its models for text. Nobody
    writes a special token; others stand in the data."""
    folder = tokenizer_folder(tmp_path, SIZE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<image>", special=special)])
    tokenizer.save_pretrained(folder)
    if special:
        assert len(folders.load_tokenizer(folder)) == SIZE + 1
    else:
        with kit.refuses("vocabulary-too-large"):
            folders.load_tokenizer(folder)


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


def test_a_judge_of_an_older_version_reads_texts_by_its_own_tokenizer(tmp_path):
    """Its folder has a second tokenizer, which appends EOS also where no special tokens are asked
    for. Read by that one, each prompt would hold an EOS, and no error would say so."""
    folder = folder_of(tmp_path, config_of("llama"))
    TOKENIZER.save_pretrained(tmp_path / "as_trained")
    edit(tmp_path / "tokenizer.json", normalizer={"type": "Prepend", "prepend": "EOS"})
    ids = folders.load_tokenizer(folder)("some text", add_special_tokens=False).input_ids
    assert ids == TOKENIZER("some text", add_special_tokens=False).input_ids
