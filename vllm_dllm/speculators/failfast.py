"""FailFast inside vLLM: as many drafts as the drafter is sure of (arXiv 2512.20573, Algorithm 1).

A drafter with diffusion blocks makes the drafts of a round in several forwards, one per sub-block
(``decoding.failfast``); another one makes all in one forward. The device alone knows how long a draft is. On CUDA a
round has the same number of forwards whatever the lengths are, and requests that have stopped are padding in the rest.
On a CPU, where nothing runs ahead of the host, the round ends with the longest draft.
"""

from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.decoding import failfast
from vllm_dllm.decoding.failfast import Asked, Drafts, Growth
from vllm_dllm.options.drafter import DEFAULT_SUB_BLOCK, DrafterOptions
from vllm_dllm.runtime.plan.arrays import iota
from vllm_dllm.runtime.plan.drafter import Drafter, DraftRows
from vllm_dllm.runtime.plan.rows import Rows
from vllm_dllm.speculators.cut import NUM_DRAFTS, cut_drafts
from vllm_dllm.speculators.deer import NO_DRAFT, DeerSpeculator, Texts


def growth_of(options: DrafterOptions, drafter: Drafter) -> Growth:
    """How long the drafts of a drafter become."""
    length = drafter.block_length
    return Growth(
        first=options.draft_length_start,
        step=options.draft_length_step,
        most=options.draft_length_max,
        threshold=options.draft_length_threshold,
        unmask_threshold=options.unmask_threshold,
        sub_block_length=options.sub_block_length or gcd(DEFAULT_SUB_BLOCK, length),
        block_length=length,
        shifted=drafter.shifted,
        num_drafts=drafter.num_drafts,
        limit=drafter.limit,
    )


