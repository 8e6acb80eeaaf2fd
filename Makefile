# melld: `make serve` to use it, `make test` to check it.  Needs Python 3.11 or newer and pip.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# cpu or cuda; by default what the machine has (make serve BUILD=cpu).
BUILD ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
# Where PyTorch's CPU build comes from when pip's own places do not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL ?= .demo-model
# A configuration, in place of the one demo model: make serve CONFIG=examples/three-models.toml
CONFIG ?=
# The machines of a Ray cluster, in place of this one: make serve CLUSTER=auto, or CLUSTER=HOST:PORT of its head
CLUSTER ?=
ARGS ?=

RUN := $(VENV)/bin
# uv, or pip where uv cannot be had.  The locks are complete and hashed, so nothing is resolved.
INSTALL := $(RUN)/python locks/install.py --no-deps
LOCKED := $(INSTALL) --require-hashes -r
SETUP := $(VENV)/.setup-$(BUILD)
DEV := $(VENV)/.setup-dev
RAY := $(VENV)/.setup-cluster
AMONG := $(if $(CLUSTER),--cluster $(CLUSTER))

# Where Python lacks ensurepip (Debian without python3-venv), it fails with half an environment: the next try makes it anew.
.DELETE_ON_ERROR:
.PHONY: setup serve test test-all check mutants gpu-check chaos bench clients dist lock clean

# uv compiles nothing.  What is imported is compiled once, whatever the shell says: each start would take ten seconds more.
KEEP_COMPILED := env PYTHONDONTWRITEBYTECODE=

setup: $(SETUP)

serve: $(SETUP) $(if $(CLUSTER),$(RAY))
ifneq ($(CONFIG),)
	@$(RUN)/melld demo-model .demo-model >/dev/null
	@for seed in 1 2; do $(RUN)/melld demo-model .demo-model-$$seed --seed $$seed >/dev/null; done
	@exec $(KEEP_COMPILED) $(RUN)/melld serve --config $(CONFIG) $(AMONG) $(ARGS)
else
	@[ -n "$(filter-out .demo-model,$(MODEL))" ] || $(RUN)/melld demo-model .demo-model >/dev/null
	@exec $(KEEP_COMPILED) $(RUN)/melld serve --model $(MODEL) $(AMONG) $(ARGS)
endif

# Six processes, each with its own daemons, for two cores, as tests also wait; ARGS="-n 0" for one.
PYTEST := $(KEEP_COMPILED) $(RUN)/python -m pytest -n 6 --no-loadscope-reorder

test: $(DEV)
	$(PYTEST) $(ARGS)

# The long forms too: what `make test` proves of one of several cases, on a lone worker, or without Ray, tensor
# parallelism or a random history, and four times the examples.  ARGS="-m long" for these alone, as CI.
test-all: $(DEV)
	$(PYTEST) --long $(ARGS)

check: $(DEV)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(PYTEST) $(ARGS)

# Change the pure core line by line and say which changes no test notices: hours for all of it, so name a module and a
# sample (make mutants ARGS="melld/scheduler/waiting.py --sample 60").
mutants: $(VENV)/.setup-mutants
	$(RUN)/python -m benchmarks.tools.mutants $(ARGS)

# The checks that need a GPU, in two runs of under ten minutes; ARGS="--device cpu" rehearses them without one.
gpu-check: $(DEV)
	$(RUN)/python -m benchmarks.tools.gpu_check $(ARGS)

# A thousand requests on four workers that die, hang and move their requests.
chaos: $(DEV)
	$(RUN)/python -m benchmarks.faults.chaos $(ARGS)

# A question's figures anew, and its tables in docs/benchmarks.md; without WHAT, which questions and tables there are.
bench: $(DEV)
	$(RUN)/python -m benchmarks $(WHAT)

# Real clients, each pinned and in an environment of its own, against a daemon; some need Node.js 20 with npm.
clients: $(SETUP) .clients/.setup
	PYTHONPATH=. $(RUN)/python -m tests.clients.run $(ARGS)

# The wheel and the source distribution.  Built with the setuptools of .venv: nothing is downloaded.
dist: $(SETUP)
	rm -rf build dist
	$(RUN)/python -c "import logging; logging.disable(logging.WARNING); from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')" >/dev/null
	@ls dist

# Resolve the lock files again from pyproject.toml.
lock: $(SETUP)
	UV=$(RUN)/uv locks/update

clean:
	rm -rf $(VENV) .clients .demo-model .demo-model-* build dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "melld needs Python 3.11 or newer; this is $$($(PYTHON) --version). Name another one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torchvision is installed beside the packages, where melld alone finds it: its CUDA build breaks `import transformers`
# (`melld.engine.image_library`).
$(VENV)/.setup-cpu: locks/cpu.txt locks/torch-cpu.txt locks/torch-cuda.txt locks/vision.txt pyproject.toml | $(VENV)/bin/python
	@echo "melld: setting up $(VENV), once, in a few minutes: PyTorch's CPU build (1 of 2)"
	@$(INSTALL) -r locks/torch-cpu.txt 2>/dev/null || \
	 $(INSTALL) --extra-index-url $(TORCH_INDEX) -r locks/torch-cpu.txt 2>/dev/null || \
	 { echo "melld: it is not to be had; the CUDA build, 3 GB, computes on the CPU too"; $(LOCKED) locks/torch-cuda.txt; }
	@echo "melld: vLLM's CPU build and what it needs, $$(grep -c == locks/cpu.txt) packages (2 of 2)"
	@$(LOCKED) locks/cpu.txt
	@rm -rf $(VENV)/vision && $(LOCKED) locks/vision.txt --target $(VENV)/vision
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/.setup-cuda: locks/cuda.txt pyproject.toml | $(VENV)/bin/python
	@echo "melld: setting up $(VENV), once, in several minutes: vLLM's CUDA build and what it needs, $$(grep -c == locks/cuda.txt) packages"
	@$(LOCKED) locks/cuda.txt
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

# What workers on other machines need: the same on every machine.
$(RAY): $(SETUP) locks/cluster.txt
	@$(LOCKED) locks/cluster.txt
	@touch $@

# Triton is installed beside the packages, where vLLM's CPU build does not find it: a test runs the copy kernel with it.
$(DEV): $(SETUP) $(RAY) locks/dev.txt locks/triton.txt
	@$(LOCKED) locks/dev.txt
	@rm -rf $(VENV)/triton && $(LOCKED) locks/triton.txt --target $(VENV)/triton
	@touch $@

$(VENV)/.setup-mutants: $(DEV) locks/mutants.txt
	@$(LOCKED) locks/mutants.txt
	@touch $@

.clients/.setup: $(wildcard locks/clients/* tests/clients/scripts/*.mjs)
	@for name in sdks instructor aider; do \
	    $(PYTHON) -m venv .clients/$$name && \
	    .clients/$$name/bin/python locks/install.py --no-deps --require-hashes -r locks/clients/$$name.txt || exit 1; \
	done
	@mkdir -p .clients/node && cp $(filter %.json %.mjs,$^) .clients/node && cd .clients/node && npm install --no-save --no-audit --no-fund
	@touch $@
