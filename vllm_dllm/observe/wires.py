"""Fields of vLLM that carry something else here: vLLM has no field yet for what they carry.

- ``ModelRunnerOutput.num_nans_in_logits``, from worker to scheduler: `Observation`, and of a target whose drafts are
  cut `take_proposed`. Ends when vLLM copies integers of the model's own per request.
- ``ModelRunnerOutput.logprobs``, from worker to scheduler: step maps, in more columns; `take_step_maps`. Ends like the
  one before.
- ``EngineCoreOutput.kv_transfer_params``, from scheduler to front end: ``vllm_dllm.observe.step_events``. Ends when an
  output has room for what a model tells of its request.
- ``RequestSpecDecodeMetrics``, from scheduler to front end: `DiffusionRequestMetrics`. Ends when a model may name the
  class of its metrics.
- ``SchedulerStats.running_lora_adapters``, from scheduler to stat loggers: `tell_step`. Ends when the statistics of a
  step have named numbers of plugins.
- ``GrammarOutput.grammar_bitmask``, from scheduler to worker: ``vllm_dllm.decoding.grammar.Masks``, which
  ``runtime.logits.grammar`` reads. Ends when a scheduler may send drafts beside a bitmask.

``patches/`` has no diff for these changes yet; 002, 003 and 004 let ``RequestSpecDecodeMetrics`` and
``SchedulerStats`` reach their readers.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from vllm_dllm.observe.step_events import StepEvent

ROWS_PER_STEP = "vllm_dllm:rows_per_step"
SCRATCH_PAGES_USED = "vllm_dllm:scratch_pages_used"

_LIMIT = 1 << 7
"""More than any of the counts: ``vllm_dllm.options.schema.MOST_DRAFTS`` is 64."""


class Observation(NamedTuple):
    """One forward of one request.

    vLLM copies one integer per request and step beside the tokens, the number of NaN logits, without waiting for the
    device. The integer of an observation is negative, and so no number of NaNs.
    """

    denoised: bool
    """False: the forward only wrote a finished block to the K/V cache."""
    drafted: int
    """Drafts forwarded beside the block itself."""
    accepted: int
    """Denoising steps that accepted drafts have skipped; of FeF, LinearSpec, ISD and S2D2 accepted drafts."""
    next_drafts: int
    """Drafts that the request has for its next forward."""
    deepest: int = 0
    """Which of the drafts, from 1, the request went on from; 0: from the block itself. A draft may skip several
    steps, so this is not ``accepted``."""
    drafting: bool = False
    """Whether the step made drafts, for this request or another, or sought in vain to."""


def pack(
    denoised: torch.Tensor,
    drafted: torch.Tensor | int = 0,
    accepted: torch.Tensor | int = 0,
    next_drafts: torch.Tensor | int = 0,
    deepest: torch.Tensor | int = 0,
    drafting: torch.Tensor | bool = False,
) -> torch.Tensor:
    """Observations of R requests as [R] int32. Each argument is [R] int64 or bool, or one number for all requests."""
    packed = (((drafting * _LIMIT + deepest) * _LIMIT + next_drafts) * _LIMIT + accepted) * _LIMIT + drafted
    return (-1 - (packed * 2 + denoised)).int()


def pack_plain(denoised: torch.Tensor) -> torch.Tensor:
    """``pack`` of requests [R] that have no drafts and make none; ``denoised`` [R] bool. Most steps have no others."""
    return -1 - denoised.int()


@lru_cache(maxsize=1 << 12)  # most requests of a step say the same
def unpack(value: int) -> Observation:
    """The observation that ``pack`` made ``value`` of."""
    packed, denoised = divmod(-1 - value, 2)
    packed, drafted = divmod(packed, _LIMIT)
    packed, accepted = divmod(packed, _LIMIT)
    packed, next_drafts = divmod(packed, _LIMIT)
    drafting, deepest = divmod(packed, _LIMIT)
    return Observation(bool(denoised), drafted, accepted, next_drafts, deepest, bool(drafting))


def take_observations(output: ModelRunnerOutput) -> dict[str, Observation]:
    """Take the observations of the requests that decoded out of a step's output, before vLLM counts them as NaNs."""
    packed, output.num_nans_in_logits = output.num_nans_in_logits or {}, None
    # Requests that only prefilled have 0 there.
    return {req_id: unpack(value) for req_id, value in packed.items() if value < 0}


