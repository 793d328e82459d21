"""What nobody has to open to understand RLHF on DeepSpeed. One folder, a file a subject:

ranks           which rank this is, what the ranks tell each other, how far long work is
refused         an error in words, the one place where it ends the program, and small JSON files
launch          makes this process a rank; DeepSpeed's compiled operators
flags           the flags of all scripts, recipes, what --resume takes over, rules
ppo_flags       the flags of ppo.py beyond the papers', their rules, and checks of its models
sources         files, folders and hub datasets
formats         the columns that are known, and what a row of them holds
tokens          token ids of prompts, chats and responses
rows            the rows of a step: which, and what they hold
batching        which rows each optimizer step takes
folders         what a model's folder or hub name holds, and what its forward takes
lora            --lora_dim
saving          a folder that stock transformers loads
config_file     ds_config.json and its monitors
adam            the optimizer
output_head     log-probs without all logits, where these are many
zero3           the model in an engine: gathering, offloading, tensor parallelism
ema             --enable_ema: an average of the weights
patches         repairs of libraries, each with the version that needs it
run             a run: its steps, evaluations, logs, saving, its end
output_folder   who writes there; args.json
checkpoints     a run that stops goes on where it stood
metrics         the numbers of a step, and intervals

On common.py stand: rollout, shared_prompts, judges, evaluation, checks. common.py imports none of
these five, and no file imports a script (tests/docs/test_house.py).

rollout         what makes sampling fast
shared_prompts  a prompt computed once for several responses
judges          who scores the responses: reward models, and the user's own functions
evaluation      held-out prompts answered, pairs judged: samples.jsonl, judge.jsonl, tokens.jsonl
checks          what the models must show before, and while, they train
"""
