"""Rollouts by vLLM: `vllm serve`, which rank 0 starts in vLLM's own Python, or finds at a URL.

    the run (ppo.py), its rank 0                     vLLM: another process, another Python
    writes the actor to a folder       -- files -->
    POST /reset_prefix_cache           ----------->  nobody else samples? Once more after loading
    POST /update_weight_version        ----------->  notes "4f1c20aa-3", the hand-over's number
    POST /collective_rpc               ----------->  load_folder, of vllm_server.py
    (or /v1/load_lora_adapter          ----------->  the adapters alone: see `write`.
     and /v1/unload_lora_adapter       ----------->  forgets the ones before)
    POST /inference/v1/generate, one   ----------->
    for each response: token ids       <-----------  token ids, their log-probs, and that number

Names and behaviour are those of vLLM 0.32. With --vllm_transfer nccl the weights take another way:
vllm_nccl.py.
"""

import atexit
import itertools
import json
import math
import os
import resource
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import vllm_nccl
import vllm_server
from deepspeed.accelerator import get_accelerator

import common
from machinery import checks, folders, lora, metrics, ranks, rollout, saving, tokens, zero3
from machinery.refused import Refused
from machinery.zero3 import unwrap_model

SENT = "prompt_ids", "row", "sample", "turn"  # of a request: its tokens, and what the draws need
FAR = 0.25  # share of the first step's tokens that may be off by as much as bf16 allows
TEMPERATURES = 0.01, 2.0  # vLLM samples at 0.01 where less is asked, and refuses more
GRACE = 2  # seconds between two looks at whether vLLM listens
TOKENS_AT_ONCE = 4096  # of all prompts that vLLM reads in one forward on a CPU
NOT_FINITE = -9999.0  # a log-prob of vLLM's that stands for NaN and for -inf
LORA_RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512  # of which --max-lora-rank must be one
TRANSFER = '{"backend": "nccl"}'  # --weight-transfer-config
MOST_BIASES = 1024  # of a request, in the model runner that vLLM has for GPUs
UNLESS_SET = {  # variables of vLLM's own
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GB for keys and values; by itself it wants 92 % of the memory
    "VLLM_NO_USAGE_STATS": "1",  # on a GPU it reports its use to vLLM's makers
}
GENERATE = "/inference/v1/generate"
GOES_ON = "\n  When that is mended, --resume goes on."
MADE = "output/vllm/bin/python"  # by make vllm
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Fault(Exception):
    """Something is wrong with vLLM, in words."""


def add_flags(arg):
    """Declares the flags of this file."""
    arg("vllm_python", str, "vLLM samples, started by rank 0 in this Python, which has it")
    arg("vllm_url", str, "vLLM samples: the server at http://HOST:PORT, which is already running")
    shared = "where weights are handed over: a folder that both can read; None: in memory"
    arg("vllm_folder", str, shared)
    ways = "files, through --vllm_folder; or nccl, from GPU to GPU: vllm_nccl.py, not run"
    arg("vllm_transfer", "files", ways, choices=["files", "nccl"])
    dtypes = (
        "of vLLM's weights; None: --dtype. Not bf16 with --dtype fp32: course/labs/real-vllm.md"
    )
    arg("vllm_dtype", str, dtypes, choices=list(common.DTYPES))
    arg("vllm_flags", "", "more flags for `vllm serve`, as in --vllm_flags=--enforce-eager")
    arg("vllm_devices", str, "CUDA_VISIBLE_DEVICES of vLLM, as in 7; None: as rank 0 has it")
    arg("vllm_ahead", 0, "1: train on the rollout before, while vLLM samples this one", most=1)
    waits = "seconds to wait for vLLM's start, a hand-over, and the next response of a rollout"
    arg("vllm_timeout", 600, waits, least=1)
    cap = "cap of each token's importance weight, pi/mu. 2 [Yao 2025]; None: no weights"
    arg("is_cap", float, cap, least=1e-6, most=math.inf)


