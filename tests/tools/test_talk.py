"""tools/talk.py: win rates by hand, responses and scores as ppo.py has them, a dialogue as typed.

In one process, with tiny models, but for one test that types into a pipe.
"""

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification

import ppo
import sft
from machinery.base.refused import Refused
from machinery.data import formats
from machinery.models import model_folders, saving
from tests import kit
from tests.kit import ROOT, load_model
from tools import talk
from tools.chat import models, screen, session, tables

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "Who are you?"}]
SHORT = ["--max_answer_seq_len", "8", "--dtype", "fp32"]


def flags_of(*given):
    return talk.get_args([*map(str, given), *SHORT])


def writers_of(args):
    return [models.Writer(args, path) for path in args.models]


def lines_of(file):
    return [json.loads(line) for line in open(file)]


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def refused_as(rule, function, *given):
    with kit.refuses(rule):
        function(*given)


@pytest.fixture(scope="module")
def flags(trained):
    """Two models (the same one, twice), short responses."""
    return flags_of(trained / "actor", trained / "actor")


@pytest.fixture(scope="module")
def judge(flags, trained):
    return models.Judge(flags(), str(trained / "judge"))


@pytest.fixture(scope="module")
def chat_folder(trained, tmp_path_factory):
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(trained / "actor", folder)
    tokenizer = model_folders.load_tokenizer(str(trained / "actor"))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


# ---- What it computes ----
@pytest.mark.parametrize(
    "pairs, share, interval",
    [
        # z^2 = 3.8416. A win, a tie, a loss, a win: 2.5 of 4.
        #   middle = (0.625 + 3.8416 / 8) / (1 + 3.8416 / 4) = 1.1052 / 1.9604
        #   half   = 1.96 / 1.9604 * sqrt(0.625 * 0.375 / 4 + 3.8416 / 64) = 0.99980 * 0.34441
        ([(1, 0), (2, 2), (3, 4), (4, 3)], 0.625, [0.21942, 0.90810]),
        # three wins: middle = 1.64027 / 2.28053, half = 1.96 / 2.28053 * 1.96 / 6
        ([(1, 0)] * 3, 1.0, [0.43850, 1.0]),
    ],
)
def test_the_win_rate_by_hand(pairs, share, interval):
    """Prompt by prompt: a win counts one, a tie a half. A model that is better on most prompts by a
    little wins, whatever the means say, because one outlier can turn a mean."""
    found, between = tables.win_rate(pairs)
    assert found == share and between == pytest.approx(interval, abs=2e-5)


def test_the_table_holds_means_and_win_rates():
    """The first model is what the others are compared with. An equal response is a tie, although
    its score has another last digit in a batch with other padding."""
    rewards = {"a": [0, 2, 4, 3], "b": [1, 2 + 1e-7, 3, 4]}
    answers = {
        name: [
            dict(text=str(place == 1 or (place, name)), reward=r, response_length=n, ended=1.0)
            for place, (r, n) in enumerate(zip(values, [4, 4, 8, 8]))
        ]
        for name, values in rewards.items()
    }
    head, a, b = tables.comparison(answers)
    assert head.split()[:4] == ["model", "reward", "response_length", "ended"]
    assert "gold" not in head and len({len(head), len(a), len(b)}) == 1
    assert a.split() == ["a", "2.250", "6.000", "1.000", "(the", "first)"]
    assert b.split() == ["b", "2.500", "6.000", "1.000", "0.625", "[0.219,", "0.908]"]


@pytest.mark.parametrize(
    "prompts, template",
    [
        (["Who?\nAnswer:", "How so?\nAnswer:"], "{}\nAnswer:"),
        (["\n\nHuman: Who?\n\nAssistant:", "\n\nHuman: How?\n\nAssistant:"], models.DIALOGUE),
        (["Translate: one", "Translate: only two"], "Translate: {}"),
        (['[{"role": "user", "content": "Who?"}]'], "chat"),
        (["only one\nAnswer:"], None),  # what belongs to the question cannot be told
        ([], None),
        ([3], None),
    ],
)
def test_a_question_is_written_as_in_the_models_own_samples(tmp_path, prompts, template):
    """A model answers well what looks like its training data, and samples.jsonl shows that. Lines
    of a foreign file are no reason to stop."""
    folder = tmp_path / "ema"  # PPO's: the samples are one folder above
    folder.mkdir()
    write_lines(tmp_path / "samples.jsonl", [{"step": 0, "prompt": prompt} for prompt in prompts])
    assert models.found_template(folder) == template
    (folder / "samples.jsonl").write_text("no JSON\n[1]\n")
    assert models.found_template(folder) == template


