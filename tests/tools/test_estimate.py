"""Will it fit? tools/estimate.py counts, from a model's config alone, what each device holds; here
its count is done by hand.

The numbers of the ZeRO paper [Rajbhandari 2020, section 3]: in half precision with Adam a weight
costs 2 bytes for itself, 2 for its gradient, 12 for its optimizer states (fp32 copy, two moments).
Stage 1 divides the 12 by the devices, 2 the gradient, 3 the 2.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, OPTConfig, Qwen2Config

import common
import ppo
import reward
import sft
from machinery.refused import Refused
from tests import kit
from tools import estimate
from tools import estimate_memory as memory

sys.path.insert(0, str(kit.ROOT / "tools"))
import bench_inside
import gpu_run

D = 2048  # the width of OPT-1.3B, which has 24 layers
WEIGHTS = 1_315_758_080
DATA = ["--data_path", "x"]


def saved(folder, config):
    """Returns a folder that has a model's config, and no weights."""
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """facebook/opt-1.3b"""
    shape = dict(hidden_size=D, ffn_dim=4 * D, num_hidden_layers=24, num_attention_heads=32)
    shape |= dict(word_embed_proj_dim=D, vocab_size=50272, max_position_embeddings=2048)
    return saved(tmp_path_factory.mktemp("opt-1.3b"), OPTConfig(**shape))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """estimate.get_args sets the number of ranks for its process: here it is set back."""
    monkeypatch.setenv("WORLD_SIZE", "1")


def sft_args(path, *flags):
    own = f"--preset qwen2.5-0.5b --dtype bf16 --model_name_or_path {path}"
    own += " --per_device_train_batch_size 8 --max_seq_len 512 --zero_stage 2 --lora_dim 0"
    return sft.get_args([*own.split(), *DATA, *map(str, flags)])


def ppo_models(path, *flags):
    """Returns the actor, the reference, the critic and the reward model: 5 rows of 20 + 12."""
    own = f"""--preset qwen2.5-0.5b --dtype bf16
              --actor_model_name_or_path {path} --critic_model_name_or_path {path}
              --per_device_generation_batch_size 5 --per_device_training_batch_size 5
              --gradient_accumulation_steps 1 --max_prompt_seq_len 20 --max_answer_seq_len 12
              --actor_lora_dim 0 --critic_lora_dim 0"""
    args = ppo.get_args([*own.split(), *DATA, *map(str, flags)])
    return args, estimate.four_models(args)


def count(args, ranks=8, cpu=False):
    return memory.count(args, estimate.language_model(args), ranks, cpu)


# ---- Weights ----
def test_weights_are_counted_without_loading_them(opt):
    """OPT-1.3B by hand: embeddings 50272 + 2050 positions of d; 24 layers of 4 d^2 + 2 d 4d
    weights, 9 d biases, 2 norms of 2 d; one norm."""
    by_hand = (50272 + 2050) * D + 24 * (12 * D * D + 9 * D + 4 * D) + 2 * D
    assert memory.sizes_of(sft_args(opt)).weights == by_hand == WEIGHTS


@pytest.mark.parametrize("head, lora_dim", [(None, 0), ("score", 0), (None, 4), ("score", 4)])
def test_counts_are_those_of_the_model_that_is_built(trained, tokenizer, head, lora_dim):
    """What weighs and what trains, of a language model and of a value model, whole or LoRA."""
    path = str(trained / ("judge" if head else "actor"))
    args = sft_args(path, "--dtype", "fp32", "--max_seq_len", 32, "--lora_dim", lora_dim)
    model = kit.load_model(path, args, 0, None, tokenizer, head, lora_dim)
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    adapters = sum(count for name, count in weights.items() if "lora_" in name)
    sizes = memory.sizes_of(args, bool(head))
    assert sizes.weights == sum(weights.values()) - adapters
    assert sizes.trained == sum(w.numel() for w in model.parameters() if w.requires_grad)


@pytest.mark.parametrize(
    "stage, weights, gradients, optimizer",
    [(0, 2, 2, 12 / 8), (1, 2, 2, 12 / 8), (2, 2, 2 / 8, 12 / 8), (3, 2 / 8, 2 / 8, 12 / 8)],
)
def test_the_zero_papers_bytes_per_weight(opt, stage, weights, gradients, optimizer):
    """1.3 B weights on 8 devices: 5.5 bytes a weight, 3.75, 2. (Stage 0 would be 16, and runs as
    stage 1.) In bf16 we sum gradients in fp32: 4 in place of 2."""
    args = sft_args(opt, "--zero_stage", stage)
    for args.dtype, factor in (("fp16", 1), ("bf16", 2)):
        parts = count(args)["update"]
        assert parts["weights"] == weights * WEIGHTS
        assert parts["gradients"] == gradients * WEIGHTS * factor
        assert parts["optimizer"] == optimizer * WEIGHTS


