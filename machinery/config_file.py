"""ds_config.json: what may stand in it, and its monitors (TensorBoard, W&B, Comet, CSV)."""

import json
from importlib.util import find_spec
from pathlib import Path

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig

from machinery.refused import Refused

FLAGS_DECIDE = """optimizer scheduler bf16 fp16 gradient_clipping train_batch_size
                  train_micro_batch_size_per_gpu gradient_accumulation_steps
                  managed_gradient_accumulation""".split()
# The monitors, and the module that each needs.
MONITORS = dict(tensorboard="tensorboard", wandb="wandb", comet="comet_ml", csv_monitor="csv")


def read_config(args):
    """Returns the dict of --ds_config; refuses what flags decide, and what DeepSpeed refuses."""
    named = f"--ds_config {args.ds_config}"
    try:
        config = json.loads(Path(args.ds_config).read_text())
        parsed(config)
    except Exception as error:  # of many kinds: no file, no JSON, an unknown key, another type
        raise Refused("ds-config", f"{named} cannot be used.\n  {error}") from None
    zero = config.setdefault("zero_optimization", {})
    decided = [key for key in FLAGS_DECIDE if key in config]
    decided += ["zero_optimization.stage"] * ("stage" in zero)
    if decided:
        raise Refused("ds-config-flag", f"{named} sets {', '.join(decided)}.\n  Flags decide that.")
    for key, module in MONITORS.items():
        if config.get(key, {}).get("enabled") and not find_spec(module):
            raise Refused("ds-config", f"{named} needs {module}, which is not installed.")
    return config


def parsed(config):
    """Returns DeepSpeed's own object of a config, which it checks; a batch size must be there."""
    return DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})


def of_engine(args):
    """Returns the dict of --ds_config without its monitors: engines feed none, see `opened`."""
    return {key: value for key, value in read_config(args).items() if key not in MONITORS}


def opened(args):
    """Returns DeepSpeed's monitors as --ds_config has them; engines feed none.

    DeepSpeed's own events (the learning rate, which we log, too) count samples instead of steps,
    and W&B drops what comes at a lower number than the last. And an engine would open its files
    before the run has taken its output folder. Files go to --output_dir, unless ds_config.json
    names another place.
    """
    config = read_config(args)
    for name in config.keys() & {"tensorboard", "csv_monitor"}:
        config[name].setdefault("output_path", args.output_dir)
    return MonitorMaster(parsed(config).monitor_config)
