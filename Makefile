# Two commands for a newcomer: `make serve` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
INSTALLED := $(VENV)/.installed
MODEL ?=
ARGS ?=

.PHONY: serve test test-lowest check format docs compare soak clean

serve: $(INSTALLED)
	$(BIN)/facet serve $(MODEL) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The oldest versions that pyproject.toml allows, in a virtual environment of their own.
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet torch==2.13.0
	$(LOWEST)/bin/python tests/support/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/constraints.txt -e '.[test]'
	$(LOWEST)/bin/python -m pytest $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest tests/test_house.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py
	$(BIN)/python tests/support/models_page.py

compare: $(INSTALLED)
	$(BIN)/python tests/bench/compare.py $(ARGS)

# Half an hour of mixed requests whose answers must be right; ARGS=--faults kills and stops processes meanwhile.
soak: $(INSTALLED)
	$(BIN)/python tests/bench/soak.py $(ARGS)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --progress-bar on torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) $(LOWEST) build dist .pytest_cache .ruff_cache
