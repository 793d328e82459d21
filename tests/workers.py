"""What test_6_deepspeed.py looks at: the three scripts' own main(), run many times over in one
launch.

Starting Python, torch and DeepSpeed takes far longer than training a tiny model for a few steps. So
one launch of this file by torchrun makes all RUNS of so many ranks and all CHECKS one after the
other in the same processes, and leaves

    runs/<name>/        what the script leaves behind
    facts/<name>.json   exit code, or the traceback; of each model saved: optimizer, optimizer steps
                        of a check: what each rank found

The tests then read those files. By hand, for one run only, here on two ranks:
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tests/workers.py FOLDER ppo_zero3
"""

import argparse
import atexit
import copy
import functools
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from packaging import version

ROOT = Path(__file__).resolve().parent.parent
# metrics that differ each time
CLOCKS = {
    "seconds",
    "tokens_per_second",
    "tflops",
    "generate_seconds",
    "score_seconds",
    "train_seconds",
}
TOKENIZER = str(ROOT / "toy/model")
# some runs are then refused, in words
OLD = version.parse(importlib.metadata.version("deepspeed")) < version.parse("0.19")
TIMEOUT = 1500  # seconds until a launch that hangs is ended; nothing is measured against it
sys.path.insert(0, str(ROOT))


# --------------------------------------------------------------------------------------------------
# The runs: name -> script and flags.  8 rows per optimizer step in most of them, however laid out
# --------------------------------------------------------------------------------------------------
def run(
    script, *flags, zero=0, rows=2, accumulation=2, before=None, sigterm_after=None, generation=None
):
    """rows: of one forward on one rank; generation: of one rollout batch, if more. before: (run,
    step) whose checkpoint is copied first. sigterm_after: a step."""
    flags = ["--zero_stage", zero, "--gradient_accumulation_steps", accumulation, *flags]
    sizes = (
        ["per_device_generation_batch_size", "per_device_training_batch_size"]
        if script == "ppo"
        else ["per_device_train_batch_size"]
    )
    flags += [
        x
        for size in sizes
        for x in (f"--{size}", generation if generation and "generation" in size else rows)
    ]
    return dict(
        script=script, flags=[str(f) for f in flags], before=before, sigterm_after=sigterm_after
    )


def base_flags(script, base):
    """Tiny and quick: 22 rows are two steps of 8 and a short one, so that five steps see a short
    batch and a second epoch."""
    flags = f"""--preset toy --dtype fp32 --data_path {base}/data --data_split 1,1,1
                --ds_config {base}/ds_config.json --max_steps 5 --num_warmup_steps 0
                --per_device_eval_batch_size 4 --log_steps 1"""
    flags += {
        "sft": f""" --model_name_or_path {base}/models/scratch --learning_rate 3e-3
                    --num_samples 2 --max_answer_seq_len 4""",
        "reward": f" --model_name_or_path {base}/models/actor --learning_rate 3e-3",
        "ppo": f""" --actor_model_name_or_path {base}/models/actor
                    --critic_model_name_or_path {base}/models/reward
                    --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --max_answer_seq_len 10
                    --num_eval_prompts 5 --eval_steps 100 --max_steps 4""",
    }[script]
    return flags.split()


