"""Structured outputs in the worker: candidates for the drafts of `vllm_dllm.decoding.grammar`, and masks on the logits.

The grammars are in the engine's process. Between the forward and the sampling of a step the engine asks the workers
what the step's logits say of the structured requests (`ask_workers`), makes the drafts, and sends their masks with the
call that samples. `GrammarRows` takes the place of vLLM's ``StructuredOutputsWorker``, whose buffer has a row for every
position that every request may have: 311 MB on the GPU at 256 requests of 64 positions and 152k tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.triton_utils import triton
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.decoding.grammar import END, FREE, MOST_ROWS, NUM_CANDIDATES, Drafted, Masks
from vllm_dllm.decoding.records import Rules
from vllm_dllm.kernels.confidence import RowStats, token_noise
from vllm_dllm.methods import BY_KIND, Policy
from vllm_dllm.runtime.logits.rows import PROCESSED_VALUES
from vllm_dllm.runtime.logits.step import StepLogits
from vllm_dllm.runtime.plan.arrays import iota, runs, to_device
from vllm_dllm.runtime.plan.rows import RowPlan
from vllm_dllm.runtime.states import BatchOptions, DenoiseStates

BLOCK_SIZE = 8192
"""Vocabulary entries of a program of vLLM's kernel."""


def ask_workers(worker: Any, req_ids: Sequence[str]) -> np.ndarray | None:
    """On every rank, after the forward: see `GrammarRows.ask`. ``None`` from all ranks but the first."""
    runner = worker.model_runner
    rows: GrammarRows = runner.structured_outputs_worker
    state = runner.execute_model_state
    index = runner.req_states.req_id_to_index
    slots = np.array([index[req_id] for req_id in req_ids], dtype=np.int64)
    if state is None:
        # Ray's compiled graph runs the forward together with the sampling.
        return rows.ask(slots, None, None)
    return rows.ask(slots, state.hidden_states, state.input_batch)


