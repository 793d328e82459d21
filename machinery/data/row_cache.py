"""Tokenised rows in the cache of `datasets`: made once on a host, and kept for the next start."""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import datasets
import jinja2
import tokenizers
import transformers

from machinery.base import ranks

MANY = 10_000  # fewer rows take some seconds, and are made by every rank at every start
LIBRARIES = datasets, jinja2, tokenizers, transformers
CODE = Path(__file__).parents[1]  # machinery/: rows depend on several of its rooms


def pays(rows, tokenizer):
    """Returns whether rows are kept: many of them, of a tokenizer whose code has a version."""
    return len(rows) >= MANY and type(tokenizer).__module__.startswith("transformers.")


def map_once(rows, function, options, content, title):
    """Returns rows.map(function), without the columns of before, from a file of the cache.

    options: the function's other arguments. content: a digest of the rows' values. title: for the
    screen. The first rank of a host makes the file, on all cores; the others wait.
    """
    name = key(options, content)
    file = Path(datasets.config.HF_DATASETS_CACHE, "rlhf_rows", f"{name}.arrow")
    file.parent.mkdir(parents=True, exist_ok=True)
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if not first:
        ranks.barrier()
    cores = min(len(os.sched_getaffinity(0)), len(rows) // 100)
    if first and not [*file.parent.glob(f"{name}*")]:
        ranks.say(f"{title}: tokenising {len(rows):,} rows, once; kept in {file.parent}")
        rows = rows.flatten_indices(keep_in_memory=True)  # a worker gets its own rows only
    made = rows.map(
        function,
        fn_kwargs=options,
        remove_columns=rows.column_names,
        num_proc=cores if cores > 1 else None,
        cache_file_name=str(file),
        new_fingerprint=name,
    )
    if first:
        ranks.barrier()
    return made


def key(options, content):
    """Returns a digest of everything that tokenised rows depend on."""
    tokenizer = options["tokenizer"]
    facts = [content, sys.version, *(library.__version__ for library in LIBRARIES)]
    facts += sorted((name, x) for name, x in options.items() if x is not tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [*sorted(Path(folder).rglob("*.*")), *sorted(CODE.rglob("*.py"))]
        facts += [(file.name, file.read_bytes()) for file in files]
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
