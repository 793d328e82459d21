"""Step 3 of RLHF: PPO.  prompts -> an actor in output/ppo whose responses score higher

    deepspeed ppo.py                        the built-in toy, from output/sft and output/reward
    deepspeed ppo.py --preset opt-1.3b      DeepSpeed-Chat's recipe

Four models:  actor      from step 1, trained: writes the responses
              critic     from step 2, trained: estimates, at each token, the reward still to come
              reference  the actor as it was, frozen: a KL penalty keeps the actor near it
              reward     from step 2, frozen: scores each whole response, once
main() loads 1 data and 2 models. Then in every step
    3 rollout      the actor samples a response to each prompt of the batch, token by token
    4 score        old log-probs, reference log-probs, values, scores: forwards without dropout
    5 advantages   score - KL penalty per token; GAE (or RLOO, GRPO, REINFORCE: no critic)
    6 update       clipped policy loss for the actor, clipped value loss for the critic
    7 log          metrics
and at the end 8 save. What is left out: a share of the pretraining loss (variants/ptx), a kl_coef
that adapts (variants/adaptive-kl).

A rollout is divided into minibatches (one optimizer step each), and these into micro-batches (one
forward each). By default a rollout is one minibatch that is used once, as in DeepSpeed-Chat. The
actor that trains is then the one that sampled: the ratio of new to old probabilities is 1, the
policy loss is never clipped (nor are values, unless the critic has dropout), and PPO is a policy
gradient with a baseline. With --ppo_epochs, or more than one minibatch, later updates see a ratio
that is not 1, and clipping acts: --allow_unstable 1 permits it, and course/labs/stability.md shows
what it does.

Read main() first: it is at the end of the file. docs/runs.md lists the problems that people met
when they changed this file.

Shapes: B responses of a micro-batch, in N rows of T tokens; P the longest prompt and R the longest
response; V vocabulary; H hidden size.
Token layout of one row, P = 3 (left-padded), R = 4 (right-padded; '-' is padding)
    place             0    1    2    3    4    5    6
    token             -    x0   x1 | y0   y1   eos  -
    logits at t predict token t+1: the response is predicted at places P-1 .. T-2. As places in
        the N * T tokens of all rows, these are `logit_places` (common.Layout)             (B, R)
    values at t estimate the reward from token t+1 on, so they are read at the same places (B, R)
    response_mask is 1 on y0, y1, eos. The score is placed on eos (on the last token if it was cut).
With --samples_per_prompt several responses to a prompt share a row in parts 4 and 6, where that is
cheaper and the architecture permits it (--share_prompt): drawn in machinery/shared_prompts.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

import common
from machinery import (
    checks,
    ema,
    evaluation,
    flags,
    folders,
    judges,
    lora,
    metrics,
    patches,
    ppo_flags,
    ranks,
    rollout,
    shared_prompts,
    tokens,
    zero3,
)
from machinery.refused import program
from machinery.rows import load_rows, open_sources
from machinery.run import Run
from machinery.zero3 import unwrap_model

# ---- What `deepspeed ppo.py` runs: the toy. Other recipes: recipes/ ----
TOY = dict(
    actor_model_name_or_path="output/sft",
    critic_model_name_or_path="output/reward",  # and the reward model, unless a flag names one
    data_path=["recipes/toy/data"],
    data_split="4,5,1",
    output_dir="output/ppo",
    max_steps=120,  # on two ranks 8 epochs of the prompts, with new responses each time
    num_train_epochs=8,
    actor_learning_rate=2e-4,
    critic_learning_rate=4e-4,  # twice the actor's: course/labs/rates.md
    actor_weight_decay=0.0,
    critic_weight_decay=0.0,
    actor_dropout=0.0,
    num_warmup_steps=10,
    max_prompt_seq_len=32,
    max_answer_seq_len=48,
    per_device_generation_batch_size=32,
    per_device_training_batch_size=32,
    recipe_rows=64,  # the rates are tuned for this many responses a step (two ranks)
    per_device_eval_batch_size=140,
    num_eval_prompts=280,
    kl_coef=0.05,
    enable_ema=1,
    gold_fn="recipes/toy/gold.py:gold",  # what the judge should have learned; only logged
    zero_stage=2,
    dtype="fp32",
    group_by_length=0,
    log_steps=5,
    eval_steps=30,
)


def get_args(argv=None):
    """Most flags that this file's maths uses; machinery/ppo_flags.py declares the others.

    There `resolve` fills in what is still None, and sets args.has_critic and args.has_reference.
    `arg`: see sft.get_args.
    """
    parser = flags.new_parser(__doc__)
    arg = flags.flag_group(parser, "PPO: models and sizes")
    arg("actor_model_name_or_path", str, "actor and reference: step 1's output", needed=True)
    arg("critic_model_name_or_path", str, "start of the critic: step 2's output")
    frozen = "frozen reward models; None: the critic's, unless --reward_fn is given"
    arg("reward_model_name_or_path", str, frozen, nargs="+")
    arg("max_prompt_seq_len", int, "tokens; a longer prompt keeps its end", least=2, needed=True)
    arg("max_answer_seq_len", int, "tokens of a response with its EOS", least=2, needed=True)
    arg("samples_per_prompt", 1, "responses; rloo and grpo compare them", least=1)
    unit = "responses of a generation batch; --rollout_batch_size of them decode at a time"
    arg("per_device_generation_batch_size", int, unit, least=1, needed=True)
    arg("per_device_training_batch_size", int, "responses of a forward", least=1, needed=True)
    batches = "generation batches per accumulation step. 1 [DeepSpeed-Chat]"
    arg("generation_batches", 1, batches, least=1)
    arg("ppo_epochs", 1, "epochs over a rollout. 1 [DeepSpeed-Chat]", least=1)
    # Several updates on a rollout are ordinary PPO. DeepSpeed-Chat reports that they diverge, and
    # leaves open why, so they must be asked for. course/labs/stability saw no divergence at usual
    # rates.
    arg("allow_unstable", 0, "1: permit several updates on one rollout", most=1)
    arg = flags.flag_group(parser, "PPO: flags that change the result")
    arg("temperature", 1.0, "of sampling, and of log-probs", least=1e-6)
    penalty = "penalty for one nat of KL. 0.1 [DeepSpeed-Chat]; 0: no reference"
    arg("kl_coef", float, penalty, needed=True)
    arg("kl_estimator", str, "None: k1 in the reward, k3 in the loss", choices=KL_ESTIMATORS)
    arg("kl_in", "reward", "place of KL. loss [Shao 2024]", choices=["reward", "loss"])
    arg("clip_reward", 5.0, "clips the judges' sum to +- this. 5 [DeepSpeed-Chat]", most=inf)
    arg("missing_eos_penalty", 0.0, "taken off the clipped score of a cut-off response")
    arg("advantage", "gae", "only gae has a critic", choices=list(ADVANTAGES))
    arg("gamma", 1.0, "discount, of gae and reinforce. 1 [DeepSpeed-Chat]", most=1)
    arg("lam", 0.95, "GAE's lambda: 0 trusts the critic. 0.95 [DeepSpeed-Chat]", most=1)
    arg("whiten", int, "1: advantages to mean 0, deviation 1; None: by --advantage", most=1)
    arg("clip", 0.2, "the ratio is clipped to 1 +- this. 0.2 [Schulman 2017]", most=inf)
    arg("clip_high", float, "its upper bound. 0.28 [Yu 2025, DAPO]; None: as --clip", most=inf)
    arg("clip_value", 0.2, "values are clipped to old +- this. 0.2 [DeepSpeed-Chat]", most=inf)
    means = "of the actor's loss: tokens [Yu 2025], responses [Shao 2024], constant [Liu 2025]"
    arg("loss_mean", "tokens", means, choices=list(LOSS_MEANS))
    arg("mask_truncated", 0, "1: cut-off responses count in no loss [Yu 2025]", most=1)
    arg("entropy_coef", 0.0, "bonus for each nat of entropy; 0: off")
    target = "approx_kl of an epoch's last update; above it, no epoch follows"
    arg("target_kl", float, target, least=1e-12)
    ppo_flags.add_options(parser)
    args = flags.parse(parser, TOY, argv, "ppo")
    return ppo_flags.resolve(args, ADVANTAGES, Sizes(args).responses)


class Sizes:
    """How a rollout is divided, on one rank.

    prompts                 of a generation batch
    responses               of the whole rollout
    batches_per_step        generation batches of a rollout. If a group is larger than a batch,
                            each group counts as one
    micro_batches           of a rollout; --gradient_accumulation_steps of them are a minibatch
    updates_per_epoch       minibatches, so optimizer steps, of one epoch over a rollout
    updates                 of all epochs

    With --per_device_generation_batch_size 8, --gradient_accumulation_steps 2 and
    --generation_batches 2 a rollout has 32 responses. --per_device_training_batch_size 4 divides it
    into 8 micro-batches, and so into 4 updates in each epoch: fewer responses in a forward mean
    more updates, not more accumulation.
    """

    def __init__(self, args):
        generated = args.per_device_generation_batch_size
        accumulation = args.gradient_accumulation_steps
        self.samples = args.samples_per_prompt
        self.prompts = max(generated // self.samples, 1)
        self.responses = accumulation * args.generation_batches * generated
        self.batches_per_step = self.responses // (self.prompts * self.samples)
        self.micro_batches = self.responses // args.per_device_training_batch_size
        self.updates_per_epoch = self.micro_batches // accumulation
        self.updates = self.updates_per_epoch * args.ppo_epochs

    def requests(self, batches):
        """Returns a dict for each response to sample: a row of data, `sample`, and `group`.

        batches: rows of data (dicts), a list for each generation batch. Each row appears
        --samples_per_prompt times, numbered by `sample`. The responses to one row form a group; a
        prompt that stands in two rows forms two.
        """
        rows = [row for batch in batches for row in batch]
        return [
            {**row, "sample": sample, "group": group}
            for group, row in enumerate(rows)
            for sample in range(self.samples)
        ]


# ---- Maths, of (B, R) unless said; mask is 1 on real response tokens ----
KL_ESTIMATORS = "k1", "k2", "k3"


def kl_estimate(logprobs, ref_logprobs, estimator):
    """KL(pi || ref) per token, from tokens sampled by pi.  [Schulman 2020]  As a value:

    r = ref / pi        k1 = -log r             unbiased, may be negative, noisy
                        k2 = (log r)^2 / 2      biased a little, never negative
                        k3 = r - 1 - log r      unbiased, never negative
    Differentiated as a loss, k2 gives the gradient of KL(pi || ref), k3 that of KL(ref || pi), and
    k1 gives 0 on average, as long as pi itself has sampled the tokens: in the first update. There
    k2's gradient is also that of pi / old_pi * k3, the corrected k3 of TRL since 1.10, which stays
    unbiased in later updates [DeepSeek 2025] eq. 7: variants/kl-corrected.
    (--kl_estimator None has been resolved to one of them.)
    """
    log_r = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r**2 / 2
    return torch.expm1(log_r) - log_r  # r - 1 in fp32 would round most of it away near r = 1


def token_rewards(shaped_scores, kl, mask, kl_coef):
    """The reward of each token: the score, less a penalty for KL.  [Ouyang 2022] eq. 2

        r_t = score_t - kl_coef * KL_t      summed over a response: theirs, without pretraining

    The score of a whole response is placed on its last token, and 0 elsewhere.
    """
    return (shaped_scores - kl_coef * kl) * mask


def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation over the response tokens.  [Schulman 2016] eq. 16

        delta_t = r_t + gamma * V_{t+1} - V_t       V = 0 after the last token
        A_t     = delta_t + gamma * lam * A_{t+1}   so we walk from the last token back
        returns = A + V                             the critic's target

    V is 0 after a response that was cut off, too. A token with mask 0 (padding, or a tool's between
    two turns) is skipped: t + 1 means the next token with mask 1. Returns advantages and returns,
    0 where mask is 0.
    """
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (B,)
    for t in reversed(range(values.shape[1])):
        is_step = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage.where(is_step, 0)
        next_advantage = advantage.where(is_step, next_advantage)
        next_value = values[:, t].where(is_step, next_value)
    returns = (advantages + values).where(mask > 0, 0)
    return advantages, returns


