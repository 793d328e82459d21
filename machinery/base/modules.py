"""The model inside an engine, and how many weights it has."""

from machinery.base import ranks


def unwrap_model(engine):
    """Returns the transformers model inside a DeepSpeed engine, a ValueModel, or both."""
    model = getattr(engine, "module", engine)
    return model.model if hasattr(model, "value_head_name") else model


def count_parameters(model, training=False):
    """Returns how many weights the model has (or trains), on however many ranks they are spread."""
    return sum(size_of(p) for p in model.parameters() if p.requires_grad or not training)


def size_of(parameter):
    """Returns how many weights a parameter has, on however many ranks they are spread."""
    split = hasattr(parameter, "gather_params")  # by tensor parallelism
    size = getattr(parameter, "ds_numel", parameter.numel())
    return size * (ranks.tensor_parallel_size() if split else 1)
