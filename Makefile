# Two commands: `make run` and `make test`. Needs python3 (3.11 or newer) with pip, and make; nothing else.

PYTHON ?= python3
GRAPH ?= graphs/ming_omni.py
ARGS ?=
VENV := .venv
PEERS := .venv-bench
CLIENTS := .venv-clients
GPU := .venv-gpu
SGLANG ?= sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One for each SGLang that was asked for: another one is installed over it.
GPU_INSTALLED := $(GPU)/.installed-$(subst =,-,$(SGLANG))
# Debian without python3-venv has the module but not pip's wheel: there the system's pip brings pip into the environment.
made = $(PYTHON) -m venv $(1) >/dev/null 2>&1 || \
	{ $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install pip; }
SOURCES := omniflow actors graphs tests bench docs

.PHONY: help run test test-clients setup check format bench bench-peers gpu docs clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed ## install what is missing, fetch the weights, serve on 127.0.0.1:8000 (GRAPH=..., ARGS="--port 9000")
	@$(BIN)/omniflow run $(GRAPH) $(ARGS)

test: $(VENV)/.installed-dev ## install what is missing and run the tests (ARGS="-k vocoder")
	$(BIN)/python -m pytest -m "not slow and not gpu and not clients" $(ARGS)

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed ## try the server with clients of others, unmodified
	OMNIFLOW_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS)/bin/python -m pytest -m clients tests/clients $(ARGS)

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

bench: $(VENV)/.installed-dev ## measure: graphs, transports beside peers, engine, first token and audio, overload
	$(BIN)/python -m bench.overhead --json bench/results/overhead.json
	$(BIN)/python -m bench.transports --write $(ARGS)
	$(BIN)/python -m pytest bench --benchmark-columns=min,median,rounds --benchmark-json=bench/results/parts.json
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/e2e.py --json bench/results/e2e.json
	$(BIN)/python bench/overload.py
	$(BIN)/python -m bench.streams --write
	$(BIN)/python -m bench.http_cost --json bench/results/http_cost.json

bench-peers: | $(VENV)/.made ## install what `make bench` compares with (.venv-bench); what cannot be had is left out
	@test -x $(PEERS)/bin/python || $(call made,$(PEERS))
	@for peer in $$(cat bench/peers/requirements.txt); do \
		$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $$peer || \
		echo "left out: $$peer"; done

gpu: $(GPU_INSTALLED) ## on a machine with GPUs: all tests and measurements that want them (ARGS="--list", SGLANG=sglang==0.5.17)
	$(GPU)/bin/python -m bench.gpu.all $(ARGS)

docs: $(VENV)/.installed-dev ## write what is generated: docs/config.md, the picture in README.md
	$(BIN)/python docs/generate.py

clean: ## remove .venv and everything that tools have written; weights stay in the user's cache
	rm -rf $(VENV) $(PEERS) $(CLIENTS) $(GPU) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are younger than everything that decides what is installed, so a second call of make does nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) install --constraint constraints.txt --editable ".[embedded]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) install --constraint constraints.txt --editable ".[embedded,dev]"
	@touch $@ $(VENV)/.installed

# Their own environment, because they ask for versions of each other's libraries. Without npm, its clients are left out.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/npm/package.json
	@test -x $(CLIENTS)/bin/python || $(call made,$(CLIENTS))
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet -r tests/clients/requirements.txt
	@! command -v npm >/dev/null || (cp tests/clients/npm/package.json $(CLIENTS)/ && npm install --silent --prefix $(CLIENTS))
	@touch $@

# Its own, because SGLang asks for one torch and one transformers exactly, built for GPUs. Triton compiles at run time
# what launches its kernels: without a C compiler and Python.h that fails after all of SGLang was installed.
$(GPU_INSTALLED): pyproject.toml
	@command -v nvidia-smi >/dev/null || { echo "no GPU here (no nvidia-smi): SGLang, several GB, is not installed;" \
		"on any machine $(BIN)/python -m bench.gpu.all --list shows what there is to run" >&2; exit 1; }
	@echo '#include <Python.h>' | $${CC:-cc} -E -o /dev/null \
		-I "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')" - 2>/dev/null || \
		{ echo "no C compiler here, or no Python.h: Triton needs both (on Debian: apt-get install gcc python3-dev)" >&2; exit 1; }
	@test -x $(GPU)/bin/python || $(call made,$(GPU))
	$(GPU)/bin/python -m pip --disable-pip-version-check install --editable ".[embedded,sglang]" "$(SGLANG)" \
		pytest pytest-timeout hypothesis jsonschema nvidia-ml-py
	@$(GPU)/bin/python -c "import torch; torch.zeros(1, device='cuda')" || \
		{ echo "this torch cannot use the GPUs here: their driver may be too old for it (CUDA 13 wants 580)" >&2; exit 1; }
	@rm -f $(GPU)/.installed*
	@touch "$@"

$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "omniflow needs Python 3.11 or newer; $(PYTHON) is none: run make PYTHON=python3.11" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON) (the first time takes a few minutes: PyTorch is large)"
	@$(call made,$(VENV))
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip
	@touch $@
