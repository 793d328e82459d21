"""Step 3 of RLHF: PPO.  prompts -> an actor in output/ppo whose responses score higher

    deepspeed ppo.py                        the built-in toy, from output/sft and output/reward
    deepspeed ppo.py --preset opt-1.3b      DeepSpeed-Chat's recipe

Four models:  actor      from step 1, trained: writes the responses
              critic     from step 2, trained: predicts, at each token, the reward still to come
              reference  the actor as it was, frozen: a KL penalty keeps the actor near it
              reward     from step 2, frozen: scores each whole response, once
main() loads 1 data and 2 models. Then in every step
    3 rollout      the actor samples a response to each prompt of the batch, token by token
    4 score        old log-probs, reference log-probs, values, scores: forwards without dropout
    5 advantages   score - KL penalty per token; GAE (or RLOO, GRPO, REINFORCE: no critic)
    6 update       clipped policy loss for the actor, clipped value loss for the critic
    7 keep         metrics
and at the end 8 save.

A rollout is divided into minibatches (one optimizer step each), and these into micro-batches (one
forward each). By default a rollout is one minibatch that is used once, as in DeepSpeed-Chat. The
actor that trains is then the one that sampled: the ratio of new to old probabilities is 1, the
policy loss is never clipped, and PPO is a policy gradient with a baseline. With --ppo_epochs, or
more than one minibatch, later updates see a ratio that is not 1, and clipping acts:
--allow_unstable 1 permits it, and labs/stability.md shows what it does.

Shapes: B responses of a micro-batch, in N rows of T tokens; P the longest prompt and R the longest
response; V vocabulary; H hidden size.
Token layout of one row, P = 3 (left-padded), R = 4 (right-padded; '-' is padding)
    place             0    1    2    3    4    5    6
    token             -    x0   x1 | y0   y1   eos  -
    logits at t predict token t+1: the response is predicted at places P-1 .. T-2. As places in
        the N * T tokens of all rows, these are `predicts` (common.Layout)                 (B, R)
    values at t predict the reward from token t+1 on, so they are read at the same places  (B, R)
    response_mask is 1 on y0, y1, eos. The score is placed on eos (on the last token if it was cut).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf, log

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

import common
from helpers import checks, decoding, judging, microscope, rollout_metrics, shared_prompts
from machinery.base import progress, ranks
from machinery.base.refused import program
from machinery.data.rows import load_rows, open_sources
from machinery.engine import ema, patches, state_offload, zero3
from machinery.flags import declaring, ppo_flags
from machinery.models import forwards, model_folders
from machinery.run.run import Run

# ---- Hyperparameters ----
PRESETS = {
    # As in sft.py.
    "toy": dict(
        actor_model_name_or_path="output/sft",
        critic_model_name_or_path="output/reward",  # and the reward model, unless a flag names one
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
        critic_dropout=None,  # the model's own, which has none
        num_warmup_steps=10,
        max_prompt_seq_len=32,
        max_answer_seq_len=48,
        per_device_generation_batch_size=declaring.toy_batch(32),
        per_device_training_batch_size=declaring.toy_batch(32),
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
    # Batch and KL penalty as in [Huang 2024], The N+ details of RLHF with PPO; not its 4 epochs.
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
    # GRPO on sums, from sft.py's preset of this name; a verifier in place of a reward model.
    "arithmetic": dict(
        actor_model_name_or_path="output/arithmetic-sft",
        data_path=["toy/arithmetic/data"],
        data_split="4,0,1",
        output_dir="output/arithmetic-grpo",
        reward_fn=["toy/arithmetic/verifier.py:correct"],
        advantage="grpo",
        samples_per_prompt=8,
        kl_coef=0.0,  # as in TRL's GRPO; then there is no reference
        max_steps=200,
        num_train_epochs=1,
        actor_learning_rate=2e-4,
        actor_weight_decay=0.0,
        actor_dropout=0.0,
        num_warmup_steps=10,
        max_prompt_seq_len=16,
        max_answer_seq_len=48,  # room for the longest derivation
        per_device_generation_batch_size=8 * declaring.toy_batch(16),  # 32 prompts on two ranks
        per_device_training_batch_size=8 * declaring.toy_batch(16),
        per_device_eval_batch_size=400,
        num_eval_prompts=200,
        eval_samples=8,
        zero_stage=2,
        dtype="fp32",
        group_by_length=0,
        log_steps=5,
        eval_steps=50,
    ),
    # GRPO on GSM8K. [verl]: its examples/tuning/0.5b/qwen2-0.5b_grpo-lora_1_h100_fsdp_vllm.sh, for
    # the chat model of this size. [TRL]: the defaults of its GRPOConfig.
    "qwen2.5-0.5b-grpo": dict(
        actor_model_name_or_path="output/sft",
        data_path=["openai/gsm8k:main"],  # [verl]
        columns={"instruction": "question"},
        data_split="0,0,1",  # all prompts
        output_dir="output/ppo",
        reward_fn=["toy/maths.py:solved"],  # 1 or 0, no reward for the format, as in [verl]
        advantage="grpo",
        samples_per_prompt=8,  # [TRL]; 5 [verl]
        num_train_epochs=1,  # [verl]
        actor_learning_rate=3e-5,  # [verl]
        actor_lora_dim=32,  # [verl]
        lora_alpha=32,  # [verl]
        actor_dropout=0.0,
        kl_in="loss",  # [verl]
        kl_estimator="k3",  # [verl], where it is called low_var_kl
        kl_coef=0.001,  # [verl]
        max_prompt_seq_len=512,  # [verl]
        max_answer_seq_len=256,  # [TRL]; 1024 [verl]. A solution of GSM8K has some 100
        per_device_generation_batch_size=32,
        per_device_training_batch_size=32,
        gradient_accumulation_steps=16,  # 512 responses a step on one GPU; 580 [verl]
        per_device_eval_batch_size=32,
        num_eval_prompts=256,
        eval_samples=4,
        eval_steps=20,
        zero_stage=2,
    ),
    # DeepSpeed-Chat's: opt/single_node/run_1.3b.sh. It does not whiten advantages (--whiten 0);
    # docs/runs.md lists what else is done otherwise.
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
        critic_dropout=None,  # the model's own, 0.1: values move, and are clipped, by dropout alone
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
    """What this file's maths takes; other flags are in machinery/flags/ppo_flags.py.

    least, most: the range. fixed: a run that goes on with --resume must have the same.
    """
    parser = declaring.new_parser(__doc__)
    arg = declaring.flag_group(parser, "PPO: models and sizes")
    arg("actor_model_name_or_path", str, "actor and reference: step 1's output", fixed=True)
    arg("critic_model_name_or_path", str, "start of the critic: step 2's output", fixed=True)
    models = "frozen reward models; None: the critic's, unless --reward_fn is given"
    arg("reward_model_name_or_path", str, models, nargs="+", fixed=True)
    function = "f(prompts, completions, **columns) returns a number a response, or one a token"
    arg("reward_fn", str, function, nargs="+", metavar="FILE:FUNCTION", fixed=True)
    logged = "a function like --reward_fn's, only logged"
    arg("gold_fn", str, logged, metavar="FILE:FUNCTION", fixed=True)
    arg("per_device_generation_batch_size", int, "responses of a generation batch", least=1)
    arg("per_device_training_batch_size", int, "responses of one forward; the same number", least=1)
    arg("generation_batches", 1, "generation batches of a rollout. 1 [DeepSpeed-Chat]", least=1)
    arg("max_prompt_seq_len", int, "tokens; a longer one keeps its end", least=2, fixed=True)
    arg("max_answer_seq_len", int, "tokens of a response, EOS included", least=2, fixed=True)
    arg = declaring.flag_group(parser, "PPO: flags that change the result")
    arg("ppo_epochs", 1, "epochs over a rollout. 1 [DeepSpeed-Chat]", least=1)
    arg("temperature", 1.0, "of sampling, and of log-probs", least=1e-6, fixed=True)
    arg("advantage", "gae", "only gae has a critic", choices=list(ADVANTAGES), fixed=True)
    arg("samples_per_prompt", 1, "responses; rloo and grpo compare them", least=1, fixed=True)
    arg("gamma", 1.0, "discount, of gae and reinforce. 1 [DeepSpeed-Chat]", most=1, fixed=True)
    arg("lam", 0.95, "GAE's lambda: 0 trusts the critic. 0.95 [DeepSpeed-Chat]", most=1, fixed=True)
    arg("whiten", int, "1: advantages to mean 0, deviation 1; None: by --advantage", fixed=True)
    arg("kl_coef", float, "penalty for one nat of KL. 0.1 [DeepSpeed-Chat]; 0: no reference")
    arg("log_kl", 0, "1: keep the reference with --kl_coef 0, to log KL", most=1)
    arg("kl_target", float, "KL to the reference, nats a response, that kl_coef adapts to hold")
    kinds = list(KL_ESTIMATORS)
    arg("kl_estimator", str, "None: k1 in the reward, k3 in the loss", choices=kinds, fixed=True)
    arg("kl_in", "reward", "place of KL. loss [Shao 2024]", choices=["reward", "loss"], fixed=True)
    arg("clip", 0.2, "the ratio is clipped to 1 +- this. 0.2 [Schulman 2017]", most=inf)
    upper = "upper bound 1 + this, to let rare tokens rise. 0.28 [Yu 2025, DAPO]; None: as --clip"
    arg("clip_high", float, upper, most=inf)
    cap = "responses of another policy: cap of each token's importance weight. 2 [Yao 2025]"
    arg("is_cap", float, cap, most=inf, fixed=True)
    band = "and a response counts if its tokens' mean ratio lies in 1/this .. this"
    arg("is_band", float, band, least=1, most=inf, fixed=True)
    means = ["tokens", "responses", "constant"]
    arg("loss_mean", "tokens", "loss_weights says over what", choices=means, fixed=True)
    truncated = "1: responses that were cut off count in no loss [Yu 2025]"
    arg("mask_truncated", 0, truncated, most=1, fixed=True)
    arg("clip_value", 0.2, "values are clipped to old +- this. 0.2 [DeepSpeed-Chat]", most=inf)
    arg("clip_reward", 5.0, "each score is clipped to +- this. 5 [DeepSpeed-Chat]", most=inf)
    scaled = "1: scores to mean 0, deviation 1 on reward.py's held-out responses"
    arg("normalize_reward", 0, scaled, most=1, fixed=True)
    arg("missing_eos_penalty", 0.0, "taken off the clipped score of a cut-off response")
    arg("entropy_coef", 0.0, "bonus for each nat of entropy; 0: off")
    arg("target_kl", float, "ends a rollout's epochs when approx_kl, to its policy, is above")
    arg("enable_ema", 0, "1: keep an average of the actor's weights, in ema/", most=1, fixed=True)
    arg("ema_decay", 0.992, "decay of --enable_ema's average. 0.992 [DeepSpeed-Chat]", most=1)
    arg("eval_ema", 0, "1: keep and evaluate that average, too: eval_ema_...", most=1)
    arg("allow_unstable", 0, "1: no limits on batch sizes, epochs, generation batches", most=1)
    ppo_flags.add_options(parser)
    return ppo_flags.resolve(declaring.parse(parser, PRESETS, argv, "ppo"), ADVANTAGES)


# ---- Maths, of (B, R) unless said; mask is 1 on real response tokens ----
KL_ESTIMATORS = "k1", "k2", "k3"


def kl_estimate(logprobs, ref_logprobs, estimator):
    """KL(pi || ref) per token, from tokens sampled by pi.  [Schulman 2020]  As a value:

    r = ref / pi        k1 = -log r             unbiased, may be negative, noisy
                        k2 = (log r)^2 / 2      biased a little, never negative
                        k3 = r - 1 - log r      unbiased, never negative
    As a loss, k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi), and k1's is 0 on
    average.
    """
    log_r = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r**2 / 2
    return log_r.exp() - 1 - log_r


def adapted_kl_coef(kl_coef, kl, target):
    """--kl_target: raises the KL penalty if KL is above its target.  [Ziegler 2019] section 2.2

        error   = clip(KL / target - 1, -0.2, 0.2)
        kl_coef = kl_coef * (1 + 0.1 * error)

    kl, target: nats per response. In steps that leave the actor as it is (a fork that trains the
    critic first) KL is 0, and this would lower the penalty: leave it out there.

    >>> round(adapted_kl_coef(0.1, kl=12.0, target=6.0), 6)  # the error is clipped to 0.2
    0.102
    """
    return kl_coef * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))


def token_rewards(scores, kl, mask, kl_coef, clip_reward, penalty=0.0):
    """Minus the KL penalty on every token, plus the scores.  [Ouyang 2022] eq. 2

    A whole response's score is placed on its last token, and 0 elsewhere. Clipping is
    DeepSpeed-Chat's; `penalty` is taken off after it.
    """
    return (-kl_coef * kl + (scores.clamp(-clip_reward, clip_reward) - penalty)) * mask


def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation over the response tokens.  [Schulman 2016] eq. 16

        delta_t = r_t + gamma * V_{t+1} - V_t       V = 0 after the last token
        A_t     = delta_t + gamma * lam * A_{t+1}   so we walk from the last token back
        returns = A + V                             the critic's target

    A token with mask 0 (padding, or a tool's between two turns) is no step: t + 1 is then the next
    token with mask 1. Returns advantages and returns, 0 where mask is 0.
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
    """The reward still to come, A_t = r_t + gamma * A_{t+1}: GAE with V = 0.  [Williams 1992]

    Whitened, this is REINFORCE++ [Hu 2025].
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


