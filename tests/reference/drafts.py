"""Step-skipping with verification, written for the eye: FreeDave, Spiffy and PSD.

All three go round by round. A forward sees the block as it stands and drafts of later states of it. The verifier
follows the drafts that the forward confirms; a denoising step from the last of them gives the new block, and the same
forward's predictions give its drafts. So a round is one forward, and a block's first has no drafts yet.

A draft always leaves a mask: the state that leaves none is the target of the one before, and needs no forward.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .decode import (
    Branch,
    Decoded,
    Model,
    Options,
    Predictions,
    Round,
    candidates,
    cut,
    denoise,
    fill,
    masks,
    ranked,
)

Target = Callable[[int, int], list[int]]
"""``target(k, n)``: what a denoising step makes of branch ``k`` when it has skipped ``n`` steps."""

Node = Collection[tuple[int, int]]
"""A draft of a Spiffy graph: (position rank, vocab rank) of what it fills in, both from 1."""


@dataclass(frozen=True)
class FreeDave:
    """FreeDave (arXiv 2510.00294), Algorithm 2. Its draft steps ``d`` count the block as it stands."""

    d: int
    match: Literal["exact", "subset"] = "exact"

    def draft(
        self, canvas: list[int], predictions: Predictions, step: int, start: int, options: Options
    ) -> list[Branch]:
        return chain(canvas, predictions, step, start, options, self.d - 1)

    def accept(self, branches: list[Branch], target: Target, options: Options) -> tuple[int, int]:
        if self.match == "exact":
            return follow(branches, target)
        best = hops = 0
        while True:
            # The longest later draft whose tokens are all in the next state of this one.
            after = target(best, hops)
            longer = [k for k in range(best + 1, len(branches)) if contains(after, branches[k].canvas, options)]
            if not longer:
                return best, hops
            best, hops = longer[-1], hops + 1


@dataclass(frozen=True)
class Spiffy:
    """Spiffy (arXiv 2509.18085), Algorithm 1, with the ``drafts`` best nodes of a draft graph (D*, section 4.4.4)."""

    graph: list[Node]
    drafts: int

    def draft(
        self, canvas: list[int], predictions: Predictions, step: int, start: int, options: Options
    ) -> list[Branch]:
        return best_of_graph(self.graph, canvas, predictions, step, start, options, self.drafts)

    def accept(self, branches: list[Branch], target: Target, options: Options) -> tuple[int, int]:
        return follow(branches, target)


@dataclass(frozen=True)
class PSD:
    """PSD (arXiv 2605.15609), Algorithm 1, stages 2 and 3, over any policy. Stage 1 of an iteration is the forward of
    the last one's stage 3. Drafts come from a graph, or are the chain of the masked positions in the policy's order."""

    drafts: int
    graph: list[Node] | None = None

    def draft(
        self, canvas: list[int], predictions: Predictions, step: int, start: int, options: Options
    ) -> list[Branch]:
        if self.graph is None:
            return chain(canvas, predictions, step, start, options, self.drafts)
        return best_of_graph(self.graph, canvas, predictions, step, start, options, self.drafts)

    def accept(self, branches: list[Branch], target: Target, options: Options) -> tuple[int, int]:
        def size(k: int) -> int:
            return -branches[k].canvas.count(options.mask_id)

        accepted = [0]
        for k in sorted(range(1, len(branches)), key=size):  # a topological order
            draft = branches[k].canvas
            for p in accepted:
                parent = branches[p]
                # What the policy commits at the parent is what passes its criterion.
                if contains(draft, parent.canvas, options) and contains(target(p, parent.level), draft, options):
                    accepted.append(k)
                    break
        deepest = max(sorted(accepted), key=size)
        return deepest, branches[deepest].level


def follow(branches: list[Branch], target: Target) -> tuple[int, int]:
    """Go from the block as it stands to the branch that equals its target, and on from there, until none does."""
    accepted = hops = 0
    while True:
        after = target(accepted, hops)
        equal = [k for k, branch in enumerate(branches) if k not in (0, accepted) and branch.canvas == after]
        if not equal:
            return accepted, hops
        accepted, hops = equal[0], hops + 1


def contains(state: list[int], part: list[int], options: Options) -> bool:
    return all(token in (options.mask_id, state[i]) for i, token in enumerate(part))


def chain(
    canvas: list[int], predictions: Predictions, step: int, start: int, options: Options, count: int
) -> list[Branch]:
    """Draft k fills in what k more steps would, were the predictions to stay as they are."""
    order = draft_order(canvas, predictions, start, options)
    drafts: list[Branch] = []
    filled = 0
    for level in range(1, count + 1):
        filled += max(1, options.quota(step + level - 1))
        if filled >= len(order):
            break
        drafts.append(Branch(fill(canvas, {i: predictions[i].token for i in order[:filled]}), level))
    return drafts


def best_of_graph(
    graph: list[Node],
    canvas: list[int],
    predictions: Predictions,
    step: int,
    start: int,
    options: Options,
    count: int,
) -> list[Branch]:
    """The ``count`` nodes with the best scores (Spiffy, eq. 12-14), best first, as drafts."""
    order = draft_order(canvas, predictions, start, options)
    nodes = [frozenset(node) for node in graph if len(node) < len(order) and max(i for i, _ in node) <= len(order)]

    def tokens(node: frozenset[tuple[int, int]]) -> dict[int, int]:
        """Token c_ij is the j-th best of the i-th position."""
        by_position = {order[i - 1]: j for i, j in node}
        return {
            position: int(predictions[position].log_probs.argsort(descending=True, stable=True)[j - 1])
            for position, j in by_position.items()
        }

    def local_score(node: frozenset[tuple[int, int]]) -> float:
        return geometric_mean(
            float(predictions[position].log_probs[token].exp()) for position, token in tokens(node).items()
        )

    def score(node: frozenset[tuple[int, int]]) -> float:
        children = [other for other in nodes if node < other]
        if not children:
            return local_score(node)
        return geometric_mean([local_score(node), geometric_mean(local_score(child) for child in children)])

    best = sorted(nodes, key=score, reverse=True)[:count]
    return [Branch(fill(canvas, tokens(node)), steps_for(len(node), step, options)) for node in best]


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.prod(values) ** (1 / len(values))


def steps_for(num_tokens: int, step: int, options: Options) -> int:
    """Denoising steps from ``step`` on whose quotas make up ``num_tokens``."""
    count = 0
    while num_tokens > 0:
        num_tokens -= max(1, options.quota(step + count))
        count += 1
    return count


def draft_order(canvas: list[int], predictions: Predictions, start: int, options: Options) -> list[int]:
    """Masked positions in the policy's order, those of earlier sub-blocks first."""
    masked, order = masks(canvas, start, options), []
    while masked:
        first = ranked(candidates(masked, start, options), predictions, options)
        order += first
        masked = [i for i in masked if i not in first]
    return order


