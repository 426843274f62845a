"""Observations of a finished request, for stat loggers (``patches/003-finished-request-metrics.diff``).

vLLM hands its loggers a record of each finished request, but not the request's speculative-decoding
observations.
"""

import functools
from dataclasses import fields
from typing import TYPE_CHECKING

from vllm_dllm.patches.original import of_vllm

if TYPE_CHECKING:
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.metrics.stats import IterationStats


def apply() -> bool:
    """Give ``FinishedRequestStats`` a ``spec_decode_metrics``; False where vLLM has the change."""
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import FinishedRequestStats

    if any(field.name == "spec_decode_metrics" for field in fields(FinishedRequestStats)):
        return False
    original = of_vllm(
        OutputProcessor,
        "_update_stats_from_finished",
        ("self", "req_state", "finish_reason", "iteration_stats"),
    )

    @functools.wraps(original)
    def update(
        self: "OutputProcessor",
        req_state: "RequestState",
        finish_reason: "FinishReason | None",
        iteration_stats: "IterationStats | None",
    ) -> None:
        original(self, req_state, finish_reason, iteration_stats)
        if iteration_stats is not None:
            iteration_stats.finished_requests[-1].spec_decode_metrics = req_state.spec_decode_metrics

    FinishedRequestStats.spec_decode_metrics = None
    OutputProcessor._update_stats_from_finished = update
    return True
