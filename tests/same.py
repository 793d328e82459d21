"""Shows whether the working tree computes what an older commit did, bit for bit.

    python tests/same.py COMMIT                  compares the working tree with that commit
    python tests/same.py COMMIT --keep FOLDER    keeps the commit's results in FOLDER/COMMIT, and
                                                 makes only those that are not there yet
    python tests/same.py COMMIT --only REGEX     only runs whose name has a match for REGEX, and
                                                 the runs that these start from
A copy of each tree makes all RUNS of its own tests/workers.py, without the CHECKS. The runs that
split tensors are one launch: if --only wants one of them, all are made. Compared are exit codes,
metrics.jsonl without its clocks, samples.jsonl, and every tensor in a .safetensors file.
The exit code is 1 if anything differs or has vanished. What was added is listed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RENAMED = {}  # an old key of both logs, or (log, key): ("samples.jsonl", "kl") -> its new name
CLOCKS = re.compile(r"(\w+_)?seconds|tokens_per_second|tflops")  # keys that differ each time


def make_runs(tree, base, only, source):
    """Makes the wanted runs that `base` lacks, by that tree's workers, in a process of its own.
    They start from the models and the data in `source`, as the other tree's runs did."""
    sys.path[0] = f"{tree}/tests"
    import workers

    workers.TIMEOUT = 4 * 3600  # one launch makes nearly all of the runs
    if not (base / "side.json").exists():
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        workers.prepare(base)
        files = {str(f.relative_to(base)): f for f in sorted(base.rglob("*")) if f.is_file()}
        prepared = {name: sha256(f.read_bytes()).hexdigest() for name, f in files.items()}
        (base / "side.json").write_text(json.dumps({"tree": tree, "prepared": prepared}))
    for file in read(source / "side.json")["prepared"] if source != base else ():
        shutil.copy(source / file, base / file)
    wanted = {}
    for ranks, runs in workers.RUNS.items():
        wanted[ranks] = [name for name in runs if re.search(only, name)]
        for name in wanted[ranks]:  # the list grows by what its runs start from
            needs = re.findall(r"BASE/runs/(\w+)", " ".join(runs[name]["flags"]))
            needs += (runs[name]["before"] or ())[:1]
            wanted[ranks] += [n for n in needs if n in runs and n not in wanted[ranks]]
    (base / "wanted.json").write_text(json.dumps(sum(wanted.values(), [])))
    for ranks, names in wanted.items():
        lacking = [name for name in names if not (base / f"facts/{name}.json").exists()]
        count, chosen = (ranks, lacking) if isinstance(ranks, int) else (2, [ranks])
        for name in lacking and (lacking if chosen is lacking else workers.RUNS[ranks]):
            shutil.rmtree(base / "runs" / name, ignore_errors=True)
        if lacking:
            started, command = time.time(), [sys.executable, "-m", "torch.distributed.run"]
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
            command += ["--nproc_per_node", count, workers.__file__, base, *chosen]
            (base / f"log {ranks}.txt").write_text(workers.start_command(command, base)[1])
            print(f"{tree}: {len(lacking)} runs, {ranks} ranks, {time.time() - started:.0f} s")


def read(file):
    return json.loads(file.read_text())


