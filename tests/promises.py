"""All that is refused and all that is promised, a line a case.

tests/test_promises.py walks through it. Only the outside stands here: command lines, files, exit
codes, names of rules (Refused.rule), words on the screen, output files, metrics. A change of what
lies inside passes both files as they are. A line that has to change is a change of what users rely
on, and what makes the change says so.

A case is a command as one types it: NAME=VALUE for the environment (RANKS, DEVICE, NVCC, COMPILER,
DEEPSPEED and APART are pretended: kit.start), the program, its flags. It starts in the box, a
folder of right and wrong things that tests/test_promises.py fills.
"""


def of(table):
    """Returns [[rule, command, words], ...] of a table's lines: RULE | COMMAND | WORDS.

    words: what the message must hold beside one of the flags that were given. It may be absent.
    """
    lines = [line.strip() for line in table.splitlines()]
    cells = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    return [[*map(str.strip, [*line, ""][:3])] for line in cells]


# --------------------------------------------------------------------------------------------------
# Refused: exit code 2, one message without a traceback, and nothing is changed
# --------------------------------------------------------------------------------------------------
# By their flags. The data that these commands name are not there: a flag comes first.
FLAGS = """
wrong-flag | sft --learning_speed 1
wrong-flag | sft --learning_rat 1 | --learning_rate
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
out-of-range | ppo --critic_dropout 1.5
ds-config | sft --ds_config no-such-file.json
ds-config | sft --ds_config wrong.json
ds-config | sft --ds_config half.json
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
old-deepspeed | DEEPSPEED=0.18.5 RANKS=2 sft --tensor_parallel_size 2 --dtype bf16
old-deepspeed | DEEPSPEED=0.18.5 RANKS=2 ppo --tensor_parallel_size 2 --dtype bf16
# PPO's own
batches-divide | ppo --per_device_training_batch_size 3 --allow_unstable 1
batches-divide | ppo --samples_per_prompt 5
group-of-one | ppo --advantage rloo
group-of-one | ppo --advantage grpo
unstable | ppo --per_device_training_batch_size 1
unstable | ppo --ppo_epochs 2
unstable | ppo --generation_batches 2
k1-in-loss | ppo --kl_in loss --kl_estimator k1
kl-target-without-kl | ppo --kl_target 2 --kl_coef 0
# a text of no letters is in every response, which would have one token
empty-stop | ppo --stop ''
empty-stop | ppo --stop . ''
empty-stop | tools.talk actor --stop ''
normalize-reward | ppo --normalize_reward 1 --reward_fn score.py:length
normalize-reward | ppo --normalize_reward 1 --reward_model_name_or_path judge measured
deepcompile-in-ppo | DEVICE=cuda ppo --deepcompile --zero_stage 2
compile-decoding-shards | ppo --compile_decoding 1 --zero_stage 3
state-offload | ppo --offload_states --zero_stage 1 --dtype bf16
state-offload | ppo --offload_states --zero_stage 3 --offload
# how ranks find each other
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
ppo --allow_unstable 1 --ppo_epochs 2 --generation_batches 2
ppo --stop '\\n' END
ppo --stop ' '
ppo --kl_target 2 --kl_coef 0.1
"""

