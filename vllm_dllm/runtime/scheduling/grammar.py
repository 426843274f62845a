"""Structured outputs in the engine's process, where vLLM keeps the grammars: drafts and masks of a step."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_dllm.decoding.grammar import MOST_ROWS, Bitmask, Masks, draft_block
from vllm_dllm.geometry import Geometry
from vllm_dllm.options.resolved import ResolvedOptions
from vllm_dllm.runtime.logits.grammar import ask_workers
from vllm_dllm.runtime.scheduling.offloading import OffloadingScheduler

CONTROL_CHARACTER = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class GrammarDrafter:
    """Drafts the blocks of structured requests, see `vllm_dllm.decoding.grammar`.

    Args:
        executor: of the engine; asked once per step that has structured requests.
        asked: options of the engine's requests.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        executor: Executor,
        geometry: Geometry,
        asked: Mapping[str, ResolvedOptions],
    ) -> None:
        self._manager, self._executor, self._geometry, self._asked = manager, executor, geometry, asked
        self._mask_id: int = manager.vllm_config.model_config.hf_config.mask_token_id
        self._bitmask: Bitmask | None = None
        # Tokens that no JSON text holds; made for the first such request.
        self._never_in_json: np.ndarray | None = None

    def draft(self, requests: list[Request]) -> GrammarOutput | None:
        """Drafts and masks of the structured requests of a step, whose forward has been given to the executor."""
        if not requests:
            return None
        if self._bitmask is None:
            backend = self._manager.backend
            assert backend is not None
            self._bitmask = Bitmask(backend.allocate_token_bitmask, self._mask_id)
        req_ids = [request.request_id for request in requests]
        answers = self._executor.collective_rpc(ask_workers, args=(req_ids,))
        answer = next(each for each in answers if each is not None)
        drafted = [
            self._draft(request, *_unpacked(row, self._geometry.window_length))
            for request, row in zip(requests, answer, strict=True)
        ]
        flat = np.array([pair for each in drafted for pair in each], dtype=np.int64).reshape(-1, 2)
        masks = Masks(
            column=answer[:, 1].copy(),
            num_rows=np.array([len(each) for each in drafted], dtype=np.int64),
            draft=flat[:, 0].copy(),
            row=flat[:, 1].copy(),
            bitmask=self._bitmask.take(),
        )
        # All rows that vLLM has for drafts are as good: our sampler decides which tokens are kept.
        return GrammarOutput(req_ids, masks, [self._geometry.canvas_length] * len(req_ids))

    def _draft(self, request: Request, known: list[int], candidates: np.ndarray) -> list[tuple[int, int]]:
        constraint = request.structured_output_request
        assert constraint is not None and self._bitmask is not None
        grammar: Any = constraint.grammar
        most = self._asked[request.request_id].most_unmasked
        candidates = candidates[: MOST_ROWS if most is None else most]
        # What the request would say without a grammar: where reasoning ends in it, the grammar begins.
        text = known + ([] if candidates.shape[1] == 0 else candidates[:, 0].tolist())
        bounds = self._manager._get_constraint_bounds(request, text)
        return draft_block(
            grammar,
            request.request_id,
            known,
            candidates,
            self._bitmask,
            grammar_start=bounds.grammar_start,
            mask_start=bounds.constraint_start,
            never=self._control_characters(grammar) if constraint.params.json is not None else None,
        )

    def _control_characters(self, grammar: Any) -> np.ndarray | None:
        """Tokens with control characters that are no line break.

        xgrammar (0.2.8) allows them in strings of a bounded length, where JSON does not. Nobody needs tabs between the
        tokens of JSON. guidance's grammars are right.
        """
        if self._never_in_json is None and hasattr(grammar, "ctx"):
            assert self._bitmask is not None
            vocabulary = enumerate(grammar.ctx.tokenizer_info.decoded_vocab)
            held = (token for token, text in vocabulary if CONTROL_CHARACTER.search(text))
            self._never_in_json = self._bitmask.words_of(held)
        return self._never_in_json


class GrammarScheduler(OffloadingScheduler):
    """Makes masks of what the workers say of a step, and not of the draft tokens that vLLM has scheduled."""

    def warm_up(self, executor: Executor) -> None:
        """vLLM calls this once, before the first request."""
        self._grammar_drafter = GrammarDrafter(self.structured_output_manager, executor, self.geometry, self.asked)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Masks for the structured requests of a step, between its forward and its sampling."""
        if not scheduler_output.has_structured_output_requests:
            return None
        scheduled = [self.requests.get(req_id) for req_id in scheduler_output.num_scheduled_tokens]
        # Prefills of some families predict a block's first token.
        prefills, decodes = self.geometry.traits.commit_predicts, scheduler_output.scheduled_spec_decode_tokens
        return self._grammar_drafter.draft(
            [
                request
                for request in scheduled
                if request is not None
                and request.use_structured_output
                and not request.is_finished()
                and not request.is_prefill_chunk
                and (prefills or request.request_id in decodes)
            ]
        )

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Leave the rows of a step alone whose sampling waits for the step before."""


def _unpacked(answer: np.ndarray, window_length: int) -> tuple[list[int], np.ndarray]:
    """Tokens before the first masked position, and candidates [n, K] from it on, of a worker's answer."""
    first, start = answer[:2].tolist()
    known = answer[2 + first : 2 + start].tolist()
    candidates = answer[2 + window_length :].reshape(MOST_ROWS, -1)
    return known, candidates[: window_length - start]