def rloo(totals, groups):
    """A response's reward minus the mean of the OTHER ones to its prompt.  [Ahmadian 2024]

        A_i = total_i - (sum of total_j over j != i) / (n - 1)

    totals: (n,) rewards of n responses, groups: (n,) numbers of their prompts -> (n,)
    """
    total, n = group_sum(totals, groups), group_sum(torch.ones_like(totals), groups)
    return totals - (total - totals) / (n - 1)


def grpo(totals, groups):
    """A response's reward, normalised within its prompt's.  [Shao 2024] section 4.1.2

    A_i = (total_i - mean) / (std + 1e-4)        (n,), (n,) -> (n,)

    std divides by n - 1. Where all rewards are equal A is exactly 0, since `set_advantages` gives
    totals in float64. The mean over tokens of GRPO's loss is another matter: see `loss_weights`.
    """
    n = group_sum(torch.ones_like(totals), groups)
    errors = totals - group_sum(totals, groups) / n
    return errors / ((group_sum(errors**2, groups) / (n - 1)).sqrt() + 1e-4)


def group_sum(values, groups):
    """(n,), (n,) numbers 0, 1, ... -> (n,): the sum over each one's group."""
    return values.new_zeros(len(groups)).index_add(0, groups, values)[groups]


def whitened(advantages, masks):
    """Shifts and scales lists of (B, R) to mean 0, deviation 1 over the rollout's tokens.

    Over the real tokens of all ranks, so that neither padding nor the number of GPUs matters.
    """
    a = torch.cat([x.flatten() for x in advantages]).double()
    m = torch.cat([x.flatten() for x in masks]).double()
    count, total, squares = ranks.all_sum(m.sum(), (a * m).sum(), (a * a * m).sum()).tolist()
    count = max(count, 1)  # a mask of the user's own may leave no token
    mean = total / count
    scale = max(squares / count - mean**2, 0.0) ** 0.5 + 1e-8
    return [(a - mean) / scale * m for a, m in zip(advantages, masks)]


