"""What exists only because of DeepSpeed before 0.19; each function says when it may go.

What an old DeepSpeed cannot do at all is refused in words: machinery/flags/declaring.py.
"""

import contextlib

import deepspeed
from packaging import version


def older_than(number):
    """Returns whether the installed DeepSpeed is older than version `number`."""
    return version.parse(deepspeed.__version__) < version.parse(number)


@contextlib.contextmanager
def gathered_parameters(parameters, **options):
    """Gathers weights that ZeRO-3 has sharded: DeepSpeed's GatheredParameters.

    Before 0.19 one by one: of several gathers it awaits the last alone, and on a CPU they may
    overtake each other.
    """
    with contextlib.ExitStack() as stack:
        for part in [[p] for p in parameters] if older_than("0.19") else [parameters]:
            stack.enter_context(deepspeed.zero.GatheredParameters(part, **options))
        yield
