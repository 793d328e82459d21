"""The runs of the three scripts that tests look at: RUNS, and what reads them.

A run is made when the first test asks for it. Two ranks and 8 rows an optimizer step in most of
them, however laid out.
"""

import functools
import importlib.metadata
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging import version

from tests import kit

DEEPSPEED = version.parse(importlib.metadata.version("deepspeed"))
OLD = DEEPSPEED < version.parse("0.19")  # 0.18.5: some runs are refused, in words
CURVES = {
    "sft": "loss eval_loss",
    "reward": "loss accuracy chosen_score rejected_score eval_loss eval_accuracy",
    "ppo": "reward kl kl_k3 critic_loss entropy response_length eos_rate advantage_std "
    "reward_std explained_variance eval_reward eval_kl eval_response_length",
}
CURVES = {script: names.split() for script, names in CURVES.items()}


# --------------------------------------------------------------------------------------------------
# The table: name -> script, flags, ranks
# --------------------------------------------------------------------------------------------------
def run(script, flags="", zero=0, rows=2, accumulation=2, generation=None, **options):
    """rows: of one forward on one rank. generation: of one rollout batch, if more.

    options: ranks. before: (run, step) whose checkpoint is copied first. sigterm_after: a step.
    BASE in the flags is the session's folder.
    """
    flags = f"--zero_stage {zero} --gradient_accumulation_steps {accumulation} {flags}"
    if script == "ppo":
        flags += f" --per_device_generation_batch_size {generation or rows}"
        flags += f" --per_device_training_batch_size {rows}"
    else:
        flags += f" --per_device_train_batch_size {rows}"
    return dict(script=script, flags=flags.split(), **options)


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


SAVING = "--save_steps 2 --keep_checkpoints 9"
BEST = "--keep_best eval_accuracy --eval_steps 1 --save_steps 1 --keep_checkpoints 9"
ONCE = dict(rows=4, accumulation=1)  # a rollout is one micro-batch, trained on once
# random numbers are resumed, too
DROPOUT = "--model_name_or_path BASE/models/actor --dropout 0.1 --log_steps 3"
PPO_DROPOUT = "--critic_dropout 0.1"
GOLD = "--gold_fn BASE/letters.py:share_of_early_letters"
GRPO = """--advantage grpo --kl_in loss --kl_estimator k3 --samples_per_prompt 2 --max_steps 2
          --loss_mean responses --eval_samples 2"""
REINFORCE = """--advantage reinforce --samples_per_prompt 2 --max_steps 2
               --loss_mean constant --mask_truncated 1"""
# a reward function with a helper process that is stopped, as judges of code stop what runs too long
LETTERS = """
import multiprocessing, time
fork = multiprocessing.get_context("fork")
def run_for_ever(ready):
    ready.set()
    time.sleep(9)
def share_of_early_letters(prompts, completions, **columns):
    ready = fork.Event()
    helper = fork.Process(target=run_for_ever, args=(ready,))
    helper.start(), ready.wait(), helper.terminate(), helper.join()
    assert helper.exitcode == -15
    return [sum('a' <= x <= 'm' for x in c) / max(len(c), 1) for c in completions]
"""
OPTIONS = """--microscope 3 --missing_eos_penalty 1 --entropy_coef 0.01
             --clip_high 0.3 --kl_in loss --kl_estimator k2
             --reward_model_name_or_path BASE/models/measured"""
UNEVEN = "--data_path BASE/uneven"  # half of its rows have five tokens or so, the others thirty
ACTOR = "--model_name_or_path BASE/models/actor"
LORA = f"{ACTOR} --lora_dim 4"
PPO_LORA = """--actor_model_name_or_path BASE/runs/sft_lora3 --actor_lora_dim 4
              --critic_model_name_or_path BASE/runs/reward_lora3 --critic_lora_dim 2"""
RECOMPUTED = {1: "--gradient_checkpointing"}
if DEEPSPEED >= version.parse("0.19.3"):
    RECOMPUTED[3] = RECOMPUTED[1]
