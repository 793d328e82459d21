"""The model card, README.md in the folder of a saved model, as the hub reads it."""

import json
import os
import re
from pathlib import Path

import yaml

from machinery.data import data_split

MARK = "<!-- Written at the end of a training run, from args.json and metrics.jsonl. -->"
LIMITS = {
    "language model": "It writes what is likely after its training data. What it says may be "
    "wrong, unfair or harmful: read what it writes to your own prompts before others do.",
    "reward model": "Its score orders responses to the same prompt, and is no probability. Far "
    "from its training data it is unreliable, and a policy that is trained on it finds its errors.",
    "critic": "It is PPO's critic, of use to go on with the training: at each token its value is "
    "the reward still to come, not a judgement of the response.",
}
EOS = {
    "all": "The tokenizer here appends EOS, where the score is read, by itself.",
    "special": "The tokenizer here appends EOS, where the score is read, unless it is called with "
    "`add_special_tokens=False`: then append it to the text.",
    "none": "Append EOS to each text: the score is read there, and this tokenizer does not.",
}
WRITES = "It was trained to end a response with EOS, and generation stops there."
LOAD = {
    False: """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
inputs = tokenizer("PROMPT", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputsEOS, max_new_tokens=128)[0]))""",
    True: """from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForSequenceClassification.from_pretrained("FOLDER"HEAD)
inputs = tokenizer(["PROMPT" + "RESPONSE"], padding=True, return_tensors="pt")
print(model(**inputs).logits[:, 0])  # one score for each text""",
}


def may_write(folder):
    """Returns whether `folder` has no README.md, or one that a run has written."""
    file = Path(folder) / "README.md"
    if file.is_file():
        return MARK in read(file)
    return not os.path.lexists(file)


def text(args, record, title, folder, adapted=None, scores=False, appended="none"):
    """Returns the card of the model that is saved in `folder`, --output_dir or a folder in it.

    record: what args.json holds. title: what was trained. adapted: what LoRA's adapters sit on,
    None for a whole model. scores: it is a reward model or critic, with a tokenizer that appends
    EOS for `appended`.
    """
    output, folder = Path(args.output_dir), Path(folder)
    kind = "reward model" if scores else "language model"
    if folder == output / "critic":
        kind = "critic"
    role = "critic_" if kind == "critic" else "actor_"
    start = getattr(args, f"{role}model_name_or_path", None) or args.model_name_or_path
    base, data = base_model(start), [name_of(path) for path in args.data_path]
    on_hub = [path for path in args.data_path if not Path(path).exists()]
    head = {
        "base_model": base,
        "base_model_relation": base and ("adapter" if adapted else "finetune"),
        "datasets": on_hub,
        "library_name": "peft" if adapted else "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "tags": ["rlhf", kind.replace(" ", "-")],
    }
    head = yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False)
    rows = record.get("data_rows", "?")
    return f"""---
{head}# license: yours to choose
---
{MARK}
# {folder.name}

{title[0].upper()}{title[1:]} ({kind}), begun from `{base or name_of(start)}`.

**Data.** {", ".join(data)}: {rows} rows ({data_split.in_words(args)}).

**Limits.** {LIMITS[kind]} Nothing but the metrics below was measured.

## How to load it

```python
{loading(folder.name, adapted, scores)}
```

{EOS[appended] if scores else WRITES}

## Metrics at the end

{table(last_evaluation(output / "metrics.jsonl"))}

## What decided the result

Flags:

{table(result_flags(args))}

Versions: {", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items())}; \
{record.get("world_size", "?")} ranks on {record.get("device", "?")}.
"""


def read(file):
    """Returns the text of a file, which may be anybody's: not all is UTF-8."""
    return file.read_text(encoding="utf-8", errors="replace")


def name_of(path):
    """Returns a hub name as it is, and of a path here, which is nobody's business, its end."""
    file = Path(path)
    return file.resolve().name if file.exists() or file.is_absolute() else str(path)


def base_model(start):
    """Returns the hub name of what a model was trained from, also through folders of ours."""
    folder = Path(start)
    if not folder.exists():
        return start
    card = folder / "README.md"
    if not card.is_file() or MARK not in (written := read(card)):
        return None
    found = re.search(r"^base_model: (.+)$", written, re.MULTILINE)
    return found and found[1].strip("'\"")


def loading(name, adapted, scores):
    """Returns lines of Python that load the folder `name`."""
    eos = ", eos_token_id=tokenizer.eos_token_id" if adapted else ""
    head = ", num_labels=1" if adapted else ""
    return LOAD[scores].replace("FOLDER", name).replace("EOS,", f"{eos},").replace("HEAD", head)


def last_evaluation(file):
    """Returns the last line of metrics.jsonl that holds an evaluation, {} if none does."""
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines if '"eval_' in line]
    last = found[-1] if found else {}
    return {key: last[key] for key in last if key in ("step", "epoch") or "eval_" in key}


def result_flags(args):
    """Returns {flag: value} of those that change the result, their paths cut to names."""
    rest, found = {"output_dir", *args.declared.speed}, {}
    for name, value in vars(args).items():
        if name[0] != "_" and name not in rest and value not in (None, ""):
            values = map(str, value if isinstance(value, list) else [value])
            found[f"--{name}"] = " ".join(map(name_of, values))
    return found


def table(values):
    """Returns a dict as a table in Markdown: a row has one line, and no | but its own."""
    lines = ["| | |", "| --- | --- |"]
    for key, value in values.items():
        text = repr(str(value))[1:-1].replace("|", r"\|")
        lines.append(f"| {key} | {text} |")
    return "\n".join(lines)
