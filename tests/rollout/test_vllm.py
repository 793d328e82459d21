"""The variant vllm: vLLM samples in place of ppo.roll_out.

What may go wrong is tried with a stand-in for its server (vllm_stub.py). The tests at the end are
of vLLM itself, and are skipped where it is not installed: `make vllm`, or VLLM_PYTHON names its
Python.
"""

import contextlib
import copy
import functools
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import common
from machinery import folders, lora
from machinery.refused import Refused
from tests import kit
from tests.docs.test_variants import VARIANTS, runner, variants
from tests.rollout import vllm_stub

CLIENT = VARIANTS / "vllm/vllm_rollouts.py"
sys.path.append(str(CLIENT.parent))  # as when both its files lie beside ppo.py
vllm = kit.import_file(CLIENT)
PROMPTS = [5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]
MODEL, TOKENIZER = functools.cache(kit.make_tiny_model), folders.load_tokenizer(kit.TOKENIZER)


def args_of(**changes):
    flags = dict(dtype="fp32", seed=1, temperature=1.0, top_p=1.0, top_k=0, actor_lora_dim=0)
    flags |= dict(max_seq_len=32, max_answer_seq_len=8, allow_mismatch=0)
    vllm.add_flags(lambda name, default, *_, **__: flags.setdefault(name, default))
    flags = {k: None if isinstance(v, type) else v for k, v in flags.items()}
    own = {"vllm_timeout": 20, "output_dir": os.environ["RLHF_TESTS"]}
    return SimpleNamespace(**{**flags, **own, **changes})


