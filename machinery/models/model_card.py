"""The model card, README.md in the folder of a saved model, as the hub reads it."""

import json
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from machinery.base import ranks

LIMITS = {
    "language model": "It writes what is likely after its training data, which may be wrong, "
    "unfair or harmful.",
    "reward model": "Its score orders responses to the same prompt, and is no probability. Far "
    "from its training data it is unreliable.",
    "critic": "It is PPO's critic, to go on with the training: at each token its value is the "
    "reward still to come, not a judgement of the response.",
}
ENDS = {  # for whom the tokenizer appends EOS; None: of a language model
    None: "It was trained to end a response with EOS, and generation stops there.",
    "all": "The tokenizer here appends EOS, where the score is read, by itself.",
    "none": "Append EOS to each text: the score is read there, and this tokenizer does not.",
}
LOAD = """from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {kind}.from_pretrained("{name}"{head})
"""
WRITE = """inputs = tokenizer("PROMPT", return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=128, eos_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(answer[0]))"""
SCORE = """inputs = tokenizer(["PROMPT" + "RESPONSE"], padding=True, return_tensors="pt")
print(model(**inputs).logits[:, 0])  # one score for each text"""


def write(args, record, title, folder, **facts):
    """Writes README.md of the model in `folder`. A card that fails does not cost the weights.

    record: what args.json holds. title: what was trained. facts: what saving.save_model returned.
    """
    try:
        card(args, record, title, Path(folder), **facts).save(Path(folder) / "README.md")
    except Exception as error:  # of what the base's README.md, flags and logs may hold
        ranks.say(f"README.md, the model's card, could not be written: {error!r}")


def card(args, record, title, folder, adapted=None, scores=False, appended="none"):
    """Returns the ModelCard of the model in `folder`, which is --output_dir or a folder in it."""
    kind = "reward model" if scores else "language model"
    if folder.name == "critic" and folder != Path(args.output_dir):
        kind = "critic"
    role = "critic_" if kind == "critic" else "actor_"
    start = vars(args).get(f"{role}model_name_or_path") or args.model_name_or_path
    base = base_model(start)
    head = ModelCardData(
        base_model=base,
        base_model_relation=base and ("adapter" if adapted else "finetune"),
        datasets=[path for path in args.data_path if not Path(path).exists()] or None,
        library_name="peft" if adapted else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["rlhf", kind.replace(" ", "-")],
    )
    kinds = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    labels = ", num_labels=1" if scores and adapted else ""  # transformers finds no head's shape
    code = LOAD.format(kind=kinds[scores], name=folder.name, head=labels)
    code += SCORE if scores else WRITE
    data = ", ".join(map(name_of, args.data_path))
    last = last_evaluation(Path(args.output_dir) / "metrics.jsonl")
    metrics = "\n".join(f"| {name} | {value} |" for name, value in last.items())
    return ModelCard(f"""---
{head.to_yaml()}
# license: yours to choose
---
# {folder.name}

{title[0].upper()}{title[1:]} ({kind}), trained from `{base or name_of(start)}`.

**Data.** {data}: {record.get("data_rows", "?")} rows.

**Limits.** {LIMITS[kind]} Nothing but the metrics below was measured.

## How to load it

```python
{code}
```

{ENDS[appended if scores else None]}

## Metrics at the end

| | |
| --- | --- |
{metrics}

Flags and versions: args.json. {record.get("world_size", "?")} ranks on {record.get("device", "?")}.
""")


def name_of(path):
    """Returns a hub name as it is, and of a path here, which is nobody's business, its end."""
    file = Path(path)
    return file.resolve().name if file.exists() or file.is_absolute() else str(path)


def base_model(start):
    """Returns the hub name of what a model was trained from, also through folders of ours."""
    if not Path(start).exists():
        return start
    file = Path(start) / "README.md"
    return ModelCard.load(file).data.base_model if file.is_file() else None


def last_evaluation(file):
    """Returns the last line of metrics.jsonl that holds an evaluation, {} if none does."""
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines if '"eval_' in line]
    last = found[-1] if found else {}
    return {key: last[key] for key in last if key in ("step", "epoch") or "eval_" in key}