def policy_loss(logprobs, old_logprobs, advantages, clip, clip_high=None):
    """Clipped surrogate, to be minimised.  [Schulman 2017] eq. 7, with the sign turned

        ratio = pi(token) / pi_old(token)
        loss  = -min(ratio * A, clip(ratio, 1 - clip, 1 + clip_high) * A)

    clip_high None is clip; larger lets rare tokens rise further [Yu 2025]. Returns loss and ratio.
    """
    ratio = (logprobs - old_logprobs).exp()
    high = 1 + (clip if clip_high is None else clip_high)
    gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, high) * advantages)
    return -gain, ratio


def importance_weights(old_logprobs, sampled_logprobs, cap):
    """Truncated importance weights, of responses that another policy mu has sampled.  [Yao 2025]

        weight = min(pi_old(token) / mu(token), cap)

    pi_old: the actor as it scored the rollout. mu: the same weights in another engine, dtype or
    kernel, or older weights. Under mu a weight without the cap has mean 1, and makes a mean over
    what may follow a text one under pi_old; the text itself is still one that mu has written. The
    cap bounds its variance, and makes it a little smaller on average.
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap)


def in_band(old_logprobs, sampled_logprobs, mask, band):
    """1 for a response whose ratio, a geometric mean over its tokens, lies in 1/band .. band.

        1/band <= exp(mean of log(pi_old(token) / mu(token))) <= band          (B, R) -> (B, 1)

    As OpenRLHF's `seq-mask-tis` with --is_cap. A response far from what the actor would write says
    little of the actor, and comes most often from an error of the engine that sampled it.
    """
    log_ratios = (old_logprobs - sampled_logprobs) * mask
    means = log_ratios.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (means.abs() <= log(band)).float()


def actor_loss(args, batch, logprobs, entropy, kl_coef):
    """The policy loss, with a penalty on KL and a bonus for entropy where flags say so.

    Returns loss, ratio, and clipped: where clipping stopped the gradient through the ratio. That
    is above 1 where the advantage is positive, and below 1 where it is negative. The ratio is each
    token's, also of a loss that takes a response's (variants/gspo): the check of the first update
    would not see an error in single tokens in a mean over the response.
    """
    loss, ratio = policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, args.clip, args.clip_high
    )
    clipped = loss != -ratio * batch.advantages  # the minimum was the other one
    if args.is_cap:
        sampled = batch.tokens["sampled_logprobs"]
        loss = loss * importance_weights(batch.old_logprobs, sampled, args.is_cap)
    if args.kl_in == "loss" and kl_coef:
        loss = loss + kl_coef * kl_estimate(logprobs, batch.ref_logprobs, args.kl_estimator)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy
    return loss, ratio, clipped


def value_loss(values, old_values, returns, clip_value):
    """Half the larger of two squared errors: of the values, and of the values clipped.

    They are clipped to old_values +- clip_value. As in DeepSpeed-Chat; not in the PPO paper.
    """
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


# ---- The choice of --advantage ----
@dataclass(frozen=True)
class Estimator:
    """How advantages are computed: from each response's tokens, or by comparing responses."""

    of_tokens: Callable | None = None  # (args, batch) -> advantages, returns or None: (B, R) each
    of_groups: Callable | None = None  # (totals, groups) -> advantages: (n,) for n responses
    needs_critic: bool = False
    whitens: bool = False  # unless --whiten says otherwise

    @property
    def compares_groups(self):
        """Whether it compares the responses to one prompt, which must all be on one rank."""
        return self.of_groups is not None


def gae_of(args, batch):
    """GAE: the only one that uses the critic."""
    return gae(batch.rewards, batch.old_values, batch.response_mask, args.gamma, args.lam)


def reinforce_of(args, batch):
    """REINFORCE: no critic, so no returns for it to learn."""
    return reinforce(batch.rewards, batch.response_mask, args.gamma), None


