"""For the lead: one test of machinery/rollout/kept_pass.py, which goes; and names that old files of
tests still import from here. The rest is in engine/, rollout/test_ppo_runs.py and
run/test_resumed_runs.py."""

import pytest

import ppo
from machinery.rollout import kept_pass
from tests.kit import TOKENIZER, weights  # noqa: F401
from tests.runs import *  # noqa: F401, F403


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("", ("actor", "critic")),
        ("--critic_dropout 0.1", ("actor",)),
        ("--actor_dropout 0.1", ("critic",)),
        ("--actor_dropout 0.1 --advantage reinforce", ()),
        ("--gradient_accumulation_steps 2", ()),
        ("--allow_unstable 1 --ppo_epochs 2", ()),
    ],
)
def test_a_pass_with_dropout_is_not_kept(flags, kept):
    """It would store numbers with dropout. With --first_pass_gate 0 an actor's went unseen: its
    ratio was 1 because both passes were one."""
    models = ["--actor_model_name_or_path", TOKENIZER, "--critic_model_name_or_path", TOKENIZER]
    assert kept_pass.roles(ppo.get_args(["--preset", "toy", *models, *flags.split()])) == kept
