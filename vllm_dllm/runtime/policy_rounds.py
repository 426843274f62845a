"""A step of requests that decode by their policy, and drafts for the next: chains, and nodes of a draft graph."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.decoding.adaptive import Drafting
from vllm_dllm.decoding.draft_graph import DraftGraph
from vllm_dllm.decoding.drafters import (
    Drafts,
    GraphTensors,
    chain_drafts,
    chain_lengths,
    chain_rounds,
    graph_drafts,
)
from vllm_dllm.decoding.records import move
from vllm_dllm.decoding.step import (
    Accepted,
    DraftingOrder,
    Finished,
    choose,
    drafting_order,
    finish,
    origin_of,
    verify_drafts,
)
from vllm_dllm.runtime.parts import Advance, Part
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.states import BatchOptions


class PolicyRounds:
    """The stages of ``vllm_dllm.decoding.step``, one after the other."""

    def __init__(self, params: PolicyParamsBuilder, graph: DraftGraph | None, refresh_interval: int | None):
        """For the requests that ``params`` knows.

        Args:
            graph: what requests draft from that do not draft chains.
            refresh_interval: denoising steps after which a block's K/V is computed anew.
        """
        self.params, self.states, self.rules = params, params.states, params.rules
        self.refresh_interval = refresh_interval
        # Whether drafts that the scheduler decides about, step by step, pay.
        self._drafting = Drafting()
        self.graph = None
        self.num_vocab_ranks = 1
        if graph is not None:
            device = self.states.device
            self.graph = GraphTensors(vocab_rank=graph.membership(device), children=graph.child_matrix(device))
            self.num_vocab_ranks = int(self.graph.vocab_rank.max())

    def advance(self, part: Part, *, with_origin: bool) -> Advance:
        """Take the requests to their next state; ``with_origin``: tell where the tokens come from."""
        window, options, rules = part.window, part.options, self.rules
        steps = window.progress.step.unsqueeze(1)
        if window.present.shape[1] > 1:
            steps = steps + window.levels
        params = self.params.params_of(options, window.progress, window.branches, steps)
        choice = choose(window, part.measured, options, params, rules)
        accepted = verify_drafts(window, choice, options, rules)
        origin = origin_of(window, choice, accepted, rules) if with_origin else None
        finished = finish(window, accepted, options, part.room, rules)
        if not self._is_to_draft(options, window.present.shape[1]):
            return Advance(accepted, finished, origin)
        drafts = self.propose(part, accepted, finished)
        # Wanted drafts come first.
        progress = replace(finished.progress, num_drafts=drafts.present.sum(dim=1))
        tokens = torch.where(drafts.present.unsqueeze(2), drafts.tokens, rules.mask_id).flatten(1)
        return Advance(accepted, replace(finished, progress=progress), origin, tokens, drafts.levels, is_drafting=True)

    def _is_to_draft(self, options: BatchOptions, num_branches: int) -> bool:
        """Whether the step makes drafts for the next. Where the scheduler takes them all back (``auto``), few do."""
        drafts_by_policy = options.asked["drafts_by_policy"].astype(bool)
        if not drafts_by_policy.any():
            return False
        are_used = num_branches > 1
        may_have_drafts = self.states.may_have_drafts(options.slots_np[drafts_by_policy])
        pays = self._drafting.decide(are_used or bool(may_have_drafts.any()), are_used)
        return pays or not options.asked["auto_drafts"][drafts_by_policy].all()

    def propose(self, part: Part, accepted: Accepted, finished: Finished) -> Drafts:
        """Drafts of the next windows, from the accepted branches' logits; present where the request wants them."""
        options, root, most = part.options, finished.tokens, self.states.max_drafts
        steps = finished.progress.step
        params = self.params.params_of(options, finished.progress, root.unsqueeze(1), steps.unsqueeze(1))
        order = drafting_order(finished, accepted, part.measured, options, params, self.rules)
        width = max(most, root.shape[1])
        quotas = self.params.quotas_ahead(options, steps, order.available.sum(dim=1), width)
        lengths = chain_lengths(quotas)
        tokens, confidence = self._tokens(part, accepted, finished, order, lengths)
        drafts = chain_drafts(root, order.available, order.rank, tokens, lengths[:, :most])
        if self.graph is not None and options.asked["uses_graph"].any():
            candidates, logprobs = self._candidates(part, accepted, finished, tokens, confidence)
            of_graph = graph_drafts(root, order.available, order.rank, candidates, logprobs, lengths, self.graph, most)
            wants = options.uses_graph.bool().unsqueeze(1)
            drafts = Drafts(
                tokens=torch.where(wants.unsqueeze(2), of_graph.tokens, drafts.tokens),
                present=torch.where(wants, of_graph.present, drafts.present),
                levels=torch.where(wants, of_graph.levels, drafts.levels),
            )
        wanted = drafts.present & (torch.arange(most, device=root.device) < options.max_drafts.unsqueeze(1))
        if self.refresh_interval is not None:
            # No draft may stand for a step that is to be a refresh.
            since = (steps % self.refresh_interval).unsqueeze(1)
            wanted &= (since > 0) & (since + drafts.levels < self.refresh_interval)
        return drafts._replace(present=wanted)

    def _tokens(
        self, part: Part, accepted: Accepted, finished: Finished, order: DraftingOrder, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Token of every masked position in a draft, and its probability: [F, W] each.

        A request that samples drafts what the step that a chain fills a position in would draw: from the logits at
        hand, with the noise of that step. Other requests draft what the logits predict.
        """
        tokens, confidence = order.measured.token, order.measured.confidence
        samples = part.logits.reader.samples(part.options.slots_np) & (part.options.asked["drafts_by_policy"] > 0)
        which_np = np.flatnonzero(samples)
        if len(which_np) == 0:
            return tokens, confidence
        which = async_tensor_h2d(which_np, device=tokens.device)
        rounds = chain_rounds(finished.tokens == self.rules.mask_id, order.rank, lengths, self.rules.block_length)
        forth = None if finished.shift is None else finished.shift[which]
        back = None if forth is None else -forth
        drawn, probability = part.logits.draw_again(
            accepted.branch[which],
            part.requests_np[which_np],
            part.requests[which],
            _moved(rounds[which], back),
            _moved(finished.tokens[which], back),
        )
        drawn, probability = _moved(drawn, forth), _moved(probability, forth)
        return tokens.index_copy(0, which, drawn), confidence.index_copy(0, which, probability)

    def _candidates(
        self, part: Part, accepted: Accepted, finished: Finished, tokens: Tensor, confidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens of every position by vocabulary rank, ``tokens`` [F, W] first, and their log-probabilities.

        Returns [F, W, J] int64 and [F, W, J] float32.
        """
        if self.num_vocab_ranks == 1:
            return tokens.unsqueeze(2), confidence.log().unsqueeze(2)
        back = None if finished.shift is None else -finished.shift
        candidates, logprobs = part.logits.alternatives(
            _moved(tokens, back), _moved(confidence, back), accepted.branch, part.requests, self.num_vocab_ranks
        )
        return _moved(candidates, finished.shift), _moved(logprobs, finished.shift)


def _moved(values: Tensor, by: Tensor | None) -> Tensor:
    """Columns of ``values`` [F, W, ...] where the window has moved on ``by`` [F]; logits are of the window before."""
    return values if by is None else move(values, by, 0)
