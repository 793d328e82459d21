"""tools/talk.py: what it computes, by hand-worked numbers; responses and scores as ppo.py has them;
and a dialogue as a person types it.

In one process, with tiny models, but for one test that types into a pipe."""

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForSequenceClassification

from machinery.base import progress
from machinery.flags import declaring
from machinery.models import model_folders, saving
from tests.conftest import load_model

sys.path.insert(0, str(ROOT / "tools"))
import talk
import talk_models
import talk_screen
import talk_session
import talk_tables

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "Who are you?"}]


def get_args(*given):
    return talk.get_args([*map(str, given)])


def writers_of(args):
    return [talk_models.Writer(args, path) for path in args.models]


def session_of(args, judge=None, gold=None):
    return talk_session.Session(args, talk.new_parser(), writers_of(args), judge, gold)


@pytest.fixture(scope="module")
def args(trained):
    """Two models (the same one, twice), short responses."""
    actor = trained / "actor"
    return get_args(actor, actor, "--max_answer_seq_len", 8, "--dtype", "fp32")


@pytest.fixture(scope="module")
def judge(args, trained):
    return talk_models.Judge(args, str(trained / "judge"))


@pytest.fixture(scope="module")
def chat_folder(trained, tmp_path_factory):
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(trained / "actor", folder)
    tokenizer = model_folders.load_tokenizer(str(trained / "actor"))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------------
# What it computes
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scores, first, share, interval",
    [
        # z^2 = 3.8416. A win, a tie, a loss, a win: 2.5 of 4.
        #   middle = (0.625 + 3.8416 / 8) / (1 + 3.8416 / 4) = 1.1052 / 1.9604
        #   half   = 1.96 / 1.9604 * sqrt(0.625 * 0.375 / 4 + 3.8416 / 64) = 0.99980 * 0.34441
        ([1, 2, 3, 4], [0, 2, 4, 3], 0.625, [0.21942, 0.90810]),
        # three wins: middle = 1.64027 / 2.28053, half = 1.96 / 2.28053 * 1.96 / 6
        ([1, 1, 1], [0, 0, 0], 1.0, [0.43850, 1.0]),
        ([2, 2], [2, 2], 0.5, [0.09453, 0.90547]),  # ties alone: nothing is known
    ],
)
def test_the_win_rate_by_hand(scores, first, share, interval):
    """Prompt by prompt: a win counts one, a tie a half. A model that is better on most prompts by a
    little wins, whatever the means say, because one outlier can turn a mean."""
    found, between = talk_tables.win_rate(scores, first)
    assert found == share and between == pytest.approx(interval, abs=2e-5)
    turned, other = talk_tables.win_rate(first, scores)
    assert turned == 1 - share and other == pytest.approx([1 - x for x in reversed(between)])


def test_the_win_rate_compares_the_same_prompts():
    with pytest.raises(ValueError):
        talk_tables.win_rate([1, 2], [1])


def test_the_table_holds_means_and_win_rates():
    """The first model is what the others are compared with. A metric that none has is absent."""
    rewards = {"a": [0, 2, 4, 3], "b": [1, 2, 3, 4]}
    answers = {}
    for name, values in rewards.items():
        lengths, ended = [4, 4, 8, 8], [1.0, 1.0, 1.0, 0.0]
        columns = zip(values, lengths, ended)
        answers[name] = [dict(reward=r, response_length=n, ended=e) for r, n, e in columns]
    head, a, b = talk_tables.comparison(answers)
    assert head.split()[:4] == ["model", "reward", "response_length", "ended"]
    assert "gold" not in head and len({len(head), len(a), len(b)}) == 1
    assert a.split() == ["a", "2.250", "6.000", "0.750", "(the", "first)"]
    assert b.split() == ["b", "2.500", "6.000", "0.750", "0.625", "[0.219,", "0.908]"]


def test_what_score_ends_with():
    """Accuracy of pairs, ties one half: 1.5 of 2."""
    pairs = [dict(chosen_score=1.0, rejected_score=0.0), dict(chosen_score=2.0, rejected_score=2.0)]
    chosen, rejected, share = talk_tables.scored(pairs)
    assert chosen.split() == ["chosen_score", "mean", "1.500", "of", "2"]
    assert rejected.split()[2] == "1.000" and share.startswith("chosen is above 0.750 [")
    assert talk_tables.scored([{"score": 1.0}, {"score": 4.0}])[0].split()[2] == "2.500"


