# Everything a fresh clone needs: Python 3.11 or newer, git, a C compiler. `make serve` and `make test` do all set-up.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000
ARGS ?=
MINUTES ?= 5
VARIANT ?= cpu
IMAGE ?= lockstep:0.1.0$(if $(filter cuda,$(VARIANT)),-cuda)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve test sweep soak lint types imports manifests check format dashboards observe docs bench image image-check \
	deploy-check clean

serve: $(VENV)/.serve ## start the server on the embedded model
	$(BIN)/lockstep serve --port $(PORT) $(ARGS)

test: $(VENV)/.test ## install what the tests need and run them
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not perf" $(ARGS)

sweep: $(VENV)/.test ## the exhaustive sweeps (long)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow" --timeout 3600 $(ARGS)

soak: $(VENV)/.test ## a real server under short requests, aborts and full pools; MINUTES=5
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

manifests: $(VENV)/.deploy ## image, compose, kustomize and chart: schemas, equality, and every field against the program
	LOCKSTEP_DEPLOY_TOOLS=required $(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy \
		--ignore tests/deploy/test_epp_contract.py $(ARGS)

check: test lint types imports manifests ## all that CI runs

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboards: $(VENV)/.test ## regenerate dashboards and Prometheus rules, which are made from code
	$(BIN)/python -m deploy.observability
	$(BIN)/python -m deploy.manifests

observe: $(VENV)/.observe ## a real Prometheus watches a server under load: every expression, every alert, and pictures
	PICTURES=docs/img $(BIN)/python -m pytest -m observability tests/observability $(ARGS)

docs: $(VENV)/.test ## regenerate the pages that are made from code, and the chart's part about settings
	$(BIN)/python -m server.docs
	$(BIN)/lockstep support --markdown > docs/support.md
	$(BIN)/python -m deploy.manifests

bench: $(VENV)/.serve ## speculation against none, side by side, on the embedded model
	$(BIN)/lockstep bench speculation $(ARGS)

image: ## build the image with docker, podman or buildah (IMAGE_TOOL, IMAGE, VARIANT, BASE_IMAGE)
	IMAGE=$(IMAGE) VARIANT=$(VARIANT) deploy/image/build.sh

image-check: ## build the image without an engine and run it read-only and without rights (Linux, root, buildah)
	$(PYTHON) deploy/image/check.py $(or $(WORK_DIR),build/image-check)

deploy-check: $(VENV)/.deploy ## what `manifests` leaves out: the CRDs' own schemas (npm) and checkov (a large install)
	VENV=$(VENV) PYTHON=$(PYTHON) deploy/check.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/.observe: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[test,observe]"
	touch $@

$(VENV)/.deploy: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[test,deploy]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
