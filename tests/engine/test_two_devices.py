"""The scripts on a second device that a CPU pretends to have (tests/two_devices.py): no operation
mixes devices, and the host waits for the device as seldom as here. (A wait empties the queue of a
GPU: what the host does until the next operation is time in which the GPU does nothing.)"""

import pytest

import common
from tests import kit, runs, two_devices

pytestmark = two_devices.needed
GROUPED = "--advantage grpo --samples_per_prompt 2"
PROGRAMS = {
    "sft": ("sft", ""),
    "sft_lora": ("sft", "--model_name_or_path BASE/models/actor --lora_dim 4"),
    "reward": ("reward", ""),
    "reward_apart": ("reward", "--share_prompt 0"),
    "ppo": ("ppo", "--enable_ema 1 --eval_samples 2 --top_p 0.9 --temperature 0.7"),
    "ppo_bf16": ("ppo", "--dtype bf16"),
    "ppo_grpo": ("ppo", f"{GROUPED} --kl_in loss --kl_estimator k3 --loss_mean responses"),
    "ppo_options": ("ppo", runs.OPTIONS),
    "ppo_lora": ("ppo", "--actor_lora_dim 4 --critic_lora_dim 2"),
    "ppo_unstable": ("ppo", "--allow_unstable 1 --ppo_epochs 2 --generation_batches 2"),
}
# one of each script is in `make test`
EACH = [
    name if name == script else pytest.param(name, marks=pytest.mark.slow)
    for name, (script, _) in PROGRAMS.items()
]
# Waits for the device, copies to it, and operators of a run, at most: a twentieth above what was
# counted on 2026-11-30 with torch 2.13 and transformers 5.24.
MOST = {
    "sft": (124, 23, 8_600),
    "reward": (56, 29, 6_600),
    "ppo": (778, 120, 53_800),
    "ppo_grpo": (701, 126, 44_800),
}


def run_there(base, name, script, flags, plant=False):
    """Makes a run on the pretended device. Returns its exit code, and how many waits for it, copies
    to it and operators it took."""
    made = runs.run(script, f"{flags} --max_steps 2", zero=2)
    with two_devices.program() as count, pytest.MonkeyPatch.context() as patch:
        if plant:
            own = common.scatter_to
            patch.setattr(common, "scatter_to", lambda wanted, values: own(wanted.cpu(), values))
        facts = runs.make_run(base, name, script, made["flags"])
    counts = sum(count.reads.values()), sum(count.copies.values()), count.operators
    return facts["code"], counts


def ran(name, plant=False):
    given = f"there_{name}{plant}", *PROGRAMS[name], plant
    return kit.fork(run_there, 1, runs.base(), *given, meet="")


@pytest.mark.parametrize("name", EACH)
def test_no_operation_mixes_devices(name):
    """Two steps, with evaluation, samples, microscope and saving. And the host waits no more often
    than it did, and calls no more operators: on a GPU a token of a small batch costs as much time
    as these take to be launched."""
    done = ran(name)
    assert done.code == 0 and done.results[0][0] == 0, done
    _, counts = done.results[0]
    print(name, counts)
    for count, most in zip(counts, MOST.get(name, counts)):
        assert 0.9 * most <= count <= most, "far fewer: does the device still see them?"


def test_a_mix_in_a_script_is_seen():
    """A mask that is left on the CPU, where everything runs on CPU ranks."""
    done = ran("sft", plant=True)
    assert done.code and "Mixed: aten.masked_scatter" in done.err, done