def requests(prompts=PROMPTS):
    return [dict(prompt_ids=ids, row=i, sample=0, group=i) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    return vllm_stub.fake_python(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def client(python, monkeypatch):
    """client(fault, flag=...): the run's side, with the stand-in on the other one. What it asks is
    noted in `asked`."""
    made = []

    def make(fault="", **changes):
        monkeypatch.setenv("VLLM_STUB", fault)
        made.append(engine := vllm.Vllm(args_of(**{"vllm_python": python, **changes})))
        ask, engine.asked = engine.ask, []

        def noted(path, body=None, **how):
            engine.asked.append((path, body))
            return ask(path, body, **how)

        engine.ask = noted
        return engine

    yield make
    for each in made:
        each.end()


def roll_out(engine, asked=None, step=1, count=3, model=None):
    given = model or MODEL(), TOKENIZER, asked or requests(), step, count
    return engine.roll_out(engine.args, *given)


def with_adapters(model, rank=4):
    lora.add_adapters(model, SimpleNamespace(lora_dim=rank, lora_alpha=16, seed=1), "random")
    return model


def on_gpu(monkeypatch):
    gpu = SimpleNamespace(device_name=lambda: "cuda", current_device_name=lambda: "cuda:0")
    monkeypatch.setattr(vllm, "get_accelerator", lambda: gpu)


def is_there(process):
    """Returns whether a process, by its id, is running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def until(condition, seconds=20):
    """Returns whether a condition came true in this time."""
    deadline = time.time() + seconds
    while not condition() and time.time() < deadline:
        time.sleep(0.05)
    return condition()


# --------------------------------------------------------------------------------------------------
# With a stand-in
# --------------------------------------------------------------------------------------------------
def test_what_comes_back_is_what_a_sampler_returns(client, tmp_path, monkeypatch):
    """The contract of docs/ppo.md. The server has the weights of each rollout's actor, and knows
    nothing of the ranks: vLLM would take their variables for its own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("VLLM_STUB_NOTES", str(notes := tmp_path / "notes"))
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    flags = dict(vllm_flags="--enforce-eager --seed=3", vllm_devices="7", vllm_dtype="bf16")
    engine = client(**flags)
    for _ in range(2):
        for request, row in zip(requests(), roll_out(engine), strict=True):
            assert request.items() <= row.items() and row["ended"] == 1.0
            assert row["response_ids"] == vllm_stub.TOKENS
            assert row["text"] == TOKENIZER.decode([7, 8])
            assert row["per_token"] == {"sampled_logprobs": vllm_stub.LOGPROBS}
    assert engine.version == f"{engine.run}-2" and engine.seconds["hand_over_seconds"] > 0
    words, env = json.loads(notes.read_text())
    assert {"--dtype=bfloat16", "--enforce-eager", "--seed=3", "--max-model-len=32"} <= {*words}
    assert "--no-enable-chunked-prefill" in words  # else a long prompt ends its engine on a CPU
    assert "--host=127.0.0.1" in words  # nobody else's host reaches it
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["CUDA_VISIBLE_DEVICES"] == "7"
    assert not {"RANK", "VLLM_API_KEY"} & env.keys()


def test_by_nccl_vllm_starts_from_files_and_then_gets_tensors(client, monkeypatch):
    """Once for each update, by the names that its files have. (What a sender does with them:
    test_vllm_nccl.py.)"""
    sent, senders = [], []

    def new_sender(ask, device, timeout):
        senders.append(device)
        return SimpleNamespace(send=lambda tensors: sent.append(copy.deepcopy(tensors)))

    on_gpu(monkeypatch)
    monkeypatch.setattr(vllm.vllm_nccl, "Sender", new_sender)
    actor, engine = copy.deepcopy(MODEL()), client(vllm_transfer="nccl", vllm_devices="1")
    for actor.global_steps in 0, 1, 1, 2:
        torch.nn.init.constant_(actor.model.norm.weight, 1.0 + actor.global_steps)
        roll_out(engine, model=actor)
    assert senders == ["cuda:0"] and [one["model.norm.weight"][0] for one in sent] == [2.0, 3.0]
    assert sent[0].keys() == load_file(f"{engine.folder}/model.safetensors").keys()
    assert engine.version == f"{engine.run}-3"


FAULTS = {
    "ends": r"vLLM has ended with code 1. Its first error is in /.*/vllm.log",
    "never": "vLLM did not start within --vllm_timeout 5 seconds",
    "killed": "vLLM has ended with code -9. Its server, engine or worker failed",
    "reset": "vLLM has ended with code -9. Its server, engine or worker failed",
    "hangs": "has not answered /inference/v1/generate for --vllm_timeout 8 seconds: it hangs",
    "other-weights": r"with weights \['elsewhere-7'\], and \w+-1 were handed over last",
    "two-weights": r"with weights \['[\w-]+', '[\w-]+'\]",  # a run's random name may come second
    "short": "broke a response off after 3 tokens: length",  # it has no room for all 8
    "unloadable": "answers /collective_rpc with 500: .*no weights",
    "cached": "has not dropped its cache of older weights",
    "nan": "a log-prob of vLLM's is not finite: its fp32 overflows",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_vllm_is_said_in_words(fault, client, monkeypatch, tmp_path):
    """And nothing is left of it: no process, no folder of weights. What it said is in its log."""
    monkeypatch.setattr(vllm, "GRACE", 1)
    limit = {"never": 5, "hangs": 8}.get(fault, 20)
    engine = client(fault, vllm_timeout=limit, output_dir=tmp_path)
    with pytest.raises(RuntimeError, match=f"{FAULTS[fault]}(.|\n)*--resume goes on"):
        roll_out(engine)
    assert engine.process.wait(5) is not None and not Path(engine.folder).exists()
    said = (tmp_path / "vllm.log").read_text()
    assert ("ValueError: no such model" in said) == (fault == "ends")


@pytest.mark.slow
def test_a_response_may_wait_for_others_longer_than_the_timeout(client):
    """vLLM answers some requests at a time, here one, in 1.2 seconds. As long as responses come, it
    does not hang."""
    engine = client("in-line")
    roll_out(engine)
    engine.args.vllm_timeout = 2
    assert len(roll_out(engine, count=len(PROMPTS))) == len(PROMPTS)


def test_a_server_elsewhere_that_is_stopped_while_it_samples_is_missed(client, monkeypatch):
    """It no longer listens, and waits for our request: without a look at it the run would wait for
    as long as --vllm_timeout says."""
    monkeypatch.setattr(vllm, "GRACE", 0.2)
    theirs = client("orphaned")
    theirs.start()
    engine = client(vllm_url=theirs.url, vllm_timeout=60)
    with pytest.raises(RuntimeError, match=f"{theirs.url} no longer listens(.|\n)*--resume"):
        roll_out(engine, requests()[:1])
    assert theirs.process.poll() is None and until(lambda: not Path(engine.folder).exists())


@pytest.mark.parametrize("others", [None, TimeoutError()], ids=["accepted", "busy"])
def test_a_server_that_refuses_now_and_then_goes_on(client, monkeypatch, others):
    """It has too many connections, and is sound: two looks in a row must find nobody."""
    looks, engine = [ConnectionRefusedError(), others] * 4, client()
    engine.url, future = "http://127.0.0.1:1", Future()
    engine.in_the_air = None, None, None, future

    def connect(*_, **__):
        found, engine.ended = looks.pop(0), not looks
        if found:
            raise found
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(vllm, "GRACE", 0)
    monkeypatch.setattr(vllm.socket, "create_connection", connect)
    engine.watch()
    assert not looks and not future.done() and Path(engine.folder).exists()


# flags of a sound server
CONFIG = {
    "dtype": "float32",
    "logprobs-mode": "processed_logprobs",
    "generation-config": "vllm",
}


@pytest.fixture
def other_server():
    """The address of another vLLM's server, with a model of another name, and its Routes."""

    class Routes(vllm_stub.Routes):
        name, room, config = "another", 99, CONFIG

        def do_GET(self):
            alien = self.config.get("alien")
            self.answer(*alien) if alien else super().do_GET()

        def do_POST(self):
            self.answer({"error": "no such route"}, 501)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", routes=Routes)
    server.shutdown()
    server.server_close()


def test_a_port_that_is_taken_is_no_server_of_ours(client, other_server, monkeypatch):
    """Between the look for a free port and vLLM's start another program may take it, also another
    run's vLLM: that one must not get our weights."""
    monkeypatch.setattr(vllm, "free_port", lambda: int(other_server.url.rpartition(":")[2]))
    with pytest.raises(RuntimeError, match="ended with code 1. Its first error"):
        roll_out(client())


def test_a_server_at_a_url_is_taken_as_it_is(client, other_server):
    """It outlives the run; and each run numbers its weights by a name of its own, so that two runs
    on one server find out. One without our routes is known at the first rollout."""
    first = client()
    roll_out(first)
    second = client(vllm_url=first.url + "/")
    assert roll_out(second)[0]["response_ids"] == vllm_stub.TOKENS
    assert second.model == first.model and second.version != first.version
    second.end()
    assert first.process.poll() is None and not Path(second.folder).exists()
    with pytest.raises(RuntimeError, match="with 501(.|\n)*started as variants/vllm/hosts.md"):
        roll_out(client(vllm_url=other_server.url))


def test_a_run_whose_responses_are_being_sampled_keeps_its_weights(client):
    """Another run at the same server is refused before it has touched anything. Else the first one
    would get the rest of its responses from the other's weights, under its own number. And while
    its rollout is in the air, no thread of its keeps a process alive that has come to its end."""
    before, first = threading.enumerate(), client("late")
    roll_out(first)
    second = client("late", vllm_url=first.url)
    first.launch(MODEL(), TOKENIZER, requests(), 1, 3)
    assert until(lambda: not second.ask("/reset_prefix_cache", {})["success"])
    ours = [thread for thread in threading.enumerate() if thread not in before]
    assert len(ours) >= 3 and all(thread.daemon for thread in ours)
    with pytest.raises(RuntimeError, match="it samples for others"):
        roll_out(second)
    assert len(first.land()) == len(PROMPTS)
    assert first.ask("/weight_info")["weight_version"] == first.version


def test_two_runs_that_hand_over_at_once_both_find_out(client, monkeypatch):
    """The second one's number is there before the first one's weights are: they would be sampled
    from under that number. So the first one takes the number away."""
    first = client()
    roll_out(first)
    second, ask = client(vllm_url=first.url), first.ask

    def meanwhile(path, *given, **how):
        if path == "/collective_rpc":
            second.hand_over(True)
        return ask(path, *given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(first, "end", lambda: None)  # the server is needed once more
        patch.setattr(first, "ask", meanwhile)
        with pytest.raises(RuntimeError, match="another run has handed its weights over meanwhile"):
            roll_out(first)
    with pytest.raises(vllm.Fault, match="of two runs"):
        second.sample(requests()[0], 1, second.sampling_params(TOKENIZER, MODEL()))


BF16 = {"dtype": "bf16", "actor_lora_dim": 4}
NCCL = {"vllm_transfer": "nccl", "GPU": True}
REFUSED = [  # what a server has (None: the run's own), the run's flags, the rule, and words
    ({}, {"max_seq_len": 99}, ""),
    ({}, {"max_seq_len": 100}, "vllm-room"),
    ({}, {"vllm_url": "http://127.0.0.1:1"}, "vllm-url"),
    ({}, {"vllm_url": "127.0.0.1:1"}, "vllm-url http://HOST:PORT"),
    # It answers with JSON of its own; or it is one without VLLM_SERVER_DEV_MODE=1
    ({"alien": [{"status": "ok"}]}, {}, "vllm-url"),
    ({"alien": [{}, 404]}, {}, "vllm-url"),
    ({}, NCCL, "vllm-flags --weight-transfer-config"),
    # The check of the first step would find the gap, but not its cause; with --is_cap not that
    ({"dtype": "bfloat16"}, {}, "vllm-flags --dtype is bfloat16"),
    ({"logprobs-mode": "raw_logprobs"}, {}, "vllm-flags --logprobs-mode processed_logprobs"),
    ({"generation-config": "auto"}, {}, "vllm-flags --generation-config vllm"),
    # On a CPU its engine ends where it reads a prompt in two parts
    ({"in-parts": True}, {}, "vllm-flags --no-enable-chunked-prefill"),
    ({"in-parts": True, "device": "cuda"}, {}, ""),
    # It refuses adapters when all models are loaded. In fp32 they are added to the weights
    ({"dtype": "bfloat16"}, BF16, "vllm-flags --enable-lora"),
    ({"dtype": "bfloat16", "lora": {}}, BF16, ""),
    ({}, {"actor_lora_dim": 4}, ""),
    (None, {"temperature": 0.001}, "vllm-temperature"),  # it would sample at 0.01, and not say so
    (None, {"temperature": 2.5}, "vllm-temperature"),
    (None, {"vllm_python": "/nowhere/python"}, "vllm-python"),
    (None, {"vllm_python": sys.executable}, "vllm-python"),
    (None, {"vllm_folder": "/nowhere"}, "vllm-folder"),
    (None, {"vllm_transfer": "nccl", "vllm_devices": "1"}, "vllm-transfer"),  # on a CPU
    (None, NCCL, "vllm-transfer"),
    (None, {**NCCL, "vllm_devices": "1", **BF16}, "vllm-transfer"),
    (None, {"vllm_flags": "--enforce-eager --logprobs_mode raw_logprobs"}, "vllm-flags"),
    (None, {"vllm_flags": "--dtype=float16"}, "vllm-flags"),
    (None, {"vllm_flags": "--hf-overrides='{"}, "vllm-flags"),
]


@pytest.mark.parametrize("has, flags, refused", REFUSED)
def test_what_vllm_cannot_do_is_refused(client, other_server, monkeypatch, has, flags, refused):
    """Before a model is loaded."""
    if flags.get("GPU"):
        on_gpu(monkeypatch)
    if has is not None:
        other_server.routes.config = {**CONFIG, **has}
        flags = {"vllm_url": other_server.url, **flags}
    rule, _, words = refused.partition(" ")
    with kit.refuses(rule) if rule else contextlib.nullcontext() as caught:
        client(**flags)
    assert not words or words in str(caught.value)


def test_a_request_has_no_more_biases_than_vllms_runner_for_gpus_keeps(client, other_server):
    """There a request with one more would end the worker; its older runner has no limit."""
    config = copy.deepcopy(MODEL().config)
    config.vocab_size = len(TOKENIZER) + vllm.MOST_BIASES + 1
    for env in {}, {"VLLM_USE_V2_MODEL_RUNNER": False}:
        other_server.routes.config = {**CONFIG, "device": "cuda", "env": env}
        engine = client(vllm_url=other_server.url)
        with contextlib.nullcontext() if env else kit.refuses("vllm-unused-ids"):
            assert engine.sampling_params(TOKENIZER, SimpleNamespace(config=config))["logit_bias"]


def test_adapters_of_a_rank_that_vllm_has_no_room_for_are_refused(client):
    """Added to their weights, as in fp32, they may have any rank."""
    model = with_adapters(kit.make_tiny_model(), 513)
    with kit.refuses("vllm-lora-rank"):
        roll_out(client(vllm_dtype="bf16"), model=model)
    assert roll_out(client(), model=model)


def test_weights_are_handed_over_once_for_each_update(client):
    """Evaluation and microscope sample from what the step before has left; the next step, too. If
    another run has handed over its weights meanwhile, ours are loaded again from their files."""
    engine, model = client(), copy.deepcopy(MODEL())

    def loads(updates):
        """Returns how often vLLM had to load weights for a rollout."""
        engine.asked.clear()
        model.global_steps = updates  # as DeepSpeed's engine counts
        assert roll_out(engine, model=model)[0]["response_ids"] == vllm_stub.TOKENS
        return [path for path, _ in engine.asked].count("/collective_rpc")

    assert [loads(0), loads(0), loads(1), loads(1)] == [1, 0, 1, 0]
    engine.ask("/update_weight_version", {"new_version": "elsewhere-7"})
    assert [loads(1), loads(1)] == [1, 0]


def test_a_folder_in_memory_without_room_is_refused(client, monkeypatch):
    """Containers often have 64 MB there. Rank 0 alone would find out, while it writes. Old weights
    are gone before new ones are written."""
    engine, seen = client(), []
    need = sum(weight.numel() for weight in MODEL().parameters()) * 4

    def usage(folder):
        seen.append([*Path(folder).glob("*.safetensors")])
        return SimpleNamespace(free=need - (len(seen) > 2))

    monkeypatch.setattr(vllm.shutil, "disk_usage", usage)
    assert roll_out(engine) and roll_out(engine)
    with kit.refuses("vllm-folder"):
        roll_out(engine)
    assert seen == [[], [], []]


def sampled(off, count=200):
    """A micro-batch in which so many tokens are off by 0.5, of 200 and some padding."""
    scored = torch.full((2, count), -1.0)
    found = scored.clone()
    found[0, :off] -= 0.5
    mask = torch.stack([torch.ones(count), torch.zeros(count)])
    per_token = {"sampled_logprobs": found}
    return SimpleNamespace(old_logprobs=scored, response_mask=mask, per_token=per_token)


@pytest.mark.parametrize(
    "flags, shares, said",
    [
        ({}, [0, 0, 0, 6], "error: step 4: for 6 of 200 tokens .* 0.001 .*first step: 0.0%"),
        ({}, [0, 1, 5, 5], None),
        ({"dtype": "bf16"}, [4, 10, 4, 20], None),  # it rounds
        ({"dtype": "bf16"}, [4, 60], "error: step 2: .* 0.2 .*first step: 2.0%"),
        ({"is_cap": 2.0}, [0, 6, 9], "warning: step 2: for 6 of 200"),
        ({"allow_mismatch": 1}, [0, 6], "warning"),
        ({"is_cap": 2.0}, [60, 60, 60], "warning: step 1: for 60 of 200 tokens .* 0.2"),
        ({"is_band": 1.1}, [0, 6], "warning: step 2"),
        ({"vllm_ahead": 1}, [0, 30, 30, 100], None),  # the rule is one update behind
        ({"vllm_ahead": 1}, [0, 0, 0, 60], "warning: step 4"),
        ({"vllm_dtype": "bf16"}, [4, 20], None),
    ],
)
def test_weights_that_vllm_kept_are_missed(client, capsys, flags, shares, said):
    """At every step, by the tokens that it then samples with other log-probs than scoring has."""
    engine, codes = client(**flags), []
    run = SimpleNamespace(finish=lambda code: codes.append((run.step, code)))
    assert ("without --is_cap" in capsys.readouterr().out) == ("vllm_ahead" in flags)
    for run.step, off in enumerate(shares, start=1):
        engine.check(run, [sampled(off)])
    words = capsys.readouterr().out.replace("\n", " ")
    assert re.search(said, words) if said else not words
    assert codes == ([(len(shares), 1)] if said and "error" in said else [])
    assert words.count("step") <= 2  # it is said once: "step 2", "first step"


def test_the_draws_belong_to_the_request(client):
    """To (seed, step, row, sample) and a `turn`: not to the order in which threads ask, nor to the
    rank. Fillers, of rows below 0, have those of row 0."""
    engine, keys = client(), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-3, 0, 0)]
    asked = [dict(prompt_ids=[7], row=row, sample=i, turn=turn) for row, i, turn in keys]
    for step in 1, 2:
        roll_out(engine, asked, step, count=1)
    params = [body["sampling_params"] for path, body in engine.asked if path == vllm.GENERATE]
    seeds = [each["seed"] for each in params]
    assert len({*seeds}) == 8 and seeds[0] == seeds[4] and seeds[5] == seeds[9]
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_ahead_the_rollout_of_the_step_before_is_trained_on(client):
    """Steps 1 and 2 have the first one. An evaluation between two steps has its own, of the weights
    of now, and takes none away."""
    engine, found = client("late", vllm_ahead=1), []
    for step, row in (0, 9), (1, 1), (2, 2), (3, 3), (0, 9), (4, 4):
        [answer] = roll_out(engine, [dict(prompt_ids=[5], row=row, sample=0)], step)
        found.append(answer["row"])
    assert found == [9, 1, 1, 2, 9, 3] and engine.in_the_air
    assert until(lambda: engine.hand_overs == 6)


@pytest.mark.parametrize("dtype, vllm_dtype", [("fp32", None), ("bf16", None), ("fp32", "bf16")])
def test_young_adapters_are_not_rounded_away(client, dtype, vllm_dtype):
    """In fp32 LoRA's adapters are added to their weights. In 16 bits that would round the sum to
    the old weights: there vLLM gets the frozen weights once, or again after another run's, and then
    the adapters alone, each time in a folder that it has not just had: of that it would warn."""
    model, name = kit.make_tiny_model().to(common.DTYPES[dtype]), "model.layers.0.self_attn.q_proj"
    frozen = model.get_submodule(name).weight.clone()
    layers = lora.adapted_layers(with_adapters(model)).values()
    engine, folders, weights = client(dtype=dtype, vllm_dtype=vllm_dtype), [], []
    for step in 1, 2, 3:
        for layer in layers:
            layer.lora_B["default"].weight.data.add_(1e-5)
        assert roll_out(engine, step=step, model=model)[0]["response_ids"] == vllm_stub.TOKENS
        for path, body in engine.asked:
            if path == "/collective_rpc":
                folders.append("whole")
                weights.append(load_file(f"{body['kwargs']['folder']}/model.safetensors"))
            elif path == "/v1/load_lora_adapter":
                folders.append(body["lora_path"])
                weights.append(load_file(f"{body['lora_path']}/adapter_model.safetensors"))
        engine.asked.clear()
        if step == 2:
            engine.ask("/update_weight_version", {"new_version": "elsewhere-7"})
    alone = "bf16" in (dtype, vllm_dtype)
    assert weights[0][f"{name}.weight"].equal(frozen) == alone
    assert {layer.scaling["default"] for layer in layers} == {4.0}
    if not alone:
        assert folders == ["whole"] * 3
        return
    assert [folder == "whole" for folder in folders] == [True, False, False, True, False]
    assert folders[1] != folders[2] != folders[4]
    b = next(key for key in weights[1] if "lora_B" in key)
    assert 0 < weights[1][b].max() < weights[2][b].max()
    assert {"--enable-lora", "--max-lora-rank=8"} <= {*engine.process.args}


def be_killed(python, notes):
    """A trainer that is killed between two steps; a process that it has forked stays."""
    engine = vllm.Vllm(args_of(vllm_python=python))
    roll_out(engine)
    left = os.fork()
    if left == 0:
        time.sleep(60)
        os._exit(0)
    Path(notes).write_text(json.dumps([engine.process.pid, engine.folder, left]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_no_server(python, tmp_path):
    """Nor the weights, which lie in memory. Something else, as the pool of a --reward_fn, may hold
    the pipe to the server open."""
    notes = tmp_path / "notes"
    assert kit.fork(be_killed, 1, python, str(notes), meet="never").codes == [-9]
    process, folder, left = json.loads(notes.read_text())
    try:
        assert until(lambda: not is_there(process)) and not Path(folder).exists()
        assert is_there(left)
    finally:
        os.kill(left, signal.SIGKILL)


def on_two_ranks(python, fault, shared=1):
    """Returns this rank's responses, or what was said. shared: how many ranks share each layer."""
    os.environ["VLLM_STUB"] = fault
    rank = torch.distributed.get_rank()
    vllm.ranks.tensor_parallel_size = lambda: shared
    if fault == "no-port":
        vllm.free_port = lambda: os.listdir("/nowhere")
    if rank != (fault == "on-rank-1"):
        python = "/nowhere/python"
    row = rank // shared
    mine = [dict(prompt_ids=[5 + row] * (1 + row), row=row, sample=i) for i in range(1 + row)]
    try:
        engine = vllm.Vllm(args_of(vllm_python=python))
        for _ in range(shared):
            rows = roll_out(engine, mine, count=2)
        engine.end()
        return [*rows, engine.seconds]
    except (RuntimeError, Refused) as error:
        return str(error)


def test_rank_0_asks_for_all_ranks(python):
    """Each gets the answers to its own requests, however many it has; and an error is said on all:
    a rank that heard nothing would wait. vLLM need not be where the other ranks are."""
    numbers = []  # of the requests, by which the stand-in's answers differ
    for rank, (*rows, seconds) in enumerate(kit.on_ranks(on_two_ranks, 2, python, "counts")):
        assert [row["prompt_ids"] for row in rows] == [[5 + rank] * (1 + rank)] * (1 + rank)
        assert [row["sample"] for row in rows] == [*range(1 + rank)] and seconds
        numbers += [row["response_ids"][0] for row in rows]
    assert {*numbers} == {0, 1, 2}
    for fault, words in (
        ("killed", "ended with code -9"),
        ("no-port", "could not be started, asked, or sent the weights: FileNotFoundError"),
        ("on-rank-1", "--vllm_python /nowhere/python"),
    ):
        first, second = kit.on_ranks(on_two_ranks, 2, python, fault)
        assert first == second and words in first


def test_ranks_that_share_each_layer_train_on_the_same_tokens(python):
    """With --tensor_parallel_size 2 both have the same requests, which vLLM answers once: that of
    the second rollout is its second one."""
    first, second = kit.on_ranks(on_two_ranks, 2, python, "counts", 2)
    assert first == second and [row["response_ids"][0] for row in first[:-1]] == [1]


def command_in(folder, model, **flags):
    """Applies the variant to a copy in `folder`. Returns the flags of a short run of its ppo.py,
    which starts from a model."""
    runner.apply("vllm", folder / "tree")
    models = kit.save_trained(folder / "models", model)
    words = f"""--preset toy --data_path {kit.base()}/data --data_split 1,1,1 --log_steps 1
        --actor_model_name_or_path {models}/actor --critic_model_name_or_path {models}/judge
        --per_device_generation_batch_size 8 --per_device_training_batch_size 8
        --num_eval_prompts 4 --num_warmup_steps 0 --output_dir {folder}/run""".split()
    return words + [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["keeps", "model"])
def test_a_run_whose_vllm_keeps_old_weights_is_stopped(python, real_model, tmp_path, fault):
    """The number of the hand-over comes back as it should, and the first step is right."""
    flags = dict(max_steps=3, actor_learning_rate=1e-3, max_answer_seq_len=16, vllm_python=python)
    given = str(tmp_path / "tree"), "ppo", command_in(tmp_path, real_model, **flags)
    env = {"VLLM_STUB": fault}
    done = kit.fork(kit.call_of_tree, 1, *given, cwd=given[0], meet="", env=env)
    words = "error: step 2: (.|\n)*vLLM has kept weights of an earlier update"
    assert bool(re.search(words, done.out)) == done.code == (fault == "keeps"), done


# --------------------------------------------------------------------------------------------------
# With vLLM itself
# --------------------------------------------------------------------------------------------------
LONG = 150  # tokens of a prompt: vLLM caches the keys and values of whole blocks of 128 on a CPU
SIZES = dict(max_seq_len=LONG + 50, max_answer_seq_len=24, vllm_timeout=600)


@pytest.fixture(scope="module")
def real_python():
    if not variants.VLLM.exists():
        pytest.skip(variants.NO_VLLM)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return str(variants.VLLM)


@pytest.fixture(scope="module")
def real_model():
    """A random Llama with heads of 32, since vLLM's kernels for a CPU know none of 8. Head and
    embeddings are tied, as in the toy's model: that is where vLLM by itself keeps an old head."""
    torch.manual_seed(0)
    shape = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, initializer_range=0.2)
    shape |= dict(vocab_size=len(TOKENIZER), max_position_embeddings=256, tie_word_embeddings=True)
    model = LlamaForCausalLM(kit.tiny_config(**shape)).eval()
    with torch.no_grad():
        model.lm_head.weight[TOKENIZER.eos_token_id] *= 2  # responses end at all lengths
    return model


@pytest.fixture(scope="module")
def real(real_python, real_model):
    """The address of a vLLM with this model, which serves all tests of this file."""
    engine = vllm.Vllm(args_of(vllm_python=real_python, vllm_flags="--enforce-eager", **SIZES))
    roll_out(engine, model=real_model)
    yield engine.url
    engine.process.stdin.close()
    assert engine.process.wait(30) is not None and not Path(engine.folder).exists()


def long_requests(count=8):
    """Prompts with one beginning, which vLLM keeps."""
    same = torch.arange(LONG - 8) % 500 + 20
    return requests([[*same.tolist(), *range(20, 21 + i)] for i in range(count)])


def largest_gap(model, rows, temperature=1.0, allowed=None):
    """The largest difference of vLLM's log-probs and those of one forward of transformers.

    allowed: from logits (R, V) to bool (R, V); of these tokens.
    """
    gaps = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float() / temperature
        if allowed is not None:
            logits = logits.where(allowed(logits), -torch.inf)
        own = logits.log_softmax(-1).gather(-1, ids[0, -len(logits) :, None])[:, 0]
        gaps.append((own - torch.tensor(row["per_token"]["sampled_logprobs"])).abs().max().item())
    return max(gaps)


def likeliest(logits):
    """Which tokens --top_k 5 keeps."""
    return logits >= logits.topk(5).values[:, -1:]


def nucleus(logits):
    """Which tokens --top_p 0.6 keeps."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < 0.6
    return torch.zeros_like(kept).scatter(-1, order, kept)


def known(logits):
    """Which tokens the tokenizer knows: all but eight."""
    return (torch.arange(logits.shape[-1]) < logits.shape[-1] - 8).expand_as(logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, allowed",
    [
        ({}, None),
        ({"temperature": 1.5}, None),
        # mu is the distribution that was drawn from, so that --is_cap has the right weights
        ({"top_k": 5}, likeliest),
        ({"top_p": 0.6}, nucleus),
        # embeddings are often padded, and here the model likes these ids
        ({}, known),
    ],
)
def test_vllms_log_probs_are_those_of_scoring(real, real_model, monkeypatch, flags, allowed):
    """In fp32, of what is drawn from. A response ends with EOS, which belongs to it, or is cut.
    Equal requests get equal tokens, however many are in the air; other weights give others."""
    engine = vllm.Vllm(args_of(vllm_url=real, **flags, **SIZES))
    model, temperature = copy.deepcopy(real_model), flags.get("temperature", 1.0)
    if allowed is known:
        knowing = kit.Knowing(TOKENIZER, range(len(TOKENIZER) - 8))
        monkeypatch.setattr(sys.modules[__name__], "TOKENIZER", knowing)
        model.lm_head.weight.data[-8:] *= 4

    def rows(step, size):
        return roll_out(engine, long_requests(24), step, size, model)

    found = rows(1, 24)
    assert largest_gap(model, found, temperature, allowed) < 1e-4
    assert not allowed or largest_gap(model, found) > 0.1
    for row in found:
        *before, last = row["response_ids"]
        assert TOKENIZER.eos_token_id not in before
        assert row["ended"] == float(last == TOKENIZER.eos_token_id)
        assert row["ended"] or len(row["response_ids"]) == 24
        assert len(row["per_token"]["sampled_logprobs"]) == len(row["response_ids"])
    again, others = rows(1, 3), rows(2, 24)
    model.lm_head.weight.data *= 1.1  # it is the embeddings, too
    moved = rows(1, 24)
    ids = [[row["response_ids"] for row in each] for each in (found, again, others, moved)]
    assert ids[0] == ids[1] not in ids[2:]
    assert largest_gap(model, moved, temperature, allowed) < 1e-4


@pytest.mark.slow
def test_vllm_samples_from_adapters_that_it_was_handed_by_themselves(
    real_python, real_model, monkeypatch
):
    """As its LoRARequest: in fp32, where we would add them to the weights, the log-probs are those
    of our forward, which computes them beside the weights; and the next hand-over replaces them.
    Adapters that vLLM has loaded are its own: it does not read the folder at each token."""
    engine = vllm.Vllm(args_of(vllm_python=real_python, vllm_flags="--enforce-eager", **SIZES))
    engine.dtype = "fp32, with adapters by themselves"
    monkeypatch.setitem(common.DTYPES, engine.dtype, torch.float32)
    model, found, hand_over = with_adapters(copy.deepcopy(real_model)), [], engine.hand_over

    def read_once(written):
        seconds = hand_over(written)
        shutil.rmtree(engine.adapters)
        return seconds

    engine.hand_over = read_once
    try:
        for step in (1, 2, 3):
            for layer in lora.adapted_layers(model).values():
                b = layer.lora_B["default"].weight.data
                b.add_(0.05 * torch.randn(b.shape, generator=torch.manual_seed(step)))
            found.append(roll_out(engine, long_requests(), count=8, model=model))
            assert largest_gap(model, found[-1]) < 1e-4
            assert largest_gap(real_model, found[-1]) > 0.1
    finally:
        engine.end()
    assert engine.lora_rank == 4 and found[0] != found[1] != found[2]


def title_of(process):
    """Returns what a process calls itself, "" of one that has just ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_run_whose_vllm_is_killed_ends_in_words_and_goes_on(
    real_python, real_model, tmp_path, victim
):
    """Nothing of that vLLM is left: no process, and no weights. --resume starts another one. At
    each step's weights sampling and scoring agree to 1e-4, as both compute in fp32."""
    flags = dict(max_steps=30, save_steps=2, keep_checkpoints=9, max_answer_seq_len=24)
    flags |= dict(vllm_folder=tmp_path, vllm_python=real_python)
    words = [*command_in(tmp_path, real_model, **flags), "--vllm_flags=--enforce-eager"]

    def start(*more):
        command, where = [sys.executable, "ppo.py", *words, *more], tmp_path / "tree"
        with open(tmp_path / "run.log", "w") as log:
            given = dict(cwd=where, env=kit.environment(), stdout=log, stderr=log)
            return subprocess.Popen(command, **given)

    process, log = start(), tmp_path / "run/metrics.jsonl"
    try:
        assert until(lambda: log.exists() and len(log.read_text().splitlines()) > 3, 300)
        servers = psutil.Process(process.pid).children(recursive=True)
        [found] = [each for each in servers if f"VLLM::{victim}" in title_of(each)]
        found.kill()
        assert process.wait(60) == 1
    finally:
        process.kill()
    assert "vLLM has ended with code" in (tmp_path / "run.log").read_text()
    assert until(lambda: not any(is_there(each.pid) for each in servers))
    assert not list(tmp_path.glob("rollouts-*"))
    assert start("--resume").wait(300) == 0, (tmp_path / "run.log").read_text()[-3000:]
    lines = kit.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(31)]
    assert all(line["sampling_gap"] < 1e-4 for line in lines[1:])
