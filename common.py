"""What all three steps do in the same way.

    1  layout       which tokens a forward takes, and where in its output a token is predicted
    2  log-probs    how likely each token was
    3  models       load, shard, and give a language model a value head
    4  DeepSpeed    one function that writes every engine's config; engines; exact means

Losses and training loops are in each step's own file.
Shapes: N rows of T tokens hold B responses, of which at most R tokens each are scored (in step 2, B
pairs); M tokens are looked at (of all responses together); V vocabulary; H hidden size.
"""

import dataclasses
import functools

import deepspeed
import torch
import torch.nn as nn
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations import HfDeepSpeedConfig

from machinery import adam, config_file, flags, folders, lora, output_head, patches, ranks, zero3
from machinery.zero3 import unwrap_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CPU_CHUNK, GPU_CHUNK = 2**20, 2**27  # bytes of fp32 logits at a time; a CPU's cache is small


# ---- 1  Layout ----
@dataclasses.dataclass
class Layout:
    """What one forward takes, and where in its output each response token is predicted.

    Every micro-batch of the three steps is a Layout. Below, a row of T = 7 tokens that holds one
    prompt and one response ('-' is padding):

        flat place   0    1    2    3    4    5    6
        token        -    x0   x1   y0   y1   eos  -
        mask         0    1    1    1    1    1    0
        positions    0    0    1    2    3    4    4
        logit_places           2    3    4    5          of y0, y1, eos, and of padding

    The logits at x1 predict y0, those at y0 predict y1, and so on: a token stands one place after
    the logits that predict it. R = 4 is the longest response of the micro-batch, in another row.
    Masks of the script's own say which of the (B, R) places count. The next row begins at flat
    place T. Rows in which several responses share a prompt differ only in what these fields hold:
    in step 3, a copy of the prompt's last token stands before each of the responses, and its logits
    predict the first token (machinery/shared_prompts.py).

    A script's MicroBatch adds what its loss needs, and `counts()`: its tokens and its rows, without
    fillers. The run's speed is computed from them.
    """

    ids: Tensor  # (N, T)
    mask: Tensor  # (N, T) 1 on real tokens; or (N, 1, T, T) 1 where token i may attend to token j
    positions: Tensor  # (N, T) position ids
    real_tokens: Tensor  # (N,) tokens of a row, without padding; (B,) of a response, where packed
    # (B, R) flat place, in N x T, of the logits (or value) before each token. They must increase
    # over the tokens whose log-probs are taken, because logits come in flat order.
    logit_places: Tensor

    def to(self, device):
        """Returns the same with all tensors on `device`."""
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {k: x.to(device, non_blocking=True) for k, x in held.items() if torch.is_tensor(x)}
        return dataclasses.replace(self, **moved)


def pad(sequences, pad_value, side="left", dtype=torch.long):
    """Lists -> values, mask: (B, T). Masks come from lengths, never from `ids != pad`."""
    rows = [torch.tensor(s, dtype=dtype) for s in sequences]
    ones = [torch.ones_like(row, dtype=torch.long) for row in rows]
    stacked = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    return stacked(rows, padding_value=pad_value), stacked(ones)