class FailFastSpeculator(DeerSpeculator):
    """Drafts up to k tokens for every request; ``num_drafts`` says how many, by slot."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device, req_states)
        if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
            raise ValueError(
                "draft_length=failfast of speculative_config does not work with enable_batch_sharded_sampling; leave "
                "one of them out"
            )
        self.has_blocks = self.drafter.context == "block-causal"
        self.growth = growth_of(self.options, self.drafter)
        if self.has_blocks:
            # The first forward of a round has the text and the rest of its last block; a shifted model predicts the
            # token behind a full block from the block itself.
            self.planned = replace(self.drafter, num_drafts=0 if self.drafter.shifted else 1)
        given = self.options.draft_forwards
        self.num_forwards = (given or failfast.forwards_of_one_each(self.growth)) if self.has_blocks else 1
        self.ends_early = device.type == "cpu"
        self.num_drafts = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        """Of the last round, [max_num_reqs] by slot: what the target verifies in the request's next step."""
        self.in_round = self.num_drafts[:0]
        """The same by place in the batch of the last round: [num_reqs]."""
        cut_drafts()
        setattr(req_states, NUM_DRAFTS, self.num_drafts)

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Drafts ``[R, k]``; those from ``num_drafts`` on are `NO_DRAFT`, and rejected whatever the target says."""
        if kwargs.get("dummy_run"):
            return super().propose(input_batch, *args, **kwargs)
        slots = input_batch.idx_mapping[: input_batch.num_reqs].long()
        self.num_drafts[slots] = 0
        drafts = super().propose(input_batch, *args, **kwargs)
        self.in_round = self.num_drafts[slots]
        return drafts

    def _look_at(self, logits: torch.Tensor) -> None:
        self.confidences = compute_token_logprobs(logits, logits.argmax(dim=-1, keepdim=True)).squeeze(1).exp()
        """Of the rows of the last forward that predict drafts: [rows], probability of the likeliest token."""

    def _draft(
        self, hidden_states: torch.Tensor, layout: DraftRows, on_device: dict[str, torch.Tensor], texts: Texts
    ) -> torch.Tensor:
        of_drafts = texts.select(on_device["drafting"])
        if self.has_blocks:
            made = self._fill_blocks(hidden_states, on_device, of_drafts)
            tokens, lengths = made.tokens, failfast.lengths(made)
            missing = max(self.num_speculative_steps - tokens.shape[1], 0)
            tokens = torch.nn.functional.pad(tokens, (0, missing))[:, : self.num_speculative_steps]
        else:
            tokens = super()._draft(hidden_states, layout, on_device, texts)
            lengths = failfast.length_of_one_forward(self.growth, self.confidences.view_as(tokens))
            lengths = torch.minimum(lengths, (self.growth.limit - of_drafts.known).clamp(min=0))
        self.num_drafts[of_drafts.slots] = lengths
        return tokens.masked_fill(iota(tokens.shape[1], tokens.device) >= lengths.unsqueeze(1), NO_DRAFT)

    def _fill_blocks(self, hidden_states: torch.Tensor, on_device: dict[str, torch.Tensor], texts: Texts) -> Drafts:
        """The drafts of D requests, each forward on the active block of each.

        Args:
            hidden_states: of the forward of the texts.
            texts: of the D requests.
        """
        length, size = self.drafter.block_length, self.growth.sub_block_length
        num_drafting = len(texts.slots)
        drafts = failfast.begin(self.growth, texts.known)
        whole = (self.temperature[texts.slots] > 0) & (self.draft_logits is not None)
        # Where the rows of the active blocks begin.
        last_row = on_device["last_row"]
        begin = texts.start - texts.start % length
        first_rows = on_device["first_row"][on_device["drafting"]] + drafts.block - begin
        for forward in range(self.num_forwards):
            if forward > 0:
                if self.ends_early and bool(drafts.is_done.all()):
                    break
                layout = self._active_blocks(drafts, texts)
                starts = np.arange(num_drafting + 1, dtype=np.int32) * length
                starts_on_device = iota(num_drafting + 1, self.device) * length
                first_rows = starts_on_device[:-1]
                last_row = first_rows + length - 1
                hidden_states = self._hidden_states(
                    layout, starts, {"table_rows": on_device["in_batch"], "query_start_loc": starts_on_device}
                )
            asked = failfast.ask(self.growth, drafts)
            rows = first_rows.unsqueeze(1) + asked.positions - drafts.block.unsqueeze(1) - int(self.drafter.shifted)
            rows = torch.minimum(rows.clamp(min=0), last_row.unsqueeze(1))
            tokens = self._tokens(hidden_states[rows.flatten()], asked, texts)
            confidences = self.confidences.view(-1, size)
            drafts = failfast.grow(self.growth, drafts, asked, tokens.view(-1, size), confidences, whole)
        return drafts

    def _tokens(self, predicting: torch.Tensor, asked: Asked, texts: Texts) -> torch.Tensor:
        """Tokens ``[D * S]`` for the positions that a forward is asked for; those of others have no meaning."""
        column = asked.positions - texts.known.unsqueeze(1)
        # A draft is drawn again until it has its place, and the distribution of its last draw is kept.
        is_drawn = asked.is_asked & (column < self.num_speculative_steps)
        slots = torch.where(is_drawn, texts.slots.unsqueeze(1), -1)
        column = column.clamp(0, self.num_speculative_steps - 1).int()
        return self._sample(predicting, asked.positions.flatten(), slots.flatten(), column.flatten())

    def _active_blocks(self, drafts: Drafts, texts: Texts) -> DraftRows:
        """One group for the active block of each request; the blocks of requests that have stopped are padding."""
        length, limit = self.drafter.block_length, self.drafter.limit
        positions, drafted, is_masked = failfast.block_tokens(self.growth, drafts)
        is_padding = (positions >= limit) | drafts.is_done.unsqueeze(1)
        tokens = self.req_states.all_token_ids.gpu
        text = tokens[texts.slots.unsqueeze(1), positions.clamp(max=tokens.shape[1] - 1)].long()
        ids = torch.where(positions < texts.known.unsqueeze(1), text, drafted)
        ids = ids.masked_fill(is_masked, self.drafter.mask_token_id)
        block = drafts.block.masked_fill(drafts.is_done, 0)
        return DraftRows(
            rows=Rows(
                tokens=ids.flatten(),
                positions=positions.masked_fill(is_padding, 0).flatten(),
                is_padding=is_padding.flatten(),
                groups=iota(len(block), self.device).repeat_interleave(length),
            ),
            is_text=~is_masked.flatten(),
            seq_lens=(block + length).clamp(max=limit).int(),
            causal=False,
            predicting=positions[:, :0],
            draft_positions=positions[:, :0],
        )


def create_speculator(vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> DeerSpeculator:
    """The speculator of a diffusion drafter, by its options."""
    assert vllm_config.speculative_config is not None
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    fails_fast = DrafterOptions.model_validate(hf_config.drafter_options).fails_fast
    return (FailFastSpeculator if fails_fast else DeerSpeculator)(vllm_config, device, req_states)
