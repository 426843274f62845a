"""Draft graphs: what a valid one is, its file, its tensors, and which model it fits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.decoding import draft_graph
from vllm_dllm.decoding.draft_graph import DraftGraph, default_graph, fingerprint, load_graph

FAMILIES = draft_graph._SHIPPED_FOR


def node(*pairs: tuple[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset(pairs)


A, B, AB, AC2 = node((1, 1)), node((2, 1)), node((1, 1), (2, 1)), node((1, 1), (3, 2))

nodes = st.dictionaries(st.integers(1, 64), st.integers(1, 8), min_size=1, max_size=6).map(
    lambda ranks: frozenset(ranks.items())
)
graphs = st.lists(nodes, min_size=1, max_size=64, unique=True).map(lambda found: DraftGraph(nodes=tuple(found)))


@given(graphs)
def test_membership_holds_the_nodes(graph: DraftGraph) -> None:
    membership = graph.membership()
    assert membership.dtype == torch.int64
    assert membership[:, -1].any()
    for found, row in zip(graph.nodes, membership.tolist(), strict=True):
        assert found == {(rank, vocab) for rank, vocab in enumerate(row, 1) if vocab}


@given(graphs)
def test_an_edge_leads_to_every_proper_superset(graph: DraftGraph) -> None:
    matrix = graph.child_matrix()
    for p, parent in enumerate(graph.nodes):
        children = {graph.nodes[q] for q in matrix[p].nonzero().flatten().tolist()}
        assert children == {node for node in graph.nodes if parent < node}


def test_a_child_may_have_several_parents() -> None:
    graph = DraftGraph(nodes=(A, B, AB, AC2))
    assert graph.child_matrix().int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0] * 4, [0] * 4]


def test_a_graph_survives_its_file(tmp_path: Path) -> None:
    graph = DraftGraph(
        nodes=(A, AB, AC2),
        counts=(5, 3, 0),
        model="some/model-b16",
        fingerprint="ab" * 32,
        family="SDAR",
        block_length=16,
        policy={"policy": "threshold", "threshold": 0.9, "tokens_per_step": 1},
        data="prompts.jsonl",
        prompts=7,
        steps=40,
        lookahead=5,
        note="„Grüße“",
    )
    graph.save(tmp_path / "graph.json")
    assert DraftGraph.load(tmp_path / "graph.json") == graph
    assert json.loads((tmp_path / "graph.json").read_text())["nodes"] == [
        [[1, 1]],
        [[1, 1], [2, 1]],
        [[1, 1], [3, 2]],
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": [[[1, 1]]], "drafts": 3}, "unknown key 'drafts'; allowed: version, nodes"),
        ({"nodes": [[[1, 1]]], "version": 2}, "version=2: Input should be 1"),
        ({}, "nodes: Field required"),
        ({"nodes": []}, "nodes: Tuple should have at least 1 item"),
        ({"nodes": [[[k, 1]] for k in range(1, 65)] + [[[1, 2]]]}, "nodes: Tuple should have at most 64 items"),
        ({"nodes": [[[1, 1]], []]}, "node 2 is empty"),
        ({"nodes": [[[1, 1], [0, 1]]]}, r"nodes\[0\]\[1\]\[0\]=0: Input should be greater than or equal to 1"),
        ({"nodes": [[[1, 0]]]}, r"nodes\[0\]\[0\]\[1\]=0: Input should be greater than or equal to 1"),
        ({"nodes": [[[65, 1]]]}, "=65: Input should be less than or equal to 64"),
        ({"nodes": [[[1, 9]]]}, "=9: Input should be less than or equal to 8"),
        ({"nodes": [[[1, 1.0]]]}, "=1.0: Input should be a valid integer"),
        ({"nodes": [[[1, 1], [2, 1], [1, 2]]]}, r"node 1, \(1,1\) \(1,2\) \(2,1\), gives a position two tokens"),
        ({"nodes": [[[1, 1], [2, 1]], [[2, 1], [1, 1]]]}, r"node 2, \(1,1\) \(2,1\), is the same as node 1"),
        ({"nodes": [[[1, 1]]], "counts": [1, 2]}, "2 counts do not fit 1 nodes"),
    ],
)
def test_an_invalid_file_is_refused_with_what_is_wrong_with_it(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"draft graph .*graph.json: .*{message}"):
        DraftGraph.load(path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), (b"{", "graph.json: Invalid JSON"), (b"\xff", "decode")]
)
def test_a_file_that_is_missing_or_no_json_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_graph(str(path), family="SDAR", block_length=4, fingerprint="")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_graph_that_fits_any_of_its_models(family: str) -> None:
    graph = load_graph(family, family=family, block_length=64, fingerprint="any")
    assert graph == default_graph(family)
    assert len(graph.nodes) == 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_that_ships_has_counts_or_says_that_it_is_not_calibrated(family: str) -> None:
    graph = default_graph(family)
    assert (graph.counts is None) == ("Not calibrated" in str(graph.note))
    assert (graph.counts is None) == (graph.policy is None) == (graph.data is None)


def test_one_graph_ships_per_calibration() -> None:
    assert list(draft_graph._SHIPPED.parent.glob("*.json")) == [draft_graph._SHIPPED]
    assert DraftGraph.load(draft_graph._SHIPPED).counts is not None


def test_a_family_without_a_graph_is_told_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"no draft graph ships for 'Mercury'; there are some for .*LLaDA2"):
        default_graph("Mercury")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"family": "LLaDA2"}, "is for family SDAR .*made for some/model.*this model has family LLaDA2"),
        ({"block_length": 16}, "is for block length 32 .*this model has block length 16"),
        ({"fingerprint": "cc"}, "is for architecture aa .*this model has architecture cc"),
    ],
)
def test_a_graph_of_another_model_is_refused_naming_both(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    fits: dict[str, Any] = {"family": "SDAR", "block_length": 32, "fingerprint": "aa"}
    graph = DraftGraph(nodes=(A,), model="some/model", **fits)
    graph.save(path)
    assert load_graph(str(path), **fits) == graph
    with pytest.raises(ValueError, match=message):
        load_graph(str(path), **{**fits, **model})


def test_the_graph_of_one_family_is_refused_for_another() -> None:
    with pytest.raises(ValueError, match=r"draft graph LLaDA2 is for family LLaDA2, and this model has family SDAR"):
        load_graph("LLaDA2", family="SDAR", block_length=4, fingerprint="")


def _config(**changes: Any) -> SimpleNamespace:
    facts = {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 5120,
        "mask_token_id": 4,
    }
    return SimpleNamespace(**{**facts, **changes})


def test_a_fingerprint_does_not_depend_on_where_the_checkpoint_lies_or_on_the_block_length() -> None:
    assert fingerprint(_config(name_or_path="/a/model", block_length=4)) == fingerprint(
        _config(name_or_path="hub/model-b32", dtype="bfloat16")
    )


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 128},
        {"num_hidden_layers": 5},
        {"num_attention_heads": 2},
        {"vocab_size": 9},
        {"mask_token_id": 3},
        {"intermediate_size": 7},
        {"architectures": ["SDARMoeForCausalLM"]},
    ],
)
def test_a_fingerprint_tells_architectures_apart(change: dict[str, Any]) -> None:
    assert fingerprint(_config(**change)) != fingerprint(_config())


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert fingerprint(SimpleNamespace(model_type="sdar", hidden_size=256)) == (
        "cb9a01ee021d34a945f935406076fcb683ee128372e485fcfd3b5a661dc16292"
    )
