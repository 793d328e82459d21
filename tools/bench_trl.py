"""The peer's side of bench.py: TRL's trainers on the rows, token ids and weights of our side.

    bench_trl.py RESULT SIDE SCRIPT FLAGS...      the flags of our script; bench.py starts it

TRL's defaults hold where nothing else is said.
"""

import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import accelerate
import bench
import torch
import transformers
import trl
from datasets import Dataset

from machinery import folders
from machinery.rows import load_rows, open_sources

# As `accelerate config` would write it for ZeRO-3; by default TRL gathers the weights once
# for a rollout.
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}


class Clock(transformers.TrainerCallback):
    """The seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **options):
        self.started = time.time()

    on_train_begin = on_step_begin  # PPOTrainer tells of the ends of its steps only

    def on_step_end(self, *args, **options):
        self.seconds.append(time.time() - self.started)
        self.started = time.time()


def load(kind, folder):
    """Loads a model in fp32: in bf16 TRL's steps are autocast over fp32 weights."""
    model_class = getattr(transformers, f"AutoModelFor{kind}")
    return model_class.from_pretrained(folder, dtype=torch.float32)


# Each of these returns the trainer, what its config has of its own, and what it is given.
def sft(args, rows, held_out, tokenizer):
    responses = [row["responses"][0] for row in rows]
    prompts = rows["prompt_ids"]
    data = {
        "input_ids": [prompt + response for prompt, response in zip(prompts, responses)],
        "completion_mask": [[0] * len(p) + [1] * len(r) for p, r in zip(prompts, responses)],
    }
    config = trl.SFTConfig, {"completion_only_loss": True, "max_length": args.max_seq_len}
    return trl.SFTTrainer, config, {"model": load("CausalLM", args.model_name_or_path)}, data


def reward(args, rows, held_out, tokenizer):
    data = {
        name: [row["prompt_ids"] + row["responses"][i] for row in rows]
        for i, name in enumerate(("chosen_ids", "rejected_ids"))
    }
    config = trl.RewardConfig, {"max_length": args.max_seq_len}
    model = load("SequenceClassification", args.model_name_or_path)
    return trl.RewardTrainer, config, {"model": model}, data


def grpo(args, rows, held_out, tokenizer):
    own = {
        "num_generations": args.samples_per_prompt,
        "max_completion_length": args.max_answer_seq_len,
        "temperature": 1.0,
        "beta": args.kl_coef,
    }
    model = load("CausalLM", args.actor_model_name_or_path)
    given = {"model": model, "reward_funcs": bench.letters}
    prompts = [tokenizer.decode(ids) for ids in rows["prompt_ids"]]
    ids_of = dict(zip(prompts, rows["prompt_ids"]))

    assert hasattr(trl.GRPOTrainer, "_tokenize_prompts"), "this TRL tokenises otherwise"

    class Trainer(trl.GRPOTrainer):
        def _tokenize_prompts(self, prompts):  # tokenised anew, one that was cut may differ
            return [ids_of[prompt] for prompt in prompts], None, {}

    return Trainer, (trl.GRPOConfig, own), given, {"prompt": prompts}


def ppo(args, rows, held_out, tokenizer):
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    own = {
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "local_rollout_forward_batch_size": args.per_device_training_batch_size,
        "temperature": 1.0,
        "response_length": args.max_answer_seq_len,
        "stop_token": "eos",
        "kl_coef": args.kl_coef,
        "num_sample_generations": 0,
        "total_episodes": len(rows),
    }
    actor, critic = args.actor_model_name_or_path, args.critic_model_name_or_path
    given = {name: load("CausalLM", actor) for name in ("model", "ref_model")}
    for name in ("reward_model", "value_model"):
        given[name] = load("SequenceClassification", critic)
    given["eval_dataset"] = Dataset.from_dict({"input_ids": list(held_out["prompt_ids"])})
    return PPOTrainer, (PPOConfig, own), given, {"input_ids": list(rows["prompt_ids"])}


TRAINERS = {"sft": sft, "reward": reward, "ppo": ppo}


def main(result, side, script, *flags):
    args = importlib.import_module(script).get_args(list(flags))
    work, step3 = Path(result).parent, script == "ppo"
    zero3 = step3 and args.actor_zero_stage == 3
    path = args.actor_model_name_or_path if step3 else args.model_name_or_path
    limit = args.max_prompt_seq_len if step3 else args.max_seq_len
    rows_of_step = args.per_device_eval_batch_size  # bench.py gives one number for all batches
    tokenizer = folders.load_tokenizer(path)
    rows, held_out = load_rows(args, open_sources(args, script), tokenizer, limit)
    if args.dtype == "bf16":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # TRL's PPO does not look at `bf16`
    if zero3:  # accelerate's own way
        config = work / "trl-zero3.json"
        config.write_text(json.dumps(ZERO3))
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config)
    options = dict(
        output_dir=f"{work}/out-trl",
        use_cpu=not (torch.cuda.is_available() or zero3),
        bf16=args.dtype == "bf16",
        num_train_epochs=1,
        per_device_train_batch_size=rows_of_step,
        gradient_checkpointing=False,
        learning_rate=args.actor_learning_rate if step3 else args.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        save_strategy="no",
        logging_steps=1 if step3 else 1000,
    )
    if side == "trl+len":
        options["train_sampling_strategy"] = "group_by_length"
    kind = grpo if step3 and args.samples_per_prompt > 1 else TRAINERS[script]
    trainer_class, (config, own), given, data = kind(args, rows, held_out, tokenizer)
    config = config(**options, **own)
    if zero3:
        # under DeepSpeed accelerate counts GPUs, and here it would find a world of one
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = dict(num_processes=world, process_index=rank, local_process_index=rank)
        accelerate.PartialState._shared_state.update(found)
    clock, done = Clock(), []
    trainer = trainer_class(
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        callbacks=[clock],
        **given,
    )
    if not step3:
        collate = trainer.data_collator

        def collate_and_count(part):
            tokens = sum(len(row["input_ids"]) for row in part) if script == "sft" else len(part)
            done.append(tokens)
            return collate(part)

        trainer.data_collator = collate_and_count
    trainer.train()
    steps, seconds = len(clock.seconds), clock.seconds[1:]
    done = done or [len(rows) * args.samples_per_prompt / steps] * steps
    found = {"work": sum(done[1:steps]), "seconds": seconds}
    if step3:
        names = ("objective/scores", "objective/kl") if kind is ppo else ("reward", "kl")
        log = [line for line in trainer.state.log_history if names[0] in line]
        later = [line[names[0]] for line in log[len(log) // 2 :]]
        found["quality"] = {"reward": statistics.fmean(later), "kl": log[-1][names[1]]}
        if kind is grpo:  # PPOTrainer does not tell
            lengths = [line["completions/mean_length"] for line in log[1:]]
            found["quality"]["tokens"] = statistics.fmean(lengths)
    else:
        trainer.save_model(options["output_dir"])  # our script evaluates it
    if int(os.environ.get("RANK", 0)) == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
