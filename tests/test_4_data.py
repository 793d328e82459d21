"""Data: every known format, what is kept, who gets it, and in which order."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

import common
import ppo
import reward
import sft
from machinery.base import ranks
from machinery.data import data_split, formats, row_cache, rows, sources, tokens
from machinery.models import saving
from machinery.rollout import judging, reward_functions
from machinery.run.run import Run

STAGES = {1: "sft", 2: "reward", 3: "ppo"}


def write(path, lines):
    """Rows -> a file of the kind that its name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    elif path.suffix == ".json":
        path.write_text(json.dumps(lines))
    else:
        Dataset.from_list(lines).to_parquet(path)
    return str(path)


def load(tokenizer, paths, step=1, limit=64, split=(1, 0, 0), seed=1):
    """Returns train, held-out of one step. By default step 1 gets all rows."""
    split = (
        [float(i == step - 1) for i in range(3)]
        if split == (1, 0, 0) and step in (2, 3)
        else list(split)
    )
    return rows.load_rows(
        SimpleNamespace(
            data_path=[str(p) for p in paths], data_split=split, seed=seed, strict=False
        ),
        tokenizer,
        STAGES[step],
        limit,
    )


def folder(path, lines):
    """Rows -> a folder with a train and a test file, the last fifth of them in test."""
    cut = len(lines) * 4 // 5
    write(path / "train.jsonl", lines[:cut])
    write(path / "test.jsonl", lines[cut:])
    return path


def texts(tokenizer, found):
    """Returns {(prompt, answer, ...)} back from the token ids, EOS cut off."""
    return {
        (tokenizer.decode(r["prompt_ids"]), *(tokenizer.decode(a[:-1]) for a in r["responses"]))
        for r in found
    }


def both(parts):
    """Train and held-out together."""
    return [row for part in parts for row in part]


def get_args(*argv, script=sft):
    """The flags of a script that is given data of one's own."""
    return script.get_args(["--data_path", *map(str, argv)])


def many(n, make):
    return [make(i) for i in range(n)]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat(*contents):
    """Messages that alternate between user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def turn(content):
    """The assistant's message alone."""
    return [{"role": "assistant", "content": content}]


def sharegpt(*contents):
    """What `chat` is, with ShareGPT's names."""
    return [{"from": ("human", "gpt")[i % 2], "value": c} for i, c in enumerate(contents)]


# --------------------------------------------------------------------------------------------------
# Formats
# --------------------------------------------------------------------------------------------------
def dahoas(i):
    return {"prompt": f"Q{i}?", "response": f" r{i}", "chosen": f" c{i}", "rejected": f" x{i}"}


def dialogue(i):
    start = f"\n\nHuman: Q{i}?\n\nAssistant: Hm.\n\nHuman: Yes?\n\nAssistant:"
    return {"chosen": start + f" c{i}", "rejected": start + f" x{i}"}


FORMATS = {  # name: (make row i, {step: what is made of row 0})
    "prompt, response, chosen, rejected (Dahoas)": (
        dahoas,
        {1: ("Q0?", " r0"), 2: ("Q0?", " c0", " x0"), 3: ("Q0?",)},
    ),
    "prompt, response": (
        lambda i: {"prompt": f"Q{i}?", "response": f" r{i}"},
        {1: ("Q0?", " r0"), 3: ("Q0?",)},
    ),
    "prompt, chosen, rejected: chosen is the answer": (
        lambda i: {"prompt": f"Q{i}?", "chosen": f" c{i}", "rejected": f" x{i}"},
        {1: ("Q0?", " c0"), 2: ("Q0?", " c0", " x0")},
    ),
    "whole dialogues (Anthropic HH), split at the last common Assistant turn": (
        dialogue,
        {
            step: ("\n\nHuman: Q0?\n\nAssistant: Hm.\n\nHuman: Yes?\n\nAssistant:", *answers)
            for step, answers in {1: (" c0",), 2: (" c0", " x0"), 3: ()}.items()
        },
    ),
    "messages": (
        lambda i: {"messages": chat(f"Q{i}?", "Hm.", "Yes?", f"r{i}")},
        {
            1: ("<user>Q0?\n<assistant>Hm.\n<user>Yes?\n<assistant>", "r0"),
            3: ("<user>Q0?\n<assistant>Hm.\n<user>Yes?\n<assistant>",),
        },
    ),
    "chat chosen, rejected": (
        lambda i: {"chosen": chat(f"Q{i}?", f"c{i}"), "rejected": chat(f"Q{i}?", f"x{i}")},
        {1: ("<user>Q0?\n<assistant>", "c0"), 2: ("<user>Q0?\n<assistant>", "c0", "x0")},
    ),
    "chat chosen, rejected beside prompt and messages (UltraFeedback)": (
        lambda i: {
            "prompt": f"Q{i}?",
            "messages": chat(f"Q{i}?", f"c{i}"),
            "chosen": chat(f"Q{i}?", f"c{i}"),
            "rejected": chat(f"Q{i}?", f"x{i}"),
        },
        {
            1: ("<user>Q0?\n<assistant>", "c0"),
            2: ("<user>Q0?\n<assistant>", "c0", "x0"),
            3: ("<user>Q0?\n<assistant>",),
        },
    ),
    "instruction, input, output (Alpaca)": (
        lambda i: {"instruction": f"Q{i}?", "input": f"in{i}", "output": f"r{i}"},
        {
            1: ("\n\nHuman: Q0?\nin0\n\nAssistant:", " r0"),
            3: ("\n\nHuman: Q0?\nin0\n\nAssistant:",),
        },
    ),
    "instruction, output": (
        lambda i: {"instruction": f"Q{i}?", "output": f"r{i}"},
        {1: ("\n\nHuman: Q0?\n\nAssistant:", " r0")},
    ),
    "prompt, completion": (
        lambda i: {"prompt": f"Q{i}?", "completion": f" r{i}"},
        {1: ("Q0?", " r0"), 3: ("Q0?",)},
    ),
    "prompt, completion as messages (TRL)": (
        lambda i: {"prompt": chat(f"Q{i}?"), "completion": chat("", f"r{i}")[1:]},
        {1: ("<user>Q0?\n<assistant>", "r0"), 3: ("<user>Q0?\n<assistant>",)},
    ),
    "prompt as messages, chosen, rejected as messages (TRL)": (
        lambda i: {"prompt": chat(f"Q{i}?"), "chosen": turn(f"c{i}"), "rejected": turn(f"x{i}")},
        {
            1: ("<user>Q0?\n<assistant>", "c0"),
            2: ("<user>Q0?\n<assistant>", "c0", "x0"),
            3: ("<user>Q0?\n<assistant>",),
        },
    ),
    "conversations (ShareGPT)": (
        lambda i: {"conversations": sharegpt(f"Q{i}?", "Hm.", "Yes?", f"r{i}"), "id": i},
        {
            1: ("<user>Q0?\n<assistant>Hm.\n<user>Yes?\n<assistant>", "r0"),
            3: ("<user>Q0?\n<assistant>Hm.\n<user>Yes?\n<assistant>",),
        },
    ),
    "question, answers, scores (WebGPT)": (
        lambda i: {
            **{"question": {"full_text": f"Q{i}?"}, "score_0": -1.0, "score_1": 1.0},
            **{"answer_0": f"x{i} [1].", "answer_1": f"c{i} [1, 2] or [3]."},
        },
        {
            1: ("\n\nHuman: Q0?\n\nAssistant:", " c0 or."),
            2: ("\n\nHuman: Q0?\n\nAssistant:", " c0 or.", " x0."),
            3: ("\n\nHuman: Q0?\n\nAssistant:",),
        },
    ),
    "history, two comments, labels (SHP)": (
        lambda i: {
            **{"history": f"Q{i}?", "labels": i % 2},
            **{"human_ref_A": "AB"[i % 2 == 0], "human_ref_B": "AB"[i % 2]},
        },
        {
            1: ("\n\nHuman: Q0?\n\nAssistant:", " A"),
            2: ("\n\nHuman: Q0?\n\nAssistant:", " A", " B"),
            3: ("\n\nHuman: Q0?\n\nAssistant:",),
        },
    ),
    "prompt alone": (lambda i: {"prompt": f"Q{i}?"}, {3: ("Q0?",)}),
    "instruction alone": (
        lambda i: {"instruction": f"Q{i}?"},
        {3: ("\n\nHuman: Q0?\n\nAssistant:",)},
    ),
}


