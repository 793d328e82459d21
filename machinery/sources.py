"""Reads the sources of data: files, folders, and data sets of the hub.

Rows of .jsonl, .json and .csv files are kept as text and parsed when they are used: load_dataset
would guess types, and make a timestamp of "2024-01-08" and a float of 1 beside 0.5. Its line
reader names no line in its errors, and reads neither .csv nor .json.
"""

import csv
import hashlib
import json
import os
import re
from pathlib import Path

import datasets
from datasets.data_files import DataFilesList
from datasets.fingerprint import Hasher

from machinery import formats, ranks
from machinery.refused import Refused, nearest

KINDS = (".jsonl", ".json", ".csv", ".parquet")  # all but the last are text
WORDS = {  # in the names of a folder's files; what is in none of these parts is not read
    "train": {"train", "training"},
    "test": {"test", "testing", "eval", "evaluation"},
    "validation": {"validation", "valid", "val", "dev"},  # held out if there is no test
}
SAVED = [{"dataset_dict.json"}, {"dataset_info.json", "state.json"}]  # in folders of save_to_disk
TEXT, PLACE = "the row as JSON", "file and line"  # columns of a dataset whose rows are text


def read_source(path, flag="--data_path"):
    """Returns {"train": Dataset} of a hub name, file or folder, and "test" if it has one.

    The second result are the names of its columns. `parse` makes a dict of a row. Refuses, and
    names `flag`, if the source cannot be read.
    """
    try:
        parts = read_parts(path)
        for rows in parts.values():
            rows.data.validate(full=True)  # a parquet file's text may be no UTF-8
    except Exception as error:  # of many kinds: offline, unknown name, no access, broken file
        why = error.__cause__ or error
        raise Refused("unreadable-data", f"{flag} {path} cannot be read.\n  {why}") from error
    columns = parts["train"].column_names
    if TEXT in columns:
        texts = (text for rows in parts.values() for text in rows[TEXT])
        columns = list(dict.fromkeys(name for text in texts for name in json.loads(text)))
    return parts, columns


def read_parts(path):
    """Returns {"train": Dataset} of a source, and "test" if it has one. Raises what goes wrong.

    Of NAME:CONFIGURATION:X, a name of the hub, the splits train_X and test_X are read.
    """
    if any(all(Path(path, mark).exists() for mark in marks) for marks in SAVED):
        saved = datasets.load_from_disk(path)
        return train_and_test(saved if isinstance(saved, dict) else {"train": saved})
    if os.path.exists(path):  # a file's name may hold a colon
        return {part: read_files(files) for part, files in files_in(Path(path)).items()}
    name, configuration, suffix = [*path.split(":", 2), "", ""][:3]
    # Of a folder no part is chosen: `datasets` would read all of it.
    if os.path.exists(name) or Path(name).suffix in KINDS or name[:1] in "./~":
        raise ValueError(f"No such file or folder. {nearest(Path(path))}")
    splits = datasets.load_dataset(name, configuration or None)
    return train_and_test(splits, suffix and f"_{suffix}")


def train_and_test(splits, end=""):
    """Returns {"train": ..., "test": ...} of {split: ...}: of the splits whose names end so.

    Held out is the split test, or else validation.
    """
    if f"train{end}" not in splits:
        words = f"It has no part train{end}, only {', '.join(splits)}."
        raise ValueError(f"{words} NAME:CONFIGURATION:X reads train_X and test_X.")
    parts = {"train": splits[f"train{end}"]}
    for name in ("validation", "test"):
        if name + end in splits:
            parts["test"] = splits[name + end]
    return parts


def files_in(path):
    """Returns {"train": [file, ...], "test": ...} of a file, or of the files directly in a folder.

    WORDS in their names make the parts; if no name has one, all files are trained on. Names are
    taken literally: a [ is no pattern. What lies in folders below, such as what a run leaves, is
    not read. The files of one part are of one kind, that of the first. The screen says how many
    files are not read.
    """
    if path.is_file() and path.suffix in KINDS:
        return {"train": [str(path)]}
    here = path.resolve()
    below = sorted(file for file in here.rglob("[!.]*") if file.suffix in KINDS and file.is_file())
    files = [file for file in below if file.parent == here]
    if not files:
        raise ValueError(f"It must be, or hold, a file of {', '.join(KINDS)}.")
    splits = {}
    for file in files:
        for split, words in WORDS.items():
            if words & {*re.split("[^a-z]", file.stem.lower())}:
                splits.setdefault(split, []).append(file)
    parts = train_and_test(splits or {"train": files})
    for part, own in parts.items():
        parts[part] = [str(file) for file in own if file.suffix == own[0].suffix]
    left = [file for file in map(str, below) if file not in sum(parts.values(), [])]
    if left:
        ranks.say(f"warning: {path}: files that are not read: {len(left)}, such as {left[0]}")
    return parts


