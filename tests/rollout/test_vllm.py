"""The variant vllm: vLLM samples in place of ppo.roll_out.

What may go wrong is tried with a stand-in for its server (vllm_stub.py). The slow tests are of vLLM
itself, and are skipped where it is not installed: `make vllm`, or VLLM_PYTHON names its Python.
"""

import contextlib
import copy
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
from tools import fork

CLIENT = VARIANTS / "vllm/vllm_rollouts.py"
sys.path.append(str(CLIENT.parent))  # as when both its files lie beside ppo.py
vllm = kit.import_file(CLIENT)
PROMPTS = [5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]


def args_of(**changes):
    flags = dict.fromkeys("vllm_python vllm_url vllm_folder vllm_dtype vllm_devices".split())
    flags |= dict(vllm_flags="", vllm_timeout=20, vllm_ahead=0, vllm_transfer="files", is_cap=0.0)
    flags |= dict(dtype="fp32", seed=1, temperature=1.0, top_p=1.0, top_k=0, actor_lora_dim=0)
    flags |= dict(max_seq_len=32, max_answer_seq_len=8, allow_mismatch=0)
    return SimpleNamespace(**{**flags, "output_dir": os.environ["RLHF_TESTS"], **changes})


def requests(prompts=PROMPTS):
    return [dict(prompt_ids=ids, row=i, sample=0, group=i) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    return vllm_stub.fake_python(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def client(python, monkeypatch):
    """client(fault, flag=...): the run's side, with the stand-in on the other one."""
    made = []

    def make(fault="", **changes):
        monkeypatch.setenv("VLLM_STUB", fault)
        flags = {"vllm_python": python, **changes}
        made.append(vllm.Vllm(args_of(**flags)))
        return made[-1]

    yield make
    for each in made:
        each.end()


def roll_out(engine, model, tokenizer, asked=None, step=1, count=3):
    return engine.roll_out(engine.args, model, tokenizer, asked or requests(), step, count)


def noting(monkeypatch, place, name, note):
    """Has each call of a function noted, by note(its first two arguments), before it is made."""
    function = getattr(place, name)

    def call(*given, **how):
        note(*given[:2])
        return function(*given, **how)

    monkeypatch.setattr(place, name, call)


def on_gpu(monkeypatch):
    gpu = SimpleNamespace(device_name=lambda: "cuda", current_device_name=lambda: "cuda:0")
    monkeypatch.setattr(vllm, "get_accelerator", lambda: gpu)


def is_there(process):
    """Returns whether a process, by its id, is running."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
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
def test_what_comes_back_is_what_a_sampler_returns(
    client, tiny_model, tokenizer, tmp_path, monkeypatch
):
    """The contract of docs/ppo.md. The server has the weights of each rollout's actor, and knows
    nothing of the ranks: vLLM would take their variables for its own."""
    notes = tmp_path / "notes"
    variables = {"RANK": "0", "VLLM_STUB_NOTES": str(notes), "VLLM_API_KEY": "of another server"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    more = dict(vllm_flags="--enforce-eager --seed=3", vllm_devices="7")
    engine = client("late", vllm_dtype="bf16", **more)
    for _ in range(2):
        for request, row in zip(requests(), roll_out(engine, tiny_model, tokenizer)):
            assert request.items() <= row.items() and row["ended"] == 1.0
            assert row["response_ids"] == vllm_stub.TOKENS
            assert row["text"] == tokenizer.decode([7, 8])
            assert row["per_token"] == {"sampled_logprobs": vllm_stub.LOGPROBS}
    assert engine.version == f"{engine.run}-2" and engine.seconds["hand_over_seconds"] > 0
    words, env = json.loads(notes.read_text())
    assert {"--dtype=bfloat16", "--enforce-eager", "--seed=3", "--max-model-len=32"} <= {*words}
    assert "--no-enable-chunked-prefill" in words  # else a long prompt ends its engine on a CPU
    assert "--host=127.0.0.1" in words  # nobody else's host reaches it
    assert "RANK" not in env and env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == "7" and "VLLM_API_KEY" not in env


def test_by_nccl_vllm_starts_from_files_and_then_gets_tensors(
    client, tiny_model, tokenizer, monkeypatch
):
    """Once for each update, by the names that its files have. (What a sender does with them:
    test_vllm_nccl.py.)"""
    sent, senders = [], []

    def new_sender(ask, device, timeout):
        senders.append(device)
        return SimpleNamespace(send=send)

    def send(tensors):
        sent.append({name: tensor.clone() for name, tensor in tensors.items()})

    on_gpu(monkeypatch)
    monkeypatch.setattr(vllm.vllm_nccl, "Sender", new_sender)
    actor, engine = copy.deepcopy(tiny_model), client(vllm_transfer="nccl", vllm_devices="1")
    for updates in 0, 1, 1, 2:
        actor.global_steps = updates
        torch.nn.init.constant_(actor.model.norm.weight, 1.0 + updates)
        roll_out(engine, actor, tokenizer)
    assert senders == ["cuda:0"] and [one["model.norm.weight"][0] for one in sent] == [2.0, 3.0]
    assert sent[0].keys() == load_file(f"{engine.folder}/model.safetensors").keys()
    assert engine.version == f"{engine.run}-3"


FAULTS = {
    "ends": r"vLLM has ended with code 1. Its first error is in /.*/vllm.log",
    "never": "vLLM did not start within --vllm_timeout 5 seconds",
    "killed": "vLLM has ended with code -9. Its server, engine or worker failed",
    "orphaned": "vLLM has ended with code -9. Its server, engine or worker failed",
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
def test_what_is_wrong_with_vllm_is_said_in_words(
    fault, client, tiny_model, tokenizer, monkeypatch, tmp_path
):
    """And nothing is left of it: no process, no folder of weights. What it said is in its log."""
    monkeypatch.setattr(vllm, "GRACE", 1)
    limit = {"never": 5, "hangs": 8}.get(fault, 20)
    engine = client(fault, vllm_timeout=limit, output_dir=tmp_path)
    with pytest.raises(RuntimeError, match=f"{FAULTS[fault]}(.|\n)*--resume goes on"):
        roll_out(engine, tiny_model, tokenizer)
    assert engine.process.wait(5) is not None and not Path(engine.folder).exists()
    said = (tmp_path / "vllm.log").read_text()
    assert ("ValueError: no such model" in said) == (fault == "ends")


@pytest.mark.slow
def test_a_response_may_wait_for_others_longer_than_the_timeout(client, tiny_model, tokenizer):
    """vLLM answers some requests at a time. As long as responses come, it does not hang."""
    engine = client("in-line")
    roll_out(engine, tiny_model, tokenizer)
    engine.args.vllm_timeout, began = 2, time.time()
    rows = roll_out(engine, tiny_model, tokenizer, None, 2, len(PROMPTS))
    assert len(rows) == len(PROMPTS) and time.time() - began > 2 * engine.args.vllm_timeout


def test_a_server_elsewhere_that_is_stopped_while_it_samples_is_missed(
    client, tiny_model, tokenizer, monkeypatch
):
    """It no longer listens, and waits for our request: without a look at it the run would wait for
    as long as --vllm_timeout says."""
    monkeypatch.setattr(vllm, "GRACE", 0.2)
    theirs = client("orphaned")
    theirs.start()
    engine = client(vllm_url=theirs.url, vllm_timeout=60)
    with pytest.raises(RuntimeError, match=f"{theirs.url} no longer listens(.|\n)*--resume"):
        roll_out(engine, tiny_model, tokenizer, requests()[:1])
    assert theirs.process.poll() is None and until(lambda: not Path(engine.folder).exists())


@pytest.mark.parametrize("others", [None, TimeoutError()], ids=["accepted", "busy"])
def test_a_server_that_refuses_now_and_then_goes_on(client, monkeypatch, others):
    """It has too many connections, and is sound: two looks in a row must find nobody."""
    looks = iter([ConnectionRefusedError(), others] * 4)
    engine = client()
    engine.url, future = "http://127.0.0.1:1", Future()
    engine.in_the_air = None, None, None, future
    monkeypatch.setattr(vllm, "GRACE", 0)

    def connect(*_, **__):
        if (found := next(looks, "last")) == "last":
            engine.ended = True
        elif found:
            raise found
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(vllm.socket, "create_connection", connect)
    engine.watch()
    assert not future.done() and Path(engine.folder).exists()


# flags of a sound server
CONFIG = {
    "dtype": "float32",
    "logprobs-mode": "processed_logprobs",
    "generation-config": "vllm",
}


@pytest.fixture
def other_server():
    """The address of another program's server, whose Routes say what it answers to a GET."""

    class Routes(vllm_stub.Routes):
        """Another vLLM, with a model of another name."""

        name, room, config = "another", 99, CONFIG

        def do_POST(self):
            self.answer({"error": "no such route"}, 501)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", routes=Routes)
    server.shutdown()
    server.server_close()


def test_a_port_that_is_taken_is_no_server_of_ours(
    client, tiny_model, tokenizer, other_server, monkeypatch
):
    """Between the look for a free port and vLLM's start another program may take it, also another
    run's vLLM: that one must not get our weights."""
    monkeypatch.setattr(vllm, "free_port", lambda: int(other_server.url.rpartition(":")[2]))
    with pytest.raises(RuntimeError, match="ended with code 1. Its first error"):
        roll_out(client(), tiny_model, tokenizer)


def test_a_server_at_a_url_is_taken_as_it_is(client, tiny_model, tokenizer, other_server):
    """It outlives the run; and each run numbers its weights by a name of its own, so that two runs
    on one server find out. One without our routes is known at the first rollout."""
    first = client()
    roll_out(first, tiny_model, tokenizer)
    second = client(vllm_url=first.url + "/")
    assert roll_out(second, tiny_model, tokenizer)[0]["response_ids"] == vllm_stub.TOKENS
    assert second.model == first.model and second.version != first.version
    second.end()
    assert first.process.poll() is None and not Path(second.folder).exists()
    with pytest.raises(RuntimeError, match="with 501(.|\n)*started as variants/vllm/hosts.md"):
        roll_out(client(vllm_url=other_server.url), tiny_model, tokenizer)


def test_a_run_whose_responses_are_being_sampled_keeps_its_weights(client, tiny_model, tokenizer):
    """Another run at the same server is refused before it has touched anything. Else the first one
    would get the rest of its responses from the other's weights, under its own number."""
    first = client("late")
    roll_out(first, tiny_model, tokenizer)
    second = client("late", vllm_url=first.url)
    first.launch(tiny_model, tokenizer, requests(), 1, 3)
    assert until(lambda: first.version.endswith("-2") and second.ask("/load")["open"])
    with pytest.raises(RuntimeError, match="it samples for others"):
        roll_out(second, tiny_model, tokenizer)
    assert len(first.land()) == len(PROMPTS)
    assert first.ask("/weight_info")["weight_version"] == first.version
    assert first.ask("/load")["loads"] == 2  # none was the second run's


def test_two_runs_that_hand_over_at_once_both_find_out(client, tiny_model, tokenizer, monkeypatch):
    """The second one's number is there before the first one's weights are: they would be sampled
    from under that number. So the first one takes the number away."""
    first = client()
    roll_out(first, tiny_model, tokenizer)
    second, ask = client(vllm_url=first.url), first.ask

    def meanwhile(path, *given, **how):
        if path == "/collective_rpc":
            second.hand_over(True)
        return ask(path, *given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(first, "end", lambda: None)  # the server is needed once more
        patch.setattr(first, "ask", meanwhile)
        with pytest.raises(RuntimeError, match="another run has handed its weights over meanwhile"):
            roll_out(first, tiny_model, tokenizer)
    given = requests()[0], 1, second.sampling_params(tokenizer, tiny_model)
    with pytest.raises(vllm.Fault, match="of two runs"):
        second.sample(*given)


def test_a_rollout_in_the_air_keeps_no_run_alive(client, tiny_model, tokenizer):
    """With --vllm_ahead 1 a run may end while vLLM samples. Before Python closes vLLM's stdin it
    waits for all threads that are no daemons, and for those of concurrent.futures."""
    engine, before = client("late", vllm_ahead=1), threading.enumerate()
    engine.launch(tiny_model, tokenizer, requests(), 1, 3)

    def ours():
        return [thread for thread in threading.enumerate() if thread not in before]

    assert until(lambda: len(ours()) >= 4)  # one for the rollout, and one for each response
    assert all(thread.daemon for thread in ours())
    assert engine.land()


BF16 = {"dtype": "bf16", "actor_lora_dim": 4}
AT_URL = [  # what a server has, the run's flags, and how it is refused: the rule, and words
    ({}, {"max_seq_len": 99}, ""),
    ({}, {"max_seq_len": 100}, "vllm-room"),
    ({}, {"vllm_url": "http://127.0.0.1:1"}, "vllm-url"),
    ({}, {"vllm_url": "127.0.0.1:1"}, "vllm-url http://HOST:PORT"),
    ({}, {"vllm_transfer": "nccl", "GPU": True}, "vllm-flags --weight-transfer-config"),
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
]
OF_OUR_OWN = [  # likewise, of a server that the run starts
    ({"temperature": 0.001}, "vllm-temperature"),  # vLLM would sample at 0.01, and not say so
    ({"temperature": 2.5}, "vllm-temperature"),
    ({"vllm_python": "/nowhere/python"}, "vllm-python"),
    ({"vllm_python": sys.executable}, "vllm-python"),
    ({"vllm_folder": "/nowhere"}, "vllm-folder"),
    ({"vllm_transfer": "nccl", "vllm_devices": "1"}, "vllm-transfer"),  # on a CPU
    ({"vllm_transfer": "nccl", "GPU": True}, "vllm-transfer"),
    ({"vllm_transfer": "nccl", "vllm_devices": "1", **BF16, "GPU": True}, "vllm-transfer"),
    ({"vllm_flags": "--enforce-eager --logprobs_mode raw_logprobs"}, "vllm-flags"),
    ({"vllm_flags": "--dtype=float16"}, "vllm-flags"),
    ({"vllm_flags": "--hf-overrides='{"}, "vllm-flags"),
]


@pytest.mark.parametrize("has, flags, refused", AT_URL + [(None, *row) for row in OF_OUR_OWN])
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


@pytest.mark.parametrize("answer", [{}, {"status": "ok"}])
def test_a_server_at_a_url_that_is_not_vllm_is_refused(client, other_server, monkeypatch, answer):
    """It answers with JSON of its own; or it is one without VLLM_SERVER_DEV_MODE=1."""

    def reply(route):
        vllm_stub.Routes.answer(route, answer, 200 if answer else 404)

    monkeypatch.setattr(other_server.routes, "do_GET", reply, raising=False)
    with kit.refuses("vllm-url"):
        client(vllm_url=other_server.url)


def test_a_request_has_no_more_biases_than_vllms_runner_for_gpus_keeps(
    client, tiny_model, tokenizer, other_server
):
    """There a request with one more would end the worker; its older runner has no limit."""
    config = copy.deepcopy(tiny_model.config)
    config.vocab_size = len(tokenizer) + vllm.MOST_BIASES + 1
    for older in False, True:
        env = {"VLLM_USE_V2_MODEL_RUNNER": False} if older else {}
        other_server.routes.config = {**CONFIG, "device": "cuda", "env": env}
        engine = client(vllm_url=other_server.url)
        with contextlib.nullcontext() if older else kit.refuses("vllm-unused-ids"):
            model = SimpleNamespace(config=config)
            assert engine.sampling_params(tokenizer, model)["logit_bias"]


def test_adapters_of_a_rank_that_vllm_has_no_room_for_are_refused(client, tokenizer):
    """Added to their weights, as in fp32, they may have any rank."""
    model = kit.make_tiny_model()
    lora.add_adapters(model, SimpleNamespace(lora_dim=513, lora_alpha=16, seed=1), "random")
    with kit.refuses("vllm-lora-rank"):
        roll_out(client(vllm_dtype="bf16"), model, tokenizer)
    assert roll_out(client(), model, tokenizer)


def test_weights_are_handed_over_once_for_each_update(client, tiny_model, tokenizer, monkeypatch):
    """Evaluation and microscope sample from what the step before has left; the next step, too. If
    another run has handed over its weights meanwhile, ours are loaded again from their files. The
    old files are gone before new ones are written: the folder is in memory."""
    engine, asked, saved, model = client(), [], [], copy.deepcopy(tiny_model)
    noting(monkeypatch, engine, "ask", lambda path, *_: asked.append(path))
    files = lambda *_: saved.append([*Path(engine.folder).glob("*.safetensors")])  # noqa: E731
    noting(monkeypatch, vllm.saving, "save_model", files)

    def loads(updates):
        """Returns how often vLLM had to load weights for a rollout."""
        asked.clear()
        model.global_steps = updates  # as DeepSpeed's engine counts
        assert roll_out(engine, model, tokenizer)[0]["response_ids"] == vllm_stub.TOKENS
        return asked.count("/collective_rpc")

    assert [loads(0), loads(0), loads(1), loads(1)] == [1, 0, 1, 0]
    engine.ask("/update_weight_version", {"new_version": "elsewhere-7"})
    assert [loads(1), loads(1)] == [1, 0] and saved == [[], []]


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
        ({"vllm_ahead": 1}, [0, 0, 60], None),
        ({"vllm_dtype": "bf16"}, [4, 20], None),
    ],
)
def test_weights_that_vllm_kept_are_missed(client, capsys, flags, shares, said):
    """At every step, by the tokens that it then samples with other log-probs than scoring has."""
    engine, run = client(**flags), SimpleNamespace(finish=lambda code: sys.exit(code))
    assert ("without --is_cap" in capsys.readouterr().out) == ("vllm_ahead" in flags)
    stopped = None
    for run.step, off in enumerate(shares, start=1):
        assert not stopped
        try:
            engine.check(run, [sampled(off)])
        except SystemExit as left:
            stopped = left.code
    words = capsys.readouterr().out.replace("\n", " ")
    assert re.search(said, words) if said else not words
    assert stopped == (1 if said and "error" in said else None)
    assert words.count("step") <= 2  # it is said once: "step 2", "first step"


def test_a_folder_in_memory_without_room_is_refused(client, tiny_model, tokenizer, monkeypatch):
    """Containers often have 64 MB there. Rank 0 alone would find out, while it writes."""
    engine, free = client(), sum(weight.numel() for weight in tiny_model.parameters()) * 4 - 1
    monkeypatch.setattr(vllm.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with kit.refuses("vllm-folder"):
        roll_out(engine, tiny_model, tokenizer)
    free += 1
    assert roll_out(engine, tiny_model, tokenizer)


def test_the_draws_belong_to_the_request(client, tiny_model, tokenizer, monkeypatch):
    """To (seed, step, row, sample) and a `turn`: not to the order in which threads ask, nor to the
    rank. Fillers, of rows below 0, have those of row 0."""
    engine, seeds = client(), []

    def note(path, body=None):
        if path == vllm.GENERATE:
            seeds.append(body["sampling_params"]["seed"])

    noting(monkeypatch, engine, "ask", note)
    keys = [(1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (1, -3, 0, 0)]
    for step, row, sample, turn in keys:
        asked = [dict(prompt_ids=[7], row=row, sample=sample, turn=turn)]
        roll_out(engine, tiny_model, tokenizer, asked, step)
    *different, filler = seeds
    assert len({*different}) == 5 and filler == seeds[0]
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_ahead_the_rollout_of_the_step_before_is_trained_on(client, tiny_model, tokenizer):
    """Steps 1 and 2 have the first one. An evaluation between two steps has its own, of the weights
    of now, and takes none away."""
    engine = client("late", vllm_ahead=1)

    def at(step, row):
        mine = [dict(prompt_ids=[5], row=row, sample=0)]
        return [each["row"] for each in roll_out(engine, tiny_model, tokenizer, mine, step)]

    found = [at(0, 9), at(1, 1), at(2, 2), at(3, 3), at(0, 9), at(4, 4)]
    assert found == [[9], [1], [1], [2], [9], [3]] and engine.in_the_air
    assert until(lambda: engine.hand_overs == 6)


@pytest.mark.parametrize("dtype, vllm_dtype", [("fp32", None), ("bf16", None), ("fp32", "bf16")])
def test_young_adapters_are_not_rounded_away(client, tokenizer, monkeypatch, dtype, vllm_dtype):
    """In fp32 LoRA's adapters are added to their weights. In 16 bits that would round the sum to
    the old weights: there vLLM gets the frozen weights once, and then the adapters alone."""
    model = kit.make_tiny_model().to(common.DTYPES[dtype])
    frozen = {name: weight.clone() for name, weight in model.state_dict().items()}
    lora.add_adapters(model, SimpleNamespace(lora_dim=4, lora_alpha=16, seed=1), "random")
    engine, weights, folders = client(dtype=dtype, vllm_dtype=vllm_dtype), [], []
    layers, alone = lora.adapted_layers(model).values(), (dtype, vllm_dtype) != ("fp32", None)
    whole, thin = "model.safetensors", "adapter_model.safetensors"

    def note(path, body=None):
        if path in ("/collective_rpc", "/v1/load_lora_adapter"):
            folders.append(body["lora_path"] if "lora" in path else body["kwargs"]["folder"])
            weights.append(load_file(Path(folders[-1], thin if "lora" in path else whole)))

    noting(monkeypatch, engine, "ask", note)
    for step in (1, 2):
        with torch.no_grad():
            for layer in layers:
                layer.lora_B["default"].weight.add_(1e-5)
        rows = roll_out(engine, model, tokenizer, step=step)
        assert rows[0]["response_ids"] == vllm_stub.TOKENS
    name = next(name for name in frozen if "q_proj.weight" in name)
    assert torch.equal(weights[0][name], frozen[name]) == alone
    assert {layer.scaling["default"] for layer in layers} == {4.0}
    assert [name in each for each in weights] == ([True, False, False] if alone else [True, True])
    if alone:
        assert folders[1] != folders[2]  # vLLM warns of a folder that it has had
        b = next(key for key in weights[1] if "lora_B" in key)
        assert 0 < weights[1][b].max() < weights[2][b].max()
        assert {"--enable-lora", "--max-lora-rank=8"} <= {*engine.process.args}
        engine.ask("/update_weight_version", {"new_version": "elsewhere-7"})  # another run's
        roll_out(engine, model, tokenizer, step=3)
        assert [name in each for each in weights[3:]] == [True, False]


def be_killed(python, notes):
    """A trainer that is killed between two steps; a process that it has forked stays."""
    engine = vllm.Vllm(args_of(vllm_python=python))
    model, tokenizer = kit.make_tiny_model(), folders.load_tokenizer(kit.TOKENIZER)
    roll_out(engine, model, tokenizer)
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
    done = kit.fork(be_killed, 1, python, str(notes), meet="never")
    assert done.codes == [-9]
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
    model, tokenizer = kit.make_tiny_model(), folders.load_tokenizer(kit.TOKENIZER)
    row = rank // shared
    mine = [dict(prompt_ids=[5 + row] * (1 + row), row=row, sample=i) for i in range(1 + row)]
    engine = None
    try:
        engine = vllm.Vllm(args_of(vllm_python=python))
        for _ in range(shared):
            rows = roll_out(engine, model, tokenizer, mine, 1, 2)
        return [*rows, engine.seconds]
    except (RuntimeError, Refused) as error:
        return str(error)
    finally:
        if engine and engine.process:
            engine.end()


def test_rank_0_asks_for_all_ranks(python):
    """Each gets the answers to its own requests, however many it has; and an error is said on all:
    a rank that heard nothing would wait. vLLM need not be where the other ranks are."""
    for rank, found in enumerate(kit.on_ranks(on_two_ranks, 2, python, "")):
        *rows, seconds = found
        assert [row["prompt_ids"] for row in rows] == [[5 + rank] * (1 + rank)] * (1 + rank)
        assert [row["sample"] for row in rows] == [*range(1 + rank)] and seconds
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["keeps", "model"])
def test_a_run_whose_vllm_keeps_old_weights_is_stopped(python, real_model, tmp_path, fault):
    """The number of the hand-over comes back as it should, and the first step is right."""
    tree, flags = tmp_path / "tree", flags_of_runs(tmp_path, real_model)
    runner.apply("vllm", tree)
    argv = f"""{flags} --max_steps 3 --actor_learning_rate 1e-3 --max_answer_seq_len 16
        --per_device_generation_batch_size 8 --per_device_training_batch_size 8
        --vllm_python {python} --output_dir {tmp_path}/run""".split()
    given, env = (str(tree), "ppo", argv), {"VLLM_STUB": fault}
    done = kit.fork(kit.call_of_tree, 1, *given, cwd=tree, meet="", env=env)
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
    return str(variants.VLLM)


@pytest.fixture(scope="module")
def real_model():
    """A random Llama with heads of 32, since vLLM's kernels for a CPU know none of 8. Head and
    embeddings are tied, as in the toy's model: that is where vLLM by itself keeps an old head."""
    torch.manual_seed(0)
    tokenizer = folders.load_tokenizer(kit.TOKENIZER)
    shape = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, initializer_range=0.2)
    shape |= dict(vocab_size=len(tokenizer), max_position_embeddings=256, tie_word_embeddings=True)
    model = LlamaForCausalLM(kit.tiny_config(**shape)).eval()
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 2  # responses end at all lengths
    return model


@pytest.fixture(scope="module")
def real(real_python, real_model):
    """The address of a vLLM with this model, which serves all tests of this file."""
    flags = dict(vllm_python=real_python, vllm_flags="--enforce-eager", **SIZES)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    engine, tokenizer = vllm.Vllm(args_of(**flags)), folders.load_tokenizer(kit.TOKENIZER)
    roll_out(engine, real_model, tokenizer)
    yield engine.url
    engine.process.stdin.close()
    assert engine.process.wait(30) is not None and not Path(engine.folder).exists()


def long_requests(count=8):
    """Prompts with one beginning, which vLLM keeps."""
    same = torch.arange(LONG - 8) % 500 + 20
    return requests([[*same.tolist(), *range(20, 21 + i)] for i in range(count)])


def largest_gap(model, row, temperature=1.0, allowed=None):
    """The largest difference of vLLM's log-probs and those of one forward of transformers.

    allowed: from logits (R, V) to bool (R, V); of these tokens.
    """
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float() / temperature
    if allowed is not None:
        logits = logits.where(allowed(logits), -torch.inf)
    own = logits.log_softmax(-1).gather(-1, ids[0, -len(logits) :, None])[:, 0]
    return (own - torch.tensor(row["per_token"]["sampled_logprobs"])).abs().max().item()


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
        ({"temperature": 0.7}, None),
        ({}, None),
        ({"temperature": 1.5}, None),
        # mu is the distribution that was drawn from, so that --is_cap has the right weights
        ({"top_k": 5}, likeliest),
        ({"top_p": 0.6}, nucleus),
        # embeddings are often padded, and here the model likes these ids
        ({}, known),
    ],
)
def test_vllms_log_probs_are_those_of_scoring(real, real_model, tokenizer, flags, allowed):
    """In fp32, of what is drawn from. A response ends with EOS, which belongs to it, or is cut.
    Equal requests get equal tokens, however many are in the air."""
    engine = vllm.Vllm(args_of(vllm_url=real, **flags, **SIZES))
    model, temperature = copy.deepcopy(real_model), flags.get("temperature", 1.0)
    if allowed is known:
        tokenizer = kit.Knowing(tokenizer, range(len(tokenizer) - 8))
        model.lm_head.weight.data[-8:] *= 4

    def rows(step, size):
        return roll_out(engine, model, tokenizer, long_requests(24), step, size)

    found = rows(1, 24)
    assert max(largest_gap(model, row, temperature, allowed) for row in found) < 1e-4
    if allowed:
        assert max(largest_gap(model, row) for row in found) > 0.1
    for row in found:
        *before, last = row["response_ids"]
        assert tokenizer.eos_token_id not in before
        assert row["ended"] == float(last == tokenizer.eos_token_id)
        assert row["ended"] or len(row["response_ids"]) == 24
        assert len(row["per_token"]["sampled_logprobs"]) == len(row["response_ids"])
    ids = [[row["response_ids"] for row in each] for each in (found, rows(1, 3), rows(2, 24))]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.slow
