"""Step 2 of RLHF: the reward model.   pairs (prompt, chosen, rejected) -> a value model in output/reward

    deepspeed reward.py                                  the built-in toy, on top of output/sft
    deepspeed reward.py --preset opt-1.3b                DeepSpeed-Chat's recipe: OPT-350M learns to judge
    deepspeed reward.py --model_name_or_path output/sft --data_path my_pairs.jsonl

A backbone with a linear head gives one number per token; the number at an answer's last token is the answer's score.
The score learns to order pairs as people did: the Bradley-Terry model says P(chosen beats rejected) = sigmoid(difference).
Numbered as in main():  1 data  2 model  3 train  4 save.  What is left out: more than two answers per prompt, margins.

Layout of a micro-batch of B = 2 pairs, T = 9 tokens ('-' is padding). The prompt is computed once for both answers, which
saves a third of the tokens of real dialogues (docs/performance.md). [Wang & Hegde 2024] do so for DPO.
    position in the row       0    1    2    3    4    5    6    7    8
    row 0                     -    -    x0   x1 | y0   y1   eos| z0   eos    chosen = values at the first eos   (B,)
    row 1                     x0   x1   x2   x3 | y0   y1   eos| z0   eos    rejected = values[:, -1]           (B,)
    position of a token       0    1    2    3    4    5    6    4    5      z goes on where x ended ...
    z0 attends to             x0   x1   x2   x3                  z0          ... and does not see y
Where an architecture has its own idea of positions or masks (ALiBi, a short window, a recurrent state, attention other than
PyTorch's), each answer has a row of its own: all chosen, then all rejected; the score is values[:, -1] of (2B, T).
"""
import inspect
import time

import common  # first: it quietens the libraries while they are imported
import arguments
import checkpoint
import estimate

import torch
import torch.nn.functional as F

# ---- Arguments ------------------------------------------------------------------------------------------------------
PRESETS = {
    # DeepSpeed-Chat, step 2, opt/single_node/run_350m.sh, number for number. A run without a preset starts from these.
    "opt-1.3b": dict(
        model_name_or_path="facebook/opt-350m",
        data_path=["Dahoas/rm-static", "Dahoas/full-hh-rlhf", "Dahoas/synthetic-instruct-gptj-pairwise",
                   "yitingxie/rlhf-reward-datasets"],
        data_split="2,4,4", output_dir="output/reward",
        num_train_epochs=1,   # as InstructGPT: a reward model overfits at once, and that hurts step 3
        learning_rate=5e-5,   # 9.65e-6 for Llama-2
        weight_decay=0.1, num_warmup_steps=0,
        dropout=0.0,          # off: the two answers of a pair must be judged by the same network
        per_device_train_batch_size=4, per_device_eval_batch_size=4, max_seq_len=512, zero_stage=0),
    "toy": dict(              # on top of step 1's model; batch 32 on the demo's two ranks; a second epoch still helps: 0.79 -> 0.80, three seeds
        model_name_or_path="output/sft", data_path=[str(common.HERE / "toy/data")], data_split="4,5,1",
        output_dir="output/reward", num_train_epochs=2, learning_rate=2e-3, weight_decay=0.1, num_warmup_steps=10,
        dropout=0.0, center_coef=0.01, per_device_train_batch_size=16, per_device_eval_batch_size=140, max_seq_len=64,
        zero_stage=2, dtype="fp32", group_by_length=0, log_steps=10),
}
COLUMNS = ["step", "epoch", "loss", "accuracy", "chosen_score", "rejected_score", "eval_loss", "eval_accuracy", "grad_norm"]

def get_args(argv=None):
    parser = arguments.new_parser(__doc__)
    arguments.add_common_arguments(parser)
    arg = arguments.flags(parser, "flags of this step alone")
    arg("value_head_prefix", default="score", help="name of the head in the model; stock transformers loads `score`")
    arg("center_coef", type=float, default=0.0, help="pulls scores towards 0, by this times (chosen + rejected)^2. 0.01 [Eisenstein 2023]")
    arg("share_prompt", type=int, default=1, help="1: compute the prompt of a pair once, if the architecture permits; 0: a row for each answer")
    return arguments.parse(parser, PRESETS, argv)

# ---- Data and loss --------------------------------------------------------------------------------------------------
PROMPT, CHOSEN, REJECTED = 1, 2, 3  # what a token belongs to; 0 is padding

