# `make` alone lists the targets. ARGS is passed to pytest or to the demo: make test-sqlite ARGS="-k claim"

BASE_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(PYTHON) -m pip install --quiet --quiet --disable-pip-version-check
# Three test processes are useful even on two cores, because most tests that start processes wait.
PYTEST_OPTIONS := --numprocesses 3 --dist worksteal --durations 10 --durations-min 5 $(ARGS)
PYTEST := $(PYTHON) -m pytest $(PYTEST_OPTIONS)

# Stamp files: an extra is installed again when pyproject.toml has changed.
TEST_READY := $(VENV)/.test-ready
BROWSER_READY := $(VENV)/.browser-ready
DEV_READY := $(VENV)/.dev-ready
DOCS_READY := $(VENV)/.docs-ready

# Tests start hundreds of processes. Without bytecode files each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.SECONDEXPANSION:
.NOTPARALLEL:
.PHONY: help quick test test-sqlite test-postgresql test-mariadb test-redis test-rabbitmq test-browser screenshots faults demo demo-check
.PHONY: lint types docs messages troubleshooting coverage bench mutants dev clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quick: $(TEST_READY) ## the tests on SQLite that start no processes; takes about a minute
	EVENTBUS_TEST_DB=sqlite $(PYTEST) -m "not long and not processes"

test: test-sqlite test-postgresql test-mariadb ## the whole suite on every available database

test-sqlite: $(TEST_READY) ## the suite on SQLite
	EVENTBUS_TEST_DB=sqlite $(PYTEST)

test-postgresql: $(TEST_READY) ## the suite on EVENTBUS_TEST_POSTGRES_URL, or on a PostgreSQL that it starts
	EVENTBUS_TEST_DB=postgresql $(PYTEST)

# The driver has no wheels and needs C headers, so it is installed only if a server is running.
test-mariadb: $(TEST_READY) ## the suite on EVENTBUS_TEST_MARIADB_URL, or on 127.0.0.1:3306
	@if ! server=$$($(PYTHON) -m tests.server_answers mariadb); then \
		echo "skipped: MariaDB does not answer at $$server"; \
	elif ! $(PIP_INSTALL) mysqlclient >$(VENV)/mysqlclient.log 2>&1; then \
		echo "skipped: mysqlclient cannot be built, see $(VENV)/mysqlclient.log" \
			"(Debian: apt-get install gcc pkg-config libmariadb-dev)"; \
	else \
		echo "EVENTBUS_TEST_DB=mariadb $(PYTEST)"; \
		EVENTBUS_TEST_DB=mariadb $(PYTEST); \
	fi

# The tests of Celery with a real broker. The other targets run them with a broker in memory.
define TEST_CELERY
	@if ! server=$$($(PYTHON) -m tests.server_answers $(BROKER)); then \
		echo "skipped: no broker answers at $$server"; \
	else \
		export EVENTBUS_TEST_BROKER=$$($(PYTHON) -m tests.server_answers --url $(BROKER)); \
		EVENTBUS_TEST_DB=postgresql $(PYTEST) $(wildcard tests/integrations/test_celery*.py); \
	fi
endef

test-redis: BROKER = redis
test-redis: $(TEST_READY) ## Celery on EVENTBUS_TEST_REDIS_URL, else on 127.0.0.1:6379
	$(TEST_CELERY)

test-rabbitmq: BROKER = rabbitmq
test-rabbitmq: $(TEST_READY) ## Celery on EVENTBUS_TEST_RABBITMQ_URL, else on 127.0.0.1:5672
	$(TEST_CELERY)

# To finish within minutes, the run on SQLite omits tests that only read files or repeat one page for
# each role. The run on PostgreSQL has only the tests of its own SQL and of worker processes.
COVERAGE := $(PYTHON) -m coverage
COVERAGE_SQLITE := -m "not long and not processes" --ignore tests/mutants --ignore tests/test_architecture.py \
	--ignore tests/test_docs.py --ignore tests/admin/test_permissions.py
COVERAGE_POSTGRESQL := tests/store tests/test_delivery.py tests/test_publishing.py tests/test_supervisor.py \
	tests/concurrency/test_worker_process.py

coverage: $(TEST_READY) ## branch coverage, including the processes that tests start
	$(COVERAGE) erase
	EVENTBUS_TEST_DB=sqlite $(COVERAGE) run -m pytest $(PYTEST_OPTIONS) $(COVERAGE_SQLITE)
	EVENTBUS_TEST_DB=postgresql $(COVERAGE) run -m pytest $(PYTEST_OPTIONS) $(COVERAGE_POSTGRESQL)
	$(COVERAGE) combine --quiet
	$(COVERAGE) report

# Playwright uses the installed Chromium and downloads none. These tests run in a separate pytest
# process, because Playwright's event loop would make other tests look asynchronous to Django.
CHROMIUM ?= $(shell command -v chromium)
BROWSER = EVENTBUS_TEST_DB=postgresql CHROMIUM="$(CHROMIUM)" $(PYTHON) -m pytest --ds tests.browser.settings $(ARGS)

