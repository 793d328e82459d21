"""Everything that nobody has to open to understand RLHF on DeepSpeed: one job a module.

DeepSpeed, transformers and datasets are noisy while they are imported, so they are imported here
first, in silence. Importing them earlier changes what is printed, and nothing else. What stands
above them must also be read by a Python that is too old.
"""

import logging
import os
import sys
import warnings

from machinery import errors

if sys.version_info < (3, 11):
    errors.fail(
        "this Python is {}.{}, and transformers needs 3.11 or newer: make .venv with one.".format(
            *sys.version_info
        )
    )
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

try:
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import torchdata  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    start = "`source .venv/bin/activate` first; `make install` makes .venv."
    errors.fail("no package {} in {}: {}".format(error.name, sys.prefix, start))
except KeyboardInterrupt:
    sys.exit("interrupted while the libraries were imported: nothing was written.")

logging.disable(logging.NOTSET)
