"""The labs: for each, which runs are compared, and by what.

An arm is a dict of flags for each step, over those of BASE. All runs have one rank. A seed goes
through the whole pipeline: its own SFT model, reward model and PPO.
"""

from dataclasses import replace

import runner

TEXT = runner.ROOT / "output/labs/text.jsonl"  # run.py writes it
SECOND = runner.ROOT / "output/labs/second"  # and this: the toy's data with another seed
HALF = runner.ROOT / "output/labs/half"  # and this, by course/swapped.py
SUMS = runner.ROOT / "output/labs/sums"  # and these: sums with three operations, see run.write_sums
BASE = {  # the toy, made smaller: half its rows a step, and fewer steps
    "sft": "--num_train_epochs 3 --num_samples 0",
    "reward": "--model_name_or_path {sft} --num_train_epochs 2",
    "ppo": "--actor_model_name_or_path {sft} --critic_model_name_or_path {reward} "
    "--max_steps 40 --enable_ema 0 --num_eval_prompts 140 --eval_steps 20 --log_steps 1",
}
VERIFIED = {  # GRPO on sums, with the share of right answers as gold: toy/arithmetic
    "sft": "--preset arithmetic --per_device_train_batch_size 48 --num_train_epochs 5 "
    "--num_samples 0",
    "ppo": "--preset arithmetic --actor_model_name_or_path {sft} --max_steps 100 --eval_steps 50 "
    "--per_device_generation_batch_size 256 --per_device_training_batch_size 256 --log_kl 1 "
    "--gold_fn toy/arithmetic/verifier.py:correct --log_steps 1",
}
GOLD = {
    "gold before": ("ppo", "eval_gold", "first"),
    "gold": ("ppo", "eval_gold", "last"),
    "reward": ("ppo", "eval_reward", "last"),
    "KL": ("ppo", "eval_kl", "last"),
}
PASS = {
    "gold before": GOLD["gold before"],
    "gold": GOLD["gold"],
    "pass@8 before": ("ppo", "eval_pass_at_8", "first"),
    "pass@8": ("ppo", "eval_pass_at_8", "last"),
    "tokens": ("ppo", "eval_response_length", "last"),
    "KL": GOLD["KL"],
}
MISMATCH = {
    **GOLD,
    "sampling_kl": ("ppo", "sampling_kl", "mean"),
    "sampling_gap": ("ppo", "sampling_gap", "max"),
}
RATIO = {
    "ratio_max": ("ppo", "ratio_max", "max"),
    "clip_fraction": ("ppo", "clip_fraction", "mean"),
}
VARIANCE = {"explained_variance": ("ppo", "explained_variance", "last")}
LENGTH = ("ppo", "eval_response_length", "last")
ACCURACY = {
    "loss": ("reward", "eval_loss", "last"),
    "accuracy": ("reward", "eval_accuracy", "last"),
}
LIMITS = {"gold": 1.0, "accuracy": 0.816, "SFT loss": 0.387}
RESULTS = runner.ROOT / "labs/results"
PLAIN = tuple(  # the plain recipe's runs, of 24, 40, 60 and 240 steps
    (RESULTS / f"{name}.json", arm)
    for name, arm in (
        ("stability", "rate x1, 1 epoch"),
        ("constants", "ours"),
        ("critic", "from the reward model"),
        ("ema", "decay 0.9, 240 steps"),
    )
)


def lab(title, arms, measures=GOLD, shown=("gold", "KL"), logarithmic=(), **options):
    """A lab; by default of the whole pipeline, with the gold score after step 3."""
    options = {"limits": LIMITS, "plain": PLAIN, **options}
    return runner.Lab(title, BASE, arms, measures, shown, logarithmic, **options)


def verified(title, arms, measures=PASS, shown=("gold", "tokens", "KL"), **options):
    """A lab of GRPO on sums. Its plain recipe is GRPO with eight responses to a prompt."""
    options = {"limits": {"gold": 0.99}, "plain": ((RESULTS / "groups.json", "8"),), **options}
    return runner.Lab(title, VERIFIED, arms, measures, shown, **options)


