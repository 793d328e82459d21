"""Who gets which row: shares of the steps, held-out prompts, and how a run knows its data again."""

import json
import zlib

from data_kit import TEMPLATE, chat, dahoas, load, many, write
from datasets import Dataset

from machinery import rows
from machinery.rows import STAGES


def prompts(tokenizer, path, stage):
    """Returns the prompts that a step trains on with --data_split 2,4,4, and those held out."""
    return [set(part["prompt"]) for part in load(tokenizer, [path], stage, split=(2, 4, 4))]


def test_the_three_steps_share_the_rows_out(tokenizer, tmp_path, capsys):
    """2:4:4: the parts are disjoint, and together they are everything. A reward model that has seen
    the responses that step 1 was taught would prefer them for the wrong reason. Each step says what
    it takes. --seed has no part in it: steps may be run with different ones."""
    write(tmp_path / "train.jsonl", many(100, dahoas))
    write(tmp_path / "test.jsonl", [dahoas(1000)])
    parts = [prompts(tokenizer, tmp_path, stage)[0] for stage in STAGES]
    assert [len(part) for part in parts] == [20, 40, 40] and len(set.union(*parts)) == 100
    said = capsys.readouterr().out.splitlines()
    of_all = "of 100 rows (--data_split 2,4,4), 1 of 1 held-out rows"
    assert said == [f"{tmp_path}: {n} {of_all}" for n in (20, 40, 40)]


def test_several_paths_are_blended(tokenizer, tmp_path):
    """Each in its own format; each gives this step its share, and prompts that are held out."""
    one = write(tmp_path / "a.jsonl", many(100, dahoas))
    make = lambda i: {"instruction": f"Do {i}", "output": "yes"}  # noqa: E731
    two = write(tmp_path / "b.parquet", many(100, make))
    for part, least in zip(load(tokenizer, [one, two], split=(1, 1, 0)), (40, 1)):
        for start in ("Q", "\n\nHuman"):
            assert sum(prompt.startswith(start) for prompt in part["prompt"]) >= least


def test_held_out_prompts_are_never_trained_on_without_a_test_split(tokenizer, tmp_path):
    """A twentieth of the prompts is held out, by hash: prompts, not rows, so that a prompt with
    many responses is on one side; and the same ones for all three steps, so that step 3 is not
    judged on what step 1 was taught."""
    # Every prompt is there twice.
    lines = [{**dahoas(i % 200), "response": f" r{i}", "chosen": f" c{i}"} for i in range(400)]
    path = write(tmp_path / "rows.jsonl", lines)
    found = [prompts(tokenizer, path, stage) for stage in STAGES]
    trained, held_out = (set.union(*parts) for parts in zip(*found))
    assert len(trained) == 190 and not trained & held_out
    assert held_out == set(sorted(trained | held_out, key=lambda p: zlib.crc32(p.encode()))[:10])
    assert found[0][1] == found[1][1] == found[2][1]


def test_held_out_prompts_are_never_trained_on_with_a_test_split(tokenizer, tmp_path, capsys):
    """A test file whose prompts are also in the training file measures memory. Such rows are not
    counted as held out, also where the prompt is in another step's part of the training file."""
    write(tmp_path / "train.jsonl", many(60, dahoas))
    write(tmp_path / "test.jsonl", many(80, dahoas)[40:])
    found = [prompts(tokenizer, tmp_path, stage) for stage in STAGES]
    assert "of 20 held-out rows" in capsys.readouterr().out
    trained, held_out = (set.union(*parts) for parts in zip(*found))
    assert held_out == {f"Q{i}?" for i in range(60, 80)} and not trained & held_out


