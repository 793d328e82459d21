"""The one place that starts runs, and what the tests share: models, data, flags, comparisons.

    from tests import kit

    done = kit.run("sft", "--max_steps", 2, ranks=2)         # .code .out .err .folder
    kit.metrics(done.folder)[-1]["loss"]
    kit.run("sft", "--zero_stage", 5, expect=2)              # asserts the exit code
    kit.start("WORLD_SIZE=2 sft --dtype fp16").rule          # a command line; why it was refused
    kit.run("sft", launcher="deepspeed", ranks=2)            # where the launcher is the subject
    first, second = kit.on_ranks(my_function, 2, argument)   # what it returned in each rank
    with kit.refuses("output-folder-in-use"): ...            # Refused, by the name of its rule

To import torch and DeepSpeed takes ten times as long as to train a tiny model for a few steps. So
one Python per session imports them and all our code once; it then forks the ranks of each run,
which start in a second. `run` makes a script's own main() there, unless a launcher is named.
`on_ranks` calls a function from the top level of a test module, where the ranks have met already.
Arguments and results are pickled; an error in a rank fails the test with its traceback.
"""

import atexit
import contextlib
import copy
import functools
import gc
import hashlib
import importlib.util
import inspect
import io
import json
import os
import pickle
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import filelock

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = str(ROOT / "recipes/toy/model")
SCRIPTS = ("sft", "reward", "ppo")
# metrics that differ each time
CLOCKS = {"seconds", "tokens_per_second", "tflops"}
CLOCKS |= {f"{phase}_seconds" for phase in ("generate", "score", "train")}
PRETENDED = ("DEVICE", "NVCC", "COMPILER", "DEEPSPEED", "APART")  # see start
LOADS = []  # of this process: see count_loads
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",  # the tests' numbers are the CPU's; set it to cuda to try them there
    "HF_HUB_OFFLINE": "1",  # no test needs the network
    "TOKENIZERS_PARALLELISM": "false",  # its threads would be lost at a fork
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
if "HF_DATASETS_CACHE" not in os.environ:  # else tests would leave their rows in the user's own
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="rlhf-datasets-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
if "RLHF_TESTS" not in os.environ:  # the workers of pytest-xdist inherit it, and make a run once
    os.environ["RLHF_TESTS"] = tempfile.mkdtemp(prefix="rlhf-tests-")
    atexit.register(shutil.rmtree, os.environ["RLHF_TESTS"], ignore_errors=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------
@dataclass
class Done:
    """What is known of a run that has ended."""

    codes: list  # each rank's exit code, or of a launcher its own; -9 if it was killed
    out: str
    err: str
    folder: Path  # --output_dir; of on_ranks None
    results: list = None  # what a function returned in each rank
    rule: str = ""  # by which rank 0 was refused
    loads: int = 0  # models that rank 0 had made or loaded by then

    @property
    def code(self):
        """0, or the first exit code that is not."""
        return next((code for code in self.codes if code), 0)

    def __str__(self):
        return f"exit codes {self.codes}\n{self.out[-3000:]}\n{self.err[-6000:]}"


@functools.cache
def base():
    """Returns a folder of this session, with the models and data of `prepare`."""
    folder = Path(os.environ["RLHF_TESTS"])
    once(folder / "made/base", prepare, folder)
    return folder


def once(file, make, *args, **options):
    """Returns what make(*args, **options) returns. One worker of pytest-xdist calls it and leaves
    that in a file; the others wait, and read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(make(*args, **options)))
        return pickle.loads(file.read_bytes())


def computes_in_bf16():
    """Returns whether this CPU computes in bf16, and does not emulate it."""
    known = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in known or "amx_bf16" in known


def run(script, *flags, ranks=1, launcher="fork", env=None, expect=0, folder=None, **options):
    """Makes a run of a script, by its name. Returns Done.

    launcher: fork or deepspeed. env: changes to the environment. expect: the exit code, or None
    for any. options: cwd, limit, and patience of `fork`.
    """
    folder = Path(folder or tempfile.mkdtemp(dir=base() / "runs")).absolute()
    argv = [*map(str, flags), "--output_dir", str(folder)]
    if launcher == "fork":
        meet = "" if ranks > 1 else "never"
        done = fork(call_main, ranks, script, argv, env=env, meet=meet, **options)
    else:
        start = [Path(sys.executable).parent / "deepspeed", "--num_gpus", ranks]
        done = start_command([*start, ROOT / f"{script}.py", *argv], env, **options)
    done.folder = folder
    assert expect is None or done.code == expect, done
    return done


def start(command, before=(), **options):
    """Starts a program by a command line, as one types it. Returns Done, whatever its exit code.

    command: "RANKS=2 ppo --flag value", "tools.talk actor". Its NAME=VALUE are the environment's,
    but for RANKS and for what is pretended: a DEVICE=cuda, with NVCC=0 without the compiler; no
    C++ COMPILER=0; DEEPSPEED=0.18.5; and with APART=1 each rank in a folder of its own, rank0, ...
    before: flags in front of the command's own. options: those of `fork`, and stdin, a text.
    """
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if "=" not in word)
    env = dict(word.split("=", 1) for word in words[:at])
    ranks, argv = int(env.pop("RANKS", 1)), [*map(str, before), *words[at + 1 :]]
    pretended = {name: env.pop(name) for name in PRETENDED if name in env}
    options = {"limit": 100, "patience": 0, "meet": "" if ranks > 1 else "never", **options}
    toolkit = base() / "cuda"
    (toolkit / "bin").mkdir(parents=True, exist_ok=True)
    (toolkit / "bin/nvcc").touch()
    given = words[at], argv, pretended, str(toolkit), options.pop("stdin", "")
    return fork(pretend_and_call_main, ranks, *given, env=env, **options)


def pretend_and_call_main(script, argv, pretended, toolkit, stdin):
    """Runs a program's main() in a rank, on what is pretended of its machine.

    toolkit: a folder that looks like CUDA's.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    if "DEVICE" in pretended:
        get_accelerator().device_name = lambda *_: pretended["DEVICE"]
        cpp_extension.CUDA_HOME = toolkit if pretended.get("NVCC") != "0" else None
    if "COMPILER" in pretended:
        for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
            get_accelerator().get_op_builder(name).load = lambda *_: 1 / 0
    if "APART" in pretended:
        os.chdir(f"rank{os.environ['RANK']}")
    deepspeed.__version__ = pretended.get("DEEPSPEED", deepspeed.__version__)
    sys.dont_write_bytecode = True  # beside a user's functions
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    call_main(script, argv)


def call_main(script, argv):
    """Runs a script's main() as its last line does, in a rank.

    What takes time is left out. A curves.png is empty: one is drawn in test_look.py. Nothing waits
    for the disk, as no test cuts the power. And nothing waits
    for gloo's threads at the end: a forked rank leaves without Python's shutdown.
    """
    from machinery import refused, run
    from tools.report import plots

    plots.draw = lambda run, title: (run.path / "curves.png").touch()
    os.sync = lambda: None
    clock = run.time.monotonic
    run.time = types.SimpleNamespace(monotonic=clock, sleep=lambda seconds: None)
    sys.argv = [f"{script}.py", *argv]
    refused.program(importlib.import_module(script).main)


def call_of_tree(tree, script, argv):
    """Runs a script of another folder in a rank. Modules that are the same there stay imported."""

    def modules(top):
        found = [Path(top, "common.py"), *Path(top, "machinery").rglob("*.py")]
        return {file.relative_to(top): file.read_bytes() for file in found}

    same = modules(ROOT) == modules(tree)
    ours = SCRIPTS if same else ("common", "machinery", *SCRIPTS)
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    sys.path.insert(0, tree)
    sys.dont_write_bytecode = False  # the next ranks of this tree compile nothing anew
    call_main(script, argv)


def count_loads():
    """Has each model of transformers that is made from now on counted in LOADS."""
    import transformers

    make = transformers.PreTrainedModel.__init__

    @functools.wraps(make)
    def make_and_count(model, *args, **options):
        LOADS.append(type(model).__name__)
        return make(model, *args, **options)

    transformers.PreTrainedModel.__init__ = make_and_count


def import_file(file):
    """Imports a file by its path, anew each time; it finds common and machinery as they are."""
    spec = importlib.util.spec_from_file_location(f"{file.stem}_of_{file.parent.name}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def parse(run):
    """Returns the flags of a lab's run, as its script reads them."""
    words = run.command(Path("runs"))
    script = importlib.import_module(run.script)
    return script.get_args(words[words.index(f"{run.script}.py") + 1 :])


def environment(changes=None):
    """Returns this process's environment with `changes`, and without the ranks of another run."""
    found = {k: v for k, v in os.environ.items() if k not in RANK_NAMES}
    # DeepSpeed compiles its optimizers anew for another version of ninja: always take the same one
    found["PATH"] = f"{Path(sys.executable).parent}:{found['PATH']}"
    return {**found, "PYTHONPATH": str(ROOT), **(changes or {})}


def start_command(command, env=None, cwd=None, limit=600):
    """Runs a command in a session of its own, which ends after `limit` seconds. Returns Done."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd or base(),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return Done([process.returncode], out, err, None)


# --------------------------------------------------------------------------------------------------
# Forked ranks
# --------------------------------------------------------------------------------------------------
def on_ranks(function, ranks, *args, **options):
    """Returns what function(*args) returned in each of so many gloo ranks. options: as in fork."""
    done = fork(function, ranks, *args, **options)
    assert done.code == 0, done
    return done.results


def fork(function, ranks, *args, env=None, cwd=None, limit=300, patience=3, meet="before"):
    """Calls a module's function in so many forked ranks. Returns Done.

    meet: "before" the function is called, "" if it sees to that itself, and "never" if it is to
    find no ranks in its environment. patience: seconds that the others have left when one rank has
    failed. limit: seconds for all.
    """
    job = Path(tempfile.mkdtemp(dir=base() / "jobs"))
    (job / "args").write_bytes(pickle.dumps(args))
    module = Path(inspect.getfile(function)).resolve().relative_to(ROOT).with_suffix("")
    request = dict(job=str(job), module=".".join(module.parts), name=function.__name__, meet=meet)
    request.update(ranks=ranks, env=env or {}, cwd=str(cwd or job), limit=limit, patience=patience)
    server().stdin.write(json.dumps(request) + "\n")
    server().stdin.flush()
    reply = server().stdout.readline()
    assert reply, "the process that forks ranks has died"
    results = [job / f"result{rank}" for rank in range(ranks)]
    results = [pickle.loads(f.read_bytes()) if f.exists() else None for f in results]
    out, err = ((job / name).read_text(errors="replace") for name in ("out", "err"))
    left = json.loads((job / "left").read_text()) if (job / "left").exists() else {}
    shutil.rmtree(job)
    return Done(json.loads(reply), out, err, None, results, **left)


@functools.cache
def server():
    """Starts the process that forks ranks. It ends with this one, which closes its stdin."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kit"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve():
    """Imports all, and then forks the ranks of each request that stdin brings, one a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from tqdm import tqdm
    from transformers import conversion_mapping

    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # its thread may hold a lock at a fork, which then is never released
    late = """peft pytest matplotlib.pyplot transformers.models.llama.modeling_llama
        transformers.optimization transformers.trainer_pt_utils datasets.io.generator
        deepspeed.module_inject.auto_ep_layer deepspeed.runtime.zero.muon.muon_optimizer
        tests.kit tests.runs"""
    for name in (*SCRIPTS, *late.split()):
        with contextlib.suppress(ImportError):  # else seconds in each rank
            importlib.import_module(name)
    importlib.import_module("machinery.launch").use_built()
    for operator in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
        with contextlib.suppress(Exception):  # there is no compiler
            get_accelerator().get_op_builder(operator)().load()
    # Else each rank finds out with a compiler what can be built, for 0.4 s.
    deepspeed.ops.__compatible_ops__  # noqa: B018
    # It builds a table of names, for half a second. No tensor may be computed in this process: a
    # rank that is forked from it would inherit a pool of threads that are not there.
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    gc.collect()
    gc.freeze()  # else each rank's first collection takes a second over what was imported
    for line in sys.stdin:
        print(json.dumps(fork_ranks(**json.loads(line))), file=answers, flush=True)


def fork_ranks(ranks, limit, patience, **request):
    """Forks the ranks of a request and waits for them. Returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deadline, children, codes = time.time() + limit, {}, [None] * ranks
    for rank in range(ranks):
        group = next(iter(children), 0)
        child = os.fork()
        if not child:
            be_rank(rank, ranks, port, group, **request)
        with contextlib.suppress(OSError):  # the child does so, too: who comes first
            os.setpgid(child, group or child)
        children[child] = rank
    group = next(iter(children))
    try:
        while None in codes:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in children:
                codes[children[child]] = code = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.time() + patience) if code else deadline
            elif time.time() > deadline:
                os.killpg(group, signal.SIGKILL)
                deadline = float("inf")
            else:
                time.sleep(0.01)
    except KeyboardInterrupt:
        os.killpg(group, signal.SIGKILL)
        raise
    return codes


def be_rank(rank, ranks, port, group, job, module, name, meet, env, cwd):
    """Does a rank's work, from its fork to its exit."""
    os.setpgid(0, group)
    job = Path(job)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(job / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    if meet != "never":
        numbers = dict(zip(RANK_NAMES, (rank, ranks, rank, ranks, "127.0.0.1", port)))
        os.environ.update({key: str(number) for key, number in numbers.items()})
    os.environ.update(env)
    code = 0
    count_loads()
    try:
        if meet == "before":
            import deepspeed

            deepspeed.init_distributed(verbose=False)
        function = getattr(importlib.import_module(module), name)
        result = function(*pickle.loads((job / "args").read_bytes()))
        (job / f"result{rank}").write_bytes(pickle.dumps(result))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else bool(stop.code)
        if rank == 0:
            rule = getattr(stop.__context__, "rule", "")  # of the Refused that became an exit code
            (job / "left").write_text(json.dumps({"rule": rule, "loads": len(LOADS)}))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


# --------------------------------------------------------------------------------------------------
# What a run leaves behind
# --------------------------------------------------------------------------------------------------
def read_lines(file):
    """Returns the rows of a .jsonl file."""
    return [json.loads(line) for line in open(file)]


def write_lines(file, rows):
    """Writes rows to a .jsonl file. Returns it."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def metrics(folder, clocks=True):
    """Returns the lines of a run's metrics.jsonl, with or without what differs each time."""
    lines = read_lines(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in line.items() if clocks or k not in CLOCKS} for line in lines]


def weights(folder, file="model.safetensors"):
    """Returns {name: tensor} of a saved model."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / file)


def outcome(folder):
    """Returns what a finished run leaves, without its clocks: the lines of metrics.jsonl, and a
    digest of each file of samples, of tokens and of weights, {name: digest}."""
    files = [f for kind in ("*s.jsonl", "**/*.safetensors") for f in folder.glob(kind)]
    names = {str(file.relative_to(folder)): file for file in files}
    digests = {
        name: hashlib.blake2b(file.read_bytes()).hexdigest()
        for name, file in names.items()
        if name != "metrics.jsonl" and not name.startswith("checkpoints")
    }
    return {"metrics": metrics(folder, clocks=False), **digests}


def tree(place):
    """Returns {path: a digest, "folder", or where a link leads} of all below `place`."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = "folder"
        elif path.name != ".lock":
            found[name] = hashlib.blake2b(path.read_bytes()).hexdigest()
    return found


@contextlib.contextmanager
def refuses(rule):
    """Asserts that what happens inside is refused by this rule. Gives what pytest caught."""
    import pytest

    from machinery.refused import Refused

    with pytest.raises(Refused) as caught:
        yield caught
    assert caught.value.rule == rule, caught.value


# --------------------------------------------------------------------------------------------------
# Tiny models and data
# --------------------------------------------------------------------------------------------------
def prepare(folder):
    """Writes models of a few thousand weights, a few dozen rows of the toy's data, and DeepSpeed
    knobs that shard them all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    vocabulary = dict(vocab_size=len(tokenizer) + 8, initializer_range=0.2)
    config = tiny_config(**vocabulary, max_position_embeddings=256)
    torch.manual_seed(0)
    actor = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        actor.lm_head.weight[tokenizer.eos_token_id] *= 6  # responses end at all lengths
    scorer = tiny_config(**vocabulary, max_position_embeddings=256, num_labels=1)
    reward = AutoModelForSequenceClassification.from_config(scorer)
    measured = copy.deepcopy(reward)
    measured.config.score_statistics = [0.1, 0.5]  # of variants/normalize-reward
    models = dict(scratch=config, actor=actor, reward=reward, measured=measured)
    for name, model in models.items():
        model.save_pretrained(folder / "models" / name)
        tokenizer.save_pretrained(folder / "models" / name)
    for name in ("data", "uneven", "runs", "jobs"):
        (folder / name).mkdir()
    for name, count in (("train", 66), ("test", 9)):
        lines = (ROOT / f"recipes/toy/data/{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"data/{name}.jsonl").write_text("".join(lines[:count]))
        short = [json.dumps({"prompt": f"{i}?", "response": " So."}) + "\n" for i in range(count)]
        (folder / f"uneven/{name}.jsonl").write_text("".join(lines[:count:2] + short[1::2]))
    knobs = json.loads((ROOT / "ds_config.json").read_text())
    # else weights this small would not be sharded
    knobs["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (folder / "ds_config.json").write_text(json.dumps(knobs))


def knobs(file, section="zero_optimization", **values):
    """Writes a ds_config.json of which a section has other values than the tests' own. Returns its
    path."""
    found = json.loads((base() / "ds_config.json").read_text())
    found[section].update(values)
    file.write_text(json.dumps(found))
    return str(file)


def tiny_config(**changes):
    """Returns the config of two layers of 32."""
    from transformers import LlamaConfig

    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ends = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return LlamaConfig(**{**shape, **ends, **changes})


def make_tiny_model(**changes):
    """Returns two random layers with the toy's vocabulary: a few milliseconds a forward."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = AutoConfig.from_pretrained(TOKENIZER).vocab_size
    return LlamaForCausalLM(tiny_config(vocab_size=size, initializer_range=0.3, **changes)).eval()


def save_trained(folder, model):
    """Makes folders as steps 1 and 2 leave them, with the toy's tokenizer and random weights.

    "actor" is `model`, a language model, and "judge" a reward model. Returns `folder`.
    """
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    for name, each in (("actor", model), ("judge", LlamaForSequenceClassification(config))):
        each.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / name)
    return folder