def test_vllm_samples_from_adapters_that_it_was_handed_by_themselves(
    real_python, real_model, tokenizer, monkeypatch
):
    """As its LoRARequest: in fp32, where we would add them to the weights, the log-probs are those
    of our forward, which computes them beside the weights; and the next hand-over replaces them."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    flags = dict(vllm_python=real_python, vllm_flags="--enforce-eager", **SIZES)
    engine = vllm.Vllm(args_of(**flags))
    engine.dtype = "fp32, with adapters by themselves"
    monkeypatch.setitem(common.DTYPES, engine.dtype, torch.float32)
    model, found = copy.deepcopy(real_model), []
    lora.add_adapters(model, SimpleNamespace(lora_dim=4, lora_alpha=16, seed=1), "random")
    hand_over = engine.hand_over

    def read_once(written):
        """Adapters that vLLM has loaded are its own: it does not read the folder at each token."""
        seconds = hand_over(written)
        shutil.rmtree(engine.adapters)
        return seconds

    monkeypatch.setattr(engine, "hand_over", read_once)
    try:
        for step in (1, 2, 3):
            with torch.no_grad():
                for layer in lora.adapted_layers(model).values():
                    b = layer.lora_B["default"].weight
                    b.add_(0.05 * torch.randn(b.shape, generator=torch.manual_seed(step)))
            found.append(roll_out(engine, model, tokenizer, long_requests(), 1, 8))
            assert max(largest_gap(model, row) for row in found[-1]) < 1e-4
            assert max(largest_gap(real_model, row) for row in found[-1]) > 0.1
    finally:
        engine.end()
    assert engine.lora_rank == 4 and found[0] != found[1] != found[2]


def flags_of_runs(folder, model):
    """Returns the flags of short runs that start from `model`, which is saved there."""
    models = kit.save_trained(folder / "models", model)
    return f"""--preset toy --data_path {kit.base()}/data --data_split 1,1,1 --max_steps 4
        --actor_model_name_or_path {models}/actor --critic_model_name_or_path {models}/judge
        --num_eval_prompts 4 --eval_steps 4 --log_steps 1 --per_device_eval_batch_size 4
        --save_steps 2 --keep_checkpoints 9 --num_warmup_steps 0 --max_answer_seq_len 24"""


@pytest.mark.slow
def test_runs_with_vllm_on_all_layouts_and_resumed(real, real_model, tmp_path):
    """In fp32 sampling and scoring agree to 1e-4, at each step's weights; on one rank and on two,
    at ZeRO 0, 2 and 3, the curves are the same; a resumed run goes on as the whole one did; and
    with --vllm_ahead 1 it trains on its first rollout twice, and then on the one that vLLM has
    sampled meanwhile."""
    tree, flags = tmp_path / "tree", flags_of_runs(tmp_path, real_model)
    runner.apply("vllm", tree)
    vllms = f"--vllm_url {real} --vllm_folder {tmp_path}"

    def run(name, ranks, stage, more):
        rows = 8 // ranks
        words = f"""{flags} --output_dir {tmp_path}/{name} --zero_stage {stage} {more}
            --per_device_generation_batch_size {rows} --per_device_training_batch_size {rows}"""
        argv = words.split()
        done = kit.fork(kit.call_of_tree, ranks, str(tree), "ppo", argv, cwd=tree, meet="")
        assert done.code == 0, done
        return kit.metrics(tmp_path / name, clocks=False)[1:]

    two = run("two", 2, 2, vllms)
    others = (1, 0), (1, 2), (1, 3), (2, 0), (2, 3)  # ranks, ZeRO stage
    layouts = [two, *(run(f"{ranks}-{stage}", ranks, stage, vllms) for ranks, stage in others)]
    fork.copy_halfway(tmp_path / "two", tmp_path / "resumed", 2)
    layouts.append(run("resumed", 2, 2, f"{vllms} --resume"))
    for lines in layouts:
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert all(line["sampling_gap"] < 1e-4 for line in lines)
        for line, other in zip(two, lines):
            assert line["reward"] == pytest.approx(other["reward"], abs=1e-3)
            assert line["kl"] == pytest.approx(other["kl"], abs=1e-3)

    ahead = run("ahead", 2, 2, f"{vllms} --vllm_ahead 1 --is_cap 2")
    rewards = [two[i]["reward"] for i in (0, 0, 1)]  # the second step has the first rollout again
    assert [line["reward"] for line in ahead[:3]] == pytest.approx(rewards, abs=1e-3)
    assert ahead[0]["sampling_gap"] < 1e-4 < min(line["sampling_gap"] for line in ahead[1:])


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
    """Nothing of that vLLM is left: no process, and no weights. --resume starts another one."""
    tree, flags = tmp_path / "tree", flags_of_runs(tmp_path, real_model)
    runner.apply("vllm", tree)
    flags += """ --max_steps 30 --per_device_generation_batch_size 8
        --per_device_training_batch_size 8"""

    flags += f""" --output_dir {tmp_path}/run --vllm_folder {tmp_path} --vllm_python {real_python}
        --vllm_flags=--enforce-eager"""

    def start(*more):
        command, env = [sys.executable, "ppo.py", *flags.split(), *more], kit.environment()
        with open(tmp_path / "run.log", "w") as log:
            return subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log)

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
    assert [line["step"] for line in kit.metrics(tmp_path / "run")] == [*range(31)]
