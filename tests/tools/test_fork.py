"""bench/fork.py: what it says of a layout in which a sampled token flipped."""

import json
from types import SimpleNamespace

from bench import fork

OPTIONS = SimpleNamespace(steps=4, tolerance=1e-3)


def write(folder, responses, losses, evaluated="same"):
    """Writes a run as `record` and ppo.py leave one: two responses in each of four steps."""
    folder.mkdir()
    lines = [{"step": step, "loss": loss, "eval_x": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sample = {"step": 2, "prompt": "held out", "response": evaluated}
    (folder / "samples.jsonl").write_text(json.dumps(sample))
    pairs = [("held out", evaluated), *((f"prompt {i}", r) for i, r in enumerate(responses))]
    folder.with_name(f"{folder.name}.responses-0").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def test_a_flipped_response_is_named_and_the_rest_is_compared(tmp_path):
    """Step 4 has another response, so its loss is another one; steps 1 to 3 are compared."""
    first = write(tmp_path / "first", "aabbccdd", [1.0, 2.0, 3.0, 4.0])
    flipped = write(tmp_path / "flipped", "aabbccdx", [1.0, 2.0, 3.0, 9.0])
    agrees, gap, _, words = fork.compare(OPTIONS, first, flipped)
    assert agrees and gap == 0 and "step 4" in words[0] and "prompt 7" in words[0]
    worse = write(tmp_path / "worse", "aabbccdx", [1.0, 2.1, 3.0, 9.0])
    assert not fork.compare(OPTIONS, first, worse)[0]


def test_too_many_flips_are_a_difference(tmp_path):
    """Both responses of a step, or one so early that half of the steps would not be compared."""
    losses = [1.0, 2.0, 3.0, 4.0]
    first = write(tmp_path / "first", "aabbccdd", losses)
    assert not fork.compare(OPTIONS, first, write(tmp_path / "both", "aabbccxx", losses))[0]
    assert not fork.compare(OPTIONS, first, write(tmp_path / "early", "axbbccdd", losses))[0]


def test_an_evaluation_with_a_flipped_response_is_left_out(tmp_path):
    """Its metrics alone: the training of that step is compared."""
    first = write(tmp_path / "first", "aabbccdd", [1.0, 2.0, 3.0, 4.0])
    other = write(tmp_path / "other", "aabbccdd", [1.0, 2.0, 3.0, 4.0], evaluated="another")
    lines = fork.lines_of(other / "metrics.jsonl")
    lines[1]["eval_x"] = 7.0
    (other / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    agrees, _, _, words = fork.compare(OPTIONS, first, other)
    assert agrees and "evaluation of step 2" in words[0]
    lines[1]["loss"] = 7.0
    (other / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert not fork.compare(OPTIONS, first, other)[0]
