"""Will it fit?  --estimate counts, from a model's config alone, what each device holds; here its
count is done by hand.

The numbers of the ZeRO paper [Rajbhandari 2020, section 3]: in half precision with Adam a weight
costs 2 bytes for itself, 2 for its gradient, 12 for its optimizer states (fp32 copy, two moments).
Stage 1 divides the 12 by the devices, 2 the gradient, 3 the 2.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import GPT2Config, LlamaConfig, OPTConfig

import common
import ppo
import reward
import sft
from tests import bench
from tools import estimate
from tools import estimate_memory as memory

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
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
        hidden_size=2048,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
        vocab_size=50272,
        max_position_embeddings=2048,
        architectures=["OPTForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def count(args, ranks=8, cpu=False):
    return memory.count(args, estimate.language_model(args), ranks, cpu)


OPT = ["--preset", "opt-1.3b", "--dtype", "bf16"]


def sft_args(path, *flags):
    return sft.get_args([*OPT, "--model_name_or_path", path, *map(str, flags)])


def test_parameters_are_counted_without_weights(opt):
    """OPT-1.3B by hand: embeddings 50272 + 2050 positions of 2048; 24 layers of 4 d^2 + 2 d 4d
    weights, 9 d biases, 2 norms of 2 d; one norm."""
    d = 2048
    by_hand = (50272 + 2050) * d + 24 * (12 * d * d + 9 * d + 4 * d) + 2 * d
    assert memory.sizes_of(opt, False, 512, "bf16").weights == by_hand == 1_315_758_080


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
    psi = 1_315_758_080
    assert parts["weights"] == weights * psi
    assert parts["gradients"] == gradients * psi
    assert parts["optimizer"] == optimizer * psi
    args.dtype = "bf16"
    parts = count(args)["update"]
    assert parts["gradients"] == gradients * psi * {0: 3, 1: 3}.get(stage, 2)
    # its BF16_Optimizer all-reduces a bf16 copy of all gradients. Others copy a share, in fp32
    kept = 2 * 5e7 if stage == 3 else 0  # stage 3's bucket
    assert parts["buffers"] == kept + psi * {0: 2, 1: 2}.get(stage, 4 / 8)


def test_a_small_models_gradients_are_joined_before_they_are_sent(tmp_path):
    """Below 5e8 weights BF16_Optimizer's two groups go in one all-reduce: 4 bytes a weight for the
    joined ones, 2 for their bf16 copy."""
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    args = sft_args(str(tmp_path), "--zero_stage", 1)
    weights = memory.sizes_of(str(tmp_path), False, 512, "bf16").weights
    assert count(args)["update"]["buffers"] == 6 * weights


@pytest.mark.parametrize("job", bench.GPU, ids=lambda job: job["name"])
def test_the_gpu_benchmark_fits_its_device(job, tmp_path):
    """Each row of `tests/bench.py --gpu` fits one device of 80 GiB, of which a tenth stays free."""
    kind, shape = bench.SHAPES[job["model"]]
    config = getattr(transformers, f"{kind}Config")(**shape)
    for folder, head in ((job["model"], "ForCausalLM"), (f"{job['model']}-score", "")):
        config.architectures = [kind + (head or "ForSequenceClassification")]
        config.save_pretrained(tmp_path / folder)
    if job["script"] is None:  # decode: bf16 weights, and both sides' caches
        weights = memory.sizes_of(str(tmp_path / job["model"]), False, 8, "bf16").weights
        tokens = max(job["rows"]) * (job["prompt"] + job["answer"])
        peak = 2 * (weights + 2 * tokens * bench.cache_of_a_token(config)) / GIB
    else:
        script, flags = bench.command({"dtype": "bf16", **job}, tmp_path)
        module, models_of = {
            "sft": (sft, estimate.language_model),
            "reward": (reward, estimate.value_model),
            "ppo": (ppo, estimate.four_models),
        }[script]
        args = module.get_args([*flags, "--estimate", "1x80"])
        phases = memory.count(args, models_of(args), 1)
        peak = estimate.Devices(args).peak(phases)
    assert peak < 0.9 * 80


def test_the_kv_cache_by_hand(tmp_path):
    """Key and value, 3 layers, 2 key-value heads of 16 (of 4 heads: grouped queries), 5 rows of 20
    + 12 tokens, 2 bytes each."""
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    args = ppo.get_args(
        [
            "--actor_model_name_or_path",
            str(tmp_path),
            "--critic_model_name_or_path",
            str(tmp_path),
            *OPT,
            "--max_prompt_seq_len",
            "20",
            "--max_answer_seq_len",
            "12",
            "--per_device_generation_batch_size",
            "5",
            "--per_device_training_batch_size",
            "5",
        ]
    )
    phases = memory.count(args, estimate.four_models(args), 1)
    assert list(phases) == ["generate", "score", "train", "update"]
    assert phases["generate"]["KV cache"] == 2 * 3 * 2 * 16 * 5 * (20 + 12) * 2
    assert phases["train"]["KV cache"] == 0


def test_logits_by_hand(opt):
    """8 rows of 512 tokens and their gradient, 2 bytes a number, and two fp32 chunks of 128 MiB, on
    a CPU of 1 MiB; a row of 2 tokens is less; a value model has none."""
    numbers = 50272 * 8 * 512
    assert count(sft_args(opt))["train"]["logits"] == numbers * 2 * 2 + 2 * 2**27
    assert count(sft_args(opt), cpu=True)["train"]["logits"] == numbers * 2 * 2 + 2 * 2**20
    short = sft_args(opt, "--max_seq_len", 2, "--per_device_train_batch_size", 1)
    assert count(short)["train"]["logits"] == 50272 * 2 * (2 * 2 + 2 * 4)
    args = reward.get_args([*OPT, "--model_name_or_path", opt])
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
    base = count(sft_args(opt))["train"]
    assert (
        count(sft_args(opt, "--gradient_checkpointing"))["train"]["activations"]
        < base["activations"] / 5
    )
    assert (
        count(sft_args(opt, "--per_device_train_batch_size", 4))["train"]["activations"]
        == base["activations"] / 2
    )
    moved = count(sft_args(opt, "--adam_offload"))["update"]
    assert moved["optimizer"] == moved["gradients"] == 0 and moved["host"] >= 12 * 1_315_758_080 / 8
    assert count(sft_args(opt, "--zero_stage", 3, "--offload"))["train"]["weights"] == 0


def test_lora_trains_two_thin_matrices_beside_each_layers_six(opt):
    """A layer of OPT: q, k, v, o of d x d and two of d x 4d; rank 8 adds 8 (rows + columns) to
    each, and nothing else has gradients."""
    d = 2048
    trained = memory.sizes_of(opt, False, 512, "bf16", None, 8).trained
    assert trained == 24 * 8 * (4 * 2 * d + 2 * 5 * d)
    parts = count(sft_args(opt, "--lora_dim", 8, "--zero_stage", 1))["update"]
    assert parts["weights"] == 2 * 1_315_758_080 and parts["optimizer"] == 12 * 24 * 8 * 18 * d / 8


def test_layers_are_shared_by_a_divisor_of_the_devices(opt, capsys):
    """What is asked about need not be launched: 8 devices, two to a layer, are counted on one CPU;
    3 are refused."""
    args = sft_args(opt, "--tensor_parallel_size", 2, "--estimate", "8x80", "--zero_stage", 2)
    assert count(args)["update"]["weights"] == 1_315_758_080  # 2 bytes a weight, halved
    with pytest.raises(SystemExit) as stop:
        estimate.estimate(
            sft_args(opt, "--tensor_parallel_size", 2, "--estimate", "3x80"),
            estimate.language_model,
        )
    assert (
        stop.value.code == 2 and "must divide the number of devices, 3" in capsys.readouterr().err
    )


def test_ds_config_may_send_offloaded_states_to_a_disk(tmp_path):
    """--adam_offload says that they leave the device; a device named in ds_config.json (nvme) must
    not be overwritten by it."""
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}}'
    )
    args = sft.get_args(
        [
            "--zero_stage",
            "3",
            "--adam_offload",
            "--offload",
            "--ds_config",
            str(tmp_path / "ds.json"),
        ]
    )
    zero = common.ds_config(args, 3, 1)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def printed(capsys, args, models_of=estimate.language_model):
    with pytest.raises(SystemExit) as end:
        estimate.estimate(args, models_of)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_what_it_suggests_fits_by_its_own_count(opt, capsys):
    """1.3 B weights cannot train on one device of 16 GiB as they are. Each line that it prints is
    taken at its word."""
    text = printed(capsys, sft_args(opt, "--estimate", "1x16"))
    assert "does NOT fit" in text
    lines = re.findall(r"^ +(\d+\.\d\d)   (--.*(?<! devices))$", text, re.M)
    assert lines
    for size, flags in lines:
        again = printed(capsys, sft_args(opt, "--estimate", "1x16", *flags.split()))
        assert "It fits" in again and f"the peak is {size} GiB" in again


def test_it_suggests_nothing_that_would_be_refused(opt, capsys, monkeypatch):
    """DeepSpeed 0.18.5 steps wrongly in bf16 at stage 1 with its optimizer on the CPU: no advice,
    then, in spite of its memory."""
    args = sft_args(opt, "--zero_stage", 1, "--estimate", "2x24")
    assert re.search(r"^ +\d+\.\d\d   --adam_offload$", printed(capsys, args), re.M)
    monkeypatch.setattr(common.deepspeed, "__version__", "0.18.5")
    text = printed(capsys, args)
    assert "does NOT fit" in text and not re.search(r"^ +\d+\.\d\d   --adam_offload$", text, re.M)


def test_it_knows_that_a_rollout_can_be_decoded_in_parts(opt):
    """All responses of a step on a rank are decoded together unless the flag says otherwise."""
    models = ["--actor_model_name_or_path", opt, "--critic_model_name_or_path", opt]
    args = ppo.get_args([*OPT, *models, "--gradient_accumulation_steps", "2"])
    assert args.rollout_batch_size == 8
    mildest = estimate.options_of(args)[0]
    assert [change["rollout_batch_size"] for change in mildest] == [4, 2, 1]
    generate = [estimate.four_models(args)[0].generates]
    args.rollout_batch_size = 2
    assert generate + [estimate.four_models(args)[0].generates] == [8, 2]


def test_it_suggests_what_step_3_would_take(opt, capsys, monkeypatch):
    """Four responses to one prompt lie in one batch of four: it cannot be halved. And where a
    role's own stage was given, that flag is named: the one for both would change nothing."""
    argv = [
        "--actor_model_name_or_path",
        opt,
        "--critic_model_name_or_path",
        opt,
        "--estimate",
        "8x13.8",
        *OPT,
        "--actor_zero_stage",
        "2",
        "--critic_zero_stage",
        "2",
        "--advantage",
        "rloo",
        "--samples_per_prompt",
        "4",
    ]
    monkeypatch.setattr(estimate.sys, "argv", ["ppo.py", *argv])
    with pytest.raises(SystemExit) as end:
        ppo.main()
    text = capsys.readouterr().out
    assert end.value.code == 0 and "does NOT fit" in text
    assert "--actor_zero_stage 3 --critic_zero_stage 3" in text and "--zero_stage" not in text
    assert "--gradient_checkpointing" in text and "_batch_size" not in text
    one = [
        word for at, word in enumerate(argv) if "--critic_zero_stage" not in (word, argv[at - 1])
    ]
    monkeypatch.setattr(estimate.sys, "argv", ["ppo.py", *one])
    with pytest.raises(SystemExit):
        ppo.main()
    assert "--zero_stage 3 --actor_zero_stage 3" in capsys.readouterr().out


