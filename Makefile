PYTHON ?= python3
BIN := .venv/bin
# Tests start many interpreters: each would compile all modules again, and each worker of pytest rewrite all tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup gpu-setup debian-venv demo test test-fast tests fast-tests test-gpu bench-gpu soak lint types docs clean

help:
	@echo "make demo    set up .venv, train a small model on this machine, export it, generate text with it"
	@echo "make test    set up .venv, run lint, types, docs and all tests"
	@echo "make test-fast  lint, types and the unit tests that take less than half a second and start no processes, while you write code"
	@echo "make soak    run the rows of tests that make test leaves out, then test with damaged input and injected faults"
	@echo "             for 10 minutes; SOAK=\"--seconds 3600 --seed 2\""
	@echo "make test-gpu   set up .venv with CuPy and matplotlib, and run the tests that need a GPU: 2 minutes"
	@echo "make bench-gpu  the same for the benchmarks that need a GPU, with tables and JSON in runs/benchmarks/gpu: 15 minutes;"
	@echo "             BENCH_GPU=\"--quick --only step\""
	@echo "make docs    build the documentation into site/; open site/index.html"
	@echo "make setup   only make .venv and install what the project needs into it"
	@echo "make clean   remove .venv and what runs have written"

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; set PYTHON: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory debian-venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Debian packs ensurepip apart from Python.
debian-venv:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian: sudo apt install python3-venv"; exit 1; }
	apt-get update -qq && apt-get install -y -qq python3-venv

demo: setup
	$(BIN)/python examples/demo.py

# Types and docs take one core for a minute: they are checked beside the tests, which often wait.
test: lint
	$(MAKE) --no-print-directory --jobs 2 tests types docs

# Groups of tests side by side (see tests/conftest.py). Four even on two cores, since tests of runs that end often wait.
# A worker that dies is not replaced: pytest-xdist would run the same test again, or wait forever. Beside pytest 9.2,
# pytest-xdist 3.8 ignores groups: pytest-dev/pytest-xdist#1386.
tests: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 --durations=10

# Types beside the tests; after the first time, mypy reads its cache.
test-fast: lint
	$(MAKE) --no-print-directory --jobs 2 types fast-tests

fast-tests: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -m "not soak and not processes and not slow" --numprocesses 2 --dist loadgroup

# Not part of `make test`, which runs a few rows and cases: see docs/howto/soak.md.
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --workers 2 $(SOAK)

# On GPUs: `make setup` must have found a torch with CUDA.
gpu-setup: setup
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "torch in .venv finds no GPU: its version is $$($(BIN)/python -c 'import torch; print(torch.__version__)')"; exit 1; }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cuda,bench]'

# Four processes: tests mostly wait for the host, and each process needs some seconds to start and a GB of the GPU.
test-gpu: gpu-setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu -v --numprocesses 4 --dist loadgroup -rs --durations=10

bench-gpu: gpu-setup
	$(BIN)/python -m benchmarks.gpu $(BENCH_GPU)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# --strict: a link or an anchor that leads nowhere is an error (but not with --quiet). Works without a network.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "documentation: site/index.html"

clean:
	rm -rf .venv runs build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
