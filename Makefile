# Two commands do everything: `make demo` and `make test`. Both set up .venv first (minutes the
# first time, seconds after that). Needs python3 (3.10 to 3.12), g++ and make; no root.

PYTHON ?= python3
BIN := .venv/bin
# Passed on to `hvd-greco demo` or to pytest: make demo ARGS="--steps 50", make test ARGS="-k wire"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint doctor clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with everything pinned, Horovod included
	@$(PYTHON) tools/bootstrap.py

demo: setup ## train on two ranks, dense and compressed, and print the table (ARGS="--help")
	@$(BIN)/hvd-greco demo $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/python tools/typecheck.py

# What starts ranks runs alone, since stall limits are short; the rest on two cores. Status 5: none
# of a part's tests were asked for.
test: lint ## ruff, mypy and the main suite (ARGS="-k name")
	@a=0; $(BIN)/pytest -n 2 -m "not mpi and not slow and not gpu" $(ARGS) || a=$$?; \
	b=0; $(BIN)/pytest -m "mpi and not slow and not gpu" $(ARGS) || b=$$?; \
	case $$a/$$b in 0/0|0/5|5/0) ;; *) exit 1 ;; esac

test-slow: setup ## the tests that the main suite leaves out for time
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

doctor: setup ## what is installed, and whether it fits together
	@$(BIN)/hvd-greco doctor

clean: ## remove .venv, caches and runs (the wheel cache in ~/.cache/hvd-greco stays)
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
