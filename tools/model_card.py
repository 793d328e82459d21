"""The model card, README.md in the folder of a model of ours, as the hub reads it."""

import contextlib
import json
import math
from pathlib import Path

from huggingface_hub import ModelCardData

from machinery import folders
from machinery.refused import Refused, read_json, record_of_model


def write_card(folder, run=None, step=math.inf):
    """Writes README.md of the model in `folder`. One that is there is the user's: it stays.

    run: the output folder of the run that trained it, by default `folder` or the one above. step:
    the step whose model it is, by default the last.
    """
    folder = Path(folder).absolute()
    run = run or (folder if read_json(folder) else folder.parent)
    record = read_json(run)
    if "data_rows" not in record or not folders.has_weights(folder):
        raise Refused("no-run", f"{folder} holds no model of a run, or there is no args.json.")
    step = read_json(folder, "evaluation.json").get("step", step)  # of best/
    text = card_text(folder, record, last_evaluation(run, step))
    try:
        with open(folder / "README.md", "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise Refused("target-in-use", f"{folder / 'README.md'} is there already.") from error


def last_evaluation(run, step):
    """Returns the metrics of the last evaluation up to `step` in metrics.jsonl of a run: a dict."""
    found = {}
    with contextlib.suppress(OSError, ValueError), open(run / "metrics.jsonl") as lines:
        for line in map(json.loads, lines):
            values = {name: value for name, value in line.items() if name.startswith("eval_")}
            if values and line["step"] <= step:
                found = {"step": line["step"], **values}
    return found


def card_text(folder, record, evaluation):
    """Returns the model card of what is in `folder`. record: args.json of its run."""
    adapted = (folder / folders.ADAPTER_CONFIG).exists()
    scores = hasattr(folders.load_config(str(folder)), "value_head_prefix")
    kind = "language model"
    if scores:
        kind = "critic" if record["script"] == "ppo" else "reward model"
    start = start_of(record, "critic" if scores else "actor")
    base = base_model(start)
    data = record["data_path"]
    head = ModelCardData(
        base_model=base,
        datasets=[path.partition(":")[0] for path in data if not exists(path)] or None,
        library_name="peft" if adapted else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["rlhf", kind.replace(" ", "-")],
    )
    load = f'AutoModelForCausalLM.from_pretrained("{folder.name}")'
    if scores:  # beside adapters transformers finds no number of labels
        load = f'AutoModelForSequenceClassification.from_pretrained("{folder.name}", num_labels=1)'
    elif (folder / "chat_template.jinja").exists():  # text alone would come without the template
        load += f'`, in chats with `pipeline("text-generation", "{folder.name}")(messages)'
    how = f"It is loaded by transformers with `{load}`."
    if adapted and folders.chain(start)[1:]:  # peft follows one level only
        how = f"These adapters lie on those in {name_of(start)}: "
        how += "`tools/export.py CHECKPOINT --merge` makes a plain model."
    if scores:
        how += "\nThe score is read at EOS. " + (
            "The tokenizer appends it, but not with `add_special_tokens=False`: then append it."
            if (folder / "tokenizer.json").exists()
            else "Append it to each text."
        )
    rows = "\n".join(f"| {name} | {value} |" for name, value in evaluation.items())
    return f"""---
{head.to_yaml()}
# license: yours to choose
---
# {folder.name}

A {kind}, trained by `{record["script"]}.py` from `{base or name_of(start)}`
on {record["data_rows"]} rows of {", ".join(map(name_of, data))}.

{how}

## Metrics at the end

| | |
| --- | --- |
{rows}
"""


def name_of(path):
    """Returns a hub name as it is, and of a path here, which is nobody's business, its end."""
    return Path(path).resolve().name if exists(path) else path


def exists(path):
    """Returns whether a path, or the NAME of NAME:CONFIGURATION:X, is a file or folder here."""
    return Path(path).exists() or Path(path.partition(":")[0]).exists()


def start_of(record, role):
    """Returns what a run's model began from. role: in step 3 "actor" or "critic"."""
    return record.get(f"{role}_model_name_or_path") or record["model_name_or_path"]


def base_model(start):
    """Returns the hub name of what a model was trained from, also through folders of our runs."""
    seen = set()
    while Path(start).exists():
        record = record_of_model(start)
        if start in seen or "data_rows" not in record:
            return None
        seen.add(start)
        start = start_of(record, "critic" if Path(start).name == "critic" else "actor")
    return start
