# Everything runs in .venv, which is made on first use and renewed when pyproject.toml or constraints.txt change.
#   make serve                      the service on port 8000, with the embedded demo checkpoint
#   make serve ARGS="--port 9000"   … with flags, or a checkpoint: ARGS=Qwen/Qwen-Image-2.1
#   make test ARGS="-k settings"    the CPU tests, in two processes; clients that need packages of their own run in
#                                   .venv-clients
#   make soak ARGS="--minutes 3"    all kinds of traffic on a server of its own; two hours without ARGS
#   make lock, audit, sbom          pin what the image installs, ask for known holes in it, list it in sbom.json

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
TOOLS := .venv-tools
ARGS ?=

.PHONY: serve test soak lint format settings-page lock audit sbom licences clean

serve: $(VENV)/.installed
	exec $(VENV)/bin/easel serve $(ARGS)

test: $(VENV)/.installed-dev $(CLIENTS)/.installed $(TOOLS)/.installed
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

soak: $(VENV)/.installed-dev
	$(VENV)/bin/python -m benchmarks.soak $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

settings-page: $(VENV)/.installed
	$(VENV)/bin/python -m app.settings_page > docs/settings.md

# What the image installs, for the Python of the Dockerfile, from pip's default index. With TORCH_INDEX_URL also
# torch's CPU build, of the same version, from that index.
LOCK := $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate \
    --no-emit-index-url --custom-compile-command "make lock"

lock: $(TOOLS)/.installed
	$(LOCK) -c constraints.txt --extra otel -o docker/requirements.txt pyproject.toml
	test -z "$(TORCH_INDEX_URL)" || echo torch | \
	    $(LOCK) --upgrade -c constraints.txt --no-deps --default-index "$(TORCH_INDEX_URL)" -o docker/torch-cpu.txt -

audit: $(TOOLS)/.installed
	$(TOOLS)/bin/python .ci/audit.py $(ARGS)

sbom: $(TOOLS)/.installed
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml -o sbom.json docker/requirements.txt

licences: $(TOOLS)/.installed
	$(TOOLS)/bin/python .ci/licences.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(TOOLS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); set PYTHON=python3.12, say" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

$(CLIENTS)/.installed: tests/clients/requirements.txt $(VENV)/bin/python
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	touch $@

$(TOOLS)/.installed: .ci/tools.txt $(VENV)/bin/python
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet -r .ci/tools.txt
	touch $@