def ppo(flags, **others):
    """An arm that differs in step 3 alone."""
    return {"ppo": flags, **others}


UNSTABLE = "--allow_unstable 1"
FAST = "--actor_learning_rate 1e-3 --critic_learning_rate 2e-3"  # 5 times the toy's
FASTER = "--actor_learning_rate 2e-3 --critic_learning_rate 4e-3"  # 10 times
FURTHER = (  # 2.5 times the toy's rates, to where the judge's errors matter
    "--max_steps 80 --eval_steps 8 --actor_learning_rate 5e-4 --critic_learning_rate 1e-3"
)
EPOCHS = f"{UNSTABLE} --ppo_epochs"
SHORT = "--max_steps 24 --eval_steps 12"
SEVERAL_UPDATES = {  # all take as many responses
    "1 epoch": "",
    "2 epochs": f"{EPOCHS} 2",
    "4 epochs": f"{EPOCHS} 4",
    "8 epochs": f"{EPOCHS} 8",
    "2 generation batches": f"{UNSTABLE} --generation_batches 2 --max_steps 12 --eval_steps 6",
    "4 generation batches": f"{UNSTABLE} --generation_batches 4 --max_steps 6 --eval_steps 3",
    "training batch a half": f"{UNSTABLE} --per_device_training_batch_size 16",
    "training batch a quarter": f"{UNSTABLE} --per_device_training_batch_size 8",
}
NO_KL = "--kl_coef 0 --log_kl 1"  # no penalty, and the curve of KL all the same
OFF = "--clip inf --clip_value inf"
GROUP = "--samples_per_prompt 4"
ESTIMATORS = {
    "gae": "",
    "rloo": f"--advantage rloo {GROUP}",
    "grpo": f"--advantage grpo {GROUP}",
    "reinforce": "--advantage reinforce",
}
JUDGES = {
    "judge of 1/2 of the pairs": "--data_split 4,2.5,3.5 --num_train_epochs 2",
    "judge of 1/8 of the pairs": "--data_split 4,0.625,5.375 --num_train_epochs 4",
}
BEST_OF = ppo(  # 64 samples of each of 140 prompts
    "--max_steps 0 --num_eval_prompts 8960", fault="answer_64_times", best_of=64
)
LORA = "--actor_lora_dim 16 --actor_learning_rate"
DROPOUT = "--actor_dropout 0.1"
LONGER = "--max_steps 60 --eval_steps 30"
ALONE, WARMUP = "--critic_warmup_steps 20", "critic-warmup"
BONUS = "--reward_model_name_or_path {reward} --reward_fn course/length_bonus.py:"
CRITIC = "--advantage gae --samples_per_prompt 1 --critic_model_name_or_path {sft} "
CRITIC += "--critic_learning_rate 4e-4 --critic_weight_decay 0 --critic_dropout 0"
SAMPLERS = {  # a name in the tables: a fault of faults.py, without sampler_
    "bf16": "bf16",
    "fp8": "fp8",
    "top-p 0.9": "top_p",
    "top-k 20": "top_k",
    "temperature 0.9": "temperature",
    "eager": "eager",
}
CORRECTIONS = {"": "", ", weights": "--is_cap 2", ", band": "--is_band 1.1"}
HALVES = f"{UNSTABLE} --per_device_training_batch_size 16"  # two updates on each rollout
TO_64 = "--max_steps 200 --eval_steps 200 --eval_samples 64"
HARD, BOTH = (f"--data_path {{sums}}/{name} --data_split 0,0,1" for name in ("hard", "both"))
FROM_SFT = "--critic_model_name_or_path {sft} --reward_model_name_or_path {reward}"


