# Every target makes the virtual environment when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: install simulate test test-all lint bench docs e2e clean
.DEFAULT_GOAL := test

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt algorithms/_compiled.pyx
	$(PYTHON) -m venv $(VENV)
	rm -f algorithms/_compiled.c algorithms/_compiled.*.so
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[coordinator,agent,embedded,s3,dev]'
	touch $@

simulate: $(STAMP)
	$(BIN)/isthmus simulate $(ARGS)

# Two files at a time; in order of names, since unit tests, which are short, fill the two processes evenly at the end.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

# One test at a time: some of the slow ones measure.
test-all: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(STAMP)
	$(BIN)/python -m tests.unit.coordinator.diagram
	$(BIN)/python -m tests.contract.bad_requests > docs/bad-requests.md

bench: $(STAMP)
	$(BIN)/isthmus bench algorithms $(ARGS)

e2e: $(STAMP)
	bash deploy/e2e.sh

clean:
	rm -rf $(VENV) build *.egg-info algorithms/_compiled.c algorithms/_compiled.*.so
