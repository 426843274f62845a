"""DEER inside vLLM: a diffusion model drafts for an autoregressive target (arXiv 2512.15176, Algorithm 1).

One forward of the drafter per round drafts all k tokens, each from a distribution of its own given the text. vLLM's
rejection sampler gets the distributions with the drafts, so the output has the target's own distribution whatever the
drafter says; a greedy target accepts the tokens that it would have written itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.decoding.records import PerRequest
from vllm_dllm.runtime.plan.drafter import DraftRows, count_rows, lay_out
from vllm_dllm.speculators.forward import DiffusionDrafter

NO_DRAFT = 0
"""Token where there is no draft. The target reads the token like any other draft, so it has to be in the vocabulary."""


@dataclass(frozen=True)
class Texts(PerRequest):
    """The texts of some requests, on the device; each [r] int64."""

    slots: torch.Tensor
    """The worker's indices."""
    start: torch.Tensor
    """Position of the first token that the drafter has not seen."""
    known: torch.Tensor
    """Length of the text. While a prompt is computed in chunks, its text reaches to the end of the chunk."""


class DeerSpeculator(DiffusionDrafter):
    """Drafts k tokens for every request in one forward.

    The host plans a round without knowing which drafts the target accepted, so the host never waits for the device.
    """

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Drafts of every request of the batch: ``[R, k]`` int64. Called when the target's step is accounted for."""
        num_reqs = input_batch.num_reqs
        drafts = self.draft_tokens[:num_reqs]
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run)
        if dummy_run:
            self._dummy_forward(input_batch)
            return drafts
        slots = input_batch.idx_mapping[:num_reqs].long()
        computed = self.req_states.num_computed_tokens.gpu[slots].long()
        known = torch.where(num_sampled[:num_reqs] > 0, self.req_states.total_len.gpu[slots].long(), computed)
        texts = Texts(slots, input_batch.positions[input_batch.query_start_loc[:num_reqs].long()], known)
        rows_np = input_batch.num_scheduled_tokens[:num_reqs].astype(np.int64)
        prompt_left = input_batch.prefill_len_np[:num_reqs] - input_batch.num_computed_prefill_tokens_np[:num_reqs]
        # From vLLM 0.33 on, 0 where every request of the batch is sure to end: no draft would be verified.
        is_drafting = (prompt_left <= rows_np) & (num_speculative_tokens != 0)
        drafts.fill_(NO_DRAFT)
        requests, new_text = np.arange(num_reqs), rows_np
        if self.options.recompute:  # the whole text of every request that drafts
            requests, texts = np.flatnonzero(is_drafting), replace(texts, start=torch.zeros_like(texts.start))
            lengths = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy().astype(np.int64)
            new_text = np.minimum(lengths, self.max_model_len)
        # In as few forwards as the rows allow. Without recompute that is one, but for vLLM's warm-up, which leaves no
        # room for the drafter's rows.
        for portion in _portions(requests, new_text + self.drafter.extra_rows, self.max_num_tokens):
            self._forward(portion, new_text[portion], is_drafting[portion], texts, drafts)
        return drafts

    def _forward(
        self, requests: np.ndarray, new_text: np.ndarray, is_drafting: np.ndarray, texts: Texts, drafts: torch.Tensor
    ) -> None:
        """One forward of the drafter, for some requests of the batch.

        Args:
            requests: ``[r]``, places of the requests in the batch, ascending.
            new_text, is_drafting: ``[r]``, see `count_rows`.
            texts: of all R requests of the batch.
            drafts: ``[R, k]``, changes for the requests that draft.
        """
        counts = count_rows(self.planned, new_text, is_drafting)
        if counts.num_rows == 0:
            return
        on_device = counts.to_device(
            self.device,
            requests=requests,
            table_rows=requests[counts.group_request],
            in_batch=requests[counts.drafting],
        )
        if len(requests) < len(texts.slots):
            texts = texts.select(on_device["requests"])
        layout = lay_out(
            self.planned,
            on_device,
            start=texts.start,
            known=texts.known,
            tokens=self.req_states.all_token_ids.gpu,
            slots=texts.slots,
        )
        hidden_states = self._hidden_states(layout, counts.query_start_loc, on_device)
        if len(counts.drafting) > 0:
            # Drafts beyond the drafter's own context are noise; the scheduler takes them back.
            drafts[on_device["in_batch"]] = self._draft(hidden_states, layout, on_device, texts)

    def _draft(
        self, hidden_states: torch.Tensor, layout: DraftRows, on_device: dict[str, torch.Tensor], texts: Texts
    ) -> torch.Tensor:
        """Drafts ``[D, k]`` int64 of the requests that draft, from the forward of the layout's rows.

        Args:
            on_device: `RowCounts.to_device`.
            texts: of the R requests of the forward.
        """
        num_drafts = self.num_speculative_steps
        sampled = self._sample(
            hidden_states[layout.predicting.flatten()],
            layout.draft_positions.flatten(),
            texts.slots[on_device["drafting"]].repeat_interleave(num_drafts),
            self.draft_column.repeat(len(layout.predicting)),
        )
        return sampled.view(-1, num_drafts)

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """The logits that drafts are drawn from, at the temperature of the request, and that the rejection test reads:
        ``[rows, vocabulary]``."""
        logits = super().compute_draft_logits(hidden_states, spec_step_idx)
        self._look_at(logits)
        factor = self.options.draft_temperature_factor
        return logits if factor == 1 else logits.div_(factor)

    def _look_at(self, logits: torch.Tensor) -> None:
        """The drafter's own logits of the rows that predict drafts, before they are drawn from."""

    def _sample(
        self, predicting: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        """Tokens ``[n]`` int64 for ``positions`` [n], from the rows that predict them, as drafts ``column`` [n] of the
        requests in ``slots`` [n]; nothing is kept of those with slot -1."""
        if self.own_group is not None:
            # Ranks that compute the same on their own may differ in the last bit, but all ranks need the same drafts.
            predicting = parallel_state.get_tp_group().broadcast(predicting)
        # vLLM keys a draw by the position before the token's.
        return self.sample_draft(
            predicting, positions - 1, slots, self.temperature, self.seeds, column, self.draft_logits
        )


def _portions(requests: np.ndarray, rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Split ``requests`` into runs with at most ``most`` rows each; a request with more rows is a run of its own."""
    ends = np.cumsum(rows[requests])
    done = 0
    while done < len(requests):
        before = ends[done - 1] if done else 0
        end = max(done + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield requests[done:end]
        done = end
