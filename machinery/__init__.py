"""Everything that nobody has to open to understand RLHF on DeepSpeed: one job a module.

DeepSpeed, transformers and datasets are noisy while they are imported, so they are imported here
first, in silence. Importing them earlier changes what is printed, and nothing else.
"""

import logging
import os
import warnings

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import datasets  # noqa: E402, F401
import deepspeed  # noqa: E402, F401
import transformers  # noqa: E402, F401

logging.disable(logging.NOTSET)