def decode_eagerly(
    model: Model, prompt: list[int], max_new_tokens: int, options: Options, freedave: FreeDave
) -> Decoded:
    """FreeDave's eager acceptance, in the rounds of the official code.

    A forward sees a window of the current block and the blocks after it that drafts can reach. What an accepted draft
    has put into those blocks stays. A step may only write to the next block from a forward that saw the current one
    finished, so a block is left once a finished state of it was accepted; only the last block has no need of that.
    """
    length, result = options.block_length, Decoded()
    begin, end = len(prompt), math.ceil((len(prompt) + max_new_tokens) / length) * length
    in_order_of_blocks = replace(options, sub_block_length=length)
    canvas = prompt + [options.mask_id] * (end - begin)
    for start in range(begin // length * length, end, length):
        block = slice(start, start + length)
        window_end = min(start + length + math.ceil(freedave.d / length) * length, end)
        finished = options.mask_id not in canvas[block]
        root, step = canvas[:window_end], 0
        drafts: list[Branch] = []
        while not finished:
            branches = [Branch(root, 0), *drafts]
            outcome = denoise(model, branches, step, start, begin, in_order_of_blocks, freedave)
            masked = len(masks(root, start, options))
            result.nfe += 1
            result.rounds.append(Round(step, masked, len(drafts), outcome.accepted, outcome.hops))
            root, step = outcome.canvas, step + outcome.hops + 1
            seen = root if window_end == block.stop else branches[outcome.accepted].canvas
            finished = options.mask_id not in seen[block]
            drafts = freedave.draft(root, outcome.predictions, step, start, in_order_of_blocks)
        canvas[:window_end] = root
    result.canvas = canvas[begin:]
    result.tokens = cut(result.canvas[:max_new_tokens], options.stop_ids)
    return result
