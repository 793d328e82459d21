"""Step 3 of RLHF: PPO.  prompts -> an actor in output/ppo whose responses score higher

    deepspeed ppo.py                        the built-in toy, from output/sft and output/reward
    deepspeed ppo.py --preset opt-1.3b      DeepSpeed-Chat's recipe

Four models:  actor      from step 1, trained: writes the responses
              critic     from step 2, trained: predicts, at each token, the reward still to come
              reference  the actor as it was, frozen: a KL penalty keeps the actor near it
              reward     from step 2, frozen: scores each whole response, once
main() loads 1 data and 2 models. Then in every step
    3 rollout      the actor samples a response to each prompt of the batch
    4 score        old log-probs, reference log-probs, values, scores: forwards in eval mode
    5 advantages   score - KL penalty per token; GAE (or RLOO, GRPO, REINFORCE: no critic)
    6 update       clipped policy loss for the actor, clipped value loss for the critic
    7 keep         metrics
and at the end 8 save.

Sizes: a rollout > its minibatches (an optimizer step each) > their micro-batches (a forward each).
Shapes: B responses of a micro-batch, P its longest prompt, R its longest response, T = P + R,
V vocabulary.
Token layout, P = 3 (left-padded), R = 4 (right-padded; '-' is padding)
    position          0    1    2    3    4    5    6
    token             -    x0   x1 | y0   y1   eos  -
    logits[:, t] predict token t+1: the response is predicted by logits[:, P-1 : T-1]  (B, R, V)
    values[:, t] predict the reward from token t+1 on: the same slice                  (B, R)
    response_mask is 1 on y0, y1, eos. The score stands on eos (on the last token if it was cut).
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

import common
from machinery.base import ranks, statistics
from machinery.base.refused import program
from machinery.data.rows import load_rows
from machinery.engine import patches
from machinery.flags import declaring, ppo_flags
from machinery.models import model_folders
from machinery.rollout import (
    decoding,
    ema,
    judging,
    kept_pass,
    kl_controller,
    microscope,
    ptx,
    reward_functions,
    rollout_metrics,
    shared_prompts,
)
from machinery.run.run import Run

# ---- Hyperparameters ----
PRESETS = {
    # As in sft.py.
    "toy": dict(
        actor_model_name_or_path="output/sft",
        critic_model_name_or_path="output/reward",
        data_path=["toy/data"],
        data_split="4,5,1",
        output_dir="output/ppo",
        max_steps=120,  # on two ranks 8 epochs; each samples new responses
        num_train_epochs=8,
        actor_learning_rate=2e-4,
        critic_learning_rate=4e-4,  # twice the actor's: labs/rates.md
        actor_weight_decay=0.0,
        critic_weight_decay=0.0,
        actor_dropout=0.0,
        critic_dropout=None,
        num_warmup_steps=10,
        max_prompt_seq_len=32,
        max_answer_seq_len=48,
        per_device_generation_batch_size=32,
        per_device_training_batch_size=32,
        per_device_eval_batch_size=140,
        num_eval_prompts=280,
        kl_coef=0.05,
        enable_ema=1,
        gold_fn="toy/gold.py:gold",  # what the judge should have learned; the policy never sees it
        zero_stage=2,
        dtype="fp32",
        group_by_length=0,
        log_steps=5,
        eval_steps=30,
    ),
    # [Huang 2024]: The N+ details of RLHF with PPO.
    "qwen2.5-0.5b": dict(
        actor_model_name_or_path="output/sft",
        critic_model_name_or_path="output/reward",
        data_path=["trl-lib/ultrafeedback_binarized"],
        data_split="0,5,5",
        output_dir="output/ppo",
        num_train_epochs=1,
        actor_learning_rate=3e-5,  # ten times [Huang 2024]'s for all weights [Schulman 2025]
        critic_learning_rate=3e-5,
        actor_lora_dim=32,
        critic_lora_dim=32,
        actor_dropout=0.0,  # off: with it the first ratio is not 1
        max_prompt_seq_len=512,
        max_answer_seq_len=256,
        per_device_generation_batch_size=8,
        per_device_training_batch_size=8,
        gradient_accumulation_steps=8,  # on 8 GPUs 512 responses [Huang 2024]
        per_device_eval_batch_size=8,
        kl_coef=0.05,  # [Huang 2024]
        missing_eos_penalty=1.0,  # TRL's
        zero_stage=2,
    ),
    # DeepSpeed-Chat's: opt/single_node/run_1.3b.sh. It does not whiten advantages: --whiten 0.
    "opt-1.3b": dict(
        actor_model_name_or_path="output/sft",
        critic_model_name_or_path="output/reward",
        data_path=["Dahoas/rm-static"],
        data_split="2,4,4",
        output_dir="output/ppo",
        num_train_epochs=1,  # the reward stops rising early
        actor_learning_rate=9.65e-6,
        critic_learning_rate=5e-6,
        actor_dropout=0.0,  # off: with it the first ratio is not 1, and the run stops
        critic_dropout=None,  # on: the model's own
        num_warmup_steps=100,
        max_prompt_seq_len=256,
        max_answer_seq_len=256,
        per_device_generation_batch_size=4,
        per_device_training_batch_size=4,
        per_device_eval_batch_size=4,
        kl_coef=0.1,
        enable_ema=1,
        zero_stage=2,
    ),
    # llama2/run_llama2_7b.sh. For weight decay and no average the script gives no reason.
    "llama-2-7b": dict(
        actor_model_name_or_path="output/sft",
        critic_model_name_or_path="output/reward",
        data_path=["Dahoas/rm-static"],
        data_split="2,4,4",
        output_dir="output/ppo",
        num_train_epochs=1,
        actor_learning_rate=9.65e-6,
        critic_learning_rate=5e-6,
        actor_weight_decay=0.1,
        critic_weight_decay=0.1,
        actor_dropout=0.0,
        critic_dropout=None,
        num_warmup_steps=100,
        max_prompt_seq_len=256,
        max_answer_seq_len=256,
        per_device_generation_batch_size=1,
        per_device_training_batch_size=1,
        per_device_eval_batch_size=1,
        kl_coef=0.1,
        enable_ema=0,
        zero_stage=3,
    ),
}


def get_args(argv=None):
    """The papers' flags; others are in machinery/flags/ppo_flags.py."""
    parser = declaring.new_parser(__doc__)
    ppo_flags.add_models_and_sizes(parser)
    arg = declaring.flag_group(parser, "PPO: flags that change the result")
    arg("ppo_epochs", 1, "epochs over a rollout. 1 [DeepSpeed-Chat]", least=1)
    arg("temperature", 1.0, "of sampling, and of log-probs", least=1e-6, fixed=True)
    arg("advantage", "gae", "only gae has a critic", choices=list(ADVANTAGES), fixed=True)
    arg("samples_per_prompt", 1, "responses; rloo and grpo compare them", least=1, fixed=True)
    arg("gamma", 1.0, "discount. 1 [DeepSpeed-Chat]", most=1, fixed=True)
    arg("lam", 0.95, "GAE's lambda: 0 trusts the critic. 0.95 [DeepSpeed-Chat]", most=1, fixed=True)
    arg("whiten", int, "1: advantages to mean 0, deviation 1; None: by --advantage", fixed=True)
    arg("kl_coef", float, "penalty for one nat of KL. 0.1 [DeepSpeed-Chat]")
    kinds = ["k1", "k2", "k3"]
    arg("kl_estimator", str, "None: k1 in the reward, k3 in the loss", choices=kinds, fixed=True)
    arg("kl_in", "reward", "place of KL. loss [Shao 2024]", choices=["reward", "loss"], fixed=True)
    arg("clip", 0.2, "the ratio is clipped to 1 +- this. 0.2 [Schulman 2017]", most=inf)
    arg("clip_value", 0.2, "values are clipped to old +- this. 0.2 [DeepSpeed-Chat]", most=inf)
    arg("clip_reward", 5.0, "scores are clipped to +- this. 5 [DeepSpeed-Chat]", most=inf)
    ppo_flags.add_options(parser)
    return ppo_flags.resolve(declaring.parse(parser, PRESETS, argv, "ppo"), ADVANTAGES)