ADVANTAGES = {
    "gae": Estimator(of_tokens=gae_of, needs_critic=True, whitens=True),
    "reinforce": Estimator(of_tokens=reinforce_of, whitens=True),
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
    reference: Callable | None  # with LoRA the actor, its adapters off; none with --kl_coef 0
    reward_models: list  # usually one; several, or none where --reward_fn judges alone
    judge: Callable  # (batch) -> scores (B, R) by the reward models and --reward_fn
    gold: Callable | None  # (batch) -> scores (B, R) by --gold_fn

    @property
    def engines(self):
        """{name: engine} of those that are trained, the actor first."""
        critic = {"critic": self.critic} if self.critic else {}
        return {"actor": self.actor, **critic}


def load_models(args, tokenizer, functions, gold, updates):
    """Part 2. functions, gold: judges (batch) -> (B, R), of --reward_fn and --gold_fn.

    updates: optimizer steps of the whole run, for the learning-rate schedules.
    """
    batch_size, accumulation = args.per_device_training_batch_size, args.gradient_accumulation_steps
    actor_args, critic_args = declaring.of_role(args, "actor"), declaring.of_role(args, "critic")
    actor = common.load_model(actor_args)
    actor = common.train_engine(actor, actor_args, batch_size, accumulation, updates)
    critic = None
    if args.has_critic:
        critic = common.load_model(critic_args, tokenizer, "score")
        critic = common.train_engine(critic, critic_args, batch_size, accumulation, updates)
    reference = None
    if args.has_reference:
        reference = common.reference_of(actor, actor_args, batch_size)
    if critic and not args.reward_model_name_or_path:
        ranks.say(f"rewards are those of {', '.join(args.reward_fn)} alone, of no reward model")
    reward_models = judging.load_models(args, batch_size, tokenizer)
    judges = [functools.partial(reward_model_scores, model) for model in reward_models]
    judge = judging.combined(args, [*functions, *judges])
    return Models(actor, critic, reference, reward_models, judge, gold)


# ---- The micro-batch ----
@dataclass
class MicroBatch(common.Layout):
    """B responses, laid out for a forward. The fields below are filled in from top to bottom."""

    responses: list  # (B,) dicts: prompt, text, response_ids, group, ...
    length: Tensor  # (B,) tokens of each response. A mask's sum may be less: it may leave some out
    ended: Tensor  # (B,) 1, or 0 for a response that was cut off
    row_weight: Tensor  # (B,) 1, or 0 for a filler (batching.Rows)
    response_mask: Tensor  # (B, R) 1 on tokens that the actor wrote and that count
    last: Tensor  # (B, R) 1 on the last of these
    tokens: dict = field(default_factory=dict)  # what the sampler said of each token: (B, R) each
    # 4 score; all below are (B, R)
    ref_logprobs: Tensor = None
    logprobs: Tensor = None  # of the scoring forward; with a graph if it is trained on, too
    entropy: Tensor = None  # of the same forward
    values: Tensor = None  # with a graph if the forward is trained on, too
    old_logprobs: Tensor = None  # the numbers of logprobs, without a graph
    old_values: Tensor = None
    kl: dict = field(default_factory=dict)  # to the reference, by each estimator: (B, R) each
    scores: Tensor = None  # a whole response's on its last token
    gold: Tensor = None  # of --gold_fn, in the same places; not trained on
    # 5 advantages
    earned: Tensor = None  # scores as they are trained on: scaled, clipped, less penalties
    rewards: Tensor = None  # these, less the KL penalty
    raw_advantages: Tensor = None  # before whitening
    advantages: Tensor = None
    returns: Tensor = None

    def per_response(self):
        """Returns {name: (B,)}, once it is scored: a metric's value for each response.

        A metric of yours is a line here. `responses` hold the texts and the data's other columns,
        and what several judges, or a function that returns a dict, said of them: reward_NAME.
        Evaluations and samples.jsonl have a metric of yours if its name begins with reward or gold.
        """
        metrics = {"reward": self.scores.sum(-1)}
        if self.gold is not None:
            metrics["gold"] = self.gold.sum(-1)
        for name in sorted(self.responses[0]):
            if name.startswith(("reward_", "gold_")):
                parts = [response[name] for response in self.responses]
                metrics[name] = metrics["reward"].new_tensor(parts)
        if self.kl:
            metrics |= {"kl": self.kl["k1"].sum(-1), "kl_k3": self.kl["k3"].sum(-1)}
        return {**metrics, "response_length": self.length, "eos_rate": self.ended}


def plain_rows(responses, pad_id):
    """The Layout of a row for each response: the prompt padded left, the response right.

    responses: B dicts with prompt_ids and response_ids. See the picture at the top of this file.
    """
    prompts, prompt_mask = common.pad([row["prompt_ids"] for row in responses], pad_id)  # (B, P)
    answers, real = common.pad([row["response_ids"] for row in responses], pad_id, "right")
    mask = torch.cat([prompt_mask, real], 1)  # (B, T)
    B, T = mask.shape
    P = prompts.shape[1]
    row_starts = T * torch.arange(B)[:, None]  # (B, 1) flat place of each row's first token
    return common.Layout(
        ids=torch.cat([prompts, answers], 1),  # (B, T): here N = B
        mask=mask,
        positions=common.position_ids(mask),
        real_tokens=mask.sum(-1),
        predicts=row_starts + torch.arange(P - 1, T - 1),  # (B, R)
    )


def make_micro_batches(tokenizer, responses, batch_size, pack=plain_rows):
    """Lays responses (dicts) out in MicroBatches of `batch_size`. Masks come from known lengths.

    pack(responses, pad_id): makes the Layout, plain_rows or shared_prompts.shared_rows. A response
    may have `tokens`, {name: a list with one number a token}: they become batch.tokens[name], and
    `own` among them is 0 on tokens that the actor has not written, a tool's for example.
    """
    out = []
    for start in range(0, len(responses), batch_size):
        part = responses[start : start + batch_size]
        length = torch.tensor([len(row["response_ids"]) for row in part])
        row_weight = torch.tensor([float(row["row_weight"]) for row in part])
        real = (torch.arange(length.max()) < length[:, None]).float()  # (B, R)
        tokens = {
            name: common.pad([row["tokens"][name] for row in part], 0.0, "right")[0].float()
            for name in part[0].get("tokens", ())
        }
        response_mask = real * tokens.get("own", real) * row_weight[:, None]
        layout = pack(part, tokenizer.pad_token_id)
        batch = MicroBatch(
            **vars(layout),
            responses=part,
            length=length,
            ended=torch.tensor([row["ended"] for row in part]),
            row_weight=row_weight,
            response_mask=response_mask,
            last=response_mask * (response_mask.cumsum(-1) == response_mask.sum(-1, keepdim=True)),
        ).to(ranks.device())
        batch.tokens = {name: numbers.to(ranks.device()) for name, numbers in tokens.items()}
        out.append(batch)
    return out


# ---- Rollout ----
def next_logits(model, inputs, cache):
    """Logits (b, V) of the token that follows: the one model call of a rollout.

    inputs: at first the prompts (b, P), then the tokens drawn last (b, 1). The cache holds the keys
    and values of all tokens before them, and the mask and positions of its b rows.
    """
    start, end = cache.length, cache.length + inputs.shape[1]
    logits = model(
        inputs,
        attention_mask=cache.mask[:, :end],
        past_key_values=cache.past,
        use_cache=True,
        **forwards.accepted(model, position_ids=cache.positions[:, start:end], logits_to_keep=1),
    ).logits  # (b, 1, V)
    cache.length = end
    return logits[:, -1]


@torch.no_grad()
def sample(args, model, tokenizer, ids, mask, uniforms, synced=False):
    """Samples a response to each prompt, token by token.

    ids, mask: (B, P), left-padded prompts. uniforms: (B, R) in [0, 1), float64: token r of row b is
    the first whose cumulative probability exceeds uniforms[b, r] times the sum of what may be
    drawn. So the draw does not depend on the other rows. synced: all ranks must make the same
    number of forwards (zero3.gather_for_generation).

    Returns responses (B, R'), their log-probs (B, R') under the model at --temperature, their
    lengths (B,), EOS included, and ended: bool (B,), False for a response that was cut at R tokens.
    """
    B, R = uniforms.shape
    device = ids.device
    responses = torch.full((B, R), tokenizer.pad_token_id, device=device)
    logprobs = torch.zeros(B, R, device=device)
    lengths = torch.zeros(B, dtype=torch.long, device=device)
    alive = torch.ones(B, dtype=torch.bool, device=device)  # rows that have not ended
    cache = decoding.new_cache(args, model, ids, mask, R)  # memory for P + R tokens, once
    forward = decoding.compiled_next_logits if cache.width else next_logits  # --compile_decoding
    inputs = ids[cache.rows]  # equal prompts are computed once
    for r in progress.shown(range(R), "tokens of each response"):
        # Forward.
        logits = forward(model, inputs, cache)  # at first a row for each different prompt
        logits = decoding.for_each_row(cache, logits)  # (b, V): now a row for each response
        rows = cache.rows  # (b,) which of the B rows these are

        # Draw. The temperature is applied in fp32, as when tokens are scored: divided in bf16 the
        # logits would be another policy's.
        probs = torch.softmax(common.in_fp32(logits, args.temperature), -1)  # (b, V)
        # Ids that no token uses cannot be drawn (embeddings are often padded). What --top_k and
        # --top_p leave out gets probability 0, so that the sum need not be 1.
        allowed = decoding.restricted(args, tokenizer, probs[:, : len(tokenizer)], r)
        cumulative = allowed.cumsum(-1, dtype=torch.float64)
        threshold = uniforms[rows, r, None] * cumulative[:, -1:]  # (b, 1)
        token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]  # (b,)
        token.clamp_(max=cumulative.shape[1] - 1)  # NaN goes past the end: part 4 stops the run
        # The log-prob is that of the whole distribution, as when the token is scored. With --top_k
        # or --top_p it is not the sampler's own: the ratio is 1 all the same, the gradient biased.
        logprob = probs.gather(-1, token[:, None])[:, 0].log()  # (b,)

        # Append, where the row goes on: rows that have ended may stay in the cache for a while.
        # A row's last token is EOS, or the end of a text of --stop.
        writes = alive[rows]
        responses[rows, r] = token.where(writes, tokenizer.pad_token_id)
        logprobs[rows, r] = logprob.where(writes, 0)
        lengths[rows] += writes
        alive[rows] &= token != tokenizer.eos_token_id
        alive[rows] &= ~decoding.at_stop(args, tokenizer, responses[rows], r)
        remaining = alive.sum().item()  # rows that go on
        if not decoding.anyone(remaining, synced):
            break
        decoding.leave_out_ended(cache, alive, remaining)
        inputs = responses[cache.rows, r, None]  # (b, 1)
    return responses[:, : r + 1], logprobs[:, : r + 1], lengths, ~alive


