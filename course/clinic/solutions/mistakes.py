"""The faults of the clinic's cases, and the flags that their runs had: see solutions/NN.md first.

Each function patches one fault into the scripts from outside. CASES says of each case which script
has it, and what else differs from the healthy run: flags, and steps that are left out.
"""

import itertools

import faults
import torch

import common
import ppo
import reward
import sft
from machinery import batching, checks, flags, rollout
from machinery.run import Run
from machinery.tokens import tokenise_prompt


# ---- Step 1 ----
def sft_without_eos():
    """Step 1's loss mask leaves EOS out."""
    collate = sft.collate

    def without_eos(rows, pad_id):
        batch = collate(rows, pad_id)
        batch.loss_mask[:, -1] = 0  # every row ends in the last column
        return batch

    sft.collate = without_eos


def mean_of_means():
    """Each micro-batch's loss is its own mean, and the loss of a step is the mean of these."""
    collate = sft.collate

    def own_mean(rows, pad_id):
        batch = collate(rows, pad_id)
        if torch.is_grad_enabled():  # evaluations measure as always
            batch.loss_mask /= batch.loss_mask.sum().clamp(min=1)  # weights that sum to 1
        return batch

    sft.collate = own_mean


# ---- Step 2 ----
def changed_pairs(change, **options):
    """Changes the rows of step 2 when they have been read, as datasets' map does."""
    load_rows = reward.load_rows
    reward.load_rows = lambda *args: [rows.map(change, **options) for rows in load_rows(*args)]


def cut_to_equal():
    """Prompt and response together are cut to so few tokens that most pairs become equal."""
    limit = 12  # tokens; a prompt has 11 to 13

    def cut(row):
        room = max(limit - len(row["prompt_ids"]), 0)
        return {"responses": [response[:room] for response in row["responses"]]}

    changed_pairs(cut)


def rejected_without_eos():
    """In the pairs EOS is missing from the rejected responses."""

    def without_eos(row):
        chosen, rejected = row["responses"]
        return {"responses": [chosen, rejected[:-1]]}

    changed_pairs(without_eos)


def swapped_labels():
    """In 30 % of the pairs chosen and rejected are swapped."""

    def swapped(row, number):
        wrong = (number * 7919) % 100 < 30
        return {"responses": row["responses"][::-1] if wrong else row["responses"]}

    changed_pairs(swapped, with_indices=True)


# ---- Step 3 ----
def paid_for_kl():
    """The KL penalty has the wrong sign: the actor is paid for each nat."""
    token_rewards = ppo.token_rewards

    def paid(shaped_scores, kl, *others):
        return token_rewards(shaped_scores, -kl, *others)

    ppo.token_rewards = paid


def moving_reference():
    """The reference is the actor itself, and moves with it."""
    common.reference_of = lambda actor, args, batch_size: actor.module


def whitened_over_padding():
    """Mean and deviation of the advantages are taken over the padding, too."""
    whitened = ppo.whitened

    def padded(advantages, masks):
        everything = [torch.ones_like(mask) for mask in masks]
        return [a * mask for a, mask in zip(whitened(advantages, everything), masks)]

    ppo.whitened = padded


def without_template():
    """Step 3 leaves out the end of the template that step 1 was trained with."""
    load_rows = ppo.load_rows

    def loaded(args, sources, tokenizer, limit):
        def plain(row):
            prompt = row["prompt"].removesuffix("\nAnswer:")
            return {"prompt": prompt, "prompt_ids": tokenise_prompt(tokenizer, prompt)}

        return [rows.map(plain) for rows in load_rows(args, sources, tokenizer, limit)]

    ppo.load_rows = loaded


def hotter_samples():
    """Tokens are drawn at a temperature that scoring does not have."""
    sample = ppo.sample

    def hot(args, *others):
        return sample(flags.with_flags(args, temperature=1.4), *others)

    ppo.sample = hot
    ppo.checks.stop_unless_sampled_as_scored = lambda run, micro_batches: None


def other_order_after_20():
    """The run was interrupted after step 20, and went on with another order of the data."""
    draw, epoch_batches, resumed = Run.draw, batching.epoch_batches, []

    def ordered(lengths, seed, *others):
        return epoch_batches(lengths, seed + len(resumed), *others)

    def other_order(run, done, collate):
        yield from itertools.islice(draw(run, done, collate), 20)
        resumed.append(True)
        yield from draw(run, 20, collate)

    batching.epoch_batches, Run.draw = ordered, other_order