RUNS = {f"{s}_zero{stage}": run(s, zero=stage) for s in kit.SCRIPTS for stage in range(4)}
RUNS |= {
    # the same work, laid out in another way
    "sft_one_rank_8x1": run("sft", zero=2, rows=8, accumulation=1, ranks=1),
    "sft_one_rank_2x4": run("sft", zero=2, rows=2, accumulation=4, ranks=1),
    "sft_1x4": run("sft", rows=1, accumulation=4),
    "sft_uneven": run("sft", UNEVEN),
    "sft_packed": run("sft", f"{UNEVEN} --packing 1", zero=3, rows=4, accumulation=1),
    "reward_one_rank": run("reward", zero=2, rows=8, accumulation=1, ranks=1),
    "reward_apart": run("reward", "--share_prompt 0", zero=3),
    "ppo_one_rank": run("ppo", zero=2, rows=8, accumulation=1, ranks=1),
    "sft_zero3_checkpointing": run("sft", "--gradient_checkpointing", zero=3),
    "sft_hpz": run("sft", "--ds_config BASE/hpz.json", zero=3),
    "ppo_offload": run("ppo", "--offload --adam_offload", zero=3),
    "ppo_bf16": run("ppo", "--dtype bf16", zero=2),
    "ppo_bf16_zero3": run("ppo", "--dtype bf16", zero=3),
    # without a critic; everything else at once, trained as it was scored or in a pass of its own
    "ppo_grpo": run("ppo", GRPO, zero=2),
    "ppo_one_rank_grpo": run("ppo", f"{GRPO} --share_prompt 0", rows=8, accumulation=1, ranks=1),
    "ppo_reinforce": run("ppo", REINFORCE, zero=3, **ONCE),
    "ppo_one_rank_reinforce": run("ppo", REINFORCE, rows=8, accumulation=1, ranks=1),
    "ppo_options": run("ppo", OPTIONS, zero=3, **ONCE),
    "ppo_one_rank_options": run("ppo", OPTIONS, rows=2, accumulation=4, ranks=1),
    # PPO's own promises
    "ppo_looked_at": run("ppo", f"{PPO_DROPOUT} {GOLD} --eval_steps 1 --microscope 5", 3),
    "ppo_unstable": run(
        "ppo",
        "--allow_unstable 1 --ppo_epochs 2 --generation_batches 2 --max_steps 1",
        zero=2,
        generation=4,
        accumulation=1,
    ),
    "ppo_target_kl": run(
        "ppo",
        """--allow_unstable 1 --ppo_epochs 4 --target_kl 1e-9 --max_steps 2
           --critic_learning_rate 2e-3""",
        zero=2,
        **ONCE,
    ),
    "ppo_bandit": run(
        "ppo",
        """--reward_fn BASE/letters.py:share_of_early_letters --max_steps 40 --kl_coef 0
           --actor_learning_rate 1e-2 --critic_learning_rate 1e-2 --num_eval_prompts 9""",
        zero=2,
        rows=16,
        accumulation=1,
    ),
    # resuming: a run with checkpoints on the way, then another that goes on from one of them
    "sft_dropout": run("sft", f"{DROPOUT} {SAVING}", 2),
    "sft_dropout_resumed": run(
        "sft", f"{DROPOUT} --save_steps 2 --resume", 2, before=("sft_dropout", 2)
    ),
    "sft_zero3_checkpoints": run("sft", "--save_steps 3 --keep_checkpoints 9", 3),
    # an epoch has 3 steps
    "sft_zero3_resumed": run("sft", "--resume", 3, before=("sft_zero3_checkpoints", 3)),
    "reward_checkpoints": run("reward", SAVING),
    "reward_resumed": run("reward", "--resume", before=("reward_checkpoints", 2)),
    "reward_best": run("reward", BEST, 3),
    "reward_best_resumed": run("reward", f"{BEST} --resume", 3, before=("reward_best", 1)),
    "reward_ended_resumed": run("reward", f"{BEST} --resume", 3, before=("reward_best", 5)),
    "ppo_one_pass": run("ppo", SAVING, 2, **ONCE),
    "ppo_one_pass_resumed": run("ppo", "--resume", 2, before=("ppo_one_pass", 2), **ONCE),
    "ppo_zero2_interrupted": run("ppo", zero=2, sigterm_after=2),
    "ppo_zero2_resumed": run("ppo", "--resume", 2, before=("ppo_zero2_interrupted", 2)),
    "ppo_dearer": run("ppo", "--kl_coef 0.3 --resume", 2, before=("ppo_zero2_interrupted", 2)),
    "ppo_dropout": run("ppo", f"{PPO_DROPOUT} {SAVING}", 3),
    "ppo_dropout_resumed": run("ppo", f"{PPO_DROPOUT} --resume", 3, before=("ppo_dropout", 2)),
    # LoRA: what one step saves, the next one takes
    "sft_lora_checkpoints": run("sft", f"{LORA} --save_steps 3 --keep_checkpoints 9", 3),
    "sft_lora_resumed": run("sft", f"{LORA} --resume", 3, before=("sft_lora_checkpoints", 3)),
    "ppo_lora_checkpoints": run("ppo", f"{PPO_LORA} {SAVING}", 3),
    "ppo_lora_resumed": run("ppo", f"{PPO_LORA} --resume", 3, before=("ppo_lora_checkpoints", 2)),
}
for stage in range(4):
    RUNS[f"sft_lora{stage}"] = run("sft", f"{LORA} {RECOMPUTED.get(stage, '')}", stage)
    of_adapters = "--model_name_or_path BASE/runs/sft_lora3 --lora_dim 4 --save_steps 5"
    RUNS[f"reward_lora{stage}"] = run("reward", of_adapters, stage)
    RUNS[f"ppo_lora{stage}"] = run("ppo", PPO_LORA, stage)