def roll_out(args, engine, tokenizer, prompts, step, batch_size):
    """Samples a response to each prompt, `batch_size` of them at a time.

    prompts: dicts with prompt_ids, row and sample. Returns the same dicts with response_ids, text,
    ended (1.0 or 0.0) and tokens, {"sampled_logprobs": [...]}. The random numbers of a response
    depend on (seed, step, row, sample) alone, and on a row's `turn`, for a fork that samples for it
    more than once in a step.
    """
    out = []
    # Here the model is in eval mode, so dropout is off. Under ZeRO-3 all weights are gathered once,
    # for all forwards, if they fit beside the cache.
    room = decoding.memory(args, engine, prompts, batch_size)
    with zero3.gather_for_generation(engine, room) as (model, synced):
        for start in progress.shown(range(0, len(prompts), batch_size), "batches of a rollout"):
            rows = prompts[start : start + batch_size]
            ids, mask = common.pad([row["prompt_ids"] for row in rows], tokenizer.pad_token_id)
            ids, mask = ids.to(ranks.device()), mask.to(ranks.device())  # (B, P)
            uniforms = decoding.row_uniforms(args.seed, step, rows, args.max_answer_seq_len)
            sampled = sample(args, model, tokenizer, ids, mask, uniforms, synced)
            responses, logprobs, lengths, ended = (x.tolist() for x in sampled)
            for i, row in enumerate(rows):
                ids_of_row = responses[i][: lengths[i]]  # with EOS, if that ended it
                new = {
                    "response_ids": ids_of_row,
                    "text": tokenizer.decode(ids_of_row, skip_special_tokens=True),
                    "ended": float(ended[i]),
                    "tokens": {"sampled_logprobs": logprobs[i][: lengths[i]]},
                }
                out.append({**row, **new})
    return out


def ordered(responses, responses_per_row=1, seed=None):
    """Returns a rollout's responses in the order in which micro-batches take them.

    By length, which saves padding, where one minibatch takes them all; else shuffled, with a seed.
    With --share_prompt the responses that share a row stay side by side.
    """
    n = responses_per_row
    rows = [responses[i : i + n] for i in range(0, len(responses), n)]
    if seed is None:
        rows.sort(key=lambda row: sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in row))
    else:
        np.random.default_rng(seed).shuffle(rows)
    return [response for row in rows for response in row]


# ---- Score ----
def actor_forward(args, actor, batch):
    """Log-probs and entropy (B, R) of the response tokens: one function for old and new ones.

    Entropy has a gradient only if --entropy_coef trains on it: that costs memory.
    """
    wanted = batch.response_mask > 0
    logits = common.response_logits(actor, batch, wanted)  # (M, V)
    logprobs = common.token_logprobs(logits, batch, wanted, args.temperature)
    with torch.set_grad_enabled(torch.is_grad_enabled() and args.entropy_coef > 0):
        entropy = common.scatter_to(wanted, common.entropy(logits, args.temperature))
    return logprobs, entropy