def collate(rows, pad_id, share_prompt=True):
    """B rows of (prompt_ids, [chosen, rejected]) -> ids, mask, parts: (B, T), or ids, mask: (2B, T) without shared prompts; real: (B,)."""
    if share_prompt:  # a row for each pair
        pieces = [[r["prompt_ids"], *r["answers"]] for r in rows]
    else:             # all chosen, then all rejected
        pieces = [[r["prompt_ids"], r["answers"][i]] for i in (0, 1) for r in rows]
    ids, mask = common.pad([sum(row, []) for row in pieces], pad_id)
    real = torch.tensor([float(r["real"]) for r in rows])
    batch = {"ids": ids, "mask": mask, "real": real, "tokens": mask.sum(-1) @ real.long().repeat(len(pieces) // len(rows))}
    if share_prompt:
        parts = [[PROMPT] * len(x) + [CHOSEN] * len(y) + [REJECTED] * len(z) for x, y, z in pieces]
        batch["parts"], _ = common.pad(parts, 0)
    return batch

def can_share_prompt(model, length):
    """-> whether the model takes a mask and positions as they are: its attention looks back over `length` tokens, and at nothing else."""
    config, takes = model.config.get_text_config(), inspect.signature(model.model.base_model.forward).parameters
    has = lambda name, default=None: getattr(config, name, default)
    windows = [has(name) or length for name in ("sliding_window", "attention_chunk_size")]
    return ("position_ids" in takes and has("_attn_implementation") == "sdpa" and min(windows) >= length and not model.model._is_stateful
            and not has("alibi") and has("is_causal", True) and not has("use_bidirectional_attention")
            and set(has("layer_types") or []) <= {"full_attention", "sliding_attention", "chunked_attention"})

def who_sees_whom(parts):
    """parts: (B, T) -> allowed: (B, 1, T, T), whether token q (row) attends to token k (column); positions: (B, T)."""
    at = torch.arange(parts.shape[1], device=parts.device)
    chosen, rejected = parts == CHOSEN, parts == REJECTED
    allowed = (at[:, None] >= at) & (parts > 0)[:, None] & ~(rejected[:, :, None] & chosen[:, None])  # (B, T, T)
    allowed |= at[:, None] == at  # padding sees itself: a softmax over nothing would be NaN
    positions = (parts > 0).cumsum(-1) - 1 - rejected * chosen.sum(-1, keepdim=True)  # both answers go on from the prompt
    return allowed[:, None], positions.clamp(min=0)

def score_pairs(model, batch):
    """-> scores of the chosen and of the rejected answers, each (B,), fp32, read at each answer's last token."""
    if "parts" not in batch:
        return model(batch["ids"], batch["mask"])[:, -1].chunk(2)  # (2B, T) -> (B,), (B,)
    parts = batch["parts"]
    values = model(batch["ids"], *who_sees_whom(parts))  # (B, T)
    end_of_chosen = parts.shape[1] - 1 - (parts == REJECTED).sum(-1, keepdim=True)  # (B, 1)
    return values.gather(1, end_of_chosen)[:, 0], values[:, -1]

def pair_loss_sum(chosen, rejected, real, center_coef=0.0):
    """Bradley-Terry loss, summed over the real pairs: log 2 each where the scores are equal.  chosen, rejected, real: (B,)

        -log sigmoid(r_chosen - r_rejected)                         [Ouyang et al. 2022] eq. 1
        + center_coef * (r_chosen + r_rejected)^2                   [Eisenstein et al. 2023] eq. 2

    The first term sees only differences, so a model is free to drift by a constant; the second holds it near zero.
    """
    loss = -F.logsigmoid(chosen - rejected) + center_coef * (chosen + rejected) ** 2  # (B,)
    return (loss * real).sum()

def correct_sum(chosen, rejected, real):
    """Pairs in the right order, a tie counting one half: a constant scorer gets 0.5, not 0.  (B,), (B,), (B,) -> ()"""
    return (((chosen > rejected) + 0.5 * (chosen == rejected)) * real).sum()

def wilson_interval(share, count, z=1.96):
    """-> [low, high]: 95 % confidence interval of a share seen in `count` trials.  Wilson 1927.

    >>> [round(x, 3) for x in wilson_interval(0.75, 100)]
    [0.657, 0.825]
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return [middle - half, middle + half]

@torch.no_grad()
def evaluate(args, engine, held_out, collate_rows):
    """-> loss, accuracy with its interval, mean scores and margin on the held-out pairs, over all ranks."""
    engine.eval()
    sums = torch.zeros(7, dtype=torch.float64)
    for batch in common.eval_loader(args, held_out, collate_rows):
        chosen, rejected = score_pairs(engine, batch)
        real = batch["real"]
        sums += torch.stack([real.sum(), pair_loss_sum(chosen, rejected, real), correct_sum(chosen, rejected, real),
                             (chosen * real).sum(), (rejected * real).sum(), (chosen ** 2 * real).sum(), (rejected ** 2 * real).sum()]).cpu()
    engine.train()
    count, loss, correct, chosen, rejected, chosen2, rejected2 = common.all_sum(*sums).tolist()
    mean = (chosen + rejected) / (2 * count)
    std = max(0.0, (chosen2 + rejected2) / (2 * count) - mean ** 2) ** 0.5
    common.inner(engine).config.score_statistics = [mean, std]  # saved in config.json, for ppo.py --normalize_reward
    return {"eval_loss": loss / count, "eval_accuracy": correct / count, "eval_accuracy_ci": wilson_interval(correct / count, count),
            "eval_chosen_score": chosen / count, "eval_rejected_score": rejected / count, "eval_margin": (chosen - rejected) / count,
            "eval_score_mean": mean, "eval_score_std": std}

def models_of(args):
    """For --estimate: the model, what it works on (two answers a pair), and that it trains."""
    return [dict(path=args.model_name_or_path, stage=args.zero_stage, trains=True, dropout=args.dropout, lora_dim=args.lora_dim, head=True,
                 rows=2 * args.per_device_train_batch_size, tokens=args.max_seq_len)]

# ---- The step, top to bottom ----------------------------------------------------------------------------------------
def main():
    args = get_args()
    if args.estimate is not None:
        estimate.estimate(args, models_of)
    common.start(args)

    # 1 data ----------------------------------------------------------------------------------------------------------
    tokenizer = common.load_tokenizer(args.model_name_or_path, args.max_seq_len)
    train, held_out = common.load_rows(args, tokenizer, step=2, limit=args.max_seq_len)
    batch_size, micro_steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = common.count_steps(args, train, batch_size, micro_steps)

    # 2 model ---------------------------------------------------------------------------------------------------------
    model = common.load_model(args.model_name_or_path, args, args.zero_stage, args.dropout, tokenizer, args.value_head_prefix, args.lora_dim)
    share_prompt = bool(args.share_prompt) and can_share_prompt(model, args.max_seq_len)
    if args.share_prompt and not share_prompt:
        common.say(f"--share_prompt: a {model.config.model_type} model does not permit it; each answer has a row of its own")

    def collate_rows(rows):
        return collate(rows, tokenizer.pad_token_id, share_prompt)

    engine = common.train_engine(model, args, args.zero_stage, batch_size, micro_steps, steps, args.learning_rate, args.weight_decay)
    common.begin(args, "step 2: reward model", args.model_name_or_path, engine, train, held_out, batch_size, micro_steps, steps)

    # 3 train ---------------------------------------------------------------------------------------------------------
    if not args.resume:
        common.log(args, {"step": 0, "epoch": 0.0, **evaluate(args, engine, held_out, collate_rows)}, COLUMNS)
    for step, epoch, evaluate_now, micro_batches in checkpoint.training_steps(
            args, {"model": engine}, {}, train, batch_size, micro_steps, steps, collate_rows):
        started = time.time()
        pairs, tokens = common.all_sum(sum(b["real"].sum() for b in micro_batches), sum(b["tokens"] for b in micro_batches)).tolist()
        sums = torch.zeros(4, device=common.device())
        for batch in map(common.to_device, micro_batches):
            chosen, rejected = score_pairs(engine, batch)  # (B,), (B,)
            real = batch["real"]
            loss_sum = pair_loss_sum(chosen, rejected, real, args.center_coef)  # ()
            engine.backward(loss_sum * common.loss_scale(pairs, micro_steps))
            engine.step()  # moves the weights at the step's last micro-batch only
            sums += torch.stack([loss_sum, correct_sum(chosen, rejected, real), (chosen * real).sum(), (rejected * real).sum()]).detach()
        loss, accuracy, chosen_score, rejected_score = (common.all_sum(*sums) / pairs).tolist()
        flops = common.train_flops(engine, tokens, tokens / (pairs if share_prompt else 2 * pairs), args.gradient_checkpointing)
        record = {"step": step, "epoch": epoch, "loss": loss, "accuracy": accuracy, "chosen_score": chosen_score,
                  "rejected_score": rejected_score, **common.speed(args, engine, tokens, flops, started)}
        common.check_finite(args, record, common.texts(tokenizer, micro_batches))
        if evaluate_now:
            record.update(evaluate(args, engine, held_out, collate_rows))
        if evaluate_now or step % args.log_steps == 0:
            common.log(args, record, COLUMNS, engine)
        if evaluate_now:
            common.draw_curves(args)

    # 4 save ----------------------------------------------------------------------------------------------------------
    common.save_model(engine, tokenizer, args.output_dir)
    common.finish(args)

if __name__ == "__main__":
    main()
