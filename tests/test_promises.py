"""Walks through tests/promises.py, the table of all that is refused and all that is promised.

Every case is a command, started as a user starts it (kit.start), in a folder that holds right and
wrong things: the box. Nothing here looks inside: a change of the code passes both files as they
are.
"""

import functools
import json
import os
import shutil
import socket
import sys
import time

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
import os, sys, time
def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
def words(prompts, completions, **columns):
    return [float(len(text.split())) for text in completions]
def narrow(prompts, completions):
    return [0.0 for text in completions]
def waits(prompts, completions, **columns):
    while not os.path.exists("go"):
        time.sleep(0.05)
    return length(prompts, completions)
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
    shutil.copytree(box / "good", box / "moved/good")
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

    def adapted(folder, base):
        """Makes a folder one of adapters on `base`."""
        config = dict(peft_type="LORA", r=2, lora_alpha=2, target_modules=["q_proj"])
        config["base_model_name_or_path"] = base
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    changed("moved/actor")
    changed("moved/judge", judge)
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
    folder = changed("no_map")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    folder = changed("not_found")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text("404: Not Found")
    folder = changed("gguf")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    edit(changed("shallow") / "config.json", num_hidden_layers=1)
    for name, source, gone in (
        ("headless", actor, "lm_head.weight"),
        ("scoreless", judge, "score.weight"),
        ("changed/judge", judge, ""),  # another file, with another size
    ):
        weights = load_file(changed(name, source) / "model.safetensors")
        weights.pop(gone, None)
        metadata = {"format": "pt", "note": "of another training"}
        save_file(weights, box / name / "model.safetensors", metadata=metadata)
    # adapters of so many layers, and as wide as that
    for name, layers, width in (("1", 1, 32), ("3", 3, 32), ("wide", 2, 64), ("none", 0, 0)):
        folder = adapted(changed(f"adapts_{name}", box / "scratch"), "actor")
        names = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_" for i in range(layers)]
        weights = {f"{name}A.weight": torch.zeros(2, width) for name in names}
        weights |= {f"{name}B.weight": torch.zeros(width, 2) for name in names}
        if layers:
            save_file(weights, folder / "adapter_model.safetensors")
    adapted(changed("adapts_itself"), "adapts_itself")
    adapted(changed("adapts_scratch"), "scratch")
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
    """Returns pytest's parameters of a table, each named by its second cell."""
    found = promises.of(table)
    alike = len({case[1] for case in found}) < len(found)
    ids = [" ".join(case[:2] if alike else case[1:2])[:90] for case in found]
    return [pytest.param(*case, id=name) for case, name in zip(found, ids)]


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


@pytest.mark.parametrize("command", [case[0] for case in promises.of(promises.TAKEN)])
def test_the_neighbours_of_wrong_flags_are_taken(box, command):
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


