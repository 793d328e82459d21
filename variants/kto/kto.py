"""KTO: good or bad, a label for each response.  rows (prompt, response, label) -> output/kto

    deepspeed kto.py                                     the built-in toy, on top of output/sft
    deepspeed kto.py --model_name_or_path output/sft --data_path my_rows.jsonl --label good

A response counts by how far its log-ratio, log pi / ref, is from a reference point z0: the KL of
the policy to the reference, which the step's own rows estimate. There are no pairs. Numbered as in
main(): 1 data, 2 models, 3 train, 4 save. All equations: [Ethayarajh 2024], arXiv 2402.01306v1.

Layout of a micro-batch: B rows of a prompt x and a response y, as sft.py lays them out. Where z0 is
estimated y is that of another prompt. loss_mask (B, R) is 1 on the responses.
"""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

import common
import ppo  # its rollout, for the evaluation
import sft  # its layout
from machinery import batching, evaluation, flags, folders, judges, ppo_flags, ranks
from machinery.refused import Refused, program
from machinery.rows import load_rows, open_sources
from machinery.run import Run

# ---- What `deepspeed kto.py` runs: the toy ----
TOY = dict(
    model_name_or_path="output/sft",
    data_path=["recipes/toy/data"],
    data_split="4,5,1",
    output_dir="output/kto",
    num_train_epochs=1,
    learning_rate=3e-4,  # that of variants/dpo, and so is beta
    beta=1.0,
    num_warmup_steps=10,
    weight_decay=0.0,
    dropout=0.0,
    max_answer_seq_len=48,
    num_eval_prompts=280,
    gold_fn="recipes/toy/gold.py:gold",
    per_device_train_batch_size=32,
    per_device_eval_batch_size=140,
    max_seq_len=64,
    zero_stage=2,
    dtype="fp32",
    group_by_length=0,
    log_steps=10,
)
COLUMNS = """step epoch loss z0 good_log_ratio bad_log_ratio eval_loss eval_accuracy eval_gold
             eval_kl grad_norm""".split()


def get_args(argv=None):
    """Reads the flags of this script from the command line."""
    parser = flags.new_parser(__doc__)
    flags.add_common_flags(parser)
    arg = flags.flag_group(parser, "flags of this script alone")
    column = "the data's column with true or false. None: pairs, of which one response is kept"
    arg("label", str, column)
    arg("beta", 0.1, "scale of the log-ratio. 0.1 [Ethayarajh 2024]")
    arg("lambda_good", 1.0, "weight of the good responses, lambda_D of the paper: eq. 8")
    arg("lambda_bad", 1.0, "weight of the bad ones, lambda_U")
    arg("gold_fn", str, "scores sampled responses, is never trained on", metavar="FILE:FUNCTION")
    arg("max_answer_seq_len", 256, "tokens of a sampled response", least=2)
    arg("temperature", 1.0, "of sampling", least=1e-6)
    ppo_flags.add_sampling_flags(arg)
    args = flags.parse(parser, TOY, argv, "kto")
    args.reward_fn, args.reward_model_name_or_path = [], []
    return args


# ---- Data ----
@dataclass
class MicroBatch(sft.MicroBatch):
    """B rows of a prompt and a response, laid out for a forward."""

    good: Tensor  # (B,) 1 for a good response, 0 for a bad one


def labelled(args, row):
    """Returns a row with one response, its only one, and `good`: 1 or 0.

    Of a pair one response is kept: the chosen one of the rows with an even number, and the rejected
    one of the others. So no prompt's two responses are ever compared.
    """
    if args.label is None:
        good = 1 - row["row"] % 2
        kept = row["responses"][1 - good]
    else:
        good, kept = json.loads(row["extra"]).get(args.label), row["responses"][0]
        if good not in (True, False):  # 1 and 0 are these, too
            words = f"{row['place']}: {args.label} must be true or false, and is {good!r}."
            raise Refused("no-label", words)
    return {**row, "responses": [kept], "good": int(good)}


