"""What each function of the assignment is checked for: points, a symptom, and a case.

A case is a function of random numbers that returns the arguments of the function, by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from types import SimpleNamespace

import torch
from transformers import LlamaConfig


@dataclass(frozen=True)
class Check:
    """One comparison of a function with its namesake in expected.py."""

    points: int
    symptom: str  # never what to do about it
    case: Callable
    look: Callable = lambda out, case: out  # what is compared
    slope: str = ""  # or else the gradient with respect to this argument


# ---- Numbers ----
def draw(rng, *shape, signs=(-1, 1)):
    """Returns multiples of 0.25 from 0.25 to 2, or the same below 0: easy on paper, and never 0."""
    numbers = [rng.choice(signs) * rng.randint(1, 8) / 4 for _ in range(prod(shape))]
    return torch.tensor(numbers).view(shape)


def logs(rng, *shape):
    """Returns log-probs."""
    return draw(rng, *shape, signs=(-1,))


def ragged(rng, B, R):
    """Returns the mask (B, R) of responses of unlike lengths, the first of them the longest."""
    lengths = [R, *(rng.randint(1, R - 1) for _ in range(B - 1))]
    return (torch.arange(R) < torch.tensor(lengths)[:, None]).float()


# ---- Cases of sft_loss_sum and pair_loss_sum ----
def covered(copies):
    return lambda rng: dict(
        logprobs=logs(rng, 1, 2).repeat(copies, 1), loss_mask=torch.ones(copies, 2)
    )


def partly(rng):
    return dict(logprobs=logs(rng, 3, 4), loss_mask=ragged(rng, 3, 4))


def pairs(lead=None, weights=(1.0, 1.0), coef=0.0):
    """lead: how far the chosen response is ahead of the rejected one."""

    def case(rng):
        rejected, other = draw(rng, 2, signs=(1,)), draw(rng, 2)
        chosen = other if lead is None else rejected + lead
        weight = torch.tensor(weights)
        return dict(chosen=chosen, rejected=rejected, row_weight=weight, center_coef=coef)

    return case


# ---- Cases of token_logprobs and sample ----
def words(B=1, temperature=1.0, scale=1.0, certain=False, bf16=False):
    """Rows of a prompt of two tokens and a response of two; of several rows, part is wanted."""

    def case(rng):
        V, T = 5, 4
        ids = torch.tensor([rng.sample(range(V), T) for _ in range(B)])
        places = T * torch.arange(B)[:, None] + torch.arange(1, T - 1)  # (B, 2)
        wanted = torch.ones(B, 2, dtype=torch.bool)
        wanted[1:, rng.randrange(2)] = False
        tokens = ids.flatten()[places[wanted] + 1]  # (M,)
        logits = draw(rng, len(tokens), V) * scale
        if certain:  # the logits leave no doubt about what comes next
            logits = 20.0 * torch.nn.functional.one_hot(tokens, V)
        logits = logits.bfloat16() if bf16 else logits
        layout = SimpleNamespace(ids=ids, logit_places=places)
        return dict(logits=logits, layout=layout, wanted=wanted, temperature=temperature)

    return case


class Table(torch.nn.Module):
    """A "model" whose logits depend on the last token alone: a row of a table for each."""

    def __init__(self, table):
        super().__init__()
        self.table, self.config = table, LlamaConfig()

    def forward(self, ids, **options):
        return SimpleNamespace(logits=self.table[ids])


class Vocabulary(SimpleNamespace):
    """As much of a tokenizer as `sample` needs: five ids."""

    pad_token_id, eos_token_id = 0, 1
    added_tokens_decoder = {}

    def __len__(self):
        return 5

    def get_vocab(self):
        return {f"token {i}": i for i in range(5)}


def rollout(ids=5, never=(), always=None, temperature=1.0, top_k=0):
    """Six prompts, the last two of them equal. After id 4 comes 4: the first one never ends.

    ids: the model's, the last of them likely. never: ids that have probability 0. always: every
    uniform number.
    """

    def case(rng):
        table = draw(rng, ids, ids)
        table[:, 4], table[:, 5:], table[4, 4] = -2.0, 3.0, 30.0
        table[:, list(never)] = -inf
        numbers = [rng.randrange(100) / 100 if always is None else always for _ in range(36)]
        prompts = torch.tensor([[2, 4], [3, 2], [2, 3], [3, 3], [2, 2], [2, 2]])
        args = dict(top_p=1.0, temperature=temperature, top_k=top_k)
        return dict(
            args=SimpleNamespace(**args),
            model=Table(table),
            tokenizer=Vocabulary(),
            ids=prompts,
            mask=torch.ones_like(prompts),
            uniforms=torch.tensor(numbers, dtype=torch.float64).view(6, 6),
        )

    return case


def drawn(out, case):
    return out[0], *out[2:]


# ---- Cases of token_rewards, gae and whitened ----
JUNK = 50.0  # in padding


def rewarded(mask, kl_coef=0.5):
    def case(rng):
        B, R = mask(rng).shape
        scores = torch.zeros(B, R)
        scores[:, -1:] = draw(rng, B, 1)
        return dict(
            shaped_scores=scores, kl=draw(rng, B, R, signs=(1,)), mask=mask(rng), kl_coef=kl_coef
        )

    return case


def whole(rng, R=3):
    return torch.ones(1, R)


def padded(rng):
    return ragged(rng, 3, 4)


def with_gap(rng):
    """Two responses, in the middle of which a tool has written tokens."""
    return torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 0.0]])


def episodes(mask, gamma=1.0, lam=0.5):
    def case(rng):
        real = mask(rng)
        rewards = draw(rng, *real.shape).where(real > 0, -JUNK)
        values = draw(rng, *real.shape).where(real > 0, JUNK)
        return dict(rewards=rewards, values=values, mask=real, gamma=gamma, lam=lam)

    return case


def batches(*masks, equal=False):
    def case(rng):
        made = [mask(rng) for mask in masks]
        make = (lambda rng, *shape: torch.ones(shape)) if equal else draw
        values = [make(rng, *mask.shape).where(mask > 0, JUNK) for mask in made]
        return dict(advantages=values, masks=made)

    return case


def of_real_tokens(out, case):
    masks = case.get("masks") or [case["mask"]]
    return [x.where(mask > 0, 0) for x, mask in zip(out, masks)]


def of_padding(out, case):
    masks = case.get("masks") or [case["mask"]] * len(out)
    return [x.where(mask == 0, 0) for x, mask in zip(out, masks)]


# ---- Cases of the losses ----
def ratios(of_each, signs, clip_high=None):
    """Two tokens that became so many times as likely. signs: those of their advantages."""

    def case(rng):
        old, advantages = logs(rng, 1, 2), draw(rng, 1, 2, signs=(1,)) * torch.tensor(signs)
        new = old + torch.tensor(of_each).log()
        return dict(
            logprobs=new, old_logprobs=old, advantages=advantages, clip=0.2, clip_high=clip_high
        )

    return case


def moved(by, target):
    """Values that moved by so much; the returns are `target` away from where they were."""

    def case(rng):
        old = draw(rng, 1, 2)
        return dict(values=old + by, old_values=old, returns=old + target, clip_value=0.2)

    return case


def groups(*numbers, scale=1.0, equal=False):
    """Rewards of responses to the prompts `numbers`. A later prompt has much higher rewards."""

    def case(rng):
        prompts = torch.tensor(numbers)
        spread = torch.tensor(rng.sample(range(1, 30), len(numbers))) / 4
        totals = (spread * (not equal) * scale + 9.25 * prompts + 0.75).double()
        return dict(totals=totals, groups=prompts)

    return case


def means(kind, *sizes, empty=False):
    """Micro-batches of so many responses. empty: the last response has no token that counts."""

    def case(rng):
        masks = [ragged(rng, size, 4) for size in sizes]
        masks[-1][-1] *= not empty
        return dict(args=SimpleNamespace(loss_mean=kind, max_answer_seq_len=6), masks=masks)

    return case


def kl(kind):
    return lambda rng: dict(logprobs=logs(rng, 2, 3), ref_logprobs=logs(rng, 2, 3), estimator=kind)


def first(out, case):
    return out[0]


def second(out, case):
    return out[1]


def last(out, case):
    return out[0][:, -1]


def each_sum(out, case):
    return out.sum(-1)


# ---- The checks: 100 points ----
PAPER = "a small case that can be done on paper comes out wrong"
INSIDE = "a case within the clip range, which can be done on paper, comes out wrong"
SLOPE = "the gradient is not that of the equation"
JUNK_COUNTS = "what stands in the padding changes real tokens"
mixed, tool = episodes(padded, 0.9, 0.8), episodes(with_gap, 0.9, 0.8)
two = batches(padded, padded)

CHECKS = {
    "sft_loss_sum": [
        Check(1, PAPER, covered(1)),
        Check(1, "two copies of a row do not have twice the loss of one", covered(2)),
        Check(2, "log-probs at places where the mask is 0 change the loss", partly),
        Check(1, SLOPE, partly, slope="logprobs"),
    ],
    "pair_loss_sum": [
        Check(2, PAPER, pairs()),
        Check(1, "a pair in the wrong order by 8 does not cost about 8", pairs(-8.0)),
        Check(2, "a filler (row_weight 0) changes the loss", pairs(0.5, (1.0, 0.0))),
        Check(2, "with center_coef, high scores cost too much or too little", pairs(0.5, coef=0.1)),
        Check(
            1, "a difference of -200 gives inf, nan or no gradient", pairs(-200.0), slope="chosen"
        ),
    ],
    "token_logprobs": [
        Check(2, PAPER, words()),
        Check(2, "tokens that the logits are sure of are not near 0", words(3, certain=True)),
        Check(2, "in a batch, numbers are not at their tokens, or elsewhere not 0", words(3)),
        Check(1, "at a temperature other than 1 log-probs are off", words(temperature=2.0)),
        Check(1, "a bf16 model's log-probs keep two digits only", words(3, 0.7, bf16=True)),
        Check(1, "logits in the hundreds give inf or nan", words(scale=200.0)),
        Check(1, SLOPE, words(2, 0.5), slope="logits"),
    ],
    "sample": [
        Check(3, "the same uniform numbers draw other tokens than on paper", rollout(), drawn),
        Check(2, "a token's log-prob is not the one that scoring would give it", rollout(), second),
        Check(2, "at temperature 0.5 responses or log-probs are off", rollout(temperature=0.5)),
        Check(1, "ids beyond the tokenizer's are drawn, or spoil the rest", rollout(7)),
        Check(
            1, "with top_k 2, tokens come too often or too rarely", rollout(top_k=2, always=0.97)
        ),
        Check(
            1,
            "a uniform number of 0 draws a token of probability 0",
            rollout(never=(0, 1), always=0.0),
        ),
    ],
    "kl_estimate": [
        Check(2, "k1 comes out wrong: where pi > ref it is above 0", kl("k1")),
        Check(2, "k2 comes out wrong: it is never below 0", kl("k2")),
        Check(2, "k3 comes out wrong: it is never below 0", kl("k3")),
        Check(1, SLOPE, kl("k3"), slope="logprobs"),
    ],
    "token_rewards": [
        Check(1, PAPER, rewarded(whole)),
        Check(1, "the penalty does not follow kl_coef", rewarded(whole, 0.25)),
        Check(1, "a response's rewards have the wrong sum", rewarded(whole, 0.1), each_sum),
        Check(2, "padding earns a reward, or pays for KL", rewarded(padded)),
    ],
    "gae": [
        Check(2, PAPER, episodes(whole), first),
        Check(
            2,
            "something that follows the last token counts in its advantage",
            episodes(whole),
            last,
        ),
        Check(1, "with lam 0 more than one step counts", episodes(whole, 1.0, 0.0), first),
        Check(2, "with gamma 0.5, lam 1 later rewards are off", episodes(whole, 0.5, 1.0), first),
        Check(3, "the returns are not what the critic should learn", episodes(whole), second),
        Check(2, JUNK_COUNTS, mixed, of_real_tokens),
        Check(1, "padding has an advantage or a return", mixed, of_padding),
        Check(2, "a tool's tokens between two turns change the actor's own", tool, of_real_tokens),
    ],
    "whitened": [
        Check(2, PAPER, batches(whole)),
        Check(2, "two micro-batches together lack mean 0, deviation 1", batches(whole, whole)),
        Check(2, JUNK_COUNTS, two, of_real_tokens),
        Check(1, "padding is not 0", two, of_padding),
        Check(1, "equal advantages do not become 0", batches(whole, equal=True)),
    ],
    "policy_loss": [
        Check(2, INSIDE, ratios(1.1, 1), first),
        Check(1, "the ratio comes out wrong", ratios(1.5, 1), second),
        Check(2, "a good token that became far likelier is pushed further", ratios(1.5, 1), first),
        Check(2, "a bad token that became far rarer is pushed further", ratios(0.5, -1), first),
        Check(1, "a bad token that became likelier gets off lightly", ratios(1.5, -1), first),
        Check(
            1, "clip_high has no effect, or a wrong one", ratios((1.25, 0.75), (1, -1), 0.3), first
        ),
        Check(1, SLOPE, ratios(0.7, 1), first, slope="logprobs"),
    ],
    "value_loss": [
        Check(2, INSIDE, moved(0.1, 1.0)),
        Check(2, "a value that ran far towards its return is pulled further", moved(0.5, 1.0)),
        Check(2, "a value that moved away from its return gets off lightly", moved(-0.5, 1.0)),
        Check(1, SLOPE, moved(-0.75, 1.0), slope="values"),
    ],
    "grpo": [
        Check(2, PAPER, groups(0, 0, 0)),
        Check(2, "responses to one prompt change another prompt's", groups(0, 1, 0, 1, 1)),
        Check(1, "in groups of unlike sizes advantages are off", groups(0, 0, 1, 1, 1, 1)),
        Check(1, "equal rewards do not have advantages of 0", groups(0, 0, 1, 1, 1, equal=True)),
        Check(1, "rewards that hardly differ: advantages are off", groups(0, 0, 0, scale=1e-4)),
    ],
    "loss_weights": [
        Check(2, "tokens: weights or divisor come out wrong", means("tokens", 3)),
        Check(2, "responses: short and long ones count differently", means("responses", 3)),
        Check(2, "constant: weights or divisor come out wrong", means("constant", 3)),
        Check(1, "cut into two micro-batches, the loss is another", means("tokens", 2, 3)),
        Check(1, "a response without tokens counts", means("responses", 2, 3, empty=True)),
    ],
}