def second_run(box, folder):
    """Rank 0 is a run that waits, and rank 1 starts others in its folder, one after the other.

    Returns their exit codes; the run goes on then.
    """
    first = os.environ["RANK"] == "0"
    for name in kit.RANK_NAMES:
        del os.environ[name]
    right = [*RIGHT["ppo"].split(), "--reward_fn", f"{box}/score.py:waits"]
    right = [word.replace("good", f"{box}/good") for word in right]
    right += ["--actor_model_name_or_path", f"{box}/actor", "--output_dir", folder]
    right += ["--critic_model_name_or_path", f"{box}/judge"]
    if first:
        return kit.call_main("ppo", right)
    codes = []
    while not os.path.exists(f"{folder}/args.json"):
        time.sleep(0.05)
    for more in ([], ["--resume"], ["--overwrite"]):
        child = os.fork()
        if not child:
            try:
                kit.call_main("ppo", [*right, *more])
            except SystemExit as stop:
                sys.stderr.flush()
                os._exit(stop.code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    open("go", "w").close()
    return codes


def test_a_living_run_keeps_its_folder(box, tmp_path):
    """A second run is refused, also with --resume and --overwrite. The message names the host and
    the process of the first, which goes on to its end."""
    done = kit.fork(second_run, 2, str(box), str(tmp_path / "out"), meet="", cwd=tmp_path)
    assert done.codes == [0, 0] and done.results[1] == [2, 2, 2], done
    assert done.err.count(f"on {socket.gethostname()}") == 3 and "in use by process" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    assert (tmp_path / "out/config.json").exists()


# --------------------------------------------------------------------------------------------------
# Stopped
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what, command, words", cases(promises.STOPPED))
def test_what_cannot_go_on_stops(box, untouched, tmp_path, what, command, words):
    """With exit code 1, and no model is saved: nobody takes the run for a finished one."""
    done = start(command, box, tmp_path)
    assert done.code == 1 and words in done.out + done.err, done
    assert kit.tree(box) == untouched and not (tmp_path / "out/config.json").exists()


# --------------------------------------------------------------------------------------------------
# Promised
# --------------------------------------------------------------------------------------------------
SHORT = "--data_split 1,1,1 --per_device_eval_batch_size 2"
STEPS = {
    "sft": f"{SHORT} --max_steps 2 --num_samples 1 --per_device_train_batch_size 2",
    "reward": f"{SHORT} --max_steps 2 --per_device_train_batch_size 2",
    "ppo": f"""{SHORT} --max_steps 1 --num_eval_prompts 2 --microscope 1
        --per_device_generation_batch_size 2 --per_device_training_batch_size 2""",
}


@pytest.fixture(scope="session")
def steps(box, tmp_path_factory):
    """{step: kit.Done} of the three steps of the toy, in an empty folder, without names of models
    and of output folders."""
    here, steps = tmp_path_factory.mktemp("steps"), {}
    for script, flags in STEPS.items():
        flags += f" --data_path {box}/good"
        flags += f" --gold_fn {box}/score.py:length" if script == "ppo" else ""
        steps[script] = kit.start(f"{script} {flags}", cwd=here)
        steps[script].folder = here / "output" / script
    return steps


@pytest.mark.parametrize("script", kit.SCRIPTS)
def test_each_step_finds_the_one_before(steps, script):
    """In output/: a bare command is all that one types. The exit code is 0, and the last line says
    where everything is."""
    done = steps[script]
    assert done.code == 0 and done.out.splitlines()[-1] == f"done: output/{script}", done
    assert "Traceback" not in done.err and "error: " not in done.err, done


@pytest.mark.parametrize("script, place, names", cases(promises.LEFT))
def test_a_step_leaves_its_files(steps, script, place, names):
    there = {path.name for path in (steps[script].folder / place).iterdir()}
    assert set(names.split()) <= there, there


def test_a_step_leaves_nothing_unfinished(steps):
    """Everything is written aside and then moved: what is hidden afterwards is the lock alone."""
    for done in steps.values():
        assert {path.name for path in done.folder.rglob(".*")} == {".lock"}


@pytest.mark.parametrize("script, file, names", cases(promises.KEYS))
def test_a_file_of_a_step_has_its_keys(steps, script, file, names):
    folder = steps[script].folder
    if file == "args.json":
        lines = [json.loads((folder / file).read_text())]
    elif file.endswith(".jsonl"):
        lines = kit.read_lines(folder / file)
    else:
        lines = kit.metrics(folder)[{"step": 1, "evaluation": -1}[file] :]
        lines += kit.metrics(folder)[:1] * (file == "evaluation")
    assert lines and all(set(names.split()) <= line.keys() for line in lines), lines[0].keys()


@pytest.mark.parametrize("script, place", [("sft", "."), ("ppo", "."), ("ppo", "ema")])
def test_stock_transformers_loads_what_writes(steps, script, place):
    """Offline, with every weight; and the tokenizer lies beside."""
    folder = steps[script].folder / place
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id


@pytest.mark.parametrize("script, place", [("reward", "."), ("ppo", "critic")])
def test_stock_transformers_loads_what_scores(steps, script, place):
    folder, kind = steps[script].folder / place, transformers.AutoModelForSequenceClassification
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and AutoTokenizer.from_pretrained(folder)


def test_the_steps_are_one_page(steps, tmp_path):
    """tools/look.py: a page of all three, and of a bare folder of them."""
    output = steps["ppo"].folder.parent
    done = kit.start(f"tools.look {output} --out {tmp_path}/report.html")
    assert done.code == 0, done
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in kit.SCRIPTS)


@pytest.mark.parametrize("command", [case[0] for case in promises.of(promises.RESUMED)])
def test_what_does_not_shape_a_run_may_change(box, tmp_path, command):
    """A stopped run goes on from its newest checkpoint with what it is given now."""
    script = command.split()[0]
    here = tmp_path / "stopped"
    shutil.copytree(box / ("stopped" if script == "sft" else "ppo_stopped"), here)
    done = kit.start(command.replace("COPY", str(here)), RIGHT[script].split(), cwd=box)
    assert done.code == 0 and "resumed from" in done.out, done
    assert (here / "config.json").exists()


@pytest.mark.parametrize("promise, name", [case[:2] for case in promises.of(promises.HELD)])
def test_a_promise_has_its_test(promise, name):
    assert f"def {name}(" in all_tests(), promise


@pytest.mark.parametrize("rule, what, name", cases(promises.ELSEWHERE))
def test_a_rule_out_of_reach_has_its_test(rule, what, name):
    assert f"def {name}(" in all_tests(), rule


@functools.cache
def all_tests():
    return "".join(file.read_text() for file in kit.ROOT.glob("tests/**/test_*.py"))
