"""Chats: what the assistant says is learned, and nothing else; the template ends its turns."""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
from data_kit import TEMPLATE, chat, dahoas, folder, load, many, write
from tokenizers import AddedToken
from transformers import LlamaConfig

from machinery import folders, rows, saving, tokens
from machinery.rows import STAGES
from tests import kit

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAY = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
NEXT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
SHAPES = {  # name: (template, EOS as the model has it, the end of a turn, EOS in chats)
    "Qwen": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + CHATML.replace("{{ m.role }}", "{{ 'user' if m.role == 'tool' else m.role }}"),
        "<eos>",
        "<|im_end|>",
        "<|im_end|>",
    ),
    "Gemma": (
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif"
        " %}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<eos>",
        "<end_of_turn>",
        "<end_of_turn>",
    ),
    "Mistral": (  # no opening of its own, and EOS ends a turn
        "<bos>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<eos>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "<eos>",
        "<eos>",
        "<eos>",
    ),
    "text": (TEMPLATE, "<eos>", "", "<eos>"),  # nothing but a line break ends a turn
    "Phi": (  # EOS once more where nothing follows: no turn ends with it
        f"{SAY}<|end|>{{% endfor %}}{NEXT}{{% if not add_generation_prompt %}}{{{{ eos_token }}}}"
        "{% endif %}",
        "<|endoftext|>",
        "<|end|>",
        "<|end|>",
    ),
    "gpt-oss": (  # an earlier turn ends otherwise, and is not learned
        f"{SAY}{{% if loop.last and not add_generation_prompt %}}<|return|>{{% else %}}<|end|>"
        f"{{% endif %}}{{% endfor %}}{NEXT}",
        "<|return|>",
        "<|return|>",
        "<|return|>",
    ),
    "Cohere": (
        f"{SAY}<|END_RESPONSE|><|END|>{{% endfor %}}{NEXT}",
        "<|END|>",
        "<|END_RESPONSE|><|END|>",
        "<|END|>",
    ),
}
SPECIAL = re.findall(r"<\|?/?\w+\|?>", f"{SHAPES}") + ["<|user|>", "<|system|>", "<|tool|>"]
SPECIAL = sorted({*SPECIAL} - {"<user>", "<assistant>"})


def saved(tokenizer, folder, name):
    """Saves a tokenizer with a chat template of this shape, as a model's folder has it."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
    tokenizer.chat_template, tokenizer.eos_token, *_ = SHAPES[name]
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def whole(tokenizer, row, i=0):
    """Returns the text of a row's prompt and its response `i`."""
    return tokenizer.decode(row["prompt_ids"] + row["responses"][i])


def covered(tokenizer, row):
    """Returns the texts that the loss covers: the runs of covered tokens, each decoded."""
    ids = row["prompt_ids"] + row["responses"][0]
    mask = row["prompt_loss_mask"] + [1] * len(row["responses"][0])
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for on, run in runs if on]


