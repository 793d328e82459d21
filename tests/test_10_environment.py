"""The rest of DeepSpeed's environment: LoRA, tensor parallelism, states that leave the device, and
what is refused.

None of these may change what is learned, apart from rounding. Each is run on the tiny models of
workers.py, two ranks, and laid beside a run without it, or beside the same run laid out in another
way.
"""

import json
import os
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import get_timers_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo
import sft
from machinery.base import modules, ranks
from machinery.engine import adam, zero3
from machinery.flags import declaring, refusals
from machinery.models import model_folders, saving
from machinery.run import launch
from tests import workers
from tests.conftest import load_model
from tests.test_6_deepspeed import (
    CURVES,
    assert_same_curves,
    config,
    curve,
    facts,
    run_of,
    weights,
    without_clocks,
)

peft = pytest.importorskip("peft")


def logits(path, head=None):
    """Returns what the model in `path`, loaded as the next step would load it, says on ten
    tokens."""
    args = sft.get_args(["--preset", "toy", "--dtype", "fp32"])
    tokenizer = model_folders.load_tokenizer(str(path))
    model = load_model(str(path), args, 0, tokenizer=tokenizer, value_head=head)
    model = modules.unwrap_model(model).eval()
    with torch.no_grad():
        return model(torch.arange(5, 15)[None]).logits


def stock(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 15)[None]).logits


