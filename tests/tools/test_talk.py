"""tools/talk.py: win rates by hand, responses and scores as ppo.py has them, a dialogue as typed.

In one process, with tiny models.
"""

import functools
import io
import json
import shutil
import sys

import pandas
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForSequenceClassification

import ppo
from machinery import folders, formats
from tests import kit
from tools import talk
from tools.chat import models, screen, session, tables

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "Who are you?"}]
SHORT = ["--max_answer_seq_len", "8", "--dtype", "fp32"]


def flags_of(*given):
    return functools.partial(talk.get_args, [*map(str, given), *SHORT])


def writers_of(args):
    return [models.Writer(args, path) for path in args.models]


@torch.no_grad()
def stock_scores(folder, rows):
    """Returns the scores that stock transformers gives to each of these lists of ids alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    return pytest.approx([model(torch.tensor([ids])).logits.item() for ids in rows], abs=1e-5)


@pytest.fixture(scope="module")
def flags(trained):
    """Two models (the same one, twice), short responses."""
    return flags_of(trained / "actor", trained / "actor")


@pytest.fixture
def writer(flags):
    return writers_of(flags())[0]


@pytest.fixture(scope="module")
def judge(flags, trained):
    return models.Judge(flags(), str(trained / "judge"))


@pytest.fixture(scope="module")
def chat_folder(trained, tmp_path_factory):
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(trained / "actor", folder)
    tokenizer = folders.load_tokenizer(str(trained / "actor"))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


# ---- What it computes ----
def test_the_table_holds_means_and_win_rates():
    """The first model is what the others are compared with, prompt by prompt: a win counts one, a
    tie a half. An equal response is a tie, although its score has another last digit in a batch
    with other padding. Here a win, a tie, a loss, a win: 2.5 of 4. Wilson's interval, z^2 = 3.8416:

        middle = (0.625 + 3.8416 / 8) / (1 + 3.8416 / 4) = 1.1052 / 1.9604
        half   = 1.96 / 1.9604 * sqrt(0.625 * 0.375 / 4 + 3.8416 / 64) = 0.99980 * 0.34441
    """
    rewards = {"a": [0, 2, 4, 3], "b": [1, 2 + 1e-7, 3, 4]}
    answers = [
        (name, pandas.DataFrame(dict(response=[name, "same", name, name], reward=own, ended=1.0)))
        for name, own in rewards.items()
    ]
    _, a, b = tables.comparison(answers)
    assert a.split() == ["a", "2.250", "1.000", "(the", "first)"]
    assert b.split() == ["b", "2.500", "1.000", "0.625", "[0.219,", "0.908]"]


TEMPLATES = [  # prompts of samples.jsonl, and the template found; None: it cannot be told
    (["Who?\nAnswer:", "How so?\nAnswer:"], "{}\nAnswer:"),
    (["\n\nHuman: Who?\n\nAssistant:", "\n\nHuman: How?\n\nAssistant:"], models.DIALOGUE),
    ([json.dumps(ASKED)], "chat"),
    (["only one\nAnswer:"], None),
    ([], None),
    ([7, ["no text"]], None),
]


def test_a_question_is_written_as_in_the_models_own_samples(tmp_path):
    """A model answers well what looks like its training data, and samples.jsonl shows that. Of
    ema/ they are one folder above."""
    for prompts, template in TEMPLATES:
        lines = [{"step": 0, "prompt": prompt} for prompt in prompts]
        kit.write_lines(tmp_path / "samples.jsonl", lines)
        assert models.found_template(models.own_prompts(tmp_path / "ema")) == template


# ---- Responses and scores ----
def test_responses_are_those_of_a_rollout(flags, tokenizer):
    """Models are given the same random numbers: the same model twice gives the same responses,
    alone or in a batch, and what differs between two models is theirs."""
    args = flags()
    first, second = writers_of(args)
    texts = "Who?", "What is a fox?", "Why?"
    prompts = [first.prompt(args, i, text) for i, text in enumerate(texts)]

    def ids(rows):
        return [row["response_ids"] for row in rows]

    found, shown = ids(first.answers(args, prompts, 0)), []
    assert found == ids(ppo.roll_out(args, first.model, tokenizer, prompts, 0, 3))
    grown = second.answers(args, prompts[1:2], 0, shown.append)  # the text as it grows, too
    assert ids(grown) == found[1:2] != ids(second.answers(args, prompts[1:2], 1))
    assert shown[-1] == tokenizer.decode(found[1][:-1], skip_special_tokens=True)


def test_scores_are_stock_transformers_scores(flags, writer, judge, trained):
    """Of prompt and response as they were sampled, in the order of the rows, equal ones equal."""
    args = flags()
    prompts = [writer.prompt(args, i, text) for i, text in enumerate(["What is a fox?", "Why?"])]
    answers = writer.answers(args, prompts, 0)
    answers.append(answers[0])
    scores = judge.scores(args, writer, answers)
    rows = [row["prompt_ids"] + row["response_ids"] for row in answers]
    assert scores == stock_scores(trained / "judge", rows) and scores[0] == scores[2]


@pytest.mark.parametrize("ended", [1.0, 0.0])
def test_a_judge_with_other_tokens_reads_the_text(flags, writer, judge, trained, tmp_path, ended):
    """Ids of another vocabulary would be other words. EOS follows only where the model wrote it."""
    args, folder = flags(), shutil.copytree(trained / "judge", tmp_path / "judge")
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    other, row = models.Judge(args, str(folder)), writer.prompt(args, 0, ASKED)
    row.update(response_ids=writer.tokenizer("ab ba").input_ids, text="ab ba", ended=ended)
    prompt, response = other.read(writer, row)
    assert other.tokenizer.decode(prompt) == "\n\nHuman: Who are you?\n\nAssistant:"
    assert other.tokenizer.decode(response) == "ab ba" + "<eos>" * int(ended)
    expected = other.score_ids(args, [(prompt, response)])
    assert other.scores(args, writer, [row]) == expected != judge.scores(args, writer, [row])


def test_a_judge_with_a_template_reads_a_dialogue_that_is_text_as_messages(
    flags, writer, judge, monkeypatch
):
    """As it was trained on one. What it cannot read is refused in words."""
    row = writer.prompt(flags(), 0, "\n\nHuman: Who?\n\nAssistant:")
    ids = writer.tokenizer(" A fox. <eos>").input_ids
    row.update(text=" A fox. ", response_ids=ids, ended=1.0)
    monkeypatch.setattr(judge.tokenizer, "chat_template", CHAT)
    both = [judge.tokenizer.decode(ids) for ids in judge.read(writer, row)]
    assert both == ["<user>Who?<eos><assistant>", "A fox.<eos>"]
    judge.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with kit.refuses("prompt-refused"):
        judge.read(writer, row)


def test_a_chat_model_ends_where_stock_generate_does(chat_folder, flags, writer, tmp_path):
    """Its template writes the prompt, also of a dialogue that is text, as ppo.py does with HH; a
    response ends at any EOS of generation_config.json. A model without a template gets the text."""
    args = flags_of(chat_folder)()
    [chats] = writers_of(args)
    row = chats.prompt(args, 0, "\n\nHuman: Who are you?\n\nAssistant:")
    ids = chats.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    assert row["chat"] and row["prompt_ids"] == ids == chats.prompt(args, 0, ASKED)["prompt_ids"]
    plain = writer.prompt(flags(), 0, row["asked"])
    assert plain["prompt"] == row["asked"] and not plain["chat"]
    [before] = chats.answers(args, [row], 0)
    end = before["response_ids"][2]
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    chats = models.Writer(args, str(folder))
    assert chats.answers(args, [row], 0)[0]["response_ids"] == before["response_ids"]
    word = AddedToken(chats.tokenizer.convert_ids_to_tokens(end), special=True)
    chats.tokenizer.add_tokens([word], special_tokens=True)  # only such a token ends a response
    [after] = chats.answers(args, [row], 0)
    assert after["response_ids"] == before["response_ids"][:3] and after["ended"]


def test_a_prompt_that_is_too_long_keeps_its_end(flags, writer):
    """The question stands there; the response may have half of the model's positions."""
    args, text = flags(), "Who are you? " + "What is a fox? " * 9
    whole = writer.prompt(args, 0, text)
    writer.positions = 12
    cut = writer.prompt(args, 0, text)
    assert cut["prompt_ids"] == whole["prompt_ids"][-6:] and cut["cut"] and not whole["cut"]
    with kit.refuses("prompt-refused"):  # without a token there is nothing to answer
        writer.prompt(args, 0, "")