# ---- Maths: pure functions of (B, R) unless said; mask is 1 on real response tokens ----
def kl_estimate(logprobs, ref_logprobs, estimator):
    """KL(pi || ref) per token, from tokens sampled by pi.  [Schulman 2020]  As a value:

    r = ref / pi        k1 = -log r             unbiased, may be negative, noisy
                        k2 = (log r)^2 / 2      biased a little, never negative
                        k3 = r - 1 - log r      unbiased, never negative
    """
    log_r = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r**2 / 2
    return log_r.exp() - 1 - log_r


def token_rewards(scores, kl, mask, kl_coef, clip_reward, penalty=0.0):
    """Minus the KL penalty on every token, plus the clipped scores.  [Ouyang 2022] eq. 2

    A whole response's score stands on its last token. `penalty` is taken off after clipping.
    """
    return (-kl_coef * kl * mask + (scores.clamp(-clip_reward, clip_reward) - penalty)) * mask


def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation over the response tokens.  [Schulman 2016] eq. 16

        delta_t = r_t + gamma * V_{t+1} - V_t       V = 0 after the last real token
        A_t     = delta_t + gamma * lam * A_{t+1}   so we walk from the last token back
        returns = A + V                             the critic's target

    Returns advantages and returns, 0 where mask is 0.
    """
    values = values * mask
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (B,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        advantages[:, t] = next_advantage
        next_value = values[:, t]
    return advantages, (advantages + values) * mask


def reinforce(rewards, mask, gamma):
    """The reward still to come, A_t = r_t + gamma * A_{t+1}: GAE with V = 0.  [Williams 1992]

    Whitened, this is REINFORCE++ [Hu 2025].
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


