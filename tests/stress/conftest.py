"""The server of ``tests/server``, for tests that load it or send it hostile requests."""

from tests.server.conftest import block_length, checkpoint, client, config, server, tokenizer

__all__ = ["block_length", "checkpoint", "client", "config", "server", "tokenizer"]
