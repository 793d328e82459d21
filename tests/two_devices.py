"""A second device without a GPU: tensors that name another device, with numbers in CPU memory.

    with two_devices.machine() as count:
        model = two_devices.moved(model)
        ...                               # raises Mixed where operands lie on two devices
    count.reads, count.copies             # {place in our code: how often}

As on CUDA, the tensors of an operation must lie on one device; CPU tensors without a dimension are
allowed if it works element by element. The host waits where it reads a number from the device
(.item(), .tolist(), .cpu(), if x:) or needs one for a shape (nonzero, a mask as an index), and
where it copies something to the device without non_blocking.

`program` runs a whole script there: DeepSpeed's engines, which need real memory, are replaced by
one of ours with PyTorch's AdamW. What this cannot show: kernels, streams, graphs, memory, time.
"""

import contextlib
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = str(Path(__file__).resolve().parent.parent)
NAME = "pretended"  # PyTorch has one name to give to a device that it does not know
aten = torch.ops.aten
needed = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch knows no device that is written in Python",
)
# what the host reads; of the second line, the shape of what comes out depends on numbers
READS = """_local_scalar_dense equal is_nonzero repeat_interleave
           nonzero masked_select _unique2 unique_dim unique_consecutive""".split()
# what takes one number, without a dimension, from the CPU although it is not element by element
TAKES_A_NUMBER = "index_put index_put_ masked_fill masked_fill_ fill_".split()


def device():
    """Returns the second device. A CPU's build of PyTorch knows no cuda:0."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class Mixed(RuntimeError):
    """An operation was given tensors of two devices."""


class OnDevice(torch.Tensor):
    """A tensor on the second device. `held` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        options = dict(dtype=held.dtype, layout=held.layout, device=device())
        options.update(strides=held.stride(), storage_offset=held.storage_offset())
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **options)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return Machine.running[-1].run(operator, args, kwargs or {})

    def tolist(self):  # these two are no operators
        Machine.running[-1].read("tolist")
        return self.held.tolist()

    def numpy(self):
        raise TypeError("can't convert a tensor of another device to numpy")

    def __repr__(self):
        return f"OnDevice({self.held})"