def take_proposed(output: ModelRunnerOutput) -> dict[str, int]:
    """Take out of a step's output how many of a request's drafts were verified, where ``speculators.cut`` says so."""
    told = output.num_nans_in_logits or {}
    output.num_nans_in_logits = {req_id: value for req_id, value in told.items() if value >= 0} or None
    return {req_id: -1 - value for req_id, value in told.items() if value < 0}


IS_STEP_MAP = float("inf")
"""What the columns of step maps have in the place of log-probabilities."""

STEP_MAP_COLUMNS = 4
STEP, AGE, TOKEN, OF_DRAFT = range(STEP_MAP_COLUMNS)
"""Columns of a step map: of each position, the denoising step that wrote its token, the forwards since, the token or
`MASKED`, and whether the token is of an accepted draft."""

MASKED = -1
"""What a step map has in the place of a masked position's token."""

OUTSIDE = -2
"""What all columns of a step map have in its last rows, behind the window."""


def take_step_maps(output: ModelRunnerOutput) -> dict[str, np.ndarray]:
    """Take the step maps of the requests that decoded out of a step's log-probabilities, before vLLM reads those.

    Returns:
        By request: [n, `STEP_MAP_COLUMNS`] int64: the window, from the first position that will be emitted. The numbers
        are meaningless for a request without ``step_map`` and ``step_events``.
    """
    logprobs = output.logprobs
    if logprobs is None or not logprobs.logprobs.size or logprobs.logprobs[0, -1] != IS_STEP_MAP:
        return {}
    maps = logprobs.logprob_token_ids[:, -STEP_MAP_COLUMNS:]
    output.logprobs = logprobs._replace(
        logprob_token_ids=logprobs.logprob_token_ids[:, :-STEP_MAP_COLUMNS],
        logprobs=logprobs.logprobs[:, :-STEP_MAP_COLUMNS],
    )
    begins = logprobs.cu_num_generated_tokens
    assert begins is not None
    return {
        req_id: maps[begins[index] : begins[index + 1]]
        for req_id, index in output.req_id_to_index.items()
        if begins[index + 1] > begins[index]
    }


def event_of(forward: int, start: int, window: np.ndarray) -> StepEvent:
    """The step event of a request's forward.

    Args:
        forward, start: as in ``StepEvent``.
        window: [n, `STEP_MAP_COLUMNS`] of `take_step_maps`.
    """
    window = window[window[:, STEP] != OUTSIDE]
    tokens = window[:, TOKEN]
    # A further pass of FeF may mask a position in the forward that gave it a token.
    fresh = (window[:, AGE] == 0) & (tokens != MASKED)
    return StepEvent(
        forward,
        start,
        tuple(None if token == MASKED else token for token in tokens.tolist()),
        tuple(np.flatnonzero(fresh).tolist()),
        tuple(np.flatnonzero(fresh & (window[:, OF_DRAFT] > 0)).tolist()),
    )


