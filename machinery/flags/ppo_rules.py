"""PPO's own rules, beside those of all scripts in rules.py. `ppo_flags.resolve` checks them."""

from machinery.flags.rules import stages_of


def whole_actor(args):
    """Returns whether each rank has all weights of the actor: neither stage 3 nor shared layers."""
    return 3 not in stages_of(args, "actor") and args.tensor_parallel_size == 1


def of_ppo(args):
    """Yields PPO's own rules."""
    stages = stages_of(args)
    generated = args.per_device_generation_batch_size
    trained = args.per_device_training_batch_size

    words = (
        "{per_device_generation_batch_size} must be divisible by {samples_per_prompt}, and times "
        "{generation_batches} by {per_device_training_batch_size}."
    )
    broken = generated * args.generation_batches % trained or generated % args.samples_per_prompt
    yield "batches-divide", broken, words
    words = "{advantage} compares the responses to a prompt.\n  Use --samples_per_prompt 4."
    yield "group-of-one", args.compares_groups and args.samples_per_prompt < 2, words
    words = "--stop has an empty text, which stands in every response: all would have one token."
    yield "empty-stop", "" in args.stop, words
    words = "{advantage} has a critic: give --critic_model_name_or_path, --critic_learning_rate."
    critic = args.critic_model_name_or_path, args.critic_learning_rate
    yield "no-critic", args.has_critic and None in critic, words

    # DeepSpeed-Chat reports divergence where this is broken, and leaves open why. While it holds,
    # the weights that train are those that sampled: the ratio is 1, clipping never acts, and this
    # is a policy gradient with a baseline. labs/stability.md tries it.
    one_update = generated == trained and args.ppo_epochs == args.generation_batches == 1
    words = (
        "{per_device_generation_batch_size} and {per_device_training_batch_size} must be equal, "
        "{ppo_epochs} and {generation_batches} 1: else DeepSpeed-Chat reports divergence.\n  Use "
        "--gradient_accumulation_steps for a larger batch; --allow_unstable 1 lifts this."
    )
    yield "unstable", not one_update and not args.allow_unstable, words

    words = "{kl_in} {kl_estimator}: its expected gradient is 0.\n  Use k2 or k3."
    yield "k1-in-loss", args.kl_in == "loss" and args.kl_estimator == "k1", words
    without_kl = args.kl_target is not None and args.kl_target * args.kl_coef <= 0
    yield "kl-target-without-kl", without_kl, "{kl_target} and {kl_coef} must be above 0."
    several_judges = args.reward_fn or len(args.reward_model_name_or_path) > 1
    words = "--normalize_reward scales the scores of one reward model alone."
    yield "normalize-reward", args.normalize_reward and several_judges, words
    words = "--deepcompile compiles one model, and PPO trains two."
    yield "deepcompile-in-ppo", args.deepcompile, words
    words = "--compile_decoding needs a whole actor: no stage 3, no --tensor_parallel_size."
    yield "compile-decoding-shards", args.compile_decoding and not whole_actor(args), words
    stays = args.offload or 0 in stages or (args.dtype == "bf16" and 1 in stages)
    words = "--offload_states needs --zero_stage 2 or 3 (1 in fp32), and no --offload."
    yield "state-offload", args.offload_states and stays, words
