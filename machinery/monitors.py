"""ds_config.json: what may stand in it, and its monitors (TensorBoard, W&B, CSV)."""

import json
from pathlib import Path

from machinery import errors

FLAGS_DECIDE = """optimizer scheduler bf16 fp16 gradient_clipping train_batch_size
                  train_micro_batch_size_per_gpu gradient_accumulation_steps
                  managed_gradient_accumulation zero_optimization.stage""".split()


def read_config(args, main):
    """Returns the dict of --ds_config; refuses what flags decide.

    The monitors write into --output_dir. main False: this engine feeds none.
    """
    try:
        config = json.loads(Path(args.ds_config).read_text())
    except (OSError, ValueError) as error:
        errors.fail(f"--ds_config {args.ds_config}: {error}")
    zero = config.setdefault("zero_optimization", {})
    given = set(config) | {f"zero_optimization.{key}" for key in zero}
    if taken := sorted(given & set(FLAGS_DECIDE)):
        decide = "(--learning_rate, --dtype, --zero_stage, --per_device_..., see --help)"
        advice = f"Flags decide that {decide}. Take it out."
        errors.fail(f"--ds_config {args.ds_config} sets {', '.join(taken)}.\n  {advice}")
    for name in {"tensorboard", "csv_monitor", "wandb"} & set(config):
        if not main:
            config[name] = {"enabled": False}
        elif name != "wandb":
            config[name]["output_path"] = args.output_dir
    return config
