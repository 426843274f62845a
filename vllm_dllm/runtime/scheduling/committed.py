"""What prefix caching is shown of texts whose context is causal: pages that hold final K/V, block grid or not."""

from typing import Any

from vllm.v1.request import Request, StreamingUpdate

from vllm_dllm.geometry import geometry_of
from vllm_dllm.options.resolve import options_of
from vllm_dllm.runtime.scheduling.kept import KeptWindowsScheduler


class CommittedPagesScheduler(KeptWindowsScheduler):
    """Knows how much of a text is committed where blocks begin anywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Requests that decode with LinearSpec.
        self._speculating: set[str] = set()
        if geometry_of(self.vllm_config).traits.causal_context:
            coordinator = self.kv_cache_manager.coordinator
            self._cache_pages = coordinator.cache_blocks
            coordinator.cache_blocks = self._cache_committed_pages

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            self._heed_options(request)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        super()._update_request_as_session(session, update)
        self._heed_options(session)

    def _heed_options(self, request: Request) -> None:
        """Take note of what a new request asks for, or the next prompt of a streaming session.

        A prompt that comes while the session still answers the one before waits, and so does what it asks for.
        """
        assert self.geometry is not None
        self._speculating.discard(request.request_id)
        if options_of(request.sampling_params, self.geometry).verify == "linear_spec":
            self._speculating.add(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._speculating.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _cache_committed_pages(self, request: Request, num_tokens: int) -> Any:
        """Show prefix caching no page that the current block, which may begin anywhere, reaches into."""
        prompt_length = request.num_prompt_tokens
        finished = (request.num_tokens - prompt_length) // self.block_length * self.block_length
        if request.request_id in self._speculating:
            # A round begins with the last token, whose K/V is not final yet.
            finished = max(request.num_tokens - prompt_length - 1, 0)
        return self._cache_pages(request, min(num_tokens, prompt_length + finished))
