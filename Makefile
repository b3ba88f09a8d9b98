# `make` alone lists what there is. Everything runs in .venv, which the first command makes.

PYTHON ?= python3
TORCH ?= 2.13.0
PY := .venv/bin/python

# Inductor takes g++ unless CXX says otherwise; make's own default for CXX would hide that there is none.
ifeq ($(origin CXX),default)
CXX := $(firstword $(shell command -v g++ || command -v clang++ || command -v c++))
endif
export CXX

.DEFAULT_GOAL := help
.PHONY: help env env-lint demo test test-all lint tables gaps aims peaks clock speed bench bench-full gpu clean

# A command with an Inductor cache of its own, removed afterwards: no result of an earlier run is taken for this one's.
define with_fresh_cache
@cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && trap 'exit 130' INT TERM && \
TORCHINDUCTOR_CACHE_DIR="$$cache" $(1)
endef

# Each file of tests runs in one of up to four processes; they were seen to take 1.2 GB each.
TESTS := $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## Set up .venv only (TORCH=2.13.0 installs that torch, TORCH= keeps what is there; PYTHON=python3.12)
	@$(PYTHON) tools/set_up.py all --torch "$(TORCH)"

env-lint:
	@$(PYTHON) tools/set_up.py lint

demo: env ## Train a small GPT-2 with and without recompile (TEXT=file trains on that text)
	@$(PY) -m demo.train_gpt2 $(if $(TEXT),--text "$(TEXT)")

test: env ## Run the tests, without the slow ones
	$(call with_fresh_cache,$(TESTS) -m "not slow and not gpu")

test-all: env ## Run the tests, with the slow ones
	$(call with_fresh_cache,$(TESTS) -m "not gpu")

lint: env-lint ## Check style and imports
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check

tables: env ## Plan GPT-3 175B and a 70B model for GPUs that are not here: benchmarks/tables.md
	@$(PY) -m benchmarks.tables

gaps: env ## Compare mincut with proven optima on small graphs (some minutes: benchmarks/gaps.md)
	@$(PY) -m benchmarks.gaps

aims: env ## Plans of the reference models for a GPU that is not here, beside their aims (MODELS="gpt-6x1024"): benchmarks/aims.md
	$(call with_fresh_cache,$(PY) -m benchmarks.aims $(MODELS))

peaks: env ## Measure ten models' peaks on the CPU, ours and peers (MODELS="mlp gpt"; hours, resumable): benchmarks/peaks.md
	@$(PY) -m benchmarks.peaks $(MODELS)

clock: env ## Compare predicted with measured step times of plans on the CPU (MODELS="gpt"; half an hour): benchmarks/clock.md
	@$(PY) -m benchmarks.clock $(MODELS)

speed: env ## Time the planner on GPTs of 6 to 96 layers (LAYERS="6 12"; some minutes): printed
	@$(PY) -m benchmarks.speed $(LAYERS)

bench: env ## Ours beside eager, Inductor and checkpointing, two models, in minutes: benchmarks/out/bench.md
	@$(PY) -m benchmarks.bench --quick $(MODELS)

bench-full: env ## Ours beside every peer (MODELS="gpt t5"; hours, resumable): benchmarks/bench.md, bench.json and plots
	@$(PY) -m benchmarks.bench $(MODELS)

gpu: env ## Measure plans on a CUDA GPU (six minutes: benchmarks/results) and run the tests that need one
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or (print("make gpu needs a CUDA GPU, and torch " \
	+ torch.__version__ + " finds none: run it on a machine with one, with a CUDA build of torch.", \
	file=sys.stderr), sys.exit(2))'
	$(call with_fresh_cache,$(PY) -m benchmarks.gpu)
	$(call with_fresh_cache,$(PY) -m pytest -m gpu tests/gpu)

clean: ## Remove .venv and all else that these commands made
	rm -rf .venv build dist *.egg-info demo/out benchmarks/out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
