"""Rows are tokenised once: what is kept, who makes it, and when it is made anew."""

import copy

import datasets
import pytest
from data_kit import chat, dahoas, load, many, write

from machinery.base import ranks
from machinery.base.refused import Refused
from machinery.data import row_cache, rows


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """However few the rows, they are kept, in an empty cache: its folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(row_cache, "MANY", 1)
    return tmp_path / "cache/rlhf_rows"


def test_rows_are_tokenised_once(tokenizer, tmp_path, monkeypatch, capsys, kept):
    """By several processes, each with a part of this step's share; the next start, and the other
    ranks of the host, read the file. The rows are those that one rank makes in its memory, and the
    dropped ones are counted at each start."""
    lines = [*many(600, dahoas), {**dahoas(0), "chosen": " x", "rejected": " x"}]
    file = write(tmp_path / "a.jsonl", lines)
    prints = []
    for cores, least in ((2, 1), (3, 1), (3, 10**9)):  # the last one without the cache
        monkeypatch.setattr(row_cache, "MANY", least)
        monkeypatch.setattr(row_cache.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        parts = load(tokenizer, [file], "reward", split=(0, 1, 0))
        prints.append([rows.fingerprint(part) for part in parts])
    said = capsys.readouterr().out
    assert said.count("a.jsonl, train: tokenising ") == 1 and said.count("chosen equals") == 3
    assert len([*kept.glob("*_of_00002.arrow")]) == 2
    assert prints[0] == prints[1] == prints[2]


@pytest.mark.parametrize("rank, there", [("0", True), ("1", False)])
def test_the_first_rank_of_a_host_makes_them(tokenizer, tmp_path, monkeypatch, kept, rank, there):
    """It meets the others when the file is there; they look for it only after that."""
    met = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(ranks, "barrier", lambda: met.append(any(kept.glob("*.arrow"))))
    write(tmp_path / "train.jsonl", many(9, dahoas))
    write(tmp_path / "test.jsonl", [dahoas(50)])
    load(tokenizer, [tmp_path])
    assert met[0] == there and len(met) == 2


CHANGES = {
    "--max_seq_len": lambda tokenizer, options: options.update(limit=65),
    "--columns": lambda tokenizer, options: options.update(names={"prompt": "chosen"}),
    "EOS": lambda tokenizer, options: tokenizer.add_special_tokens({"eos_token": "<pad>"}),
    "a token more": lambda tokenizer, options: tokenizer.add_tokens(["zebra"]),
    "the chat template": lambda tokenizer, options: setattr(tokenizer, "chat_template", "x"),
    "the code": lambda tokenizer, options: (row_cache.CODE / "models/a.py").write_text("# other"),
    "a library": lambda tokenizer, options: setattr(row_cache.jinja2, "__version__", "0"),
}


@pytest.mark.parametrize("what", ["nothing", *CHANGES])
def test_rows_of_other_data_flags_tokenizers_or_code_are_made_anew(
    tokenizer, tmp_path, monkeypatch, what
):
    """A cache that knew a file by its name would train on the rows of yesterday. All that rows
    depend on is in the key, the code of all rooms too; that the tokenizer was used is not."""
    assert (row_cache.CODE / "models/model_folders.py").exists()
    monkeypatch.setattr(row_cache.jinja2, "__version__", "1")  # put back after the test
    monkeypatch.setattr(row_cache, "CODE", tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.py").write_text("# one")
    options = {"tokenizer": tokenizer, "stage": "sft", "limit": 64, "train_on": None, "names": {}}
    before = row_cache.key(options, "content")
    rows.tokenise_row(dahoas(1), **options)
    CHANGES.get(what, lambda *_: None)(tokenizer, options)
    assert (before == row_cache.key(options, "content")) == (what == "nothing")
    assert before != row_cache.key(options, "other content")


def test_code_without_a_version_is_not_trusted_to_be_the_same(tokenizer):
    """A tokenizer that came with a model, by --trust_remote_code, may read other files, too."""
    theirs = type("Theirs", (), {"__module__": "transformers_modules.theirs"})()
    many_rows = range(row_cache.MANY)
    assert row_cache.pays(many_rows, tokenizer) and not row_cache.pays(many_rows, theirs)


def test_chats_without_a_chat_template_are_refused(tokenizer, tmp_path, kept):
    """Also by the processes that tokenise, which cannot end the run themselves."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    file = write(tmp_path / "a.jsonl", [{"messages": chat(f"Q{i}?", "So.")} for i in range(300)])
    with pytest.raises(Refused) as caught:
        load(tokenizer, [file])
    assert caught.value.rule == "no-chat-template"
