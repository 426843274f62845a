"""``vllm-dllm calibrate``: prompts, the record of an engine's steps, refusals, and the whole of it."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests import warm
from vllm_dllm.commands import cli
from vllm_dllm.commands.calibrate import Recording, draw, show
from vllm_dllm.commands.engine import BUNDLED_MODEL
from vllm_dllm.commands.prompts import read_prompts
from vllm_dllm.decoding.calibration import Candidate, Step, trajectory
from vllm_dllm.decoding.draft_graph import MOST_VOCAB_RANK, DraftGraph, load_graph
from vllm_dllm.observe.recorder import Round

VLLM_DLLM = Path(sys.executable).with_name("vllm-dllm")
M = 511
"""The mask token."""


# Prompts.


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('One?\n\n  {"prompt": "two"}  \n')
    assert read_prompts(path) == ["One?", '{"prompt": "two"}']


def test_a_jsonl_file_has_prompts_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    path.write_text(json.dumps({"prompt": "Two?", "id": 3}) + "\n\n" + json.dumps({"messages": messages}))
    assert read_prompts(path) == ["Two?", messages]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("One?", "line 2: no JSON"),
        ('"One?"', "line 2: neither"),
        ('{"prompt": 3}', "line 2: neither"),
        ('{"messages": []}', "line 2: neither"),
        ('{"messages": [{"content": "One?"}]}', "line 2: neither"),
        ('{"messages": [{"role": "user", "content": 5}]}', "line 2: neither"),
        ('{"messages": [{"role": "user", "content": "One?"}, 7]}', "line 2: neither"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "line 2: neither"),
        ('{"question": "One?"}', "line 2: neither"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"prompts.jsonl, {message}"):
        read_prompts(path)


def test_messages_may_be_what_a_chat_has(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "One?"}, "Two?"]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": calls}]
    path.write_text(json.dumps({"messages": messages}))
    assert read_prompts(path) == [messages]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One?"}', encoding="utf-8-sig")
    assert read_prompts(path) == ["One?"]


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"prompts.txt is not UTF-8: .* position 3"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)


# Record.


def round_of(
    *requests: tuple[str, Sequence[int], Sequence[int], Sequence[float]],
    start: int = 0,
    first: int = 0,
    denoised: bool = True,
    top_tokens: Callable[[int], torch.Tensor] | None = None,
) -> Round:
    """A round of requests (id, block before, after, confidence); column c's best tokens are 10c, 10c + 1, ..."""
    num, width = len(requests), len(requests[0][1])
    ranks = torch.arange(MOST_VOCAB_RANK)
    tokens = (10 * torch.arange(width).unsqueeze(1) + ranks).expand(num, -1, -1)
    return Round(
        req_ids=[name for name, *_ in requests],
        block_start=torch.full((num,), start),
        first=torch.full((num,), first),
        denoised=torch.full((num,), denoised),
        branches=torch.tensor([[before] for _, before, _, _ in requests]),
        present=torch.ones(num, 1, dtype=torch.bool),
        reached=torch.ones(num, 1, dtype=torch.bool),
        accepted=torch.zeros(num, dtype=torch.int64),
        predicted=tokens[:, :, :1].transpose(1, 2),
        confidence=torch.tensor([[confidence] for *_, confidence in requests]),
        chosen=torch.tensor([[b != a for b, a in zip(before, after, strict=True)] for _, before, after, _ in requests]),
        tokens=torch.tensor([after for _, _, after, _ in requests]),
        top_tokens=top_tokens or (lambda k: tokens[:, :, :k]),
    )


def recording(**options: Any) -> Recording:
    return Recording(M, **{"left_to_right": False, "sub_block_length": None, **options})


def lookaheads(blocks: list[list[Step]]) -> list[Any]:
    return [[[sorted(node) for node in found] for found in trajectory(block, 5)] for block in blocks]


def test_tokens_are_ranked_by_the_logits_of_the_step_that_made_the_root() -> None:
    record = recording()
    record(round_of(("a", [M, M, M, M], [0, M, M, M], [0.9, 0.1, 0.4, 0.3])))
    record(round_of(("a", [0, M, M, M], [0, M, 21, M], [0.9, 0.8, 0.1, 0.2])))
    record(round_of(("a", [0, M, 21, M], [0, 10, 21, M], [0.9, 0.7, 0.1, 0.2])))
    record(round_of(("a", [0, 10, 21, M], [0, 10, 21, 30], [0.9, 0.7, 0.1, 0.2])))
    assert lookaheads(record.blocks) == [[[[(1, 2)], [(3, 1)]], [[(1, 1)]], []]]


