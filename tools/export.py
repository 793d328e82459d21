"""Turns a checkpoint into a model: a folder that stock transformers, or peft, loads.

    python tools/export.py output/sft/checkpoints/step-500
    python tools/export.py output/ppo/checkpoints/step-60 --to output/ppo-60

It holds what the run would have saved had it ended at that step, and lies by default beside
checkpoints/, in step-N. One process reads the shards of all ranks: start it without a launcher,
where the run was started, for the flags in args.json may name models by relative paths. Of PPO it
writes actor, critic/ and, with --enable_ema, ema/.
"""

import argparse
import contextlib
import io
import sys
from pathlib import Path

import torch
from deepspeed.utils import zero_to_fp32

import common
from machinery.base import modules, records, refused
from machinery.flags import declaring
from machinery.models import model_folders, saving
from machinery.run import checkpoints


def get_args(argv=None):
    """Reads the command line."""
    parser = declaring.new_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="the folder step-N of a run")
    parser.add_argument("--to", type=Path, help="the folder to write; by default beside it")
    args = parser.parse_args(argv)
    args.to = args.to or args.checkpoint.absolute().parent.parent / args.checkpoint.name
    return args


def read_run(checkpoint):
    """Returns the flags of the run that wrote a checkpoint, and what its ranks saved, in order."""
    if damaged := checkpoints.damage(checkpoint):
        what = f"Missing, cut short or changed: {', '.join(damaged)}"
        inside = ", ".join(map(str, sorted(checkpoint.glob("checkpoints/step-*"))))
        what = f"Its checkpoints: {inside}" if inside else what
        refused.fail(f"{checkpoint} is no whole checkpoint.\n  {what}")
    record = records.read(checkpoint.absolute().parent.parent)
    if "script" not in record:
        refused.fail(f"{checkpoint}: there is no args.json of a run above checkpoints/.")
    if record["tensor_parallel_size"] > 1:
        advice = "Go on with --resume; a run saves its model at its end."
        refused.fail(f"{checkpoint} was written with --tensor_parallel_size above 1.\n  {advice}")
    files = [checkpoint / f"rank{i}.pt" for i in range(len([*checkpoint.glob("rank*.pt")]))]
    return argparse.Namespace(**record), [checkpoints.read(file, mmap=True) for file in files]


def read_weights(folder, stage):
    """Returns {name: whole tensor} of an engine: as forwards have them, or at stage 3 in fp32."""
    if stage < 3:
        file = zero_to_fp32.get_model_state_file(folder / "state", stage)
        return torch.load(file, weights_only=False, map_location="cpu", mmap=True)["module"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="state")


def load_engine(args, folder, stage, tokenizer, value_head):
    """Returns the model of an engine, with the weights of the checkpoint.

    args: the flags of this model. folder: the engine's, in the checkpoint.
    """
    model = common.load_model(args, tokenizer, value_head)
    missing, unexpected = model.load_state_dict(read_weights(folder, stage), strict=False)
    own = {name for name, _ in model.named_parameters()}  # a tied weight counts once
    if strangers := sorted(own.intersection(missing).union(unexpected)):
        why = f"is not of the model that {args.model_name_or_path} is now"
        refused.fail(f"{folder} {why}: {', '.join(strangers[:3])}.")
    return model


def join_average(saved):
    """Returns full_tensor(name, parameter) for saving.save_model: the average of the actor.

    saved: what each rank saved. A weight's shards are 1-d, padded at the end to equal shares.
    """
    shards = [rank["state"]["ema"] for rank in saved]

    def full_tensor(name, parameter):
        if name not in shards[0]:  # frozen
            return parameter.detach()
        flat = torch.cat([part[name] for part in shards])[: parameter.numel()]
        return flat.view(parameter.shape).to(parameter.dtype)

    return full_tensor


def export(checkpoint, to):
    """Writes the models of a checkpoint to the folder `to`."""
    args, saved = read_run(checkpoint)
    if saving.is_whole(to):
        refused.fail(f"{to} holds a model.\n  Name another folder with --to.")
    shape = saved[0]["shape"]
    roles = {name: "" if name == "model" else name for name in shape if name != "ranks"}
    first = declaring.of_role(args, next(iter(roles.values()))).model_name_or_path
    tokenizer = model_folders.load_tokenizer(first, args)  # the model's or the actor's
    tokenizer.eos_token = saved[0].get("eos_token", tokenizer.eos_token)
    for engine, role in reversed(roles.items()):  # the actor last: it marks the folder as whole
        own = declaring.of_role(args, role, zero_stage=0, gradient_checkpointing=False)
        head = "score" if engine == "critic" else vars(args).get("value_head_prefix")
        model = load_engine(own, checkpoint / engine, shape[engine], tokenizer, head)
        if engine == "model" and saved[0].get("score_statistics"):
            config = modules.unwrap_model(model).config
            config.score_statistics = saved[0]["score_statistics"]
        if engine == "actor" and saved[0]["state"].get("ema"):
            saving.save_model(model, tokenizer, to / "ema", join_average(saved))
        saving.save_model(model, tokenizer, to / ("critic" if engine == "critic" else ""))
    print(f"{to} holds the model of {checkpoint.name}")


if __name__ == "__main__":
    arguments = get_args()
    export(arguments.checkpoint, arguments.to)
    sys.exit(0)
