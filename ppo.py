"""Step 3 of RLHF: PPO.   prompts -> an actor in output/ppo whose answers the reward model scores higher

    deepspeed ppo.py                                     the built-in toy, from output/sft and output/reward
    deepspeed ppo.py --preset opt-1.3b                   DeepSpeed-Chat's recipe
    deepspeed ppo.py --actor_model_name_or_path output/sft --critic_model_name_or_path output/reward --data_path my.jsonl

Four models:  actor      from step 1, trained: writes the answers
              critic     from step 2, trained: foresees, at each token, the reward still to come
              reference  the actor as it was, frozen: how far the actor may stray from it is priced by a KL term
              reward     from step 2, frozen: scores each whole answer, once
main()'s banners are 1 data, 2 models; then in every step
    3 rollout      the actor samples an answer to each prompt of the batch
    4 score        forwards without dropout give old log-probs, reference log-probs, values and scores
    5 advantages   score - KL penalty per token; GAE (or RLOO, GRPO, REINFORCE: no critic); whitening over all ranks
    6 update       clipped policy loss for the actor, clipped value loss for the critic; then the actor's EMA
    7 keep         metrics, samples
and 8 save.
What is left out: vLLM-style serving engines, asynchronous rollouts, multi-turn environments.

Shapes: B answers of a micro-batch, P prompt slots, R response slots, T = P + R, V vocabulary,
M real response tokens of all rows.
Token layout, P = 3 (left-padded), R = 4 (right-padded; '-' is padding)
    position          0    1    2    3    4    5    6
    token             -    x0   x1 | y0   y1   eos  -
    logits[:, t] score token t+1: the response is scored by logits[:, P-1 : T-1], made for the M real tokens of all rows     (M, V)
    values[:, t] is the outlook before token t+1 is chosen: the same slice           (B, R)
    response_mask is 1 on y0, y1, eos.  The score lands on eos (on the last token of an answer that was cut off).
"""
import contextlib
import importlib.util
import json
import math
import time
import traceback
from pathlib import Path

import common  # first: it quietens the libraries while they are imported
import arguments
import checkpoint
import estimate

import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn as nn
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

# ---- Arguments ------------------------------------------------------------------------------------------------------
PRESETS = {
    # DeepSpeed-Chat, step 3, opt/single_node/run_1.3b.sh, number for number. A run without a preset starts from these. (It does
    # not whiten advantages, as we do; --whiten 0.)
    "opt-1.3b": dict(
        actor_model_name_or_path="output/sft", critic_model_name_or_path="output/reward",
        data_path=["Dahoas/rm-static"], data_split="2,4,4", output_dir="output/ppo",
        num_train_epochs=1,               # the reward reaches its plateau fast
        actor_learning_rate=9.65e-6, critic_learning_rate=5e-6, actor_weight_decay=0.0, critic_weight_decay=0.0,
        actor_dropout=0.0,                # off: the pass that trains must see the policy that sampled
        critic_dropout=None,              # on: the model's own
        num_warmup_steps=100, max_prompt_seq_len=256, max_answer_seq_len=256,
        per_device_generation_batch_size=4, per_device_training_batch_size=4, per_device_eval_batch_size=4,
        kl_coef=0.1, enable_ema=1, zero_stage=2),
    "toy": dict(                          # 64 answers a step on the demo's two ranks
        actor_model_name_or_path="output/sft", critic_model_name_or_path="output/reward",
        data_path=[str(common.HERE / "toy/data")], data_split="4,5,1", output_dir="output/ppo", max_steps=120,
        num_train_epochs=1, actor_learning_rate=2e-4, critic_learning_rate=4e-4, actor_weight_decay=0.0,
        critic_weight_decay=0.0, actor_dropout=0.0, critic_dropout=None, num_warmup_steps=10, max_prompt_seq_len=32,
        max_answer_seq_len=48, per_device_generation_batch_size=32, per_device_training_batch_size=32,
        per_device_eval_batch_size=140, num_eval_prompts=280, kl_coef=0.05, enable_ema=1, zero_stage=2, dtype="fp32", group_by_length=0, log_steps=5,
        eval_steps=30, gold_fn=str(common.HERE / "toy/gold.py") + ":gold"),
}
COLUMNS = ["step", "reward", "gold", "kl", "response_length", "eos_rate", "actor_loss", "critic_loss", "explained_variance",
           "entropy", "ratio_max", "eval_reward", "eval_gold", "seconds"]