def refused(capsys, *flags, script=sft):
    """Returns the message with which a script's arguments are refused, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        script.get_args(["--preset", "toy", *flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# LoRA: frozen weights, and beside each a product of two thin matrices that trains
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, stages", [("sft", (0, 1, 2, 3)), ("reward", (1, 3)), ("ppo", (0, 2, 3))]
)
def test_lora_trains_alike_under_every_stage(script, stages):
    """Adapters are sharded like any weight, with gradient checkpointing (stages 1 and 3 of sft) or
    without."""
    assert_same_curves([f"{script}_lora{stage}" for stage in stages], CURVES[script])
    losses = [
        loss
        for _, loss in curve(
            f"{script}_lora{stages[0]}", {"ppo": "critic_loss"}.get(script, "loss")
        )
    ]
    assert len(set(losses)) == len(losses)
    for name in {"ppo": [f"ppo_lora{stages[-1]}", f"ppo_lora{stages[-1]}/critic"]}.get(
        script, [f"{script}_lora{stages[-1]}"]
    ):
        adapters = load_file(workers.shared_folder() / "runs" / name / "adapter_model.safetensors")
        assert all(tensor.abs().max() > 0 for key, tensor in adapters.items() if "lora_B" in key), (
            "B is 0 until it learns"
        )


def test_adapters_are_small_and_in_pefts_format():
    """What is saved: A (4 x in) and B (out x 4) of every linear layer but the output, under peft's
    names, and nothing else. Stock peft loads it on the base named in adapter_config.json and says
    what our loader says."""
    folder, base = run_of("sft_lora3"), workers.shared_folder() / "models/actor"
    adapters = load_file(folder / "adapter_model.safetensors")
    assert not (folder / "model.safetensors").exists()
    # layers x matrices x (A, B)
    assert {k.split(".")[-2] for k in adapters} == {"lora_A", "lora_B"} and len(
        adapters
    ) == 2 * 7 * 2
    assert adapters["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].shape == (4, 32)
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base.resolve())
    loaded = stock(
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    )
    torch.testing.assert_close(logits(folder), loaded, rtol=0, atol=1e-4)
    assert (loaded - logits(base)).abs().max() > 0.1, "the adapters did learn"


@pytest.mark.parametrize(
    "adapters, merged, kind, head",
    [
        ("sft_lora3", "sft_lora_merged", AutoModelForCausalLM, None),
        ("reward_lora3", "reward_lora_merged", AutoModelForSequenceClassification, "score"),
    ],
)
def test_a_merged_model_is_a_plain_model(adapters, merged, kind, head):
    """W + B A * alpha / dim: --merge_lora saves a model without a trace of peft, which stock
    transformers loads. The next step takes either form, and both say the same; the reward model was
    even trained on top of either."""
    torch.testing.assert_close(
        logits(run_of(adapters), head), logits(run_of(merged), head), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        logits(run_of(merged), head), stock(kind.from_pretrained(run_of(merged))), rtol=0, atol=1e-5
    )
    assert (
        not any("lora" in key for key in weights(run_of(merged)))
        and not (run_of(merged) / "adapter_config.json").exists()
    )


def test_the_value_head_trains_in_full():
    """The head is new in step 2: left frozen, or wrapped in an adapter, the reward model could not
    learn its scale. It is saved beside the adapters under the name that stock peft looks for, and a
    critic goes on from it."""
    key = "base_model.model.score.weight"
    adapters = load_file(run_of("reward_lora3") / "adapter_model.safetensors")
    assert [k for k in adapters if "score" in k] == [key]
    args = sft.get_args(["--preset", "toy", "--dtype", "fp32"])
    tokenizer = model_folders.load_tokenizer(workers.TOKENIZER)
    new = load_model(str(run_of("sft_lora3")), args, 0, None, tokenizer, "score", lora_dim=4)
    trains = {name for name, p in new.named_parameters() if p.requires_grad}
    assert "model.score.weight" in trains and all(
        "lora_" in name for name in trains - {"model.score.weight"}
    )
    assert (adapters[key] - new.model.score.weight).abs().max() > 1e-3
    critic = load_file(run_of("ppo_lora3") / "critic/adapter_model.safetensors")
    assert (critic[key] - adapters[key]).abs().max() > 1e-4


def test_a_head_of_another_name_comes_back_with_its_adapters(tmp_path):
    """--value_head_prefix: peft looks the head up by name, so it has that name before adapters
    come. Else what was trained is dropped in silence, and the reward model scores with a head at
    random."""
    args = sft.get_args(["--preset", "toy", "--dtype", "fp32"])
    tokenizer, base = (
        model_folders.load_tokenizer(workers.TOKENIZER),
        str(workers.shared_folder() / "models/actor"),
    )
    made = load_model(base, args, 0, None, tokenizer, "v_head", lora_dim=4)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.1)  # "trained"
    saving.save_model(made, tokenizer, tmp_path / "saved")
    found = load_model(str(tmp_path / "saved"), args, 0, None, tokenizer, "score")
    ids = torch.arange(5, 15)[None]
    assert found.model.v_head.weight.eq(0.1).all()
    torch.testing.assert_close(
        found.eval()(ids, torch.ones_like(ids)),
        made.eval()(ids, torch.ones_like(ids)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_without_its_adapters_the_actor_is_the_reference():
    """B starts at 0, so before the first update actor and reference are one: KL is 0 to the bit.
    After it, it is not; and old and new policy still agree before each update, though the adapters
    were off in between."""
    for stage in (0, 2, 3):
        kl = [value for _, value in curve(f"ppo_lora{stage}", "kl_k3")]
        assert kl[0] == 0 and min(kl[1:]) > 1e-5
        assert all(
            value == pytest.approx(1, abs=1e-6)
            for _, value in curve(f"ppo_lora{stage}", "ratio_max")
        )
    plain = logits(workers.shared_folder() / "runs/sft_lora3")
    actor, ema = logits(run_of("ppo_lora3")), logits(run_of("ppo_lora3") / "ema")
    assert 0 < (ema - plain).abs().max() < 0.2 * (actor - plain).abs().max(), (
        "the average of adapters lags behind them"
    )


@pytest.mark.parametrize(
    "whole, resumed", [("sft_lora3", "sft_lora_resumed"), ("ppo_lora3", "ppo_lora_resumed")]
)
def test_a_resumed_lora_run_equals_an_uninterrupted_one(whole, resumed):
    assert without_clocks(resumed) == without_clocks(whole)
    found, expected = (
        load_file(run_of(name) / "adapter_model.safetensors") for name in (resumed, whole)
    )
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_lora_with_checkpointing_under_stage_3_needs_a_newer_deepspeed(capsys, monkeypatch):
    """With 0.18.5 torch's checkpointing finds weights of another shape on the way back, and stops
    in the first step."""
    flags = ("--lora_dim", "4", "--gradient_checkpointing", "--zero_stage", "3")
    monkeypatch.setattr(deepspeed, "__version__", "0.19.0")
    sft.get_args(["--preset", "toy", *flags])
    monkeypatch.setattr(deepspeed, "__version__", "0.18.5")
    assert "needs DeepSpeed 0.19" in refused(capsys, *flags)


def test_what_an_old_deepspeed_gets_wrong_is_set_right_or_refused(capsys, monkeypatch):
    """In bf16 at stage 1, 0.18.5 sums gradients over the ranks before the last micro-batch's are
    in, which a setting mends; with its optimizer on the CPU its gradients are wrong, which nothing
    does. The first was read in its sources, both were seen."""
    for installed, settings in (
        ("0.18.5", {"enabled": True, "immediate_grad_update": True}),
        ("0.19.0", {"enabled": True}),
    ):
        monkeypatch.setattr(deepspeed, "__version__", installed)
        assert config("--dtype", "bf16", "--zero_stage", "1")["bf16"] == settings
    wrong = ("--dtype", "bf16", "--adam_offload", "--zero_stage", "1")
    sft.get_args(["--preset", "toy", *wrong])
    monkeypatch.setattr(deepspeed, "__version__", "0.18.5")
    assert "take --zero_stage 2" in refused(capsys, *wrong)
    sft.get_args(["--preset", "toy", *wrong[:-1], "2"])


def test_lora_needs_weights_and_known_targets(capsys):
    """Adapters on a random model, or on layers that do not exist, are a mistake: said in words."""
    args = sft.get_args(["--preset", "toy", "--lora_targets", "nothing"])
    for path, word in (
        (str(workers.shared_folder() / "models/scratch"), "holds no weights"),
        (str(workers.shared_folder() / "models/actor"), "--lora_targets"),
    ):
        with pytest.raises(SystemExit) as stop:
            load_model(path, args, 0, lora_dim=4)
        assert stop.value.code == 2 and word in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Tensor parallelism: two ranks share every layer, and see the same rows
# --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "script, keys", [("sft", ["loss", "eval_loss"]), ("reward", ["loss", "eval_loss"])]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_that_share_layers_learn_what_two_that_share_rows_do(script, keys, stage):
    """Tensor parallelism splits matrices, not data: the same 8 rows a step, a sum over rows taken
    once, the same losses up to bf16's rounding (a row's products are added in another order)."""
    assert_same_curves([f"{script}_dp{stage}", f"{script}_tp{stage}"], keys, rel=6e-3)
    assert_same_curves([f"{script}_dp{stage}", f"{script}_tp{stage}"], ["grad_norm"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_split_layers_are_saved_whole(stage):
    for script in ("sft", "reward"):
        shared, split = (weights(run_of(f"{script}_{how}{stage}")) for how in ("dp", "tp"))
        assert {k: v.shape for k, v in shared.items()} == {k: v.shape for k, v in split.items()}
        assert max((shared[k].float() - split[k].float()).abs().max().item() for k in shared) < 0.03
    folder = run_of(f"ppo_tp{stage}")
    start, end, ema = (
        weights(f) for f in (workers.shared_folder() / "models/actor", folder, folder / "ema")
    )
    for key in start:
        assert ema[key].shape == start[key].shape
        assert (ema[key].float() - start[key]).norm() < 0.5 * (
            end[key].float() - start[key]
        ).norm() + 0.02 * start[key].norm()
    moved, lag = (
        sum((a[key].float() - b[key].float()).square().sum() for key in start) ** 0.5
        for a, b in ((end, start), (ema, start))
    )
    assert lag < 0.5 * moved, "an average with decay 0.992 is near its start after four steps"
    assert any((ema[key] != start[key].bfloat16()).any() for key in start), (
        "and yet it moves, where bf16 can show it"
    )


@pytest.mark.slow
def test_ranks_that_share_layers_write_the_same_answers():
    """Both ranks sample from the same numbers; were one to stop before the other, the run would
    hang. Before the first update the ratio is 1: generating, scoring and training read the same
    split weights."""
    for stage in (1, 2, 3):
        assert all(
            value == pytest.approx(1, abs=1e-3) for _, value in curve(f"ppo_tp{stage}", "ratio_max")
        )
        lines = (run_of(f"ppo_tp{stage}") / "samples.jsonl").read_text().splitlines()
        assert len(lines) == 10, "5 prompts, before and after, each once"


def test_what_tensor_parallelism_cannot_do_is_refused(capsys, monkeypatch):
    """bf16 only, a divisor of the ranks, no LoRA, and a DeepSpeed that has it. Versions are
    compared as versions: as strings 0.9.5 would be newer than 0.16.4."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = ("--tensor_parallel_size", "2")
    assert "bf16" in refused(capsys, *two, "--dtype", "fp32")
    assert "number of ranks, 2" in refused(capsys, "--tensor_parallel_size", "3", "--dtype", "bf16")
    assert "LoRA" in refused(capsys, *two, "--dtype", "bf16", "--lora_dim", "4")
    monkeypatch.setattr(deepspeed, "__version__", "0.9.5")
    assert "0.16.4" in refused(capsys, *two, "--dtype", "bf16")
    monkeypatch.setattr(deepspeed, "__version__", "0.18.5")
    assert "--zero_stage 2" in refused(capsys, *two, "--dtype", "bf16", "--zero_stage", "3")


