"""The server of ``tests/server``, for what the pages send to a server."""

from tests.server.conftest import block_length, checkpoint, client, config, server, tokenizer

__all__ = ["block_length", "checkpoint", "client", "config", "server", "tokenizer"]
