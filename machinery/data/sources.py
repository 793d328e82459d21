"""Reads the sources of data: files, folders and hub datasets.

Rows of .jsonl, .json and .csv files are kept as text and parsed when they are used: load_dataset
would guess types, and make a timestamp of "2024-01-08" and a float of 1 beside 0.5. Its line
reader names no line in its errors, and reads neither .csv nor .json.
"""

import csv
import hashlib
import json
import re
from pathlib import Path
from statistics import mode

import datasets
from datasets.data_files import FILES_TO_IGNORE, NON_WORDS_CHARS, SPLIT_KEYWORDS, DataFilesList
from datasets.fingerprint import Hasher

from machinery.base import ranks
from machinery.base.refused import Refused, nearest
from machinery.data import formats

KINDS = (".jsonl", ".json", ".csv", ".parquet")  # all but the last are text
TEXT, PLACE = "the row as JSON", "file and line"  # columns of a dataset whose rows are text


def read_source(path, flag="--data_path"):
    """Returns {"train": Dataset} of a hub name, file or folder, and "test" if it has one.

    The second result are the names of its columns. `parse` makes a dict of a row. Refuses, and
    names `flag`, if the source cannot be read.
    """
    try:
        splits, columns = read_splits(path)
        if "train" not in splits:
            words = f"It has no part train, only {', '.join(map(str, splits))}."
            if any(part.startswith("train_") for part in splits):
                words += " To choose among parts train_X and test_X, use NAME:CONFIGURATION:X."
            raise ValueError(words)
    except Exception as error:  # of many kinds: offline, unknown name, no access, broken file
        why = error.__cause__ or error
        raise Refused("unreadable-data", f"{flag} {path} cannot be read.\n  {why}") from error
    parts = {"train": splits["train"]}
    for name in ("validation", "test"):
        if name in splits:
            parts["test"] = splits[name]
    return parts, columns


def read_splits(path):
    """Returns {name: Dataset} of a source, and the names of its columns. Raises what goes wrong.

    Of NAME:CONFIGURATION:X the parts train_X and test_X are read, as train and test.
    """
    fields = [path] if Path(path).exists() else path.split(":")  # a file's name may hold a colon
    name, configuration, suffix, *others = *fields, "", ""
    if any(others):
        raise ValueError("It must be NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:X.")
    local, files = Path(name), {}
    if not (name and local.exists()) and (local.suffix in KINDS or name[:1] in "./~"):
        raise ValueError(f"No such file or folder. {nearest(local)}")
    if local.exists() and (configuration or suffix and local.is_file()):
        raise ValueError("It has no configurations. FOLDER::X reads the folder's files train_X.")
    if local.is_file():
        if local.suffix not in KINDS:
            raise ValueError(f"It must be one of {', '.join(KINDS)}.")
        files = {"train": [name]}
    if local.is_dir():
        files = files_in(local, suffix)
    names = [name for part in files.values() for name in part]
    if names and not names[0].endswith(".parquet"):  # all are of one kind
        splits = {part: read_files(files[part]) for part in files}
        texts = (text for rows in splits.values() for text in rows[TEXT])
        return splits, list(dict.fromkeys(name for text in texts for name in json.loads(text)))
    read = datasets.load_dataset
    # A plain list would be one of patterns.
    listed = {part: DataFilesList(files[part], [(digest(files[part]),)]) for part in files}
    splits = read("parquet", data_files=listed) if listed else read(name, configuration or None)
    if suffix and not listed:
        ours = [part for part in splits if suffix_of(part) == suffix]
        if not ours:
            raise ValueError(f"No part of it ends in _{suffix}, only {', '.join(splits)}.")
        splits = {part.partition("_")[0]: splits[part] for part in ours}
    for split in splits.values():
        split.data.validate(full=True)  # a parquet file's text may be no UTF-8
    return splits, next(iter(splits.values())).column_names


