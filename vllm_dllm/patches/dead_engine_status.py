"""A server whose engine has died ends with an error (``patches/010-dead-engine-exit-status.diff``).

vLLM ends it with status 0, which supervisors that restart on failure take for the end that was wanted.
"""

import functools
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm

if TYPE_CHECKING:
    from vllm.entrypoints.launchers.launcher import NoSignalServer


def apply() -> bool:
    """Change the HTTP server of vLLM's launcher; False where vLLM has the change."""
    from vllm.entrypoints.launchers import launcher

    original = of_vllm(launcher.NoSignalServer, "serve", ("self", "sockets"))
    if mentions(of_vllm(launcher, "serve_http", ("app", "sock")), "dead_error"):
        return False

    @functools.wraps(original)
    async def serve(self: "NoSignalServer", *args: Any, **kwargs: Any) -> None:
        # The application deletes its state when the server ends.
        engine = getattr(self.config.app.state, "engine_client", None)
        await original(self, *args, **kwargs)
        if engine is not None and engine.errored and not engine.is_running:
            raise engine.dead_error

    launcher.NoSignalServer.serve = serve
    return True