def get_args(argv=None):
    parser = arguments.new_parser(__doc__)
    arg = arguments.flags(parser, "PPO: flags that change the result")
    arg("actor_model_name_or_path", help="the model to train, and frozen, the reference: step 1's output")
    arg("critic_model_name_or_path", help="where the critic starts: step 2's output")
    arg("reward_model_name_or_path", help="the frozen reward model; None: the critic's")
    arg("reward_fn", metavar="FILE:FUNCTION", help="f(prompts, completions, **columns) -> floats, in place of a reward model")
    arg("gold_fn", metavar="FILE:FUNCTION", help="the same signature; its scores are logged and never trained on")
    arg("actor_learning_rate", type=float, help="peak. About twice the critic's [DeepSpeed-Chat]")
    arg("critic_learning_rate", type=float, help="peak; about half the actor's [DeepSpeed-Chat]")
    arg("actor_weight_decay", type=float, help="AdamW, matrices only")
    arg("critic_weight_decay", type=float, help="AdamW, matrices only")
    arg("actor_dropout", type=float, help="0: old and new log-probs must come from the same network; None: the model's own")
    arg("critic_dropout", type=float, help="on in training, off where values are stored; None: the model's own")
    arg("per_device_generation_batch_size", type=int, help="answers of one rollout batch on one device")
    arg("per_device_training_batch_size", type=int, help="answers of one forward/backward on one device; equal to the one above")
    arg("generation_batches", type=int, default=1, help="rollout batches before training on them. 1 [DeepSpeed-Chat]")
    arg("ppo_epochs", type=int, default=1, help="passes over each rollout. 1 [DeepSpeed-Chat]")
    arg("max_prompt_seq_len", type=int, help="tokens; a longer prompt keeps its end")
    arg("max_answer_seq_len", type=int, help="tokens, EOS included; a longer answer is cut off")
    arg("min_new_tokens", type=int, default=0, help="tokens before EOS may be sampled; log-probs as with top_p")
    arg("stop", nargs="+", default=[], help="texts that end an answer, which counts as ended, as with EOS")
    arg("temperature", type=float, default=1.0, help="of sampling; log-probs are of the same distribution")
    arg("top_p", type=float, default=1.0, help="nucleus sampling; 1: off. Log-probs stay those of the whole distribution")
    arg("top_k", type=int, default=0, help="sample from the k likeliest tokens; 0: off. Log-probs as with top_p")
    arg("kl_coef", type=float, help="price of one nat of KL to the reference. 0.1 [DeepSpeed-Chat]")
    arg("kl_estimator", choices=["k1", "k2", "k3"], help="per-token KL estimate [Schulman 2020]; None: k1 in the reward, k3 in the loss")
    arg("kl_target", type=float, help="nats per answer: kl_coef adapts to hold it [Ziegler 2019, section 2.2]; None: fixed")
    arg("kl_in", choices=["reward", "loss"], default="reward", help="where that price is paid; loss: as GRPO does, with k3")
    arg("advantage", choices=["gae", "rloo", "grpo", "reinforce"], default="gae", help="how good a token was; only gae has a critic")
    arg("samples_per_prompt", type=int, default=1, help="answers to each prompt of the batch; rloo and grpo compare them")
    arg("gamma", type=float, default=1.0, help="discount. 1 [DeepSpeed-Chat]")
    arg("lam", type=float, default=0.95, help="GAE's lambda: 0 trusts the critic, 1 the rewards. 0.95 [DeepSpeed-Chat]")
    arg("clip", type=float, default=0.2, help="the ratio counts within 1 +- this [Schulman 2017]")
    arg("clip_high", type=float, help="upper bound 1 + this, to let rare tokens rise. 0.28 [Yu 2025, DAPO]; None: as --clip")
    arg("dual_clip", type=float, default=0.0, help="bounds the loss of a bad token at this times it. 3 [Ye 2020]; 0: off")
    arg("target_kl", type=float, help="make no further update on a rollout after one whose approx_kl is above this; None: never")
    arg("clip_value", type=float, default=0.2, help="values move at most this far from the stored ones. 0.2 [DeepSpeed-Chat]")
    arg("clip_reward", type=float, default=5.0, help="scores are cut to +- this. 5 [DeepSpeed-Chat]")
    arg("normalize_reward", type=int, default=0, help="1: scores to mean 0, deviation 1 of step 2's held-out answers")
    arg("missing_eos_penalty", type=float, default=0.0, help="taken off the clipped score of an answer that was cut off")
    arg("entropy_coef", type=float, default=0.0, help="bonus for each nat of entropy; 0: off")
    arg("critic_warmup_steps", type=int, default=0, help="first steps that train the critic alone")
    arg("whiten", type=int, help="1: advantages to mean 0, deviation 1, masked, over all ranks; None: 1 for gae and reinforce")
    arg("enable_ema", type=int, help="1: keep an average of the actor's weights, in output_dir/ema; better generations")
    arg("ema_decay", type=float, default=0.992, help="of that average. 0.992 [DeepSpeed-Chat]")
    arg("unsup_data_path", nargs="+", help="plain text, mixed into the actor's updates (PTX)")
    arg("unsup_coef", type=float, default=27.8, help="weight of its loss. 27.8 [InstructGPT, eq. 2]")
    arg("num_eval_prompts", type=int, default=128, help="held-out prompts answered at each evaluation")
    arg("allow_unstable", type=int, default=0, help="1: lift the constraints on batch sizes, epochs and rollout batches")
    arg("actor_zero_stage", type=int, choices=[0, 1, 2, 3], help="ZeRO stage of actor and reference; None: --zero_stage")
    arg("critic_zero_stage", type=int, choices=[0, 1, 2, 3], help="ZeRO stage of critic and reward model; None: --zero_stage")
    arg("offload_states", action="store_true",
        help="optimizer states, master weights and gradients wait on the CPU while answers are written and scored")
    arg("actor_lora_dim", type=int, default=0, help="LoRA's rank, see lora_alpha below; the reference is the actor, adapters off. 0: off")
    arg("critic_lora_dim", type=int, default=0, help="LoRA's rank; the value head trains in full all the same. 0: off")
    arguments.add_common_arguments(parser, own_forms=("model_name_or_path", "learning_rate", "weight_decay", "dropout", "lora_dim",
                                                      "max_seq_len", "per_device_train_batch_size"))
    args = arguments.parse(parser, PRESETS, argv)
    for role in ("actor", "critic"):
        if getattr(args, f"{role}_zero_stage") is None:
            setattr(args, f"{role}_zero_stage", args.zero_stage)
    toy = PRESETS["toy"]
    if args.gold_fn == toy["gold_fn"] and args.data_path != toy["data_path"]:
        args.gold_fn = None  # it knows the toy's own questions only
    args.reward_model_name_or_path = args.reward_model_name_or_path or args.critic_model_name_or_path
    args.whiten = args.advantage in ("gae", "reinforce") if args.whiten is None else args.whiten
    args.kl_estimator = args.kl_estimator or ("k3" if args.kl_in == "loss" else "k1")
    args.max_seq_len = args.max_prompt_seq_len + args.max_answer_seq_len
    args.offload_states = args.offload_states and not args.adam_offload  # there they live anyway
    if broken := broken_constraint(args):
        common.fail(broken)
    return args

def broken_constraint(args):
    """-> in words, which of step 3's rules the flags break; None if all is well.

    DeepSpeed-Chat reports divergence when one of the last three is broken, so they hold unless lifted knowingly.

    While they hold, the weights that train are the weights that sampled: the ratio is 1, clipping never acts, and this is
    a policy gradient with a baseline. A correct PPO survives several epochs; what made others diverge is mostly that the
    pass that stored old log-probs and the pass that trained disagreed (dropout, masks, dtype). Ours are the same function.
    """
    generation, training = args.per_device_generation_batch_size, args.per_device_training_batch_size
    if (generation * args.generation_batches) % training:
        return (f"--per_device_training_batch_size {training} does not divide the {generation} x {args.generation_batches} "
                f"answers of each accumulation step.\n  Use a divisor, for example {math.gcd(generation, training)}.")
    if generation % args.samples_per_prompt or (args.advantage in ("rloo", "grpo") and args.samples_per_prompt < 2):
        return (f"--samples_per_prompt {args.samples_per_prompt}: it must divide --per_device_generation_batch_size {generation}, "
                "and be 2 or more with --advantage rloo or grpo, which compare answers to one prompt.\n  Use 4, for example.")
    stages, moved = {args.actor_zero_stage, args.critic_zero_stage}, args.offload_states and not args.adam_offload
    fixed = "--offload" if args.offload else f"--zero_stage {min(stages)} in {args.dtype}"  # where states cannot be moved
    for broken, what, why in (
            (moved and common.older_than("0.17.6") and stages != {3},
             "--offload_states", f"it needs --zero_stage 3 with DeepSpeed {deepspeed.__version__}; upgrade to 0.18.5 or newer"),
            (moved and (0 in stages or (1 in stages and args.dtype == "bf16") or args.offload),  # stage 1 has another optimizer in bf16
             f"--offload_states with {fixed}", "DeepSpeed cannot move these states: use --zero_stage 2 or 3, without --offload"),
            (args.tensor_parallel_size > 1 and common.older_than("0.19"), f"--tensor_parallel_size {args.tensor_parallel_size}",
             "step 3 needs DeepSpeed 0.19 for it: 0.18.5 finds its ranks' answers inconsistent"),
            (args.kl_in == "loss" and args.kl_estimator == "k1", "--kl_in loss --kl_estimator k1",
             "the expected gradient of k1 is 0: take k2 or k3"),
            (args.normalize_reward and args.reward_fn, "--normalize_reward with --reward_fn",
             "step 2's statistics are the reward model's"),
            (0 < args.dual_clip <= 1, f"--dual_clip {args.dual_clip}",
             "it bounds large losses only when it is above 1; 3 is usual"),
            (args.clip_high is not None and args.clip_high < args.clip, f"--clip_high {args.clip_high}",
             f"it must be --clip {args.clip} or more"),
            (args.critic_warmup_steps and args.advantage != "gae", f"--critic_warmup_steps {args.critic_warmup_steps}",
             "only gae has a critic"),
            (args.kl_target is not None and args.kl_target * args.kl_coef <= 0, f"--kl_target {args.kl_target}",
             "it and --kl_coef must be above 0")):
        if broken:
            return f"{what}: {why}."
    if args.allow_unstable:
        return None
    if generation != training:
        return (f"--per_device_generation_batch_size {generation} and --per_device_training_batch_size {training} differ.\n"
                "  Step 3 trains on exactly what it just generated; with other sizes the stored log-probs go stale.\n"
                f"  Set both to {training} (or both to {generation}), and use --gradient_accumulation_steps for a larger batch.\n"
                "  --allow_unstable 1 lifts this.")
    for name in ("ppo_epochs", "generation_batches"):
        if getattr(args, name) != 1:
            return (f"--{name} {getattr(args, name)} must be 1: DeepSpeed-Chat reports divergence otherwise.\n"
                    "  Use --gradient_accumulation_steps for a larger batch, or lift this with --allow_unstable 1.")

