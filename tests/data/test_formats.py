"""Formats: the columns of a row say what it holds, and what each step makes of it."""

import json

import pytest
from data_kit import TEMPLATE, both, chat, dahoas, load, many, texts, write
from datasets import Dataset, DatasetDict

from machinery import formats, rows, sources
from machinery.rows import STAGES
from tests import kit

TALK = "\n\nHuman: Q0?\n\nAssistant: Hm.\n\nHuman: Yes?\n\nAssistant:"
WRAPPED = "\n\nHuman: Q0?\n\nAssistant:"
ASKED = "<user>Q0?\n<assistant>"
KIND = "<system>Be kind.\n" + ASKED
PAIR = {name: chat("Q0?", name) for name in ("chosen", "rejected")}
SYSTEM = [{"role": "system", "content": "Be kind."}]
FORMATS = {  # name: (a row, what SFT, the reward model and PPO make of it; () if they cannot)
    "prompt and responses (Dahoas)": (
        dahoas(0),
        [("Q0?", " r0"), ("Q0?", " c0", " x0"), ("Q0?",)],
    ),
    "prompt, response": ({"prompt": "Q0?", "response": " r"}, [("Q0?", " r"), (), ("Q0?",)]),
    "prompt, chosen, rejected: chosen is the response": (
        {"prompt": "Q0?", "chosen": " c", "rejected": " x"},
        [("Q0?", " c"), ("Q0?", " c", " x"), ("Q0?",)],
    ),
    "responses that begin with Assistant: (rlhf-reward-datasets)": (
        {"prompt": "\n\nHuman: Q0?\n\n", "chosen": "Assistant: c", "rejected": "Assistant: x"},
        [(WRAPPED, " c"), (WRAPPED, " c", " x"), (WRAPPED,)],
    ),
    "whole dialogues (Anthropic HH), cut at the last turn in common": (
        {"chosen": TALK + " c", "rejected": TALK + " x"},
        [(TALK, " c"), (TALK, " c", " x"), (TALK,)],
    ),
    "messages": ({"messages": chat("Q0?", "r")}, [(ASKED, "r"), (), (ASKED,)]),
    "messages, of which step 3 asks the last question": (
        {"messages": chat("Q0?", "r", "Yes?")},
        [(ASKED, "r"), (), (f"{ASKED}r\n<user>Yes?\n<assistant>",)],
    ),
    "conversations (ShareGPT)": (
        {"conversations": [{"from": "human", "value": "Q0?"}, {"from": "gpt", "value": "r"}]},
        [(ASKED, "r"), (), (ASKED,)],
    ),
    "a pair of chats": (PAIR, [(ASKED, "chosen"), (ASKED, "chosen", "rejected"), (ASKED,)]),
    "a pair of chats beside prompt and messages (UltraFeedback)": (
        {**{n: SYSTEM + c for n, c in PAIR.items()}, "prompt": "Q0?", "messages": chat("Q0?", "c")},
        [(KIND, "chosen"), (KIND, "chosen", "rejected"), (KIND,)],
    ),
    "prompt and responses as messages (TRL)": (
        {"prompt": chat("Q0?"), **{name: talk[1:] for name, talk in PAIR.items()}},
        [(ASKED, "chosen"), (ASKED, "chosen", "rejected"), (ASKED,)],
    ),
    "prompt, completion as messages (TRL)": (
        {"prompt": SYSTEM, "completion": chat("Q0?", "r")},
        [(KIND, "r"), (), None],
    ),
    "instruction, input, output (Alpaca)": (
        {"instruction": "Q0?", "input": "in", "output": "r"},
        [("\n\nHuman: Q0?\nin\n\nAssistant:", " r"), (), None],
    ),
    "instruction alone": ({"instruction": "Q0?"}, [(), (), (WRAPPED,)]),
    "text, learned whole": ({"text": "It is warm."}, [("It is warm.", ""), (), ()]),
    "prompt alone": ({"prompt": "Q0?"}, [(), (), ("Q0?",)]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_columns_say_the_format(tokenizer, name):
    """For each step that can use them: prompt and responses come back from the token ids."""
    row, expected = FORMATS[name]
    # dialogues that are text stay text where there is no template
    has_messages = any(isinstance(value, list) for value in row.values())
    tokenizer.chat_template = TEMPLATE if has_messages else None
    for stage, wanted in zip(STAGES, expected):
        assert rows.serves(row, stage) == (wanted != ())
        if wanted:
            made = rows.tokenise_row(row, tokenizer, stage, 64)
            assert not made["drop"] and texts(tokenizer, [made]) == {wanted}


def test_a_text_is_learned_whole(tokenizer):
    """Every token of it, and EOS, whatever --train_on says of prompts and responses."""
    for train_on in (None, "last", "all"):
        made = rows.tokenise_row({"text": "It is warm."}, tokenizer, "sft", 64, train_on)
        assert all(made["prompt_loss_mask"]) and made["responses"] == [[tokenizer.eos_token_id]]


# ---- Other names ----
@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_columns_may_have_other_names(tokenizer, tmp_path, kind):
    """--columns says which column is which, in all steps, also where two change places, or one has
    a usual name. Reward functions get the columns under the names that the file has."""
    row = {"prompt": "other", "instruction": "Q0?", "chosen": " a", "rejected": " b"}
    write(tmp_path / f"train{kind}", [row])
    write(tmp_path / f"test{kind}", [row | {"instruction": "T?"}])
    names = {"prompt": "instruction", "chosen": "rejected", "rejected": "chosen"}
    for stage, made in (("sft", (" b",)), ("reward", (" b", " a")), ("ppo", ())):
        train, _ = load(tokenizer, [tmp_path], stage, columns=names)
        assert texts(tokenizer, train) == {("Q0?", *made)}
        assert json.loads(train["extra"][0])["chosen"] == " a"


def test_in_a_blend_other_names_hold_where_they_are(tokenizer, tmp_path):
    """A source of one's own beside one that has the usual names. Where only some are there, a
    column of the usual name must not take the place of the others."""
    one = write(tmp_path / "a.jsonl", many(40, lambda i: {"question": f"A{i}?", "answer": " a"}))
    two = write(tmp_path / "b.jsonl", many(40, dahoas))
    names = {"prompt": "question", "response": "answer"}
    found = both(load(tokenizer, [one, two], columns=names))
    assert len(found) == 80 and {("A3?", " a"), ("Q3?", " r3")} <= texts(tokenizer, found)
    for paths, wrong in (([two], names), ([one, two], names | {"response": "reply"})):
        with kit.refuses("no-such-column"):
            load(tokenizer, paths, columns=wrong)


def test_names_of_a_set_in_deepspeed_chats_blend_are_known(tokenizer, monkeypatch):
    """A preset's blend holds a set whose texts do not say who speaks: they are wrapped as the
    dialogues are that they are blended with."""
    pairs = [{"prompt": f"Q{i}?", "chosen": "c", "rejected": "x"} for i in range(2)]
    hub = DatasetDict(train=Dataset.from_list(pairs))
    monkeypatch.setattr(sources.datasets, "load_dataset", lambda *given: hub)
    found = both(load(tokenizer, ["Dahoas/synthetic-instruct-gptj-pairwise"], "reward"))
    assert (WRAPPED, " c", " x") in texts(tokenizer, found)


def test_a_call_of_a_tool_at_the_end_is_refused(tokenizer, tmp_path, capsys):
    """Only the content of a last turn is learned: "Let me look." and EOS. Columns beside the
    messages reach no model, which is said, with how many rows have one."""
    look = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look"}]}
    called = [*chat("Q0?"), look]
    for row in ({"messages": called}, {**PAIR, "chosen": called}):
        with pytest.raises(formats.BadRow, match="tool_calls would not be learned"):
            formats.read_row(row)
    earlier = {"messages": [*called, {"role": "tool", "content": "3"}, *chat("", "3")[1:]]}
    assert formats.read_row(earlier).response == "3"
    rows = many(20, lambda i: {**dahoas(i), "system": "Be kind." if i % 2 else None})
    load(tokenizer, [write(tmp_path / "a.jsonl", rows)])
    assert "rows have a column system or tools, which no model sees" in capsys.readouterr().out
