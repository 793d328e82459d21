"""--compile_decoding in runs on real engines: a step that is compiled once stays right while the
weights train. (transformers compiles on CUDA alone; here a backend of ours runs the step as it is,
and notes what a CUDA graph would have been recorded with.)"""

from collections import defaultdict

import pytest
import torch

from tests import kit, runs
from tests.rollout.test_decoding import OnAnAccelerator

LORA = "--actor_lora_dim 4 --critic_lora_dim 2"
CASES = {  # ZeRO stage, flags
    "zero0": (0, ""),
    "zero1_bf16": (1, "--dtype bf16"),
    "zero2": (2, ""),
    "zero0_lora": (0, LORA),
    "zero1_lora": (1, LORA),
    "zero2_bf16_lora": (2, f"--dtype bf16 {LORA}"),
}


def run_compiled(base, folder, flags, mistake):
    """Makes a run in this rank. Returns its exit code, how many steps were compiled before the
    first rollout and at the end, and for each input of theirs that is a weight or a cache, by its
    name, the addresses that it has had."""
    import ppo
    from helpers import decoding

    own, roll_out, models, graphs, counts = decoding.compiled_next_logits, ppo.roll_out, {}, [], []
    places = defaultdict(set)

    def backend(graph, inputs):
        graphs.append(graph)
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        number = len(graphs)

        def run(*given):
            for name, x in zip(names, given, strict=True):
                cached = torch.is_tensor(x) and x.dim() == 4 and x.shape[2] > 1  # the mask has 1
                if isinstance(x, torch.nn.Parameter) or cached:
                    places[number, name].add(x.data_ptr())
            return graph.forward(*given)

        return run

    def compiled(model, inputs, cache):
        on_accelerator = models.setdefault(id(model), OnAnAccelerator(model, backend))
        return own(on_accelerator, inputs, cache)

    def roll_out_and_count(args, engine, *given):
        counts.append(len(graphs))
        if mistake and len(counts) == 3:
            for weight in engine.module.parameters():
                weight.data = weight.data.clone()
        if mistake and len(counts) == 7:  # the last evaluation
            engine.module.lm_head.weight.requires_grad_(False)
        return roll_out(args, engine, *given)

    decoding.compiled_next_logits, ppo.roll_out = compiled, roll_out_and_count
    try:
        kit.call_main("ppo", [*runs.base_flags("ppo", base), *flags, "--output_dir", str(folder)])
    except SystemExit as stop:
        return stop.code, (counts[0], len(graphs)), dict(places)


def compiled(case, folder, mistake=False):
    stage, flags = CASES[case]
    flags += " --compile_decoding 1 --enable_ema 1 --eval_steps 1 --max_steps 3"
    made = runs.run("ppo", flags, stage)
    given = runs.base(), folder, made["flags"], mistake
    done = kit.fork(run_compiled, 2, *given, meet="", limit=600)
    assert done.code == 0, done
    return done.results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_compiled_once_and_its_weights_stay_where_they_are(case, tmp_path):
    """Three updates, a rollout and an evaluation between them; the reference is the actor without
    its adapters where there are some. A CUDA graph reads where it was recorded: a weight or a cache
    that moved would leave it the old numbers, and what is sampled would not be what is scored."""
    for code, (tried, ended), places in compiled(case, tmp_path / "run"):
        assert code == 0 and tried == ended == 1
        assert len(places) > 20 and {len(found) for found in places.values()} == {1}
    gaps = [line["sampling_gap"] for line in kit.metrics(tmp_path / "run")[1:]]
    assert len(gaps) == 3 and max(gaps) < (0.5 if "bf16" in case else 1e-3)


@pytest.mark.slow
def test_weights_that_move_and_a_step_that_is_compiled_again_are_seen(tmp_path):
    for _, (tried, ended), places in compiled("zero0", tmp_path / "run", mistake=True):
        assert ended > tried and max(len(found) for found in places.values()) > 1