# ---- Maths: pure functions.  Shapes: B sequences, R response tokens; mask (B, R) is 1 on real response tokens -------
def kl_estimate(logprobs, ref_logprobs, estimator):
    """KL(pi || ref) per token, from tokens sampled by pi.  [Schulman 2020, "Approximating KL divergence"]   (B, R) -> (B, R)

        r = ref / pi        k1 = -log r             unbiased, may be negative, noisy
                            k2 = (log r)^2 / 2      biased a little, never negative
                            k3 = r - 1 - log r      unbiased, never negative
    """
    log_r = ref_logprobs - logprobs
    return {"k1": -log_r, "k2": log_r ** 2 / 2, "k3": log_r.exp() - 1 - log_r}[estimator]

def token_rewards(scores, kl, mask, kl_coef, clip_reward, penalty=0.0):
    """Reward of each token: minus the KL price everywhere, plus the clipped score on the last token.  [Ouyang 2022] eq. 2

    scores, penalty (taken off after clipping): (B,), kl, mask: (B, R) -> (B, R), 0 where mask is 0
    """
    rewards = -kl_coef * kl * mask
    last = mask.sum(-1).long().sub(1).clamp(min=0).unsqueeze(-1)  # (B, 1): the EOS, or the token where the answer was cut
    rewards = rewards.scatter_add(1, last, (scores.clamp(-clip_reward, clip_reward) - penalty).unsqueeze(-1))
    return rewards * mask

def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation over the response tokens.  [Schulman 2016] eq. 16

        delta_t = r_t + gamma * V_{t+1} - V_t       V = 0 after the last real token
        A_t     = delta_t + gamma * lam * A_{t+1}   so we walk from the last token back
        returns = A + V                             what the critic should have said

    rewards, values, mask: (B, R) -> advantages, returns: (B, R), 0 where mask is 0
    """
    values = values * mask
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (B,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        advantages[:, t], next_value = next_advantage, values[:, t]
    return advantages, (advantages + values) * mask

def reinforce(rewards, mask, gamma):
    """The reward still to come: GAE with lambda 1 and a critic that says 0.  [Williams 1992], whitened as in [Hu 2025] REINFORCE++

        A_t = r_t + gamma * A_{t+1}                                 rewards, mask: (B, R) -> (B, R), 0 where mask is 0
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]

def rloo(totals, groups):
    """Leave one out: an answer's reward minus the mean of the OTHER answers to its prompt.  [Ahmadian 2024]

        A_i = R_i - (sum of R_j over j != i) / (n - 1)      totals: (N,) rewards, groups: (N,) prompt numbers -> (N,)
    """
    total, n = group_sum(totals, groups), group_sum(torch.ones_like(totals), groups)
    return totals - (total - totals) / (n - 1)

def grpo(totals, groups):
    """An answer's reward, normalised within the answers to its prompt.  [Shao 2024] section 4.1.2      (N,), (N,) -> (N,)

        A_i = (R_i - mean(R)) / std(R)                              0 where all answers are equally good
    """
    n = group_sum(torch.ones_like(totals), groups)
    errors = totals - group_sum(totals, groups) / n
    return errors / ((group_sum(errors ** 2, groups) / (n - 1)).sqrt() + 1e-6)

def group_sum(values, groups):
    """(N,), (N,) numbers 0, 1, ... -> (N,): the sum over each one's group."""
    return values.new_zeros(len(groups)).index_add(0, groups, values)[groups]

def whitened(advantages, masks):
    """Shift and scale lists of (B, R) to mean 0 and deviation 1 over all real tokens of the step, on all ranks.

    Per rank, or with padding counted in, results would change with the number of GPUs and with the padding.
    """
    a, m = torch.cat([x.flatten() for x in advantages]).double(), torch.cat([x.flatten() for x in masks]).double()
    count, total, squares = common.all_sum(m.sum(), (a * m).sum(), (a * a * m).sum()).tolist()
    mean = total / count
    scale = max(squares / count - mean ** 2, 0.0) ** 0.5 + 1e-8
    return [(a - mean) / scale * m for a, m in zip(advantages, masks)]

def policy_loss(logprobs, old_logprobs, advantages, clip, clip_high=None, dual_clip=0.0):
    """Clipped surrogate, to be minimised.  [Schulman 2017] eq. 7, with the sign turned.   (B, R) -> loss, ratio: (B, R)

        ratio = pi(token) / pi_old(token)
        loss  = -min(ratio * A, clip(ratio, 1 - clip, 1 + clip_high) * A)       clip_high = clip, unless it is given
    The minimum is the pessimist's choice: no gain from updating the ratio beyond the clip, full loss when it went wrong: a
    bad token (A < 0) that has become likely has no bound. With dual_clip the loss is at most -dual_clip * A there.  [Ye 2020]
    """
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * advantages)
    if dual_clip:
        gain = torch.where(advantages < 0, torch.max(gain, dual_clip * advantages), gain)
    return -gain, ratio

def actor_loss(args, logprobs, entropies, batch, kl_coef):
    """The policy loss, and where flags ask for them a price on KL and a bonus for entropy.  -> loss, ratio, clipped: (B, R)"""
    loss, ratio = policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], args.clip, args.clip_high, args.dual_clip)
    clipped = loss != -ratio * batch["advantages"]  # clipping decided: no gradient through this token's ratio
    if args.kl_in == "loss":
        loss = loss + kl_coef * kl_estimate(logprobs, batch["ref_logprobs"], args.kl_estimator)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropies
    return loss, ratio, clipped

def value_loss(values, old_values, returns, clip_value):
    """Half the squared error; the larger of the plain one and that of values kept within old +- clip.   (B, R) -> (B, R)

    As in OpenAI's baselines and DeepSpeed-Chat; not in the PPO paper.
    """
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)

def entropy(logits, temperature=1.0):
    """Of softmax(logits / temperature), in nats; a chunk at a time: no fp32 copy of all, unless a gradient is asked for.   (M, V) -> (M,)"""
    chunks = (common.in_fp32(part, temperature) for part in logits.split(common.CHUNK))
    return torch.cat([torch.distributions.Categorical(logits=part, validate_args=False).entropy() for part in chunks])

# ---- Rollout and score ----------------------------------------------------------------------------------------------
class ReservedLayer(DynamicLayer):
    """One layer's keys and values, in slots reserved once: transformers' own layer copies all of them for every token."""
    def __init__(self, slots):
        super().__init__()
        self.slots = slots

    def update(self, keys, values, *args, **kwargs):
        """keys, values: (B, heads, new tokens, size of a head) -> those of all tokens so far, as views"""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.reserved = [x.new_empty(*x.shape[:2], self.slots, x.shape[3]) for x in (keys, values)]
        start, end = self.get_seq_length(), self.get_seq_length() + keys.shape[2]
        for slots, new in zip(self.reserved, (keys, values)):
            slots[:, :, start:end] = new
        self.keys, self.values = (slots[:, :, :end] for slots in self.reserved)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        """Rows that have finished leave the cache."""
        self.reserved = [slots[indices] for slots in self.reserved]
        self.keys, self.values = (slots[:, :, :self.get_seq_length()] for slots in self.reserved)

def reserved_cache(model, slots):
    """-> a cache for `slots` tokens a row. Layers that keep less than that (a short window, no keys at all) stay transformers' own."""
    def keeps_all(layer):
        return type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= slots)
    cache = DynamicCache(config=model.config)
    cache.layers = [ReservedLayer(slots) if keeps_all(layer) else layer for layer in cache.layers]
    return cache

