"""A stand-in for vLLM: the routes of its server that variants/vllm calls, and what may go wrong.

`fake_python` makes a Python that has this file where vLLM has its server. The variable VLLM_STUB
says what it does: a fault that a route below names; "model", where it samples with transformers
("keeps": from the first weights that it was handed); and otherwise it answers each request with the
same three tokens ("counts": the first of them is the number of the request).
"""

import http.server
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

LOCK = threading.Lock()
LINE = threading.Lock()
TOKENS, LOGPROBS = [7, 8, 1], [-0.5, -1.0, -1.5]


def fake_python(folder):
    """Returns the path of a Python in `folder` that has a package vllm."""
    package = folder / "packages/vllm/entrypoints/launchers/api_server"
    package.mkdir(parents=True)
    (package / "entry.py").write_text(Path(__file__).read_text())
    python = folder / "python"
    start = f'PYTHONPATH={folder}/packages exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{start}\n")
    python.chmod(0o755)
    return str(python)


class Routes(http.server.BaseHTTPRequestHandler):
    """What the server knows are attributes of this class: it has one process."""

    name, room, fault, model, version, config = "", 0, "", None, "default", {}
    adapters, number = set(), itertools.count()  # names of adapters; of requests
    open = 0  # requests that are being answered

    def do_GET(self):
        if self.path == "/weight_info":
            return self.answer({"weight_version": self.version})
        if self.path.startswith("/server_info"):
            return self.answer(server_info(self.config))
        assert self.path == "/v1/models"
        self.answer({"data": [{"id": self.name, "max_model_len": self.room}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            assert body["method"] == "load_folder"
            self.load(body["kwargs"]["folder"])
        elif self.path.endswith("load_lora_adapter"):
            loads = self.path == "/v1/load_lora_adapter"
            # In place vLLM would read them again at every token; it keeps those that it has
            assert loads == (body["lora_name"] not in self.adapters) and "load_inplace" not in body
            self.adapters ^= {body["lora_name"]}
            self.answer(b"Success")
        elif self.path == "/reset_prefix_cache":
            self.answer({"success": self.fault != "cached" and not Routes.open})
        elif self.path == "/update_weight_version":
            Routes.version = body["new_version"]
            self.answer({"success": True})
        else:
            assert self.path == "/inference/v1/generate"
            # Adapters of before are unloaded, unless another run came between
            assert body["model"] in (self.adapters or {self.name}) and len(self.adapters) <= 2
            with LOCK:
                Routes.open += 1
            answer = self.generate(body["token_ids"], body["sampling_params"])
            with LOCK:
                Routes.open -= 1
            self.answer(answer)

    def load(self, folder):
        if self.fault == "unloadable":
            return self.answer({"error": f"{folder}: no weights"}, 500)
        if self.fault == "model" or (self.fault == "keeps" and not Routes.model):
            import torch
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(1)  # one thread samples as one row of several would
            Routes.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.answer({"results": [None]})

    def generate(self, ids, params):
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in ("orphaned", "reset"):  # as vLLM without its worker: it listens no more
            self.server.shutdown()
            self.server.socket.close()
        if self.fault == "reset":  # as for a connection that it had not accepted yet
            at_once = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            os.close(self.connection.fileno())
        with LINE if self.fault == "in-line" else nullcontext():  # as with --max-num-seqs=1
            slow = {"hangs": 60, "orphaned": 60, "reset": 60, "late": 1, "in-line": 1.2}
            time.sleep(slow.get(self.fault, 0))
        tokens, logprobs, why = TOKENS, LOGPROBS, "length" if self.fault == "short" else "stop"
        if self.fault == "counts":
            tokens = [next(self.number), *TOKENS[1:]]
        if self.fault in ("model", "keeps"):
            tokens, logprobs, why = sampled(Routes.model, ids, params)
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
        if self.fault in ("other-weights", "two-weights"):
            spans = [{"version": "elsewhere-7"}] + spans * (self.fault == "two-weights")
        if self.fault == "nan":
            logprobs = [-0.5, -9999.0, -1.5]
        content = [{"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs)]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
        return {"choices": [{**choice, "finish_reason": why}]}

    def answer(self, body, code=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def server_info(config):
    """Returns what vLLM says of itself. config: flags, as in its command; device; env."""
    model = {name.replace("-", "_"): value for name, value in config.items()}
    found = {
        "model_config": {**model, "dtype": f"torch.{config['dtype']}"},
        "device_config": {"device": config.get("device", "cpu")},
        "scheduler_config": {"enable_chunked_prefill": config.get("in-parts", False)},
        "lora_config": config.get("lora"),
    }
    return {"vllm_config": found, "vllm_env": config.get("env", {})}


def sampled(model, ids, params):
    """Returns tokens, their log-probs, and why they end: without a cache, one row at a time."""
    import torch

    generator = torch.Generator().manual_seed(params["seed"] % 2**32)
    bias = {int(i): x for i, x in (params["logit_bias"] or {}).items()}
    tokens, logprobs = [], []
    with torch.no_grad():
        while len(tokens) < params["max_tokens"]:
            logits = model(torch.tensor([ids + tokens])).logits[0, -1].float()
            logits[list(bias)] += torch.tensor(list(bias.values()))
            probs = torch.softmax(logits / params["temperature"], -1)
            threshold = torch.rand(1, generator=generator, dtype=torch.float64)
            token = torch.searchsorted(probs.cumsum(-1, dtype=torch.float64), threshold).item()
            tokens.append(token)
            logprobs.append(probs[token].log().item())
            if token in params["stop_token_ids"]:
                return tokens, logprobs, "stop"
    return tokens, logprobs, "length"


def main():
    Routes.config = flags = dict(word[2:].split("=", 1) for word in sys.argv if "=" in word)
    Routes.name, Routes.room = flags["served-model-name"], int(flags["max-model-len"])
    Routes.fault = os.environ.get("VLLM_STUB", "")
    if Routes.fault == "ends":
        sys.exit("ValueError: no such model")
    if Routes.fault == "never":
        time.sleep(60)
    if file := os.environ.get("VLLM_STUB_NOTES"):
        Path(file).write_text(json.dumps([sys.argv, dict(os.environ)]))
    http.server.ThreadingHTTPServer.allow_reuse_address = False
    http.server.ThreadingHTTPServer((flags["host"], int(flags["port"])), Routes).serve_forever()
    time.sleep(60)  # "orphaned" and "reset"
