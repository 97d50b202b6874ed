# Two commands: `make run` and `make test`. Needs python3 (3.11 or newer) with pip, and make; nothing else.

PYTHON ?= python3
GRAPH ?= graphs/ming_omni.py
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := omniflow actors graphs tests bench docs

.PHONY: help run test setup check format bench docs clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed ## install what is missing, fetch the weights, serve on 127.0.0.1:8000 (GRAPH=..., ARGS="--port 9000")
	@$(BIN)/omniflow run $(GRAPH) $(ARGS)

test: $(VENV)/.installed-dev ## install what is missing and run the tests (ARGS="-k vocoder")
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

setup: $(VENV)/.installed-dev ## make .venv with everything that run, test and check need

check: $(VENV)/.installed-dev ## lint, format, types, import contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

format: $(VENV)/.installed-dev ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev ## measure: first token, first audio, real-time factor, memory; and under five times the load
	$(BIN)/python bench/e2e.py $(ARGS)
	$(BIN)/python bench/overload.py

docs: $(VENV)/.installed-dev ## write what is generated: docs/config.md, the picture in README.md
	$(BIN)/python docs/generate.py

clean: ## remove .venv and everything that tools have written; weights stay in the user's cache
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are younger than everything that decides what is installed, so a second call of make does nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) install --constraint constraints.txt --editable ".[embedded]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) install --constraint constraints.txt --editable ".[embedded,dev]"
	@touch $@ $(VENV)/.installed

# Debian without python3-venv has the module but not pip's wheel: there the system's pip brings pip into .venv.
$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "omniflow needs Python 3.11 or newer; $(PYTHON) is none: run make PYTHON=python3.11" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON) (the first time takes a few minutes: PyTorch is large)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip
	@touch $@