def test_a_dialogue_is_written_as_hh_has_it():
    """As machinery/data/formats.py reads it; a chat model's text gets the space that data has."""
    text = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Who are you?\n\nAssistant:"
    for said in (" Hello.", "Hello."):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
        assert models.written([*messages, *ASKED], models.DIALOGUE) == text
    assert models.written(messages, "chat") is messages
    assert models.written("as it is {}", "Q: {}") == "as it is {}"


# ---- Responses and scores ----
def test_responses_are_those_of_a_rollout(flags, tokenizer):
    """Models are given the same random numbers: the same model twice gives the same responses,
    alone or in a batch, and what differs between two models is theirs."""
    args = flags()
    first, second = writers_of(args)
    texts = ["Who?", "What is a fox?", "Why?"]
    prompts = [first.prompt(args, i, text) for i, text in enumerate(texts)]
    answers = first.answers(args, prompts, 0)
    assert [row["prompt"] for row in answers] == texts  # in their order
    ids = [row["response_ids"] for row in answers]
    rolled = ppo.roll_out(args, first.model, tokenizer, prompts, 0, 3)
    assert [row["response_ids"] for row in rolled] == ids
    assert [row["response_ids"] for row in second.answers(args, prompts[1:2], 0)] == ids[1:2]
    assert [row["response_ids"] for row in second.answers(args, prompts, 1)] != ids
    shown = []
    first.answers(args, prompts[1:2], 0, shown.append)
    ids = answers[1]["response_ids"]
    assert len(shown) == len(ids) - 1 and not first.model._forward_pre_hooks
    assert shown[-1] == first.tokenizer.decode(ids[:-1], skip_special_tokens=True)


@torch.no_grad()
def test_scores_are_stock_transformers_scores(flags, judge, trained):
    """Of prompt and response as they were sampled, in the order of the rows, equal ones equal."""
    args = flags()
    writer = writers_of(args)[0]
    prompts = [writer.prompt(args, i, text) for i, text in enumerate(["What is a fox?", "Why?"])]
    answers = writer.answers(args, prompts, 0)
    answers.append(answers[0])
    stock = AutoModelForSequenceClassification.from_pretrained(trained / "judge")
    stock.config.pad_token_id = None
    rows = [torch.tensor([row["prompt_ids"] + row["response_ids"]]) for row in answers]
    scores = judge.scores(args, writer, answers)
    assert scores == pytest.approx([stock(ids).logits.item() for ids in rows], abs=1e-5)
    assert scores[0] == scores[2]


@pytest.mark.parametrize("ended", [1.0, 0.0])
def test_a_judge_with_other_tokens_reads_the_text(flags, judge, trained, tmp_path, ended):
    """Ids of another vocabulary would be other words. EOS follows only where the model wrote it."""
    args = flags()
    folder = shutil.copytree(trained / "judge", tmp_path / "judge")
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    other, writer = models.Judge(args, str(folder)), writers_of(args)[0]
    row = writer.prompt(args, 0, ASKED)
    row.update(response_ids=writer.tokenizer("ab ba").input_ids, text="ab ba", ended=ended)
    prompt, response = other.tokenise(writer, row)
    assert other.tokenizer.decode(prompt) == "\n\nHuman: Who are you?\n\nAssistant:"
    assert other.tokenizer.decode(response) == "ab ba" + "<eos>" * int(ended)
    expected = other.score_ids(args, [(prompt, response)])
    assert other.scores(args, writer, [row]) == expected != judge.scores(args, writer, [row])


