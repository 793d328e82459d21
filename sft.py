"""Step 1 of RLHF: supervised fine-tuning.  prompt + response -> a language model in output/sft

    deepspeed sft.py                                     the built-in toy, on CPU or GPU
    deepspeed sft.py --preset opt-1.3b                   DeepSpeed-Chat's recipe
    deepspeed sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --data_path my.jsonl --data_split 1,0,0

The model learns to continue a prompt with its response: cross entropy on the response's tokens,
EOS included, and in chats on the assistant's turns before it (--train_on). The parts of
main(): 1 data, 2 model, 3 train, 4 save. With --packing 1 short rows share a row of the forward, in
place of padding, and none sees another (collate_packed).

Token layout of a micro-batch of B = 2 rows, T = 6 tokens ('-' is padding). The last R = 3 columns
hold every token that the loss covers. In this example that is the longest response.
    column       0    1    2    3    4    5          every row ends in the last column, so the
    row 0        x0   x1   x2 | y0   y1   eos        loss looks at the last R columns of all rows,
    row 1        -    x0   x1   x2 | y0   eos        masked: row 1's mask is 0 1 1
    logits at column t predict column t+1, so columns T-R-1 .. T-2 predict the last R
    (common.Layout.logit_places), and logits are made for those alone that the mask marks: (M, V),
    here M = 3 + 2
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import common
from machinery import batching, checks, evaluation, flags, folders, judges, ranks, shared_prompts
from machinery.refused import program
from machinery.rows import load_rows, open_sources
from machinery.run import Run

# ---- What `deepspeed sft.py` runs: the toy. Other recipes: recipes/ ----
TOY = dict(
    model_name_or_path="recipes/toy/model",  # from scratch: 0.9 M weights, minutes on two cores
    data_path=["recipes/toy/data"],
    data_split="4,5,1",  # PPO draws its own responses: it needs the fewest rows
    output_dir="output/sft",
    num_train_epochs=5,
    learning_rate=3e-3,  # high: few weights, and from scratch
    weight_decay=0.0,
    num_warmup_steps=20,
    per_device_train_batch_size=24,
    recipe_rows=48,  # the rate is tuned for this many rows a step (two ranks)
    per_device_eval_batch_size=140,
    max_seq_len=64,
    zero_stage=2,
    dtype="fp32",
    group_by_length=0,
    log_steps=20,
)
COLUMNS = """step epoch loss eval_loss eval_perplexity learning_rate grad_norm
             tokens_per_second""".split()


def get_args(argv=None):
    """Reads the flags of this step from the command line.

    arg(name, default or type, help): a type if the default comes from TOY or a recipe, or is None.
    least (0), most: the range. needed: the script cannot run without it.
    """
    parser = flags.new_parser(__doc__)
    flags.add_common_flags(parser)
    arg = flags.flag_group(parser, "flags of this step alone")
    turns = "assistant turns, or everything. None: all turns of chats, else the last response"
    arg("train_on", str, turns, choices=["last", "all", "everything"])
    arg("num_samples", 5, "held-out prompts answered at each evaluation")
    arg("gold_fn", str, "grades those responses, only logged", metavar="FILE:FUNCTION")
    arg("max_answer_seq_len", 64, "tokens of those responses, at most", least=2)
    arg("packing", 0, "1: short rows share a row; saves little unless --group_by_length 0", most=1)
    return flags.parse(parser, TOY, argv, "sft")


# ---- Data and loss ----
@dataclass
class MicroBatch(common.Layout):
    """B rows of a prompt and its response, laid out for a forward."""

    loss_mask: Tensor  # (B, R) 1 on the tokens that the loss covers
    row_weight: Tensor  # (B,) 1, or 0 for a filler: a row that only fills up the last batch

    def counts(self):
        """Tokens and rows, without fillers: for the run's speed."""
        return (self.real_tokens * self.row_weight).sum(), self.row_weight.sum()


def collate(rows, pad_id):
    """Lays out B rows (dicts, see part 1 of main) in a MicroBatch.

    The loss never covers a row's first token, which nothing predicts, nor a filler row.
    """
    sequences = [row["prompt_ids"] + row["responses"][0] for row in rows]
    ids, mask = common.pad(sequences, pad_id)  # (B, T)
    covered = [row["prompt_loss_mask"] + [1] * len(row["responses"][0]) for row in rows]
    loss_mask, _ = common.pad([[0] + row[1:] for row in covered], 0, dtype=torch.float)  # (B, T)
    first = loss_mask.any(0).nonzero()[0].item()  # the leftmost column that counts; R = T - first
    row_weight = torch.tensor([row["row_weight"] for row in rows])
    loss_mask = loss_mask[:, first:] * row_weight[:, None]  # (B, R)
    layout = common.last_columns(ids, mask, count=loss_mask.shape[1])
    return MicroBatch(**vars(layout), loss_mask=loss_mask, row_weight=row_weight)


