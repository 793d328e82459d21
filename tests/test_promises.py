"""Walks through tests/promises.py, the table of all that is refused and all that is promised.

Every case is a command, started as a user starts it (kit.start), in a folder that holds right and
wrong things: the box. Nothing here looks inside: a change of the code passes both files as they
are.
"""

import json
import os
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import kit, promises

PAIR = {"prompt": "Why?", "response": " So.", "chosen": " So.", "rejected": " No."}
SCORE = """
import sys
def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
def words(prompts, completions, **columns):
    return [float(len(text.split())) for text in completions]
def narrow(prompts, completions):
    return [0.0 for text in completions]
def raises(prompts, completions, **columns):
    raise ValueError("a bug of the user's")
def leaves(prompts, completions, **columns):
    sys.exit(0)
"""
RETURNS = """
calls = []
def nothing(completions, **columns):
    return None
def batch(completions, **columns):
    return dict(enumerate([1.0] * len(completions)))  # as many keys as responses, and numbers
def named(completions, **columns):
    return {"reward": [1.0] * len(completions)}
def letters(completions, **columns):
    return "1" * len(completions)
def octets(completions, **columns):
    return b"1" * len(completions)
def a_set(completions, **columns):
    return set(range(len(completions)))
def one_more(completions, **columns):
    return [1.0] * (len(completions) + 1)
def nan(completions, **columns):
    return [float("nan")] * len(completions)
def huge(completions, **columns):
    return [1e38] * len(completions)
def words(completions, **columns):
    return ["good"] * len(completions)
def none_of_one(completions, **columns):
    return [None] * len(completions)
def too_many_tokens(completions, **columns):
    return [[1.0] * 99] * len(completions)
def empty_part(completions, **columns):
    return [{"format": None}] * len(completions)
def unlike_parts(completions, **columns):
    return [{str(number): 1.0} for number in range(len(completions))]
def parts_by_call(completions, **columns):
    calls.append(1)
    return [{str(len(calls)): 1.0}] * len(completions)
"""
GOOD = '{"prompt": "Q?", "response": " r"}\n'