def rloo(totals, groups):
    """A response's reward minus the mean of the OTHER ones to its prompt.  [Ahmadian 2024]

        A_i = R_i - (sum of R_j over j != i) / (n - 1)

    totals: (N,) rewards, groups: (N,) prompt numbers -> (N,)
    """
    total, n = group_sum(totals, groups), group_sum(torch.ones_like(totals), groups)
    return totals - (total - totals) / (n - 1)


def grpo(totals, groups):
    """A response's reward, normalised within its prompt's.  [Shao 2024] section 4.1.2

    A_i = (R_i - mean(R)) / std(R)      0 where all are equal (in float64).  (N,), (N,) -> (N,)
    """
    n = group_sum(torch.ones_like(totals), groups)
    errors = totals - group_sum(totals, groups) / n
    return errors / ((group_sum(errors**2, groups) / (n - 1)).sqrt() + 1e-4)


def group_sum(values, groups):
    """(N,), (N,) numbers 0, 1, ... -> (N,): the sum over each one's group."""
    return values.new_zeros(len(groups)).index_add(0, groups, values)[groups]


def whitened(advantages, masks):
    """Shifts and scales lists of (B, R) to mean 0, deviation 1 over the rollout's tokens.

    Of all ranks, without padding: else results would change with the number of GPUs.
    """
    a = torch.cat([x.flatten() for x in advantages]).double()
    m = torch.cat([x.flatten() for x in masks]).double()
    count, total, squares = ranks.all_sum(m.sum(), (a * m).sum(), (a * a * m).sum()).tolist()
    mean = total / count
    scale = max(squares / count - mean**2, 0.0) ** 0.5 + 1e-8
    return [(a - mean) / scale * m for a, m in zip(advantages, masks)]


def policy_loss(logprobs, old_logprobs, advantages, clip, clip_high=None, dual_clip=0.0):
    """Clipped surrogate, to be minimised.  [Schulman 2017] eq. 7, with the sign turned

        ratio = pi(token) / pi_old(token)
        loss  = -min(ratio * A, clip(ratio, 1 - clip, 1 + clip_high) * A)

    For a bad token (A < 0) that became likely the loss has no bound; dual_clip gives it one.
    [Ye 2020]  Returns loss and ratio.
    """
    ratio = (logprobs - old_logprobs).exp()
    high = 1 + (clip if clip_high is None else clip_high)
    gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, high) * advantages)
    if dual_clip:
        bounded = torch.max(gain, dual_clip * advantages)
        gain = torch.where(advantages < 0, bounded, gain)
    return -gain, ratio


