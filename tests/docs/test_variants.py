"""The variants: each is a small diff, or a new script, and each still applies, learns the same
however it is laid out, and says what its runs have shown.
"""

import contextlib
import itertools
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import kit
from tests.conftest import micro_batch
from tests.rollout import vllm_stub
from tests.tiny_models import StandIn
from tools import fork

VARIANTS = kit.ROOT / "variants"
variants = kit.import_file(VARIANTS / "run.py")
pages, runner = variants.pages, variants.runner
pictures = pages.pictures


def patched(name, folder, script="ppo.py"):
    """Returns a script with the variant's diff, as a module."""
    runner.apply(name, folder / "tree")
    return kit.import_file(folder / "tree" / script)


def test_a_variant_replaces_no_file_of_ones_own(tmp_path):
    """Nor does half of it go in: its diff is not applied either. Once more, unchanged, it does."""
    runner.apply("gspo", tree := tmp_path / "tree")
    (tree / "dpo.py").write_text("my own edits\n")
    before = kit.tree(tree)
    with pytest.raises(SystemExit, match="dpo.py is there"):
        variants.put("dpo", tree)
    assert kit.tree(tree) == before
    (tree / "dpo.py").unlink()
    for _ in range(2):
        variants.put("dpo", tree)


def test_variants_that_exclude_each_other_say_so(tmp_path):
    """With the line that undoes the one that is there; after it the other one goes on. Also in a
    tree inside another repository: git looks for the diff's files at the top of that one, finds
    none, and takes the diff for one that can be applied, and be taken back, to no effect."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    runner.apply("", tree := tmp_path / "tree")
    (tree / "variants").symlink_to(VARIANTS)
    unchanged = (tree / "ppo.py").read_text()
    variants.put("gspo", tree)
    assert (tree / "ppo.py").read_text() != unchanged
    for name, words in (("gspo", "gspo is applied already"), ("ptx", "ptx does not go")):
        with pytest.raises(SystemExit, match=words) as error:
            variants.put(name, tree)
        [undo] = re.findall("gspo is applied.*To undo it: (.*)", str(error.value))
    subprocess.run(undo.split(), cwd=tree, check=True)
    assert (tree / "ppo.py").read_text() == unchanged
    variants.put("ptx", tree)
    assert (tree / "ptx.py").is_file()


def test_the_pages_say_what_the_runs_showed():
    """The table of each page, and that of all variants, are made from their results."""
    for name in variants.NAMES:
        page = (VARIANTS / name / "README.md").read_text()
        results = variants.results_of(name)
        if results:
            lab = variants.lab_of(name, kit.ROOT)
            assert f"{pages.BEGIN}\n{pages.table(lab, results)}\n{pages.END}" in page, name
            assert pictures.of_lab(lab, results).axes, name
    assert variants.overview() in (kit.ROOT / "docs/variants.md").read_text()


MODELS = {"sft": "actor", "reward": "reward", "measured": "measured"}


def tiny_data():
    return f"--data_path {kit.base()}/data --data_split 1,1,1".split()


@pytest.fixture
def forked(monkeypatch, capsys):
    """forked(a word, ...): the exit code of tools/fork.py --quick, and what it has printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fork.py", "--quick", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            fork.main()
        return left.value.code, capsys.readouterr().out

    return run


def test_a_small_kl_may_differ_by_more_than_another_small_metric():
    """In a response's KL near 0 rounding shows sooner. A mean over tokens has no such room."""
    for name, differs in (("eval_kl", False), ("approx_kl", True)):
        gap, where = fork.difference({4: {name: 1.271e-3}}, {4: {name: 1.269e-3}})
        assert (gap > 1e-3) == differs and name in where


@pytest.mark.parametrize("other", [1.0, 1.1, math.nan])
@pytest.mark.parametrize("place", ["2_ranks_ZeRO_3", "resumed"])
def test_a_layout_that_learns_otherwise_is_named(place, other, tmp_path, monkeypatch, forked):
    """Its exit code is 1 then. A NaN is the largest difference, whatever comes after it."""

    def launch(options, known, folder, layout, *more):
        (folder / "checkpoints/step-2").mkdir(parents=True, exist_ok=True)
        loss = other if folder.name == place else 1.0
        lines = [{"step": step, "loss": loss, "reward": 1.0} for step in range(1, 5)]
        kit.write_lines(folder / "metrics.jsonl", lines)

    monkeypatch.setattr(fork, "launch", launch)
    monkeypatch.setattr(fork, "start", lambda *_: SimpleNamespace(stdout=""))
    code, out = forked("--keep", tmp_path, "x.py")
    assert code == ("DIFFERS" in out) == (other != 1)
    assert "NOT looked at: filler rows" in out  # this script does not know --data_split


