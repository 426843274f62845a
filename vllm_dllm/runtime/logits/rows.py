"""Reads rows of logits as the sampling parameters of their requests want them read.

Outside of ``runtime.logits`` only ``decoding.distributions`` reads logits: rows of drafts of FeF and S2D2. A step's
logits are [rows, vocab] in the model's dtype and may take gigabytes. Nothing here makes an fp32 copy of them all: what
sampling parameters reshape is processed ``PROCESSED_VALUES`` at a time, and everything else is read by
``kernels.confidence`` in one pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_dllm.decoding.isd import texts_of_rows
from vllm_dllm.decoding.records import Rules
from vllm_dllm.kernels.confidence import Draws, RowStats
from vllm_dllm.kernels.row_stats import row_stats
from vllm_dllm.options.resolved import ResolvedOptions
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.logits.bad_words import BlockBadWords
from vllm_dllm.runtime.logits.truncation import apply_top_k_top_p, truncate

PROCESSED_VALUES = 16 << 20
"""Logits that are processed at a time (penalties, top-k, ...), which takes them in fp32: 64 MiB."""
DRAFT_VALUES = 128 << 20
"""Logits that are copied for drafts at a time, in the model's precision: 256 MiB in bfloat16."""


@dataclass(frozen=True)
class RowGroups:
    """Logits rows of n groups, K of each, and whose they are."""

    logits: Tensor
    """[n * K, vocab]."""
    slots_np: np.ndarray
    """[n] slots of the groups' requests, on the host."""
    slots: Tensor
    """[n] int64."""
    positions: Tensor
    """[n, K] int64: position that each row predicts."""
    rounds: Tensor
    """[n, K] int64: round of the noise, which makes a draw at a position differ from the one before: ``place_rows``."""
    window: Tensor
    """[n, W] int64: the window that the group is part of."""
    window_start: Tensor
    """[n] int64: position of the window's first column."""
    draws: Draws | None = None
    """How the tokens are drawn where requests sample; None: it is yet to be made."""

    def select(self, groups_np: np.ndarray, groups: Tensor) -> "RowGroups":
        """The rows of some of the groups; the logits are copied."""
        return RowGroups(
            self.logits.view(len(self.slots_np), -1, self.logits.shape[1])[groups].flatten(0, 1),
            self.slots_np[groups_np],
            slots=self.slots[groups],
            positions=self.positions[groups],
            rounds=self.rounds[groups],
            window=self.window[groups],
            window_start=self.window_start[groups],
        )


def repeated(values: Tensor, columns: Tensor) -> Tensor:
    """Each of ``values`` [n] once for every one of its ``columns`` [n, K]: [n * K], one after the other in memory."""
    # `flatten` copies nothing where n is 1, so that it would ask for n.
    return values.unsqueeze(1).expand_as(columns).clone(memory_format=torch.contiguous_format).view(-1)


def draws_of(slots: Tensor, positions: Tensor, rounds: Tensor, temperatures: Tensor, seeds: Tensor) -> Draws:
    """How the tokens of [n * K] rows are drawn.

    Args:
        slots, positions, rounds: as in ``RowGroups``.
        temperatures, seeds: [slots] float32 and int64.
    """
    per_row = repeated(slots, positions)
    return Draws(temperatures[per_row], seeds[per_row], positions.flatten(), rounds.flatten())


