"""What drafting and verifying cost beside the model: the parts of a step, timed with and without drafts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from vllm_dllm.methods import VerifierName

if TYPE_CHECKING:
    from vllm import LLM


@dataclass
class Step:
    """One step of a single request; times in seconds.

    Attributes:
        rows: decoding rows.
        plan: laying out the rows, and their attention metadata.
        forward: the model, and the logits.
        row_stats: tokens and confidences of the logits' rows; part of ``sampler``.
        sampler: everything from the logits to the next state and its drafts.
    """

    rows: int = 0
    plan: float = 0.0
    forward: float = 0.0
    row_stats: float = 0.0
    sampler: float = 0.0


@dataclass(frozen=True)
class Overhead:
    """What drafts add to a step, as shares of the forward without drafts.

    Attributes:
        drafts: beside the block itself.
        forward: the forward with drafts, whose rows are as many times more.
        plan: added to the row plan.
        row_stats: added by tokens and confidences of the drafts' rows.
        decision: added by the rest of the sampler: acceptance, drafting, pruning.
        steps: with drafts that were timed.
    """

    verify: VerifierName
    drafts: int
    forward: float
    plan: float
    row_stats: float
    decision: float
    steps: int

    @property
    def share(self) -> float:
        """All that is added beside the model."""
        return self.plan + self.row_stats + self.decision


@contextmanager
def timed_steps(llm: "LLM") -> Iterator[list[Step]]:
    """Times every step of the engine, which must run in this process, until the context ends."""
    import vllm_dllm.runtime.logits.rows

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    steps: list[Step] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if part == "plan":
                steps.append(Step())
            _synchronize()
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            _synchronize()
            step = steps[-1]
            setattr(step, part, getattr(step, part) + time.perf_counter() - begin)
            return result

        return call

    def sampler_call(sampler: Any, logits: torch.Tensor, batch: Any, *args: Any) -> Any:
        steps[-1].rows = batch.num_draft_tokens
        return sample(sampler, logits, batch, *args)

    sampler_class = type(runner.sampler)
    sample = timed("sampler", sampler_class.__call__)
    row_stats = vllm_dllm.runtime.logits.rows.row_stats
    with ExitStack() as stack:
        patch = mock.patch.object
        for part, owner, name in (
            ("plan", runner.model_state, "prepare_attn"),
            ("forward", runner.model, "forward"),
            ("forward", runner.model, "compute_logits"),
        ):
            stack.enter_context(patch(owner, name, timed(part, getattr(owner, name))))
        stack.enter_context(patch(vllm_dllm.runtime.logits.rows, "row_stats", timed("row_stats", row_stats)))
        # Python looks for `__call__` in the class.
        stack.enter_context(patch(sampler_class, "__call__", sampler_call))
        yield steps


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def compare(
    verify: VerifierName, drafts: int, alone: Sequence[Step], drafted: Sequence[Step], block_length: int
) -> Overhead:
    """Overhead of ``drafts`` drafts, by medians over the steps that have exactly so many.

    Raises:
        ValueError: one of the two has no step of that kind.
    """
    plain = [step for step in alone if step.rows == block_length]
    full = [step for step in drafted if step.rows == (1 + drafts) * block_length]
    if not plain or not full:
        rows = sorted({step.rows for step in drafted})
        raise ValueError(f"{verify}: no step with {drafts} drafts among {len(drafted)} steps of {rows} rows")

    def added(part: Callable[[Step], float]) -> float:
        return (median(map(part, full)) - median(map(part, plain))) / forward

    forward = median(step.forward for step in plain)
    return Overhead(
        verify=verify,
        drafts=drafts,
        forward=median(step.forward for step in full) / forward,
        plan=added(lambda step: step.plan),
        row_stats=added(lambda step: step.row_stats),
        decision=added(lambda step: step.sampler - step.row_stats),
        steps=len(full),
    )
