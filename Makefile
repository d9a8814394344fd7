# Needs python3 (3.11 or newer, with venv) and make; everything else goes into .venv.
# `make PYTHON=/path/to/python3 ...` chooses the Python, `make test ARGS="-k key -x"` hands options to pytest.
# Written for GNU Make 3.81 and the sh of macOS as well; no absolute paths, so that a blank in one does no harm.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all storm coverage lint format types imports check lock image clean

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?=
ARGS ?=
DOCKER ?= docker
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' sidecar/__init__.py)

# Foreign packages must not get into .venv's way.
unexport PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX

# The lock is complete and exact: a pip configuration may say where packages come from, not which and not where to.
PIP := PIP_USER=0 PIP_CONSTRAINT=/dev/null $(PY) -m pip --disable-pip-version-check --no-input --quiet --quiet
INSTALL := $(PIP) install --require-hashes --only-binary :all:

CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11)

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | while IFS='	' read -r name text; do printf '  %-10s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.runtime ## The one-minute story: retries, a lost answer and twins end as one mail
	@$(PY) -m sidecar demo

test: $(VENV)/.test ## All tests but the slow ones
	@$(PY) -m pytest -m "not slow" $(ARGS)

test-all: $(VENV)/.test ## All tests, the slow ones too
	@$(PY) -m pytest $(ARGS)

storm: $(VENV)/.test ## Faults of every kind for a minute, then the judge; ARGS="--seed 7 --seconds 600"
	@PYTHONPATH=tests $(PY) -m storm $(ARGS)

coverage: $(VENV)/.test ## All tests, and which lines no test reached
	@$(PY) -m coverage erase
	@$(PY) -m coverage run -m pytest $(ARGS)
	@$(PY) -m coverage combine --quiet
	@$(PY) -m coverage report

lint: $(VENV)/.test ## ruff: format and rules
	@code=0; $(PY) -m ruff format --check . || code=1; $(PY) -m ruff check . || code=1; exit $$code

format: $(VENV)/.test ## ruff: format in place, mend what it can
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

types: $(VENV)/.test ## mypy --strict on package and tests
	@$(PY) -m mypy --strict

imports: $(VENV)/.test ## import-linter: the layers of pyproject.toml
	@$(VENV)/bin/lint-imports

check: lint types imports test ## lint, types, imports, test

COMPILE = $(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --only-binary :all: \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(ARGS)

# The small files take their versions from the large one, so that the demo, the image and the tests run the same code.
lock: $(VENV)/.runtime ## Write constraints/ anew; ARGS=--upgrade takes newer releases
	@$(INSTALL) -r constraints/lock.txt
	@$(COMPILE) pyproject.toml --extra embedded --group build --group lock --group test --group dev -o constraints/test.txt
	@$(COMPILE) pyproject.toml --extra embedded -c constraints/test.txt -o constraints/runtime.txt
	@$(COMPILE) --group build -c constraints/test.txt -o constraints/build.txt
	@$(COMPILE) --group lock -c constraints/test.txt -o constraints/lock.txt
	@if grep -n '://' constraints/*.txt; then echo 'constraints/ must hold no address'; exit 1; fi

image: ## The container image, by docker build (DOCKER=podman works too)
	$(DOCKER) build --build-arg VERSION=$(VERSION) -t email-idempotency-sidecar:$(VERSION) -t email-idempotency-sidecar .

clean: ## Remove .venv, build output and caches (never ./data: it holds records)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .grimp_cache .import_linter_cache .hypothesis .coverage .coverage.*
	find sidecar tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says that .venv holds what its lock file says. The program itself is installed in place (editable).
$(VENV)/.runtime: $(PY) pyproject.toml constraints/runtime.txt constraints/build.txt
	@echo 'Installing the packages of constraints/runtime.txt into $(VENV) ...'
	@$(INSTALL) -r constraints/build.txt -r constraints/runtime.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime constraints/test.txt
	@echo 'Installing the packages of constraints/test.txt into $(VENV) ...'
	@$(INSTALL) -r constraints/test.txt
	@touch $@

$(PY):
	@found=; \
	for candidate in $(CANDIDATES); do \
		if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then found=$$candidate; break; fi; \
	done; \
	if [ -n "$$found" ]; then echo "Making $(VENV) with $$("$$found" --version) ..."; exec "$$found" -m venv --clear $(VENV); fi; \
	for candidate in $(CANDIDATES); do break; done; \
	if ! "$$candidate" -c '' 2>/dev/null; then \
		echo "There is no $$candidate here. Install Python 3.11 or newer, or say which one: make PYTHON=/path/to/python3"; \
	elif ! "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "$$candidate is $$("$$candidate" --version); 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3"; \
	else \
		echo "$$candidate cannot make virtual environments: venv or ensurepip is missing."; \
		echo 'On Debian and Ubuntu: apt-get install python3-venv'; \
	fi >&2; \
	exit 1