def importance_weights(old_logprobs, sampled_logprobs, cap):
    """Truncated importance weights, of responses that another policy mu has sampled.  [Yao 2025]

        weight = min(pi_old(token) / mu(token), cap)

    pi_old: the actor as it scored the rollout. mu: the same weights in another engine, dtype or
    kernel, or older weights. Uncapped weights have mean 1 under mu. They correct the distribution
    of the next token only: the tokens before it are still mu's. The cap bounds their variance, and
    lowers their mean a little.
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap)


def of(args):
    """Returns the Vllm that flags ask for, or None. All ranks call it, before models are loaded."""
    return Vllm(args) if args.vllm_python or args.vllm_url else None


class Vllm:
    """vLLM, as the run sees it. Rank 0 talks to it, for all ranks."""

    def __init__(self, args):
        self.args, self.process, self.url = args, None, (args.vllm_url or "").rstrip("/")
        self.dtype = args.vllm_dtype or args.dtype
        self.run, self.hand_overs = secrets.token_hex(4), 0
        self.version = ""  # the number of the last hand-over
        self.updates = None  # how many the actor had when its weights were last written
        self.folder = ""  # of rank 0: where it hands weights over
        self.sender, self.tensors = None, {}  # --vllm_transfer nccl: of rank 0, and what it sends
        self.lora_rank = 0  # of adapters that are handed over by themselves; 0: there are none
        self.names = itertools.cycle(["adapters-a", "adapters-b"])  # folders, in turn
        self.in_the_air = self.landed = None  # a rollout that was asked for, and the newest one
        self.ended = False  # then `watch` ends, too
        self.seconds = {}  # of the last hand-over, for the log
        self.shares_off, self.warned = [], False  # shares of tokens, in the first steps: `check`
        low, high = TEMPERATURES
        if not low <= args.temperature <= high:
            words = f"--temperature {args.temperature}: vLLM samples between {low} and {high}."
            raise Refused("vllm-temperature", words)
        try:
            words = shlex.split(args.vllm_flags)
        except ValueError as error:
            raise Refused("vllm-flags", f"--vllm_flags {args.vllm_flags}: {error}.") from None
        given = {word.split("=")[0].replace("_", "-") for word in words}
        if ours := ", ".join(sorted(given & {f"--{flag}" for flag in self.musts()})):
            words = f"--vllm_flags {args.vllm_flags}: the run itself gives vLLM {ours}, because"
            words += " draws and log-probs depend on it.\n  Leave it out (--vllm_dtype may differ)."
            raise Refused("vllm-flags", words)
        if args.vllm_ahead and not args.is_cap:
            ranks.say(
                "warning: --vllm_ahead 1 without --is_cap: older weights sample, and are taken for "
                "the actor's"
            )
        self.by_nccl = args.vllm_transfer == "nccl"
        if self.by_nccl:
            self.device = get_accelerator().current_device_name()  # this thread's: the main one
            if get_accelerator().device_name() != "cuda" or args.actor_lora_dim:
                words = "--vllm_transfer nccl: for NVIDIA GPUs, without LoRA."
                raise Refused("vllm-transfer", words)
            if not args.vllm_url and not args.vllm_devices:
                words = "--vllm_transfer nccl: vLLM needs a GPU of its own (--vllm_devices)."
                raise Refused("vllm-transfer", words)
        self.model, self.most_biases = found_by_rank_0(self.prepare)

    def prepare(self):
        """Rank 0: finds vLLM, and makes the folder. It need not be there for the other ranks.

        Returns the model's name, and how many biases a request may have.
        """
        args = self.args
        if self.url:
            model, device, runner = self.found_at_url()
        else:
            refuse_without_vllm(args.vllm_python)
            model = f"rollouts-{self.run}"  # by its name no other server can be taken for ours
            device = get_accelerator().device_name()
            runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"
        memory = "/dev/shm" if Path("/dev/shm").exists() else tempfile.gettempdir()  # on Linux
        place = os.path.abspath(args.vllm_folder or memory)  # a server has a place of its own
        try:
            self.folder = tempfile.mkdtemp(prefix="rollouts-", dir=place)
        except OSError as error:
            raise Refused("vllm-folder", f"--vllm_folder {place}: {error.strerror}") from None
        if args.vllm_url and args.vllm_folder:  # the server may run as another user
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(self.folder, 0o777 & ~umask)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each response
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        return model, MOST_BIASES if runner and device != "cpu" else float("inf")

    def musts(self):
        """Returns those of vLLM's flags that it must have: draws and log-probs depend on them."""
        return {
            "dtype": str(common.DTYPES[self.dtype]).removeprefix("torch."),
            "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
            "generation-config": "vllm",  # nothing of the folder's
        }

    def found_at_url(self):
        """Refuses a server at --vllm_url that is none, or that samples otherwise.

        Returns the name of its model, its device, and whether it may have a GPU's model runner.
        """
        at, musts, needed = f"--vllm_url {self.url}", self.musts(), self.args.max_seq_len
        if not self.url.lower().startswith(("http://", "https://")):
            raise Refused("vllm-url", f"{at}: write http://HOST:PORT.")
        try:
            [model, *_] = self.ask("/v1/models")["data"]
            name, room = model["id"], model["max_model_len"]
            info = self.ask("/server_info?config_format=json")
            config, env = info["vllm_config"], info["vllm_env"]
            has = {flag: config["model_config"][flag.replace("-", "_")] for flag in musts}
            device = config["device_config"]["device"]
            runner = env.get("VLLM_USE_V2_MODEL_RUNNER") is not False
            backend = (config.get("weight_transfer_config") or {}).get("backend")
            in_parts = device == "cpu" and config["scheduler_config"]["enable_chunked_prefill"]
            takes_adapters = config["lora_config"] is not None
        except Fault as fault:
            raise Refused("vllm-url", f"{at}: {fault}") from None
        except (LookupError, TypeError, ValueError, AttributeError):
            raise Refused("vllm-url", f"{at}: this is not vLLM 0.32") from None
        if room < needed:
            words = f"{at}: it has room for {room} tokens of prompt and response, and the run needs"
            words += f" {needed}.\n  Start it with --max-model-len {needed}."
            raise Refused("vllm-room", words)
        if self.by_nccl and backend != "nccl":
            words = f"{at}: start it with --weight-transfer-config '{TRANSFER}'."
            raise Refused("vllm-flags", words)
        if in_parts:
            words = f"{at}: on a CPU, a prompt that it reads in two parts would end its engine.\n"
            raise Refused("vllm-flags", f"{words}  Start it with --no-enable-chunked-prefill.")
        if self.args.actor_lora_dim and not self.adds_adapters() and not takes_adapters:
            words = f"{at}: it takes no adapters.\n  Start it with --enable-lora and what else"
            raise Refused("vllm-flags", f"{words} variants/vllm/hosts.md names.")
        for flag, must in musts.items():
            theirs = str(has[flag]).removeprefix("torch.")
            if theirs != must:
                words = f"{at}: its --{flag} is {theirs}.\n  Start it with --{flag} {must}."
                raise Refused("vllm-flags", words)
        return name, device, runner

    # ---- A rollout ----
    def roll_out(self, args, engine, tokenizer, requests, step, batch_size):
        """Takes and returns what ppo.roll_out does. The tokens are other draws than its.

        All ranks call it. The weights are handed over if there was an update since the last time.
        With --vllm_ahead 1 it returns the rollout of the step before, while this one is sampled. At
        the first step there is none: steps 1 and 2 are given the same one.
        batch_size: how many responses a rank has in the air at a time.
        """
        before = self.land()
        self.launch(engine, tokenizer, requests, step, batch_size)
        if step and before and args.vllm_ahead:
            return before
        landed = self.land()
        if not step:  # of an evaluation; a step is still to come for the other one
            self.landed = before
        return landed

    def launch(self, engine, tokenizer, requests, step, batch_size):
        """Writes the weights, and has rank 0 begin with the rollout of all ranks.

        Ranks that share each layer (--tensor_parallel_size) have the same requests, which are sent
        once: they must train on the same tokens.
        """
        params = self.sampling_params(tokenizer, unwrap_model(engine))
        self.stop_ids = params["stop_token_ids"]
        began = time.time()
        updates = getattr(engine, "global_steps", None)  # of DeepSpeed's engine; else not known
        written = updates is None or updates != self.updates
        if written:
            self.write(engine, tokenizer)
        self.updates, seconds = updates, time.time() - began
        sent = [{name: one[name] for name in SENT if name in one} for one in requests]
        of_ranks, future = ranks.all_gather_objects([sent]), None
        shares = of_ranks[:: ranks.tensor_parallel_size()]
        if ranks.get_rank() == 0:
            given = sum(shares, []), step, params, batch_size * len(shares), written, seconds
            future = vllm_nccl.in_background(self.fly, *given)
        start = sum(map(len, shares[: ranks.data_parallel_rank()]))
        self.in_the_air = tokenizer, requests, slice(start, start + len(requests)), future

    def write(self, engine, tokenizer):
        """Writes what is handed over: the weights, or LoRA's adapters and, once, those beside them.

        In 16 bits a sum of weights and young adapters is rounded to the weights: vLLM would sample
        from the policy of the start (docs/performance.md counts what is lost).
        """
        layers = lora.adapted_layers(engine).values()
        if not layers or self.adds_adapters():
            self.write_whole(engine, tokenizer)
            return
        rank, most = max(layer.r["default"] for layer in layers), LORA_RANKS[-1]
        if rank > most:
            words = f"--actor_lora_dim {rank}: vLLM takes adapters of rank {most} at most.\n"
            words += "  In fp32 they are added to the weights, and may have any rank."
            raise Refused("vllm-lora-rank", words)
        if not self.lora_rank:
            with not_added(layers):
                self.write_whole(engine, tokenizer)
        self.lora_rank = rank
        self.adapters = Path(self.folder) / next(self.names)
        saving.save_model(engine, tokenizer, self.adapters)

    def adds_adapters(self):
        """Returns whether adapters are added to the weights: in fp32 nothing of them is lost."""
        return self.dtype == self.args.dtype == "fp32"

    def write_whole(self, engine, tokenizer):
        """Writes the weights in place of older ones, of which vLLM has a copy of its own.

        These go first: the folder may be in memory, which then need not have room for both.
        """
        model = unwrap_model(engine)
        started = self.args.vllm_url or self.updates is not None  # our own starts from files
        if self.by_nccl and started:
            zero3.release_early_gathers(engine)
            tensors = saving.saved_tensors(model)
            self.tensors = {name: zero3.full_tensor(name, one) for name, one in tensors}
            return
        self.tensors = {}
        need = zero3.count_parameters(model) * next(model.parameters()).element_size()
        found_by_rank_0(lambda: self.make_room(need))
        saving.save_model(engine, tokenizer, self.folder, merge=True)

    def make_room(self, need):
        """Rank 0: takes older weights away, and refuses a folder without room for new ones."""
        for file in Path(self.folder).glob("*.safetensors"):
            file.unlink()
        free = shutil.disk_usage(self.folder).free
        if free < need:
            words = f"{self.folder}: the weights need {need / 1e9:.2f} GB, and {free / 1e9:.2f} GB "
            words += "are free.\n  Name another folder by --vllm_folder, or give /dev/shm more."
            raise Refused("vllm-folder", words)

    def land(self):
        """Waits for the rollout that is in the air, if one is. Returns this rank's newest one."""
        if self.in_the_air:
            tokenizer, requests, mine, future = self.in_the_air
            self.wait(future)
            # of rank 0, on all ranks, also an error's words
            answers, seconds = ranks.all_gather_objects(future.result() if future else [])
            self.in_the_air = None
            if isinstance(answers, str):
                raise RuntimeError(answers)
            self.landed, self.seconds = [], {"hand_over_seconds": seconds}
            for request, new in zip(requests, answers[mine]):
                text = tokens.as_text(tokenizer, new["response_ids"], self.stop_ids)
                self.landed.append({**request, **new, "text": text})
        return self.landed

    def wait(self, future):
        """Waits on all ranks until rank 0 has its answers, however long vLLM takes.

        One wait would end after ranks.WAIT_MINUTES. These are many short ones.
        """
        pause = 0.01
        while ranks.get_world_size() > 1 and ranks.all_sum(bool(future and not future.done()))[0]:
            ranks.go_on()
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def fly(self, requests, step, params, count, written, seconds):
        """Rank 0: hands the weights over, and asks for all responses, `count` at a time.

        Returns these, or words, also for what nobody foresaw: the other ranks wait for them. And
        the seconds of the hand-over, with those before.
        """
        try:
            if not self.url:
                self.start()
            if not self.version:  # the first time
                threading.Thread(target=self.watch, daemon=True).start()
            seconds += self.hand_over(written)
            return [self.sample_all(requests, step, params, count), seconds]
        except Fault as fault:
            words = str(fault)
        except (LookupError, TypeError, ValueError) as error:
            words = f"vLLM's answer is not one of vLLM 0.32: {error!r}"
        except Exception as error:
            traceback.print_exc()
            words = f"vLLM could not be started, asked, or sent the weights: {error!r}"
        self.end()
        return [words + GOES_ON, seconds]

    def hand_over(self, written):
        """Has vLLM load what was written; the tokens that it samples come with the number of that.

        If nothing was written, and no other run has handed over its own, vLLM has it already.
        Returns the seconds that it took.
        """
        began, before, adapters = time.time(), self.version, self.sampler()
        ours = bool(before) and self.ask("/weight_info")["weight_version"] == before
        if ours and not written:
            return time.time() - began
        self.hand_overs += 1
        self.version = f"{self.run}-{self.hand_overs}"
        self.drop_caches()  # before weights move under another run's responses
        self.ask("/update_weight_version", {"new_version": self.version})
        if self.tensors:
            given = self.ask, self.device, self.args.vllm_timeout
            self.sender = self.sender or vllm_nccl.Sender(*given)
            self.sender.send(self.tensors)
        elif not self.lora_rank or not ours:  # the weights beside adapters stay
            loads = {"method": "load_folder", "kwargs": {"folder": self.folder}}
            self.ask("/collective_rpc", loads)  # of vllm_server.py
        if self.lora_rank:
            # Under a new name each time. Of one that it knows vLLM would keep the adapters, or with
            # load_inplace, read them from the folder again at every token.
            given = {"lora_name": self.sampler(), "lora_path": str(self.adapters)}
            self.ask("/v1/load_lora_adapter", given, read=bytes)
            if ours:
                self.ask("/v1/unload_lora_adapter", {"lora_name": adapters}, read=bytes)
        if self.ask("/weight_info")["weight_version"] != self.version:
            # the other run's number would come back with weights of ours
            self.ask("/update_weight_version", {"new_version": "of two runs"})
            raise Fault("another run has handed its weights over meanwhile: it uses this server")
        self.drop_caches()
        return time.time() - began

    def drop_caches(self):
        """Has vLLM drop what it has kept of prompts. It cannot while it samples."""
        if not self.ask("/reset_prefix_cache", {})["success"]:
            raise Fault("vLLM has not dropped its cache of older weights: it samples for others")

    def sampler(self):
        """Returns the name of what samples, as vLLM knows it: the model, or the adapters on it."""
        return f"adapters-{self.version}" if self.lora_rank else self.model

    def sampling_params(self, tokenizer, model):
        """Returns what all requests have in common: vLLM's SamplingParams.

        Nothing is left to the model's folder: not the filters of a generation_config.json, and not
        what ends a response. Ids that no token uses (embeddings are often padded) get a bias that
        leaves them a probability of e^-50 at most.
        """
        args = self.args
        rows = range(model.config.get_text_config().vocab_size)
        ids = sorted({*rows}.difference(folders.known_ids(model, tokenizer)))
        if len(ids) > self.most_biases:
            words = f"the tokenizer has no token for {len(ids):,} of the model's ids, and on a GPU "
            words += f"vLLM can keep {self.most_biases:,} of them from being drawn.\n"
            words += "  Set VLLM_USE_V2_MODEL_RUNNER=0 for vLLM: its older runner has no limit."
            raise Refused("vllm-unused-ids", words)
        return dict(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_tokens=args.max_answer_seq_len,
            logprobs=0,  # that of the drawn token alone
            ignore_eos=True,  # the config's
            stop_token_ids=folders.ends_of(model, tokenizer),
            detokenize=False,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            logit_bias={str(i): -100.0 for i in ids} or None,
        )

    def sample_all(self, requests, step, params, count):
        """Returns what `sample` makes of each request, `count` of them at a time.

        One of them may wait for its turn in vLLM for longer than --vllm_timeout. If no response at
        all has come for that long, vLLM is taken to hang.
        """
        numbered, found = enumerate(requests), {}  # each thread takes its next one
        newest = time.time()  # when a response came last

        def work():
            nonlocal newest
            try:
                for i, one in numbered:
                    found[i] = self.sample(one, step, params)
                    newest = time.time()
            except Exception:
                list(numbered)  # nobody begins with another one
                raise

        threads = [vllm_nccl.in_background(work) for _ in range(min(count, len(requests)))]
        while (left := newest + self.args.vllm_timeout - time.time()) > 0:
            with suppress(TimeoutError):  # a response may have come in this time
                vllm_nccl.wait_for(threads, left)
                return [found[i] for i in range(len(requests))]
        raise Fault(self.why(GENERATE, TimeoutError()))

    def sample(self, request, step, params):
        """Returns response_ids, ended and per_token of a request. Several threads call it."""
        key = rollout.draw_key(self.args.seed, step, request)
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)  # 63 bits
        asked = dict(model=self.sampler(), token_ids=request["prompt_ids"])
        asked["sampling_params"] = {**params, "seed": seed}
        [choice] = self.ask(GENERATE, asked, forever=True)["choices"]
        versions = sorted({span["version"] for span in choice.get("weight_versions") or []})
        if versions != [self.version]:
            raise Fault(
                f"vLLM sampled with weights {versions}, and {self.version} were handed over last: "
                "does another run use this server?"
            )
        ids, why = choice["token_ids"], choice["finish_reason"]
        if why != "stop" and (why, len(ids)) != ("length", params["max_tokens"]):
            raise Fault(f"vLLM broke a response off after {len(ids)} tokens: {why}")
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        if any(logprob <= NOT_FINITE for logprob in logprobs):
            raise Fault(
                f"a log-prob of vLLM's is not finite: its {self.dtype} overflows, or is NaN"
            )
        return {
            "response_ids": ids,
            "ended": float(why == "stop"),
            "per_token": {"sampled_logprobs": logprobs},
        }

    def check(self, run, micro_batches):
        """Stops the run if scoring and vLLM differ in many more tokens than in its first step.

        Then vLLM has kept weights of an earlier update, all or some of them. It is found as soon as
        these differ enough from the actor's to move tokens: in fp32 that is the next step, in 16
        bits rounding hides the first updates.

        All ranks call it, at each step after its update: not all runs have the log-probs before.
        The first step is compared by machinery/checks.py, unless --is_cap lets sampling and scoring
        differ. Where they may, this only warns, once.
        """
        args = self.args
        corrected = args.is_cap or getattr(args, "is_band", None)  # of the variant band
        coarse = args.vllm_ahead or self.dtype != args.dtype
        limits = SimpleNamespace(dtype="bf16" if coarse else args.dtype)
        gaps = [metrics.token_gaps(batch)[batch.response_mask > 0] for batch in micro_batches]
        off, count = checks.counts_off(limits, gaps)[-1]
        if len(self.shares_off) <= 2 * args.vllm_ahead:  # ahead, from the third on it is the rule
            if not self.shares_off:
                self.warn_if_far(run, gaps)
            self.shares_off.append(off / max(count, 1))
            return
        usual = max(self.shares_off)
        if self.warned or not checks.too_many(limits, off - 3 * usual * count, count):
            return
        goes_on = self.warned = corrected or args.vllm_ahead or args.allow_mismatch
        ranks.say(
            f"{'warning' if goes_on else 'error'}: step {run.step}: for {off:,} of {count:,} tokens"
            f" scoring gives another log-prob than vLLM, by more than {checks.OFF[limits.dtype]} "
            f"(in this run's first step: {usual:.1%}).\n  Likely: vLLM has kept weights of an "
            "earlier update, all or some of them"
            + "; or rounding to --vllm_dtype hides the updates from it" * (self.dtype != args.dtype)
            + ". --allow_mismatch 1 goes on."
        )
        if not goes_on:
            run.finish(code=1)

    def warn_if_far(self, run, gaps):
        """Warns if scoring and vLLM differ by much in many of the first step's tokens."""
        far, count = checks.counts_off(SimpleNamespace(dtype="bf16"), gaps)[-1]
        if far > FAR * count:
            ranks.say(
                f"warning: step {run.step}: for {far:,} of {count:,} tokens scoring gives another "
                f"log-prob than vLLM, by more than {checks.OFF['bf16']}.\n  Likely: --top_p, "
                "--top_k, a vLLM of lower precision, or one that has not loaded the weights."
            )

    # ---- The server ----
    def start(self):
        """Starts vLLM on the folder, and returns when it answers."""
        args, port = self.args, free_port()
        flags = {
            "model": self.folder,
            "host": "127.0.0.1",
            "port": port,
            "served-model-name": self.model,
            "max-model-len": args.max_seq_len,
            "worker-extension-cls": "vllm_server.Loads",
            **self.musts(),
        }
        if self.by_nccl:
            flags["weight-transfer-config"] = TRANSFER
        words = [f"--{name}={value}" for name, value in flags.items()]
        words += ["--enable-scale-out", "--disable-uvicorn-access-log"]
        if get_accelerator().device_name() == "cpu":
            # Of a prompt that it has read in part vLLM takes back the draw, which generators of a
            # CPU refuse: the engine dies. Whole prompts then need room for the longest of them.
            most = max(TOKENS_AT_ONCE, args.max_seq_len)
            words += ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={most}"]
        more = {"CUDA_VISIBLE_DEVICES": args.vllm_devices} if args.vllm_devices else {}
        if not args.vllm_folder:  # else the path may be too long for a socket
            more["VLLM_RPC_BASE_PATH"] = self.folder
        if self.lora_rank:
            more["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the route for adapters
            room = min(each for each in LORA_RANKS if each >= self.lora_rank)
            words += ["--enable-lora", f"--max-lora-rank={room}"]
        command = [args.vllm_python, vllm_server.__file__, self.folder, *words]
        ranks.say(f"vLLM starts, and writes to {self.log()}")
        with open(self.log(), "wb") as log:
            self.process = subprocess.Popen(
                [*command, *shlex.split(args.vllm_flags)],
                stdin=subprocess.PIPE,  # it ends when this does
                stdout=log,
                stderr=log,
                env=environment(more),
                start_new_session=True,  # Ctrl-C is for the run
            )
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.time() + args.vllm_timeout
        while not self.answers():
            if self.process.poll() is not None:
                raise Fault(self.why_it_ended())
            if time.time() > deadline:
                raise Fault(f"vLLM did not start within --vllm_timeout {args.vllm_timeout} seconds")
            time.sleep(0.1)

    def log(self):
        """Returns the file that a server of the run's own writes to."""
        return f"{self.args.output_dir}/vllm.log"

    def watch(self):
        """Ends a vLLM that no longer listens, or the wait for one that runs elsewhere.

        It has lost its worker, or was told to stop. It still waits for our open requests, which
        wait for the worker.
        """
        at, refused = urllib.parse.urlsplit(self.url), 0
        port = at.port or (443 if at.scheme == "https" else 80)
        while not self.ended and (not self.process or self.process.poll() is None):
            *_, future = self.in_the_air or [None]
            try:
                socket.create_connection((at.hostname, port), timeout=5).close()
                refused = 0
            except ConnectionRefusedError:
                refused += 1
            except OSError:  # it is busy
                refused = 0
            if refused > 1 and self.process:
                vllm_server.kill_group(self.process.pid)
            elif refused > 1 and future and not future.done():
                words = f"vLLM at {self.url} no longer listens: it has ended or lost its engine"
                with suppress(InvalidStateError):  # it has landed just now
                    future.set_result([words + GOES_ON, 0.0])
                    self.end()
            time.sleep(GRACE)

    def answers(self):
        """Returns whether the server is up: this run's, and no other one on that port."""
        try:
            with NO_PROXY.open(f"{self.url}/v1/models", timeout=5) as answer:
                return json.load(answer)["data"][0]["id"] == self.model
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return False

    def ask(self, path, body=None, read=json.loads, forever=False):
        """Returns what vLLM answers to a POST of `body`, or to a GET. Raises Fault, in words.

        It waits for --vllm_timeout, or forever: then the caller looks at the time.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            limit = None if forever else self.args.vllm_timeout
            with NO_PROXY.open(request, timeout=limit) as answer:
                return read(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            text = ""
            with suppress(OSError, HTTPException):
                text = error.read().decode(errors="replace")[:1000]
            if error.code == 500 and self.ends():  # its engine is dead, and it follows
                raise Fault(self.why_it_ended()) from None
            advice = "\n  Is it started as variants/vllm/hosts.md says?" * bool(self.args.vllm_url)
            raise Fault(f"vLLM answers {path} with {error.code}: {text}{advice}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise Fault(self.why(path, getattr(error, "reason", error))) from None

    def why(self, path, error):
        """Returns in words why no answer came to `path`."""
        if isinstance(error, TimeoutError):
            seconds = f"--vllm_timeout {self.args.vllm_timeout} seconds"
            return f"vLLM has not answered {path} for {seconds}: it hangs, or needs longer"
        if self.ends():
            return self.why_it_ended()
        return f"vLLM cannot be reached, or what answers is not vLLM ({error!r})"

    def ends(self):
        """Returns whether a server of the run's own has ended, or does so now."""
        try:  # `watch` needs up to two GRACEs to see that it has lost its worker
            return self.process is not None and self.process.wait(4 * GRACE) is not None
        except subprocess.TimeoutExpired:
            return False

    def why_it_ended(self):
        code, why = self.process.returncode, ""
        if self.version or code < 0:  # it had started
            why = "Its server, engine or worker failed or was killed (perhaps as memory ran out). "
        return f"vLLM has ended with code {code}. {why}Its first error is in {self.log()}"

    def end(self):
        """Ends the server that this run has started, and its workers; takes the folder away."""
        self.ended = True
        if self.process:
            vllm_server.kill_group(self.process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def not_added(layers):
    """Multiplies the products of all adapters by 0 meanwhile: what is merged is W without them."""
    kept = [layer.scaling["default"] for layer in layers]
    for layer in layers:
        layer.scaling["default"] = 0.0
    yield
    for layer, own in zip(layers, kept):
        layer.scaling["default"] = own


def free_port():
    """Returns a port that is free now. If another program takes it first, vLLM says so and ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(more):
    """Returns the environment of vLLM: without this rank's place among others, and our code.

    Also without a key, which the run would not send.
    """
    ours = "RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PYTHON", "OMP_", "VLLM_API_KEY"
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    own = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}
    return {**UNLESS_SET, **env, **own, **more}


def found_by_rank_0(look):
    """Returns on all ranks what look() returns on rank 0, or raises what it refuses."""
    found = None
    if ranks.get_rank() == 0:
        try:
            found = look()
        except Refused as refused:
            found = refused
    [found, *_] = ranks.all_gather_objects([found])
    if isinstance(found, Refused):
        raise found
    return found


def refuse_without_vllm(python):
    """Refuses a --vllm_python that has no vLLM."""
    looks = "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"
    try:
        found = subprocess.run([python, "-c", looks], env=environment({})).returncode == 0
    except OSError as error:
        words = f"--vllm_python {python}: {error.strerror}.\n  Name the Python that has vLLM"
        raise Refused("vllm-python", f"{words}: make vllm makes {MADE}.") from None
    if not found:
        words = f"There is no vLLM at {python} (--vllm_python): make vllm makes {MADE}."
        raise Refused("vllm-python", words)