# --------------------------------------------------------------------------------------------------
# State offload, DeepCompile
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "away, stays",
    [
        ("ppo_offload_states1", "ppo_zero1"),
        ("ppo_offload_states2", "ppo_zero2"),
        ("ppo_offload_states3", "ppo_zero3"),
        ("ppo_bf16_offload_states2", "ppo_bf16"),
        ("ppo_bf16_offload_states3", "ppo_bf16_zero3"),
    ],
)
def test_states_that_leave_and_come_back_are_the_same(away, stays):
    """Moments, master weights and gradients wait elsewhere while answers are written and scored:
    all numbers and the final weights are the same to the bit."""
    assert without_clocks(away) == without_clocks(stays)
    # DeepSpeed's own list: all but the 16-bit weights are away while answers are scored, and back
    # to be saved
    for rank in facts(away):
        assert rank["away"] and all(
            {"hp_params", "optim_states"} <= set(states) for states in rank["away"]
        )
        assert all(saved["away"] == [] for saved in rank["saved"])
    assert not any(any(rank["away"]) for rank in facts(stays))
    for part in ("", "ema", "critic"):
        found, expected = (weights(run_of(name) / part) for name in (away, stays))
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_state_offload_is_refused_where_deepspeed_has_none(capsys, monkeypatch):
    away = ("--offload_states", "--dtype", "bf16", "--zero_stage")
    assert "--zero_stage 2 or 3" in refused(capsys, *away, "0", script=ppo)
    assert "--zero_stage 2 or 3" in refused(capsys, *away, "1", script=ppo)
    monkeypatch.setattr(deepspeed, "__version__", "0.17.5")
    assert "upgrade to 0.18.5" in refused(capsys, *away, "2", script=ppo)
    ppo.get_args(["--preset", "toy", *away, "3"])
    # nothing to move: they live on the CPU
    ppo.get_args(["--preset", "toy", *away, "2", "--adam_offload"])