test-browser: $(if $(CHROMIUM),$(BROWSER_READY)) ## test the admin in a real browser, and with another theme
ifeq ($(CHROMIUM),)
	@echo "skipped: chromium is not installed (Debian: apt-get install chromium; or set CHROMIUM=/path/to/it)"
else
	$(BROWSER) tests/browser
	$(PYTHON) -m pytest --ds tests.unfold.settings tests/unfold $(ARGS)
endif

screenshots: $(BROWSER_READY) ## create the pictures of the documentation again
	$(BROWSER) tests/browser/screenshots.py

messages: $(TEST_READY) ## collect new texts for translation, and compile the translations (needs gettext)
	cd django_eventbus && ../$(PYTHON) -m django makemessages --all --no-wrap --no-location --no-obsolete
	cd django_eventbus && ../$(PYTHON) -m django compilemessages

# With these values the faults take hours. For every change, .ci/run uses smaller values:
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
# Four processes, because these tests wait even longer, for leases and timeouts.
LONG_FAULTS = $(FAULTS) $(PYTEST) --numprocesses 4 -m long -o faulthandler_timeout=3600

faults: $(TEST_READY) ## the long fault tests: kills, crashes, failovers, a soak test
	EVENTBUS_TEST_DB=postgresql $(LONG_FAULTS) tests/faults tests/integrations tests/store/test_model.py
	EVENTBUS_TEST_DB=sqlite $(LONG_FAULTS) tests/faults/test_kills.py
	@if ! $(PYTHON) -c 'import MySQLdb' 2>/dev/null; then \
		echo "skipped: the faults of MariaDB, its driver is not installed (make test-mariadb installs it)"; \
	else \
		EVENTBUS_TEST_DB=mariadb $(LONG_FAULTS) tests/faults/test_kills.py tests/faults/test_mariadb.py; \
	fi

# New users try the demo first, so it installs only the packages that it needs.
DB ?= sqlite
DEMOS_READY := $(VENV)/.demo-sqlite-ready $(VENV)/.demo-postgres-ready
# This is also expanded for other targets, where DB may have other values.
DEMO_READY = $(if $(filter sqlite postgres,$(DB)),$(VENV)/.demo-$(DB)-ready,$(if \
	$(filter demo demo-check,$(MAKECMDGOALS)),$(error DB is sqlite or postgres, not $(DB))))
# CELERY runs one handler of the shop in Celery, with a broker in a folder or on this machine.
DEMO_CELERY_READY := $(VENV)/.demo-celery-ready
CELERY_READY = $(if $(CELERY),$(if $(filter folder redis rabbitmq,$(CELERY)),$(DEMO_CELERY_READY),$(if \
	$(filter demo demo-check,$(MAKECMDGOALS)),$(error CELERY is folder, redis or rabbitmq, not $(CELERY)))))
DEMO = $(PYTHON) example_project/run.py --database $(DB) $(if $(CELERY),--celery $(CELERY)) $(ARGS)

demo: $$(DEMO_READY) $$(CELERY_READY) ## run the example shop; DB=postgres starts a PostgreSQL; CELERY=folder, redis or rabbitmq
	@$(DEMO)

demo-check: $$(DEMO_READY) $$(CELERY_READY) ## run the example shop for 30 seconds and check the results; also DB= and CELERY=
	$(DEMO) --check

lint: $(DEV_READY) ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(DEV_READY) ## mypy, strict, on the package; mypy and pyright on the samples of tests/typing
	$(PYTHON) -m mypy
	$(PYTHON) -m tests.typing

docs: $(DOCS_READY) ## build the documentation; warnings are errors
	$(PYTHON) -m sphinx -W -b html docs docs/_build/html

troubleshooting: $(TEST_READY) ## write docs/howto/troubleshooting.md from the checks of event_doctor
	PYTHONPATH=. DJANGO_SETTINGS_MODULE=tests.settings $(PYTHON) docs/troubleshooting.py

bench: $(TEST_READY) ## measure throughput and latency on this machine
	$(PYTHON) -m benchmarks

# DB and MODULES are lists with commas; SEED repeats a sample.
COUNT ?= 50
MODULES ?= store,delivery,flow,worker
mutants: DB = sqlite,postgresql
mutants: $(TEST_READY) ## change the engine at COUNT places, one at a time, and list changes that no test detects
	$(PYTHON) -m tests.mutants --count $(COUNT) $(if $(SEED),--seed $(SEED)) --db $(DB) --modules $(MODULES)

dev: $(PYTHON) ## install everything a contributor needs into .venv
	$(PIP_INSTALL) -e ".[browser,dev,docs,test]"
	@touch $(TEST_READY) $(BROWSER_READY) $(DEV_READY) $(DOCS_READY) $(DEMOS_READY) $(DEMO_CELERY_READY)

clean: ## remove all files that other targets created
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage* dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PYTHON):
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
		f"Python 3.11 or newer is needed, $(BASE_PYTHON) is {v.major}.{v.minor}. " \
		"Name another one: make BASE_PYTHON=python3.12")'
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.demo-sqlite-ready: pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[cron,prometheus]"
	@touch $@

$(VENV)/.demo-postgres-ready: pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[cron,embedded-postgres,prometheus]"
	@touch $@

$(DEMO_CELERY_READY): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) -e ".[celery,cron]" "redis>=5"
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
