"""The three scripts on DeepSpeed, with one rank and with two, under every ZeRO stage.

Sharding, accumulation and the number of GPUs decide how fast a run is and what fits. They must not
decide what comes out: each of those choices is run here on a tiny model in fp32, and the numbers
are laid side by side. runs.py says what is run.
"""

import pytest
import torch

from tests import kit, runs
from tests.runs import CURVES, assert_same_curves, curve, facts, metrics, run_of

ONE_RANK = {"sft": "sft_one_rank_8x1", "reward": "reward_one_rank", "ppo": "ppo_one_rank"}
LAYOUTS = {s: [ONE_RANK[s], *(f"{s}_zero{stage}" for stage in range(4))] for s in kit.SCRIPTS}


@pytest.mark.parametrize("script", kit.SCRIPTS)
def test_zero_stages_and_ranks_agree(script):
    """ZeRO only decides where optimizer states, gradients and weights lie, and eight rows are eight
    rows: one rank with all of them takes the same steps as two that share them, on the training
    rows and on the held-out ones. The third step has six rows only; the places left are filled with
    rows that count nothing, so that no rank waits for another.

    So is the norm of the gradient before clipping: the loss division and the average over ranks
    that DeepSpeed does by itself are undone exactly once. Under stage 0 in fp32 DeepSpeed keeps no
    norm, and it is had in another way."""
    assert_same_curves(LAYOUTS[script], CURVES[script])
    assert_same_curves(LAYOUTS[script], ["grad_norm"], rel=1e-3)
    assert all(norm > 0 for _, norm in curve(ONE_RANK[script], "grad_norm"))


@pytest.mark.parametrize("script", kit.SCRIPTS)
def test_sharded_and_whole_models_are_saved_alike(script):
    """What stage 3 gathers to write is what stage 0 holds: the same names, shapes and, after the
    same training, weights. On one rank, too."""
    expected = kit.weights(run_of(f"{script}_zero0"))
    for name in (ONE_RANK[script], f"{script}_zero3"):
        found = kit.weights(run_of(name))
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-4)


SAME = {
    # 8 rows at once, 2 x 4 or 8 x 1. A mean of micro-batch means would give a token in a short
    # response more weight than one in a long one
    "accumulation": ["sft_one_rank_8x1", "sft_one_rank_2x4", "sft_1x4"],
    "packing": ["sft_uneven", "sft_packed"],
    # ZeRO++'s second copy of the weights within a machine (in ds_config.json)
    "hpz": ["sft_zero3", "sft_hpz"],
    "layers computed twice": ["sft_zero3", "sft_zero3_checkpointing"],
    # of frozen models, too; each by itself is in runs.MATRIX
    "states and weights on the CPU": ["ppo_zero3", "ppo_offload"],
    "a row for each response": ["reward_zero3", "reward_apart"],
    # one forward scores and trains where a rollout is one micro-batch, here with all options
    "one pass or four": ["ppo_options", "ppo_one_rank_options"],
    # in groups, with a shared prompt or a row for each response
    "grpo": ["ppo_grpo", "ppo_one_rank_grpo"],
    "reinforce": ["ppo_reinforce", "ppo_one_rank_reinforce"],
}


@pytest.mark.parametrize("what", SAME)
def test_a_saving_changes_no_curve(what):
    names = SAME[what]
    keys = set(CURVES[names[0].split("_")[0]])
    if what in ("grpo", "reinforce"):  # no critic is loaded, trained or saved
        keys -= {"critic_loss", "explained_variance"}
        assert "explained_variance" not in metrics(names[0])[1]
        assert [saved["folder"] for saved in facts(names[0])[0]["saved"]] == ["ema", "."]
    if what == "grpo":
        keys |= {"equal_groups", "group_std"}
    if what == "layers computed twice":
        found = [[saved["recomputes"] for saved in facts(name)[0]["saved"]] for name in names]
        assert found == [[False], [True]]
    assert_same_curves(names, keys)


@pytest.mark.parametrize("script", kit.SCRIPTS)
def test_each_step_looks_whether_padding_changes_its_model(script):
    """Once, with all engines. (What the check finds: test_forks.py.) And a run is evaluated before
    its first step, after each epoch of three, and at its end, where --eval_steps says nothing."""
    run_and_engines = 3 if script == "ppo" else 2
    assert facts(f"{script}_zero0")[0]["refuse_if_padding_matters"] == [run_and_engines]
    if script == "sft":
        assert [step for step, _ in curve("sft_zero0", "eval_loss")] == [0, 3, 5]


def test_rollouts_do_not_depend_on_ranks_or_stages():
    """The same prompts get the same responses, word for word, on one rank and on two, sharded or
    not: sampling draws from (seed, step, row), never from a generator whose state depends on who
    else is running."""
    texts = []
    for name in LAYOUTS["ppo"]:
        lines = kit.read_lines(run_of(name) / "samples.jsonl")
        texts.append([(line["step"], line["prompt"], line["response"]) for line in lines])
    assert len(texts[0]) == 10, "5 prompts, before and after"
    assert len({len(text) for *_, text in texts[0]}) > 1, "responses of different lengths"
    assert all(found == texts[0] for found in texts)


@pytest.mark.parametrize(
    "names",
    [
        ("ppo_one_rank", "ppo_zero0", "ppo_zero3"),
        ("ppo_one_rank_grpo", "ppo_grpo"),
        ("ppo_one_rank_options", "ppo_options"),  # three prompts on two ranks
    ],
)
def test_each_tokens_numbers_do_not_depend_on_ranks_or_stages(names):
    """tokens.jsonl (--microscope): all that training sees of a few responses, each there once; the
    critic's numbers where there is one."""
    first, *rest = [kit.read_lines(run_of(name) / "tokens.jsonl") for name in names]
    assert len(first) in (6, 8, 16) and first[0]["step"] < first[-1]["step"]
    assert ("value" in first[0]["tokens"]) == ("grpo" not in names[0])
    for lines in rest:
        for expected, found in zip(first, lines, strict=True):
            assert found["response"] == expected["response"]
            assert found["tokens"].keys() == expected["tokens"].keys()
            for name, values in expected["tokens"].items():
                values = values if name == "text" else pytest.approx(values, abs=2e-4)
                assert found["tokens"][name] == values, name


def test_the_optimizer_is_fused_unless_its_states_are_offloaded():
    """FusedAdam is one kernel on the device; DeepSpeedCPUAdam steps states that stay in CPU memory.
    Same AdamW."""
    for name, optimizer in (("ppo_zero3", "FusedAdam"), ("ppo_offload", "DeepSpeedCPUAdam")):
        assert {saved["optimizer"] for saved in facts(name)[0]["saved"]} == {optimizer}


@pytest.mark.slow
def test_deepspeeds_launcher_needs_no_compiler(tmp_path):
    """DeepSpeed compiles its optimizers, and on a CPU an all-reduce, on first use. Where that
    fails, torch's AdamW takes over, and the run says so. It waits for no lock that a killed build
    has left. (torchrun and plain Python start the runs of test_variants.py.)"""
    for folder in ("fused_adam", "building/fused_adam"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "lock").touch()
    flags = [*runs.base_flags("sft", runs.base()), "--max_steps", 1, "--num_samples", 0]
    without = {"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = kit.run("sft", *flags, ranks=2, launcher="deepspeed", env=without)
    assert "torch's AdamW takes its place" in done.out
    assert "2 x cpu, from scratch" in done.out and (done.folder / "model.safetensors").exists()