@pytest.mark.parametrize(
    "name, step", [(name, step) for name, (_, steps) in FORMATS.items() for step in steps]
)
def test_the_columns_say_the_format(tokenizer, tmp_path, name, step):
    """Each known set of columns, for each step that can use it: prompt and answers
    come back from the token ids, and no row is lost between training and held-out."""
    make, expected = FORMATS[name]
    tokenizer.chat_template = TEMPLATE
    found = both(load(tokenizer, [folder(tmp_path, many(10, make))], step))
    assert len(found) == 10
    assert expected[step] in texts(tokenizer, found)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_the_kind_of_file_does_not_matter(tokenizer, tmp_path, kind):
    """The same rows from JSON lines, a JSON list, and parquet."""
    found = both(load(tokenizer, [write(tmp_path / f"rows{kind}", many(100, dahoas))]))
    assert texts(tokenizer, found) == {(f"Q{i}?", f" r{i}") for i in range(100)}


def test_a_folder_holds_train_and_test(tokenizer, tmp_path):
    """Files with "test" in their name are held out; all the others, however
    many, are trained on."""
    write(tmp_path / "train-0.jsonl", many(10, dahoas))
    write(tmp_path / "train-1.jsonl", many(20, dahoas)[10:])
    write(tmp_path / "test.jsonl", many(25, dahoas)[20:])
    train, held_out = load(tokenizer, [tmp_path])
    assert {p for p, _ in texts(tokenizer, train)} == {f"Q{i}?" for i in range(20)}
    assert {p for p, _ in texts(tokenizer, held_out)} == {f"Q{i}?" for i in range(20, 25)}


def test_a_name_that_only_contains_test_is_not_held_out(tokenizer, tmp_path):
    """The words "latest" and "retrieval" do not name splits."""
    write(tmp_path / "latest.jsonl", many(50, dahoas))
    write(tmp_path / "retrieval.jsonl", many(100, dahoas)[50:])
    train, held_out = load(tokenizer, [tmp_path])
    assert len(train) + len(held_out) == 100 and len(train) > 80


def test_several_paths_are_blended(tokenizer, tmp_path):
    """Each in its own format; each gives this step its share."""
    one = write(tmp_path / "a.jsonl", many(100, dahoas))
    two = write(
        tmp_path / "b.parquet", many(100, lambda i: {"instruction": f"Do {i}", "output": "yes"})
    )
    train, held_out = load(tokenizer, [one, two], split=(1, 1, 0))
    for start in ("Q", "\n\nHuman"):
        assert 40 <= sum(p.startswith(start) for p in train["prompt"]) <= 50
        assert any(p.startswith(start) for p in held_out["prompt"])


def test_chat_goes_through_the_tokenizers_template(tokenizer):
    """The prompt ends with the template's opening of an assistant turn; the
    answer follows it, and EOS."""
    tokenizer.chat_template = TEMPLATE
    ids = rows.tokenise_prompt(tokenizer, chat("Why?", "So.", "Really?"))
    assert tokenizer.decode(ids) == "<user>Why?\n<assistant>So.\n<user>Really?\n<assistant>"


def test_a_users_special_tokens_are_data_in_chat_too(tokenizer):
    """The template may write special tokens; the user's words may not."""
    tokenizer.chat_template = TEMPLATE
    ids = rows.tokenise_prompt(tokenizer, chat("say <eos> twice"))
    assert tokenizer.eos_token_id not in ids and "say <eos> twice" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"conversations": [{"from": "human", "value": None}]}, "conversations, 1: content must"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "conversations, 1: no message"),
        ({"prompt": "a", "completion": chat("b")}, "completion does not end with a message"),
        ({"prompt": "a", "completion": ["b"]}, "completion, 1: no message with a role"),
        ({"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": "A"}, "labels must be"),
        ({"history": ["a"], "human_ref_A": "b", "human_ref_B": "c", "labels": 1}, "history must"),
    ],
)
def test_a_row_of_a_known_format_that_cannot_be_read_is_refused(row, words):
    """Each names the column and what is wrong with it."""
    with pytest.raises(formats.BadRow, match=words):
        formats.read_row(row)


def test_a_comparison_that_nobody_decided_is_no_pair(tokenizer):
    """Two answers of WebGPT with the same score: step 1 learns one, step 2 drops the pair."""
    row = {"question": "Q?", "answer_0": "a", "answer_1": "b", "score_0": 0, "score_1": "0.0"}
    made = [rows.tokenise_row(row, tokenizer, stage, 64) for stage in ("sft", "reward")]
    assert [m["drop"] for m in made] == ["", "chosen equals rejected"]


COLUMNS = {  # --columns: (a row, {step: what is made of it})
    "prompt=question,response=answer": (
        {"question": "Q?", "answer": " a", "prompt": "other", "level": 1},
        {1: ("Q?", " a"), 3: ("Q?",)},
    ),
    "chosen=rejected,rejected=chosen": (
        {"prompt": "Q?", "chosen": " a", "rejected": " b"},
        {1: ("Q?", " b"), 2: ("Q?", " b", " a")},
    ),
    "messages=talk": ({"talk": chat("Q?", "a")}, {1: ("<user>Q?\n<assistant>", "a")}),
}


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
@pytest.mark.parametrize("names", COLUMNS)
def test_columns_may_have_other_names(tokenizer, tmp_path, names, kind):
    """--columns says which column is which, in all steps. Reward functions get the columns under
    the names that the file has."""
    tokenizer.chat_template = TEMPLATE
    row, expected = COLUMNS[names]
    source = [row] * 3
    write(tmp_path / f"train{kind}", source)
    for step, made in expected.items():
        args = get_args(tmp_path, "--columns", names)
        args.data_split = [1.0, 1.0, 1.0]
        write(tmp_path / f"test{kind}", [json.loads(json.dumps(row).replace("Q?", "T?"))])
        train, _ = rows.load_rows(args, tokenizer, STAGES[step], 64)
        assert texts(tokenizer, train) == {made}
        if step == 3:
            assert json.loads(train["extra"][0]) == {"question": "Q?", "answer": " a", "level": 1}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--columns", "question"], "'question' is not like prompt=question"),
        (["--columns", "promt=question"], "'promt' is not one of prompt, response"),
        (["--columns", "prompt=query"], "has no query.\n  It has prompt, response"),
    ],
)
def test_columns_that_are_not_there_are_refused(tokenizer, tmp_path, capsys, flags, words):
    """A name with a slip of the pen would else leave a column of the usual name in its place."""
    path = write(tmp_path / "rows.jsonl", many(30, dahoas))
    with pytest.raises(SystemExit) as stop:
        rows.load_rows(get_args(path, *flags), tokenizer, "sft", 64)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_in_a_blend_other_names_hold_where_they_are(tokenizer, tmp_path, capsys):
    """A source of one's own beside one that has the usual names."""
    one = write(tmp_path / "a.jsonl", many(40, lambda i: {"question": f"A{i}?", "answer": " a"}))
    two = write(tmp_path / "b.jsonl", many(40, dahoas))
    args = get_args(one, two, "--columns", "prompt=question,response=answer")
    found = both(rows.load_rows(args, tokenizer, "sft", 64))
    assert len(found) == 80 and {("A3?", " a"), ("Q3?", " r3")} <= texts(tokenizer, found)
    assert f"{two}: it has none of the columns" in capsys.readouterr().out


