"""The real thing: sft.py, reward.py and ppo.py on DeepSpeed, with one rank and with two, under
every ZeRO stage.

Sharding, accumulation and the number of GPUs decide how fast a run is and what fits. They must not
decide what comes out: each of those choices is run here on a tiny model in fp32, and the numbers
are laid side by side. workers.py says what is run; all runs of so many ranks share one launch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import common
import ppo
import sft
from machinery.base import ranks
from machinery.engine import throughput
from machinery.models import model_folders
from machinery.rollout import ema, kept_pass, ptx
from machinery.run import best
from tests import workers
from tests.workers import CLOCKS
from tools import export

ROOT = Path(__file__).resolve().parent.parent

SCRIPTS = ("sft", "reward", "ppo")
CURVES = {
    "sft": ["loss", "eval_loss"],
    "reward": ["loss", "accuracy", "chosen_score", "rejected_score", "eval_loss", "eval_accuracy"],
    "ppo": [
        "reward",
        "kl",
        "kl_k3",
        "critic_loss",
        "entropy",
        "response_length",
        "eos_rate",
        "advantage_std",
        "explained_variance",
        "eval_reward",
        "eval_kl",
        "eval_response_length",
    ],
}


def facts(name, ranks=2):
    """What the launch noted about a run or a check, one dict a rank."""
    if name in workers.REFUSED:
        pytest.skip("refused in words with a DeepSpeed before 0.19")
    folder, output = workers.launch("rare" if name in workers.RARE else ranks)
    file = folder / "facts" / f"{name}.json"
    if not file.is_file():
        errors = "\n".join(
            f"{f.name}: {f.read_text()}" for f in sorted((folder / "facts").glob("*.failed?"))
        )
        pytest.fail(f"{name} was not run to its end.\n{errors or output[-6000:]}")
    return json.loads(file.read_text())


def run_of(name):
    """Returns the output folder of a run that ended well."""
    ranks = (
        1
        if "one_rank" in name
        else 4
        if "_tp2_dp2" in name
        else "tensor parallel"
        if "_tp" in name
        else "late"
        if "_late" in name
        else 2
    )
    assert {rank["code"] for rank in facts(name, ranks)} == {0}
    return workers.shared_folder() / "runs" / name


def metrics(name):
    return [json.loads(line) for line in (run_of(name) / "metrics.jsonl").read_text().splitlines()]


def curve(name, key):
    """Returns [(step, value), ...] of one metric."""
    return [(record["step"], record[key]) for record in metrics(name) if key in record]


def assert_same_curves(names, keys, rel=5e-5, absolute=1e-5):
    for key in keys:
        expected = curve(names[0], key)
        assert len(expected) >= 2
        for name in names[1:]:
            found = curve(name, key)
            assert [s for s, _ in found] == [s for s, _ in expected]
            assert [v for _, v in found] == pytest.approx(
                [v for _, v in expected], rel=rel, abs=absolute
            ), f"{key}: {names[0]} and {name}"


def weights(folder):
    return load_file(folder / "model.safetensors")


# --------------------------------------------------------------------------------------------------
# DeepSpeed's config: one function writes it
# --------------------------------------------------------------------------------------------------
def config(*flags, **options):
    args = sft.get_args(["--preset", "toy", *flags])
    return common.ds_config(
        args, **{"stage": args.zero_stage, "batch_size": 4, "micro_steps": 3, **options}
    )


def test_flags_become_deepspeeds_config():
    """Batch sizes, stage, dtype, clipping and offloading come from the flags; ds_config.json has
    the rest; nobody has to keep two places in agreement."""
    plain = config("--dtype", "bf16", "--zero_stage", "2", "--max_grad_norm", "0.5")
    assert (
        plain["bf16"]
        == {"enabled": True, **({"immediate_grad_update": True} if workers.OLD else {})}
        and "fp16" not in plain
    )
    assert plain["gradient_clipping"] == 0.5
    assert (
        plain["train_micro_batch_size_per_gpu"] == 4 and plain["gradient_accumulation_steps"] == 3
    )
    assert plain["zero_optimization"]["stage"] == 2
    assert not {"offload_param", "offload_optimizer"} & set(plain["zero_optimization"])
    shipped = json.loads((workers.ROOT / "ds_config.json").read_text())
    assert plain["zero_optimization"].items() >= shipped["zero_optimization"].items()
    assert not {"bf16", "fp16"} & set(config("--dtype", "fp32"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_has_a_config(stage):
    """Stage 3 shards weights, and sets reduce_scatter; offloading is asked of DeepSpeed only where
    that stage has it: weights under stage 3, optimizer states wherever they are sharded."""
    flags = (
        ["--zero_stage", str(stage)]
        + ["--adam_offload"] * (stage > 0)
        + ["--offload"] * (stage == 3)
    )
    zero = config(*flags)["zero_optimization"]
    assert zero["stage"] == stage
    assert zero.get("reduce_scatter") is (True if stage == 3 else None)
    assert zero.get("offload_param", {}).get("device") == ("cpu" if stage == 3 else None)
    assert zero.get("offload_optimizer") == (
        {"device": "cpu", "pin_memory": True} if stage else None
    )


def test_a_frozen_model_gets_no_training_config():
    """Reference and reward model are sharded and offloaded like the others, but there is nothing to
    optimise in them."""
    frozen = config("--zero_stage", "3", "--offload", "--adam_offload", train=False)
    assert (
        "gradient_clipping" not in frozen and "offload_optimizer" not in frozen["zero_optimization"]
    )
    assert frozen["zero_optimization"]["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize(
    "knobs",
    [
        {"bf16": {"enabled": True}},
        {"train_batch_size": 8},
        {"optimizer": {"type": "Adam"}},
        {"zero_optimization": {"stage": 3}},
    ],
)
def test_ds_config_must_not_repeat_what_flags_decide(knobs, tmp_path, capsys):
    """Every number has one home: a --ds_config that sets what a flag sets is refused, not silently
    merged."""
    (tmp_path / "knobs.json").write_text(json.dumps(knobs))
    with pytest.raises(SystemExit) as stop:
        config("--ds_config", str(tmp_path / "knobs.json"))
    assert stop.value.code == 2 and next(iter(knobs)) in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# The same numbers, however the work is laid out
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_zero_stages_agree(script):
    """ZeRO only decides where optimizer states, gradients and weights lie: stages 0 to 3 give the
    same curves, on the training rows and on the held-out ones."""
    assert_same_curves([f"{script}_zero{stage}" for stage in (0, 1, 2, 3)], CURVES[script])


def test_checkpointing_recomputes_the_same():
    """Layers that are computed twice, and gathered for it once more, give the curves of layers
    whose activations were kept."""
    assert_same_curves(["sft_zero3", "sft_zero3_checkpointing"], CURVES["sft"])


def test_a_shared_prompt_is_only_a_saving():
    """Step 2 with the prompt computed once for both answers, and with a row for each answer: the
    same curves."""
    assert_same_curves(["reward_zero3", "reward_apart"], CURVES["reward"])
    tokens = [
        record["tokens_per_second"] * record["seconds"]
        for name in ("reward_zero3", "reward_apart")
        for record in metrics(name)[1:2]
    ]
    assert tokens[0] < 0.9 * tokens[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_gpu_and_two_agree(script):
    """Eight rows are eight rows: one rank with all of them takes the same steps as two ranks that
    share them. The third step has six rows only; the places left are filled with rows that count
    nothing, so that no rank waits for another."""
    one = {"sft": "sft_one_rank_8x1"}.get(script, f"{script}_one_rank")
    assert_same_curves([one, f"{script}_zero0", f"{script}_zero3"], CURVES[script])
    two = weights(run_of(f"{script}_zero0"))
    for key, tensor in weights(run_of(one)).items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=2e-4)


def test_accumulation_does_not_change_the_result():
    """8 rows at once, 2 x 4 or 8 x 1: the loss is one mean over the step's tokens. A mean of
    micro-batch means would give a token in a short answer more weight than one in a long answer."""
    assert_same_curves(
        [f"sft_one_rank_{rows}x{8 // rows}" for rows in (8, 4, 2, 1)] + ["sft_1x4"], CURVES["sft"]
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_gradient_norms_agree(script):
    """The norm of the gradient before clipping is logged, and the same, under every stage: the loss
    division and the average over ranks that DeepSpeed does by itself are undone exactly once."""
    one = {"sft": "sft_one_rank_2x4"}.get(script, f"{script}_one_rank")
    assert_same_curves(
        [one, *(f"{script}_zero{stage}" for stage in (1, 2, 3))], ["grad_norm"], rel=1e-3
    )
    assert all(norm > 0 for _, norm in curve(one, "grad_norm"))


def test_the_gradient_norm_is_logged_without_zero_too():
    """DeepSpeed keeps the norm in its ZeRO optimizers; under stage 0 in fp32 there is none, and the
    number must be had in another way: a grad_norm of null hides the first sign of trouble."""
    assert_same_curves(["sft_zero1", "sft_zero0"], ["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_sharded_and_whole_models_are_saved_alike(script):
    """What stage 3 gathers to write is what stage 0 holds: the same names, shapes and, after the
    same training, weights."""
    whole, sharded = weights(run_of(f"{script}_zero0")), weights(run_of(f"{script}_zero3"))
    assert whole.keys() == sharded.keys()
    for key in whole:
        torch.testing.assert_close(sharded[key], whole[key], rtol=0, atol=2e-4)


def test_sharding_and_saving_loses_nothing():
    """A model that is loaded in shards and saved untouched is the model that was loaded, to the
    bit."""
    facts("check_save")
    before, after = (
        weights(workers.shared_folder() / name) for name in ("models/actor", "saved_zero3")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )


def test_rollouts_do_not_depend_on_ranks_or_stages():
    """The same prompts get the same answers, word for word, on one rank and on two, sharded or not:
    sampling draws from (seed, step, row), never from a generator whose state depends on who else is
    running."""
    samples = {
        name: (run_of(name) / "samples.jsonl").read_text().splitlines()
        for name in ("ppo_one_rank", "ppo_zero0", "ppo_zero1", "ppo_zero2", "ppo_zero3")
    }
    texts = {
        name: [(s["step"], s["prompt"], s["response"]) for s in map(json.loads, lines)]
        for name, lines in samples.items()
    }
    assert len(texts["ppo_zero0"]) == 10  # 5 prompts, before and after
    assert len({json.loads(line)["response_length"] for line in samples["ppo_zero0"]}) > 1, (
        "answers of different lengths"
    )
    for name, found in texts.items():
        assert found == texts["ppo_zero0"], name


def test_further_evaluations_do_not_depend_on_ranks_or_stages():
    """--eval_ema and --eval_best_of, on one rank under ZeRO-2 and on two under ZeRO-3. At step 0
    the average is the actor; the best of two responses is at least as good as the first."""
    kinds = ["eval_ema_reward", "eval_ema_kl", "eval_best_of_reward", "eval_best_of_kl"]
    assert_same_curves(["ppo_one_rank_ptx", "ppo_ptx"], kinds)
    first, *_, last = [line for line in metrics("ppo_ptx") if "eval_reward" in line]
    assert first["eval_ema_reward"] == pytest.approx(first["eval_reward"], abs=1e-6)
    assert last["eval_ema_reward"] != last["eval_reward"]
    assert first["eval_best_of_reward"] > first["eval_reward"]


def test_looking_changes_nothing():
    """A run that is evaluated at every step, also by the microscope, with the average and with the
    best of two, trains to the bit as one that is evaluated at its ends only. Its critic's dropout
    draws from PyTorch's generator, which an evaluation must leave alone."""
    kept = [
        {k: v for k, v in line.items() if k[:5] != "eval_" and k not in workers.CLOCKS}
        for line in metrics("ppo_dropout")
    ]
    for line, expected in zip(metrics("ppo_looked_at"), kept, strict=True):
        assert {k: line.get(k) for k in expected} == expected
    assert len(curve("ppo_looked_at", "eval_best_of_reward")) > 2
    for folder in (".", "critic"):
        found, expected = (weights(run_of(n) / folder) for n in ("ppo_looked_at", "ppo_dropout"))
        assert all(torch.equal(found[name], expected[name]) for name in expected), folder


