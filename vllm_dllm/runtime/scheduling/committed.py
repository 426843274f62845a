"""What prefix caching is shown of a text: pages that hold final K/V, or will when the step is over."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from vllm_dllm.runtime.scheduling.kept import KeptWindowsScheduler


class CommittedPagesScheduler(KeptWindowsScheduler):
    """Knows how much of a text is committed where blocks begin anywhere, and takes back what a step never computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By priority a request may be preempted in a step that it has its rows of: how many pages it showed prefix
        # caching before that step, of each group of layers.
        self._pages_shown: dict[str, list[int]] = {}
        if self.geometry.traits.causal_context:
            coordinator = self.kv_cache_manager.coordinator
            self._cache_pages = coordinator.cache_blocks
            coordinator.cache_blocks = self._cache_committed_pages

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._pages_shown.clear()

    def _note_pages(self, request: Request) -> None:
        """Before a request gets its pages of a step: note what prefix caching knows of the request already."""
        if self.policy == SchedulingPolicy.PRIORITY:
            managers = self.kv_cache_manager.coordinator.single_type_managers
            shown = [manager.num_cached_block.get(request.request_id, 0) for manager in managers]
            self._pages_shown.setdefault(request.request_id, shown)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Take the pages back, too, that prefix caching was shown for rows of this step: nobody computes them now."""
        shown = self._pages_shown.pop(request.request_id, ())
        managers = self.kv_cache_manager.coordinator.single_type_managers
        for manager, number in zip(managers, shown, strict=False):
            pages = manager.req_to_blocks[request.request_id][number:]
            self.kv_cache_manager.evict_blocks({page.block_id for page in pages})
        return super()._preempt_request(request, *args, **kwargs)

    def _cache_committed_pages(self, request: Request, num_tokens: int) -> Any:
        """Show prefix caching no page that the current block, which may begin anywhere, reaches into."""
        prompt_length = request.num_prompt_tokens
        finished = (request.num_tokens - prompt_length) // self.block_length * self.block_length
        if self.asked[request.request_id].verify == "linear_spec":
            # A round begins with the last token, whose K/V is not final yet.
            finished = max(request.num_tokens - prompt_length - 1, 0)
        return self._cache_pages(request, min(num_tokens, prompt_length + finished))
