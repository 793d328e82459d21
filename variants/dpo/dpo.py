"""DPO: preferences without a reward model.  pairs (prompt, chosen, rejected) -> output/dpo

    deepspeed dpo.py                                     the built-in toy, on top of output/sft
    deepspeed dpo.py --model_name_or_path output/sft --data_path my_pairs.jsonl

A policy is its own reward model: beta * log(pi / ref) of a response is its implicit reward, and the
Bradley-Terry loss of step 2 trains it. Numbered as in main(): 1 data, 2 models, 3 train, 4 save.

Layout of a micro-batch of B pairs: 2B rows as sft.py lays them out, all chosen, then all rejected.
Every row ends in the last column; loss_mask (2B, R) is 1 on the responses.
"""

import functools

import torch
import torch.nn.functional as F

import common
import ppo  # its rollout, for the evaluation
import sft  # its layout
from machinery import batching, evaluation, flags, folders, judges, ppo_flags, ranks
from machinery.refused import program
from machinery.rows import load_rows, open_sources
from machinery.run import Run

# ---- What `deepspeed dpo.py` runs: the toy. Another recipe: recipes/qwen2.5-0.5b/dpo.flags ----
TOY = dict(
    model_name_or_path="output/sft",
    data_path=["recipes/toy/data"],
    data_split="4,5,1",
    output_dir="output/dpo",
    num_train_epochs=1,
    learning_rate=3e-4,
    beta=1.0,  # with 0.1 accuracy rises and gold falls: see variants/dpo/README.md
    num_warmup_steps=10,
    weight_decay=0.0,
    dropout=0.0,
    max_answer_seq_len=48,
    num_eval_prompts=280,
    gold_fn="recipes/toy/gold.py:gold",
    per_device_train_batch_size=16,
    per_device_eval_batch_size=140,
    max_seq_len=64,
    zero_stage=2,
    dtype="fp32",
    group_by_length=0,
    log_steps=10,
)
COLUMNS = """step epoch loss accuracy chosen_reward rejected_reward eval_loss eval_accuracy
             eval_gold eval_kl grad_norm""".split()
NAMES = "loss", "accuracy", "chosen_reward", "rejected_reward"


def get_args(argv=None):
    """Reads the flags of this script from the command line."""
    parser = flags.new_parser(__doc__)
    flags.add_common_flags(parser)
    arg = flags.flag_group(parser, "flags of this script alone")
    kinds = ["sigmoid", "ipo", "simpo"]
    arg("loss", "sigmoid", "see pair_loss", choices=kinds)
    arg("beta", 0.1, "scale of the log-ratio. 0.1 [Rafailov 2023]; 2 for simpo")
    arg("margin", 0.5, "SimPO's gamma. 0.3 to 1.6 [Meng 2024]")
    arg("gold_fn", str, "scores sampled responses, is never trained on", metavar="FILE:FUNCTION")
    arg("max_answer_seq_len", 256, "tokens of a sampled response", least=2)
    arg("temperature", 1.0, "of sampling", least=1e-6)
    ppo_flags.add_sampling_flags(arg)
    args = flags.parse(parser, TOY, argv, "dpo")
    args.reward_fn, args.reward_model_name_or_path = [], []
    return args


# ---- Data and loss ----
def collate(rows, pad_id):
    """Lays B pairs out in a sft.MicroBatch of 2B rows: all chosen, then all rejected."""
    both = []
    for i in (0, 1):
        for row in rows:
            response = {"responses": [row["responses"][i]]}
            both.append({**row, **response, "prompt_loss_mask": [0] * len(row["prompt_ids"])})
    return sft.collate(both, pad_id)


def implicit_rewards(args, model, reference, batch):
    """beta * log(pi / ref) of the chosen and of the rejected responses, (B,) each. [Rafailov 2023]

    SimPO has no reference, and takes the mean over a response's tokens. [Meng 2024] eq. 4
    The reference comes first: under ZeRO-3 the forward that is trained on must come right before
    its backward.
    """
    ref_logprobs = 0.0
    if reference:
        with torch.no_grad():
            ref_logprobs = common.response_logprobs(reference, batch, batch.loss_mask)  # (2B, R)
    logprobs = common.response_logprobs(model, batch, batch.loss_mask)  # (2B, R)
    rewards = args.beta * (logprobs - ref_logprobs).sum(-1)  # (2B,)
    if args.loss == "simpo":
        rewards = rewards / batch.loss_mask.sum(-1).clamp(min=1)
    return rewards.chunk(2)


