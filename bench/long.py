"""Long runs: 2,000 steps of each script on a tiny model. Memory, open files and the disk must not
grow with the steps.

python bench/long.py [STEPS] [RANKS] [SCRIPT ...] prints the table of docs/reliability.md; 2,000
steps on one rank take 15 minutes on a CPU core.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import kill


def watch(file, every):
    """Returns a fault that does no harm: every so many steps rank 0 notes its memory (MB) and its
    open files."""

    def fault(rank):
        from machinery.run import crash

        check_finite = crash.stop_unless_finite

        def note(args, record, *rows):
            if rank == 0 and record["step"] % every == 0 and rows and "seconds" in record:
                memory = (
                    int(Path("/proc/self/statm").read_text().split()[1])
                    * os.sysconf("SC_PAGE_SIZE")
                    / 1e6
                )
                with open(file, "a") as out:
                    out.write(
                        json.dumps([record["step"], memory, len(os.listdir("/proc/self/fd"))])
                        + "\n"
                    )
            return check_finite(args, record, *rows)

        crash.stop_unless_finite = note

    return fault


def main(steps=2000, ranks=1, *scripts):
    steps, ranks = int(steps), int(ranks)
    base = kill.prepare()
    print("script  seconds  " + "step: memory in MB, open files", flush=True)
    for script in scripts or ("sft", "reward", "ppo"):
        notes, output, began = base / f"{script}.notes", base / f"long/{script}", time.time()
        argv = kill.flags(
            base,
            script,
            2,
            "--max_steps",
            steps,
            "--eval_steps",
            steps // 4,
            "--save_steps",
            steps // 10,
            "--keep_checkpoints",
            2,
        )
        codes, log, _ = kill.run(
            script, argv, output, ranks=ranks, fault=watch(notes, steps // 10), limit=7200
        )
        assert codes == [0] * ranks, log[-3000:]
        seen = [json.loads(line) for line in notes.read_text().splitlines()]
        print(
            f"{script:6} {time.time() - began:8.0f}  "
            + "   ".join(f"{step}: {memory:.0f}, {files}" for step, memory, files in seen)
        )
        sizes = {
            f.name: sum(x.stat().st_size for x in [f, *f.rglob("*")] if x.is_file()) / 1e6
            for f in sorted(output.iterdir())
        }
        print(
            "        on disk, MB: "
            + ", ".join(f"{name} {size:.2f}" for name, size in sizes.items() if size > 0.1)
            + f"; checkpoints {sorted(f.name for f in output.glob('checkpoints/*'))}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