@torch.no_grad()
def generate(model, ids, mask, uniforms, tokenizer, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=(), synced=False, known=None):
    """Sample answers, token by token, with a key-value cache.

    ids, mask: (B, P), left-padded prompts. uniforms: (B, R) in [0, 1): the r-th token of row b is the inverse of the
    cumulative distribution at uniforms[b, r], so an answer depends on its own row only, not on its neighbours or rank.
    Rows of the embedding beyond the `known` ids of the tokenizer are never sampled: another model may not have them. (Log-probs stay
    those of all rows; training leaves next to no probability on ids that never occur.)
    -> answer: (B, R'), answer_mask: (B, R'), R' <= R; the mask is 1 up to and including the first EOS, or the token that
    completes one of the texts in `stop`.
    """
    (B, R), P = uniforms.shape, ids.shape[1]
    answer = torch.full((B, R), tokenizer.pad_token_id, device=ids.device)
    answer_mask = torch.zeros_like(answer)
    mask = torch.cat([mask, torch.ones_like(answer)], 1)  # (B, P + R)
    extras, cache = common.extras(model, mask, keep=1), reserved_cache(model, P + R)
    positions = extras.pop("position_ids", None)  # (B, P + R)
    active = torch.arange(B, device=ids.device)  # (b,) the rows still in the batch
    alive = torch.ones_like(active, dtype=torch.bool)  # (b,) of these, the ones that have not ended
    inputs, uniforms = ids, uniforms.to(ids.device).double()
    for r in range(R):
        end = P + r
        if positions is not None:
            extras["position_ids"] = positions[active, end - inputs.shape[1]:end]
        logits = model(inputs, attention_mask=mask[active, :end], past_key_values=cache, use_cache=True, **extras).logits[:, -1, :known]  # (b, V)
        if r < min_new_tokens:
            logits[:, tokenizer.eos_token_id] = -torch.inf
        probs = filter_top(torch.softmax(common.in_fp32(logits, temperature), -1), top_k, top_p)  # (b, V)
        cdf = probs.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cdf, uniforms[active, r, None] * cdf[:, -1:], right=True)  # (b, 1) the first whose cdf exceeds u
        token.clamp_(max=cdf.shape[1] - 1)  # NaN logits: none exceeds u. The run is stopped when the answers are scored
        answer[active, r] = token[:, 0].where(alive, tokenizer.pad_token_id)
        answer_mask[active, r] = alive.long()
        alive = alive & (token[:, 0] != tokenizer.eos_token_id)
        if stop:  # such a text may reach over several tokens: the last 16 are looked at
            tails = tokenizer.batch_decode(answer[active, max(0, r - 15):r + 1])
            alive = alive & torch.tensor([not any(text in tail for text in stop) for tail in tails], device=ids.device)
        count = alive.sum().item()
        # Without `synced` ranks stop on their own. With ZeRO-3's hooks on, a rank that stopped would hang the others.
        if not (common.all_sum(count)[0] if synced else count):
            break
        if 0 < count <= 0.75 * len(active):  # finished rows leave, once a quarter has finished: each time the cache is copied
            kept = alive.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            active, alive, token = active[kept], alive[kept], token[kept]
        inputs = token
    return answer[:, :r + 1], answer_mask[:, :r + 1]

def filter_top(probs, top_k, top_p):
    """(B, V) probabilities with all but the `top_k` largest, and all beyond cumulative `top_p`, set to 0 (0 and 1: off)."""
    if top_k:
        probs = probs.where(probs >= probs.topk(min(top_k, probs.shape[-1])).values[:, -1:], 0)
    if top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        ordered = ordered.where(ordered.cumsum(-1) - ordered < top_p * ordered.sum(-1, keepdim=True), 0)
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return probs

def row_uniforms(seed, step, rows, count):
    """-> (B, count) numbers in [0, 1); line b depends on (seed, step, rows[b]) and nothing else. rows: numbers, or tuples."""
    seeds = [[seed, step, *np.atleast_1d(row)] for row in rows]
    return torch.stack([torch.from_numpy(np.random.default_rng(s).random(count, np.float32)) for s in seeds])

def roll_out(args, engine, tokenizer, rows, step, batch_size):
    """Sample one answer to each prompt -> list of dicts: the row, answer_ids (EOS included), text, ended.

    An answer depends on (seed, step, prompt's row number, sample): not on the rank, the slot, or the neighbours in the batch.
    """
    out = []
    with common.gathered(engine) as (model, synced):
        for start in range(0, len(rows), batch_size):
            part = rows[start:start + batch_size]
            ids, mask = common.pad([r["prompt_ids"] for r in part], tokenizer.pad_token_id)
            uniforms = row_uniforms(args.seed, step, [(max(r["row"], 0), r.get("sample", 0)) for r in part], args.max_answer_seq_len)
            answers, answer_mask = generate(model, ids.to(common.device()), mask.to(common.device()), uniforms, tokenizer, args.temperature,
                                            args.top_k, args.top_p, args.min_new_tokens, args.stop, synced=synced, known=len(tokenizer))
            for row, answer, count in zip(part, answers.tolist(), answer_mask.sum(-1).tolist()):
                answer = answer[:count]
                stopped = any(text in tokenizer.decode(answer) for text in args.stop)
                ended = count < args.max_answer_seq_len or answer[-1] == tokenizer.eos_token_id or stopped
                out.append({**row, "answer_ids": answer, "ended": float(ended), "text": tokenizer.decode(answer, skip_special_tokens=True)})
    return out

def collate_answers(sequences, pad_id):
    """-> ids, mask: (B, T = P + R), response_mask: (B, R). Masks are by position, from the known lengths.

    mask tells attention which tokens are real; response_mask, which ones the losses cover: none of a filler row's.
    """
    ids, mask = common.pad([s["prompt_ids"] for s in sequences], pad_id)                            # (B, P)
    answer, answer_mask = common.pad([s["answer_ids"] for s in sequences], pad_id, side="right")    # (B, R)
    real = torch.tensor([float(s["real"]) for s in sequences])                                      # (B,)
    return {"ids": torch.cat([ids, answer], 1), "mask": torch.cat([mask, answer_mask], 1), "response_mask": answer_mask * real[:, None],
            "real": real, "ended": torch.tensor([s["ended"] for s in sequences]), "row": torch.tensor([s["row"] for s in sequences])}

def frozen_engine(model, args, stage, batch_size):
    """-> `model` for inference only: a sharded engine under ZeRO-3, else the module itself on this rank's device."""
    model.requires_grad_(False)
    if stage < 3:
        return model.to(common.device()).eval()
    engine = deepspeed.initialize(model=model, config=common.ds_config(args, 3, batch_size, train=False, main=False))[0]
    engine.eval()
    return engine

@contextlib.contextmanager
def adapters_off(model):
    """LoRA trains its adapters only: without them the actor is the model that it began as, the reference."""
    adapted = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for layer in adapted:
        layer.enable_adapters(False)
    yield
    for layer in adapted:
        layer.enable_adapters(True)

def actor_pass(args, actor, batch, with_entropy):
    """The one function that gives the actor's log-probs, stored or trained.   -> log-probs, entropy: (B, R), (B, R) or None; 0 at padding"""
    ids, wanted = batch["ids"], batch["response_mask"] > 0                                                  # (B, T), (B, R)
    logits = common.last_logits(actor, ids, batch["mask"], wanted)                                          # (M, V)
    logprobs = common.TokenLogprobs.apply(logits, ids[:, -wanted.shape[1]:][wanted], args.temperature)      # (M,)
    with torch.set_grad_enabled(torch.is_grad_enabled() and args.entropy_coef > 0):
        entropies = common.spread(entropy(logits, args.temperature), wanted) if with_entropy else None      # (B, R)
    return common.spread(logprobs, wanted), entropies

def critic_pass(critic, batch):
    """-> values (B, R): the outlook before each response token is chosen."""
    return critic(batch["ids"], batch["mask"])[:, -batch["response_mask"].shape[1] - 1:-1]