def starting(tree):
    """Returns what takes the place of fork.start: it forks the ranks of a script of a tree."""

    def start(script, flags, ranks=1):
        given = str(tree), Path(script).stem, [str(flag) for flag in flags]
        env = {"VLLM_STUB": "model"}
        done = kit.fork(kit.call_of_tree, ranks, *given, cwd=tree, meet="", env=env)
        return subprocess.CompletedProcess([script, *given[2]], done.code, done.out, done.err)

    return start


MISTAKES = {
    "fillers are learned": (
        "sft.py",
        "evaluate_at, COLUMNS, collate_rows)",
        "evaluate_at, COLUMNS, lambda rows: collate_rows([{**r, 'row_weight': 1} for r in rows]))",
    ),
    "a mean of the ranks' means": (
        "reward.py",
        "pairs = ranks.all_sum(sum(batch.row_weight.sum() for batch in micro_batches)).item()",
        "pairs = ranks.get_world_size() * sum(b.row_weight.sum() for b in micro_batches).item()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_only_filler_rows_show_is_named(mistake, tmp_path, monkeypatch, forked):
    """Without them the layouts learn the same, and resuming is exact."""
    script, right, wrong = MISTAKES[mistake]
    runner.apply("", tree := tmp_path / "tree")
    text = (tree / script).read_text()
    assert text.count(right) == 1
    (tree / script).write_text(text.replace(right, wrong))
    monkeypatch.setattr(fork, "start", starting(tree))
    monkeypatch.setattr(fork, "QUICK", (fork.FIRST, fork.WHOLE))
    flags = ["--preset", "toy", "--model_name_or_path", kit.base() / "models/actor"]
    flags += [*tiny_data(), "--data_split", "32,32,2"]
    code, out = forked("--keep", tmp_path / "runs", tree / script, *flags)
    assert code == 1 and "steps with 2 filler rows" in out
    differ = [line for line in out.splitlines() if line.endswith("DIFFERS")]
    assert [line[: len(fork.FILLED)] for line in differ] == [fork.FILLED, "DIFFERS"], out


NEXT = {  # what a step makes of a number, and of a metric, for the step that follows
    "adaptive-kl": ("kl_coef", "kl", lambda x, kl: x * (1 + 0.1 * min(max(kl / 2 - 1, -0.2), 0.2))),
    "lagrangian": (
        "multiplier",
        "reward_1_exclaims",
        lambda x, cost: x * math.exp(0.1 * x * (cost - 0.3)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.NAMES)
def test_a_variant_is_equal_on_all_layouts_and_resumed(name, tmp_path, monkeypatch, forked):
    """tools/fork.py on tiny models and data, and on forked ranks: ZeRO stages, --resume. A number
    that each step makes of the one before goes on from the checkpoint, and not from its flag."""
    tree, models, what = tmp_path / "tree", kit.base() / "models", variants.declared(name)
    runner.apply(name, tree)
    script, text = what["check"]
    given = {name: models / each for name, each in MODELS.items()}
    given["vllm"] = vllm_stub.fake_python(tmp_path)  # it samples with transformers
    if "{made}" in text:
        variants.make_data(name, tmp_path / "made")
        given["made"] = tmp_path / "made"
    flags = shlex.split(text.replace("recipes/toy/data", f"{kit.base()}/data").format(**given))
    flags += tiny_data() * ("--data_path" not in flags)
    # not the toy's 48: decoding takes the longest, and responses still end at all lengths
    flags += ["--max_answer_seq_len", "12"] * (script != "reward.py")
    monkeypatch.setattr(fork, "start", starting(tree))
    own = ["--rows", what.get("rows", 8), "--keep", tmp_path / "runs", *what.get("fork", [])]
    code, out = forked(*own, tree / script, *flags)
    assert code == 0, out
    if name in NEXT:
        number, metric, after = NEXT[name]
        lines = kit.read_lines(tmp_path / "runs/resumed/metrics.jsonl")
        lines = [line for line in lines if number in line]
        assert len(lines) == 4
        for line, following in itertools.pairwise(lines):
            expected = after(line[number], line[metric])
            assert following[number] == pytest.approx(expected) != line[number]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_variant_is_checked_by_commands(ranks, tmp_path, monkeypatch):
    """`make variants` makes two steps, and then calls tools/fork.py. Here the steps are really made
    as it starts a script: by itself, and with torchrun."""
    commands = []
    monkeypatch.setattr(variants, "call", lambda words, _: commands.append([*map(str, words)]))
    variants.check("dpo", kit.base() / "models", tmp_path, "--quick")
    (_, script, *flags), (_, program, *options) = commands
    monkeypatch.chdir(tmp_path / "tree")
    monkeypatch.setattr(sys, "argv", [program, *options])
    assert fork.get_options().quick and fork.get_options().script == script
    flags += ["--model_name_or_path", kit.base() / "models/actor", *tiny_data()]
    done = fork.start(script, flags, ranks)
    assert done.returncode == 0 and f"done: {tmp_path}/steps" in done.stdout, done.stderr


# --------------------------------------------------------------------------------------------------
# Their maths, by hand
# --------------------------------------------------------------------------------------------------
ROW = dict(prompt_ids=[5, 6], row_weight=1)


def numbers(tensor):
    return [round(x, 4) for x in tensor.flatten().tolist()]


def args_of(script, words=""):
    return script.get_args(f"--preset toy {words}".split())


def loss_of(ppo, words, new, **given):
    """Returns what actor_loss does, of tokens with new log-probs."""
    vars(batch := micro_batch()).update(given)
    return ppo.actor_loss(args_of(ppo, f"--kl_coef 0 {words}"), batch, new, None)


def test_the_losses_of_dpo(tokenizer, tiny_model):
    """Implicit rewards are beta * (log pi - log ref), summed over a response; SimPO's are beta
    times the mean of log pi. Equal ones cost log 2 in DPO. IPO wants a difference of 1 / (2 beta),
    SimPO one of its margin and more. A filler pair counts nothing."""
    dpo = kit.import_file(VARIANTS / "dpo/dpo.py")
    args = args_of(dpo, "--beta 0.5")
    row = {**ROW, "responses": [[8, 9, 1], [10, 1]]}
    batch = dpo.collate([row, {**row, "row_weight": 0}], tokenizer.pad_token_id)
    assert batch.loss_mask.tolist() == [[1, 1, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]]
    rewards = dpo.implicit_rewards(args, tiny_model, tiny_model, batch)
    assert not torch.cat(rewards).any()
    args.loss = "simpo"
    chosen, rejected = dpo.implicit_rewards(args, tiny_model, None, batch)
    logits = tiny_model(torch.tensor([[5, 6, 8, 9, 1]])).logits[0].log_softmax(-1)
    by_hand = (logits[1, 8] + logits[2, 9] + logits[3, 1]) / 3 * 0.5
    assert chosen[0].item() == pytest.approx(by_hand.item(), abs=1e-5)
    args.beta, given = 0.1, [torch.tensor(x) for x in ([0.3, 1.0, 0.5], [0.3, -1.0, 0.0])]
    losses = {"sigmoid": [0.6931, 0.1269, 0.4741], "ipo": [25, 225, 0]}  # log(1 + e^-2), 5^2
    losses["simpo"] = [0.9741, 0.2014, 0.6931]  # log(1 + e^(margin - difference))
    for args.loss, expected in losses.items():
        assert dpo.pair_loss(args, *given).tolist() == pytest.approx(expected, abs=1e-4)
        loss_sum, sums = dpo.pair_sums(args, *given, torch.tensor([0.0, 1, 0]))
        assert loss_sum.item() == sums[0].item() == pytest.approx(expected[1], abs=1e-4)


def test_ktos_loss_by_hand():
    """r is 2, and z0 is 1: beta * (r - z0) is 0.5, whose sigmoid is 0.6225. A good response has
    what is missing to 1, a bad one the rest. At z0 both have half of their weight."""
    kto = kit.import_file(VARIANTS / "kto/kto.py")
    args = args_of(kto, "--beta 0.5 --lambda_bad 2")
    ratios = torch.tensor([2.0, 2.0, 1.0, 1.0], requires_grad=True)
    loss = kto.kto_loss(args, ratios, torch.tensor([1, 0, 1, 0]), z0=1.0)
    assert numbers(loss) == [0.3775, 1.2449, 0.5, 1.0]
    (gradient,) = torch.autograd.grad(loss.sum(), ratios)  # -+ lambda * beta * sigmoid * (1 - it)
    assert numbers(gradient) == [-0.1175, 0.235, -0.125, 0.25]


def test_ktos_reference_point_by_hand(tokenizer, monkeypatch):
    """Five rows: each has the response of the row two further on, cut to its own room. The mean of
    their log-ratios is z0, without a filler, and 0 if it is negative. A row that is alone has no
    partner."""
    kto = kit.import_file(VARIANTS / "kto/kto.py")
    args = args_of(kto, "--max_seq_len 4")
    rows = [{**ROW, "row": i, "responses": [[20 + i, 9, 1], [30 + i, 1]]} for i in range(5)]
    rows = [kto.labelled(args, row) for row in rows]
    assert [row["responses"] for row in rows[:2]] == [[[20, 9, 1]], [[31, 1]]]
    assert [row["good"] for row in rows] == [1, 0, 1, 0, 1]
    filler = {**rows[0], "row": -1, "row_weight": 0}
    made = kto.mismatched(args, [rows[3], rows[0], filler], rows[::-1])
    assert [row["responses"] for row in made] == [[[20, 9]], [[22, 9]], [[20, 9]]]
    assert kto.mismatched(args, [rows[3]], [rows[3]])[0]["row_weight"] == 0
    batch, engine = kto.collate(made, tokenizer.pad_token_id), torch.nn.Module()
    assert batch.good.tolist() == [0, 1, 1]
    for ratios, mean in (([3.5, -0.5, 9.0], 1.5), ([-2.5, -0.5, 9.0], -1.5)):
        monkeypatch.setattr(kto, "log_ratios", lambda *_, found=ratios: torch.tensor(found))
        assert kto.reference_point(engine, None, [batch]) == (max(mean, 0), mean)


def test_kto_reads_a_column_of_labels():
    """True, false, 1 and 0 are labels; what is none is refused, with its place."""
    kto = kit.import_file(VARIANTS / "kto/kto.py")
    args = args_of(kto, "--label good")
    row = {"row": 4, "responses": [[7, 1]], "place": "rows.jsonl, line 5"}
    for said, good in (("true", 1), ("false", 0), ("0.0", 0), ('"yes"', None), ("null", None)):
        given = args, {**row, "extra": f'{{"good": {said}}}'}
        with kit.refuses("no-label") if good is None else contextlib.nullcontext():
            assert kto.labelled(*given)["good"] == good


def test_the_gspo_variant_by_hand(tmp_path):
    """One ratio a response, the geometric mean of its tokens': e^-0.1, and e^0.3, which is clipped.
    What is returned is each token's. RLOO's advantage is n / (n - 1) times Dr. GRPO's."""
    ppo, mask = patched("gspo", tmp_path), torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    new = torch.tensor([[0.3, -0.5, 9.0], [0.2, 0.4, 0.3]])
    given = dict(response_mask=mask, old_logprobs=0 * mask, advantages=mask)
    loss, ratio, clipped = loss_of(ppo, "--ratio sequence", new, **given)
    assert numbers(loss[:, 0]) == [-0.9048, -1.2] and clipped[:, 0].tolist() == [False, True]
    assert ratio.equal(new.exp())
    totals, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    assert numbers(ppo.dr_grpo(totals, groups)) == [-1, 1, 0, 0]
    assert ppo.rloo(totals, groups).equal(2 * ppo.dr_grpo(totals, groups))


def test_the_cispo_variant_by_hand(tmp_path):
    """At a ratio of 1 the gradient is PPO's. Above the bound PPO has none, and CISPO's is the bound
    times the advantage; a ratio below 1 weighs as it is, whatever the advantage's sign."""
    ppo, old = patched("cispo", tmp_path), torch.zeros(4)
    new = torch.tensor([0.0, 1.0, 1.0, -1.0], requires_grad=True)  # ratios 1, e, e, 1 / e
    given = dict(old_logprobs=old, advantages=torch.tensor([2.0, 2.0, -2.0, 2.0]))
    for loss, expected in (("cispo", [-2, -3, 3, -0.7358]), ("ppo", [-2, 0, 5.4366, -0.7358])):
        words = f"--policy_loss {loss} --clip_high 0.5"
        loss, _, clipped = loss_of(ppo, words, new, **given)
        assert numbers(torch.autograd.grad(loss.sum(), new)[0]) == expected
    clipped = loss_of(ppo, "--policy_loss cispo --clip 0.2", new, **given)[2]
    assert clipped.tolist() == [False, True, True, False]


def test_the_band_variant_by_hand(tmp_path):
    """The mean log ratio decides, over real tokens: 0.5 and -0.1 make 0.2 = log(1.22). What a cut
    response, or one outside of the band, had for tokens is no part of any divisor either."""
    ppo = patched("band", tmp_path)
    scored = torch.tensor([[-1.0, -1.0, 9.0], [-1.0, -1.0, -1.0], [-3.0, -1.0, -1.0]])
    sampled = torch.tensor([[-1.5, -0.9, 0.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 1, 1]])
    for band, expected in ((1.3, [1, 1, 0]), (1.2, [0, 1, 0]), (2.0, [1, 1, 1])):
        assert numbers(ppo.in_band(scored, sampled, mask, band)) == expected, band
    args = args_of(ppo, "--mask_truncated 1 --is_band 1.2 --max_answer_seq_len 3")
    given = dict(response_mask=mask, old_logprobs=scored, per_token={"sampled_logprobs": sampled})
    for ended, tokens, responses in (([1.0, 1, 1], 3, 1), ([1.0, 0, 1], 0, 0)):
        batch = micro_batch(ended=torch.tensor(ended), **given)
        masks = [ppo.trained_mask(args, batch)]
        for args.loss_mean, expected in (("tokens", tokens), ("responses", responses)):
            weights, divisor = ppo.loss_weights(args, masks)
            assert divisor == expected and weights[0].sum() == pytest.approx(expected)
    batch.row_weight = torch.tensor([1.0, 1, 0])  # the last one is a filler
    assert ppo.band_means(args, [batch]) == {"in_band_fraction": 0.5}


def test_the_dppo_variant_by_hand(tmp_path):
    """A likely token that has lost 0.2 is dropped where its advantage is negative, and where that
    is positive it comes back. A rare one that is ten times as likely as before trains on, though
    PPO clips it. A token that was certain, and is, has no divergence."""
    ppo = patched("dppo", tmp_path)
    old, new = (torch.tensor(x).log() for x in ([0.9, 0.9, 1e-3, 1.0], [0.7, 0.7, 1e-2, 1.0]))
    given = dict(old_logprobs=old, advantages=torch.tensor([-1.0, 1.0, 1.0, 1.0]))
    assert loss_of(ppo, "", new.requires_grad_(), **given)[2].tolist() == [1, 0, 1, 0]
    # KL: 0.9 * log(0.9 / 0.7) + 0.1 * log(0.1 / 0.3) = 0.1163, of the rare token 0.0067
    bounds = ("tv", 0.19, 1), ("tv", 0.21, 0), ("kl", 0.116, 1), ("kl", 0.117, 0)
    for trust_region, most, first in bounds:
        words = f"--trust_region {trust_region} --max_divergence {most}"
        loss, ratio, dropped = loss_of(ppo, words, new, **given)
        assert dropped.tolist() == [first, 0, 0, 0], (trust_region, most)
        (gradient,) = torch.autograd.grad(loss.sum(), new)  # -ratio * A
        assert numbers(gradient) == [0.7778 * (1 - first), -0.7778, -10, -1] == numbers(loss)


def test_the_entropy_mask_variant_by_hand(tmp_path):
    """Of eight tokens that count, in two micro-batches, a quarter trains: two of the first one. KL
    in the loss counts on the others, too, unless the divisor leaves them out."""
    ppo, ones = patched("entropy-mask", tmp_path), torch.ones(2, 2)
    words = "--top_entropy 0.25 --kl_coef 1 --kl_in loss --kl_estimator k2"
    entropies = [[0.1, 0.9], [0.8, 0.2]], [[0.3, 0.4], [0.5, 0.6]], [[9.0, 9], [9, 9]]
    given = zip(entropies, (ones, ones, 0 * ones))  # the third holds fillers
    batches = [micro_batch(entropy=torch.tensor(e), response_mask=mask) for e, mask in given]
    ppo.mark_forks(args_of(ppo, words), batches)
    masks = [batch.forks for batch in batches]
    assert [numbers(mask) for mask in masks] == [[0, 1, 1, 0], [0] * 4, [0] * 4]
    given = dict(old_logprobs=0 * ones, advantages=ones, ref_logprobs=ones)
    loss, *_ = loss_of(ppo, words, 0 * ones, forks=masks[0], **given)  # KL: 1 ** 2 / 2
    assert numbers(loss) == [0.5, -0.5, -0.5, 0.5]
    # with --divide_by kept, optimizer_step passes these masks on
    assert ppo.loss_weights(args_of(ppo), masks)[1] == 2


def test_the_remax_variant_by_hand(tmp_path, tiny_model, tokenizer):
    """One likeliest response to each prompt: its reward is the baseline of all of the prompt's,
    clipped and without KL as it has no log-probs. KL of the tokens to come still counts."""
    ppo, seen = patched("remax", tmp_path), []

    def judge(batch):
        seen.extend(row["prompt_ids"] + row["response_ids"] for row in batch.responses)
        return batch.last * torch.tensor([[9.0], [2.0]])

    models = SimpleNamespace(actor=tiny_model, functions={}, judge=judge)
    rows = [dict(ROW, prompt_ids=[5 + i], row=i, group=i, sample=n) for i in (0, 1) for n in (0, 1)]
    ppo.score_likeliest(args_of(ppo, "--max_answer_seq_len 4"), models, tokenizer, rows, 5)
    assert [row["likeliest"] for row in rows] == [5, 5, 2, 2]
    greedy = tiny_model.generate(torch.tensor([[5], [6]]), do_sample=False, max_new_tokens=4)
    assert seen == greedy.tolist()
    rewards, ones = torch.tensor([[-0.1, 4.0], [-0.1, 3.0]]), torch.ones(2, 2)
    batch = micro_batch(responses=rows[1:3], rewards=rewards, response_mask=ones)
    advantages, returns = ppo.remax_advantages(args_of(ppo), batch)
    assert numbers(advantages) == [-1.1, -1, 0.9, 1] and returns is None


def test_the_ensemble_variant_by_hand(tmp_path):
    """Each judge is the harshest one of another response, and all its tokens count there: a minimum
    token by token would mix the two."""
    runner.apply("ensemble", tmp_path / "tree")
    several = kit.import_file(tmp_path / "tree/machinery/judges.py")
    first, second = torch.tensor([[0.0, 1.0], [0, 3]]), torch.tensor([[0.0, 2.0], [1, 1]])
    judges = [lambda batch: first, lambda batch: second]
    args = SimpleNamespace(reward_fn=["a.py:one", "a.py:two"], reward_model_name_or_path=[])
    expected = {"sum": [[0, 3], [1, 4]], "mean": [[0, 1.5], [0.5, 2]], "min": [[0, 1], [1, 1]]}
    for args.reward_combine, scores in expected.items():
        batch = SimpleNamespace(responses=[{}, {}])
        assert several.sum_and_note(args, judges)(batch).tolist() == scores
        assert batch.responses[1] == {"reward_1_one": 3, "reward_2_two": 2}


def test_the_dynamic_sampling_variant_by_hand(tmp_path, tokenizer):
    """The second prompt's responses are equally good, and so are those to the one that replaces it;
    the next one's are not. Another prompt stays as it is. And no two groups get the same prompt:
    their responses would be the same, too."""
    ppo, answer = patched("dynamic-sampling", tmp_path), dict(response_ids=[7], ended=1.0)

    def roll_out(args, actor, tokenizer, prompts, *others):
        rewarded = [{**row, "reward": row["sample"] * (row["turn"] == 2)} for row in prompts]
        return [{**row, **answer} for row in rewarded]

    def judge(batch):
        return torch.tensor([[float(row["reward"])] for row in batch.responses])

    def replaced(*rewards):
        numbered = [dict(ROW, group=i // 2, row=i // 2, reward=x) for i, x in enumerate(rewards)]
        rows = [{**row, **answer} for row in numbered]
        return rows, ppo.replaced(args, models, tokenizer, [{"prompt_ids": [5]}] * 9, rows, 5)

    args = args_of(ppo, "--dynamic_sampling 3 --samples_per_prompt 2 --advantage grpo")
    models = SimpleNamespace(judge=judge, actor=None, functions={}, roll_out=roll_out)
    rows, found = replaced(0, 1, 1, 1)
    assert found[:2] == rows[:2] and [row["turn"] for row in found[2:]] == [2, 2]
    _, found = replaced(*[1] * 18)
    assert {row["turn"] for row in found} == {2}
    assert sorted(row["row"] for row in found) == sorted([*range(9)] * 2)


def test_points_stand_where_a_sentence_ends(tokenizer):
    """The process reward and its sum: a kind remark 0.5, a whole right answer 1."""
    steps = kit.import_file(VARIANTS / "process-reward/steps.py")
    prompt = "How does the otter get to the mill?\nAnswer:"
    text = " Happy to help! The otter gets to the mill by boat."
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    (given,) = steps.steps([prompt], [text], [ids])
    ends = {tokenizer.decode(ids[: i + 1]): x for i, x in enumerate(given) if x}
    assert ends == {" Happy to help!": 0.5, text: 1.0}
    wrong = " The owl gets to the mill by"
    assert steps.whole([prompt] * 2, [text, wrong]) == [1.5, pytest.approx(1 / 3)]


def test_a_judge_behind_a_server_grades(monkeypatch):
    """The stub grades the number of words. A server that fails thrice is asked again; one that says
    no number in 1 .. 10 costs more than the worst grade."""
    judge, stub = (kit.import_file(VARIANTS / f"llm-judge/{name}.py") for name in ("judge", "stub"))
    monkeypatch.setattr(judge.time, "sleep", lambda seconds: None)
    failures = [503] * 3

    class Faulty(stub.Judge):
        def do_POST(self):
            self.send_error(failures.pop()) if failures else super().do_POST()

    monkeypatch.setenv("JUDGE_MODEL", "stub")
    monkeypatch.setenv("JUDGE_URL", stub.serve(handler=Faulty))
    chat = [{"role": "user", "content": "Why?"}]
    found = judge.judge(["Why?", chat], ["It is so.", [{"role": "assistant", "content": "No."}]])
    assert found == [round(grade / 9, 4) for grade in (2, 1)] and not failures
    assert judge.grade_of("As a judge I cannot say.") == -1


class Even(StandIn):
    """A "model" to which all tokens are equally likely. It keeps its logits."""

    def forward(self, ids, **options):
        self.logits = torch.zeros(*ids.shape, 576, requires_grad=True)
        return SimpleNamespace(logits=self.logits)


def test_the_tool_turns_variant_by_hand(tmp_path, tokenizer):
    """A tool answers each of the actor's first two tokens with two of its own. The random numbers
    go on after these, and no gradient of loss, KL or entropy reaches them. Nor do they end the
    response, though they are a text of --stop. (Credit crosses them: tests/maths.)"""
    ppo, model = patched("tool-turns", tmp_path), Even().eval()
    flags = "--max_answer_seq_len 8 --tool_turns 2 --entropy_coef 1 --stop zq"
    args, row = args_of(ppo, flags), dict(ROW, row=0, sample=0)
    given = args, model, tokenizer, [row], 1, 1
    [alone], [row] = ppo.roll_out(*given), ppo.roll_out(*given, lambda **_: ["zq"])
    drawn, zq = alone["response_ids"], tokenizer("zq").input_ids
    assert row["response_ids"] == [drawn[0], *zq, drawn[3], *zq, *drawn[6:]] and not row["ended"]

    (batch,) = ppo.make_micro_batches(tokenizer, [row], 1)
    logprobs, entropy = ppo.actor_forward(args, model, batch)
    (logprobs + entropy + ppo.kl_estimate(logprobs, torch.zeros(8), "k2")).sum().backward()
    reached = model.logits.grad[0, 1:-1].any(-1)
    assert reached.tolist() == row["per_token"]["own"] == [1, 0, 0, 1, 0, 0, 1, 1]


def test_the_deepspeed_chat_reward_variant_by_hand(tmp_path):
    """The responses differ from column 3 on; the longer one ends in column 5. The loss is a mean
    over these three."""
    reward = patched("deepspeed-chat-reward", tmp_path, "reward.py")
    row = dict(ROW, responses=[[7, 8, 9, 1], [7, 9, 1]])
    batch = reward.collate([row], 0, reward.compared_rows)
    assert (batch.logit_places + 1).tolist() == [[3, 4, 5, 5], [9, 10, 11, 10]]  # last tokens
    values = torch.tensor([[1.0, 2, 3], [1, 0, 3]])
    loss = reward.compared_loss_sum(values, batch.compared, batch.row_weight)
    assert numbers(loss) == [0.5044]  # (2 * 0.6931 + 0.1269) / 3


def test_the_token_reward_variant_by_hand(tmp_path, tokenizer):
    """The loss looks at every beginning of a response, from the prompt alone on. Step 3 gives each
    token what it adds to the value; that is what GAE makes of a score at the end where the critic
    is the reward model [Wiewiora 2003]."""
    reward = patched("token-reward", tmp_path, "reward.py")
    row = dict(ROW, responses=[[7, 8, 1], [9, 1]])
    batch = reward.collate([row], 0, reward.rows_of_all_tokens)
    assert (batch.logit_places + 1).tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert batch.begins.tolist() == [[1, 1, 1], [0, 1, 1]]  # the shorter one begins later
    values = torch.tensor([[0.0, 1, 1, 2], [9, 0, -1, 1]])
    loss = reward.beginnings_loss_sum(values, batch.begins, batch.row_weight)
    # of the chosen (1.3133 + 2 * 0.6931) / 3, of the rejected (0.1269 + 0.0486) / 2
    assert numbers(loss) == [0.4938]

    ppo = kit.import_file(tmp_path / "tree/ppo.py")
    rows = [dict(ROW, ended=1.0, response_ids=ids) for ids in ([9, 7, 1], [8])]
    (batch,) = ppo.make_micro_batches(tokenizer, rows, 2)
    model = lambda ids, mask, positions: ids.float()  # noqa: E731  a token's value is its number
    scores = ppo.token_scores(model, batch)
    assert scores.tolist() == [[3, -2, -6], [2, 0, 0]]
    last, critic = ppo.reward_model_scores(model, batch), torch.tensor([[6.0, 9, 7], [6, 8, 8]])
    expected, _ = ppo.gae(last, critic, batch.response_mask, 1.0, 0.5)
    assert ppo.gae(scores, 0 * critic, batch.response_mask, 1.0, 0.5)[0].equal(expected)


def test_the_margin_variant_by_hand(tmp_path):
    """The difference of 2 exceeds a margin of 0.5 by 1.5. Without the flag there is none, and a row
    without a number is named."""
    reward = patched("margin", tmp_path, "reward.py")
    args = args_of(reward, "--margin m --margin_coef 2")
    row = dict(ROW, responses=[[7, 1], [8, 1]], place="a.jsonl, line 5", extra='{"m": 0.25}')
    batch = reward.collate(args, [row], 0)
    assert batch.margin.tolist() == [0.5]
    given = torch.tensor([3.0]), torch.tensor([1.0]), batch.row_weight
    losses = reward.pair_loss_sum(*given, 0.0, batch.margin), reward.pair_loss_sum(*given)
    assert numbers(torch.stack(losses)) == [0.2014, 0.1269]
    with kit.refuses("no-margin"):
        reward.margin_of(args, {**row, "extra": '{"m": "0.25"}'})
    assert reward.margin_of(args_of(reward), {**row, "extra": "{}"}) == 0


def test_the_lagrangian_variant_by_hand(tmp_path):
    """A score of 3 and a cost of 1 make (3 - 2 * 1) / (1 + 2) on the last token. A mean cost of 0.6
    raises a multiplier of 2 by 2 %, one of 0 stays, and a huge cost raises it to its bound. The
    limit needs a judge beside the cost."""
    ppo, last = patched("lagrangian", tmp_path), torch.tensor([[0.0, 1], [0, 1]])
    args = args_of(ppo, "--kl_coef 0")
    args.cost_limit, args.multiplier = 0.5, 2.0
    batch = micro_batch(scores=3 * last, last=last, response_mask=torch.ones(2, 2))
    batch.ended, batch.cost = torch.ones(2), torch.tensor([[0.0, 1], [0, 0]])
    ppo.set_rewards(args, batch)
    assert numbers(batch.rewards) == [0, 0.3333, 0, 1]
    for args.multiplier, cost, after in ((2.0, 0.6, 2.0404), (0.0, 0.6, 0), (4.0, 999, 5)):
        assert round(ppo.next_multiplier(args, cost), 4) == after
    judges = "--reward_fn recipes/toy/gold.py:gold --reward_model_name_or_path a"
    for more in ("", f"{judges} --cost_judge 3"):
        with kit.refuses("wrong-flag"):
            args_of(ppo, f"--cost_limit 0 {more}")
    assert ppo.cost_name(args_of(ppo, f"--cost_limit 0 {judges}")) == "reward_1_gold"


def test_the_kl_corrected_variant_by_hand(tmp_path):
    """Over all tokens that the old policy can draw, by enumeration: the gradient is that of
    KL(pi || ref), though pi has moved. Without the ratio neither k2 nor k3 has it."""
    ppo = patched("kl-corrected", tmp_path)
    old, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    given = dict(old_logprobs=old.log(), ref_logprobs=ref.log(), advantages=0 * old)
    logits = torch.tensor([0.2, 0.5, 0.1], requires_grad=True)
    pi = logits.softmax(-1)
    [right] = torch.autograd.grad((pi * (pi / ref).log()).sum(), logits)
    for estimator, corrected in (("k3", 1), ("k3", 0), ("k2", 0)):
        words = f"--kl_in loss --kl_coef 1 --kl_estimator {estimator} --kl_corrected {corrected}"
        loss = loss_of(ppo, words, logits.log_softmax(-1), **given)[0]
        gap = (torch.autograd.grad((old * loss).sum(), logits)[0] - right).abs().max()
        assert gap < 1e-6 if corrected else gap > 0.02, (estimator, gap)
