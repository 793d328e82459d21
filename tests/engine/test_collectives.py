"""Sixteen ranks on two hosts ask the same of each other, in the same order, whatever each of them
meets: a rank that asks something else hangs all of them. How that is seen without sixteen ranks,
and what is not: sixteen.py."""

import pytest

from tests import kit, runs
from tests.engine import sixteen

EVERYTHING = """--enable_ema 1 --microscope 3 --save_steps 1 --eval_steps 1 --keep_best eval_reward
                --max_steps 2"""
EPOCHS = "--allow_unstable 1 --ppo_epochs 3 --generation_batches 2 --target_kl 1e-9 --max_steps 2"
LORA = "--actor_lora_dim 4 --critic_lora_dim 2 --enable_ema 1 --max_steps 2"
# script, ZeRO stage, flags; what is other on one rank, and which; the exit code
WAYS = {
    "ppo": ("ppo", 2, EVERYTHING),
}
RARE = {
    "sft": ("sft", 2, "--save_steps 2 --max_steps 2"),
    "reward": ("reward", 1, "--save_steps 2 --eval_steps 1 --keep_best eval_loss --max_steps 2"),
    "sft, sharded": ("sft", 3, "--save_steps 2 --max_steps 2"),
    "reward, sharded": ("reward", 3, "--share_prompt 0 --max_steps 2"),
    "ppo, not sharded": ("ppo", 0, EVERYTHING),
    "ppo, sharded": ("ppo", 3, EVERYTHING),
    "grpo": ("ppo", 2, f"{runs.GRPO} --eval_steps 1"),
    "reinforce, sharded": ("ppo", 3, runs.REINFORCE),
    "LoRA": ("ppo", 1, LORA),
    "LoRA, sharded": ("ppo", 3, LORA),
    "epochs that end early": ("ppo", 2, EPOCHS),
    "states that leave the device": ("ppo", 3, "--offload_states --max_steps 2"),
    "bf16": ("ppo", 1, f"{EVERYTHING} --dtype bf16"),
    "its shard alone fits": ("ppo", 3, EVERYTHING, "has_no_room", 8),
    "its loss is NaN": ("sft", 2, "--max_steps 2", "loses_its_loss", 7, 1),
    "its scores are NaN": ("ppo", 2, EVERYTHING, "loses_its_scores", 7, 1),
    "its scores are NaN, sharded": ("ppo", 3, EVERYTHING, "loses_its_scores", 15, 1),
}


def started(name, tmp_path):
    """Starts the four ranks of a run. Returns what is known at its end."""
    script, stage, flags, *more = (WAYS | RARE)[name]
    rows = 4 if "samples_per_prompt" in flags else 2  # two prompts: the last ranks have none
    made = runs.run(script, f"{flags} --output_dir {tmp_path}/run", stage, rows=rows)
    what, odd, code = [*more, *("", None, 0)[len(more) :]]
    given = runs.base(), tmp_path, script, made["flags"], what, odd
    return kit.fork(sixteen.run, len(sixteen.HERE), *given, meet=""), code


@pytest.mark.parametrize("name", [*WAYS, *(pytest.param(n, marks=pytest.mark.slow) for n in RARE)])
def test_all_ranks_ask_the_same_of_each_other(name, tmp_path):
    """Rank 15 has no row of its own in any step, nor in an evaluation; rank 8 is another host's
    first."""
    done, code = started(name, tmp_path)
    assert done.code == 0, done
    assert [found[0] for found in done.results] == [code] * len(sixteen.HERE), done
    first, *others = [calls for _, calls, _ in done.results]
    assert len(first) > 20 and all(calls == first for calls in others)
    if code == 0:
        rows = [found[2] for found in done.results]
        assert all(rows[0]) and not any(rows[-1])


def test_a_rank_that_asks_once_more_is_seen(tmp_path, monkeypatch):
    """A mistake as it is easily made: a sum over all ranks where a rank has no rows."""
    monkeypatch.setitem(WAYS, "mistake", ("ppo", 2, "--max_steps 1", "asks_once_more", None))
    done, _ = started("mistake", tmp_path)
    assert done.code and "Differ: call" in done.err and "ppo.py:" in done.err, done