# ---- Files ----
def test_prompts_of_a_file_end_in_a_table(trained, tmp_path, capsys):
    """Every response is in --out, with its scores. The other columns reach the gold function. A
    model against itself wins half, whatever it writes."""
    rows = [{"prompt": f"What is {word}?", "answer": word} for word in ("a fox", "a hen", "it")]
    data = kit.write_lines(tmp_path / "data.jsonl", rows)
    gold, out, actor = tmp_path / "gold.py", tmp_path / "out.jsonl", trained / "actor"
    gold.write_text("def f(prompts, completions, answer, **_): return [len(a) for a in answer]\n")
    job = [actor, actor, "--reward", trained / "judge", "--prompts", data, "--out", out]
    talk.main([*map(str, job), "--gold_fn", f"{gold}:f", "--num", "0", *SHORT])
    assert capsys.readouterr().out.splitlines()[-1].count("0.500 [0.125, 0.875]") == 2
    found = kit.read_lines(out)
    assert [line["prompt"] for line in found] == [row["prompt"] for row in rows] * 2
    assert [line["gold"] for line in found[:3]] == [5, 5, 2]


def test_prompts_are_those_held_out_and_a_template_takes_their_questions(tmp_path):
    """Those of training would flatter the model that has seen them. Of a dialogue that is text the
    template takes the questions, not the words "Human:" and "Assistant:" around them."""
    text = "\n\nHuman: Who?\n\nAssistant: A fox.\n\nHuman: Why?\n\nAssistant:"
    kit.write_lines(tmp_path / "train.jsonl", [{"prompt": "seen?"}])
    kit.write_lines(tmp_path / "test.jsonl", [{"prompt": text}, {"prompt": "How?"}])
    args = talk.get_args(["x", "--prompts", str(tmp_path), "--template", "Q: {}\\nA:"])
    asked = [row["prompt"] for row in talk.read_prompts(args)]
    written = [models.written(prompt, args.template) for prompt in asked]
    assert written == ["Q: Who?\nA: A fox.\nQ: Why?\nA:", "Q: How?\nA:"]


