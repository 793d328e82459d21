"""The labs: each rule of thumb is a declaration, its runs are commands that parse, its mistakes do
what they say, and what its page says is what its runs showed."""

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
from conftest import ROOT

import ppo
import reward
import sft
from machinery.data import rows
from machinery.rollout import kept_pass, reward_functions, samples

LABS = ROOT / "labs"
sys.path[:0] = [str(LABS)]
import declared  # noqa: E402
import faults  # noqa: E402
import run as lab_runs  # noqa: E402

MODULES = {"sft": sft, "reward": reward, "ppo": ppo}


# --------------------------------------------------------------------------------------------------
# Declarations and commands
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", declared.LABS)
def test_the_runs_of_a_lab_are_commands_that_parse(name):
    """Each arm, each step: a flag that was renamed would be found an hour into the lab."""
    lab, commands = declared.LABS[name], set()
    assert len(lab.seeds) >= 3 and set(lab.shown) <= set(lab.measures)
    for arm in lab.arms.values():
        assert arm.get("fault", "none") in faults.FAULTS
        for script, run in lab_runs.chain(lab, arm, lab.seeds[0]).items():
            words = run.command(Path("runs"))
            args = MODULES[script].get_args(words[words.index(f"{script}.py") + 1 :])
            assert args.seed == lab.seeds[0] and args.preset == "toy"
            commands.add(tuple(words))
    assert len(commands) >= len(lab.arms)


def test_a_run_has_one_place_whoever_asks_for_it(tmp_path):
    """Labs share runs: the place depends on the flags, whatever their order, on the seed, on the
    mistake, and on the models that the run starts from."""
    lab = declared.LABS["rates"]

    def place(arm, seed=1, lab=lab):
        return lab_runs.chain(lab, arm, seed)["ppo"].folder(tmp_path)

    plain = place({"ppo": "--clip 0.3 --lam 0.9"})
    assert place({"ppo": "--lam 0.9 --clip 0.3"}, lab=declared.LABS["stability"]) == plain
    others = [place({"ppo": "--clip 0.3"}), place({"ppo": "--clip 0.3 --lam 0.9"}, 2)]
    others += [place({"ppo": "--clip 0.3 --lam 0.9", "fault": "none"})]
    others += [place({"ppo": "--clip 0.3 --lam 0.9", "sft": "--num_train_epochs 9"})]
    assert len({plain, *others}) == 5
    assert lab_runs.merged("--a 1 --b 2 3", "--b 4 --c") == ("--a", "1", "--b", "4", "--c")


def test_runs_are_skipped_resumed_and_their_end_is_noted(tmp_path, monkeypatch):
    """A run that is there costs nothing, one that was interrupted goes on with --resume, one that
    stopped at a NaN is a result, and any other failure ends the lab with the end of its log."""
    run, calls = lab_runs.Run("sft", ("--max_steps", "2"), 1), []
    folder, ends = run.folder(tmp_path), [0]

    def call(command, stdout, **_):
        calls.append(command)
        stdout.write("what it said")
        return ends[0]

    monkeypatch.setattr(subprocess, "call", call)
    lab_runs.make(run, tmp_path)
    assert "--resume" not in calls[0] and lab_runs.make(run, tmp_path) == 0 and len(calls) == 1
    (folder / lab_runs.FINISHED).unlink()
    (folder / "args.json").write_text("{}")
    ends[0] = 1
    with pytest.raises(SystemExit, match="what it said"):
        lab_runs.make(run, tmp_path)
    assert calls[1][-1] == "--resume" and not (folder / lab_runs.FINISHED).exists()
    (folder / "nonfinite_rank0.jsonl").write_text("")
    lab_runs.make(run, tmp_path)
    assert json.loads((folder / lab_runs.FINISHED).read_text())["stopped"] is True


# --------------------------------------------------------------------------------------------------
# Measures
# --------------------------------------------------------------------------------------------------
def test_best_of_n_is_the_mean_over_all_choices_of_n(tmp_path):
    """Four samples to each of two prompts; the best of every pair, by hand."""
    prompts = [[(0.3, 1.0), (0.1, 0.0), (0.9, 0.5), (0.2, 0.25)], [(4, 1), (3, 0), (2, 1), (1, 0)]]
    lines = [{"reward": r, "gold": g} for each in prompts for r, g in each]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curve = lab_runs.best_of(tmp_path, 4)
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
    assert lab_runs.calibration(sure) == pytest.approx(0)
    assert lab_runs.calibration(wrong) == pytest.approx(0.8808, abs=1e-4)
    assert lab_runs.calibration(sure + wrong) == pytest.approx(0.8808 * 8 / 12, abs=1e-4)


