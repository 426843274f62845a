.DEFAULT_GOAL := help
.PHONY: help install demo demo-deer lint test test-unit test-newer test-engine test-server test-stress docs bench bench-gpu \
	clean

# Made by tools/install.sh; a change of what is to be installed makes it out of date.
INSTALLED := .venv/.installed
# A vLLM that has no CPU build yet, under the compiled modules of the one in .venv.
NEWER := 0.33
# tools/newer_vllm.py makes .venv-X.Y, of X.Y.Z too.
NEWER_INSTALLED := .venv-$(subst $() $(),.,$(wordlist 1,2,$(subst ., ,$(or $(VLLM),$(NEWER)))))/.installed
# A process stays with a group of tests, mostly a file, so that they share engines (tests/conftest.py).
# pytest-xdist would wait forever for the other tests of a process that crashed, unless the crash ends the run.
PYTEST_OPTIONS := --numprocesses=2 --dist=loadgroup --no-loadscope-reorder --max-worker-restart=0
PYTEST := .venv/bin/pytest $(PYTEST_OPTIONS)
UNIT := $(PYTEST) tests/unit -m "not slow"
# What a newer vLLM may break: tokens, pages, schedules, kernels, what is replaced or wrapped, and what a GPU runs.
TEST_NEWER := .venv-$(NEWER)/bin/pytest $(PYTEST_OPTIONS) tests/engine/test_seams.py tests/engine/patches \
	$(addprefix tests/engine/cpu/test_,batch.py rejection.py sampling.py) tests/engine/speculators/test_lossless.py \
	$(addprefix tests/engine/runtime/test_,attention.py golden.py prefix_cache.py profile.py async_scheduling.py \
		streaming_sessions.py structured_outputs.py offloading.py) \
	$(addprefix tests/gpu_less/test_,start.py steps.py drafter.py full_graphs.py kernel_bounds.py)

# $(call timed,name,command): runs a command, then prints the seconds that it took; its exit status stays.
timed = @begin=$$(date +%s); $(2); status=$$?; echo "$(1): $$(($$(date +%s) - begin)) s"; exit $$status

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(INSTALLED): pyproject.toml tools/install.sh
	@bash tools/install.sh

install: $(if $(VLLM),$(NEWER_INSTALLED),$(INSTALLED)) ## build .venv with vLLM for CPU and all extras; VLLM=0.33: .venv-0.33, too

$(NEWER_INSTALLED): $(INSTALLED) tools/newer_vllm.py
	.venv/bin/python tools/newer_vllm.py $(or $(VLLM),$(NEWER))

demo: $(INSTALLED) ## decode a few prompts with the bundled model, one token per step and in parallel
	@.venv/bin/vllm-dllm demo

demo-deer: $(INSTALLED) ## answer a few prompts with the bundled autoregressive model and its diffusion drafter
	@.venv/bin/vllm-dllm demo-deer

lint: $(INSTALLED) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: export HYPOTHESIS_PROFILE ?= full
test: lint $(NEWER_INSTALLED) ## lint, then every test with all examples, and those of test-newer, as CI does (at most 40 minutes on two cores)
	@begin=$$(date +%s); status=0; \
	$(UNIT) || status=1; \
	echo "test-unit: $$(($$(date +%s) - begin)) s"; \
	newer=$$(date +%s); \
	$(TEST_NEWER) || status=1; \
	echo "test-newer: $$(($$(date +%s) - newer)) s"; \
	$(PYTEST) --session-timeout=3600 -m "slow or not unit" || status=1; \
	echo "test: $$(($$(date +%s) - begin)) s"; exit $$status

test-unit: $(INSTALLED) ## tests that need no vLLM (less than a minute)
	$(call timed,test-unit,$(UNIT))

test-newer: $(NEWER_INSTALLED) ## tests of what a newer vLLM may break, on vLLM 0.33 (5 minutes; part of test)
	$(call timed,test-newer,$(TEST_NEWER))

test-engine: $(INSTALLED) ## tests with engines in pytest's own processes
	$(call timed,test-engine,$(PYTEST) tests/engine)

test-server: $(INSTALLED) ## tests of `vllm serve`
	$(call timed,test-server,$(PYTEST) tests/server)

test-stress: $(INSTALLED) ## load, faults, hostile requests, several processes
	$(call timed,test-stress,$(PYTEST) tests/stress)

docs: $(INSTALLED) ## build the site of the documentation in build/site
	.venv/bin/mkdocs build --strict

bench: $(INSTALLED) ## measure the engine, step-skipping, caches and drafters
	.venv/bin/python benchmarks/engine.py
	.venv/bin/python benchmarks/step_skipping.py --docs docs/step-skipping.md
	.venv/bin/python benchmarks/full_attention.py --docs docs/full-attention.md
	.venv/bin/python benchmarks/deer.py --docs docs/deer.md

# With the interpreter at hand: `make install` makes a .venv for CPUs.
bench-gpu: ## measure on a GPU, in ten minutes (needs vLLM for CUDA: docs/gpu.md)
	python benchmarks/gpu.py --docs docs/gpu.md

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