@pytest.mark.parametrize(
    "one, others",
    [
        ("ppo_one_rank", ("ppo_zero0", "ppo_zero3")),
        ("ppo_one_rank_rloo", ("ppo_rloo",)),
        ("ppo_one_rank_grpo", ("ppo_grpo",)),
        ("ppo_one_rank_reinforce", ("ppo_reinforce",)),
        ("ppo_one_rank_options", ("ppo_options",)),  # three prompts on two ranks
    ],
)
def test_each_tokens_numbers_do_not_depend_on_ranks_or_stages(one, others):
    """tokens.jsonl (--microscope): all that training sees of a few responses, each there once, with
    every way to compute advantages; the critic's numbers where there is one."""
    files = [run_of(name) / "tokens.jsonl" for name in (one, *others)]
    first, *rest = [[json.loads(line) for line in open(file)] for file in files]
    assert len(first) in (6, 8, 16) and first[0]["step"] < first[-1]["step"]
    assert ("value" in first[0]["tokens"]) == (one in ("ppo_one_rank", "ppo_one_rank_options"))
    for lines in rest:
        for expected, found in zip(first, lines, strict=True):
            assert found["response"] == expected["response"]
            assert found["tokens"].keys() == expected["tokens"].keys()
            for name, values in expected["tokens"].items():
                values = values if name == "text" else pytest.approx(values, abs=2e-4)
                assert found["tokens"][name] == values, name


