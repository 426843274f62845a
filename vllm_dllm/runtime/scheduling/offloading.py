"""KV offloading: pages of K/V that vLLM's OffloadingConnector keeps outside of the device, and brings back."""

import contextlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_dllm.runtime.scheduling.requests import RequestScheduler


class OffloadingScheduler(RequestScheduler):
    """Has the connector store final K/V alone, and load whole blocks.

    The connector takes the K/V of a text for final as soon as its tokens are known, but for the last token of a text
    that has ended. Here a block is known a step before its K/V is final, and the last block of a text never gets there.
    What prefix caching is shown in a step is final when the step is over (`RequestScheduler`), and the connector copies
    after that: so it stores as far as prefix caching was shown.

    A text whose every token is loaded begins with its last token, as vLLM computes that again. Here a prompt begins
    with a block, so the last page of such a text is computed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Tokens with final K/V, of requests that are not finished or whose end the connector does not know yet.
        self._final: dict[str, int] = {}
        if self.connector is not None:
            self._matched = self.connector.get_num_new_matched_tokens
            self.connector.get_num_new_matched_tokens = self._whole_blocks_matched
            stores = self.connector.scheduler
            self._offloadable = stores._calc_num_offloadable_tokens
            stores._calc_num_offloadable_tokens = self._final_offloadable

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        (pages,) = self.kv_cache_manager.coordinator.single_type_managers
        for req_id in scheduler_output.num_scheduled_tokens:
            self._final[req_id] = pages.num_cached_block.get(req_id, 0) * pages.block_size
        # The connector waits for what it stores of preempted requests, and by itself before it loads. A session that
        # let its pages go is named among these, and may load already.
        preempted = scheduler_output.preempted_req_ids
        scheduler_output.preempted_req_ids = {
            req_id for req_id in preempted or () if not self._is_loading(self.requests.get(req_id))
        }
        try:
            metadata = super()._build_kv_connector_meta(connector, scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = preempted
        for req_id in scheduler_output.finished_req_ids:
            self._final.pop(req_id, None)
        return metadata

    @staticmethod
    def _is_loading(request: Request | None) -> bool:
        return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def _free_request_blocks(self, request: Request) -> None:
        if not request.is_finished():
            # The connector remembers the pages of a session that waits, to store later what it had no room for. Others
            # may have them by then.
            self._final.pop(request.request_id, None)
        super()._free_request_blocks(request)

    def _final_offloadable(self, state: Any, num_computed_tokens: int) -> int:
        """``OffloadingConnectorScheduler._calc_num_offloadable_tokens``, but for what is not final."""
        return min(self._offloadable(state, num_computed_tokens), self._final.get(state.req.request_id, 0))

    def _whole_blocks_matched(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """``KVConnectorBase_V1.get_num_new_matched_tokens``, but for the page of the text's last token."""
        matched, is_async = self._matched(request, num_computed_tokens)
        if not matched:
            return matched, is_async
        most = (request.num_tokens - 1) // self.block_size * self.block_size - num_computed_tokens
        return (min(matched, most), is_async) if most > 0 else (0, False)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Like vLLM's, but with running requests also where a transfer or a step in flight still holds pages."""
        if not reset_running_requests or self.connector is None:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        for request in self.requests.values():
            if self._is_loading(request):
                # vLLM begins anew with a request whose load failed, once the transfer is over.
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request.request_id)
            elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                # Its K/V may have been loaded already, and it waits with its pages.
                self._free_request_blocks(request)
                request.num_computed_tokens = 0
        with contextlib.suppress(RuntimeError):
            super().reset_prefix_cache(reset_running_requests=True)
        manager = self.kv_cache_manager
        manager.evict_blocks({page.block_id for page in manager.block_pool.blocks if page.block_hash is not None})
        return self.reset_connector_cache() if reset_connector else True

    def reset_connector_cache(self) -> bool:
        """Like vLLM's, but also where no step was taken since the last reset, whose jobs end with the next step."""
        if self.connector is None:
            return super().reset_connector_cache()
        stores = self.connector.scheduler
        ending, stores._current_batch_jobs_to_flush = stores._current_batch_jobs_to_flush, set()
        try:
            return super().reset_connector_cache()
        finally:
            stores._current_batch_jobs_to_flush |= ending
