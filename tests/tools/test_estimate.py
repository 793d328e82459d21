"""Will it fit? tools/estimate.py counts, from a model's config alone, what each device holds; here
its count is done by hand.

The numbers of the ZeRO paper [Rajbhandari 2020, section 3]: in half precision with Adam a weight
costs 2 bytes for itself, 2 for its gradient, 12 for its optimizer states (fp32 copy, two moments).
Stage 1 divides the 12 by the devices, 2 the gradient, 3 the 2.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, OPTConfig

import common
import ppo
import reward
import sft
from machinery.base.refused import Refused
from tests.kit import ROOT, load_model
from tools import estimate
from tools import estimate_memory as memory

D = 2048  # the width of OPT-1.3B, which has 24 layers
WEIGHTS = 1_315_758_080
SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=600,
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """The config of facebook/opt-1.3b, and no weights."""
    folder = tmp_path_factory.mktemp("opt-1.3b")
    OPTConfig(
        hidden_size=D,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
        vocab_size=50272,
        max_position_embeddings=2048,
        architectures=["OPTForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small(tmp_path):
    """The config of a small Llama, and no weights."""
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """estimate.get_args sets the number of ranks for its process: here it is set back."""
    monkeypatch.setenv("WORLD_SIZE", "1")


def sft_args(path, *flags):
    own = ["--dtype", "bf16", "--model_name_or_path", path, "--per_device_train_batch_size", 8]
    own += ["--max_seq_len", 512, "--zero_stage", 2, "--lora_dim", 0, "--data_path", "x"]
    return sft.get_args([*map(str, [*own, *flags])])


def ppo_args(path, *flags):
    models = ["--actor_model_name_or_path", path, "--critic_model_name_or_path", path]
    own = ["--dtype", "bf16", "--actor_lora_dim", 0, "--critic_lora_dim", 0, "--data_path", "x"]
    sizes = [f"--per_device_{kind}_batch_size" for kind in ("generation", "training")]
    own += [sizes[0], 5, sizes[1], 5, "--gradient_accumulation_steps", 1]
    own += ["--max_prompt_seq_len", 20, "--max_answer_seq_len", 12]
    return ppo.get_args([*map(str, [*models, *own, *flags])])


def count(args, ranks=8, cpu=False):
    return memory.count(args, estimate.language_model(args), ranks, cpu)


# ---- Weights ----
def test_weights_are_counted_without_loading_them(opt):
    """OPT-1.3B by hand: embeddings 50272 + 2050 positions of d; 24 layers of 4 d^2 + 2 d 4d
    weights, 9 d biases, 2 norms of 2 d; one norm."""
    by_hand = (50272 + 2050) * D + 24 * (12 * D * D + 9 * D + 4 * D) + 2 * D
    assert memory.sizes_of(opt, False, 512, "bf16").weights == by_hand == WEIGHTS


@pytest.mark.parametrize("head, lora_dim", [(False, 0), (True, 0), (False, 4), (True, 4)])
def test_counts_are_those_of_the_model_that_is_built(trained, tokenizer, head, lora_dim):
    """What weighs and what trains, of a language model and of a value model, whole or LoRA."""
    path = str(trained / ("judge" if head else "actor"))
    args = sft_args(path, "--dtype", "fp32")
    value_head = "score" if head else None
    model = load_model(path, args, 0, None, tokenizer, value_head, lora_dim=lora_dim)
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    adapters = sum(count for name, count in weights.items() if "lora_" in name)
    sizes = memory.sizes_of(path, head, 32, "fp32", None, lora_dim)
    assert sizes.weights == sum(weights.values()) - adapters
    assert sizes.trained == sum(w.numel() for w in model.parameters() if w.requires_grad)


def test_lora_trains_two_thin_matrices_beside_each_layers_six(opt):
    """A layer of OPT: q, k, v, o of d x d and two of d x 4d; rank 8 adds 8 (rows + columns) to
    each, and nothing else has gradients."""
    trained = 24 * 8 * (4 * 2 * D + 2 * 5 * D)
    assert memory.sizes_of(opt, False, 512, "bf16", None, 8).trained == trained
    parts = count(sft_args(opt, "--lora_dim", 8, "--zero_stage", 1))["update"]
    assert parts["weights"] == 2 * WEIGHTS and parts["optimizer"] == 12 * trained / 8


@pytest.mark.parametrize(
    "stage, weights, gradients, optimizer",
    [(0, 2, 2, 12 / 8), (1, 2, 2, 12 / 8), (2, 2, 2 / 8, 12 / 8), (3, 2 / 8, 2 / 8, 12 / 8)],
)
def test_the_zero_papers_bytes_per_weight(opt, stage, weights, gradients, optimizer):
    """1.3 B weights on 8 devices: 5.5 bytes a weight, 3.75, 2. (Stage 0 would be 16, and runs as
    stage 1.) In bf16 we sum gradients in fp32: 4 in place of 2, and DeepSpeed's stage 1 keeps
    both."""
    args = sft_args(opt, "--zero_stage", stage)
    args.dtype = "fp16"
    parts = count(args)["update"]
    assert parts["weights"] == weights * WEIGHTS
    assert parts["gradients"] == gradients * WEIGHTS
    assert parts["optimizer"] == optimizer * WEIGHTS
    args.dtype = "bf16"
    parts = count(args)["update"]
    assert parts["gradients"] == gradients * WEIGHTS * (3 if stage < 2 else 2)
    # its BF16_Optimizer all-reduces a bf16 copy of all gradients. Others copy a share, in fp32
    kept = 2 * 5e7 if stage == 3 else 0  # stage 3's bucket
    assert parts["buffers"] == kept + WEIGHTS * (2 if stage < 2 else 4 / 8)


def test_a_small_models_gradients_are_joined_before_they_are_sent(small):
    """Below 5e8 weights BF16_Optimizer's two groups go in one all-reduce: 4 bytes a weight for the
    joined ones, 2 for their bf16 copy."""
    weights = memory.sizes_of(small, False, 512, "bf16").weights
    assert count(sft_args(small, "--zero_stage", 1))["update"]["buffers"] == 6 * weights


# ---- Activations, logits, cache ----
def test_the_kv_cache_by_hand(small):
    """Key and value, 3 layers, 2 key-value heads of 16 (of 4 heads: grouped queries), 5 rows of 20
    + 12 tokens, 2 bytes each. Fewer rows are decoded at a time with --rollout_batch_size."""
    for flags, rows in (([], 5), (["--rollout_batch_size", 2], 2)):
        args = ppo_args(small, *flags)
        phases = memory.count(args, estimate.four_models(args), 1)
        assert list(phases) == ["generate", "score", "train", "update"]
        assert phases["generate"]["KV cache"] == 2 * 3 * 2 * 16 * rows * (20 + 12) * 2
        assert phases["train"]["KV cache"] == 0


def test_one_forward_scores_and_trains_where_nothing_lies_between(small):
    """One micro-batch, one update, no dropout: its activations are there while it is scored."""

    def kept(*flags):
        return estimate.four_models(ppo_args(small, *flags))[0].kept

    assert kept() and not kept("--gradient_accumulation_steps", 2)
    assert not kept("--actor_dropout", 0.1)


def test_logits_by_hand(opt):
    """8 rows of 512 tokens and their gradient, 2 bytes a number, and two fp32 chunks of 128 MiB, on
    a CPU of 1 MiB; a value model has none."""
    numbers = 50272 * 8 * 512
    assert count(sft_args(opt))["train"]["logits"] == numbers * 2 * 2 + 2 * 2**27
    assert count(sft_args(opt), cpu=True)["train"]["logits"] == numbers * 2 * 2 + 2 * 2**20
    args = reward.get_args(["--model_name_or_path", opt, "--data_path", "x"])
    assert memory.count(args, estimate.value_model(args), 8)["train"]["logits"] == 0


def test_activations_agree_with_the_known_formula(tmp_path):
    """A GPT layer keeps 34 bytes a token and hidden unit in half precision [Korthikanti 2022, eq.
    2], 5 of them by its three dropout masks and more for attention scores, where attention is not
    fused. Fused and without dropout the mask of 512 positions adds 4 again."""
    GPT2Config(
        n_embd=256,
        n_layer=6,
        n_head=4,
        vocab_size=600,
        activation_function="gelu",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        architectures=["GPT2LMHeadModel"],
    ).save_pretrained(tmp_path)
    row = memory.sizes_of(str(tmp_path), False, 512, "bf16").kept_by_row
    assert 30 < row / 6 / 512 / 256 < 38


def test_checkpointing_sharding_and_offload_move_what_they_should(opt):
    base = count(sft_args(opt))["train"]["activations"]
    less = count(sft_args(opt, "--gradient_checkpointing"))["train"]["activations"]
    half = count(sft_args(opt, "--per_device_train_batch_size", 4))["train"]["activations"]
    assert less < base / 5 and half == base / 2
    moved = count(sft_args(opt, "--adam_offload"))["update"]
    assert moved["optimizer"] == moved["gradients"] == 0 and moved["host"] >= 12 * WEIGHTS / 8
    assert count(sft_args(opt, "--zero_stage", 3, "--offload"))["train"]["weights"] == 0


# ---- The program ----
def asked(capsys, *given):
    estimate.main([*map(str, given)])
    return capsys.readouterr().out


def test_it_says_whether_it_fits_and_what_to_try(opt, capsys):
    """1.3 B weights train on 8 devices of 80 GiB, and not on one of 16. GPUs compute in bf16."""
    own = ["sft.py", "--model_name_or_path", opt, "--lora_dim", 0, "--data_path", "x"]
    fits = asked(capsys, *own, "--devices", "8x80")
    assert "sft.py on 8 x device, bf16" in fits and "It fits" in fits
    less = asked(capsys, *own, "--devices", "1x16")
    assert "does NOT fit" in less and "--gradient_checkpointing" in less


def test_devices_need_not_be_launched(opt, capsys):
    """8 devices, two to a layer, are counted on one CPU; two do not divide 3."""
    own = ["sft.py", "--model_name_or_path", opt, "--lora_dim", 0, "--data_path", "x"]
    own += ["--tensor_parallel_size", 2]
    split = asked(capsys, *own, "--devices", "8x80")
    script, args, devices = estimate.get_args([*map(str, own), "--devices", "8x80"])
    assert count(args, devices.count)["update"]["weights"] == WEIGHTS  # 2 bytes each, halved
    assert "on 8 x" in split
    for wrong in ("3x80", "8 of 80"):
        with pytest.raises(Refused):
            estimate.main([*map(str, own), "--devices", wrong])


def test_the_program_loads_nothing():
    """On the toy, as a person starts it: it ends with 0 and touches no output folder."""
    command = [sys.executable, "tools/estimate.py", "sft.py", "--devices", "2"]
    command += ["--output_dir", "/nowhere/to/be/found"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "sft.py on 2 x" in run.stdout and not Path("/nowhere").exists()


def test_ds_config_may_send_offloaded_states_to_a_disk(tmp_path):
    """--adam_offload says that they leave the device; a device named in ds_config.json (nvme) must
    not be overwritten by it."""
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}}'
    )
    flags = "--zero_stage 3 --adam_offload --offload --ds_config".split()
    args = sft.get_args([*flags, str(tmp_path / "ds.json")])
    zero = common.ds_config(args, 3, 1)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of resident memory"
)
def test_a_measured_run_is_near_the_estimate(tmp_path):
    """One real run of sft.py, ZeRO 0, one CPU rank (bench/memory.py has the rest): its peak, with a
    generous bound."""
    sys.path.insert(0, str(ROOT / "bench"))
    import memory as measured_runs

    rows = measured_runs.compare(tmp_path, "sft", 1, 0, "21M", "--max_seq_len 128")
    estimated, measured = (max(row[i] for row in rows) for i in (1, 2))
    assert 0.7 < estimated / measured < 1.3
