"""What runs write down for tools/look.py: tokens.jsonl (--microscope) and judge.jsonl."""

from types import SimpleNamespace

import datasets
import pytest
import torch

from machinery import evaluation, folders, rows, sources
from tests import kit
from tests.conftest import micro_batch


def looked_at(tmp_path, tokenizer, monkeypatch, **changes):
    """Returns a micro-batch of random numbers, of 3 and 2 tokens, and tokens.jsonl."""
    monkeypatch.setattr(evaluation, "MOST_TOKENS", 2)
    args = SimpleNamespace(output_dir=str(tmp_path), kl_coef=0.5, kl_in="reward")
    draw = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(2, 3, generator=draw) for name in evaluation.NUMBERS.values()}
    mask, ends = torch.tensor([[1.0, 1, 1], [1, 1, 0]]), torch.ones(2)
    given = dict(response_mask=mask, length=torch.tensor([3, 2]), ended=ends, scores=mask)
    batch = micro_batch([1, 0], **{**drawn, **given, **changes})
    for response, ids in zip(batch.responses, ([5, 6, 1], [7, 1])):
        response |= dict(sample=0, prompt="Who?", text="I", ended=1.0, response_ids=ids)
    evaluation.write_microscope(SimpleNamespace(args=args, tokenizer=tokenizer), 7, [batch])
    return batch, kit.read_lines(tmp_path / "tokens.jsonl")


def test_tokens_jsonl_holds_what_training_sees(tmp_path, tokenizer, monkeypatch):
    """Each number of each token, in the order of the rows, up to MOST_TOKENS of a response. The
    advantages are those before whitening."""
    batch, lines = looked_at(tmp_path, tokenizer, monkeypatch)
    kl = {"kl": batch.kl("k1"), "kl_k3": batch.kl("k3")}
    for line, i in zip(lines, (1, 0), strict=True):
        found = [line[name] for name in ("row", "step", "kl_coef", "reward", "response_length")]
        assert found == [1 - i, 7, 0.5, 3 - i, 3 - i]
        tokens = line["tokens"]
        ids = batch.responses[i]["response_ids"]
        assert tokens.pop("text") == [tokenizer.decode(ids[:1]), tokenizer.decode(ids[1:2])]
        assert tokens.keys() == {*evaluation.NUMBERS, *kl}
        for name, numbers in tokens.items():
            tensor = kl.get(name, getattr(batch, evaluation.NUMBERS.get(name, ""), None))
            assert numbers == pytest.approx(tensor[i, :2].tolist(), rel=1e-5)


def test_what_a_run_does_not_have_is_not_in_tokens_jsonl(tmp_path, tokenizer, monkeypatch):
    """Without a critic, and without a reference."""
    none = dict(old_values=None, returns=None, ref_logprobs=None)
    _, lines = looked_at(tmp_path, tokenizer, monkeypatch, **none)
    assert {*lines[0]["tokens"]} == {"text", "logprob", "entropy", "reward", "advantage"}


@pytest.mark.parametrize("compares, expected", [(False, [0, 1]), (True, [0, 0, 0, 1, 1, 1])])
def test_the_microscope_is_bounded_and_may_be_off(compares, expected):
    """Where responses to a prompt are compared, each is there several times."""
    rows = datasets.Dataset.from_list([{"prompt_ids": [5]}] * 2)
    for number in (0, 99):
        args = SimpleNamespace(microscope=number, compares_groups=compares, samples_per_prompt=3)
        found = [request["row"] for request in evaluation.microscope_requests(args, rows)]
        assert found == (expected if number else [])


def test_tokens_are_decoded_with_their_spaces():
    """Also where a tokenizer writes a space only between tokens, as SentencePiece ones do."""
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join("ab"[i] for i in ids))
    none = dict.fromkeys({*evaluation.NUMBERS.values()} - {"ref_logprobs"})
    batch = SimpleNamespace(ref_logprobs=None, responses=[{"response_ids": [0, 1, 0]}], **none)
    evaluation.note_numbers(batch, tokenizer)
    assert batch.responses[0]["numbers"]["text"] == ["a", " b", " a"]


def test_judge_jsonl_has_every_pair_once(tmp_path):
    """Of all ranks, in the order of the rows; each evaluation replaces the one
    before. Lengths are those of the tokens. A pair can be found in its file, and read here; a
    column of the data takes no number's place."""
    args = SimpleNamespace(output_dir=str(tmp_path))
    data = tmp_path / "pairs.jsonl"
    texts = [dict(prompt="Who?", chosen="A" * i, rejected="B", row="mine") for i in range(1, 4)]
    kit.write_lines(data, texts)
    source, columns = sources.read_source(str(data))
    tokenizer = folders.load_tokenizer(kit.TOKENIZER)
    held_out = [rows.tokenise_row(row, tokenizer, "reward", 64) for row in source["train"]]
    for chosen in (9.0, 1.0):
        evaluation.write_pairs(args, held_out, torch.tensor([[2, 0.5, 0.0], [0, chosen, 2.0]]))
    first, second = kit.read_lines(tmp_path / "judge.jsonl")
    names = ("row", "chosen_score", "rejected_score", "chosen", "rejected", "prompt", "place")
    assert [first[name] for name in names] == [0, 1.0, 2.0, "A", "B", "Who?", f"{data}, line 1"]
    assert [second[name] for name in names[:4]] == [2, 0.5, 0.0, "AAA"]
    assert first["rejected_length"] == len(held_out[0]["responses"][1])