def names_in(args, path, columns):
    """Returns --columns for one source, as {ours: theirs}; refuses if it has only some of them.

    A source of a blend that has none of them is read with formats.NAMES, or as it is.
    """
    given = args.columns or {}
    there = [name for name in given.values() if name in columns]
    if not there and (not given or len(args.data_path) > 1):
        return formats.NAMES.get(path, {})
    if len(there) < len(given):
        raise Refused("no-such-column", f"--columns: {path} has only {', '.join(columns)}.")
    return given


def parse(row, names=None):
    """Returns a row of a source's Dataset as a dict of its columns, renamed by {ours: theirs}."""
    row, names = json.loads(row[TEXT]) if TEXT in row else row, names or {}
    ours = {name: row[theirs] for name, theirs in names.items() if theirs in row}
    return {name: row[name] for name in row if name not in names.values()} | ours


# ---- Files ----
def read_files(files):
    """Returns a Dataset; of files of text its columns are TEXT and PLACE.

    `datasets` keeps it in its cache from then on. There it is known by where the files are, what is
    in them, and the code that reads them.
    """
    known_by = Hasher.hash([own_code(), [digest(file) for file in files]])
    if files[0].endswith(".parquet"):  # a plain list would be one of patterns
        return datasets.Dataset.from_parquet(DataFilesList(files, [(known_by,)]))
    known = {"files": files, "known_by": known_by}
    return datasets.Dataset.from_generator(read_rows, gen_kwargs=known)


def digest(file):
    """Returns a text that is another one as soon as a byte of the file is."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def own_code():
    """Returns the code that makes rows, by which they are known in the cache of `datasets`.

    Code elsewhere that a fork calls from there is not in it: its changes would not show.
    """
    names = "sources", "formats", "tokens", "rows"
    return [Path(__file__).with_name(f"{name}.py").read_text() for name in names]


def read_rows(files, known_by):
    """Yields a dict of TEXT and PLACE for each row of the files."""
    for file in files:
        place = None
        for text, place in read_file(file):
            parse_strictly(text, place)
            yield {TEXT: text, PLACE: place}
        if place is None:  # as a failed copy leaves it
            raise ValueError(f"{file} is empty.")


def read_file(file):
    """Yields (a row as JSON, where it stands) for each row of a file; of .csv all is text."""
    # What is no UTF-8 passes here, so that `parse_strictly` can name its line.
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        if file.endswith(".csv"):
            yield from read_table(file, csv.reader(lines, strict=True))
            return
        start = lines.read(100).lstrip()
        lines.seek(0)
        if start.startswith("[") and file.endswith(".json"):
            for number, row in enumerate(json.load(lines, object_pairs_hook=unique), 1):
                yield json.dumps(row), f"{file}, row {number}"
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield line, f"{file}, line {number}"


def read_table(file, table):
    """Yields what `read_file` does, of the rows of a csv.reader."""
    try:
        names = next(table, [])
        for row in filter(None, table):
            if len(row) != len(names):
                raise ValueError("there must be a cell for each name of line 1")
            yield json.dumps(unique(zip(names, row))), f"{file}, line {table.line_num}"
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{file}, line {table.line_num}: {error}") from None


def unique(pairs):
    """Returns a dict of (name, value) pairs, of which the last would count if two had a name."""
    pairs = [*pairs]
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"a name is there twice in {', '.join(name for name, _ in pairs)}")
    return row


def parse_strictly(text, place):
    """Raises a ValueError that names its place if the text is no object of JSON."""
    try:
        row = json.loads(text.rstrip("\r\n"), object_pairs_hook=unique)
        json.dumps(row, ensure_ascii=False).encode()  # fails on half of a surrogate pair
    except ValueError as error:
        why = re.sub(r"line 1 column (\d+) .*", r"character \1", str(error))
        raise ValueError(f"{place}: {why}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: no JSON object")