# By what the commands name, before any model is loaded.
FILES = """
# data: a file's place, and what it is to hold
unreadable-data | sft --data_path colums.jsonl | columns.jsonl
unreadable-data | sft --data_path '' | No such file
unreadable-data | sft --data_path only | test
unreadable-data | sft --data_path nothing | nothing
unreadable-data | sft --data_path good cut.jsonl | cut.jsonl, line 2:
unreadable-data | sft --data_path control.jsonl | control.jsonl, line 2:
unreadable-data | sft --data_path half.jsonl | half.jsonl, line 2:
unreadable-data | sft --data_path latin.jsonl | latin.jsonl, line 2:
unreadable-data | sft --data_path latin.parquet | Invalid UTF8 sequence at string index 0
unreadable-data | sft --data_path list.jsonl | list.jsonl, line 1: no JSON object
unreadable-data | sft --data_path rows.txt | .jsonl, .json, .csv, .parquet
unreadable-data | sft --data_path empty.jsonl | empty.jsonl is empty
unreadable-data | sft --data_path cells.csv | cells.csv, line 3:
unreadable-data | tools.talk actor --prompts cut.jsonl | cut.jsonl, line 2:
unknown-columns | sft --data_path columns.jsonl | question
unknown-columns | reward --data_path answers.jsonl | chosen
unknown-columns | ppo --data_path columns.jsonl | prompt
no-such-column | sft --columns prompt=question,response=reply | has only
no-such-column | sft --data_path columns.jsonl --columns prompt=question,response=no | has only
bad-row | sft --data_path number.jsonl | number.jsonl, line 2:
bad-row | reward --data_path pair_of_number.jsonl | pair_of_number.jsonl, line 2:
bad-row | sft --data_path image.jsonl | image.jsonl, line 2:
bad-row | reward --data_path users_turn.jsonl | users_turn.jsonl, line 2:
bad-row | reward --data_path two_prompts.jsonl | two_prompts.jsonl, line 2:
chat-template | sft --data_path chat | no chat template
chat-template | sft --model_name_or_path thinking --data_path chat | --train_on last
no-rows-left | sft --data_split 0,4,4 | --data_split
no-rows-left | sft --data_split 0,0,0 | --data_split
no-rows-left | reward --data_path alike | dropped
no-rows | tools.talk actor --prompts blank.jsonl | blank.jsonl
# models: what a folder must hold
no-such-model | sft --model_name_or_path ./good/modle | good/modle
no-such-model | sft --model_name_or_path cut_tokenizer | cut_tokenizer
no-such-model | sft --model_name_or_path cut_config | cut_config
no-such-model | ppo --actor_model_name_or_path missing/actor | missing/actor
no-weights | ppo --actor_model_name_or_path scratch | scratch
no-weights | ppo --critic_model_name_or_path scratch | scratch
no-weights | sft --lora_dim 4 --model_name_or_path scratch | scratch
no-weights | sft --model_name_or_path no_base | adapter_config.json
no-weights | sft --model_name_or_path adapts_itself | adapter_config.json
no-weights | sft --model_name_or_path adapts_scratch | scratch
no-weights | ppo --reward_model_name_or_path no_base | adapter_config.json
no-weights | tools.talk scratch | scratch
cannot-write | sft --model_name_or_path judge | judge
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
too-long | sft --model_name_or_path actor --max_seq_len 257 | 256
too-long | ppo --max_prompt_seq_len 200 --max_answer_seq_len 57 | 256
no-eos | sft --model_name_or_path endless | eos_token
vocabulary-too-large | sft --model_name_or_path narrow | narrow
other-vocabulary | ppo --critic_model_name_or_path other | other
other-vocabulary | ppo --reward_model_name_or_path judge other | other
# another end of a response
other-vocabulary | ppo --reward_model_name_or_path instruct | instruct
no-score-statistics | ppo --normalize_reward 1 | score_statistics
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
flag-changed | sft --output_dir stopped --resume --seed 5 | --seed
flag-changed | sft --output_dir stopped --resume --max_seq_len 63 | --max_seq_len
flag-changed | sft --output_dir stopped --resume --lora_dim 2 | --lora_dim
flag-changed | sft --output_dir stopped --resume --data_split 1,0,1 | --data_split
flag-changed | sft --output_dir stopped --resume --data_path only | --data_path
flag-changed | sft --output_dir stopped --resume --lr_scheduler_type linear | --lr_scheduler_type
flag-changed | sft --output_dir stopped --resume --keep_best eval_loss | --keep_best
flag-changed | sft --output_dir stopped --resume --model_name_or_path other | --model_name_or_path
flag-changed | ppo --output_dir ppo_stopped --resume --top_p 0.9 | --top_p
flag-changed | ppo --output_dir ppo_stopped --resume --reward_fn score.py:words | --reward_fn
flag-changed | ppo --output_dir ppo_stopped --resume \
    --reward_model_name_or_path measured | --reward_model_name_or_path
flag-changed | ppo --output_dir ppo_stopped --resume --kl_in loss | --kl_
flag-changed | ppo --output_dir ppo_stopped --resume --num_eval_prompts 2 | --num_eval_prompts
flag-changed | ppo --output_dir ppo_stopped --resume --gold_fn score.py:length | --gold_fn
# tools
no-model | tools.talk | --score
no-model | tools.talk actor --score answers.jsonl | --score
score-needs-reward | tools.talk --score answers.jsonl | --reward
out-file | tools.talk actor --out new.jsonl | --prompts
out-file | tools.talk actor --prompts answers.jsonl --out answers.jsonl | answers.jsonl
no-folder | tools.look gone | gone
no-run | tools.look nothing | nothing
foreign-page | tools.look finished --out score.py | score.py
no-checkpoint | tools.export gone/checkpoints/step-1 | manifest.json
no-checkpoint | tools.export broken/checkpoints/step-2 | rank0.pt
no-run | tools.export alone/checkpoints/step-2 | args.json
target-in-use | tools.export stopped/checkpoints/step-2 --to good | good
target-in-use | tools.export stopped/checkpoints/step-2 --to score.py | score.py
target-in-use | tools.export stopped/checkpoints/step-2 --to stopped/checkpoints/new | checkpoints
target-in-use | tools.export stopped/checkpoints/step-2 --to '' | --to
empty-stop | tools.estimate ppo.py --stop '' | --stop
encoder | tools.estimate sft.py --model_name_or_path bert | bert
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
missing-weights | ppo --reward_model_name_or_path scoreless | scoreless
# it does not look at the mask of padding
padding-changes-a-row | sft --model_name_or_path rwkv | rwkv
# its tokens are others in a cache of fixed shapes
compile-decoding | ppo --actor_model_name_or_path mamba --compile_decoding 1 | tokens of a try
ranks-differ | RANKS=2 APART=1 sft --model_name_or_path ../actor | rank 1
adam-not-built | COMPILER=0 sft --adam_offload | compiler
# checkpoints
beyond-last-step | sft --output_dir stopped --resume --max_steps 1 | --max_steps 2
no-checkpoint-whole | sft --output_dir broken --resume | broken/checkpoints
resume-another | sft --output_dir stopped --resume --data_path changed/good | data_fingerprint
resume-another | ppo --output_dir ppo_stopped --resume \
    --reward_model_name_or_path changed/judge | frozen_models
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
function-returns | ppo --reward_fn returns.py:one_more | scores for
function-returns | ppo --reward_fn returns.py:nan | nan
function-returns | ppo --reward_fn returns.py:huge | 1e+38
function-returns | ppo --reward_fn returns.py:words | good
function-returns | ppo --reward_fn returns.py:none_of_one | None
function-returns | ppo --reward_fn returns.py:too_many_tokens | tokens
function-returns | ppo --reward_fn returns.py:empty_part | None
function-returns | ppo --reward_fn returns.py:unlike_parts | parts
function-returns | ppo --reward_fn returns.py:parts_by_call --gradient_accumulation_steps 2 | parts
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

# Refused, but not here: what no command of one process reaches, and the test that holds it.
ELSEWHERE = """
output-in-use | a second run while one is alive | test_a_living_run_keeps_its_folder
ranks-differ | folders of two machines | test_a_folder_that_is_not_shared_is_refused
padding-changes-a-row | positions or order are ignored | \
    test_a_model_that_ignores_positions_or_the_mask_is_refused
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
sft | . | args.json metrics.jsonl curves.png samples.jsonl README.md config.json
sft | . | model.safetensors tokenizer.json tokenizer_config.json
reward | . | args.json metrics.jsonl curves.png judge.jsonl README.md config.json
reward | . | model.safetensors tokenizer.json tokenizer_config.json
ppo | . | args.json metrics.jsonl curves.png samples.jsonl tokens.jsonl README.md config.json
ppo | . | model.safetensors tokenizer.json tokenizer_config.json
ppo | ema | README.md config.json model.safetensors tokenizer.json tokenizer_config.json
ppo | critic | README.md config.json model.safetensors tokenizer.json tokenizer_config.json
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
ppo | samples.jsonl | step prompt response reward gold
ppo | tokens.jsonl | step prompt response tokens
ppo | args.json | kl_coef data_path script versions seed world_size data_fingerprint
"""

# A stopped run goes on, with exit code 0: these flags do not shape it, and folders may have moved.
RESUMED = """
sft --output_dir COPY --resume --learning_rate 1e-9 --weight_decay 0.3 --max_grad_norm 0.5
sft --output_dir COPY --resume --data_path moved/good --model_name_or_path moved/actor
sft --output_dir COPY --resume --max_steps 3 --save_steps 0 --log_steps 2 --eval_steps 1
sft --output_dir COPY --resume --per_device_train_batch_size 1 --gradient_accumulation_steps 2
sft --output_dir COPY --resume --dropout 0.1
ppo --output_dir COPY --resume --actor_learning_rate 1e-9 --kl_coef 0.3 --max_steps 2
ppo --output_dir COPY --resume --reward_model_name_or_path moved/judge --max_steps 2
"""

# What else is promised, and the test that holds it: by its name, wherever it stands.
HELD = """
# exit codes, words, flags
0 done, 2 wrong input, 1 anything else | test_each_step_finds_the_one_before
of several ranks that are refused alike only rank 0 speaks | test_only_rank_zero_speaks_at_once
--help opens with the header | test_help_opens_with_the_header_and_explains_every_flag
--max_steps 0 evaluates and ends | test_max_steps_0_evaluates_and_ends
DeepSpeed-Chat's numbers | test_the_recipe_is_deepspeed_chats_number_for_number
any flag overrides the preset | test_presets_name_flags_and_any_flag_overrides_them
a preset's gold score goes with its data | test_a_presets_gold_score_goes_with_its_data
the device's fast dtype is the default | test_a_cpu_computes_in_fp32
the launchers: deepspeed | test_deepspeeds_launcher_needs_no_compiler
two hosts compute what one computes | test_two_hosts_give_the_numbers_of_one
every command of the pages parses | test_every_command_in_the_docs_parses

