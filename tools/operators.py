"""Compiles DeepSpeed's operators for the accelerator that is here, as `make install` does.

One line for each: built, or why not and what takes its place. All of them are optional. They lie
in a folder of the virtual environment (operators.use_built).
"""

import contextlib
import io
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepspeed.accelerator import get_accelerator

from machinery import launch

OPERATORS = {  # and what is used without them
    "FusedAdamBuilder": "torch's fused AdamW takes its place",
    "CPUAdamBuilder": "--adam_offload will be refused",
    "ShareMemCommBuilder": "ranks on one CPU use gloo alone",  # there is none for GPUs
}


def why_not(builder):
    """Compiles an operator. Returns why it could not be built, in a line; "" if it was."""
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            builder().load()
    except Exception as error:  # no compiler, no ninja, no headers of Python or CUDA
        lines = str(error).splitlines() or [type(error).__name__]
        telling = [line for line in lines if "error:" in line or "not found" in line]
        return (telling or lines)[0].strip()[:160]
    return ""


def main():
    launch.use_built()
    print("compiling DeepSpeed's optimizers: 4 to 6 minutes, once", flush=True)
    for name, instead in OPERATORS.items():
        builder = get_accelerator().get_op_builder(name)
        if builder:
            began = time.time()
            why = why_not(builder)
            words = f"not built: {why}; {instead}" if why else "built"
            print(f"  {builder.NAME}: {words} ({time.time() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
