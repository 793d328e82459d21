"""`bench.py --growth`: bytes that a rank sends in a step and holds between steps, for each ZeRO
stage. No clock is read."""

import gc
import json
import os

import torch
from deepspeed.comm import comm

import bench
from machinery.run.run import Run

# bytes of the tiny model in fp32
WEIGHTS = 4 * (2 * 4096 * 256 + 6 * (4 * 256**2 + 3 * 256 * 688) + 13 * 256)
JOBS = [
    dict(
        name=f"growth {stage} {ranks}",
        script="sft",
        sides=("growth",),
        batch=1,
        length=64,
        steps=6,
        held_out=8,
        ranks=ranks,
        stage=stage,
        dtypes=["fp32"],
    )
    for stage in (0, 1, 2, 3)
    for ranks in (1, 2, 4, 8)
]


def run(job, work):
    """Watches sft.py's main(). Returns the bytes that rank 0 sends in a step (ring algorithms) and
    the bytes of tensors that it holds between steps."""
    comm.comms_logger.enabled = comm.comms_logger.prof_all = True
    # buffers as small as this model, or they are all that is seen
    config = json.loads((bench.ROOT / "ds_config.json").read_text())
    config["zero_optimization"].update(
        reduce_bucket_size=500_000,
        allgather_bucket_size=500_000,
        stage3_prefetch_bucket_size=0,
        stage3_param_persistence_threshold=0,
    )
    # a file a rank: none reads what another is writing
    knobs = work / f"ds-{os.environ.get('RANK', 0)}.json"
    knobs.write_text(json.dumps(config))
    job = {**job, "extra": ["--ds_config", str(knobs)]}
    counts, inner_steps, ranks = {}, Run.steps, job.get("ranks", 1)

    def steps(*args, **kwargs):
        for step in inner_steps(*args, **kwargs):
            # from here on steps are alike; the last one, which also evaluates, is not counted
            if step[0] == 3:
                comm.comms_logger.comms_dict.clear()
            elif step[0] == job["steps"]:
                ops = {
                    op: sum(size * times[0] for size, times in sizes.items()) / (step[0] - 3)
                    for op, sizes in comm.comms_logger.comms_dict.items()
                }
                storages = {
                    t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in gc.get_objects()
                    if isinstance(t, torch.Tensor)
                }
                # what the logger notes is one rank's input: a whole tensor of an all-reduce or
                # reduce-scatter, a shard of an all-gather
                factors = {
                    "all_reduce": 2 * (ranks - 1) / ranks,
                    "all_gather_into_tensor": ranks - 1,
                }
                counts.update(
                    ops=ops,
                    held=sum(storages.values()),
                    sent=sum(
                        factors.get(op, (ranks - 1) / ranks) * size for op, size in ops.items()
                    ),
                )
            yield step

    Run.steps = steps
    (record,) = bench.ours(job, work)
    return [{**record, **counts}]


def table(records):
    """Bytes sent by a rank in a step, in units of the weights' bytes, and bytes of tensors that a
    rank holds between steps."""
    lines = [
        "| ZeRO stage | ranks | sent, x weights | theory | MB held by a rank "
        "| by operation, x weights |",
        "|" + " --- |" * 6,
    ]
    for r in records:
        stage, ranks = int(r["name"].split()[1]), int(r["name"].split()[2])
        theory = (3 if stage == 3 else 2) * (ranks - 1) / ranks
        lines.append(
            f"| {stage} | {ranks} | {r['sent'] / WEIGHTS:.2f} | {theory:.2f} "
            f"| {r['held'] / 1e6:.0f} | "
            + ", ".join(
                f"{op} {size / WEIGHTS:.2f}"
                for op, size in r["ops"].items()
                if size / WEIGHTS > 0.005
            )
            + " |"
        )
    return "\n".join(lines) + "\n"
