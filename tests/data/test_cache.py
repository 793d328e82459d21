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


def test_a_second_start_tokenises_nothing(tokenizer, tmp_path, capsys, monkeypatch):
    """Hundreds of thousands of rows take minutes. What was dropped is said again. But what other
    code has made, of this project or of a library, is not taken: it may make other rows."""
    file = write(tmp_path / "a.jsonl", LINES)
    (first, made), (second, found) = counted(tokenizer, file), counted(tokenizer, file)
    assert first == len(LINES) and second == 0 and found == made
    assert capsys.readouterr().out.count("2 of 21 rows are dropped: chosen equals rejected") == 2
    monkeypatch.setattr(rows.transformers, "__version__", "6.0")
    assert counted(tokenizer, file)[0] == len(LINES)
    monkeypatch.setattr(sources, "own_code", lambda: ["another"])
    assert counted(tokenizer, file)[0] == len(LINES)


def counted_on_a_rank(file):
    from machinery import folders

    return counted(folders.load_tokenizer(kit.TOKENIZER), file)


def test_each_row_is_tokenised_by_one_rank_for_all(tmp_path):
    """They start together, and the others wait for it: for its file, not in a collective.
    Which rank takes the rows of training and which the held-out ones is left to chance."""
    found = kit.on_ranks(counted_on_a_rank, 3, write(tmp_path / "a.jsonl", LINES))
    assert sum(count for count, _ in found) == len(LINES)
    assert found[0][1] == found[1][1] == found[2][1]


def ask_otherwise(file):
    """Changes the text of a file. It is as long as before, and as old: only the bytes differ."""
    before = os.stat(file)
    pairs = many(20, lambda i: {name: chat(f"R{i}?", name) for name in ("chosen", "rejected")})
    write(file, pairs)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_other_texts_or_another_tokenizer_are_tokenised_anew(tokenizer, tmp_path, kind):
    """Ids of another tokenizer would train in silence on another text; and of a file that was
    written anew under its name, `datasets` would take what it has kept of the old one."""
    tokenizer.chat_template = TEMPLATE
    file = tmp_path / f"a{kind}"
    pairs = many(20, lambda i: {name: chat(f"Q{i}?", name) for name in ("chosen", "rejected")})
    write(file, pairs)
    _, before = counted(tokenizer, file)
    for change in (
        lambda: setattr(tokenizer, "chat_template", TEMPLATE.replace(">", ":")),
        lambda: setattr(tokenizer, "eos_token", "<pad>"),
        lambda: tokenizer.add_tokens("Q7"),
        lambda: ask_otherwise(file),
    ):
        change()
        count, after = counted(tokenizer, file)
        assert count == 20 and after != before
        before = after


def test_other_flags_are_tokenised_anew(tokenizer, tmp_path):
    """A shorter limit, other columns, another stage, other turns that are learned."""
    file = write(tmp_path / "a.jsonl", many(20, dahoas))
    changes = [{}, {"limit": 5}, {"train_on": "everything"}, {"columns": {"prompt": "response"}}]
    for change in [*changes, {"stage": "reward"}, {"stage": "ppo"}]:
        for expected in (20, 0):
            assert counted(tokenizer, file, **{"stage": "sft", **change})[0] == expected, change
