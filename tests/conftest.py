"""Engines of the whole test run: in this process, and one per configuration."""

import os

# Read by vLLM when it is imported: the engine core runs in this process, where tests can look into it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