def test_deepcompile_needs_a_gpu_and_trains_only(capsys, monkeypatch):
    assert "needs a GPU" in refused(capsys, "--deepcompile")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    assert config("--deepcompile")["compile"] == {"deepcompile": True}
    assert "compile" not in config("--deepcompile", train=False)
    # DeepSpeed keeps one schedule of its passes in a process: actor and critic would share it
    assert "sft.py and reward.py take it" in refused(
        capsys, "--deepcompile", "--zero_stage", "2", script=ppo
    )


# --------------------------------------------------------------------------------------------------
# Every combination of stage, dtype, offload, LoRA and tensor parallelism that CPU ranks permit: the
# table of docs/deepspeed.md
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*workers.MATRIX, *workers.SPLIT])
def test_every_combination_learns_the_same(name):
    """Where weights and states lie, and who holds which part, changes no loss: two steps beside
    those of plain stage 0 in fp32. The same numbers in fp32, and up to bf16's rounding in bf16."""
    plain = f"m_fp320{'_lora' * name.endswith('_lora')}"
    rel = {"fp32": 5e-5, "bf16": 6e-3}[name[2:6]]
    assert_same_curves([plain, name], ["loss", "eval_loss"], rel=rel)


def test_the_table_of_combinations_is_that_of_the_tests():
    """docs/deepspeed.md says `runs` for exactly the combinations that are run here."""
    page = (workers.ROOT / "docs/deepspeed.md").read_text()
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(("| fp32 |", "| bf16 |"))
    ]
    said = {
        (dtype, int(stage), flags, column)
        for dtype, stage, flags, *cells in lines
        for column, cell in zip(("plain", "LoRA", "TP"), cells)
        if cell == "runs"
    }
    spelled = {
        where: " ".join(f"`{flag}`" for flag in flags) or "-"
        for where, flags in workers.OFFLOADS.items()
    }
    run = {
        (dtype, stage, spelled[where], column)
        for stage, where in workers.POSSIBLE
        for dtype, column in (
            ("fp32", "plain"),
            ("fp32", "LoRA"),
            ("bf16", "plain"),
            ("bf16", "LoRA"),
            ("bf16", "TP"),
        )
    }
    assert said == run


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_can_share_layers_and_rows_at_once(stage):
    """Four ranks, two and two: each pair shares every layer, and the pairs share the rows. The same
    losses as two ranks that share rows only."""
    assert_same_curves(
        [f"sft_dp{stage}", f"sft_tp2_dp2_zero{stage}"], ["loss", "eval_loss"], rel=6e-3
    )


