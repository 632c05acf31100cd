# Two commands: `make run` serves, `make test` tests. Both set everything up in .venv first. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Model to serve: a directory or a Hugging Face hub id; empty is the bundled demo model. ARGS: more flags for `chairlift up`.
MODEL ?=
ARGS ?=

# Where PyTorch's CPU builds are: tried first on a machine without an NVIDIA GPU. Empty: not tried.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# What to ask the configured package index for if that one does not answer.
TORCH_FALLBACK ?= torch==2.13.0

# Processes that the tests are divided among, file by file; those with Docker share one engine and go by themselves.
TEST_WORKERS ?= 2
IN_PARALLEL := -n $(TEST_WORKERS) --dist loadfile

# A variable that no rule reads has no effect but in the environment of the programs, where some belong.
VARIABLES := PYTHON VENV MODEL ARGS TORCH_CPU_INDEX TORCH_FALLBACK TORCH_INDEX TEST_WORKERS PYTEST_ARGS NAME STAGE SHELL CHAIRLIFT_% HF_% PIP_% CUDA_%
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNKNOWN := $(strip $(filter-out $(VARIABLES),$(GIVEN)))
ifneq ($(UNKNOWN),)
$(warning no rule reads $(UNKNOWN); flags of the server go into ARGS, such as make run ARGS="--port 50061 --http-port 8001")
endif

# Python caches bytecode even if the environment says not to: without it, collecting the tests takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: gpu-check chart-tools chart-check compose-check help run lock test test-slow mutants test-portable test-busy check lint types stubs setup setup-dev check-extras demo-model bench bench-batching bench-hf clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*##/ { printf "  make %-15s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: setup  ## engine + frontend on 127.0.0.1:50051, HTTP on 8000, with one completion as a smoke test (MODEL=... ARGS="...")
	@exec $(BIN)/chairlift up --smoke-test $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: setup-dev  ## the test suite, minutes (TEST_WORKERS=... processes, 2.5 GB each)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow and not docker" $(PYTEST_ARGS)

test-slow: setup-dev $(VENV)/other-triton  ## the long and the timing-bound tests, and those of containers where there is a Docker engine
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "slow and not docker" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m docker $(PYTEST_ARGS) tests/deploy

mutants: setup-dev  ## mutation testing of a sample of files: which changes does no test notice? (ARGS="FILE --per-file 0")
	$(BIN)/python .ci/mutants.py $(ARGS)

test-portable: setup-dev  ## the numerical tests as on other CPUs (AVX2, AVX-512, neither) and on 1, 2 and 4 cores (ARGS="--machines haswell")
	$(BIN)/python -m tests.portability $(ARGS)

test-busy: setup-dev  ## the test suite beside a load of 10 and more processes (ARGS="--processes 20")
	$(BIN)/python .ci/busy.py $(ARGS) -- $(MAKE) test

check: lint types test  ## linters, types and the test suite

lint: setup-dev  ## style and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup-dev  ## mypy, strict
	$(BIN)/mypy

stubs: setup-dev  ## generate the gRPC stubs from protos/
	$(BIN)/python protos/generate.py

# Needs the network. TORCH_INDEX=URL adds the hashes of torch's builds there, such as those for an older CUDA.
lock: setup-dev  ## renew the images' lock files: hashes of all Python packages, digest of the base image
	$(BIN)/python deploy/lock.py $(TORCH_INDEX)

check-extras: setup-dev  ## install each extra alone into an environment of its own and import what it promises
	$(BIN)/python .ci/check_extras.py

chart-tools: setup-dev  ## helm and Kubernetes' schemas, for the tests of the chart; into the user's cache folder, once
	$(BIN)/python -m tests.support.chart_tools

chart-check: chart-tools  ## deploy/helm: lint, and the objects of seven sets of values against three versions of Kubernetes
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/deploy/chart

compose-check: setup-dev  ## compose.yaml with the Docker engine at hand: build, up, kill, restart, bad input, down
	$(BIN)/python -m pytest -m docker tests/deploy

demo-model: setup-dev  ## train the bundled demo model anew
	$(BIN)/python -m tests.support.demo_model.train

bench: setup-dev  ## one benchmark of the engine (NAME=list shows all; ARGS="--quick")
	@$(BIN)/python -m engine.bench $(or $(NAME),list) $(ARGS)

bench-batching: setup-dev  ## static against continuous batching, one engine, slot by slot (ARGS="--quick", "--trace FILE")
	@$(BIN)/python -m loadgen.experiments.batching $(ARGS)

bench-hf: setup-dev  ## transformers' generate in padded batches of 4 to 128 against the pair (ARGS="--quick")
	@$(BIN)/python -m loadgen.experiments transformers-batches $(ARGS)

# Plain Python, nothing installed: for a machine with a GPU and without a network.
gpu-check: export PYTHONPATH := .:protos:$(PYTHONPATH)
gpu-check:  ## on a GPU: measure against goals and floors (STAGE=kernels|decode|mix|pair|invariance|peers ARGS="--first-contact")
	@$(PYTHON) -m engine.bench gpu-check $(if $(STAGE),--stage $(STAGE)) $(ARGS)

setup: $(VENV)/.installed  ## what `make run` needs
setup-dev: $(VENV)/.installed-dev  ## what `make test` needs

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Chairlift needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Say which: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)  # Ctrl-C may have left one without pip
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# --no-compile: pip would compile 17 s of bytecode, of which a start needs 3 s; Python compiles that when it first imports it.
# A torch that fits and is installed already is kept. Without an NVIDIA GPU a CPU build is looked for first, because the ordinary
# one brings gigabytes of CUDA.
$(VENV)/.torch: $(VENV)/.python
	@if $(BIN)/python -c 'from importlib.metadata import version; v = tuple(map(int, version("torch").split("+")[0].split(".")[:2])); raise SystemExit(not (2, 11) <= v < (2, 14))' 2>/dev/null; then \
	  echo "torch is installed already"; \
	elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	  echo "NVIDIA GPU found: the ordinary torch build comes with the rest"; \
	else \
	  echo "No NVIDIA GPU: installing a CPU build of torch, 200 MB"; \
	  { [ -n "$(TORCH_CPU_INDEX)" ] && $(BIN)/python -m pip install --quiet --no-compile --timeout 8 --retries 0 --no-deps --index-url "$(TORCH_CPU_INDEX)" 'torch>=2.11,<2.14' 2>/dev/null; } || \
	  { echo "No CPU build at \"$(TORCH_CPU_INDEX)\": asking the configured index for $(TORCH_FALLBACK), gigabytes with CUDA"; \
	    $(BIN)/python -m pip install --quiet --no-compile --no-deps '$(TORCH_FALLBACK)'; }; \
	fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "Installing Chairlift and the packages that it needs: minutes on a slow network (PIP_VERBOSE=1 shows what pip does)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[engine,frontend,loadgen,transformers]'
	@$(BIN)/python -c 'import engine, frontend, loadgen, torch, grpc, tokenizers, matplotlib'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	@echo "Installing Chairlift, the packages that it needs and its development tools: minutes (PIP_VERBOSE=1 shows what pip does)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -c 'import engine, frontend, loadgen, torch, grpc, tokenizers, matplotlib, pytest, transformers'
	@touch $@ $(VENV)/.installed

# The compile check runs with both ends of the range of Triton's versions.
$(VENV)/other-triton: pyproject.toml $(VENV)/.installed-dev
	@$(BIN)/python .ci/other_triton.py $@

clean:  ## remove .venv and caches
	rm -rf "$(VENV)" build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
