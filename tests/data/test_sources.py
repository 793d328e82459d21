"""Sources: what stands in a file reaches training and reward functions as the file spells it."""

import json
import re
from pathlib import Path

import pytest
from data_kit import both, dahoas, load, many, texts, write
from datasets import Dataset

from machinery import sources
from machinery.refused import Refused
from tests import kit

FOLDERS = """
# its files: what is trained on; what is held out; how many are not read
train.jsonl latest.jsonl test.jsonl: train.jsonl; test.jsonl; 1
train.jsonl validation.jsonl: train.jsonl; validation.jsonl; 0
train.jsonl val.jsonl test.jsonl: train.jsonl; test.jsonl; 1
train-a.jsonl train-b.csv train-c.jsonl test.csv: train-a.jsonl train-c.jsonl; test.csv; 1
Train_1.jsonl training.jsonl trained.jsonl .train.jsonl a/train.jsonl train.txt: \
    Train_1.jsonl training.jsonl; ; 2
trained.jsonl b.jsonl: b.jsonl trained.jsonl; ; 0
"""


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, capsys):
    """The words of their names say what is trained on and what is held out; where none has one, all
    is trained on. A part has one kind of file. No row is left out in silence."""
    for number, line in enumerate(FOLDERS.replace("\\\n", "").splitlines()[2:]):
        folder, (names, held) = tmp_path / str(number), line.split(": ")
        for name in names.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, [])
        expected = [[f"{folder}/{name}" for name in part.split()] for part in held.split(";")[:2]]
        assert sources.files_in(folder) == dict(zip(("train", "test"), filter(None, expected)))
        named = re.findall(r"not read: (\d), such as /", capsys.readouterr().out)
        assert [*map(int, named)] == [int(held[-1])][held[-1] == "0" :]
    write(tmp_path / "test.jsonl", many(1, dahoas))
    with kit.refuses("unreadable-data"):  # none to train on
        sources.read_source(str(tmp_path))


def test_what_a_run_leaves_among_its_data_is_none_of_them(tokenizer, tmp_path):
    """Where its output folder lies there. A resumed run would find other rows than before. And such
    a folder is itself no data: args.json is no file of rows."""
    write(tmp_path / "a.jsonl", many(1, dahoas))
    for name in ("metrics", "checkpoints"):
        write(tmp_path / f"out/{name}.jsonl", many(1, dahoas))
    (tmp_path / "out/args.json").write_text('{\n "seed": 1\n}')
    assert sources.files_in(tmp_path) == {"train": [f"{tmp_path}/a.jsonl"]}
    with kit.refuses("unreadable-data"):
        load(tokenizer, [tmp_path / "out"])


def test_a_hub_name_may_choose_splits_and_a_folder_may_not(tmp_path, monkeypatch):
    """By the end of their names. In a folder it would be dropped in silence, and other rows be read
    (`datasets` takes the name of a folder, too)."""
    parts = ("train_prefs", "train_sft", "test_prefs", "test_sft")
    hub = {part: Dataset.from_list([{"prompt": part}]) for part in parts}
    asked = []
    monkeypatch.setattr(sources.datasets, "load_dataset", lambda *given: asked.append(given) or hub)
    found, columns = sources.read_source("a/b::prefs")
    assert [*found] == ["train", "test"] and columns == ["prompt"]
    assert [rows[0]["prompt"] for rows in found.values()] == ["train_prefs", "test_prefs"]
    with pytest.raises(Refused, match="only train_prefs, .* NAME:CONFIGURATION:X"):
        sources.read_source("a/b:main")
    hub["train"] = hub["test_prefs"]  # also where there is a part of that name
    with pytest.raises(Refused, match="no part train_gen, only train_prefs"):
        sources.read_source("a/b::gen")
    assert asked == [("a/b", None), ("a/b", "main"), ("a/b", None)]
    monkeypatch.chdir(tmp_path)
    for name in ("train", "train_v1"):
        write(tmp_path / f"data/{name}.jsonl", many(2, dahoas))
    for path in "data/train_v1.jsonl::x data:main data::v1:y data::v1 ::v1 no.jsonl::v1".split():
        with kit.refuses("unreadable-data"):
            sources.read_source(path)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_name_is_no_pattern(tmp_path, kind, monkeypatch):
    """Neither a folder's nor a file's. Nor does a README.md say what to read: it may name files
    elsewhere, and addresses."""
    monkeypatch.chdir(tmp_path)
    files = {"d1/a": "other", "b1": "other", "d[1]/a": "own", "d[1]/b[1]*": "own"}
    for name, text in files.items():
        file = Path(write(tmp_path / f"x{kind}", [{"prompt": text, "response": text}]))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        file.rename(tmp_path / f"{name}{kind}")
    card = "---\nconfigs:\n- config_name: a\n  data_files: ../b1*\n---\n"
    (tmp_path / "d[1]/README.md").write_text(card)
    for path, count in (("d[1]", 2), (f"d[1]/a{kind}", 1), (f"{tmp_path}/d[1]/b[1]*{kind}", 1)):
        parts, columns = sources.read_source(path)
        rows = [sources.parse(row)["prompt"] for row in parts["train"]]
        assert rows == ["own"] * count and columns == ["prompt", "response"]


