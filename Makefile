PYTHON ?= python3
MODEL ?= Qwen/Qwen3-30B-A3B
RANK ?= 64

ifdef LORA_MEM_PYTHON
# An interpreter that has vLLM already: nothing is installed into it, not even this package.
PY := $(LORA_MEM_PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := .venv/bin/python
endif

# Torch, its profiler and vLLM write to stderr, which nbval compares.
QUIET := KINETO_LOG_LEVEL=6 TORCH_CPP_LOG_LEVEL=ERROR VLLM_LOGGING_LEVEL=ERROR
# Progress bars show the time they took.
COMPARED := $(QUIET) LORA_MEM_PROGRESS=0
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.PHONY: help env demo check test test-all notebooks lab clean

help:
	@echo "make demo       the size of an adapter, then its life in a real vLLM engine, with the hook and without"
	@echo "make test       lint, types, imports, tests and notebooks; make check runs the first three"
	@echo "make test-all   the same with the slowest tables whole instead of sampled"
	@echo "make notebooks  run the notebooks and save them with their output"
	@echo "make lab        open the notebooks in JupyterLab"
	@echo "make clean      remove .venv and what tools left behind"
	@echo "Each makes .venv first if needed. PYTHON=$(PYTHON) makes it; LORA_MEM_DEVICE=gpu|cpu chooses the vLLM;"
	@echo "LORA_MEM_PYTHON=/path/python uses an interpreter that has vLLM already."

env:
	@$(PYTHON) scripts/setup_env.py

demo: env
	$(PY) -m lora_mem size $(MODEL) --rank $(RANK)
	$(PY) -m lora_mem.demo

test: env check
	$(PY) -m pytest
	$(COMPARED) $(PY) -m pytest --nbval --nbval-current-env notebooks

test-all: env check
	$(PY) -m pytest -m ""
	$(COMPARED) $(PY) -m pytest --nbval --nbval-current-env notebooks

check: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

notebooks: env
	$(COMPARED) $(PY) -m jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.kernel_name=python3 --ExecutePreprocessor.record_timing=False $(NOTEBOOKS)

lab: env
	$(QUIET) $(PY) -m jupyter lab --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/notebooks/01_size_of_an_adapter.ipynb

clean:
	rm -rf .venv setup.log build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