def reinforce(rewards, mask, gamma):
    """The reward still to come, A_t = r_t + gamma * A_{t+1}.  [Williams 1992]

    That is GAE with V = 0 and lambda = 1. Whitened, it is REINFORCE++ [Hu 2025].
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


def rloo(totals, groups):
    """A response's reward minus the mean of the OTHER ones to its prompt.  [Ahmadian 2024]

        A_i = total_i - (sum of total_j over j != i) / (size - 1)

    totals: (n,) rewards of n responses, groups: (n,) the number of each one's group -> (n,). size:
    how many responses the group has.
    """
    group_totals, size = group_sum(totals, groups), group_sum(torch.ones_like(totals), groups)
    return totals - (group_totals - totals) / (size - 1)


def grpo(totals, groups):
    """A response's reward, normalised within its group.  [Shao 2024] section 4.1.2

    A_i = (total_i - mean) / (std + 1e-4)        (n,), (n,) -> (n,)

    std is the sample deviation: it divides by the group's size - 1. If all rewards are equal, A is
    exactly 0, because `set_advantages` passes totals in float64. If KL is a part of the rewards,
    they are not quite equal, and what differs is scaled up: use --kl_in loss. How GRPO's loss
    averages over tokens is a separate choice: see `loss_weights`.
    """
    size = group_sum(torch.ones_like(totals), groups)
    errors = totals - group_sum(totals, groups) / size
    return errors / ((group_sum(errors**2, groups) / (size - 1)).sqrt() + 1e-4)


def group_sum(values, groups):
    """(n,), (n,) numbers 0, 1, ... -> (n,): the sum over each one's group.

    The responses of a group may be apart, even in different micro-batches (see `ordered`), so
    view(-1, samples) would mix prompts.
    """
    return values.new_zeros(len(groups)).index_add(0, groups, values)[groups]


def whitened(advantages, masks):
    """Shifts and scales lists of (B, R) to mean 0, deviation 1 where masks (B, R) are 1.

    Over the tokens of all ranks, so that neither padding nor the number of GPUs matters.
    """
    mean, variance = metrics.moments(advantages, masks)
    scale = variance**0.5 + 1e-8
    return [(x - mean) / scale * mask for x, mask in zip(advantages, masks)]


def policy_loss(logprobs, old_logprobs, advantages, clip, clip_high=None):
    """Clipped surrogate, to be minimised.  [Schulman 2017] eq. 7, negated

        ratio = pi(token) / pi_old(token)
        loss  = -min(ratio * A, clip(ratio, 1 - clip, 1 + clip_high) * A)

    clip_high None is clip; larger lets rare tokens rise further [Yu 2025].

    Returns loss, ratio, and clipped: where clipping stops the gradient through the ratio (a ratio
    above its bounds with a positive advantage, or below them with a negative one).
    """
    ratio = (logprobs - old_logprobs).exp()
    high = 1 + (clip if clip_high is None else clip_high)
    gain, clipped_gain = ratio * advantages, ratio.clamp(1 - clip, high) * advantages
    return -torch.min(gain, clipped_gain), ratio, clipped_gain < gain


def actor_loss(args, batch, logprobs, entropy):
    """The policy loss, with a penalty on KL and a bonus for entropy where flags say so.

    Returns loss, ratio and clipped, as policy_loss does.
    """
    loss, ratio, clipped = policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, args.clip, args.clip_high
    )
    if args.kl_in == "loss" and args.kl_coef:
        loss = loss + args.kl_coef * kl_estimate(logprobs, batch.ref_logprobs, args.kl_estimator)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    return loss, ratio, clipped


def value_loss(values, old_values, returns, clip_value):
    """Half the larger of two squared errors: that of the values, and that of the clipped values.

    Values are clipped to old_values +- clip_value, as in DeepSpeed-Chat. The PPO paper does not.
    """
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


# ---- The choice of --advantage ----
@dataclass(frozen=True)
class Estimator:
    """How advantages are computed: from each response's tokens, or by comparing responses."""

    of_tokens: Callable | None = None  # (args, batch) -> advantages, returns or None: (B, R) each
    # (totals, groups) of this rank's n responses -> advantages: (n,) each. A filler's total is 0
    of_groups: Callable | None = None
    needs_critic: bool = False
    whitens: bool = False  # unless --whiten says otherwise

    @property
    def compares_groups(self):
        """Whether it compares the responses to one prompt, which must all be on one rank."""
        return self.of_groups is not None


