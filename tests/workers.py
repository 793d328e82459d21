"""Old names of what is in kit.py and runs.py now. To be deleted when nothing imports it."""

from tests import kit
from tests.kit import CLOCKS, ROOT, TOKENIZER, prepare  # noqa: F401
from tests.runs import *  # noqa: F401, F403
from tests.runs import base as shared_folder  # noqa: F401
from tests.runs import run as _run

TENSOR_PARALLEL, RARE = {}, {}


def run(script, *flags, zero=0, rows=2, accumulation=2, generation=None, **others):
    return _run(script, " ".join(map(str, flags)), zero, rows, accumulation, generation, **others)


def start_command(command, base):
    done = kit.start_command(command, cwd=base, limit=1500)
    return done.code, done.out + done.err
