"""SmolLM2-135M-Instruct, a pretrained chat model: what only a real model shows.

Where its Python package is not installed the tests skip, and say what to install.
"""

import json

import pytest
import torch
import transformers
from data_kit import load
from transformers import AutoTokenizer

from machinery import folders
from tests import kit, runs
from tests.tiny_models import get_args

pytestmark = pytest.mark.slow
RECIPE = kit.ROOT / "recipes/smollm2"
SMALL = """--preset smollm2 --actor_model_name_or_path {0}/model --data_path {0}/sums --dtype fp32
    --num_eval_prompts 2 --max_answer_seq_len 12"""


@pytest.fixture(scope="module")
def step(smollm2, tmp_path_factory):
    """A run of one step of the recipe, at a rate that moves nothing that can be seen."""
    flags = f"""{SMALL.format(smollm2)} --reward_fn {RECIPE}/verifier.py:right --max_steps 1
        --actor_learning_rate 1e-12 --gradient_accumulation_steps 1
        --per_device_generation_batch_size 8 --per_device_training_batch_size 8"""
    folder = tmp_path_factory.mktemp("step") / "out"
    return kit.run("ppo", *flags.split(), folder=folder, limit=900)


def test_a_step_samples_as_it_scores(step):
    """A cache of 30 layers against one forward, on weights that mean something: largest logit 43.
    In fp32 they agree to five digits, and the first ratio is 1."""
    line = next(line for line in kit.metrics(step.folder) if "ratio_max" in line)
    assert line["sampling_gap"] < 1e-3 and abs(line["ratio_max"] - 1) < 1e-4


def test_what_is_saved_answers_messages(step):
    """With stock transformers: the template comes with the folder. So do the tokens with which the
    model came, of which padding is EOS."""
    writer = transformers.pipeline("text-generation", str(step.folder))
    asked = [{"role": "user", "content": "What is 62 + 60?"}]
    [answer] = writer(asked, max_new_tokens=24, do_sample=False)
    assert "62" in answer["generated_text"][-1]["content"]  # it speaks of the question
    tokenizer = AutoTokenizer.from_pretrained(step.folder)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"


@pytest.mark.parametrize("scale", [0.003, 0.1])
def test_adapters_that_rounding_nearly_hides_are_merged(smollm2, scale, tmp_path):
    """In bf16 30 layers round the outputs by 1 to 2 %, which is as much as the weaker adapters
    change them. On special tokens it can be a quarter; there sound adapters were refused."""
    import peft

    given = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2 / "model", dtype="float32")
    model = peft.get_peft_model(base, given)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=scale)
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(smollm2 / "model").save_pretrained(tmp_path / "adapter")
    found = kit.load_model(str(tmp_path / "adapter"), get_args("--dtype", "bf16"), 0)
    for name, weight in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(found.get_parameter(name).float(), weight, rtol=0.01, atol=2e-3)


def sentence_ends(prompts, completions, **columns):
    """A reward that this model gets for some responses and not for others."""
    return [float("." in response[-1]["content"]) for response in completions]


def test_zero3_on_two_ranks_is_one_rank_and_goes_on_from_its_checkpoint(smollm2, tmp_path):
    """A tied head, which two ranks shard with the embeddings; 30 layers, gathered for a rollout.
    The updates are one rank's, and after --resume they are those of the run that went on, to the
    bit. The head stays tied, and it has learned."""
    flags = f"""{SMALL.format(smollm2)} --reward_fn {__file__}:sentence_ends --max_steps 2
        --num_warmup_steps 0 --samples_per_prompt 4
        --per_device_generation_batch_size 4 --per_device_training_batch_size 4"""
    two = "--gradient_accumulation_steps 1 --zero_stage 3 --save_steps 1 --keep_checkpoints 2"
    two = [*flags.split(), *two.split()]
    whole = kit.run("ppo", *two, ranks=2, limit=900)
    resumed = tmp_path / "resumed"
    runs.copy_checkpoint(whole.folder, 1, resumed)
    done = kit.run("ppo", *two, "--resume", ranks=2, folder=resumed, limit=900)
    assert "starts anew" not in done.out
    assert kit.outcome(resumed) == kit.outcome(whole.folder)
    one = kit.run("ppo", *flags.split(), "--gradient_accumulation_steps", 2, limit=900)
    lines = [kit.metrics(run.folder) for run in (whole, one)]
    for line, same in zip(*lines, strict=True):
        for name in ("reward", "entropy", "grad_norm") if line["step"] else ("eval_reward",):
            assert line[name] == pytest.approx(same[name], rel=1e-3), name
    assert 0 < lines[0][1]["reward"] < 1 and lines[0][1]["grad_norm"] > 0
    before, after = kit.weights(smollm2 / "model"), kit.weights(whole.folder)
    assert before.keys() == after.keys() and "lm_head.weight" not in after
    assert not before["model.embed_tokens.weight"].equal(after["model.embed_tokens.weight"])


def test_real_dialogues_become_chats_that_fit(smollm2, hh, capsys):
    """HH is text, and many of its dialogues have more than 128 tokens with the template. They are
    cut at the beginning, and the last question stays."""
    tokenizer = folders.load_tokenizer(smollm2 / "model", in_chats=True)
    train, _ = load(tokenizer, [hh], "ppo", 128)
    said = capsys.readouterr().out
    assert "rows are dialogues as text, and get the chat template" in said
    assert "rows lose the beginning of a long prompt" in said
    opening = tokenizer("<|im_start|>assistant\n").input_ids
    assert all(len(row["prompt_ids"]) <= 128 for row in train)
    assert all(row["prompt_ids"][-len(opening) :] == opening for row in train)
    asked = json.loads(train[0]["prompt"])
    assert asked[-1]["role"] == "user"
