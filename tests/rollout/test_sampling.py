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
from tests.tiny_models import StandIn, config_of

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

    config = config_of("llama", num_hidden_layers=1, vocab_size=12)

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
    """A "model" with the same logits everywhere."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, ids, **options):
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, -1))


def drawn(logits, uniforms, **flags):
    """Returns one token for each number of `uniforms`, and the log-probs that are kept."""
    args, ids = SimpleNamespace(**{**FLAGS, **flags}), torch.full((len(uniforms), 1), 2)
    tokenizer = Knowing(NO_END, range(len(logits)))
    given = Fixed(logits), tokenizer, ids, torch.ones_like(ids), uniforms[:, None]
    responses, logprobs, _, _ = ppo.sample(args, *given)
    return responses[:, 0], logprobs[:, 0]


def allowed(probs, top_k, top_p):
    """Which tokens may be drawn: of the likeliest k those whose share of the sum reaches p."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or None]
    total, found, reached = sum(probs[i] for i in order), [], 0.0
    for i in order:
        if reached < top_p * total:  # the likeliest token always stays
            found.append(i)
        reached += probs[i]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_sampling_is_the_inverse_of_the_cumulative_distribution(seed):
    """p = 0.2, 0.5, 0.3: the tokens own [0, 0.2), [0.2, 0.7) and [0.7, 1). Here with random
    probabilities, some of them 0, at a temperature, and with what --top_k and --top_p leave. A
    token that is impossible is not drawn by the numbers at the ends either. The log-prob that is
    kept is the model's at the temperature, of all tokens, and not that of a flag."""
    rng = np.random.default_rng(seed)
    weights, T = rng.random(8) * (rng.random(8) < 0.7), [1.0, 0.5, 2.0][seed % 3]
    weights[1] = 1.0
    top_k, top_p = [0, 3, 9][seed % 3], [1.0, 0.7, 0.01][seed // 3 % 3]
    probs = weights ** (1 / T)
    probs /= probs.sum()
    kept = sorted(allowed(probs, top_k, top_p))
    ends = np.cumsum([probs[i] for i in kept])
    numbers = np.concatenate([[0.0, 1 - 1e-12], rng.random(200)])
    expected = [kept[np.searchsorted(ends / ends[-1], number, "right")] for number in numbers]
    logits, flags = torch.tensor(weights).log(), dict(temperature=T, top_k=top_k, top_p=top_p)
    tokens, logprobs = drawn(logits.float(), torch.tensor(numbers), **flags)
    assert tokens.tolist() == expected
    assert logprobs.exp().tolist() == pytest.approx([probs[i] for i in expected], rel=1e-5)


def test_the_temperature_is_applied_in_fp32():
    """As it is when tokens are scored. Divided in bf16, logits of 20 would be off by up to 0.06:
    the policy that samples would be another one than the policy that is trained."""
    logits = (20 + torch.randn(50, generator=torch.Generator().manual_seed(0))).bfloat16()
    tokens, logprobs = drawn(logits, torch.linspace(0, 0.9, 9).double(), temperature=0.7)
    exact = (logits.double() / 0.7).log_softmax(-1)[tokens]
    assert torch.allclose(logprobs.double(), exact, atol=1e-4)


def test_random_numbers_belong_to_the_request():
    """They depend on (seed, step, row, sample, turn) only: not on slot, neighbours or rank. So
    responses stay the same when the number of GPUs changes. A filler has row 0's."""
    every, first = rollout.uniforms_of(7, 3, ROWS, 5), ROWS[0]
    same = [ROWS[3], {**first, "row": -1}, {**first, "turn": 0}]
    assert torch.equal(rollout.uniforms_of(7, 3, same, 5), every[[3, 0, 0]])
    assert ((0 <= every) & (every < 1)).all()
    changes = dict(sample=1), dict(turn=1), dict(turn=2)
    others = rollout.uniforms_of(7, 3, [{**first, **change} for change in changes], 5)
    moved = [rollout.uniforms_of(*key, [first], 5) for key in ((8, 3), (7, 4))]
    assert len(torch.cat([every, others, *moved]).unique()) == 9 * 5


def test_ids_that_no_token_uses_are_never_sampled(tiny_model):
    """An embedding is often padded beyond the tokenizer; the reward model's may be padded less, and
    could not read such an id. Nor does a NaN lead outside: the check on scores stops the run."""
    given = *common.pad([[5, 6, 7]], 0), torch.full((1, 3), 0.9999), NO_END
    assert generate(tiny_model, *given)[0].max() > 20, "else nothing is tested"
    assert generate(tiny_model, *given, known=range(20))[0].max() < 20
    broken = copy.deepcopy(tiny_model)
    broken.lm_head.weight.data.fill_(float("nan"))
    assert generate(broken, *given, known=range(20))[0].tolist() == [[19, 19, 19]]
