"""DeepSpeed-Chat's side of a row of bench.py: its own scripts, on our token ids and weights.

    git clone https://github.com/deepspeedai/DeepSpeedExamples && pip install tensorboard
    python bench/bench.py --only sft reward ppo --dtype bf16 \\
        --chat DeepSpeedExamples/applications/DeepSpeed-Chat

In bf16, because DeepSpeed-Chat has no fp32. Its code is not changed. It is given our rows as its
PromptDataset, the critic as the pytorch_model.bin that it looks for, and `no_init_weights` where
transformers had it before version 5. Its defaults hold for the rest.
"""

import importlib
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path

STEPS = {
    "sft": "step1_supervised_finetuning",
    "reward": "step2_reward_model_finetuning",
    "ppo": "step3_rlhf_finetuning",
}
PHASES = {"sft": 1, "reward": 2, "ppo": 3}


def flags_of(args, script):
    """Returns DeepSpeed-Chat's flags for those of our script."""
    own = vars(args)
    given = {
        "data_output_path": f"{args.output_dir}-dsc",
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
        "num_warmup_steps": 0,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "dtype": args.dtype,
        "seed": args.seed,
    }
    if script == "ppo":
        names = """actor_model_name_or_path critic_model_name_or_path max_prompt_seq_len
            max_answer_seq_len per_device_generation_batch_size per_device_training_batch_size
            actor_learning_rate critic_learning_rate actor_zero_stage critic_zero_stage"""
        given |= {"actor_dropout": 0, "critic_dropout": 0}
    else:
        names = """model_name_or_path max_seq_len per_device_train_batch_size learning_rate
            weight_decay zero_stage"""
        given |= {"dropout": 0, "per_device_eval_batch_size": args.per_device_eval_batch_size}
    given |= {name: own[name] for name in names.split()}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def dataset_of(rows, script, limit, pad_id):
    """Returns our rows as DeepSpeed-Chat holds them: padded to `limit`; prompts are reversed."""
    import torch
    from dschat.utils.data import data_utils

    def row(ids):
        ids = torch.tensor(ids)
        mask = torch.ones_like(ids)
        if script == "ppo":
            return {"input_ids": ids.flip(0), "attention_mask": mask}
        shape = () if script == "sft" else (1,)
        room = (0, limit - len(ids))
        padded = torch.nn.functional.pad(ids, room, value=pad_id)
        mask = torch.nn.functional.pad(mask, room)
        return {
            "input_ids": padded.view(*shape, limit),
            "attention_mask": mask.view(*shape, limit),
        }

    prompts = [row(each["prompt_ids"]) for each in rows] if script == "ppo" else []
    sides = [
        [row(each["prompt_ids"] + each["responses"][i]) for each in rows]
        for i in range(0 if script == "ppo" else PHASES[script])
    ]
    return data_utils.PromptDataset(prompts, *(sides + [[], []])[:2], pad_id, PHASES[script])


def write_critic(folder):
    """Writes the weights of a sequence-classification model under DeepSpeed-Chat's names."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(f"{folder}/model.safetensors")
    renamed = {
        name.replace("score.", "v_head.").replace("model.", "rwtransformer.", 1): x
        for name, x in weights.items()
    }
    torch.save(renamed, f"{folder}/pytorch_model.bin")


def run(result, chat, script, *flags):
    """Runs a step of DeepSpeed-Chat, and writes its rate into the file `result`."""
    from deepspeed.runtime import engine
    from transformers import initialization, modeling_utils

    from machinery.data.rows import load_rows, open_sources
    from machinery.models import model_folders

    sys.path.insert(0, chat)
    modeling_utils.no_init_weights = initialization.no_init_weights
    args = importlib.import_module(script).get_args(list(flags))
    step3 = script == "ppo"
    path = args.actor_model_name_or_path if step3 else args.model_name_or_path
    limit = args.max_prompt_seq_len if step3 else args.max_seq_len
    tokenizer = model_folders.load_tokenizer(path)
    sets = load_rows(args, open_sources(args, script), tokenizer, limit)
    from dschat.rlhf import ppo_trainer
    from dschat.utils.data import data_utils

    def given(*_, **__):
        return [dataset_of(rows, script, limit, tokenizer.eos_token_id) for rows in sets]

    data_utils.create_prompt_dataset = given
    times = []
    if step3:
        write_critic(args.critic_model_name_or_path)
        trainer = ppo_trainer.DeepSpeedPPOTrainer
        generate, overflow = trainer.generate_experience, trainer.get_overflow

        def begin(self, *words):
            if not times:
                times.append(time.time())
            return generate(self, *words)

        def end(self):
            times.append(time.time())
            return overflow(self)

        trainer.generate_experience, trainer.get_overflow = begin, end
    else:
        step = engine.DeepSpeedEngine.step

        def timed(self, *words, **options):
            step(self, *words, **options)
            times.append(time.time())

        engine.DeepSpeedEngine.step = timed
    sys.argv = ["main.py", *flags_of(args, script)]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "29577")
    sys.argv += ["--local_rank", "0"]
    runpy.run_path(f"{chat}/training/{STEPS[script]}/main.py", run_name="__main__")
    seconds = [after - before for before, after in zip(times, times[1:])][1:]
    rows = sets[0]
    work = len(rows) / (len(times) - step3)  # of a step
    if script == "sft":
        tokens = [len(row["prompt_ids"]) + len(row["responses"][0]) for row in rows]
        work = sum(tokens) / len(times)
    found = {"rate": work / statistics.fmean(seconds), "step": statistics.fmean(seconds)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    run(*sys.argv[1:])
