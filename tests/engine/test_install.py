"""`make demo`, and the build of operators, on machines that we do not have."""

import os
import sys

import pytest

from tests import kit


def test_make_takes_the_gpus_that_the_user_has_named(tmp_path):
    """`deepspeed --num_gpus 2` ignores CUDA_VISIBLE_DEVICES, says so in a line, and trains on 0, 1,
    where somebody else may work."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for devices, words in (("", "error --num_gpus 2 sft.py"), ("6,7", "error  sft.py")):
        env = {"CUDA_VISIBLE_DEVICES": devices, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        assert words in kit.start_command("make -n demo".split(), env, kit.ROOT).out


@pytest.mark.slow
def test_each_operator_is_built_by_itself(tmp_path):
    """Where the first could not be built, the others were not tried. Each has a line."""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-compiler"}
    done = kit.start_command([sys.executable, kit.ROOT / "tools/operators.py"], env)
    assert done.code == 0 and "Traceback" not in done.out + done.err, done
    assert done.out.count("not built: ") == 3