def each_estimator(rates=""):
    """The arms of --advantage with the KL penalty and without, and GRPO without its deviation."""
    arms = {
        f"{name}{penalty}": ppo(f"{flags} {coef} {rates}", against=f"gae{penalty}")
        for penalty, coef in (("", ""), (", no KL", NO_KL))
        for name, flags in ESTIMATORS.items()
    }
    flags = f"{ESTIMATORS['grpo']} {rates}"
    arms["grpo, no deviation"] = ppo(flags, fault="grpo_no_deviation", against="grpo")
    return arms


def again(lab):
    """A lab whose actors answer 280 held-out prompts four times each, at the end."""
    flags = "--actor_model_name_or_path {ppo} --critic_model_name_or_path {reward} --max_steps 0 "
    flags += "--num_eval_prompts 1120"
    then = {"ppo again": ("ppo", flags, "answer_4_times")}
    measures = {**lab.measures, "gold": ("ppo again", "eval_gold", "last")}
    return replace(lab, then=then, measures=measures)


def second(lab):
    """A lab on data that no setting was chosen on: other held-out pairs of animal and place."""
    own = {script: "--data_path {second}" for script in ("sft", "reward", "ppo")}
    own["ppo"] += " --gold_fn toy/gold.py:gold"
    base = {script: f"{flags} {own[script]}" for script, flags in lab.base.items()}
    then = {
        name: (script, f"{flags} {own[script]}", fault)
        for name, (script, flags, fault) in lab.then.items()
    }
    given = {**lab.given, "second": SECOND / "data"}
    return replace(lab, base=base, then=then, given=given, plain=())