def test_it_fits_says_so_and_wrong_requests_are_refused(opt, capsys):
    assert "It fits" in printed(capsys, sft_args(opt, "--estimate", "8x80"))
    with pytest.raises(SystemExit) as end:
        estimate.estimate(sft_args(opt, "--estimate", "8 of 80"), estimate.language_model)
    assert end.value.code == 2 and "--estimate 8x80" in capsys.readouterr().err


def test_more_devices_are_an_answer_too_and_sometimes_there_is_none(opt, capsys):
    """Stage 3 divides all that a weight costs; but 1.3 B gathered weights of 2 bytes never fit in
    1.5 GiB."""
    more = re.search(
        r"(\d+\.\d\d)   --zero_stage 3 on (\d+) devices",
        printed(capsys, sft_args(opt, "--estimate", "1x16")),
    )
    assert f"the peak is {more[1]} GiB" in printed(
        capsys, sft_args(opt, "--estimate", f"{more[2]}x16", "--zero_stage", 3)
    )
    assert "none, on any number of devices" in printed(capsys, sft_args(opt, "--estimate", "1x1.5"))


def test_the_command_loads_nothing():
    """The three scripts' own flag, on the toy: it ends with 0 and touches no output folder."""
    run = subprocess.run(
        [sys.executable, "sft.py", "--estimate", "2", "--output_dir", "/nowhere/to/be/found"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "sft.py on 2 x" in run.stdout and not Path("/nowhere").exists()


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of resident memory"
)
def test_a_measured_run_is_near_the_estimate(tmp_path):
    """One real run of sft.py, ZeRO 0, one CPU rank (tests/memory.py has the rest): its peak, with a
    generous bound."""
    from tests import memory as measured_memory

    rows = measured_memory.compare(tmp_path, "sft", 1, 0, "21M", "--max_seq_len 128")
    estimated, measured = (max(row[i] for row in rows) for i in (1, 2))
    assert 0.7 < estimated / measured < 1.3