PAIR = {"chosen": " Yes.", "rejected": " No."}


def test_each_subset_of_pairs_has_an_accuracy_of_its_own():
    """Of four pairs three are in order: both of one subset, and one of two of the other."""
    pairs = [{"chosen_score": chosen, "rejected_score": 0.0} for chosen in (1.0, 2.0, 3.0, -1.0)]
    lines = tables.scored(pairs, ["chat", "code", "chat", "code"])
    assert [line.split()[3] for line in lines[2:]] == ["0.750", "1.000", "0.500"]
    assert [line.split("subset ")[-1] for line in lines[3:]] == ["chat, 2 pairs", "code, 2 pairs"]
    assert len(tables.scored(pairs)) == 3


@pytest.mark.parametrize(
    "row, scored",
    [
        (
            {"prompt": "Who?", **PAIR, "chosen_score": "mine", "reward_model_chosen_score": 3},
            {f"{'reward_model_' * 2}chosen_score": "Who? Yes.", "rejected_score": "Who? No."},
        ),
        ({"messages": [*ASKED, dict(role="assistant", content="Me.")]}, {"score": None}),
    ],
)
def test_rows_of_a_file_are_scored(trained, chat_folder, tmp_path, row, scored):
    """--score: the row as it was, its own columns too, and the scores of stock transformers."""
    folder = shutil.copytree(trained / "judge", tmp_path / "judge")
    (tokenizer := folders.load_tokenizer(str(chat_folder))).save_pretrained(folder)
    data, out = kit.write_lines(tmp_path / "data.jsonl", [row, row]), tmp_path / "out.jsonl"
    job = ["--reward", folder, "--score", data, "--out", out, "--num", 1, "--dtype", "fp32"]
    talk.main([*map(str, job)])
    [found] = kit.read_lines(out)
    chat = "<user>Who are you?<eos><assistant>Me."
    ids = [tokenizer(f"{text or chat}<eos>").input_ids for text in scored.values()]
    assert [found.pop(name) for name in scored] == stock_scores(folder, ids)
    assert found == row


