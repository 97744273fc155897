# `make` alone lists the targets. ARGS goes to pytest, or to the demo: make test-sqlite ARGS="-k claim"

BASE_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(PYTHON) -m pip install --quiet --quiet --disable-pip-version-check
# Three at a time: most tests of processes wait for something.
PYTEST := $(PYTHON) -m pytest --numprocesses 3 --dist worksteal --durations 10 --durations-min 5 $(ARGS)

# Stamps: an extra is installed again when pyproject.toml changed.
TEST_READY := $(VENV)/.test-ready
BROWSER_READY := $(VENV)/.browser-ready
DEV_READY := $(VENV)/.dev-ready
DOCS_READY := $(VENV)/.docs-ready

# Tests start processes by the hundred; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.SECONDEXPANSION:
.NOTPARALLEL:
.PHONY: help test test-sqlite test-postgresql test-mariadb test-browser screenshots faults demo demo-check
.PHONY: lint types docs messages bench dev clean

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

# Chromium is driven where it is, by its path: Playwright downloads none. These tests have a process
# of their own, because Playwright's event loop would make all others look asynchronous.
CHROMIUM ?= $(shell command -v chromium)
BROWSER = EVENTBUS_TEST_DB=postgresql CHROMIUM="$(CHROMIUM)" $(PYTHON) -m pytest --ds tests.browser.settings $(ARGS)

test-browser: $(if $(CHROMIUM),$(BROWSER_READY)) ## the admin in a real browser, and under another theme
ifeq ($(CHROMIUM),)
	@echo "skipped: there is no chromium (Debian: apt-get install chromium; else CHROMIUM=/path/to/it)"
else
	$(BROWSER) tests/browser
	$(PYTHON) -m pytest --ds tests.unfold.settings tests/unfold $(ARGS)
endif

screenshots: $(BROWSER_READY) ## take the pictures of the documentation anew
	$(BROWSER) tests/browser/screenshots.py

messages: $(TEST_READY) ## collect the texts to be translated, and compile what is (needs gettext)
	cd django_eventbus && ../$(PYTHON) -m django makemessages --all --no-wrap --no-location --no-obsolete
	cd django_eventbus && ../$(PYTHON) -m django compilemessages

# In full, which takes hours. Bounded, as .ci/run does it for every change:
# make faults KILLS=10 EVENTS=2000 CRASHES=5 ROWS=100000 SOAK=300 ROUNDS=0
KILLS ?= 100
EVENTS ?= 20000
CRASHES ?= 10
ROWS ?= 1000000
SOAK ?= 1800
ROUNDS ?= 8
FAULTS = EVENTBUS_FAULT_KILLS=$(KILLS) EVENTBUS_FAULT_EVENTS=$(EVENTS) \
	EVENTBUS_FAULT_CRASHES=$(CRASHES) EVENTBUS_FAULT_ROWS=$(ROWS) EVENTBUS_FAULT_SECONDS=$(SOAK) \
	EVENTBUS_FAULT_ROUNDS=$(ROUNDS)
# They wait even more, for leases and timeouts.
LONG_FAULTS = $(FAULTS) $(PYTEST) --numprocesses 4 -m long -o faulthandler_timeout=3600

faults: $(TEST_READY) ## the long faults: kills, crashes, failovers, a soak
	EVENTBUS_TEST_DB=postgresql $(LONG_FAULTS) tests/faults tests/store/test_model.py
	EVENTBUS_TEST_DB=sqlite $(LONG_FAULTS) tests/faults/test_kills.py
	@if ! $(PYTHON) -c 'import MySQLdb' 2>/dev/null; then \
		echo "skipped: the faults of MariaDB, its driver is not installed (make test-mariadb does it)"; \
	else \
		EVENTBUS_TEST_DB=mariadb $(LONG_FAULTS) tests/faults/test_kills.py tests/faults/test_mariadb.py; \
	fi

# The first thing a visitor tries: it installs no more than it needs.
DB ?= sqlite
DEMOS_READY := $(VENV)/.demo-sqlite-ready $(VENV)/.demo-postgres-ready
DEMO_READY = $(if $(filter sqlite postgres,$(DB)),$(VENV)/.demo-$(DB)-ready,$(error DB is sqlite or postgres, not $(DB)))
DEMO = $(PYTHON) example_project/run.py --database $(DB) $(ARGS)

demo: $$(DEMO_READY) ## the example shop with events flowing; DB=postgres brings a PostgreSQL
	@$(DEMO)

demo-check: $$(DEMO_READY) ## run the example shop for 30 seconds and check its books; DB=postgres too
	$(DEMO) --check

lint: $(DEV_READY) ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(DEV_READY) ## mypy, strict, on the package
	$(PYTHON) -m mypy

docs: $(DOCS_READY) ## build the documentation; a warning is an error
	$(PYTHON) -m sphinx -W -b html docs docs/_build/html

bench: $(TEST_READY) ## print throughput and latency of this machine
	$(PYTHON) -m benchmarks

dev: $(PYTHON) ## install everything a contributor needs into .venv
	$(PIP_INSTALL) -e ".[browser,dev,docs,test]"
	@touch $(TEST_READY) $(BROWSER_READY) $(DEV_READY) $(DOCS_READY) $(DEMOS_READY)

clean: ## remove everything the other targets made
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PYTHON):
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
		f"Python 3.11 or newer is needed, $(BASE_PYTHON) is {v.major}.{v.minor}. " \
		"Name another one: make BASE_PYTHON=python3.12")'
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.demo-sqlite-ready: pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[cron]"
	@touch $@

$(VENV)/.demo-postgres-ready: pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[cron,embedded-postgres]"
	@touch $@

$(TEST_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[test]"
	@touch $@

$(BROWSER_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[browser]"
	@touch $@

$(DEV_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(DOCS_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@
