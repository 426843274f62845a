"""What a denoising step gives vLLM of its requests."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.decoding.records import PerRequest, dense
from vllm_dllm.observe.wires import pack, pack_plain
from vllm_dllm.runtime.parts import Advance
from vllm_dllm.runtime.plan.rows import Sight


@dataclass(frozen=True)
class Emission(PerRequest):
    """What a denoising step gives vLLM of D requests."""

    tokens: Tensor
    """[D, W] int64: tokens to emit first."""
    count: Tensor
    """[D] int32: how many of them to emit."""
    rejected: Tensor
    """[D] int32: rows that vLLM does not count as computed."""
    first: Tensor
    """[D] int64: column of the window that they begin in."""
    shift: Tensor | None
    """[D] int64: columns that the window moved on; None where blocks are replaced whole."""
    observation: Tensor
    """[D] int32: see ``vllm_dllm.observe.wires``."""

    @classmethod
    def of(cls, sight: Sight, first: Tensor, num_rows: Tensor, step: Advance, drafting: bool) -> "Emission":
        """What requests emit.

        Args:
            first: [D] int64: as in ``Progress``.
            num_rows: [D] int32: rows that they have, all that they do not emit being rejected.
            drafting: whether the step made drafts, for these requests or others.
        """
        finished, denoises = step.finished, ~sight.commit_only
        if step.observation is not None:
            observation = step.observation
        elif sight.present.shape[1] == 1 and not drafting:
            observation = pack_plain(denoises)
        else:
            observation = pack(
                denoises,
                sight.present.sum(dim=1) - 1,
                step.accepted.skipped,
                finished.progress.num_drafts,
                step.accepted.branch,
                drafting,
            )
        count = finished.num_emitted.int()
        return cls(
            tokens=finished.emitted,
            count=count,
            rejected=num_rows - count,
            first=dense(first),
            shift=finished.shift,
            observation=observation,
        )


def add_prefills(emission: Emission, query_start_loc: Tensor, full_attention: bool) -> Emission:
    """``emission`` of a whole batch of R requests, in which those that prefill come last.

    Args:
        query_start_loc: [R + 1] int32: first row of every request.
        full_attention: vLLM's counter of computed tokens stays at 0.
    """
    num_rows = query_start_loc.diff()
    more = len(num_rows) - len(emission.count)
    padded = emission.map(lambda values: pad(values, (0, 0) * (values.ndim - 1) + (0, more)))
    # Otherwise prefills reject nothing.
    return replace(padded, rejected=num_rows) if full_attention else padded