@pytest.mark.parametrize("step, count", [(1, 30 + 40), (2, 60), (3, 60)])
def test_sets_for_step_1_alone_are_known_by_name(
    tokenizer, tmp_path, capsys, monkeypatch, step, count
):
    """Two of DeepSpeed-Chat's list have responses that nobody compared: step 1 takes all their
    rows, the others none. Who speaks is marked as in the sets that they are blended with."""
    vicuna = "Be kind. USER: Q{i}? ASSISTANT: Hm. USER: V{i}? ASSISTANT:"
    hub = {
        "pvduy/sharegpt_alpaca_oa_vicuna_format": lambda i: {
            "prompt": vicuna.format(i=i), "label": "r",
        },
        "wangrui6/Zhihu-KOL": lambda i: {"INSTRUCTION": f"Z{i}?", "RESPONSE": "r", "SOURCE": "s"},
    }  # fmt: skip
    load_hub = lambda path: DatasetDict(train=Dataset.from_list(many(20, hub[path])))  # noqa: E731
    monkeypatch.setattr(sources.datasets, "load_dataset", load_hub)
    own = write(tmp_path / "rows.jsonl", many(150, dahoas))
    found = both(load(tokenizer, [*hub, own], step, split=(2, 4, 4)))
    named = {text for text in texts(tokenizer, found) if not text[0].startswith("Q")}
    assert len(found) == pytest.approx(count, abs=12) and bool(named) == (step == 1)
    assert capsys.readouterr().out.count("no rows for this step") == 2 * (step > 1)
    if step == 1:
        talk = "Be kind.\n\nHuman: Q1?\n\nAssistant: Hm.\n\nHuman: V1?\n\nAssistant:"
        assert {(talk, " r"), ("\n\nHuman: Z1?\n\nAssistant:", " r")} < named


def test_other_columns_travel_to_the_reward_function(tokenizer, tmp_path):
    """Step 3 keeps whatever else a row holds, for --reward_fn f(prompts,
    completions, **columns)."""
    path = folder(tmp_path, many(10, lambda i: {"prompt": f"Q{i}?", "topic": f"t{i}", "level": i}))
    row = next(r for r in load(tokenizer, [path], 3)[0] if r["prompt"] == "Q7?")
    assert json.loads(row["extra"]) == {"topic": "t7", "level": 7}


SPELLED = {  # what `datasets` would change, were it to guess the types of columns
    "a date": ["2024-01-08", "2024-01-09"],
    "a time": ["2024-01-08T10:00:00Z", "2024-01-08 10:00"],
    "integers beside a float": [1, 0.5, 2],
    "integers of 2^63 and more": [2**63, -(2**70), 1],
    "many types": [1, "1", None, True, [1, "a"], {"b": 2.0}],
    "objects with other keys": [{"a": 1}, {"b": "2024-01-08"}, {}],
    "digits in text": ["007", "1e5", "NaN"],
}


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_values_reach_a_reward_function_as_the_file_spells_them(tokenizer, tmp_path, kind):
    """A column of dates is text, an integer stays one, whatever stands in other rows. A row without
    a column has None in it. Dates are fine as prompts, too."""
    cycle = [{name: values[i % len(values)] for name, values in SPELLED.items()} for i in range(60)]
    lines = [{"prompt": f"2024-01-{i:02}", **row} for i, row in enumerate(cycle)]
    lines[7] = {"prompt": "2024-01-07"}
    train, held_out = load(tokenizer, [write(tmp_path / f"rows{kind}", lines)], 3)
    found = {row["prompt"]: json.loads(row["extra"]) for row in both((train, held_out))}
    assert found.pop("2024-01-07") == dict.fromkeys(SPELLED)
    assert found == {
        line["prompt"]: {name: line[name] for name in SPELLED} for line in lines if len(line) > 1
    }
    assert [*map(type, found["2024-01-02"].values())][:3] == [str, str, int]


def test_all_of_a_csv_file_is_text(tokenizer, tmp_path):
    """Quotes, line breaks and commas as in any .csv file; numbers and NA are text, too."""
    lines = ["Q,response,n", '"Q,\n""0""", r,007', *(f"Q{i}?, r{i},NA" for i in range(1, 40))]
    file = tmp_path / "rows.csv"
    file.write_text("\r\n".join(["prompt" + lines[0][1:], *lines[1:]]) + "\r\n")
    assert ('Q,\n"0"', " r") in texts(tokenizer, both(load(tokenizer, [file])))
    found = {row["prompt"]: json.loads(row["extra"]) for row in both(load(tokenizer, [file], 3))}
    assert found['Q,\n"0"'] == {"response": " r", "n": "007"} and found["Q1?"]["n"] == "NA"


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*?.json", "a::b.jsonl", "zip::a.csv", "a b.json"])
def test_a_file_may_have_any_name(tokenizer, tmp_path, name):
    """To `datasets` such characters are patterns, or the parts of an archive."""
    file = tmp_path / name
    if file.suffix == ".csv":
        file.write_text("prompt,response\n" + "".join(f"Q{i}?, r{i}\n" for i in range(30)))
    else:
        write(file, many(30, dahoas))
    write(tmp_path / "a1.jsonl", [{"prompt": "other", "response": "other"}] * 30)
    assert texts(tokenizer, both(load(tokenizer, [file]))) == {
        (f"Q{i}?", f" r{i}") for i in range(30)
    }


def test_the_fingerprint_is_of_the_rows_themselves(tokenizer, tmp_path):
    """Equal data in another place and in another kind of file has an equal fingerprint, by which
    --resume knows it; one letter more, or another order, has another."""
    lines = many(40, dahoas)
    edited = [*lines[:-1], {**lines[-1], "response": " r39."}]
    prints = []
    for number, rows_of in enumerate([lines, lines, lines, edited, lines[::-1]]):
        kind = ".parquet" if number == 1 else ".jsonl"
        (tmp_path / str(number)).mkdir()
        write(tmp_path / f"{number}/train{kind}", rows_of)
        write(tmp_path / f"{number}/test{kind}", [dahoas(50)])
        prints.append(rows.fingerprint(load(tokenizer, [tmp_path / str(number)])[0]))
    assert prints[0] == prints[1] == prints[2] and len(set(prints)) == 3


def test_a_date_in_a_chat_template_changes_no_fingerprint():
    """Some templates write today's date. A run that is resumed tomorrow has the same data."""
    table = {"prompt": ["[]"], "responses": [[[1, 2]]], "length": [7]}
    today = Dataset.from_dict({**table, "prompt_ids": [[5, 6]]})
    tomorrow = Dataset.from_dict({**table, "prompt_ids": [[5, 7]]})
    assert rows.fingerprint(today) == rows.fingerprint(tomorrow)
    assert rows.digest_of(today) != rows.digest_of(
        tomorrow
    )  # the cache: one may be a user's column
    other = Dataset.from_dict({**table, "prompt": ["[1]"], "prompt_ids": [[5, 6]]})
    assert rows.fingerprint(today) != rows.fingerprint(other)


def response(ids):
    texts = dict(prompt="Why?", text=" So.", chat=False, extra="{}")
    return dict(prompt_ids=[9], response_ids=ids, row_weight=1, ended=1.0, **texts)