def test_the_predicted_token_is_the_best_among_equals() -> None:
    record = recording()
    equals = torch.tensor([[[7, 0], [7, 10], [7, 20]]])
    record(round_of(("a", [M, M, M], [0, M, M], [0.9, 0.8, 0.7]), top_tokens=lambda k: equals))
    record(round_of(("a", [0, M, M], [0, 10, M], [0.9, 0.8, 0.7])))
    assert lookaheads(record.blocks) == [[[[(1, 1)]]]]


def test_every_block_of_every_request_is_a_trajectory_of_its_own() -> None:
    record = recording()
    more = [0.9, 0.8, 0.7]
    record(round_of(("a", [M, M, M], [0, M, M], more), ("b", [M, M, M], [M, 10, M], more)))
    record(round_of(("b", [M, 10, M], [0, 10, M], more), ("a", [0, M, M], [0, 10, 20], more)))
    record(round_of(("a", [M, M, M], [0, M, M], more), start=3))
    assert lookaheads(record.blocks) == [[[]], [[[(1, 1)]]], []]


def test_a_block_that_starts_again_after_preemption_is_another_trajectory() -> None:
    record = recording()
    more = [0.9, 0.8, 0.7]
    for _ in range(2):
        record(round_of(("a", [M, M, M], [0, M, M], more)))
        record(round_of(("a", [0, M, M], [0, 10, M], more)))
    assert lookaheads(record.blocks) == [[[[(1, 1)]]]] * 2


def test_a_forward_that_only_commits_is_no_step() -> None:
    record = recording()
    record(round_of(("a", [M, M, M], [0, M, M], [0.9, 0.8, 0.7]), denoised=False))
    assert record.blocks == []


def test_a_mask_token_of_the_prompt_takes_no_rank() -> None:
    record = recording()
    record(round_of(("a", [M, M, M, M], [M, M, M, 30], [0.9, 0.8, 0.7, 0.6]), first=1))
    record(round_of(("a", [M, M, M, 30], [M, M, 20, 30], [0.9, 0.8, 0.7, 0.6]), first=1))
    assert lookaheads(record.blocks) == [[[[(2, 1)]]]]


def test_an_edited_token_ends_the_lookahead() -> None:
    record = recording()
    record(round_of(("a", [M, M, M], [0, M, M], [0.9, 0.8, 0.7])))
    record(round_of(("a", [0, M, M], [1, 10, M], [0.9, 0.8, 0.7])))
    assert lookaheads(record.blocks) == [[[]]]


def test_positions_of_an_earlier_sub_block_rank_first() -> None:
    record = recording(sub_block_length=2)
    record(round_of(("a", [M, M, M, M], [0, M, M, M], [0.9, 0.1, 0.8, 0.7])))
    record(round_of(("a", [0, M, M, M], [0, 10, M, M], [0.9, 0.1, 0.8, 0.7])))
    assert lookaheads(record.blocks) == [[[[(1, 1)]]]]


def test_positions_of_a_sequential_policy_rank_from_left_to_right() -> None:
    record = recording(left_to_right=True)
    record(round_of(("a", [M, M, M, M], [0, M, M, M], [0.9, 0.1, 0.8, 0.7])))
    record(round_of(("a", [0, M, M, M], [0, 10, M, M], [0.9, 0.1, 0.8, 0.7])))
    assert lookaheads(record.blocks) == [[[[(1, 1)]]]]


# Show.


def test_the_table_says_how_many_forwards_the_graph_would_have_saved() -> None:
    one, two = frozenset({(1, 1)}), frozenset({(2, 1)})
    console = Console(width=120, record=True, file=StringIO())
    console.print(show([Candidate(one, 1, 3)], [((one, two), (one,), ()), ((one,),)]))
    text = console.export_text()
    assert re.search(r"\(1,1\) +│ +1 +│ +3 +│ +75\.0%", text)
    assert "Drafting all nodes: 5 instead of 6 denoising forwards (1.20x)" in " ".join(text.split())


