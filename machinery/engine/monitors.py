"""ds_config.json: what may stand in it, and its monitors (TensorBoard, W&B, Comet, CSV)."""

import json
from pathlib import Path

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig

from machinery.base.refused import Refused

FLAGS_DECIDE = """optimizer scheduler bf16 fp16 gradient_clipping train_batch_size
                  train_micro_batch_size_per_gpu gradient_accumulation_steps
                  managed_gradient_accumulation zero_optimization.stage""".split()
MONITORS = "tensorboard", "wandb", "comet", "csv_monitor"


def read_config(args, main):
    """Returns the dict of --ds_config; refuses what flags decide, and what DeepSpeed refuses.

    The monitors write into their output_path, by default --output_dir. main False: without them,
    for an engine.
    """
    named = f"--ds_config {args.ds_config}"
    try:
        config = json.loads(Path(args.ds_config).read_text())
        DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # of many kinds: no file, no JSON, an unknown key, another type
        why = " ".join(str(error).split()[:40])
        raise Refused("ds-config", f"{named} cannot be used.\n  {why}") from None
    zero = config.setdefault("zero_optimization", {})
    given = {*config, *(f"zero_optimization.{key}" for key in zero)}
    if taken := sorted(given & set(FLAGS_DECIDE)):
        advice = "Flags decide that (--learning_rate, --dtype, --zero_stage, ...). Take it out."
        raise Refused("ds-config-flag", f"{named} sets {', '.join(taken)}.\n  {advice}")
    for name in config.keys() & set(MONITORS):
        if not main:
            config[name] = {"enabled": False}
        elif name in ("tensorboard", "csv_monitor"):
            config[name]["output_path"] = config[name].get("output_path") or args.output_dir
    return config


def opened(args):
    """Returns DeepSpeed's monitors as --ds_config has them; engines themselves feed none.

    DeepSpeed's own events (the learning rate, which we log, too) count samples instead of steps,
    and W&B drops what comes at a lower number than the last. And an engine would open its files
    before the run has taken its output folder.
    """
    config = {**read_config(args, True), "train_micro_batch_size_per_gpu": 1}
    return MonitorMaster(DeepSpeedConfig(config).monitor_config)
