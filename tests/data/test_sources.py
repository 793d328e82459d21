"""Sources: what stands in a file reaches training and reward functions as the file spells it."""

import json
from pathlib import Path

import pytest
from data_kit import both, dahoas, load, many, texts, write
from datasets import Dataset

from machinery import sources
from machinery.refused import Refused
from tests import kit


def test_a_folder_holds_train_and_test(tokenizer, tmp_path):
    """Files with the word "test" in their name are held out, and those with "train" trained on."""
    for name, rows in (("train-0", range(10)), ("latest", range(10, 20)), ("test", range(20, 25))):
        write(tmp_path / f"{name}.jsonl", [dahoas(i) for i in rows])
    parts = [{p for p, _ in texts(tokenizer, part)} for part in load(tokenizer, [tmp_path])]
    assert parts == [{f"Q{i}?" for i in range(10)}, {f"Q{i}?" for i in range(20, 25)}]


def test_a_validation_part_is_held_out_and_a_test_part_before_it(tokenizer, tmp_path):
    write(tmp_path / "train.jsonl", [dahoas(i) for i in range(10)])
    for name, i in (("validation", 50), ("test", 60)):
        write(tmp_path / f"{name}.jsonl", [dahoas(i)])
        assert [*load(tokenizer, [tmp_path])[1]["prompt"]] == [f"Q{i}?"]


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, capsys):
    """Files of another kind than the part's first one, of other words, and in folders below. No row
    is left out in silence."""
    for name in ("train-a.jsonl", "train-b.jsonl", "latest.jsonl", "more/train.jsonl"):
        write(tmp_path / name, many(3, dahoas))
    (tmp_path / "train-c.csv").write_text("prompt,response\nWhy?,So.\n")
    parts, _ = sources.read_source(str(tmp_path))
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 6}
    said = capsys.readouterr().out
    assert f"train joins 2 files, {tmp_path}/train-a.jsonl to {tmp_path}/train-b.jsonl" in said
    assert f"files that are not read: 3, such as {tmp_path}/latest.jsonl" in said


def test_the_words_of_a_folders_names_say_what_is_held_out(tmp_path, capsys):
    """A word ends where a letter does not follow. Where no name has one, all is trained on. Each
    part has its own kind of file."""
    names = "Train_1.jsonl training.jsonl test-x.csv validation.jsonl .train.jsonl trained.jsonl"
    for name in [*names.split(), "train.txt"]:
        write(tmp_path / name, many(1, dahoas))
    here = lambda *names: [f"{tmp_path}/{name}" for name in names]  # noqa: E731
    held_out = {"test": here("test-x.csv")}
    assert sources.files_in(tmp_path) == {
        "train": here("Train_1.jsonl", "training.jsonl"),
        **held_out,
    }
    said = capsys.readouterr().out
    assert f"files that are not read: 2, such as {tmp_path}/trained.jsonl" in said
    for name in ("Train_1.jsonl", "training.jsonl", "test-x.csv", "validation.jsonl"):
        (tmp_path / name).unlink()
    assert sources.files_in(tmp_path) == {"train": here("trained.jsonl")}
    write(tmp_path / "test.jsonl", many(1, dahoas))
    with kit.refuses("unreadable-data"):  # none to train on
        sources.read_source(str(tmp_path))


WRONG = "data/train_v1.jsonl::x  data:main  data::v1:y  data::v1  ::v1  nowhere.jsonl::v1".split()


@pytest.mark.parametrize("path", WRONG)
def test_what_chooses_on_the_hub_chooses_nothing_in_a_folder(tmp_path, monkeypatch, path):
    """It would be dropped in silence, and other rows be read."""
    monkeypatch.chdir(tmp_path)
    for name in ("train_v1", "train_v2"):
        write(tmp_path / f"data/{name}.jsonl", many(2, dahoas))
    with kit.refuses("unreadable-data"):
        sources.read_source(path)