def actor_loss(args, batch, logprobs, entropy, kl_coef):
    """The policy loss, with a penalty on KL and a bonus for entropy where flags say so.

    Returns loss, ratio, and clipped: where clipping stopped the gradient through the ratio.
    """
    clips = args.clip, args.clip_high, args.dual_clip
    loss, ratio = policy_loss(logprobs, batch.old_logprobs, batch.advantages, *clips)
    clipped = loss != -ratio * batch.advantages
    if args.kl_in == "loss":
        loss = loss + kl_coef * kl_estimate(logprobs, batch.ref_logprobs, args.kl_estimator)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    return loss, ratio, clipped


def value_loss(values, old_values, returns, clip_value):
    """Half the squared error of the values, or of the values clipped to old +- clip, if larger.

    As in DeepSpeed-Chat; not in the PPO paper.
    """
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


# ---- The choice of --advantage ----
@dataclass(frozen=True)
class Estimator:
    """How advantages are computed."""

    of: Callable  # (args, batch) -> (B, R); if it compares groups (totals, groups) -> (N,)
    needs_critic: bool = False
    compares_groups: bool = False  # the responses to one prompt, all on one rank
    whitens: bool = False  # unless --whiten says otherwise


def gae_of(args, batch):
    """GAE, which sets batch.returns, too."""
    given = batch.rewards, batch.old_values, batch.response_mask, args.gamma, args.lam
    advantages, batch.returns = gae(*given)
    return advantages


def reinforce_of(args, batch):
    return reinforce(batch.rewards, batch.response_mask, args.gamma)


ADVANTAGES = {
    "gae": Estimator(gae_of, needs_critic=True, whitens=True),
    "reinforce": Estimator(reinforce_of, whitens=True),
    "rloo": Estimator(rloo, compares_groups=True),
    "grpo": Estimator(grpo, compares_groups=True),
}


# ---- The micro-batch, rollout and scores ----
@dataclass
class MicroBatch:
    """B responses, as one forward takes them. main() fills it in from top to bottom."""

    responses: list  # (B,) dicts: prompt, text, ended, ...
    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T) 1 on real tokens, for attention
    response_mask: Tensor  # (B, R) 1 on the tokens that count; 0 in a filler row
    last: Tensor  # (B, R) 1 on the last of these
    row_weight: Tensor  # (B,) 1, or 0 for a filler (common.Rows)
    ended: Tensor  # (B,) 1, or 0 for a response that was cut off
    shared: shared_prompts.SharedRows = None  # the same, with one row for each prompt
    # 4 score; all below are (B, R)
    ref_logprobs: Tensor = None
    old_logprobs: Tensor = None
    entropy: Tensor = None
    kl: Tensor = None  # k1
    kl_k3: Tensor = None
    old_values: Tensor = None
    scores: Tensor = None  # a whole response's on its last token
    gold: Tensor = None  # likewise: --gold_fn, not trained on
    # 5 advantages
    rewards: Tensor = None
    raw_advantages: Tensor = None  # before whitening
    advantages: Tensor = None
    returns: Tensor = None
    # 6 update
    loss_weight: Tensor = None


@torch.no_grad()
def sample(args, model, tokenizer, ids, mask, uniforms, synced=False):
    """Samples responses, token by token.  -> responses, response_mask: (B, R'), R' <= R

    ids, mask: (B, P), left-padded prompts. uniforms: (B, R) in [0, 1): token r of row b is where
    the cumulative distribution passes uniforms[b, r]. The mask is 1 up to EOS (or --stop).
    """
    uniforms = uniforms.to(ids.device).double()
    responses = torch.full(uniforms.shape, tokenizer.pad_token_id, device=ids.device)  # (B, R)
    response_mask = torch.zeros_like(responses)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)  # (B,)
    slots = decoding.each_slot(args, model, tokenizer, ids, mask, responses, alive, synced)
    for r, rows, logits in slots:  # (b,), (b, V): rows that go on. It reads responses and alive
        probs = torch.softmax(common.in_fp32(logits, args.temperature), -1)
        cdf = probs.cumsum(-1, dtype=torch.float64)
        drawn = uniforms[rows, r, None] * cdf[:, -1:]  # (b, 1)
        token = torch.searchsorted(cdf, drawn, right=True)[:, 0]  # the first whose cdf exceeds it
        token.clamp_(max=cdf.shape[1] - 1)  # beyond only if cdf is NaN: part 4 stops the run
        responses[rows, r] = token.where(alive[rows], tokenizer.pad_token_id)
        response_mask[rows, r] = alive[rows].long()
        alive[rows] &= token != tokenizer.eos_token_id
    return responses[:, : r + 1], response_mask[:, : r + 1]