def mismatched(args, rows, everyone):
    """Returns the rows, each with the response of another prompt: what z0 is estimated from.

    everyone: all rows of the step, on all ranks. In the order of their numbers, a row gets the
    response that is half of them further on: next to it there may be one of the same prompt. It
    depends on nothing else, so that ranks and micro-batches do not change z0. A row that is alone
    has no partner, and no weight.
    """
    everyone, half = sorted(everyone, key=lambda row: row["row"]), len(everyone) // 2
    others = everyone[half:] + everyone[:half]
    response_of = {row["row"]: other["responses"][0] for row, other in zip(everyone, others)}
    made = []
    for row in rows:
        room = args.max_seq_len - len(row["prompt_ids"])
        response = response_of.get(row["row"], row["responses"][0])[:room]  # a filler's is its own
        weight = row["row_weight"] * (len(everyone) > 1)
        made.append({**row, "responses": [response], "row_weight": weight})
    return made


def collate(rows, pad_id):
    """Lays out B rows in a MicroBatch, whose loss covers the responses alone."""
    good = torch.tensor([row["good"] for row in rows])
    rows = [{**row, "prompt_loss_mask": [0] * len(row["prompt_ids"])} for row in rows]
    return MicroBatch(**vars(sft.collate(rows, pad_id)), good=good)


# ---- Loss ----
def log_ratios(model, reference, batch):
    """r = log pi(y | x) - log ref(y | x) of each response.  -> (B,)

    The reference comes first: under ZeRO-3 the forward that is trained on must come right before
    its backward.
    """
    with torch.no_grad():
        ref_logprobs = common.response_logprobs(reference, batch, batch.loss_mask)  # (B, R)
    logprobs = common.response_logprobs(model, batch, batch.loss_mask)  # (B, R)
    return (logprobs - ref_logprobs).sum(-1)


@torch.no_grad()
def reference_point(engine, reference, batches):
    """z0 = max(0, mean of log pi(y' | x) / ref(y' | x)), y' of other prompts; and that mean.

    The mean is over all micro-batches and ranks, and no gradient goes through it: it says where the
    sigmoid of the loss saturates, and nothing else ("Implementation" in section 4.1). Two numbers.
    """
    engine.eval()  # no dropout
    total = count = 0.0
    for batch in batches:
        batch = batch.to(ranks.device())
        total += (log_ratios(engine, reference, batch) * batch.row_weight).sum()
        count += batch.row_weight.sum()
    engine.train()
    total, count = ranks.all_sum(total, count).tolist()
    mean = total / max(count, 1)
    return max(mean, 0.0), mean


def kto_loss(args, log_ratio, good, z0):
    """The loss of each response.  log_ratio, good: (B,) -> (B,)   eq. 7

    lambda_good * (1 - sigmoid(beta * (r - z0)))    of a good response
    lambda_bad  * (1 - sigmoid(beta * (z0 - r)))    of a bad one
    """
    sign = 2 * good - 1
    weight = args.lambda_good * good + args.lambda_bad * (1 - good)
    return weight * (1 - torch.sigmoid(args.beta * sign * (log_ratio - z0)))


def sums_of(args, log_ratio, batch, z0):
    """Of a micro-batch the loss, summed: (), and six sums: (6,).

    The sums are of the loss, of what is on the right side of z0, and of the good and of the bad
    responses their number and their log-ratios.
    """
    weight, good = batch.row_weight, batch.good
    loss_sum = (kto_loss(args, log_ratio, good, z0) * weight).sum()
    right = (log_ratio > z0) == (good > 0)
    each = (right, good, good * log_ratio, 1 - good, (1 - good) * log_ratio)
    return loss_sum, torch.stack([loss_sum, *((x * weight).sum() for x in each)]).detach()


def means_of(sums):
    """Returns the metrics of sums_of(), summed over all ranks."""
    loss, right, good, good_ratios, bad, bad_ratios = ranks.all_sum(*sums).tolist()
    names = {"loss": loss / (good + bad), "accuracy": right / (good + bad)}
    names |= {"good_log_ratio": good_ratios / max(good, 1)}
    return names | {"bad_log_ratio": bad_ratios / max(bad, 1)}