def test_mixing_in_text_does_not_depend_on_ranks():
    """PTX (InstructGPT's mix of pretraining text) adds as many micro-batches of text as there are
    of answers; its loss, too, is one mean over the step, and its rows are the same on one rank and
    on two."""
    names = ["ppo_one_rank_ptx", "ppo_ptx"]
    assert_same_curves(names, [*CURVES["ppo"], "eval_text_loss"])
    plain, mixed = weights(run_of("ppo_zero0")), weights(run_of("ppo_ptx"))
    assert max((plain[k] - mixed[k]).abs().max().item() for k in plain) > 1e-3, (
        "the text was trained on"
    )


@pytest.mark.parametrize("variant", ["rloo", "grpo", "reinforce"])
def test_variants_without_a_critic_do_not_depend_on_ranks(variant):
    """Several answers a prompt, compared with each other or whitened over all ranks; no critic is
    loaded, trained or saved, and its columns are not there. One rank and two, sharded or not,
    trained as scored or in a pass of its own, with shared prompts or (grpo on one rank) without."""
    names = [f"ppo_{variant}", f"ppo_one_rank_{variant}"]
    assert_same_curves(
        names, [k for k in CURVES["ppo"] if k not in ("critic_loss", "explained_variance")]
    )
    assert [s["folder"] for s in facts(names[0])[0]["saved"]] == ["ema", "."]
    assert (
        "explained_variance" not in metrics(names[0])[1]
        and not (run_of(names[0]) / "critic").exists()
    )


def test_the_pass_that_trains_may_give_the_old_logprobs():
    """Where a rollout is one micro-batch trained once, its forward is made once, with its graph:
    same numbers as the long way (four micro-batches), with all the options of the loss on. The
    first step goes the long way, for the gate."""
    assert_same_curves(["ppo_options", "ppo_one_rank_options"], CURVES["ppo"])
    assert [n for n in facts("ppo_options")[0]["trained_as_scored"] if n] == [2, 2, 2], (
        "all steps but the first"
    )
    assert set(facts("ppo_one_rank_options", 1)[0]["trained_as_scored"]) == {0}


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("", ("actor", "critic")),
        ("--critic_dropout 0.1", ("actor",)),
        ("--actor_dropout 0.1", ("critic",)),
        ("--actor_dropout 0.1 --advantage reinforce", ()),
        ("--gradient_accumulation_steps 2", ()),
        ("--allow_unstable 1 --ppo_epochs 2", ()),
    ],
)
def test_a_pass_with_dropout_is_not_kept(flags, kept):
    """It would store numbers with dropout. With --first_pass_gate 0 an actor's went unseen: its
    ratio was 1 because both passes were one."""
    model = str(ROOT / "toy/model")
    flags = [
        "--actor_model_name_or_path",
        model,
        "--critic_model_name_or_path",
        model,
        *flags.split(),
    ]
    assert kept_pass.roles(ppo.get_args(["--preset", "toy", *flags])) == kept