def roll_out(args, engine, tokenizer, prompts, step, batch_size):
    """Samples a response to each prompt: the rows (dicts), with response_ids, text and ended.

    `batch_size` of them at a time. A response depends on (seed, step, row, sample) alone.
    """
    out = []
    with decoding.prompt_batches(args, engine, tokenizer, prompts, step, batch_size) as batches:
        for rows, model, *inputs in batches:
            sampled = sample(args, model, tokenizer, *inputs)
            out += decoding.described(args, tokenizer, rows, *sampled)
    return out


def make_micro_batches(tokenizer, responses, batch_size, responses_a_row=1):
    """Lays responses out in MicroBatches, with masks from the known lengths."""
    out, pad_id = [], tokenizer.pad_token_id
    for start in range(0, len(responses), batch_size):
        part = responses[start : start + batch_size]
        ids, mask = common.pad([row["prompt_ids"] for row in part], pad_id)  # (B, P)
        response, real = common.pad([row["response_ids"] for row in part], pad_id, "right")
        row_weight = torch.tensor([float(row["row_weight"]) for row in part])
        ended = torch.tensor([row["ended"] for row in part])
        response_mask = real * row_weight[:, None]  # (B, R)
        last = response_mask * (real.cumsum(-1) == real.sum(-1, keepdim=True))
        ids, mask = torch.cat([ids, response], 1), torch.cat([mask, real], 1)
        tensors = ids, mask, response_mask, last, row_weight, ended
        out.append(MicroBatch(part, *(x.to(ranks.device()) for x in tensors)))
        if responses_a_row > 1:
            out[-1].shared = shared_prompts.SharedRows(part, responses_a_row, real, pad_id)
    return out


def response_logprobs(args, model, batch, **options):
    """Log-probs, (B, R), of the responses: see common.last_logprobs."""
    layout = batch.ids, batch.mask, batch.response_mask, args.temperature, batch.shared
    return common.last_logprobs(model, *layout, **options)


def actor_forward(args, actor, batch, stores):
    """Log-probs and entropy, (B, R) each: the one function for old and new ones.

    Entropy is None unless it is stored or used in the loss.
    """
    used = args.entropy_coef > 0
    return response_logprobs(args, actor, batch, with_entropy=stores or used, train_entropy=used)


def last_values(model, batch):
    """A ValueModel's values, (B, R + 1), from the last token of the prompt on."""
    if batch.shared:
        return batch.shared.values(model)
    return model(batch.ids, batch.mask)[:, -batch.last.shape[1] - 1 :]


def critic_forward(args, critic, batch, stores):
    """Values, (B, R), old and new: the reward predicted from each response token on."""
    return last_values(critic, batch)[:, :-1]


def reward_model_scores(model, batch):
    """Scores, (B, R): each response's stands on its last token."""
    return last_values(model, batch)[:, 1:].where(batch.last > 0, 0)


def set_rewards(args, batch, kl_coef, score_statistics):
    """Gives each token its reward. score_statistics: mean, deviation with --normalize_reward."""
    scores, mask = batch.scores, batch.response_mask
    if score_statistics:
        mean, std = score_statistics
        scores = (scores - mean) / std * batch.last
    kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, args.kl_estimator)  # (B, R)
    kl_coef = kl_coef if args.kl_in == "reward" else 0.0
    penalty = args.missing_eos_penalty * (1 - batch.ended)[:, None] * batch.last
    batch.rewards = token_rewards(scores, kl, mask, kl_coef, args.clip_reward, penalty)