def test_what_one_source_trains_on_no_other_holds_out(tokenizer, tmp_path):
    """In a blend, in any order: prompt 0 is trained on in a, and 7 in b."""
    write(tmp_path / "a/train.jsonl", many(6, dahoas))
    write(tmp_path / "a/test.jsonl", [dahoas(7), dahoas(8)])
    write(tmp_path / "b/train.jsonl", [dahoas(7), dahoas(9)])
    write(tmp_path / "b/test.jsonl", [dahoas(10), dahoas(0)])
    for names in ("ab", "ba"):
        _, test = load(tokenizer, [tmp_path / name for name in names])
        assert sorted(test["prompt"]) == ["Q10?", "Q8?"]


def test_of_many_held_out_rows_some_are_taken(tokenizer, tmp_path, capsys, monkeypatch):
    """Of each source alike, the same ones in every run, and said: an evaluation of all rows of a
    large set takes longer than the steps between. --num_eval_prompts may ask for more."""
    monkeypatch.setattr(rows, "MOST_HELD_OUT", 6)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write(path / "train.jsonl", many(10, dahoas))
        write(path / "test.jsonl", [dahoas(f"{path.name}{i}") for i in range(20)])
    first, again = (load(tokenizer, paths)[1]["prompt"] for _ in range(2))
    assert sorted(prompt[1] for prompt in first) == list("aaabbb") and [*first] == [*again]
    assert capsys.readouterr().out.count("3 of 20 held-out rows") == 4
    assert len(load(tokenizer, paths, "ppo", num_eval_prompts=9)[1]) == 8


def test_what_step_3_asks_is_not_held_out(tokenizer, tmp_path):
    """The same question without a response in both files: a held-out prompt that is trained on."""
    tokenizer.chat_template = TEMPLATE
    lines = [{"messages": chat(f"Q{i}?", "A.", "Why?")} for i in range(6)]
    write(tmp_path / "train.jsonl", lines[:5])
    write(tmp_path / "test.jsonl", [lines[0], lines[5]])
    _, held_out = load(tokenizer, [tmp_path], "ppo")
    assert [json.loads(prompt) for prompt in held_out["prompt"]] == [lines[5]["messages"]]


def test_the_fingerprint_is_of_the_rows_themselves(tokenizer, tmp_path):
    """Equal data in another place and in another kind of file has an equal fingerprint, by which
    --resume knows it; one letter more has another."""
    lines = many(40, dahoas)
    edited = [*lines[:-1], {**lines[-1], "response": " r39."}]
    prints = []
    made = ((0, "jsonl", lines), (1, "parquet", lines), (2, "jsonl", edited))
    for number, kind, of in made:
        write(tmp_path / f"{number}/train.{kind}", of)
        write(tmp_path / f"{number}/test.{kind}", [dahoas(50)])
        prints.append(rows.fingerprint(load(tokenizer, [tmp_path / str(number)])[0]))
    assert prints[0] == prints[1] and prints[0] != prints[2]


def test_a_date_in_a_chat_template_changes_no_fingerprint():
    """Some templates write today's date. A run that is resumed tomorrow has the same data."""
    table = {"prompt": ["[]"], "prompt_ids": [[5, 6]], "extra": ["{}"]}
    today, tomorrow, other = (
        Dataset.from_dict({**table, **changed})
        for changed in ({}, {"prompt_ids": [[5, 7]]}, {"prompt": ["[1]"]})
    )
    assert rows.fingerprint(today) == rows.fingerprint(tomorrow) != rows.fingerprint(other)


def test_several_processes_make_the_rows_that_one_makes(tokenizer, tmp_path, monkeypatch, capsys):
    """Where there are many rows, of this step's share. What is dropped is counted once."""
    lines = [*many(600, dahoas), {**dahoas(0), "chosen": " x", "rejected": " x"}]
    file = write(tmp_path / "a.jsonl", lines)
    prints = []
    for least in (10**9, 1):
        monkeypatch.setattr(rows, "MANY", least)
        parts = load(tokenizer, [file], "reward", split=(0, 1, 0))
        prints.append([rows.fingerprint(part) for part in parts])
    said = capsys.readouterr().out
    assert said.count("1 of 571 rows are dropped: chosen equals") == 2
    assert prints[0] == prints[1]
