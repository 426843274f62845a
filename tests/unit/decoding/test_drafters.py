"""Drafts of a block's later states: chains and graphs."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from vllm_dllm.decoding.draft_graph import DraftGraph, Node
from vllm_dllm.decoding.drafters import Drafts, GraphTensors, chain_drafts, chain_lengths, graph_drafts, ranks

MASK = 99


def order_of(scores: list[float], group_length: int | None) -> list[int]:
    """Positions that take part, best first; those of earlier groups before those of later ones."""
    taking_part = [i for i, score in enumerate(scores) if score > -math.inf]
    return sorted(taking_part, key=lambda i: (0 if group_length is None else i // group_length, -scores[i], i))


few_scores = st.sampled_from([-math.inf, 0.0, 0.1, 0.5, 0.5, 0.9])
score_rows = st.integers(1, 9).flatmap(lambda width: st.lists(st.lists(few_scores, min_size=width, max_size=width)))


@given(score_rows.filter(bool), st.none() | st.integers(1, 9))
def test_ranks_go_by_group_then_score_then_from_left_to_right(
    rows: list[list[float]], group_length: int | None
) -> None:
    found = ranks(torch.tensor(rows), group_length).tolist()
    for scores, rank in zip(rows, found, strict=True):
        order = order_of(scores, group_length)
        assert [rank[i] for i in order] == list(range(len(order)))
        assert sorted(rank) == list(range(len(scores)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_a_chain_fills_what_the_policy_would_and_something_in_every_step(quotas: list[int]) -> None:
    lengths = chain_lengths(torch.tensor([quotas]))[0].tolist()
    assert lengths == [sum(max(1, quota) for quota in quotas[: k + 1]) for k in range(len(quotas))]


class Block:
    """A root with predictions: its positions, the tokens they would get, and the policy's order of them."""

    def __init__(self, masked: list[bool], order: list[int], probabilities: list[list[float]]):
        self.masked, self.order = masked, order
        self.root = [MASK if m else i for i, m in enumerate(masked)]
        self.probabilities = probabilities  # [W, J], of tokens 10 * position + vocab rank

    @property
    def tokens(self) -> list[list[int]]:
        return [[10 * i + j for j in range(len(p))] for i, p in enumerate(self.probabilities)]

    @property
    def rank(self) -> list[int]:
        rest = [i for i in range(len(self.masked)) if i not in self.order]
        return [(self.order + rest).index(i) for i in range(len(self.masked))]

    def filled(self, tokens: dict[int, int]) -> list[int]:
        return [tokens.get(i, token) for i, token in enumerate(self.root)]


@st.composite
def blocks(draw: st.DrawFn, vocab_ranks: int = 3) -> Block:
    width = draw(st.integers(1, 8))
    masked = draw(st.lists(st.booleans(), min_size=width, max_size=width))
    order = draw(st.permutations([i for i, m in enumerate(masked) if m]))
    probability = st.floats(0.01, 0.99)
    rows = draw(st.lists(st.lists(probability, min_size=vocab_ranks, max_size=vocab_ranks), min_size=8, max_size=8))
    return Block(masked, list(order), rows[:width])