# a run is the same, however it is laid out
ZeRO stages and ranks change no curve | test_zero_stages_and_ranks_agree
nor do they change a rollout | test_rollouts_do_not_depend_on_ranks_or_stages
nor the numbers of a token | test_each_tokens_numbers_do_not_depend_on_ranks_or_stages
what saves memory or time changes no curve | test_a_saving_changes_no_curve
a shared prompt changes no score | test_a_shared_prompt_changes_no_score_and_no_gradient
what is saved does not depend on the stage | test_sharded_and_whole_models_are_saved_alike
the rows of a step | test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks
to evaluate more often changes nothing | test_looking_changes_nothing
to save checkpoints changes nothing | test_taking_a_checkpoint_changes_nothing

# no run is lost
a resumed run is the uninterrupted one, to the bit | test_a_resumed_run_equals_an_uninterrupted_one
late in a run, too | test_a_run_goes_on_to_the_bit_also_late
with LoRA, too | test_a_resumed_lora_run_equals_an_uninterrupted_one
killed at any moment | test_killed_three_times_and_resumed_it_is_the_same_run
a damaged checkpoint is passed over | test_a_damaged_checkpoint_is_passed_over_in_words
every kind of damage is seen | test_every_kind_of_damage_is_seen
a checkpoint is on the disk first | test_a_checkpoint_is_on_the_disk_before_it_has_its_name
a full disk costs no checkpoint | test_a_full_disk_costs_no_checkpoint
SIGTERM and Ctrl-C save | test_a_signal_saves_a_checkpoint_and_a_second_ctrl_c_does_not
when a rank is gone the others stop | test_when_a_rank_is_gone_the_others_stop
a rank that fails says which it is | test_a_rank_that_fails_shows_its_own_traceback
other ranks, other micro-batches | test_a_run_goes_on_in_another_layout
the rates of a resumed run are those given | test_a_resumed_run_takes_the_settings_that_it_is_given
the penalty of --kl_target goes on | test_the_kl_penalty_follows_its_target_and_goes_on_from_there
a run moves an old one aside, when all is loaded | \
    test_overwrite_moves_the_old_run_aside_when_all_is_loaded
