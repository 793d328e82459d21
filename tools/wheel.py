"""Says whether PyPI's build of torch runs on the GPUs that are here: `make install` asks it first.

    python3 tools/wheel.py torch==2.13.0

PyPI's torch 2.13 is built with CUDA 13. That needs NVIDIA's driver 580 or newer, and a GPU of
compute capability 7.5 (T4) or more: no V100, no P100. With another, a run would end in "driver too
old" or "no kernel image", after 3 GB of downloads. PyTorch's own index has a build with CUDA 12.6,
for capabilities 5.0 to 9.0 (pytorch#172352). This program needs no torch, and says nothing where
all is well, there is no GPU, or an index is named.
"""

import subprocess
import sys

DRIVER, CAPABILITY, NEWEST = 580, 7.5, 9.0  # the last: of the build with CUDA 12.6
QUESTION = "nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader"
INDEX = "--index-url https://download.pytorch.org/whl/cu126"


def gpus():
    """Returns (driver, compute capability) of each GPU, such as (570, 9.0)."""
    try:
        lines = subprocess.run(QUESTION.split(), capture_output=True, text=True).stdout
        found = [line.split(",") for line in lines.splitlines()]
        return [(int(driver.split(".")[0]), float(capability)) for driver, capability in found]
    except (OSError, ValueError):  # no nvidia-smi, or it finds no driver
        return []


def advice(torch, found):
    """Returns what to do, in words; "" if nothing. torch: the words for pip. found: see `gpus`."""
    if not found or len(torch) > 1 or "+" in torch[0]:
        return ""
    drivers, capabilities = zip(*found)
    if min(drivers) >= DRIVER and min(capabilities) >= CAPABILITY:
        return ""
    here = f"NVIDIA's driver {min(drivers)}, compute capability {min(capabilities)}"
    needs = f"{torch[0]} of PyPI needs driver {DRIVER} and capability {CAPABILITY} (T4) or newer"
    if max(capabilities) > NEWEST:
        return f"error: {here}: {needs}.\n  Update the driver."
    take = f'TORCH="{torch[0]} {INDEX}" make install'
    return f"error: {here}: {needs}.\n  Take the build with CUDA 12.6: {take}"


if __name__ == "__main__":
    sys.exit(advice(sys.argv[1:], gpus()) or 0)