@torch.no_grad()
def score(args, batch, actor, reference, critic, reward_model, reused=()):
    """Add old_logprobs, ref_logprobs, values, entropy (B, R) and reward, kl, kl_k3, response_length (B,) to a micro-batch.

    Forwards of the same function, without dropout, on the same padding as the pass that trains: before the first update the
    ratio is exactly 1. reused: the engines among actor and critic whose forward here is kept to train on: logprobs and
    new_values are old_logprobs and values with their graph.
    """
    ids, mask, count = batch["ids"], batch["mask"], batch["response_mask"].shape[1]
    with adapters_off(reference):  # before the actor: with LoRA they are one model, and ZeRO-3 must see the pass that trains last
        batch["ref_logprobs"] = common.last_logprobs(reference, ids, mask, batch["response_mask"], args.temperature)
    with torch.set_grad_enabled(actor in reused):
        batch["logprobs"], batch["entropy"] = actor_pass(args, actor, batch, with_entropy=True)
    batch["old_logprobs"] = batch["logprobs"].detach()
    for name, estimator in (("kl", "k1"), ("kl_k3", "k3")):  # of an answer: the sum over its tokens
        batch[name] = (kl_estimate(batch["old_logprobs"], batch["ref_logprobs"], estimator) * batch["response_mask"]).sum(-1)
    batch["response_length"] = batch["response_mask"].sum(-1).long()
    if critic:
        with torch.set_grad_enabled(critic in reused):
            batch["new_values"] = critic_pass(critic, batch)
        batch["values"] = batch["new_values"].detach()
    if reward_model:
        last = mask[:, -count:].sum(-1, keepdim=True) - 1  # (B, 1): the answer's last token, in response slots
        batch["reward"] = reward_model(ids, mask)[:, -count:].gather(1, last).squeeze(-1)
    return batch

def advantages_of(args, micro_batches, kl_coef, statistics):
    """Add advantages (B, R), and with a critic returns (B, R), to each micro-batch of the rollout.  statistics: score's mean, deviation"""
    for batch in micro_batches:
        kl, mask = kl_estimate(batch["old_logprobs"], batch["ref_logprobs"], args.kl_estimator), batch["response_mask"]     # (B, R)
        scores, penalty = (batch["reward"] - statistics[0]) / statistics[1], args.missing_eos_penalty * (1 - batch["ended"])  # (B,)
        rewards = token_rewards(scores, kl, mask, kl_coef if args.kl_in == "reward" else 0.0, args.clip_reward, penalty)    # (B, R)
        batch["total"] = rewards.sum(-1)                                                                                    # (B,)
        if args.advantage == "gae":
            batch["advantages"], batch["returns"] = gae(rewards, batch["values"], mask, args.gamma, args.lam)
        elif args.advantage == "reinforce":
            batch["advantages"] = reinforce(rewards, mask, args.gamma)
    masks = [b["response_mask"] for b in micro_batches]
    if args.advantage in ("rloo", "grpo"):  # one number an answer; the answers to one prompt are all on this rank
        totals, rows = (torch.cat([b[k] for b in micro_batches]) for k in ("total", "row"))                                 # (N,)
        each = {"rloo": rloo, "grpo": grpo}[args.advantage](totals, rows.unique(return_inverse=True)[1])                    # (N,)
        for batch, mask, part in zip(micro_batches, masks, each.split([len(m) for m in masks])):
            batch["advantages"] = part[:, None] * mask
    raw = [b["advantages"] for b in micro_batches]
    for batch, before, after in zip(micro_batches, raw, whitened(raw, masks) if args.whiten else raw):
        batch["raw_advantages"], batch["advantages"] = before, after

def park(args, *engines):
    """--offload_states: what only the optimizer needs waits on the CPU."""
    if args.offload_states:
        waits = [state for state in OffloadStateTypeEnum if state != OffloadStateTypeEnum.lp_params]  # lp_params: the weights themselves
        for engine in engines:
            engine.offload_states(include=waits, pin_memory=common.device().type != "cpu")  # (0.18.5 cannot pin where there is no GPU)

def unpark(args, *engines):
    """... and comes back to train."""
    if args.offload_states:
        for engine in engines:
            engine.reload_states()

def load_function(spec, flag):
    """'FILE:FUNCTION' -> the function. This runs the user's own code."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file() or Path(file).suffix != ".py":
        common.fail(f"{flag} {spec}: no such Python file: {file!r}.\n  Give it as FILE.py:FUNCTION.")
    module_spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # the user's own code may raise anything
        traceback.print_exc()
        common.fail(f"{flag} {spec}: {file} cannot be run: {error!r}.")
    if not callable(getattr(module, name, None)):
        common.fail(f"{flag} {spec}: there is no function {name} in {file}.")
    return getattr(module, name)

def call_function(function, sequences):
    """-> (B,) floats: `function(prompts, completions, **columns)` on this rank's answers, as TRL calls it: texts, or in chat data
    lists of messages, and the data's other columns."""
    def call(part):
        extra = [json.loads(s["extra"]) for s in part]
        names = dict.fromkeys(name for row in extra for name in row if name not in ("prompts", "completions"))
        return function(prompts=[json.loads(s["prompt"]) if s["chat"] else s["prompt"] for s in part],
                        completions=[[{"role": "assistant", "content": s["text"]}] if s["chat"] else s["text"] for s in part],
                        **{name: [row.get(name) for row in extra] for name in names})
    try:
        values = call(sequences)
    except Exception as error:  # the user's own code may raise anything
        traceback.print_exc()
        for s in sequences:  # which of them was it?
            try:
                call([s])
            except Exception as alone:
                common.fail(f"{function.__name__} raised {alone!r}.\n  The prompt: {s['prompt']!r}\n  The answer: {s['text']!r}", this_rank=True)
        common.fail(f"{function.__name__} raised {error!r} for {len(sequences)} answers at once, and for none of them alone.", this_rank=True)
    try:
        scores = [float(value) for value in values]
    except (TypeError, ValueError):  # it returned None, or something that is no number
        scores = []
    wrong = [s["prompt"] for s, value in zip(sequences, scores) if not math.isfinite(value)]
    if wrong or len(scores) != len(sequences):
        common.fail(f"{function.__name__} must return one finite number for each of {len(sequences)} answers.\n"
                    f"  It returned {str(values)[:300]}" + (f"\n  Not finite for the prompt {wrong[0]!r}" if wrong else ""), this_rank=True)
    return torch.tensor(scores)

# ---- EMA of the actor, in fp32, on local shards: no communication until it is saved ---------------------------------
def local_shard(parameter):
    """-> this rank's equal share (padded, 1-d) of a weight: ZeRO-3's own partition, else a slice of the whole weight."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    rank, ranks = common.data_world()
    flat = parameter.detach().flatten()
    share = -(-len(flat) // ranks)
    return nn.functional.pad(flat, (0, share * ranks - len(flat)))[rank * share:(rank + 1) * share]

def gather_shards(parameter, shard):
    """-> on rank 0's CPU, the weight whose `local_shard`s the ranks hold; None on the others. All ranks call it."""
    (rank, ranks), shape = common.world(), getattr(parameter, "ds_shape", parameter.shape)
    mine = shard.to(common.device()).contiguous()
    shards = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(shards, mine)
    parts = dist.get_world_size(parameter.ds_process_group) if hasattr(parameter, "ds_tensor") else common.data_world()[1]
    split = ranks // parts  # with tensor parallelism neighbouring ranks hold different parts of a layer: every split-th shard is of mine
    part = torch.cat(shards[rank % split::split])[:shape.numel()].view(shape).to(parameter.dtype)
    tensor = common.join_tensor_parallel(parameter, part)
    return tensor.cpu() if rank == 0 else None

def ema_start(model):
    """-> {name: this rank's fp32 shard of each weight}. bf16 would lose it: (1 - 0.992) of a step is below half an ulp."""
    return {name: local_shard(p).float().clone() for name, p in model.named_parameters() if p.requires_grad}