def test_hpz_changes_nothing():
    """ZeRO++'s second copy of the weights within a machine (`zero_hpz_partition_size` in
    ds_config.json)."""
    assert_same_curves(["sft_zero3", "sft_hpz"], CURVES["sft"])


# --------------------------------------------------------------------------------------------------
# What a GPU needs, checked without one: a stand-in answers where CUDA would
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def cuda(monkeypatch):
    """Every question for the device is answered as on a GPU that holds 10 bytes of 100."""
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cuda", 0))
    for name, value in (
        ("is_available", True),
        ("memory_reserved", 30),
        ("memory_allocated", 10),
        ("mem_get_info", (70, 100)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.mark.parametrize("stage, overlaps", [(1, False), (2, False), (3, True)])
def test_gradients_are_reduced_as_deepspeed_does_by_default(stage, overlaps):
    """At stage 2 with overlap_comm a second stream reads the gradient of a weight above
    reduce_bucket_size, while ranks that own no part of it free it: it may be overwritten. Nor does
    DeepSpeed's timer wait for the device at each forward."""
    made = config("--zero_stage", str(stage), "--dtype", "fp32")
    assert DeepSpeedZeroConfig(**made["zero_optimization"]).overlap_comm is overlaps
    assert get_timers_config(made).enabled is False


@pytest.mark.parametrize("numel, fits", [(17, True), (18, False)])
def test_room_on_a_gpu_is_what_cuda_and_its_allocator_have_free(cuda, monkeypatch, numel, fits):
    """70 bytes that CUDA has and 20 that PyTorch holds and does not use: 0.8 of them is 72.
    DeepSpeed asks the driver, by the number in CUDA_VISIBLE_DEVICES, which may be a name (MIG)."""
    monkeypatch.setattr(get_accelerator(), "available_memory", lambda: int("MIG-1"))
    monkeypatch.setattr(ranks, "all_sum", lambda *values: values)
    weight = SimpleNamespace(ds_numel=numel, element_size=lambda: 4)
    assert zero3.fit_on_every_rank([weight]) is fits


CPUS = {"AVX2": "flags: fma avx2", "AVX512": "flags: avx2 avx512f avx512_vnni"}
CPUS |= {"BF16": "flags: avx512f avx512_bf16", "AMX": "flags: avx512f amx_bf16 amx_tile"}


@pytest.mark.parametrize("cpu, has", zip(CPUS, (False, False, True, True)))
def test_a_cpu_computes_in_what_it_has(monkeypatch, capsys, cpu, has):
    """bf16 without its instructions is emulated, and many times slower than fp32. DeepSpeed says of
    every CPU that it has them. What --estimate asks about is another device."""
    monkeypatch.setattr(refusals.Path, "read_text", lambda _: CPUS[cpu])
    assert get_accelerator().is_bf16_supported()
    assert declaring.fast_dtype() == declaring.fast_dtype("2") == ("bf16" if has else "fp32")
    assert declaring.fast_dtype("8x80") == "bf16"
    for dtype in ("bf16", "fp32"):
        launch.warn_of_bf16(SimpleNamespace(dtype=dtype))
        assert ("emulates bf16" in capsys.readouterr().out) is (dtype == "bf16" and not has)


@pytest.mark.parametrize("emulated, dtype", [(False, "bf16"), (True, "fp16")])
def test_asking_a_gpu_for_bf16_puts_nothing_on_it(cuda, monkeypatch, emulated, dtype):
    """V100 and T4 emulate bf16. DeepSpeed asks with a tensor on device 0, in every rank."""

    def supported(including_emulation=True):
        assert not including_emulation, "this makes a tensor"
        return not emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert declaring.fast_dtype() == dtype


@pytest.mark.parametrize(
    "environment, adam_offload, device, threads",
    [
        ({}, False, "cpu", 4),
        ({}, True, "cuda", 4),
        ({}, False, "cuda", None),
        ({"OMP_NUM_THREADS": "3"}, True, "cuda", None),
        ({"OMP_NUM_THREADS": "1"}, True, "cuda", None),  # the user's
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, True, "cuda", 4),  # torchrun's
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, False, "cpu", None),
    ],
)
def test_each_rank_takes_its_share_of_the_cores(
    monkeypatch, environment, adam_offload, device, threads
):
    """Two ranks on 8 cores. CPU Adam is a loop over all weights of the rank: on one thread, or on
    as many as there are cores in every rank, it takes several times as long."""
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(ranks, "device", lambda: torch.device(device))
    launch.share_cores(SimpleNamespace(adam_offload=adam_offload))
    assert taken == ([threads] if threads else [])


