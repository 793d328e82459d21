"""LoRA, tensor parallelism, states that leave the device: none may change what is learned, apart
from rounding. runs.py says what is run; each is laid beside a run without it, or laid out in
another way. What cannot be done is refused: tests/run/test_flags.py.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import sft
from machinery import folders, zero3
from tests import kit, runs
from tests.runs import CURVES, assert_same_curves, curve, facts, metrics, run_of

peft = pytest.importorskip("peft")
ADAPTERS = "adapter_model.safetensors"


def logits(path):
    """Returns what the model in `path`, as the next step would load it, says on ten tokens."""
    return says(zero3.unwrap_model(load(path)))


def load(path, head=None, lora_dim=0):
    args = sft.get_args(["--preset", "toy"])
    tokenizer = folders.load_tokenizer(kit.TOKENIZER)
    return kit.load_model(str(path), args, 0, None, tokenizer, head, lora_dim)


def says(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 15)[None]).logits


def distance(weights, others):
    """Returns how far two models are apart, over the weights that both have."""
    both = weights.keys() & others.keys()
    return sum((weights[k].float() - others[k].float()).square().sum() for k in both) ** 0.5


# --------------------------------------------------------------------------------------------------
# LoRA: frozen weights, and beside each a product of two thin matrices that trains
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script, stages", [("sft", "0123"), ("reward", "13"), ("ppo", "023")])
def test_lora_trains_alike_under_every_stage(script, stages):
    """Adapters are sharded like any weight, with gradient checkpointing or without."""
    assert_same_curves([f"{script}_lora{stage}" for stage in stages], CURVES[script])
    folder = run_of(f"{script}_lora{stages[-1]}")
    for part in ("", "critic") if script == "ppo" else ("",):
        adapters = kit.weights(folder / part, ADAPTERS)
        assert all(tensor.any() for key, tensor in adapters.items() if "lora_B" in key)  # from 0


def test_adapters_are_small_and_in_pefts_format():
    """A (4 x in) and B (out x 4) of every linear layer but the output, and nothing else. Stock peft
    loads them on the base that adapter_config.json names, and says what our loader says."""
    folder, base = run_of("sft_lora3"), runs.base() / "models/actor"
    adapters = kit.weights(folder, ADAPTERS)
    assert not (folder / "model.safetensors").exists()
    assert len(adapters) == 2 * 7 * 2  # layers x matrices x (A, B)
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    torch.testing.assert_close(logits(folder), says(stock), rtol=0, atol=1e-4)
    assert (logits(folder) - logits(base)).abs().max() > 0.1


def test_the_value_head_trains_in_full():
    """It is new in step 2: left frozen, or behind an adapter, the reward model could not learn its
    scale. It is saved beside the adapters, and a critic goes on from it."""
    key = "base_model.model.score.weight"
    adapters = kit.weights(run_of("reward_lora3"), ADAPTERS)
    assert [name for name in adapters if "score" in name] == [key]
    new = load(run_of("sft_lora3"), "score", lora_dim=4)
    trains = {name for name, p in new.named_parameters() if p.requires_grad}
    assert {name for name in trains if "lora_" not in name} == {"model.score.weight"}
    assert (adapters[key] - new.model.score.weight).abs().max() > 1e-3
    critic = kit.weights(run_of("ppo_lora3") / "critic", ADAPTERS)
    assert (critic[key] - adapters[key]).abs().max() > 1e-4


def test_without_its_adapters_the_actor_is_the_reference():
    """B starts at 0: before the first update KL is 0 to the bit, and after it is not. Old and new
    policy agree before each update, though the adapters were off in between."""
    for stage in (0, 2, 3):
        first, *later = [kl for _, kl in curve(f"ppo_lora{stage}", "kl_k3")]
        assert first == 0 and min(later) > 1e-5
        ratios = [ratio for _, ratio in curve(f"ppo_lora{stage}", "ratio_max")]
        assert ratios == pytest.approx([1] * len(ratios), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_a_resumed_lora_run_equals_an_uninterrupted_one(script):
    whole, resumed = f"{script}_lora3", f"{script}_lora_resumed"
    assert kit.outcome(run_of(resumed)) == kit.outcome(run_of(whole))


# --------------------------------------------------------------------------------------------------
# Tensor parallelism: two ranks share every layer, and see the same rows
# --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "reward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_share_layers_learn_what_ranks_that_share_rows_do(script, stage):
    """The same rows a step, a sum over rows taken once, the same losses up to bf16's rounding. Four
    ranks, two and two, share both."""
    names = [f"{script}_dp{stage}", f"{script}_tp{stage}"]
    assert_same_curves(names, ["loss", "eval_loss"], rel=6e-3)
    assert_same_curves(names, ["grad_norm"], rel=0.05)
    shared, split = (kit.weights(run_of(name)) for name in names)
    start = kit.weights(runs.base() / "models/actor")
    assert shared.keys() == split.keys() and distance(shared, split) < 0.5 * distance(shared, start)
    if script == "sft" and stage < 3:
        four = f"sft_tp2_dp2_zero{stage}"
        assert_same_curves([names[0], four], ["loss", "eval_loss"], rel=6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_share_layers_write_the_same_responses(stage):
    """They sample from the same numbers; were one to stop before the other, the run would hang.
    Generating, scoring and training read the same split weights: the ratio is 1 before the update.
    The average of split weights is saved whole, and lags behind them."""
    name = f"ppo_tp{stage}"
    ratios = [ratio for _, ratio in curve(name, "ratio_max")]
    assert ratios == pytest.approx([1] * len(ratios), abs=1e-3)
    lines = (run_of(name) / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 10  # 5 prompts, before and after, each once
    start = kit.weights(runs.base() / "models/actor")
    end, ema = (kit.weights(run_of(name) / part) for part in ("", "ema"))
    assert 0 < distance(ema, start) < 0.5 * distance(end, start)


# --------------------------------------------------------------------------------------------------
# fp16, for GPUs without bf16 (T4, V100); on CPU ranks it is slow, and right
# --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "reward"])
def test_fp16_learns_what_fp32_does(script):
    """The loss is scaled by 2^16 before the backward, and the gradient divided by it."""
    names = [f"{script}_zero2", *(f"{script}_fp16_{stage}" for stage in (1, 2, 3))]
    assert_same_curves(names, ["loss", "eval_loss", "grad_norm"], rel=6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_fp16_1", "ppo_fp16_2", "ppo_fp16_3", "ppo_fp16_grpo"])
def test_real_fp16_engines_skip_together(name):
    """At the first scale the critic's gradients overflow in more updates than the actor's (in two
    or three, by the processor). Both skip all of them, on both ranks, or the one would learn from
    what the other has not.
    What is sampled is what is scored: the ratio is 1 before each update. The rate that is logged is
    the step's own: the schedule moves on after a step, and not after one that is skipped."""
    skipped = {saved["skipped"] for rank in facts(name) for saved in rank["saved"]}
    assert len(skipped) == 1 and (skipped != {0} or "grpo" in name)
    assert max(abs(ratio - 1) for _, ratio in curve(name, "ratio_max")) < 1e-2
    lines, applied = metrics(name)[1:], 0
    for line in lines:  # a skipped step has no norm
        cosine = math.cos(math.pi * applied / len(lines))
        assert line["learning_rate"] == pytest.approx(5e-4 * (1 + cosine))
        applied += line["grad_norm"] is not None


