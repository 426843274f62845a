"""What drafting and verifying cost beside the model: the parts of a step, timed with and without drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_probe import Parts, Stopwatch, clock_of, runner_of, watched

from vllm_dllm.methods import VerifierName

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Step:
    """One denoising step of a single request.

    Attributes:
        rows: of the model's forward.
        parts: in seconds.
    """

    rows: int
    parts: Parts


@dataclass(frozen=True)
class Overhead:
    """What drafts add to a step, as shares of the forward without drafts.

    Attributes:
        drafts: beside the block itself.
        forward: the forward with drafts, whose rows are as many times more.
        plan: added to the row plan.
        sampler: added from the logits to the next state: tokens and confidences of the drafts' rows, acceptance,
            drafting, pruning.
        steps: with drafts that were timed.
    """

    verify: VerifierName
    drafts: int
    forward: float
    plan: float
    sampler: float
    steps: int

    @property
    def share(self) -> float:
        """All that is added beside the model."""
        return self.plan + self.sampler


def timed_steps(llm: "LLM", run: Callable[[], object]) -> list[Step]:
    """The denoising steps of what ``run`` runs on an engine of this process, but for the last step of all."""
    runner = runner_of(llm)
    stopwatch = Stopwatch(clock_of(runner.device))
    with watched(runner, stopwatch.around) as steps:
        run()
    # Steps of prompts have no logits.
    return [
        Step(step.rows, parts) for step, parts in zip(steps[:-1], stopwatch.parts(), strict=True) if step.logits_rows
    ]


def compare(
    verify: VerifierName, drafts: int, alone: Sequence[Step], drafted: Sequence[Step], block_length: int
) -> Overhead:
    """Overhead of ``drafts`` drafts, by medians over the steps that have exactly so many.

    Raises:
        ValueError: one of the two has no step of that kind.
    """
    plain = [step.parts for step in alone if step.rows == block_length]
    full = [step.parts for step in drafted if step.rows == (1 + drafts) * block_length]
    if not plain or not full:
        rows = sorted({step.rows for step in drafted})
        raise ValueError(f"{verify}: no step with {drafts} drafts among {len(drafted)} steps of {rows} rows")
    without, with_drafts = Parts.median(plain), Parts.median(full)
    return Overhead(
        verify=verify,
        drafts=drafts,
        forward=with_drafts.forward / without.forward,
        plan=(with_drafts.plan - without.plan) / without.forward,
        sampler=(with_drafts.sampler - without.sampler) / without.forward,
        steps=len(full),
    )
