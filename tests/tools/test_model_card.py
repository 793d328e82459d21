"""The model card that tools/export.py writes: README.md in the folder of a saved model."""

import json
import math
import shutil

import pytest
import transformers
import yaml

from tests import kit
from tests.runs import run_of
from tools import export, model_card


def saved(folder, model, **record):
    """Makes the folder of a run that has ended, with one of kit's models in it. Returns it."""
    shutil.copytree(kit.base() / "models" / model, folder)
    if model == "reward":  # as all of ours
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "value_head_prefix": "score"}))
    record = {"script": "sft", "data_path": ["Some/data"], "data_rows": 40, **record}
    record["data_fingerprint"] = "0"
    (folder / "args.json").write_text(json.dumps(record))
    lines = [{"step": 4, "eval_loss": 3.5}, {"step": 8, "eval_loss": 2.5}, {"step": 9, "loss": 1.0}]
    kit.write_lines(folder / "metrics.jsonl", lines)
    return folder


def card_of(folder):
    export.main([str(folder), "--card"])
    return (folder / "README.md").read_text()


def test_the_card_says_what_the_hub_and_its_readers_ask(tmp_path, monkeypatch):
    """Base model, data and its share, metrics at the end, how to load it; no path of this machine,
    and no license that nobody chose. Its call loads the folder."""
    data = [f"{kit.ROOT}/recipes/toy/data", "Some/hub-data:main:prefs"]
    folder = saved(tmp_path / "out", "reward", data_path=data, model_name_or_path=str(tmp_path))
    text = card_of(folder)
    _, head, body = text.split("---\n", 2)
    head = yaml.safe_load(head)
    assert head["datasets"] == ["Some/hub-data"] and head["pipeline_tag"] == "text-classification"
    assert head["library_name"] == "transformers" and "license" not in head
    for words in ("| eval_loss | 2.5 |", "| step | 8 |", "40 rows", "add_special_tokens=False"):
        assert words in body, words
    assert str(tmp_path) not in text and str(kit.ROOT) not in text
    monkeypatch.chdir(tmp_path)
    load = body.split("transformers with `")[1].split("`")[0]
    assert eval(load, vars(transformers)).config.num_labels == 1


def test_the_card_finds_the_base_on_the_hub(tmp_path):
    """Step 3 starts from folders of steps 1 and 2, whose args.json say where those began. The
    critic of step 3 begins elsewhere than the actor."""
    sft = saved(tmp_path / "sft", "actor", model_name_or_path="Some/model")
    judge = saved(tmp_path / "judge", "reward", model_name_or_path="Some/other")
    roles = dict(actor_model_name_or_path=str(sft), critic_model_name_or_path=str(judge))
    ppo = saved(tmp_path / "ppo", "actor", script="ppo", **roles)
    shutil.copytree(judge, ppo / "critic", ignore=shutil.ignore_patterns("args.json", "*.jsonl"))
    found = [model_card.base_model(str(path)) for path in (ppo, ppo / "critic", "Some/third")]
    assert found == ["Some/model", "Some/other", "Some/third"]
    assert "A language model, trained by `ppo.py` from `Some/model`" in card_of(ppo)
    assert "A critic, trained by `ppo.py` from `Some/other`" in card_of(ppo / "critic")
    roles["actor_model_name_or_path"] = str(ppo)  # which has been trained on
    saved(tmp_path / "loop", "actor", script="ppo", **roles)
    (ppo / "args.json").write_text((tmp_path / "loop/args.json").read_text())
    assert model_card.base_model(str(ppo)) is None


def test_who_has_written_a_card_keeps_it(tmp_path):
    """And what is no model of a run gets none."""
    folder = saved(tmp_path / "out", "actor", model_name_or_path="Some/model")
    (folder / "README.md").write_text("mine")
    with kit.refuses("target-in-use"):
        card_of(folder)
    assert (folder / "README.md").read_text() == "mine"
    for other in (kit.base() / "models/actor", tmp_path / "gone"):
        with kit.refuses("no-run"):
            card_of(other)


def test_a_model_of_an_earlier_step_has_that_steps_metrics(tmp_path):
    """Of a checkpoint, and of best/."""
    folder = saved(tmp_path / "out", "actor", model_name_or_path="Some/model")
    assert model_card.last_evaluation(folder, 7) == {"step": 4, "eval_loss": 3.5}
    assert model_card.last_evaluation(folder, math.inf) == {"step": 8, "eval_loss": 2.5}
    assert model_card.last_evaluation(tmp_path, math.inf) == {}
    best = shutil.copytree(kit.base() / "models/actor", folder / "best")
    (best / "evaluation.json").write_text('{"step": 4, "eval_loss": 3.5}')
    assert "| eval_loss | 3.5 |" in card_of(best)


@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_what_is_exported_has_its_card(merge, tmp_path):
    """peft loads adapters on a plain model alone. Of those that lie on others, as here, the card
    says what comes first; and of what has none below it how it is loaded."""
    run = run_of("reward_lora3")
    export.main([str(run / "checkpoints/step-5"), "--to", str(tmp_path / "new"), *merge])
    text = (tmp_path / "new/README.md").read_text()
    assert f"library_name: {'transformers' if merge else 'peft'}" in text
    asks = "on those in sft_lora3: `tools/export.py CHECKPOINT --merge` makes" in text
    loads = "AutoModelForSequenceClassification" in text
    assert (asks, loads) == ((False, True) if merge else (True, False))
    record = {**json.loads((run / "args.json").read_text()), "model_name_or_path": "Some/model"}
    assert "from_pretrained" in model_card.card_text(tmp_path / "new", record, {})
