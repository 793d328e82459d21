"""Reads the sources of data: files, folders and hub datasets.

Rows of .jsonl, .json and .csv files are kept as text and parsed when they are read: `datasets`
would guess types, and make a timestamp of "2024-01-08" and a float of 1 beside 0.5.
"""

import csv
import hashlib
import itertools
import json
import re
from pathlib import Path

import datasets
import pyarrow

from machinery.base import ranks, refused
from machinery.data.formats import ASSISTANT, HUMAN

KINDS = (".jsonl", ".json", ".csv", ".parquet")
MARKED = {  # sets of DeepSpeed-Chat's list whose texts do not say who speaks: columns by our names
    "Dahoas/synthetic-instruct-gptj-pairwise": dict(
        prompt="prompt", chosen="chosen", rejected="rejected"
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": dict(prompt="prompt", response="label"),
    "wangrui6/Zhihu-KOL": dict(prompt="INSTRUCTION", response="RESPONSE"),
}
SFT_ONLY = [name for name, columns in MARKED.items() if "rejected" not in columns]  # all for step 1
TEXT, PLACE = "the row as JSON", "file and line"  # columns of a dataset whose rows are text


def read_source(path, flag="--data_path"):
    """Returns {"train": Dataset} of a hub name, file or folder, and "test" if it has one.

    The second result are the names of its columns. `parse` makes a dict of a row. Ends with an
    error that names `flag` if the source cannot be read.
    """
    local = Path(path)
    if not path.strip():
        refused.fail(f"{flag} is empty.\n  Name a file, a folder or a dataset of the hub.")
    if not local.exists() and (local.suffix in KINDS or path[0] in "./~"):
        refused.fail(f"{flag} {path}: no such file or folder.\n  {refused.nearest(local)}")
    if local.is_file() and local.suffix not in KINDS:
        refused.fail(f"{flag} {path}: unknown kind of file.\n  Known: {', '.join(KINDS)}.")
    try:
        splits, columns = read_splits(path)
    except Exception as error:  # of many kinds: offline, unknown name, no access, broken file
        refused.fail(f"{flag} {path} cannot be read.\n  {error.__cause__ or error}")
    if "train" not in splits:
        advice = "To train on one of them, give its file, or name the file train."
        refused.fail(
            f"{flag} {path} has no part train, only {', '.join(map(str, splits))}.\n  {advice}"
        )
    tests = [splits[name] for name in ("test", "validation") if name in splits]
    return {"train": splits["train"], **({"test": tests[0]} if tests else {})}, columns


def read_splits(path):
    """Returns {name: Dataset} of a source, and the names of its columns. Raises what goes wrong."""
    local, files = Path(path), {}
    if local.is_file():
        files = {"train": [path]}
    if local.is_dir() or local.suffix == ".parquet":
        if re.search(r"[*?[]|::", str(local.resolve())):
            raise ValueError("Rename it: its path has one of *, ?, [ and ::, read as patterns.")
    if local.is_dir():
        files = datasets.load_dataset_builder(path).config.data_files
    names = list(itertools.chain(*files.values()))
    if local.is_dir() and names:
        warn_of_others(local, names)
    if names and all(Path(name).suffix in KINDS[:3] for name in names):
        columns = {}
        return {part: read_files(files[part], columns) for part in files}, list(columns)
    kind = {"path": "parquet", "data_files": path} if local.is_file() else {"path": path}
    splits = datasets.load_dataset(**kind)
    for rows in splits.values():
        rows.data.validate(full=True)  # broken UTF-8 would else show when the row is read
    if path in MARKED:
        splits = splits.map(add_markers, fn_kwargs=MARKED[path])
    return splits, list(dict.fromkeys(itertools.chain(*splits.column_names.values())))


def warn_of_others(folder, taken):
    """Warns of files in a folder that hold data, and are not among those that are read.

    `datasets` reads one kind of file, and where names say train or test no others.
    """
    taken = {Path(name).resolve() for name in taken}
    kinds = set(KINDS) - {".json"}  # which is often something else
    there = [file for file in sorted(folder.rglob("[!.]*")) if file.suffix in kinds]
    names = [str(file) for file in there if file.is_file() and file.resolve() not in taken]
    if names:
        what = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        ranks.say(f"warning: of the folder {folder} these files are not read: {what}")


def add_markers(row, prompt, **responses):
    """Marks who speaks, as the datasets do that are blended with this one.

    prompt, responses: the names of the row's columns. Vicuna's marks (USER:) are replaced.
    """
    text = row[prompt]
    if text and text.rstrip().endswith("ASSISTANT:"):
        text = re.sub(r"\s*USER:\s*", HUMAN, text.rstrip())
        text = re.sub(r"\s*ASSISTANT:", ASSISTANT, text)
    elif text is not None:
        text = HUMAN + text + ASSISTANT
    texts = {name: row[column] and " " + row[column] for name, column in responses.items()}
    return {"prompt": text, **texts}


def names_in(args, path, columns):
    """Returns --columns for one source, {} if it has none of them; refuses if it lacks some."""
    names = vars(args).get("columns") or {}
    lacking = [name for name in names.values() if name not in columns]
    if names and len(lacking) == len(names) and len(args.data_path) > 1:
        ranks.say(f"{path}: it has none of the columns that --columns names, and is read as it is")
        return {}
    if lacking:
        found = ", ".join(columns)
        refused.fail(f"--columns: {path} has no {', '.join(lacking)}.\n  It has {found}.")
    return names


def rename(row, names):
    """Returns a row with its columns renamed; names: {ours: theirs}, or None."""
    ours = {name: row[theirs] for name, theirs in (names or {}).items() if theirs in row}
    taken = (names or {}).values()
    return {name: value for name, value in row.items() if name not in taken} | ours


def parse(row):
    """Returns a row of a source's Dataset as a dict of its columns."""
    return json.loads(row[TEXT]) if TEXT in row else row


# ---- Files of text ----
def read_files(files, columns):
    """Returns a Dataset of TEXT and PLACE. Adds the names of the columns to the dict `columns`."""
    rows = itertools.chain.from_iterable(map(read_some, files))
    tables, digest = [], hashlib.blake2b(digest_size=8)
    while batch := list(itertools.islice(rows, 10_000)):  # few enough to be held twice
        texts, places = zip(*batch)
        for row in map(parse_strictly, texts, places):
            columns.update(dict.fromkeys(row))
        digest.update("".join(texts).encode())
        tables.append(pyarrow.table({TEXT: texts, PLACE: places}))
    # Without a fingerprint, `datasets` would make it of a pickled copy of everything.
    return datasets.Dataset(pyarrow.concat_tables(tables), fingerprint=digest.hexdigest())


def read_some(file):
    """Yields what `read_file` does. A file without a row, as a failed copy leaves, is an error."""
    rows = read_file(file)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{file} is empty.")
    yield first
    yield from rows


def read_file(file):
    """Yields (a row as JSON, where it stands) for each row of a file."""
    path = Path(file)
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        if path.suffix == ".csv":
            yield from read_csv(file, lines)
        elif path.suffix == ".json" and lines.read(100).lstrip().startswith("["):
            rows = json.loads(path.read_text("utf-8-sig"))
            yield from ((json.dumps(row), f"{file}, row {i}") for i, row in enumerate(rows, 1))
        else:
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield line, f"{file}, line {number}"


def read_csv(file, lines):
    """Yields what `read_file` does for a .csv file; all its values are text."""
    csv.field_size_limit(2**31 - 1)  # a text may be longer than 131,072 characters
    table = csv.DictReader(lines, strict=True)
    names = table.fieldnames or []
    if len(set(names)) < len(names):
        raise ValueError(f"{file}, line 1: two columns have the same name.")
    for row in table:
        place = f"{file}, line {table.line_num}"
        if None in row or None in row.values():
            raise ValueError(f"{place}: it has not as many cells as the first line.")
        yield json.dumps(row), place


def parse_strictly(text, place):
    """Returns a row of JSON as a dict; raises a ValueError that names its place if it is none."""
    try:
        row = json.loads(text)
        half = "\\ud" in text or "\\uD" in text  # it may spell half a surrogate pair
        (json.dumps(row, ensure_ascii=False) if half else text).encode()
        if isinstance(row, dict):
            return row
        why = "no JSON object"
    except UnicodeEncodeError:
        why = "no UTF-8, or half of a surrogate pair"
    except (ValueError, RecursionError) as error:
        why = re.sub(r"line \d+ column \d+ ", "", str(error))  # of this line's own
    raise ValueError(f"{place}: {why}")