def ema_update(ema, model, decay):
    """ema += (1 - decay) * (weights - ema), shard by shard: no communication.

    Written to gathered weights the average would be lost: ZeRO-3 throws them away on exit unless `modifier_rank` is set. An
    EMA elsewhere did so and never moved.
    """
    for name, p in model.named_parameters():
        if p.requires_grad:
            ema[name].lerp_(local_shard(p).float(), 1 - decay)

# ---- Evaluation: the same held-out prompts, with the same random numbers, each time ---------------------------------
def evaluate(args, actor, reference, reward_model, functions, tokenizer, held_out, step):
    """Answer held-out prompts, score them, append them to samples.jsonl -> means over all ranks."""
    rank, ranks = common.data_world()
    order = list(range(len(held_out))) + [-1] * (-len(held_out) % ranks)
    rows = [common.Rows(held_out)[i] for i in order[rank::ranks]]
    size = args.per_device_eval_batch_size
    sequences = sorted(roll_out(args, actor, tokenizer, rows, 0, size), key=lambda s: len(s["answer_ids"]))
    names = ["reward", *(["gold"] if "gold" in functions else []), "kl", "response_length"]
    actor.eval()
    for start in range(0, len(sequences), size):
        part = sequences[start:start + size]
        batch = common.to_device(collate_answers(part, tokenizer.pad_token_id))
        score(args, batch, actor, reference, None, reward_model)
        batch.update({name: call_function(f, part) for name, f in functions.items()})
        for name in names:
            for s, value in zip(part, batch[name].tolist()):
                s[name] = value
    actor.train()
    reports = common.world()[0] % common.LAYOUT["tensor_parallel"] == 0  # ranks that share a model's layers have the same answers
    answers = sorted(common.everyones([s for s in sequences if s["real"] and reports]), key=lambda s: s["row"])
    common.append(args, "samples.jsonl", [{"step": step, "prompt": s["prompt"], "response": s["text"], **{k: s[k] for k in names}} for s in answers])
    for s in answers[:2]:
        common.say(f"    {s['prompt']!r} -> {s['text']!r}   " + ", ".join(f"{k} {s[k]:.4g}" for k in names))
    return {f"eval_{k}": sum(s[k] for s in answers) / len(answers) for k in names}

def one_pass(args):
    """-> the roles that are spared a forward: where a rollout is one micro-batch, trained on once, the pass that scores it keeps its
    graph and is the pass that trains. Not so a critic with dropout: its values are stored without.
    """
    several = max(args.gradient_accumulation_steps, args.generation_batches, args.ppo_epochs) > 1
    if several or args.per_device_training_batch_size != args.per_device_generation_batch_size:
        return ()
    dropout = args.critic_dropout
    if dropout is None and args.advantage == "gae":
        dropout = any(common.own_dropout(common.load(args.critic_model_name_or_path)).values())
    return ("actor",) if dropout else ("actor", "critic")

def models_of(args):
    """For --estimate: the models, what they work on, which of them train. With LoRA the actor without is the reference."""
    kept = one_pass(args)
    frozen = dict(rows=args.per_device_training_batch_size, tokens=args.max_seq_len, trains=False)
    reference = dict(frozen, path=args.actor_model_name_or_path, stage=args.actor_zero_stage, answer=args.max_answer_seq_len, dropout=0.0)
    actor = dict(reference, trains=True, lora_dim=args.actor_lora_dim, dropout=args.actor_dropout, kept="actor" in kept,
                 ema=args.enable_ema, cached=args.per_device_generation_batch_size)
    reward = dict(frozen, path=args.reward_model_name_or_path, stage=args.critic_zero_stage, head=True)
    critic = dict(reward, path=args.critic_model_name_or_path, trains=True, lora_dim=args.critic_lora_dim, dropout=args.critic_dropout,
                  kept="critic" in kept)
    used = ((actor, True), (critic, args.advantage == "gae"), (reference, not args.actor_lora_dim), (reward, not args.reward_fn))
    return [model for model, needed in used if needed]

# ---- Helpers of the update ------------------------------------------------------------------------------------------
def skip_together(engines):
    """fp16, between all backwards and all steps of an update: if one engine's gradients overflowed, all skip it.

    Else the critic would learn from a rollout that the actor did not. (A DeepSpeed optimizer asks its own `has_overflow`.)
    """
    overflow = any([type(e.optimizer).has_overflow(e.optimizer) for e in engines])  # over all ranks; a list: each is asked
    for engine in engines:  # hides the optimizer's own method, which is why the line above asks the class
        engine.optimizer.has_overflow = lambda *args, **options: overflow

def minibatches(micro_batches, accumulation, epochs, seed):
    """Yield lists of `accumulation` micro-batches, one list an optimizer step, reshuffled in each of the `epochs`."""
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(micro_batches))
        for start in range(0, len(order), accumulation):
            yield [micro_batches[i] for i in order[start:start + accumulation]]

def first_pass_gate(args, drift, step):
    """Before a rollout's first update the ratio must be 1: same weights, same tokens, same function. Else stop, and say why."""
    drift = max(common.everyones([drift.nan_to_num(nan=float("inf")).item()]))  # approx_kl is below drift^2
    tolerance = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}[args.dtype]  # 0.0 was seen with fp32 and bf16 on CPUs
    if drift > tolerance:
        common.say(f"error: step {step}: before the first update the ratio is off by {drift:.4g} (allowed with {args.dtype}: {tolerance}).\n"
                   "  The pass that trains does not see the policy that was scored. Likely: dropout in the actor (--actor_dropout 0),\n"
                   "  a mask or temperature used in one pass only, or a kernel that is not deterministic.")
        common.finish(args, code=1)

def read_text(args, tokenizer):
    """PTX: the `text` column of every --unsup_data_path -> list of lists of ids, each at most a prompt and an answer long."""
    sources = [common.read_source(path, "--unsup_data_path")["train"] for path in args.unsup_data_path]
    for path, source in zip(args.unsup_data_path, sources):
        if "text" not in source.column_names:
            common.fail(f"--unsup_data_path {path} has the columns {', '.join(source.column_names)}.\n  It needs text.")
    texts = [text for source in sources for text in source["text"]]
    ids = [common.tokenise_answer(tokenizer, text)[:args.max_seq_len] for text in texts if isinstance(text, str) and text.strip()]
    if len(ids) < len(texts):
        common.say(f"--unsup_data_path: dropped {len(texts) - len(ids)} of {len(texts)} rows: no text")
        if args.strict:
            common.fail("--strict: rows without text would be dropped, see above.")
    return ids or common.fail(f"--unsup_data_path {' '.join(args.unsup_data_path)} holds no text.")

def text_batches(unsup, count, batch_size, seed, pad_id):
    """PTX: this rank's share of the text for one optimizer step -> list of `count` dicts of ids, mask: (B, T)."""
    rank, ranks = common.data_world()
    rows = np.random.default_rng(seed).choice(len(unsup), (count, ranks, batch_size))[:, rank]
    made = [common.pad([unsup[i] for i in part], pad_id) for part in rows]
    return [common.to_device({"ids": ids, "mask": mask}) for ids, mask in made]

def text_loss_sum(actor, text):
    """PTX: cross entropy, summed over the real tokens that have a real one before them.  ids, mask: (B, T), left-padded -> ()"""
    covered = text["mask"][:, :-1]  # (B, T-1): what follows a real token is real
    return -common.last_logprobs(actor, text["ids"], text["mask"], covered).sum()

def adapt_kl_coef(coef, kl, target, gain=0.1):
    """Ziegler et al. 2019, section 2.2: raise the price when KL is above its target, lower it when below.

    >>> round(adapt_kl_coef(0.1, kl=12.0, target=6.0), 6)  # far above: the error is clipped to 0.2
    0.102
    """
    return coef * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))