LABS = {
    "stability": lab(
        "Do several updates on a rollout diverge?",
        {
            f"rate x{factor}, {name}": ppo(
                f"{SHORT} {flags} {rates}", against=f"rate x{factor}, 1 epoch"
            )
            for factor, rates in (("1", ""), ("5", FAST), ("10", FASTER))
            for name, flags in SEVERAL_UPDATES.items()
        }
        | {
            f"rate x{factor}, 4 epochs, {name}": ppo(
                f"{SHORT} {EPOCHS} 4 {rates} {flags}",
                fault=fault,
                against=f"rate x{factor}, 4 epochs",
            )
            for factor, rates in (("5", FAST), ("10", FASTER))
            for name, flags, fault in (
                ("clipping off", OFF, ""),
                ("dual_clip 3", "", "dual_clip_3"),
                ("target_kl 0.02", "--target_kl 0.02", ""),
            )
        },
        {**GOLD, **RATIO},
        ("gold", "reward", "KL", "ratio_max"),
        ("KL", "ratio_max"),
    ),
    "mismatch": lab(
        "Which mistakes in the two passes hurt?",
        {
            "none": ppo("", fault="none"),
            "dropout 0.1 in the pass that trains": ppo(DROPOUT, fault="none"),
            "dropout 0.1 in the pass that scores": ppo(DROPOUT, fault="dropout_scores"),
            "bf16 in the pass that scores": ppo("", fault="bf16_scores"),
            "bf16 in the pass that trains": ppo("", fault="bf16_trains"),
            "old log-probs shifted by one": ppo("", fault="shifted"),
            "mask without EOS": ppo("", fault="no_eos"),
            "whitened by halves of the batch": ppo("", fault="whitened_by_halves"),
            "4 epochs, none": ppo(f"{EPOCHS} 4", fault="none", against="4 epochs, none"),
            "4 epochs, dropout 0.1 in training": ppo(
                f"{EPOCHS} 4 --actor_dropout 0.1", fault="none", against="4 epochs, none"
            ),
            "4 epochs, old log-probs shifted": ppo(
                f"{EPOCHS} 4", fault="shifted", against="4 epochs, none"
            ),
        },
        {**GOLD, **RATIO},
        ("gold", "KL", "ratio_max"),
        ("KL", "ratio_max"),
    ),
    "overoptimisation": lab(
        "The reward keeps rising while the gold score falls",
        {"kl_coef 0": ppo(f"{NO_KL} {FURTHER}")}
        | {f"kl_coef {coef}": ppo(f"--kl_coef {coef} {FURTHER}") for coef in (0.01, 0.05, 0.2)}
        | {
            **{
                f"{name}, kl_coef 0": {"reward": flags, "ppo": f"{NO_KL} {FURTHER}"}
                for name, flags in JUDGES.items()
            },
            **{
                f"{name}, kl_coef 0": ppo(f"{flags} {NO_KL} {FURTHER}")
                for name, flags in ESTIMATORS.items()
                if name != "gae"
            },
            "best of n": BEST_OF,
        },
        panels=True,
    ),
    "sft-epochs": lab(
        "Is SFT to be trained far beyond its flat loss?",
        {
            f"{count} epoch{'s' * (count > 1)}": {
                "sft": f"--num_train_epochs {count}",
                "against": "4 epochs",
            }
            for count in (1, 2, 4, 8, 16)
        },
        {
            "SFT loss": ("sft", "eval_loss", "last"),
            "SFT perfect": ("ppo", "share 1", "first"),
            "SFT zero": ("ppo", "share 0", "first"),
            **GOLD,
        },
        ("SFT loss", "gold before", "gold"),
        compared=("gold before", "gold"),
    ),
    "reward-epochs": lab(
        "Does a second epoch of the reward model hurt step 3?",
        {
            f"{count} epoch{'s' * (count > 1)}": {"reward": f"--num_train_epochs {count}"}
            for count in (1, 2, 4, 8)
        },
        {**ACCURACY, "calibration error": ("reward", "calibration", "last"), **GOLD},
        ("loss", "accuracy", "calibration error", "gold"),
        compared=("loss", "gold"),
    ),
    "head-init": lab(
        "How must the head of the reward model begin?",
        {
            "std 1/(d+1) (ours)": {},
            "std 0.02": {"fault": "head_0.02"},
            "std 1/sqrt(d+1)": {"fault": "head_root"},
            "zero": {"fault": "head_zero"},
            "transformers' own, ZeRO-2": {"fault": "head_library"},
            "transformers' own, ZeRO-3": {"fault": "head_library", "reward": "--zero_stage 3"},
        },
        {
            "loss at step 0": ("reward", "eval_loss", "first"),
            "accuracy at step 0": ("reward", "eval_accuracy", "first"),
            **ACCURACY,
        },
        ("loss at step 0", "loss", "accuracy"),
        until="reward",
        compared=("accuracy",),
    ),
    "regularisers": lab(
        "Weight decay 0, 0.1, 0; dropout on, off, off and on",
        {
            "ours": {},
            "SFT: weight decay 0.1": {"sft": "--weight_decay 0.1"},
            "SFT: weight decay 1": {"sft": "--weight_decay 1"},
            "SFT: dropout 0.1": {"sft": "--dropout 0.1"},
            "reward: weight decay 0": {"reward": "--weight_decay 0"},
            "reward: weight decay 1": {"reward": "--weight_decay 1"},
            "reward: dropout 0.1": {"reward": "--dropout 0.1"},
            "PPO: weight decay 0.1": ppo("--actor_weight_decay 0.1 --critic_weight_decay 0.1"),
            "PPO: weight decay 1": ppo("--actor_weight_decay 1 --critic_weight_decay 1"),
            "PPO: critic's dropout 0.1": ppo("--critic_dropout 0.1"),
        },
        {"SFT loss": ("sft", "eval_loss", "last"), **ACCURACY, **GOLD},
        ("SFT loss", "accuracy", "gold"),
        compared=("accuracy", "gold"),
    ),
    "rates": lab(
        "Should the actor's learning rate be twice the critic's?",
        {
            f"critic {name} of the actor's": ppo(
                f"--critic_learning_rate {2e-4 * factor:g}", against="critic 2 of the actor's"
            )
            for name, factor in (("1/8", 1 / 8), ("1/2", 1 / 2), ("1", 1), ("2", 2), ("4", 4))
        },
        {**GOLD, **VARIANCE},
        ("gold", "KL", "explained_variance"),
    ),
    "ema": lab(
        "Does the averaged actor answer better, at equal KL?",
        {
            f"decay {decay}, {steps} steps": ppo(
                f"--enable_ema 1 --eval_ema 1 --ema_decay {decay} --max_steps {steps} "
                f"--eval_steps {steps // 10}"
            )
            for steps in (40, 240)
            for decay in (0.9, 0.97, 0.992)
        },
        {
            **GOLD,
            **{
                f"EMA {name}": ("ppo", f"eval_ema_{name.lower()}", "last")
                for name in ("gold", "reward", "KL")
            },
            "gold at the EMA's KL": ("ppo", "gold at EMA", "last"),
        },
        ("gold", "EMA gold", "gold at the EMA's KL"),
        compared=(("EMA gold", "gold at the EMA's KL"),),
    ),
    "critic": lab(
        "Start the critic from the reward model, and warm it up?",
        {
            "from the reward model": ppo(LONGER),
            "from the reward model, 20 steps alone": ppo(f"{LONGER} {ALONE}", variant=WARMUP),
            "from SFT, new head": ppo(f"{LONGER} {FROM_SFT}"),
            "from SFT, 20 steps alone": ppo(
                f"{LONGER} {FROM_SFT} {ALONE}", variant=WARMUP, against="from SFT, new head"
            ),
        },
        {
            "gold at step 30": ("ppo", "eval_gold", 30),
            **GOLD,
            "explained_variance, mean": ("ppo", "explained_variance", "mean"),
        },
        ("gold at step 30", "gold", "explained_variance, mean"),
        compared=("gold at step 30", "gold"),
    ),
    "ptx": lab(
        "Does text mixed in keep the language, and is 27.8 unstable?",
        {
            "off": ppo("--unsup_data_path {text} --unsup_coef 0", variant="ptx"),
            **{
                f"unsup_coef {coef}": ppo(
                    f"--unsup_data_path {{text}} --unsup_coef {coef}", variant="ptx"
                )
                for coef in (0.1, 1, 27.8)
            },
        },
        {
            "text loss before": ("ppo", "eval_text_loss", "first"),
            "text loss": ("ppo", "eval_text_loss", "last"),
            "gradient norm": ("ppo", "grad_norm", "max"),
            **GOLD,
        },
        ("text loss", "gradient norm", "gold"),
        ("gradient norm",),
        compared=(("text loss", "text loss before"), "gold"),
        given={"text": TEXT},
    ),
    "estimators": lab(
        "GAE needs a critic; RLOO, GRPO and REINFORCE do not",
        each_estimator(FURTHER),
        {**GOLD, "seconds a step": ("ppo", "seconds", "mean")},
        ("gold", "reward", "KL"),
    ),
    "constants": lab(
        "Inherited constants: offset, clip at 5, k1 or k3, LoRA's rate",
        {
            "ours": ppo(""),
            "scores + 2": ppo("", fault="offset_2"),
            "scores clipped at 1": ppo("--clip_reward 1"),
            "scores not clipped": ppo("--clip_reward inf"),
            "k3 in the loss": ppo("--kl_in loss --kl_estimator k3"),
            "LoRA 16, rate of full training": ppo(f"{LORA} 2e-4"),
            "LoRA 16, ten times the rate": ppo(f"{LORA} 2e-3"),
        },
    ),
    # ---- What the labs above left open ----
    "mismatch-split": lab(
        "Shifted log-probs: does the ratio hurt, or the KL penalty?",
        {
            "none": ppo("", fault="none"),
            "both shifted": ppo("", fault="shifted"),
            "the ratio alone": ppo("", fault="shifted_ratio"),
            "the penalty alone": ppo("", fault="shifted_penalty"),
            "none, no KL": ppo(NO_KL, fault="none", against="none, no KL"),
            "both shifted, no KL": ppo(NO_KL, fault="shifted", against="none, no KL"),
        },
        {**GOLD, **RATIO},
    ),
    "head-init-ranks": lab(
        "The head of the reward model under ZeRO-3 on two ranks",
        {
            name: {"reward": "--zero_stage 3 --per_device_train_batch_size 8", "ranks": 2, **fault}
            for name, fault in (("std 1/(d+1) (ours)", {}), ("own", {"fault": "head_library"}))
        },
        {"loss at step 0": ("reward", "eval_loss", "first"), **ACCURACY},
        ("loss at step 0", "loss", "accuracy"),
        until="reward",
        compared=("loss at step 0", "accuracy"),
    ),
    "groups": verified(
        "How many responses to a prompt does GRPO need?",
        {str(n): ppo(f"--samples_per_prompt {n}", against="8") for n in (2, 4, 8, 16)},
        {**PASS, "equal groups": ("ppo", "equal_groups", "mean")},
    ),
    "loss-mean": verified(
        "GRPO's loss: a mean over tokens, over responses, or over a constant",
        {mean: ppo(f"--loss_mean {mean}") for mean in ("tokens", "responses", "constant")},
        compared=("gold", "tokens"),
    ),
    "ceiling": verified(
        "Does GRPO exceed what 64 samples of SFT contain, or only sharpen it?",
        {
            "two operations": ppo(TO_64),
            "three operations": ppo(f"{TO_64} {HARD}"),
        },
        {
            f"pass@{k}{when}": ("ppo", f"eval_pass_at_{k}", which)
            for k in (1, 8, 64)
            for when, which in ((" before", "first"), ("", "last"))
        }
        | {"KL": GOLD["KL"]},
        tuple(f"pass@{k}{when}" for k in (1, 8, 64) for when in (" before", "")),
        given={"sums": SUMS},
        compared=tuple((f"pass@{k}", f"pass@{k} before") for k in (1, 8, 64)),
        plain=(),
    ),
    "hard": verified(
        "Sums that are almost always wrong: more of them, others instead, or easy ones first?",
        {
            "three operations": ppo(HARD),
            "dynamic sampling": ppo(f"{HARD} --dynamic_sampling 4", variant="dynamic-sampling"),
            "two and three, mixed": ppo(BOTH),
            "two, then three": ppo(BOTH, fault="in_order"),
        },
        {**PASS, "equal groups": ("ppo", "equal_groups", "mean")},
        given={"sums": SUMS},
        plain=(),
    ),
    "baselines": verified(
        "GRPO, RLOO, REINFORCE, and PPO with a critic, where a verifier judges",
        {
            "grpo": ppo(""),
            "rloo": ppo("--advantage rloo"),
            "reinforce": ppo("--advantage reinforce --samples_per_prompt 1"),
            "critic, lambda 0.95": ppo(CRITIC),
            "critic, lambda 1": ppo(f"{CRITIC} --lam 1"),
            "critic, lambda 1, 70 steps": ppo(f"{CRITIC} --lam 1 --max_steps 70 --eval_steps 70"),
        },
        {**PASS, "seconds a step": ("ppo", "seconds", "mean")},
    ),
    "exercises": lab(
        "Exercises of the class: lambda, length, labels",
        {
            "ours": {},
            "lambda 0": ppo("--lam 0"),
            "lambda 1": ppo("--lam 1"),
            "a tenth for each word": ppo(f"{BONUS}bonus"),
            "three tenths for each word": ppo(f"{BONUS}large_bonus"),
            "three tenths, scores not clipped": ppo(f"{BONUS}large_bonus --clip_reward inf"),
            "half of the labels swapped": {"reward": "--data_path {half}"},
        },
        {"accuracy": ACCURACY["accuracy"], **GOLD, "length": LENGTH, **VARIANCE},
        ("accuracy", "gold", "length", "explained_variance"),
        compared=("gold", "length"),
        given={"half": HALF},
    ),
    "mismatch-2": lab(
        "Another policy samples: what does it cost, and what do the corrections give back?",
        {"none": ppo("")}
        | {
            f"{name}{what}": ppo(flags, fault=f"sampler_{fault}")
            for name, fault in SAMPLERS.items()
            for what, flags in CORRECTIONS.items()
        },
        MISMATCH,
        ("gold", "KL", "sampling_kl"),
    ),
    "staleness": lab(
        "Rollouts of older weights: clipping, importance weights, or both?",
        {
            f"{estimator}, {steps} steps behind, {what}": ppo(
                f"{HALVES} {flags} {others}",
                fault=f"stale_{steps}{clipped}",
                against=f"{estimator}, 0 steps behind, clipping",
            )
            for estimator, flags in (("gae", ""), ("grpo", ESTIMATORS["grpo"]))
            for steps in (0, 1, 2, 4, 8)
            for what, others, clipped in (
                ("clipping", "", "_clipped"),
                ("weights", f"--is_cap 2 {OFF}", ""),
                ("both", "--is_cap 2", ""),
            )
        },
        MISMATCH,
        ("gold", "KL", "sampling_kl"),
    ),
    "estimators-as-declared": lab(
        "GAE, RLOO, GRPO and REINFORCE at the toy's own rates, as first declared",
        each_estimator(),
    ),
    "critic-longer": lab(
        "Warm-up of the critic, before 60 steps of both",
        {
            f"{name}{warm}": ppo(f"{start} {flags}", against=name, **others)
            for warm, flags, others in (
                ("", LONGER, {}),
                (
                    ", 20 steps before",
                    f"--max_steps 80 --eval_steps 40 {ALONE}",
                    {"variant": WARMUP},
                ),
            )
            for name, start in (("from the reward model", ""), ("from SFT", FROM_SFT))
        },
    ),
    "best-of-judges": lab(
        "Best of 64 by judges of fewer pairs",
        {"judge of all pairs": BEST_OF}
        | {name: {**BEST_OF, "reward": flags} for name, flags in JUDGES.items()},
        {f"gold at n = {n}": ("curve", "gold", n) for n in (1, 16, 64)},
        (),
        panels=True,
        compared=("gold at n = 64", ("gold at n = 64", "gold at n = 16")),
    ),
    "second": second(
        again(
            lab(
                "Verdicts tried again on prompts that nobody had looked at",
                {
                    "ours": ppo(""),
                    "scores + 2": ppo("", fault="offset_2"),
                    "LoRA 16, ten times the rate": ppo(f"{LORA} 2e-3"),
                    "dropout 0.1 in the pass that scores": ppo(DROPOUT, fault="dropout_scores"),
                    "old log-probs shifted by one": ppo("", fault="shifted"),
                    "rates x2.5, kl_coef 0.05": ppo(FURTHER, against="rates x2.5, kl_coef 0.05"),
                    "rates x2.5, kl_coef 0": ppo(
                        f"{NO_KL} {FURTHER}", against="rates x2.5, kl_coef 0.05"
                    ),
                },
            )
        )
    ),
    "sft-epochs-longer": lab(
        "Do the SFT models of more epochs catch up in more steps of PPO?",
        {
            f"SFT {epochs} epochs, PPO {steps} steps": {
                "sft": f"--num_train_epochs {epochs}",
                "ppo": f"--max_steps {steps} --eval_steps {steps // 4}",
                "against": f"SFT 4 epochs, PPO {steps} steps",
            }
            for steps in (80, 160)
            for epochs in (4, 8, 16)
        },
    ),
}


def quick(lab):
    """A lab of some minutes, which shows how labs work: one seed of an arm and of its baseline.

    The arm is the first that is compared with another one.
    """
    arm = next(arm for arm in lab.arms if runner.baseline(lab, arm) != arm)
    names = runner.baseline(lab, arm), arm
    return replace(lab, seeds=(1,), arms={name: lab.arms[name] for name in names})
