"""All that is refused and all that is promised, a line a case.

tests/test_promises.py walks through it. Only the outside stands here: command lines, files, exit
codes, names of rules (Refused.rule), words on the screen, output files, metrics. A change of what
lies inside passes both files as they are. A line that has to change is a change of what users rely
on, and what makes the change says so, after || at its end:

    || other words: REASON     still held, in the words, or with the limits, that the line now has
    || leaves: REASON          held until the feature leaves
    || left: REASON            no longer held, and no longer tried

A case is a command as one types it: NAME=VALUE for the environment (RANKS, DEVICE, NVCC, COMPILER,
DEEPSPEED and APART are pretended: kit.start), the program, its flags. It starts in the box, a
folder of right and wrong things that tests/test_promises.py fills.
"""


def of(table):
    """Returns [[rule, command, words], ...] of a table's lines: RULE | COMMAND | WORDS.

    words: what the message must hold beside one of the flags that were given. It may be absent.
    What has left is left out.
    """
    lines = [line.strip() for line in table.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    lines = [line.partition("|| ")[0].strip() for line in lines if "|| left: " not in line]
    cells = [line.split(" | ") for line in lines]
    return [[*map(str.strip, [*line, ""][:3])] for line in cells]


# --------------------------------------------------------------------------------------------------
# Refused: exit code 2, one message without a traceback, and nothing is changed
# --------------------------------------------------------------------------------------------------
# By their flags. The data that these commands name are not there: a flag comes first.
FLAGS = """
wrong-flag | sft --learning_speed 1
wrong-flag | sft --learning_rat 1 | unrecognized arguments \
    || other words: argparse's own, without the nearest name
# no guessing from abbreviations
wrong-flag | sft --learning 1
# step 3 has the actor's and the critic's
wrong-flag | ppo --learning_rate 1e-5
wrong-flag | ppo --kl_estimator k4
wrong-flag | sft --columns prompt
wrong-flag | sft --preset nope | toy
wrong-flag | sft --dtype fp8 | bf16
wrong-flag | sft --zero_stage 4
wrong-flag | ppo --advantage best
wrong-flag | tools.estimate ppo.py --devices many
wrong-flag | tools.export | checkpoint
wrong-flag | tools.talk actor --template question | {}
# a file of flags
wrong-flag | sft @gone.flags | gone.flags || other words: argparse reads @file
wrong-flag | sft @typo.flags | --learning_rat \
    || other words: argparse reads @file, and names the flag, not the line
flags-file | sft @twice.flags | twice.flags, line 3: || left: what stands later counts
how-many | sft --data_split 2,4
how-many | sft --adam_betas 0.9
out-of-range | sft --max_seq_len 1
out-of-range | sft --adam_betas nan,0.9
out-of-range | sft --learning_rate inf
out-of-range | sft --learning_rate nan
out-of-range | sft --per_device_train_batch_size 0
out-of-range | sft --seed 4294967296
# it trains nothing
out-of-range | sft --lora_dim 4 --lora_alpha 0
out-of-range | ppo --top_p 0
out-of-range | sft --save_steps -1 | at least 0.
out-of-range | ppo --critic_dropout 1.5
out-of-range | ppo --whiten 2
out-of-range | ppo --share_prompt 2
out-of-range | reward --share_prompt 2
ds-config | sft --ds_config no-such-file.json
ds-config | sft --ds_config wrong.json
ds-config | sft --ds_config half.json
# a monitor that is not installed
ds-config | sft --ds_config comet.json | comet_ml
ds-config-flag | sft --ds_config decided.json | zero_optimization.stage
# what this hardware, or DeepSpeed, cannot do
gpu-only | sft --dtype fp16
gpu-only | sft --deepcompile
gpu-only | DEVICE=cuda NVCC=0 sft --deepcompile
zero-only | sft --adam_offload --zero_stage 0
zero-only | DEVICE=cuda sft --deepcompile --zero_stage 0
zero-only | sft --offload
tensor-parallel | RANKS=2 sft --tensor_parallel_size 2 --dtype fp32
tensor-parallel | RANKS=2 sft --tensor_parallel_size 3 --dtype bf16
tensor-parallel | RANKS=2 sft --tensor_parallel_size 2 --dtype bf16 --lora_dim 4
old-deepspeed | DEEPSPEED=0.18.5 sft --adam_offload --zero_stage 1 --dtype bf16
old-deepspeed | DEEPSPEED=0.18.5 sft --lora_dim 4 --gradient_checkpointing --zero_stage 3
old-deepspeed | DEEPSPEED=0.19.2 sft --lora_dim 4 --gradient_checkpointing --zero_stage 3
old-deepspeed | DEEPSPEED=0.18.4 sft
old-deepspeed | DEEPSPEED=0.18.5 RANKS=2 sft --tensor_parallel_size 2 --dtype bf16
old-deepspeed | DEEPSPEED=0.18.5 RANKS=2 ppo --tensor_parallel_size 2 --dtype bf16
# PPO's own
batches-divide | ppo --per_device_training_batch_size 3 --allow_unstable 1
batches-divide | ppo --samples_per_prompt 5
batches-divide | ppo --samples_per_prompt 64
batches-divide | ppo --samples_per_prompt 48 --gradient_accumulation_steps 3
group-of-one | ppo --advantage rloo
group-of-one | ppo --advantage grpo
no-critic | ppo --preset arithmetic --advantage gae
unstable | ppo --per_device_training_batch_size 1
unstable | ppo --ppo_epochs 2
unstable | ppo --generation_batches 2
k1-in-loss | ppo --kl_in loss --kl_estimator k1
wrong-flag | ppo --kl_target 2 --kl_coef 0 \
    || other words: --kl_target is in variants/adaptive-kl
# a text of no letters is in every response, which would have one token
wrong-flag | ppo --stop '' || other words: --stop is inside variants/tool-turns
wrong-flag | ppo --stop . '' || other words: --stop is inside variants/tool-turns
wrong-flag | tools.talk actor --stop '' || other words: --stop is inside variants/tool-turns
wrong-flag | ppo --normalize_reward 1 --reward_fn score.py:length \
    || other words: --normalize_reward is in variants/normalize-reward
wrong-flag | ppo --normalize_reward 1 --reward_model_name_or_path judge measured \
    || other words: --normalize_reward is in variants/normalize-reward
deepcompile-in-ppo | DEVICE=cuda ppo --deepcompile --zero_stage 2
wrong-flag | ppo --compile_decoding 1 --zero_stage 3 \
    || other words: --compile_decoding is in variants/compiled-decoding
state-offload | ppo --offload_states --zero_stage 1 --dtype bf16
state-offload | ppo --offload_states --zero_stage 3 --offload
# how ranks find each other
no-such-rank | WORLD_SIZE=two sft | 'two' || left: int() says so itself
no-such-rank | WORLD_SIZE= sft | WORLD_SIZE || left: int() says so itself
no-such-rank | RANK=x sft | 'x' || left: int() says so itself
no-such-rank | RANK=3 sft | '3' || left: int() says so itself
no-such-rank | LOCAL_RANK= sft | LOCAL_RANK || left: int() says so itself
no-such-rank | MASTER_PORT=abc sft | abc || left: int() says so itself
no-master-address | SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2 sft | MASTER_ADDR
"""

# The neighbours of what is refused by its flags: these are taken, and then miss their data.
TAKEN = """
RANKS=2 sft --tensor_parallel_size 2 --dtype bf16 --zero_stage 3
sft --offload --adam_offload --zero_stage 3
sft --lora_dim 4 --gradient_checkpointing --zero_stage 3
sft --learning_rate=0
ppo --offload_states --zero_stage 3 --dtype bf16
ppo --offload_states --zero_stage 1
ppo --offload_states --zero_stage 0 --actor_zero_stage 2 --critic_zero_stage 3
# states that live on the CPU do not move
ppo --offload_states --adam_offload
ppo --advantage grpo --samples_per_prompt 4 --kl_in loss
ppo --advantage grpo --samples_per_prompt 64 --gradient_accumulation_steps 2
ppo --per_device_generation_batch_size 8 --per_device_training_batch_size 4 --allow_unstable 1
ppo --allow_unstable 1 --ppo_epochs 2 --generation_batches 2
ppo --stop '\\n' END || left: --stop is inside variants/tool-turns
ppo --stop ' ' || left: --stop is inside variants/tool-turns
ppo --kl_target 2 --kl_coef 0.1 || left: variants/adaptive-kl
"""

# By what the commands name, before any model is loaded.
FILES = """
# data: a file's place, and what it is to hold
unreadable-data | sft --data_path colums.jsonl | columns.jsonl
unreadable-data | sft --data_path '' | No such file
unreadable-data | sft --data_path only | test
unreadable-data | sft --data_path nothing | nothing
unreadable-data | sft --data_path good cut.jsonl | cut.jsonl, line 2: Unterminated
unreadable-data | sft --data_path control.jsonl | line 2: Invalid control character at: character 14
unreadable-data | sft --data_path half.jsonl | half.jsonl, line 2:
unreadable-data | sft --data_path latin.jsonl | latin.jsonl, line 2:
unreadable-data | sft --data_path latin.parquet | Invalid UTF8 sequence at string index 0
unreadable-data | sft --data_path list.jsonl | list.jsonl, line 1: no JSON object
unreadable-data | sft --data_path rows.txt | .jsonl, .json, .csv, .parquet
unreadable-data | sft --data_path empty.jsonl | empty.jsonl is empty
unreadable-data | sft --data_path cells.csv | cells.csv, line 3:
unreadable-data | sft --data_path open.csv | open.csv, line 3:
# of two values the last would count
unreadable-data | sft --data_path twice.jsonl | twice.jsonl, line 2:
unreadable-data | sft --data_path twice.json | a name is there twice
unreadable-data | sft --data_path twice.csv | twice.csv, line 2:
unreadable-data | tools.talk actor --prompts cut.jsonl | cut.jsonl, line 2:
unknown-columns | sft --data_path columns.jsonl | question
unknown-columns | reward --data_path answers.jsonl | chosen
unknown-columns | ppo --data_path columns.jsonl | prompt
no-such-column | sft --columns prompt=question,response=reply | has only
no-such-column | sft --data_path columns.jsonl --columns prompt=question,response=no | has only
bad-row | sft --data_path number.jsonl | number.jsonl, line 2:
bad-row | reward --data_path pair_of_number.jsonl | pair_of_number.jsonl, line 2:
bad-row | sft --data_path image.jsonl | image.jsonl, line 2:
bad-row | ppo --data_path role.jsonl | line 2: messages, 2: role 'Assistant'
bad-row | sft --data_path two_formats.jsonl | two_formats.jsonl, line 2:
bad-row | reward --data_path users_turn.jsonl | users_turn.jsonl, line 2:
bad-row | reward --data_path two_prompts.jsonl | two_prompts.jsonl, line 2:
chat-template | sft --data_path chat | no chat template
chat-template | sft --model_name_or_path thinking --data_path chat --train_on all | --train_on last
no-rows-left | sft --data_split 0,4,4 | --data_split
no-rows-left | sft --data_split 0,0,0 | --data_split
no-rows-left | reward --data_path alike | dropped
no-rows | tools.talk actor --prompts blank.jsonl | blank.jsonl
# models: what a folder must hold
no-such-model | sft --model_name_or_path ./good/modle | good/modle
no-such-model | sft --model_name_or_path cut_tokenizer | cut_tokenizer
no-such-model | sft --model_name_or_path cut_config | cut_config
no-such-model | ppo --actor_model_name_or_path missing/actor | missing/actor
# in a new clone, before the first run: the hub is not asked
no-such-model | ppo --actor_model_name_or_path output/sft | Nearest in output: nothing
# its own code does not run unasked
no-such-model | sft --model_name_or_path remote | trust_remote_code
no-weights | ppo --actor_model_name_or_path scratch | scratch
no-weights | ppo --critic_model_name_or_path scratch | scratch
no-weights | sft --lora_dim 4 --model_name_or_path scratch | scratch
no-weights | sft --model_name_or_path no_base | adapter_config.json
no-weights | sft --model_name_or_path adapts_itself | adapter_config.json
no-weights | sft --model_name_or_path adapts_scratch | scratch
no-weights | ppo --reward_model_name_or_path no_base | adapter_config.json
no-weights | tools.talk scratch | scratch
cannot-write | sft --model_name_or_path judge | judge
cannot-write | sft --model_name_or_path tied_judge | tied_judge
cannot-write | ppo --actor_model_name_or_path judge | judge
cannot-write | tools.talk judge | judge
cannot-score | ppo --reward_model_name_or_path actor | actor
cannot-score | tools.talk actor --reward actor | actor
# an encoder sees the tokens that it is to predict: BERT and its like, with weights and without
encoder | sft --model_name_or_path bert | bert
encoder | sft --model_name_or_path bert_from_scratch | bert
encoder | sft --model_name_or_path roberta | roberta
encoder | reward --model_name_or_path bert | bert
encoder | ppo --actor_model_name_or_path bert | bert
encoder | ppo --reward_model_name_or_path bert | bert
encoder | tools.talk bert | bert
# what transformers has no decoder for, without weights
no-class | sft --model_name_or_path t5 | t5
no-class | reward --model_name_or_path t5 | t5
too-long | sft --model_name_or_path actor --max_seq_len 257 | 256
too-long | ppo --max_prompt_seq_len 200 --max_answer_seq_len 57 | 256
no-eos | sft --model_name_or_path endless | eos_token
vocabulary-too-large | sft --model_name_or_path narrow | narrow
other-vocabulary | ppo --critic_model_name_or_path other | other
other-vocabulary | ppo --reward_model_name_or_path judge other | other
# another end of a response
other-vocabulary | ppo --reward_model_name_or_path instruct | instruct
# it would read chats in a template in which it was not trained
other-template | ppo --actor_model_name_or_path thinking --data_path chat \
    --reward_model_name_or_path talks_otherwise | talks_otherwise
no-score-statistics | ppo --normalize_reward 1 | score_statistics \
    || left: variants/normalize-reward
cannot-split-layers | RANKS=2 sft --model_name_or_path odd --tensor_parallel_size 2 --dtype bf16 | 3
# functions of the user's
function-file | ppo --reward_fn missing.py:length | missing.py
function-file | ppo --reward_fn score.py | score.py
function-file | sft --gold_fn missing.py:length | missing.py
function-columns | ppo --reward_fn score.py:length score.py:lenght | lenght
function-columns | ppo --reward_fn score.py:narrow | narrow(prompts, completions, **columns)
# where the run would go
output-taken | sft --output_dir done | done
output-taken | sft --output_dir foreign | foreign
output-taken | sft --output_dir foreign --overwrite | foreign
output-taken | sft --output_dir finished | finished
output-taken | sft --output_dir damaged --overwrite | damaged
output-unusable | sft --output_dir score.py | score.py
output-unusable | sft --output_dir link | link
no-args-json | reward --resume | --resume
no-args-json | sft --output_dir damaged --resume | args.json
no-args-json | sft --output_dir strange --resume | args.json
run-finished | sft --output_dir finished --resume | finished
run-finished | sft --output_dir bestless --resume --keep_best eval_loss | best is gone \
    || left: a convenience. A run goes on when it is not finished, whatever parts it has
flag-changed | sft --output_dir stopped --resume --seed 5 | --seed
flag-changed | sft --output_dir stopped --resume --data_split 1,0,1 | --data_split
flag-changed | sft --output_dir stopped --resume --data_path only | --data_path
flag-changed | sft --output_dir stopped --resume --model_name_or_path other | --model_name_or_path
flag-changed | sft --output_dir stopped --resume --preset opt-1.3b | --preset
flag-changed | ppo --output_dir ppo_stopped --resume --reward_fn score.py:words | --reward_fn
flag-changed | ppo --output_dir ppo_stopped --resume \
    --reward_model_name_or_path measured | --reward_model_name_or_path
resume-another | reward --output_dir stopped --resume | sft.py
resume-another | sft --output_dir older --resume | another version of this project
# tools
no-model | tools.talk | --score
no-model | tools.talk actor --score answers.jsonl | --score
score-needs-reward | tools.talk --score answers.jsonl | --reward
out-file | tools.talk actor --out new.jsonl | --prompts
out-file | tools.talk actor --prompts answers.jsonl --out answers.jsonl | answers.jsonl
no-run | tools.look gone | gone
no-page | tools.look finished --out no/such.html | no/such.html
foreign-page | tools.look finished --out nothing | nothing
no-run | tools.look nothing | nothing
foreign-page | tools.look finished --out score.py | score.py
no-checkpoint | tools.export gone/checkpoints/step-1 | done \
    || other words: the mark of a whole checkpoint is `done`
no-checkpoint | tools.export broken/checkpoints/step-2 | done \
    || other words: the mark of a whole checkpoint is `done`
no-run | tools.export alone/checkpoints/step-2 | args.json
target-in-use | tools.export stopped/checkpoints/step-2 --to good | good
target-in-use | tools.export stopped/checkpoints/step-2 --to score.py | score.py
target-in-use | tools.export stopped/checkpoints/step-2 --to stopped/checkpoints/new | checkpoints
target-in-use | tools.export stopped/checkpoints/step-2 --to '' | --to
wrong-flag | tools.estimate ppo.py --stop '' | --stop \
    || other words: --stop is inside variants/tool-turns
encoder | tools.estimate sft.py --preset toy --model_name_or_path bert | bert \
    || other words: a model that no run of ours made needs --preset or @file
"""

# By weights, rows and checkpoints as they are read. Nothing is changed.
WEIGHTS = """
unreadable-weights | sft --model_name_or_path cut_weights | cut_weights
unreadable-weights | sft --model_name_or_path no_shards | no_shards
unreadable-weights | sft --model_name_or_path gguf | gguf
unreadable-weights | sft --model_name_or_path no_map | no_map
unreadable-weights | sft --model_name_or_path not_found | not_found
missing-weights | sft --model_name_or_path headless | lm_head
# its config has one layer, and its file two
unused-weights | sft --model_name_or_path shallow | layers.1
unused-weights | sft --model_name_or_path shallow --zero_stage 3 | layers.1
# adapters, on two layers
missing-weights | sft --model_name_or_path adapts_1 | layers.1
unused-weights | sft --model_name_or_path adapts_3 | layers.2
unreadable-weights | sft --model_name_or_path adapts_wide | adapts_wide
unreadable-weights | sft --model_name_or_path adapts_none | adapts_none
# they are no weights of the model
adapter-kind | sft --model_name_or_path adapts_prompts | PROMPT_TUNING
missing-weights | ppo --reward_model_name_or_path scoreless | scoreless
# it does not look at the mask of padding
padding-changes-a-row | sft --model_name_or_path rwkv | rwkv
not-finite-weights | sft --model_name_or_path nan_weights | damaged
# its tokens are others in a cache of fixed shapes
compile-decoding | ppo --actor_model_name_or_path mamba --compile_decoding 1 | nats a token \
    || left: variants/compiled-decoding
ranks-differ | RANKS=2 APART=1 sft --model_name_or_path ../actor | rank 1
adam-not-built | COMPILER=0 sft --adam_offload | compiler
# checkpoints
resume-another | COMPILER=0 sft --output_dir stopped --resume | model optimizer
resume-another | sft --output_dir replaced --resume --model_name_or_path deep | model.layers.2
beyond-last-step | sft --output_dir stopped --resume --max_steps 1 | --max_steps 2
no-checkpoint-whole | sft --output_dir broken --resume | broken/checkpoints \
    || other words: the mark of a whole checkpoint is `done`
resume-another | sft --output_dir stopped --resume --data_path changed/good | data_fingerprint
resume-another | ppo --output_dir ppo_stopped --resume \
    --reward_model_name_or_path changed/judge | frozen_models
resume-another | sft --output_dir stopped --resume --lora_dim 2 | model \
    || other words: a flag on the line of --resume overrides, and is named
resume-another | ppo --output_dir ppo_stopped --resume --num_eval_prompts 1 | data_fingerprint \
    || other words: a flag on the line of --resume overrides, and is named
resume-another | sft --output_dir stopped --resume --per_device_train_batch_size 1 | rows_per_step
resume-shape | sft --output_dir stopped --resume --zero_stage 0 | stages
another-model | tools.export replaced/checkpoints/step-2 --to new | deep
not-exported | tools.export stopped/checkpoints/step-2 --to score.py/new | score.py/new
prompt-refused | tools.talk actor --template chat --prompts answers.jsonl | actor
"""

# When a run has begun: what its functions return, and what its evaluations have.
BEGUN = """
keep-best-unknown | sft --keep_best loss | eval_loss
keep-best-unknown | reward --keep_best eval_accuracy_ci | eval_accuracy
function-returns | ppo --reward_fn returns.py:nothing | NoneType
# a dict for the whole batch: a loop over it gives its keys
function-returns | ppo --reward_fn returns.py:batch | dict
function-returns | ppo --reward_fn returns.py:named | dict
function-returns | ppo --reward_fn returns.py:letters | str
function-returns | ppo --reward_fn returns.py:octets | bytes
function-returns | ppo --reward_fn returns.py:a_set | set
function-returns | ppo --reward_fn returns.py:one | float
function-returns | ppo --reward_fn returns.py:one_less | scores for
# which response it was: the rows of the batch
function-returns | ppo --reward_fn returns.py:nan | for the responses to rows [
function-returns | ppo --reward_fn returns.py:huge | 1e+38
function-returns | ppo --reward_fn returns.py:words | good
function-returns | ppo --reward_fn returns.py:none_of_one | None
function-returns | ppo --reward_fn returns.py:too_many_tokens | tokens
function-returns | ppo --reward_fn returns.py:empty_part | one function a part \
    || other words: a dict is refused: one function a part
function-returns | ppo --reward_fn returns.py:parts_of_some | one function a part \
    || other words: a dict is refused: one function a part
function-returns | ppo --reward_fn returns.py:no_parts | one function a part \
    || other words: a dict is refused: one function a part
function-returns | ppo --reward_fn returns.py:parts_of_parts | one function a part \
    || other words: a dict is refused: one function a part
# the deviation of all rewards has this name in the log
function-returns | ppo --reward_fn returns.py:part_std | one function a part \
    || other words: a dict is refused: one function a part
function-returns | ppo --reward_fn returns.py:part_1 | one function a part \
    || other words: a dict is refused: one function a part
# also in an evaluation
function-returns | RANKS=2 ppo --reward_fn returns.py:parts_by_rank | other parts for other rows \
    || left: one function a part
function-returns | RANKS=2 ppo --reward_fn returns.py:parts_by_rank_in_a_step | other parts \
    || left: one function a part
function-returns | ppo --gold_fn returns.py:batch | dict
function-returns | sft --gold_fn returns.py:batch | dict
"""

# In a dialogue of tools/talk.py, which goes on: what is typed, and a word of the answer.
TYPED = """
no-command | /foo | no command /foo
no-flag | /set models x | temperature
wrong-flag | /set temperature hot | hot
out-of-range | /set temperature 0 | --temperature 0
nothing-asked | /undo | nothing was asked
nothing-asked | /retry | nothing was asked
"""

# Refused, but no command of one process reaches it. tests/held.py names the test of each.
ELSEWHERE = """
output-in-use | a second run beside a living one is refused
no-recipe | a model that no run of ours made is refused where no recipe is named, with the list
ranks-differ | an output folder that is not the same on all machines is refused
padding-changes-a-row | a model that ignores positions, or looks ahead, is refused
foreign-checkpoint | a checkpoint that would run code is refused
# of variants/vllm
vllm-python | a --vllm_python without vLLM is refused
vllm-temperature | a temperature at which vLLM samples otherwise, or not at all, is refused
vllm-url | a --vllm_url where nothing, or no vLLM, answers is refused
vllm-room | a vLLM without room for prompt and response is refused
vllm-flags | a vLLM of another dtype, log-probs or defaults of sampling is refused
vllm-flags | --vllm_flags that take what vLLM must have, or that are no words, are refused
vllm-flags | a vLLM at --vllm_url that would fail later, on prompts or adapters, is refused
vllm-folder | a --vllm_folder that cannot be written to is refused
vllm-folder | a --vllm_folder without room for the weights is refused
vllm-transfer | --vllm_transfer nccl on a CPU, with LoRA, or without --vllm_devices is refused
vllm-unused-ids | more unused ids than vLLM's runner for GPUs can exclude are refused
vllm-lora-rank | adapters of a rank that vLLM has no room for are refused
"""

# --------------------------------------------------------------------------------------------------
# Stopped: exit code 1, in words; what stopped it, and a word of the message
# --------------------------------------------------------------------------------------------------
STOPPED = """
a loss that is not finite | sft --learning_rate 1e30 --max_grad_norm 0 --max_steps 4 | not finite
a ratio that is not 1 before the first update | ppo --actor_dropout 0.5 | off by
a reward function that raises | ppo --reward_fn score.py:raises | for the responses to rows [
a gold function that raises | sft --gold_fn score.py:raises | a bug of the user's
a function that ends the program | ppo --reward_fn score.py:leaves | ended the program
a file that ends the program | ppo --reward_fn leaving.py:f | ended the program
"""

# --------------------------------------------------------------------------------------------------
# Promised
# --------------------------------------------------------------------------------------------------
# What a step leaves in output/STEP: the folder there, and its files.
LEFT = """
sft | . | args.json metrics.jsonl samples.jsonl config.json \
    || other words: curves.png by tools/look.py, README.md by tools/export.py
sft | . | model.safetensors tokenizer.json tokenizer_config.json
reward | . | args.json metrics.jsonl judge.jsonl config.json \
    || other words: curves.png by tools/look.py, README.md by tools/export.py
reward | . | model.safetensors tokenizer.json tokenizer_config.json
ppo | . | args.json metrics.jsonl samples.jsonl tokens.jsonl config.json \
    || other words: curves.png by tools/look.py, README.md by tools/export.py
ppo | . | model.safetensors tokenizer.json tokenizer_config.json
ppo | ema | config.json model.safetensors tokenizer.json tokenizer_config.json \
    || other words: README.md by tools/export.py
ppo | critic | config.json model.safetensors tokenizer.json tokenizer_config.json \
    || other words: README.md by tools/export.py
"""

# What the lines of its files hold. Of metrics.jsonl "step" is that of a step, "evaluation" of one
# that was evaluated, too. args.json is one line.
KEYS = """
sft | step | step epoch loss learning_rate grad_norm tokens_per_second tflops seconds
sft | evaluation | eval_loss eval_perplexity
sft | samples.jsonl | step prompt response ended
sft | args.json | learning_rate data_path script versions seed world_size data_fingerprint
reward | step | step epoch loss learning_rate grad_norm tokens_per_second tflops seconds
reward | step | accuracy chosen_score rejected_score
reward | evaluation | eval_accuracy eval_accuracy_ci eval_loss eval_chosen_score eval_margin
reward | judge.jsonl | prompt chosen rejected chosen_score rejected_score place
reward | args.json | learning_rate data_path script versions seed world_size data_fingerprint
ppo | step | step epoch loss learning_rate grad_norm tokens_per_second tflops seconds
ppo | step | reward kl kl_k3 actor_loss critic_loss approx_kl ratio_max clip_fraction entropy gold
ppo | step | response_length eos_rate explained_variance advantage_std reward_std sampling_gap
ppo | step | generate_seconds score_seconds train_seconds
ppo | evaluation | eval_reward eval_kl eval_response_length eval_gold
ppo | samples.jsonl | step prompt response reward gold ended
ppo | tokens.jsonl | step prompt response tokens
ppo | args.json | kl_coef data_path script versions seed world_size data_fingerprint
"""

# A stopped run goes on, with exit code 0, with its own flags. Those that are given override them: a
# command, and what it says of such a flag. Folders may have moved.
RESUMED = """
sft --output_dir stopped --resume
sft --output_dir stopped --resume --learning_rate 1e-9 --weight_decay 0.3 --max_grad_norm 0.5
sft --output_dir stopped --resume --data_path moved/good --model_name_or_path moved/actor
sft --output_dir stopped --resume --max_steps 3 --save_steps 0 --log_steps 2 --eval_steps 1
sft --output_dir stopped --resume --dropout 0.1 --max_steps 3
sft --output_dir stopped --resume --per_device_train_batch_size 1 --gradient_accumulation_steps 2
ppo --output_dir ppo_stopped --resume --actor_learning_rate 1e-9 --kl_coef 0.3 --max_steps 2
ppo --output_dir ppo_stopped --resume --reward_model_name_or_path moved/judge --max_steps 2
ppo --output_dir judged --resume --max_steps 2 \
    --reward_fn moved/score.py:length moved/score.py:good || other words: one function a part
sft --output_dir stopped --resume --max_seq_len 63 | --max_seq_len was 64 and is now 63 \
    || other words: a flag on the line of --resume overrides, and is named
sft --output_dir stopped --resume --lr_scheduler_type linear | and is now linear \
    || other words: a flag on the line of --resume overrides, and is named
sft --output_dir stopped --resume --keep_best eval_loss | --keep_best was None \
    || other words: a flag on the line of --resume overrides, and is named
ppo --output_dir ppo_stopped --resume --top_p 0.9 --max_steps 2 | --top_p was 1.0 \
    || other words: a flag on the line of --resume overrides, and is named
ppo --output_dir ppo_stopped --resume --kl_in loss --max_steps 2 | --kl_in was reward \
    || other words: a flag on the line of --resume overrides, and is named
ppo --output_dir ppo_stopped --resume --gold_fn score.py:length --max_steps 2 | --gold_fn was \
    || other words: a flag on the line of --resume overrides, and is named
"""

# What is right, but near what is refused, or done without what is missing, runs to its end; and
# what it says.
RUNS = """
sft --max_steps 0 --max_seq_len 256 | done:
# torch's AdamW takes the place of DeepSpeed's
COMPILER=0 sft | torch's AdamW
sft --model_name_or_path scratch | from scratch
# buffers that older versions of transformers saved are no weights
sft --model_name_or_path old_buffers --max_steps 0 | done:
sft --model_name_or_path thinking --data_path chat --train_on last --max_steps 0 | done:
# what a chat template asks for is done, and said with the number of rows
sft --model_name_or_path thinking --data_path chat --max_steps 0 | have turns that are not learned
sft --model_name_or_path thinking --data_path talk --max_steps 0 | get the chat template
sft --model_name_or_path thinking --max_steps 0 | are plain text, and get no chat template
sft --model_name_or_path thinking --data_path long_chat --max_steps 0 \
    | lose the beginning of a long prompt \
    || other words: a chat that is too long is cut by tokens, and counted
sft --data_path talk --max_seq_len 16 --max_steps 0 | lose the beginning of a long prompt
sft --keep_best eval_loss | is the best so far
sft --data_path good answers.jsonl --max_steps 0 | answers.jsonl:
sft --data_path columns.jsonl --columns prompt=question,response=reply --max_steps 0 | done:
reward --keep_best eval_accuracy | is the best so far
ppo --reward_fn score.py:length score.py:words | done:
ppo --reward_fn score.py:length score.py:good --gold_fn score.py:good | done: \
    || other words: a dict is refused: one function a part
# a number for each token, and one number
ppo --reward_fn score.py:tokens score.py:good --gold_fn score.py:tokens | done: \
    || other words: a dict is refused: one function a part
# into another working folder
ppo --reward_fn score.py:moves | done:
ppo --stop e | done: || left: --stop is inside variants/tool-turns
ppo --stop e --reward_model_name_or_path judge | warning: --stop \
    || left: --stop is inside variants/tool-turns
ppo --critic_model_name_or_path actor --reward_model_name_or_path judge | done:
ppo --advantage grpo --samples_per_prompt 2 --critic_model_name_or_path judge | done:
ppo --reward_model_name_or_path measured --normalize_reward 1 | done: \
    || left: variants/normalize-reward
ppo --top_p 0.9 | warning: --top_p
ppo --advantage grpo --samples_per_prompt 2 | warning: grpo scales up KL
"""

# What else is promised. tests/held.py names the test of each.
PROMISED = """
# exit codes, words, flags
a name that is too long for a file is refused
the ~ of an output folder is the user's own
0 done, 2 wrong input, 1 anything else
of several ranks that are refused alike only rank 0 speaks
--help opens with the header
--max_steps 0 evaluates and ends
DeepSpeed-Chat's numbers
any flag overrides the preset
a preset's gold score goes with its data
the device's fast dtype is the default
the launchers: deepspeed
two hosts compute what one computes
every command of the pages parses
the next step takes the recipe of the run that made its model, and says so \
    || other words: a model that no run of ours made needs --preset or @file: refused
where a step has other rows than the recipe is tuned for the run says so \
    || other words: the banner says when a step has other rows than the recipe's
the launchers: torchrun, plain Python
long work shows itself in a job's log || left: tqdm alone, off without a terminal
to import a script does nothing

# a run is the same, however it is laid out
ZeRO stages and ranks change no curve
nor do they change a rollout
nor the numbers of a token
what saves memory or time changes no curve
a shared prompt changes no score
what is saved does not depend on the stage
the rows of a step
to evaluate more often changes nothing
to save checkpoints changes nothing
layers that ranks share learn what rows that they share do
no knob differs from DeepSpeed's default in silence

# no run is lost
a resumed run is the uninterrupted one, to the bit
late in a run, too
with LoRA, too
killed at any moment
a damaged checkpoint is passed over || other words: a folder without `done` does not count
every kind of damage is seen || left: sizes are not compared
a checkpoint is on the disk first
a full disk costs no checkpoint
SIGTERM and Ctrl-C save
so do a closed terminal and a reader that goes away
who is told to stop while rows are made leaves no process
a port that is taken is named || other words: torch names it
ranks of one host listen to nobody else
the name of a folder or a file is no pattern
what a run leaves is no data
when a rank is gone the others stop
a rank that fails says which it is || other words: torch marks it
other ranks, other micro-batches \
    || other words: other ranks are refused in words; other micro-batches go on
the rates of a resumed run are those given
the penalty of --kl_target goes on || other words: held by variants/adaptive-kl
a run moves an old one aside, when all is loaded
a second run that starts meanwhile is refused
logs of a launcher may be there before
best/ is whole at every moment || other words: whole, or not there
best/ is the best of the evaluations
a best model that was lost is said
a log that was shortened goes on with whole lines
a checkpoint becomes the run's own model
no tool touches what another owns
a variant replaces no file of one's own
export runs nothing that a checkpoint names
a page replaces a page and nothing else
whatever is given, a run keeps its promises
a number that is not finite stops a run
what takes long by itself is no hang
when a rank hangs each says where it is
operators that are built are loaded without a compiler
no run waits for a build that was killed
data are known by their rows
a helper that outlives its run locks nobody out
what a run holds does not grow

# models
a saved model loads in stock transformers
stock generate stops where training did
stock tools give a reward model's scores \
    || other words: EOS by TemplateProcessing; callers without special tokens append it themselves
a scorer made elsewhere keeps its head
without weights: from scratch
--dropout is this run's alone
padding is what the model came with
else not EOS where another is to spare
LoRA's adapters are peft's
a value head trains in full, with LoRA, too
actor, EMA and critic are saved
the EMA moves by its share, in fp32, on shards
a padded row is the row alone
engines in fp16 skip together
step 2 stores what step 3 scales by || other words: held by variants/normalize-reward
the README's lines use what was trained || other words: tools/export.py writes the card
a chat ends where training ended it
frozen models are in eval mode
the EMA moves once an update, and not where one is skipped
others may read what a run saves, as umask says

# data
the columns say the format
values reach functions as the file spells them
what teaches nothing is dropped and counted
a row that raises names its line
files that are not read are named
the steps share rows out
held-out prompts are never trained on
EOS is appended once, and none to a cut text
prompt and response are tokenised apart
text that spells a special token is data; in chats such a row is dropped, and counted \
    || other words: in chats such a row is dropped, and counted
a prompt that is cut keeps its BOS
a template sees tokens that are not special
every row comes once an epoch
another order each epoch, of the seed
what is cut has no EOS, and a prompt keeps its end
a chat that is too long loses whole turns, and keeps its system turn \
    || left: it is cut by tokens, and counted
a dialogue as text gets the chat template where there is one
SFT's loss covers the response and its EOS
in chats it covers what the assistant says

# the reward model
one score a response, at its last token
its loss is of the difference of two scores
a tie counts one half

# PPO
the score is on EOS, whatever padding is
the first ratio is 1
else the run stops
what was sampled is scored alike
what is generated is what the plain model would
with sharded weights, too
a generation_config of the model's does not leak in
random numbers belong to the row
one mean over ranks and micro-batches
advantages are whitened over all ranks
optimizer steps are as many as the flags say
KL counts once
a filler row counts nothing
nothing is trained on where all is masked
a run that teaches nothing says since when || other words: one warning
of a prompt's responses equal rewards are counted
PPO learns
a function may return parts, and numbers of tokens \
    || other words: numbers and lists a token; one function a part
parts of an evaluation are alike || left: one function a part
a function may spawn processes
what a verifier is not sure of is wrong
tokens.jsonl holds what training sees
judge.jsonl has every pair once
every monitor gets metrics.jsonl, step for step
a text of --stop ends a response || other words: held by variants/tool-turns
masks come from lengths, and never from padding's id
token t is predicted one place before
log-probs are log softmax in fp32
a planted mistake between sampling and scoring is found, rounding passes \
    || other words: a coarse model needs --allow_mismatch 1
nothing that is not finite is trained on
padding changes no whitened advantage
every logged mean is over tokens that count
each KL says which one it is

# tools
it says whether it fits
tokens a second and TFLOPs by hand
a verdict for each row of the table of metrics \
    || other words: each verdict is a row; what a reader of the curves sees has none
a dialogue goes on after a mistyped command
responses of talk.py are those of a rollout
a verdict says so where it cannot tell
no healthy run is called sick
equal responses are a tie
what a model writes is text, on the page
what a model writes is text, in the terminal
"""
