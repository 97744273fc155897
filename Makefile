# `make` alone lists the targets. ARGS goes to pytest: make test-sqlite ARGS="-k claim"

BASE_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(PYTHON) -m pip install --quiet --quiet --disable-pip-version-check
PYTEST := $(PYTHON) -m pytest $(ARGS)

# Stamps: an extra is installed again when pyproject.toml changed.
TEST_READY := $(VENV)/.test-ready
DEV_READY := $(VENV)/.dev-ready
DOCS_READY := $(VENV)/.docs-ready

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test test-sqlite test-postgresql test-mariadb demo demo-check lint types docs bench dev clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: test-sqlite test-postgresql test-mariadb ## the whole suite on every database that is there

test-sqlite: $(TEST_READY) ## the suite on SQLite
	EVENTBUS_TEST_DB=sqlite $(PYTEST)

test-postgresql: $(TEST_READY) ## on EVENTBUS_TEST_POSTGRES_URL, else on a PostgreSQL it brings itself
	EVENTBUS_TEST_DB=postgresql $(PYTEST)

# The driver has no wheels and needs C headers, so it is installed only where a server answers.
test-mariadb: $(TEST_READY) ## on EVENTBUS_TEST_MARIADB_URL, else on 127.0.0.1:3306
	@if ! server=$$($(PYTHON) -m tests.server_answers mariadb); then \
		echo "skipped: MariaDB does not answer at $$server"; \
	elif ! $(PIP_INSTALL) mysqlclient >$(VENV)/mysqlclient.log 2>&1; then \
		echo "skipped: mysqlclient cannot be built, see $(VENV)/mysqlclient.log" \
			"(Debian: apt-get install gcc pkg-config libmariadb-dev)"; \
	else \
		echo "EVENTBUS_TEST_DB=mariadb $(PYTEST)"; \
		EVENTBUS_TEST_DB=mariadb $(PYTEST); \
	fi

demo: $(TEST_READY) ## the example shop with events flowing
	$(PYTHON) example_project/run.py

demo-check: $(TEST_READY) ## run the example shop for a moment and check its books
	$(PYTHON) example_project/run.py --check

lint: $(DEV_READY) ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(DEV_READY) ## mypy, strict, on the package
	$(PYTHON) -m mypy

docs: $(DOCS_READY) ## build the documentation; a warning is an error
	$(PYTHON) -m sphinx -W -b html docs docs/_build/html

bench: $(TEST_READY) ## print throughput and latency of this machine
	$(PYTHON) -m benchmarks

dev: $(TEST_READY) $(DEV_READY) $(DOCS_READY) ## install everything a contributor needs into .venv

clean: ## remove everything the other targets made
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PYTHON):
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
		f"Python 3.11 or newer is needed, $(BASE_PYTHON) is {v.major}.{v.minor}. " \
		"Name another one: make BASE_PYTHON=python3.12")'
	$(BASE_PYTHON) -m venv $(VENV)

$(TEST_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[test]"
	@touch $@

$(DEV_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(DOCS_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@
