"""What the tests of the data share: rows, files of them, and their way back from token ids."""

import json
from types import SimpleNamespace

from datasets import Dataset

from machinery import rows
from machinery.rows import STAGES
from tests import kit

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def many(count, make):
    return [make(i) for i in range(count)]


def dahoas(i):
    return {"prompt": f"Q{i}?", "response": f" r{i}", "chosen": f" c{i}", "rejected": f" x{i}"}


def chat(*contents):
    """Returns messages that alternate between user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def write(path, lines):
    """Writes rows to a file of the kind that its name says. Returns its path as text."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(lines).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(lines))
    else:
        kit.write_lines(path, lines)
    return str(path)


def folder(path, lines):
    """Writes rows to a train and a test file, the last fifth of them to test. Returns the path."""
    border = len(lines) * 4 // 5
    write(path / "train.jsonl", lines[:border])
    write(path / "test.jsonl", lines[border:])
    return path


def load(tokenizer, paths, stage="sft", limit=64, split=None, **flags):
    """Returns the train and held-out rows of a stage, of all rows unless there is a split."""
    split = split or [float(name == stage) for name in STAGES]
    args = {"data_path": [str(p) for p in paths], "data_split": split, "columns": None, **flags}
    args = SimpleNamespace(**args)
    return rows.load_rows(args, rows.open_sources(args, stage), tokenizer, limit)


def both(parts):
    """Returns the train and held-out rows together."""
    return [row for part in parts for row in part]


def texts(tokenizer, found):
    """Returns {(prompt, response, ...)} back from the token ids, without EOS."""
    return {
        (tokenizer.decode(r["prompt_ids"]), *(tokenizer.decode(a[:-1]) for a in r["responses"]))
        for r in found
    }