def call(function, responses):
    """A reward function's scores of these responses: each stands on its response's last token."""
    laid_out = [
        {"prompt_ids": [9], "response_ids": [5, 1], "row_weight": 1, "ended": 1.0, **row}
        for row in responses
    ]
    (batch,) = ppo.make_micro_batches(SimpleNamespace(pad_token_id=0), laid_out, len(laid_out))
    scores = reward_functions.call_function(function, batch)
    assert torch.equal(scores != 0, batch.last > 0)
    return scores.sum(-1)


def test_a_reward_function_gets_the_columns_of_all_blended_sources():
    """Two sources with unlike columns: the function gets both columns in every batch,
    None where a row has none. Not the columns of whichever row comes first."""
    responses = [
        {"prompt": "a", "chat": False, "text": "A", "extra": '{"topic": "t"}'},
        {"prompt": "b", "chat": False, "text": "BB", "extra": '{"level": 2}'},
    ]

    def function(prompts, completions, topic, level):
        assert (prompts, topic, level) == (["a", "b"], ["t", None], [None, 2])
        return [len(c) for c in completions]

    assert call(function, responses).tolist() == [1, 2]


def test_a_reward_function_may_score_every_token():
    """A list of one number a token stands on the tokens; `completion_ids` says which they are.
    Numbers for fewer tokens than there are would be laid on the wrong ones."""
    responses = [response([5, 6, 1]), response([7, 1])]
    (batch,) = ppo.make_micro_batches(SimpleNamespace(pad_token_id=0), responses, 2)

    def each_token(prompts, completions, completion_ids, **columns):
        return [[float(token) for token in ids] for ids in completion_ids]

    def too_few(prompts, completions, **columns):
        return [[1.0] for _ in completions]

    scores = reward_functions.call_function(each_token, batch)
    assert scores.tolist() == [[5, 6, 1], [7, 1, 0]]
    with pytest.raises(SystemExit):
        reward_functions.call_function(too_few, batch)


@pytest.mark.parametrize("combine, expected", [("sum", [3.0, -2.0]), ("min", [1.0, -4.0])])
def test_several_judges_are_summed_or_the_harshest_one_counts(combine, expected):
    """Judges are a list of models and functions. Each lays its scores on tokens, (B, R), so that
    combining them is a sum of tensors, or a minimum."""
    responses = [response([5, 6, 1]), response([7, 1])]
    (batch,) = ppo.make_micro_batches(SimpleNamespace(pad_token_id=0), responses, 2)
    nothing = torch.zeros_like(batch.response_mask)
    policy = SimpleNamespace(before=lambda batch: (nothing, nothing))

    def judge(*scores):
        return lambda batch: torch.tensor(scores)[:, None] * batch.last

    judges = [judge(1.0, 2.0), judge(2.0, -4.0)]
    both = judging.combined(judges, combine)
    ppo.score(batch, policy, lambda batch: nothing, both, gold=None)
    assert batch.scores.sum(-1).tolist() == expected
    assert torch.equal(batch.scores != 0, batch.last > 0)


def test_the_harshest_judge_keeps_all_its_tokens():
    """One judge scores whole responses, another each token: 0.5 + 0.5 is less than 2. A minimum
    token by token would compare the second judge's 0.5 with the first one's 0."""
    (batch,) = ppo.make_micro_batches(SimpleNamespace(pad_token_id=0), [response([5, 1])], 1)
    nothing = torch.zeros_like(batch.response_mask)
    policy = SimpleNamespace(before=lambda batch: (nothing, nothing))
    judges = [lambda batch: 2.0 * batch.last, lambda batch: 0.5 * batch.response_mask]
    both = judging.combined(judges, "min")
    ppo.score(batch, policy, lambda batch: nothing, both, gold=None)
    assert batch.scores.tolist() == [[0.5, 0.5]]


def test_a_reward_function_gets_chat_as_messages(tokenizer, tmp_path):
    """As TRL hands it over: a list of messages for each prompt, and one message
    of the assistant for each answer."""
    question = [{"role": "user", "content": "Why?"}]

    def function(prompts, completions, messages, **columns):
        assert (
            prompts == [question]
            and completions == [[{"role": "assistant", "content": " So."}]]
            and len(messages[0]) == 2
        )
        return [0.5]

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    row = rows.tokenise_row(
        {"messages": [*question, {"role": "assistant", "content": "?"}]}, tokenizer, "ppo", 64
    )
    assert row["chat"] and call(function, [{**row, "text": " So."}]).tolist() == [0.5]


def test_a_pair_of_chats_keeps_all_turns_before_the_answer(tokenizer):
    """ultrafeedback has the first question as `prompt` beside whole dialogues:
    system message and earlier turns count."""
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    row = {
        "prompt": "Why?",
        **{
            name: [*turns, {"role": "assistant", "content": name}]
            for name in ("chosen", "rejected")
        },
    }
    assert formats.read_row(row)[:5] == (turns, "chosen", "chosen", "rejected", None)


@pytest.mark.parametrize(
    "contents, prompt, question",
    [
        (["Q?", "A."], 1, None),
        (["Q?", "A.", "Why?"], 1, 3),  # (SFT learns the answer that there is)
        (["Q?"], 1, None),
        (["Q?", "A.", "Why?", "B.", "When?"], 3, 5),
    ],
)
def test_step_3_answers_the_last_question(tokenizer, contents, prompt, question):
    """[user, assistant, user]: the unanswered question is what step 3 asks. SFT and the split into
    train and held-out see the same prompt in all stages: that of the last response."""
    messages = chat(*contents)
    example = formats.read_row({"messages": messages})
    assert example.prompt == messages[:prompt]
    assert example.question == (messages[:question] if question else None)
    tokenizer.chat_template = TEMPLATE
    made = rows.tokenise_row({"messages": messages}, tokenizer, "ppo", 64)
    assert json.loads(made["prompt"]) == messages[: question or prompt]


def test_what_step_3_asks_is_not_held_out(tokenizer, tmp_path, capsys):
    """The same unanswered question in both files: a held-out prompt that is trained on."""
    tokenizer.chat_template = TEMPLATE
    lines = [{"messages": chat(f"Q{i}?", "A.", "Why?")} for i in range(5)]
    write(tmp_path / "train.jsonl", lines)
    write(tmp_path / "test.jsonl", [lines[0], {"messages": chat("Q9?", "A.", "Why?")}])
    _, held_out = load(tokenizer, [tmp_path], 3)
    assert [json.loads(prompt) for prompt in held_out["prompt"]] == [chat("Q9?", "A.", "Why?")]


def test_a_content_in_parts_is_joined(tokenizer, tmp_path):
    """A content may be a list of parts; in a pair, too, and where `prompt` is a list."""

    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    turn = {"role": "assistant", "content": parts("A", "", ".")}
    asked = {"role": "user", "content": parts("Why", "?")}
    plain = [{"role": "user", "content": "Why?"}]
    assert formats.read_row({"messages": [asked, turn]})[:2] == (plain, "A.")
    pair = {"chosen": [asked, turn], "rejected": [*plain, {**turn, "content": "B."}]}
    assert formats.read_row(pair)[:4] == (plain, "A.", "A.", "B.")
    assert formats.read_row({"prompt": [asked], "response": "A."})[:2] == (plain, "A.")


