"""Declares ppo.py's flags beyond the papers', fills in what is left open, and checks its models."""

import contextlib

from machinery import flags, folders, ranks
from machinery.refused import Refused

# ppo.py has forms of its own: actor_..., critic_..., max_prompt_seq_len, ...
OWN_FORMS = """model_name_or_path learning_rate weight_decay dropout lora_dim max_seq_len
               per_device_train_batch_size""".split()


def add_options(parser):
    """Declares the options of ppo.py, and what all scripts share."""
    arg = flags.flag_group(parser, "PPO: options that change the result")
    function = "f(prompts, completions, **columns) returns a number a response, or one a token"
    arg("reward_fn", str, function, nargs="+", metavar="FILE:FUNCTION")
    arg("gold_fn", str, "a function like --reward_fn's, only logged", metavar="FILE:FUNCTION")
    arg("allow_mismatch", 0, "1: warn, and go on, if scoring differs from sampling", most=1)
    arg("log_kl", 0, "1: keep the reference with --kl_coef 0, to log KL", most=1)
    arg("enable_ema", 0, "1: keep an average of the actor's weights, in ema/", most=1)
    arg("ema_decay", 0.992, "decay of --enable_ema's average. 0.992 [DeepSpeed-Chat]", most=1)
    for role in ("actor", "critic"):
        rate = f"peak; {flags.LORA_RATE}"
        arg(f"{role}_learning_rate", float, rate, needed=role == "actor")
        arg(f"{role}_weight_decay", 0.0, "decoupled (AdamW); matrices only")
        arg(f"{role}_dropout", float, "every dropout; None: what its config says", most=1)
        arg(f"{role}_lora_dim", 0, flags.LORA)
    add_sampling_flags(arg)
    arg = flags.flag_group(parser, "PPO: options that change only speed and memory")
    for role, frozen in (("actor", "reference"), ("critic", "judges")):
        which = f"of {role} and {frozen}; None: --zero_stage"
        arg(f"{role}_zero_stage", int, which, choices=flags.STAGES)
    together = "responses decoded at a time; None: all of a step on a rank"
    arg("rollout_batch_size", int, together, least=1)
    arg("share_prompt", 1, "1: compute a prompt once for --samples_per_prompt responses", most=1)
    arg("offload_states", False, "optimizer states wait on the CPU during a rollout")
    arg("microscope", 4, "held-out prompts in tokens.jsonl")
    flags.add_common_flags(parser, OWN_FORMS)


def add_sampling_flags(arg):
    """Declares how responses are sampled."""
    arg("top_p", 1.0, "nucleus sampling; 1: off", least=1e-6, most=1)
    arg("top_k", 0, "sample from the k likeliest; 0: off")
    arg("num_eval_prompts", 128, "held-out prompts answered at each evaluation", least=1)
    arg("eval_samples", 1, "responses to each: pass@k, k = 1, 2, 4, ...", least=1)


def resolve(args, advantages, responses):
    """Returns the flags with what they leave open, and checks PPO's rules.

    advantages: {name: object with needs_critic, compares_groups and whitens}. responses: of a
    rollout, on one rank. The judges become lists.
    """
    advantage = advantages[args.advantage]
    args.has_critic = advantage.needs_critic
    args.compares_groups = advantage.compares_groups
    args.has_reference = bool(args.kl_coef or args.log_kl)
    left_open = {
        "whiten": advantage.whitens,
        "kl_estimator": "k3" if args.kl_in == "loss" else "k1",
        "actor_zero_stage": args.zero_stage,
        "critic_zero_stage": args.zero_stage,
        "reward_fn": [],
        "reward_model_name_or_path": [] if args.reward_fn else [args.critic_model_name_or_path],
        "rollout_batch_size": responses,
    }
    for name, value in left_open.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.max_seq_len = args.max_prompt_seq_len + args.max_answer_seq_len
    args.offload_states &= not args.adam_offload  # with it they live on the CPU anyway
    flags.refuse_broken(args, rules_of_ppo)
    if args.top_p < 1 or args.top_k:
        ranks.say("warning: --top_p or --top_k: KL is not the sampler's, may be below 0")
    if args.kl_coef and args.advantage == "grpo" and args.kl_in == "reward":
        ranks.say("warning: grpo scales up KL in rewards; use --kl_in loss: docs/grpo.md")
    return args


