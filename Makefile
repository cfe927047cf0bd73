# `make train` and `make test` do all the set-up by themselves: they need Python 3.12, make and the
# package registry. Choose other releases with `make test MEGATRON=0.18.2 TORCH=2.13.0`.
PYTHON ?= python3
MEGATRON ?= 0.19.2
TORCH ?= 2.13.0
VENV ?= .venv
ARGS ?=

# Compiling torch and Megatron anew in every process would cost each of them ten seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(MEGATRON)-$(TORCH)

.PHONY: help train test matrix gate drift lint bench setup clean

help:
	@echo "make train    run the reference RL trainer on two CPU ranks (ARGS='--help' for its options)"
	@echo "make test     run the tests (ARGS='-k name' to choose)"
	@echo "make matrix   hazards, patches and parity on every supported Megatron release"
	@echo "make gate     ... on the oldest one and one in between"
	@echo "make drift    patches against all release wheels, read only (ARGS='a source tree')"
	@echo "make lint     ruff, mypy and the generated files"
	@echo "make bench    run benchmarks/"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 12) else \
	  "megatron-core $(MEGATRON) needs Python >= 3.12, and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python \
	  "torch==$(TORCH)" "megatron-core[training]==$(MEGATRON)" -e ".[trainer]" --group dev
	rm -f $(VENV)/.ready-*
	touch $@

train: $(STAMP)
	$(BIN)/megatron-idempotent train $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

matrix gate: $(STAMP)
	$(BIN)/nox --session $@ -- $(ARGS)

drift: $(STAMP)
	$(BIN)/nox --session drift -- $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist .nox
