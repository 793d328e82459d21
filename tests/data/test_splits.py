"""Who gets which row: shares of the steps, held-out prompts, and how a run knows its data again."""

import json
import random
import zlib

import pytest
from data_kit import TEMPLATE, chat, dahoas, load, many, write
from datasets import Dataset

from machinery import rows
from machinery.rows import STAGES


def numbers(part):
    return [json.loads(extra)["n"] for extra in part["extra"]]


@pytest.mark.parametrize("seed", range(6))
def test_the_steps_share_the_rows_out(tokenizer, tmp_path, seed):
    """Against plain loops, of one to three sources with prompts that come several times. The shares
    are disjoint: a reward model that has seen the responses that step 1 was taught would prefer
    them for the wrong reason. Held out is a source's test part, or a twentieth of its prompts, by
    hash: prompts, not rows, and for all steps the same. But no prompt that any step trains on in
    any source: that would measure memory. Rows keep their order. --seed has no part in it."""
    rng, sources = random.Random(seed), {}
    for name in "abc"[: 1 + seed % 3]:
        sources[name] = {}
        for part in ("train", "test")[: rng.choice([1, 2])]:
            lines = [dahoas(rng.randrange(150)) for _ in range(rng.randint(60, 120))]
            lines = [{**line, "n": f"{name} {part} {i}"} for i, line in enumerate(lines)]
            write(tmp_path / f"{name}/{part}.jsonl", lines)
            sources[name][part] = lines
    trained = {}
    for name, parts in sources.items():
        asked = {line["prompt"] for line in parts["train"]}
        by_hash = sorted(asked, key=lambda prompt: zlib.crc32(prompt.encode()))
        held_out = by_hash[: 0 if "test" in parts else max(1, len(asked) // 20)]
        trained[name] = [line for line in parts["train"] if line["prompt"] not in held_out]
    asked = {line["prompt"] for lines in trained.values() for line in lines}
    held_out = [
        line["n"]
        for parts in sources.values()
        for line in parts.get("test", parts["train"])
        if line["prompt"] not in asked
    ]
    paths = [tmp_path / name for name in sources]
    found = {stage: load(tokenizer, paths, stage, split=(2, 4, 4)) for stage in STAGES}
    assert all(numbers(test) == held_out for _, test in found.values())
    shares = [numbers(train) for train, _ in found.values()]
    for name, lines in trained.items():
        own = [[n for n in share if n[0] == name] for share in shares]
        whole = [line["n"] for line in lines]
        assert sorted(sum(own, []), key=whole.index) == whole
        for part, share in zip(own, (0.2, 0.4, 0.4)):
            assert sorted(part, key=whole.index) == part and abs(len(part) - share * len(whole)) < 1
    assert shares == [sorted(share, key=lambda n: n[0]) for share in shares]


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
    said = f"{paths[0]}: 10 of 10 rows (--data_split 1,0,0), 3 of 20 held-out rows\n"
    assert capsys.readouterr().out.count(said) == 2
    assert len(load(tokenizer, paths, "ppo", num_eval_prompts=9)[1]) == 8


def test_what_step_3_asks_is_not_held_out(tokenizer, tmp_path):
    """The same question without a response in both files, or with one in one of them: a held-out
    prompt that is trained on."""
    tokenizer.chat_template = TEMPLATE
    asked = [chat(f"Q{i}?", "A.", "Why?") for i in range(7)]
    answered = [{"prompt": messages, "response": "B."} for messages in asked]
    asked = [{"messages": messages} for messages in asked]
    write(tmp_path / "train.jsonl", [*asked[:4], *answered[4:6]])
    write(tmp_path / "test.jsonl", [asked[0], answered[1], asked[4], asked[6]])
    _, held_out = load(tokenizer, [tmp_path], "ppo")
    assert [json.loads(prompt) for prompt in held_out["prompt"]] == [asked[6]["messages"]]


def test_the_fingerprint_is_of_the_rows_themselves():
    """By it --resume knows the data, wherever they lie, and whatever date a chat template writes
    into the tokens. One letter more in a prompt or a response (`extra`) is another one."""
    table = {"prompt": ["[]"], "prompt_ids": [[5, 6]], "extra": ["{}"], "place": ["a, line 1"]}
    changes = {}, {"prompt_ids": [[5, 7]], "place": ["b"]}, {"prompt": ["[1]"]}, {"extra": ["{1}"]}
    prints = [rows.fingerprint(Dataset.from_dict({**table, **changed})) for changed in changes]
    assert prints[0] == prints[1] and len({*prints}) == 3


def test_several_processes_make_the_rows_that_one_makes(tokenizer, tmp_path, monkeypatch, capsys):
    """Where there are many rows, of this step's share. What is dropped is counted once."""
    lines = [*many(600, dahoas), {**dahoas(0), "chosen": " x", "rejected": " x"}]
    file, prints = write(tmp_path / "a.jsonl", lines), []
    for least in (10**9, 1):
        monkeypatch.setattr(rows, "MANY", least)
        parts = load(tokenizer, [file], "reward", split=(0, 1, 0))
        prints.append([rows.fingerprint(part) for part in parts])
    said = capsys.readouterr().out
    assert said.count("1 of 571 rows are dropped: chosen equals") == 2
    assert prints[0] == prints[1]
