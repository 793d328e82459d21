"""The labs: each run is a command that parses, each mistake does what it says, and what a page says
is what its runs showed."""

import json
import re
import subprocess
import sys
from itertools import combinations
from math import log
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
import torch

import ppo
import reward
import sft
from machinery.rollout import kept_pass
from tests import kit

LABS = kit.ROOT / "labs"
sys.path.insert(0, str(LABS))
import declared  # noqa: E402
import faults  # noqa: E402
import runner  # noqa: E402

MODULES = {"sft": sft, "reward": reward, "ppo": ppo}


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", declared.LABS)
def test_the_runs_of_a_lab_are_commands_that_parse(name):
    """Each arm, each step: a flag that was renamed would be found an hour into the lab."""
    lab, commands = declared.LABS[name], set()
    assert len(lab.seeds) >= 3 and set(lab.shown) <= set(lab.measures)
    for runs in lab.chains().values():
        for run in runs.values():
            words = run.command(Path("runs"))
            assert not run.fault or run.fault in faults.FAULTS
            if not run.variant:
                MODULES[run.script].get_args(words[words.index(f"{run.script}.py") + 1 :])
            commands.add(tuple(words))
    assert len(commands) >= len(lab.arms) * len(lab.seeds)


def test_a_run_has_one_place_whoever_asks_for_it(tmp_path):
    """Labs share runs: the place depends on the flags, whatever their order, on the seed, on the
    mistake, and on the models that the run starts from."""

    def place(arm, seed=1):
        return declared.lab("t", {"a": arm}).chains()["a", seed]["ppo"].folder(tmp_path)

    plain = place({"ppo": "--clip 0.3 --lam 0.9"})
    assert place({"ppo": "--lam 0.9 --clip 0.3"}) == plain
    others = [place({"ppo": "--clip 0.3"}), place({"ppo": "--clip 0.3 --lam 0.9"}, 2)]
    others += [place({"ppo": "--clip 0.3 --lam 0.9", "fault": "none"})]
    others += [place({"ppo": "--clip 0.3 --lam 0.9", "sft": "--num_train_epochs 9"})]
    assert len({plain, *others}) == 5
    assert runner.merged("--a 1 --b 2 3", "--b 4 --c") == ("--a", "1", "--b", "4", "--c")


def test_runs_are_skipped_resumed_and_their_end_is_noted(tmp_path, monkeypatch, capsys):
    """A run that is there costs nothing, one that was interrupted goes on with --resume, one that
    stopped at a NaN is a result, and any other failure ends the lab with the end of its log. How
    many runs there are is said at once, and Ctrl-C ends with one line."""
    run, calls = runner.Run("sft", ("--max_steps", "2"), 1), []
    folder = run.folder(tmp_path)

    def call(command, stdout, **_):
        calls.append(command)
        stdout.write("what it said")
        return 1

    monkeypatch.setattr(subprocess, "call", call)
    with pytest.raises(SystemExit, match="what it said"):
        runner.make(run, tmp_path)
    assert "--resume" not in calls[0] and not run.is_made(tmp_path)
    (folder / "args.json").write_text("{}")
    (folder / "nonfinite_rank0.jsonl").write_text("")
    runner.make(run, tmp_path)
    assert calls[1][-1] == "--resume"
    assert json.loads((folder / runner.FINISHED).read_text())["stopped"] is True
    assert runner.make(run, tmp_path) == 0 and len(calls) == 2

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make", interrupt)
    other = runner.Run("sft", (), 1)
    with pytest.raises(SystemExit, match="same command"):
        runner.make_all({("a", 1): {"sft": run}, ("b", 1): {"sft": other}}, tmp_path, jobs=1)
    assert "1 runs to make" in capsys.readouterr().out


