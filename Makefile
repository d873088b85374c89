# Everything sets itself up: a fresh machine needs Python 3.10 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
DOCS := .venv-docs
DIST := .venv-dist
PROCESSES ?= 4
READY := $(VENV)/.ready

.PHONY: help environments prepared test test-cuda test-stack test-stack-testing test-frameworks test-matrix lint types unit demo bench bench-trace bench-fleet zoo docs docs-reference dist format clean

help:
	@echo "make demo    train a small network that starves, and see what is seen (90 s)"
	@echo "make test    ruff, mypy, the documentation's links and the tests"
	@echo "make docs-reference   write the parts of docs/ that are made from the code: metrics, settings, figures"
	@echo "make docs    build the documentation's site into site/; a broken link is an error"
	@echo "make dist    build the wheel and the sdist into dist/, and check them as a package index and a user would"
	@echo "make test-cuda   what the agent calls in torch's CUDA build: on a GPU, or in the environment of CUDA_STAND_IN=PYTHON"
	@echo "make test-stack   what runs beside real servers and a browser: Prometheus, Alertmanager, VictoriaMetrics, Slurm, Chromium (minutes)"
	@echo "make test-stack-testing   the same beside the newer servers of Debian's testing suite, such as Prometheus 3 (root, debootstrap)"
	@echo "make test-matrix  the tests on other versions of Python and torch (hours, 5 GB of disk for each torch)"
	@echo "make test-frameworks   training loops of real frameworks (transformers, Lightning, fastai and others), callbacks, sinks (minutes)"
	@echo "make bench   what the agent costs, side by side with others (minutes)"
	@echo "make bench-trace   what reading a trace of 200 MB costs, side by side with Holistic Trace Analysis (minutes)"
	@echo "make bench-fleet   what a fleet of 2,000 ranks costs one Prometheus, and each dashboard query (a quarter of an hour)"
	@echo "make zoo     what it says of training scripts whose trouble is known (hours)"

$(READY): pyproject.toml constraints.txt telemetry/_version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt tests/frameworks/requirements.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	$(FRAMEWORKS)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/frameworks/requirements.txt
	@touch $@

$(DOCS)/.ready: docs/tools/requirements.txt constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -r docs/tools/requirements.txt
	@touch $@

$(DIST)/.ready: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt build twine
	@touch $@

# With `-j 2` they are made side by side: each waits for downloads for much of its time.
environments: $(READY) $(FRAMEWORKS)/.ready $(DOCS)/.ready $(DIST)/.ready

test: lint types docs unit

# Strict: a page that is in no menu, a link or an anchor without a target is an error. The variable turns an
# advertisement off.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Part of `make test`, where they are skipped without a GPU. The other environment keeps its own torch.
test-cuda: $(READY)
	@[ -z "$(CUDA_STAND_IN)" ] || $(CUDA_STAND_IN) -m pip install -q --disable-pip-version-check -e . pytest hypothesis
	$(or $(CUDA_STAND_IN),$(BIN)/python) -m pytest tests/cuda

# Part of `make test`, where a suite whose programs are not installed is skipped; here that is a failure.
test-stack: $(READY)
	TELEMETRY_TEST_REQUIRE_STACK=1 $(BIN)/python -m pytest -m stack

# It makes .venv-matrix/debian-testing, where the servers are; the programs that it does not have are this machine's.
test-stack-testing: $(READY)
	servers=$$($(BIN)/python -m tests.matrix.debian) && PATH="$$servers:$$PATH" $(MAKE) test-stack

# The wheel is built from the sdist, so both are checked. The last part uses the torch of $(VENV).
dist: $(DIST)/.ready $(READY)
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/twine check --strict dist/*
	$(BIN)/python -m tests.distribution dist

test-matrix:
	$(PYTHON) -m tests.matrix

# In an environment of its own, made once. On three processes: most of each test is imports.
test-frameworks: $(FRAMEWORKS)/.ready
	TELEMETRY_TEST_REQUIRE_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python -m pytest -n 3 --dist loadfile tests/frameworks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	@# Grafana's SDK needs Python 3.11: before it the dashboards cannot be generated, and so not be checked.
	! $(BIN)/python -c 'import grafana_foundation_sdk' 2>/dev/null || $(BIN)/mypy --python-version 3.11 grafana

# More processes than a small machine has cores: most tests wait for other processes. Four of them kept two cores busy for
# 93 % of the time. Which tests stay together is said in tests/conftest.py, which files start first in
# tests/start_order.py. `make test-frameworks` has the tests of frameworks, also those that need only torch.
# What fails while several processes keep all cores busy is run once more, alone. It has to pass then; both are shown.
# Each process has few cores for itself, so torch's own threads would only take turns.
unit: export OMP_NUM_THREADS = 1
unit: $(READY)
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --ignore tests/frameworks || \
	  { [ $$? = 1 ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --ignore tests/frameworks; }

# Compiles the tests, as pytest rewrites them, into __pycache__, so that not each process of `make unit` has to. Also where
# Python is told to write no bytecode. A file that cannot be imported is shown now, not at the end of the tests.
prepared: $(READY)
	@collected=$$(PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq --ignore tests/frameworks) || \
	  { echo "$$collected"; exit 1; }

demo: $(READY)
	$(BIN)/telemetry demo

# The sinks are measured with their real packages.
bench: $(READY) $(FRAMEWORKS)/.ready
	$(BIN)/python -m benchmarks.overhead

bench-trace: $(READY)
	$(BIN)/python -m benchmarks.trace

bench-fleet: $(READY)
	$(BIN)/python -m benchmarks.fleet

zoo: $(READY)
	$(BIN)/python -m tests.zoo $(ZOO)

docs-reference: $(READY)
	$(BIN)/python docs/tools/reference.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) $(DIST) site .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
