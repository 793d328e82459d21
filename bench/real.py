"""Runs all three steps on real dialogues, with a model that starts from nothing: see README.

    python bench/real.py FOLDER      with train.jsonl and test.jsonl: chosen and rejected dialogues

One rank of one thread, in fp32. Results lie in output/real.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "toy")]
OUT = ROOT / "output/real"
SHAPE = dict(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=6,
    num_attention_heads=8,
    max_position_embeddings=1024,
)
COMMON = "--preset toy --dtype fp32 --num_warmup_steps 20 --per_device_eval_batch_size 16"
STEPS = {
    "sft": "--num_train_epochs 6 --learning_rate 1e-3 --per_device_train_batch_size 8 "
    "--max_seq_len 512 --eval_steps 75 --train_on all --data_split 1,0,0",
    "reward": "--model_name_or_path {out}/sft --num_train_epochs 2 --learning_rate 1e-4 "
    "--per_device_train_batch_size 8 --max_seq_len 512 --eval_steps 25 --data_split 0,1,0",
    "ppo": "--actor_model_name_or_path {out}/sft --critic_model_name_or_path {out}/reward "
    "--data_split 0,0,1 --max_steps 60 --eval_steps 20 "
    "--actor_learning_rate 1e-4 --critic_learning_rate 2e-4 "
    "--num_eval_prompts 97 --max_prompt_seq_len 256 --max_answer_seq_len 64 --kl_coef 0.05 "
    "--per_device_generation_batch_size 16 --per_device_training_batch_size 16",
}


def make_model(data):
    """Writes a tokenizer of 4,096 entries, made from the dialogues, and a small Llama's config."""
    from make import make_tokenizer
    from transformers import LlamaConfig

    rows = [json.loads(line) for line in open(data / "train.jsonl")]
    texts = [row[side] for row in rows for side in ("chosen", "rejected")]
    tokenizer = make_tokenizer(texts, vocab_size=4096)
    ends = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    config = LlamaConfig(**SHAPE, **ends, vocab_size=len(tokenizer))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(OUT / "model")
    tokenizer.save_pretrained(OUT / "model")


def main():
    data = Path(sys.argv[1]).resolve()
    make_model(data)
    for script, flags in STEPS.items():
        model = f"--model_name_or_path {OUT}/model" if script == "sft" else ""
        given = f"{COMMON} {model} --data_path {data} {flags.format(out=OUT)}"
        command = [sys.executable, f"{script}.py", *given.split(), "--output_dir", OUT / script]
        subprocess.run([*command, "--overwrite"], cwd=ROOT, check=True)
    for script in STEPS:
        lines = open(OUT / f"{script}/metrics.jsonl").read().splitlines()
        found = [record for record in map(json.loads, lines) if any("eval" in k for k in record)]
        for name in [name for name in found[-1] if name.startswith("eval")]:
            print(f"{script:7} {name:22}", *(record.get(name) for record in found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
