"""Which test holds a promise of tests/promises.py (PROMISED, ELSEWHERE), by the test's name.

Tests may move, and be renamed: then a name changes here. The promises do not.
"""

BEFALLS = "test_whatever_befalls_a_run_it_ends_as_one_that_nothing_befell"
KILLED = "test_killed_before_any_operation_on_files_nothing_is_lost"
HELD = {
    # refused elsewhere
    "a second run beside a living one is refused": "test_a_living_run_keeps_its_folder",
    "a checkpoint that would run code is refused": (
        "test_a_checkpoint_that_would_run_code_is_refused"
    ),
    "an output folder that is not the same on all machines is refused": (
        "test_a_folder_that_is_not_shared_is_refused"
    ),
    "a model that ignores positions, or looks ahead, is refused": (
        "test_a_model_that_ignores_positions_or_the_mask_is_refused"
    ),
    "a --vllm_python without vLLM is refused": "test_what_vllm_cannot_do_is_refused",
    "a temperature at which vLLM samples otherwise, or not at all, is refused": (
        "test_what_vllm_cannot_do_is_refused"
    ),
    "--vllm_transfer nccl on a CPU, with LoRA, or without --vllm_devices is refused": (
        "test_what_vllm_cannot_do_is_refused"
    ),
    "a --vllm_url where nothing, or no vLLM, answers is refused": (
        "test_a_server_at_a_url_that_is_not_vllm_is_refused"
    ),
    "a vLLM without room for prompt and response is refused": "test_what_vllm_cannot_do_is_refused",
    "a vLLM of another dtype, log-probs or defaults of sampling is refused": (
        "test_what_vllm_cannot_do_is_refused"
    ),
    "--vllm_flags that take what vLLM must have, or that are no words, are refused": (
        "test_what_vllm_cannot_do_is_refused"
    ),
    "a vLLM at --vllm_url that would fail later, on prompts or adapters, is refused": (
        "test_what_vllm_cannot_do_is_refused"
    ),
    "a --vllm_folder that cannot be written to is refused": "test_what_vllm_cannot_do_is_refused",
    "a --vllm_folder without room for the weights is refused": (
        "test_a_folder_in_memory_without_room_is_refused"
    ),
    "more unused ids than vLLM's runner for GPUs can exclude are refused": (
        "test_a_request_has_no_more_biases_than_vllms_runner_for_gpus_keeps"
    ),
    "adapters of a rank that vLLM has no room for are refused": (
        "test_adapters_of_a_rank_that_vllm_has_no_room_for_are_refused"
    ),
    "a model that no run of ours made is refused where no recipe is named, with the list": (
        "test_a_model_without_a_recipe_is_refused_with_the_list"
    ),
    # exit codes, words, flags
    "a name that is too long for a file is refused": "test_a_name_that_is_too_long_is_refused",
    "the ~ of an output folder is the user's own": "test_a_home_is_no_folder_of_that_name",
    "the next step takes the recipe of the run that made its model, and says so": (
        "test_the_next_step_takes_the_preset_of_the_folder_that_it_starts_from"
    ),
    "where a step has other rows than the recipe is tuned for the run says so": (
        "test_the_banner_says_when_a_step_has_other_rows_than_the_recipes"
    ),
    "the launchers: torchrun, plain Python": "test_a_variant_is_checked_by_commands",
    "to import a script does nothing": "test_modules_are_imported_in_any_order_and_in_silence",
    "0 done, 2 wrong input, 1 anything else": "test_each_step_finds_the_one_before",
    "of several ranks that are refused alike only rank 0 speaks": (
        "test_only_rank_zero_speaks_at_once"
    ),
    "--help opens with the header": "test_help_opens_with_the_header_and_explains_every_flag",
    "--max_steps 0 evaluates and ends": "test_max_steps_0_evaluates_and_ends",
    "DeepSpeed-Chat's numbers": "test_the_recipe_is_deepspeed_chats_number_for_number",
    "any flag overrides the preset": "test_any_flag_overrides_its_recipe",
    "a preset's gold score goes with its data": "test_any_flag_overrides_its_recipe",
    "the device's fast dtype is the default": "test_a_cpu_computes_in_fp32",
    "the launchers: deepspeed": "test_deepspeeds_launcher_needs_no_compiler",
    "two hosts compute what one computes": "test_two_hosts_give_the_numbers_of_one",
    "every command of the pages parses": "test_every_command_in_the_docs_parses",
    # a run is the same, however it is laid out
    "layers that ranks share learn what rows that they share do": (
        "test_ranks_that_share_layers_learn_what_ranks_that_share_rows_do"
    ),
    "no knob differs from DeepSpeed's default in silence": (
        "test_gradients_are_reduced_as_deepspeed_does_by_default"
    ),
    "ZeRO stages and ranks change no curve": "test_zero_stages_and_ranks_agree",
    "nor do they change a rollout": "test_rollouts_do_not_depend_on_ranks_or_stages",
    "nor the numbers of a token": "test_each_tokens_numbers_do_not_depend_on_ranks_or_stages",
    "what saves memory or time changes no curve": "test_a_saving_changes_no_curve",
    "a shared prompt changes no score": "test_a_shared_prompt_changes_no_score_and_no_gradient",
    "what is saved does not depend on the stage": "test_sharded_and_whole_models_are_saved_alike",
    "the rows of a step": "test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks",
    "to evaluate more often changes nothing": "test_looking_changes_nothing",
    "to save checkpoints changes nothing": "test_taking_a_checkpoint_changes_nothing",
    # no run is lost
    "what takes long by itself is no hang": "test_what_takes_long_is_no_hang",
    "when a rank hangs each says where it is": (
        "test_when_a_rank_hangs_each_rank_prints_where_it_is"
    ),
    "operators that are built are loaded without a compiler": (
        "test_what_is_built_is_loaded_without_a_compiler"
    ),
    "no run waits for a build that was killed": "test_nobody_waits_for_a_build_that_was_killed",
    "data are known by their rows": "test_the_fingerprint_is_of_the_rows_themselves",
    "a helper that outlives its run locks nobody out": (
        "test_a_helper_that_outlives_its_run_does_not_hold_the_lock"
    ),
    "what a run holds does not grow": "test_what_a_run_holds_does_not_grow_with_its_steps",
    "a resumed run is the uninterrupted one, to the bit": (
        "test_a_resumed_run_equals_an_uninterrupted_one"
    ),
    "late in a run, too": "test_a_run_goes_on_to_the_bit_also_late",
    "with LoRA, too": "test_a_resumed_lora_run_equals_an_uninterrupted_one",
    "killed at any moment": BEFALLS,
    "a damaged checkpoint is passed over": BEFALLS,
    "a checkpoint is on the disk first": (
        "test_a_mark_comes_when_what_it_vouches_for_is_on_the_disk"
    ),
    "a full disk costs no checkpoint": BEFALLS,
    "so do a closed terminal and a reader that goes away": BEFALLS,
    "who is told to stop while rows are made leaves no process": (
        "test_who_is_told_to_stop_while_rows_are_tokenised_leaves_no_process"
    ),
    "a port that is taken is named": "test_a_port_that_is_taken_is_named",
    "ranks of one host listen to nobody else": "test_ranks_of_one_host_listen_to_nobody_else",
    "a best model that was lost is said": "test_a_resumed_run_knows_that_it_had_a_best_model",
    "a log that was shortened goes on with whole lines": "test_a_log_is_cut_where_a_line_ends",
    "the name of a folder or a file is no pattern": "test_a_name_is_no_pattern",
    "what a run leaves is no data": "test_what_a_run_leaves_among_its_data_is_none_of_them",
    "a function may spawn processes": "test_a_function_may_spawn_processes",
    "what a verifier is not sure of is wrong": "test_what_breaks_verifiers_of_word_problems",
    "a variant replaces no file of one's own": "test_a_variant_replaces_no_file_of_ones_own",
    "export runs nothing that a checkpoint names": (
        "test_a_checkpoint_that_would_run_code_is_refused"
    ),
    "SIGTERM and Ctrl-C save": BEFALLS,
    "when a rank is gone the others stop": BEFALLS,
    "a rank that fails says which it is": BEFALLS,
    "other ranks, other micro-batches": "test_a_run_goes_on_in_another_layout",
    "the rates of a resumed run are those given": (
        "test_a_resumed_run_takes_the_settings_that_it_is_given"
    ),
    "the penalty of --kl_target goes on": ("test_a_variant_is_equal_on_all_layouts_and_resumed"),
    "a run moves an old one aside, when all is loaded": (
        "test_overwrite_moves_the_old_run_aside_when_all_is_loaded"
    ),
    "a second run that starts meanwhile is refused": "test_the_check_is_repeated_under_the_lock",
    "logs of a launcher may be there before": "test_logs_of_a_launcher_may_be_there_before",
    "best/ is whole at every moment": KILLED,
    "best/ is the best of the evaluations": "test_the_best_model_is_kept",
    "a checkpoint becomes the run's own model": "test_a_checkpoint_is_a_model",
    "no tool touches what another owns": "test_nothing_of_another_owner_is_touched",
    "a page replaces a page and nothing else": "test_the_page_replaces_a_page_and_nothing_else",
    "whatever is given, a run keeps its promises": "test_hostile_cases_keep_the_promises",
    "a number that is not finite stops a run": "test_a_nan_stops_the_run_and_is_named",
    # models
    "the README's lines use what was trained": "test_the_readmes_lines_use_what_was_trained",
    "a chat ends where training ended it": "test_a_chat_ends_where_our_scripts_end_it",
    "frozen models are in eval mode": "test_frozen_models_are_in_eval_mode",
    "the EMA moves once an update, and not where one is skipped": (
        "test_the_ema_moves_by_its_share_of_the_difference_in_fp32"
    ),
    "others may read what a run saves, as umask says": "test_files_are_as_readable_as_umask_says",
    "a saved model loads in stock transformers": (
        "test_stock_generate_stops_where_training_ended_a_response"
    ),
    "stock generate stops where training did": (
        "test_stock_generate_stops_where_training_ended_a_response"
    ),
    "stock tools give a reward model's scores": "test_stock_tools_give_a_reward_models_scores",
    "a scorer made elsewhere keeps its head": "test_a_reward_model_made_elsewhere_keeps_its_head",
    "without weights: from scratch": "test_a_folder_without_weights_starts_from_scratch",
    "--dropout is this run's alone": "test_dropout_is_this_runs_alone",
    "padding is what the model came with": (
        "test_stock_generate_stops_where_training_ended_a_response"
    ),
    "else not EOS where another is to spare": "test_a_padding_token_that_is_not_eos_is_found",
    "LoRA's adapters are peft's": "test_stock_tools_load_adapters",
    "a value head trains in full, with LoRA, too": "test_the_value_head_trains_in_full",
    "actor, EMA and critic are saved": "test_actor_ema_and_critic_are_all_saved",
    "the EMA moves by its share, in fp32, on shards": (
        "test_ranks_that_hold_nothing_train_and_save_the_same"
    ),
    "a padded row is the row alone": "test_padding_never_changes_a_logprob_or_a_value",
    "engines in fp16 skip together": "test_real_fp16_engines_skip_together",
    "step 2 stores what step 3 scales by": "test_step_2_stores_what_step_3_scales_by",
    # data
    "a dialogue as text gets the chat template where there is one": (
        "test_a_dialogue_as_text_is_a_chat_where_there_is_a_template"
    ),
    "what is cut has no EOS, and a prompt keeps its end": (
        "test_what_is_cut_where_a_row_is_too_long"
    ),
    "SFT's loss covers the response and its EOS": "test_sft_covers_the_response_and_its_eos",
    "in chats it covers what the assistant says": (
        "test_the_loss_covers_what_the_assistant_says_and_its_ends_of_turn"
    ),
    "the columns say the format": "test_the_columns_say_the_format",
    "values reach functions as the file spells them": (
        "test_values_reach_a_reward_function_as_the_file_spells_them"
    ),
    "what teaches nothing is dropped and counted": (
        "test_rows_that_teach_nothing_are_dropped_and_counted"
    ),
    "a row that raises names its line": "test_whatever_a_row_raises_names_its_line",
    "files that are not read are named": "test_files_of_a_folder_that_are_not_read_are_named",
    "the steps share rows out": "test_the_steps_share_the_rows_out",
    "held-out prompts are never trained on": ("test_the_steps_share_the_rows_out"),
    "EOS is appended once, and none to a cut text": (
        "test_eos_is_appended_once_and_the_text_comes_back"
    ),
    "prompt and response are tokenised apart": "test_prompt_and_response_are_tokenised_apart",
    "text that spells a special token is data; in chats such a row is dropped, and counted": (
        "test_a_chat_that_spells_a_special_token_is_left_out"
    ),
    "a prompt that is cut keeps its BOS": "test_what_is_cut_where_a_row_is_too_long",
    "a template sees tokens that are not special": (
        "test_a_template_sees_tokens_that_are_not_special"
    ),
    "every row comes once an epoch": "test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks",
    "another order each epoch, of the seed": "test_each_epoch_has_its_own_order_from_the_seed",
    # the reward model
    "one score a response, at its last token": "test_a_pair_is_scored_at_both_ends",
    "its loss is of the difference of two scores": "test_the_reward_models_loss",
    "a tie counts one half": "test_the_reward_models_loss",
    # PPO
    "masks come from lengths, and never from padding's id": (
        "test_lengths_and_ends_never_come_from_a_mask"
    ),
    "token t is predicted one place before": "test_logits_are_shifted_by_one",
    "log-probs are log softmax in fp32": "test_token_logprobs_are_log_softmax_in_fp32",
    "a planted mistake between sampling and scoring is found, rounding passes": (
        "test_a_rollout_that_is_sampled_otherwise_than_it_is_scored_is_stopped"
    ),
    "nothing that is not finite is trained on": (
        "test_no_stored_number_that_is_not_finite_is_trained_on"
    ),
    "padding changes no whitened advantage": "test_advantages_against_loops",
    "every logged mean is over tokens that count": (
        "test_what_updates_report_are_means_over_their_tokens"
    ),
    "each KL says which one it is": "test_the_estimators_of_kl",
    "the score is on EOS, whatever padding is": (
        "test_the_score_is_placed_on_eos_whatever_padding_is"
    ),
    "the first ratio is 1": "test_before_the_first_update_the_ratio_is_exactly_1",
    "else the run stops": "test_the_gate_stops_a_run_whose_two_passes_disagree",
    "what was sampled is scored alike": "test_sampling_and_scoring_give_a_token_one_logprob",
    "what is generated is what the plain model would": "test_decoding_equals_the_plain_model",
    "with sharded weights, too": "test_sharded_generation_equals_the_plain_model",
    "a generation_config of the model's does not leak in": (
        "test_a_models_own_generation_config_is_left_out_of_greedy_answers"
    ),
    "random numbers belong to the row": "test_random_numbers_belong_to_the_request",
    "one mean over ranks and micro-batches": (
        "test_micro_batches_and_ranks_add_up_to_one_token_mean"
    ),
    "advantages are whitened over all ranks": "test_whitening_is_over_all_ranks",
    "optimizer steps are as many as the flags say": (
        "test_optimizer_steps_are_as_many_as_the_flags_say"
    ),
    "KL counts once": "test_advantages_against_loops",
    "a filler row counts nothing": "test_a_filler_is_seen_by_the_model_and_counts_nowhere",
    "nothing is trained on where all is masked": (
        "test_a_step_whose_responses_are_all_masked_trains_nothing"
    ),
    "a run that teaches nothing says since when": (
        "test_a_first_step_that_teaches_nothing_is_named"
    ),
    "of a prompt's responses equal rewards are counted": (
        "test_a_prompt_whose_responses_have_equal_rewards_is_counted"
    ),
    "PPO learns": "test_ppo_learns_a_bandit",
    "a function may return parts, and numbers of tokens": (
        "test_a_reward_function_may_score_every_token"
    ),
    "tokens.jsonl holds what training sees": "test_tokens_jsonl_holds_what_training_sees",
    "judge.jsonl has every pair once": "test_judge_jsonl_has_every_pair_once",
    "every monitor gets metrics.jsonl, step for step": (
        "test_the_monitors_write_into_the_new_folder"
    ),
    "a text of --stop ends a response": "test_a_stop_text_ends_a_response",
    # tools
    "a verdict says so where it cannot tell": "test_verdicts_by_hand",
    "no healthy run is called sick": "test_no_healthy_run_is_called_sick",
    "equal responses are a tie": "test_the_table_holds_means_and_win_rates",
    "what a model writes is text, on the page": (
        "test_what_a_model_writes_is_text_and_the_page_opens_offline"
    ),
    "what a model writes is text, in the terminal": (
        "test_a_model_cannot_write_to_the_terminal_itself"
    ),
    "it says whether it fits": "test_it_says_whether_it_fits",
    "tokens a second and TFLOPs by hand": "test_speed_by_hand",
    "a verdict for each row of the table of metrics": (
        "test_every_verdict_is_a_row_of_the_table_of_metrics"
    ),
    "a dialogue goes on after a mistyped command": "test_a_dialogue_goes_on_after_what_it_refuses",
    "responses of talk.py are those of a rollout": "test_responses_are_those_of_a_rollout",
}