def context_of(
    slots: Tensor,
    positions: Tensor,
    window: Tensor,
    temperatures: Tensor,
    text: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What vLLM's sampling parameters go by in each of the n * K rows, and the divisor of its logits, [n * K, 1].

    Args:
        slots, positions, window: as in ``RowGroups``.
        temperatures: [slots] float32.
        text: where each row has the text before it: ``window_start`` as in ``RowGroups``, and whether the request was
            told the first token of its window, [n] bool (``decoding.isd.texts_of_rows``). ``None``: only finished
            blocks count as text, and no row has drafts before it.
    """
    # vLLM's kernels read all of these as they lie in memory.
    per_row = repeated(slots, positions)
    of_row = temperatures[per_row]
    if text is None:
        num_drafts = torch.zeros_like(per_row, dtype=torch.int32)
        tokens = window[:, : positions.shape[1]].to(torch.int32)
    else:
        num_drafts, tokens = texts_of_rows(positions, window, *text)
    return (
        per_row,
        num_drafts.contiguous().view(-1),
        tokens.clone(memory_format=torch.contiguous_format).view(-1),
        # vLLM means the position of the row, which predicts the next one.
        positions.flatten() - 1,
        torch.where(of_row > 0, of_row, 1.0).unsqueeze(1),
    )


def without_mask(logits: Tensor, own: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Logits of the mask token and of the ``first`` other token, [rows] each, such that another token can be chosen.

    The mask token is a token like any other to top-k and its like, as in the reference samplers. Only where it is the
    most likely one it would leave no room for those that may be chosen. Parameters may leave nothing (the only allowed
    token is a bad word, or the mask). Then it is the first other token, as in ``decoding.distributions``; an empty
    distribution would have no confidence.

    Args:
        logits: [rows, vocab] float32, -inf for the mask token.
        own: [rows] float32: the mask token's.
    """
    best = logits.amax(dim=1)
    return torch.where(own < best, own, -torch.inf), torch.where(best == -torch.inf, 0.0, logits[:, first])


class LogitsReader:
    """Reads logits as the sampling parameters of their requests want them read, whose state vLLM's sampler keeps.

    Args:
        rules: of the engine.
    """

    def __init__(self, sampler: Sampler, max_model_len: int, stages: Stages, rules: Rules):
        self.sampling_states = sampler.sampling_states
        self.req_states = sampler.req_states
        self.mask_token_id = rules.mask_id
        self.max_model_len = max_model_len
        # A word may be completed from either side in a block, which vLLM's check does not know.
        self.processors = [p for p in sampler.logits_processors if not isinstance(p, BadWordsState)]
        max_num_reqs = self.req_states.max_num_reqs
        self.bad_words = BlockBadWords(max_num_reqs, self.req_states.device)
        self._strides = rules.strides
        self._penalties = sampler.penalties_state if rules.commit_emits and not rules.strides else None
        self.needs_processing_np = np.zeros(max_num_reqs, dtype=bool)
        self._staged = True
        self._context_stage, self._mask_stage = stages.stage(context_of), stages.stage(without_mask)

    def add_request(self, slot: int, params: SamplingParams, options: ResolvedOptions) -> None:
        """Take the sampling parameters and options of a request that enters ``slot``."""
        self._staged = True
        states = self.sampling_states
        states.add_request(slot, params)
        # A tokenizer may have more tokens than the model, which a text never has. vLLM's kernel would write the scores
        # of such end tokens beyond the row.
        if params.min_tokens and max(params.all_stop_token_ids, default=0) >= states.vocab_size:
            params = copy(params)
            params._all_stop_token_ids = {token for token in params.all_stop_token_ids if token < states.vocab_size}
        processed = [p.add_request(slot, params) for p in self.processors]
        words = [word for word in params.bad_words_token_ids or () if max(word) < states.vocab_size]
        self.bad_words.add_request(slot, words, edits=options.edit_threshold != inf)
        if options.confidence_top_k is not None:
            states.top_k.np[slot] = min(states.top_k.np[slot], options.confidence_top_k)
        self.needs_processing_np[slot] = (
            any(processed)
            or self.bad_words.num_words_np[slot] > 0
            or states.min_p.np[slot] != 0.0
            or states.top_k.np[slot] != states.vocab_size
            or states.top_p.np[slot] != 1.0
        )

    def apply_staged_writes(self) -> None:
        """Send what ``add_request`` staged to the device; once in every step."""
        for processor in self.processors:
            # A processor of the user may count on being called in every step, as vLLM promises.
            if self._staged or not isinstance(processor, (LogitBiasState, PenaltiesState)):
                processor.apply_staged_writes()
        if self._staged:
            self.sampling_states.apply_staged_writes()
            self._staged = False

    def samples(self, slots_np: np.ndarray) -> np.ndarray:
        """[n] bool: requests with a temperature above 0."""
        return self.sampling_states.temperature.np[slots_np] > 0

    def is_plain(self, slots_np: np.ndarray) -> bool:
        """Whether the requests take the most likely tokens of the logits as they are."""
        return not (self.samples(slots_np).any() or self.needs_processing_np[slots_np].any())

    def measure(self, rows: RowGroups, *, with_entropy: bool = False, with_margin: bool = False) -> RowStats:
        """Token and confidence of each row, after the sampling parameters of its request.

        Requests with parameters that reshape the distribution take the slow path, and they alone: a request's result
        must not depend on its neighbours.
        """
        num_groups = len(rows.slots_np)
        how = {"with_entropy": with_entropy, "with_margin": with_margin}
        how["sampling"] = bool(self.samples(rows.slots_np).any())
        needs_processing = np.flatnonzero(self.needs_processing_np[rows.slots_np])
        # As many groups at a time as keep the fp32 logits below PROCESSED_VALUES.
        size = max(1, PROCESSED_VALUES * num_groups // max(1, rows.logits.numel()))
        if len(needs_processing) == num_groups <= size:
            copied = replace(rows, logits=rows.logits.to(torch.float32, copy=True))
            return self._draw(replace(rows, logits=self.process(copied)), temperature_applied=True, **how)
        stats = self._draw(rows, **how)
        for begin in range(0, len(needs_processing), size):
            groups_np = needs_processing[begin : begin + size]
            groups = async_tensor_h2d(groups_np, device=rows.logits.device)
            part = rows.select(groups_np, groups)
            part_stats = self._draw(replace(part, logits=self.process(part)), temperature_applied=True, **how)
            for values, part_values in zip(stats, part_stats, strict=True):
                if values is not None and part_values is not None:
                    values.view(num_groups, -1)[groups] = part_values.view(len(groups_np), -1)
        return stats

    def _draw(
        self, rows: RowGroups, *, sampling: bool, temperature_applied: bool = False, **measures: bool
    ) -> RowStats:
        draws = None
        if sampling:
            states = self.sampling_states
            draws = rows.draws or draws_of(
                rows.slots, rows.positions, rows.rounds, states.temperature.gpu, states.seeds.gpu
            )
            draws = draws._replace(temperature_applied=temperature_applied)
        return row_stats(rows.logits, draws, forbidden_token=self.mask_token_id, **measures)

    @contextmanager
    def _finished_blocks_counted(self, rows: RowGroups) -> Iterator[None]:
        """Have penalties count finished blocks only.

        Where commits emit, vLLM has counted the first token of the current block too. That token is taken out of the
        counts meanwhile. Otherwise a preempted request would get other tokens: after a preemption a prefill predicts
        the first token, and a prefill emits nothing.
        """
        penalties = self._penalties
        if penalties is None or not penalties.use_penalty[rows.slots_np].any():
            yield
            return
        slots, start, states = rows.slots, rows.window_start, self.req_states
        is_emitted = (states.total_len.gpu[slots] > start) & (states.prompt_len.gpu[slots] <= start)
        # Several groups may be of one request: each writes the same number.
        place = slots, rows.window[:, 0].clamp(min=0)
        counted = penalties.output_bin_counts[place]
        penalties.output_bin_counts[place] = counted - is_emitted.int()
        yield
        penalties.output_bin_counts[place] = counted

    def process(self, rows: RowGroups) -> Tensor:
        """Apply all sampling parameters but the draw itself.

        Returns [n * K, vocab] fp32, temperature included; fp32 logits are changed in place.
        """
        states, slots_np = self.sampling_states, rows.slots_np
        text = None
        if self._strides:
            text = rows.window_start, self.req_states.total_len.gpu[rows.slots] > rows.window_start
        slots, local_pos, ids, pos, divisor = self._context_stage(
            rows.slots, rows.positions, rows.window, states.temperature.gpu, text
        )
        context = LogitsContext(
            expanded_idx_mapping=slots,
            idx_mapping=rows.slots.contiguous(),
            idx_mapping_np=slots_np,
            expanded_local_pos=local_pos,
            input_ids=ids,
            pos=pos,
            seq_lens_upper_bound_np=np.full(len(slots_np), self.max_model_len, dtype=np.int32),
        )
        logits = rows.logits.float()
        with self._finished_blocks_counted(rows):
            for processor in self.processors:
                processed = processor.apply(logits, context)
                if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                    returned = getattr(processed, "shape", processed)
                    raise TypeError(
                        f"logits processor {type(processor).__name__} returned {returned}, not logits {logits.shape}"
                    )
                logits = processed
        logits = self.bad_words.apply(
            logits,
            slots_np,
            rows.slots,
            rows.positions,
            rows.window,
            rows.window_start,
            self.mask_token_id,
            self.req_states,
        )
        mask, first = self.mask_token_id, int(self.mask_token_id == 0)
        own = logits[:, mask].clone(memory_format=torch.contiguous_format)
        logits[:, mask] = -torch.inf
        logits[:, mask], logits[:, first] = self._mask_stage(logits, own, first)
        logits.div_(divisor)
        states.apply_min_p(logits, slots, slots_np)
        return apply_top_k_top_p(states, logits, slots, slots_np)

    def take_memory(self, logits: Tensor) -> None:
        """Take as much as the sampling parameters of any step do, while vLLM profiles memory with ``logits``."""
        some = logits[: max(1, PROCESSED_VALUES // logits.shape[1])].to(torch.float32, copy=True)
        top_k = torch.full((len(some),), some.shape[1] - 1, dtype=torch.int32, device=some.device)
        for k in (None, top_k):
            some = truncate(some, k, torch.full((len(some),), 0.9, device=some.device))
        row_stats(some, None, forbidden_token=self.mask_token_id, with_entropy=True, with_margin=True)
        self._compile_kernels(logits[:1], some[:1])

    def _compile_kernels(self, plain: Tensor, processed: Tensor) -> None:
        """Measure a row in every way, or the first request that wants it so would wait for the compiler.

        Args:
            plain, processed: [1, vocab] as the model has them, and as sampling parameters leave them.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=plain.device)
        draws = Draws(zero.float(), zero, zero, zero)
        for row, drawn in ((plain, draws), (processed, draws._replace(temperature_applied=True))):
            for how, with_entropy, with_margin in product((None, drawn), (False, True), (False, True)):
                row_stats(
                    row,
                    how,
                    forbidden_token=self.mask_token_id,
                    with_entropy=with_entropy,
                    with_margin=with_margin,
                )