def test_what_a_chat_template_refuses_is_dropped_in_words(tokenizer):
    """Some models know no system role, or want roles to alternate; their templates raise."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    row = rows.tokenise_row(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        tokenizer,
        "sft",
        64,
    )
    assert row["drop"] == "the chat template refuses it: no system role"


@pytest.mark.parametrize(
    "step, columns",
    [
        (1, {"question": "a", "reply": "b"}),
        (1, {"prompt": "a"}),
        (1, {"text": "a"}),
        (2, {"prompt": "a", "response": "b"}),
        (2, {"messages": [{"role": "user", "content": "a"}]}),
        (3, {"text": "a"}),
    ],
)
def test_columns_that_a_step_cannot_use_are_an_error(tokenizer, tmp_path, capsys, step, columns):
    """Exit code 2, and the message lists what was found and what is known:
    guessing would train on the wrong thing."""
    path = write(tmp_path / "rows.jsonl", [columns] * 30)
    with pytest.raises(SystemExit) as stop:
        load(tokenizer, [path], step)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert all(
        word in message for word in (path, *columns, "instruction + output", "chosen + rejected")
    )


# --------------------------------------------------------------------------------------------------
# Made once
# --------------------------------------------------------------------------------------------------
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
    monkeypatch.setattr(row_cache.os, "sched_getaffinity", lambda _: {0, 1})
    made = [load(tokenizer, [file], 2, split=(1, 1, 0))]
    monkeypatch.setattr(row_cache.os, "sched_getaffinity", lambda _: {0, 1, 2})  # next, more cores
    made += [load(tokenizer, [file], 2, split=(1, 1, 0))]
    said = capsys.readouterr().out
    assert said.count("a.jsonl, train: tokenising ") == 1 and said.count("chosen equals") % 2 == 0
    assert len([*kept.glob("*_of_00002.arrow")]) == 2
    monkeypatch.setattr(row_cache, "MANY", 10**9)
    in_memory = load(tokenizer, [file], 2, split=(1, 1, 0))
    prints = [[rows.fingerprint(part) for part in parts] for parts in (*made, in_memory)]
    assert prints[0] == prints[1] == prints[2]


@pytest.mark.parametrize("rank, there", [("0", [True]), ("1", [False])])
def test_the_first_rank_of_a_host_makes_them(tokenizer, tmp_path, monkeypatch, kept, rank, there):
    """It meets the others when the file is there; they look for it only after that."""
    met = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(ranks, "barrier", lambda: met.append(any(kept.glob("*.arrow"))))
    write(tmp_path / "train.jsonl", many(9, dahoas))
    write(tmp_path / "test.jsonl", [dahoas(50)])
    load(tokenizer, [tmp_path])
    assert met[:1] == there and len(met) == 2


CHANGES = {
    "the rows": lambda tokenizer, options: "other content",
    "--max_seq_len": lambda tokenizer, options: options.update(limit=65),
    "the step": lambda tokenizer, options: options.update(stage="reward"),
    "--train_on": lambda tokenizer, options: options.update(train_on="everything"),
    "--columns": lambda tokenizer, options: options.update(names={"prompt": "chosen"}),
    "EOS": lambda tokenizer, options: tokenizer.add_special_tokens({"eos_token": "<pad>"}),
    "a token more": lambda tokenizer, options: tokenizer.add_tokens(["zebra"]),
    "the chat template": lambda tokenizer, options: setattr(tokenizer, "chat_template", "x"),
    "the code": lambda tokenizer, options: Path(row_cache.__file__).write_text("# another"),
    "a library": lambda tokenizer, options: setattr(row_cache.jinja2, "__version__", "0"),
}


@pytest.mark.parametrize("what", ["nothing", *CHANGES])
def test_rows_of_other_data_flags_tokenizers_or_code_are_made_anew(
    tokenizer, tmp_path, monkeypatch, what
):
    """A cache that knew a file by its name would train on the rows of yesterday. All that rows
    depend on is in the key; that the tokenizer was used meanwhile is not."""
    monkeypatch.setattr(row_cache.jinja2, "__version__", "1")  # put back after the test
    monkeypatch.setattr(row_cache, "__file__", str(tmp_path / "rows.py"))
    Path(row_cache.__file__).write_text("# one")
    tokenizer = copy.deepcopy(tokenizer)
    options = {"tokenizer": tokenizer, "stage": "sft", "limit": 64, "train_on": None, "names": {}}
    before = row_cache.key(options, "content")
    rows.tokenise_row(dahoas(1), **options)
    content = CHANGES.get(what, lambda *_: None)(tokenizer, options)
    after = row_cache.key(options, content if isinstance(content, str) else "content")
    assert (before == after) == (what == "nothing")


def test_a_template_that_writes_the_date_is_of_its_day(tokenizer, monkeypatch):
    """Llama's templates do. Others' rows stay."""
    keys, tokenizer = [], copy.deepcopy(tokenizer)
    for template in ("x", "{{ strftime_now('%d') }}"):
        tokenizer.chat_template = template
        for day in (1, 2):
            today = SimpleNamespace(date=SimpleNamespace(today=lambda day=day: day))
            monkeypatch.setattr(row_cache, "datetime", today)
            keys.append(row_cache.key({"tokenizer": tokenizer}, "content"))
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_code_without_a_version_is_not_trusted_to_be_the_same(tokenizer):
    """A tokenizer that came with a model, by --trust_remote_code, may read other files, too."""
    theirs = type("Theirs", (), {"__module__": "transformers_modules.theirs"})()
    many_rows = range(row_cache.MANY)
    assert row_cache.pays(many_rows, tokenizer) and not row_cache.pays(many_rows, theirs)
    assert not row_cache.pays(many_rows[1:], tokenizer)


def test_chats_without_a_chat_template_are_refused(tokenizer, tmp_path, capsys, kept):
    """Also by the processes that tokenise, which cannot end the run themselves."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    file = write(tmp_path / "a.jsonl", [{"messages": chat(f"Q{i}?", "So.")} for i in range(300)])
    with pytest.raises(SystemExit) as stop:
        load(tokenizer, [file])
    assert stop.value.code == 2
    assert "the tokenizer has no chat template" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Which turns are learned
# --------------------------------------------------------------------------------------------------
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {  # name: (template, EOS, the end of a turn)
    "ChatML": (CHATML, "<eos>", "<|im_end|>"),
    "Qwen": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + CHATML.replace("{{ m.role }}", "{{ 'user' if m.role == 'tool' else m.role }}"),
        "<|im_end|>",
        "<|im_end|>",
    ),
    "Llama-3": (
        "<bos>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}",
        "<|eot_id|>",
        "<|eot_id|>",
    ),
    "Gemma": (
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif"
        " %}{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<eos>",
        "<end_of_turn>",
    ),
    "Mistral": (  # no opening of its own, and EOS ends a turn
        "<bos>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<eos>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "<eos>",
        "<eos>",
    ),
    "text": (TEMPLATE, "<eos>", ""),  # nothing but a line break ends a turn
}
SPECIAL = re.findall(r"<\|?/?\w+\|?>", "".join(template for template, *_ in SHAPES.values()))


def shaped(tokenizer, name):
    """The tokenizer with a chat template of this shape, and the end of a turn."""
    template, eos, end = SHAPES[name]
    tokenizer = copy.deepcopy(tokenizer)
    specials = [token for token in dict.fromkeys(SPECIAL) if "user" not in token]
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [t for t in specials if t != "<assistant>"]}
    )
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    return tokenizer, end


def covered(tokenizer, row):
    """Returns the texts that the loss covers, without a break each, of a row that sft.collate laid
    out beside another one."""
    beside = {**row, "prompt_ids": [5], "prompt_loss_mask": [0], "responses": [[6] * 9]}
    batch = sft.collate([{**r, "row_weight": 1} for r in (row, beside)], tokenizer.pad_token_id)
    mask = batch["loss_mask"][0]
    runs, before = [], 0.0
    for token, on in zip(batch["ids"][0][-len(mask) :].tolist(), mask.tolist()):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    return [tokenizer.decode(run) for run in runs]


