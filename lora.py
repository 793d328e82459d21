"""LoRA: `--lora_dim`. Frozen weights, and beside each matrix a product of two thin ones that trains.  [Hu et al. 2021]

Not needed to understand the three steps. peft puts the adapters in, and its format is what is saved; what is ours is that they
are added to weights that ZeRO-3 has sharded, and that the next step takes them as it takes a plain model.
"""
import json
from pathlib import Path

import torch

import common

def add_adapters(model, args, path, dim, value_head=None):
    """Freeze `model` and put an adapter beside each target: W x becomes W x + B A x * alpha / dim.  [Hu et al. 2021] eq. 3

    B is 0 at first, so nothing changes until it is trained. The value head trains in full: it is new, and a single row.
    """
    import peft  # here, not above: it is slow to import, and only LoRA needs it
    base, head = str(Path(path).resolve()) if Path(path).is_dir() else path, [value_head] if value_head else None
    config = peft.LoraConfig(r=dim, lora_alpha=args.lora_alpha, base_model_name_or_path=base, exclude_modules=head,
                             target_modules="all-linear" if args.lora_targets == ["all-linear"] else args.lora_targets)
    torch.manual_seed(args.seed)
    try:
        peft.inject_adapter_in_model(config, model)
        if any("lora_embedding" in name for name, _ in model.named_parameters()):
            raise ValueError("embeddings take no adapters here.")
    except ValueError as error:
        common.fail(f"--lora_targets {' '.join(args.lora_targets)}: {error}")
    config.task_type, config.modules_to_save = "SEQ_CLS" if head else "CAUSAL_LM", head  # for stock peft, to load what is saved
    model.merge_lora = args.merge_lora
    if value_head:
        getattr(model, value_head).requires_grad_(True)

def chain(path):
    """-> [path], and where it holds adapters what they sit on, and so on: the last one holds weights."""
    folders = [path]
    while (config := Path(folders[-1]) / "adapter_config.json").is_file():
        folders.append(json.loads(config.read_text())["base_model_name_or_path"])
        if folders[-1] in folders[:-1]:
            common.fail(f"{path}: its adapters sit on each other ({' on '.join(folders)}), and on no weights.")
    return folders

def merge_adapters(model, folder):
    """Add the adapters in `folder` (peft's format) to the weights of `model`, and take over the head saved with them."""
    import peft
    config = peft.PeftConfig.from_pretrained(folder)
    config.task_type = None  # a causal LM's adapters are welcome in a value model
    wrapped = peft.PeftModel.from_pretrained(model, folder, config=config)
    for layer in wrapped.modules():
        if hasattr(layer, "lora_A"):
            with common.all_gathered(list(layer.parameters()), modifier_rank=0):
                layer.merge()
    wrapped.unload().requires_grad_(True)

def merged(model, state):
    """-> `state`, each adapter in it added to the weight beside which it sat."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = (state.pop(f"{name}.lora_{x}.default.weight").float() for x in "AB")
            delta = layer.scaling["default"] * (b @ a).T if layer.fan_in_fan_out else layer.scaling["default"] * (b @ a)
            state.update({key.replace(".base_layer.", "."): state.pop(key) for key in list(state) if key.startswith(f"{name}.base_layer.")})
            state[f"{name}.weight"] = (state[f"{name}.weight"].float() + delta).to(state[f"{name}.weight"].dtype)
    return state