BEST = "--keep_best eval_accuracy --eval_steps 1 --save_steps 1 --keep_checkpoints 9".split()
# random numbers must be resumed, too
DROPOUT = ["--model_name_or_path", "BASE/models/actor", "--dropout", 0.1]
SAMPLES = ["--samples_per_prompt", 2, "--max_steps", 2]
OPTIONS = [
    "--microscope",
    3,
    "--missing_eos_penalty",
    1,
    "--normalize_reward",
    1,
    "--entropy_coef",
    0.01,
    "--critic_warmup_steps",
    1,
    "--clip_high",
    0.3,
    "--dual_clip",
    3,
    "--kl_in",
    "loss",
    "--kl_estimator",
    "k2",
    "--reward_model_name_or_path",
    "BASE/models/measured",
]
MORE_EVALUATIONS = ["--eval_ema", 1, "--eval_best_of", 2]
LORA = ["--model_name_or_path", "BASE/models/actor"]
PPO_LORA = [
    "--actor_model_name_or_path",
    "BASE/runs/sft_lora3",
    "--critic_model_name_or_path",
    "BASE/runs/reward_lora3",
    "--actor_lora_dim",
    4,
    "--critic_lora_dim",
    2,
    "--enable_ema",
    1,
]
TWO_RANKS = {
    f"{script}_zero{stage}": run(script, zero=stage)
    for script in ("sft", "reward", "ppo")
    for stage in (0, 1, 2, 3)
}
TWO_RANKS |= {
    "sft_1x4": run("sft", rows=1, accumulation=4),
    "ppo_ptx": run(
        *("ppo", "--unsup_data_path", "BASE/text.jsonl", "--unsup_coef", 2, *MORE_EVALUATIONS),
        zero=3,
    ),
    "ppo_looked_at": run(
        *("ppo", "--critic_dropout", 0.1, "--kl_target", 0.5, "--eval_steps", 1),
        *("--microscope", 5, "--enable_ema", 1, *MORE_EVALUATIONS),
        zero=3,
    ),
    "ppo_unstable": run(
        "ppo",
        "--allow_unstable",
        1,
        "--ppo_epochs",
        2,
        "--generation_batches",
        2,
        "--max_steps",
        2,
        zero=2,
        accumulation=1,
    ),
    # resuming: a run with checkpoints on the way, then another that goes on from one of them
    "sft_dropout": run("sft", *DROPOUT, "--save_steps", 2, "--keep_checkpoints", 9, zero=2),
    "sft_dropout_resumed": run(
        "sft", *DROPOUT, "--save_steps", 2, "--resume", zero=2, before=("sft_dropout", 2)
    ),
    "sft_zero3_checkpoints": run("sft", "--save_steps", 3, "--keep_checkpoints", 9, zero=3),
    # an epoch has 3 steps
    "sft_zero3_resumed": run("sft", "--resume", zero=3, before=("sft_zero3_checkpoints", 3)),
    "reward_checkpoints": run("reward", "--save_steps", 2, "--keep_checkpoints", 9, zero=0),
    "reward_resumed": run("reward", "--resume", zero=0, before=("reward_checkpoints", 2)),
    "reward_best": run("reward", *BEST, zero=3),
    "reward_best_resumed": run("reward", *BEST, "--resume", zero=3, before=("reward_best", 1)),
    "reward_ended_resumed": run("reward", *BEST, "--resume", zero=3, before=("reward_best", 5)),
    "ppo_one_pass": run(
        "ppo", "--save_steps", 2, "--keep_checkpoints", 9, zero=2, rows=4, accumulation=1
    ),
    "ppo_one_pass_resumed": run(
        "ppo", "--resume", zero=2, rows=4, accumulation=1, before=("ppo_one_pass", 2)
    ),
    "ppo_zero2_interrupted": run("ppo", zero=2, sigterm_after=2),
    "ppo_zero2_resumed": run("ppo", "--resume", zero=2, before=("ppo_zero2_interrupted", 2)),
    "ppo_dropout": run(
        "ppo",
        "--critic_dropout",
        0.1,
        "--kl_target",
        0.5,
        "--save_steps",
        2,
        "--keep_checkpoints",
        9,
        zero=3,
    ),
    "ppo_dearer": run(
        "ppo", "--kl_coef", 0.3, "--resume", zero=2, before=("ppo_zero2_interrupted", 2)
    ),
    "ppo_dropout_resumed": run(
        "ppo",
        "--critic_dropout",
        0.1,
        "--kl_target",
        0.5,
        "--resume",
        zero=3,
        before=("ppo_dropout", 2),
    ),
    # the variants: several answers a prompt and no critic; everything else at once, trained as it
    # was scored or in a pass of its own
    "ppo_rloo": run("ppo", "--advantage", "rloo", *SAMPLES, zero=3, rows=4, accumulation=1),
    "ppo_grpo": run(
        "ppo", "--advantage", "grpo", "--kl_in", "loss", "--kl_estimator", "k3", *SAMPLES, zero=2
    ),
    "ppo_reinforce": run("ppo", "--advantage", "reinforce", *SAMPLES, zero=1),
    "ppo_options": run("ppo", *OPTIONS, zero=3, rows=4, accumulation=1),
    "ppo_gate": run("ppo", "--actor_dropout", 0.1, "--max_steps", 1, zero=2),
    "ppo_target_kl": run(
        "ppo",
        "--allow_unstable",
        1,
        "--ppo_epochs",
        4,
        "--target_kl",
        1e-9,
        "--max_steps",
        2,
        zero=2,
        rows=4,
        accumulation=1,
    ),
    "ppo_text_alone": run(
        "ppo",
        "--unsup_data_path",
        "BASE/text.jsonl",
        "--unsup_coef",
        3,
        "--reward_fn",
        "BASE/letters.py:nothing",
        "--kl_coef",
        0,
        "--advantage",
        "reinforce",
        "--max_steps",
        1,
        zero=2,
    ),
    "ppo_bf16": run("ppo", "--dtype", "bf16", zero=2),
    "sft_bf16": run("sft", "--dtype", "bf16", "--max_steps", 15, zero=2),
    "ppo_bandit": run(
        "ppo",
        "--reward_fn",
        "BASE/letters.py:share_of_early_letters",
        "--max_steps",
        40,
        "--kl_coef",
        0,
        "--actor_learning_rate",
        1e-2,
        "--critic_learning_rate",
        1e-2,
        "--num_eval_prompts",
        9,
        zero=2,
        rows=16,
        accumulation=1,
    ),
    "ppo_more_answers": run(
        "ppo", "--allow_unstable", 1, "--max_steps", 2, zero=2, rows=2, generation=4, accumulation=1
    ),
    **{
        f"{script}_offload": run(script, "--offload", "--adam_offload", zero=3)
        for script in ("sft", "reward", "ppo")
    },
    "sft_zero3_checkpointing": run("sft", "--gradient_checkpointing", zero=3),
    "reward_apart": run("reward", "--share_prompt", 0, zero=3),
    "sft_hpz": run("sft", "--ds_config", "BASE/hpz.json", zero=3),
    "sft_adam_offload": run("sft", "--adam_offload", zero=2),
    # LoRA: on all stages; what one step saves, adapters or a merged model, the next one takes
    **{
        f"sft_lora{stage}": run(
            "sft",
            *LORA,
            "--lora_dim",
            4,
            *["--gradient_checkpointing"] * (stage == 1 or (stage == 3 and not OLD)),
            zero=stage,
        )
        for stage in (0, 1, 2, 3)
    },
    "sft_lora_merged": run("sft", *LORA, "--lora_dim", 4, "--merge_lora", zero=3),
    "sft_lora_bf16": run(
        "sft", *LORA, "--lora_dim", 4, "--dtype", "bf16", "--offload", "--adam_offload", zero=3
    ),
    "sft_lora_checkpoints": run(
        "sft", *LORA, "--lora_dim", 4, "--save_steps", 3, "--keep_checkpoints", 9, zero=3
    ),
    "sft_lora_resumed": run(
        "sft", *LORA, "--lora_dim", 4, "--resume", zero=3, before=("sft_lora_checkpoints", 3)
    ),
    **{
        f"reward_lora{stage}": run(
            *("reward", "--model_name_or_path", "BASE/runs/sft_lora3", "--lora_dim", 4),
            *("--save_steps", 5),
            zero=stage,
        )
        for stage in (1, 3)
    },
    "reward_lora_merged": run(
        "reward",
        "--model_name_or_path",
        "BASE/runs/sft_lora_merged",
        "--lora_dim",
        4,
        "--merge_lora",
        zero=2,
    ),
    **{f"ppo_lora{stage}": run("ppo", *PPO_LORA, zero=stage) for stage in (0, 2, 3)},
    "ppo_lora_merged": run(
        "ppo",
        "--actor_model_name_or_path",
        "BASE/runs/sft_lora_merged",
        "--critic_model_name_or_path",
        "BASE/runs/reward_lora_merged",
        "--actor_lora_dim",
        4,
        "--merge_lora",
        zero=3,
    ),
    # states that leave the device between the phases
    **{
        f"ppo_offload_states{stage}": run("ppo", "--offload_states", zero=stage)
        for stage in (1, 2, 3)
    },
    **{
        f"ppo_bf16_offload_states{stage}": run(
            "ppo", "--offload_states", "--dtype", "bf16", zero=stage
        )
        for stage in (2, 3)
    },
    "ppo_bf16_zero3": run("ppo", "--dtype", "bf16", zero=3),
    "ppo_lora_checkpoints": run(
        "ppo", *PPO_LORA, "--save_steps", 2, "--keep_checkpoints", 9, zero=3
    ),
    "ppo_lora_resumed": run(
        "ppo", *PPO_LORA, "--resume", zero=3, before=("ppo_lora_checkpoints", 2)
    ),
}
ONE_RANK = {
    f"sft_one_rank_{rows}x{8 // rows}": run("sft", zero=2, rows=rows, accumulation=8 // rows)
    for rows in (8, 4, 2, 1)
}
ONE_RANK |= {
    "reward_one_rank": run("reward", zero=2, rows=8, accumulation=1),
    "ppo_one_rank": run("ppo", zero=2, rows=8, accumulation=1),
    "ppo_one_rank_rloo": run(
        "ppo", "--advantage", "rloo", *SAMPLES, zero=0, rows=4, accumulation=2
    ),
    "ppo_one_rank_grpo": run(
        "ppo",
        "--advantage",
        "grpo",
        "--share_prompt",
        0,
        "--kl_in",
        "loss",
        "--kl_estimator",
        "k3",
        *SAMPLES,
        zero=0,
        rows=8,
        accumulation=1,
    ),
    "ppo_one_rank_reinforce": run(
        "ppo", "--advantage", "reinforce", *SAMPLES, zero=0, rows=8, accumulation=1
    ),
    "ppo_one_rank_options": run("ppo", *OPTIONS, zero=0, rows=2, accumulation=4),
    "ppo_one_rank_ptx": run(
        "ppo",
        "--unsup_data_path",
        "BASE/text.jsonl",
        "--unsup_coef",
        2,
        *MORE_EVALUATIONS,
        zero=2,
        rows=8,
        accumulation=1,
    ),
}
BF16 = {
    "sft": ["--dtype", "bf16", "--model_name_or_path", "BASE/models/actor"],
    "reward": ["--dtype", "bf16"],
    "ppo": ["--dtype", "bf16"],
}
# a launch of their own, because DeepSpeed's groups of ranks are global
TENSOR_PARALLEL = {
    f"{script}_tp{stage}": run(
        script, *BF16[script], "--tensor_parallel_size", 2, zero=stage, rows=4
    )
    for script in BF16
    for stage in (1, 2, 3)
}
# Every combination that CPU ranks permit, two steps each: docs/deepspeed.md
OFFLOADS = {
    "": [],
    "_adam": ["--adam_offload"],
    "_offload": ["--offload"],
    "_both": ["--offload", "--adam_offload"],
}
POSSIBLE = [
    (stage, where)
    for stage in (0, 1, 2, 3)
    for where in OFFLOADS
    if where in {0: [""], 3: OFFLOADS}.get(stage, ["", "_adam"])
]
MATRIX = {
    f"m_{dtype}{stage}{where}{'_lora' * lora}": run(
        "sft",
        *LORA,
        "--dtype",
        dtype,
        "--max_steps",
        2,
        *OFFLOADS[where],
        *["--lora_dim", 4] * lora,
        *["--save_steps", 2] * (where == ""),  # for the exports
        zero=stage,
    )
    for dtype in ("fp32", "bf16")
    for stage, where in POSSIBLE
    for lora in (0, 1)
}
SPLIT = {
    f"m_bf16{stage}{where}_tp": run(
        "sft",
        *LORA,
        "--dtype",
        "bf16",
        "--max_steps",
        2,
        *OFFLOADS[where],
        "--tensor_parallel_size",
        2,
        zero=stage,
        rows=4,
    )
    for stage, where in POSSIBLE
}
TWO_RANKS |= MATRIX
TENSOR_PARALLEL |= SPLIT
REFUSED = {
    name
    for name in (*TENSOR_PARALLEL, *MATRIX)
    if OLD and re.fullmatch(r"ppo_tp\d|\w+_tp3|m_bf163\w*_tp|m_bf161_adam\w*", name)
}
TWO_RANKS, TENSOR_PARALLEL = (
    {name: options for name, options in runs.items() if name not in REFUSED}
    for runs in (TWO_RANKS, TENSOR_PARALLEL)
)
FOUR_RANKS = {
    f"sft_tp2_dp2_zero{stage}": run("sft", *BF16["sft"], "--tensor_parallel_size", 2, zero=stage)
    for stage in (1, 2)
}
TWO_RANKS |= {
    f"{script}_dp{stage}": run(script, *BF16[script], zero=stage)
    for script in ("sft", "reward")
    for stage in (1, 2, 3)
}
# Runs of 203 steps, and what goes on from three of their checkpoints for the next seven steps
LATE_STEPS = (7, 21, 196)
LONG = "--lr_scheduler_type constant --keep_checkpoints 99 --eval_steps 100".split()
LATE = {}
for script, stage in itertools.product(("sft", "reward", "ppo"), range(4)):
    long = [*LONG, *["--enable_ema", 1] * (script == "ppo")]
    name = f"{script}_late{stage}"
    LATE[name] = run(script, *long, "--max_steps", 203, "--save_steps", 7, zero=stage)
    for step in LATE_STEPS:
        until = ["--max_steps", step + 7, "--resume"]
        LATE[f"{name}_{step}"] = run(script, *long, *until, zero=stage, before=(name, step))
# On two ranks, in a launch of their own, because the tests that look at them are slow ones
RARE = {
    name: TWO_RANKS.pop(name)
    for name in [*TWO_RANKS]
    if "offload_states" in name or (name in MATRIX and "fp320" not in name)
}
RUNS = {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}
RUNS |= {"tensor parallel": TENSOR_PARALLEL, "late": LATE, "rare": RARE}


def prepare(base):
    """Models of a few thousand weights, a few dozen rows of the toy's data, and DeepSpeed knobs
    that shard them all."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        LlamaConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    shape = dict(
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config, wide = (
        LlamaConfig(**shape),
        LlamaConfig(**{**shape, "hidden_size": 1024, "num_hidden_layers": 1}),
    )
    actor = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        actor.lm_head.weight[tokenizer.eos_token_id] *= 6  # answers end at all lengths
    reward = AutoModelForSequenceClassification.from_config(LlamaConfig(**shape, num_labels=1))
    measured = copy.deepcopy(reward)
    measured.config.score_statistics = [0.1, 0.5]  # as reward.py stores them
    wide_actor = AutoModelForCausalLM.from_config(wide)
    for name, model in {
        "scratch": None,
        "actor": actor,
        "reward": reward,
        "measured": measured,
        "wide": wide_actor,
        "wide_scratch": None,
    }.items():
        (model or (wide if "wide" in name else config)).save_pretrained(base / "models" / name)
        tokenizer.save_pretrained(base / "models" / name)

    (base / "data").mkdir()
    for name, count in (("train", 66), ("test", 9)):
        lines = (ROOT / f"toy/data/{name}.jsonl").read_text().splitlines(keepends=True)
        (base / f"data/{name}.jsonl").write_text("".join(lines[:count]))
    rows = [json.loads(line) for line in lines]
    (base / "text.jsonl").write_text(
        "".join(json.dumps({"text": r["prompt"] + r["chosen"]}) + "\n" for r in rows[:40])
    )

    knobs = json.loads((ROOT / "ds_config.json").read_text())
    # else weights this small would not be sharded
    knobs["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (base / "ds_config.json").write_text(json.dumps(knobs))
    knobs["zero_optimization"]["zero_hpz_partition_size"] = 2
    (base / "hpz.json").write_text(json.dumps(knobs))
    (base / "letters.py").write_text(
        "def share_of_early_letters(prompts, completions, **columns):\n"
        "    return [sum('a' <= x <= 'm' for x in c) / max(len(c), 1) for c in completions]\n"
        "def nothing(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    for name in ("runs", "facts"):
        (base / name).mkdir()


@functools.cache
def shared_folder():
    """One temporary folder a session, with the models and the data of all runs."""
    base = Path(tempfile.mkdtemp(prefix="rlhf-tests-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    prepare(base)
    return base


def start_command(command, base):
    """Runs `command` in its own session; returns (exit code or None when it hung, its output)."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(base / "datasets"),
        "PYTHONPATH": str(ROOT),
        # DeepSpeed compiles its optimizers at first use, and anew for another version of ninja:
        # always take the same one
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    log = base / "log.txt"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [str(c) for c in command],
            cwd=base,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return code, log.read_text()


@functools.cache
def launch(ranks):
    """Makes all runs and checks of `ranks` ranks (or of a name in RUNS, on two), once a session.
    Returns (folder, the launch's output)."""
    base = shared_folder()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        ranks if isinstance(ranks, int) else 2,
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
    ]
    return base, start_command(
        [*torchrun, __file__, base, *[ranks] * isinstance(ranks, str)], base
    )[1]