# ---- Activations, logits, cache ----
def test_ppos_phases_by_hand(tmp_path):
    """KV cache: key and value, 3 layers, 2 key-value heads of 16 (of 4 heads: grouped queries), 5
    rows of 20 + 12 tokens, 2 bytes each; with --rollout_batch_size fewer rows at a time. One
    micro-batch, one update, no dropout: one forward scores and trains, and keeps activations."""
    shape = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=600)
    saved(tmp_path, LlamaConfig(num_key_value_heads=2, **shape))
    for flags, rows in (([], 5), (["--rollout_batch_size", 2], 2)):
        phases = memory.count(*ppo_models(tmp_path, *flags), 1)
        assert phases["generate"]["KV cache"] == 2 * 3 * 2 * 16 * rows * (20 + 12) * 2
        assert phases["train"]["KV cache"] == 0


def test_logits_by_hand(opt):
    """4 rows of 512 tokens and their gradient, 2 bytes a number, and two fp32 chunks of 128 MiB, on
    a CPU of 1 MiB. Of 8 rows they are made in parts of 512 MiB in fp32, and the gradient of the
    matrix is summed in fp32. A value model has none."""
    for rows, both in ((4, 50272 * 4 * 512 * 2 * 2), (8, 2**29 + 4 * 50272 * D)):
        for cpu, chunk in ((False, 2**27), (True, 2**20)):
            args = sft_args(opt, "--per_device_train_batch_size", rows)
            assert count(args, cpu=cpu)["train"]["logits"] == both + 2 * chunk
    args = reward.get_args(["--preset", "qwen2.5-0.5b", "--model_name_or_path", opt, *DATA])
    assert memory.count(args, estimate.value_model(args), 8)["train"]["logits"] == 0


def test_activations_agree_with_the_known_formula(tmp_path):
    """A GPT layer keeps 34 bytes a token and hidden unit in half precision [Korthikanti 2022, eq.
    2], 5 of them by its three dropout masks and more for attention scores, where attention is not
    fused. Fused and without dropout less; and the mask of 512 positions, 2 bytes each, is kept once
    for all layers: in each of them it would be 4 more."""
    off = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, activation_function="gelu")
    saved(tmp_path, GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=600, **off))
    row = memory.sizes_of(sft_args(tmp_path)).kept_by_row
    assert 30 < row / 6 / 512 / 256 < 34


def test_checkpointing_and_offload_move_what_they_should(opt):
    """Activations shrink with layers that are computed twice, and with fewer rows; optimizer
    states, gradients and weights leave the device. But DeepSpeed (0.19.8) keeps the fp32 sum of
    bf16 gradients there, and makes it whole when the first gradients are reduced."""

    def held(words="", phase="train", cpu=False):
        return count(sft_args(opt, *words.split()), cpu=cpu)[phase]

    def activations(words=""):
        return held(words)["activations"]

    base, single = activations(), "--gradient_accumulation_steps 1"
    assert activations("--gradient_checkpointing") < base / 5
    assert activations("--per_device_train_batch_size 4") == base / 2
    sizes = memory.sizes_of(sft_args(opt, "--max_seq_len", 128))
    assert sizes.shared == 2 * 128**2, "the mask of a row, which every layer has"
    moved = held(f"--adam_offload {single}", "update")
    assert moved["optimizer"] == moved["gradients"] == 0 and moved["host"] >= 12 * WEIGHTS / 8
    summed = held("--adam_offload --gradient_accumulation_steps 2")
    assert summed["optimizer"] == 0 and summed["gradients"] == 4 * WEIGHTS / 8
    assert held(single)["gradients"] == 4 * WEIGHTS / 8
    assert held(single, cpu=True)["gradients"] == 0, "its pages are not written yet"
    for flags in ([], ["--gradient_accumulation_steps", 2]):  # a step ends without them
        phases = memory.count(*ppo_models(opt, "--zero_stage", 2, *flags), 8)
        assert [parts["gradients"] > 0 for parts in phases.values()] == [False, False, True, True]
    assert held("--zero_stage 3 --offload")["weights"] == 0