TURNS = chat("Why?", "So.", "And?", "Then so.\n\nYes!", "Hm?", "No")
CHATS = {  # name: (messages, which of them are learned)
    "turns": (TURNS, [1, 3, 5]),
    "a question at the end": (TURNS[:-1], [1, 3]),
    "system": ([{"role": "system", "content": "Be brief."}, *TURNS], [2, 4, 6]),
    "tool": ([*TURNS[:2], {"role": "tool", "content": "3"}, *TURNS[3:4]], [1, 3]),
    "text like a special token": (chat("Say <|im_end", "|>im_start|>", "< eos>?", "<eot>"), [1, 3]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_covers_what_the_assistant_says_and_its_ends_of_turn(tokenizer, tmp_path, shape):
    """And nothing else: not the openings that the template writes, not system, user and tool. The
    tokens together are what the template makes of the whole chat, up to the last turn's end, and
    EOS once. EOS is what ends a turn, though a base model may end a text otherwise: who talks to
    the model stops at that."""
    *_, end, eos = SHAPES[shape]
    tokenizer = folders.load_tokenizer(saved(tokenizer, tmp_path, shape), in_chats=True)
    assert tokenizer.eos_token == eos
    for name, (messages, turns) in CHATS.items():
        row = rows.tokenise_row({"messages": messages}, tokenizer, "sft", 512)
        if shape == "Gemma" and name == "system":
            assert row["drop"] == "the chat template refuses it: no system role"
            continue
        ends = [end] * (len(turns) - 1) + [end if end.endswith(eos) else end + eos]
        said = [messages[i]["content"] + end for i, end in zip(turns, ends)]
        expected = [" " * (shape == "Mistral") + text for text in said]
        assert covered(tokenizer, row) == (expected[-1:] if shape == "gpt-oss" else expected)
        text = tokenizer.apply_chat_template(messages[: turns[-1] + 1], tokenize=False)
        start = text.rindex(messages[turns[-1]]["content"])
        last = rows.tokenise_row({"messages": messages}, tokenizer, "sft", 512, "last")
        for made in (row, last):
            assert whole(tokenizer, made) == text[:start] + said[-1]
            ids = made["prompt_ids"] + made["responses"][0]
            count = sum(token in tokenizer.all_special_ids for token in ids)
            spelled = "|".join(map(re.escape, SPECIAL))
            assert count == len(re.findall(spelled, whole(tokenizer, made)))


TALK = "\n\nHuman: Q?\n\nAssistant: A.\n\nB.\n\nHuman: And?\n\nAssistant:"


def test_one_source_of_chats_makes_the_end_of_turn_eos(tokenizer, tiny_model, tmp_path):
    """In all stages, also where the chats are dialogues as text: the first row decides, as with
    messages. Text has no turns, and ends with EOS as before. EOS is saved with the model, and is no
    padding, with which a base model may pad."""
    make = lambda i: {name: chat(f"Q{i}?", name) for name in ("chosen", "rejected")}  # noqa: E731
    talk = {"prompt": TALK, "chosen": " C.", "rejected": " D."}
    data = {"text": many(9, dahoas), "chats": many(9, make), "talk": [talk] * 9}
    for name, lines in data.items():
        folder(tmp_path / name, lines)
    for stage in STAGES:
        for names in (["text"], ["chats"], ["text", "chats"], ["text", "talk"]):
            paths = [str(tmp_path / name) for name in names]
            args = SimpleNamespace(data_path=paths, columns=None)
            assert rows.open_sources(args, stage).hold_chats == (names != ["text"])
    path = saved(tokenizer, tmp_path / "model", "Qwen")
    own = folders.load_tokenizer(path)
    own.pad_token = "<|im_end|>"
    own.save_pretrained(path)
    plain, in_chats = (folders.load_tokenizer(path, in_chats=on) for on in (False, True))
    assert (plain.eos_token, plain.pad_token) == ("<eos>", "<|im_end|>")
    assert (in_chats.eos_token, in_chats.pad_token) == ("<|im_end|>", "<pad>")
    model = copy.deepcopy(tiny_model)
    saving.note_tokens(model, in_chats, scores=False)
    assert model.config.eos_token_id == in_chats.eos_token_id
    both = [in_chats.eos_token_id, plain.eos_token_id]  # stock generate() ended at the model's own
    assert model.generation_config.eos_token_id == both


TRAIN_ON = {  # a row: {--train_on: what the loss covers}; None is the default
    "messages": (
        {"messages": chat("Q?", "A.", "And?", "C.")},
        {
            None: ["A.", "C.<eos>"],
            "last": ["C.<eos>"],
            "everything": ["<user>Q?\n<assistant>A.\n<user>And?\n<assistant>C.<eos>"],
        },
    ),
    "a pair of chats": (
        {name: chat("Q?", "A.", "And?", name) for name in ("chosen", "rejected")},
        {None: ["chosen<eos>"], "all": ["A.", "chosen<eos>"]},
    ),
    "whole dialogues": (
        {"chosen": TALK + " C.", "rejected": TALK + " D."},
        {None: [" C.<eos>"], "all": [" A.\n\nB.", " C.<eos>"]},
    ),
    "dialogues that part early": (
        {"chosen": TALK + " C.", "rejected": "\n\nHuman: Q?\n\nAssistant: D."},
        {"all": [" A.\n\nB.", " C.<eos>"]},
    ),
    "plain text": (
        {"prompt": "Q?", "response": " A."},
        {None: [" A.<eos>"], "all": [" A.<eos>"], "everything": ["Q? A.<eos>"]},
    ),
}


@pytest.mark.parametrize("name", TRAIN_ON)
def test_train_on_says_which_turns_are_learned(tokenizer, name):
    """Without the flag a chat in `messages` is learned whole, and all else by its response. The
    prompts of the other steps are not learned. (Dialogues that are text stay text where there is no
    chat template.)"""
    tokenizer.chat_template = None if "dialogues" in name else TEMPLATE
    row, wanted = TRAIN_ON[name]
    for train_on, expected in wanted.items():
        made = rows.tokenise_row(row, tokenizer, "sft", 128, train_on)
        assert covered(tokenizer, made) == expected
    assert not any(rows.tokenise_row(row, tokenizer, "ppo", 128)["prompt_loss_mask"])


LAST = "{% if m.role == 'assistant' and loop.last %}BEFORE{{ m.content | trim }}AFTER{% else %}"
LAST += "{{ m.content }}{% endif %}"
WRITTEN = {  # what a template writes of a message; it writes another text of earlier turns
    "an empty thought (Qwen3)": LAST.replace("BEFORE", "<think>\n\n</think>\n\n"),
    "a channel (gpt-oss)": LAST.replace("BEFORE", "<|channel|>final<|message|>"),
    "an end of the response (Cohere)": LAST.replace("AFTER", "<|END_RESPONSE|>"),
    "no thought of earlier turns": (
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_response_is_written_as_the_template_writes_a_finished_turn(tokenizer, name):
    """In pairs, and where the last turn alone is learned, as where all are: prompt and response
    together are the stock rendering of the whole chat. A mask on an earlier turn that is changed
    would lie on the wrong tokens: it is not learned, and the run says in how many rows. Whoever
    asks for all turns is refused."""
    content = WRITTEN[name].replace("BEFORE", "").replace("AFTER", "")
    tokenizer = with_template(tokenizer, CHATML.replace("{{ m.content }}", content))
    tokenizer.add_tokens(["<think>", "</think>"])
    asked = chat("Why?", "<think>Hm</think>So.", "And?")
    answers = {name: chat("", name)[1:] for name in ("chosen", "rejected")}
    stock = [
        tokenizer.apply_chat_template(asked + turn, tokenize=False).rstrip() + "<eos>"
        for turn in answers.values()
    ]
    pair = rows.tokenise_row({"prompt": asked, **answers}, tokenizer, "reward", 256)
    assert [whole(tokenizer, pair, i) for i in (0, 1)] == stock and pair["notes"] == ""
    messages = {"messages": asked + answers["chosen"]}
    for train_on, note in ((None, "have turns that are not learned"), ("last", "")):
        row = rows.tokenise_row(messages, tokenizer, "sft", 256, train_on)
        assert whole(tokenizer, row) == stock[0] and row["notes"].startswith(note)
        assert not any(row["prompt_loss_mask"]) and bool(row["notes"]) == bool(note)
    with kit.refuses("chat-template") as caught:
        rows.tokenise_row(messages, tokenizer, "sft", 256, "all")
    assert "--train_on last" in caught.value.words


def test_a_template_sees_tokens_that_are_not_special(tokenizer):
    """Qwen3's and R1's templates look for </think>, which is an added token of theirs: what is
    thought in an earlier turn must be dropped by ours as it is in stock use."""
    content = WRITTEN["no thought of earlier turns"]
    tokenizer = with_template(tokenizer, CHATML.replace("{{ m.content }}", content))
    tokenizer.add_tokens(["<think>", "</think>"])
    turns = chat("Why?", "<think>Hm</think>So.", "And?", "<think>Oh</think>Then.")
    row = rows.tokenise_row({"messages": turns}, tokenizer, "sft", 256, "last")
    stock = tokenizer.apply_chat_template(turns[:3], add_generation_prompt=True, return_dict=False)
    assert row["prompt_ids"] == stock and not row["drop"]
    thought = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert set(thought) < set(row["responses"][0])


def test_after_an_opening_that_a_finished_turn_lacks_a_response_stays_as_it_is(tokenizer):
    """R1's opening begins a thought, and of a finished turn its template writes the answer alone. A
    mask cannot be told from that: the run says so, and refuses who asks for all turns."""
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tokenizer, turns = with_template(tokenizer, template), chat("Why?", "So.", "And?", "Then.")
    answers = {"prompt": turns[:3], "chosen": turns[3:], "rejected": chat("", "No")[1:]}
    for row, stage in (({"messages": turns}, "sft"), (answers, "reward")):
        made = rows.tokenise_row(row, tokenizer, stage, 256)
        opening = "And?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        assert whole(tokenizer, made).endswith(f"{opening}Then.<eos>")
        assert not any(made["prompt_loss_mask"]) and "as the data has it" in made["notes"]
    with kit.refuses("chat-template"):
        rows.tokenise_row({"messages": turns}, tokenizer, "sft", 256, "all")


def test_an_end_of_turn_is_special_even_if_its_tokenizer_does_not_say_so(tokenizer, tmp_path):
    """It becomes EOS: spelled in a text it is text, and in a chat it would end a turn."""
    tokenizer = with_template(tokenizer, CHATML)
    tokenizer.add_tokens([AddedToken("<|im_end|>", rstrip=True, normalized=False)])
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    made = folders.load_tokenizer(tmp_path, in_chats=True)
    assert made.added_tokens_decoder[made.eos_token_id].rstrip  # it eats spaces, as in Phi-3
    ids = made("a<|im_end|> \nb").input_ids
    assert ids == tokenizer("a<|im_end|> \nb").input_ids and len(ids) == 3
    text = "Is <|im_end|> a word?"
    assert made.eos_token_id not in tokens.tokenise_prompt(made, text)
    row = rows.tokenise_row({"messages": chat(text, "No.")}, made, "sft", 64)
    assert "spells a special token" in row["drop"]


def test_an_end_of_turn_that_is_text_is_said(tokenizer, tmp_path, capsys):
    """As where a base model got a chat template and not its tokens: each response is learned with
    these letters before its EOS, and a reward function reads them at its end."""
    own = with_template(tokenizer, CHATML.replace("im_end", "turn_end"))
    own.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=len(own)).save_pretrained(tmp_path)
    assert folders.load_tokenizer(tmp_path, in_chats=True).eos_token == "<eos>"
    assert "'<|turn_end|>' ends a turn, and is no token" in capsys.readouterr().out
    folders.load_tokenizer(tmp_path)
    with_template(tokenizer, TEMPLATE).save_pretrained(tmp_path)
    folders.load_tokenizer(tmp_path, in_chats=True)  # a line break ends a turn
    assert not capsys.readouterr().out


def test_a_chat_that_spells_a_special_token_is_left_out(tokenizer, tmp_path, capsys):
    """In what a template writes it would be that token: a user who writes <eos> would end a turn,
    and a name may do so, too. In every step, also where the chat was text. Such rows are counted.
    In plain text they are data (test_tokens.py)."""
    tokenizer = with_template(tokenizer, CHATML)
    fields = [{"content": "Say <eos>"}, {"name": "a<pad>b"}, {"tool": {"of": ["<eos>"]}}]
    spelled = [[{**TURNS[0], **field}, TURNS[1]] for field in fields]
    spelled += [TURNS[:1] + chat("", "So.<eos>")[1:]]
    cases = [("sft", {"messages": turns}, on) for turns in spelled for on in ("last", "all")]
    cases += [("ppo", {"messages": turns}, None) for turns in spelled[:3]]
    cases += [("reward", {"chosen": TURNS[:2], "rejected": spelled[-1]}, None)]
    cases += [("reward", {"chosen": TALK + " A.", "rejected": TALK + " B.<eos>"}, None)]
    for stage, row, train_on in cases:
        made = rows.tokenise_row(row, tokenizer, stage, 256, train_on)
        assert "spells a special token" in made["drop"] and not made["prompt_ids"], made
    lines = [{"messages": chat(f"Q{i}?", "A.")} for i in range(9)]
    write(tmp_path / "test.jsonl", lines[:1])
    write(tmp_path / "train.jsonl", lines[1:] + [{"messages": turns} for turns in spelled])
    train, _ = load(tokenizer, [tmp_path])
    assert len(train) == 8
    assert "train: 4 of 12 rows are dropped: a message spells a special" in capsys.readouterr().out


# ---- Dialogues that are text ----
SAID = chat("Q?", "A.\n\nB.", "And?")
ALIKE = {  # a stage: a row of text, and the same as messages
    "sft": (
        {"prompt": TALK, "response": " C."},
        {"messages": [*SAID, *chat("", "C.")[1:]]},
    ),
    "reward": (
        {"chosen": TALK + " C.", "rejected": TALK + " D."},
        {"prompt": SAID, "chosen": chat("", "C.")[1:], "rejected": chat("", "D.")[1:]},
    ),
    "ppo": ({"prompt": TALK}, {"prompt": SAID}),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_dialogue_as_text_is_a_chat_where_there_is_a_template(tokenizer, stage):
    """Anthropic's HH, given to a chat model: as text it would be asked in a language that it was
    not trained in, and nothing would tell. Each row says what was done to it."""
    tokenizer = with_template(tokenizer, CHATML)
    of_text, of_chat = (
        rows.tokenise_row(row, tokenizer, stage, 256, "last") for row in ALIKE[stage]
    )
    said = "are dialogues as text, and get the chat template"
    assert (of_text.pop("notes"), of_chat.pop("notes")) == (said, "")
    del of_text["extra"], of_chat["extra"]
    assert of_text == of_chat and of_text["chat"]


def test_turns_in_a_response_are_turns(tokenizer):
    """Dialogues that part early: in the text of one response more is asked and answered. As one
    message it would have the model write the user's part, too."""
    tokenizer.chat_template = TEMPLATE
    row = {"prompt": "\n\nHuman: Q?\n\nAssistant:"}
    row["response"] = " A.\n\nHuman: And?\n\nAssistant: C."
    for train_on, learned in (("last", ["C.<eos>"]), ("all", ["A.", "C.<eos>"])):
        made = rows.tokenise_row(row, tokenizer, "sft", 256, train_on)
        assert covered(tokenizer, made) == learned
        text = "<user>Q?\n<assistant>A.\n<user>And?\n<assistant>"
        assert tokenizer.decode(made["prompt_ids"]) == text


BEGUN = TALK + " Well,"
STAYS = [  # a stage, a row whose text stays text
    *[("sft", {"prompt": prompt, "response": "A."}) for prompt in ("Q?", "Q?\n\nAssistant:")],
    ("sft", {"prompt": f"So:{TALK}", "response": "A."}),
    *[("ppo", {"prompt": p}) for p in ("\n\nHuman: Q?", "\n\nAssistant:", "Human: and Assistant:")],
    # as messages the user's words would be learned, or a response would lose its beginning
    ("sft", {"prompt": TALK, "response": " C.\n\nHuman: Bye"}),
    ("ppo", {"prompt": BEGUN}),
    ("reward", {"prompt": BEGUN, "chosen": " C.", "rejected": " D."}),
]


@pytest.mark.parametrize("stage, row", STAYS)
def test_other_text_stays_text(tokenizer, stage, row):
    """A dialogue begins with a speaker and ends with the opening of the assistant."""
    made = rows.tokenise_row(row, with_template(tokenizer, TEMPLATE), stage, 256)
    assert (made["prompt"], made["chat"]) == (row["prompt"], False)
    assert made["notes"] == "are plain text, and get no chat template"


@pytest.mark.parametrize("text, template", [({"prompt": TALK}, None), ({"text": TALK}, TEMPLATE)])
def test_a_dialogue_stays_text_without_a_template_and_where_it_is_learned_whole(
    tokenizer, text, template
):
    tokenizer = with_template(tokenizer, template)
    row = rows.tokenise_row({**text, "response": " C."}, tokenizer, "sft", 256)
    assert (row["prompt"], row["chat"], row["notes"]) == (TALK, False, "")
    assert whole(tokenizer, row) == TALK + " C." * (template is None) + "<eos>"


# ---- Rows that are too long, or cannot be read ----
def test_what_is_cut_is_counted(tokenizer, tmp_path, capsys):
    """Of text and of chats alike, the end of the prompt is kept, with what is learned of it."""
    lines = [{"prompt": "Why? " * 40, "response": "A."}, {"prompt": "Q?", "response": "So. " * 40}]
    load(tokenizer, [folder(tmp_path, [*lines, *lines, {**lines[0], "prompt": "How?"}])], limit=32)
    said = capsys.readouterr().out
    assert "train: 2 of 4 rows lose the beginning of a long prompt" in said
    assert "train: 2 of 4 rows lose the end of a long response" in said
    turns = {"messages": chat("Why? " * 40, "So.", "And?", "A.")}
    row = rows.tokenise_row(turns, with_template(tokenizer, TEMPLATE), "sft", 32)
    assert row["notes"] == "lose the beginning of a long prompt"
    assert len(row["prompt_ids"]) == 32 - len(row["responses"][0])
    assert covered(tokenizer, row) == ["So.", "A.<eos>"]


ODD = """{% for m in messages %}{% if m.content == "raise" %}{{ 1 + m.content }}{% endif %}
{%- if m.content != "raise" and m.content != "silent" %}<{{ m.role }}>{{ m.content }}{% endif %}
{%- endfor %}"""


def test_a_row_that_the_template_cannot_render_is_dropped(tokenizer):
    """Its code may raise anything, not only jinja's own errors; and a prompt of which nothing is
    left would be a row without tokens, which stops PPO in the middle of a run."""
    tokenizer.chat_template = ODD
    for text, why in (("Why?", ""), ("raise", "the chat template refuses"), ("silent", "empty")):
        for stage in ("sft", "ppo"):
            row = rows.tokenise_row({"messages": chat(text, "A.")}, tokenizer, stage, 64)
            assert row["drop"].startswith(why) and bool(row["drop"]) == bool(why)


class Failing:
    """A tokenizer that cannot read one row."""

    bos_token_id, eos_token_id, chat_template = None, 1, None

    def __call__(self, text, **options):
        if text == "Q7?":
            raise KeyError("a bug of the tokenizer's")
        return SimpleNamespace(input_ids=[5, 6])


@pytest.mark.parametrize("many_rows", [10_000, 2])
def test_whatever_a_row_raises_names_its_line(tmp_path, monkeypatch, many_rows):
    """Also from one of the processes that tokenise many rows: an error that cannot be sent from
    there would be waited for without an end."""
    monkeypatch.setattr(rows, "MANY", many_rows)
    for kind, place in ((".jsonl", "train.jsonl, line 8: KeyError"), (".parquet", "'Q7?'")):
        write(tmp_path / kind / f"train{kind}", many(9, dahoas))
        write(tmp_path / kind / f"test{kind}", [dahoas(50)])
        with kit.refuses("bad-row") as caught:
            load(Failing(), [tmp_path / kind], "sft")
        assert place in caught.value.words, caught.value
