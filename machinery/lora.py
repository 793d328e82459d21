"""LoRA (--lora_dim): frozen weights, and beside each matrix a product of two thin ones that trains.

[Hu et al. 2021]. peft puts the adapters in, and its format is what is saved. (The calls that
transformers' models have for it, such as disable_adapters, refuse versions of peft that
requirements.txt allows: transformers 5.24 takes none below 0.22.) [Schulman 2025] is "LoRA Without
Regret", thinkingmachines.ai/blog/lora.
"""

import re
from pathlib import Path

import torch
import torch.nn as nn

from machinery import folders, ranks, zero3


def add_adapters(model, args, path, value_head=None):
    """With --lora_dim freezes `model` and puts an adapter beside each target.

    [Hu et al. 2021] eq. 3, with dim = --lora_dim:

        W x becomes W x + B A x * alpha / dim, with B = 0 at first

    The value head, named `value_head`, trains in full: it may be new, and is a single row.
    path: where the frozen weights came from. Says which matrices have no adapter: peft gives the
    experts of some models none.
    """
    if not args.lora_dim:
        return
    import peft  # here, not above: it is slow to import, and only LoRA needs it

    head = [value_head] if value_head else None
    left_out = [*unadaptable(model), *(head or [])]
    config = peft.LoraConfig(
        r=args.lora_dim,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear",
        exclude_modules=left_out or None,
        base_model_name_or_path=str(Path(path).resolve()) if Path(path).is_dir() else path,
    )
    torch.manual_seed(args.seed)
    peft.inject_adapter_in_model(config, model)
    # for stock peft, to load what is saved
    config.task_type, config.modules_to_save = "SEQ_CLS" if head else "CAUSAL_LM", head
    if value_head:
        getattr(model, value_head).requires_grad_(True)
    say_what_has_none(model)


def unadaptable(model):
    """Returns the names of linear layers that cannot have an adapter.

    They are routers, which give several tensors; DeepSeek-V4's, of which each group of rows is a
    matrix of its own; and what a Mamba mixer has beside in_proj: its kernels take those weights,
    and leave out what an adapter adds.
    """
    others, found = ("Router", "GroupedLinear"), []
    for name, layer in model.named_modules():
        mamba = hasattr(layer, "conv1d") and hasattr(layer, "D")
        for own, part in layer.named_children():
            other = type(part).__name__.endswith(others) or mamba and own != "in_proj"
            if other and isinstance(part, nn.Linear):
                found.append(f"{name}.{own}")
    return found


def say_what_has_none(model):
    """Says which frozen matrices have no adapter, if any do beside embeddings and the output."""
    layers, output = adapted_layers(model).values(), model.get_output_embeddings()
    adapted = [getattr(layer.get_base_layer(), name_of_weight(layer)) for layer in layers]
    ends = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) or m is output]
    known, left_out, names = {id(weight) for weight in adapted + ends}, 0, set()
    for name, weight in model.named_parameters():
        matrix = len(getattr(weight, "ds_shape", weight.shape)) > 1
        if matrix and not weight.requires_grad and id(weight) not in known:
            left_out += zero3.size_of(weight)
            names.add(re.sub(r".*\.\d+\.|base_layer\.", "", name))
    if names:
        count = sum(map(zero3.size_of, adapted))
        weights = f"{count:,} of {count + left_out:,} weights"
        ranks.say(f"LoRA adapts {weights}; without an adapter: {', '.join(sorted(names))}")


def name_of_weight(layer):
    """Returns what the weight beside an adapter is called: of experts it is a parameter's name."""
    return getattr(layer, "parameter_name", "weight")


def adapted_layers(model):
    """Returns the layers of a model, or of an engine, that have an adapter: {name: layer}."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


class WithoutAdapters:
    """An engine whose forwards leave its adapters out; in all else it is the engine."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __call__(self, *inputs, **options):
        layers = adapted_layers(self.engine).values()
        for layer in layers:
            layer.enable_adapters(False)
        result = self.engine(*inputs, **options)
        for layer in layers:
            layer.enable_adapters(True)
        return result