def reward_model_scores(model, batch):
    """Scores (B, R) of a reward model: its value at each response's end, placed on `last`."""
    values = common.values_at_tokens(model, batch)  # (B, R)
    score = values.gather(1, batch.length[:, None] - 1)  # (B, 1)
    return score * batch.last


def score(args, models, batch, one_pass):
    """Fills in old log-probs, entropy, values, reference log-probs, KL and scores of a micro-batch.

    one_pass: the actor's and the critic's forwards keep their graphs, and part 6 trains on them.
    """
    with torch.no_grad():
        # The reference comes before the actor: with LoRA both are one engine, and under ZeRO-3 a
        # forward that is trained on must be the engine's last one before its backward.
        reference, mask = models.reference, batch.response_mask  # (B, R)
        if reference:
            batch.ref_logprobs = common.response_logprobs(reference, batch, mask, args.temperature)
        batch.scores = models.judge(batch)
        batch.gold = models.gold(batch) if models.gold else None
    with torch.set_grad_enabled(one_pass):
        batch.logprobs, batch.entropy = actor_forward(args, models.actor, batch)
        batch.old_logprobs = batch.logprobs.detach()  # the same numbers, as constants
        if models.critic:
            batch.values = common.values_before_tokens(models.critic, batch)
            batch.old_values = batch.values.detach()
    for kind in KL_ESTIMATORS if reference else ():
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, kind)
        batch.kl[kind] = kl * batch.response_mask


def scored_rollout(
    args,
    models,
    tokenizer,
    clock,
    prompts,
    step,
    rollout_batch_size,
    micro_batch_size,
    *,
    responses_per_row=1,
    seed=None,
    one_pass=False,
):
    """Parts 3 and 4: roll_out, ordered, make_micro_batches, and score for each. No dropout acts.

    Evaluation and microscope call it, too, without what follows the star: see `ordered` for
    responses_per_row and seed, and `score` for one_pass. clock: rollout_metrics.Clock, which
    measures both parts.
    """
    for engine in models.engines.values():
        # engine.train(False) is eval mode: dropout is off, so that what is stored is of the policy
        # that samples. engine.train(True), for one_pass, is needed by gradient checkpointing alone:
        # a model with dropout has no one_pass.
        engine.train(one_pass)
    with state_offload.states_on_cpu(args, models.engines.values()):  # --offload_states
        # ---- 3 rollout ----
        responses = roll_out(args, models.actor, tokenizer, prompts, step, rollout_batch_size)
        clock.lap("generate_seconds")
        # A fork may choose among the responses here, or sample some again. Every rank must keep the
        # same number, which makes whole minibatches.
        responses = ordered(responses, responses_per_row, seed)

        # ---- 4 score ----
        pack = shared_prompts.packing(responses_per_row) or plain_rows
        micro_batches = make_micro_batches(tokenizer, responses, micro_batch_size, pack)
        for batch in micro_batches:
            score(args, models, batch, one_pass)
        clock.lap("score_seconds")
    return micro_batches


def shares_pass(args, *models):
    """Returns whether one forward can score a rollout and then be trained on.

    Where a rollout is one micro-batch that is trained on once, without dropout, nothing changes
    between the two. It spares a forward of the actor and one of the critic in every step: 5.1
    samples/s with it, 4.15 without (python bench/bench.py --only ppo, on two CPU cores). It takes
    memory: the graphs of both models are held at the same time.
    """
    sizes = {args.per_device_generation_batch_size, args.per_device_training_batch_size}
    counts = args.gradient_accumulation_steps, args.generation_batches, args.ppo_epochs
    dropout = any(model_folders.has_dropout(model) for model in models)
    return len(sizes) == 1 and max(counts) == 1 and not dropout


# ---- Advantages ----
def set_rewards(args, batch, kl_coef, score_statistics):
    """Gives each token its reward. score_statistics: mean, deviation with --normalize_reward."""
    scores = batch.scores
    if score_statistics:  # of whole responses: so the mean is taken off once, on the last token
        mean, std = score_statistics
        scores = (scores - mean * batch.last) / std
    # (B, R): on the last token alone. A penalty (B, 1) would be taken off at every token.
    penalty = args.missing_eos_penalty * (1 - batch.ended)[:, None] * batch.last
    none = torch.zeros_like(scores)
    mask, clip = batch.response_mask, args.clip_reward
    batch.earned = token_rewards(scores, none, mask, 0.0, clip, penalty)
    kl = batch.kl.get(args.kl_estimator, none)  # no reference: kl_coef is 0
    kl_coef = kl_coef if args.kl_in == "reward" else 0.0
    batch.rewards = token_rewards(scores, kl, mask, kl_coef, clip, penalty)


def set_advantages(args, micro_batches, kl_coef, score_statistics):
    """Gives a rollout's micro-batches rewards, advantages and, with a critic, returns."""
    estimator = ADVANTAGES[args.advantage]
    for batch in micro_batches:
        set_rewards(args, batch, kl_coef, score_statistics)
    if estimator.compares_groups:  # a response's advantage is placed on each of its tokens
        totals = torch.cat([batch.rewards.double().sum(-1) for batch in micro_batches])  # (n,)
        groups = [row["group"] for batch in micro_batches for row in batch.responses]
        groups = torch.tensor(groups).unique(return_inverse=True)[1].to(totals.device)  # (n,)
        sizes = [len(batch.responses) for batch in micro_batches]
        each = estimator.of_groups(totals, groups).float().split(sizes)
        for batch, advantages in zip(micro_batches, each):
            batch.raw_advantages = advantages[:, None] * batch.response_mask
    else:
        for batch in micro_batches:
            batch.raw_advantages, batch.returns = estimator.of_tokens(args, batch)
    raw = [batch.raw_advantages for batch in micro_batches]
    if args.whiten:
        raw = whitened(raw, [batch.response_mask for batch in micro_batches])
    for batch, advantages in zip(micro_batches, raw):
        batch.advantages = advantages


# ---- Update ----
def minibatches(micro_batches, accumulation, seed):
    """Yields lists of `accumulation` micro-batches, one for each optimizer step, shuffled.

    The micro-batches stay as they were scored: other padding would round otherwise, and the first
    ratio would not be quite 1.
    """
    order = np.random.default_rng(seed).permutation(len(micro_batches))
    for start in range(0, len(order), accumulation):
        yield [micro_batches[i] for i in order[start : start + accumulation]]