class Machine(TorchDispatchMode):
    """Makes what is asked for on the device, and counts how often the host waits for it."""

    running = []

    def __init__(self):
        super().__init__()
        self.reads, self.copies, self.operators = Counter(), Counter(), 0

    def read(self, what):
        self.reads[f"{place()}: {what}"] += 1
        warnings.warn("the host waits for the device", stacklevel=2)  # as set_sync_debug_mode does

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return self.run(operator, args, kwargs or {})

    def run(self, operator, args, kwargs):
        self.operators += 1
        name = operator.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = [x for x in tensors if isinstance(x, OnDevice)]
        here = [x for x in tensors if not isinstance(x, OnDevice)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type != "cpu"
        to_cpu = there and target is not None and torch.device(target).type == "cpu"
        if there and here:
            self.refuse_mixed(operator, name, args, here)
        if to_cpu:
            self.read(".cpu()")
        elif to_device and here and not kwargs.get("non_blocking"):
            self.copies[f"{place()}: {name}"] += 1
        elif name == "copy_" and there and here:
            if isinstance(args[0], OnDevice):
                self.copies[f"{place()}: {name}"] += 1
            else:
                self.read("copy_")
        elif there and (name in READS or is_indexed_by_mask(name, args)):
            self.read(name)
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        known = {id(x.held): x for x in there}
        held = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
        out = operator(*held[0], **held[1])
        stays = to_cpu or (name == "copy_" and not isinstance(args[0], OnDevice))
        if stays or not (there or to_device):
            return out
        return tree_map(lambda x: known[id(x)] if id(x) in known else wrapped(x), out)

    def refuse_mixed(self, operator, name, args, here):
        """Raises Mixed unless CUDA would take these tensors of the CPU."""
        if name in ("copy_", "_to_copy"):
            return
        elementwise = torch.Tag.pointwise in operator.tags or name in TAKES_A_NUMBER
        if elementwise and all(x.dim() == 0 for x in here):
            return
        if name in ("index", "index_put", "index_put_") and isinstance(args[0], OnDevice):
            indices = {id(x) for x in args[1]}
            if all(id(x) in indices or x.dim() == 0 for x in here):  # they are copied
                self.copies[f"{place()}: {name}"] += len(here)
                return
        shapes = [tuple(x.shape) for x in here]
        raise Mixed(f"{operator}: operands {shapes} lie on the CPU, the others on {device()}")


def wrapped(x):
    return OnDevice(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice) else x


def is_indexed_by_mask(name, args):
    """Returns whether places are marked by True and False: they are looked for first."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    if name != "index" and args[2].numel() == 1:  # masked_fill
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def place(*passing):
    """Returns which line of ours is running: file:function. passing: files that it came through."""
    frame = sys._getframe()
    while frame := frame.f_back:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/.venv/" not in file and file not in (__file__, *passing):
            return f"{file[len(ROOT) + 1 :]}:{frame.f_code.co_name}"
    return "a library"


@contextlib.contextmanager
def machine():
    """The second device: inside, what is asked for on device() lies there. Gives its Machine."""
    from machinery import ranks

    lifts = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch, Machine() as count:
        Machine.running.append(count)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) comes by, too
        patch.setattr(ranks, "device", device)
        try:
            yield count
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            Machine.running.pop()


def moved(model):
    """Puts a model's weights and buffers on the device, in place. Returns it."""
    made = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and not isinstance(weight, OnDevice):
                if weight not in made:  # tied weights stay tied
                    data = OnDevice(weight.detach())
                    made[weight] = nn.Parameter(data, requires_grad=weight.requires_grad)
                module._parameters[name] = made[weight]
        for name, buffer in module._buffers.items():
            module._buffers[name] = wrapped(buffer)
    return model


# --------------------------------------------------------------------------------------------------
# Whole scripts
# --------------------------------------------------------------------------------------------------
class Engine:
    """What our code asks of a DeepSpeed engine, with PyTorch's AdamW, on one rank."""

    skipped_steps = 0

    def __init__(self, model, args, micro_steps, steps):
        import transformers

        self.module, self.args, self.micro_steps = model, args, micro_steps
        self.micro_step = self.global_steps = 0
        self.norm, self._config = None, SimpleNamespace()
        self.masters = {w: as_master(w) for w in model.parameters() if w.requires_grad}
        matrices, vectors = [], []
        for weight in self.masters.values():
            (matrices if weight.dim() > 1 else vectors).append(weight)
        decays = ((matrices, args.weight_decay), (vectors, 0.0))
        groups = [{"params": weights, "weight_decay": x} for weights, x in decays if weights]
        options = dict(lr=args.learning_rate, betas=tuple(args.adam_betas), foreach=False)
        self.optimizer = self.basic_optimizer = AdamW(groups, **options)
        self.lr_scheduler = transformers.get_scheduler(
            args.lr_scheduler_type, self.optimizer, args.num_warmup_steps, steps
        )
        self.train()

    def __call__(self, *inputs, **options):
        return self.module(*inputs, **options)

    def __getattr__(self, name):
        return getattr(self.module, name)

    def train(self, mode=True):
        self.module.train(mode)

    def eval(self):
        self.module.eval()

    def backward(self, loss):
        (loss / self.micro_steps).backward()

    def step(self):
        self.micro_step += 1
        if self.micro_step % self.micro_steps:
            return
        for weight, master in self.masters.items():
            if weight.grad is not None:
                grad, weight.grad = weight.grad, None
                master.grad = grad.float()
        masters = self.masters.values()
        self.norm = nn.utils.clip_grad_norm_(masters, self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in self.masters.items():
                if weight is not master:
                    weight.copy_(master)
        self.lr_scheduler.step()
        self.global_steps += 1

    def get_global_grad_norm(self):
        return self.norm

    def gradient_accumulation_steps(self):
        return self.micro_steps

    def is_gradient_accumulation_boundary(self):
        return (self.micro_step + 1) % self.micro_steps == 0

    def was_step_applied(self):
        return True

    def zero_optimization_stage(self):
        return 0

    def save_checkpoint(self, folder, tag, **_):
        folder = Path(folder) / tag
        folder.mkdir(parents=True)
        parts = self.module.state_dict(), self.optimizer.state_dict()
        held = tree_map(lambda x: getattr(x, "held", x), parts)
        torch.save((*held, self.lr_scheduler.state_dict(), self.global_steps), folder / "engine.pt")

    def load_checkpoint(self, folder, tag, **_):
        model, adam, schedule, self.global_steps = torch.load(Path(folder) / tag / "engine.pt")
        for name, weight in self.module.state_dict().items():
            weight.held.copy_(model[name])
        self.optimizer.load_state_dict(adam)
        self.lr_scheduler.load_state_dict(schedule)
        return folder, {}

    def offload_states(self, **options):
        pass

    def reload_states(self):
        pass


def as_master(weight):
    """Returns the fp32 weight that the optimizer steps: this one, or a copy."""
    return weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())


class AdamW(torch.optim.AdamW):
    def has_overflow(self, *_):
        return False


@contextlib.contextmanager
def program():
    """The second device, and on it whole scripts, on one rank: ZeRO's stages are all 0."""
    from transformers import PreTrainedModel

    import common
    from machinery import flags, zero3

    load, freeze = common.load_model, common.frozen_model

    def whole(function):
        return lambda args, *given, **options: function(
            flags.with_flags(args, zero_stage=0), *given, **options
        )

    with machine() as count, pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero3, "loading_device", lambda args: "cpu")
        patch.setattr(common, "load_model", lambda *a, **o: moved(whole(load)(*a, **o)))
        patch.setattr(common, "frozen_model", whole(freeze))
        patch.setattr(
            common,
            "train_engine",
            lambda model, args, batch_size, micro_steps, steps: Engine(
                model, args, micro_steps, steps
            ),
        )
        # the step of a token runs as it is
        patch.setattr(PreTrainedModel, "get_compiled_call", lambda model, config: model)
        yield count