@pytest.mark.parametrize(
    "graph",
    [
        DraftGraph(nodes=(frozenset({(1, 1)}),)),
        DraftGraph(nodes=(frozenset({(1, 1)}), frozenset({(1, 1), (3, 2)})), counts=(4, 0)),
    ],
    ids=["one node", "with counts"],
)
def test_a_picture_shows_every_node(graph: DraftGraph, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(graph, tmp_path / "graph.svg")
    text = " ".join(re.findall(r">([^<>]+)</text>", (tmp_path / "graph.svg").read_text()))
    assert "as it stands" in text
    assert text.count("(1,1)") == len(graph.nodes)


# Command.


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit status and output, without the boxes that Rich draws around messages, on one line."""
    result = CliRunner(env={"COLUMNS": "110"}).invoke(cli.app, ["calibrate", *arguments])
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--out'"),
        (["--out", "graph.json", "--model", "some/model"], "--prompts: is needed"),
        (["--out", "graph.json", "--policy", "entropy"], "--policy: 'entropy' cannot be calibrated for"),
        (["--out", "graph.json", "--policy", "static", "--threshold", "0.5"], "--threshold: policy 'static' has none"),
        (["--out", "no/such/graph.json"], "'--out': there is no folder"),
        (["--out", "graph.json", "--picture", "graph.pdf"], "'--picture': graph.pdf must end in .svg or .png"),
        (["--out", "graph.json", "--prompts", "absent.txt"], "--prompts"),
        (["--out", "graph.json", "--drafts", "65"], "--drafts"),
        (["--out", "graph.svg", "--picture", "./graph.svg"], "--picture: graph.svg is the file of --out"),
        (["--out", __file__, "--prompts", __file__], "is the file of --out"),
        (["--out", "graph.json", "--limit", "201"], "--limit: 201 is more than the 200 problems that there are"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_dllm.commands.calibrate.load_engine", lambda model: pytest.fail("the model was loaded"))
    status, output = invoke(*arguments)
    assert status == 2
    assert message in output


def test_without_matplotlib_a_picture_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_dllm.commands.calibrate.load_engine", lambda model: pytest.fail("the model was loaded"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, output = invoke("--out", "graph.json", "--picture", "graph.svg")
    assert status == 2
    assert "pip install 'vllm-dllm[bench]'" in output


def test_without_the_bundled_model_the_user_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm_dllm.commands.engine.BUNDLED_MODEL", tmp_path / "absent")
    status, output = invoke("--out", str(tmp_path / "graph.json"))
    assert status == 2
    assert "--model: there is no bundled model" in output


@pytest.mark.slow
@pytest.mark.skipif(not (BUNDLED_MODEL / "config.json").is_file(), reason="the bundled model is not there")
def test_the_bundled_model_gets_a_graph_that_fits_it_and_no_other(tmp_path: Path) -> None:
    out = tmp_path / "graph.json"
    command = [str(VLLM_DLLM), "calibrate", "--out", str(out), "--limit", "12", "--drafts", "6", "--max-tokens", "48"]
    result = warm.run(command, timeout=300)
    assert result.returncode == 0, result.stderr

    graph = DraftGraph.load(out)
    assert len(graph.nodes) == 6
    assert graph.counts is not None
    # The most confident position with its best token comes next more often than anything else.
    assert graph.nodes[graph.counts.index(max(graph.counts))] == {(1, 1)}
    assert (graph.model, graph.family, graph.block_length, graph.prompts) == ("tiny-sdar", "SDAR", 16, 12)
    assert graph.policy == {"policy": "threshold", "threshold": 0.9, "tokens_per_step": 1}
    assert f"Wrote {out}" in result.stdout.replace("\n", "")
    forwards = re.search(r"(\d+) instead of (\d+) denoising forwards", " ".join(result.stdout.split()))
    assert forwards is not None
    assert int(forwards[1]) < int(forwards[2])

    assert graph.fingerprint is not None
    assert load_graph(str(out), family="SDAR", block_length=16, fingerprint=graph.fingerprint) == graph
    with pytest.raises(ValueError, match="block length 16"):
        load_graph(str(out), family="SDAR", block_length=4, fingerprint=graph.fingerprint)