def gae_advantages(args, batch):
    """GAE: the only one that uses the critic."""
    return gae(batch.rewards, batch.old_values, batch.response_mask, args.gamma, args.lam)


def reinforce_advantages(args, batch):
    """REINFORCE: no critic, so no returns for it to learn."""
    return reinforce(batch.rewards, batch.response_mask, args.gamma), None


ADVANTAGES = {
    "gae": Estimator(of_tokens=gae_advantages, needs_critic=True, whitens=True),
    "reinforce": Estimator(of_tokens=reinforce_advantages, whitens=True),
    "rloo": Estimator(of_groups=rloo),
    "grpo": Estimator(of_groups=grpo),
}


# ---- The models ----
@dataclass(frozen=True)
class Models:
    """The four models, and the judges. Only actor and critic are trained.

    These two are DeepSpeed engines; the frozen models are engines under ZeRO-3, else plain models.
    """

    actor: DeepSpeedEngine
    critic: DeepSpeedEngine | None  # None: --advantage compares responses, or sums rewards up
    reference: Callable | None  # with LoRA the actor, adapters off; None if no KL is asked for
    reward_models: list  # usually one; several, or none where --reward_fn judges alone
    functions: dict  # {name: function} of --reward_fn and --gold_fn: judges.call_functions
    judge: Callable  # (batch) -> scores (B, R) by the reward models and --reward_fn
    gold: Callable | None  # (batch) -> scores (B, R) by --gold_fn

    @property
    def engines(self):
        """{name: engine} of those that are trained, the actor first."""
        critic = {"critic": self.critic} if self.critic else {}
        return {"actor": self.actor, **critic}