# --------------------------------------------------------------------------------------------------
# Checks that look inside an engine, 2 ranks.  Each returns what this rank found, as JSON
# --------------------------------------------------------------------------------------------------
def tiny_args(base, stage, *flags):
    import sft

    return sft.get_args([*base_flags("sft", base), "--zero_stage", str(stage), *flags])


def tiny_engine(base, stage, model="actor", options=(), **head):
    """options: flags. head: tokenizer and value_head of `common.load_model`."""
    import common
    from machinery.flags import declaring

    args = declaring.of_role(
        tiny_args(base, stage, *options),
        model_name_or_path=f"{base}/models/{model}",
        dropout=None,
        learning_rate=1e-2,
        weight_decay=0.0,
    )
    return common.train_engine(common.load_model(args, **head), args, 2, 1, 10)


def whole_weights(engine):
    from machinery.engine import old_deepspeed

    named = dict(engine.module.named_parameters())
    with old_deepspeed.gathered_parameters(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


def rows_of_rank(seed, vocabulary=500):
    """Two rows of ids, which differ from rank to rank."""
    import torch

    from machinery.base import ranks

    first, generator = 2 * ranks.get_rank(), torch.Generator().manual_seed(seed)
    shape = 2 * ranks.get_world_size(), 9
    return torch.randint(2, vocabulary, shape, generator=generator)[first : first + 2]


def train_one_step(engine, seed=0):
    """Returns this rank's loss, on its own two rows."""
    import torch

    import common

    ids = rows_of_rank(seed)
    loss = -common.last_logprobs(engine, ids, torch.ones_like(ids), torch.ones(len(ids), 8)).mean()
    if hasattr(engine, "step"):
        engine.backward(loss)
        engine.step()
    return loss.item()


def check_value_head(base):
    """A new head under ZeRO-3, from scratch and on loaded weights, and a trained head; and the same
    without ZeRO."""
    import deepspeed

    from machinery.models import model_folders

    tokenizer = model_folders.load_tokenizer(TOKENIZER)
    found = {}
    for name in ("wide", "wide_scratch", "reward"):
        for stage in (0, 3):
            engine = tiny_engine(base, stage, name, tokenizer=tokenizer, value_head="score")
            weight = engine.module.model.score.weight
            with deepspeed.zero.GatheredParameters([weight]):
                found[f"{name}_zero{stage}"] = dict(
                    weight=weight.flatten().tolist(), sharded=hasattr(weight, "ds_id")
                )
    return found


def check_ema(base):
    """The EMA of a model before and after one step, put together from all ranks' shards; and the
    weights while the EMA is in their place, and after."""
    import torch

    from machinery.rollout import ema

    found = {}
    args = argparse.Namespace(enable_ema=1, ema_decay=0.9)
    for stage in (0, 1, 2, 3):
        engine = tiny_engine(base, stage)
        average = ema.Ema(args, engine.module, {})

        def whole_ema(engine=engine, average=average):
            # whole on rank 0 only, which sends it to the others
            named = engine.module.named_parameters()
            box = [{name: average.full_tensor(name, p) for name, p in named}]
            torch.distributed.broadcast_object_list(box)
            return box[0]

        start, weights_before = whole_ema(), whole_weights(engine)
        train_one_step(engine)
        weights = whole_weights(engine)
        average.update(engine)
        moved = whole_ema()
        with average.in_place_of(engine):
            within = whole_weights(engine)
        after = whole_weights(engine)
        found[f"zero{stage}"] = dict(
            starts_off=max((start[n] - weights_before[n]).abs().max().item() for n in start),
            moved=min((moved[n] - start[n]).abs().max().item() for n in start),
            error=max(
                (moved[n] - (start[n] + 0.1 * (weights[n] - start[n]))).abs().max().item()
                for n in start
            ),
            in_place=all(within[n].equal(moved[n]) for n in moved),
            back=all(after[n].equal(weights[n]) for n in weights),
            checksum=sum(w.double().sum().item() for w in moved.values()),
        )
    return found


def check_stage_3(base):
    """What stage 3 keeps: the order of modules by which it prefetches, where forwards that score
    and passes that train take turns; and what of an offload is among Adam's moments when a
    checkpoint is written and read."""
    import torch

    from machinery.engine import state_offload
    from machinery.rollout import kept_pass
    from machinery.run import checkpoints

    engine, found = tiny_engine(base, 3), {"whole": []}
    trace = engine.optimizer.parameter_offload.get_param_coordinator()
    ids = torch.arange(2, 20).reshape(2, 9)
    for mended in (False, True):
        model = kept_pass.KeptPass.__new__(kept_pass.KeptPass)
        model.engine, model.trains, model.keeps, model.recorded = engine, True, False, not mended
        model.forward = lambda batch, stores: engine(ids).logits.mean()
        for _ in range(3):
            model.before(None)
            engine.backward(model.now(None))
            engine.step()
        found["whole"].append(trace.is_complete_trace())

    def buffers():
        states = engine.basic_optimizer.state.values()
        return sorted({name for state in states for name in state if "buffer" in name})

    args = argparse.Namespace(offload_states=True, keep_checkpoints=1, output_dir=f"{base}/stage_3")
    facts = {"rows": 1, "data_rows": 1, "data_fingerprint": ""}
    with state_offload.states_on_cpu(args, [engine]):
        pass
    found["held"] = buffers()
    checkpoints.save(args, {"model": engine}, 1, {"state": {}, **facts})
    checkpoints.load(args, {"model": engine}, {}, facts, 1)
    return {**found, "loaded": buffers()}


def check_gathered(base):
    """Answers by sharded weights where rank 0 stops at once and rank 1 goes on; all weights
    gathered, and module by module."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import get_z3_leaf_modules
    from transformers import AutoModelForCausalLM

    import common
    import ppo
    from machinery.base import ranks
    from machinery.engine import patches, zero3
    from machinery.models import model_folders
    from machinery.rollout import decoding

    tokenizer, rank = model_folders.load_tokenizer(TOKENIZER), ranks.get_rank()
    known = len(tokenizer)  # the model has rows for more, which are never sampled
    args = argparse.Namespace(temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[])
    plain = AutoModelForCausalLM.from_pretrained(f"{base}/models/actor").eval()
    prompts = [[10 + rank, 11, 12], [20, 21 + rank]]
    ids, mask = common.pad(prompts, 0)
    uniforms = decoding.row_uniforms(1, rank, range(2), 9)
    # the number in the middle of EOS's share of the first token's cdf
    for row, prompt in enumerate(prompts if rank == 0 else ()):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt])).logits[0, -1, :known].float()
        cdf = torch.softmax(logits, -1).double().cumsum(-1)
        uniforms[row, 0] = cdf[tokenizer.eos_token_id - 1 : tokenizer.eos_token_id + 1].mean()
    expected, expected_mask = ppo.sample(args, plain, tokenizer, ids, mask, uniforms)
    found = {"lengths": expected_mask.sum(1).tolist()}
    accelerator = get_accelerator()
    memory, installed = accelerator.available_memory, deepspeed.__version__
    for way in ("gathered", "one by one", "module by module"):
        engine = tiny_engine(base, 3)
        if way == "module by module":
            accelerator.available_memory = lambda *_: 0
        if way == "one by one":
            deepspeed.__version__ = "0.18.5"
        with zero3.gather_for_generation(engine) as (model, synced):
            training = [model.training]
            sampled = ppo.sample(args, model, tokenizer, ids, mask, uniforms, synced)
        responses, response_mask = sampled
        accelerator.available_memory, deepspeed.__version__ = memory, installed
        counts = response_mask.sum(1).tolist()
        found[way] = dict(
            synced=synced,
            training=training + [model.training],
            lengths=counts,
            responses=[r[:n].tolist() for r, n in zip(responses, counts)],
            expected=[r[:n].tolist() for r, n in zip(expected, found["lengths"])],
            still_sharded=all(p.numel() == 0 for p in engine.module.parameters()),
            whole_layers=len(get_z3_leaf_modules(engine.module)),
            quick=torch.nn.functional.linear is patches.quick_linear,
            loss=train_one_step(engine),
            plain_loss=train_one_step(plain),
            next_loss=train_one_step(engine),
        )
    return found


def check_save(base):
    """Sharded weights, saved as they were loaded."""
    from machinery.models import model_folders, saving

    tokenizer = model_folders.load_tokenizer(TOKENIZER)
    saving.save_model(tiny_engine(base, 3), tokenizer, base / "saved_zero3")
    return {}


def check_fp16(base):
    """Two fp16 engines; in the second of three updates the gradients of one rank's first engine
    overflow."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from machinery.base import ranks
    from machinery.engine import patches

    args = argparse.Namespace(dtype="fp16")
    accelerator, found = type(get_accelerator()), {}
    # on a CPU: slow, and right
    supported, accelerator.is_fp16_supported = accelerator.is_fp16_supported, lambda self: True
    for stage in (1, 2, 3):
        engines = []
        for _ in range(2):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1, bias=False).half()
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "fp16": {"enabled": True, "initial_scale_power": 8},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            }
            engines.append(
                deepspeed.initialize(
                    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
                )[0]
            )
        found[f"zero{stage}"] = []
        for overflow in (False, True, False):
            for engine in engines:
                loss = engine(torch.ones(1, 4).half()).float().sum()
                overflows = overflow and engine is engines[0] and ranks.get_rank()
                engine.backward(loss * (float("inf") if overflows else 1.0))
            patches.skip_together(args, engines)
            for engine in engines:
                engine.step()
            found[f"zero{stage}"].append([engine.was_step_applied() for engine in engines])
    accelerator.is_fp16_supported = supported
    return found


