.DEFAULT_GOAL := help
.PHONY: help install demo demo-deer test lint bench clean

# Made by tools/install.sh; a change of what is to be installed makes it out of date.
INSTALLED := .venv/.installed

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(INSTALLED): pyproject.toml tools/install.sh
	@bash tools/install.sh

install: $(INSTALLED) ## build .venv with vLLM for CPU and all extras (Python 3.11 or 3.12)

demo: $(INSTALLED) ## decode a few prompts with the bundled model, one token per step and in parallel
	@.venv/bin/vllm-dllm demo

demo-deer: $(INSTALLED) ## answer a few prompts with the bundled autoregressive model and its diffusion drafter
	@.venv/bin/vllm-dllm demo-deer

lint: $(INSTALLED) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint ## lint, then every test (at most 40 minutes on two cores)
	.venv/bin/pytest --numprocesses=2 --dist=loadfile --session-timeout=2400

bench: $(INSTALLED) ## measure the engine, step-skipping, caches and drafters
	.venv/bin/python benchmarks/engine.py
	.venv/bin/python benchmarks/step_skipping.py --docs docs/step-skipping.md
	.venv/bin/python benchmarks/full_attention.py --docs docs/full-attention.md
	.venv/bin/python benchmarks/deer.py --docs docs/deer.md

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
