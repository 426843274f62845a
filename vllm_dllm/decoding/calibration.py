"""Which drafts a model's own decoding calls for (Spiffy, arXiv 2509.18085, algorithms 2 and 3, appendix D.1)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import NamedTuple, TypeAlias

from vllm_dllm.decoding.draft_graph import MOST_POSITIONS, Node

Lookahead: TypeAlias = tuple[Node, ...]
"""What was unmasked after a denoising step: in the first step after it, in the second, ..., as far as a draft could say
it. The ranks are those by the logits of that step, among the positions that it left masked."""

Trajectory: TypeAlias = tuple[Lookahead, ...]
"""One block: the ``Lookahead`` of each of its denoising steps but the last."""

NODES_PER_LEVEL = 3
FREE_LEVELS = 2
"""Nodes of these levels need no parent."""


class Step(NamedTuple):
    """One denoising step of a block, columns counted from the block's start."""

    unmasked: Mapping[int, int]
    """Token of each column that it unmasked."""
    edited: bool
    """It changed a token that was there (token editing)."""
    ranks: Mapping[int, int]
    """Rank, from 1, of each column that it left masked, by its logits."""
    top_tokens: Mapping[int, Sequence[int]]
    """Best tokens of each of those, best first."""


@dataclass(frozen=True)
class Candidate:
    """A node of the graph of all possibilities."""

    node: Node
    level: int
    """Steps after the root in which it is among the most frequent; the least, where there are several."""
    count: int
    """Roots after which the block came to be in this state, after any number of steps of the lookahead."""


def trajectory(steps: Sequence[Step], lookahead: int) -> Trajectory:
    """What each step of a block was followed by, for at most ``lookahead`` steps (algorithm 2, part 1).

    It ends where no draft could follow: a draft leaves a mask, keeps the tokens that are there, and has tokens and
    positions only from the best.
    """
    found = []
    for t, root in enumerate(steps[:-1], 1):
        nodes: list[Node] = []
        for step in steps[t : t + lookahead]:
            node = _unmasked_after(root, step)
            if node is None:
                break
            nodes.append(node)
        found.append(tuple(nodes))
    return tuple(found)


def _unmasked_after(root: Step, step: Step) -> Node | None:
    """What ``step`` unmasked, in ranks of ``root``; ``None`` where no draft can say it."""
    if step.edited or not step.ranks:
        return None
    pairs = []
    for column, token in step.unmasked.items():
        if root.ranks[column] > MOST_POSITIONS or token not in root.top_tokens[column]:
            return None
        pairs.append((root.ranks[column], root.top_tokens[column].index(token) + 1))
    return frozenset(pairs)


def states(lookahead: Lookahead) -> list[Node]:
    """The block's state after each step of a lookahead, as what was filled into the root."""
    return list(accumulate(lookahead, or_))


def candidates(trajectories: Iterable[Trajectory]) -> list[Candidate]:
    """Algorithm 2, part 2: the graph of all possibilities, level by level.

    Its edges need no list: the paper adds one from every node to every proper superset, the most frequent transitions
    among them. A state that is frequent at several levels is one node, of the least of them.
    """
    count: Counter[Node] = Counter()
    by_level: list[Counter[Node]] = []
    for trajectory in trajectories:
        for lookahead in trajectory:
            reached = states(lookahead)
            count.update(set(reached))
            for level, state in enumerate(reached):
                if level == len(by_level):
                    by_level.append(Counter())
                by_level[level][state] += 1
    # What no step changed is no draft.
    taken: set[Node] = {frozenset()}
    found: list[Candidate] = []
    for level, counts in enumerate(by_level, 1):
        most_frequent = sorted(
            (node for node in counts if node not in taken), key=lambda n: (-counts[n], _canonical(n))
        )
        for node in most_frequent[:NODES_PER_LEVEL]:
            taken.add(node)
            found.append(Candidate(node, level, count[node]))
    return found


def select(found: Sequence[Candidate], size: int) -> list[Candidate]:
    """Algorithm 2, part 3: the connected subgraph of ``size`` nodes with the greatest sum of counts (eq. 24-27).

    A node is connected if its level is one of the first two or one of its subsets is in the subgraph. Branch and bound
    over the nodes by falling count; exact. Smallest nodes first, and fewer where no more can be connected.
    """
    nodes = _connectable(sorted(found, key=lambda c: (-c.count, _canonical(c.node))))
    size = min(size, len(nodes))
    # Sets of nodes as bits. A node without an entry is connected by itself.
    parents = {
        i: sum(1 << j for j, other in enumerate(nodes) if other.node < candidate.node)
        for i, candidate in enumerate(nodes)
        if candidate.level > FREE_LEVELS
    }
    sums = list(accumulate((candidate.count for candidate in nodes), initial=0))
    best, best_total = 0, -1

    def search(i: int, left: int, chosen: int, total: int, orphans: list[int]) -> None:
        """Decide on node ``i`` and those after it. ``orphans``: parents of each chosen node that has none chosen."""
        nonlocal best, best_total
        if not left:
            if not orphans and total > best_total:
                best, best_total = chosen, total
            return
        if i + left > len(nodes):
            return
        bound = total + sums[i + left] - sums[i]
        for options in orphans:
            undecided = options >> i
            if not undecided:
                return
            # One of the places goes to a parent of this node: at best the first of them.
            first = i + (undecided & -undecided).bit_length() - 1
            bound = min(bound, total + sums[i + left - 1] - sums[i] + nodes[max(first, i + left - 1)].count)
        if bound <= best_total:
            return
        still = [options for options in orphans if not options >> i & 1]
        if i in parents and not parents[i] & chosen:
            still.append(parents[i])
        search(i + 1, left - 1, chosen | 1 << i, total + nodes[i].count, still)
        search(i + 1, left, chosen, total, orphans)

    search(0, size, 0, 0, [])
    selected = [candidate for i, candidate in enumerate(nodes) if best >> i & 1]
    return sorted(selected, key=lambda c: _canonical(c.node))


def forwards(trajectories: Iterable[Trajectory], nodes: Iterable[Node]) -> int:
    """Denoising forwards that the trajectories cost where all ``nodes`` are drafted every time; none: their steps."""
    drafted = set(nodes)
    total = 0
    for trajectory in trajectories:
        total, step = total + 1, 0
        while step < len(trajectory):
            accepted = 0
            for state in states(trajectory[step]):
                if state not in drafted:
                    break
                accepted += 1
            total, step = total + 1, step + 1 + accepted
    return total


def _connectable(nodes: Sequence[Candidate]) -> list[Candidate]:
    """Those that are connected in the graph of all."""
    kept: list[Candidate] = []
    for candidate in sorted(nodes, key=lambda c: len(c.node)):
        if candidate.level <= FREE_LEVELS or any(other.node < candidate.node for other in kept):
            kept.append(candidate)
    return [candidate for candidate in nodes if candidate in kept]


def _canonical(node: Node) -> tuple[int, list[tuple[int, int]]]:
    return len(node), sorted(node)
