"""The box: a folder of right and wrong things, for whoever starts programs in it.

Rows in all states, functions of a user's, folders of models. FILES says what the files hold, and
UNFIT which folders of models are not what a run can take.
"""

import json
import os
import shutil

import peft
import pyarrow
import pyarrow.parquet
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import kit

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
def good(prompts, completions, **columns):
    return [True] * len(completions)
def tokens(prompts, completions, completion_ids, **columns):
    return [[0.5] * len(ids) for ids in completion_ids]
def moves(prompts, completions, **columns):
    os.chdir("/")
    return length(prompts, completions)
def leaves(prompts, completions, **columns):
    sys.exit(0)
"""
RETURNED = {  # what functions of these names return for n responses
    "nothing": "None",
    "batch": "dict(enumerate([1.0] * n))",  # as many keys as responses, and numbers
    "named": '{"reward": [1.0] * n}',
    "letters": '"1" * n',
    "octets": 'b"1" * n',
    "a_set": "set(range(n))",
    "one": "1.0",
    "one_less": "[1.0] * (n - 1)",
    "nan": '[1.0] * (n - 1) + [float("nan")]',
    "huge": "[1.0] * (n - 1) + [1e38]",
    "words": '[1.0] * (n - 1) + ["good"]',
    "none_of_one": "[1.0] * (n - 1) + [None]",
    "too_many_tokens": "[1.0] * (n - 1) + [[1.0] * 99]",
    "empty_part": '[{"format": None}] * n',
    "no_parts": "[{}] * n",
    "parts_of_parts": '[{"format": {"of": 1.0}}] * n',
    "part_std": '[{"std": 1.0}] * n',
    "part_1": "[{1: 1.0}] * n",
    "parts_of_some": '[{"format": 1.0}] * (n - 1) + [{"style": 1.0}]',
}
RETURNS = "".join(
    f"def {name}(completions, **columns):\n    n = len(completions)\n    return {value}\n"
    for name, value in RETURNED.items()
)
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
    "good/test.jsonl": [PAIR, {**PAIR, "prompt": "How?"}, {**PAIR, "prompt": "When?"}],
    "changed/good/train.jsonl": rows_of(response=" So!"),
    "changed/good/test.jsonl": [PAIR],
    "rank0/good/train.jsonl": rows_of(),
    "rank1/good/train.jsonl": rows_of(response=" So!"),
    "only/test.jsonl": [PAIR],
    "alike/train.jsonl": rows_of(chosen=" So.", rejected=" So."),
    "alike/test.jsonl": [PAIR],
    "chat/train.jsonl": [TURNS] * 24,
    "chat/test.jsonl": [{"messages": chat("z", "b")}],
    "talk/train.jsonl": rows_of(prompt="\n\nHuman: Why?\n\nAssistant:"),
    "talk/test.jsonl": [{**PAIR, "prompt": "\n\nHuman: How is it?\n\nAssistant:"}],
    "long_chat/train.jsonl": [{"messages": chat("a" * 90, "b", "c", "d")}] * 24,
    "long_chat/test.jsonl": [{"messages": chat("z", "b")}],
    "answers.jsonl": [{"prompt": f"Why {i}?", "response": " So."} for i in range(4)],
    "blank.jsonl": [{"prompt": "  "}],
    "columns.jsonl": [{"question": f"{i}?", "reply": "b"} for i in range(24)],
    "cut.jsonl": GOOD + '{"prompt": "Q?", "resp',
    "control.jsonl": GOOD + '{"prompt": "Q\x01?"}\n',
    "half.jsonl": GOOD + '{"prompt": "\\ud800"}\n',
    "latin.jsonl": GOOD.encode() + '{"prompt": "é"}'.encode("latin-1"),
    "list.jsonl": "[1, 2]\n",
    "rows.txt": GOOD,
    "empty.jsonl": "\n",
    "twice.jsonl": GOOD + '{"prompt": "Q?", "response": "a", "response": "b"}\n',
    "twice.json": '[{"prompt": "Q?", "response": "a", "response": "b"}]',
    "twice.csv": "prompt,response,response\nQ?, a, b\n",
    "open.csv": 'prompt,response\nQ?,r\nQ?,"r\n',
    "two_formats.jsonl": second(prompt="Q?", instruction="Say so", output="So."),
    "cells.csv": "prompt,response\nQ?, r\nQ?, r,more\n",
    "number.jsonl": second(prompt=7, response=" r"),
    "pair_of_number.jsonl": second(prompt="Q?", chosen=7, rejected=" x"),
    "image.jsonl": second(messages=chat([{"type": "image", "url": "a.png"}], "A.")),
    "role.jsonl": second(messages=[*chat("Q?"), {"role": "Assistant", "content": "A."}]),
    "users_turn.jsonl": second(chosen=chat("Q?", "A.", "And?"), rejected=chat("Q?", "B.")),
    "two_prompts.jsonl": second(chosen=chat("Q?", "A."), rejected=chat("When?", "B.")),
    "score.py": SCORE,
    "returns.py": RETURNS,
    "leaving.py": "import sys\nsys.exit(0)\n",
    "decided.json": '{"zero_optimization": {"stage": 2}}',
    "wrong.json": '{"zero_optimization": {"no_such_knob": 1}}',
    "comet.json": '{"comet": {"enabled": true}}',
    "half.json": '{"zero_optimization": ',
    "typo.flags": "--seed 1\n--learning_rat 1",
    "remote/config.json": json.dumps(
        {
            "model_type": "mine",
            "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"},
        }
    ),
    "remote/code.py": "open('it_ran', 'w')\n",
    "done/config.json": "{}",
    "foreign/model.safetensors": "not ours",
}
UNFIT = "cut_config cut_tokenizer no_base endless narrow cut_weights no_shards bert".split()


def fill_box(box):
    """Makes FILES, links and models in the folder `box`. Returns it."""
    for name, content in FILES.items():
        path = box / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("good/train.jsonl", "good/test.jsonl", "score.py"):
        (box / "moved" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(box / name, box / "moved" / name)
    (box / "nothing").mkdir()
    column = pyarrow.array([b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), box / "latin.parquet")
    make_models(box)
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
    edit(changed("shallow") / "config.json", num_hidden_layers=1)
    edit(changed("endless") / "tokenizer_config.json", eos_token=None)
    edit(changed("narrow", box / "scratch") / "config.json", vocab_size=100)
    tokenizer = AutoTokenizer.from_pretrained(kit.TOKENIZER)
    tokenizer.chat_template = (  # it drops what was thought in earlier turns
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else "
        "m.content.split('</think>')[-1] }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(changed("thinking"))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(changed("talks_otherwise", judge))
    tokenizer = AutoTokenizer.from_pretrained(kit.TOKENIZER)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(99)
    tokenizer.save_pretrained(changed("instruct", judge))
    tokenizer.add_tokens(["zebra-crossing"])
    tokenizer.save_pretrained(changed("other", judge))
    tied = transformers.LlamaForSequenceClassification.from_pretrained(judge).config
    tied.update({"tie_word_embeddings": True})  # all weights of a language model are there
    tied.save_pretrained(changed("tied_judge", judge))
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
    for name, source, gone in (
        ("headless", actor, "lm_head.weight"),
        ("scoreless", judge, "score.weight"),
        ("changed/judge", judge, ""),  # another file, with another size
    ):
        weights = load_file(changed(name, source) / "model.safetensors")
        weights.pop(gone, None)
        metadata = {"format": "pt", "note": "of another training"}
        save_file(weights, box / name / "model.safetensors", metadata=metadata)
    for name, key, value in (
        ("nan_weights", "lm_head.weight", torch.full((1,), torch.nan)),
        ("old_buffers", "model.layers.0.self_attn.masked_bias", torch.tensor(-1e4)),
    ):
        weights = load_file(changed(name) / "model.safetensors")
        weights[key] = (weights.get(key, value) * value).contiguous()
        save_file(weights, box / name / "model.safetensors", metadata={"format": "pt"})
    # adapters of so many layers, and as wide as that
    for name, layers, width in (("1", 1, 32), ("3", 3, 32), ("wide", 2, 64), ("none", 0, 0)):
        folder = adapted(changed(f"adapts_{name}", box / "scratch"), "actor")
        names = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_" for i in range(layers)]
        weights = {f"{name}A.weight": torch.zeros(2, width) for name in names}
        weights |= {f"{name}B.weight": torch.zeros(width, 2) for name in names}
        if layers:
            save_file(weights, folder / "adapter_model.safetensors")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(actor), prompt)
    model.save_pretrained(changed("adapts_prompts", box / "scratch"))
    adapted(changed("adapts_itself"), "adapts_itself")
    adapted(changed("adapts_scratch"), "scratch")
    # other architectures
    vocabulary = dict(vocab_size=AutoConfig.from_pretrained(actor).vocab_size)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ends = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    rwkv = dict(hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    for name, config in {
        "bert": transformers.BertConfig(**vocabulary, **shape, **ends),
        "roberta": transformers.RobertaConfig(**vocabulary, **shape, **ends),
        "rwkv": transformers.RwkvConfig(**vocabulary, **rwkv, **ends),
        "deep": kit.tiny_config(**vocabulary, num_hidden_layers=3),
        "odd": kit.tiny_config(**vocabulary, hidden_size=30, num_attention_heads=3),
    }.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(box / name)
        AutoTokenizer.from_pretrained(kit.TOKENIZER).save_pretrained(box / name)
    (changed("bert_from_scratch", box / "bert") / "model.safetensors").unlink()
    t5 = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    transformers.T5Config(**vocabulary, **t5).save_pretrained(changed("t5", box / "scratch"))