# ---- The program ----
def test_it_says_whether_it_fits(opt, capsys):
    """1.3 B weights train on 8 devices of 80 GiB, and not on one of 16. No output folder is made.
    Devices are not launched: two that share a layer are counted on one CPU; they do not divide
    3."""
    own = f"sft.py --preset qwen2.5-0.5b --model_name_or_path {opt} --lora_dim 0".split() + DATA
    own += ["--output_dir", "/nowhere/to/be/found"]
    for devices, said in (("8x80", "It fits"), ("1x16", "does NOT fit")):
        estimate.main([*own, "--devices", devices])
        assert said in capsys.readouterr().out
    assert not Path("/nowhere").exists()
    own += ["--tensor_parallel_size", "2", "--devices"]
    _, args, devices = estimate.get_args([*own, "8x80"])
    assert count(args, devices.count)["update"]["weights"] == WEIGHTS  # 2 bytes each, halved
    with pytest.raises(Refused):
        estimate.main([*own, "3x80"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen/Qwen2.5-0.5B"""
    shape = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936)
    shape |= dict(num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768)
    config = Qwen2Config(tie_word_embeddings=True, **shape)
    return saved(tmp_path_factory.mktemp("qwen2.5-0.5b"), config)


@pytest.mark.slow
@pytest.mark.parametrize("step", gpu_run.STEPS)
def test_each_step_of_gpu_run_fits_the_smallest_card_that_it_is_for(step, qwen):
    """`make gpu-run` is for one card of 24 GB or more, and some of these report 22 GiB. A step that
    does not fit would end a run of hours. A tenth is left to CUDA's context and the allocator."""
    words = gpu_run.command(step)[1:]
    for place, word in enumerate(words[:-1]):
        if word.endswith("model_name_or_path"):
            words[place + 1] = qwen
    script, args, devices = estimate.get_args([*words, "--devices", "1x22"])
    assert args.dtype == "bf16" and devices.count == 1
    phases = memory.count(args, estimate.SCRIPTS[script][1](args), 1)
    peak = max(devices.held(parts) for parts in phases.values())
    print(f"{step}: {peak:.1f} GiB of {devices.room:.1f}")
    assert 1 < peak < devices.room  # the weights alone are 1 GiB


def test_ds_config_may_send_offloaded_states_to_a_disk(tmp_path):
    """--adam_offload says that they leave the device; a device named in ds_config.json (nvme) must
    not be overwritten by it."""
    file, disk = tmp_path / "ds.json", {"device": "nvme", "nvme_path": "/disk"}
    file.write_text(json.dumps({"zero_optimization": {"offload_optimizer": disk}}))
    args = sft.get_args(["--zero_stage", "3", "--adam_offload", "--ds_config", str(file)])
    zero = common.ds_config(args, 1)["zero_optimization"]
    assert zero["offload_optimizer"] == {**disk, "pin_memory": True}


FLAGS = """--preset toy --data_path {folder}/data --data_split 1,1,1 --output_dir {folder}/out
    --overwrite --max_steps 2 --eval_steps 100 --per_device_eval_batch_size 2 --dtype fp32
    --zero_stage {stage} """
LEARN = """--model_name_or_path {folder}/{size} --max_seq_len 256
    --per_device_train_batch_size 4 """
FLAGS_OF = {  # of the runs that docs/memory.md shows
    "sft": f"{FLAGS}{LEARN} --num_samples 0 ",
    "reward": f"{FLAGS}{LEARN} ",
    "ppo": f"""{FLAGS} --actor_model_name_or_path {{folder}}/{{size}}
        --critic_model_name_or_path {{folder}}/{{size}}-reward --max_prompt_seq_len 128
        --max_answer_seq_len 128 --per_device_generation_batch_size 4
        --per_device_training_batch_size 4 --num_eval_prompts 2 """,
}


def test_the_estimates_of_the_page_are_those_of_today(tmp_path, monkeypatch):
    """docs/memory.md holds what was measured once, on the toy's rows, against what is estimated
    now. The errors, and their mean, are those of the numbers that it shows."""
    page, errors = (kit.ROOT / "docs/memory.md").read_text(), []
    cells = r"\| (?P<script>\w+) \| (?P<ranks>\d) \| (?P<stage>\d) \| (?P<size>\w+) \|"
    for row in re.finditer(rf"^{cells} `?(?P<flags>.*?)`? \| .*$", page, re.M):
        bench_inside.full_rows(tmp_path, row["size"])
        words = FLAGS_OF[row["script"]].format(folder=tmp_path, **row.groupdict()) + row["flags"]
        monkeypatch.setenv("WORLD_SIZE", row["ranks"])
        script, models_of = estimate.SCRIPTS[row["script"]]
        args = script.get_args(words.split())
        found = memory.count(args, models_of(args), int(row["ranks"]), cpu=True)
        shown = re.findall(r"(\w+) ([\d.]+) / ([\d.]+)", row[0])
        expected = {phase: sum(parts.values()) / 2**30 for phase, parts in found.items()}
        own = {phase: float(number) for phase, number, _ in shown}
        assert own == pytest.approx(expected, abs=0.011), row[0]
        errors.append(max(own.values()) / max(float(seen) for *_, seen in shown) - 1)
        assert row[0].endswith(f"| {errors[-1]:+.0%} |"), row[0]
    mean = sum(map(abs, errors)) / 18  # rows
    words = f"{max(errors):+.0%}, and {mean:.0%} in size on average"
    assert f"{min(errors):+.0%} to {words}".replace("%", " %") in page