class GrammarRows:
    """Masks and drafts of the structured requests of a step, from the engine's call to the sampler's."""

    def __init__(
        self,
        model: Any,
        states: DenoiseStates,
        rules: Rules,
        plan_of_step: Callable[[], RowPlan | None],
        logits_of: Callable[[Tensor, RowPlan, BatchOptions], StepLogits],
    ):
        """``logits_of`` gives the step's logits, guided ones where requests are."""
        self.model = model
        self.states, self.rules = states, rules
        self.plan_of_step = plan_of_step
        self.logits_of = logits_of
        # Of the current step: its masks, and the place of each structured request among them.
        self._masks: Masks | None = None
        self._place_of: dict[int, int] = {}
        # Rows of logits that have a mask, those of denoising steps and those of prefills, which are numbered anew.
        self.rows = self.first_rows = rules.columns[:0]

    # Between the forward and the sampling.

    @torch.inference_mode()
    def ask(self, slots_np: np.ndarray, hidden_states: Tensor | None, batch: InputBatch | None) -> np.ndarray | None:
        """What S structured requests need for a draft.

        The logits are computed here, and once: the sampling that follows finds them in the model.

        Args:
            slots_np: [S] slots of the requests.
            hidden_states: of the forward, [rows, hidden]; ``None``: there is no forward yet, nor a candidate.

        Returns:
            [S, 2 + W + MOST_ROWS * K] int64: column of the first token that is not emitted, column of the first masked
            position (W: there is none), the window, and the K best tokens of the first masked positions. ``None`` but
            on the first rank.
        """
        logits, plan = None, self.plan_of_step()
        if hidden_states is not None and batch is not None and plan is not None:
            logits = self.model.compute_logits(hidden_states[batch.logits_indices])
            self.model.kept_logits = logits
        if get_tensor_model_parallel_rank() != 0:
            return None
        slots = to_device(self.states.device, slots=slots_np)["slots"]
        state, columns = self.states.gather(slots), self.rules.columns
        window, first = state.branches[:, : len(columns)], state.progress.first
        masked = (window == self.rules.mask_id) & (columns >= first.unsqueeze(1))
        start = torch.where(masked.any(dim=1), masked.long().argmax(dim=1), len(columns))
        parts = [first.unsqueeze(1), start.unsqueeze(1), window]
        if logits is not None and batch is not None and plan is not None and plan.num_decodes:
            parts.append(self._candidates(logits, plan, batch, slots_np, start).flatten(1))
        answer: np.ndarray = torch.cat(parts, dim=1).cpu().numpy()
        return answer

    def _candidates(
        self, logits: Tensor, plan: RowPlan, batch: InputBatch, slots_np: np.ndarray, start: Tensor
    ) -> Tensor:
        """The best tokens of the positions from column ``start`` [S] on: [S, MOST_ROWS, K] int64, best first.

        Requests that sample get the tokens that come first in their draw. Those that prefill have a single row, which
        needs no draft: what they get means nothing.
        """
        decoding = batch.idx_mapping_np[: plan.num_decodes]
        options = self.states.options_of(decoding, batch.idx_mapping[: plan.num_decodes])
        of_step = self.logits_of(logits, plan, options)
        place_of = {slot: place for place, slot in enumerate(decoding.tolist())}
        places = np.array([place_of.get(slot, 0) for slot in slots_np.tolist()], dtype=np.int64)
        requests = to_device(logits.device, requests=places)["requests"]
        column = (start.unsqueeze(1) + iota(MOST_ROWS, logits.device)).clamp(max=len(self.rules.columns) - 1)
        rows = of_step.rows_at(requests, torch.zeros_like(start).unsqueeze(1), column)
        samples = bool(of_step.reader.samples(slots_np).any())
        # The noise of a value takes 64-bit integers.
        size = max(1, PROCESSED_VALUES // (4 if samples else 1) // logits.shape[1])
        found = []
        for some in rows.flatten().split(size):
            scores = logits[some].float()
            if samples:
                draws = of_step.rows.draws
                assert draws is not None
                noise = token_noise(draws.seed[some], draws.position[some], draws.round_[some], scores.shape[1])
                temperature = draws.temperature[some].unsqueeze(1)
                hot = temperature > 0
                scores.div_(torch.where(hot, temperature, 1.0)).sub_(noise.mul_(hot))
            scores[:, self.rules.mask_id] = -torch.inf
            found.append(scores.topk(NUM_CANDIDATES, dim=1).indices)
        return torch.cat(found).view(*rows.shape, NUM_CANDIDATES)

    # vLLM's part of the sampling.

    def apply_grammar_bitmask(
        self, logits: Tensor, input_batch: InputBatch, grammar_req_ids: list[str], grammar_bitmask: Masks | np.ndarray
    ) -> None:
        """Mask the logits [rows, vocab] of the structured requests, in place; vLLM calls this before the sampler."""
        if isinstance(grammar_bitmask, np.ndarray):
            return  # vLLM's warm-up, whose mask forbids nothing
        masks, plan = grammar_bitmask, self.plan_of_step()
        assert plan is not None
        batch_index = {req_id: index for index, req_id in enumerate(input_batch.req_ids)}
        index_np = np.array([batch_index[req_id] for req_id in grammar_req_ids], dtype=np.int64)
        self._masks = masks
        self._place_of = {index: place for place, index in enumerate(index_np.tolist())}
        owner, offset = runs(masks.num_rows)
        has_mask = masks.row != FREE
        decodes = np.flatnonzero(has_mask & (index_np[owner] < plan.num_decodes))
        # A prefill draws one token, behind the rows of the branches.
        first_of = {index: place for place, index in enumerate(plan.first_token_requests.tolist())}
        firsts = np.flatnonzero(has_mask & (offset == 0) & np.isin(index_np[owner], plan.first_token_requests))
        first_rows = np.array([first_of[index] for index in index_np[owner[firsts]].tolist()], dtype=np.int64)
        on = to_device(
            logits.device,
            request=index_np[owner[decodes]],
            column=masks.column[owner[decodes]] + offset[decodes],
            first_rows=first_rows,
            row=masks.row[np.concatenate((decodes, firsts))],
        )
        length = self.rules.block_length
        groups = plan.sight.groups[on["request"], 0, on["column"] // length]
        self.rows, self.first_rows = groups * length + on["column"] % length, on["first_rows"]
        rows = torch.cat((self.rows, self.first_rows + len(plan.run_requests_np) * length))
        if not len(rows):
            return
        bits = torch.from_numpy(masks.bitmask)
        bits = (bits.pin_memory() if logits.is_cuda else bits).to(logits.device, non_blocking=True)
        # Every row of logits passes for a request of its own. The kernel multiplies a row by the stride in the type of
        # this tensor: 32 bits end at row 14,134 of 152k tokens.
        offsets = iota(len(logits) + 1, logits.device)
        structured_outputs._apply_grammar_bitmask_kernel[(len(rows), triton.cdiv(logits.shape[1], BLOCK_SIZE))](
            logits,
            logits.stride(0),
            rows.int(),
            offsets,
            bits[on["row"]],
            bits.stride(0),
            logits.shape[1],
            MASK_STRIDE=1,
            BLOCK_SIZE=BLOCK_SIZE,
        )

    # The sampler's part.

    def drafted(self, requests_np: np.ndarray, options: BatchOptions) -> Drafted:
        """Drafts and masks of the structured ``requests_np`` [F] of a step. Those without either stand still."""
        shape = len(requests_np), len(self.rules.columns)
        token, exact = np.full(shape, END, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        masks = self._masks
        if masks is not None:
            begin = np.cumsum(masks.num_rows) - masks.num_rows
            for row, request in enumerate(requests_np.tolist()):
                place = self._place_of.get(request)
                if place is None:
                    continue  # a request that has ended, which asynchronous scheduling learns of too late
                column, number = int(masks.column[place]), int(masks.num_rows[place])
                token[row, column : column + number] = masks.draft[begin[place] : begin[place] + number]
                exact[row, column : column + number] = 1
        judging = [policy for policy in Policy if BY_KIND[policy].judges_positions]
        by_position = np.isin(options.asked["policy"], judging)
        on = to_device(options.slots.device, token=token, exact=exact, by_position=by_position.astype(np.int64))
        return Drafted(on["token"], on["exact"].bool(), on["by_position"].bool())

    def overrule(self, logits: Tensor, stats: RowStats, rows: Tensor) -> None:
        """Have the grammar precede other sampling parameters, which may leave nothing that the grammar allows.

        Such a position gets the most likely token that the grammar allows.

        Args:
            logits: [n, vocab], masked.
            stats: of the n rows; changes.
            rows: those of the n rows that have a mask: ``self.rows`` or ``self.first_rows``.
        """
        for some in rows.split(max(1, PROCESSED_VALUES // logits.shape[1])):
            masked, token = logits[some], stats.token[some]
            allowed = masked.gather(1, token.unsqueeze(1)).squeeze(1) > -torch.inf
            stats.token[some] = torch.where(allowed, token, masked.argmax(dim=1))
            # What the policy would go by is not known of the other token.
            stats.confidence[some] = torch.where(allowed, stats.confidence[some], 0.0)

    def end_step(self) -> None:
        """Forget the step's masks."""
        self._masks, self._place_of = None, {}
        self.rows = self.first_rows = self.rules.columns[:0]