CHATS = {  # name: (messages, which of them are learned)
    "one turn": (chat("Why?", "So."), [1]),
    "turns": (chat("Why?", "So.", "And?", "Then so.\n\nYes!", "Hm?", "No"), [1, 3, 5]),
    "a question at the end": (chat("Why?", "So.", "And?", "Then.", "Hm?"), [1, 3]),
    "system": (
        [{"role": "system", "content": "Be brief."}, *chat("Why?", "So.", "And?", "B")],
        [2, 4],
    ),
    "tool": (
        [*chat("Add 1 and 2", "I ask."), {"role": "tool", "content": "3"}, *turn("It is 3.")],
        [1, 3],
    ),
    "an answer in two messages": ([*chat("Why?", "So."), *turn("Or so.")], [1, 2]),
    "special tokens in the text": (
        chat("Say <|im_end|> and <eos>", "<|im_start|>user\n<eot> <eos>", "<bos>?", "a<|eot_id|>"),
        [1, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_covers_what_the_assistant_says_and_its_ends_of_turn(tokenizer, shape, name):
    """And nothing else: not the openings that the template writes, not system, user and tool. The
    tokens together are what the template makes of the whole chat, up to the last turn's end, and
    EOS once. A special token that a message spells is text."""
    tokenizer, end = shaped(tokenizer, shape)
    messages, turns = CHATS[name]
    row = rows.tokenise_row({"messages": messages}, tokenizer, "sft", 512)
    if shape == "Gemma" and name in ("system", "an answer in two messages"):
        assert row["drop"].startswith("the chat template refuses it: ")
        return
    eos = "" if tokenizer.eos_token == end else tokenizer.eos_token
    space = " " * (shape == "Mistral")
    expected = [space + messages[i]["content"] + end for i in turns]
    if shape == "Mistral" and name == "an answer in two messages":
        expected = ["".join(expected)]  # one follows the other at once
    assert covered(tokenizer, row) == [*expected[:-1], expected[-1] + eos]
    ids, asked = row["prompt_ids"] + row["responses"][0], messages[: turns[-1] + 1]
    whole = tokenizer.apply_chat_template(asked, tokenize=False)
    assert tokenizer.decode(ids) == whole.rstrip() + eos
    without = [{**message, "content": "x"} for message in asked]
    written = tokenizer.apply_chat_template(without, tokenize=True, return_dict=False)
    specials = [[i for i in of if i in tokenizer.all_special_ids] for of in (ids, written)]
    assert specials[0] == specials[1] + [tokenizer.eos_token_id] * bool(eos)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [4, 9, 14, 20, 33])
def test_the_mask_of_a_row_that_is_cut_stays_on_its_tokens(tokenizer, shape, limit):
    """A long prompt loses its start, a long response its end; each token keeps what it had."""
    tokenizer, _ = shaped(tokenizer, shape)
    row = {"messages": CHATS["turns"][0]}
    whole = rows.tokenise_row(row, tokenizer, "sft", 512)
    made = rows.tokenise_row(row, tokenizer, "sft", limit)
    prompt, mask, (response,) = made["prompt_ids"], made["prompt_loss_mask"], made["responses"]
    assert made["length"] == len(prompt) + len(response) == limit
    assert prompt == whole["prompt_ids"][-len(prompt) :]
    assert mask == whole["prompt_loss_mask"][-len(prompt) :]
    assert response == whole["responses"][0][: len(response)]


@pytest.mark.parametrize("step", STAGES)
@pytest.mark.parametrize("shape", ["ChatML", "Gemma", "text"])
def test_in_chats_the_end_of_turn_is_eos(tokenizer, tiny_model, tmp_path, shape, step):
    """The base models of Qwen end a text with <|endoftext|>, and their chat template ends a turn
    with <|im_end|>. Who talks to the model stops at that, so it is what the model must learn, what
    ends a rollout, and what is saved as EOS. Text has no turns, and ends with EOS as before."""
    tokenizer, end = shaped(tokenizer, shape)
    model, eos = copy.deepcopy(tiny_model), end or tokenizer.eos_token
    for name in ("text", "chats"):
        (tmp_path / name).mkdir()
    pairs = {name: (lambda i, name=name: chat(f"Q{i}?", name)) for name in ("chosen", "rejected")}
    path = folder(tmp_path / "text", many(10, dahoas))
    load(tokenizer, [path], step)
    assert tokenizer.eos_token == SHAPES[shape][1]
    path = folder(tmp_path / "chats", many(10, lambda i: {n: make(i) for n, make in pairs.items()}))
    train, _ = load(tokenizer, [path], step)
    assert tokenizer.eos_token == eos and tokens.end_of_turn(tokenizer) == eos
    assert all(ids.count(tokenizer.eos_token_id) == 1 for row in train for ids in row["responses"])
    assert all(ids[-1] == tokenizer.eos_token_id for row in train for ids in row["responses"])
    saving.note_tokens(model, tokenizer, scores=False)
    configs = model.config, model.generation_config
    assert [config.eos_token_id for config in configs] == [tokenizer.eos_token_id] * 2


TALK = "\n\nHuman: Q?\n\nAssistant: A.\n\nB.\n\nHuman: And?\n\nAssistant:"
TRAIN_ON = {  # a row: {--train_on: what the loss covers}; None is the default
    "messages": (
        {"messages": chat("Q?", "A.", "And?", "C.")},
        {
            None: ["A.", "C.<eos>"],
            "all": ["A.", "C.<eos>"],
            "last": ["C.<eos>"],
            "everything": ["user>Q?\n<assistant>A.\n<user>And?\n<assistant>C.<eos>"],
        },
    ),
    "a prompt of messages": (
        {"prompt": chat("Q?", "A.", "And?"), "completion": "C."},
        {None: ["C.<eos>"], "all": ["A.", "C.<eos>"]},
    ),
    "a pair of chats": (
        {name: chat("Q?", "A.", "And?", name) for name in ("chosen", "rejected")},
        {None: ["chosen<eos>"], "all": ["A.", "chosen<eos>"]},
    ),
    "whole dialogues": (
        {"chosen": TALK + " C.", "rejected": TALK + " D."},
        {None: [" C.<eos>"], "last": [" C.<eos>"], "all": [" A.\n\nB.", " C.<eos>"]},
    ),
    "dialogues that part early": (
        {"chosen": TALK + " C.", "rejected": "\n\nHuman: Q?\n\nAssistant: D."},
        {"all": [" A.\n\nB.", " C.<eos>"]},
    ),
    "a prompt that quotes a dialogue, and ends in another way": (
        {"prompt": "\n\nHuman: Q?\n\nAssistant: A.\n\nHuman: And?\n\nMax:", "response": " C."},
        {"all": [" A.", " C.<eos>"]},
    ),
    "plain text": (
        {"prompt": "Q?", "response": " A."},
        {None: [" A.<eos>"], "all": [" A.<eos>"], "everything": ["? A.<eos>"]},
    ),
}


@pytest.mark.parametrize(
    "name, train_on", [(name, on) for name, (_, wanted) in TRAIN_ON.items() for on in wanted]
)
def test_train_on_says_which_turns_are_learned(tokenizer, name, train_on):
    """Without the flag a chat in `messages` is learned whole, and all else by its response. (A
    row's first token is never covered: nothing predicts it.) Step 2 and 3 do not ask for it."""
    tokenizer.chat_template = TEMPLATE
    row, wanted = TRAIN_ON[name]
    made = rows.tokenise_row(row, tokenizer, "sft", 128, train_on)
    assert covered(tokenizer, made) == wanted[train_on]
    assert not any(rows.tokenise_row(row, tokenizer, "ppo", 128)["prompt_loss_mask"])


UNCHECKED = {  # what templates do that makes the assistant's tokens depend on what follows
    "it drops what was thought in earlier turns": CHATML.replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    ),
    "it opens a turn with a word that it does not keep": CHATML.replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    ),
    "it ends the last turn in another way": CHATML
    + "{% if not add_generation_prompt %}.{% endif %}",
    "it puts the system message before the last question": (
        "{% for m in messages[1:] %}{% if loop.last %}{{ messages[0].content }}{% endif %}"
        "{{ m.content }};{% endfor %}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_template_whose_turns_cannot_be_told_is_refused(tokenizer, tmp_path, capsys, name):
    """Turn by turn it writes another text than of the whole chat. A mask would lie on the wrong
    tokens. --train_on last needs none of that."""
    tokenizer, _ = shaped(tokenizer, "ChatML")
    tokenizer.chat_template = UNCHECKED[name]
    system = [{"role": "system", "content": "Be kind."}]
    row = {"messages": [*system, *chat("Why?", "<think>Hm</think>So.", "And?", "Then.")]}
    path = folder(tmp_path, many(10, lambda i: row | {"id": i}))
    with pytest.raises(SystemExit) as stop:
        load(tokenizer, [path])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "Use --train_on last" in said
    assert rows.tokenise_row(row, tokenizer, "sft", 128, "last")["drop"] == ""


# --------------------------------------------------------------------------------------------------
# What is dropped is counted
# --------------------------------------------------------------------------------------------------
def test_rows_that_teach_nothing_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    """An empty text, equal answers, and answers that are equal once they are
    cut: a pair without a difference has a gradient, and it teaches noise.
    Dropped rows are counted on the screen, by reason."""
    long = " and" * 40
    lines = many(40, dahoas) + [
        {"prompt": "E1?", "chosen": "", "rejected": " x"},
        {"prompt": "  ", "chosen": " c", "rejected": " x"},
        {"prompt": "S1?", "chosen": " same", "rejected": " same"},
        {"prompt": "L1?", "chosen": long + " yes", "rejected": long + " no"},
    ]
    lines = [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in lines]
    write(tmp_path / "train.jsonl", lines)
    write(tmp_path / "test.jsonl", [{"prompt": "T?", "chosen": " c", "rejected": " x"}])
    train, _ = load(tokenizer, [tmp_path], 2, limit=16)
    assert {p for p, *_ in texts(tokenizer, train)} == {f"Q{i}?" for i in range(40)}
    said = capsys.readouterr().out
    for count, why in (
        (2, "empty prompt or response"),
        (1, "chosen equals rejected"),
        (1, "chosen equals rejected once cut"),
    ):
        assert f"train: dropped {count} of 44 rows: {why}\n" in said


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": None, "response": " r"},
        {"prompt": "Q?", "response": None},
        {"instruction": "Q?", "output": None},
        {"instruction": None, "output": "r"},
    ],
)
def test_a_missing_text_is_an_empty_one(tokenizer, tmp_path, capsys, bad):
    """null happens in real files: dropped and counted, not trained on as the
    word "null" or "None"."""
    write(tmp_path / "train.jsonl", [dict.fromkeys(bad, "good"), bad])
    write(tmp_path / "test.jsonl", [dict.fromkeys(bad, "other")])
    assert len(load(tokenizer, [tmp_path])[0]) == 1
    assert "dropped 1 of 2 rows: empty prompt or response" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Who gets which row