def merge_adapters(model, adapters):
    """Adds adapters to the weights of `model`, those of the innermost folder first.

    adapters: folders in peft's format, as in Source. They are LoRA's, or of another kind that peft
    can merge, and few outputs of the merged model are compared with the adapted one's. A value head
    that comes with them replaces the model's.
    """
    for folder in reversed(adapters):
        import peft  # as above

        plain = few_outputs(model)
        ends = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
        # An adapter of such a matrix comes with the matrix itself.
        gathered = zero3.gathered_parameters([*{end.weight for end in ends}], modifier_rank=0)
        words = f"the adapters in {folder} do not load (at --zero_stage 3 some kinds do not)"
        with folders.refusing("unreadable-weights", words), gathered:
            config = peft.PeftConfig.from_pretrained(folder)
            config.task_type = None  # a causal LM's adapters are welcome in a value model
            # by itself peft reads them to the first GPU, on every rank
            outer = peft.PeftModel.from_pretrained(model, folder, config=config, torch_device="cpu")
            there = set(peft.load_peft_weights(folder, device="cpu"))
        wanted = set(peft.get_peft_model_state_dict(outer, save_embedding_layers=False))
        unused = there - wanted - outer.state_dict().keys()
        folders.refuse_misfits(folder, wanted - there, unused)
        kind = config.peft_type.value
        words = f"the {kind} adapters in {folder} do not merge (take LoRA's, or a merged model)"
        with folders.refusing("adapter-kind", words):
            untie(model)
            adapted = few_outputs(model)
            for layer in tuned_layers(model):
                with zero3.gathered_parameters([*layer.parameters()], modifier_rank=0):
                    layer.merge()
            outer.unload().requires_grad_(True)
            if adapted is None:
                ranks.say(f"{folder}: too large to compare merged and adapted outputs")
            elif is_far(few_outputs(model), adapted, plain):
                raise ValueError("merged, the model has other outputs")


def tuned_layers(model):
    """Returns the layers of a model that have an adapter, of any kind that peft knows."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # as above

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def untie(model):
    """Gives the output matrix weights of its own if it, or the embedding, has an adapter.

    Else what is merged into one of the two would change the other.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tuned = {embedding, output}.intersection(tuned_layers(model))
    if output is not None and tuned and output.weight is embedding.weight:
        with zero3.gathered_parameters([embedding.weight]):
            own = torch.nn.Parameter(embedding.weight.clone())
        getattr(output, "base_layer", output).weight = own


@torch.no_grad()
def few_outputs(model):
    """Returns the logits of a few tokens; of a value model what its head sees.

    None where ZeRO-3's weights do not fit on each rank at once.
    """
    with zero3.gather_for_generation(model) as (_, synced):
        if synced:
            return None
        # Not the first ids, special tokens: there SmolLM2's outputs in bf16 change by a quarter
        apart = model.config.get_text_config().vocab_size // 17
        ids = torch.arange(1, 17, device=model.device)[None] * apart  # (1, 16)
        if model.can_generate():
            return model(ids).logits
        return model.base_model(ids)[0]


def is_far(merged, adapted, plain):
    """Returns whether outputs of the merged model are not the adapted ones, but for rounding.

    The measure is what the adapters change: plain are the outputs without them. What changes less
    than rounding may change cannot be told from it: 9 % of the outputs in bf16, 0.03 % in fp32.
    """
    difference, effect = (adapted - merged).abs().mean(), (adapted - plain).abs().mean()
    rounding = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().mean()
    return difference > max(effect / 2, rounding)


def merge_state(model, state):
    """Adds each adapter to the weight that it sat beside, in `state`, {name: whole tensor}.

    Of e experts peft stacks all A, (e * r, in), and has in B (out, r * e), the expert changing
    fastest.
    """
    layers = adapted_layers(model)
    factors = {
        name: [state.pop(f"{name}.lora_{x}.default.weight").float() for x in "AB"]
        for name in layers
    }
    # experts' adapters lie inside one another
    state = {name.replace(".base_layer", ""): tensor for name, tensor in state.items()}
    for name, layer in layers.items():
        a, b = factors[name]
        experts = getattr(layer, "num_experts", 1)
        a = a.view(experts, -1, a.shape[1])  # (e, r, in)
        b = b.view(b.shape[0], -1, experts)  # (out, r, e)
        delta = torch.stack([b[:, :, e] @ a[e] for e in range(experts)])  # (e, out, in)
        if layer.fan_in_fan_out or getattr(layer.get_base_layer(), "is_transposed", False):
            delta = delta.mT
        own = f"{name.replace('.base_layer', '')}.{name_of_weight(layer)}"
        weight = state[own]
        whole = weight.float() + layer.scaling["default"] * delta.view_as(weight)
        state[own] = whole.to(weight.dtype)
    return state