a second run that starts meanwhile is refused | test_the_check_is_repeated_under_the_lock
logs of a launcher may be there before | test_logs_of_a_launcher_may_be_there_before
best/ is whole at every moment | test_the_best_model_is_whole_at_every_moment
best/ is the best of the evaluations | test_the_best_model_is_kept
a checkpoint becomes the run's own model | test_a_checkpoint_is_a_model
no tool touches what another owns | test_nothing_of_another_owner_is_touched
a page replaces a page and nothing else | test_the_page_replaces_a_page_and_nothing_else
whatever is given, a run keeps its promises | test_hostile_cases_keep_the_promises
a number that is not finite stops a run | test_a_nan_stops_the_run_and_leaves_its_rows_behind

# models
a saved model loads in stock transformers | test_a_saved_model_loads_in_stock_transformers
stock generate stops where training did | \
    test_stock_generate_stops_where_training_ended_a_response
stock tools give a reward model's scores | test_stock_tools_give_a_reward_models_scores
a scorer made elsewhere keeps its head | test_a_reward_model_made_elsewhere_keeps_its_head
without weights: from scratch | test_a_folder_without_weights_starts_from_scratch
--dropout is this run's alone | test_dropout_is_this_runs_alone
padding is what the model came with | test_padding_is_as_it_came
else not EOS where another is to spare | test_a_padding_token_that_is_not_eos_is_found
LoRA's adapters are peft's | test_stock_tools_load_adapters
a value head trains in full, with LoRA, too | test_the_value_head_trains_in_full
actor, EMA and critic are saved | test_actor_ema_and_critic_are_all_saved
the EMA moves by its share, in fp32, on shards | test_the_ema_moves_by_exactly_its_share
a padded row is the row alone | test_padding_never_changes_a_logprob_or_a_value
engines in fp16 skip together | test_real_fp16_engines_skip_together
step 2 stores what step 3 scales by | test_step_2_stores_what_step_3_scales_by