@pytest.mark.slow
def test_a_lab_at_two_steps_from_its_runs_to_its_picture(tmp_path, monkeypatch):
    """Four runs of two steps each; the second call makes none of them again."""
    few = "--max_steps 2 --log_steps 1"
    models = "--actor_model_name_or_path {sft} --critic_model_name_or_path {reward}"
    base = {
        "sft": f"{few} --num_samples 0",
        "reward": f"--model_name_or_path {{sft}} {few}",
        "ppo": f"{models} {few} --num_eval_prompts 4",
    }
    arms = {"ours": {}, "shifted": {"fault": "shifted"}}
    lab = runner.Lab("t", base, arms, declared.GOLD, ("gold",), seeds=(1,))
    places = [tmp_path / name for name in ("results.json", "page.md", "lab.png")]
    places[1].write_text(runner.MARK * 2)
    runner.study(lab, tmp_path, 2, *places, False)
    found = runner.read(places[0])
    assert [result["arm"] for result in found] == ["ours", "shifted"]
    assert all(0 <= result["values"]["gold"] <= 1 for result in found)
    monkeypatch.setattr(subprocess, "call", None)
    runner.study(lab, tmp_path, 2, *places, False)
    assert runner.table(lab, found) in places[1].read_text()


# --------------------------------------------------------------------------------------------------
# Measures
# --------------------------------------------------------------------------------------------------
def test_best_of_n_is_the_mean_over_all_choices_of_n(tmp_path):
    """Four samples to each of two prompts; the best of every pair, by hand."""
    prompts = [[(0.3, 1.0), (0.1, 0.0), (0.9, 0.5), (0.2, 0.25)], [(4, 1), (3, 0), (2, 1), (1, 0)]]
    lines = [{"reward": r, "gold": g} for each in prompts for r, g in each]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curve = runner.best_of(tmp_path, 4)
    assert curve["n"] == [1, 2, 4] and curve["kl"][0] == 0
    for n, reward_mean, gold in zip(*(curve[key] for key in ("n", "reward", "gold"))):
        best = [max(chosen) for each in prompts for chosen in combinations(each, n)]
        assert reward_mean == pytest.approx(mean(r for r, _ in best))
        assert gold == pytest.approx(mean(g for _, g in best))


def test_calibration_by_hand():
    """Four pairs of which three are right, at a confidence of 3/4: no error. Eight at 0.8808, all
    wrong: 0.8808. Together each bin has the weight of its pairs."""
    sure = [{"chosen_score": s * log(3), "rejected_score": 0.0} for s in (1, 1, 1, -1)]
    wrong = [{"chosen_score": 1.0, "rejected_score": 3.0}] * 8
    assert runner.calibration(sure) == pytest.approx(0)
    assert runner.calibration(sure + wrong) == pytest.approx(0.8808 * 8 / 12, abs=1e-4)


def test_the_actor_is_compared_at_the_averages_kl():
    """The average is at 1.5 nats. The actor was at 1 and at 2: its gold score is in the middle."""
    golds, kls = (0.5, 0.6, 0.8, 0.7), (0, 1, 2, 4)
    lines = [{"eval_kl": kl, "eval_gold": g, "eval_ema_kl": kl} for kl, g in zip(kls, golds)]
    lines[-1]["eval_ema_kl"] = 1.5
    assert runner.gold_at(lines) == pytest.approx(0.7)


def test_an_unfinished_measure_is_left_out_of_the_mean():
    results = [
        {"arm": "a", "seed": 1, "stopped": True, "values": {"gold": None}},
        {"arm": "a", "seed": 2, "stopped": False, "values": {"gold": 0.5}},
    ]
    lab = declared.lab("t", {"a": {}}, {"gold": None})
    assert "| a | 2, 1 stopped at NaN | 0.500 [0.500, 0.500] |" in runner.table(lab, results)


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", declared.LABS)
def test_a_page_says_what_the_results_say(name):
    """The table of a page is made from the committed results, and so is its picture."""
    page, results = (LABS / f"{name}.md").read_text(), runner.read(LABS / f"results/{name}.json")
    for part in ("**The claim.**", "**The hypothesis", "**Verdict.**", f"run.py {name} --plot"):
        assert part in page, part
    [row] = re.findall(rf"^\| \[{name}\].*$", (LABS / "README.md").read_text(), re.M)
    assert runner.table(declared.LABS[name], results) in page
    assert (LABS / f"{name}.png").exists() and f"{name}.png" in row
    assert {result["arm"] for result in results} <= set(declared.LABS[name].arms)