def chat(*contents):
    """Returns messages that alternate between user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def rows_of(**columns):
    return [{**PAIR, "prompt": f"Why {i}?", **columns} for i in range(24)]


def second(**row):
    """Returns two rows of which the second is wrong."""
    return [dict.fromkeys(row) | PAIR, row]


TURNS = {"messages": chat("a", "<think>b</think>c", "d", "e")}
FILES = {  # what lies in the box: a path, and its text, bytes or rows
    "good/train.jsonl": rows_of(),
    "good/test.jsonl": [PAIR],
    "changed/good/train.jsonl": rows_of(response=" So!"),
    "changed/good/test.jsonl": [PAIR],
    "rank0/good/train.jsonl": rows_of(),
    "rank1/good/train.jsonl": rows_of(response=" So!"),
    "only/test.jsonl": [PAIR],
    "alike/train.jsonl": rows_of(chosen=" So.", rejected=" So."),
    "alike/test.jsonl": [PAIR],
    "chat/train.jsonl": [TURNS] * 24,
    "chat/test.jsonl": [{"messages": chat("z", "b")}],
    "answers.jsonl": [{"prompt": f"Why {i}?", "response": " So."} for i in range(4)],
    "blank.jsonl": [{"prompt": "  "}],
    "columns.jsonl": [{"question": "a", "reply": "b"}] * 4,
    "cut.jsonl": GOOD + '{"prompt": "Q?", "resp',
    "control.jsonl": GOOD + '{"prompt": "Q\x01?"}\n',
    "half.jsonl": GOOD + '{"prompt": "\\ud800"}\n',
    "latin.jsonl": GOOD.encode() + '{"prompt": "é"}'.encode("latin-1"),
    "list.jsonl": "[1, 2]\n",
    "rows.txt": GOOD,
    "empty.jsonl": "\n",
    "cells.csv": "prompt,response\nQ?, r\nQ?, r,more\n",
    "number.jsonl": second(prompt=7, response=" r"),
    "pair_of_number.jsonl": second(prompt="Q?", chosen=7, rejected=" x"),
    "image.jsonl": second(messages=chat([{"type": "image", "url": "a.png"}], "A.")),
    "users_turn.jsonl": second(chosen=chat("Q?", "A.", "And?"), rejected=chat("Q?", "B.")),
    "two_prompts.jsonl": second(chosen=chat("Q?", "A."), rejected=chat("When?", "B.")),
    "score.py": SCORE,
    "returns.py": RETURNS,
    "leaving.py": "import sys\nsys.exit(0)\n",
    "decided.json": '{"zero_optimization": {"stage": 2}}',
    "wrong.json": '{"zero_optimization": {"no_such_knob": 1}}',
    "half.json": '{"zero_optimization": ',
    "done/config.json": "{}",
    "foreign/model.safetensors": "not ours",
}
SMALL = "--data_split 1,1,1 --max_steps 2 --num_warmup_steps 0 --per_device_eval_batch_size 2"
RIGHT = {  # flags that are right, before those of a case
    "sft": f"""--preset toy --data_path good --model_name_or_path actor {SMALL} --max_seq_len 64
        --per_device_train_batch_size 2 --num_samples 1 --max_answer_seq_len 4""",
    "reward": f"""--preset toy --data_path good --model_name_or_path actor {SMALL}
        --max_seq_len 64 --per_device_train_batch_size 2""",
    "ppo": f"""--preset toy --data_path good --actor_model_name_or_path actor {SMALL} --gold_fn=
        --critic_model_name_or_path judge --max_prompt_seq_len 16 --max_answer_seq_len 6
        --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --max_steps 1
        --num_eval_prompts 1""",
    "tools.talk": "--max_answer_seq_len 4 --dtype fp32",
}


# --------------------------------------------------------------------------------------------------
# The box
# --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def box(tmp_path_factory):
    """A folder with right and wrong things. No case may change it."""
    box = tmp_path_factory.mktemp("box")
    for name, content in FILES.items():
        path = box / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (box / "nothing").mkdir()
    (box / "link").symlink_to("gone")
    column = pyarrow.array([b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), box / "latin.parquet")
    make_models(box)
    make_runs(box)
    return box


def make_models(box):
    """Makes folders of models, right ones and wrong ones."""
    for name in ("scratch", "actor", "reward", "measured"):
        shutil.copytree(kit.base() / "models" / name, box / ("judge" if name == "reward" else name))
    actor, judge = box / "actor", box / "judge"

    def changed(name, source=actor):
        return shutil.copytree(source, box / name)

    def edit(file, **values):
        """Sets keys of a JSON file; None takes one out."""
        found = {**json.loads(file.read_text()), **values}
        file.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    # config.json and the tokenizer's files
    (changed("cut_config") / "config.json").write_text('{"model_type": ')
    (changed("cut_tokenizer") / "tokenizer.json").write_text('{"version')
    adapters = '{"base_model_name_or_path": null}'
    (changed("no_base", box / "scratch") / "adapter_config.json").write_text(adapters)
    edit(changed("endless") / "tokenizer_config.json", eos_token=None)
    edit(changed("narrow", box / "scratch") / "config.json", vocab_size=100)
    tokenizer = AutoTokenizer.from_pretrained(kit.TOKENIZER)
    tokenizer.chat_template = (  # it drops what was thought in earlier turns
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else "
        "m.content.split('</think>')[-1] }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(changed("thinking"))
    tokenizer = AutoTokenizer.from_pretrained(kit.TOKENIZER)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(99)
    tokenizer.save_pretrained(changed("instruct", judge))
    tokenizer.add_tokens(["zebra-crossing"])
    tokenizer.save_pretrained(changed("other", judge))
    # weights
    os.truncate(changed("cut_weights") / "model.safetensors", 1000)
    folder = changed("no_shards")
    (folder / "model.safetensors").unlink()
    named = {"metadata": {}, "weight_map": {"lm_head.weight": "model-1-of-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    folder = changed("gguf")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    for name, source, gone in (
        ("headless", actor, "lm_head.weight"),
        ("scoreless", judge, "score.weight"),
        ("changed/judge", judge, ""),  # another file, with another size
    ):
        weights = load_file(changed(name, source) / "model.safetensors")
        weights.pop(gone, None)
        metadata = {"format": "pt", "note": "of another training"}
        save_file(weights, box / name / "model.safetensors", metadata=metadata)
    # other architectures
    vocabulary = dict(vocab_size=AutoConfig.from_pretrained(actor).vocab_size)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ends = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    rwkv = dict(hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    mamba = dict(hidden_size=32, state_size=4, num_hidden_layers=2)
    for name, config in {
        "bert": transformers.BertConfig(**vocabulary, **shape, **ends),
        "roberta": transformers.RobertaConfig(**vocabulary, **shape, **ends),
        "rwkv": transformers.RwkvConfig(**vocabulary, **rwkv, **ends),
        "mamba": transformers.MambaConfig(**vocabulary, **ends, **mamba),
        "deep": kit.tiny_config(**vocabulary, num_hidden_layers=3),
        "odd": kit.tiny_config(**vocabulary, hidden_size=30, num_attention_heads=3),
    }.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(box / name)
        AutoTokenizer.from_pretrained(kit.TOKENIZER).save_pretrained(box / name)
    (changed("bert_from_scratch", box / "bert") / "model.safetensors").unlink()


def make_runs(box):
    """Makes output folders: of runs that are finished, stopped, damaged, and somebody else's."""
    for script, name, steps in (("sft", "finished", 2), ("ppo", "ppo_stopped", 1)):
        flags = f"--output_dir {name} --save_steps 1 --keep_checkpoints 2 --max_steps {steps}"
        done = kit.start(f"{script} {flags}", RIGHT[script].split(), cwd=box)
        assert done.code == 0, done
    (box / "ppo_stopped/config.json").unlink()
    for name in ("damaged", "strange", "stopped"):
        shutil.copytree(box / "finished", box / name)
    (box / "damaged/args.json").write_text('{"seed": 1')
    (box / "strange/args.json").write_text('{"seed": [1], "files": 3}')
    (box / "stopped/config.json").unlink()
    for name in ("broken", "replaced", "alone"):
        shutil.copytree(box / "stopped", box / name)
    for step in (1, 2):
        os.truncate(box / f"broken/checkpoints/step-{step}/rank0.pt", 10)
    args = json.loads((box / "stopped/args.json").read_text())
    (box / "replaced/args.json").write_text(json.dumps({**args, "model_name_or_path": "deep"}))
    (box / "alone/args.json").unlink()