# states that leave the device between the phases; layers that two ranks share
BF16 = {"sft": f"--dtype bf16 {ACTOR}", "reward": "--dtype bf16", "ppo": "--dtype bf16"}
for stage in (1, 2, 3):
    RUNS[f"ppo_offload_states{stage}"] = run("ppo", "--offload_states", stage)
    RUNS[f"ppo_bf16_offload_states{stage}"] = run("ppo", "--offload_states --dtype bf16", stage)
    for script, flags in BF16.items():
        RUNS[f"{script}_dp{stage}"] = run(script, flags, stage)
        split = f"{flags} --tensor_parallel_size 2"
        RUNS[f"{script}_tp{stage}"] = run(script, split, stage, rows=4)
        RUNS[f"{script}_tp2_dp2_zero{stage}"] = run(script, split, stage, ranks=4)
RUNS |= {f"{s}_fp16_{n}": run(s, "--dtype fp16", n) for s in kit.SCRIPTS for n in (1, 2, 3)}
RUNS["ppo_fp16_grpo"] = run("ppo", f"{GRPO} --dtype fp16", 2)
# Every combination that CPU ranks permit, two steps each: docs/deepspeed.md
OFFLOADS = {
    "": [],
    "_adam": ["--adam_offload"],
    "_offload": ["--offload"],
    "_both": ["--offload", "--adam_offload"],
}
WHERE = {0: [""], 1: ["", "_adam"], 2: ["", "_adam"], 3: OFFLOADS}
POSSIBLE = [(stage, where) for stage in WHERE for where in WHERE[stage]]
MATRIX, SPLIT = {}, {}
for stage, where in POSSIBLE:
    for dtype in ("fp32", "bf16"):
        flags = " ".join([ACTOR, "--dtype", dtype, "--max_steps 2", *OFFLOADS[where]])
        saving = "" if where else "--save_steps 2"  # for the exports
        # in bf16 the gradients of a single micro-batch go to the CPU another way (common.ds_config)
        single = dict(rows=4, accumulation=1) if (dtype, where) == ("bf16", "_adam") else {}
        MATRIX[f"m_{dtype}{stage}{where}"] = run("sft", f"{flags} {saving}", stage, **single)
        MATRIX[f"m_{dtype}{stage}{where}_lora"] = run(
            "sft", f"{flags} {saving} --lora_dim 4", stage
        )
    split = f"{flags} --tensor_parallel_size 2"
    SPLIT[f"m_bf16{stage}{where}_tp"] = run("sft", split, stage, rows=4)
