# The commands of contributors and CI. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE ?= $(HOME)/.cache/goodput
export GOODPUT_CACHE := $(CACHE)
# Newer versions of pip read the second variable when they install the build back end.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_CACHE_DIR ?= $(CACHE)/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Containers often set this variable. Then each start of a command would compile its modules again,
# which takes a third of the start, and each worker of pytest all tests.
export PYTHONDONTWRITEBYTECODE :=

RUNTIME := replay,engine,operator,completion
TESTS ?=
# Most tests wait half of the time. A worker runs complete files, and starts its own cluster for the
# tests that need one. WORKERS=0 runs the tests one after the other.
WORKERS ?= 2
# A worker of numpy's BLAS that waits for its next product keeps a core busy, and pytest's workers need
# them all.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

.PHONY: help setup torch smollm2 plan-smollm2 chat demo test test-torch test-foreign test-s3 check lint types arch golden e2e cluster cluster-down bench chart picture clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Goodput needs Python 3.11 or later, and {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Two stamps: the demo installs the runtime packages, the tests add the developer's tools. Neither
# installs torch.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[$(RUNTIME)]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[$(RUNTIME),dev]'
	@touch $(VENV)/.runtime $@

setup: $(VENV)/.dev ## create .venv with the packages of the tests (without torch)

torch: | $(VENV)/bin/python ## install torch once into the download cache (5 GB), and link it into .venv
	@$(BIN)/python -m tools.torch_packages $(VENV)

# The first prerequisite says what the others download.
smollm2: plan-smollm2 $(VENV)/.runtime torch ## download a small chat model (0.6 GB), and torch
	@$(BIN)/python -m tools.smollm2
	@$(BIN)/python -m tools.foreign.serving

plan-smollm2: | $(VENV)/bin/python
	@$(BIN)/python -m tools.smollm2 --plan

chat: smollm2 ## talk to a small real model on this machine (6.1 GB and five minutes the first time)
	@$(BIN)/python -m tools.chat examples/smollm2.yaml

demo: $(VENV)/.runtime ## serve two emulated replicas, replay the sample trace, show the report
	$(BIN)/replay --trace sample --rate-scale 3 -f examples/chat.yaml

test: $(VENV)/.dev ## run the tests
	$(PYTEST) $(TESTS)

# Only files with the marker are collected: all others take ten seconds in each worker.
TORCH_TESTS = $(or $(TESTS),$(shell grep -rl --include='test_*.py' 'mark\.torch' tests))

test-torch: $(VENV)/.dev smollm2 ## run the tests that need torch
	OMP_NUM_THREADS=1 $(PYTEST) -m torch $(TORCH_TESTS)

test-foreign: $(VENV)/.dev ## install llama_cpp.server and transformers serve (15 minutes, 6 GB), and replay against them
	$(BIN)/python -m tools.foreign
	@$(BIN)/python -m tools.cluster build
	GOODPUT_FOREIGN=1 $(BIN)/pytest tests/replay/foreign tests/e2e/operator/test_real_servers_in_pods.py $(TESTS)

test-s3: $(VENV)/.dev ## build an S3 server (two minutes), and test replays in the cluster with it
	$(BIN)/python -m tools.s3
	@$(BIN)/python -m tools.cluster build
	GOODPUT_S3=1 GOODPUT_REQUIRE_CLUSTER=1 $(BIN)/pytest tests/e2e/operator/test_object_storage.py $(TESTS)

check: lint types arch ## lint, types and import contracts

lint: $(VENV)/.dev ## ruff check, ruff format, and the language rules of CONTRIBUTING.md
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_language.py

types: $(VENV)/.dev ## mypy --strict for code, tests, benchmarks and tools
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks tools

arch: $(VENV)/.dev ## check the import contracts of pyproject.toml
	$(BIN)/lint-imports

golden: $(VENV)/.dev ## rewrite the golden files; read the diff before committing it
	$(BIN)/pytest --rewrite-golden tests -m golden

# Only KUBECONFIG on make's command line selects a cluster; the environment variable does not.
ifeq ($(origin KUBECONFIG),command line)
e2e: export GOODPUT_KUBECONFIG := $(abspath $(KUBECONFIG))
# Values of the chart with the images that the cluster has; the chart's defaults unless given.
e2e: export GOODPUT_VALUES := $(abspath $(VALUES))
# Two workers would install two operators with the same cluster-wide objects.
e2e: WORKERS := 0
else
# These tests wait for more than half of the time.
e2e: WORKERS := 3
endif

e2e: $(VENV)/.dev ## end-to-end tests on local processes and a cluster (KUBECONFIG=FILE [VALUES=FILE] selects one)
	@test -n "$${GOODPUT_KUBECONFIG:-}" || $(BIN)/python -m tools.cluster build
	GOODPUT_REQUIRE_CLUSTER=1 $(PYTEST) tests/e2e tests/charts $(TESTS)

cluster: $(VENV)/.dev ## start a Kubernetes cluster that runs until make cluster-down; no container engine needed
	@$(BIN)/python -m tools.cluster up

cluster-down: ## stop the cluster of `make cluster`
	@$(BIN)/python -m tools.cluster down

bench: $(VENV)/.dev ## run every benchmark in its short form (docs/benchmarks.md)
	$(BIN)/python -m benchmarks

picture: $(VENV)/.runtime ## draw docs/images/report.png from RUN=DIR (requires the system package chromium)
	$(BIN)/python docs/images/draw.py $(RUN) docs/images/report.png

chart: $(VENV)/.dev ## render and lint the Helm chart
	@$(BIN)/python -m tools.cluster build
	GOODPUT_REQUIRE_CLUSTER=1 $(BIN)/pytest tests/charts

clean: ## remove the files of the other targets, except the download cache
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