def collate_packed(rows, pad_id):
    """Does what collate does, but short rows share a row of the forward (--packing).

    The B rows come in another order, that of the N <= B rows of the forward.
    """
    sequences = [row["prompt_ids"] + row["responses"][0] for row in rows]
    bins = shared_prompts.bins([len(sequence) for sequence in sequences])
    batch = collate([rows[i] for together in bins for i in together], pad_id)
    if len(bins) == len(rows):  # no two fit into one: no need of a mask (N, 1, T, T)
        return batch
    packed = [[sequences[i] for i in together] for together in bins]
    layout = shared_prompts.packed_rows(packed, pad_id, count=batch.loss_mask.shape[1])
    return replace(batch, **vars(layout))


def sft_loss_sum(logprobs, loss_mask):
    """Cross entropy, -log p(token | tokens before it), SUMMED over the covered tokens.

    A sum, because the mean is taken once over the whole optimizer step (common.mean_factor): the
    mean of micro-batch means would give a token in a short batch more weight than one in a long
    batch.  logprobs, loss_mask: (B, R) -> ()
    `evaluate` calls this as well, and eval_perplexity is the exponential of its mean: what is for
    training alone (label smoothing, weights of tokens or rows) belongs in part 3 of main.
    """
    return -(logprobs * loss_mask).sum()


@torch.no_grad()
def evaluate(args, engine, held_out, collate_rows):
    """Held-out loss per token over all ranks (not a mean of batch means), and its perplexity.

    To average over rows, weight them by row_weight: fillers repeat the first row.
    """
    engine.eval()  # no dropout
    total = covered = 0.0
    for _, batch in batching.eval_loader(args, held_out, collate_rows):
        logprobs = common.response_logprobs(engine, batch, batch.loss_mask)  # (B, R)
        total += sft_loss_sum(logprobs, batch.loss_mask)
        covered += batch.loss_mask.sum()
    engine.train()
    total, covered = ranks.all_sum(total, covered).tolist()
    loss = total / covered
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 80))}  # no overflow


# ---- The step, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "step 1: supervised fine-tuning")
    gold = judges.load_function(args.gold_fn, "--gold_fn") if args.gold_fn else None

    # ---- 1 data ----
    # A row holds prompt_ids, the prompt's tokens; responses, a list with the ids of its response,
    # tokenised apart from the prompt and with the tokenizer's EOS appended; and prompt_loss_mask, 1
    # where --train_on covers the prompt, too. Prompt and response together have at most
    # --max_seq_len tokens: a long prompt keeps its end, a long response is cut and loses its EOS.
    # Batches add row_weight: 0 for a filler, a row that only fills up the last batch, else 1.
    sources = open_sources(args, "sft")
    tokenizer = folders.load_tokenizer(args.model_name_or_path, args, in_chats=sources.hold_chats)
    train, held_out = load_rows(args, sources, tokenizer, args.max_seq_len)
    batch_size, micro_steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = run.plan(tokenizer, train, held_out, batch_size, micro_steps)

    # ---- 2 model ----
    model = common.load_model(args)
    engine = common.train_engine(model, args, batch_size, micro_steps, steps)
    packed = shared_prompts.permitted(args, engine, flag="packing")

    def collate_rows(rows):
        return (collate_packed if packed else collate)(rows, tokenizer.pad_token_id)

    checks.refuse_if_padding_matters(run, engine)  # padding must not change a log-prob

    def evaluate_at(step):
        metrics = evaluate(args, engine, held_out, collate_rows)
        return metrics | evaluation.answer_and_keep(run, engine, tokenizer, held_out, step, gold)

    # ---- 3 train ----
    # `run.steps` evaluates at the start, or goes on from a checkpoint, and saves checkpoints. For
    # each step it yields the number of the step and its micro-batches.
    for _, micro_batches in run.steps({"model": engine}, evaluate_at, COLUMNS, collate_rows):
        # The loss is a mean over all tokens that it covers: of all micro-batches and all ranks.
        tokens = ranks.all_sum(sum(batch.loss_mask.sum() for batch in micro_batches)).item()
        loss_total = torch.zeros((), device=ranks.device())
        for batch in micro_batches:
            batch = batch.to(ranks.device())
            logprobs = common.response_logprobs(engine, batch, batch.loss_mask)  # (B, R)
            loss_sum = sft_loss_sum(logprobs, batch.loss_mask)  # ()
            engine.backward(loss_sum * common.mean_factor(engine, tokens))
            engine.step()  # moves the weights at the step's last micro-batch only
            loss_total += loss_sum.detach()
        # The run logs the step, and evaluates when that is due. Numbers of your own must be of all
        # ranks, as this one is (ranks.all_sum).
        run.log({"loss": ranks.all_sum(loss_total).item() / tokens}, micro_batches)

    # ---- 4 save ----
    run.save(engine, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