# ---- Evaluation ----
@torch.no_grad()
def evaluate(args, engine, reference, held_out, pad_id):
    """Loss, z0, and which responses are on their side of it, of the held-out rows of all ranks."""
    everyone = [labelled(args, row) for row in numbered(held_out)]

    def batches(change):
        """Yields this rank's micro-batches, whose rows have gone through `change`."""

        def collate_rows(rows):
            return collate(change([labelled(args, row) for row in rows]), pad_id)

        for _, batch in batching.eval_loader(args, held_out, collate_rows):
            yield batch

    others = batches(lambda rows: mismatched(args, rows, everyone))
    z0, unclamped = reference_point(engine, reference, others)
    engine.eval()
    sums = torch.zeros(6, dtype=torch.float64)
    for batch in batches(list):
        sums += sums_of(args, log_ratios(engine, reference, batch), batch, z0)[1].cpu()
    engine.train()
    found = {**means_of(sums), "z0": z0, "z0_unclamped": unclamped}
    return {f"eval_{name}": value for name, value in found.items()}


def numbered(rows):
    """Returns all rows of a dataset, each with its number."""
    dealt = batching.Rows(rows)
    return [dealt[i] for i in range(len(rows))]


@torch.no_grad()
def answer(args, engine, reference, tokenizer, prompts, functions):
    """Responses to held-out prompts, of all ranks: dicts with text, kl, gold, response_length."""
    size = args.per_device_eval_batch_size
    rows = evaluation.requests(prompts)
    engine.eval()
    responses = ppo.roll_out(args, engine, tokenizer, rows, 0, size)
    judges.call_functions(functions, responses)
    for batch in ppo.make_micro_batches(tokenizer, responses, size):
        mask, temperature = batch.response_mask, args.temperature  # (B, R)
        ref_logprobs = common.response_logprobs(reference, batch, mask, temperature)
        logprobs = common.response_logprobs(engine, batch, mask, temperature)
        found = {"response_length": batch.length, "kl": (logprobs - ref_logprobs).sum(-1)}  # (B,)
        if functions:
            found["gold"] = judges.function_scores(batch, "gold").sum(-1)
        for name, values in found.items():
            for response, value in zip(batch.responses, values.tolist()):
                response[name] = value
    engine.train()
    return sorted(ranks.each_once(responses), key=lambda row: row["row"])


# ---- The script, top to bottom ----
def main():
    args = get_args()
    run = Run(args, "KTO: Kahneman-Tversky optimization")
    functions = judges.load_functions(args)  # --gold_fn

    # ---- 1 data ----
    sources = open_sources(args, "sft" if args.label else "reward")
    tokenizer = folders.load_tokenizer(args.model_name_or_path, args, in_chats=sources.hold_chats)
    train, held_out = load_rows(args, sources, tokenizer, args.max_seq_len)
    batch_size, micro_steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = run.plan(tokenizer, train, held_out, batch_size, micro_steps)
    prompts = held_out.select(range(min(args.num_eval_prompts, len(held_out))))
    pad_id = tokenizer.pad_token_id
    good = sum(labelled(args, row)["good"] for row in numbered(train))
    words = (
        f"{good:,} good responses of weight {args.lambda_good:g}, {len(train) - good:,} bad ones"
    )
    ranks.say(f"{words} of weight {args.lambda_bad:g}")

    # ---- 2 models ----
    engine = common.train_engine(common.load_model(args), args, batch_size, micro_steps, steps)
    reference = common.reference_of(engine, args, batch_size)

    def evaluate_at(step):
        metrics = evaluate(args, engine, reference, held_out, pad_id)
        responses = answer(args, engine, reference, tokenizer, prompts, functions)
        return metrics | evaluation.report(run, step, responses)

    # ---- 3 train ----
    # A step's rows come as lists, not yet laid out, because z0 needs those of all ranks.
    for _, lists in run.steps({"model": engine}, evaluate_at, COLUMNS):
        lists = [[labelled(args, row) for row in rows] for rows in lists]
        everyone = ranks.each_once([row for rows in lists for row in rows])
        others = [collate(mismatched(args, rows, everyone), pad_id) for rows in lists]
        z0, unclamped = reference_point(engine, reference, others)
        micro_batches = [collate(rows, pad_id) for rows in lists]
        sums = torch.zeros(6, device=ranks.device())
        for batch in micro_batches:
            batch = batch.to(ranks.device())
            loss_sum, of_batch = sums_of(args, log_ratios(engine, reference, batch), batch, z0)
            engine.backward(loss_sum * common.mean_factor(engine, len(everyone)))
            engine.step()  # moves the weights at the step's last micro-batch only
            sums += of_batch
        run.log({**means_of(sums), "z0": z0, "z0_unclamped": unclamped}, micro_batches)

    # ---- 4 save ----
    run.save(engine, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