# --------------------------------------------------------------------------------------------------
def prompts(tokenizer, paths, step, seed=1, split=(2, 4, 4)):
    """Returns the prompts that a step trains on, and those it holds out."""
    return tuple(
        set(part["prompt"]) for part in load(tokenizer, paths, step, split=split, seed=seed)
    )


def test_the_three_steps_share_the_rows_out(tokenizer, tmp_path):
    """2:4:4: the parts are disjoint, and together they are everything. A reward model that
    has seen the answers that step 1 was taught would prefer them for the wrong reason."""
    write(tmp_path / "train.jsonl", many(100, dahoas))
    write(tmp_path / "test.jsonl", [dahoas(1000)])
    parts = [prompts(tokenizer, [tmp_path], step)[0] for step in (1, 2, 3)]
    assert [len(p) for p in parts] == [20, 40, 40]
    assert len(set.union(*parts)) == 100


TEXT, PAIR = (lambda i: {"prompt": f"Q{i}?", "response": " r"}), dahoas
SPLITS = {  # make a row, flags, {model folder: (its data, its --data_split)}, each step's split
    "a file for each step": (TEXT, [], {}, [[1, 0, 0], None, [0, 0, 1]]),
    "chats": (lambda i: {"messages": chat(f"Q{i}?", "A.")}, [], {}, [[1, 0, 0], None, [0, 0, 1]]),
    "step 1 of one source for all": (PAIR, [], {}, [[2, 4, 4], None, None]),
    "pairs of one's own": (PAIR, [], {"sft": ("other", [1, 0, 0])}, [None, [0, 1, 0], [0, 0, 1]]),
    "the same source": (PAIR, [], {"sft": ("rows", [2, 4, 4])}, [None, [2, 4, 4], [2, 4, 4]]),
    "its own split": (PAIR, [], {"sft": ("rows", [1, 1, 1])}, [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
    "nothing is left": (PAIR, [], {"sft": ("rows", [1, 0, 0])}, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    "a preset's name": (PAIR, ["--preset", "opt-1.3b"], {}, [[2, 4, 4]] * 3),
    "a split": (PAIR, ["--data_split", "1,2,1"], {"sft": ("rows", [1, 1, 1])}, [[1, 2, 1]] * 3),
}


@pytest.mark.parametrize(
    "name, step", [(n, i) for n, (*_, wanted) in SPLITS.items() for i in (1, 2, 3) if wanted[i - 1]]
)
def test_a_file_of_ones_own_is_not_cut_unasked(tokenizer, tmp_path, name, step):
    """Where each step has its own file, there is nothing to keep apart: it takes all rows. Steps
    that share one source take disjoint shares, as the run before did, or 2,4,4."""
    make, given, models, splits = SPLITS[name]
    tokenizer.chat_template = TEMPLATE
    path = write(tmp_path / "rows.jsonl", many(100, make))
    for model, (data, split) in models.items():
        (tmp_path / model).mkdir()
        record = {"data_path": [str(tmp_path / f"{data}.jsonl")], "data_split": split}
        (tmp_path / model / "args.json").write_text(json.dumps(record))
    script = (sft, reward, ppo)[step - 1]
    roles = ["actor_", "critic_"] if step == 3 else [""]
    model = str(tmp_path / ("sft/ema" if step == 3 else "sft"))
    flags = [word for role in roles for word in (f"--{role}model_name_or_path", model)]
    args = get_args(path, *flags, *given, script=script)
    train, held_out = rows.load_rows(args, tokenizer, STAGES[step], 64)
    wanted = splits[step - 1]
    assert args.data_split == wanted and len(held_out) == 5
    assert len(train) == pytest.approx(95 * wanted[step - 1] / sum(wanted), abs=1)
    said = data_split.in_words(args)
    assert (said == "all rows") == (sum(map(bool, wanted)) == 1) != ("--data_split" in said)


def test_the_parts_do_not_depend_on_the_seed(tokenizer, tmp_path):
    """Or two steps run with different seeds would share rows."""
    path = write(tmp_path / "rows.jsonl", many(100, dahoas))
    assert prompts(tokenizer, [path], 1, seed=1) == prompts(tokenizer, [path], 1, seed=2)


def test_held_out_prompts_are_never_trained_on_without_a_test_split(tokenizer, tmp_path):
    """Every twentieth prompt by hash is held out: prompts, not rows, so that a
    prompt with many answers is on one side; and the same ones for all three
    steps, so that step 3 is not judged on what step 1 was taught."""
    # every prompt twice
    lines = [{**dahoas(i % 200), "response": f" r{i}", "chosen": f" c{i}"} for i in range(400)]
    path = write(tmp_path / "rows.jsonl", lines)
    found = [prompts(tokenizer, [path], step) for step in (1, 2, 3)]
    trained, held_out = (set.union(*parts) for parts in zip(*found))
    assert 2 <= len(held_out) <= 25 and not trained & held_out
    assert found[0][1] == found[1][1] == found[2][1]


def test_held_out_prompts_are_never_trained_on_with_a_test_split(tokenizer, tmp_path, capsys):
    """A test file whose prompts are also in the training file measures memory. Such rows are
    dropped and counted, also where the prompt is in another step's part of the training file."""
    write(tmp_path / "train.jsonl", many(60, dahoas))
    # half of them are trained on by some step
    write(tmp_path / "test.jsonl", many(80, dahoas)[40:])
    found = [prompts(tokenizer, [tmp_path], step) for step in (1, 2, 3)]
    assert "held-out: dropped" in capsys.readouterr().out
    trained, held_out = (set.union(*parts) for parts in zip(*found))
    assert held_out >= {f"Q{i}?" for i in range(60, 80)}
    assert not trained & held_out


def test_real_dialogues_are_split_where_they_part(tokenizer, hh):
    """Anthropic's HH: the shared prompt ends at the last Assistant turn that both dialogues have in
    common; what is left of each is its answer. Nothing is lost: prompt + answer is the dialogue."""
    lines = [json.loads(line) for line in open(hh / "train.jsonl")]
    for row in lines:
        prompt, answer, chosen, rejected, *_ = formats.read_row(row)
        assert prompt.startswith("\n\nHuman:") and prompt.endswith("\n\nAssistant:")
        assert (prompt + chosen, prompt + rejected) == (
            row["chosen"],
            row["rejected"],
        ) and answer == chosen
        assert not (
            "\n\nAssistant:" in chosen
            and "\n\nAssistant:" in rejected
            and chosen.split("\n\nAssistant:")[0] == rejected.split("\n\nAssistant:")[0]
        )
    train, held_out = load(tokenizer, [hh], 2, limit=512, split=(2, 4, 4))
    assert 0.3 * len(lines) < len(train) <= 0.4 * len(lines) and len(held_out) > 50
    assert max(
        len(row["prompt_ids"]) + max(map(len, row["responses"])) for row in train
    ) == 512 and not set(train["prompt"]) & set(held_out["prompt"])


# --------------------------------------------------------------------------------------------------
# In which order
# --------------------------------------------------------------------------------------------------
LENGTHS = np.random.default_rng(0).integers(1, 100, 83)  # 83 rows: the last step of 8 is 5 short


def play(monkeypatch, rank, count):
    """Makes this process the rank `rank` of `count`."""
    monkeypatch.setattr(ranks, "get_rank", lambda: rank)
    monkeypatch.setattr(ranks, "get_world_size", lambda: count)


def steps_of(monkeypatch, count, batch_size, micro_steps, epoch=0, seed=1, group_by_length=1):
    """Returns, for each optimizer step, the sorted rows of all ranks; asserts
    that all ranks make as many forwards."""
    per_rank = []
    for rank in range(count):
        play(monkeypatch, rank, count)
        per_rank.append(
            common.epoch_batches(LENGTHS, seed, epoch, batch_size, micro_steps, group_by_length)
        )
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(len(batch) == batch_size for batches in per_rank for batch in batches)
    return [
        sorted(
            i
            for batches in per_rank
            for batch in batches[start : start + micro_steps]
            for i in batch
        )
        for start in range(0, len(per_rank[0]), micro_steps)
    ]


@pytest.mark.parametrize("group_by_length", [0, 1])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(monkeypatch, group_by_length):
    """Eight rows a step, as 1 rank x 8, 2 x 4, 4 x 2 or 8 x 1, in one
    micro-batch or several: the same eight rows."""
    layouts = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 2, 4), (2, 2, 2), (1, 1, 8)]
    found = [steps_of(monkeypatch, *layout, group_by_length=group_by_length) for layout in layouts]
    assert all(f == found[0] for f in found)
    assert len(found[0]) == 11


@pytest.mark.parametrize("group_by_length", [0, 1])
def test_every_row_comes_once_an_epoch(monkeypatch, group_by_length):
    """83 rows in steps of 8: ten whole steps and one of three rows, filled up
    with five fillers (-1). Nothing is dropped."""
    steps = steps_of(monkeypatch, 2, 2, 2, group_by_length=group_by_length)
    assert sorted(i for step in steps for i in step if i >= 0) == list(range(83))
    assert sorted(step.count(-1) for step in steps) == [0] * 10 + [5]


@pytest.mark.parametrize("group_by_length", [0, 1])
def test_each_epoch_has_its_own_order_from_the_seed(monkeypatch, group_by_length):
    """A sampler that is never told its epoch gives the same order sixteen
    times. Ours comes from (seed, epoch)."""

    def order(epoch, seed):
        return steps_of(monkeypatch, 1, 8, 1, epoch, seed, group_by_length)

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1) != order(2, 1)
    assert order(0, 1) != order(0, 2)


