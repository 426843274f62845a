"""Checkpoints of the families: configurations as published, and tiny ones."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import LoggingConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import configure_logging_if_needed
from vllm.transformers_utils import repo_utils

from tests.paths import GOLDEN
from vllm_dllm.plugin import register

register()


TINY_SDAR = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 1000000,
    "vocab_size": 512,
    "mask_token_id": 511,
    "eos_token_id": 510,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads a configuration that was refused once more, two seconds later."""
    monkeypatch.setattr(repo_utils.time, "sleep", lambda seconds: None)


@pytest.fixture
def golden() -> Path:
    return GOLDEN


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., str]:
    """Write a checkpoint that has only a ``config.json``; returns its path."""

    def write(config: dict[str, Any], name: str = "model") -> str:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@pytest.fixture
def engine_config(write_config: Callable[..., str]) -> Callable[..., VllmConfig]:
    """vLLM's own way from engine arguments to a configuration; a tiny SDAR model unless told otherwise."""

    def create(config: dict[str, Any] | None = None, name: str = "model", **arguments: Any) -> VllmConfig:
        model = write_config(TINY_SDAR | (config or {}), name)
        arguments = {"enforce_eager": True, "load_format": "dummy", **arguments}
        return EngineArgs(model=model, skip_tokenizer_init=True, **arguments).create_engine_config()

    return create


@pytest.fixture
def hook_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's loggers do not propagate to the root logger, where pytest listens."""
    configure_logging_if_needed(LoggingConfig())  # or the first engine does, which resets loggers and handlers
    logger = logging.getLogger("vllm.vllm_dllm.models")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