CHECKS = {
    "check_fp16": check_fp16,
    "check_value_head": check_value_head,
    "check_ema": check_ema,
    "check_stage_3": check_stage_3,
    "check_gathered": check_gathered,
    "check_save": check_save,
}


# --------------------------------------------------------------------------------------------------
# The worker
# --------------------------------------------------------------------------------------------------
def make_run(base, name, script, flags, before, sigterm_after):
    """Runs one main() in this process. Returns its exit code and what is worth knowing about the
    engines that it saved."""
    import ppo
    from machinery.base import ranks
    from machinery.models import saving
    from machinery.rollout import kept_pass
    from machinery.run import crash

    facts, output = {"saved": []}, base / "runs" / name
    if before and ranks.get_rank() == 0:
        source = base / "runs" / before[0]
        shutil.copytree(
            source / "checkpoints" / f"step-{before[1]}",
            output / "checkpoints" / f"step-{before[1]}",
        )
        for file in source.glob("*.json*"):
            if file.name not in ("config.json", "adapter_config.json", "model_config.json"):
                shutil.copy(file, output)
    if before:
        ranks.barrier()
    check_finite, save_model = crash.stop_unless_finite, saving.save_model
    score, collecting, passes = ppo.score, kept_pass.collecting, []

    def check_finite_and_interrupt(args, record, *rows):
        last_rank = ranks.get_rank() == ranks.get_world_size() - 1
        if record["step"] == sigterm_after and "seconds" in record and last_rank:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank only is told to stop
        return check_finite(args, record, *rows)

    def save_model_and_note(engine, tokenizer, folder, *args, **kwargs):
        facts["saved"].append(
            dict(
                folder=str(Path(folder).relative_to(output)),
                optimizer_steps=engine.global_steps,
                optimizer=type(engine.basic_optimizer).__name__,
                away=away(engine),
            )
        )
        return save_model(engine, tokenizer, folder, *args, **kwargs)

    def away(engine):  # DeepSpeed's own list of the states that have left the device
        return sorted(state.value for state in getattr(engine.optimizer, "offloaded_states", ()))

    def collecting_and_note(args, all_passes, step=None):
        passes[:] = all_passes
        return collecting(args, all_passes, step)

    def score_and_note(batch, policy, *models):
        facts.setdefault("trained_as_scored", []).append(sum(each.keeps for each in passes))
        facts.setdefault("away", []).append(away(policy.engine))
        return score(batch, policy, *models)

    ppo.score, kept_pass.collecting = score_and_note, collecting_and_note
    crash.stop_unless_finite, saving.save_model = check_finite_and_interrupt, save_model_and_note
    sys.argv = [
        f"{script}.py",
        *base_flags(script, base),
        *(f.replace("BASE", str(base)) for f in flags),
        "--output_dir",
        str(output),
    ]
    try:
        __import__(script).main()
        facts["code"] = "main() came back without finish()"
    except SystemExit as stop:
        facts["code"] = stop.code
    finally:
        ppo.score, kept_pass.collecting = score, collecting
        crash.stop_unless_finite, saving.save_model = check_finite, save_model
    return facts