def left_by(base, tree, name, renamed):
    """Returns all that a run left, as {(file, line or tensor, key): value}."""
    folder, facts = base / "runs" / name, base / f"facts/{name}.json"
    codes = [rank["code"] for rank in read(facts)] if facts.exists() else f"none in {base}"
    found = {("exit codes", "", ""): codes}  # without any, a run equals no other
    for log in ("metrics.jsonl", "samples.jsonl"):
        text = (folder / log).read_text() if (folder / log).exists() else ""
        lines = text.replace(str(base), "BASE").replace(tree, "TREE").splitlines()
        found[log, "lines", ""] = len(lines)
        for number, line in enumerate(lines, 1):
            for key, value in json.loads(line).items():
                if not CLOCKS.fullmatch(key):
                    key = renamed.get((log, key), renamed.get(key, key))
                    found[log, number, key] = json.dumps(value)
    for file in sorted(folder.rglob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")  # a length, a header in JSON, all tensors
        for tensor, header in sorted(json.loads(data[8:start]).items()):
            if tensor != "__metadata__":
                begin, end = header.pop("data_offsets")
                bits = sha256(data[start + begin : start + end]).hexdigest()
                found[str(file.relative_to(folder)), tensor, ""] = f"{header} {bits}"
    return found


def compare(bases, trees, name):
    """Returns whether all that the old run left is there again, and some words on it."""
    old, new = map(left_by, bases, trees, (name, name), (RENAMED, {}))
    for where, value in old.items():
        if new.get(where) != value:
            return False, f"{' '.join(map(str, where))}: {value} -> {new.get(where, 'vanished')}"
    lines = sum(value for (_, place, _), value in old.items() if place == "lines")
    tensors = sum(file.endswith(".safetensors") for file, _, _ in old)
    added = {f"; added: {file} {key or tensor}" for file, tensor, key in new.keys() - old.keys()}
    words = f"exit codes {old['exit codes', '', '']}, {lines} lines, {tensors} tensors"
    return "safetensors" not in "".join(added), words + "".join(sorted(added))


def report(bases):
    """Prints a line for each run, then the total, and returns the exit code."""
    sides = [read(base / "side.json") for base in bases]
    old, new = (read(base / "wanted.json") for base in bases)
    prepared, trees = [side["prepared"] for side in sides], [side["tree"] for side in sides]
    changed = [file for file in prepared[0] if prepared[1].get(file) != prepared[0][file]]
    rows = [("what is prepared", not changed, f"{len(prepared[0])} files, changed: {changed}")]
    rows += [(name, *compare(bases, trees, name)) for name in old if name in new]
    rows += [(name, False, "only the old side has this run") for name in old if name not in new]
    rows += [(name, True, "added: only the new side has it") for name in new if name not in old]
    for name, equal, words in rows:
        print(f"{'equal' if equal else 'DIFFERS':8} {name:30} {words[:300]}")
    failed = sum(not equal for _, equal, _ in rows)
    for log in bases[1].glob("log *.txt") if failed else ():
        errors = re.findall(r"(?m)^(?:\[rank\d+\]: )?(\w+(?:Error|Exception)\b.*)", log.read_text())
        print(*(f"{log.name}: {error}" for error in dict.fromkeys(errors)), sep="\n")
    print(f"{len(rows) - failed} equal, {failed} differ; {len(old)} runs")
    return 1 if failed or not old else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--keep", type=Path, help="a folder for that commit's results")
    parser.add_argument("--only", default="", help="a regular expression for the names of runs")
    args = parser.parse_args()

    def git(*command):
        return subprocess.check_output(["git", "-C", ROOT, *command], text=True).strip()

    commit, folder = git("rev-parse", "--short", args.commit), Path(tempfile.mkdtemp())
    trees = [folder / "old_tree", folder / "new_tree"]
    bases = [(args.keep or folder).resolve() / commit, folder / "new"]
    try:
        git("worktree", "add", "--detach", trees[0], commit)
        for name in git("ls-files", "-co", "--exclude-standard").splitlines():
            if (ROOT / name).is_file():  # as it is now: later edits change no result
                (trees[1] / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, trees[1] / name)
        for tree, base in zip(trees, bases):
            command = [sys.executable, __file__, "--make", tree, base, args.only, bases[0]]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
            subprocess.run(command, env=env, check=True)
        failed = report(bases)
    finally:
        git("worktree", "remove", "--force", trees[0])
    if failed:
        sys.exit(f"The working tree's results are in {bases[1]}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_runs(sys.argv[2], Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    else:
        main()
