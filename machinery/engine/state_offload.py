"""State offload (--offload_states): what only optimizers need waits on the CPU meanwhile."""

import contextlib

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from machinery.base import ranks


@contextlib.contextmanager
def states_on_cpu(args, engines):
    """Runs the block with the optimizer states, fp32 weights and gradients of `engines` on the CPU.

    Only the weights that forwards use stay. Without --offload_states nothing moves.
    """
    engines = list(engines) if args.offload_states else []
    states = set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_params}
    on_gpu = ranks.device().type != "cpu"  # DeepSpeed 0.18.5 cannot pin memory without a GPU
    for engine in engines:
        engine.offload_states(include=states, pin_memory=on_gpu)
    yield
    for engine in engines:
        engine.reload_states()


def drop_buffers(engine):
    """Drops the CPU buffers that stage 3 keeps among Adam's state. The next offload makes new ones.

    DeepSpeed (0.19.8) would write them to a checkpoint, a second copy of the moments, and load them
    onto the device, where an offload would then move the moments to.
    """
    for state in engine.basic_optimizer.state.values():
        for name in [name for name in state if name.endswith("_offload_buffer")]:
            del state[name]