def stacked(found: list[Block]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Root, masked, rank, tokens and log-probabilities."""
    return (
        torch.tensor([b.root for b in found]),
        torch.tensor([b.masked for b in found]),
        torch.tensor([b.rank for b in found]),
        torch.tensor([b.tokens for b in found]),
        torch.tensor([b.probabilities for b in found]).log(),
    )


def listed(drafts: Drafts, row: int) -> list[list[int]]:
    """The present drafts of a request."""
    count = int(drafts.present[row].sum())
    assert drafts.present[row].tolist() == [True] * count + [False] * (drafts.present.shape[1] - count)
    return drafts.tokens[row, :count].tolist()


@given(blocks(), st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_drafts_of_a_chain_fill_ever_more_of_the_order_and_leave_a_mask(block: Block, quotas: list[int]) -> None:
    root, masked, rank, tokens, _ = stacked([block])
    lengths = chain_lengths(torch.tensor([quotas]))
    drafts = chain_drafts(root, masked, rank, tokens[:, :, 0], lengths)
    expected = [block.filled({i: 10 * i for i in block.order[:n]}) for n in lengths[0].tolist() if n < len(block.order)]
    assert listed(drafts, 0) == expected
    assert drafts.levels.tolist() == [list(range(1, len(quotas) + 1))]
    for earlier, later in itertools.pairwise(expected):
        assert all(a in (MASK, b) for a, b in zip(earlier, later, strict=True))
        assert MASK in later


def geometric_mean(values: list[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def best_nodes(block: Block, graph: DraftGraph, count: int) -> list[tuple[float, Node]]:
    """Spiffy (arXiv 2509.18085), eq. 12-14, to the letter, over the nodes that can be drafted."""
    room = len(block.order)
    nodes = [node for node in graph.nodes if len(node) < room and max(i for i, _ in node) <= room]

    def local(node: Node) -> float:
        return geometric_mean([block.probabilities[block.order[i - 1]][j - 1] for i, j in node])

    def score(node: Node) -> float:
        children = [other for other in nodes if node < other]
        return geometric_mean([local(node), geometric_mean([local(c) for c in children])]) if children else local(node)

    return sorted(((score(node), node) for node in nodes), key=lambda pair: -pair[0])[:count]


def graph_tensors(graph: DraftGraph) -> GraphTensors:
    return GraphTensors(graph.membership(), graph.child_matrix())


nodes = st.dictionaries(st.integers(1, 6), st.integers(1, 3), min_size=1, max_size=4).map(
    lambda n: frozenset(n.items())
)
graphs = st.lists(nodes, min_size=1, max_size=9, unique=True).map(lambda found: DraftGraph(nodes=tuple(found)))


@given(blocks(), graphs, st.integers(1, 12), st.lists(st.integers(1, 3), min_size=8, max_size=8))
@examples(300)
def test_the_best_nodes_of_a_graph_are_drafted(block: Block, graph: DraftGraph, count: int, quotas: list[int]) -> None:
    lengths = chain_lengths(torch.tensor([quotas]))
    drafts = graph_drafts(*stacked([block]), lengths, graph_tensors(graph), count)
    expected = best_nodes(block, graph, count)
    every = {node: score for score, node in best_nodes(block, graph, len(graph.nodes))}
    by_canvas = {
        tuple(block.filled({block.order[i - 1]: 10 * block.order[i - 1] + j - 1 for i, j in node})): node
        for node in every
    }
    got = [by_canvas[tuple(canvas)] for canvas in listed(drafts, 0)]
    assert drafts.tokens.shape[1] == drafts.levels.shape[1] == count
    assert len(set(got)) == len(got) == len(expected)
    # Nodes whose scores differ by rounding alone may change places.
    assert [every[node] for node in got] == pytest.approx([score for score, _ in expected], rel=1e-4)
    steps = [next(k for k in range(1, 9) if sum(quotas[:k]) >= len(node)) for node in got]
    assert drafts.levels[0, : len(got)].tolist() == steps


@given(st.lists(blocks(), min_size=2, max_size=5), graphs, st.integers(1, 4))
def test_requests_of_a_batch_draft_as_each_alone(found: list[Block], graph: DraftGraph, count: int) -> None:
    width = min(len(b.masked) for b in found)
    found = [Block(b.masked[:width], [i for i in b.order if i < width], b.probabilities[:width]) for b in found]
    lengths = chain_lengths(torch.ones(1, 8, dtype=torch.int64))
    together = graph_drafts(*stacked(found), lengths.expand(len(found), -1), graph_tensors(graph), count)
    for row, block in enumerate(found):
        alone = graph_drafts(*stacked([block]), lengths, graph_tensors(graph), count)
        assert listed(together, row) == listed(alone, 0)


def test_a_token_that_cannot_be_does_not_spoil_the_scores_of_the_others() -> None:
    graph = DraftGraph(nodes=(frozenset({(1, 2)}), frozenset({(1, 1)}), frozenset({(1, 1), (2, 2)})))
    block = Block([True] * 4, [2, 0, 1, 3], [[0.9, 0.0]] * 4)
    drafts = graph_drafts(*stacked([block]), torch.arange(1, 5).unsqueeze(0), graph_tensors(graph), 3)
    assert listed(drafts, 0)[0] == [MASK, MASK, 20, MASK]
