"""A step of requests that decode by their policy, and drafts for the next: chains, and nodes of a draft graph."""

from dataclasses import dataclass, replace

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
from vllm_dllm.decoding.grammar import Drafted, left_to_right
from vllm_dllm.decoding.records import PerRequest, Progress, dense, move
from vllm_dllm.decoding.step import (
    Accepted,
    DraftingOrder,
    Finished,
    Origin,
    choose,
    drafting_order,
    finish,
    origin_of,
    verify_drafts,
)
from vllm_dllm.runtime.compiled import Stages
from vllm_dllm.runtime.parts import Advance, Forward, Part, see
from vllm_dllm.runtime.policy_params import PolicyParamsBuilder
from vllm_dllm.runtime.states import BatchOptions


@dataclass(frozen=True)
class Decided(PerRequest):
    """What a step decides by its logits, and in what order the next windows' drafts fill them."""

    accepted: Accepted
    finished: Finished
    origin: Origin | None
    """None where no request wants log-probabilities."""
    order: DraftingOrder | None
    """None where the step makes no drafts, as the next two."""
    lengths: Tensor | None
    """[F, max(max_drafts, W)] int64: of ``chain_lengths``."""
    rounds: Tensor | None
    """[F, W] int64: of ``chain_rounds``."""


class PolicyRounds:
    """The stages of ``vllm_dllm.decoding.step``, one after the other."""

    def __init__(
        self, params: PolicyParamsBuilder, graph: DraftGraph | None, refresh_interval: int | None, stages: Stages
    ):
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
        self._compiles = stages.enabled
        self._decide_stage, self._fill_stage = stages.stage(self.decide), stages.stage(self._fill)

    def advance(self, part: Part, drafted: Drafted | None, *, drafting: bool, with_origin: bool) -> Advance:
        """Take the requests to their next state.

        Args:
            drafted: of requests that are all structured.
            drafting: what ``is_to_draft`` says.
            with_origin: tell where the tokens come from.
        """
        options = part.options
        samples = part.logits.reader.samples(options.slots_np) & (options.asked["drafts_by_policy"] > 0)
        decide = self._decide_stage if options.compares_only else self.decide
        decided = decide(
            part.forward,
            with_origin,
            drafting,
            # Where steps are compiled, one form serves all.
            drafting and (self._compiles or bool(samples.any())),
            drafted,
        )
        if not drafting:
            return Advance(decided.accepted, decided.finished, decided.origin)
        return self.propose(part, decided, np.flatnonzero(samples))

    def decide(
        self,
        forward: Forward,
        with_origin: bool,
        drafting: bool,
        drawing: bool,
        drafted: Drafted | None = None,
    ) -> Decided:
        """The step up to its drafts; ``drafting``: there will be some, and ``drawing``: of requests that sample."""
        rules, options = self.rules, forward.options
        seen = see(forward, self.states.unpack, rules)
        window = seen.window
        steps = window.progress.step.unsqueeze(1)
        if window.present.shape[1] > 1:
            steps = steps + window.levels
        params = self.params.params_of(options, window.progress, window.branches, steps)
        choice = choose(window, seen.measured, options, params, rules)
        if drafted is not None:
            choice = left_to_right(choice, window, seen.measured.token.squeeze(1), drafted)
        accepted = verify_drafts(window, choice, options, rules)
        origin = origin_of(window, choice, accepted, options, rules) if with_origin else None
        finished = finish(window, accepted, options, seen.room, rules)
        accepted, finished = accepted.dense(), finished.dense()
        if not drafting:
            return Decided(accepted, finished, origin, None, None, None)
        root, steps = finished.tokens, finished.progress.step
        params = self.params.params_of(options, finished.progress, root.unsqueeze(1), steps.unsqueeze(1))
        order = drafting_order(finished, accepted, seen.measured, options, params, rules)
        width = max(self.states.max_drafts, root.shape[1])
        lengths = chain_lengths(self.params.quotas_ahead(options, steps, order.available.sum(dim=1), width))
        rounds = None
        if drawing:
            rounds = chain_rounds(root == rules.mask_id, order.rank, lengths, rules.block_length)
        return Decided(accepted, finished, origin, order, lengths, rounds)

    def is_to_draft(self, part: Part) -> bool:
        """Whether the step makes drafts for the next. Where the scheduler takes them all back (``auto``), few do."""
        options = part.options
        drafts_by_policy = options.asked["drafts_by_policy"].astype(bool)
        if not drafts_by_policy.any():
            return False
        are_used = part.sight.present.shape[1] > 1
        may_have_drafts = self.states.may_have_drafts(options.slots_np[drafts_by_policy])
        pays = self._drafting.decide(are_used or bool(may_have_drafts.any()), are_used)
        return pays or not options.asked["auto_drafts"][drafts_by_policy].all()

    def propose(self, part: Part, decided: Decided, samples_np: np.ndarray) -> Advance:
        """Drafts of the next windows, from the accepted branches' logits; present where the request wants them.

        Args:
            samples_np: requests that sample and want drafts.
        """
        order = decided.order
        assert order is not None
        tokens, confidence = order.measured.token, order.measured.confidence
        if len(samples_np):
            tokens, confidence = self._draw(part, decided, tokens, confidence, samples_np)
        candidates = logprobs = None
        if self.graph is not None and part.options.asked["uses_graph"].any():
            candidates, logprobs = self._candidates(part, decided, tokens, confidence)
        # Without the origin, which the stage does not read, one compiled form serves requests with and without
        # log-probabilities.
        without_origin = replace(decided, origin=None)
        progress, drafts, levels = self._fill_stage(part.options, without_origin, tokens, candidates, logprobs)
        finished = replace(decided.finished, progress=progress)
        return Advance(decided.accepted, finished, decided.origin, drafts, levels)

    def _fill(
        self,
        options: BatchOptions,
        decided: Decided,
        tokens: Tensor,
        candidates: Tensor | None,
        logprobs: Tensor | None,
    ) -> tuple[Progress, Tensor, Tensor]:
        """The progress of the next windows, and their drafts and levels as ``Advance`` has them.

        Args:
            tokens: [F, W] int64: token of every masked position in a draft.
            candidates, logprobs: of ``_candidates``; None: no request drafts from the graph.
        """
        order, lengths, finished = decided.order, decided.lengths, decided.finished
        assert order is not None and lengths is not None
        root, most, steps = finished.tokens, self.states.max_drafts, finished.progress.step
        drafts = chain_drafts(root, order.available, order.rank, tokens, lengths[:, :most])
        if candidates is not None and logprobs is not None:
            assert self.graph is not None
            of_graph = graph_drafts(root, order.available, order.rank, candidates, logprobs, lengths, self.graph, most)
            wants = options.uses_graph.bool().unsqueeze(1)
            drafts = Drafts(
                tokens=torch.where(wants.unsqueeze(2), of_graph.tokens, drafts.tokens),
                present=torch.where(wants, of_graph.present, drafts.present),
                levels=torch.where(wants, of_graph.levels, drafts.levels),
            )
        present = drafts.present & (torch.arange(most, device=root.device) < options.max_drafts.unsqueeze(1))
        if self.refresh_interval is not None:
            # No draft may stand for a step that is to be a refresh.
            since = (steps % self.refresh_interval).unsqueeze(1)
            present = present & (since > 0) & (since + drafts.levels < self.refresh_interval)
        # Wanted drafts come first.
        progress = replace(finished.progress, num_drafts=present.sum(dim=1))
        filled = torch.where(present.unsqueeze(2), drafts.tokens, self.rules.mask_id).flatten(1)
        return progress, filled, dense(drafts.levels)

    def _draw(
        self, part: Part, decided: Decided, tokens: Tensor, confidence: Tensor, which_np: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Token of every masked position in a draft, and its probability: [F, W] each.

        A request that samples drafts what the step that a chain fills a position in would draw: from the logits at
        hand, with the noise of that step. Other requests draft what the logits predict, ``tokens``.
        """
        finished, rounds = decided.finished, decided.rounds
        assert rounds is not None
        which = async_tensor_h2d(which_np, device=tokens.device)
        drawn, probability = part.logits.draw_drafts(
            which_np,
            which,
            rounds,
            finished.tokens,
            finished.shift,
            decided.accepted.branch,
            part.requests_np,
            part.requests,
        )
        if finished.shift is not None:
            forth = finished.shift[which]
            drawn, probability = move(drawn, forth, 0), move(probability, forth, 0)
        return tokens.index_copy(0, which, drawn), confidence.index_copy(0, which, probability)

    def _candidates(self, part: Part, decided: Decided, tokens: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of every position by vocabulary rank, ``tokens`` [F, W] first, and their log-probabilities.

        Returns [F, W, J] int64 and [F, W, J] float32.
        """
        if self.num_vocab_ranks == 1:
            return tokens.unsqueeze(2), confidence.log().unsqueeze(2)
        shift = decided.finished.shift
        back = None if shift is None else -shift
        candidates, logprobs = part.logits.alternatives(
            _moved(tokens, back), _moved(confidence, back), decided.accepted.branch, part.requests, self.num_vocab_ranks
        )
        return _moved(candidates, shift), _moved(logprobs, shift)


def _moved(values: Tensor, by: Tensor | None) -> Tensor:
    """Columns of ``values`` [F, W, ...] where the window has moved on ``by`` [F]; logits are of the window before."""
    return values if by is None else move(values, by, 0)
