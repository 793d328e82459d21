"""tools/export.py: what it may not touch, and --merge. That its model is the run's own is tested in
tests/run/, beside the runs."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from machinery.refused import Refused
from tests import kit
from tests.runs import run_of
from tools import export, talk
from tools.chat import models


@pytest.fixture(scope="module")
def run():
    """A reward model's run under ZeRO-3 on two ranks, with adapters."""
    return run_of("reward_lora3")


def test_nothing_of_another_owner_is_touched(run, tmp_path, monkeypatch):
    """What fails (a damaged checkpoint, a full disk) leaves nothing behind. (Folders that are not
    one's own: tests/promises.py.)"""
    checkpoint = run / "checkpoints/step-5"
    damaged = tmp_path / "run/checkpoints/step-5"
    shutil.copytree(checkpoint, damaged)
    (damaged / "rank1.pt").write_bytes(b"")
    with kit.refuses("foreign-checkpoint"):
        export.export(damaged, tmp_path / "to")
    (damaged / "done").unlink()
    with kit.refuses("no-checkpoint"):
        export.export(damaged, tmp_path / "to")

    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(export.saving, "save_model", full)
    with kit.refuses("not-exported"):
        export.export(checkpoint, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_chat_runs_end_of_turn_is_exported(run, tmp_path, monkeypatch):
    """A checkpoint knows the EOS of its run. If it is not the base's, it is the end of a turn."""
    asked, load = [], export.folders.load_tokenizer

    def noted(path, args=None, in_chats=False):
        asked.append(in_chats)
        return load(path, args)

    monkeypatch.setattr(export.folders, "load_tokenizer", noted)
    args, saved = export.read_run(run / "checkpoints/step-5")
    saved[0]["eos_token"] = "<|im_end|>"
    export.write_models(args, saved, run / "checkpoints/step-5", tmp_path / "to", False)
    assert asked == [False, True]


class Runs:
    """What runs code as soon as it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("it_ran"),)


def test_a_checkpoint_that_would_run_code_is_refused(run, tmp_path, monkeypatch):
    """Whichever file it stands in, before any is read. It may be sent as one of ours. The code of a
    model runs by the command line's --trust_remote_code alone, whatever the run's own flags say."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run", ignore=shutil.ignore_patterns("model.safetensors"))
    checkpoint = Path("run/checkpoints/step-5")
    for file in [checkpoint / "rank1.pt", *checkpoint.rglob("*optim_states.pt")]:
        whole = file.read_bytes()
        torch.save({"state": Runs()}, file)
        with kit.refuses("foreign-checkpoint"):
            export.export(checkpoint, tmp_path / "to")
        file.write_bytes(whole)
    args = json.loads(Path("run/args.json").read_text())
    Path("run/args.json").write_text(json.dumps({**args, "trust_remote_code": True}))
    trusted = []
    monkeypatch.setattr(export, "write_models", lambda args, *_: trusted.append(args))
    for flags in ([], ["--trust_remote_code"]):
        with contextlib.suppress(Refused):
            export.main([str(checkpoint), "--to", "to", *flags])
    assert [args.trust_remote_code for args in trusted] == [False, True]
    assert not Path("it_ran").exists()


@torch.no_grad()
def test_merged_adapters_give_the_same_scores_in_stock_transformers(run, tmp_path):
    """A run with --lora_dim saves adapters, and so does export; with --merge a plain model."""
    for name, merge in (("adapters", []), ("plain", ["--merge"])):
        export.main([str(run / "checkpoints/step-5"), "--to", str(tmp_path / name), *merge])
    assert (tmp_path / "adapters/adapter_config.json").exists()
    assert not (tmp_path / "plain/adapter_config.json").exists()
    args = talk.get_args(["x", "--dtype", "fp32"])
    [score] = models.Judge(args, str(tmp_path / "adapters")).score_ids(args, [([5, 6], [7, 1])])
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    stock.config.pad_token_id = None
    assert stock(torch.tensor([[5, 6, 7, 1]])).logits.item() == pytest.approx(score, abs=1e-5)