def rollout_metrics(args, micro_batches):
    """-> what the rollout was like, over all ranks: means over answers, and over response tokens."""
    names = ["reward", *(["gold"] if args.gold_fn else []), "kl", "kl_k3", "response_length", "ended"]
    each = [torch.cat([b[name] for b in micro_batches]).double() for name in names]  # (N,) all answers of this rank
    real = torch.cat([b["real"] for b in micro_batches])  # (N,) fillers 0
    count, *sums = common.all_sum(real.sum(), *((values * real).sum() for values in each)).tolist()
    means = {name: total / count for name, total in zip(names, sums)}
    means["eos_rate"] = means.pop("ended")

    def moments(name):  # -> mean and variance over the response tokens of all ranks
        x = torch.cat([b[name][b["response_mask"] > 0] for b in micro_batches]).double()  # (M,)
        count, total, squares = common.all_sum(len(x), x.sum(), (x ** 2).sum()).tolist()
        return total / count, max(squares / count - (total / count) ** 2, 0.0)
    errors = moments("raw_advantages")[1]  # with a critic A = returns - values is its error
    means.update(entropy=moments("entropy")[0], advantage_std=errors ** 0.5)
    if "returns" in micro_batches[0]:  # 1: the critic foresees all, 0: no better than a constant
        means["explained_variance"] = 1 - errors / max(moments("returns")[1], 1e-12)
    return means

def check_models(args, tokenizer):
    """One vocabulary for all, an actor that writes, a reward model that scores: or a clear error, before anything is loaded.

    -> mean, deviation of step 2's scores on held-out answers, with which --normalize_reward scales; else 0, 1.
    """
    actor, critic, reward = args.actor_model_name_or_path, args.critic_model_name_or_path, args.reward_model_name_or_path
    for path in [path for path, needed in ((critic, args.advantage == "gae"), (reward, not args.reward_fn)) if needed]:
        known = common.load_tokenizer(path, args.max_seq_len).get_vocab()
        if known != tokenizer.get_vocab() or common.load(path).get_text_config().vocab_size < len(tokenizer):
            common.fail(f"{actor} and {path} have different vocabularies: the second cannot read what the first writes.\n"
                        "  Train the reward model (step 2) on a model of the actor's family.")
    if "SequenceClassification" in str(common.load(actor).architectures):
        common.fail(f"{actor} is a reward model: it has no head that writes.\n  The actor comes from step 1 (output/sft).")
    if not args.reward_fn and "SequenceClassification" not in str(common.load(reward).architectures):
        common.fail(f"{reward} is no reward model: it has no trained value head, and would score at random.\n"
                    "  Run step 2 on it (reward.py), or give a function in its place (--reward_fn).")
    if not args.normalize_reward:
        return 0.0, 1.0
    return getattr(common.load(reward), "score_statistics", None) or common.fail(
        f"--normalize_reward: {reward} holds no score_statistics in its config.json.\n  reward.py stores them.")

def step_flops(args, actor, critic, reward_model, reused, tokens, rows):
    """-> FLOPs of a step on `rows` rows of `tokens` tokens together: rollout, scoring (less what is reused) and training."""
    actor_forward, critic_forward, reward_forward = (
        common.train_flops(model, tokens, tokens / rows, False) / 3 if model else 0.0 for model in (actor, critic, reward_model))
    trained = args.ppo_epochs * (4 if args.gradient_checkpointing else 3)  # in forwards
    return (actor_forward * (trained + 2 + (actor not in reused))          # 2: the rollout, the reference
            + critic_forward * (trained + (critic not in reused)) + reward_forward)

