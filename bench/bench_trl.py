"""The peer's side of bench.py: TRL's trainers on the rows, token ids and weights of our side.
`bench.py` starts it."""

import importlib
import json
import os
import statistics
import time
import types

import accelerate
import datasets
import torch
import transformers

import bench
import common
from machinery.base import ranks
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


def run(job, work):
    """TRL's trainer on the rows, ids and weights of our side; its defaults where nothing says
    otherwise."""
    script, flags = bench.command(job, work)
    module = importlib.import_module(script)
    if job.get("stage") == 3:  # accelerate's own way to be told
        config = work / "trl-zero3.json"
        config.write_text(json.dumps(ZERO3))
        os.environ.update(
            ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(config)
        )
    args = module.get_args(flags)
    path = args.actor_model_name_or_path if script == "ppo" else args.model_name_or_path
    sources = open_sources(args, script)
    tokenizer = model_folders.load_tokenizer(path, in_chats=sources.hold_chats)
    limit = args.max_prompt_seq_len if script == "ppo" else args.max_seq_len
    rows, held_out = load_rows(args, sources, tokenizer, limit)
    # bf16: autocast, fp32 weights
    options = dict(
        output_dir=f"{work}/out-trl",
        use_cpu=ranks.device().type == "cpu" and job.get("stage") != 3,
        bf16=job["dtype"] == "bf16",
        per_device_train_batch_size=job["batch"],
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        lr_scheduler_type="constant",
        learning_rate=args.actor_learning_rate if script == "ppo" else args.learning_rate,
        weight_decay=0.0,
        max_grad_norm=1.0,
        adam_beta2=0.95,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_steps=1000,
    )
    seconds, done = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args, **options):
            self.started = time.time()

        on_train_begin = on_step_begin  # PPOTrainer tells of the ends of its steps only

        def on_step_end(self, *args, **options):
            seconds.append(time.time() - self.started)
            self.started = time.time()

    def load(kind, folder):  # fp32 weights
        return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            folder, dtype=torch.float32
        )

    if "samples" in job:
        from trl import GRPOConfig, GRPOTrainer

        texts = [tokenizer.decode(ids) for ids in rows["prompt_ids"]]
        config = GRPOConfig(
            **{**options, "logging_steps": 1},
            num_train_epochs=1,
            num_generations=job["samples"],
            max_completion_length=job["answer"],
            temperature=1.0,
            beta=args.kl_coef,
        )
        trainer = GRPOTrainer(
            model=load("CausalLM", path),
            args=config,
            processing_class=tokenizer,
            reward_funcs=bench.letters,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
            callbacks=[Clock()],
        )
    elif script == "ppo":
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        critic = args.critic_model_name_or_path
        config = PPOConfig(
            **{**options, "logging_steps": 1},
            num_ppo_epochs=1,
            num_mini_batches=1,
            local_rollout_forward_batch_size=job["batch"],
            temperature=1.0,
            response_length=job["answer"],
            kl_coef=args.kl_coef,
            num_sample_generations=0,
            total_episodes=len(rows),
        )
        # under DeepSpeed accelerate counts GPUs, and here it would find a world of one
        if job.get("stage") == 3:
            rank = int(os.environ["RANK"])
            accelerate.PartialState._shared_state.update(
                num_processes=job["ranks"], process_index=rank, local_process_index=rank
            )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=load("CausalLM", path),
            ref_model=load("CausalLM", path),
            reward_model=load("SequenceClassification", critic),
            value_model=load("SequenceClassification", critic),
            train_dataset=datasets.Dataset.from_dict({"input_ids": list(rows["prompt_ids"])}),
            eval_dataset=datasets.Dataset.from_dict({"input_ids": list(held_out["prompt_ids"])}),
            callbacks=[Clock()],
        )
    else:
        options.update(
            num_train_epochs=1,
            train_sampling_strategy="group_by_length" if job["side"] == "trl+len" else "random",
        )
        if script == "sft":
            from trl import SFTConfig as Config
            from trl import SFTTrainer as Trainer

            data = datasets.Dataset.from_dict(
                {
                    "input_ids": [r["prompt_ids"] + r["responses"][0] for r in rows],
                    "completion_mask": [
                        [0] * len(r["prompt_ids"]) + [1] * len(r["responses"][0]) for r in rows
                    ],
                }
            )
            options["completion_only_loss"] = True
        else:
            from trl import RewardConfig as Config
            from trl import RewardTrainer as Trainer

            data = datasets.Dataset.from_dict(
                {
                    f"{name}_ids": [r["prompt_ids"] + r["responses"][i] for r in rows]
                    for i, name in enumerate(("chosen", "rejected"))
                }
            )
        trainer = Trainer(
            model=load("CausalLM" if script == "sft" else "SequenceClassification", path),
            processing_class=tokenizer,
            args=Config(**options, max_length=job["length"]),
            train_dataset=data,
            callbacks=[Clock()],
        )
        collate = trainer.data_collator
        trainer.data_collator = lambda part: (
            done.append(sum(len(r["input_ids"]) for r in part) if script == "sft" else len(part))
            or collate(part)
        )
    trainer.train()
    done = done or [job["batch"] * job.get("ranks", 1)] * len(seconds)
    out = {
        "rate": sum(done[1 : len(seconds)]) / sum(seconds[1:]),
        "step_seconds": statistics.fmean(seconds[1:]),
        **bench.peak(),
    }
    if script == "ppo":
        names = ("reward", "kl") if "samples" in job else ("objective/scores", "objective/kl")
        log = [m for m in trainer.state.log_history if names[0] in m]
        rewards, kls = ([m[name] for m in log] for name in names)
        return [{**out, "quality": bench.ppo_quality(rewards, kls)}]
    model = trainer.model if script == "sft" else common.ValueModel(trainer.model, "score")

    def collate_rows(part):  # a row for each answer, as TRL has it
        return module.collate(part, tokenizer.pad_token_id)

    run = types.SimpleNamespace(args=args, notes={})
    with torch.autocast(ranks.device().type, torch.bfloat16, enabled=job["dtype"] == "bf16"):
        asked = run if script == "reward" else args
        quality = module.evaluate(asked, model, held_out, collate_rows)
    return [
        {**out, "quality": {k: quality[k] for k in ("eval_loss", "eval_accuracy") if k in quality}}
    ]