def test_grouping_by_length_saves_padding(monkeypatch):
    """Rows of like length together: less than a third of the padding of a plain shuffle. And
    not from long to short: an order by length would be a curriculum that nobody asked for."""

    def padding(steps):
        real = [[LENGTHS[i] for i in step if i >= 0] for step in steps]
        return sum(max(step) * len(step) - sum(step) for step in real)

    shuffled, grouped = (steps_of(monkeypatch, 1, 8, 1, group_by_length=g) for g in (0, 1))
    assert padding(grouped) < padding(shuffled) / 3
    longest = [max(LENGTHS[i] for i in step if i >= 0) for step in grouped]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_a_filler_is_a_row_that_counts_nothing(tokenizer, tmp_path):
    """Row -1 is row 0 again with `row_weight` 0: it can be forwarded, and it is
    masked out of every sum."""
    train, _ = load(tokenizer, [folder(tmp_path, many(10, dahoas))])
    filler, first = common.Rows(train)[-1], common.Rows(train)[0]
    assert (filler["row_weight"], first["row_weight"]) == (0, 1)
    assert filler["prompt_ids"] == first["prompt_ids"]


def test_evaluation_sees_every_row_once_over_all_ranks(tokenizer, tmp_path, monkeypatch):
    """Ten pairs, three ranks, two a batch: each pair once, and both forwards
    are made on every rank."""
    _, held_out = load(tokenizer, [folder(tmp_path, many(50, dahoas))], 2)
    seen, forwards = [], []
    for rank in range(3):
        play(monkeypatch, rank, 3)
        batches = list(
            common.eval_loader(
                SimpleNamespace(per_device_eval_batch_size=2),
                held_out,
                lambda part: {
                    **reward.collate(part, 0),
                    "names": [r["prompt"] for r in part if r["row_weight"]],
                },
            )
        )
        forwards.append(len(batches))
        seen += [name for batch in batches for name in batch["names"]]
        assert sum(batch["row_weight"].sum() for batch in batches) == sum(
            len(batch["names"]) for batch in batches
        )
    assert forwards == [2, 2, 2]
    assert sorted(seen) == [f"Q{i}?" for i in range(40, 50)]


@pytest.mark.parametrize(
    "count, world, flags, steps",
    [
        (83, 1, [], 33),  # 11 steps of 8 an epoch, 3 epochs
        (83, 2, [], 18),  # 6 steps of 16
        (80, 1, [], 30),
        (83, 1, ["--max_steps", "7"], 7),
    ],
)
def test_steps_of_a_run(monkeypatch, count, world, flags, steps):
    """Epochs times steps per epoch, the short one included, unless --max_steps says otherwise."""
    play(monkeypatch, 0, world)
    args = sft.get_args(["--num_train_epochs", "3", *flags])
    run = SimpleNamespace(args=args)
    assert Run.plan(run, None, range(count), [], 4, 2) == steps