def load_models(args, tokenizer, functions, updates):
    """Part 2. functions: {name: function} of --reward_fn and --gold_fn.

    updates: optimizer steps of the whole run, for the learning-rate schedules.
    """
    batch_size, accumulation = args.per_device_training_batch_size, args.gradient_accumulation_steps
    actor_args, critic_args = flags.of_role(args, "actor"), flags.of_role(args, "critic")
    actor = common.load_model(actor_args)
    actor = common.train_engine(actor, actor_args, batch_size, accumulation, updates)
    critic = None
    if args.has_critic:
        critic = common.load_model(critic_args, tokenizer, "score")
        critic = common.train_engine(critic, critic_args, batch_size, accumulation, updates)
    reference = None
    if args.has_reference:
        reference = common.reference_of(actor, actor_args, batch_size)
    if critic and not args.reward_model_name_or_path:  # by default the critic's folder judges, too
        ranks.say(f"rewards come from {', '.join(args.reward_fn)} alone; no reward model is loaded")
    reward_models = judges.load_models(args, batch_size, tokenizer)
    of_models = [functools.partial(reward_model_scores, model) for model in reward_models]
    of_functions = {
        name: functools.partial(judges.function_scores, name=name) for name in functions
    }
    gold = of_functions.get("gold")
    functions_that_judge = [of_functions[n] for n in judges.names_of(args) if n in of_functions]
    judge = judges.sum_and_note(args, [*functions_that_judge, *of_models])
    return Models(actor, critic, reference, reward_models, functions, judge, gold)


# ---- The micro-batch ----
@dataclass
class MicroBatch(common.Layout):
    """B responses, laid out for a forward. The fields below are filled in from top to bottom."""

    # (B,) dicts: the fields of a row of data (part 1 of sft.py's main), `sample` and `group` of
    # Sizes.requests, response_ids, text, ended and per_token of roll_out, function_scores.
    responses: list
    length: Tensor  # (B,) tokens of each response, those that response_mask leaves out included
    ended: Tensor  # (B,) 1, or 0 for a response that was cut off
    row_weight: Tensor  # (B,) 1, or 0 for a filler (batching.Rows)
    response_mask: Tensor  # (B, R) 1 on tokens that the actor wrote and that count
    last: Tensor  # (B, R) 1 on the last of these
    per_token: dict = field(default_factory=dict)  # {name: what the sampler says of each, (B, R)}
    # 4 score; all below are (B, R), unless they say otherwise
    ref_logprobs: Tensor = None
    scores: Tensor = None  # what the judges say; a whole response's score is on its last token
    gold: Tensor = None  # what --gold_fn says, in the same places; not trained on
    old_values: Tensor = None
    old_logprobs: Tensor = None  # of the actor before the update
    entropy: Tensor = None  # of the same forward as old_logprobs
    # 5 advantages
    score_clipped: Tensor = None  # (B,) whether clipping has changed a score
    shaped_scores: Tensor = None  # scores after clipping and penalties
    rewards: Tensor = None  # these, less the KL penalty of each token
    raw_advantages: Tensor = None  # before whitening
    advantages: Tensor = None
    returns: Tensor = None
    # 6 update
    ratio: Tensor = None  # new to old probability, as of the most recent update

    def kl(self, estimator):
        """KL to the reference, per token: (B, R). 0 where there is no reference."""
        if self.ref_logprobs is None:
            return torch.zeros_like(self.response_mask)
        kl = kl_estimate(self.old_logprobs, self.ref_logprobs, estimator)
        return kl * self.response_mask

    def counts(self):
        """Tokens and rows, without fillers: for the run's speed.

        A prompt that several responses share counts for each of them.
        """
        prompts = [len(response["prompt_ids"]) for response in self.responses]
        tokens = (self.row_weight * (self.length + self.length.new_tensor(prompts))).sum()
        return tokens, self.row_weight.sum()


def plain_rows(responses, pad_id):
    """The Layout of a row for each response: the prompt padded left, the response right.

    responses: B dicts with prompt_ids and response_ids. See the picture at the top of this file.
    With --share_prompt shared_prompts.shared_rows may take its place: what you change here, change
    there, too.
    """
    prompts = [response["prompt_ids"] for response in responses]
    prompts, prompt_mask = common.pad(prompts, pad_id)  # (B, P)
    answers = [response["response_ids"] for response in responses]
    answers, real = common.pad(answers, pad_id, "right")  # (B, R)
    ids, mask = torch.cat([prompts, answers], 1), torch.cat([prompt_mask, real], 1)  # (B, T)
    return common.last_columns(ids, mask, count=answers.shape[1])  # here N = B