def set_advantages(args, micro_batches):
    """Gives a rollout's micro-batches advantages and, with a critic, returns."""
    estimator = ADVANTAGES[args.advantage]
    masks = [batch.response_mask for batch in micro_batches]
    if estimator.compares_groups:  # a response's advantage stands on each of its tokens
        totals = torch.cat([batch.rewards.double().sum(-1) for batch in micro_batches])  # (N,)
        rows = [response["row"] for batch in micro_batches for response in batch.responses]
        groups = torch.tensor(rows).unique(return_inverse=True)[1].to(totals.device)  # (N,)
        each = estimator.of(totals, groups).float().split([len(mask) for mask in masks])
        raw = [part[:, None] * mask for part, mask in zip(each, masks)]
    else:
        raw = [estimator.of(args, batch) for batch in micro_batches]
    final = whitened(raw, masks) if args.whiten else raw
    for batch, before, after in zip(micro_batches, raw, final):
        batch.raw_advantages, batch.advantages = before, after


def minibatches(micro_batches, accumulation, epochs, seed):
    """Yields a list of `accumulation` micro-batches for each optimizer step, shuffled each epoch.

    They stay as they were scored: with other padding the ratio would not be 1.
    """
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(micro_batches))
        for start in range(0, len(order), accumulation):
            yield [micro_batches[i] for i in order[start : start + accumulation]]


def set_loss_weights(minibatch):
    """Gives each token its weight in the losses and their metrics; returns the weights' sum.

    Every response token of the optimizer step, on all ranks, counts the same, as in DAPO
    [Yu 2025]. A mean over responses, as in GRPO [Shao 2024], would be written here.
    """
    for batch in minibatch:
        batch.loss_weight = batch.response_mask
    return ranks.all_sum(sum(batch.loss_weight.sum() for batch in minibatch)).item()


@torch.no_grad()
def score(batch, policy, reference, judge, gold):
    """Fills in log-probs, entropy, KL and scores of a micro-batch.

    The forwards are the update's, in eval mode, on the same padding, so that the first ratio is
    exactly 1. The reference comes first: with LoRA it is the actor's engine, too, and under
    ZeRO-3 an engine's last forward before its backward must be the one that is trained on.
    """
    batch.ref_logprobs = reference(batch)
    batch.old_logprobs, batch.entropy = policy.before(batch)
    logprobs = batch.old_logprobs, batch.ref_logprobs
    batch.kl = kl_estimate(*logprobs, "k1") * batch.response_mask
    batch.kl_k3 = kl_estimate(*logprobs, "k3") * batch.response_mask
    batch.scores, batch.gold = judge(batch), gold and gold(batch)


