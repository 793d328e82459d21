"""Turns a checkpoint into a model: a folder that stock transformers, or peft, loads.

    python tools/export.py output/sft/checkpoints/step-500
    python tools/export.py output/ppo/checkpoints/step-60 --to output/ppo-60
    python tools/export.py output/sft --card

It holds what the run would have saved had it ended at that step, and lies by default beside
checkpoints/, in step-N. Of PPO it is actor, critic/ and, with --enable_ema, ema/. A run with
--lora_dim saves adapters; --merge adds them to the weights, which gives a plain model. One process
reads the shards of all ranks: start it without a launcher, where the run was started, for the flags
in args.json may name models by relative paths.

With --card it exports nothing, but writes the model card, README.md, of a model that a run has
saved: what who uploads it needs. A model that is exported gets its card at once.

A checkpoint may be another's, so nothing in it runs. One that names functions or classes which
none of ours needs is refused, and the code of a model runs only with --trust_remote_code on this
command line, whatever args.json says.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from deepspeed.utils import zero_to_fp32
from safetensors import SafetensorError

import common
from machinery import checkpoints, flags, folders, launch, saving
from machinery.refused import Refused, program, read_json
from tools import model_card

# What DeepSpeed and we save beside what torch.load(weights_only=True) takes. None runs code.
KNOWN = """
numpy.ndarray numpy.dtype numpy._core.multiarray._reconstruct numpy.core.multiarray._reconstruct
deepspeed.runtime.fp16.loss_scaler.LossScaler deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
deepspeed.runtime.zero.config.ZeroStageEnum deepspeed.utils.tensor_fragment.fragment_address
"""


def get_args(argv=None):
    """Reads the command line."""
    parser = flags.new_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="the folder step-N of a run")
    parser.add_argument("--to", help="the folder to write; by default beside checkpoints/")
    parser.add_argument("--merge", action="store_true", help="add LoRA's adapters to the weights")
    card = "write README.md of the model in this folder of a run instead"
    parser.add_argument("--card", action="store_true", help=card)
    code = "run the Python code that comes with a model"
    parser.add_argument("--trust_remote_code", action="store_true", help=code)
    args = parser.parse_args(argv)
    beside = args.checkpoint.absolute().parent.parent / args.checkpoint.name
    args.to = beside if args.to is None else args.to
    return args


def refuse_code(checkpoint):
    """Refuses a checkpoint that names functions or classes which it has no need of."""
    for file in sorted(checkpoint.rglob("*.pt")):
        try:
            named = {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
        except Exception as error:  # of many kinds: it is written otherwise than torch.save does
            named = {str(error)}
        if strange := ", ".join(named.difference(KNOWN.split()))[:300]:
            words = f"{file} may run code when it is read: {strange}."
            advice = "If you trust it, go on with --resume: a run saves its model at its end."
            raise Refused("foreign-checkpoint", f"{words}\n  {advice}")


def read_run(checkpoint):
    """Returns the flags of the run that wrote a checkpoint, and what its ranks saved, in order."""
    if not (checkpoint / checkpoints.DONE).exists():
        words = f"{checkpoint} is no whole checkpoint, step-N: it has no file `{checkpoints.DONE}`."
        raise Refused("no-checkpoint", words)
    refuse_code(checkpoint)
    record = read_json(checkpoint.absolute().parent.parent)
    if record.get("tensor_parallel_size") != 1:
        words = f"{checkpoint}: there must be a run's args.json above checkpoints/, and in it"
        advice = "Else go on with --resume: a run saves its model at its end."
        raise Refused("no-run", f"{words} tensor_parallel_size 1.\n  {advice}")
    files = [checkpoint / f"rank{i}.pt" for i in range(len([*checkpoint.glob("rank*.pt")]))]
    return argparse.Namespace(**record), [checkpoints.read(file) for file in files]


def read_weights(folder, stage):
    """Returns {name: whole tensor} of what an engine trains.

    They are as forwards have them, or at stage 3 in fp32.
    """
    if stage < 3:
        file = zero_to_fp32.get_model_state_file(folder / "state", stage)
        return checkpoints.read(file)["module"]
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with silent[0], silent[1], contextlib.chdir(folder):  # a path with [ would be a pattern
        return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(".", tag="state")


def load_engine(args, folder, stage, tokenizer, value_head):
    """Returns the model of an engine, with the weights of the checkpoint.

    args: the flags of this model. folder: the engine's, in the checkpoint.
    """
    model = common.load_model(args, tokenizer, value_head)
    missing, unexpected = model.load_state_dict(read_weights(folder, stage), strict=False)
    # a tied weight counts once; one that is frozen is the base's
    own = {name for name, weight in model.named_parameters() if weight.requires_grad}
    if strangers := sorted(own.intersection(missing).union(unexpected)):
        why = f"is not of the model that {args.model_name_or_path} is now"
        raise Refused("another-model", f"{folder} {why}: {', '.join(strangers[:3])}.")
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


def export(checkpoint, to, merge=False, trust_remote_code=False):
    """Writes the models of a checkpoint to the folder `to`, which comes to be when all is written.

    merge: plain models, also of LoRA. trust_remote_code: run the code of a model's own.
    """
    to = Path(to)
    args, saved = read_run(checkpoint)
    in_use = any(to.iterdir()) if to.is_dir() else to.exists()
    if in_use or to.resolve().is_relative_to(checkpoint.resolve().parent):
        words = f"{to} is there, and not empty, or it lies among checkpoints."
        raise Refused("target-in-use", f"{words}\n  Name a new folder with --to.")
    args.trust_remote_code = trust_remote_code
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=".export-") as aside:
            new = Path(aside) / "new"
            write_models(args, saved, checkpoint, new, merge)
            new.rename(to)
    except (OSError, SafetensorError) as error:
        words = f"{to} could not be written, or {checkpoint} not be read: {error}"
        raise Refused("not-exported", f"{words}\n  Nothing is left of it.") from error


def write_models(args, saved, checkpoint, folder, merge):
    """Writes every model of a checkpoint. args, saved: what read_run returns."""
    shape = saved[0]["layout"]["shape"]
    roles = {name: "" if name == "model" else name for name in shape if name != "ranks"}
    first = flags.of_role(args, next(iter(roles.values()))).model_name_or_path
    load = folders.load_tokenizer
    in_chats = load(first, args).eos_token != saved[0]["eos_token"]
    tokenizer = load(first, args, in_chats)  # the model's or the actor's
    for engine, role in roles.items():
        own = flags.of_role(args, role)
        own = flags.with_flags(own, zero_stage=0, gradient_checkpointing=False)
        head = "score" if engine == "critic" else vars(args).get("value_head_prefix")
        model = load_engine(own, checkpoint / engine, shape[engine], tokenizer, head)
        to = folder / "critic" if engine == "critic" else folder
        options = {"notes": saved[0]["notes"], "merge": merge}
        if engine == "actor" and saved[0]["state"].get("ema"):
            average = join_average(saved)
            saving.save_model(model, tokenizer, folder / "ema", average, **options)
        saving.save_model(model, tokenizer, to, **options)


def write_cards(to, checkpoint):
    """Writes the model cards of what was exported to the folder `to`."""
    step = int(checkpoint.name.rpartition("-")[2])
    for folder in filter(saving.is_whole, (to, to / "ema", to / "critic")):
        model_card.write_card(folder, checkpoint.absolute().parent.parent, step)


def main(argv=None):
    args = get_args(argv)
    launch.silence_libraries()
    if args.card:
        model_card.write_card(args.checkpoint)
        print(f"{args.checkpoint / 'README.md'} is the model's card")
        return
    export(args.checkpoint, args.to, args.merge, args.trust_remote_code)
    write_cards(Path(args.to), args.checkpoint)
    print(f"{args.to} holds the model of {args.checkpoint.name}")


if __name__ == "__main__":
    program(main)
