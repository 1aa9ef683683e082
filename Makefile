# Two commands for a newcomer: `make serve` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
CLIENTS := .venv-clients
INSTALLED := $(VENV)/.installed
MODEL ?=
ARGS ?=

.PHONY: serve test test-lowest clients check format docs compare soak clean

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

# Clients that need other versions than the tests do, in a virtual environment of their own, against our server.
clients: $(INSTALLED)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade pip
	$(CLIENTS)/bin/python -m pip install --quiet --only-binary=:all: litellm langchain-openai pytest pytest-asyncio pytest-timeout httpx
	FACET=$(BIN)/facet $(CLIENTS)/bin/python -m pytest -W ignore tests/clients $(ARGS)

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
	rm -rf $(VENV) $(LOWEST) $(CLIENTS) build dist .pytest_cache .ruff_cache