RUNS |= MATRIX | SPLIT
# Runs of 70 steps, and what goes on from two of their checkpoints for the next seven steps
LATE_STEPS = (7, 63)
LONG = "--lr_scheduler_type constant --keep_checkpoints 99 --eval_steps 100"
for script in kit.SCRIPTS:
    long = LONG + " --enable_ema 1" * (script == "ppo")
    # quicker: late, accumulation is tried with sft, and the pass that scores and trains with ppo
    sizes = {} if script == "sft" else ONCE
    for stage in range(4):
        name = f"{script}_late{stage}"
        RUNS[name] = run(script, f"{long} --max_steps 70 --save_steps 7", stage, **sizes)
        for step in LATE_STEPS:
            more = f"{long} --max_steps {step + 7} --resume"
            RUNS[f"{name}_{step}"] = run(script, more, stage, before=(name, step), **sizes)
REFUSED = re.compile(r"\w*_tp\w*|m_bf161_adam\w*")  # before DeepSpeed 0.19


# --------------------------------------------------------------------------------------------------
# Making them
# --------------------------------------------------------------------------------------------------
@functools.cache
def base():
    """Returns the session's folder, with what these runs need beside kit's models and data."""
    folder = kit.base()
    kit.once(folder / "made/runs", prepare, folder)
    return folder


def prepare(folder):
    """Writes what the flags in RUNS name with BASE, beside what kit.prepare writes."""
    kit.knobs(folder / "hpz.json", zero_hpz_partition_size=2)
    (folder / "letters.py").write_text(LETTERS)


@functools.cache
def made(name):
    """Returns kit.Done of a run, which is made when it is asked for first."""
    if OLD and REFUSED.fullmatch(name):
        pytest.skip("refused in words with a DeepSpeed before 0.19")
    return kit.once(base() / "made" / name, make, name)


def make(name):
    """Makes a run, and before it those that it starts from. Returns kit.Done."""
    options = RUNS[name]
    for other in re.findall(r"BASE/runs/(\w+)", " ".join(options["flags"])):
        made(other)
    if "before" in options:
        other, step = options["before"]
        made(other)
        copy_checkpoint(base() / "runs" / other, step, base() / "runs" / name)
    args = base(), name, options["script"], options["flags"], options.get("sigterm_after")
    done = kit.fork(make_run, options.get("ranks", 2), *args, meet="")
    assert done.code == 0, done
    return done


def make_run(base, name, script, flags, sigterm_after=None):
    """Makes a run in this rank. Returns its exit code and what is worth knowing of its engines:
    of each model saved its folder, optimizer and optimizer steps, what of it is offloaded, and
    whether it computes activations twice; and of the actor what is offloaded while responses are
    written. Then what it drew: numbers from Python and NumPy at each step's end, and torch's seed.
    And of some calls the arguments, from the third on, or how many they had; of rollouts the step;
    and which engines are in train mode when responses are scored, and when an update is made."""
    import random

    import numpy as np
    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import AttentionMaskInterface

    import ppo
    from machinery import checks, ema, ranks
    from machinery import flags as declaring
    from machinery.run import Run
    from machinery.zero3 import unwrap_model

    facts, output = {"saved": [], "away": [], "draws": {}}, base / "runs" / name
    log, save, roll_out = Run.log, Run.save, ppo.roll_out
    with_modes = "score", "optimizer_step"
    of_ppo = "minibatches", "ordered", *with_modes
    calls = dict.fromkeys(of_ppo, ppo)
    calls |= {"update": ema.Ema, "refuse_if_padding_matters": checks}
    plain = {name: getattr(place, name) for name, place in calls.items()}

    def noted(name, args, options):
        if name in with_modes:  # which engines are in train mode, and whether the actor scores
            modes = [engine.module.training for engine in args[1].engines.values()]
            return modes, options.get("actor")
        return args[2:] if calls[name] is ppo else len(args)

    def noting(name):
        def call(*args, **options):
            facts.setdefault(name, []).append(noted(name, args, options))
            return plain[name](*args, **options)

        return call

    def log_and_interrupt(run, *args, **options):
        log(run, *args, **options)
        facts["draws"][run.step] = random.random(), float(np.random.random())
        if run.step == sigterm_after and ranks.get_rank() == ranks.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank only is told to stop

    def save_and_note(run, engine, tokenizer, folder=None, *args, **options):
        place = str(Path(folder or output).relative_to(output))
        optimizer = type(engine.basic_optimizer).__name__
        note = dict(folder=place, optimizer=optimizer, optimizer_steps=engine.global_steps)
        note["recomputes"] = unwrap_model(engine).is_gradient_checkpointing
        facts["saved"].append({**note, "away": away(engine), "skipped": engine.skipped_steps})
        return save(run, engine, tokenizer, folder, *args, **options)

    def roll_out_and_note(args, engine, *others, **options):
        facts["away"].append(away(engine))
        facts.setdefault("steps", []).append(others[2])
        return roll_out(args, engine, *others, **options)

    def away(engine):  # DeepSpeed's own list of the states that have left the device
        return sorted(state.value for state in getattr(engine.optimizer, "offloaded_states", ()))

    if "fp16" in flags:  # on a CPU: slow, and right
        type(get_accelerator()).is_fp16_supported = lambda self: True
        declaring.get_accelerator = lambda: SimpleNamespace(device_name=lambda: "one that has fp16")
    Run.log, Run.save, ppo.roll_out = log_and_interrupt, save_and_note, roll_out_and_note
    for name, place in calls.items():
        setattr(place, name, noting(name))
    flags = [flag.replace("BASE", str(base)) for flag in flags]
    try:
        kit.call_main(script, [*base_flags(script, base), *flags, "--output_dir", str(output)])
    except SystemExit as stop:
        facts["code"], facts["cudnn"] = stop.code, torch.backends.cuda.cudnn_sdp_enabled()
        facts["mask"] = AttentionMaskInterface()["sdpa"].__name__
    finally:
        Run.log, Run.save, ppo.roll_out = log, save, roll_out
        for name, place in calls.items():
            setattr(place, name, plain[name])
    facts["seed"] = torch.initial_seed()
    return facts


