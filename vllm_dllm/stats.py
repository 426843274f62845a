"""What one request cost: forwards, denoising steps and the tokens they committed.

The numbers ride on vLLM's per-request observations (``CompletionOutput.spec_decode_metrics``): the
scheduler observes each forward of a request once, with the tokens it committed (see ``vllm_dllm.metrics``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics


@dataclass(frozen=True)
class RequestStats:
    """Cost of a finished request.

    Attributes:
        nfe: model forwards the request took part in after its prefill (number of function evaluations).
        committed_tokens: tokens returned to the user, the stop token included.
        denoising_steps: those forwards that denoised. The rest only wrote a finished block to the KV cache, which
            families with shifted logits (Fast-dLLM v2) do in a forward of its own.
    """

    nfe: int
    committed_tokens: int
    denoising_steps: int

    @property
    def tokens_per_forward(self) -> float:
        """Committed tokens per forward (TPF); 0 where no forward was needed."""
        return self.committed_tokens / self.nfe if self.nfe else 0.0


def request_stats(output: "RequestOutput | CompletionOutput") -> RequestStats:
    """Cost of a finished request that a diffusion model answered.

    Args:
        output: a completion, or a request; a request of ``n > 1`` completions gives the sum over them.

    Raises:
        ValueError: the request has not finished, or its engine recorded no observations.
    """
    completions: Sequence[CompletionOutput] = getattr(output, "outputs", None) or [output]
    costs = [_completion_stats(completion) for completion in completions]
    return RequestStats(
        nfe=sum(cost.nfe for cost in costs),
        committed_tokens=sum(cost.committed_tokens for cost in costs),
        denoising_steps=sum(cost.denoising_steps for cost in costs),
    )


def response_stats(metrics: Mapping[str, Any] | None) -> RequestStats:
    """The same numbers from the ``metrics`` object of an OpenAI response (the usage chunk's, when streaming).

    Raises:
        ValueError: the server reported no observations; it does so for single completions only (``n == 1``).
    """
    observations = (metrics or {}).get("speculative_decoding")
    if observations is None:
        raise ValueError(
            "the response has no metrics.speculative_decoding: it is reported by diffusion models, for one "
            "prompt and n=1, and in a stream only with stream_options.include_usage"
        )
    return _count(observations["acceptance_histogram"], observations.get("per_step_drafted"))


def observed_stats(metrics: "RequestSpecDecodeMetrics") -> RequestStats:
    """Cost of one completion as its scheduler observed it."""
    return _count(metrics.histogram, metrics.per_step_drafted)


def _completion_stats(completion: "CompletionOutput") -> RequestStats:
    if completion.finish_reason is None:
        raise ValueError("request statistics are known once a request has finished; this output is not the last")
    if completion.spec_decode_metrics is None:
        raise ValueError(
            f"completion {completion.index} (finish_reason={completion.finish_reason!r}) carries no "
            "observations: they are recorded for diffusion models of vllm-dllm, and not for aborted requests"
        )
    stats = observed_stats(completion.spec_decode_metrics)
    if isinstance(completion.stop_reason, str):
        # A stop string is found where text is made, after the scheduler counted the block that it cuts short.
        committed = min(stats.committed_tokens, len(completion.token_ids))
        return RequestStats(stats.nfe, committed, stats.denoising_steps)
    return stats


def _count(histogram: Sequence[int], per_step_drafted: Sequence[int] | None) -> RequestStats:
    """``histogram[n]``: forwards that committed n tokens. ``per_step_drafted[i]``: rows that forward i
    denoised, where the family has forwards that denoise none; empty otherwise."""
    nfe = sum(histogram)
    return RequestStats(
        nfe=nfe,
        committed_tokens=sum(tokens * forwards for tokens, forwards in enumerate(histogram)),
        denoising_steps=sum(rows > 0 for rows in per_step_drafted) if per_step_drafted else nfe,
    )
