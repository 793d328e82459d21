"""The toy for verifiable rewards: what is said to be known of it is, and its verifier is right."""

import doctest
import json

import pytest

from recipes.arithmetic import generate, verifier
from recipes.toy import maths
from tests.kit import ROOT, base, metrics, read_lines, run, write_lines

TOY = ROOT / "recipes/arithmetic"


def rows_of(part):
    return read_lines(TOY / f"{part}.jsonl")


def sums(part):
    return [generate.read(row["prompt"].removesuffix(" =")) for row in rows_of(part)]


def test_held_out_sums_are_never_trained_on_and_the_longer_ones_are_longer():
    trained, held_out = set(sums("data/train")), set(sums("data/test"))
    assert len(held_out) == 200 and not trained & held_out
    lengths = [{len(line[1]) for line in each} for each in (trained, held_out, sums("longer/test"))]
    assert lengths == [{2}, {2}, {3}]


def test_what_is_known_of_the_pupil_against_all_that_he_may_write():
    """Imitation and luck by brute force: the verifier reads every possible response."""
    right = lucky = 0.0
    for row, line in zip(rows_of("data/test"), sums("data/test")):
        chances = dict(generate.responses(line))
        assert sum(chances.values()) == pytest.approx(1) and row["response"] in chances
        for text, p in chances.items():
            p *= verifier.correct([row["prompt"]], [text], [row["answer"]])[0]
            right += p
            lucky += p * (p > 0 and not verifier.all_steps_right(row["prompt"], text))
    known = json.loads((TOY / "data/limits.json").read_text())["pupil"]
    found = [right / 200, lucky / right]
    assert [known["imitation"], known["luck"]] == pytest.approx(found)


@pytest.mark.parametrize("line", open(ROOT / "recipes/toy/maths.jsonl"))
def test_what_breaks_verifiers_of_word_problems(line):
    """Thousands, units, currencies, several boxes, none, negative numbers, decimals, fractions,
    trailing text; and what a policy would find: empty boxes, names, other letters, factors."""
    case = json.loads(line)
    assert maths.solved(["Why?"], [case["response"]], [case["answer"]]) == [case["right"]]


@pytest.mark.parametrize(
    "name", ["9", "9/", "\\boxed", "\\boxed{", "{", "\\frac{1}", " ", "$", "dozen "]
)
def test_a_long_response_is_read_once(name):
    """Of a million characters, none of them an answer. What takes quadratic time would take hours,
    and Python makes no number of 5,000 digits."""
    text = name * (10**6 // len(name))
    responses = [f"#### {text}", f"\\boxed{{{text}}}", f"#### 5{text}x", f"#### {name * 200}"]
    assert maths.solved(["Why?"] * 4, responses, ["5"] * 4) == [0] * 4


def test_the_examples_in_the_verifier_are_true():
    found = doctest.testmod(maths)
    assert found.attempted and not found.failed


def test_each_row_has_its_answer_where_its_data_have_it():
    """In a blend of GSM8K and MATH a row has None in the other's column."""
    columns = {"answer": ["#### 5", None], "solution": [None, r"so \boxed{6}"]}
    assert maths.solved(["a", "b"], ["#### 5", "#### 6"], **columns) == [1, 1]
    for nothing in (None, "", " ", r"\boxed{}", r"\boxed{\ }", "####", "x" * 2000):
        with pytest.raises(ValueError, match="no answer in the columns"):
            maths.solved(["a"], ["#### 5"], [nothing])


GSM8K = """--preset qwen2.5-0.5b-grpo --max_steps 1 --max_answer_seq_len 8 --dtype fp32
           --gradient_accumulation_steps 1"""


@pytest.mark.slow
def test_the_recipe_for_gsm8k_on_rows_in_its_columns(tmp_path):
    """Both steps, with random weights. A row without an answer is named, not counted as wrong."""
    file = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"So {n + 1}.\n#### {n + 1}"} for n in range(40)]
    write_lines(file, rows)
    sft = f"""{GSM8K} --data_path {file} --columns instruction=question,output=answer
              --model_name_or_path {base()}/models/actor --max_seq_len 64""".split()
    ppo = f"""{GSM8K} --data_path {file} --columns instruction=question
              --actor_model_name_or_path {run("sft", *sft).folder} --num_eval_prompts 2
              --max_prompt_seq_len 64 --per_device_generation_batch_size 8
              --per_device_training_batch_size 8""".split()
    assert metrics(run("ppo", *ppo).folder)[-1]["eval_pass_at_4"] == 0
    file.write_text('{"question": "1 + 1?", "answer": null}\n{"question": "?", "answer": null}\n')
    failed = run("ppo", *ppo, expect=1).err
    assert "no answer in the columns" in failed and "in solved, for the responses to rows" in failed