@pytest.mark.parametrize("given", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_cudas_segments_grow_unless_the_user_says_otherwise(cuda, monkeypatch, given):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "expandable_segments:False")
    settings = []
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False
    )
    launch.let_segments_grow()
    assert settings == ([] if given else ["expandable_segments:True"])


@pytest.mark.parametrize("device, fused", [("cuda", True), ("cpu", None)])
def test_without_a_compiler_pytorchs_fused_adam_takes_over_on_a_gpu(
    monkeypatch, capsys, device, fused
):
    """pip's CUDA wheels come without nvcc. PyTorch's default is foreach, which needs temporary
    tensors as large as the weights."""

    def fails(*_, **__):
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(adam, "FusedAdam", fails)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: device)
    args = SimpleNamespace(adam_betas=[0.9, 0.95], adam_offload=False, offload_states=False)
    optimizer = adam.build_optimizer(torch.nn.Linear(2, 1), args, 2, 1e-3, 0.0)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] is fused
    assert ("CUDA toolkit" in capsys.readouterr().out) is (device == "cuda")
    args.offload_states = True  # at stage 3 DeepSpeed moves its own Adam's states only
    with pytest.raises(SystemExit):
        adam.build_optimizer(torch.nn.Linear(2, 1), args, 3, 1e-3, 0.0)
    assert "--offload_states under stage 3 needs" in capsys.readouterr().err