def copy_checkpoint(source, step, output):
    """Makes an output folder as a run that was killed after `step` leaves it."""
    place = Path("checkpoints") / f"step-{step}"
    shutil.copytree(source / place, output / place)
    for file in source.glob("*.json*"):
        if file.name not in ("config.json", "adapter_config.json", "model_config.json"):
            shutil.copy(file, output)


# --------------------------------------------------------------------------------------------------
# Reading them
# --------------------------------------------------------------------------------------------------
def facts(name):
    """Returns what make_run noted, one dict a rank."""
    return made(name).results


def run_of(name):
    """Returns the output folder of a run that ended well."""
    assert {rank["code"] for rank in facts(name)} == {0}, made(name)
    return base() / "runs" / name


def metrics(name):
    return kit.metrics(run_of(name))


def without_clocks(name):
    return kit.metrics(run_of(name), clocks=False)


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


# --------------------------------------------------------------------------------------------------
# Engines without a run around them, in a rank
# --------------------------------------------------------------------------------------------------
def config(*flags, **options):
    """Returns the config of sft.py's engine: micro-batches of 4 rows, 3 a step."""
    import common
    import sft

    args = sft.get_args(["--preset", "toy", *flags])
    return common.ds_config(args, **{"batch_size": 4, "micro_steps": 3, **options})


def tiny_args(base, stage, *flags):
    import sft

    return sft.get_args([*base_flags("sft", base), "--zero_stage", str(stage), *flags])


def tiny_engine(base, stage, model="actor", options=(), **head):
    """options: flags. head: tokenizer and value_head of `common.load_model`."""
    import common
    from machinery import flags

    args = tiny_args(base, stage, *options)
    own = dict(model_name_or_path=f"{base}/models/{model}", dropout=None)
    args = flags.with_flags(args, **own, learning_rate=1e-2, weight_decay=0.0)
    return common.train_engine(common.load_model(args, **head), args, 2, 1, 10)


def whole_weights(engine):
    from machinery import zero3

    named = dict(engine.module.named_parameters())
    with zero3.gathered_parameters(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


def rows_of_rank(seed, vocabulary=500):
    """Returns two rows of ids, which differ from rank to rank."""
    import torch

    from machinery import ranks

    first, generator = 2 * ranks.get_rank(), torch.Generator().manual_seed(seed)
    shape = 2 * ranks.get_world_size(), 9
    return torch.randint(2, vocabulary, shape, generator=generator)[first : first + 2]


def train_one_step(model, seed=0):
    """Trains a language model or its engine on this rank's own two rows. Returns the loss."""
    ids = rows_of_rank(seed)
    loss = model(ids, labels=ids).loss
    if hasattr(model, "step"):
        model.backward(loss)
        model.step()
    return loss.item()