@pytest.fixture(scope="session")
def untouched(box):
    return kit.tree(box)


def cases(table):
    """Returns pytest's parameters of a table, each named by its command."""
    return [pytest.param(*case, id=case[1][:70]) for case in promises.of(table)]


# --------------------------------------------------------------------------------------------------
# Refused
# --------------------------------------------------------------------------------------------------
def assert_refused(done, rule, words):
    assert (done.code, done.rule) == (2, rule), done
    assert done.err.count("error: ") == 1 and "Traceback" not in done.out + done.err, done
    assert words in done.err, done


@pytest.mark.parametrize("rule, command, words", cases(promises.FLAGS))
def test_flags_are_refused(box, untouched, rule, command, words):
    """In words that name a flag that was given, and before anything is looked at."""
    right = "--preset toy --data_path gone.jsonl".split() * ("tools." not in command)
    done = kit.start(command, right, cwd=box)
    assert_refused(done, rule, words)
    given = [word for word in command.split() if word.startswith("--")]
    assert not given or any(flag in done.err for flag in given), done
    assert done.loads == 0 and kit.tree(box) == untouched


@pytest.mark.parametrize("command", promises.TAKEN.strip().splitlines())
def test_the_neighbours_of_wrong_flags_are_taken(box, command):
    if command.startswith("#"):
        return
    done = kit.start(command, "--preset toy --data_path gone.jsonl".split(), cwd=box)
    assert done.rule in ("unreadable-data", "no-such-model"), done


@pytest.mark.parametrize("rule, command, words", cases(promises.FILES))
def test_what_is_named_is_refused_before_a_model_is_loaded(
    box, untouched, tmp_path, rule, command, words
):
    done = start(command, box, tmp_path)
    assert_refused(done, rule, words)
    assert done.loads == 0 and kit.tree(box) == untouched and not list(tmp_path.iterdir())


@pytest.mark.parametrize("rule, command, words", cases(promises.WEIGHTS))
def test_what_is_read_is_refused(box, untouched, tmp_path, rule, command, words):
    done = start(command, box, tmp_path)
    assert_refused(done, rule, words)
    assert kit.tree(box) == untouched


@pytest.mark.parametrize("rule, command, words", cases(promises.BEGUN))
def test_what_shows_when_a_run_has_begun_is_refused(box, untouched, tmp_path, rule, command, words):
    done = start(command, box, tmp_path)
    assert_refused(done, rule, words)
    assert kit.tree(box) == untouched and not (tmp_path / "out/config.json").exists()


def start(command, box, tmp_path):
    """Starts a case with right flags before its own; its output folder is tmp_path/out."""
    program = next(word for word in command.split() if "=" not in word)
    right = RIGHT.get(program, "").split()
    if program in kit.SCRIPTS:
        right += ["--output_dir", tmp_path / "out"]
    return kit.start(command, right, cwd=box)


def test_a_dialogue_goes_on_after_what_it_refuses(box, untouched):
    """Each mistyped command is answered by one message, and a question after them by the model."""
    table = promises.of(promises.TYPED)
    typed = "".join(f"{command}\n" for _, command, _ in table)
    talk = RIGHT["tools.talk"].split()
    done = kit.start("tools.talk actor", talk, cwd=box, stdin=f"{typed}Still there?\n")
    said = done.err.split("error: ")[1:]
    assert done.code == 0 and len(said) == len(table), done
    for (_, command, words), message in zip(table, said):
        assert words in message, (command, message)
    assert "tokens" in done.out.split("actor")[-1] and kit.tree(box) == untouched, done