def make_micro_batches(tokenizer, responses, batch_size, pack=plain_rows):
    """Lays responses (dicts) out in MicroBatches of `batch_size`. Masks come from known lengths.

    pack(responses, pad_id): makes the Layout, plain_rows or shared_prompts.shared_rows. A response
    may have `per_token`, {name: a list with one number a token}: they become
    batch.per_token[name], and `own` among them is 0 on tokens that the actor has not written, a
    tool's for example. All responses, on all ranks, must have the same names.
    """
    out = []
    for start in range(0, len(responses), batch_size):
        part = responses[start : start + batch_size]
        length = torch.tensor([len(response["response_ids"]) for response in part])
        row_weight = torch.tensor([float(response["row_weight"]) for response in part])
        real = (torch.arange(length.max()) < length[:, None]).float()  # (B, R)
        per_token = {
            name: common.pad([r["per_token"][name] for r in part], 0, "right", torch.float)[0]
            for name in part[0].get("per_token", ())
        }
        response_mask = real * per_token.get("own", real) * row_weight[:, None]
        layout = pack(part, tokenizer.pad_token_id)
        batch = MicroBatch(
            **vars(layout),
            responses=part,
            length=length,
            ended=torch.tensor([response["ended"] for response in part]),
            row_weight=row_weight,
            response_mask=response_mask,
            last=response_mask * (response_mask.cumsum(-1) == response_mask.sum(-1, keepdim=True)),
        ).to(ranks.device())
        batch.per_token = {name: x.to(ranks.device()) for name, x in per_token.items()}
        out.append(batch)
    return out


# ---- Rollout ----
def next_logits(model, inputs, cache):
    """Logits (b, V) of the token that follows: the one model call of a rollout.

    inputs: at first the prompts (b, P), then the tokens drawn last (b, 1). The cache holds the keys
    and values of all tokens before them, and the mask and positions of its b rows.
    """
    start, end = cache.length, cache.length + inputs.shape[1]
    positions = cache.positions[:, start:end]
    logits = model(
        inputs,
        attention_mask=cache.mask[:, :end],
        use_cache=True,
        **folders.accepted(model, cache=cache.past, position_ids=positions, logits_to_keep=1),
    ).logits  # (b, 1, V), or (b, P, V) at first if the model has no logits_to_keep
    cache.length = end
    return logits[:, -1]


@torch.no_grad()
def sample(args, model, tokenizer, ids, mask, uniforms, synced=False):
    """Samples a response to each prompt, token by token.

    Here B counts the responses decoded together (--rollout_batch_size), and R is
    --max_answer_seq_len.
    ids, mask: (B, P), left-padded prompts. uniforms: (B, R) in [0, 1), float64: token r of response
    i is the first id whose cumulative probability exceeds uniforms[i, r] times the total
    probability of the allowed ids. So the draw does not depend on the other responses. synced:
    True if all ranks must make the same number of forwards (zero3.gather_for_generation).

    Returns responses (B, R'), their log-probs (B, R') under the model at --temperature, their
    lengths (B,), EOS included, and ended: bool (B,), False for a response that was cut at R tokens.
    """
    B, R = uniforms.shape
    device = ids.device
    responses = torch.full((B, R), tokenizer.pad_token_id, device=device)
    logprobs = torch.zeros(B, R, device=device)
    lengths = torch.zeros(B, dtype=torch.long, device=device)
    alive = torch.ones(B, dtype=torch.bool, device=device)  # responses that have not ended
    ends = torch.tensor(folders.ends_of(model, tokenizer), device=device)
    known = torch.tensor(folders.known_ids(model, tokenizer), device=device)  # (n,)
    cache = rollout.new_cache(model, ids, mask, R)  # memory for P + R tokens, once
    # cache.active: which of the B responses each row of the cache is for. At first there is a row
    # for each of the U different prompts; for_each_response then gives each response its own.
    inputs = ids[cache.active]  # (U, P)
    for r in ranks.shown(range(R), "tokens of each response"):
        # Forward.
        logits = next_logits(model, inputs, cache)  # at first (U, V), then (b, V)
        logits = rollout.for_each_response(cache, logits)  # (b, V)
        active = cache.active  # (b,)

        # Draw.
        probs = torch.softmax(common.scaled_logits(logits, args.temperature), -1)  # (b, V)
        # Ids that no token uses cannot be drawn (embeddings are often padded). Tokens that --top_k
        # or --top_p excludes get probability 0, so the sum may be below 1.
        allowed = rollout.restricted(args, probs[:, known])  # (b, n)
        cumulative = allowed.cumsum(-1, dtype=torch.float64)
        threshold = uniforms[active, r, None] * cumulative[:, -1:]  # (b, 1)
        index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]  # (b,)
        index.clamp_(max=len(known) - 1)  # NaN would index past the end; part 4 stops it
        token = known[index]  # (b,)
        # The log-prob is that of the whole distribution, as when the token is scored. With --top_k
        # or --top_p it is not the sampler's own: the ratio is 1 all the same, the gradient biased.
        logprob = probs.gather(-1, token[:, None])[:, 0].log()  # (b,)

        # Append, where the response goes on. It ends at EOS, or another end of the model's own.
        writes = alive[active]
        responses[active, r] = token.where(writes, tokenizer.pad_token_id)
        logprobs[active, r] = logprob.where(writes, 0)
        lengths[active] += writes
        alive[active] &= ~torch.isin(token, ends)
        remaining = alive.sum().item()  # responses that go on
        if not rollout.goes_on(remaining, synced):
            break
        # A response that has ended keeps its row, and gets padding, until a quarter of the rows
        # have ended: to take rows out, the cache is copied.
        rollout.leave_out_ended(cache, alive, remaining)
        inputs = responses[cache.active, r, None]  # (b, 1)
    return responses[:, : r + 1], logprobs[:, : r + 1], lengths, ~alive


