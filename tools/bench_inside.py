"""What bench.py measures inside a process of its own: `bench_inside.py PART ...`.

prepare   models with random weights, a tokenizer, and data: the same bytes each time
machine   the limit of arithmetic: GFLOP/s of the model's own matrix products
decode    sampling by itself, by our loop or by transformers' `generate`
script    main() of a script on a GPU, whose memory is known in that process alone; or with
          `generate` in place of ppo.sample
"""

import functools
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common import DTYPES
from machinery.folders import padding_token

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- What is measured on ----
def llama(width, layers, heads, inner, vocabulary=128256, tied=True, **others):
    """Returns a Llama's config."""
    return transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **others,
    )


SHAPES = {
    "tiny": lambda: llama(256, 6, 8, 688, 4096, False),
    "llama-1b": lambda: llama(2048, 16, 32, 8192, num_key_value_heads=8, head_dim=64),
    "llama-3b": lambda: llama(3072, 28, 24, 8192, num_key_value_heads=8, head_dim=128),
    "llama-7b": lambda: llama(4096, 32, 32, 11008, 32000, False),
    "opt-1.3b": lambda: transformers.OPTConfig(
        hidden_size=2048,
        word_embed_proj_dim=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        ffn_dim=8192,
        dropout=0.0,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ),
}


def prepare(work, rows, held_out, pretrained):
    """Writes tokenizer, models and data of all rows. pretrained: the folder of --model, or ""."""
    sys.path.insert(0, str(ROOT / "recipes/toy"))
    from make import make_tokenizer

    work, rows = Path(work), json.loads(rows)
    folders = (
        Path(os.environ.get("RLHF_HH", ROOT / "../shared/data/hh")),
        ROOT / "recipes/toy/data",
    )
    source = next(folder for folder in folders if (folder / "train.jsonl").exists())
    texts = {
        part: [json.loads(line) for line in open(source / f"{part}.jsonl")]
        for part in ("train", "test")
    }
    both = [row[side] for row in texts["train"] for side in ("chosen", "rejected")]
    if pretrained:
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
        # TRL's PPO masks by `ids != pad`: where padding is EOS it would not see the ends of turns
        if tokenizer.pad_token in (None, tokenizer.eos_token):
            tokenizer.pad_token = padding_token(tokenizer, vocab_size=0)
    else:
        tokenizer = make_tokenizer(both, vocab_size=4096)
    trained = {"tiny"} | {row["model"] for row in rows if row["script"] == "ppo"}
    for name in {row["model"] for row in rows}:
        for kind, folder in (("CausalLM", name), ("SequenceClassification", f"{name}-score")):
            if pretrained:
                copy_model(pretrained, work / folder, kind, tokenizer.pad_token_id)
            else:
                write_model(work / folder, SHAPES[name](), kind, name in trained)
            tokenizer.save_pretrained(work / folder)
    if rows[0]["model"] not in ("tiny", "real"):
        texts = long_texts("".join(row["chosen"] for row in texts["train"]))
    texts["test"] = texts["test"][: int(held_out)]
    for count in {row["data"] for row in rows}:
        folder = work / f"data-{count}"
        folder.mkdir(exist_ok=True)
        for part, found in (("train", texts["train"][:count]), ("test", texts["test"])):
            lines = "".join(json.dumps(row) + "\n" for row in found)
            (folder / f"{part}.jsonl").write_text(lines)


def write_model(folder, config, kind, with_weights):
    """Writes a model. Without weights a script draws them; step 3 takes none without."""
    model_class = getattr(transformers, type(config).__name__.replace("Config", f"For{kind}"))
    config.architectures, config.num_labels = [model_class.__name__], 1
    if not with_weights:
        config.save_pretrained(folder)
    elif not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder, max_shard_size="100GB")


SIZES = {"21M": (512, 1408, 4), "69M": (768, 2048, 8), "176M": (1024, 2816, 12)}  # for `full_rows`