def trained_mask(args, batch):
    """1 on the tokens that count in the losses: (B, R).

    --mask_truncated 1 leaves out responses that were cut off: that a response was too long says
    nothing of its tokens. [Yu 2025] section 3.4, overlong filtering. --is_band leaves out responses
    that the actor would hardly write. Both still have rewards, which count in the baseline of their
    group and in the metrics.
    """
    mask = batch.response_mask
    if args.mask_truncated:
        mask = mask * batch.ended[:, None]
    if args.is_band:
        sampled = batch.tokens["sampled_logprobs"]
        mask = mask * in_band(batch.old_logprobs, sampled, batch.response_mask, args.is_band)
    return mask


def loss_weights(args, masks):
    """The weight of each token in the actor's loss: (B, R) of each micro-batch, and the divisor.

    masks: the `trained_mask` of each micro-batch. The loss is

        sum of weight_t * loss_t / divisor

    over all micro-batches and ranks of the optimizer step. With n responses, of L_i tokens that
    count each, --loss_mean makes it

        tokens      sum of loss_t / sum of L_i                   every token counts the same: DAPO
        responses   1/n * sum over i of (sum of loss_t / L_i)    every response does: GRPO
        constant    1/n * sum over i of (sum of loss_t / R)      R = --max_answer_seq_len: Dr. GRPO

    [Yu 2025] eq. 8, [Shao 2024] eq. 3, [Liu 2025] section 3.1. With `responses` a token of a long
    response counts less: long bad ones are punished less for each token, and long good ones are
    reinforced less. With `tokens` and `constant` a long response counts more as a whole; these two
    differ by a factor of the step. A response without tokens that count is not among the n. The
    critic's loss and the metrics are means over tokens always. Importance weights are no part of
    this: see `actor_loss`.
    """
    if args.loss_mean == "tokens":
        return masks, ranks.all_sum(sum(mask.sum() for mask in masks)).item()
    lengths = [mask.sum(-1, keepdim=True) for mask in masks]  # (B, 1) each
    count = ranks.all_sum(sum((length > 0).sum() for length in lengths)).item()
    if args.loss_mean == "constant":
        lengths = [torch.full_like(length, args.max_answer_seq_len) for length in lengths]
    return [mask / length.clamp(min=1) for mask, length in zip(masks, lengths)], count


def optimizer_step(args, run, minibatch, actor, critic, kl_coef, one_pass, means):
    """One optimizer step of the actor, and of the critic, on a minibatch.

    one_pass: it trains on the forwards of `score`, which kept their graphs; else on new ones.
    means: rollout_metrics.TokenMeans, which are told of it.
    """
    engines = [actor, critic] if critic else [actor]
    masks = [trained_mask(args, batch) for batch in minibatch]  # (B, R) each
    weights, divisor = loss_weights(args, masks)
    token_count = ranks.all_sum(sum(mask.sum() for mask in masks)).item()
    for batch, weight, mask in zip(minibatch, weights, masks):  # one forward each
        # The actor
        logprobs, entropy = batch.logprobs, batch.entropy  # (B, R)
        if not one_pass:
            logprobs, entropy = actor_forward(args, actor, batch)
        loss, ratio, clipped = actor_loss(args, batch, logprobs, entropy, kl_coef)
        if not one_pass and not means.updates:  # the first of the rollout: no weight has moved
            checks.stop_unless_one(run, ratio, batch.response_mask)
        loss_sum = (loss * weight).sum()
        actor.backward(loss_sum * common.loss_scale(actor, divisor))

        # The critic, if there is one
        critic_loss = torch.zeros_like(loss)
        if critic:
            values = batch.values  # (B, R)
            if not one_pass:
                values = common.values_before_tokens(critic, batch)
            critic_loss = value_loss(values, batch.old_values, batch.returns, args.clip_value)
            loss_sum = (critic_loss * mask).sum()
            critic.backward(loss_sum * common.loss_scale(critic, token_count))

        patches.skip_together(args, engines)  # fp16: an overflow skips both
        for engine in engines:
            engine.step()  # moves weights at the minibatch's last micro-batch
        means.add(
            batch.response_mask,
            ratio,
            actor_loss=loss,
            critic_loss=critic_loss,
            approx_kl=kl_estimate(batch.old_logprobs, logprobs.detach(), "k3"),  # KL(old || new)
            clip_fraction=clipped,
            clip_fraction_low=clipped & (batch.advantages < 0),
            clip_fraction_high=clipped & (batch.advantages > 0),
        )
    means.end_update()


# ---- Metrics ----
@torch.no_grad()
def rollout_means(args, micro_batches):
    """What a rollout was like, over all ranks: {name: number}. Metrics of yours: per_response.

    reward_std            deviation of all responses' rewards as they are trained on, but without
                          KL. 0: nothing to learn from
    truncated_reward      mean reward of the responses that were cut off, if any were
    entropy               mean over the tokens
    advantage_std         deviation over the tokens, before whitening
    explained_variance    1: the critic foresaw each return; 0: no better than a constant
    sampling_...          how far the policy mu that sampled is from the one that scored, pi: see
                          sampling_means
    """
    moments = functools.partial(rollout_metrics.moments, micro_batches)  # mean, variance
    means = rollout_metrics.response_means(micro_batches)
    reward = lambda batch: batch.scores.sum(-1)  # noqa: E731  (B,)
    earned = lambda batch: batch.earned.sum(-1)  # noqa: E731  (B,)
    means["reward_std"] = moments(earned, lambda batch: batch.row_weight)[1] ** 0.5
    if means["eos_rate"] < 1:
        cut = lambda batch: batch.row_weight * (1 - batch.ended)  # noqa: E731
        means["truncated_reward"] = moments(reward, cut)[0]
    means["entropy"] = moments(lambda batch: batch.entropy)[0]
    means["advantage_std"] = moments(lambda batch: batch.raw_advantages)[1] ** 0.5
    if args.has_critic:
        errors = moments(lambda batch: batch.returns - batch.old_values)[1]
        variance = moments(lambda batch: batch.returns)[1]
        means["explained_variance"] = 1 - errors / max(variance, 1e-12)
    if args.compares_groups:
        means |= group_means(micro_batches)
    return means | sampling_means(micro_batches)