def test_the_critic_can_be_warmed_up_alone():
    """--critic_warmup_steps 1: one optimizer step less for the actor, whose second rollout still
    has a KL of 0, and whose learning rate is 0 in the first, where the critic's is not."""
    run_of("ppo_options")
    steps = {s["folder"]: s["optimizer_steps"] for s in facts("ppo_options")[0]["saved"]}
    assert (steps["."], steps["critic"]) == (3, 4)
    lines = metrics("ppo_options")[1:]
    assert [line["kl"] == 0 for line in lines] == [True, True, False, False]
    assert [line["learning_rate"] > 0 for line in lines] == [False, True, True, True]
    assert all(line["critic_learning_rate"] > 0 for line in lines)


# --------------------------------------------------------------------------------------------------
# PPO's own promises
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["ppo_one_rank", "ppo_zero0", "ppo_zero1", "ppo_zero2", "ppo_zero3"]
)
def test_before_the_first_update_the_ratio_is_exactly_1(name):
    """With one pass over each rollout the weights that train are the weights that sampled: the
    ratio is 1 to the last bits of fp32, nothing is clipped, and the KL of old and new policy is 0.
    If it is not, two passes disagree."""
    for record in metrics(name)[1:]:
        assert record["ratio_max"] == pytest.approx(1, abs=1e-6)
        assert record["clip_fraction"] == 0 and abs(record["approx_kl"]) < 1e-7


def test_step_2_stores_what_step_3_scales_by():
    """Mean and deviation of the held-out scores go into the reward model's config.json, for
    --normalize_reward; the margin is what the mean scores differ by, and accuracy lies within its
    interval."""
    for name in ("reward_zero0", "reward_zero3", "reward_one_rank"):
        last = metrics(name)[-1]
        assert json.loads((run_of(name) / "config.json").read_text())[
            "score_statistics"
        ] == pytest.approx([last["eval_score_mean"], last["eval_score_std"]])
        assert last["eval_score_mean"] == pytest.approx(
            (last["eval_chosen_score"] + last["eval_rejected_score"]) / 2, abs=1e-6
        )
        assert last["eval_margin"] == pytest.approx(
            last["eval_chosen_score"] - last["eval_rejected_score"], abs=1e-6
        )
        low, high = last["eval_accuracy_ci"]
        assert low < last["eval_accuracy"] < high and last["eval_score_std"] > 0


def test_a_rollout_larger_than_a_training_batch():
    """4 answers a rank are written at once and trained on in two updates; the ratio is 1 in the
    first (the gate sees to it) and has moved in the second."""
    records = metrics("ppo_more_answers")[1:]
    assert len(records) == 2 and all(
        record["ratio_max"] > 1 + 1e-5 and record["approx_kl"] > 0 for record in records
    )
    assert {
        saved["optimizer_steps"] for rank in facts("ppo_more_answers") for saved in rank["saved"]
    } == {4}


def test_the_gate_stops_a_run_whose_two_passes_disagree(capfd):
    """Dropout in the actor: the pass that trains is not the policy that was scored. No step is
    taken, nothing is saved."""
    assert [(rank["code"], rank["saved"]) for rank in facts("ppo_gate")] == [(1, [])] * 2
    assert re.search(
        r"error: step 1: before the first update the ratio is off by .*--actor_dropout 0",
        workers.launch(2)[1],
        re.S,
    )


def test_updates_end_once_the_policy_has_moved():
    """--target_kl, far too small: of 4 passes over each rollout the first sees a KL of 0, and the
    second is the last."""
    run_of("ppo_target_kl")
    assert {s["folder"]: s["optimizer_steps"] for s in facts("ppo_target_kl")[0]["saved"]}[
        "."
    ] == 2 * 2


def test_text_has_the_weight_that_it_was_given():
    """InstructGPT's eq. 2 adds unsup_coef times the text's log-likelihood. With a reward that is
    always 0 nothing else moves the actor, and the first gradient must be 3 times that of the text's
    mean loss a token. (Adam would hide a factor.)"""
    from transformers import AutoModelForCausalLM

    base, args = (
        run_of("ppo_text_alone").parent.parent,
        ppo.get_args(
            [
                "--unsup_data_path",
                str(workers.shared_folder() / "text.jsonl"),
                "--max_answer_seq_len",
                "10",
            ]
        ),
    )
    text_mix = ptx.TextMix(args, model_folders.load_tokenizer(workers.TOKENIZER))
    texts = [row["ids"] for row in text_mix.texts]
    model = AutoModelForCausalLM.from_pretrained(base / "models/actor")
    drawn = np.random.default_rng((1234, 1, 0)).choice(len(texts), (2, 2, 2)).flatten()
    losses = [
        model(torch.tensor([texts[i]]))
        .logits[0, :-1]
        .log_softmax(-1)[range(len(texts[i]) - 1), texts[i][1:]]
        for i in drawn
    ]
    (-torch.cat(losses).mean()).backward()
    norm = (
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    )
    assert metrics("ppo_text_alone")[1]["grad_norm"] == pytest.approx(3 * norm, rel=1e-3)


