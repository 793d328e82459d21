"""The model card: README.md in the folder of a saved model."""

from pathlib import Path

import transformers
import yaml
from bases import RECORD, saved
from tiny_models import get_args

from machinery.models import model_card, saving
from tests.kit import ROOT


def test_the_card_says_what_the_hub_and_its_readers_ask(tmp_path, monkeypatch):
    """Base model, data and its share, metrics at the end, limits, how to load it;
    no path of this machine, and no license that nobody chose. Its call loads the folder."""
    flags = ["--output_dir", str(tmp_path / "out"), "--learning_rate", "0.125"]
    flags += ["--data_path", f"{ROOT}/toy/data::prefs", "Some/hub-data:main:prefs"]
    saved(tmp_path, "another EOS", "score", flags=flags)
    text = (tmp_path / "out/README.md").read_text()
    _, head, body = text.split("---\n", 2)
    head = yaml.safe_load(head)
    assert head["datasets"] == ["Some/hub-data"] and head["pipeline_tag"] == "text-classification"
    assert head["library_name"] == "transformers" and "license" not in head
    for words in ("| eval_loss | 2.5 |", "40 rows"):
        assert words in body, words
    assert str(tmp_path) not in text and str(ROOT) not in text
    monkeypatch.chdir(tmp_path)
    load = body.split("transformers with `")[1].split("`")[0]
    assert eval(load, vars(transformers)).config.num_labels == 1


def test_the_card_of_a_chat_model_asks_with_messages(tmp_path, monkeypatch):
    """stock pipelines apply the template to messages, and to text they do not: a chat model that
    is asked with text alone often answers nothing."""
    saved(tmp_path, "another EOS")
    text = (tmp_path / "out/README.md").read_text()
    ask = text.split("in chats with `")[1].split("`")[0]
    monkeypatch.chdir(tmp_path)
    names = {"messages": [{"role": "user", "content": "Hm?"}], "pipeline": transformers.pipeline}
    [answer] = eval(ask, names)
    assert [turn["role"] for turn in answer["generated_text"]] == ["user", "assistant"]
    (tmp_path / "plain").mkdir()
    saved(tmp_path / "plain", "full")
    assert "messages" not in (tmp_path / "plain/out/README.md").read_text()


def test_the_card_finds_the_base_on_the_hub(tmp_path):
    """Step 3 starts from a folder of step 2's, whose card says where that began."""
    assert model_card.base_model("Qwen/Some") == "Qwen/Some"
    assert model_card.base_model(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nbase_model: Qwen/Some\n---\n")
    assert model_card.base_model(str(tmp_path)) == "Qwen/Some"


def test_the_card_of_adapters_on_adapters_says_what_comes_first(tmp_path):
    """peft loads adapters on a plain model alone. Others have nothing below them to merge."""
    folder, *_ = saved(tmp_path, "full", lora_dim=2)
    text = Path(folder, "README.md").read_text()
    assert "AutoModelForCausalLM" in text and "--merge" not in text
    args = get_args("--model_name_or_path", folder)
    facts = dict(adapted=True, scores=False, appends=False)
    text = model_card.card_text(args, RECORD, "step 3: PPO", tmp_path / "ppo", **facts)
    assert "on those in out: `tools/export.py CHECKPOINT --merge` makes" in text
    assert "from_pretrained" not in text


def test_no_card_costs_the_weights(tmp_path, monkeypatch):
    """The base's README.md may be in any encoding; whatever fails, the model is saved. A README.md
    of the user's stays as it is."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_bytes(b"caf\xe9")
    folder, *_ = saved(tmp_path, "full")
    assert saving.is_whole(folder) and not (tmp_path / "out/README.md").exists()
    (tmp_path / "out/README.md").write_text("mine")
    (tmp_path / "base/README.md").unlink()
    saved(tmp_path, "full")
    assert (tmp_path / "out/README.md").read_text() == "mine"
