"""Tensor parallelism (--tensor_parallel_size): which models can be split, and joining the parts."""

from deepspeed.module_inject.layers import LinearAllreduce

from machinery.base import ranks
from machinery.base.refused import Refused


def check_model(path, config, args):
    """Ends with a clear error if the layers of the model in `path` cannot be split as asked."""
    size, text = args.tensor_parallel_size, config.get_text_config()
    names = "num_attention_heads", "num_key_value_heads"
    heads = [getattr(text, name, None) or size for name in names]
    if size > 1 and (not text.base_model_tp_plan or any(count % size for count in heads)):
        rule = f"must divide {heads}, the attention and key-value heads of {path}"
        known = f"and transformers must know how to split a {config.model_type} model"
        raise Refused("cannot-split-layers", f"--tensor_parallel_size {size} {rule},\n  {known}.")


def options(args):
    """Returns what DeepSpeed's config says of tensor parallelism: nothing where there is none.

    It can split the output matrix, too. Ours stays whole: every rank sees all logits.
    """
    options = {"autotp_size": args.tensor_parallel_size, "vocab_parallel_lm_head": False}
    return {"tensor_parallel": options} if args.tensor_parallel_size > 1 else {}


def whole_layers(config):
    """Returns DeepSpeed's config of an engine without the split, which comes after the loading."""
    return {name: value for name, value in config.items() if name != "tensor_parallel"}


def loading_device(args):
    """Returns where weights are read to: this rank's device, or the CPU if they are split next."""
    return "cpu" if args.tensor_parallel_size > 1 else ranks.device()


def join_shards(parameter, tensor):
    """Returns the whole of a weight, or of its EMA, of which this rank holds `tensor`.

    The ranks that share the layer put it together; all of them call this.
    """
    gather = getattr(parameter, "gather_params", None)  # DeepSpeed's, in place, on layers it split
    if not gather:
        return tensor
    box = [tensor.clone()]
    if tensor.dim() > 1 or not isinstance(gather.__self__, LinearAllreduce):  # whose bias is whole
        gather(box)
    return box[0]
