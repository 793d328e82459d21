"""Step 2 of RLHF: the reward model.  pairs (prompt, chosen, rejected) -> output/reward

    deepspeed reward.py                                  the built-in toy, on top of output/sft
    deepspeed reward.py --preset opt-1.3b                DeepSpeed-Chat's recipe, OPT-350M
    deepspeed reward.py --model_name_or_path output/sft --data_path my.jsonl --data_split 0,1,0

A backbone with a linear head gives one number per token; the number at a response's last token is
the response's score. The score learns to order pairs as people did: the Bradley-Terry model says
P(chosen beats rejected) = sigmoid(difference). Numbered as in main(): 1 data, 2 model, 3 train,
4 save. What is left out: more than two responses per prompt, margins (variants/margin).

Layout of a micro-batch of B = 2 pairs: 2B rows of T = 7 tokens, first all chosen responses (y),
then all rejected ones (z); '-' is padding.
    column       0    1    2    3    4    5    6
    row 0        -    -    x0   x1 | y0   y1   eos       pair 0, chosen
    row 1        x0   x1   x2   x3 | y0   y1   eos       pair 1, chosen
    row 2        -    -    -    x0   x1 | z0   eos       pair 0, rejected
    row 3        -    x0   x1   x2   x3 | z0   eos       pair 1, rejected
    Every row ends in the last column, and there its score is read: (2B,).
By default the prompt of a pair is computed once, with both responses after it in one row, where
the architecture permits it: --share_prompt, drawn in machinery/shared_prompts.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import common
from machinery import batching, checks, evaluation, flags, folders, metrics, ranks, shared_prompts
from machinery.refused import program
from machinery.rows import load_rows, open_sources
from machinery.run import Run

# ---- What `deepspeed reward.py` runs: the toy. Other recipes: recipes/ ----
TOY = dict(
    model_name_or_path="output/sft",
    data_path=["recipes/toy/data"],
    data_split="4,5,1",
    output_dir="output/reward",
    num_train_epochs=2,  # held-out loss below 1 epoch's: course/labs/reward-epochs.md
    learning_rate=2e-3,
    weight_decay=0.1,
    num_warmup_steps=10,
    dropout=0.0,
    center_coef=0.01,  # [Eisenstein 2023]
    per_device_train_batch_size=16,
    recipe_rows=32,  # the rate is tuned for this many rows a step (two ranks)
    per_device_eval_batch_size=140,
    max_seq_len=64,
    zero_stage=2,
    dtype="fp32",
    group_by_length=0,
    log_steps=10,
)
# loss has --center_coef in it, eval_loss has not.
COLUMNS = """step epoch loss accuracy chosen_score rejected_score eval_loss eval_accuracy
             grad_norm""".split()
SUMS = "loss", "accuracy", "chosen_score", "rejected_score"


def get_args(argv=None):
    """Reads the flags of this step from the command line. `arg`: see sft.get_args."""
    parser = flags.new_parser(__doc__)
    flags.add_common_flags(parser)
    arg = flags.flag_group(parser, "flags of this step alone")
    arg("value_head_prefix", "score", "name of the head; stock transformers loads `score`")
    pull = "weight of (chosen + rejected)^2, which pulls scores to 0. 0.01 [Eisenstein 2023]"
    arg("center_coef", 0.0, pull)
    arg("share_prompt", 1, "1: compute the prompt of a pair once; 0: a row for each", most=1)
    return flags.parse(parser, TOY, argv, "reward")


# ---- Data and loss ----
@dataclass
class MicroBatch(common.Layout):
    """B pairs, laid out for a forward. logit_places: (2B, 1), one place before each last token."""

    row_weight: Tensor  # (B,) 1, or 0 for a filler row

    def counts(self):
        """Tokens and rows, without fillers: for the run's speed."""
        weight = self.row_weight.repeat(len(self.ids) // len(self.row_weight))  # (N,), 2B or B
        return (self.real_tokens * weight).sum(), weight.sum()


def plain_rows(rows, pad_id):
    """The Layout of two rows for each pair: see the picture at the top of this file.

    By default shared_prompts.pair_rows takes its place: what you change here, change there, too.
    """
    sequences = [row["prompt_ids"] + row["responses"][i] for i in (0, 1) for row in rows]
    ids, mask = common.pad(sequences, pad_id)  # (2B, T)
    return common.last_columns(ids, mask, count=1)


def collate(rows, pad_id, pack=plain_rows):
    """Lays out B pairs (dicts of prompt_ids and responses: chosen, rejected) in a MicroBatch.

    pack(rows, pad_id): makes the Layout, plain_rows or shared_prompts.pair_rows.
    """
    row_weight = torch.tensor([float(row["row_weight"]) for row in rows])
    return MicroBatch(**vars(pack(rows, pad_id)), row_weight=row_weight)


def score_pairs(model, batch):
    """Scores of the chosen and of the rejected responses, (B,) each, at their last tokens.

    ppo.py, tools/talk.py and stock transformers read a response's score at the same token.
    """
    scores = common.values_at_tokens(model, batch)[:, 0]  # (2B,)
    return scores.chunk(2)


def pair_loss_sum(chosen, rejected, row_weight, center_coef=0.0):
    """Bradley-Terry loss, summed over the pairs: log 2 each where the scores are equal.

        -log sigmoid(r_chosen - r_rejected)                         [Ouyang 2022] eq. 1
        + center_coef * (r_chosen + r_rejected)^2                   [Eisenstein 2023] eq. 2

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
    """Loss (without --center_coef), accuracy and mean scores of all ranks' held-out pairs."""
    engine.eval()  # no dropout
    found = []
    for numbers, batch in batching.eval_loader(run.args, held_out, collate_rows):
        chosen, rejected = score_pairs(engine, batch)  # (B,), (B,)
        columns = torch.tensor(numbers), chosen.cpu(), rejected.cpu()  # (B,) each
        found.append(torch.stack([column.double() for column in columns], 1))  # (B, 3)
    engine.train()
    # This rank's pairs, (n, 3): the row's number, the chosen score, the rejected score.
    pairs = torch.cat(found)
    pairs = pairs[pairs[:, 0] >= 0]  # fillers have negative numbers
    evaluation.write_pairs(run.args, held_out, pairs)
    _, chosen, rejected = pairs.unbind(1)  # (n,) each
    ones = torch.ones_like(chosen)
    sums = pair_sums(pair_loss_sum(chosen, rejected, ones), chosen, rejected, ones)
    *sums, count = ranks.all_sum(*sums, len(pairs)).tolist()
    loss, accuracy, chosen_mean, rejected_mean = (total / count for total in sums)
    mean = (chosen_mean + rejected_mean) / 2
    # In two passes: the mean of squares less the squared mean would lose digits far from 0.
    squares = ranks.all_sum(((pairs[:, 1:] - mean) ** 2).sum()).item()
    std = (squares / (2 * count)) ** 0.5
    return {
        "eval_loss": loss,
        "eval_accuracy": accuracy,
        "eval_accuracy_ci": metrics.wilson_interval(accuracy, count),
        "eval_chosen_score": chosen_mean,
        "eval_rejected_score": rejected_mean,
        "eval_margin": chosen_mean - rejected_mean,
        "eval_score_mean": mean,
        "eval_score_std": std,
    }


# ---- The step, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "step 2: reward model")

    # ---- 1 data ----
    sources = open_sources(args, "reward")
    tokenizer = folders.load_tokenizer(args.model_name_or_path, args, in_chats=sources.hold_chats)
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
    for _, micro_batches in run.steps({"model": engine}, evaluate_at, COLUMNS, collate_rows):
        pairs = ranks.all_sum(sum(batch.row_weight.sum() for batch in micro_batches)).item()
        sums = torch.zeros(4, device=ranks.device())  # the four SUMS
        for batch in micro_batches:
            batch = batch.to(ranks.device())
            weight = batch.row_weight  # (B,)
            chosen, rejected = score_pairs(engine, batch)  # (B,), (B,)
            loss_sum = pair_loss_sum(chosen, rejected, weight, args.center_coef)  # ()
            engine.backward(loss_sum * common.mean_factor(engine, pairs))
            engine.step()  # moves the weights at the step's last micro-batch only
            sums += pair_sums(loss_sum, chosen, rejected, weight)
        means = ranks.all_sum(*sums) / pairs
        run.log(dict(zip(SUMS, means.tolist())), micro_batches)  # and evaluates, when due

    # ---- 4 save ----
    run.save(engine, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
