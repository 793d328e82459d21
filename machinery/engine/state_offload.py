"""State offload (--offload_states): what only optimizers need is on the CPU between updates."""

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from machinery.base import ranks


def to_cpu(args, engines):
    """Moves the optimizer states, fp32 weights and gradients of `engines` to the CPU.

    Only the weights that forwards use stay. Without --offload_states nothing moves.
    """
    states = set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_params}
    on_gpu = ranks.device().type != "cpu"  # DeepSpeed 0.18.5 cannot pin memory without a GPU
    for engine in engines if args.offload_states else ():
        engine.offload_states(include=states, pin_memory=on_gpu)


def to_device(args, engines):
    """Moves back what `to_cpu` moved away."""
    for engine in engines if args.offload_states else ():
        engine.reload_states()


def drop_buffers(engine):
    """Drops the CPU buffers that stage 3 keeps among Adam's state. The next offload makes new ones.

    DeepSpeed (0.19.8) would write them to a checkpoint, a second copy of the moments, and load them
    onto the device, where an offload would then move the moments to.
    """
    for state in engine.basic_optimizer.state.values():
        for name in [name for name in state if name.endswith("_offload_buffer")]:
            del state[name]
