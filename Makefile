# `make help` lists the targets. PYTHON chooses the interpreter: `make test PYTHON=python3.12` uses
# the environment .venv-3.12. ARGS adds arguments: `make test ARGS="-k drain"`. WORKERS processes
# run the tests, each with its own servers: more processes than cores, because many tests wait.

PYTHON ?= python3
ifeq ($(PYTHON),python3)
VENV ?= .venv
else
VENV ?= .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo demo-pipeline demo-prepared demo-fleet up quick test mysql test-mysql test-matrix lint mutants docs dist screenshots bench venv system clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 15

demo: $(VENV)/.example ## show that nothing is lost and nothing leaks; needs no server
	$(BIN)/python -m example_project.demo $(ARGS)

demo-pipeline: $(VENV)/.pipeline ## the same, and then Spark archives and audits the log; needs Java 17
	$(BIN)/python -m example_project.demo --pipeline $(ARGS)

demo-prepared: $(VENV)/.example ## show that an event is published if its sender, elsewhere, has committed
	$(BIN)/python -m example_project.prepared_demo $(ARGS)

demo-fleet: $(VENV)/.example ## show that callers go on while servers are killed and stopped
	$(BIN)/python -m example_project.fleet_demo $(ARGS)

up: $(VENV)/.example ## run the example project until Ctrl-C
	$(BIN)/python -m example_project.up $(ARGS)

SIDE_BY_SIDE := -n auto --dist loadgroup --no-loadscope-reorder

quick: WORKERS ?= 2
quick: venv ## unit tests in about a minute: no servers, no pages of the admin
	$(BIN)/python -m tests.servers --only '' --workers $(WORKERS) run -- \
		$(BIN)/python -m pytest -m "unit and not pages" $(SIDE_BY_SIDE) $(ARGS)

test: WORKERS ?= 4
test: venv ## everything: the tests on private servers; lint and docs are among them
	$(BIN)/python -m tests.servers --needed --workers $(WORKERS) run -- \
		$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-mysql: WORKERS ?= 4
test-mysql: venv ## the cases of MariaDB on a private MySQL, which is downloaded once
	$(BIN)/python -m tests.servers --only postgres,mysql,redis,rabbitmq --needed --workers $(WORKERS) run -- \
		$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

mysql: venv
	$(BIN)/python -m tests.servers unpack

test-matrix: venv ## the oldest and the newest Python, Django, Celery and drivers, as far as they are here
	$(PIP) nox
	$(BIN)/python -m nox $(ARGS)

lint: venv ## format, lint, types, import contracts, migrations
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m basedpyright -p tests/style --pythonpath "$$($(BIN)/python -c 'import sys; print(sys.executable)')"
	$(BIN)/lint-imports
	DATABASE_URL=sqlite://:memory: $(BIN)/python manage.py makemigrations --check --dry-run

mutants: venv ## plant small bugs into a copy, and list those that no test notices
	$(BIN)/python -m tests.servers run -- $(BIN)/python -m tests.mutants $(ARGS)

docs: venv ## build the documentation, warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo 'file://$(CURDIR)/docs/_build/html/index.html'

dist: venv ## build the sdist, and from it the wheel; check them, and use the wheel in a new project
	rm -rf dist
	$(BIN)/python -m build
	$(PIP) nox twine
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m nox --session package

screenshots: venv ## take the pictures of the admin in the documentation
	SCREENSHOTS=docs/images/admin CI=true $(BIN)/python -m pytest tests/browser/test_screenshots.py -k pictures_of

bench: ARGS ?= all
bench: venv ## measure beside the peers on private servers; writes benchmarks/results
	$(BIN)/python -m benchmarks $(ARGS)

venv: $(VENV)/.everything ## the environment for development, with system packages

system:
	@$(PYTHON) -m tests.servers install

clean: ## remove what builds and tests leave behind; the environment stays
	rm -rf .demo build dist docs/_build *.egg-info .hypothesis .*_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# The environment. Its packages are up to date if the stamp is newer than setup.cfg. Without the
# archive of Spark's classes (tests.pipeline.classes) the tests are slower, but do the same.

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.example: setup.cfg $(VENV)/.created
	$(PIP) --editable '.[example,door]'
	@touch $@

$(VENV)/.pipeline: setup.cfg $(VENV)/.created
	$(PIP) --editable '.[example,door,spark]'
	@touch $@ $(VENV)/.example

$(VENV)/.everything: setup.cfg pyproject.toml $(VENV)/.created | system
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) --editable '.[all,docs,example]' --group dev
	-$(BIN)/python -m tests.pipeline.classes
	@touch $@ $(VENV)/.example $(VENV)/.pipeline