def roll_out(args, engine, tokenizer, requests, step, batch_size):
    """Samples a response to each request, `batch_size` of them at a time.

    All ranks must call it, with equally many requests.
    requests: dicts with prompt_ids, row (its number; below 0 for a filler), sample, and more that
    is passed on. Returns them with response_ids, text, ended (1.0 or 0.0) and
    per_token, {"sampled_logprobs": [...]}.
    The engine must be in eval mode: dropout would make it another policy. The random numbers of a
    response depend on (seed, step, row, sample) alone, and on a request's `turn`, for a fork that
    samples for it more than once in a step.
    """
    assert not isinstance(engine, lora.WithoutAdapters), "its adapters would be on"
    assert not unwrap_model(engine).training, "dropout is on: engine.eval() first"
    out = []
    # Under ZeRO-3 all weights are gathered once, for all forwards, if they fit beside the cache.
    room = rollout.memory(args, engine, requests, batch_size)
    ends = folders.ends_of(unwrap_model(engine), tokenizer)
    with zero3.gather_for_generation(engine, room) as (model, synced):
        for start in ranks.shown(range(0, len(requests), batch_size), "batches of a rollout"):
            part = requests[start : start + batch_size]
            prompts = [request["prompt_ids"] for request in part]
            ids, mask = common.pad(prompts, tokenizer.pad_token_id)
            ids, mask = ids.to(ranks.device()), mask.to(ranks.device())  # (B, P)
            uniforms = rollout.uniforms_of(args.seed, step, part, args.max_answer_seq_len)
            sampled = sample(args, model, tokenizer, ids, mask, uniforms, synced)
            responses, logprobs, lengths, ended = (x.tolist() for x in sampled)
            for i, request in enumerate(part):
                response_ids = responses[i][: lengths[i]]  # with EOS, if that ended it
                new = {
                    "response_ids": response_ids,
                    "text": tokens.as_text(tokenizer, response_ids, ends),
                    "ended": float(ended[i]),
                    "per_token": {"sampled_logprobs": logprobs[i][: lengths[i]]},
                }
                out.append({**request, **new})
    return out


def ordered(responses, responses_per_row=1, seed=None):
    """Returns a rollout's responses in the order in which micro-batches take them.

    Sorted by length, which saves padding, if one minibatch takes them all; otherwise shuffled with
    `seed`, so that each update sees all lengths. With --share_prompt the responses that share a row
    stay side by side.
    """
    n = responses_per_row
    rows = [responses[i : i + n] for i in range(0, len(responses), n)]
    if seed is None:
        rows.sort(key=lambda row: sum(len(r["prompt_ids"] + r["response_ids"]) for r in row))
    else:
        np.random.default_rng(seed).shuffle(rows)
    return [response for row in rows for response in row]


# ---- Score ----
def actor_forward(args, actor, batch):
    """Log-probs and entropy (B, R) of the response tokens. Old and new ones both come from here.

    Entropy has a gradient only if --entropy_coef trains on it, which costs memory. Otherwise it is
    computed for the log alone, in one forward of a rollout (and again in its backward, where logits
    are made in parts).
    """
    mask, temperature = batch.response_mask, args.temperature
    if batch.entropy is not None and not args.entropy_coef:
        return common.response_logprobs(actor, batch, mask, temperature), batch.entropy

    def numbers_of(logits, wanted):  # (m, V), bool (B, R)
        logprobs = common.token_logprobs(logits, batch, wanted, temperature)
        with torch.set_grad_enabled(torch.is_grad_enabled() and args.entropy_coef != 0):
            entropy = common.scatter_to(wanted, common.entropy(logits, temperature))
        return torch.stack([logprobs, entropy])  # (2, B, R)

    logprobs, entropy = common.numbers_of_tokens(actor, batch, mask > 0, numbers_of)
    return logprobs, entropy if args.entropy_coef else entropy.detach()


def reward_model_scores(model, batch):
    """Scores (B, R) of a reward model: its value at each response's end, placed on `last`."""
    values = common.values_at_tokens(model, batch)  # (B, R)
    score = values.gather(1, batch.length[:, None] - 1)  # (B, 1)
    return score * batch.last


@torch.no_grad()
def score(args, models, batch, actor=True):
    """Fills in the scores, values and log-probs of a micro-batch, before any weight moves.

    judges.call_functions must have been called for its responses. actor: whether the actor scores
    them, too. If not, the update sets old_logprobs and entropy (optimizer_step).
    """
    if models.reference:
        batch.ref_logprobs = common.response_logprobs(
            models.reference, batch, batch.response_mask, args.temperature
        )
    batch.scores = models.judge(batch)
    if models.gold:
        batch.gold = models.gold(batch)
    if models.critic:
        batch.old_values = common.values_before_tokens(models.critic, batch)
    if actor:
        batch.old_logprobs, batch.entropy = actor_forward(args, models.actor, batch)


@torch.no_grad()
def roll_out_and_score(args, models, tokenizer, requests):
    """Parts 3 and 4 for held-out requests, as evaluation and microscope want them: micro-batches.

    The random numbers are the same each time: those of step 0.
    """
    engines, size = models.engines.values(), args.per_device_eval_batch_size
    at_once = max(size, args.rollout_batch_size)  # responses
    for engine in engines:
        engine.eval()  # no dropout
    zero3.states_to_cpu(args, engines)  # --offload_states
    responses = roll_out(args, models.actor, tokenizer, requests, 0, at_once)
    responses = ordered(responses)
    judges.call_functions(models.functions, responses)
    micro_batches = make_micro_batches(tokenizer, responses, size)
    for batch in micro_batches:
        score(args, models, batch)
    zero3.states_to_device(args, engines)
    return micro_batches


# ---- Advantages ----
def set_rewards(args, batch):
    """Gives each token its reward."""
    clipped_scores = batch.scores.clamp(-args.clip_reward, args.clip_reward)  # as DeepSpeed-Chat
    batch.score_clipped = (clipped_scores != batch.scores).any(-1)
    # (B, R): on the last token alone. A penalty (B, 1) would be taken off at every token.
    penalty = args.missing_eos_penalty * (1 - batch.ended)[:, None] * batch.last
    batch.shaped_scores = (clipped_scores - penalty) * batch.response_mask
    batch.rewards = batch.shaped_scores
    if args.kl_in == "reward" and args.kl_coef:
        kl = batch.kl(args.kl_estimator)  # (B, R)
        batch.rewards = token_rewards(batch.shaped_scores, kl, batch.response_mask, args.kl_coef)