def test_the_actor_is_compared_at_the_averages_kl():
    """The average is at 1.5 nats. The actor was at 1 and at 2: its gold score is in the middle."""
    golds, kls = (0.5, 0.6, 0.8, 0.7), (0, 1, 2, 4)
    lines = [{"eval_kl": kl, "eval_gold": g, "eval_ema_kl": kl} for kl, g in zip(kls, golds)]
    lines[-1]["eval_ema_kl"] = 1.5
    assert lab_runs.gold_at(lines) == pytest.approx(0.7)


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", declared.LABS)
def test_a_page_says_what_the_results_say(name):
    """The table of a page is made from the committed results. A lab that was not run claims no
    number."""
    page, results = (LABS / f"{name}.md").read_text(), lab_runs.read_results(name)
    for part in (
        "**The claim.**",
        "**The hypothesis",
        "**Verdict.**",
        f"labs/run.py {name} --plot",
    ):
        assert part in page, part
    [row] = re.findall(rf"^\| \[{name}\].*$", (LABS / "README.md").read_text(), re.M)
    if not results:
        assert "Not run yet" in page and "not run yet" in row
        assert not (LABS / f"{name}.png").exists()
        return
    assert lab_runs.table(declared.LABS[name], results) in page
    assert (LABS / f"{name}.png").exists() and f"{name}.png" in row and "not run" not in row
    assert {result["arm"] for result in results} <= set(declared.LABS[name].arms)


def test_every_picture_can_be_drawn_again(tmp_path):
    """From the committed results alone."""
    for name, lab in declared.LABS.items():
        if results := lab_runs.read_results(name):
            lab_runs.draw(lab, results, tmp_path / f"{name}.png")
            assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_an_unfinished_measure_is_left_out_of_the_mean():
    results = [
        {"arm": "a", "seed": 1, "stopped": True, "values": {"gold": None}},
        {"arm": "a", "seed": 2, "stopped": False, "values": {"gold": 0.5}},
    ]
    lab = declared.Lab("t", {"a": {}}, {"gold": None})
    assert "| a | 2, 1 stopped at NaN | 0.500 [0.500, 0.500] |" in lab_runs.table(lab, results)


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


# --------------------------------------------------------------------------------------------------
# What the labs needed of the scripts
# --------------------------------------------------------------------------------------------------
def test_step_1_grades_its_samples(tmp_path, tiny_model, tokenizer):
    """--gold_fn gets the prompt, the response and the data's other columns, as in step 3; its mean
    is eval_gold, and each grade stands beside its response."""
    (tmp_path / "g.py").write_text(
        "def level(prompts, completions, level, **columns):\n"
        "    assert len(prompts) == len(completions)\n    return level\n"
    )
    graded = dict(prompt="Why?", response=" So.")
    made = [
        rows.tokenise_row({**graded, "level": n}, tokenizer, "sft", 64, graded=True) for n in (1, 4)
    ]
    assert rows.tokenise_row({**graded, "level": 1}, tokenizer, "sft", 64)["extra"] == ""
    args = SimpleNamespace(gold_fn=f"{tmp_path}/g.py:level", num_samples=2)
    args.max_answer_seq_len, args.max_seq_len = 4, 64
    kept = []
    run = SimpleNamespace(args=args, samples=kept.extend)
    gold = reward_functions.load(args)[1]
    metrics = samples.answer_and_keep(run, tiny_model, tokenizer, made, 0, gold)
    assert metrics == {"eval_gold": 2.5} and [line["gold"] for line in kept] == [1, 4]
    assert samples.answer_and_keep(run, tiny_model, tokenizer, made, 0) == {}


@pytest.mark.parametrize("gate, stops", [(1, True), (0, False)])
def test_the_gate_is_lifted_knowingly(gate, stops):
    """--first_pass_gate 0 goes on with a ratio that is not 1: for those who study a mistake."""
    ended = []
    args = SimpleNamespace(first_pass_gate=gate, dtype="fp32")
    run = SimpleNamespace(args=args, step=1, finish=lambda code: ended.append(code))
    ratio, mask = torch.tensor([[1.0, 1.5]]), torch.ones(1, 2)
    kept_pass.first_pass_gate(run, SimpleNamespace(keeps=False), ratio, mask)
    assert bool(ended) == stops


# --------------------------------------------------------------------------------------------------
# A whole lab, small
# --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_lab_at_two_steps_from_its_runs_to_its_picture(tmp_path, monkeypatch):
    """Four runs of two steps each; the second call makes none of them again."""
    few = "--max_steps 2 --log_steps 1"
    base = {"sft": f"{few} --num_samples 0", "reward": few, "ppo": f"{few} --num_eval_prompts 4"}
    monkeypatch.setattr(lab_runs, "BASE", base)
    arms = {"ours": {}, "shifted": {"fault": "shifted", "ppo": "--first_pass_gate 0"}}
    lab = declared.Lab("A small lab", arms, seeds=(1,))
    lab_runs.make_all(lab, tmp_path, jobs=2)
    found = lab_runs.collect(lab, tmp_path)
    assert [result["arm"] for result in found] == ["ours", "shifted"]
    assert all(0 <= result["values"]["gold"] <= 1 for result in found)
    monkeypatch.setattr(subprocess, "call", None)
    lab_runs.make_all(lab, tmp_path, jobs=2)
    lab_runs.draw(lab, found, tmp_path / "lab.png")
    assert (tmp_path / "lab.png").stat().st_size > 5_000
