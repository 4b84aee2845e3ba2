# Everything a contributor runs. `make help` lists it.
# All Python runs in .venv; big downloads and builds go to the cache folder outside the checkout.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help prerequisites venv cluster demo soak chaos test test-unit test-node test-gpu test-fast lint types arch fmt proto docs \
	manifests bench-extender bench-pack bench-planned bench-queue ci clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

prerequisites: ## install what this machine lacks: Slurm, munge, Go (says what it does)
	@$(PYTHON) -m tests.support.bootstrap

venv: prerequisites $(VENV)/.ready ## make the virtual environment in .venv

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "[make] Python packages -> $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	@touch $@

cluster: venv ## start a real cluster (NODES=64 GPUS=8) and keep it until Ctrl-C
	@$(BIN)/python -m tests.support.cluster up --nodes $${NODES:-64} --gpus $${GPUS:-8}

demo: venv ## watch a real kube-scheduler and a real Slurm share GPUs
	@$(BIN)/python -m demo

test: venv ## all tests on real Slurm, Kubernetes and nodes (as root; 50 min on two cores); those on a GPU: test-gpu
	@$(PYTEST) -n 2 --ignore=tests/gpu $(ARGS)

test-unit: venv ## unit, property and contract tests only (about a minute)
	@$(PYTEST) tests/unit tests/property tests/contract $(ARGS)

test-node: venv ## of these the node agent's, on real kubelets with real containers (13 min); ends with one JSON line
	@$(PYTEST) tests/node $(ARGS)

test-gpu: venv ## discovery, map, idle check and process list against a real NVIDIA driver, where there is one
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nvidia]'
	@$(PYTEST) tests/gpu -rs $(ARGS)

lint: venv ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

fmt: venv ## let ruff format and fix
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

types: venv ## mypy --strict
	@$(BIN)/mypy

arch: venv ## import contracts
	@$(BIN)/lint-imports

proto: venv ## generate the link's code again
	@$(BIN)/python -m tests.support.proto

docs: venv ## make docs/config.md and docs/metrics.md from the docstrings again
	@$(BIN)/python -m tests.support.reference

soak: venv ## the pure core under random faults in an exact world (OPERATIONS=100000 SEED=1); ends with one JSON line
	@$(BIN)/python -m tests.property.soak --operations $${OPERATIONS:-100000} --seed $${SEED:-1}

chaos: venv ## real nodes with agents under load and random faults (MINUTES=10 SEED=1; HOLLOW=6: hollow nodes without), judged by the checker; ends with one JSON line
	@$(BIN)/python -m tests.support.chaos --minutes $${MINUTES:-10} --seed $${SEED:-1} --hollow $${HOLLOW:-0}

bench-extender: venv ## filter + prioritize on 5,000 names against a do-nothing extender
	@$(BIN)/python -m bench.extender

bench-planned: venv ## pods per second at 5,000 nodes: stock, reactive, planned (ARGS="--nodes 500")
	@$(BIN)/python -m bench.planned $(ARGS)

bench-pack: venv ## a gang of 64 in 5,000 nodes, packed by arrays and by NetworkX walks
	@$(BIN)/python -m bench.pack

bench-queue: venv ## creation to Binding with 5,000 held jobs in Slurm, and without
	@$(BIN)/python -m bench.waiting_queue $(ARGS)

ci: lint types arch test ## what CI runs

clean: ## remove what was made in the checkout
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
