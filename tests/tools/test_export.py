"""tools/export.py: what it may not touch, and --merge. That its model is the run's own is tested in
tests/run/, beside the runs."""

import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests import kit
from tests.runs import run_of
from tools import export, talk
from tools.chat import models


@pytest.fixture(scope="module")
def run():
    """A reward model's run under ZeRO-3 on two ranks, with adapters, and its last checkpoint."""
    folder = run_of("reward_lora3")
    return folder, folder / "checkpoints/step-5"


def test_nothing_of_another_owner_is_touched(run, tmp_path):
    """Neither a folder that holds anything (of the user, or of the run), nor a file, nor a place
    among checkpoints, nor the current folder by an empty name. What fails leaves nothing behind."""
    folder, checkpoint = run
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.safetensors").write_text("mine")
    file = tmp_path / "mine/model.safetensors"
    for to, rule in (
        (tmp_path / "mine", "target-in-use"),
        (file, "target-in-use"),
        (folder, "target-in-use"),
        (checkpoint / "new", "target-in-checkpoints"),
        ("", "empty-target"),
    ):
        with kit.refuses(rule):
            export.export(checkpoint, to)
    assert file.read_text() == "mine"
    copy = tmp_path / "run/checkpoints/step-5"
    shutil.copytree(checkpoint, copy)
    with kit.refuses("no-run"):
        export.export(copy, tmp_path / "to")
    (copy / "rank1.pt").write_bytes(b"")
    with kit.refuses("no-checkpoint"):
        export.export(copy, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run"]


def test_the_folder_comes_to_be_when_all_is_written(run, tmp_path, monkeypatch):
    """A full disk, or a kill, leaves no folder that looks like a model."""

    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(export.saving, "save_model", full)
    with pytest.raises(OSError):
        export.export(run[1], tmp_path / "to")
    assert not [*tmp_path.iterdir()]


@torch.no_grad()
def test_merged_adapters_give_the_same_scores_in_stock_transformers(run, tmp_path):
    """A run with --lora_dim saves adapters, and so does export; with --merge a plain model."""
    for name, merge in (("adapters", False), ("plain", True)):
        export.main([str(run[1]), "--to", str(tmp_path / name), *["--merge"] * merge])
    assert (tmp_path / "adapters/adapter_config.json").exists()
    assert not (tmp_path / "plain/adapter_config.json").exists()
    flags = talk.get_args(["x", "--dtype", "fp32"])
    pair = [5, 6, 7, 8], [9, 10, 1]
    [score] = models.Judge(flags(), str(tmp_path / "adapters")).score_ids(flags(), [pair])
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    stock.config.pad_token_id = None
    ids = torch.tensor([[*pair[0], *pair[1]]])
    assert stock(ids).logits.item() == pytest.approx(score, abs=1e-5)
