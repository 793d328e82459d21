"""How fast a step was: tokens, FLOPs and seconds; and its learning rate and gradient norm."""

from machinery.base import modules, ranks


def work(args, engines, micro_batches):
    """Returns the tokens of a step and its FLOPs, over all ranks, without padding and fillers.

    Counted is one forward and one backward of each engine. What else a step of PPO does (the
    rollout, forwards that only score, further epochs) takes time and counts nothing.

    micro_batches: with counts(), see common.Layout.
    """
    counts = zip(*(batch.counts() for batch in micro_batches))
    tokens, rows = ranks.all_sum(*map(sum, counts)).tolist()
    return tokens, tokens * sum(flops_per_token(args, each, tokens / rows) for each in engines)


def flops_per_token(args, engine, length):
    """Returns the FLOPs of a forward and a backward, for a token in a row of `length` tokens.

        forward    2 N + 4 * layers * hidden * length     (PaLM, Chowdhery et al. 2022, appendix B)
        backward   twice that, so 6 N in all; with LoRA only adapters have gradients of their own

    N: the weights, without an input embedding that is looked up only. With gradient checkpointing
    the forward is made twice.
    """
    model = modules.unwrap_model(engine)
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    looked_up = model.get_input_embeddings().weight
    tied = output is not None and output.weight is looked_up
    weights = [weight for weight in model.parameters() if tied or weight is not looked_up]
    size = sum(map(modules.size_of, weights))
    trained = sum(modules.size_of(weight) for weight in weights if weight.requires_grad)
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    forwards = 2 if args.gradient_checkpointing else 1
    return 2 * (forwards + 1) * (size + attention) + 2 * (trained + attention)


def grad_norm(args, engine):
    """Returns the norm of the gradient before clipping, or None where fp16 skipped the step."""
    norm = engine.get_global_grad_norm()
    skipped = args.dtype == "fp16" and not engine.was_step_applied()
    return None if norm is None or skipped else float(norm)


def learning_rate(engine):
    """Returns the rate of the step just made."""
    schedule = engine.lr_scheduler
    # its schedule has moved on, unless fp16 skipped the step
    step = max(0, schedule.last_epoch - engine.was_step_applied())
    return float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step))


def speed(tokens, flops, seconds):
    """Returns the metrics of a step that took `seconds`.

    tokens, without padding, and flops are of all ranks; "tflops" is per device.
    """
    return {
        "tokens_per_second": tokens / seconds,
        "tflops": flops / seconds / ranks.get_world_size() / 1e12,
        "seconds": seconds,
    }