def test_a_chat_model_ends_where_stock_generate_does(chat_folder, tmp_path):
    """Its template writes the prompt; a response ends at any EOS of generation_config.json."""
    args = flags_of(chat_folder)(["--max_answer_seq_len", "200"])
    [writer] = writers_of(args)
    row = writer.prompt(args, 0, ASKED)
    ids = writer.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    assert writer.template == "chat" and row["prompt_ids"] == ids and row["chat"]
    [before] = writer.answers(args, [row], 0)
    texts = [writer.tokenizer.decode([i]) for i in before["response_ids"]]
    place = next(i for i, text in enumerate(texts) if i > 2 and len(text) > 4 and text.isascii())
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    ends = {"eos_token_id": [1, before["response_ids"][place]]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    [after] = models.Writer(args, str(folder)).answers(args, [row], 0)
    first = texts.index(texts[place])
    assert after["response_ids"] == before["response_ids"][: first + 1] and after["ended"]


def test_a_prompt_that_is_too_long_keeps_its_end(flags):
    args = flags()
    writer = writers_of(args)[0]
    whole = writer.prompt(args, 0, "What is a fox? " * 9)
    writer.positions = 12  # the response may have half of them
    cut = writer.prompt(args, 0, "What is a fox? " * 9)
    assert cut["prompt_ids"] == whole["prompt_ids"][-6:] and cut["cut"] and not whole["cut"]


@pytest.mark.parametrize("scores", [False, True], ids=["writer", "judge"])
def test_adapters_are_taken_like_whole_models(trained, tmp_path, tokenizer, scores):
    """What --lora_dim leaves: the score, and the logits, are those of weights and adapters."""
    base, folder = str(trained / ("judge" if scores else "actor")), str(tmp_path / "adapters")
    own = sft.get_args("--preset toy --dtype fp32".split())
    model = load_model(base, own, 0, None, tokenizer, "score" if scores else None, lora_dim=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    saving.save_model(model, tokenizer, folder)
    args, ids = flags_of("x")(), torch.tensor([[5, 6, 7, 8, 9, 1]])
    if scores:
        inputs = ids, torch.ones_like(ids), torch.arange(6)[None]
        expected = model(*inputs)[0, -1:]
        found = [models.Judge(args, path).model(*inputs)[0, -1:] for path in (base, folder)]
    else:
        expected = model(ids).logits
        found = [models.Writer(args, path).model(ids).logits for path in (base, folder)]
    assert torch.allclose(found[1], expected, atol=1e-4)
    assert not torch.allclose(found[0], expected, atol=1e-2)


# ---- Files ----
def test_prompts_of_a_file_end_in_a_table(trained, tmp_path, capsys):
    """Every response is in --out, with its scores. The other columns reach the gold function. A
    model against itself wins half, whatever it writes."""
    rows = [{"prompt": f"What is {word}?", "answer": word} for word in ("a fox", "a hen", "it")]
    data = write_lines(tmp_path / "data.jsonl", [*rows, {"prompt": " ", "answer": ""}])
    gold, out, actor = tmp_path / "gold.py", tmp_path / "out.jsonl", trained / "actor"
    gold.write_text("def f(prompts, completions, answer, **_): return [len(a) for a in answer]\n")
    job = [actor, actor, "--reward", trained / "judge", "--prompts", data, "--out", out]
    job = [*map(str, [*job, "--gold_fn", f"{gold}:f", "--num", 0]), *SHORT]
    talk.main(job)
    said = capsys.readouterr().out
    first, second = said.splitlines()[-2:]
    assert "dropped 1 rows" in said and "(the first)" in first
    assert second.count("0.500 [0.125, 0.875]") == 2
    found = lines_of(out)
    assert [line["prompt"] for line in found] == [row["prompt"] for row in rows] * 2
    assert [line["gold"] for line in found[:3]] == [5, 5, 2]
    refused_as("out-file", talk.main, job)
    assert lines_of(out) == found


PAIR = {"chosen": " Yes.", "rejected": " No."}
DIALOGUES = {name: f"\n\nHuman: Who?\n\nAssistant:{text}" for name, text in PAIR.items()}
CHATS = {k: [*ASKED, {"role": "assistant", "content": text}] for k, text in PAIR.items()}


@pytest.mark.parametrize(
    "row, names",
    [
        ({"prompt": "Who?", **PAIR, "chosen_score": "mine"}, ["chosen_score", "rejected_score"]),
        (DIALOGUES, ["chosen_score", "rejected_score"]),
        (CHATS, ["chosen_score", "rejected_score"]),
        ({"instruction": "Who?", "output": "Me.", "score": 3}, ["score"]),
        ({"messages": CHATS["chosen"]}, ["score"]),
    ],
    ids=["pair", "dialogues", "chats", "instruction", "messages"],
)
def test_rows_of_a_file_are_scored(trained, chat_folder, tmp_path, row, names):
    """--score: the row as it was, its own columns too, and the scores of stock transformers."""
    folder = shutil.copytree(trained / "judge", tmp_path / "judge")
    tokenizer = model_folders.load_tokenizer(str(chat_folder))
    tokenizer.save_pretrained(folder)
    data = write_lines(tmp_path / "data.jsonl", [row, row])
    job = ["--reward", folder, "--score", data, "--out", tmp_path / "out.jsonl", "--num", 1]
    talk.main([*map(str, job), "--dtype", "fp32"])
    [found] = lines_of(tmp_path / "out.jsonl")
    new = {f"reward_model_{name}" if name in row else name: name for name in names}
    assert found == {**row, **{name: found[name] for name in new}}
    texts = {"score": " Me."} if "instruction" in row else dict(zip(names, PAIR.values()))
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    stock.config.pad_token_id = None
    if "messages" in row or row is CHATS:
        return
    for name, score in new.items():
        prompt = "Who?" if "prompt" in row else "\n\nHuman: Who?\n\nAssistant:"
        ids = tokenizer(f"{prompt}{texts[score]}<eos>", return_tensors="pt").input_ids
        assert found[name] == pytest.approx(stock(ids).logits.item(), abs=1e-5)


# ---- What is refused ----
@pytest.mark.parametrize(
    "given, rule",
    [
        ("", "no-model"),
        ("m --prompts a --score b --reward r", "two-jobs"),
        ("m --score a --reward r", "score-needs-reward"),
        ("m --out x.jsonl", "out-without-job"),
        ("m --prompts p --out nowhere/x.jsonl", "out-file"),
        ("m --template Q:", "template"),
    ],
)
def test_flags_that_make_no_job_are_refused(given, rule):
    refused_as(rule, talk.get_args, given.split())


def test_sampling_flags_are_ppos_own():
    """They are read by ppo.get_args, with its ranges and its rules between flags."""
    args = talk.get_args("m --temperature 0.5 --stop a b".split())(["--top_k", "3"])
    assert (args.temperature, args.stop, args.top_k, args.models) == (0.5, ["a", "b"], 3, ["m"])
    for wrong in ("--temperature 0", "--max_answer_seq_len 8 --min_new_tokens 8"):
        with pytest.raises(Refused):
            talk.get_args(["m", *wrong.split()])


@pytest.mark.parametrize(
    "kind, name, rule",
    [
        ("Writer", "judge", "cannot-write"),
        ("Judge", "actor", "cannot-score"),
        (
            "Writer",
            ROOT / "toy/model",
            "no-weights",
        ),  # a config, and no weights: it would write at random
    ],
)
def test_a_folder_that_is_something_else_is_refused(trained, kind, name, rule):
    """Before it is loaded: the scores of a model that does not score would be noise."""
    refused_as(rule, getattr(models, kind), flags_of("m")(), str(trained / name))


def test_what_a_template_cannot_write_is_refused(trained, chat_folder, tmp_path):
    args = talk.get_args(["m", "--template", "chat", *SHORT])()
    refused_as("no-chat-template", models.Writer, args, str(trained / "actor"))
    data = write_lines(tmp_path / "data.jsonl", [CHATS])
    job = ["--reward", str(trained / "judge"), "--score", str(data)]
    refused_as("no-chat-template", talk.main, job)
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    tokenizer = model_folders.load_tokenizer(str(chat_folder))
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    tokenizer.save_pretrained(folder)
    writer = models.Writer(args, str(folder))
    refused_as("chat-template-refuses", writer.prompt, args, 0, ASKED)


# ---- A dialogue ----
def typed(talking, monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    talking.run()


def test_a_dialogue_goes_on_from_each_models_own_words(flags, judge, monkeypatch, capsys):
    """Questions, /retry, /undo, /reset: what the models are given is what was said."""
    talking = session.Session(flags, writers_of(flags()), judge)
    typed(talking, monkeypatch, "Who are you?", "/retry", "And \\", "now?")
    first, second = talking.histories
    said = [message["content"] for message in first]
    assert [said[0], said[2]] == ["Who are you?", "And \nnow?"] and first == second
    answer = said[1] if said[1][0].isspace() else " " + said[1]
    prompt = f"\n\nHuman: Who are you?\n\nAssistant:{answer}\n\nHuman: And \nnow?\n\nAssistant:"
    assert talking.prompts[0]["prompt"] == prompt
    assert capsys.readouterr().out.count("(reward ") == 6
    second[1] = {"role": "assistant", "content": " Other words"}
    typed(talking, monkeypatch, "/undo", "Go on")
    assert "Other words\n\nHuman: Go on" in talking.prompts[1]["prompt"]
    assert "And" not in talking.prompts[1]["prompt"] and len(talking.histories[0]) == 4
    typed(talking, monkeypatch, "/reset", "Hi")
    assert talking.prompts[1]["prompt"] == "\n\nHuman: Hi\n\nAssistant:"


def test_a_chat_goes_through_the_template(chat_folder, monkeypatch):
    """Spaces at the ends of a response are not part of a message. Special tokens that a person
    types are text."""
    flags = flags_of(chat_folder)
    talking = session.Session(flags, writers_of(flags()))
    typed(talking, monkeypatch, "Hi <eos>")
    talking.histories[0][1]["content"] = " Hello."
    typed(talking, monkeypatch, "Who?")
    ids = talking.prompts[0]["prompt_ids"]
    text = "<user>Hi <eos><eos><assistant>Hello.<eos><user>Who?<eos><assistant>"
    assert talking.writers[0].tokenizer.decode(ids) == text and ids.count(1) == 3


def test_a_mistyped_command_ends_nothing(flags, monkeypatch, capsys):
    """It is answered in words, and changes no setting. The others are listed by /help."""
    talking = session.Session(flags, writers_of(flags()))
    bad = ["/foo", "/set", "/set temperature hot", "/set top_p 2", "/set models x", "/undo"]
    bad += ["/set min_new_tokens 9", "/save", "/save nowhere/x.jsonl"]
    typed(talking, monkeypatch, *bad, "/help", "/prompt", "Still there?")
    said = capsys.readouterr()
    assert said.err.count("error: ") == len(bad) and len(talking.histories[0]) == 2
    assert vars(talking.args) == vars(flags())
    assert all(f"  /{name} " in said.out for name in talking.commands())
    typed(talking, monkeypatch, "/set temperature 0.5", "/set top_k 3", "/quit", "never read")
    assert (talking.args.temperature, talking.args.top_k, talking.turn) == (0.5, 3, 1)


def test_ctrl_c_stops_a_response_and_no_more(flags, monkeypatch, capsys):
    """The question is as if it had never been asked; the next one is answered."""
    talking = session.Session(flags, writers_of(flags()))
    own, calls = talking.writers[1].answers, []

    def answers(*given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return own(*given)

    monkeypatch.setattr(talking.writers[1], "answers", answers)
    typed(talking, monkeypatch, "Who?", "What?")
    asked = [[message["content"] for message in history[::2]] for history in talking.histories]
    assert asked == [["What?"], ["What?"]] and "stopped" in capsys.readouterr().out


def test_save_writes_what_sft_reads(flags, monkeypatch, tmp_path):
    talking, file = session.Session(flags, writers_of(flags())), tmp_path / "said.jsonl"
    typed(talking, monkeypatch, "Who?", f"/save {file}", f"/save {file}")
    for line, history in zip(lines_of(file), talking.histories, strict=True):
        assert line["messages"] == history
        assert formats.read_row(line).response == history[1]["content"]


def test_a_gold_function_that_knows_other_prompts_only_ends_nothing(flags, monkeypatch, capsys):
    def gold(prompts, completions, **columns):
        if "fox" not in prompts[0]:
            raise ValueError("the fox only")
        return [0.25]

    talking = session.Session(flags, writers_of(flags()), gold=gold)
    typed(talking, monkeypatch, "Who?", "The fox?")
    said = capsys.readouterr()
    assert "gold - (" in said.out and "gold 0.250" in said.out
    assert "Traceback" not in said.out + said.err


def test_a_dialogue_through_a_pipe(trained):
    """The program itself, as a person starts it, from another folder than the project's."""
    command = [sys.executable, ROOT / "tools/talk.py", "actor", "--reward", "judge"]
    options = dict(capture_output=True, cwd=trained, input=b"Who?\n/bad\nWhat\xff?\n")
    run = subprocess.run([*command, "--max_answer_seq_len", "6"], **options, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(b"actor:\n") == 2 and run.stdout.count(b"(reward ") == 2
    assert b"error: there is no command /bad" in run.stderr and b"Traceback" not in run.stderr


# ---- The screen ----
@pytest.mark.parametrize("width, height", [(80, 24), (80, 8), (30, 24)])
def test_what_grows_ends_whole(width, height):
    """Side by side if there is room, else one below another. At the end each response stands there
    once and whole, also if it is higher than the screen."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height)
    words = [f"word{i}" for i in range(30)]
    with screen.Screen(["first", "second"], console) as shown:
        for number in (0, 1):
            shown.write(number, " ".join(words[:20]))
            picture = console.render_lines(shown.picture())
            assert len(picture) < height
            shown.done(number, " ".join(words), f"reward {number}")
    lines = console.render_lines(shown.picture(whole=True))
    text = ["".join(segment.text for segment in line) for line in lines]
    for word in [*words, *words]:
        assert sum(line.split().count(word) for line in text) == 2
    assert (text[0].split() == ["first", "second"]) == (width == 80)
    end = out.getvalue().rpartition("word28")[2]
    assert "word29" in end


def test_a_model_cannot_write_to_the_terminal_itself(capsys):
    """Text is data: a random model writes escape sequences sooner or later."""
    with screen.Screen(["[red]model"]) as shown:
        shown.done(0, "a\x1b[2J\r\x07b [bold]", "note")
    assert capsys.readouterr().out == "[red]model:\na\ufffd[2J\ufffd\ufffdb [bold]\n  (note)\n\n"