def set_advantages(args, micro_batches):
    """Gives a rollout's micro-batches rewards, advantages and, with a critic, returns."""
    estimator = ADVANTAGES[args.advantage]
    for batch in micro_batches:
        set_rewards(args, batch)
    if estimator.compares_groups:  # a response's advantage is placed on each of its tokens
        totals = torch.cat([batch.rewards.double().sum(-1) for batch in micro_batches])  # (n,)
        groups = [response["group"] for batch in micro_batches for response in batch.responses]
        groups = torch.tensor(groups).unique(return_inverse=True)[1].to(totals.device)  # (n,)
        counts = [len(batch.responses) for batch in micro_batches]
        each = estimator.of_groups(totals, groups).float().split(counts)
        for batch, advantages in zip(micro_batches, each):
            batch.raw_advantages = advantages[:, None] * batch.response_mask
    else:
        for batch in micro_batches:
            batch.raw_advantages, batch.returns = estimator.of_tokens(args, batch)
    advantages = [batch.raw_advantages for batch in micro_batches]
    if args.whiten:
        # over the tokens that train: with --mask_truncated the cut-off responses count in no mean
        advantages = whitened(advantages, [trained_mask(args, batch) for batch in micro_batches])
    for batch, of_batch in zip(micro_batches, advantages):
        batch.advantages = of_batch


# ---- Update ----
def minibatches(micro_batches, accumulation, seed):
    """Yields lists of `accumulation` micro-batches, one for each optimizer step, shuffled.

    The micro-batches stay as they were scored: different padding would change the rounding, and
    the first ratio would not be quite 1.
    """
    assert len(micro_batches) % accumulation == 0, "the responses must fill whole minibatches"
    order = np.random.default_rng(seed).permutation(len(micro_batches))
    for start in range(0, len(order), accumulation):
        yield [micro_batches[i] for i in order[start : start + accumulation]]


def trained_mask(args, batch):
    """1 on the tokens that count in the losses, and when advantages are whitened: (B, R).

    --mask_truncated 1 leaves out responses that were cut off: a response being too long says
    nothing about the quality of its tokens. [Yu 2025] section 3.4, overlong filtering. They still
    have rewards, which count in the baseline of their group and in the metrics.

    In a step in which no token counts, the gradient is 0, and Adam's moments still move weights.

    A mask of your own that reads `batch.entropy` or `batch.old_logprobs` needs them from part 4:
    set `scores_actor` in main to True.
    """
    if args.mask_truncated:
        return batch.response_mask * batch.ended[:, None]
    return batch.response_mask


LOSS_MEANS = "tokens", "responses", "constant"


def loss_weights(args, masks):
    """The weight of each token in the actor's loss: (B, R) of each micro-batch, and the divisor.

    masks: the `trained_mask` of each micro-batch. The loss is

        sum of weight_t * loss_t / divisor

    over all micro-batches and ranks of the optimizer step. With n responses, of L_i tokens that
    count each, --loss_mean makes it

        tokens      sum of loss_t / sum of L_i                   every token counts the same: DAPO
        responses   1/n * sum over i of (sum of loss_t / L_i)    every response does: GRPO
        constant    1/n * sum over i of (sum of loss_t / C)      C = --max_answer_seq_len: Dr. GRPO

    [Yu 2025] eq. 8 (there over the responses to one prompt, here over those of the whole step),
    [Shao 2024] eq. 3, [Liu 2025] section 3.2. With `responses` a token of a long response counts
    less: long bad ones are punished less for each token, and long good ones are reinforced less.
    With `tokens` and `constant` a long response counts more as a whole; within one step these two
    differ only by a constant factor. Responses with no counted tokens are left out of n. The
    critic's loss is always the mean over the tokens of `trained_mask`; the metrics, actor_loss
    among them, are means over all tokens of response_mask.
    """
    if args.loss_mean == "tokens":
        return masks, ranks.all_sum(sum(mask.sum() for mask in masks)).item()
    lengths = [mask.sum(-1, keepdim=True) for mask in masks]  # (B, 1) each
    count = ranks.all_sum(sum((length > 0).sum() for length in lengths)).item()
    if args.loss_mean == "constant":
        lengths = [torch.full_like(length, args.max_answer_seq_len) for length in lengths]
    return [mask / length.clamp(min=1) for mask, length in zip(masks, lengths)], count


def optimizer_step(args, models, minibatch, means):
    """One optimizer step of the actor, and of the critic, on a minibatch.

    means: metrics.TokenMeans of the step. Returns the means of this update, {name: number}.
    """
    actor, critic, engines = models.actor, models.critic, models.engines.values()
    masks = [trained_mask(args, batch) for batch in minibatch]  # (B, R) each
    weights, divisor = loss_weights(args, masks)
    if critic:
        token_count = ranks.all_sum(sum(mask.sum() for mask in masks)).item()
    for batch, weight, mask in zip(minibatch, weights, masks):  # one forward each
        # The actor
        logprobs, entropy = actor_forward(args, actor, batch)  # (B, R) each
        if batch.old_logprobs is None:  # part 4 has not scored the actor, and no weight has moved
            assert not means.updates, "old log-probs are of the policy before the first update"
            batch.old_logprobs, batch.entropy = logprobs.detach(), entropy.detach()
        loss, ratio, clipped = actor_loss(args, batch, logprobs, entropy)
        batch.ratio = ratio.detach()
        found = {  # (B, R) each, for the log
            "actor_loss": loss,
            "approx_kl": kl_estimate(batch.old_logprobs, logprobs.detach(), "k3"),  # KL(old || new)
            "clip_fraction": clipped,
            "clip_fraction_low": clipped & (batch.advantages < 0),
            "clip_fraction_high": clipped & (batch.advantages > 0),
        }
        loss_sum = (loss * weight).sum()
        actor.backward(loss_sum * common.mean_factor(actor, divisor))

        # The critic, if there is one
        if critic:
            values = common.values_before_tokens(critic, batch)  # (B, R)
            critic_loss = value_loss(values, batch.old_values, batch.returns, args.clip_value)
            found["critic_loss"] = critic_loss
            loss_sum = (critic_loss * mask).sum()
            critic.backward(loss_sum * common.mean_factor(critic, token_count))

        patches.skip_together(args, engines)  # fp16: if either overflows, both skip
        for engine in engines:
            engine.step()  # moves weights at the minibatch's last micro-batch
        means.add(batch, found)  # over the tokens of response_mask, whatever --loss_mean says
    return means.end_update()


