"""Step 1 of RLHF: supervised fine-tuning.   prompt + answer -> a language model in output/sft

    deepspeed sft.py                                     the built-in toy, on whatever is there
    deepspeed sft.py --preset opt-1.3b                   DeepSpeed-Chat's recipe
    deepspeed sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --data_path my.jsonl

The model learns to continue a prompt with its answer: cross entropy on the answer's tokens, EOS included, and on nothing
else. Numbered as in main():  1 data  2 model  3 train  4 save.  What is left out: packing, and losses on the prompt
unless --train_on_prompt asks for them.

Token layout of a micro-batch: B = 2 rows, T = 6 tokens, K = 3 tokens of the longest answer ('-' is padding).
    position     0    1    2    3    4    5          every row ends in the last column, so the
    row 0        x0   x1   x2 | y0   y1   eos        loss looks at the last K columns of all rows,
    row 1        -    x0   x1   x2 | y0   eos        masked: row 1's mask is 0 1 1
    logits[:, t] score token t+1: the last K tokens are scored by positions T-K-1 .. T-2, and logits are made
    for those alone that the mask marks     (M, V), here M = 3 + 2
"""
import math
import time

import common  # first: it quietens the libraries while they are imported
import arguments
import checkpoint
import estimate

import torch
from transformers import GenerationConfig

# ---- Arguments ------------------------------------------------------------------------------------------------------
PRESETS = {
    # DeepSpeed-Chat, step 1, opt/single_node/run_1.3b.sh, number for number. A run without a preset starts from these.
    "opt-1.3b": dict(
        model_name_or_path="facebook/opt-1.3b",
        data_path=["Dahoas/rm-static", "Dahoas/full-hh-rlhf", "Dahoas/synthetic-instruct-gptj-pairwise",
                   "yitingxie/rlhf-reward-datasets"],
        data_split="2,4,4", output_dir="output/sft",
        num_train_epochs=16,  # held-out perplexity is flat after 1-2 epochs, and the generations keep getting better
        learning_rate=9.65e-6, weight_decay=0.0, num_warmup_steps=0,
        dropout=None,         # on: OPT's own 0.1
        per_device_train_batch_size=8, per_device_eval_batch_size=8, max_seq_len=512, zero_stage=2),
    # One million weights from scratch on a CPU: a high learning rate, few epochs. Batch 48 on the demo's two ranks.
    "toy": dict(
        model_name_or_path=str(common.HERE / "toy/model"), data_path=[str(common.HERE / "toy/data")],
        data_split="4,5,1", output_dir="output/sft", num_train_epochs=5, learning_rate=3e-3, weight_decay=0.0,
        num_warmup_steps=20, dropout=None, per_device_train_batch_size=24, per_device_eval_batch_size=140,
        max_seq_len=64, zero_stage=2, dtype="fp32", group_by_length=0, log_steps=20),
}
COLUMNS = ["step", "epoch", "loss", "eval_loss", "eval_perplexity", "learning_rate", "grad_norm", "tokens_per_second"]

def get_args(argv=None):
    parser = arguments.new_parser(__doc__)
    arguments.add_common_arguments(parser)
    arg = arguments.flags(parser, "flags of this step alone")
    arg("train_on_prompt", action="store_true", help="the loss covers the prompt's tokens too")
    arg("num_samples", type=int, default=5, help="held-out prompts answered at each evaluation")
    arg("max_answer_seq_len", type=int, default=64, help="tokens of those answers, at most")
    return arguments.parse(parser, PRESETS, argv)

# ---- Data and loss --------------------------------------------------------------------------------------------------
def collate(rows, pad_id, train_on_prompt=False):
    """B rows of (prompt_ids, answers[0]) -> ids, mask: (B, T); loss_mask: (B, K), 1 on the tokens that the loss covers; real: (B,)."""
    ids, mask = common.pad([r["prompt_ids"] + r["answers"][0] for r in rows], pad_id)
    # with --train_on_prompt all tokens but the first, which has nothing before it to be predicted from
    counts = [len(r["prompt_ids"]) - 1 + len(r["answers"][0]) if train_on_prompt else len(r["answers"][0]) for r in rows]
    loss_mask = torch.zeros(len(rows), max(counts))
    for b, (row, count) in enumerate(zip(rows, counts)):
        loss_mask[b, max(counts) - count:] = row["real"]  # rows end in the last column; a filler row counts nothing
    return {"ids": ids, "mask": mask, "loss_mask": loss_mask, "real": torch.tensor([r["real"] for r in rows])}

def sft_loss_sum(logprobs, loss_mask):
    """Cross entropy, -log p(token | tokens before it), SUMMED over the covered tokens.  logprobs, loss_mask: (B, K) -> ()

    A sum, because the mean is taken once over the whole optimizer step (common.loss_scale): the mean of micro-batch
    means would give a token in a short batch more weight than one in a long batch.
    """
    return -(logprobs * loss_mask).sum()