# ---- Rules ----
def rules_of_ppo(args):
    """Yields PPO's own rules."""
    stages = flags.stages_of(args)
    generated = args.per_device_generation_batch_size
    trained = args.per_device_training_batch_size

    # A micro-batch may hold whole groups of responses, or a group several micro-batches.
    few, many = sorted([generated, args.samples_per_prompt])
    whole = generated * args.gradient_accumulation_steps * args.generation_batches
    words = "One must divide the other: {samples_per_prompt}, {per_device_generation_batch_size}."
    yield "batches-divide", many % few, words
    words = f"A rank's {whole} responses of a step are not whole groups of {{samples_per_prompt}}."
    yield "batches-divide", whole % many, f"{words}\n  Raise {{gradient_accumulation_steps}}."
    words = (
        "{per_device_generation_batch_size} times {generation_batches} must be divisible by "
        "{per_device_training_batch_size}."
    )
    yield "batches-divide", generated * args.generation_batches % trained, words
    words = "{advantage} compares the responses to a prompt.\n  Use --samples_per_prompt 4."
    yield "group-of-one", args.compares_groups and args.samples_per_prompt < 2, words
    words = "{advantage} has a critic: give --critic_model_name_or_path, --critic_learning_rate."
    critic = args.critic_model_name_or_path, args.critic_learning_rate
    yield "no-critic", args.has_critic and None in critic, words

    # DeepSpeed-Chat reports divergence where this is broken, and leaves open why. While it holds,
    # the weights that train are those that sampled: the ratio is 1, clipping never acts, and this
    # is a policy gradient with a baseline. course/labs/stability.md tries it.
    one_update = generated == trained and args.ppo_epochs == args.generation_batches == 1
    words = (
        "{per_device_generation_batch_size} and {per_device_training_batch_size} must be equal, "
        "{ppo_epochs} and {generation_batches} must be 1: else DeepSpeed-Chat reports divergence.\n"
        "  Use --gradient_accumulation_steps for a larger batch; --allow_unstable 1 lifts this."
    )
    yield "unstable", not one_update and not args.allow_unstable, words

    words = "{kl_in} {kl_estimator}: its expected gradient is 0.\n  Use k2 or k3."
    yield "k1-in-loss", args.kl_in == "loss" and args.kl_estimator == "k1", words
    words = "--deepcompile compiles one model, and PPO trains two."
    yield "deepcompile-in-ppo", args.deepcompile, words
    stays = args.offload or 0 in stages or (args.dtype == "bf16" and 1 in stages)
    words = "--offload_states needs --zero_stage 2 or 3 (1 in fp32), and no --offload."
    yield "state-offload", args.offload_states and stays, words


# ---- Models ----
def check_models(args, tokenizer, in_chats=False):
    """Ends with an error, before any model is loaded, if they do not fit each other.

    All have one vocabulary, the actor writes, the judges score. in_chats: the prompts are chats,
    which the judges read as the actor's template renders them.
    """
    critics = [args.critic_model_name_or_path] if args.has_critic else []
    judges = args.reward_model_name_or_path
    folders.has_weights(args.actor_model_name_or_path, needed=True)
    for path in critics + judges:
        folders.has_weights(path, needed=True)
        config = folders.load_config(path, args.trust_remote_code)
        other = folders.load_tokenizer(path, args)
        # A judge reads its score at EOS, in chats at the end of turn
        other_eos = path in judges and other.eos_token != tokenizer.eos_token
        if other_eos or other.get_vocab() != tokenizer.get_vocab():
            words = f"{path} has another vocabulary or EOS ({other.eos_token}) than the actor "
            words += f"({tokenizer.eos_token})."
            raise Refused("other-vocabulary", f"{words}\n  Run reward.py on the actor.")
        if path in judges:
            folders.refuse_other_kind(path, config, scores=True)
            theirs = probe(other)
            if in_chats and theirs is None:
                words = "has no chat template for such chats: it will read them in the actor's"
                ranks.say(f"{path} {words}")
            elif in_chats and theirs != probe(tokenizer):
                words = f"{path} was trained on chats in another template than the actor's."
                raise Refused("other-template", f"{words}\n  Run reward.py on the actor.")


def probe(tokenizer):
    """Returns a chat as the tokenizer's template renders it; None where it renders none."""
    turns = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]
    with contextlib.suppress(Exception):  # there is no template, or it refuses such a chat
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
