"""Long runs: 2,000 steps of each script on a tiny model. Memory, open files and the disk must not
grow with the steps.

    python bench/long.py [STEPS] [SCRIPT ...]

prints the table of docs/reliability.md; 2,000 steps on one rank take 15 minutes on a CPU core.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import kit, runs


def step_of(folder):
    """Returns the last step in a run's metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def watch(process, folder, every):
    """Yields step, resident memory in MB and open files of a process, every so many steps."""
    wanted = every
    while process.poll() is None:
        if (step := step_of(folder)) >= wanted:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            yield step, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, files
            wanted += every
        time.sleep(0.1)


def size_of(path):
    """Returns the MB of a file, or of all files under a folder."""
    return sum(x.stat().st_size for x in [path, *path.rglob("*")] if x.is_file()) / 1e6


def main(steps=2000, *scripts):
    steps, base = int(steps), kit.base()
    print("script  seconds  step: memory in MB, open files", flush=True)
    for script in scripts or kit.SCRIPTS:
        folder, began = base / "long" / script, time.time()
        run = runs.run(script, f"--max_steps {steps} --eval_steps {steps // 4}", zero=2)
        flags = [*runs.base_flags(script, base), *run["flags"]]
        flags += ["--save_steps", str(steps // 10), "--keep_checkpoints", "2"]
        command = [sys.executable, ROOT / f"{script}.py", *flags, "--output_dir", folder]
        log = open(base / f"{script}.log", "w")
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=kit.environment(), cwd=base
        )
        seen = [f"{s}: {mb:.0f}, {files}" for s, mb, files in watch(process, folder, steps // 10)]
        assert process.wait() == 0, (base / f"{script}.log").read_text()[-3000:]
        print(f"{script:6} {time.time() - began:8.0f}  {'   '.join(seen)}")
        sizes = {file.name: size_of(file) for file in sorted(folder.iterdir())}
        large = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items() if size > 0.1)
        kept = sorted(file.name for file in folder.glob("checkpoints/*"))
        print(f"        on disk, MB: {large}; checkpoints {kept}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