# --------------------------------------------------------------------------------------------------
# State offload, and every combination that CPU ranks permit
# --------------------------------------------------------------------------------------------------
AWAY = {f"ppo_offload_states{stage}": f"ppo_zero{stage}" for stage in (1, 2, 3)}
AWAY |= {"ppo_bf16_offload_states2": "ppo_bf16", "ppo_bf16_offload_states3": "ppo_bf16_zero3"}


@pytest.mark.parametrize("away", AWAY)
def test_states_that_leave_and_come_back_are_the_same(away):
    """Moments, master weights and gradients wait elsewhere while responses are written and scored,
    and are back to be saved: numbers and weights are the same to the bit."""
    stays = AWAY[away]
    assert kit.outcome(run_of(away)) == kit.outcome(run_of(stays))
    for rank in facts(away):  # DeepSpeed's own list
        assert rank["away"]
        assert all({"hp_params", "optim_states"} <= set(states) for states in rank["away"])
        assert all(saved["away"] == [] for saved in rank["saved"])
    assert not any(any(rank["away"]) for rank in facts(stays))


@pytest.mark.parametrize("name", [*runs.MATRIX, *runs.SPLIT])
def test_every_combination_learns_the_same(name):
    """Where weights and states lie, and who holds which part, changes no loss: two steps beside
    those of plain stage 0 in fp32, in bf16 up to its rounding."""
    plain = f"m_fp320{'_lora' * name.endswith('_lora')}"
    rel = {"fp32": 5e-5, "bf16": 6e-3}[name[2:6]]
    assert_same_curves([plain, name], ["loss", "eval_loss"], rel=rel)


def test_the_table_of_combinations_is_that_of_the_tests():
    """docs/deepspeed.md says `runs` for exactly the combinations that are run here."""
    offloads = {" ".join(map("`{}`".format, flags)): name for name, flags in runs.OFFLOADS.items()}
    said = set()
    for line in (kit.ROOT / "docs/deepspeed.md").read_text().splitlines():
        if line.startswith(("| fp32 |", "| bf16 |")):
            dtype, stage, flags, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            name = f"m_{dtype}{stage}{offloads.get(flags.strip('-'))}"
            columns = zip(("", "_lora", "_tp"), cells)
            said |= {f"{name}{column}" for column, cell in columns if cell == "runs"}
    assert said == runs.MATRIX.keys() | runs.SPLIT.keys()