# ---- The step, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "step 3: PPO")
    functions = judges.load_functions(args)  # --reward_fn, --gold_fn

    # ---- 1 data ----
    sources = open_sources(args, "ppo")
    tokenizer = folders.load_tokenizer(
        args.actor_model_name_or_path, args, in_chats=sources.hold_chats
    )
    train, held_out = load_rows(args, sources, tokenizer, args.max_prompt_seq_len)
    ppo_flags.check_models(args, tokenizer, sources.hold_chats)
    held_out = held_out.select(range(min(args.num_eval_prompts, len(held_out))))
    sizes = Sizes(args)
    steps = run.plan(tokenizer, train, held_out, sizes.prompts, sizes.batches_per_step)

    # ---- 2 models ----
    models = load_models(args, tokenizer, functions, steps * sizes.updates)
    actor, critic, engines = models.actor, models.critic, models.engines
    checks.refuse_if_padding_matters(run, *engines.values())
    pack, responses_per_row = shared_prompts.packing(args, models, plain_rows)  # --share_prompt
    # Saved in checkpoints beside the engines. --resume fills it in when run.steps begins.
    state = {}
    average = ema.Ema(args, actor.module, state)  # --enable_ema

    def evaluate_at(step):
        if few := evaluation.microscope_requests(args, held_out):  # --microscope
            micro_batches = roll_out_and_score(args, models, tokenizer, few)
            set_advantages(args, micro_batches)
            evaluation.write_microscope(run, step, micro_batches)
        requests = evaluation.requests(held_out, args.eval_samples)
        responses = evaluation.gathered(roll_out_and_score(args, models, tokenizer, requests))
        return evaluation.report(run, step, responses, args.eval_samples)

    # The actor's log-probs are needed before the update if there is a second one, or if KL is in
    # the reward. Otherwise the update's own forward gives them, and part 4 saves a forward. In the
    # first step part 4 always computes them, to compare them with the sampler's.
    scores_actor = sizes.updates > 1 or (args.kl_in == "reward" and args.kl_coef > 0)
    first = True  # this process's first step
    clock = metrics.Clock()
    # run.steps evaluates once before the first step, or resumes. For each step it draws `batches`,
    # sizes.batches_per_step lists of sizes.prompts rows of `train`. run.log below evaluates when
    # due, and run.steps saves when due after the body.
    for step, batches in run.steps(engines, evaluate_at, metrics.columns(args), state=state):
        clock.start()

        # ---- 3 rollout ----
        for engine in engines.values():
            engine.eval()  # no dropout: everything stored must describe the policy that samples
        zero3.states_to_cpu(args, engines.values())  # --offload_states
        requests = sizes.requests(batches)  # dicts: one for each response to sample
        responses = roll_out(args, actor, tokenizer, requests, step, args.rollout_batch_size)
        clock.lap("generate_seconds")

        # ---- 4 score ----
        order_seed = None if sizes.updates_per_epoch == 1 else (args.seed, step)
        responses = ordered(responses, responses_per_row, order_seed)
        judges.call_functions(functions, responses)  # --reward_fn, --gold_fn; into the responses
        size = args.per_device_training_batch_size
        micro_batches = make_micro_batches(tokenizer, responses, size, pack)
        for batch in micro_batches:
            score(args, models, batch, actor=scores_actor or first)
        zero3.states_to_device(args, engines.values())
        checks.stop_unless_rollout_is_finite(run, micro_batches)
        if first:  # later, a mismatch shows in the log, as sampling_kl
            checks.stop_unless_sampled_as_scored(run, micro_batches)
        clock.lap("score_seconds")  # the checks have waited for the device

        # ---- 5 advantages ----
        set_advantages(args, micro_batches)

        # ---- 6 update ----
        for engine in engines.values():
            engine.train()  # turns on the critic's dropout; stop_unless_one catches an actor's
            if first:  # ZeRO-3 records the next forward and backward, and prefetches in that order
                patches.record_backward(engine)
        means = metrics.TokenMeans()
        for epoch in range(args.ppo_epochs):
            seed = args.seed, step, epoch
            drawn = minibatches(micro_batches, args.gradient_accumulation_steps, seed)
            for number, minibatch in enumerate(drawn):
                update_means = optimizer_step(args, models, minibatch, means)
                average.update(actor)  # --enable_ema
                if epoch == number == 0:  # no weight had moved since the rollout: the ratio was 1
                    checks.stop_unless_one(run, minibatch)
            if args.target_kl and update_means["approx_kl"] > args.target_kl:
                break
        clock.lap("train_seconds")

        # ---- 7 log ----
        logged = {
            "kl_coef": args.kl_coef,
            **means.of_all_updates(),
            **metrics.rollout_means(args, micro_batches),
            **clock.laps,
        }
        checks.warn_of_scores(run, logged)
        run.log(logged, micro_batches)  # to log a number of your own, add it to `logged`
        first = False

    # ---- 8 save ----
    average.save(run, actor, tokenizer)  # --enable_ema
    if critic:
        run.save(critic, tokenizer, f"{args.output_dir}/critic")
    run.save(actor, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
