"""The model card, README.md in the folder of a saved model, as the hub reads it."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from machinery.base import ranks
from machinery.models import model_folders


def write_card(args, record, title, folder, **facts):
    """Writes README.md of the model in `folder`. A card that fails does not cost the weights.

    record: what args.json holds, and the last evaluation. title: what was trained. facts: what
    saving.save_model returned.
    """
    try:
        text = card_text(args, record, title, Path(folder), **facts)
        with open(Path(folder) / "README.md", "x") as file:  # one that is there is the user's
            file.write(text)
    except Exception as error:  # of what the base's README.md, flags and logs may hold
        ranks.say(f"the model card, README.md, could not be written: {error!r}")


def card_text(args, record, title, folder, adapted, scores, appends):
    """Returns the model card of what is in `folder`, --output_dir or a folder in it."""
    flags, kind = vars(args), "language model"
    if scores:
        kind = "critic" if "critic_model_name_or_path" in flags else "reward model"
    role = "critic" if scores else "actor"
    start = flags.get(f"{role}_model_name_or_path") or args.model_name_or_path
    base = base_model(start)
    head = ModelCardData(
        base_model=base,
        datasets=[p.partition(":")[0] for p in args.data_path if not exists(p)] or None,
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
    if adapted and model_folders.chain(start)[1:]:  # peft follows one level only
        how = f"These adapters lie on those in {name_of(start)}: "
        how += "`tools/export.py CHECKPOINT --merge` makes a plain model."
    last = record.get("evaluation", {}).items()
    rows = "\n".join(f"| {name} | {value} |" for name, value in last)
    return f"""---
{head.to_yaml()}
# license: yours to choose
---
# {folder.name}

A {kind} ({title}), trained from `{base or name_of(start)}`
on {record["data_rows"]} rows of {", ".join(map(name_of, args.data_path))}.


{how}
{"Append EOS to each text." if scores and not appends else ""}

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


def base_model(start):
    """Returns the hub name of what a model was trained from, also through folders of ours."""
    if not Path(start).exists():
        return start
    file = Path(start) / "README.md"
    return ModelCard.load(file).data.base_model if file.is_file() else None
