# One command each, from a fresh clone with only python3 and make:
#   make chat    talk to the default model
#   make check   what a change must pass, without any download, in two minutes
#   make test    everything CI runs
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODEL := smollm2-135m
BLAS  := libopenblas0-pthread
# python3 unless it is older than 3.11 and a newer one is at hand; python3.12 etc. can be given: make PYTHON=...
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup model chat check test lint format clean
help:
	@echo "make chat    talk to the default model ($(MODEL))"
	@echo "make check   format, lint, types, import rules and the quick tests; no download"
	@echo "make test    the same and all other tests, as CI runs them"
	@echo "make setup   the virtual environment only;  make model  the default model only"
	@echo "make format  rewrite the sources with ruff;  make clean  remove $(VENV)"

setup: $(STAMP)

# Built again when pyproject.toml changes; a failed build leaves no stamp and is repeated.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (found none); give one with: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) (about a minute, once)"
	@if command -v uv >/dev/null 2>&1; then \
		test -x $(PY) || uv venv --quiet --python $(PYTHON) $(VENV); \
		uv pip install --quiet --python $(PY) -e '.[dev]'; \
	else \
		test -x $(PY) || $(PYTHON) -m venv $(VENV) \
			|| { rm -rf $(VENV); echo "python cannot make a virtual environment:" \
			     "install python3-venv, or uv" >&2; exit 2; }; \
		$(PY) -m pip install -qq --disable-pip-version-check -e '.[dev]'; \
	fi
	@$(MAKE) --no-print-directory blas
	@touch $@

# On Linux mlx runs on the CPU, several times faster with this library. Where it cannot be
# installed without a question only speed is lost.
HAS_BLAS = $(PY) -c 'import sys; from dspark_mlx import blas; sys.exit(not blas.prefer_fast_blas())'
.PHONY: blas
blas:
	@if [ "$$(uname -s)" = Linux ] && ! $(HAS_BLAS); then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
			export DEBIAN_FRONTEND=noninteractive; \
			{ apt-get install -y -qq --no-install-recommends $(BLAS) || { apt-get update -qq && \
			  apt-get install -y -qq --no-install-recommends $(BLAS); }; } >/dev/null 2>&1 || true; \
		fi; \
		$(HAS_BLAS) || echo "note: no OpenBLAS found, mlx will run slower (Debian, Ubuntu: sudo apt install $(BLAS))"; \
	fi

# Fetched once into the user's cache folder; costs a moment when it is there.
model: $(STAMP)
	@$(VENV)/bin/dspark models --fetch $(MODEL) --quiet

chat: model
	@$(VENV)/bin/dspark-chat

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/deptry --no-ansi .

# Without what needs the model (real_model) and what takes long (slow).
check: lint
	$(PY) -m pytest -q -n 2 --dist loadgroup -m "not real_model and not slow"

test: lint model
	$(PY) -m pytest -q -n 2 --dist loadgroup

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV)
