"""Chats: what the assistant says is learned, and nothing else; the template ends its turns."""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
from data_kit import TEMPLATE, chat, dahoas, folder, load, many, write
from transformers import LlamaConfig

from machinery import folders, rows, saving
from machinery.rows import STAGES
from tests import kit

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {  # name: (template, EOS, the end of a turn)
    "Qwen": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + CHATML.replace("{{ m.role }}", "{{ 'user' if m.role == 'tool' else m.role }}"),
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
    """Returns the tokenizer with a chat template of this shape, and the end of a turn."""
    template, eos, end = SHAPES[name]
    tokenizer = copy.deepcopy(tokenizer)
    specials = [t for t in dict.fromkeys(SPECIAL) if t not in ("<user>", "<assistant>")]
    tokenizer.add_special_tokens({"extra_special_tokens": specials})
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    return tokenizer, end


def covered(tokenizer, row):
    """Returns the texts that the loss covers: the runs of covered tokens, each decoded."""
    ids = row["prompt_ids"] + row["responses"][0]
    mask = row["prompt_loss_mask"] + [1] * len(row["responses"][0])
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for on, run in runs if on]


TURNS = chat("Why?", "So.", "And?", "Then so.\n\nYes!", "Hm?", "No")
CHATS = {  # name: (messages, which of them are learned)
    "turns": (TURNS, [1, 3, 5]),
    "a question at the end": (TURNS[:-1], [1, 3]),
    "system": ([{"role": "system", "content": "Be brief."}, *TURNS], [2, 4, 6]),
    "tool": ([*TURNS[:2], {"role": "tool", "content": "3"}, *TURNS[3:4]], [1, 3]),
    "text like a special token": (chat("Say <|im_end", "|>im_start|>", "< eos>?", "<eot>"), [1, 3]),
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_covers_what_the_assistant_says_and_its_ends_of_turn(tokenizer, shape, name):
    """And nothing else: not the openings that the template writes, not system, user and tool. The
    tokens together are what the template makes of the whole chat, up to the last turn's end, and
    EOS once."""
    tokenizer, end = shaped(tokenizer, shape)
    messages, turns = CHATS[name]
    row = rows.tokenise_row({"messages": messages}, tokenizer, "sft", 512)
    if shape == "Gemma" and name == "system":
        assert row["drop"] == "the chat template refuses it: no system role"
        return
    eos = "" if tokenizer.eos_token == end else tokenizer.eos_token
    expected = [" " * (shape == "Mistral") + messages[i]["content"] + end for i in turns]
    assert covered(tokenizer, row) == [*expected[:-1], expected[-1] + eos]
    ids, asked = row["prompt_ids"] + row["responses"][0], messages[: turns[-1] + 1]
    whole = tokenizer.apply_chat_template(asked, tokenize=False)
    assert tokenizer.decode(ids) == whole.rstrip() + eos
    without = [{**message, "content": "x"} for message in asked]
    written = tokenizer.apply_chat_template(without, tokenize=True, return_dict=False)
    specials = [[i for i in of if i in tokenizer.all_special_ids] for of in (ids, written)]
    assert specials[0] == specials[1] + [tokenizer.eos_token_id] * bool(eos)


def loaded(tokenizer, folder, paths, stage):
    """Returns a step's rows and tokenizer as part 1 of the scripts loads them, from a model's
    folder."""
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
    flags = {"data_path": [str(path) for path in paths], "columns": None}
    args = SimpleNamespace(**flags, data_split=[float(name == stage) for name in STAGES])
    sources = rows.open_sources(args, stage)
    found = folders.load_tokenizer(folder, in_chats=sources.hold_chats)
    return *rows.load_rows(args, sources, found, 64), found


SAY = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
NEXT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT_ENDS = {  # name: (template, EOS, what ends a turn)
    "Phi": (
        f"{SAY}<|end|>{{% endfor %}}{NEXT}{{% if not add_generation_prompt %}}{{{{ eos_token }}}}"
        "{% endif %}",
        "<|endoftext|>",
        "<|end|>",
    ),
    "gpt-oss": (
        f"{SAY}{{% if loop.last and not add_generation_prompt %}}<|return|>{{% else %}}<|end|>"
        f"{{% endif %}}{{% endfor %}}{NEXT}",
        "<|return|>",
        "<|return|>",
    ),
    "Cohere": (f"{SAY}<|END_RESPONSE|><|END|>{{% endfor %}}{NEXT}", "<|END|>", "<|END|>"),
}


@pytest.mark.parametrize("shape", CHAT_ENDS)
def test_the_end_of_a_turn_is_told_from_that_of_the_chat(tokenizer, tmp_path, shape):
    """Phi's template writes EOS once more where nothing follows: no turn ends with it."""
    template, eos, end = CHAT_ENDS[shape]
    tokenizer = copy.deepcopy(tokenizer)
    specials = "<|end|> <|return|> <|END_RESPONSE|> <|END|> <|endoftext|> <|user|> <|assistant|>"
    tokenizer.add_special_tokens({"extra_special_tokens": specials.split()})
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    found = folders.load_tokenizer(tmp_path, in_chats=True)
    assert found.eos_token == end
    row = rows.tokenise_row({"messages": TURNS}, found, "sft", 512)
    said = [TURNS[i]["content"] for i in (1, 3, 5)]
    ends = {"Phi": ["<|end|>"] * 3, "Cohere": ["<|END_RESPONSE|><|END|>"] * 3}
    if shape == "gpt-oss":  # an earlier turn ends otherwise, and is not learned
        assert covered(found, row) == ["No<|return|>"]
    else:
        assert covered(found, row) == [text + end for text, end in zip(said, ends[shape])]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shape", ["Qwen", "Gemma", "text"])
def test_in_chats_the_end_of_turn_is_eos(tokenizer, tiny_model, tmp_path, shape, stage):
    """The base models of Qwen end a text with <|endoftext|>, and their chat template ends a turn
    with <|im_end|>. Who talks to the model stops at that, so it is what the model must learn, what
    ends a rollout, and what is saved as EOS. Text has no turns, and ends with EOS as before. One
    source of chats among others is enough."""
    tokenizer, end = shaped(tokenizer, shape)
    tokenizer.eos_token = "<eos>"
    text = folder(tmp_path / "text", many(10, dahoas))
    *_, found = loaded(tokenizer, tmp_path / "model", [text], stage)
    assert found.eos_token == "<eos>"
    make = lambda i: {name: chat(f"Q{i}?", name) for name in ("chosen", "rejected")}  # noqa: E731
    chats = folder(tmp_path / "chats", many(10, make))
    train, _, tokenizer = loaded(tokenizer, tmp_path / "model", [text, chats], stage)
    eos = tokenizer.eos_token_id
    assert tokenizer.eos_token == (end or "<eos>")
    responses = [ids for row in train for ids in row["responses"]]
    assert responses or stage == "ppo"  # whose rows are prompts
    assert all(ids.count(eos) == 1 and ids[-1] == eos for ids in responses)
    model = copy.deepcopy(tiny_model)
    saving.note_tokens(model, tokenizer, scores=False)
    assert [c.eos_token_id for c in (model.config, model.generation_config)] == [eos] * 2


def test_in_chats_the_end_of_turn_is_no_padding(tokenizer, tmp_path):
    """A base model may pad with the token that ends its template's turns."""
    tokenizer, end = shaped(tokenizer, "Qwen")
    tokenizer.eos_token, tokenizer.pad_token = "<eos>", end
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    plain, in_chats = (folders.load_tokenizer(tmp_path, in_chats=on) for on in (False, True))
    assert (plain.eos_token, plain.pad_token) == ("<eos>", end)
    assert in_chats.eos_token == end != in_chats.pad_token == "<pad>"


TALK = "\n\nHuman: Q?\n\nAssistant: A.\n\nB.\n\nHuman: And?\n\nAssistant:"
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


def test_turns_that_the_template_changes_are_not_learned(tokenizer, tmp_path, capsys):
    """It drops what was thought in earlier turns: turn by turn it writes another text than of the
    whole chat. A mask would lie on the wrong tokens. So such a turn is not learned, and the run
    says in how many rows. Whoever asks for all turns is refused."""
    thinks = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", thinks)
    turns = chat("Why?", "<think>Hm</think>So.", "And?", "Then.")
    short, other = {"messages": turns[:2]}, {"messages": [*chat("How?"), *turns[1:]]}
    paths = [folder(tmp_path, [{"messages": turns}] * 8 + [short, other])]
    train, test = load(tokenizer, paths, limit=256)
    said = capsys.readouterr().out
    assert "train: 8 of 8 rows have turns that are not learned" in said
    assert "test: 1 of 2 rows have turns that are not learned" in said
    assert covered(tokenizer, train[0]) == ["Then.<|im_end|><eos>"]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = train[0]["prompt_ids"] + train[0]["responses"][0]
    assert tokenizer.decode(ids) == whole.rstrip() + "<eos>" and "Hm" not in whole
    assert covered(tokenizer, test[0]) == ["<think>Hm</think>So.<|im_end|><eos>"]
    last = rows.tokenise_row({"messages": turns}, tokenizer, "sft", 256, "last")
    assert (last["notes"], last["prompt_ids"]) == ("", train[0]["prompt_ids"])
    with kit.refuses("chat-template") as caught:
        load(tokenizer, paths, train_on="all")
    assert "--train_on last" in caught.value.words


TURN = "{% if m.role == 'assistant' and loop.last %}BEFORE{{ m.content | trim }}AFTER{% else %}"
TURN += "{{ m.content }}{% endif %}"
WRITTEN = {  # what a template writes before and after the content of the last turn
    "an empty thought (Qwen3)": ("<think>\n\n</think>\n\n", ""),
    "a channel (gpt-oss)": ("<|channel|>final<|message|>", ""),
    "an end of the response (Cohere)": ("", "<|END_RESPONSE|>"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_response_is_written_as_the_template_writes_a_finished_turn(tokenizer, name):
    """In pairs, and where the last turn alone is learned, as where all are: prompt and response
    together are the stock rendering of the whole chat."""
    before, after = WRITTEN[name]
    turn = TURN.replace("BEFORE", before).replace("AFTER", after)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", turn)
    asked, made = chat("Why?", "So.", "And?"), {}
    for text in ("Then. ", "Hm"):
        stock = tokenizer.apply_chat_template([*asked, *chat("", text)[1:]], tokenize=False)
        made[text] = stock.rstrip() + "<eos>"
    answers = {"prompt": asked, "chosen": chat("", "Then. ")[1:], "rejected": chat("", "Hm")[1:]}
    pair = rows.tokenise_row(answers, tokenizer, "reward", 256)
    found = [tokenizer.decode(pair["prompt_ids"] + ids) for ids in pair["responses"]]
    assert found == list(made.values()) and pair["notes"] == ""
    for train_on in (None, "last"):
        messages = [*asked, *answers["chosen"]]
        row = rows.tokenise_row({"messages": messages}, tokenizer, "sft", 256, train_on)
        assert tokenizer.decode(row["prompt_ids"] + row["responses"][0]) == made["Then. "]


def test_after_an_opening_that_a_finished_turn_lacks_a_response_stays_as_it_is(tokenizer):
    """R1's opening begins a thought, and of a finished turn its template writes the answer alone. A
    mask cannot be told from that: the run says so, and refuses who asks for all turns."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    turns = chat("Why?", "So.", "And?", "Then.")
    answers = {"prompt": turns[:3], "chosen": turns[3:], "rejected": chat("", "No")[1:]}
    for row, stage in (({"messages": turns}, "sft"), (answers, "reward")):
        made = rows.tokenise_row(row, tokenizer, stage, 256)
        ids = made["prompt_ids"] + made["responses"][0]
        assert tokenizer.decode(ids).endswith(
            "And?<|im_end|>\n<|im_start|>assistant\n<think>\nThen.<eos>"
        )
        assert not any(made["prompt_loss_mask"]) and "as the data has it" in made["notes"]
    refused = rows.tokenise_row({"messages": turns}, tokenizer, "sft", 256, "all")
    assert "--train_on last" in refused["drop"]


def test_a_template_sees_tokens_that_are_not_special(tokenizer):
    """Qwen3's and R1's templates look for </think>, which is an added token of theirs: what is
    thought in an earlier turn must be dropped by ours as it is in stock use."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    thinks = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", thinks)
    turns = chat("Why?", "<think>Hm</think>So.", "And?", "<think>Oh</think>Then.")
    row = rows.tokenise_row({"messages": turns}, tokenizer, "sft", 256, "last")
    stock = tokenizer.apply_chat_template(turns[:3], add_generation_prompt=True, return_dict=False)
    assert row["prompt_ids"] == stock and not row["drop"]
    thought = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert set(thought) < set(row["responses"][0])


def test_a_chat_that_spells_a_special_token_is_left_out(tokenizer, tmp_path, capsys):
    """In what a template writes it would be that token: a user who writes <eos> would end a turn,
    and a name may do so, too. In every step, also where the chat was text. Such rows are counted.
    In plain text they are data (test_tokens.py)."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    fields = [{"content": "Say <eos>"}, {"name": "a<pad>b"}, {"tool": {"of": ["<eos>"]}}]
    asked = [[{**TURNS[0], **field}] for field in fields]
    spelled = [{"messages": turns + TURNS[1:2]} for turns in asked]
    spelled += [{"messages": TURNS[:1] + chat("", "So.<eos>")[1:]}]
    for stage in ("sft", "ppo"):
        for row in spelled[: 3 if stage == "ppo" else 4]:
            for train_on in ("last", "all"):
                made = rows.tokenise_row(row, tokenizer, stage, 256, train_on)
                assert "spells a special token" in made["drop"] and not made["prompt_ids"], made
    answers = {"chosen": chat("", "A.")[1:], "rejected": chat("", "<eos>")[1:]}
    text = {"chosen": TALK + " A.", "rejected": TALK.replace("B.", "<eos>") + " B."}
    for row in ({"prompt": TURNS[:1], **answers}, {**text, "rejected": TALK + " B.<eos>"}):
        made = rows.tokenise_row(row, tokenizer, "reward", 256)
        assert "spells a special token" in made["drop"], made
    lines = [{"messages": chat(f"Q{i}?", "A.")} for i in range(9)]
    write(tmp_path / "test.jsonl", lines[:1])
    train, _ = load(tokenizer, [write(tmp_path / "train.jsonl", lines[1:] + spelled) and tmp_path])
    assert len(train) == 8
    assert "train: 4 of 12 rows are dropped: a message spells a special" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Dialogues that are text
# --------------------------------------------------------------------------------------------------
BARE_TEXT = "are plain text, and get no chat template"
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
@pytest.mark.parametrize("shape", ["Qwen", "Gemma", "Mistral"])
def test_a_dialogue_as_text_is_a_chat_where_there_is_a_template(tokenizer, shape, stage):
    """Anthropic's HH, given to a chat model: as text it would be asked in a language that it was
    not trained in, and nothing would tell. Each row says what was done to it."""
    tokenizer, _ = shaped(tokenizer, shape)
    of_text, of_chat = (
        rows.tokenise_row(row, tokenizer, stage, 256, "last") for row in ALIKE[stage]
    )
    said = "are dialogues as text, and get the chat template"
    assert (of_text.pop("notes"), of_chat.pop("notes")) == (said, "")
    del of_text["extra"], of_chat["extra"]
    assert of_text == of_chat and of_text["chat"]


def test_without_a_template_a_dialogue_stays_text(tokenizer):
    row = rows.tokenise_row({"prompt": TALK, "response": " C."}, tokenizer, "sft", 256)
    assert (row["prompt"], row["chat"], row["notes"]) == (TALK, False, "")
    assert tokenizer.decode(row["prompt_ids"] + row["responses"][0]) == TALK + " C.<eos>"


def test_turns_in_a_response_are_turns(tokenizer):
    """Dialogues that part early: in the text of one response more is asked and answered. As one
    message it would have the model write the user's part, too."""
    tokenizer.chat_template = TEMPLATE
    row = {
        "prompt": "\n\nHuman: Q?\n\nAssistant:",
        "response": " A.\n\nHuman: And?\n\nAssistant: C.",
    }
    made = rows.tokenise_row(row, tokenizer, "sft", 256)
    assert covered(tokenizer, made) == ["C.<eos>"]
    assert (
        tokenizer.decode(made["prompt_ids"]) == "<user>Q?\n<assistant>A.\n<user>And?\n<assistant>"
    )
    made = rows.tokenise_row(row, tokenizer, "sft", 256, "all")
    assert covered(tokenizer, made) == ["A.", "C.<eos>"]


@pytest.mark.parametrize(
    "prompt",
    ["Q?", "Q?\n\nAssistant:", "\n\nHuman: Q?", "\n\nAssistant:", "Human: and Assistant:"],
)
def test_other_text_stays_text(tokenizer, prompt):
    """A dialogue begins with a speaker and ends with the opening of the assistant."""
    tokenizer.chat_template = TEMPLATE
    row = rows.tokenise_row({"prompt": prompt, "response": "A."}, tokenizer, "sft", 64)
    assert (row["prompt"], row["chat"], row["notes"]) == (prompt, False, BARE_TEXT)


@pytest.mark.parametrize(
    "stage, row",
    [
        ("sft", {"prompt": TALK, "response": " C.\n\nHuman: Bye"}),
        ("ppo", {"prompt": TALK + " Well,"}),
        ("reward", {"prompt": TALK + " Well,", "chosen": " C.", "rejected": " D."}),
    ],
)
def test_a_dialogue_that_does_not_end_as_one_stays_text(tokenizer, stage, row):
    """A response that ends with the user's turn, and one that the prompt has begun: as messages
    the first would teach the user's words, and the second would lose its beginning."""
    tokenizer.chat_template = TEMPLATE
    made = rows.tokenise_row(row, tokenizer, stage, 256)
    assert (made["prompt"], made["chat"], made["notes"]) == (row["prompt"], False, BARE_TEXT)


@pytest.mark.parametrize("stage", STAGES)
def test_where_dialogues_are_text_the_end_of_turn_is_eos_too(tokenizer, tmp_path, stage):
    """The first row decides, as with messages."""

    def make(i):
        return {name: text.replace("Q?", f"Q{i}?") for name, text in ALIKE[stage][0].items()}

    qwen, end = shaped(tokenizer, "Qwen")
    qwen.eos_token = "<eos>"
    data = [folder(tmp_path / "talk", many(10, make))]
    *_, found = loaded(qwen, tmp_path / "model", data, stage)
    assert found.eos_token == end


def test_text_that_is_learned_whole_stays_text(tokenizer):
    """Also where it spells a dialogue: it is no prompt that somebody responds to."""
    tokenizer.chat_template = TEMPLATE
    row = rows.tokenise_row({"text": TALK}, tokenizer, "sft", 128)
    assert (row["prompt"], row["chat"], row["notes"]) == (TALK, False, "")


# --------------------------------------------------------------------------------------------------
# Chats that are too long
# --------------------------------------------------------------------------------------------------
def test_what_is_cut_is_counted(tokenizer, tmp_path, capsys):
    """Of text and of chats alike, the end of the prompt is kept."""
    lines = [{"prompt": "Why? " * 40, "response": "A."}, {"prompt": "Q?", "response": "So. " * 40}]
    load(tokenizer, [folder(tmp_path, [*lines, *lines, {**lines[0], "prompt": "How?"}])], limit=32)
    said = capsys.readouterr().out
    assert "train: 2 of 4 rows lose the beginning of a long prompt" in said
    assert "train: 2 of 4 rows lose the end of a long response" in said
    tokenizer.chat_template = TEMPLATE
    row = rows.tokenise_row({"messages": chat("Why? " * 40, "A.")}, tokenizer, "sft", 32)
    assert row["notes"] == "lose the beginning of a long prompt"
    assert len(row["prompt_ids"]) == 32 - len(row["responses"][0])


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
        place_of = tmp_path / kind[1:]
        write(place_of / f"train{kind}", many(9, dahoas))
        write(place_of / f"test{kind}", [dahoas(50)])
        with kit.refuses("bad-row") as caught:
            load(Failing(), [place_of], "sft")
        assert place in caught.value.words, caught.value