SPELLED = {  # what `datasets` would change, were it to guess the types of columns
    "a date": ["2024-01-08", "2024-01-09"],
    "integers beside a float": [1, 0.5, 2],
    "many types": [1, "1", None, True, [1, "a"], {"b": 2.0}],
    "objects with other keys": [{"a": 1}, {"b": "2024-01-08"}, {}],
    "digits in text": ["007", "1e5", "NaN"],
    "escaped control characters": ["a\x01", "\x00"],
}


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_values_reach_a_reward_function_as_the_file_spells_them(tokenizer, tmp_path, kind):
    """A column of dates is text, an integer stays one, whatever stands in other rows. A row without
    a column has None in it. Dates are fine as prompts, too. A file may have any name, also one that
    `datasets` would read as a pattern or as a part of an archive."""
    cycle = [{name: values[i % len(values)] for name, values in SPELLED.items()} for i in range(60)]
    lines = [{"prompt": f"2024-01-{i:02}", **row} for i, row in enumerate(cycle)]
    lines[7] = {"prompt": "2024-01-07"}
    found = both(load(tokenizer, [write(tmp_path / f"zip::a[1]*{kind}", lines)], "ppo"))
    extra = {row["prompt"]: row["extra"] for row in found}
    for line in lines:
        of_it = {name: line.get(name) for name in SPELLED}
        assert extra.pop(line["prompt"]) == json.dumps(of_it)
    assert not extra


def test_all_of_a_csv_file_is_text(tokenizer, tmp_path):
    """Quotes, line breaks and commas as in any .csv file; numbers and NA are text, too."""
    lines = ["prompt,response,n", '"Q,\n""0""", r,007', *(f"Q{i}?, r{i},NA" for i in range(1, 40))]
    file = tmp_path / "rows.csv"
    file.write_text("\r\n".join(lines) + "\r\n")
    found = {row["prompt"]: row["extra"] for row in both(load(tokenizer, [file], "ppo"))}
    assert found['Q,\n"0"'] == '{"response": " r", "n": "007"}'
    assert found["Q1?"] == '{"response": " r1", "n": "NA"}'


# ---- What is dropped is counted ----
def test_rows_that_teach_nothing_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    """An empty text, equal responses, and responses that are equal once they are cut: a pair
    without a difference has a gradient, and it teaches noise."""
    pairs = [("E?", "", " x"), ("  ", " c", " x"), ("N?", " c", None), ("S?", " same", " same")]
    pairs += [("L?", " and" * 40 + " yes", " and" * 40 + " no")]
    lines = [dict(zip(("prompt", "chosen", "rejected"), pair)) for pair in pairs]
    write(tmp_path / "train.jsonl", many(40, dahoas) + lines)
    write(tmp_path / "test.jsonl", [dahoas(50)])
    train, _ = load(tokenizer, [tmp_path], "reward", limit=16)
    assert {p for p, *_ in texts(tokenizer, train)} == {f"Q{i}?" for i in range(40)}
    said = capsys.readouterr().out
    for count, why in ((3, "empty prompt or response"), (2, "chosen equals rejected")):
        assert f"train: {count} of 45 rows are dropped: {why}" in said
