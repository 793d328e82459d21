"""Step 2 of RLHF: the reward model.  pairs (prompt, chosen, rejected) -> output/reward

    deepspeed reward.py                                  the built-in toy, on top of output/sft
    deepspeed reward.py --preset opt-1.3b                DeepSpeed-Chat's recipe, OPT-350M
    deepspeed reward.py --model_name_or_path output/sft --data_path my_pairs.jsonl

A backbone with a linear head gives one number per token; the number at a response's last token is
the response's score. The score learns to order pairs as people did: the Bradley-Terry model says
P(chosen beats rejected) = sigmoid(difference). Numbered as in main(): 1 data, 2 model, 3 train,
4 save. What is left out: more than two responses per prompt, margins.

Layout of a micro-batch of B = 2 pairs: 2B rows of T = 7 tokens, first all chosen responses (y),
then all rejected ones (z); '-' is padding.
    column       0    1    2    3    4    5    6
    row 0        -    -    x0   x1 | y0   y1   eos       pair 0, chosen
    row 1        x0   x1   x2   x3 | y0   y1   eos       pair 1, chosen
    row 2        -    -    -    x0   x1 | z0   eos       pair 0, rejected
    row 3        -    x0   x1   x2   x3 | z0   eos       pair 1, rejected
    Every row ends in the last column, and there its score is read: (2B,).
By default the prompt of a pair is computed once, with both responses after it in one row, where
the architecture permits it: --share_prompt, drawn in helpers/shared_prompts.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import common
from helpers import checks, pair_scores, shared_prompts
from machinery.base import ranks, statistics
from machinery.base.refused import program
from machinery.data import batching
from machinery.data.rows import load_rows, open_sources
from machinery.flags import declaring
from machinery.models import model_folders
from machinery.run.run import Run

# ---- Hyperparameters ----
PRESETS = {
    # As in sft.py.
    "toy": dict(
        model_name_or_path="output/sft",
        data_path=["toy/data"],
        data_split="4,5,1",
        output_dir="output/reward",
        num_train_epochs=2,  # held-out loss below 1 epoch's in 9 of 10 seeds: labs/reward-epochs.md
        learning_rate=2e-3,
        weight_decay=0.1,
        num_warmup_steps=10,
        dropout=0.0,
        center_coef=0.01,  # [Eisenstein 2023]
        per_device_train_batch_size=declaring.toy_batch(16),
        per_device_eval_batch_size=140,
        max_seq_len=64,
        zero_stage=2,
        dtype="fp32",
        group_by_length=0,
        log_steps=10,
    ),
    # [TRL]: its examples/scripts/reward_modeling.py, for a model and data like these.
    "qwen2.5-0.5b": dict(
        model_name_or_path="output/sft",  # so that judge and actor share vocabulary and EOS
        data_path=["trl-lib/ultrafeedback_binarized"],  # [TRL]
        data_split="0,5,5",  # half of it; the other half's prompts are step 3's
        output_dir="output/reward",
        num_train_epochs=1,  # more overfit [Ouyang 2022]; on the toy not two: labs/reward-epochs.md
        learning_rate=1e-4,  # with LoRA [TRL]; 1e-5 trains all weights
        lora_dim=32,  # [TRL]; the head trains in full
        lora_alpha=16,  # [TRL]
        weight_decay=0.0,
        dropout=0.0,  # off, as in DeepSpeed-Chat; labs/regularisers.md
        per_device_train_batch_size=8,  # [TRL]
        per_device_eval_batch_size=8,
        max_seq_len=1024,  # 2048 [TRL]
        zero_stage=2,
    ),
    # DeepSpeed-Chat's: opt/single_node/run_350m.sh.
    "opt-1.3b": dict(
        model_name_or_path="facebook/opt-350m",
        data_path=[
            "Dahoas/rm-static",
            "Dahoas/full-hh-rlhf",
            "Dahoas/synthetic-instruct-gptj-pairwise",
            "yitingxie/rlhf-reward-datasets",
        ],
        data_split="2,4,4",
        output_dir="output/reward",
        num_train_epochs=1,  # as [Ouyang 2022]; labs/reward-epochs.md
        learning_rate=5e-5,
        weight_decay=0.1,
        dropout=0.0,  # off; its script gives no reason. labs/regularisers.md
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_seq_len=512,
        zero_stage=0,
    ),
    # llama2/run_llama2_7b.sh, which has --gradient_checkpointing --offload --adam_offload, too.
    "llama-2-7b": dict(
        model_name_or_path="meta-llama/Llama-2-7b-hf",  # as large as the actor
        data_path=["Dahoas/rm-static"],
        data_split="2,4,4",
        output_dir="output/reward",
        num_train_epochs=1,
        learning_rate=9.65e-6,  # a large model takes a lower rate than OPT-350M
        weight_decay=0.1,
        dropout=0.0,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_seq_len=512,
        zero_stage=3,
    ),
}
COLUMNS = """step epoch loss accuracy chosen_score rejected_score eval_loss eval_accuracy
             grad_norm""".split()
SUMS = "loss", "accuracy", "chosen_score", "rejected_score"


def get_args(argv=None):
    """Reads the flags of this step from the command line."""
    parser = declaring.new_parser(__doc__)
    declaring.add_common_flags(parser)
    arg = declaring.flag_group(parser, "flags of this step alone")
    arg("value_head_prefix", "score", "name of the head; stock transformers loads `score`")
    pull = "pulls scores to 0, by this times (chosen + rejected)^2. 0.01 [Eisenstein 2023]"
    arg("center_coef", 0.0, pull, fixed=True)
    arg("share_prompt", 1, "1: compute the prompt of a pair once; 0: a row for each response")
    return declaring.parse(parser, PRESETS, argv, "reward")


# ---- Data and loss ----
@dataclass
class MicroBatch(common.Layout):
    """B pairs, laid out for a forward: predicts is (2B, 1), one place before each last token."""

    row_weight: Tensor  # (B,) 1, or 0 for a filler row


def plain_rows(rows, pad_id):
    """The Layout of two rows for each pair: see the picture at the top of this file."""
    sequences = [row["prompt_ids"] + row["responses"][i] for i in (0, 1) for row in rows]
    ids, mask = common.pad(sequences, pad_id)  # (2B, T)
    return common.Layout(**common.last_columns(ids, mask, count=1))


def collate(rows, pad_id, pack=plain_rows):
    """Lays out B pairs (dicts of prompt_ids and responses: chosen, rejected) in a MicroBatch.

    pack(rows, pad_id): makes the Layout, plain_rows or shared_prompts.pair_rows.
    """
    row_weight = torch.tensor([float(row["row_weight"]) for row in rows])
    return MicroBatch(**vars(pack(rows, pad_id)), row_weight=row_weight)


def score_pairs(model, batch):
    """Scores of the chosen and of the rejected responses, (B,) each, at their last tokens."""
    scores = common.values_at_tokens(model, batch)[:, 0]  # (2B,)
    return scores.chunk(2)


def pair_loss_sum(chosen, rejected, row_weight, center_coef=0.0):
    """Bradley-Terry loss, summed over the pairs: log 2 each where the scores are equal.

        -log sigmoid(r_chosen - r_rejected)                         [Ouyang et al. 2022] eq. 1
        + center_coef * (r_chosen + r_rejected)^2                   [Eisenstein et al. 2023] eq. 2

    The first term sees only differences, so a model is free to drift by a constant; the second
    holds it near zero.  chosen, rejected, row_weight: (B,) -> ()
    DeepSpeed-Chat compares the values at all tokens from where the two responses differ:
    variants/deepspeed-chat-reward does so, and has the figures of both.
    """
    loss = -F.logsigmoid(chosen - rejected) + center_coef * (chosen + rejected) ** 2  # (B,)
    return (loss * row_weight).sum()


def correct_sum(chosen, rejected, row_weight):
    """Pairs in the right order, a tie counting one half, so that a constant scorer gets 0.5."""
    correct = (chosen > rejected) + 0.5 * (chosen == rejected)  # (B,)
    return (correct * row_weight).sum()


def pair_sums(loss_sum, chosen, rejected, row_weight):
    """The four SUMS of a micro-batch: (4,)"""
    correct = correct_sum(chosen, rejected, row_weight)
    chosen_sum = (chosen * row_weight).sum()
    rejected_sum = (rejected * row_weight).sum()
    return torch.stack([loss_sum, correct, chosen_sum, rejected_sum]).detach()


@torch.no_grad()
def evaluate(run, engine, held_out, collate_rows):
    """Loss (without --center_coef), accuracy and mean scores on the held-out pairs, of all ranks.

    The scores' mean and deviation go into the saved model's config, for ppo.py --normalize_reward.
    """
    engine.eval()  # no dropout
    sums = torch.zeros(5, dtype=torch.float64)  # the four SUMS and the pairs
    judged = []  # (row, score of the chosen, score of the rejected)
    for numbers, batch in batching.eval_loader(run.args, held_out, collate_rows):
        chosen, rejected = score_pairs(engine, batch)  # (B,), (B,)
        loss_sum = pair_loss_sum(chosen, rejected, batch.row_weight)
        judged += zip(numbers, chosen.tolist(), rejected.tolist())
        sums[:4] += pair_sums(loss_sum, chosen, rejected, batch.row_weight).cpu()
        sums[4] += batch.row_weight.sum().cpu()
    engine.train()
    pair_scores.keep(run.args, held_out, judged)
    loss, correct, chosen, rejected, count = ranks.all_sum(*sums).tolist()
    mean = (chosen + rejected) / (2 * count)
    # Squares of differences to the mean lose no digits where the mean is far from 0.
    squares = sum((c - mean) ** 2 + (r - mean) ** 2 for row, c, r in judged if row >= 0)
    std = (ranks.all_sum(squares).item() / (2 * count)) ** 0.5
    run.notes["score_statistics"] = [mean, std]
    return {
        "eval_loss": loss / count,
        "eval_accuracy": correct / count,
        "eval_accuracy_ci": statistics.wilson_interval(correct / count, count),
        "eval_chosen_score": chosen / count,
        "eval_rejected_score": rejected / count,
        "eval_margin": (chosen - rejected) / count,
        "eval_score_mean": mean,
        "eval_score_std": std,
    }


# ---- The step, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "step 2: reward model")

    # ---- 1 data ----
    sources = open_sources(args, "reward")
    tokenizer = model_folders.load_tokenizer(
        args.model_name_or_path, args, in_chats=sources.hold_chats
    )
    train, held_out = load_rows(args, sources, tokenizer, args.max_seq_len)
    batch_size, micro_steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = run.plan(tokenizer, train, held_out, batch_size, micro_steps)

    # ---- 2 model ----
    model = common.load_model(args, tokenizer, args.value_head_prefix)
    pack = shared_prompts.pair_rows if shared_prompts.permitted(args, model) else plain_rows
    engine = common.train_engine(model, args, batch_size, micro_steps, steps)

    def collate_rows(rows):
        return collate(rows, tokenizer.pad_token_id, pack)

    checks.refuse_if_padding_matters(run, engine)

    def evaluate_at(step):
        return evaluate(run, engine, held_out, collate_rows)

    # ---- 3 train ----
    for _, micro_batches in run.steps({"model": engine}, collate_rows, evaluate_at, COLUMNS):
        pairs = ranks.all_sum(sum(batch.row_weight.sum() for batch in micro_batches)).item()
        sums = torch.zeros(4, device=ranks.device())
        for batch in micro_batches:
            batch = batch.to(ranks.device())
            weight = batch.row_weight  # (B,)
            chosen, rejected = score_pairs(engine, batch)  # (B,), (B,)
            loss_sum = pair_loss_sum(chosen, rejected, weight, args.center_coef)  # ()
            engine.backward(loss_sum * common.loss_scale(engine, pairs))
            engine.step()  # moves the weights at the step's last micro-batch only
            sums += pair_sums(loss_sum, chosen, rejected, weight)
        means = ranks.all_sum(*sums) / pairs
        run.log(dict(zip(SUMS, means.tolist())))  # and evaluates, when due

    # ---- 4 save ----
    run.save(engine, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
