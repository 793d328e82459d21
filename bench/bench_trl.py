"""The peer's side of bench.py: TRL's trainers on the rows, token ids and weights of our side.

    bench_trl.py RESULT SIDE SCRIPT FLAGS...      the flags of our script; bench.py starts it

TRL's defaults hold where the flags say nothing else.
"""

import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import accelerate
import torch
import transformers
import trl
from datasets import Dataset

import bench
from machinery.data.rows import load_rows, open_sources
from machinery.models import model_folders

# As `accelerate config` would write it for ZeRO-3; by default TRL gathers the weights once
# for a rollout.
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
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


def options_of(args, out):
    """Returns what the configs of all trainers have in common."""
    ppo = hasattr(args, "actor_learning_rate")
    batch = "per_device_training_batch_size" if ppo else "per_device_train_batch_size"
    return dict(
        output_dir=out,
        use_cpu=not torch.cuda.is_available() and "ACCELERATE_USE_DEEPSPEED" not in os.environ,
        bf16=args.dtype == "bf16",
        per_device_train_batch_size=getattr(args, batch),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_train_epochs=1,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        lr_scheduler_type="constant",
        learning_rate=args.actor_learning_rate if ppo else args.learning_rate,
        weight_decay=0.0,
        max_grad_norm=1.0,
        adam_beta2=0.95,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_steps=1 if ppo else 1000,
    )


def learner(side, script, args, rows, **others):
    """Returns SFTTrainer or RewardTrainer."""
    ids = [[row["prompt_ids"] + response for response in row["responses"]] for row in rows]
    name, kind = ("SFT", "CausalLM") if script == "sft" else ("Reward", "SequenceClassification")
    data, options = dict(zip(("chosen_ids", "rejected_ids"), zip(*ids))), others.pop("options")
    if script == "sft":
        masks = [[0] * len(r["prompt_ids"]) + [1] * len(r["responses"][0]) for r in rows]
        data = {"input_ids": [first for first, *_ in ids], "completion_mask": masks}
        options["completion_only_loss"] = True
    if side == "trl+len":
        options["train_sampling_strategy"] = "group_by_length"
    config = getattr(trl, f"{name}Config")(**options, max_length=args.max_seq_len)
    model, data = load(kind, args.model_name_or_path), Dataset.from_dict(data)
    return getattr(trl, f"{name}Trainer")(model=model, args=config, train_dataset=data, **others)


def grpo_trainer(args, rows, options, processing_class, **others):
    """Returns GRPOTrainer. It tokenises the prompts itself."""
    config = trl.GRPOConfig(
        **options,
        num_generations=args.samples_per_prompt,
        max_completion_length=args.max_answer_seq_len,
        temperature=1.0,
        beta=args.kl_coef,
    )
    prompts = [processing_class.decode(ids) for ids in rows["prompt_ids"]]
    return trl.GRPOTrainer(
        model=load("CausalLM", args.actor_model_name_or_path),
        args=config,
        reward_funcs=bench.letters,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=processing_class,
        **others,
    )


def ppo_trainer(args, rows, held_out, options, **others):
    """Returns PPOTrainer."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    config = PPOConfig(
        **options,
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=args.per_device_training_batch_size,
        temperature=1.0,
        response_length=args.max_answer_seq_len,
        kl_coef=args.kl_coef,
        num_sample_generations=0,
        total_episodes=len(rows),
    )
    if args.actor_zero_stage == 3:
        # under DeepSpeed accelerate counts GPUs, and here it would find a world of one
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = dict(num_processes=world, process_index=rank, local_process_index=rank)
        accelerate.PartialState._shared_state.update(found)
    actor, critic = args.actor_model_name_or_path, args.critic_model_name_or_path
    return PPOTrainer(
        args=config,
        model=load("CausalLM", actor),
        ref_model=load("CausalLM", actor),
        reward_model=load("SequenceClassification", critic),
        value_model=load("SequenceClassification", critic),
        train_dataset=Dataset.from_dict({"input_ids": list(rows["prompt_ids"])}),
        eval_dataset=Dataset.from_dict({"input_ids": list(held_out["prompt_ids"])}),
        **others,
    )


def main(result, side, script, *flags):
    args = importlib.import_module(script).get_args(list(flags))
    work, ppo = Path(result).parent, script == "ppo"
    if ppo and args.actor_zero_stage == 3:  # accelerate's own way to be told
        (work / "trl-zero3.json").write_text(json.dumps(ZERO3))
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(work / "trl-zero3.json")
    path = args.actor_model_name_or_path if ppo else args.model_name_or_path
    tokenizer = model_folders.load_tokenizer(path)
    limit = args.max_prompt_seq_len if ppo else args.max_seq_len
    rows, held_out = load_rows(args, open_sources(args, script), tokenizer, limit)
    clock, out, work_done = Clock(), f"{work}/out-trl", []
    common = dict(options=options_of(args, out), processing_class=tokenizer, callbacks=[clock])
    if not ppo:
        trainer = learner(side, script, args, rows, **common)
        collate = trainer.data_collator

        def collate_and_count(part):
            tokens = sum(len(row["input_ids"]) for row in part) if script == "sft" else len(part)
            work_done.append(tokens)
            return collate(part)

        trainer.data_collator = collate_and_count
    elif args.samples_per_prompt > 1:
        trainer = grpo_trainer(args, rows, **common)
    else:
        trainer = ppo_trainer(args, rows, held_out, **common)
    trainer.train()
    seconds = clock.seconds[1:]
    found = {"step": statistics.fmean(seconds)}
    if ppo:
        steps = len(clock.seconds)
        work_done = [len(rows) * args.samples_per_prompt / steps] * steps
        names = ("reward", "kl")
        if args.samples_per_prompt == 1:
            names = ("objective/scores", "objective/kl")
        log = [line for line in trainer.state.log_history if names[0] in line]
        later = [line[names[0]] for line in log[len(log) // 2 :]]
        found["quality"] = {"reward": statistics.fmean(later), "kl": log[-1][names[1]]}
    else:
        trainer.save_model(out)  # our script evaluates it
    found["rate"] = sum(work_done[1 : len(clock.seconds)]) / sum(seconds)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