@dataclass
class DiffusionRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's observations of a request, with the meaning that their fields have for diffusion.

    Has no fields of its own, for between processes only vLLM's travel:

    - ``histogram[n]``: forwards that committed n tokens, up to the most that any did: vLLM's own has an entry for every
      row that a forward may have, and is a part of every response;
    - ``num_draft_tokens``: rows that the forwards computed for the request;
    - ``per_step_drafted[i]``: branches that forward i denoised, so 1 for the block without drafts, and 0 where the
      forward only wrote a finished block to the K/V cache;
    - ``per_step_accepted[i]``: denoising steps that forward i skipped.

    Behind the entries of the forwards, the lists of a request with a step map have one entry per token:
    ``per_step_accepted`` its denoising step, ``per_step_drafted`` its forward and, behind those, its block.
    """

    def __post_init__(self) -> None:
        self.forward: Observation | None = None
        """What the worker said of the forward to be observed next; None once it is observed."""
        self.last_committed = 0
        self.wants_events = False
        """Whether the request wants step events."""
        self.blocks: tuple[int, int] | None = None
        """Where the first block of the text begins, and the length of all; set where the request wants its step map."""
        self.written = np.zeros((0, STEP_MAP_COLUMNS), dtype=np.int64)
        """Of the forward to be observed next, as `take_step_maps` has it."""
        self.position = 0
        """Of the first token that the forward emits."""
        self._places: list[np.ndarray] = []

    def begin_answer(self, *, wants_events: bool, blocks: tuple[int, int] | None) -> None:
        """Have step events and the step map tell of an answer that begins now: a session has several."""
        self.wants_events, self.blocks, self._places = wants_events, blocks, []

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count ``forward``, which had ``num_draft_tokens`` rows and committed ``num_accepted`` tokens.

        The lists per step are kept whatever ``detailed`` says: they are two small integers per forward.
        """
        assert self.forward is not None, "the worker says of every forward after the prefill what it did"
        self._reach(num_accepted)
        super().observe(num_draft_tokens, num_accepted)
        self.per_step_drafted.append(1 + self.forward.drafted if self.forward.denoised else 0)
        self.per_step_accepted.append(self.forward.accepted)
        self.forward = None
        self.last_committed = num_accepted
        if self.blocks is not None:
            start, length = self.blocks
            step, age = self.written[:num_accepted, [STEP, AGE]].T
            forward = len(self.per_step_drafted) - 1 - age
            block = (self.position + np.arange(num_accepted) - start) // length
            self._places.append(np.stack((step, forward, block)))

    def trim(self, returned: int) -> None:
        """Correct the last observation: a stop token left the user ``returned`` of its tokens."""
        if returned == self.last_committed:
            return
        self.histogram[self.last_committed] -= 1
        self._reach(returned)
        self.histogram[returned] += 1
        self.last_committed = returned
        if self._places:
            self._places[-1] = self._places[-1][:, :returned]
        while not self.histogram[-1]:
            self.histogram.pop()

    def _reach(self, num_tokens: int) -> None:
        """Have an entry for forwards that committed ``num_tokens``."""
        self.histogram += [0] * (num_tokens + 1 - len(self.histogram))

    def snapshot(self) -> RequestSpecDecodeMetrics:
        """The observations so far, which later ones do not change, with the step map of the answer."""
        metrics = counts_of(self)
        if self._places:
            step, forward, block = np.concatenate(self._places, axis=1)
            metrics.per_step_accepted += step.tolist()
            metrics.per_step_drafted += [*forward.tolist(), *(block - block[:1]).tolist()]
        return metrics


def counts_of(metrics: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """The observations so far, which later ones do not change, without a step map."""
    return RequestSpecDecodeMetrics(**asdict(metrics))


def tell_step(stats: SchedulerStats, *, num_rows: int, num_scratch_pages: int) -> None:
    """Let vLLM's statistics of a step carry its rows, and the scratch pages that are still in use after it.

    The field holds named counts of LoRA adapters, which vLLM's front end adds.
    """
    stats.running_lora_adapters = {ROWS_PER_STEP: num_rows, SCRATCH_PAGES_USED: num_scratch_pages}


def take_step(stats: SchedulerStats) -> tuple[int, int] | None:
    """Take (rows, scratch pages) out of the statistics of a step, before a logger takes the numbers for adapters.

    None: these statistics are of no step.
    """
    told = stats.running_lora_adapters
    return (told.pop(ROWS_PER_STEP), told.pop(SCRATCH_PAGES_USED)) if ROWS_PER_STEP in told else None