def test_real_fp16_engines_skip_together():
    """Three updates; in the second one rank's actor overflows. Both engines skip it, on both ranks,
    under ZeRO 1, 2 and 3."""
    for found in facts("check_fp16"):
        assert found == {
            f"zero{stage}": [[True, True], [False, False], [True, True]] for stage in (1, 2, 3)
        }


def test_bf16_trains_and_its_ratio_stays_within_the_gate():
    """In bf16 both passes still go through the same kernels on the same padding, so the ratio is
    not merely near 1."""
    records = metrics("ppo_bf16")
    print("bf16: largest ratio at the first pass", max(r["ratio_max"] for r in records[1:]))
    assert all(abs(r["ratio_max"] - 1) < 1e-3 for r in records[1:])
    losses = [loss for _, loss in curve("sft_bf16", "loss")]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    exact = [loss for _, loss in curve("sft_zero2", "loss")]
    assert losses[0] == pytest.approx(exact[0], rel=0.02), "the same model, rounded"


def test_optimizer_steps_are_as_many_as_the_flags_say():
    """One optimizer step per step, whatever the accumulation. --ppo_epochs and --generation_batches
    multiply it, and then, from the second pass on, the ratio does move."""
    assert all(
        saved["optimizer_steps"] == 5
        for name in ("sft_zero0", "sft_1x4", "reward_zero2")
        for saved in facts(name)[0]["saved"]
    )
    assert all(
        saved["optimizer_steps"] == 4
        for name in ("ppo_zero0", "ppo_zero3")
        for saved in facts(name)[0]["saved"]
    )
    run_of("ppo_unstable")
    critic, actor = (
        [s["optimizer_steps"] for s in facts("ppo_unstable")[0]["saved"] if s["folder"] == f]
        for f in ("critic", ".")
    )
    assert actor == critic == [2 * 2 * 2]  # steps x epochs x rollout batches
    assert max(r["ratio_max"] for r in metrics("ppo_unstable")[1:]) > 1.001


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
def test_the_ema_moves_by_exactly_its_share(stage):
    """ema += (1 - decay) * (weights - ema), on each rank's own shards. Written into gathered
    weights, it is thrown away under ZeRO-3 and nobody notices: so here it is put together from both
    ranks and checked, for every weight. --eval_ema puts it in the weights' place, and gives the
    weights back to the bit."""
    ranks = [rank[stage] for rank in facts("check_ema")]
    for found in ranks:
        assert found["starts_off"] == 0
        assert found["moved"] > 1e-4 and found["error"] < 1e-6
        assert found["in_place"] and found["back"]
    assert ranks[0]["checksum"] == ranks[1]["checksum"]


