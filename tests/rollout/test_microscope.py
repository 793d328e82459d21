"""What runs write down for tools/look.py: tokens.jsonl (--microscope) and judge.jsonl."""

import copy
from types import SimpleNamespace

import datasets
import pytest
import torch

import ppo
from machinery import evaluation, folders, rows, sources
from tests import kit


@pytest.fixture
def looked(tiny_model, tokenizer, tmp_path):
    """Returns a function that magnifies held-out prompts with these flags: tokens.jsonl's lines.

    Judge and critic are plain functions; the reference finds each token a little less likely."""
    reference = copy.deepcopy(tiny_model)
    reference.lm_head.weight.data.mul_(0.8)
    critic = torch.nn.Module()
    critic.forward = lambda ids, mask, positions: torch.full(ids.shape, 0.75)
    texts = [f"{'Who? ' * i}\nAnswer:" for i in range(1, 4)]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [dict(prompt=t, prompt_ids=i, chat=False, extra="{}") for t, i in zip(texts, ids)]

    def run_it(flags):
        own = "--preset toy --max_answer_seq_len 6 --per_device_eval_batch_size 2 --kl_coef 0.5"
        args = ppo.get_args(f"{own} --output_dir {tmp_path} {flags}".split())
        judge = lambda batch: 2.0 * batch.last  # noqa: E731
        own = critic if args.has_critic else None
        models = ppo.Models(tiny_model, own, reference, [], {}, judge, None)
        requests = evaluation.microscope_requests(args, datasets.Dataset.from_list(rows))
        if requests:
            batches = ppo.answered(args, models, tokenizer, requests)
            ppo.set_advantages(args, batches)
            run = SimpleNamespace(args=args, tokenizer=tokenizer)
            evaluation.write_microscope(run, 7, batches)
        return kit.read_lines(tmp_path / "tokens.jsonl") if requests else []

    return run_it


@pytest.mark.parametrize("estimator, group", [("gae", 1), ("grpo", 2)])
def test_tokens_jsonl_holds_what_training_sees(looked, estimator, group):
    """The reward is minus the KL penalty, and the score on the last token; advantages are the
    estimator's, before whitening: with GAE and lambda 1 what is to come, less the critic's
    guess."""
    flags = f"--advantage {estimator} --samples_per_prompt {group} --lam 1 --microscope 2"
    lines = looked(flags)
    expected = [(row, place) for row in (0, 1) for place in range(group)]
    assert [(line["row"], line["sample"]) for line in lines] == expected
    for line in lines:
        tokens = line["tokens"]
        count = len(tokens["text"])
        assert line["step"] == 7 and line["kl_coef"] == 0.5 and count == line["response_length"]
        assert all(len(values) == count for values in tokens.values())
        kl = [a - b for a, b in zip(tokens["logprob"], tokens["ref_logprob"])]
        assert tokens["kl"] == pytest.approx(kl, abs=1e-4) and max(map(abs, kl)) > 1e-3
        rewards = [-0.5 * x + 2 * (i == count - 1) for i, x in enumerate(kl)]
        assert tokens["reward"] == pytest.approx(rewards, abs=1e-4)
        to_come = [sum(rewards[i:]) for i in range(count)]
        if estimator == "gae":
            assert tokens["value"] == [0.75] * count
            assert tokens["return"] == pytest.approx(to_come, abs=1e-4)
            assert tokens["advantage"] == pytest.approx([x - 0.75 for x in to_come], abs=1e-4)
        else:
            assert "value" not in tokens and "return" not in tokens


def test_the_microscope_is_bounded_and_may_be_off(looked, monkeypatch):
    """More prompts than there are, and fewer tokens than a response has."""
    assert looked("--microscope 0") == []
    monkeypatch.setattr(evaluation, "MOST_TOKENS", 2)
    lines = looked("--microscope 99")
    assert len(lines) == 3 and max(line["response_length"] for line in lines) > 2
    assert all(len(values) == 2 for line in lines for values in line["tokens"].values())


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
