"""DeepSpeed-Chat's recipes, number for number: presets that hold when they are named.

From applications/DeepSpeed-Chat/training/step*/training_scripts of DeepSpeedExamples:
opt/single_node/run_1.3b.sh (step 2: run_350m.sh) and llama2/run_llama2_7b.sh. Two things differ:
its SFT loss covers the prompt, too (--train_on everything), and its PPO does not whiten advantages
(--whiten 0). What only saves memory is left to flags, as a switch in a preset could not be taken
back: its Llama-2 scripts have --gradient_checkpointing, and in step 2 --offload --adam_offload.
"""

DATA = [
    "Dahoas/rm-static",
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "yitingxie/rlhf-reward-datasets",
]
OPT = {
    "sft": dict(
        model_name_or_path="facebook/opt-1.3b",
        data_path=DATA,
        data_split="2,4,4",
        output_dir="output/sft",
        num_train_epochs=16,  # responses gain after perplexity [its README]; labs/sft-epochs.md
        learning_rate=9.65e-6,
        weight_decay=0.0,
        dropout=None,  # on: OPT's own 0.1
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_seq_len=512,
        zero_stage=2,
    ),
    "reward": dict(
        model_name_or_path="facebook/opt-350m",
        data_path=DATA,
        data_split="2,4,4",
        output_dir="output/reward",
        num_train_epochs=1,  # InstructGPT: more overfit, which hurts step 3; labs/reward-epochs.md
        learning_rate=5e-5,
        weight_decay=0.1,
        dropout=0.0,  # off: one network must judge both responses of a pair
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_seq_len=512,
        zero_stage=0,
    ),
    "ppo": dict(
        actor_model_name_or_path="output/sft",
        critic_model_name_or_path="output/reward",
        data_path=DATA[:1],
        data_split="2,4,4",
        output_dir="output/ppo",
        num_train_epochs=1,
        actor_learning_rate=9.65e-6,
        critic_learning_rate=5e-6,
        actor_dropout=0.0,  # off: with it the first ratio is not 1, and the run stops
        critic_dropout=None,  # on: the model's own
        num_warmup_steps=100,
        max_prompt_seq_len=256,
        max_answer_seq_len=256,
        per_device_generation_batch_size=4,
        per_device_training_batch_size=4,
        per_device_eval_batch_size=4,
        kl_coef=0.1,
        enable_ema=1,
        zero_stage=2,
    ),
}
# What differs for Llama-2. Seven billion weights: stage 3 everywhere, and smaller batches. The
# reward model is as large as the actor, and a large model takes a lower rate than OPT-350M. For
# the rest (fewer epochs, weight decay in step 3, no average) the scripts give no reason.
LLAMA = {
    "sft": dict(
        model_name_or_path="meta-llama/Llama-2-7b-hf",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        zero_stage=3,
    ),
    "reward": dict(
        model_name_or_path="meta-llama/Llama-2-7b-hf",
        data_path=DATA[:1],
        learning_rate=9.65e-6,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        zero_stage=3,
    ),
    "ppo": dict(
        actor_weight_decay=0.1,
        critic_weight_decay=0.1,
        per_device_generation_batch_size=1,
        per_device_training_batch_size=1,
        per_device_eval_batch_size=1,
        enable_ema=0,
        zero_stage=3,
    ),
}


def deepspeed_chat(script):
    """Returns the presets of `script` ("sft", "reward", "ppo"): {name: {flag: value}}."""
    return {"opt-1.3b": OPT[script], "llama-2-7b": OPT[script] | LLAMA[script]}
