# Two commands: `make run` sets up and runs the main job; `make test` checks everything.
PYTHON ?= python3.11
VENV   ?= .venv
# For example an index that has CPU builds of torch; the default index serves a CUDA build on Linux.
TORCH_ARGS ?=
BIN    := $(VENV)/bin

.PHONY: run test setup fast blackbox lint clean

run: setup
	$(BIN)/forge quickstart

# A worker for each core; a module stays with one of them, and so do all live tests.
test: setup lint
	$(BIN)/pytest -n auto --dist loadgroup

# The simulator's core compiled to C; sources that change run as they are until it is made again.
fast: setup
	$(BIN)/forge compile

# Agent programs of others, pinned, each in a folder of its own: 15 minutes, 5 GB; npm and python3-venv from the system.
blackbox: setup
	$(BIN)/forge blackbox install

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.ready

# torch is installed by its exact version first: an open range would take a build with several GB of GPU libraries.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH_ARGS) $(shell grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[live,agents,grammar,smollm2,dash,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info forge/_compiled
