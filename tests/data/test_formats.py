"""Formats: the columns of a row say what it holds, and what each step makes of it."""

import json

import pytest
from data_kit import TEMPLATE, both, chat, dahoas, folder, load, many, texts, write
from datasets import Dataset, DatasetDict

from machinery import formats, rows, sources
from machinery.rows import STAGES
from tests import kit

TALK = "\n\nHuman: Q0?\n\nAssistant: Hm.\n\nHuman: Yes?\n\nAssistant:"
WRAPPED = "\n\nHuman: Q0?\n\nAssistant:"
ASKED = "<user>Q0?\n<assistant>"
PAIR = {name: chat("Q0?", name) for name in ("chosen", "rejected")}
SYSTEM = [{"role": "system", "content": "Be kind."}]
FORMATS = {  # name: (row 0, what SFT, the reward model and PPO make of it)
    "prompt and responses (Dahoas)": (
        dahoas(0),
        [("Q0?", " r0"), ("Q0?", " c0", " x0"), ("Q0?",)],
    ),
    "prompt, response": ({"prompt": "Q0?", "response": " r"}, [("Q0?", " r"), None, ("Q0?",)]),
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
    "messages": (
        {"messages": chat("Q0?", "Hm.", "Yes?", "r")},
        [(f"{ASKED}Hm.\n<user>Yes?\n<assistant>", "r"), None],
    ),
    "conversations (ShareGPT)": (
        {"conversations": [{"from": "human", "value": "Q0?"}, {"from": "gpt", "value": "r"}]},
        [(ASKED, "r"), None, (ASKED,)],
    ),
    "a pair of chats": (PAIR, [(ASKED, "chosen"), (ASKED, "chosen", "rejected"), (ASKED,)]),
    "a pair of chats beside prompt and messages (UltraFeedback)": (
        {**{n: SYSTEM + c for n, c in PAIR.items()}, "prompt": "Q0?", "messages": chat("Q0?", "c")},
        [None, ("<system>Be kind.\n" + ASKED, "chosen", "rejected")],
    ),
    "prompt and responses as messages (TRL)": (
        {"prompt": chat("Q0?"), **{name: talk[1:] for name, talk in PAIR.items()}},
        [(ASKED, "chosen"), (ASKED, "chosen", "rejected"), (ASKED,)],
    ),
    "prompt, completion as messages (TRL)": (
        {"prompt": SYSTEM, "completion": chat("Q0?", "r")},
        [("<system>Be kind.\n" + ASKED, "r"), None],
    ),
    "instruction, input, output (Alpaca)": (
        {"instruction": "Q0?", "input": "in", "output": "r"},
        [("\n\nHuman: Q0?\nin\n\nAssistant:", " r"), None],
    ),
    "instruction alone": ({"instruction": "Q0?"}, [None, None, (WRAPPED,)]),
    "text, learned whole": ({"text": "It is warm."}, [("It is warm.", ""), None, None]),
    "prompt alone": ({"prompt": "Q0?"}, [None, None, ("Q0?",)]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_columns_say_the_format(tokenizer, tmp_path, name):
    """For each step that can use them: prompt and responses come back from the token ids, and no
    row is lost between training and held-out."""
    row, expected = FORMATS[name]
    # dialogues that are text stay text where there is no template
    has_messages = any(isinstance(value, list) for value in row.values())
    tokenizer.chat_template = TEMPLATE if has_messages else None
    source = [json.loads(json.dumps(row).replace("Q0?", f"Q{i}?")) for i in range(10)]
    if "text" in row:
        source = many(10, lambda i: {"text": f"It is {i}."}) + [row]
    for stage, made in zip(STAGES, expected):
        if made:
            found = both(load(tokenizer, [folder(tmp_path, source)], stage))
            assert len(found) == len(source) and made in texts(tokenizer, found)


def test_a_text_is_learned_whole(tokenizer):
    """Every token of it, and EOS, whatever --train_on says of prompts and responses."""
    for train_on in (None, "last", "all"):
        made = rows.tokenise_row({"text": "It is warm."}, tokenizer, "sft", 64, train_on)
        assert tokenizer.decode(made["prompt_ids"]) == "It is warm." and made["drop"] == ""
        assert all(made["prompt_loss_mask"]) and made["responses"] == [[tokenizer.eos_token_id]]


def test_step_3_asks_the_last_question(tokenizer):
    """[user, assistant, user]: the question without a response is what step 3 asks. SFT and the
    split into train and held-out see the same prompt in all steps: that of the last response."""
    tokenizer.chat_template = TEMPLATE
    for contents, prompt, question in ((("Q?", "A."), 1, 1), (("Q?", "A.", "Why?"), 1, 3)):
        messages = chat(*contents)
        assert formats.read_row({"messages": messages}).prompt == messages[:prompt]
        made = rows.tokenise_row({"messages": messages}, tokenizer, "ppo", 64)
        assert json.loads(made["prompt"]) == messages[:question]


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


def test_names_of_a_set_in_deepspeed_chats_blend_are_known(tokenizer, tmp_path, monkeypatch):
    """A preset's blend holds a set whose texts do not say who speaks: they are wrapped as the
    dialogues are that they are blended with."""
    name = "Dahoas/synthetic-instruct-gptj-pairwise"
    pairs = [{"prompt": f"Q{i}?", "chosen": "c", "rejected": "x"} for i in range(2)]
    hub = DatasetDict(train=Dataset.from_list(pairs))
    monkeypatch.setattr(sources.datasets, "load_dataset", lambda *given: hub)
    found = both(load(tokenizer, [name], "reward"))
    assert (WRAPPED, " c", " x") in texts(tokenizer, found)


def test_a_call_of_a_tool_at_the_end_is_refused(tokenizer, tmp_path, capsys):
    """Only the content of a last turn is learned: "Let me look." and EOS. Columns beside the
    messages reach no model, which is said, with how many rows have one."""
    look = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look"}]}
    asked = chat("Q0?")
    pair = {"prompt": "Q0?", "chosen": [*asked, look], "rejected": chat("Q0?", "no")}
    for row in ({"messages": [*asked, look]}, pair):
        with pytest.raises(formats.BadRow, match="tool_calls would not be learned"):
            formats.read_row(row)
    earlier = {"messages": [*asked, look, {"role": "tool", "content": "3"}, *chat("", "3")[1:]]}
    assert formats.read_row(earlier).response == "3"
    rows = many(20, lambda i: {**dahoas(i), "system": "Be kind." if i % 2 else None})
    load(tokenizer, [write(tmp_path / "a.jsonl", rows)])
    assert "rows have a column system or tools, which no model sees" in capsys.readouterr().out
