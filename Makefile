PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test lint types clean

help:
	@echo "make demo    set up .venv, train a small model on this machine, export it, let it speak"
	@echo "make test    set up .venv, run lint, types and all tests"
	@echo "make setup   only make .venv and install what the project needs into it"
	@echo "make clean   remove .venv and what runs have written"

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; set PYTHON: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "venv needs ensurepip; on Debian: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
