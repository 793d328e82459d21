"""Evaluations: alone, with --max_steps 0; and what is said of scores."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import reward
import sft
from machinery import batching, evaluation, tokens
from tests import kit, runs


@pytest.mark.parametrize("script, metric", [("sft", "eval_loss"), ("ppo", "eval_reward")])
def test_max_steps_0_evaluates_and_ends(script, metric):
    """How good is this model, on this data? The line of step 0, the samples and exit code 0; no
    step is made, so no model and no checkpoint is saved: the folder is no finished run."""
    done = kit.run(script, *runs.base_flags(script, kit.base()), "--max_steps", 0)
    [line] = kit.metrics(done.folder)
    assert line["step"] == 0 and metric in line
    assert script == "ppo" or line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    own = {"tokens.jsonl"} if script == "ppo" else set()
    left = {file.name for file in done.folder.glob("[!.]*")}
    assert left == {"args.json", "metrics.jsonl", "samples.jsonl"} | own, done


def test_what_is_true_of_evaluations_in_steps_1_and_2(monkeypatch):
    """Dropout is off, and then on again, and no graph is kept. The deviation of scores keeps its
    digits far from 0: of 100 +- 0.1, sums of squares in fp32 would be wrong by a percent of it."""
    modes, model = [], torch.nn.Identity()
    scores = 100 + 0.1 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    rows = SimpleNamespace(row_weight=torch.ones(500), loss_mask=torch.ones(500, 3))
    monkeypatch.setattr(batching, "eval_loader", lambda *_: [(range(500), rows)])
    monkeypatch.setattr(reward.evaluation, "write_pairs", lambda *_: None)

    def noting(result):
        seen = lambda engine: (engine.training, torch.is_grad_enabled())  # noqa: E731
        return lambda engine, *_: modes.append(seen(engine)) or result

    monkeypatch.setattr(reward, "score_pairs", noting(scores))
    monkeypatch.setattr(common, "response_logprobs", noting(-torch.ones(500, 3)))
    found = reward.evaluate(SimpleNamespace(args=None, notes={}), model, None, None)
    deviation = scores.double().std(unbiased=False).item()
    assert found["eval_score_std"] == pytest.approx(deviation, rel=1e-5) and model.training
    assert sft.evaluate(None, model, None, None)["eval_loss"] == 1
    assert model.training and modes == [(False, False)] * 2


@torch.no_grad()
def test_sfts_loss_is_that_of_stock_transformers(tmp_path):
    """The mean over all tokens of all responses, EOS among them and the prompt's not: of the
    evaluation, and of a step that takes all rows in two micro-batches."""
    place, tokenizer = kit.base() / "models/actor", AutoTokenizer.from_pretrained(kit.TOKENIZER)
    model, expected = AutoModelForCausalLM.from_pretrained(place), []
    for name in ("test", "train"):
        rows, total, count = kit.read_lines(kit.base() / f"data/{name}.jsonl")[:6], 0.0, 0
        kit.write_lines(tmp_path / f"{name}.jsonl", rows)
        for row in rows:
            prompt = tokenizer(row["prompt"])["input_ids"]
            response = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
            logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
            total -= sum(logprobs[at, token].item() for at, token in zip(places, response))
            count += len(response)
        expected.append(total / count)
    argv = f"""--data_path {tmp_path} --data_split 1,0,0 --model_name_or_path {place} --max_steps 1
               --per_device_train_batch_size 3 --gradient_accumulation_steps 2""".split()
    before, step = kit.metrics(kit.run("sft", *runs.base_flags("sft", kit.base()), *argv).folder)
    assert [before["eval_loss"], step["loss"]] == pytest.approx(expected, rel=1e-5)


def test_what_the_reward_model_learns_is_what_is_logged():
    """One pair a step, so that its scores are in the log. The loss has --center_coef as well."""
    argv = """--center_coef 0.5 --max_steps 3 --per_device_train_batch_size 1
              --gradient_accumulation_steps 1""".split()
    done = kit.run("reward", *runs.base_flags("reward", kit.base()), *argv)
    for step in kit.metrics(done.folder)[1:]:
        chosen, rejected = step["chosen_score"], step["rejected_score"]
        assert step["accuracy"] == (chosen > rejected)
        expected = math.log1p(math.exp(rejected - chosen)) + 0.5 * (chosen + rejected) ** 2
        assert step["loss"] == pytest.approx(expected, rel=1e-5)


def test_step_1_grades_what_it_answers(tiny_model, tokenizer, tmp_path):
    """Two prompts of unlike length, together as each alone; each score is the sum of its tokens',
    and eval_gold the mean of the scores."""
    argv = f"--preset toy --output_dir {tmp_path} --max_answer_seq_len 6 --num_samples 2".split()
    run, model = SimpleNamespace(args=sft.get_args(argv)), copy.deepcopy(tiny_model)
    texts = "Why?", "Where is the fox, and when can I see it?"
    rows = [dict(prompt=text, prompt_ids=tokenizer(text).input_ids, chat=False) for text in texts]
    rows = [{**row, "extra": "{}"} for row in rows]

    def gold(prompts, completions, completion_ids, **_):
        return [[float(len(p)), *[1.0] * (len(i) - 1)] for p, i in zip(prompts, completion_ids)]

    found = evaluation.answer_and_keep(run, model, tokenizer, rows, 3, gold)
    lines = kit.read_lines(tmp_path / "samples.jsonl")
    for row, line in zip(rows, lines, strict=True):
        [alone] = evaluation.answer_greedily(run.args, model, tokenizer, [row["prompt_ids"]])
        assert line.items() >= {**alone, "step": 3, "prompt": row["prompt"]}.items()
        ids = tokens.tokenise_response(tokenizer, line["response"])
        assert line["gold"] == len(row["prompt"]) + len(ids) - 1
    assert found == {"eval_gold": pytest.approx(sum(line["gold"] for line in lines) / 2)}


def test_one_eos_ends_a_response_of_step_1(tokenizer, monkeypatch):
    """The second of these has none."""
    written = torch.tensor([[7, tokenizer.eos_token_id, 0], [7, 8, 9]])
    stub = torch.nn.Identity()
    stub.generation_config, stub.generate = None, lambda ids, **_: torch.cat([ids, written], 1)
    args = sft.get_args(["--preset", "toy", "--max_answer_seq_len", "6"])
    found = evaluation.answer_greedily(args, stub, tokenizer, [[5, 6], [7, 8]])
    assert [answer["ended"] for answer in found] == [1.0, 0.0]