def sampling_means(micro_batches):
    """How far the policy mu that sampled is from the one that scored, pi: {name: number}.

    sampling_gap        largest abs(log(pi / mu)) of a token
    sampling_kl         mean of log(mu / pi) over the tokens: KL(mu || pi), nats a token
    sampling_outside    share of the tokens with pi / mu outside of 0.8 .. 1.2
    sampling_ppl_ratio  perplexity of the responses under pi, over that under mu: exp(sampling_kl)

    All are 0, and the ratio 1, but for rounding where a model samples and scores in the same way: a
    cache sums in another order. {} where a fork's sampler tells no log-probs.
    """
    if any("sampled_logprobs" not in batch.tokens for batch in micro_batches):
        return {}

    def log_ratio(batch):
        return batch.old_logprobs - batch.tokens["sampled_logprobs"]  # (B, R)

    moments = functools.partial(rollout_metrics.moments, micro_batches)
    kl = -moments(log_ratio)[0]
    outside = moments(lambda batch: ((log_ratio(batch).exp() - 1).abs() > 0.2).float())[0]
    gaps = [rollout_metrics.token_gaps(batch).max().item() for batch in micro_batches]
    return {
        "sampling_gap": max(ranks.all_gather_objects(gaps)),
        "sampling_kl": kl,
        "sampling_outside": outside,
        "sampling_ppl_ratio": exp(kl),
    }


def group_means(micro_batches):
    """How much the responses to one prompt differ in reward: what RLOO and GRPO learn from.

    equal_groups    share of prompts whose responses all have the same reward: their advantages
                    are 0, so they teach nothing
    group_std       deviation of a prompt's rewards, which divides by n - 1: mean over the prompts
    Rewards are here as they are trained on, clipped and less penalties, but without KL.
    """
    groups = {}
    for batch in micro_batches:
        for row, reward in zip(batch.responses, batch.earned.double().sum(-1)):
            if row["row_weight"]:
                groups.setdefault(row["group"], []).append(reward)
    rewards = [torch.stack(group) for group in groups.values()]  # (n,) of each prompt
    equal = sum(group.max() - group.min() <= checks.EQUAL for group in rewards)
    deviations = sum(group.std() for group in rewards)
    equal, deviations, count = ranks.all_sum(equal, deviations, len(rewards)).tolist()
    return {"equal_groups": equal / max(count, 1), "group_std": deviations / max(count, 1)}


# ---- The step, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "step 3: PPO")
    functions, gold = judging.load_functions(args)  # --reward_fn, --gold_fn

    # ---- 1 data ----
    sources = open_sources(args, "ppo")
    tokenizer = model_folders.load_tokenizer(
        args.actor_model_name_or_path, args, in_chats=sources.hold_chats
    )
    train, held_out = load_rows(args, sources, tokenizer, args.max_prompt_seq_len)
    score_statistics = ppo_flags.check_models(args, tokenizer)  # --normalize_reward
    held_out = held_out.select(range(min(args.num_eval_prompts, len(held_out))))
    # Sizes of a rollout on one rank: 8 micro-batches of 4 responses and an accumulation of 2 make
    # 4 minibatches, so 4 optimizer steps in an epoch over the rollout.
    sizes = ppo_flags.Sizes(args)
    steps = run.plan(tokenizer, train, held_out, sizes.prompts, sizes.generation_batches)

    # ---- 2 models ----
    models = load_models(args, tokenizer, functions, gold, steps * sizes.updates)
    actor, critic, engines = models.actor, models.critic, models.engines
    checks.refuse_if_padding_matters(run, *engines.values())
    state = {"kl_coef": args.kl_coef, "equal_since": None}  # what checkpoints keep beside engines
    average = ema.Ema(args, actor.module, state)  # --enable_ema
    responses_per_row = shared_prompts.responses_per_row(  # --share_prompt
        args, *engines.values(), *models.reward_models
    )
    one_pass_is_enough = shares_pass(args, *engines.values())
    decoding.try_compiled(args, actor, tokenizer, sample)  # --compile_decoding
    clock = rollout_metrics.Clock()
    # Evaluation and microscope roll out and score as the loop below does.
    rollout = functools.partial(scored_rollout, args, models, tokenizer, clock)

    def current_kl_coef():
        """The penalty for a nat of KL: --kl_coef, or what --kl_target has made of it."""
        return state["kl_coef"] if args.kl_target else args.kl_coef

    def evaluate_at(step):
        microscope.look(run, step, rollout, set_advantages, current_kl_coef(), score_statistics)
        return rollout_metrics.evaluate(run, step, rollout, actor, average)

    columns = rollout_metrics.columns(args)
    first = True  # this process's first step compares what sampling, scoring and training say
    # run.steps evaluates once before the first step, or resumes. For each step it draws rows of
    # `train`; run.log below evaluates when due, and after the loop's body it saves when due.
    for step, drawn in run.steps(engines, sizes.repeated, evaluate_at, columns, state):
        clock.start()
        one_pass = one_pass_is_enough and not first

        # ---- 3 rollout, 4 score ----
        prompts = sizes.grouped(drawn)  # dicts: each row of data --samples_per_prompt times
        micro_batches = rollout(
            prompts,
            step,
            args.rollout_batch_size,
            args.per_device_training_batch_size,
            responses_per_row=responses_per_row,
            seed=None if sizes.updates_per_epoch == 1 else (args.seed, step),  # see `ordered`
            one_pass=one_pass,
        )
        rollout_metrics.stop_unless_finite(run, micro_batches)
        if first and not (args.is_cap or args.is_band):  # else another policy may sample
            checks.stop_unless_sampled_as_scored(run, micro_batches)

        # ---- 5 advantages ----
        kl_coef = current_kl_coef()
        set_advantages(args, micro_batches, kl_coef, score_statistics)

        # ---- 6 update ----
        for engine in engines.values():
            engine.train()  # dropout acts from here on, in a model that has it
            if first:
                patches.record_backward(engine)  # ZeRO-3 prefetches in the order that it sees next
        means = rollout_metrics.TokenMeans()
        accumulation = args.gradient_accumulation_steps  # micro-batches of a minibatch
        for epoch in range(args.ppo_epochs):
            for minibatch in minibatches(micro_batches, accumulation, (args.seed, step, epoch)):
                optimizer_step(args, run, minibatch, actor, critic, kl_coef, one_pass, means)
                average.update(actor)  # --enable_ema
            if args.target_kl and means.of_last_update["approx_kl"] > args.target_kl:
                break
        clock.lap("train_seconds")
        first = False

        # ---- 7 keep ----
        metrics = {
            "kl_coef": kl_coef,
            **means.of_all_updates(args.has_critic),
            **rollout_means(args, micro_batches),
            **clock.laps,
        }
        tokens, flops = rollout_metrics.work(
            args, micro_batches, engines, models.reward_models, means.updates, one_pass
        )
        checks.warn_of_equal_rewards(run, state, metrics)
        run.log(metrics, tokens, flops)  # a number of yours is one more entry of metrics
        if args.kl_target:
            state["kl_coef"] = adapted_kl_coef(kl_coef, metrics["kl"], args.kl_target)

    # ---- 8 save ----
    average.save(run, actor, tokenizer)  # --enable_ema
    if critic:
        run.save(critic, tokenizer, f"{args.output_dir}/critic")
    run.save(actor, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
