"""How fast a step was: tokens, FLOPs and seconds; and its learning rate and gradient norm."""

import time

from machinery import model_folders, ranks


def train_flops(engine, tokens, length, checkpointing):
    """Returns the FLOPs of forward and backward on `tokens` tokens, in rows of `length`.

    They are 3 times those of the forward, 4 times with checkpointing. The forward takes, per token,
    2 for each weight in a matrix product, and 4 * layers * hidden * length in attention (PaLM,
    Chowdhery et al. 2022, appendix B). The input embedding is a look-up: it counts only if it is
    also the output matrix.
    """
    model = model_folders.unwrap_model(engine)
    config = model.config.get_text_config()
    weights = model_folders.count_parameters(model)
    if model.get_output_embeddings() is None or not config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= getattr(embedding, "ds_numel", embedding.numel())
    attention = 4 * config.num_hidden_layers * config.hidden_size * length
    return tokens * (2 * weights + attention) * (4 if checkpointing else 3)


def grad_norm(args, engine):
    """Returns the norm of the gradient before clipping, or None where fp16 skipped the step."""
    norm = engine.get_global_grad_norm()
    skipped = args.dtype == "fp16" and not engine.was_step_applied()
    return None if norm is None or skipped else float(norm)


def speed(args, engine, tokens, flops, started):
    """Returns the metrics that every step logs. The step began at the time `started`.

    tokens, without padding, and flops are of all ranks; "tflops" is per device.
    """
    seconds, schedule = time.time() - started, engine.lr_scheduler
    # the rate of the step just made: its schedule has moved on, unless fp16 skipped the step
    step = max(0, schedule.last_epoch - engine.was_step_applied())
    return {
        "learning_rate": float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step)),
        "grad_norm": grad_norm(args, engine),
        "tokens_per_second": tokens / seconds,
        "tflops": flops / seconds / ranks.get_world_size() / 1e12,
        "seconds": seconds,
    }