def main():
    import deepspeed

    from machinery.base import ranks
    from machinery.run import crash, logs

    base, only = Path(sys.argv[1]), sys.argv[2:]
    deepspeed.init_distributed(verbose=False)
    rank, count = ranks.get_rank(), ranks.get_world_size()
    crash.finish = lambda args, code=0: sys.exit(code)  # the group of ranks lives on
    logs.draw_curves = lambda args: None
    jobs = {
        name: functools.partial(make_run, base, name, **options)
        for name, options in RUNS[count].items()
    }
    if count == 2:
        jobs |= {name: functools.partial(check, base) for name, check in CHECKS.items()}
    for group in set(only) & set(RUNS):
        named, only = RUNS[group].items(), []
        jobs = {name: functools.partial(make_run, base, name, **run) for name, run in named}
    for name, job in jobs.items():
        if only and name not in only:
            continue
        try:
            found, failed = job(), False
        except Exception:
            found, failed = {"code": traceback.format_exc()}, True
        if failed:  # the other rank may be waiting for this one: nothing more can be run
            (base / "facts" / f"{name}.failed{rank}").write_text(found["code"])
            print(name, found["code"], file=sys.stderr, flush=True)
            os._exit(1)
        everyone = [None] * count
        import torch

        torch.distributed.all_gather_object(everyone, found)
        if rank == 0:
            (base / "facts" / f"{name}.json").write_text(json.dumps(everyone))
    ranks.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
