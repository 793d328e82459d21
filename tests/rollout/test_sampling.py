"""ppo.sample and ppo.roll_out: which token is drawn, and where a response ends."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import ppo
from machinery import evaluation, rollout
from tests.kit import Knowing, generate
from tests.rollout.test_layouts_by_hand import RESPONSES
from tests.tiny_models import StandIn

E = 1  # EOS
FLAGS = dict(top_k=0, top_p=1.0, temperature=1.0)
NO_END = SimpleNamespace(pad_token_id=0, eos_token_id=-1)
ROWS = [{"row": number, "sample": 0} for number in range(4)]


# --------------------------------------------------------------------------------------------------
# Where a response ends
# --------------------------------------------------------------------------------------------------
class Scripted(StandIn):
    """A "model" that says what it is told: row b's r-th token is script[b][r]. It goes on talking
    after its EOS. What it caches of each token is which row it belongs to, so that it can tell who
    is still there when rows have left."""

    def __init__(self, script):
        super().__init__()
        self.script = torch.tensor(script)

    def forward(self, ids, cache, **options):
        rows, r = torch.arange(len(ids)), 0
        if past := cache.get_seq_length():
            rows, r = cache.layers[0].keys[:, 0, 0, 0], past - self.prompt + 1
        else:
            self.prompt = ids.shape[1]
        keys = rows[:, None, None, None].expand(-1, 1, ids.shape[1], 1)
        cache.update(keys, keys, 0)
        logits = torch.full((*ids.shape, 12), -1e9)
        logits[:, -1].scatter_(1, self.script[rows, r, None], 0.0)
        return SimpleNamespace(logits=logits)


SCRIPT = [[5, 6, E, 7], [5, 6, 7, 8], [E, 5, E, 6], [5, 6, 7, E]]


@pytest.mark.parametrize("pad", ["<eos>", "<pad>"])
def test_responses_end_at_their_first_eos_or_are_marked_as_cut(tokenizer, pad):
    """RESPONSES from the other side: what a model says after its first EOS is never kept. A
    response has ended by the id that steps 1 and 2 appended, also in its last slot; the text that
    is scored has no EOS in it."""
    tokenizer.pad_token = pad
    args = SimpleNamespace(seed=1, max_answer_seq_len=4, **FLAGS)
    prompts = [{"prompt_ids": [5 + i], **row} for i, row in enumerate(ROWS)]
    out = ppo.roll_out(args, Scripted(SCRIPT).eval(), tokenizer, prompts, 1, 99)
    assert [row["response_ids"] for row in out] == [ids for ids, _, _ in RESPONSES.values()]
    assert [row["ended"] for row in out] == [1, 0, 1, 1]
    expected = [tokenizer.decode(ids) for ids in ([5, 6], [5, 6, 7, 8], [], [5, 6, 7])]
    assert [row["text"] for row in out] == expected


def test_no_column_comes_back_in_which_nobody_wrote(tokenizer):
    """Responses are as wide as the longest, and what is behind the end of one has log-prob 0."""
    more = dict(max_answer_seq_len=4, max_prompt_seq_len=1, rollout_batch_size=9)
    args = SimpleNamespace(**FLAGS, **more)
    script = [[E, 5, 5, 6], *[[5, 6, E, 7]] * 4]  # so few have ended that all rows stay
    model, ids = Scripted(script), torch.arange(7, 12)[:, None]
    half = torch.full((5, 4), 0.5, dtype=torch.float64)
    found = ppo.sample(args, model, tokenizer, ids, torch.ones_like(ids), half)
    responses, logprobs, lengths, ended = (each.tolist() for each in found)
    assert responses == [[E, 0, 0], *[[5, 6, E]] * 4] and lengths == [1, 3, 3, 3, 3]
    assert all(ended) and logprobs == [[0, 0, 0]] * 5


# --------------------------------------------------------------------------------------------------
# Which token is drawn
# --------------------------------------------------------------------------------------------------
def test_a_models_own_generation_config_is_left_out_of_greedy_answers(tiny_model, tokenizer):
    """Step 1's samples are made by transformers' generate(), which fills in from it what is left
    open. Here it forbids the tokens that would be written."""
    args, model = SimpleNamespace(max_answer_seq_len=6, max_seq_len=32), copy.deepcopy(tiny_model)
    free = evaluation.answer_greedily(args, model, tokenizer, [[5, 6, 7]])
    written = tokenizer.encode(free[0]["response"], add_special_tokens=False)
    model.generation_config.suppress_tokens = written
    assert written and evaluation.answer_greedily(args, model, tokenizer, [[5, 6, 7]]) == free


class Fixed(StandIn):
    """A "model" with the same next-token probabilities everywhere."""

    def __init__(self, probs):
        super().__init__()
        self.logits = torch.tensor(probs).log()

    def forward(self, ids, **options):
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, -1))


def sample(probs, uniforms, **options):
    """Returns one token for each number of `uniforms`."""
    ids, uniforms = torch.full((len(uniforms), 1), 2), torch.tensor(uniforms).unsqueeze(1)
    given = Fixed(probs), ids, torch.ones_like(ids), uniforms, NO_END
    return generate(*given, **options)[0][:, 0].tolist()


def counts(probs, **options):
    """Returns how often each token is drawn by 1000 evenly spaced numbers: the probabilities,
    without noise."""
    drawn = sample(probs, [(i + 0.5) / 1000 for i in range(1000)], **options)
    return np.bincount(drawn, minlength=len(probs)).tolist()


def test_sampling_is_the_inverse_of_the_cumulative_distribution():
    """p = 0.2, 0.5, 0.3: the tokens own [0, 0.2), [0.2, 0.7) and [0.7, 1)."""
    assert sample([0.2, 0.5, 0.3], [0.0, 0.19, 0.21, 0.69, 0.71, 0.9999999]) == [0, 0, 1, 1, 2, 2]
    assert counts([0.2, 0.5, 0.3]) == [200, 500, 300]


def test_an_impossible_token_is_never_drawn():
    """Also not by the numbers at the ends, where a cumulative distribution stands still."""
    assert set(sample([0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.99999994])) == {1, 2}


def test_temperature_sharpens_and_flattens():
    """p^(1/T), scaled to sum to 1: at T = 0.5, 0.2 : 0.4 : 0.4 becomes 1 : 4 : 4 ninths."""
    expected = pytest.approx([1000 / 9, 4000 / 9, 4000 / 9], abs=1)
    assert counts([0.2, 0.4, 0.4], temperature=0.5) == expected


def test_top_k_and_top_p_by_hand():
    """top_k 2 keeps the two likeliest. top_p 0.75 keeps tokens until their sum reaches 0.75: 0.5
    does not, 0.8 does."""
    probs = [0.15, 0.5, 0.05, 0.3]
    for top_k, top_p, expected in (
        (0, 1.0, probs),
        (2, 1.0, [0, 0.5, 0, 0.3]),
        (9, 1.0, probs),
        (0, 0.75, [0, 0.5, 0, 0.3]),
        (0, 0.9, [0.15, 0.5, 0, 0.3]),
        (0, 0.01, [0, 0.5, 0, 0]),  # the likeliest token always stays
        (2, 0.6, [0, 0.5, 0, 0]),  # 0.5 of the 0.8 that top_k left is 0.625
    ):
        args = SimpleNamespace(top_k=top_k, top_p=top_p)
        kept = rollout.restricted(args, torch.tensor([probs]))[0].tolist()
        assert kept == pytest.approx(expected)
    assert counts(probs, top_k=2) == pytest.approx([0, 625, 0, 375], abs=1)


def test_the_log_prob_that_is_kept_is_the_models_and_not_that_of_a_flag():
    """At T = 0.5 p is 1 : 4 : 4 ninths. --top_k draws from fewer tokens, and what is trained is the
    model: its log-prob is of all tokens."""
    args = SimpleNamespace(**{**FLAGS, "temperature": 0.5, "top_k": 2})
    tokenizer = Knowing(SimpleNamespace(pad_token_id=0, eos_token_id=2), 3)
    ids, uniforms = torch.full((2, 1), 2), torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    given = Fixed([0.2, 0.4, 0.4]), tokenizer, ids, torch.ones_like(ids), uniforms
    responses, logprobs, lengths, ended = ppo.sample(args, *given)
    assert responses.tolist() == [[1], [2]] and lengths.tolist() == [1, 1]
    assert logprobs.exp().flatten().tolist() == pytest.approx([4 / 9, 4 / 9])
    assert ended.tolist() == [False, True]


def test_the_temperature_is_applied_in_fp32():
    """As it is when tokens are scored. Divided in bf16, logits of 20 would be off by up to 0.06:
    the policy that samples would be another one than the policy that is trained."""
    model, args = Fixed([1.0]), SimpleNamespace(**{**FLAGS, "temperature": 0.7})
    model.logits = (20 + torch.randn(50, generator=torch.Generator().manual_seed(0))).bfloat16()
    ids, uniforms = torch.full((9, 1), 2), torch.linspace(0, 0.9, 9).double()[:, None]
    given = model, Knowing(NO_END, 50), ids, torch.ones_like(ids), uniforms
    responses, logprobs, _, _ = ppo.sample(args, *given)
    exact = (model.logits.double() / 0.7).log_softmax(-1)[responses]
    assert torch.allclose(logprobs.double(), exact, atol=1e-4)


def test_random_numbers_belong_to_the_request():
    """They depend on (seed, step, row, sample, turn) only: not on slot, neighbours or rank. So
    responses stay the same when the number of GPUs changes. A filler has row 0's."""
    every = rollout.uniforms_of(7, 3, ROWS, 5)
    assert torch.equal(rollout.uniforms_of(7, 3, [ROWS[3], ROWS[1]], 5), every[[3, 1]])
    assert torch.equal(rollout.uniforms_of(7, 3, [{"row": -1, "sample": 0}], 5), every[:1])
    assert ((0 <= every) & (every < 1)).all() and len(every.unique()) == 20
    first = ROWS[:1]
    others = [rollout.uniforms_of(8, 3, first, 5), rollout.uniforms_of(7, 4, first, 5)]
    for change in (dict(sample=1), dict(turn=1), dict(turn=2)):
        others.append(rollout.uniforms_of(7, 3, [{**ROWS[0], **change}], 5))
    assert len(torch.cat([every[:1], *others]).unique()) == 6 * 5
    assert torch.equal(rollout.uniforms_of(7, 3, [{**ROWS[0], "turn": 0}], 5), every[:1])


def test_ids_that_no_token_uses_are_never_sampled(tiny_model):
    """An embedding is often padded beyond the tokenizer; the reward model's may be padded less, and
    could not read such an id. Nor does a NaN lead outside: the check on scores stops the run."""
    given = *common.pad([[5, 6, 7]], 0), torch.full((1, 3), 0.9999), NO_END
    assert generate(tiny_model, *given)[0].max() > 20, "else nothing is tested"
    assert generate(tiny_model, *given, known=20)[0].max() < 20
    broken = copy.deepcopy(tiny_model)
    broken.lm_head.weight.data.fill_(float("nan"))
    assert generate(broken, *given, known=20)[0].tolist() == [[19, 19, 19]]