@torch.no_grad()
def evaluate(args, engine, held_out, collate_rows):
    """-> held-out loss per token over all ranks, weighted by tokens (not a mean of batch means), and its perplexity."""
    engine.eval()
    total = covered = 0.0
    for batch in common.eval_loader(args, held_out, collate_rows):
        logprobs = common.last_logprobs(engine, batch["ids"], batch["mask"], batch["loss_mask"])  # (B, K)
        total += sft_loss_sum(logprobs, batch["loss_mask"])
        covered += batch["loss_mask"].sum()
    engine.train()
    total, covered = common.all_sum(total, covered).tolist()
    return {"eval_loss": total / covered, "eval_perplexity": math.exp(min(total / covered, 80))}

def answer_prompts(args, engine, tokenizer, rows, step):
    """Answer a few held-out prompts, the same at every evaluation, greedily; write them down and show the first."""
    if not rows:
        return
    room = min(args.max_answer_seq_len, args.max_seq_len // 2)  # tokens of an answer; a long prompt keeps its end
    ids, mask = common.pad([r["prompt_ids"][-(args.max_seq_len - room):] for r in rows], tokenizer.pad_token_id)
    greedy = GenerationConfig(max_new_tokens=room, do_sample=False, eos_token_id=tokenizer.eos_token_id,
                              pad_token_id=tokenizer.pad_token_id)
    with common.gathered(engine) as (model, synced):
        own, model.generation_config = model.generation_config, greedy  # generate takes what `greedy` leaves open from the model's
        out = model.generate(ids.to(common.device()), attention_mask=mask.to(common.device()), generation_config=greedy, synced_gpus=synced)
        model.generation_config = own
    answers = tokenizer.batch_decode(out[:, ids.shape[1]:], skip_special_tokens=True)
    common.append(args, "samples.jsonl", [{"step": step, "prompt": r["prompt"], "response": a} for r, a in zip(rows, answers)])
    common.say(f"    {rows[0]['prompt']!r} -> {answers[0]!r}")

def models_of(args):
    """For --estimate: the model, what it works on, and that it trains."""
    return [dict(path=args.model_name_or_path, stage=args.zero_stage, trains=True, dropout=args.dropout, lora_dim=args.lora_dim,
                 rows=args.per_device_train_batch_size, tokens=args.max_seq_len)]

# ---- The step, top to bottom ----------------------------------------------------------------------------------------
def main():
    args = get_args()
    if args.estimate is not None:
        estimate.estimate(args, models_of)
    common.start(args)

    # 1 data ----------------------------------------------------------------------------------------------------------
    tokenizer = common.load_tokenizer(args.model_name_or_path, args.max_seq_len)
    train, held_out = common.load_rows(args, tokenizer, step=1, limit=args.max_seq_len)
    batch_size, micro_steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = common.count_steps(args, train, batch_size, micro_steps)
    show = [held_out[i] for i in range(min(args.num_samples, len(held_out)))]

    def collate_rows(rows):
        return collate(rows, tokenizer.pad_token_id, args.train_on_prompt)

    # 2 model ---------------------------------------------------------------------------------------------------------
    model = common.load_model(args.model_name_or_path, args, args.zero_stage, args.dropout, lora_dim=args.lora_dim)
    engine = common.train_engine(model, args, args.zero_stage, batch_size, micro_steps, steps, args.learning_rate, args.weight_decay)
    common.begin(args, "step 1: supervised fine-tuning", args.model_name_or_path, engine, train, held_out, batch_size, micro_steps, steps)

    # 3 train ---------------------------------------------------------------------------------------------------------
    if not args.resume:
        common.log(args, {"step": 0, "epoch": 0.0, **evaluate(args, engine, held_out, collate_rows)}, COLUMNS)
        answer_prompts(args, engine, tokenizer, show, 0)
    for step, epoch, evaluate_now, micro_batches in checkpoint.training_steps(
            args, {"model": engine}, {}, train, batch_size, micro_steps, steps, collate_rows):
        started = time.time()
        covered, tokens, rows = common.all_sum(sum(b["loss_mask"].sum() for b in micro_batches),
                                               sum(b["mask"].sum(-1) @ b["real"] for b in micro_batches),
                                               sum(b["real"].sum() for b in micro_batches)).tolist()
        loss_total = torch.zeros((), device=common.device())
        for batch in map(common.to_device, micro_batches):
            logprobs = common.last_logprobs(engine, batch["ids"], batch["mask"], batch["loss_mask"])  # (B, K)
            loss_sum = sft_loss_sum(logprobs, batch["loss_mask"])  # ()
            engine.backward(loss_sum * common.loss_scale(covered, micro_steps))
            engine.step()  # moves the weights at the step's last micro-batch only
            loss_total += loss_sum.detach()
        flops = common.train_flops(engine, tokens, tokens / rows, args.gradient_checkpointing)
        record = {"step": step, "epoch": epoch, "loss": common.all_sum(loss_total)[0].item() / covered,
                  **common.speed(args, engine, tokens, flops, started)}
        common.check_finite(args, record, common.texts(tokenizer, micro_batches))
        if evaluate_now:
            record.update(evaluate(args, engine, held_out, collate_rows))
        if evaluate_now or step % args.log_steps == 0:
            common.log(args, record, COLUMNS, engine)
        if evaluate_now:
            answer_prompts(args, engine, tokenizer, show, step)
            common.draw_curves(args)

    # 4 save ----------------------------------------------------------------------------------------------------------
    common.save_model(engine, tokenizer, args.output_dir)
    common.finish(args)

if __name__ == "__main__":
    main()
