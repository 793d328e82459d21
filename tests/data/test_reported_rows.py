"""What people reported of other projects: parts of a row that never reached the model."""

import json

import pytest
from data_kit import TEMPLATE, both, chat, dahoas, load, many, texts
from datasets import Dataset, DatasetDict
from test_chats import CHATML, covered, whole, with_template

from machinery import formats, rows
from tests import kit

THINKING = (  # as Qwen3's: thoughts in a field of their own, of the last turn alone
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def row_of(tokenizer, template, row, stage="sft", train_on=None):
    """Returns a row of `tokenise_row` under a chat template, and the tokenizer that has it."""
    tokenizer = with_template(tokenizer, template)
    return rows.tokenise_row(row, tokenizer, stage, 256, train_on), tokenizer


@pytest.mark.parametrize("train_on", [None, "last", "all"])
def test_the_last_turn_is_rendered_with_its_own_fields(tokenizer, train_on):
    """verl#7807, NeMo Automodel#2348: with its thoughts in reasoning_content a model was trained to
    think nothing."""
    said = {"role": "assistant", "content": "42", "reasoning_content": "6 times 7"}
    messages = [*chat("What is it?"), said]
    made, own = row_of(tokenizer, THINKING, {"messages": messages}, train_on=train_on)
    stock = own.apply_chat_template(messages, tokenize=False)
    assert whole(own, made) == stock.rstrip() + own.eos_token and made["notes"] == ""


def test_pairs_that_differ_in_their_thoughts_are_pairs(tokenizer):
    """They were dropped, as "chosen equals rejected"."""
    pair = {}
    for name, thought in (("chosen", "6 times 7"), ("rejected", "6 plus 7")):
        said = {"role": "assistant", "content": "42", "reasoning_content": thought}
        pair[name] = [*chat("What is it?"), said]
    made, own = row_of(tokenizer, THINKING, pair, "reward")
    assert not made["drop"]
    assert ["6 times 7" in whole(own, made), "6 plus 7" in whole(own, made, 1)] == [True, True]


@pytest.mark.parametrize("field", ["weight", "loss", "train", "trainable"])
@pytest.mark.parametrize("value", [0, False])
def test_a_turn_that_says_so_is_not_learned(tokenizer, field, value):
    """OpenAI's weight, and what other trainers call it: few-shot turns, and mistakes that are there
    to be corrected. The last turn that is learned is the response. A row without one is dropped."""
    messages = chat("Why?", "No idea.", "Why?", "So.", "And?", "Hm.")
    for i in (1, 5):
        messages[i][field] = value
    made, own = row_of(tokenizer, CHATML, {"messages": messages})
    assert covered(own, made) == ["So.<|im_end|>" + own.eos_token]
    assert "No idea." in whole(own, made) and "And?" not in whole(own, made)
    asked, _ = row_of(tokenizer, CHATML, {"messages": messages}, "ppo")
    assert "And?" in own.decode(asked["prompt_ids"]) and "Hm." not in own.decode(
        asked["prompt_ids"]
    )
    messages[3][field] = value
    assert row_of(tokenizer, CHATML, {"messages": messages})[0]["drop"] == rows.EMPTY
    completion = {"prompt": messages[:1], "completion": messages[1:2]}
    assert row_of(tokenizer, CHATML, completion)[0]["drop"] == rows.EMPTY


def test_what_a_table_fills_up_with_null_changes_nothing(tokenizer):
    """Not the text of a prompt either, by which rows are held out; and a step that does not use a
    column takes whatever is there."""
    messages = [{**message, "weight": None} for message in chat("Why?", "So.")]
    made, own = row_of(tokenizer, CHATML, {"messages": messages})
    plain, _ = row_of(tokenizer, CHATML, {"messages": chat("Why?", "So.")})
    assert made["prompt_ids"] + made["responses"] == plain["prompt_ids"] + plain["responses"]
    assert json.loads(made["prompt"]) == messages[:1]
    assert "thinking" not in row_of(tokenizer, CHATML, {"messages": messages})[0]["notes"]
    for row in ({"prompt": "Q?", "response": {"answer": 42}}, {"prompt": "Q?", "messages": []}):
        assert row_of(tokenizer, CHATML, row, "ppo")[0]["drop"] == ""


def test_a_weight_between_0_and_1_is_refused():
    """It would be learned with weight 1."""
    messages = chat("Why?", "So.")
    messages[1]["weight"] = 0.5
    with pytest.raises(formats.BadRow, match="weight"):
        formats.read_row({"messages": messages})


@pytest.mark.parametrize("role", ["developer", "function", "tool", "system"])
@pytest.mark.parametrize("stage", rows.STAGES)
def test_what_a_template_does_not_write_is_counted(tokenizer, stage, role):
    """sglang#40082, ollama#18305: Qwen's templates know no developer; the instruction vanished. So
    did thoughts under a template that knows of none."""
    only = "{% for m in messages if m.role in ['user', 'assistant'] %}"
    template = TEMPLATE.replace("{% for m in messages %}", only)
    start = [{"role": role, "content": "In French."}, *chat("Why?")]
    row = {name: [*start, *chat("", name)[1:]] for name in ("chosen", "rejected")}
    note = "have a part that the chat template leaves out or changes: "
    assert row_of(tokenizer, template, row, stage)[0]["notes"] == f"{note}a turn of {role}"
    assert row_of(tokenizer, TEMPLATE, row, stage)[0]["notes"] == ""
    row["chosen"][-1]["thinking"] = "Hm."
    expected = "" if stage == "ppo" else f"{note}thinking"
    assert row_of(tokenizer, TEMPLATE, row, stage)[0]["notes"] == expected


SYSTEM, AGAIN = {"role": "system", "content": "Be brief."}, chat("Go on.", "A", "Go on.", "B")
CONTINUED = {  # name: (prompt, what comes before the response, the chat of both)
    "the same question twice": (AGAIN[:1], AGAIN[1:3], AGAIN[:3]),
    "the prompt is text": ("Go on.", AGAIN[1:3], AGAIN[:3]),
    "the question alone is repeated": ([SYSTEM, *AGAIN[:1]], AGAIN[:1], [SYSTEM, *AGAIN[:1]]),
    "a whole chat, and its question": (AGAIN[2:3], AGAIN[:3], AGAIN[:3]),
    "a whole chat, and a question without the system's turn": (
        AGAIN[:1],
        [SYSTEM, *AGAIN[:3]],
        [SYSTEM, *AGAIN[:3]],
    ),
    "a system's turn, then the chat": ([SYSTEM], AGAIN[:3], [SYSTEM, *AGAIN[:3]]),
    "no prompt": ([], AGAIN[:3], AGAIN[:3]),
    "a chat, and its last question": (AGAIN[:3], AGAIN[2:3], AGAIN[:3]),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_prompt_and_what_goes_on_from_it_are_one_chat(name):
    """TRL#4147, TRL#2390: a user who says the same twice ("Continue.") lost the first turn."""
    prompt, start, expected = CONTINUED[name]
    last = {"role": "assistant", "content": "C"}
    for kind in ("completion", "chosen"):
        assert formats.read_row({"prompt": prompt, kind: [*start, last]}).prompt == expected


@pytest.mark.parametrize("value", [0, False, [], {}, 0.0])
@pytest.mark.parametrize("name", ["response", "completion", "chosen", "text", "output"])
def test_a_value_of_a_wrong_type_is_no_empty_text(tokenizer, tmp_path, name, value):
    """It counted as empty, and the row was dropped."""
    row = {"text": {}, "output": {"instruction": "Q?"}}.get(name, {"prompt": "Q?"})
    row = {**row, name: value, **({"rejected": " x"} if name == "chosen" else {})}
    file = kit.write_lines(tmp_path / "train.jsonl", [row] * 3)
    with kit.refuses("bad-row") as caught:
        load(tokenizer, [file], "reward" if name == "chosen" else "sft")
    assert f"{file}, line 1: " in str(caught.value)


@pytest.mark.parametrize("parts", [["train"], ["train", "test"], None])
def test_a_folder_of_save_to_disk_is_read(tokenizer, tmp_path, parts):
    """It was taken for broken JSON. None: a Dataset that is in no DatasetDict. A file that is
    called state.json, or LlamaFactory's dataset_info.json, makes no such folder."""
    made = Dataset.from_list(many(40, dahoas))
    shares = {part: made.shard(len(parts), i) for i, part in enumerate(parts or ())}
    saved = DatasetDict(shares) if parts else made
    saved.save_to_disk(tmp_path / "set")
    found = both(load(tokenizer, [tmp_path / "set"]))
    assert texts(tokenizer, found) == {(f"Q{i}?", f" r{i}") for i in range(40)}
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).mkdir()
        kit.write_lines(tmp_path / name / name, many(40, dahoas))
        assert texts(tokenizer, both(load(tokenizer, [tmp_path / name]))) == texts(tokenizer, found)


def test_a_row_sets_options_of_its_chat_template(tokenizer):
    """chat_template_kwargs, as TRL has it: with enable_thinking false, Qwen3's template opens the
    turn with an empty thought, in every step."""
    off = {"chat_template_kwargs": {"enable_thinking": False, "unknown": None}}
    for stage in ("sft", "ppo"):
        for options, thought in (({}, ""), (off, "<think></think>")):
            row = {"messages": chat("Why?", "So."), **options}
            made, own = row_of(tokenizer, THINKING, row, stage)
            assert own.decode(made["prompt_ids"]) == f"<user>Why?\n<assistant>{thought}"
            assert json.loads(made["extra"]).get("chat_template_kwargs") == (
                options.get("chat_template_kwargs")
            )
    for wrong in ("enable_thinking=false", ["a"], {"a b": 1}):
        with kit.refuses("bad-row"):
            row_of(tokenizer, THINKING, {**row, "chat_template_kwargs": wrong})


STARTED = [*chat("2 + 2?"), {"role": "assistant", "content": "The sum is "}]
SUM, WRONG = {"role": "assistant", "content": "4."}, {"role": "assistant", "content": "5."}
TRIMMED = CHATML.replace("m.content }}", "m.content | trim }}")


@pytest.mark.parametrize("template", [CHATML, TRIMMED])
def test_a_response_goes_on_from_the_turn_that_the_prompt_begins(tokenizer, template):
    """transformers#32213, transformers#33198: a prompt that ends with words of the assistant's was
    rendered as a finished turn, and a second one was opened. The response is the rest of the turn,
    in every step, and what the prompt has of it is not learned."""
    rest = {
        "sft": [{"response": "4."}, {"completion": [SUM]}],
        "reward": [{"chosen": "4.", "rejected": "5."}, {"chosen": [SUM], "rejected": [WRONG]}],
        "ppo": [{}, {"response": "4."}],
    }
    whole_turn = {**STARTED[1], "content": "The sum is 4."}
    for stage, others in rest.items():
        for other in others:
            made, own = row_of(tokenizer, template, {"prompt": STARTED, **other}, stage)
            assert json.loads(made["prompt"]) == STARTED  # as functions get it, and rows are known
            stock = own.apply_chat_template(STARTED, continue_final_message=True, tokenize=False)
            assert own.decode(made["prompt_ids"]) == stock and stock.rstrip().endswith("The sum is")
            finished = own.apply_chat_template([*STARTED[:1], whole_turn], tokenize=False)
            if stage != "ppo":
                assert whole(own, made) == finished.rstrip() + own.eos_token
    for train_on in ("last", "all"):
        row = {"prompt": [*chat("Why?", "So."), *STARTED], "response": "4."}
        made, own = row_of(tokenizer, template, row, train_on=train_on)
        earlier = ["So.<|im_end|>"] * (train_on == "all")
        learned = [text.strip() for text in covered(own, made)]
        assert learned == [*earlier, "4.<|im_end|>" + own.eos_token]
    for kind in ("ppo", "sft"):  # an empty start is the opening of a turn
        row = {"prompt": [*chat("Why?"), {**SUM, "content": " "}], "response": "So."}
        opened = row_of(tokenizer, template, {**row, "prompt": chat("Why?")}, kind)[0]
        assert row_of(tokenizer, template, row, kind)[0]["prompt_ids"] == opened["prompt_ids"]


def test_a_turn_that_is_begun_keeps_its_thoughts(tokenizer):
    """Those of the prompt's message, or of the response's."""
    thought = {"reasoning_content": "2 and 2"}
    start = [*STARTED[:1], {**STARTED[1], **thought}]
    for row in ({"prompt": start, "response": "4."}, {"prompt": start, "completion": [SUM]}):
        made, own = row_of(tokenizer, THINKING, row)
        said = "<user>2 + 2?\n<assistant><think>2 and 2</think>The sum is 4."
        assert whole(own, made) == said + own.eos_token and made["notes"] == ""
    row = {"prompt": STARTED, "completion": [{**SUM, **thought}]}
    made, own = row_of(tokenizer, THINKING, row)  # the prompt's turn has begun without it
    assert made["notes"].endswith("leaves out or changes: reasoning_content")


def test_a_field_of_the_users_own_begins_nothing(tokenizer):
    """Mistral's API marks a message that is to be continued with `prefix`. In data this is a name
    like any other."""
    marked = [{**message, "prefix": True} for message in chat("How?", "Fine.", "Why?", "So.")]
    for train_on in ("last", "all"):
        made, own = row_of(tokenizer, CHATML, {"messages": marked}, train_on=train_on)
        plain, _ = row_of(tokenizer, CHATML, {"messages": chat("How?", "Fine.", "Why?", "So.")})
        assert whole(own, made) == whole(own, plain)
    assert covered(own, made) == ["Fine.<|im_end|>", "So.<|im_end|>" + own.eos_token]


def test_two_turns_of_the_assistant_that_the_data_has_stay_two(tokenizer):
    """Only a column `prompt` begins a turn: in a whole chat both are there, and finished."""
    messages = [*STARTED, SUM]
    for row in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        made, own = row_of(tokenizer, CHATML, row)
        assert whole(own, made) == own.apply_chat_template(messages, tokenize=False).rstrip() + (
            own.eos_token
        )