@pytest.mark.parametrize(
    "prompts, template",
    [
        (["Who?\nAnswer:", "How so?\nAnswer:"], "{}\nAnswer:"),
        (["\n\nHuman: Who?\n\nAssistant:", "\n\nHuman: How?\n\nAssistant:"], talk_models.DIALOGUE),
        (["1 + 2 =", "3 + 4 ="], "{}"),
        (["Translate: one", "Translate: only two"], "Translate: {}"),
        (['[{"role": "user", "content": "Who?"}]'], "chat"),
        (["only one\nAnswer:"], None),  # what belongs to the question cannot be told
        (None, None),
    ],
)
def test_a_question_is_written_as_in_the_models_own_samples(tmp_path, prompts, template):
    """A model answers well what looks like its training data, and samples.jsonl shows that. Lines
    of an older or a foreign file are no reason to stop."""
    folder = tmp_path / "ema"  # PPO's: the samples are one folder above
    folder.mkdir()
    if prompts:
        lines = [json.dumps({"step": 0, "prompt": prompt}) + "\n" for prompt in prompts]
        (tmp_path / "samples.jsonl").write_text("".join(lines))
    assert talk_models.found_template(folder) == template
    (folder / "samples.jsonl").write_text("no JSON\n[1]\n")
    assert talk_models.found_template(folder) == template