def test_a_hub_name_may_choose_splits(monkeypatch):
    """By the end of their names. Without it, the error says what there is and how to choose."""
    parts = ("train_prefs", "train_sft", "test_prefs", "test_sft")
    hub = {part: Dataset.from_list([{"prompt": part}]) for part in parts}
    asked = []
    monkeypatch.setattr(sources.datasets, "load_dataset", lambda *given: asked.append(given) or hub)
    found, columns = sources.read_source("a/b::prefs")
    assert {part: rows[0]["prompt"] for part, rows in found.items()} == {
        "train": "train_prefs",
        "test": "test_prefs",
    }
    assert columns == ["prompt"]
    with pytest.raises(Refused, match="only train_prefs, .* NAME:CONFIGURATION:X"):
        sources.read_source("a/b:main")
    hub["train"] = hub["test_prefs"]  # also where there is a part of that name
    with pytest.raises(Refused, match="no part train_gen, only train_prefs"):
        sources.read_source("a/b::gen")
    assert asked == [("a/b", None), ("a/b", "main"), ("a/b", None)]


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
    for path in ("d[1]", f"d[1]/a{kind}", str(tmp_path / f"d[1]/b[1]*{kind}")):
        parts, columns = sources.read_source(path)
        rows = [sources.parse(row)["prompt"] for row in parts["train"]]
        assert rows == ["own"] * (2 if path == "d[1]" else 1) and columns == ["prompt", "response"]


def test_what_a_run_leaves_among_its_data_is_none_of_them(tokenizer, tmp_path):
    """Where its output folder lies there. A resumed run would find other rows than before. And such
    a folder is itself no data: args.json is no file of rows."""
    write(tmp_path / "a.jsonl", many(1, dahoas))
    out = tmp_path / "out"
    for name in ("metrics", "samples", "checkpoints/b"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write(out / f"{name}.jsonl", many(1, dahoas))
    (out / "args.json").write_text('{\n "seed": 1\n}')
    assert sources.files_in(tmp_path) == {"train": [f"{tmp_path}/a.jsonl"]}
    with kit.refuses("unreadable-data"):
        load(tokenizer, [out])


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
    extra = {row["prompt"]: json.loads(row["extra"]) for row in found}
    assert extra == {line["prompt"]: {name: line.get(name) for name in SPELLED} for line in lines}
    assert [type(extra["2024-01-02"][name]) for name in list(SPELLED)[:2]] == [str, int]


def test_all_of_a_csv_file_is_text(tokenizer, tmp_path):
    """Quotes, line breaks and commas as in any .csv file; numbers and NA are text, too."""
    lines = ["prompt,response,n", '"Q,\n""0""", r,007', *(f"Q{i}?, r{i},NA" for i in range(1, 40))]
    file = tmp_path / "rows.csv"
    file.write_text("\r\n".join(lines) + "\r\n")
    assert ('Q,\n"0"', " r") in texts(tokenizer, both(load(tokenizer, [file])))
    asked = both(load(tokenizer, [file], "ppo"))
    found = {row["prompt"]: json.loads(row["extra"]) for row in asked}
    assert found['Q,\n"0"'] == {"response": " r", "n": "007"} and found["Q1?"]["n"] == "NA"


# ---- What is dropped is counted ----
def test_rows_that_teach_nothing_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    """An empty text, equal responses, and responses that are equal once they are cut: a pair
    without a difference has a gradient, and it teaches noise."""
    long = " and" * 40
    lines = many(40, dahoas) + [
        {"prompt": "E1?", "chosen": "", "rejected": " x"},
        {"prompt": "  ", "chosen": " c", "rejected": " x"},
        {"prompt": "N1?", "chosen": " c", "rejected": None},
        {"prompt": "S1?", "chosen": " same", "rejected": " same"},
        {"prompt": "L1?", "chosen": long + " yes", "rejected": long + " no"},
    ]
    write(tmp_path / "train.jsonl", lines)
    write(tmp_path / "test.jsonl", [dahoas(50)])
    train, _ = load(tokenizer, [tmp_path], "reward", limit=16)
    assert {p for p, *_ in texts(tokenizer, train)} == {f"Q{i}?" for i in range(40)}
    said = capsys.readouterr().out
    for count, why in ((3, "empty prompt or response"), (2, "chosen equals rejected")):
        assert f"train: {count} of 45 rows are dropped: {why}" in said
