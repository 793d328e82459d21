"""The steps of a run, and its checkpoints: a run that dies goes on exactly where it stood (docs/reliability.md).

Not needed to understand the three steps; what their loops see is `training_steps`.
"""
import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import common

INTERRUPTED = []  # filled by SIGTERM / SIGINT; looked at between two steps
BEGAN = time.time()

def told_to_stop(number, frame):
    """Signal handler: stop after this step. A second Ctrl-C stops at once (SIGTERM does not count: launchers send it after the first)."""
    INTERRUPTED.append(number)
    if INTERRUPTED.count(signal.SIGINT) > 1:
        os._exit(1)

def training_steps(args, engines, state, rows, batch_size, micro_steps, steps, collate):
    """Yield (step, epoch, evaluate_now, micro_batches) for each step of the run, 1 .. `steps`, and keep the run safe.

    Resumes in the middle of an epoch; after each step's body, saves when due or when told to stop. state: a dict of what
    the script itself must keep (EMA, KL coefficient), restored in place.
    """
    lengths = np.asarray(rows["length"])
    step_rows = common.rows_per_step(batch_size, micro_steps)
    per_epoch = -(-len(rows) // step_rows)
    step, saved = load_checkpoint(args, engines, state, len(rows), step_rows) if args.resume else (0, {"state": {}})
    state.update(placed(state, saved["state"]))
    for number in (signal.SIGTERM, signal.SIGINT):  # only now: a launcher's signal must end the ranks of a run that was refused
        signal.signal(number, told_to_stop)
    with tqdm(total=steps, initial=step, unit="step", leave=False, disable=True if common.world()[0] else None) as bar:  # None: in a terminal
        while step < steps:
            batches = common.epoch_batches(lengths, args.seed, step // per_epoch, batch_size, micro_steps, args.group_by_length)
            loader = StatefulDataLoader(common.Rows(rows), batch_sampler=batches, collate_fn=collate,
                                        generator=torch.Generator())  # its own: the global one belongs to dropout
            taken = step % per_epoch  # steps of this epoch that are done: above 0 only when resuming
            dealt_alike = taken and saved["loader"] and saved.get("micro_steps") == micro_steps
            if dealt_alike:
                loader.load_state_dict(saved["loader"])
            iterator = iter(loader)
            if not dealt_alike:  # other ranks, or other micro-batches: the rows are dealt out anew, and those already taken are skipped
                for _ in range(taken * micro_steps):
                    next(iterator)
            while step < steps and (micro_batches := list(itertools.islice(iterator, micro_steps))):
                step += 1
                common.phase(f"at step {step}")
                yield step, step / per_epoch, step == steps or step % (args.eval_steps or per_epoch) == 0, micro_batches
                bar.update()
                told, late = common.all_sum(len(INTERRUPTED), 0 < args.max_hours * 3600 < time.time() - BEGAN)  # on any rank
                stop = (told or late) and step < steps
                if stop or (args.save_steps and step % args.save_steps == 0):
                    save_checkpoint(args, engines, step, {"loader": loader.state_dict(), "micro_steps": micro_steps, "state": state,
                                                          "data_rows": len(rows), "rows": step_rows})
                if stop:
                    why = "interrupted" if told else f"--max_hours {args.max_hours:g} are over"
                    common.say(f"{why} after step {step}: saved to {common.checkpoints(args)[-1]}. Go on with --resume.")
                    common.finish(args, code=1)

def checksum(file):
    """-> [size, CRC-32] of a file: it finds what is cut short, damaged or edited."""
    crc = 0
    with open(file, "rb") as data:
        while block := data.read(1 << 24):
            crc = zlib.crc32(block, crc)
        return [os.fstat(data.fileno()).st_size, crc]

def save_checkpoint(args, engines, step, state):
    """Everything needed to go on exactly. engines: {name: engine}. state: this rank's own, anything torch.save takes.

    Written aside, listed with checksums (manifest.json), synced, then renamed: a folder named step-N is whole, or was damaged since.
    """
    folder, (rank, ranks) = Path(args.output_dir) / "checkpoints", common.world()
    aside = folder / "unfinished"
    common.phase(f"writing {folder}/step-{step}")
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    common.barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(aside / name, tag="state", save_latest=False)
    # dropout uses torch's two; python's and numpy's are for a --reward_fn that draws from them; all else draws from (seed, step)
    rng = torch.get_rng_state(), get_accelerator().get_rng_state(), random.getstate(), np.random.get_state()
    logs = {file: file.stat().st_size for name in common.LOGS if (file := Path(args.output_dir) / name).exists()}
    saved = {"rng": rng, "logs": {file.name: size for file, size in logs.items()}, "shape": shape(engines), **state}
    torch.save(saved, aside / f"rank{rank}.pt")
    common.barrier()
    mine = sorted(f for f in aside.rglob("*") if f.is_file())[rank::ranks]
    for file in [*mine, *logs] if rank == 0 else mine:
        common.sync(file)
    files = common.everyones([(str(f.relative_to(aside)), checksum(f)) for f in mine])
    if rank == 0:
        (aside / "manifest.json").write_text(json.dumps(dict(files)))
        for path in (aside / "manifest.json", *(f for f in aside.rglob("*") if f.is_dir()), aside):
            common.sync(path)
        aside.rename(folder / f"step-{step}")
        common.sync(folder)
        for old in (*common.checkpoints(args)[:-args.keep_checkpoints], *folder.glob("damaged-step-*")):
            shutil.rmtree(old)
    common.barrier()

def shape(engines):
    """-> what decides how a checkpoint is laid out: ranks, and each engine's ZeRO stage."""
    return {"ranks": common.world()[1], **{name: engine.zero_optimization_stage() for name, engine in engines.items()}}

def load_engine(engine, folder, reshape):
    """Read an engine's checkpoint. reshape: other ranks wrote it (or stage 1 and this is 2, or the reverse), so rank 0 first turns it
    into DeepSpeed's universal form, a file for each weight."""
    groups, schedule, universal = engine.optimizer.param_groups, engine.lr_scheduler, folder / "universal"
    settings = [{name: group[name] for name in ("initial_lr", "weight_decay", "betas")} for group in groups]  # this run's flags
    if reshape and common.world()[0] == 0:
        shutil.rmtree(universal, ignore_errors=True)  # of a conversion that was killed
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(argparse.Namespace(input_folder=str(folder / "state"), output_folder=str(universal), strict=True,
                num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, inject_missing_state=True))
    common.barrier()
    engine._config.load_universal_checkpoint = reshape
    if engine.load_checkpoint(folder, tag="universal" if reshape else "state")[0] is None:
        raise RuntimeError(f"DeepSpeed could not read {folder}")
    engine._config.load_universal_checkpoint = False
    # the checkpoint brought the settings of before, and under stage 3 in the universal form gave every group the first one's
    schedule.base_lrs = [ours["initial_lr"] for ours in settings]
    for group, ours, factor in zip(engine.optimizer.param_groups, settings, schedule.lr_lambdas):
        group.update(ours, lr=ours["initial_lr"] * factor(schedule.last_epoch))
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = engine.gradient_clipping()
    common.barrier()
    if common.world()[0] == 0:
        shutil.rmtree(universal, ignore_errors=True)

def reshaped(own, saved):
    """saved: one thing of the state, as each rank wrote it. -> the same laid out as `own`: shards (1-d, padded at the end to equal
    shares) are joined and cut anew; what is no shard is alike on all ranks."""
    if isinstance(own, dict):
        return {key: reshaped(value, [part[key] for part in saved]) for key, value in own.items()}
    if not torch.is_tensor(own):
        return saved[0]
    start, whole = common.world()[0] * len(own), torch.cat(saved)
    return nn.functional.pad(whole, (0, max(0, start + len(own) - len(whole))))[start:start + len(own)].clone()

def placed(own, saved):
    """-> `saved`, its tensors on the devices of those of `own`."""
    if isinstance(saved, dict):
        return {key: placed(own[key], value) for key, value in saved.items()}
    return saved.to(own.device) if torch.is_tensor(saved) else saved

def damage(folder):
    """-> the files of a checkpoint that are not as its manifest lists them, [] if it is whole. The ranks share the reading."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        manifest = {"manifest.json": "missing or damaged"}
    mine = sorted(manifest.items())[common.world()[0]::common.world()[1]]
    return common.everyones([name for name, known in mine if not (folder / name).is_file() or checksum(folder / name) != known])

def load_checkpoint(args, engines, state, data_rows, step_rows):
    """Restore `engines`, RNGs and the .jsonl files from the newest whole checkpoint -> (step, this rank's state).

    data_rows, step_rows: rows of the data and of a step, which must be those that the run had before.
    """
    (rank, ranks), damaged = common.world(), []
    for folder in reversed(common.checkpoints(args)):
        if not (files := damage(folder)):
            break
        common.say(f"{folder} is not whole, and is left aside. Missing, cut short or changed: {', '.join(files)}")
        damaged.append(folder)
    else:
        common.fail(f"--resume: no checkpoint in {folder.parent} is whole.\n  --overwrite starts anew.")
    step = int(folder.name.split("-")[1])
    parts = [folder / f"rank{i}.pt" for i in range(len([*folder.glob("rank*.pt")]))]
    saved = torch.load(parts[rank % len(parts)], weights_only=False, map_location="cpu")  # our own file
    if saved["rows"] != step_rows:
        common.fail(f"--resume: the run took {saved['rows']} rows a step, and would now take {step_rows}.\n"
                    "  Choose per-device batch size and --gradient_accumulation_steps so that times the ranks they give the same.")
    if saved.get("data_rows", data_rows) != data_rows:
        common.fail(f"--resume: the run's share of the data had {saved['data_rows']} rows, and now it has {data_rows}.\n"
                    "  Give it the data of before.")
    before, now = saved["shape"], shape(engines)
    if before != now and args.tensor_parallel_size > 1:
        common.fail(f"--resume: {folder} was written by {before}, and this is {now}.\n  With --tensor_parallel_size neither may change.")
    for name, engine in engines.items():
        if before[name] != now[name] and not {before[name], now[name]} == {1, 2}:
            common.fail(f"{folder} was written under ZeRO stage {before[name]}, and this run has {now[name]}.\n"
                        "  DeepSpeed turns 1 into 2 and back, no others. The number of ranks may change under any stage.")
        load_engine(engine, folder / name, reshape=before != now and now[name] > 0)
    if before == now:
        for restore, rng in zip((torch.set_rng_state, get_accelerator().set_rng_state, random.setstate, np.random.set_state), saved["rng"]):
            restore(rng)
    else:
        common.say(f"from {before} to {now}: the same run up to rounding; dropout draws other numbers")
        torch.manual_seed(args.seed + rank + 1_000_000 * step)
        saved.update(loader=None, state=reshaped(state, [torch.load(part, weights_only=False, map_location="cpu")["state"] for part in parts]))
    if rank == 0:
        for bad in damaged:  # out of the way of the new step-N; the next save removes it
            bad.rename(bad.with_name(f"damaged-{bad.name}"))
        for old in (folder.parent / "unfinished", *common.checkpoints(args)[:-args.keep_checkpoints]):
            shutil.rmtree(old, ignore_errors=True)
        for name, size in saved["logs"].items():  # lines written after the checkpoint go
            if (file := Path(args.output_dir) / name).exists():
                os.truncate(file, min(size, file.stat().st_size))
    common.barrier()
    common.say(f"resumed from {folder}")
    return step, saved