def full_rows(folder, size, weights=False):
    """Writes a model of one of SIZES, with a vocabulary of 8,000, a reward model like it, and data
    whose rows fill every length."""
    hidden, intermediate, layers = SIZES[size]
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent.parent / "recipes/toy/model")
    for name, kind in ((size, "CausalLM"), (f"{size}-reward", "SequenceClassification")):
        config = llama(hidden, layers, hidden // 64, intermediate, 8000, tied=False)
        write_model(folder / name, config, kind, weights)
        tokenizer.save_pretrained(folder / name)
    (folder / "data").mkdir(exist_ok=True)
    text = "When can I see the fox at the camp? " * 100
    for split, count in (("train", 64), ("test", 4)):
        rows = [
            {"prompt": f"{split}{i} {text}", "chosen": f" a{i} {text}", "rejected": f" b{i} {text}"}
            for i in range(count)
        ]
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def copy_model(pretrained, folder, kind, pad_token_id):
    """Writes a pretrained model, or a reward model that is made from it: its head is random."""
    torch.manual_seed(0)
    model_class = getattr(transformers, f"AutoModelFor{kind}")
    model = model_class.from_pretrained(pretrained, num_labels=1, pad_token_id=pad_token_id)
    model.save_pretrained(folder, max_shard_size="100GB")


def long_texts(text):
    """Returns rows that are longer than any limit, so that every row is cut to full length."""
    made = [
        {
            "prompt": f"\n\nHuman: {text[i * 30 :][:3000]}\n\nAssistant:",
            "chosen": text[i * 50 :][:16000],
            "rejected": text[i * 70 :][:16000],
        }
        for i in range(1, 321)
    ]
    return {"train": made[:-16], "test": made[-16:]}


# ---- Limits ----
def best_seconds(function):
    """Returns the shortest of up to 20 tries in up to 2 s."""
    times = []
    while len(times) < 20 and sum(times) < 2:
        get_accelerator().synchronize()
        started = time.perf_counter()
        function()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def machine(side, model, dtype):
    """GFLOP/s of the model's own matrix products."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shapes = [m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Linear)]
    rows = 16384 if DEVICE.type == "cuda" else 1024
    options, flops, seconds = dict(dtype=DTYPES[dtype], device=DEVICE), 0, 0.0
    for shape in set(shapes):
        x, weight = torch.randn(rows, shape[1], **options), torch.randn(shape, **options)
        product = functools.partial(torch.nn.functional.linear, x, weight)
        seconds += shapes.count(shape) * best_seconds(product)
        flops += shapes.count(shape) * 2 * rows * shape.numel()
    return {"work": flops / 1e9, "seconds": [seconds]}


def read_rate(size):
    """Returns at how many bytes a second so many bytes are read."""
    memory = torch.ones(int(size) // 4, device=DEVICE)
    written = best_seconds(lambda: memory.add_(1)) / 2  # and read
    return memory.nbytes / min(best_seconds(memory.sum), written)


# ---- Decoding ----
def plain_generate(args, model, tokenizer, ids, mask, uniforms, synced=False):
    """transformers' `generate` with ppo.sample's arguments; it samples from the whole distribution,
    and keeps no log-probs. On a GPU it has a static cache, for which it compiles the model."""
    config = transformers.GenerationConfig(
        max_new_tokens=uniforms.shape[1],
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        cache_implementation="static" if DEVICE.type == "cuda" else None,
    )
    # else the model's own EOS would be used
    own, model.generation_config = model.generation_config, config
    found = model.generate(ids, attention_mask=mask, generation_config=config)
    model.generation_config = own
    responses = found[:, ids.shape[1] :]
    ended = responses == tokenizer.eos_token_id
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, responses.shape[1])
    return responses, torch.zeros(responses.shape, device=DEVICE), lengths, ended.any(1)


@torch.no_grad()
def decode(side, model, dtype, *words):
    """Samples --answer tokens after each of --rows prompts of --prompt tokens, without EOS."""
    from machinery import rollout
    from tests import kit

    names = [word.removeprefix("--") for word in words[::2]]
    size = SimpleNamespace(**dict(zip(names, map(int, words[1::2]))))
    torch.manual_seed(0)
    config, dtype = AutoConfig.from_pretrained(model), DTYPES[dtype]
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    no_end = SimpleNamespace(pad_token_id=0, eos_token_id=-1)
    ids = torch.randint(2, 4000, (size.rows, size.prompt), device=DEVICE)
    mask, seconds = torch.ones_like(ids), []
    uniforms = torch.rand(size.rows, size.answer, device=DEVICE, dtype=torch.float64)
    for _ in range(4):
        get_accelerator().synchronize()
        started = time.perf_counter()
        if side == "generate":
            responses = plain_generate(None, model, no_end, ids, mask, uniforms)[0]
        else:
            responses = kit.generate(model, ids, mask, uniforms, no_end)[0]
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - started)
        assert responses.shape == (size.rows, size.answer)
    work = size.rows * size.answer
    # A token reads all weights and the cache; a prompt's forward makes the logits of its last.
    weights = model.num_parameters()
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    kept = rollout.numbers_of_a_token(config)
    cached = size.rows * (size.prompt + size.answer / 2)  # tokens, on average
    token_bytes = (weights + cached * kept) * dtype.itemsize
    products = weights * size.answer + (weights - head) * size.prompt
    return {
        "work": work,
        "seconds": [statistics.median(seconds[1:])],  # the first warms up
        "flops": 2 * size.rows * products / work,
        "reading_seconds": token_bytes / read_rate(token_bytes) / size.rows,
    }


def script(side, name, *flags):
    """Runs main() of a script, as a user does. It leaves its own metrics."""
    module = importlib.import_module(name)
    if side == "generate":
        # it tells no log-probs, so the check that compares them with those of scoring only warns
        flags = [*flags, "--allow_mismatch", "1"]
        module.sample = plain_generate
    sys.argv = [f"{name}.py", *flags]
    try:
        module.main()
    except SystemExit as stop:
        if stop.code:
            raise
    return {}


if __name__ == "__main__":
    part, *given = sys.argv[1:]
    if part == "prepare":
        prepare(*given)
    else:
        result, *given = given
        found = {"machine": machine, "decode": decode, "script": script}[part](*given)
        if DEVICE.type == "cuda":
            found["gb"] = torch.cuda.max_memory_allocated() / 2**30
        Path(result).write_text(json.dumps(found))