def test_every_picture_can_be_drawn_again(tmp_path):
    """From the committed results alone: dots, and curves."""
    for name in ("ptx", "overoptimisation"):
        results = runner.read(LABS / f"results/{name}.json")
        runner.draw(declared.LABS[name], results, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


# --------------------------------------------------------------------------------------------------
# Mistakes
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def patched(monkeypatch):
    """Gives back what a mistake has patched."""
    names = "actor_forward set_loss_weights whitened reward_model_scores".split()
    for name in names:
        monkeypatch.setattr(ppo, name, getattr(ppo, name))
    monkeypatch.setattr(kept_pass, "roles", kept_pass.roles)
    monkeypatch.setattr(kept_pass.KeptPass, "begin", kept_pass.KeptPass.begin)
    return monkeypatch


@pytest.mark.parametrize(
    "fault, scores, trains",
    [
        ("none", (False, 32, 0), (True, 32, 0)),
        ("dropout_scores", (True, 32, 0), (False, 32, 0)),
        ("bf16_scores", (False, 16, 0), (True, 32, 0)),
        ("bf16_trains", (False, 32, 0), (True, 16, 0)),
        ("shifted", (False, 32, 1), (True, 32, 0)),
    ],
)
def test_a_mistake_changes_the_pass_that_it_names(patched, fault, scores, trains):
    """Whether there is dropout, the bits of a matrix product, and the shift of the log-probs: in
    the pass that scores, in the one that trains, and not in an evaluation."""
    linear, token_shift = torch.nn.Linear(3, 3, bias=False), torch.arange(4.0)[None]
    engine = SimpleNamespace(module=linear, train=linear.train)

    def forward(args, actor, batch, stores):
        bits = torch.finfo(linear(torch.ones(1, 3)).dtype).bits
        return token_shift, (linear.training, bits)

    patched.setattr(ppo, "actor_forward", forward)
    faults.FAULTS[fault]()
    policy = kept_pass.KeptPass(None, "actor", engine, ppo.actor_forward)

    def seen(stores):
        logprobs, (dropout, bits) = ppo.actor_forward(None, engine, None, stores)
        return dropout, bits, int((logprobs[0, 0] - token_shift[0, 0]).item() != 0)

    policy.begin(None, trains=True)
    assert seen(True) == (False, 32, 0), "an evaluation"
    policy.begin(1, trains=True)
    assert seen(True) == scores
    engine.train()
    assert seen(False) == trains and linear.training


def test_the_mistakes_that_no_gate_sees(patched):
    """The mask ends before EOS; advantages are whitened in two halves; scores have an offset."""
    mask, last = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]])
    batch = SimpleNamespace(response_mask=mask, last=last)
    faults.no_eos()
    assert ppo.set_loss_weights([batch]) == 3
    assert batch.loss_weight.tolist() == [[1, 1, 0], [1, 0, 0]]
    faults.whitened_by_halves()
    [white] = ppo.whitened([torch.tensor([[1.0, 3.0], [10.0, 30.0]])], [torch.ones(2, 2)])
    assert white.round(decimals=5).tolist() == [[-1, 1], [-1, 1]]
    patched.setattr(ppo, "reward_model_scores", lambda model, batch: torch.zeros(2, 3))
    faults.offset(2.0)
    assert ppo.reward_model_scores(None, batch).equal(2.0 * last)
