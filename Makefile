.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV := .venv
ORACLE := .venv-oracle
ORACLE_TESTS := tests/models/test_eagle_speculators.py tests/models/test_block_speculators.py tests/models/test_mtp.py
# What test-fast runs: seconds of CPU per file, chosen by measurement; whole engines, oracles and kernels are left out.
FAST_TESTS := tests/config tests/metrics tests/test_architecture.py tests/test_house_rules.py tests/test_plugins.py tests/docs/test_design.py tests/graphs \
	$(addprefix tests/engine/test_,scheduler.py kv_cache.py finish.py upload.py bounded.py machine.py lossless.py) \
	$(addprefix tests/lab/test_,verdict.py outcome.py) tests/sampling/test_verifier.py tests/workloads/test_reading.py
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RECIPE_FILES := pyproject.toml constraints.txt
ARGS ?=
# Two workers keep a module's tests together, so that a checkpoint fixture loads once. Modules come by name: the last ones are
# short, where xdist would begin those of few tests last, long ones among them, which leaves a worker idle.
PYTEST_ARGS ?= -q -n 2 --dist loadfile --no-loadscope-reorder

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.stamp-test ## Decode the tiny workload and report; options: make run ARGS="method=none"
	$(BIN)/python -m hydraspec $(ARGS)

setup: $(VENV)/.stamp-dev ## Create .venv with everything a developer needs

test: $(VENV)/.stamp-test ## Run the test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

test-fast: $(VENV)/.stamp-test ## Run the tests of one edit: no long engine, model or kernel runs, no zoo, no gate
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(FAST_TESTS) $(ARGS)

test-slow: $(VENV)/.stamp-test ## Run every CPU test, the long scenario runs included
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not gpu and not multi_gpu" --timeout 3600 $(ARGS)

test-oracle: $(ORACLE)/.stamp ## Run the tests that need the speculators package, in an environment of their own
	$(ORACLE)/bin/python -m pytest -q $(ORACLE_TESTS) $(ARGS)

fmt: $(VENV)/.stamp-dev ## Format the sources, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.stamp-dev ## Check rules and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.stamp-dev ## Check types with mypy
	$(BIN)/mypy

check: lint type test ## Lint, type and test: what has to be green

wheel: $(VENV)/.stamp-dev ## Build the wheel, then compose a run from it where the checkout cannot be seen
	bash .ci/wheel $(BIN)/python

bench: $(VENV)/.stamp-test ## Time the native engine against transformers on this CPU
	$(BIN)/python tests/bench/transformers_on_cpu.py $(ARGS)

bench-gpu: $(VENV)/.stamp-test ## Time tokens on this GPU, native against vLLM: ARGS="target=gemma4_31b"
	$(BIN)/python -m hydraspec $(if $(findstring experiment=,$(ARGS)),,experiment=bench_gemma4) $(ARGS)

bench-kernels: $(VENV)/.stamp-test ## Time every kernel on this GPU against its floor
	for bench in kernels/benchmarks/bench_*.py; do $(BIN)/python $$bench; done

test-gpu: $(VENV)/.stamp-test ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

test-multi-gpu: $(VENV)/.stamp-test ## Run the tests that need two or more CUDA devices
	$(BIN)/python -m pytest -q -n 0 -m multi_gpu $(ARGS)

# PART=cells, tests, memcheck or speed; CELLS=<names or patterns> runs some of a part's cells again.
verify-gpu: $(VENV)/.stamp-test ## The device gate, before a change to engine, models or kernels is done: PART=cells
	$(BIN)/python tests/gate/verify.py $(ARGS)

table: $(VENV)/.stamp-test ## Measure every tiny target with every drafter: the table of docs/results.md
	$(BIN)/python tests/bench/results_table.py $(ARGS)

sweep: $(VENV)/.stamp-test ## Sweep K over the default target, each K against its own baseline
	$(BIN)/python -m hydraspec -m experiment=k_sweep $(ARGS)

clean: ## Remove caches and build products; .venv and outputs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path "./.venv*" -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself: the resolver then takes the build that pip.conf or TORCH_INDEX offers
# (TORCH_INDEX=https://download.pytorch.org/whl/cpu keeps the CUDA libraries out) and later steps keep it.
$(VENV)/.stamp-test: $(RECIPE_FILES) | $(BIN)/python
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-test
	$(PIP) install -c constraints.txt -e ".[dev]"
	touch $@

# speculators pulls torchvision and torchaudio in, built for PyPI's torch: beside another build they do not load, and none
# of its model classes reads them.
$(ORACLE)/.stamp: $(RECIPE_FILES)
	test -x $(ORACLE)/bin/python || $(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python -m pip --disable-pip-version-check install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(ORACLE)/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e ".[test,oracle]"
	$(ORACLE)/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio
	touch $@

.PHONY: help run setup test test-fast test-slow test-oracle test-gpu test-multi-gpu verify-gpu fmt lint type check wheel bench bench-gpu bench-kernels table sweep clean
