# `make quickstart` prunes a real model on a fresh machine; `make test` is what CI runs; `make check` is for every save.
# On Linux without a GPU, PyPI's torch brings gigabytes of CUDA. This takes the CPU build instead:
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RECIPE ?= recipes/quickstart.yaml

.PHONY: quickstart test check coverage format planted versions docs clean

quickstart: $(VENV)/.installed
	$(BIN)/compressx run $(RECIPE)

test: $(VENV)/.installed-dev
	$(MAKE) lint
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=15

check: $(VENV)/.installed-dev
	$(MAKE) lint
	$(BIN)/python -m pytest -m "not slow" -q -n auto --dist worksteal

.PHONY: lint
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The same tests with the lines and branches that none of them reaches; tracing doubles their time, so not in CI.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term-missing:skip-covered

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/compressx schema > recipes/recipe.schema.json

# Plants the faults of tests/planted one by one; the fast tests have to catch each. Half an hour; not in CI.
planted: $(VENV)/.installed-dev
	$(BIN)/python tests/planted/planted.py

# Tests the oldest and the newest Python of pyproject.toml, which have to be in PATH, and the versions of transformers
# between which it allows any; not in CI. A new one, before its bound is raised:
#   make versions VERSIONS="transformers==5.24.0"
VERSIONS ?= python3.11 python3.14 transformers==5.16.0 transformers==5.23.0
versions: $(VENV)/.installed-dev
	$(BIN)/python tests/versions.py $(VERSIONS)

# The site of the documentation, in build/site; `mkdocs serve` shows it while you write.
docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and '$(PYTHON) is Python ' + sys.version.split()[0] + \
	    '; compressx needs 3.11 to 3.14: name one, as in make PYTHON=python3.13')"
	$(PYTHON) -m venv $(VENV)

# torch first and alone: a later resolution then keeps the build that was chosen here.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt --editable '.[dev]'
	touch $@
