# Everything a contributor or CI runs. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE ?= $(HOME)/.cache/goodput
export GOODPUT_CACHE := $(CACHE)
# The second name is what newer pip reads for the build back end, which it installs apart.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_CACHE_DIR ?= $(CACHE)/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

RUNTIME := replay,engine,operator,completion
TESTS ?=
# Most tests wait for something half of the time. Each worker takes whole files, and starts a
# cluster of its own for those that need one. WORKERS=0: one after the other.
WORKERS ?= 2
PYTEST = $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile

.PHONY: help setup demo test test-torch check lint types arch golden e2e cluster cluster-down bench chart picture clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Goodput needs Python 3.11 or later, and {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Two stamps: the demo installs what users run, the tests add the developer's tools. Neither
# needs torch.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[$(RUNTIME)]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[$(RUNTIME),dev]'
	@touch $(VENV)/.runtime $@

$(VENV)/.torch: $(VENV)/.dev
	$(BIN)/pip install --quiet --editable '.[$(RUNTIME),dev,torch]'
	@touch $@

setup: $(VENV)/.dev ## make .venv with everything the tests need (no torch)

demo: $(VENV)/.runtime ## serve two emulated replicas, replay the sample trace, show the report
	$(BIN)/replay --trace sample --rate-scale 3 -f examples/chat.yaml

test: $(VENV)/.dev ## run the tests
	$(PYTEST) $(TESTS)

test-torch: $(VENV)/.torch ## run the tests that need torch, which this installs
	$(PYTEST) -m torch $(TESTS) || test $$? -eq 5  # 5: there are none yet

check: lint types arch ## lint, types and import contracts

lint: $(VENV)/.dev ## ruff, format included, and the language of CONTRIBUTING.md
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_language.py --counts

types: $(VENV)/.dev ## mypy --strict, tests, benchmarks and tools too
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks tools

arch: $(VENV)/.dev ## the import contracts of pyproject.toml
	$(BIN)/lint-imports

golden: $(VENV)/.dev ## rewrite the golden files; read the diff before committing it
	$(BIN)/pytest --rewrite-golden tests -m golden

# A cluster is given on make's command line only: one that a shell happens to know is left alone.
ifeq ($(origin KUBECONFIG),command line)
e2e: export GOODPUT_KUBECONFIG := $(abspath $(KUBECONFIG))
# Values of the chart that say which images that cluster has; the chart's own unless given.
e2e: export GOODPUT_VALUES := $(abspath $(VALUES))
# Two workers would install two operators, of one name for all that is the cluster's.
e2e: WORKERS := 0
endif

e2e: $(VENV)/.dev ## end to end: local processes, and a real cluster (KUBECONFIG=FILE [VALUES=FILE]: that one)
	@test -n "$${GOODPUT_KUBECONFIG:-}" || $(BIN)/python -m tools.cluster build
	GOODPUT_REQUIRE_CLUSTER=1 $(PYTEST) tests/e2e tests/charts $(TESTS)

cluster: $(VENV)/.dev ## start a Kubernetes cluster without a container engine and keep it
	@$(BIN)/python -m tools.cluster up

cluster-down: ## end the cluster that `make cluster` started
	@$(BIN)/python -m tools.cluster down

bench: $(VENV)/.dev ## every benchmark, short; see docs/benchmarks.md for the long ones
	$(BIN)/python -m benchmarks

picture: $(VENV)/.runtime ## redraw docs/images/report.png from RUN=DIR (needs the system package chromium)
	$(BIN)/python docs/images/draw.py $(RUN) docs/images/report.png

chart: $(VENV)/.dev ## render and lint the Helm chart
	@$(BIN)/python -m tools.cluster build
	GOODPUT_REQUIRE_CLUSTER=1 $(BIN)/pytest tests/charts

clean: ## remove what the targets above made, except the download cache
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
