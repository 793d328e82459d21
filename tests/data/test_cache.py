"""Rows are tokenised once on a machine: `datasets` keeps them for other ranks and later runs."""

import os

import pytest

from machinery import rows, sources
from tests import kit
from tests.data.data_kit import TEMPLATE, chat, dahoas, load, many, write

LINES = [*many(20, dahoas), *[{"prompt": "Q?", "chosen": " same", "rejected": " same"}] * 2]


def counted(tokenizer, file, stage="reward", limit=64, **flags):
    """Returns how many rows are tokenised to load a file's, and what they are then."""
    count, tokenise_row = [], rows.tokenise_row
    rows.tokenise_row = lambda *row, **options: count.append(1) or tokenise_row(*row, **options)
    try:
        parts = load(tokenizer, [file], stage, limit, **flags)
    finally:
        rows.tokenise_row = tokenise_row
    return len(count), [part.to_list() for part in parts]


def test_a_second_start_tokenises_nothing(tokenizer, tmp_path, capsys):
    """Hundreds of thousands of rows take minutes. What was dropped is said again."""
    file = write(tmp_path / "a.jsonl", LINES)
    (first, made), (second, found) = counted(tokenizer, file), counted(tokenizer, file)
    assert first == len(LINES) and second == 0 and found == made
    assert capsys.readouterr().out.count("2 of 21 rows are dropped: chosen equals rejected") == 2


def counted_on_a_rank(file):
    from machinery import folders

    return counted(folders.load_tokenizer(kit.TOKENIZER), file)


def test_each_row_is_tokenised_by_one_rank_for_all(tmp_path):
    """They start together, and the others wait for it: for its file, not in a collective.
    Which rank takes the rows of training and which the held-out ones is left to chance."""
    file = write(tmp_path / "a.jsonl", LINES)
    found = kit.on_ranks(counted_on_a_rank, 3, file)
    assert sum(count for count, _ in found) == len(LINES)
    assert found[0][1] == found[1][1] == found[2][1]


CHATS = many(20, lambda i: {name: chat(f"Q{i}?", name) for name in ("chosen", "rejected")})


def with_template(tokenizer, file, changed):
    tokenizer.chat_template = changed


def with_eos(tokenizer, file, changed):
    tokenizer.eos_token = changed


def with_token(tokenizer, file, changed):
    tokenizer.add_tokens(changed)


def with_other_text(tokenizer, file, changed):
    """As long as it was, and with the time of before: only the bytes differ."""
    before, text = os.stat(file), open(file).read()
    assert "Q7?" in text and len(changed) == 3
    with open(file, "w") as new:
        new.write(text.replace("Q7?", changed))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [
    (with_template, TEMPLATE.replace(">", ":")),
    (with_eos, "<pad>"),
    (with_token, "Q7"),
    (with_other_text, "R7?"),
]


def test_a_parquet_file_that_was_written_anew_is_read_anew(tokenizer, tmp_path):
    """Under the same name `datasets` would take what it has kept of the old one."""
    for letter in "QR":
        lines = [{**dahoas(i), "prompt": f"{letter}{i}?"} for i in range(20)]
        _, parts = counted(tokenizer, write(tmp_path / "a.parquet", lines))
        assert {row["prompt"][0] for part in parts for row in part} == {letter}


@pytest.mark.parametrize("change, changed", CHANGES)
def test_other_texts_or_another_tokenizer_are_tokenised_anew(tokenizer, tmp_path, change, changed):
    """Ids of another tokenizer would train in silence on another text."""
    tokenizer.chat_template = TEMPLATE
    file = write(tmp_path / "a.jsonl", CHATS)
    _, before = counted(tokenizer, file)
    change(tokenizer, file, changed)
    count, after = counted(tokenizer, file)
    assert count == len(CHATS) and after != before


def test_other_flags_are_tokenised_anew(tokenizer, tmp_path):
    """A shorter limit, other columns, another stage, other turns that are learned."""
    file, options = write(tmp_path / "a.jsonl", many(20, dahoas)), {"stage": "sft"}
    changes = [{}, {"limit": 5}, {"train_on": "everything"}, {"columns": {"prompt": "response"}}]
    for change in [*changes, {"stage": "reward"}, {"stage": "ppo"}]:
        assert counted(tokenizer, file, **{**options, **change})[0] == 20, change
        assert counted(tokenizer, file, **{**options, **change})[0] == 0, change


def test_what_other_code_has_made_is_not_taken(tokenizer, tmp_path, monkeypatch):
    """After an update of this project, or of the library, rows may be made in another way."""
    file = write(tmp_path / "a.jsonl", LINES)
    counted(tokenizer, file)
    monkeypatch.setattr(rows.transformers, "__version__", "6.0")
    assert counted(tokenizer, file)[0] == len(LINES)
    monkeypatch.setattr(sources, "own_code", lambda: ["another"])
    assert counted(tokenizer, file)[0] == len(LINES)