def test_a_dialogue_is_written_as_hh_has_it():
    """As machinery/data/formats.py reads it; a chat model's text gets the space that data has there."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello."},
        {"role": "user", "content": "Who are you?"},
    ]
    text = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Who are you?\n\nAssistant:"
    assert talk_models.written(messages, talk_models.DIALOGUE) == text
    messages[1]["content"] = "Hello."
    assert talk_models.written(messages, talk_models.DIALOGUE) == text
    joined = "Q: Hi A: Hello.\nQ: Who are you? A:"  # a line of its own, where there is none yet
    assert talk_models.written(messages, "Q: {} A:") == joined
    assert talk_models.written(messages, "chat") is messages
    assert talk_models.written("as it is {}", "Q: {}") == "as it is {}"


# --------------------------------------------------------------------------------------------------
# Responses and scores
# --------------------------------------------------------------------------------------------------
def test_models_are_given_the_same_random_numbers(args):
    """So the same model twice gives the same responses, alone or in a batch, and what differs
    between two models is theirs. Another turn gives others."""
    first, second = writers_of(args)
    texts = ["Who?", "What is a fox?", "Why?"]
    prompts = [first.prompt(args, i, text) for i, text in enumerate(texts)]
    answers = first.answers(args, prompts, 0)
    assert [row["prompt"] for row in answers] == texts  # in their order
    assert len({row["text"] for row in answers}) == 3
    assert second.answers(args, prompts, 0) == answers
    one_by_one = declaring.of_role(args, per_device_eval_batch_size=1)
    assert second.answers(one_by_one, prompts, 0) == answers
    assert second.answers(args, prompts[1:2], 0) == answers[1:2]
    assert second.answers(args, prompts, 1) != answers
    shown = []
    first.answers(args, prompts[1:2], 0, shown.append)
    ids = answers[1]["response_ids"]
    assert len(shown) == len(ids) - 1 and not first.model._forward_pre_hooks
    assert shown[-1] == first.tokenizer.decode(ids[:-1], skip_special_tokens=True)


def test_no_bar_is_drawn_into_a_response(args, monkeypatch):
    """Bars of progress go to a terminal after a second, and move its cursor."""
    writer = writers_of(args)[0]
    monkeypatch.setattr(sys, "stderr", Terminal())
    prompts = [writer.prompt(args, 0, "Who?")]
    own = progress.tqdm
    monkeypatch.setattr(progress, "tqdm", lambda **options: own(**{**options, "delay": 0}))
    writer.answers(args, prompts, 0, lambda text: None)
    assert sys.stderr.getvalue() == ""
    writer.answers(args, prompts, 0)
    assert "responses" in sys.stderr.getvalue()


@torch.no_grad()
def test_scores_are_stock_transformers_scores(args, judge, trained):
    """Of prompt and response as they were sampled, padding or not; in the order of the rows."""
    writer = writers_of(args)[0]
    prompts = [writer.prompt(args, i, text) for i, text in enumerate(["What is a fox?", "Why?"])]
    answers = writer.answers(args, prompts, 0)
    stock = AutoModelForSequenceClassification.from_pretrained(trained / "judge")
    expected = []
    for row in answers:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        stock.config.pad_token_id = None
        expected.append(stock(ids).logits.item())
    assert judge.scores(args, writer, answers) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("ended", [1.0, 0.0])
def test_a_judge_with_other_tokens_reads_the_text(args, judge, trained, tmp_path, ended):
    """Ids of another vocabulary would be other words. EOS follows only where the model wrote it."""
    folder = tmp_path / "judge"
    shutil.copytree(trained / "judge", folder)
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text())
    vocab = state["model"]["vocab"]
    a, b = vocab["a"], vocab["b"]
    vocab.update(a=b, b=a)
    file.write_text(json.dumps(state))
    other = talk_models.Judge(args, str(folder))
    writer = writers_of(args)[0]
    row = writer.prompt(args, 0, ASKED)
    row.update(response_ids=writer.tokenizer("ab ba").input_ids, text="ab ba", ended=ended)
    prompt, response = other.tokenise(writer, row)
    assert other.tokenizer.decode(prompt) == "\n\nHuman: Who are you?\n\nAssistant:"
    assert other.tokenizer.decode(response) == "ab ba" + "<eos>" * int(ended)
    assert judge.can_read(writer) and not other.can_read(writer)
    expected = other.score_ids(args, [(prompt, response)])
    assert other.scores(args, writer, [row]) == expected != judge.scores(args, writer, [row])


def test_a_chat_model_ends_where_stock_generate_does(chat_folder, tmp_path):
    """Its template writes the prompt; a response ends at any EOS of generation_config.json."""
    args = get_args(chat_folder, "--max_answer_seq_len", 200, "--dtype", "fp32")
    [writer] = writers_of(args)
    row = writer.prompt(args, 0, ASKED)
    ids = writer.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    assert writer.template == "chat" and writer.ends == []
    assert row["prompt_ids"] == ids and row["chat"]
    [before] = writer.answers(args, [row], 0)
    texts = [writer.tokenizer.decode([i]) for i in before["response_ids"]]
    place = next(i for i, text in enumerate(texts) if i > 2 and len(text) > 4 and text.isascii())
    end = before["response_ids"][place]
    ends = {"eos_token_id": [1, end]}
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(ends))
    writer = talk_models.Writer(args, str(folder))
    assert writer.ends == [texts[place]]
    [after] = writer.answers(args, [row], 0)
    first = texts.index(texts[place])
    assert after["response_ids"] == before["response_ids"][: first + 1] and after["ended"]


def test_a_prompt_that_is_too_long_keeps_its_end(args):
    writer = writers_of(args)[0]
    short = declaring.of_role(args, max_prompt_seq_len=3)
    whole, cut = (writer.prompt(each, 0, "What is a fox?") for each in (args, short))
    assert cut["prompt_ids"] == whole["prompt_ids"][-3:] and (whole["cut"], cut["cut"]) == (0, 1)
    writer.positions = 12  # the response may have half of them
    assert len(writer.prompt(args, 0, "What is a fox? " * 9)["prompt_ids"]) == 6
    assert len(writer.answers(args, [writer.prompt(args, 0, "What? " * 9)], 0)[0]["text"]) > 0


@pytest.mark.parametrize("scores", [False, True], ids=["writer", "judge"])
def test_adapters_are_taken_like_whole_models(trained, tmp_path, tokenizer, scores):
    """What --lora_dim leaves: the score, and the responses, are those of weights and adapters."""
    import sft

    base, folder = str(trained / ("judge" if scores else "actor")), str(tmp_path / "adapters")
    own = "--preset toy --dtype fp32 --lora_targets q_proj v_proj".split()
    head = "score" if scores else None
    model = load_model(base, sft.get_args(own), 0, None, tokenizer, head, lora_dim=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    saving.save_model(model, tokenizer, folder)
    args = get_args("x", "--max_answer_seq_len", 8, "--dtype", "fp32")
    if scores:
        before, after = (talk_models.Judge(args, path) for path in (base, folder))
        pair = ([5, 6, 7], [8, 9, 1])
        expected = model(torch.tensor([[*pair[0], *pair[1]]]), torch.ones(1, 6))[0, -1].item()
        assert after.score_ids(args, [pair]) == pytest.approx([expected], abs=1e-4)
        assert abs(before.score_ids(args, [pair])[0] - expected) > 1e-2
        return
    before, after = (talk_models.Writer(args, path) for path in (base, folder))
    ids = torch.tensor([[5, 6, 7]])
    logits = [each.model(ids).logits for each in (before, after)]
    assert torch.allclose(logits[1], model(ids).logits, atol=1e-4)
    assert not torch.allclose(*logits, atol=1e-2)


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------
def lines_of(file):
    return [json.loads(line) for line in open(file)]


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_prompts_of_a_file_end_in_a_table(trained, tmp_path, capsys):
    """Every response is in --out, with its scores. The other columns reach the gold function. A
    model against itself wins half, whatever it writes."""
    rows = [{"prompt": f"What is {word}?", "answer": word} for word in ("a fox", "a hen", "it")]
    data = write_lines(tmp_path / "data.jsonl", [*rows, {"prompt": " ", "answer": ""}])
    gold = tmp_path / "gold.py"
    gold.write_text("def f(prompts, completions, answer, **_): return [len(a) for a in answer]\n")
    out, actor = tmp_path / "out.jsonl", trained / "actor"
    options = ["--dtype", "fp32", "--max_answer_seq_len", "6", "--num", "0"]
    jobs = ["--prompts", data, "--out", out, "--gold_fn", f"{gold}:f"]
    talk.main([*map(str, [actor, actor, "--reward", trained / "judge", *jobs]), *options])
    said = capsys.readouterr().out
    assert "dropped 1 rows" in said
    first, second = said.splitlines()[-2:]
    assert "(the first)" in first and "0.500 [0.125, 0.875]" in second and "5.000" not in first
    found = lines_of(out)
    assert [line["prompt"] for line in found] == [row["prompt"] for row in rows] * 2
    assert [line["gold"] for line in found[:3]] == [5, 5, 2]
    assert {*found[0]} == {*"model prompt response reward gold response_length ended".split()}
    with pytest.raises(SystemExit):
        talk.main([*map(str, [actor, *jobs])])  # --out is there
    assert lines_of(out) == found


PAIR = {"chosen": " Yes.", "rejected": " No."}
DIALOGUES = {name: f"\n\nHuman: Who?\n\nAssistant:{text}" for name, text in PAIR.items()}
CHATS = {k: [*ASKED, {"role": "assistant", "content": text}] for k, text in PAIR.items()}


@pytest.mark.parametrize(
    "row, names",
    [
        ({"prompt": "Who?", **PAIR}, ["chosen_score", "rejected_score"]),
        (DIALOGUES, ["chosen_score", "rejected_score"]),
        (CHATS, ["chosen_score", "rejected_score"]),
        ({"prompt": "Who?", "response": " Me."}, ["score"]),
        ({"instruction": "Who?", "output": "Me."}, ["score"]),
        ({"messages": CHATS["chosen"]}, ["score"]),
    ],
)
def test_score_takes_every_format(trained, chat_folder, tmp_path, capsys, row, names):
    """--score: the row as it was, and its scores, those of stock transformers."""
    folder = tmp_path / "judge"
    shutil.copytree(trained / "judge", folder)
    tokenizer = model_folders.load_tokenizer(str(chat_folder))
    tokenizer.save_pretrained(folder)
    data = write_lines(tmp_path / "data.jsonl", [row, row])
    job = ["--reward", folder, "--score", data, "--out", tmp_path / "out.jsonl", "--num", 1]
    talk.main([*map(str, job), "--dtype", "fp32"])
    [found] = lines_of(tmp_path / "out.jsonl")
    assert list(found) == [*row, *names]
    assert ("95 % interval" in capsys.readouterr().out) == (len(names) == 2)
    if "instruction" in row or row is DIALOGUES:
        text = {"score": " Me."} if "score" in names else dict(zip(names, PAIR.values()))
        stock = AutoModelForSequenceClassification.from_pretrained(folder)
        stock.config.pad_token_id = None
        for name, response in text.items():
            ids = tokenizer(f"\n\nHuman: Who?\n\nAssistant:{response}<eos>", return_tensors="pt")
            assert found[name] == pytest.approx(stock(ids.input_ids).logits.item(), abs=1e-5)


def test_a_dialogue_is_scored_as_the_same_response_in_a_pair(trained, chat_folder, tmp_path):
    """A reward model reads the response and EOS, whatever step 1 trains on in such data."""
    folder = tmp_path / "judge"
    shutil.copytree(trained / "judge", folder)
    tokenizer = model_folders.load_tokenizer(str(chat_folder))
    turn = "{% for m in messages %}{{ m['content'] + '!' }}{% endfor %}"
    tokenizer.chat_template = turn  # it ends a turn with another token than EOS
    tokenizer.save_pretrained(folder)
    found = []
    for number, row in enumerate([CHATS, {"messages": CHATS["chosen"]}]):
        data, out = write_lines(tmp_path / f"{number}.jsonl", [row]), tmp_path / f"{number}.out"
        job = ["--reward", folder, "--score", data, "--out", out, "--dtype", "fp32"]
        talk.main([*map(str, job)])
        found += lines_of(out)
    assert found[1]["score"] == pytest.approx(found[0]["chosen_score"], abs=1e-5)


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given, why",
    [
        ("", "name a model"),
        ("m --prompts a --score b --reward r", "two jobs"),
        ("--score a", "needs --reward"),
        ("m --score a --reward r", "alone"),
        ("m --out x.jsonl", "/save"),
        ("m --prompts p --out /nowhere/x.jsonl", "in a folder that is"),
        ("m --template Q:", "one {}"),
        ("m --prompts p --out " + "x" * 300, "300 characters"),
        ("m --temperature 0", "out of range"),
        ("m --top_p nan", "out of range"),
        ("m --max_answer_seq_len 8 --min_new_tokens 8", "EOS never comes"),
        ("m --rewards r", "Nearest: --reward"),
    ],
)
def test_flags_that_make_no_sense_are_refused(capsys, given, why):
    with pytest.raises(SystemExit) as stop:
        get_args(*given.split())
    assert stop.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, name, why",
    [
        ("Writer", "judge", "Give it as --reward"),
        ("Judge", "actor", "score at random"),
        ("Writer", str(ROOT / "toy/model"), "no weights"),
        ("Writer", "running", "has not ended"),
        ("Writer", "./nothing", "no such folder"),
    ],
)
def test_a_folder_that_is_something_else_is_refused(trained, tmp_path, capsys, kind, name, why):
    """Before anything is loaded: a reward model has nothing to write with, and the other way round
    its scores would be noise. The folder of a run that goes on holds no model yet."""
    (tmp_path / "running").mkdir()
    (tmp_path / "running/args.json").write_text("{}")
    path = tmp_path / name if name == "running" else trained / name if name.isalpha() else name
    with pytest.raises(SystemExit) as stop:
        getattr(talk_models, kind)(get_args("m"), str(path))
    assert stop.value.code == 2 and why in capsys.readouterr().err


def test_what_a_tokenizer_has_no_template_for_is_refused(args, trained, tmp_path, capsys):
    """In words that name the model: where --template asks for it, and where data needs it."""
    chat = get_args("m", "--template", "chat", "--dtype", "fp32")
    data = write_lines(tmp_path / "data.jsonl", [CHATS])
    jobs = {
        "no chat template": lambda: talk_models.Writer(chat, str(trained / "actor")),
        "holds chats": lambda: talk.main(
            ["--reward", str(trained / "judge"), "--score", str(data)]
        ),
    }
    for why, job in jobs.items():
        with pytest.raises(SystemExit):
            job()
        assert why in capsys.readouterr().err


def test_a_prompt_that_a_template_refuses_is_named(chat_folder, tmp_path, capsys):
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    tokenizer = model_folders.load_tokenizer(str(chat_folder))
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    tokenizer.save_pretrained(folder)
    writer = talk_models.Writer(get_args("m"), str(folder))
    with pytest.raises(SystemExit):
        writer.prompt(get_args("m"), 0, ASKED)
    said = capsys.readouterr().err
    assert "refuses a prompt: no system role" in said and "Who are you?" in said


def test_a_bad_row_is_named_before_a_model_is_loaded(tmp_path, capsys):
    data = write_lines(tmp_path / "data.jsonl", [{"prompt": "Who?"}, {"prompt": 5}])
    with pytest.raises(SystemExit):
        talk.main(["/no/model", "--prompts", str(data)])
    assert "data.jsonl, line 2: prompt must be text" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# A dialogue
# --------------------------------------------------------------------------------------------------
def typed(session, monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    session.run()


def test_a_dialogue_goes_on_from_each_models_own_words(args, judge, monkeypatch, capsys):
    """Questions, /retry, /undo, /pick, /reset: what the models are given is what was said."""
    session = session_of(args, judge)
    typed(session, monkeypatch, "Who are you?", "/retry", "And \\", "now?")
    first, second = session.histories
    said = [message["content"] for message in first]
    assert [said[0], said[2]] == ["Who are you?", "And \nnow?"] and first == second
    answer = said[1] if said[1][0].isspace() else " " + said[1]
    prompt = f"\n\nHuman: Who are you?\n\nAssistant:{answer}\n\nHuman: And \nnow?\n\nAssistant:"
    assert session.prompts[0]["prompt"] == prompt
    out = capsys.readouterr().out
    assert out.count("(reward ") == 6 and out.count(f"{args.models[0]}:\n") == 6
    second[1] = {"role": "assistant", "content": " Other words"}
    typed(session, monkeypatch, "/undo", "/pick 2", "Go on")
    assert session.histories[0][1]["content"] == " Other words"
    assert "Other words\n\nHuman: Go on" in session.prompts[0]["prompt"]
    assert "And" not in session.prompts[0]["prompt"] and len(session.histories[0]) == 4
    typed(session, monkeypatch, "/reset", "/system Be kind.", "Hi")
    assert session.prompts[1]["prompt"] == "Be kind.\n\nHuman: Hi\n\nAssistant:"
    typed(session, monkeypatch, "/history off", "Hi")
    assert session.prompts[1]["prompt"] == "Be kind.\n\nHuman: Hi\n\nAssistant:"


def test_a_chat_goes_through_the_template(chat_folder, monkeypatch, capsys):
    """Spaces at the ends of a response are not part of a message. Special tokens that a person
    types are text."""
    session = session_of(get_args(chat_folder, "--max_answer_seq_len", 6, "--dtype", "fp32"))
    typed(session, monkeypatch, "Hi <eos>")
    session.histories[0][1]["content"] = " Hello."
    typed(session, monkeypatch, "Who?", "/prompt")
    ids = session.prompts[0]["prompt_ids"]
    text = "<user>Hi <eos><eos><assistant>Hello.<eos><user>Who?<eos><assistant>"
    assert session.writers[0].tokenizer.decode(ids) == text and ids.count(1) == 3
    assert repr(text) in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, why",
    [
        ("/foo", "no command /foo"),
        ("/set", None),
        ("/set temperature 0.5", None),
        ("/set temperature hot", "no such number"),
        ("/set top_p 2", "out of range"),
        ("/set min_new_tokens 9", "EOS never comes"),
        ("/set models x", "/set takes one of"),
        ("/pick 3", "1 to 2"),
        ("/undo", "nothing was asked"),
        ("/retry", "nothing was asked"),
        ("/history maybe", "on, off"),
        ("/template chat", "no chat template"),
        ("/template Q", "one {}"),
        (r"/template Q: {}\nA:", None),
        ("/save", "not there yet"),
        ("/save " + "x" * 300, "too long"),
        ("/save /nowhere/x.jsonl", "No such file"),
        ("/help", None),
        ("/prompt", None),
    ],
)
def test_a_mistyped_command_ends_nothing(args, monkeypatch, capsys, line, why):
    session = session_of(args)
    typed(session, monkeypatch, line, "Still there?")
    said = capsys.readouterr()
    assert (why in said.err) if why else said.err == ""
    assert len(session.histories[0]) == 2 and "tokens" in said.out
    settings = session.args.temperature, session.writers[0].template
    assert settings[0] == (0.5 if line.endswith("0.5") else 1.0)
    assert settings[1] == ("Q: {}\nA:" if r"\n" in line else talk_models.DIALOGUE)


def test_help_lists_every_command(args, monkeypatch, capsys):
    session = session_of(args)
    typed(session, monkeypatch, "/help", "/quit", "never read")
    out = capsys.readouterr().out
    for name in session.commands():
        assert f"  /{name} " in out
    assert session.turn == 0


def test_ctrl_c_stops_a_response_and_no_more(args, monkeypatch, capsys):
    """The question is as if it had never been asked; the next one is answered."""
    session = session_of(args)
    own, calls = session.writers[1].answers, []

    def answers(*given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return own(*given)

    monkeypatch.setattr(session.writers[1], "answers", answers)
    typed(session, monkeypatch, "Who?", "What?")
    asked = [[message["content"] for message in history[::2]] for history in session.histories]
    assert asked == [["What?"], ["What?"]] and "stopped" in capsys.readouterr().out


def test_save_writes_what_sft_reads(args, monkeypatch, tmp_path):
    from machinery.data import formats

    session, file = session_of(args), tmp_path / "said.jsonl"
    typed(session, monkeypatch, "Who?", f"/save {file}", f"/save {file}")
    for line, history in zip(lines_of(file), session.histories, strict=True):
        assert line["messages"] == history
        assert formats.read_row(line).response == history[1]["content"]


def test_a_gold_function_that_knows_other_prompts_only_ends_nothing(args, monkeypatch, capsys):
    def gold(prompts, completions, **columns):
        if "fox" not in prompts[0]:
            raise ValueError("the fox only")
        return [0.25]

    typed(session_of(args, gold=gold), monkeypatch, "Who?", "The fox?")
    said = capsys.readouterr()
    assert "gold - (gold raised ValueError('the fox only')" in said.out and "gold 0.250" in said.out
    assert "Traceback" not in said.out + said.err


def test_a_dialogue_through_a_pipe(trained):
    """The program itself, as a person starts it, from another folder than the project's."""
    command = [sys.executable, ROOT / "tools/talk.py", "actor", "--reward", "judge"]
    options = dict(capture_output=True, text=True, cwd=trained, input="Who?\n/bad\nWhat?\n")
    run = subprocess.run([*command, "--max_answer_seq_len", "6"], **options, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("actor:\n") == 2 and run.stdout.count("(reward ") == 2
    assert run.stderr == "error: there is no command /bad.\n  /help lists them.\n"


# --------------------------------------------------------------------------------------------------
# The screen
# --------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    """A screen of text that knows two movements: up, and clear from here on."""

    def isatty(self):
        return True

    def picture(self):
        lines = [""]
        for piece in self.getvalue().split("\x1b["):
            up, a, rest = piece.partition("A")
            if a and up.isdecimal():
                lines = [*lines[: -int(up) - 1], ""]
                piece = rest
            first, *others = piece.removeprefix("J").split("\n")
            lines[-1] += first
            lines += others
        return lines


@pytest.mark.parametrize("columns, rows", [(80, 24), (80, 6), (30, 24)])
def test_what_grows_is_drawn_over_itself(monkeypatch, columns, rows):
    """Side by side if there is room, else one below another. At the end each response stands there
    once and whole, also if it is higher than the screen; no picture is higher than the screen."""
    monkeypatch.setattr(talk_screen, "SECONDS", 0)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    out = Terminal()
    screen = talk_screen.Screen(["first", "second"], out)
    words = [f"word{i}" for i in range(30)]
    for number in (0, 1):
        for count in range(len(words)):
            screen.write(number, " " + " ".join(words[:count]))
            if screen.columns:
                assert screen.drawn <= rows - 2
        screen.done(number, " ".join(words), f"reward {number}")
    lines = out.picture() if screen.columns else out.getvalue().split("\n")
    text = "\n".join(lines)
    assert screen.columns == (columns == 80)
    for word in words:
        assert sum(line.split().count(word) for line in lines) == 2, text
    assert text.count("(reward 0)") == text.count("(reward 1)") == 1
    if rows == 24 and screen.columns:
        assert lines[0].split() == ["first", "│", "second"]
        assert all(talk_screen.cells(line) <= columns for line in lines)


def test_a_model_cannot_write_to_the_terminal_itself():
    """Text is data: a random model writes escape sequences sooner or later."""
    out = io.StringIO()
    screen = talk_screen.Screen(["model"], out)
    screen.write(0, "a\x1b[2J")
    screen.done(0, "a\x1b[2J\r\x07b", "note")
    assert out.getvalue() == "model:\na\ufffd[2J\ufffd\ufffdb\n  (note)\n"


def test_wide_letters_take_two_columns():
    """Chinese, or an emoji: columns stay straight."""
    assert talk_screen.wrapped("日本語です", 4) == ["日本", "語で", "す"]
    lines = talk_screen.side_by_side(["日本", "ab\ncd"], 13)
    assert [talk_screen.cells(line.partition("│")[0]) for line in lines] == [6, 6]
