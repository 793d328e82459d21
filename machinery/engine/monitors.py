"""ds_config.json: what may stand in it, and its monitors (TensorBoard, W&B, Comet, CSV)."""

import importlib.util
import json
from pathlib import Path

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig

from machinery.base import refused

FLAGS_DECIDE = """optimizer scheduler bf16 fp16 gradient_clipping train_batch_size
                  train_micro_batch_size_per_gpu gradient_accumulation_steps
                  managed_gradient_accumulation zero_optimization.stage""".split()
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml", "csv_monitor": ""}


def read_config(args, main):
    """Returns the dict of --ds_config; refuses what flags decide, and what DeepSpeed would.

    The monitors write into their output_path, by default --output_dir. main False: without them,
    for an engine.
    """
    named = f"--ds_config {args.ds_config}"
    try:
        config = json.loads(Path(args.ds_config).read_text())
    except (OSError, ValueError) as error:
        refused.fail(f"{named}: {error}")
    if not isinstance(config, dict):
        refused.fail(f"{named} holds no JSON object.\n  DeepSpeed's config is one: {{...}}.")
    zero = config.setdefault("zero_optimization", {})
    inner = zero if isinstance(zero, dict) else ()
    given = {*config, *(f"zero_optimization.{key}" for key in inner)}
    if taken := sorted(given & set(FLAGS_DECIDE)):
        decide = "(--learning_rate, --dtype, --zero_stage, --per_device_..., see --help)"
        advice = f"Flags decide that {decide}. Take it out."
        refused.fail(f"{named} sets {', '.join(taken)}.\n  {advice}")
    try:
        wanted = DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1}).monitor_config
    except Exception as error:  # of many kinds: a key it does not know, a value of another type
        why = " ".join(str(error).split()[:40])
        refused.fail(f"{named}: DeepSpeed does not take it.\n  {why}")
    every = config.get("steps_per_print")  # DeepSpeed does not look at it, and divides by it
    if every is not None and not (isinstance(every, int) and every > 0):
        refused.fail(f"{named}: steps_per_print {every!r} must be an integer above 0.")
    for name in PACKAGES.keys() & config.keys():
        if not main:
            config[name] = {"enabled": False}
            continue
        package = getattr(wanted, name).enabled and PACKAGES[name]
        if package and not importlib.util.find_spec(package):
            advice = f"pip install {package}, or disable it."
            refused.fail(f"{named}: {name} is enabled, and its package missing.\n  {advice}")
        if name in ("tensorboard", "csv_monitor"):
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