def load_model(path, args, stage, dropout=None, tokenizer=None, value_head=None, lora_dim=0):
    """common.load_model with the flags of one model written out."""
    import common
    from machinery import flags

    own = dict(model_name_or_path=path, zero_stage=stage, dropout=dropout, lora_dim=lora_dim)
    return common.load_model(flags.with_flags(args, **own), tokenizer, value_head)


class Knowing:
    """A tokenizer, or the stand-in of one, of which only some ids are known, and none ends."""

    added_tokens_decoder = {}

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.ids = tokenizer, ids

    def __len__(self):
        return len(self.ids)

    def get_vocab(self):
        return {str(i): i for i in self.ids}

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def generate(model, ids, mask, uniforms, tokenizer, synced=False, known=None, **options):
    """ppo.sample with the flags of sampling written out, off unless they are given.

    known: the ids that the tokenizer has; None: all of the model's. Returns responses and
    response_mask, (B, R') each.
    """
    import torch

    import ppo

    off = dict(temperature=1.0, top_k=0, top_p=1.0)
    args = types.SimpleNamespace(**{**off, **options})
    known = known or range(model.config.get_text_config().vocab_size)
    sampled = ppo.sample(args, model, Knowing(tokenizer, known), ids, mask, uniforms, synced)
    responses, _, lengths, _ = sampled
    return responses, (
        torch.arange(responses.shape[1], device=lengths.device) < lengths[:, None]
    ).long()


def uniforms(rows, count, step=0):
    """Returns the random numbers (rows, count) of a rollout's rows 0, 1, ... at seed 1."""
    from machinery import rollout

    keys = [{"row": row, "sample": 0} for row in range(rows)]
    return rollout.uniforms_of(1, step, keys, count)


if __name__ == "__main__":
    serve()
