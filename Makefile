# Two commands do all their own set-up: `make serve` and `make test`. Only POSIX sh, GNU Make 3.81+ and a Python are needed.

VENV  ?= .venv
MODEL ?= smollm2
HOST  ?= 127.0.0.1
PORT  ?= 8000
TIERS ?= nvme,redis
ARGS  ?=
SEEDS ?= 20000

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# What is installed is named by what decided it; a changed file, or a moved folder, installs anew.
KEY := $(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d ' ' -f 1)
DEV_READY    := $(VENV)/.ready-dev-$(KEY)
ENGINE_READY := $(VENV)/.ready-engine-$(KEY)
MODEL_READY  := $(VENV)/.ready-model-$(KEY)
# The dev set contains the engine set.
SERVE_READY  := $(if $(wildcard $(DEV_READY)),$(DEV_READY),$(ENGINE_READY))

.PHONY: help serve test lint sim plots wheel-test setup clean
.DEFAULT_GOAL := help

help:
	@echo "make serve        set up, then serve $(MODEL) on http://$(HOST):$(PORT) with KV tiers $(TIERS)"
	@echo "                  MODEL=smollm2|org/name|PATH  PORT=8000  HOST=127.0.0.1  TIERS=nvme,redis  ARGS='--more-flags'"
	@echo "make test         set up, then run the tests           ARGS='tests/kvstore -x'"
	@echo "make lint         ruff check, ruff format --check, mypy --strict"
	@echo "make sim          simulate the whole store          SEEDS=20000"
	@echo "make plots        draw docs/plots from the newest rows in benchmarks/results"
	@echo "make wheel-test   build the wheel and try it in clean environments"
	@echo "make setup        only what make test sets up"
	@echo "make clean        remove the virtual environment, caches and build outputs (not the model and KV cache folder)"
	@echo "PYTHON=/path/to/python3.12 chooses the interpreter (3.11 to 3.13) of a new environment."

serve: $(SERVE_READY)
	@echo
	@echo "Serving $(MODEL) on http://$(HOST):$(PORT) as soon as it is loaded (fetched before, if need be)."
	@echo "Then, from another terminal:"
	@echo
	@echo "  curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"$(MODEL)\", \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"max_tokens\": 32, \"temperature\": 0}'"
	@echo
	@exec $(VENV)/bin/pagetier serve --model $(MODEL) --host $(HOST) --port $(PORT) --kv-tier $(TIERS) $(ARGS)

test: $(DEV_READY) $(MODEL_READY)
	$(PY) -m pytest $(ARGS)

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

sim: $(DEV_READY)
	$(VENV)/bin/pagetier bench sim --seeds $(SEEDS) --no-keep

# Runs no benchmark. One that has kept no rows yet has no picture.
PLOTTED := $(filter cpu policies preemption restart service tiers,$(notdir $(basename $(wildcard benchmarks/results/*.csv))))
plots: $(DEV_READY)
	@for name in $(PLOTTED); do $(VENV)/bin/pagetier bench $$name --recorded --plot docs/plots >/dev/null || exit; done

wheel-test: $(DEV_READY) $(MODEL_READY)
	.ci/wheel-test $(PY)

setup: $(DEV_READY) $(MODEL_READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The first interpreter that is in range and really runs: a pyenv shim may be on PATH and run nothing.
$(PY):
	@lacking=; for python in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 || continue; \
	  if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then lacking="$$lacking $$python"; continue; fi; \
	  echo "Creating $(VENV) with $$python ($$("$$python" -c 'import platform; print(platform.python_version())'))"; \
	  "$$python" -m venv --clear $(VENV) && exit 0; \
	  exit 1; \
	done; \
	if [ -n "$$lacking" ]; then \
	  echo "Found$$lacking, but without the venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	else \
	  echo "Pagetier needs Python 3.11, 3.12 or 3.13; none of these runs and is in range: $(PYTHON) python3.11 python3.12 python3.13 python3 python." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	fi; \
	exit 1

$(DEV_READY): | $(PY)
	@echo "Installing into $(VENV): some minutes the first time, torch is large"
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-dev-* $(VENV)/.ready-engine-*
	@touch $@

$(ENGINE_READY): | $(PY)
	@echo "Installing into $(VENV): some minutes the first time, torch is large"
	$(PIP) install --quiet -c constraints.txt -e '.[engine]'
	@rm -f $(VENV)/.ready-engine-*
	@touch $@

# The default model, which the tests run. Lies in the cache folder, so an existing copy costs nothing.
$(MODEL_READY): | $(DEV_READY)
	$(VENV)/bin/pagetier pull smollm2
	@rm -f $(VENV)/.ready-model-*
	@touch $@
