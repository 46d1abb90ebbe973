# ppo_lab: every command a reader needs. `make` or `make help` lists them.
PYTHON ?= python3
TORCH ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Tiny networks run faster on one thread than on many.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help lab test test-fast book bench gpu-check data clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo '  options            PYTHON=python3.12   TORCH="torch==2.9.1"   WORKERS=4'

lab: $(STAMP) ## install what is needed and open the book in JupyterLab
	$(BIN)/jupyter lab chapters/00_start_here.ipynb

test: $(STAMP) ## install, then ruff and the whole test suite with every notebook
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

test-fast: $(STAMP) ## the quick tests only: no notebooks, no training
	$(BIN)/pytest tests -n $(WORKERS) --dist loadfile -m "not slow and not distributed and not gpu and not browser"

book: $(STAMP) ## execute every notebook in place and normalise its metadata
	$(BIN)/python tools/book.py

bench: $(STAMP) ## measure speed and scores; compares with Stable-Baselines3 where installed
	$(BIN)/python tools/bench.py

gpu-check: $(STAMP) ## train half a billion weights on this machine's GPU and print speed and memory
	$(BIN)/pytest tests/llm/test_gpu.py -m gpu
	$(BIN)/python tools/gpu_check.py

data: $(STAMP) ## make everything in data/ again (an hour and a half)
	$(BIN)/python tools/make_data.py

clean: ## remove the environment and all caches; runs/ and data/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp: reinstall only when the dependencies changed, or when TORCH=… names another build than last time.
ifneq ($(TORCH),)
ifneq ($(TORCH),$(shell cat $(STAMP) 2>/dev/null))
.PHONY: $(STAMP)
endif
endif
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'ppo_lab: $(PYTHON) not found: install Python 3.11 or newer, or name it: make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) tools/install.py --venv $(VENV) $(if $(TORCH),--torch '$(TORCH)')
	@echo '$(TORCH)' > $@
