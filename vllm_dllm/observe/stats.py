"""What one request cost: forwards, denoising steps, drafts, and the tokens that came of them.

The numbers ride on vLLM's per-request observations (``CompletionOutput.spec_decode_metrics``): the
scheduler observes each forward of a request once. ``vllm_dllm.observe.wires`` says what it writes into which field.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics


@dataclass(frozen=True)
class StepMap:
    """How each token of a completion came to its place: one integer per returned token in each of the fields.

    Attributes:
        steps: denoising step of the token's own block that unmasked it (with token editing: that wrote it last),
            counted from 0 in each block, as TraDo's ``step_map``. Steps that accepted drafts stand for count, so drafts
            of a lossless verifier do not change it. -1: the prefill, or the forward that committed the block before,
            which give some families the first token of a block (``FamilyTraits.commit_predicts``).
        blocks: the token's block, counted from 0 at the first token.
        forwards: the forward of the request that wrote the token, counted from 0 as ``RequestStats.nfe`` counts; -1:
            the prefill.
    """

    steps: tuple[int, ...]
    blocks: tuple[int, ...]
    forwards: tuple[int, ...]

    def first(self, num_tokens: int) -> "StepMap":
        """Of the first tokens alone."""
        return StepMap(self.steps[:num_tokens], self.blocks[:num_tokens], self.forwards[:num_tokens])


@dataclass(frozen=True)
class RequestStats:
    """Cost of a finished request.

    Attributes:
        nfe: model forwards the request took part in after its prefill (number of function evaluations).
        committed_tokens: tokens returned to the user, the stop token included. Where a stop string ended a request,
            responses of a server count the rest of the last block, too. So do outputs that have the newest tokens alone
            (``RequestOutputKind.DELTA``), but where fewer tokens came before than the last output has.
        denoising_steps: those forwards that denoised. The rest only wrote a finished block to the KV cache, which
            families whose commits give a first token (Fast-dLLM v2) and large batches with asynchronous scheduling do
            in a forward of its own.
        drafted: branches that were drafted, one per later state of a block that a forward tried.
        accepted: denoising steps skipped because a draft of their outcome was accepted, which is forwards saved.
        acceptance_histogram: entry ``i`` is the number of forwards with drafts that skipped ``i`` denoising steps;
            empty where no forward had drafts.
            With ``fef``, ``linear_spec``, ``isd`` and ``s2d2``, whose drafts are tokens, ``drafted`` and ``accepted``
            count tokens, and the histogram the forwards that verified. Forwards of ``linear_spec`` and ``isd`` all
            count as denoising.
        step_map: of a request with ``dllm_step_map``, for one completion; None otherwise.
    """

    nfe: int
    committed_tokens: int
    denoising_steps: int
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    step_map: StepMap | None = field(default=None, repr=False)

    @property
    def tokens_per_forward(self) -> float:
        """Committed tokens per forward (TPF); 0 where no forward was needed."""
        return self.committed_tokens / self.nfe if self.nfe else 0.0


def request_stats(output: "RequestOutput | CompletionOutput") -> RequestStats:
    """Cost of a finished request that a diffusion model answered.

    Args:
        output: a completion, or a request; a request of ``n > 1`` completions gives the sum over them, without their
            step maps, which each completion has.

    Raises:
        ValueError: the request has not finished, or its engine recorded no observations.
        TypeError: it is no output, but a list of outputs, for example.
    """
    completions: Sequence[CompletionOutput] = getattr(output, "outputs", None) or [output]
    if not all(hasattr(completion, "finish_reason") for completion in completions):
        raise TypeError(f"request_stats takes one RequestOutput or CompletionOutput, not {type(output).__name__}")
    costs = [_completion_stats(completion) for completion in completions]
    if len(costs) == 1:
        return costs[0]
    histograms = zip_longest(*(cost.acceptance_histogram for cost in costs), fillvalue=0)
    counts = ("nfe", "committed_tokens", "denoising_steps", "drafted", "accepted")
    sums = {name: sum(getattr(cost, name) for cost in costs) for name in counts}
    return RequestStats(**sums, acceptance_histogram=tuple(map(sum, histograms)))


def response_stats(metrics: Mapping[str, Any] | None) -> RequestStats:
    """The same numbers from the ``metrics`` object of an OpenAI response (the usage chunk's, when streaming).

    Raises:
        ValueError: the server reported no observations, which it does for single completions only (``n == 1``), or
            those of a model that is none of ours.
    """
    observations = (metrics or {}).get("speculative_decoding")
    if observations is None:
        raise ValueError(
            "the response has no metrics.speculative_decoding: it is reported by diffusion models, for one "
            "prompt and n=1, and in a stream only with stream_options.include_usage"
        )
    # vLLM leaves lists without entries out.
    return _count(
        observations["acceptance_histogram"],
        observations.get("per_step_drafted") or (),
        observations.get("per_step_accepted") or (),
    )


def observed_stats(metrics: "RequestSpecDecodeMetrics") -> RequestStats:
    """Cost of one completion as its scheduler observed it."""
    return _count(metrics.histogram, metrics.per_step_drafted, metrics.per_step_accepted)


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
        # A stop string is found where text is made, after the scheduler counted the block that it cuts short. An output
        # with the newest tokens alone (`RequestOutputKind.DELTA`) does not say how many came before.
        num_tokens = len(completion.token_ids)
        # Of the last block at least one token is left: the one that completed the stop string.
        most_tokens = len(completion.spec_decode_metrics.histogram) - 1
        if not 0 < stats.committed_tokens - num_tokens < most_tokens:
            return stats
        step_map = None if stats.step_map is None else stats.step_map.first(num_tokens)
        return replace(stats, committed_tokens=num_tokens, step_map=step_map)
    return stats


def _count(histogram: Sequence[int], per_step_drafted: Sequence[int], per_step_accepted: Sequence[int]) -> RequestStats:
    """Cost from the fields of ``vllm_dllm.observe.wires.DiffusionRequestMetrics``."""
    nfe = sum(histogram)
    if len(per_step_drafted) < nfe:
        raise ValueError(
            f"{nfe} forwards were observed but {len(per_step_drafted)} of them described, so these are not the "
            "observations of a diffusion model of vllm-dllm"
        )
    steps, places = per_step_accepted[nfe:], per_step_drafted[nfe:]
    per_step_accepted, per_step_drafted = per_step_accepted[:nfe], per_step_drafted[:nfe]
    depths = Counter(
        accepted for branches, accepted in zip(per_step_drafted, per_step_accepted, strict=True) if branches > 1
    )
    return RequestStats(
        nfe=nfe,
        committed_tokens=sum(tokens * forwards for tokens, forwards in enumerate(histogram)),
        denoising_steps=sum(branches > 0 for branches in per_step_drafted),
        drafted=sum(branches - 1 for branches in per_step_drafted if branches),
        accepted=sum(per_step_accepted),
        acceptance_histogram=tuple(depths[depth] for depth in range(max(depths, default=-1) + 1)),
        step_map=StepMap(tuple(steps), tuple(places[len(steps) :]), tuple(places[: len(steps)])) if steps else None,
    )