# ---- The step, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "step 3: PPO")
    judges, gold = reward_functions.load(args)  # --reward_fn, --gold_fn

    # ---- 1 data ----
    tokenizer = model_folders.load_tokenizer(args.actor_model_name_or_path, args)
    train, held_out = load_rows(args, tokenizer, "ppo", args.max_prompt_seq_len)
    score_statistics = ppo_flags.check_models(args, tokenizer)
    held_out = held_out.select(range(min(args.num_eval_prompts, len(held_out))))
    text_mix = ptx.TextMix(args, tokenizer)  # --unsup_data_path
    sizes = ppo_flags.Sizes(args)  # of a rollout
    batch_size, accumulation = args.per_device_training_batch_size, args.gradient_accumulation_steps
    steps = run.plan(tokenizer, train, held_out, sizes.prompts, sizes.generation_batches)

    # ---- 2 models ----
    actor_args, critic_args = declaring.of_role(args, "actor"), declaring.of_role(args, "critic")
    actor_micro_steps = accumulation * text_mix.backwards
    actor_updates = max(steps - args.critic_warmup_steps, 1) * sizes.updates
    actor = common.load_model(actor_args)
    actor = common.train_engine(actor, actor_args, batch_size, actor_micro_steps, actor_updates)
    # before() scores in eval mode, now() trains: one forward for both where they are the same.
    policy = kept_pass.KeptPass(args, "actor", actor, actor_forward)
    engines, passes, critic = {"actor": actor}, [policy], None
    if args.has_critic:
        critic = common.load_model(critic_args, tokenizer, "score")
        counts = batch_size, accumulation, steps * sizes.updates
        critic = common.train_engine(critic, critic_args, *counts, main=False)
        values = kept_pass.KeptPass(args, "critic", critic, critic_forward)
        engines["critic"] = critic
        passes.append(values)
    reference = common.reference_of(actor, actor_args, batch_size)
    reward_models = judging.load_models(args, batch_size, tokenizer)
    judges += [functools.partial(reward_model_scores, model) for model in reward_models]
    judge = judging.combined(judges, args.reward_combine)
    responses_a_row = shared_prompts.responses_a_row(args, *engines.values(), *reward_models)
    state = {}  # what checkpoints keep beside the engines
    average = ema.Ema(args, actor.module, state)  # --enable_ema
    kl_control = kl_controller.KlController(args, state)  # --kl_coef, --kl_target
    models = policy, functools.partial(response_logprobs, args, reference), judge, gold
    parts = roll_out, make_micro_batches, score, set_rewards, set_advantages

    def evaluate_at(step):
        with kept_pass.collecting(args, passes):
            microscope.look(run, step, parts, passes, models, kl_control.coef, score_statistics)
            return rollout_metrics.evaluate(run, step, parts, models, actor, average, text_mix)

    columns = rollout_metrics.columns(args)
    means = statistics.TokenMeans("actor_loss", "critic_loss", "approx_kl", "clip_fraction")
    for step, batches in run.steps(engines, sizes.repeated, evaluate_at, columns, state):
        # ---- 3 rollout ----
        times = [time.time()]
        with kept_pass.collecting(args, passes, step):
            prompts, size = sum(batches, []), args.rollout_batch_size
            responses = roll_out(args, actor, tokenizer, prompts, step, size)
            times.append(time.time())

            # ---- 4 score ----
            seed = args.seed, step
            responses = sizes.arranged(responses, seed, responses_a_row)
            micro_batches = make_micro_batches(tokenizer, responses, batch_size, responses_a_row)
            for batch in micro_batches:
                score(batch, *models)
                if critic:
                    batch.old_values = values.before(batch)
        rollout_metrics.stop_unless_finite(run, micro_batches)
        times.append(time.time())

        # ---- 5 advantages ----
        for batch in micro_batches:
            set_rewards(args, batch, kl_control.coef, score_statistics)
        set_advantages(args, micro_batches)

        # ---- 6 update ----
        means.reset()
        training = [each.engine for each in passes if each.trains]
        shuffled = minibatches(micro_batches, accumulation, args.ppo_epochs, seed)
        for update, minibatch in enumerate(shuffled):  # one optimizer step each
            total = set_loss_weights(minibatch)
            if not total:  # fillers only
                continue
            for batch in minibatch:
                logprobs, entropy = policy.now(batch)  # (B, R)
                loss, ratio, clipped = actor_loss(args, batch, logprobs, entropy, kl_control.coef)
                if not means.tokens:  # nothing trained yet: the ratio must be 1
                    kept_pass.first_pass_gate(run, policy, ratio, batch.response_mask)
                if policy.trains:  # not during --critic_warmup_steps
                    loss_sum = (loss * batch.loss_weight).sum()
                    actor.backward(loss_sum * common.loss_scale(total, actor_micro_steps))
                    text_mix.backward(actor, (step, update))  # a micro-step of its own
                critic_losses = torch.zeros_like(loss)
                if critic:
                    targets = batch.old_values, batch.returns
                    critic_losses = value_loss(values.now(batch), *targets, args.clip_value)
                    loss_sum = (critic_losses * batch.loss_weight).sum()
                    critic.backward(loss_sum * common.loss_scale(total, accumulation))
                patches.skip_together(args, training)
                for engine in training:
                    engine.step()  # moves weights at the minibatch's last micro-batch
                approx_kl = kl_estimate(batch.old_logprobs, logprobs.detach(), "k3")  # old || new
                means.add(batch.loss_weight, ratio, loss, critic_losses, approx_kl, clipped)
            average.update(actor)
            if means.end_update(total, args.target_kl):
                break

        # ---- 7 keep ----
        times.append(time.time())
        measured = means, times, passes, reward_models, micro_batches
        kl = rollout_metrics.log(run, kl_control.coef, *measured)["kl"]
        kl_control.update(kl, policy.trains)

    # ---- 8 save ----
    average.save(run, actor, tokenizer)  # --enable_ema
    if critic:
        run.save(critic, tokenizer, f"{args.output_dir}/critic")
    run.save(actor, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