# data
the columns say the format | test_the_columns_say_the_format
values reach functions as the file spells them | \
    test_values_reach_a_reward_function_as_the_file_spells_them
what teaches nothing is dropped and counted | \
    test_rows_that_teach_nothing_are_dropped_and_counted
a row that raises names its line | test_whatever_a_row_raises_names_its_line
files that are not read are named | test_files_of_a_folder_that_are_not_read_are_named
the steps share rows out | test_the_three_steps_share_the_rows_out
held-out prompts are never trained on | \
    test_held_out_prompts_are_never_trained_on_without_a_test_split
EOS is appended once, and none to a cut text | \
    test_eos_is_appended_once_and_the_text_comes_back
prompt and response are tokenised apart | test_prompt_and_response_are_tokenised_apart
text that spells a special token is data | test_text_that_spells_a_special_token_is_data
every row comes once an epoch | test_every_row_comes_once_an_epoch
another order each epoch, of the seed | test_each_epoch_has_its_own_order_from_the_seed

# PPO
the score is on EOS, whatever padding is | \
    test_the_score_is_placed_on_eos_whatever_padding_is
the first ratio is 1 | test_before_the_first_update_the_ratio_is_exactly_1
else the run stops | test_the_gate_stops_a_run_whose_two_passes_disagree
what was sampled is scored alike | test_sampling_and_scoring_give_a_token_one_logprob
what is generated is what the plain model would | test_decoding_equals_the_plain_model
with sharded weights, too | test_sharded_generation_equals_the_plain_model
a generation_config of the model's does not leak in | \
    test_a_models_own_generation_config_is_left_out_of_greedy_answers
random numbers belong to the row | test_random_numbers_belong_to_the_row
one mean over ranks and micro-batches | test_micro_batches_and_ranks_add_up_to_one_token_mean
advantages are whitened over all ranks | test_whitening_is_over_all_ranks
optimizer steps are as many as the flags say | \
    test_optimizer_steps_are_as_many_as_the_flags_say
KL counts once | test_the_kl_penalty_is_applied_once
a filler row counts nothing | test_a_filler_is_seen_by_the_model_and_counts_nowhere
nothing is trained on where all is masked | \
    test_a_step_whose_responses_are_all_masked_trains_nothing
a run that teaches nothing says since when | \
    test_a_run_that_teaches_nothing_is_named_at_the_step_where_it_begins_to
of a prompt's responses equal rewards are counted | \
    test_a_prompt_whose_responses_have_equal_rewards_is_counted
PPO learns | test_ppo_learns_a_bandit
a function may return parts, and numbers of tokens | test_a_reward_function_may_score_every_token
tokens.jsonl holds what training sees | test_tokens_jsonl_holds_what_training_sees
judge.jsonl has every pair once | test_judge_jsonl_has_every_pair_once
every monitor gets metrics.jsonl, step for step | \
    test_the_monitors_write_into_the_new_folder
a closed text of --stop ends a response | test_a_stop_text_ends_a_response

# tools
it says whether it fits | test_it_says_whether_it_fits
tokens a second and TFLOPs by hand | test_speed_by_hand
a verdict for each row of the README's table | \
    test_every_row_of_the_readmes_table_has_a_verdict
a dialogue goes on after a mistyped command | test_a_dialogue_goes_on_after_what_it_refuses
responses of talk.py are those of a rollout | test_responses_are_those_of_a_rollout
"""
