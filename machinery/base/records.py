"""args.json, in which a run notes its flags and what it found, and other small JSON files."""

import contextlib
import json
from pathlib import Path


def read(folder, name="args.json"):
    """Returns a JSON file in `folder` as a dict; {} if there is none, or something else."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads((Path(folder) / name).read_text())
        return record if isinstance(record, dict) else {}
    return {}


def of_model(folder):
    """Returns args.json of the run that saved the model in `folder`, {} if it is unknown.

    That of ema/, critic/ and best/ is in the folder above.
    """
    return read(folder) or read(Path(folder).parent)