def score_after_eos():
    """The score is placed one token after EOS, where the mask is 0."""
    set_rewards = ppo.set_rewards

    def shifted(args, batch, *others):
        scores = batch.scores
        batch.scores = scores.roll(1, -1)
        batch.scores[:, 0] = 0  # the longest response has no such place
        set_rewards(args, batch, *others)
        batch.scores = scores

    ppo.set_rewards = shifted


def masks_by_ids():
    """EOS is the padding token, and step 3 makes its masks by comparing ids."""
    make_micro_batches = ppo.make_micro_batches

    def by_ids(tokenizer, *others):
        batches = make_micro_batches(tokenizer, *others)
        for batch in batches:
            mask = batch.response_mask * (1 - batch.last * batch.ended[:, None])  # ids != EOS
            last = mask * (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
            batch.response_mask, batch.last = mask, last
            batch.length = mask.sum(-1).long().clamp(min=1)
        return batches

    ppo.make_micro_batches = by_ids


def no_early_eos():
    """EOS may not be among the first 24 tokens; log-probs are those of the policy that may end."""
    sample, restricted = ppo.sample, rollout.restricted

    def longer(args, model, tokenizer, *others):
        drawn = itertools.count()

        def without_end(args, probs):
            probs = restricted(args, probs).clone()  # (b, V)
            if next(drawn) < 24:
                probs[:, tokenizer.eos_token_id] = 0
            return probs

        rollout.restricted = without_end
        return sample(args, model, tokenizer, *others)

    ppo.sample = longer


def positions_from_the_edge():
    """Position ids count columns from the left edge, padding included; nothing checks it."""
    position_ids = common.position_ids

    def from_the_edge(mask):
        return position_ids(torch.ones_like(mask))

    common.position_ids = from_the_edge
    checks.refuse_if_padding_matters = lambda run, *engines: None


# ---- The cases ----
def case(script, fault=None, **more):
    """Returns what a case differs in from the healthy run. more: flags of scripts, or steps."""
    return {"script": script, "fault": fault, "steps": more.pop("steps", None), "flags": more}


GRPO = "--advantage grpo --samples_per_prompt 4 --reward_fn course/clinic/verifiers.py"
FAR_CRITIC = "--critic_model_name_or_path {sft} --reward_model_name_or_path {reward}"
JUDGE = "sft", "reward"  # the steps of a case that ends with the reward model
CASES = {
    "01": case("sft", sft_without_eos),
    "02": case("ppo", paid_for_kl, ppo="--kl_coef 0.2"),
    # dropout is on in the forward that scores a rollout
    "03": case("ppo", faults.dropout_scores, ppo="--actor_dropout 0.1"),
    "04": case("reward", cut_to_equal, steps=JUDGE, reward="--share_prompt 0 --num_train_epochs 1"),
    "05": case("ppo", moving_reference),
    "06": case("ppo", whitened_over_padding),
    # the log-prob that scoring stores for a token is that of the token before
    "07": case("ppo", faults.shifted),
    "08": case("ppo", without_template),
    "09": case("ppo", hotter_samples),
    "10": case("reward", rejected_without_eos),
    # the critic starts with a random head, and the scores lie around 10
    "11": case("ppo", lambda: faults.offset(10.0), ppo=f"{FAR_CRITIC} --clip_reward inf"),
    "12": case("ppo", other_order_after_20),
    # the verifier looks at the form of a response, and not at what it says
    "13": case("ppo", ppo=f"{GRPO}:complete"),
    "14": case("ppo", score_after_eos),
    "15": case("ppo", masks_by_ids),
    # both learning rates are ten times too high
    "16": case("ppo", ppo="--actor_learning_rate 2e-3 --critic_learning_rate 4e-3"),
    "17": case("reward", swapped_labels, steps=JUDGE, reward="--num_train_epochs 1"),
    # the verifier compares texts that never are equal: every response gets 0
    "18": case("ppo", ppo=f"{GRPO}:exact"),
    # rollouts are sampled from a part of the distribution, and scored under all of it
    "19": case("ppo", ppo="--top_p 0.8"),
    "20": case("ppo", no_early_eos),
    "21": case(
        "sft",
        mean_of_means,
        sft="--per_device_train_batch_size 4 --gradient_accumulation_steps 6",
    ),
    "22": case("ppo", positions_from_the_edge, sft="--model_name_or_path course/clinic/gpt2"),
}
