"""Measures an entry of the leaderboard (course/leaderboard.md), or prints the table.

    python course/leaderboard.py course/leaderboard/plain.flags    flags of ppo.py
    python course/leaderboard.py my_ppo.py my.flags                a script beside it, and flags
    python course/leaderboard.py                                   the table of all entries

An entry is run with three seeds, each with an SFT model and a reward model of its own, on one rank.
What it needed goes into course/leaderboard.json, and the table into leaderboard.md.
"""

import argparse
import hashlib
import json
import shlex
import statistics
import sys
from math import inf
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "labs"))
import declared  # noqa: E402
import pages  # noqa: E402
import runner  # noqa: E402

GOLD, KL = 0.95, 2.0  # to be reached at one evaluation
SEEDS = 101, 102, 103  # authors tune with others
RESULTS = HERE / "leaderboard.json"
MODELS = {name: declared.BASES["toy"][name] for name in ("sft", "reward")}
START = "--critic_model_name_or_path {reward} --enable_ema 0"
# Whatever an entry says of these: where it starts, what is measured, and how often.
FIXED = """ --actor_model_name_or_path {sft} --reward_model_name_or_path {reward}
    --data_path recipes/toy/data --data_split 4,5,1
    --gold_fn recipes/toy/gold.py:gold --log_kl 1 --temperature 1 --top_p 1 --top_k 0
    --max_prompt_seq_len 32 --max_answer_seq_len 48
    --num_eval_prompts 280 --eval_samples 1 --eval_steps 5 --log_steps 1"""


def lab_of(script, flags, seeds=SEEDS):
    """Returns an entry as a lab with one arm. script: "ppo", or the name of another one."""
    words = shlex.split(flags, comments=True)  # "--name=value" is two words
    words = [part for w in words for part in (w.split("=", 1) if w.startswith("--") else [w])]
    files = {word for word in words if word.startswith("@")}  # which may name such flags
    if refused := {"--reward_fn", "--seed"} & {*words} | files:
        why = "An entry learns from the reward model, and has the board's seeds"
        raise SystemExit(f"{why}: no {' or '.join(sorted(refused))}.")
    base = {**MODELS, script: " ".join(runner.merged(START, shlex.join(words), FIXED))}
    return runner.Lab(script, base, {"entry": {}}, {}, until=script, seeds=tuple(seeds))


def needed(args, lines):
    """Returns the responses drawn until an evaluation has both GOLD and KL, or None; and the best
    gold at a KL of at most KL, up to that evaluation.

    args: of args.json; lines: of metrics.jsonl, one a step. A script that draws others than those
    it trains on logs `responses`: how many it drew in the step.
    """
    each, drawn, best = args["rows_per_step"] * args["samples_per_prompt"], 0, 0.0
    for line in lines:
        drawn += line.get("responses", each) if line["step"] else 0
        if "eval_gold" in line and line.get("eval_kl", inf) <= KL:
            best = max(best, line["eval_gold"])
            if line["eval_gold"] >= GOLD:
                return drawn, best
    return None, best


def table(entries):
    """Returns the table of {name: {seed: needed()}}: the fewest responses come first, and of those
    that do not get there with all seeds the best."""
    if not entries:
        return "No entry has been measured yet."
    rows = []
    for name, by_seed in entries.items():
        counts, golds = zip(*by_seed.values())
        reached = [count for count in counts if count is not None]
        all_reached = len(reached) == len(by_seed)
        text = f"reached with {len(reached)} of {len(by_seed)} seeds"
        if all_reached:
            text = f"{statistics.mean(reached):,.0f} [{min(reached):,}, {max(reached):,}]"
        each = [f"{seed}: {count or 'not reached'}" for seed, (count, _) in by_seed.items()]
        best = f"{statistics.mean(golds):.3f} [{min(golds):.3f}, {max(golds):.3f}]"
        order = -len(reached) / len(by_seed), sum(reached) if all_reached else 0, -sum(golds)
        rows.append((order, [name, text, ", ".join(each), best]))
    heads = ["entry", "responses", "by seed", f"best gold at KL <= {KL:g}"]
    return pages.markdown(heads, [row for _, row in sorted(rows)])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="a script, a file of flags, or both")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--runs", type=Path, default=runner.ROOT / "output/leaderboard")
    args = parser.parse_args()
    entries = runner.read(RESULTS) or {}
    if args.files:
        script = next((file.stem for file in args.files if file.suffix == ".py"), "ppo")
        flags = "\n".join(file.read_text() for file in args.files if file.suffix != ".py")
        text = (runner.ROOT / f"{script}.py").read_bytes()
        root = args.runs.resolve() / hashlib.sha1(text).hexdigest()[:10]  # of a changed one: anew
        chains = lab_of(script, flags, args.seeds).chains()
        runner.make_all(chains, root, args.jobs)
        found = {}
        for (_, seed), runs in chains.items():
            folder = runs[script].folder(root)
            known = json.loads((folder / "args.json").read_text())
            found[str(seed)] = needed(known, runner.lines_of(folder, "metrics.jsonl"))
        if tuple(args.seeds) != SEEDS:  # somebody's check: the board stays as it is
            return print(table({args.files[-1].stem: found}))
        entries[args.files[-1].stem] = found
        RESULTS.write_text(json.dumps(entries, indent=1) + "\n")
    pages.put(HERE / "leaderboard.md", table(entries))
    print(table(entries))


if __name__ == "__main__":
    main()