def pair_loss(args, chosen, rejected):
    """The loss of each pair, from implicit rewards r = beta * log(pi / ref).  (B,), (B,) -> (B,)

    sigmoid   -log sigmoid(r_chosen - r_rejected)            [Rafailov 2023] eq. 7
    ipo       (h - 1 / (2 beta))^2, h = difference of r / beta   [Azar 2023] eq. 17
    simpo     -log sigmoid(r_chosen - r_rejected - margin)   [Meng 2024] eq. 6
    """
    difference = chosen - rejected
    if args.loss == "ipo":
        return (difference / args.beta - 1 / (2 * args.beta)) ** 2
    margin = args.margin if args.loss == "simpo" else 0.0
    return -F.logsigmoid(difference - margin)


def pair_sums(args, chosen, rejected, row_weight):
    """The loss of a micro-batch, summed: (), and the sums of the NAMES: (4,)."""
    loss_sum = (pair_loss(args, chosen, rejected) * row_weight).sum()
    correct = (chosen > rejected) + 0.5 * (chosen == rejected)  # (B,)
    sums = [(x * row_weight).sum() for x in (correct, chosen, rejected)]
    return loss_sum, torch.stack([loss_sum, *sums]).detach()


# ---- Evaluation ----
@torch.no_grad()
def evaluate(args, engine, reference, held_out, collate_rows):
    """Loss, accuracy and implicit rewards on the held-out pairs of all ranks."""
    engine.eval()
    sums = torch.zeros(5, dtype=torch.float64)
    for _, batch in batching.eval_loader(args, held_out, collate_rows):
        weight = batch.row_weight.chunk(2)[0]  # (B,)
        pair = implicit_rewards(args, engine, reference, batch)
        sums += torch.cat([pair_sums(args, *pair, weight)[1], weight.sum()[None]]).cpu()
    engine.train()
    *sums, count = ranks.all_sum(*sums).tolist()
    return {f"eval_{name}": total / count for name, total in zip(NAMES, sums)}


@torch.no_grad()
def answer(args, engine, reference, tokenizer, prompts, functions):
    """Responses to held-out prompts, of all ranks: dicts with text, kl, gold, response_length."""
    size = args.per_device_eval_batch_size
    rows = evaluation.requests(prompts)
    engine.eval()
    responses = ppo.roll_out(args, engine, tokenizer, rows, 0, size)
    judges.call_functions(functions, responses)
    for batch in ppo.make_micro_batches(tokenizer, responses, size):
        found = {"response_length": batch.length}  # (B,)
        if reference:
            mask, temperature = batch.response_mask, args.temperature  # (B, R)
            ref_logprobs = common.response_logprobs(reference, batch, mask, temperature)
            logprobs = common.response_logprobs(engine, batch, mask, temperature)
            found["kl"] = (logprobs - ref_logprobs).sum(-1)
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
    run = Run(args, "DPO: direct preference optimization")
    functions = judges.load_functions(args)  # --gold_fn

    # ---- 1 data ----
    sources = open_sources(args, "reward")
    tokenizer = folders.load_tokenizer(args.model_name_or_path, args, in_chats=sources.hold_chats)
    train, held_out = load_rows(args, sources, tokenizer, args.max_seq_len)
    batch_size, micro_steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = run.plan(tokenizer, train, held_out, batch_size, micro_steps)
    prompts = held_out.select(range(min(args.num_eval_prompts, len(held_out))))
    collate_rows = functools.partial(collate, pad_id=tokenizer.pad_token_id)

    # ---- 2 models ----
    engine = common.train_engine(common.load_model(args), args, batch_size, micro_steps, steps)
    reference = None
    if args.loss != "simpo":
        reference = common.reference_of(engine, args, batch_size)

    def evaluate_at(step):
        metrics = evaluate(args, engine, reference, held_out, collate_rows)
        responses = answer(args, engine, reference, tokenizer, prompts, functions)
        return metrics | evaluation.report(run, step, responses)

    # ---- 3 train ----
    for _, micro_batches in run.steps({"model": engine}, evaluate_at, COLUMNS, collate_rows):
        pairs = ranks.all_sum(sum(batch.row_weight.sum() for batch in micro_batches)).item() / 2
        sums = torch.zeros(4, device=ranks.device())
        for batch in micro_batches:
            batch = batch.to(ranks.device())
            chosen, rejected = implicit_rewards(args, engine, reference, batch)  # (B,), (B,)
            weight = batch.row_weight.chunk(2)[0]
            loss_sum, of_batch = pair_sums(args, chosen, rejected, weight)
            engine.backward(loss_sum * common.mean_factor(engine, pairs))
            engine.step()  # moves the weights at the step's last micro-batch only
            sums += of_batch
        run.log(dict(zip(NAMES, (ranks.all_sum(*sums) / pairs).tolist())), micro_batches)

    # ---- 4 save ----
    run.save(engine, tokenizer)
    run.finish()


if __name__ == "__main__":
    program(main)