# ---- A dialogue ----
@pytest.fixture
def session_of(monkeypatch):
    """session_of(flags, judge): a Session; typed(a line, ...) is what is typed in it."""

    def start(flags, judge=None):
        talking = session.Session(flags, writers_of(flags()), judge)

        def typed(*lines):
            monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
            talking.run()

        talking.typed = typed
        return talking

    return start


def said(history):
    return [message["content"] for message in history]


def test_a_dialogue_goes_on_from_each_models_own_words(flags, judge, session_of, capsys):
    """Questions, /retry, /undo, /reset: what the models are given is what was said."""
    talking = session_of(flags, judge)
    talking.typed("Who are you?", "/retry", "And \\", "now?")
    first, second = talking.histories
    assert said(first)[::2] == ["Who are you?", "And \nnow?"] and first == second
    assert capsys.readouterr().out.count("(reward ") == 6
    second[1] = {"role": "assistant", "content": " Other words"}
    talking.typed("/undo", "Go on")
    prompt = "\n\nHuman: Who are you?\n\nAssistant: Other words\n\nHuman: Go on\n\nAssistant:"
    assert talking.prompts[1]["prompt"] == prompt and len(talking.histories[0]) == 4
    talking.typed("/reset", "Hi")
    assert talking.prompts[1]["prompt"] == "\n\nHuman: Hi\n\nAssistant:"


def test_ctrl_c_stops_a_response_and_no_more(flags, session_of):
    """The question is as if it had never been asked, and after /retry question and responses are as
    they were; the next one is answered."""
    talking = session_of(flags)
    writer = talking.writers[1]
    own = writer.answers

    def interrupted(*given):
        writer.answers = own
        raise KeyboardInterrupt

    writer.answers = interrupted
    talking.typed("Who?", "What?")
    assert [said(history)[::2] for history in talking.histories] == [["What?"], ["What?"]]
    before, writer.answers = json.dumps(talking.histories), interrupted
    talking.typed("/retry")
    assert json.dumps(talking.histories) == before


def test_a_chat_goes_through_the_template(chat_folder, session_of, capsys):
    """Spaces at the ends of a response are not part of a message. A question that spells a special
    token is refused, as a run drops such a row, and the dialogue goes on."""
    talking = session_of(flags_of(chat_folder))
    talking.typed("Hi <eos>")
    assert "spells a special token" in capsys.readouterr().err and talking.histories == [[]]
    talking.typed("Hi")
    talking.histories[0][1]["content"] = " Hello."
    talking.typed("Who?")
    ids = talking.prompts[0]["prompt_ids"]
    text = "<user>Hi<eos><assistant>Hello.<eos><user>Who?<eos><assistant>"
    assert talking.writers[0].tokenizer.decode(ids) == text and ids.count(1) == 3


def test_settings_are_ppos_flags_with_its_types_and_ranges(flags, session_of, capsys):
    """A wrong one changes nothing. (What is mistyped is refused in words: tests/promises.py.)"""
    talking = session_of(flags)
    talking.typed("/set temperature hot", "/set temperature 0", "/set models x")
    assert capsys.readouterr().err.count("error: ") == 3 and vars(talking.args) == vars(flags())
    talking.typed("/set temperature 0.5", "/quit", "never read")
    assert (talking.args.temperature, talking.turn) == (0.5, 0)


def test_save_writes_what_sft_reads(flags, session_of, tmp_path):
    """One dialogue of each model is a line of messages."""
    talking, file = session_of(flags), tmp_path / "said.jsonl"
    talking.typed("Who?", f"/save {file}")
    for line, history in zip(kit.read_lines(file), talking.histories, strict=True):
        assert line["messages"] == history
        assert formats.read_row(line).response == history[1]["content"]


# ---- The screen ----
def test_a_model_cannot_write_to_the_terminal_itself(capsys):
    """Text is data: a random model writes escape sequences sooner or later."""
    with screen.Screen(["[red]model"]) as shown:
        shown.write(0, "a\x1b[2J\r\x07b [bold]", "note")
    assert r"a\x1b[2J\r\x07b [bold]" in capsys.readouterr().out