def position_ids(mask):
    """Position ids of padded rows.  (N, T) -> (N, T)

        mask        0 0 1 1 1        a token's position is the number of REAL tokens before it
        positions   0 0 0 1 2

    Without them a model counts from the left edge, and a row that is padded on the left gets other
    positions, so other log-probs, than the same row alone. A padded slot gets any number: no real
    token sees it.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def last_columns(ids, mask, count):
    """The Layout of rows, a response in each, whose last `count` columns hold what is scored.

    ids, mask: (N, T). A token is predicted one column earlier, so logit_places is (N, count). Other
    masks say which of these places count.
    """
    N, T = ids.shape
    row_starts = T * torch.arange(N)[:, None]  # (N, 1) flat place of each row's first column
    return Layout(
        ids=ids,
        mask=mask,
        positions=position_ids(mask),
        real_tokens=mask.sum(-1),
        logit_places=row_starts + torch.arange(T - count - 1, T - 1),  # (N, count)
    )


# ---- 2  Log-probs ----


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target], a chunk of tokens at a time.

    It works in chunks, so neither pass needs an fp32 copy of all logits.
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature=1.0):
        """logits: (M, V), targets: (M,) -> (M,)"""
        parts = [scaled_logits(logits[part], temperature).logsumexp(-1) for part in chunks(logits)]
        logsumexp = torch.cat(parts)
        ctx.save_for_backward(logits, targets, logsumexp)
        ctx.temperature = temperature
        chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return scaled_logits(chosen, temperature) - logsumexp

    @staticmethod
    def backward(ctx, grad):
        """d logp / d logits = (onehot(target) - softmax) / temperature"""
        logits, targets, logsumexp = ctx.saved_tensors
        out = torch.empty_like(logits)  # (M, V)
        grad = (grad / ctx.temperature).unsqueeze(-1)  # (M, 1)
        for part in chunks(logits):
            scaled = scaled_logits(logits[part], ctx.temperature)
            softmax = (scaled - logsumexp[part, None]).exp_()  # (chunk, V)
            minus = softmax.mul_(-grad[part])  # and + grad at the target, next
            out[part] = minus.scatter_add_(-1, targets[part, None], grad[part])
        return out, None, None


def chunks(logits):
    """Slices of logits (M, V): the tokens that are in fp32 at a time."""
    size = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    step = max(1, size // (4 * logits.shape[-1]))
    # One slice, an empty one, where there are no tokens
    return [slice(start, start + step) for start in range(0, max(1, len(logits)), step)]


def scaled_logits(logits, temperature):
    """logits / temperature, in fp32: rounded to bf16, sampling and scoring would disagree."""
    return logits.float() if temperature == 1 else logits.float() / temperature


def entropy(logits, temperature=1.0):
    """Entropy of softmax(logits / temperature), in nats.  (M, V) -> (M,)"""
    out = []
    for part in chunks(logits):
        scaled = scaled_logits(logits[part], temperature)
        categorical = torch.distributions.Categorical(logits=scaled, validate_args=False)
        out.append(categorical.entropy())
    return torch.cat(out)


def response_logits(model, layout, wanted):
    """The logits (M, V) that predict the wanted tokens, response by response.

    wanted: bool (B, R). Most positions of a row are prompt or padding, and the output matrix is the
    largest product of a small model, so logits are made at the wanted places alone where the model
    can: since 5.23 transformers' own models take a mask (N, T) of places in `logits_to_keep`, and
    return the logits in flat order, which is that of `logit_places`. Others make logits for the
    last columns. V is the size of the output matrix, which may exceed len(tokenizer).
    """
    T = layout.ids.shape[1]
    places = layout.logit_places[wanted]  # (M,) in flat order

    def forward(logits_to_keep):
        options = {"position_ids": layout.positions, "logits_to_keep": logits_to_keep}
        mask = folders.mask_for(model, layout.mask)
        options = folders.accepted(model, **options)
        return model(layout.ids, attention_mask=mask, use_cache=False, **options).logits

    if folders.picks_positions(model):
        marked = torch.zeros_like(layout.ids, dtype=torch.bool).flatten()  # (N * T,)
        marked = marked.index_fill(0, places, True).view_as(layout.ids)  # (N, T)
        return forward(marked)  # (M, V)

    columns = int(T - (places % T).min()) if len(places) else 1  # so many of the last ones
    logits = forward(columns)
    left_out = T - logits.shape[1]  # columns without logits; 0 if the model knows no such option
    return logits[places // T, places % T - left_out]  # (N, T - left_out, V) -> (M, V)


def token_logprobs(logits, layout, wanted, temperature=1.0):
    """Log-probs (B, R), fp32, of the wanted tokens, from response_logits; 0 elsewhere."""
    tokens = layout.ids.flatten()[layout.logit_places[wanted] + 1]  # (M,)
    return scatter_to(wanted, TokenLogprobs.apply(logits, tokens, temperature))


def response_logprobs(model, layout, mask, temperature=1.0):
    """Log-probs (B, R), fp32, of the tokens where `mask` (B, R) is not 0, and 0 elsewhere."""

    def numbers_of(logits, wanted):  # (m, V), bool (B, R)
        return token_logprobs(logits, layout, wanted, temperature)

    return numbers_of_tokens(model, layout, mask != 0, numbers_of)


def numbers_of_tokens(model, layout, wanted, numbers_of):
    """numbers_of(logits, wanted) of response_logits; where these are many, a part at a time.

    numbers_of: gives each token where `wanted`, bool (B, R), is True its own numbers, and 0
    elsewhere (output_head.in_parts says more).
    """
    if not output_head.too_many(model, wanted):
        return numbers_of(response_logits(model, layout, wanted), wanted)
    with output_head.in_parts(model, wanted, numbers_of):
        return response_logits(model, layout, wanted)  # these are not logits, but their numbers


def scatter_to(wanted, values):
    """Puts values (M,) where `wanted` (B, R) is True, and 0 elsewhere: (B, R)."""
    return values.new_zeros(wanted.shape).masked_scatter(wanted, values)


# ---- 3  Models ----
class ValueModel(nn.Module):
    """A backbone and a linear head with one number per token: the reward model and the critic.

    It wraps transformers' sequence-classification model, so that stock transformers loads what is
    saved. Only the forward differs: the head is read at every token.
    """

    def __init__(self, model, value_head_name):
        super().__init__()
        self.model = model
        self.value_head_name = value_head_name
        self.config = model.config

    def forward(self, ids, mask, positions):
        """Values (N, T), fp32, one for each token. ids, mask, positions: see Layout."""
        backbone = self.model.base_model
        mask = folders.mask_for(backbone, mask)
        options = folders.accepted(backbone, position_ids=positions)
        hidden = backbone(ids, attention_mask=mask, use_cache=False, **options)[0]  # (N, T, H)
        values = getattr(self.model, self.value_head_name)(hidden)  # (N, T, 1)
        return values.squeeze(-1).float()


class ValueHead(nn.Linear):
    """A linear layer that multiplies in fp32: rounded to bf16, many scores would be equal.

    It takes over the parameters of the layer that it replaces, also where ZeRO-3 has partitioned
    them.
    """

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden):
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)


def values_before_tokens(value_model, layout):
    """Values (B, R) one place before each response token: the reward still to come from there."""
    values = value_model(layout.ids, layout.mask, layout.positions)  # (N, T)
    return values.flatten(0, 1)[layout.logit_places]


def values_at_tokens(value_model, layout):
    """Values (B, R) at the response tokens themselves. At the last one it is the score.

    `logit_places` is one place before each token, so that 1 is added.
    """
    values = value_model(layout.ids, layout.mask, layout.positions)  # (N, T)
    return values.flatten(0, 1)[layout.logit_places + 1]


def load_model(args, tokenizer=None, value_head=None):
    """Loads a causal LM, or with `value_head` (the head's attribute name) a ValueModel.

    args: the flags of this model: model_name_or_path, zero_stage, dropout, lora_dim, dtype, ...
    tokenizer: needed with value_head; its padding id goes into the model's config.
    The model is on this rank's device, or sharded under ZeRO-3: while an HfDeepSpeedConfig lives,
    transformers partitions each weight as it reads it, so that no rank holds the whole model. A
    folder without weights gives a new, random model, which every rank builds whole on the CPU,
    from the same seed.
    """
    source = folders.resolve(args, tokenizer, value_head)  # config, weights, adapters
    kind = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
    options = {"dtype": DTYPES[args.dtype], "trust_remote_code": args.trust_remote_code}
    missing = source.missing_weights(kind, **options)  # at most a new head's
    partitioned = None
    torch.manual_seed(args.seed)
    if not source.has_weights:
        model = kind.from_config(source.config, **options)
    elif args.zero_stage == 3:
        whole = flags.with_flags(args, tensor_parallel_size=1)  # layers are split later
        partitioned = HfDeepSpeedConfig(ds_config(whole, 1))
        patches.compare_whole_weights()
        patches.quicken_linear()
        model = source.read(kind, **options)
        patches.forget_unused_names(model)
    else:
        model = source.read(kind, device_map=zero3.loading_device(args), **options)
    model.own_dropout = source.own_dropout  # for config.json: --dropout is of this run alone
    # transformers gives the embedding of the padding token no gradient. In many chat models that is
    # EOS, which must learn. Padding itself has no gradient anyway: masks leave it out.
    model.get_input_embeddings().padding_idx = None
    if value_head:
        if missing:
            init_value_head(model.score, args.seed)
        head = ValueHead(model.score) if type(model.score) is nn.Linear else model.score
        del model.score  # transformers' name for it
        setattr(model, source.head, head)
    lora.merge_adapters(model, source.adapters)
    del partitioned  # transformers has a weak reference only: it partitions nothing from here on
    lora.add_adapters(model, args, source.path, source.head)  # --lora_dim
    model.ends_with_head = not value_head and output_head.ends_with_head(model)
    # With adapters DeepSpeed 0.19.8 frees whole layers too early.
    if args.zero_stage == 3 and not args.deepcompile and not args.lora_dim:
        zero3.gather_layers_whole(model)
    return ValueModel(model, source.head) if value_head else model


def init_value_head(head, seed):
    """Draws a new head's weights: normal, mean 0, std 1 / (d + 1), d its input width.

    OpenRLHF takes the model's hidden size for d, which is the same for all but OPT-350M, whose head
    has 512 inputs and whose hidden size is 1,024. [Stiennon 2020] and OpenAI's code have the larger
    std 1/sqrt(d + 1); on the toy three seeds cannot tell the two apart (course/labs/head-init.md).

    Under ZeRO-3 the head is gathered, written on rank 0, and partitioned again from there. Only a
    head that no file holds is drawn.
    """
    gathered = deepspeed.zero.GatheredParameters([head.weight], modifier_rank=0)
    with gathered, torch.no_grad():
        if ranks.get_rank() == 0 or not hasattr(head.weight, "ds_id"):
            generator = torch.Generator().manual_seed(seed)  # draws on the CPU only
            drawn = torch.empty_like(head.weight, device="cpu")
            drawn.normal_(0, 1 / (head.in_features + 1), generator=generator)
            head.weight.copy_(drawn)


# ---- 4  DeepSpeed ----
# An engine wraps a model with its optimizer and its schedule. engine(...) is the forward.
# engine.backward(loss) adds gradients, and engine.step() moves the weights only at the last of
# gradient_accumulation_steps calls. ZeRO divides among the ranks what each would hold: stage 1 the
# optimizer states, 2 also the gradients, 3 also the weights. Stage 0 divides nothing.
# Call backward() once for each step(): after a second call, stages 1 and 2 in fp32 lose what came
# before (DeepSpeed 0.19.8). To train on two losses, add them up first.
def stage_of(args):
    """The ZeRO stage of an engine that trains: --zero_stage, but 1 in place of 0 unless in fp32.

    The maths is the same, but at 0 DeepSpeed 0.19 leaves fp16's loss scale out of backward(), and
    its steps in bf16 are not those of the other stages.
    """
    return args.zero_stage if args.dtype == "fp32" else max(args.zero_stage, 1)


def ds_config(args, batch_size, micro_steps=1, train=True):
    """The DeepSpeed config (dict) of one engine: ds_config.json, and over it what the flags say.

    batch_size: what one forward on one device holds: rows, pairs or responses. micro_steps:
    backwards of an optimizer step.
    train False: a frozen engine, which only shards and offloads weights.
    """
    config = config_file.of_engine(args)
    zero = config["zero_optimization"]
    zero["stage"] = stage_of(args) if train else args.zero_stage
    zero3.add_options(args, config, train)  # --offload, --adam_offload, --tensor_parallel_size
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    if args.dtype == "bf16":
        # With this, stage 1 adds each gradient to its fp32 sum as it comes. Otherwise all bf16
        # gradients stay beside the sums, and 0.18 reduces before the last micro-batch is in.
        config["bf16"]["immediate_grad_update"] = True
        # Gradients are summed in fp32: bf16 would drop the small ones. (fp16 sums in fp16, which is
        # DeepSpeed's default.) With a single micro-batch there is no sum, but DeepSpeed chooses its
        # bf16 optimizer at stage 1 by this setting. With --adam_offload the setting would only cost
        # a buffer on the device, at stages 1 and 2 (0.19.8).
        if train and (micro_steps > 1 or not args.adam_offload):
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if train:
        config["gradient_clipping"] = args.max_grad_norm
        if args.deepcompile:  # never for an engine that only does inference
            config["compile"] = {"deepcompile": True}
    config["train_micro_batch_size_per_gpu"] = batch_size
    config["gradient_accumulation_steps"] = micro_steps
    return config


def train_engine(model, args, batch_size, micro_steps, steps):
    """The engine that trains `model` for `steps` optimizer steps; step() moves the schedule, too.

    args: the flags of this model, as in load_model.
    """
    plain = unwrap_model(model)
    if args.gradient_checkpointing:
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = adam.build_optimizer(model, args)
    kind, warmup = args.lr_scheduler_type, args.num_warmup_steps
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=transformers.get_scheduler(kind, optimizer, warmup, steps),  # a LambdaLR
        config=ds_config(args, batch_size, micro_steps),
    )
    if args.deepcompile:
        engine.compile()
    if args.zero_stage == 0 and args.dtype == "fp32":
        patches.keep_grad_norm(engine, args.max_grad_norm)
    if ranks.data_parallel_size() == 1:
        patches.reduce_nothing(engine)
    engine.train()  # from_pretrained hands models over in eval mode
    return engine


def frozen_model(args, batch_size, tokenizer=None, value_head=None):
    """Loads a model for inference only: sharded under ZeRO-3, else whole on this rank's device."""
    args = flags.with_flags(args, dropout=None, lora_dim=0)
    model = load_model(args, tokenizer, value_head).requires_grad_(False)
    if args.zero_stage < 3:
        return model.to(ranks.device()).eval()
    config = ds_config(args, batch_size, train=False)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def reference_of(actor, args, batch_size):
    """The model that `actor` was when it was loaded with the flags `args`, frozen.

    With LoRA only adapters train, so it is the actor without its adapters.
    """
    if args.lora_dim:
        others = [n for n, p in actor.named_parameters() if p.requires_grad and "lora_" not in n]
        assert not others, f"these train, too, so the reference would move: {others}"
        return lora.WithoutAdapters(actor)
    return frozen_model(args, batch_size)


def mean_factor(engine, count):
    """The factor of a micro-batch's loss SUM with which the step follows (all sums) / count.

    count: what the optimizer step holds, over all ranks and micro-batches: tokens in step 1, pairs
    in step 2; in step 3 tokens for the critic, and for the actor what --loss_mean says.
    DeepSpeed divides each loss by the engine's accumulation steps, and averages gradients over the
    ranks: both are undone here, and nowhere else.
    """
    return ranks.data_parallel_size() * engine.gradient_accumulation_steps() / (count or 1)
