"""From how many responses on is vLLM faster than our own loop? Tokens per second of both, in turn.

    python variants/vllm/bench/crossover.py --vllm_python output/vllm/bin/python output/real/model

It samples with ppo.roll_out and with vLLM, from the same weights and prompts: from the toy's model
with random weights, and from each FOLDER, in fp32 and in bf16. The seconds of vLLM include the
hand-over: the actor's weights are written, and loaded, before each rollout, as in training.
Nothing ends a response, so that both sample the same number of tokens. All prompts differ.

The smallest rollouts come first. Each is made up to --times times, as long as the share of
--minutes lasts that its model and dtype have; one that is expected to take longer is left out, and
the table says so. This process uses as many threads as PyTorch takes by itself. vLLM leaves one
core to its scheduler, unless VLLM_CPU_OMP_THREADS_BIND is set. While one of them samples the other
one waits.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]
import vllm_rollouts  # noqa: E402

import common  # noqa: E402
import ppo  # noqa: E402
from machinery import flags, folders, ranks  # noqa: E402

PROMPT = 24  # tokens
HEAD = (
    "| model | dtype | rows x tokens | ours, tokens/s | vLLM, tokens/s | of its seconds, hand-over "
    "| vLLM / ours | times |"
)


class WithoutEnd:
    """A tokenizer without EOS, for our loop: each response then has all of its tokens."""

    eos_token_id = -1

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.tokenizer)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


class Endless(vllm_rollouts.Vllm):
    """vLLM, likewise without EOS."""

    def sampling_params(self, tokenizer, model):
        return {**super().sampling_params(tokenizer, model), "stop_token_ids": []}


def get_args(options, folder, dtype):
    """Returns the flags of a run of ppo.py, with those that variants/vllm adds."""
    flags = ["--preset", "toy", "--actor_model_name_or_path", folder, "--dtype", dtype]
    flags += ["--max_prompt_seq_len", PROMPT, "--max_answer_seq_len", max(options.tokens)]
    args = ppo.get_args([str(flag) for flag in flags])

    def arg(name, default, *_, **__):  # a type stands for None
        setattr(args, name, None if isinstance(default, type) else default)

    vllm_rollouts.add_flags(arg)
    args.vllm_python, args.vllm_flags = options.vllm_python, options.vllm_flags
    args.output_dir = options.out.parent
    return args


def requests_of(count, vocabulary):
    """Returns requests with random prompts, which all differ: ours computes equal ones once."""
    drawn = torch.randint(vocabulary, (count, PROMPT), generator=torch.manual_seed(0)).tolist()
    return [dict(prompt_ids=ids, row=i, sample=0, group=i) for i, ids in enumerate(drawn)]


def compare(options, folder, dtype, deadline):
    """Returns a dict for each size: its tokens per second, lists with one number for each try."""
    args = get_args(options, folder, dtype)
    tokenizer = folders.load_tokenizer(folder)
    model = common.load_model(flags.of_role(args, "actor")).to(ranks.device()).eval()
    model.generation_config.eos_token_id = None  # its ends would be the loop's, too
    vllm = Endless(args)

    def seconds_of(name, rows, tokens, step):
        """Samples, and returns how long it took."""
        args.max_answer_seq_len = tokens
        requests = requests_of(rows, len(tokenizer))
        given, began = (requests, step, rows), time.perf_counter()
        if name == "vllm":
            responses = vllm.roll_out(args, model, tokenizer, *given)
        else:
            responses = ppo.roll_out(args, model, WithoutEnd(tokenizer), *given)
        seconds = time.perf_counter() - began
        assert all(len(each["response_ids"]) == tokens for each in responses)
        return seconds

    sizes = sorted(itertools.product(options.rows, options.tokens), key=lambda x: x[0] * x[1])
    found = [dict(rows=n, tokens=t, ours=[], vllm=[], hand_over=[]) for n, t in sizes]
    best = {}  # tokens per second of the quickest rollout so far
    try:
        for name in ("ours", "vllm"):  # starts vLLM, and warms both up
            seconds_of(name, min(options.rows), 8, 1)
        for step in range(1, options.times + 1):
            for cell in found:
                count = cell["rows"] * cell["tokens"]
                expected = sum(count / rate for rate in best.values())
                if time.time() + expected > deadline:
                    words = (
                        f"left out: some {expected:.0f} s, and {deadline - time.time():.0f} left"
                    )
                    cell.setdefault("left_out", words)
                    continue
                for name in ("ours", "vllm"):
                    rate = count / seconds_of(name, cell["rows"], cell["tokens"], step)
                    cell[name].append(rate)
                    best[name] = max(rate, best.get(name, 0.0))
                cell["hand_over"].append(vllm.seconds["hand_over_seconds"])
                print(f"    {folder} {dtype}: {cell}", file=sys.stderr, flush=True)
    finally:
        vllm.end()
    name = f"{folder.absolute().parent.name}/{folder.name}"
    return [{"model": name, "dtype": dtype, **cell} for cell in found]


def line(cell):
    """Returns a line of the table: medians."""
    names = [cell["model"], cell["dtype"], f"{cell['rows']} x {cell['tokens']}"]
    if not cell["ours"]:
        return f"| {' | '.join([*names, cell['left_out'], '', '', '', '0'])} |"
    ours, vllm = statistics.median(cell["ours"]), statistics.median(cell["vllm"])
    share = statistics.median(cell["hand_over"]) * vllm / (cell["rows"] * cell["tokens"])
    numbers = [f"{ours:,.0f}", f"{vllm:,.0f}", f"{share:.0%}", f"{vllm / ours:.2f}"]
    return f"| {' | '.join([*names, *numbers, str(len(cell['ours']))])} |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="of models")
    parser.add_argument("--vllm_python", required=True, help="the Python that has vLLM")
    parser.add_argument("--vllm_flags", default="--enforce-eager --max-num-seqs=256")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--times", type=int, default=3, help="at most, of each size")
    parser.add_argument("--minutes", type=float, default=11, help="in all")
    parser.add_argument("--out", type=Path, default=ROOT / "output/crossover.json")
    options = parser.parse_args()
    end, found = time.time() + 60 * options.minutes, []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    groups = [*itertools.product([ROOT / "recipes/toy/model", *options.folders], options.dtypes)]
    for done, (folder, dtype) in enumerate(groups):
        share = (end - time.time()) / (len(groups) - done)
        found += compare(options, folder, dtype, time.time() + share)
        threads = {"threads": torch.get_num_threads(), "cores": os.cpu_count()}
        settings = {**vars(options), "folders": [*map(str, options.folders)], "out": None}
        options.out.write_text(json.dumps({**threads, **settings, "found": found}, indent=1))
    print("\n".join([HEAD, "| --- " * 8 + "|", *map(line, found)]))


if __name__ == "__main__":
    main()