def files_in(folder, suffix=""):
    """Returns {"train": [file, ...], "test": ...} of a folder, by words in the names below it.

    The words are those of `datasets`, and so is the choice of one kind of files, the most frequent.
    But names are taken literally: a [ is no pattern, and no README.md names files elsewhere. If
    output folders of runs lie among the data, their files do not count: otherwise a resumed run
    would find other rows than before.

    suffix: X, where only files train_X, test_X, ... are read.
    """
    here, files, parts = folder.resolve(), [], {}
    runs = {file.parent for file in here.rglob("args.json")} - {here}
    for file in sorted(here.rglob("*.*"), key=str):
        if suffix not in ("", suffix_of(file.stem)):
            continue
        below = str(file.relative_to(here))
        hidden = re.search(r"(^|/)(\.|__)", below) or file.name in FILES_TO_IGNORE
        if file.suffix in KINDS and file.is_file() and not hidden and runs.isdisjoint(file.parents):
            files.append(file)
            words = {*re.split(f"[{NON_WORDS_CHARS}/]", below)}
            for part, those in SPLIT_KEYWORDS.items():
                if words.intersection(those):
                    parts.setdefault(str(part), []).append(file)
    if not files:
        named = f" named train_{suffix}" if suffix else ""
        raise ValueError(f"It holds no file of {', '.join(KINDS)}{named}.")
    parts = parts or {"train": files}
    kind = mode(file.suffix[:5] for those in parts.values() for file in those)  # .json is .jsonl
    parts = {part: [file for file in parts[part] if file.suffix[:5] == kind] for part in parts}
    left = {file for file in files if file.suffix != ".json"}  # which is often something else
    if left := left.difference(*parts.values()):
        ranks.say(f"warning: {folder}: files that are not read: {len(left)}, such as {min(left)}")
    for part, those in parts.items():
        if len(several := sorted({suffix_of(file.stem) for file in those})) > 1:
            names = ", ".join(f"{part}_{each}".rstrip("_") for each in several[-9:])
            words = f"{part} joins {names}. To choose one: {folder}::{several[-1]}"
            ranks.say(f"warning: {folder}: {words}")
    return {part: [*map(str, those)] for part, those in parts.items() if those}


def suffix_of(name):
    """Returns X of train_X, test_X-00000-of-00002, ...; of other names ""."""
    word, _, suffix = re.sub(r"[-_.]\d+(-of-\d+.*)?$", "", name).partition("_")
    return suffix if any(word in words for words in SPLIT_KEYWORDS.values()) else ""


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


# ---- Files of text ----
def read_files(files):
    """Returns a Dataset of TEXT and PLACE. `datasets` keeps it in its cache from then on.

    There it is known by where the files are, what is in them, and the code that reads them.
    """
    known = {"files": files, "known_by": Hasher.hash([own_code(), digest(files)])}
    return datasets.Dataset.from_generator(read_rows, gen_kwargs=known)


def digest(files):
    """Returns a text that is another one as soon as a byte of the files is."""
    each = []
    for file in files:
        with open(file, "rb") as content:
            each.append(hashlib.file_digest(content, "blake2b").hexdigest())
    return " ".join(each)


def own_code():
    """Returns the code of this room, by which what it makes is known in the cache of `datasets`.

    Code elsewhere that a fork calls from here is not in it: its changes would not show.
    """
    return [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]


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
            table = csv.reader(lines, strict=True)
            try:
                names = next(table, [])
                for row in filter(None, table):
                    if len(row) != len(names):
                        raise ValueError("there must be a cell for each name of line 1")
                    yield json.dumps(unique(zip(names, row))), f"{file}, line {table.line_num}"
            except (csv.Error, ValueError) as error:
                raise ValueError(f"{file}, line {table.line_num}: {error}") from None
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
    except (ValueError, RecursionError) as error:
        why = re.sub(r"line 1 column (\d+) .*", r"character \1", str(error))
        raise ValueError(f"{place}: {why}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: no JSON object")