# ---- The step, top to bottom ----------------------------------------------------------------------------------------
def main():
    args = get_args()
    if args.estimate is not None:
        estimate.estimate(args, models_of, lambda changed: arguments.refusal(changed) or broken_constraint(changed))
    common.start(args)
    functions = {name: load_function(getattr(args, f"{name}_fn"), f"--{name}_fn") for name in ("reward", "gold") if getattr(args, f"{name}_fn")}

    # 1 data ----------------------------------------------------------------------------------------------------------
    tokenizer = common.load_tokenizer(args.actor_model_name_or_path, args.max_seq_len)
    score_statistics = check_models(args, tokenizer)
    train, held_out = common.load_rows(args, tokenizer, step=3, limit=args.max_prompt_seq_len)
    held_out = held_out.select(range(min(args.num_eval_prompts, len(held_out))))
    unsup = args.unsup_data_path and read_text(args, tokenizer)
    generation_size, batch_size = args.per_device_generation_batch_size, args.per_device_training_batch_size
    prompts_per_batch = generation_size // args.samples_per_prompt  # of a generation batch
    accumulation = args.gradient_accumulation_steps                 # micro-batches of an optimizer step
    rollout_batches = accumulation * args.generation_batches        # generation batches of a rollout
    updates = rollout_batches * generation_size // (batch_size * accumulation)  # optimizer steps of one epoch over a rollout
    steps = common.count_steps(args, train, prompts_per_batch, rollout_batches)
    critic_steps = steps * args.ppo_epochs * updates                # optimizer steps of the run
    actor_steps = max(steps - args.critic_warmup_steps, 1) * args.ppo_epochs * updates
    actor_micro_steps = accumulation * (2 if unsup else 1)          # PTX adds as many micro-batches of text

    # 2 models --------------------------------------------------------------------------------------------------------
    actor = common.load_model(args.actor_model_name_or_path, args, args.actor_zero_stage, args.actor_dropout, lora_dim=args.actor_lora_dim)
    actor = common.train_engine(actor, args, args.actor_zero_stage, batch_size, actor_micro_steps, actor_steps,
                                args.actor_learning_rate, args.actor_weight_decay)
    engines, critic = {"actor": actor}, None
    if args.advantage == "gae":
        critic = common.load_model(args.critic_model_name_or_path, args, args.critic_zero_stage, args.critic_dropout, tokenizer,
                                   "score", args.critic_lora_dim)
        critic = common.train_engine(critic, args, args.critic_zero_stage, batch_size, accumulation, critic_steps,
                                     args.critic_learning_rate, args.critic_weight_decay, main=False)
        engines["critic"] = critic
    reference = actor                                               # without its adapters, if it has any
    if not args.actor_lora_dim:
        reference = common.load_model(args.actor_model_name_or_path, args, args.actor_zero_stage)
        reference = frozen_engine(reference, args, args.actor_zero_stage, batch_size)
    reward_model = None
    if not args.reward_fn:
        reward_model = common.load_model(args.reward_model_name_or_path, args, args.critic_zero_stage, None, tokenizer, "score")
        reward_model = frozen_engine(reward_model, args, args.critic_zero_stage, batch_size)
    if {args.actor_zero_stage, args.critic_zero_stage} != {2}:
        common.say("warning: DeepSpeed-Chat's step 3 uses ZeRO stage 2. 0 and 1 run out of memory sooner, 3 is slower.")
    if args.allow_unstable:
        common.say("warning: --allow_unstable: old log-probs go stale within a rollout. Watch ratio_max, clip_fraction, approx_kl; --target_kl.")
    columns = [c for c in COLUMNS if (args.gold_fn or "gold" not in c) and (critic or c not in ("critic_loss", "explained_variance"))]
    state = {"ema": ema_start(actor.module) if args.enable_ema else None, "kl_coef": args.kl_coef}  # kept by checkpoints
    common.begin(args, "step 3: PPO", args.actor_model_name_or_path, actor, train, held_out, prompts_per_batch, rollout_batches, steps)

    def evaluate_at(step):
        park(args, *engines.values())
        means = evaluate(args, actor, reference, reward_model, functions, tokenizer, held_out, step)
        unpark(args, *engines.values())
        return means

    if not args.resume:
        common.log(args, {"step": 0, "epoch": 0.0, **evaluate_at(0)}, columns)
    one_forward, gate_step = one_pass(args), None
    for step, epoch, evaluate_now, prompts in checkpoint.training_steps(
            args, engines, state, train, prompts_per_batch, rollout_batches, steps, list):
        # 3 rollout ---------------------------------------------------------------------------------------------------
        started = time.time()
        park(args, *engines.values())
        asked = [{**row, "sample": i} for batch in prompts for row in batch for i in range(args.samples_per_prompt)]
        answers = roll_out(args, actor, tokenizer, asked, step, generation_size)
        generated_at = time.time()

        # 4 score -----------------------------------------------------------------------------------------------------
        # updating: the engines that this step trains; the actor waits during --critic_warmup_steps.
        # reused: of these, those whose pass here is also the pass that trains (`one_pass`); never in the first step of a
        # run, so that the gate below has two passes to compare.
        gate_step = gate_step or step
        updating = list(engines.values()) if step > args.critic_warmup_steps else [critic]
        reused = [engines[role] for role in one_forward if engines.get(role) in updating and step > gate_step]
        for engine in engines.values():
            engine.train(engine in reused)
        if updates == 1:  # like lengths together: less padding
            answers.sort(key=lambda s: len(s["prompt_ids"]) + len(s["answer_ids"]))
        else:             # that would make one update of short answers, another of long ones. (Which share one depends on the ranks.)
            np.random.default_rng([args.seed, step]).shuffle(answers)
        parts = [answers[i:i + batch_size] for i in range(0, len(answers), batch_size)]
        micro_batches = [common.to_device(collate_answers(part, tokenizer.pad_token_id)) for part in parts]
        for part, batch in zip(parts, micro_batches):
            score(args, batch, actor, reference, critic, reward_model, reused)
            batch.update({name: call_function(f, part).to(common.device()) for name, f in functions.items()})
        for engine in engines.values():
            engine.train()
        unpark(args, *engines.values())
        blame = ({"prompt": json.loads(s["prompt"]) if s["chat"] else s["prompt"], "completion": s["text"], **json.loads(s["extra"])}
                 for s in answers if s["real"])  # read only by check_finite, and only if it stops the run
        stored = [k for k in ("old_logprobs", "ref_logprobs", "entropy", "reward", "values") if k in micro_batches[0]]
        totals = common.all_sum(*(sum(b[k].sum() for b in micro_batches) for k in stored)).tolist()
        common.check_finite(args, {"step": step, **dict(zip(stored, totals))}, blame)
        scored_at = time.time()

        # 5 advantages ------------------------------------------------------------------------------------------------
        kl_coef = state["kl_coef"] if args.kl_target else args.kl_coef  # an adapted one outlives --resume
        advantages_of(args, micro_batches, kl_coef, score_statistics)

        # 6 update ----------------------------------------------------------------------------------------------------
        names = ("actor_loss", "critic_loss", "approx_kl", "clip_fraction")  # sums: of these, over this rank's tokens
        sums, ratio_max, trained_tokens = torch.zeros(4, dtype=torch.float64), 0.0, 0.0
        for update, minibatch in enumerate(minibatches(micro_batches, accumulation, args.ppo_epochs, (args.seed, step))):
            tokens, sums_before = common.all_sum(sum(b["response_mask"].sum() for b in minibatch))[0].item(), sums.clone()
            if not tokens:  # fillers only
                continue
            if unsup:
                texts = text_batches(unsup, len(minibatch), batch_size, (args.seed, step, update), tokenizer.pad_token_id)
                text_tokens = common.all_sum(sum(text["mask"][:, :-1].sum() for text in texts))[0].item()
            for batch in minibatch:
                response_mask, logprobs, entropies = batch["response_mask"], batch["logprobs"], batch["entropy"]  # (B, R)
                if actor not in reused:
                    with torch.set_grad_enabled(actor in updating):
                        logprobs, entropies = actor_pass(args, actor, batch, with_entropy=args.entropy_coef > 0)
                loss, ratio, clipped = actor_loss(args, logprobs, entropies, batch, kl_coef)                    # (B, R)
                if trained_tokens == 0 and actor not in reused:  # (a reused pass would be compared with itself)
                    first_pass_gate(args, ((ratio.detach() - 1).abs() * response_mask).max(), step)
                if actor in updating:
                    actor.backward((loss * response_mask).sum() * common.loss_scale(tokens, actor_micro_steps))
                    if unsup:
                        actor.step()  # ends the first of two micro-steps: the weights move after the last one only
                        loss_text = args.unsup_coef * text_loss_sum(actor, texts.pop())
                        actor.backward(loss_text * common.loss_scale(text_tokens, actor_micro_steps))
                errors = torch.zeros_like(loss)
                if critic:
                    values = batch["new_values"] if critic in reused else critic_pass(critic, batch)            # (B, R)
                    errors = value_loss(values, batch["values"], batch["returns"], args.clip_value)             # (B, R)
                    critic.backward((errors * response_mask).sum() * common.loss_scale(tokens, accumulation))
                if batch is minibatch[-1] and args.dtype == "fp16":
                    skip_together(updating)
                for engine in updating:
                    engine.step()  # moves the weights at the minibatch's last micro-batch only
                with torch.no_grad():
                    ratio_max = max(ratio_max, (ratio * response_mask).max().item())
                    approx_kl = kl_estimate(batch["old_logprobs"], logprobs, "k3")  # of old and new policy
                    sums += torch.stack([(x * response_mask).sum().double().cpu() for x in (loss, errors, approx_kl, clipped)])
            if args.enable_ema and actor in updating and actor.was_step_applied():  # fp16 may have skipped it
                ema_update(state["ema"], actor.module, args.ema_decay)
            trained_tokens += tokens
            if args.target_kl and common.all_sum((sums - sums_before)[names.index("approx_kl")])[0].item() / tokens > args.target_kl:
                break
        trained_at = time.time()

        # 7 keep ------------------------------------------------------------------------------------------------------
        tokens, count = common.all_sum(sum((b["mask"].sum(-1) * b["real"]).sum() for b in micro_batches),
                                       sum(b["real"].sum() for b in micro_batches)).tolist()
        flops = step_flops(args, actor, critic, reward_model, reused, tokens, count)
        means = dict(zip(names, (common.all_sum(*sums) / trained_tokens).tolist()))
        record = {"step": step, "epoch": epoch, "loss": means["actor_loss"] + means["critic_loss"], **means,  # (loss: for tools that look for it)
                  "ratio_max": max(common.everyones([ratio_max])), **rollout_metrics(args, micro_batches), "kl_coef": kl_coef,
                  "generate_seconds": generated_at - started, "score_seconds": scored_at - generated_at,
                  "train_seconds": trained_at - scored_at, **common.speed(args, actor, tokens, flops, started)}
        if critic:
            record["critic_grad_norm"] = common.grad_norm(args, critic)
        else:
            del record["critic_loss"]
        common.check_finite(args, record, blame)
        if args.kl_target and actor in updating:
            state["kl_coef"] = adapt_kl_coef(kl_coef, record["kl"], args.kl_target)
        if evaluate_now:
            record.update(evaluate_at(step))
        if evaluate_now or step % args.log_steps == 0:
            common.log(args, record, columns, actor)
        if evaluate_now:
            common.draw_curves(args)

    # 8 save ----------------------------------------------------------------------------------------------------------
    def averaged(name, parameter):  # frozen weights have no average
        ema = state["ema"].get(name)
        return common.whole(name, parameter) if ema is None else gather_shards(parameter, ema)
    if args.enable_ema:
        common.save_model(actor, tokenizer, Path(args.output_dir) / "ema", averaged)
    if critic:
        common.save_model(critic, tokenizer, Path(args.output_dir) / "critic")
    common.save_model(actor, tokenizer, args.output_dir)
    common.finish(args)

if __name__ == "__main__":
    main()
