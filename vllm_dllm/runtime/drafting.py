"""Drafts for the next forward, from the logits of this one: chains, and the nodes of a draft graph."""

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.adaptive import Drafting
from vllm_dllm.decoding.draft_graph import DraftGraph
from vllm_dllm.decoding.drafters import GraphTensors, chain_drafts, chain_lengths, chain_rounds, graph_drafts
from vllm_dllm.decoding.records import Rules, move
from vllm_dllm.decoding.step import Accepted, DraftingOrder, Finished, drafting_order
from vllm_dllm.runtime.parts import Part
from vllm_dllm.runtime.policy_params import BatchOptions, PolicyParamsBuilder
from vllm_dllm.runtime.states import DenoiseStates


class Drafter:
    """Makes the drafts of requests that draft by their policy's order."""

    def __init__(
        self,
        states: DenoiseStates,
        params: PolicyParamsBuilder,
        rules: Rules,
        graph: DraftGraph | None,
        refresh_interval: int | None,
    ):
        """For the requests in ``states``.

        Args:
            refresh_interval: denoising steps after which a block's K/V is computed anew.
        """
        self.states = states
        self.params = params
        self.rules = rules
        self.refresh_interval = refresh_interval
        # Whether drafts that the scheduler decides about, step by step, pay.
        self._drafting = Drafting()
        self.graph = None
        self.num_vocab_ranks = 1
        if graph is not None:
            self.graph = GraphTensors(
                vocab_rank=graph.membership(states.device), children=graph.child_matrix(states.device)
            )
            self.num_vocab_ranks = int(self.graph.vocab_rank.max())

    def is_to_draft(self, options: BatchOptions, num_branches: int) -> bool:
        """Whether the step makes drafts for the next. Where the scheduler takes them all back (``auto``), few do."""
        if not options.drafting_np.any():
            return False
        slots_np = options.slots_np[options.drafting_np]
        are_used = num_branches > 1
        pays = self._drafting.decide(are_used or bool(self.states.may_have_drafts(slots_np).any()), are_used)
        return pays or not self.states.auto_drafts_np[slots_np].all()

    def propose(self, part: Part, accepted: Accepted, finished: Finished) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts of the next windows, from the accepted branches' logits.

        Returns:
            number of drafts [F] int64, their tokens [F, max_drafts * W] int64, their levels [F, max_drafts] int64.
        """
        options, root, most = part.options, finished.tokens, self.states.max_drafts
        steps = finished.progress.step
        params = self.params.params_of(options, finished.progress, root.unsqueeze(1), steps.unsqueeze(1))
        order = drafting_order(finished, accepted, part.measured, options, params, self.rules)
        width = max(most, root.shape[1])
        quotas = self.params.quotas_ahead(options, steps, order.available.sum(dim=1), width)
        lengths = chain_lengths(quotas)
        tokens, confidence = self._tokens(part, accepted, finished, order, lengths)
        drafts = chain_drafts(root, order.available, order.rank, tokens, lengths[:, :most])
        if self.graph is not None and options.graph_np.any():
            candidates, logprobs = self._candidates(part, accepted, finished, tokens, confidence)
            of_graph = graph_drafts(root, order.available, order.rank, candidates, logprobs, lengths, self.graph, most)
            if options.graph_np.all():
                drafts = of_graph
            else:
                wants = async_tensor_h2d(options.graph_np, device=root.device)
                drafts = drafts._replace(
                    tokens=torch.where(wants.view(-1, 1, 1), of_graph.tokens, drafts.tokens),
                    present=torch.where(wants.unsqueeze(1), of_graph.present, drafts.present),
                    levels=torch.where(wants.unsqueeze(1), of_graph.levels, drafts.levels),
                )
        wanted = drafts.present & (torch.arange(most, device=root.device) < options.max_drafts.unsqueeze(1))
        if self.refresh_interval is not None:
            # No draft may stand for a step that is to be a refresh.
            since = (steps % self.refresh_interval).unsqueeze(1)
            wanted &= (since > 0) & (since + drafts.levels < self.refresh_interval)
        drafted = torch.where(wanted.unsqueeze(2), drafts.tokens, self.rules.mask_id)
        return wanted.sum(dim=1), drafted.flatten(1), drafts.levels

    def _tokens(
        self, part: Part, accepted: Accepted, finished: Finished, order: DraftingOrder, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Token of every masked position in a draft, and its probability: [F, W] each.

        A request that samples drafts what the step that a chain fills a position in would draw: from the logits at
        hand, with the noise of that step. Other requests draft what the logits predict.
        """
        tokens, confidence = order.measured.token, order.measured.confidence
        samples = part.logits.reader.samples(part.options.slots_np) & (part.options.drafting_np)
        if not samples.any():
            return tokens, confidence
        rounds = chain_rounds(finished.tokens == self.rules.mask_id, order.rank, lengths, self.rules.block_length)
        window = finished.tokens
        if finished.shift is not None:
            # The logits are of the window before it moved.
            rounds, window = (move(values, -finished.shift, 0) for values in (rounds, window))
        which_np = np.flatnonzero(samples)
        which = async_tensor_h2d(which_np, device=tokens.device)
        drawn, probability = part.logits.draw_again(
            accepted.branch[which], part.requests_np[which_np], part.requests[which], rounds[which], window[which]
        )
        if finished.shift is not None:
            drawn, probability = (move(values, finished.shift[which], 0) for values in (drawn, probability))
        return tokens.index_copy(0, which, drawn), confidence.index_copy(0, which, probability)

    def _candidates(
        self, part: Part, accepted: Accepted, finished: Finished, tokens: Tensor, confidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens of every position by vocabulary rank, ``tokens`` [F, W] first, and their log-probabilities.

        Returns [F, W, J] int64 and [F, W, J] float32.
        """
        if self.num_vocab_ranks == 1:
            return tokens.unsqueeze(2), confidence.log().unsqueeze(2)
        shift = finished.shift
        if shift is not None:
            tokens, confidence = move(tokens, -shift, 0), move(confidence, -shift, 0)
        candidates, logprobs = part.logits.alternatives(
            tokens, confidence, accepted.branch, part.requests, self.num_vocab_ranks
        )
        if shift is not None:
            return move(candidates, shift, 0), move(logprobs, shift, 0)
        return candidates, logprobs