def test_saving_the_ema_makes_one_copy_of_a_weight(monkeypatch):
    """Five numbers on two ranks: shards of three, put side by side in the dtype of the weight. What
    is saved is a view of them: at 7B a second copy of the embedding, in fp32, would be 2 GB."""
    weight = torch.empty(5, dtype=torch.bfloat16)
    shards, gathered = torch.tensor([[1.0, 2, 3], [4, 5, 0]]), []

    def all_gather(out, mine):
        gathered.append(out)
        assert mine.tolist() == [1, 2, 3] and out.dtype == mine.dtype == weight.dtype
        out.copy_(shards.flatten())

    monkeypatch.setattr(ranks, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", all_gather)
    whole = ema.gather_shards(weight, shards[0])
    assert whole.tolist() == [1, 2, 3, 4, 5] and whole.dtype == weight.dtype
    assert whole.data_ptr() == gathered[0].data_ptr()


@pytest.mark.parametrize("flags, place", [((0, 1), "meta"), ((2, 1), "meta"), ((2, 2), "cpu")])
def test_weights_are_loaded_straight_to_the_device(monkeypatch, flags, place):
    """(ZeRO stage, tensor parallelism.) A machine with 8 devices would else hold a model 8 times in
    its memory. `meta` plays the device."""
    monkeypatch.setattr(ranks, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(common.tensor_parallel, "check_model", lambda *_: None)
    args = workers.tiny_args(workers.shared_folder(), flags[0])
    args.model_name_or_path, args.dropout = f"{workers.shared_folder()}/models/actor", None
    args.tensor_parallel_size = flags[1]
    assert {p.device.type for p in common.load_model(args).parameters()} == {place}


def test_actor_ema_and_critic_are_all_saved():
    """Three models come out of step 3, each a folder that loads; the EMA lies between where the
    actor began and ended."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = run_of("ppo_zero3")
    start, end, ema = (
        weights(f) for f in (workers.shared_folder() / "models/actor", folder, folder / "ema")
    )
    critic_start, critic_end = (
        weights(f) for f in (workers.shared_folder() / "models/reward", folder / "critic")
    )
    assert max((critic_end[k] - critic_start[k]).abs().max().item() for k in critic_start) > 1e-4
    for key in start:
        travelled = (end[key] - start[key]).norm()
        assert travelled > 1e-4
        assert 0 < (ema[key] - start[key]).norm() < 0.1 * travelled, "four steps of 0.8 % each"
    AutoModelForCausalLM.from_pretrained(folder / "ema")
    assert (
        AutoModelForSequenceClassification.from_pretrained(folder / "critic").config.num_labels == 1
    )


# --------------------------------------------------------------------------------------------------
# Sharded weights: the value head, and generating
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["wide", "wide_scratch"])
@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_a_new_value_head_is_the_same_on_all_ranks(model, stage):
    """ZeRO-3 partitions weights while they are made, and a layer that is added on top, too.
    The head is written on rank 0 and must reach every rank: mean 0, deviation 1/(d+1), the same
    numbers as without sharding."""
    heads = [torch.tensor(rank[f"{model}_{stage}"]["weight"]) for rank in facts("check_value_head")]
    assert [rank[f"{model}_{stage}"]["sharded"] for rank in facts("check_value_head")] == [
        stage == "zero3"
    ] * 2
    width = len(heads[0])
    assert width == 1024 and torch.equal(*heads)
    assert heads[0].mean().abs() < 4 / (width + 1) / width**0.5  # 4 standard errors
    assert heads[0].std().item() == pytest.approx(1 / (width + 1), rel=4 / (2 * width) ** 0.5)
    assert heads[0].tolist() == facts("check_value_head")[0][f"{model}_zero0"]["weight"]


def test_a_trained_value_head_is_never_touched():
    """A head that comes with the checkpoint is loaded in shards, and gathered again it is what the
    file holds."""
    trained = weights(workers.shared_folder() / "models/reward")["score.weight"].flatten().tolist()
    for rank in facts("check_value_head"):
        assert (
            rank["reward_zero3"]["weight"] == trained and rank["reward_zero0"]["weight"] == trained
        )


@pytest.mark.parametrize("way", ["gathered", "one by one", "module by module"])
def test_sharded_generation_equals_the_plain_model(way):
    """Rank 0's answers end at once, rank 1's go on. With all weights gathered (one by one with
    DeepSpeed 0.18.5) each rank stops alone; where they do not fit they are gathered module by
    module, and rank 0 keeps step until rank 1 is done. Either way the tokens are those of the
    unsharded model, and afterwards the model trains as before."""
    ranks = facts("check_gathered")
    assert ranks[0]["lengths"] == [1, 1] and max(ranks[1]["lengths"]) > 2
    for rank in ranks:
        found = rank[way]
        assert found["synced"] == (way == "module by module") and found["training"] == [False, True]
        assert found["responses"] == found["expected"]
        assert found["still_sharded"], "weights are released again"
        assert found["whole_layers"] == 2, "each decoder layer is gathered in one go"
        assert found["quick"], "nn.Linear has no autograd function where there is no backward"
        assert found["loss"] == pytest.approx(found["plain_loss"], rel=1e-5)
        assert found["next_loss"] < found["loss"]


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------
RESUMED = [
    ("sft_zero3", "sft_zero3_resumed"),  # at the end of an epoch
    ("ppo_zero2", "ppo_zero2_resumed"),  # after SIGTERM
    ("sft_dropout", "sft_dropout_resumed"),  # in the middle of an epoch, with dropout
    ("ppo_dropout", "ppo_dropout_resumed"),
    ("reward_checkpoints", "reward_resumed"),  # ZeRO 0
    # where the pass that scores is the pass that trains, but for a run's first step
    ("ppo_one_pass", "ppo_one_pass_resumed"),
]


def without_clocks(name):
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in metrics(name)]


@pytest.mark.parametrize("whole, resumed", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(whole, resumed):
    """Weights, optimizer, schedule, dropout and its random numbers, place in the data, EMA: if any
    of them were lost, the next loss would differ. After --resume all metrics, samples and final
    weights are the same to the bit."""
    assert without_clocks(resumed) == without_clocks(whole)
    folders = [run_of(resumed), run_of(whole)]
    if not whole.startswith("reward"):  # step 2 writes none
        assert (
            folders[0].joinpath("samples.jsonl").read_text()
            == folders[1].joinpath("samples.jsonl").read_text()
        )
    for part in ("", "ema", "critic") if whole.startswith("ppo") else ("",):
        found, expected = (weights(folder / part) for folder in folders)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_taking_a_checkpoint_changes_nothing():
    """A run that saves on the way is the same run; and of its checkpoints the newest
    --keep_checkpoints stay."""
    assert without_clocks("sft_zero3_checkpoints") == without_clocks("sft_zero3")
    kept = {
        name: sorted(f.name for f in (run_of(name) / "checkpoints").iterdir())
        for name in ("sft_dropout", "sft_dropout_resumed")
    }
    # --keep_checkpoints 9, 1
    assert kept == {"sft_dropout": ["step-2", "step-4"], "sft_dropout_resumed": ["step-4"]}


def test_an_interrupted_run_saves_first():
    """SIGTERM (a cluster's time limit) on one of two ranks: both finish the step, save, and leave
    with exit code 1. No config.json is there yet, for it marks a finished model."""
    assert [rank["code"] for rank in facts("ppo_zero2_interrupted")] == [1, 1]
    folder = workers.shared_folder() / "runs/ppo_zero2_interrupted"
    assert [f.name for f in (folder / "checkpoints").iterdir()] == ["step-2"]
    assert not (folder / "config.json").exists()
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [0, 1, 2]


def content(file):
    """The bytes of a file; of adapters' config, whose lists have any order, the values."""
    if file.name != "adapter_config.json":
        return file.read_bytes()
    values = json.loads(file.read_text()).items()
    return {key: sorted(value) if isinstance(value, list) else value for key, value in values}


EXPORTED = {name: 2 for name in workers.MATRIX if re.fullmatch(r"m_\w+\d(_lora)?", name)}
EXPORTED |= {"reward_lora1": 5, "reward_lora3": 5, "ppo_one_pass": 4, "ppo_dropout": 4}
EXPORTED["ppo_lora_checkpoints"] = 4


@pytest.mark.parametrize("name", EXPORTED)
def test_a_checkpoint_is_a_model(name, tmp_path):
    """Of a run that stopped there is often no more than its checkpoints. What export makes of the
    last one is what the run itself has saved at its end, to the byte: weights, configs, tokenizer,
    of all models, from two ranks' shards under every stage, in fp32 and bf16, with LoRA."""
    run = run_of(name)
    export.export(run / f"checkpoints/step-{EXPORTED[name]}", tmp_path / "model")
    files = [f for part in ("", "ema", "critic") for f in (run / part).glob("*") if f.is_file()]
    models = [f for f in files if f.suffix == ".safetensors"]
    assert len(models) == (3 if name.startswith("ppo") else 1)
    left = {"args.json", "metrics.jsonl", "samples.jsonl", "curves.png", "README.md"}
    left |= {"tokens.jsonl", "judge.jsonl"}
    for file in files:
        if file.name not in left:
            made = tmp_path / "model" / file.relative_to(run)
            assert content(made) == content(file), file


def test_what_export_cannot_do_is_refused_in_words(tmp_path, capsys):
    """A folder that is no checkpoint, or a damaged one, and a model in the way."""
    whole = run_of("ppo_one_pass")
    shutil.copytree(whole / "checkpoints/step-4", tmp_path / "checkpoints/step-4")
    shutil.copy(whole / "args.json", tmp_path)
    (tmp_path / "checkpoints/step-4/rank1.pt").write_bytes(b"")
    for checkpoint, to, words in (
        (tmp_path, "to", "is no whole checkpoint"),
        (tmp_path / "checkpoints/step-4", "to", "rank1.pt"),
        (whole / "checkpoints/step-4", whole, "holds a model"),
        (whole / "ema", "to", "is no whole checkpoint"),
    ):
        with pytest.raises(SystemExit) as stop:
            export.export(checkpoint, tmp_path / to)
        assert stop.value.code == 2 and words in capsys.readouterr().err


def test_the_best_model_is_kept(tmp_path):
    """By the held-out metric, the first of equals, and not the untrained model of step 0. It is the
    model of that step; a run that is resumed from before it finds it again; and keeping it changes
    nothing in the run."""
    scores = dict(curve("reward_best", "eval_accuracy")[1:])
    step = max(scores, key=scores.get)  # the first of them
    whole, resumed = run_of("reward_best"), run_of("reward_best_resumed")
    export.export(whole / f"checkpoints/step-{step}", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (
        whole / "best/model.safetensors"
    ).read_bytes()
    for name in ("model.safetensors", "best/model.safetensors"):
        if step > 1 or "best" not in name:
            assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    plain = run_of("reward_zero3")
    assert (plain / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    names = {str(name) for name in json.loads((whole / "args.json").read_text())["files"]}
    assert {"best/model.safetensors", "best/evaluation.json"} <= names  # removed with the run
    assert json.loads((whole / "best/evaluation.json").read_text())["step"] == step


def test_a_run_that_is_resumed_at_its_last_step_saves_the_same_model():
    """It was killed in the last save: no evaluation comes after, so the scores' mean and deviation,
    which --normalize_reward needs, are those of the checkpoint."""
    whole, resumed = run_of("reward_best"), run_of("reward_ended_resumed")
    assert json.loads((whole / "config.json").read_text())["score_statistics"]
    for name in ("config.json", "model.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    "name, before, value, better",
    [
        ("eval_loss", [], 9.0, True),
        ("eval_loss", [2.0, 3.0], 1.9, True),
        ("eval_loss", [2.0, 3.0], 2.0, False),
        ("eval_loss", [2.0, 3.0], float("nan"), False),
        ("eval_perplexity", [2.0], 3.0, False),
        ("eval_kl", [2.0], 3.0, False),
        ("eval_accuracy", [0.5, 0.7], 0.8, True),
        ("eval_gold", [0.7], 0.7 + 1e-12, False),  # the log has nine digits
        ("eval_reward", [-3.0], -2.0, True),
        ("eval_best_of_gold", [0.3], 0.4, True),
        ("eval_text_loss", [], float("nan"), False),
    ],
)
def test_it_knows_which_way_is_better(tmp_path, name, before, value, better):
    """Of a loss less is better, of an accuracy more; step 0, nobody's work, is no rival."""
    records = [{"step": 0, name: 0.0}, *({"step": 2, name: number} for number in before)]
    lines = [json.dumps(record) + "\n" for record in [*records, {"step": 3, name: value}]]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    args = SimpleNamespace(output_dir=str(tmp_path))
    assert best.improves(args, name, {"step": 3, name: value}) == better


def test_a_better_model_of_after_the_checkpoint_stays(tmp_path):
    """--resume cuts the log at the checkpoint; best/ may be of a later step, and says how good."""
    lines = [{"step": 2, "eval_gold": 0.5}, {"step": 3, "eval_gold": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / best.EVALUATION).write_text('{"step": 9, "eval_gold": 0.8}')
    args = SimpleNamespace(output_dir=str(tmp_path))
    assert not best.improves(args, "eval_gold", lines[1])
    assert best.improves(args, "eval_gold", {"step": 3, "eval_gold": 0.9})
    assert best.improves(args, "eval_reward", {"step": 3, "eval_reward": 0.1}), "another metric"


def test_an_unknown_metric_is_refused_at_the_first_evaluation(capsys):
    record = {"step": 0, "epoch": 0.0, "eval_loss": 1.0, "eval_accuracy_ci": [0.1, 0.2]}
    best.check(SimpleNamespace(keep_best=None), record)
    best.check(SimpleNamespace(keep_best="eval_loss"), record)
    for name in ("loss", "eval_accuracy_ci", "epoch"):
        with pytest.raises(SystemExit):
            best.check(SimpleNamespace(keep_best=name), record)
        assert "have eval_loss.\n" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Offloading
# --------------------------------------------------------------------------------------------------
def test_a_checkpoint_holds_the_moments_once():
    """After --offload_states stage 3 keeps the buffers on the CPU among Adam's state, for the next
    time. In a checkpoint they would be a second copy, and a resumed run would load them onto the
    device: then an offload moves moments from there to there."""
    for found in facts("check_stage_3"):
        assert found["held"] == ["exp_avg_offload_buffer", "exp_avg_sq_offload_buffer"]
        assert found["loaded"] == []


def test_stage_3_prefetches_in_a_backward_too():
    """DeepSpeed records the order of modules between two forwards, and prefetches by it. Where
    forwards that score and passes that train take turns (a critic with dropout, no accumulation),
    no record held a backward (False: if it does now, patches.record_backward may go)."""
    for found in facts("check_stage_3"):
        assert found["whole"] == [False, True]


def test_the_optimizer_is_fused_unless_its_states_are_offloaded():
    """FusedAdam is one kernel on the device; DeepSpeedCPUAdam steps states that stay in CPU memory.
    Same AdamW."""
    for name, optimizer in (
        ("sft_zero0", "FusedAdam"),
        ("sft_zero3", "FusedAdam"),
        ("ppo_zero2", "FusedAdam"),
        ("sft_adam_offload", "DeepSpeedCPUAdam"),
        ("sft_offload", "DeepSpeedCPUAdam"),
    ):
        assert {saved["optimizer"] for saved in facts(name)[0]["saved"]} == {optimizer}


@pytest.mark.parametrize(
    "offloaded, plain",
    [
        ("sft_adam_offload", "sft_zero2"),
        ("sft_offload", "sft_zero3"),
        ("reward_offload", "reward_zero3"),
        ("ppo_offload", "ppo_zero3"),
    ],
)
def test_offloading_does_not_change_the_result(offloaded, plain):
    """--offload (weights, of frozen models too) and --adam_offload (optimizer states) move memory,
    not numbers."""
    assert_same_curves([plain, offloaded], CURVES[plain.split("_")[0]])


# --------------------------------------------------------------------------------------------------
# Learning
# --------------------------------------------------------------------------------------------------
def test_ppo_learns_a_bandit():
    """The smallest task that PPO must solve: a model of random weights, and as reward the share of
    the letters a to m in its answer, a function of the user's own (--reward_fn). In 40 steps the
    reward rises far beyond its noise, in training and on prompts never trained on."""
    rewards = [reward for _, reward in curve("ppo_bandit", "reward")]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    held_out = [reward for _, reward in curve("ppo_bandit", "eval_reward")]
    assert held_out[-1] > held_out[0] + 0.2


def test_a_resumed_run_takes_the_kl_penalty_that_it_is_given():
    """KL runs away, the run is resumed with a higher --kl_coef: it counts from the next step on.
    (One that --kl_target adapts is kept.)"""
    assert [coef for _, coef in curve("ppo_dearer", "kl_coef")] == [0.05, 0.05, 0.3, 0.3]


def test_the_rate_that_is_logged_is_the_steps_own():
    """The schedule moves on after a step, so the rate is the one before; where fp16 skipped the
    step it has not moved."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0 - step)
    rates = []
    for applied in (True, False, True):
        if applied:
            optimizer.step()
            schedule.step()
        engine = SimpleNamespace(
            lr_scheduler=schedule,
            was_step_applied=lambda applied=applied: applied,
            get_global_grad_norm=lambda: 1.0,
            global_steps=1,
        )
        rates.append(
            throughput.speed(SimpleNamespace(dtype="fp16"), engine, 1, 1, 1.0)["learning_rate"]
        )
    assert rates == [10.0, 9.0, 9.0]


def test_without_a_compiler_torchs_adamw_takes_over(tmp_path):
    """DeepSpeed compiles its optimizers on first use. Where that fails, the run says so and goes
    on. A lock that a killed build left behind is named; one that another run holds at this moment
    is not."""
    for name, age in (("left", 600), ("held", 0)):
        (tmp_path / "empty" / name).mkdir(parents=True)
        (tmp_path / "empty" / name / "lock").touch()
        os.utime(tmp_path / "empty" / name, (time.time() - age,) * 2)
    environment = {
        **os.environ,
        "CXX": "no-compiler",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "empty"),
    }
    environment = {
        k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    command = [
        sys.executable,
        str(ROOT / "sft.py"),
        "--max_steps",
        "2",
        "--num_samples",
        "0",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "torch's AdamW takes its place" in run.stdout
    assert (
        "left/lock is there, and for 10 minutes nothing" in run.stdout
        and "held/lock" not in run.stdout
    )
    assert (tmp_path / "out/model.safetensors").exists()
