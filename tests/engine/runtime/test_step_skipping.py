"""Step-skipping with verification in the engine: what the official code, the reference and the theory say it does."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import (
    MASK,
    Forward,
    bundled,
    drafting_engine,
    engine_of,
    generate,
    golden,
    greedy,
    nfe_of,
    recorded,
    reference_model,
    tokens_of,
)
from tests.reference.decode import Options, StepSkipping, decode
from tests.reference.drafts import PSD, FreeDave, Node, Spiffy
from tests.reference.golden import FreeDaveCase, load_freedave
from vllm_dllm import request_stats
from vllm_dllm.decoding.draft_graph import DraftGraph, default_graph

# The official FreeDave.


def golden_freedave(*, eager: bool) -> list[list[FreeDaveCase]]:
    """The official runs, by block length."""
    try:
        cases = load_freedave()
    except FileNotFoundError:
        return []
    by_length = defaultdict(list)
    for case in cases:
        if case.eager == eager:
            by_length[case.options.block_length].append(case)
    return [by_length[length] for length in sorted(by_length)]


def block_length_of(cases: list[FreeDaveCase]) -> str:
    return f"block{cases[0].options.block_length}"


def official_verifications(case: FreeDaveCase, forwards: list[Forward]) -> list[tuple[int, int]]:
    """Drafts and the accepted one, in our count, for each forward with drafts.

    The official draft 0 is our block as it stands. Its last draft may leave no mask: ours leave one, which the step
    from the accepted draft then fills, so that its acceptance is that of the draft before it here.
    """
    most = [forward.masked - 1 for forward in forwards]
    return [
        (min(drafts - 1, limit), min(accepted, limit))
        for (drafts, accepted), limit in zip(case.verifications, most, strict=True)
    ]


def begins_a_block(forwards: list[Forward], index: int) -> bool:
    return index == 0 or forwards[index].masked >= forwards[index - 1].masked


@pytest.mark.parametrize("cases", golden_freedave(eager=False), ids=block_length_of)
def test_freedave_gives_the_official_tokens_forwards_and_accepted_drafts(cases: list[FreeDaveCase]) -> None:
    llm = drafting_engine(golden("sdar"), cases[0].options)
    params = [greedy(c.options, FreeDave(c.draft_steps, c.match), max_tokens=c.max_new_tokens) for c in cases]
    with recorded(llm) as forwards:
        outputs = generate(llm, [c.prompt for c in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        assert tokens_of(output) == case.tokens, case.name
        assert nfe_of(output) == case.nfe, case.name
        seen = forwards[output.request_id]
        verifying = [forward for index, forward in enumerate(seen) if not begins_a_block(seen, index)]
        ours = [(forward.drafts, forward.accepted) for forward in verifying]
        assert ours == official_verifications(case, verifying), case.name


@pytest.mark.parametrize("cases", golden_freedave(eager=True), ids=block_length_of)
def test_eager_freedave_gives_the_official_tokens(cases: list[FreeDaveCase]) -> None:
    """The forwards differ: ours leave a block in the forward that finishes it, wherever its drafts end.

    The subset rule is refused here: its tokens depend on which drafts were tried.
    """
    cases = [c for c in cases if c.match == "exact"]
    llm = drafting_engine(golden("sdar"), cases[0].options, dllm={"eager": True})
    params = [greedy(c.options, FreeDave(c.draft_steps, c.match), max_tokens=c.max_new_tokens) for c in cases]
    outputs = generate(llm, [c.prompt for c in cases], params)
    assert [c.name for c, o in zip(cases, outputs, strict=True) if tokens_of(o) != c.tokens] == []


# The plain reference.

FAMILIES = {
    "sdar": Options(block_length=8, mask_id=MASK),
    "llada2_moe": Options(block_length=16, mask_id=MASK),
    "fast_dllm_v2": Options(block_length=8, mask_id=MASK, sub_block_length=4, shifted=True),
}
POLICIES: dict[str, dict[str, object]] = {
    "static": {"policy": "static"},
    "static, 2 a step": {"policy": "static", "tokens_per_step": 2},
    "static, 3 a step": {"policy": "static", "tokens_per_step": 3},
    "static, uneven steps": {"policy": "static", "denoising_steps": 5},
    "sequential": {"policy": "sequential"},
    "threshold": {"threshold": 0.5},
    "threshold, 2 a step": {"threshold": 0.6, "tokens_per_step": 2},
    "threshold, uneven steps": {"threshold": 0.7, "denoising_steps": 5},
    "entropy": {"policy": "entropy", "entropy_bound": 2.0},
    "localleap": {"policy": "localleap", "threshold": 0.6, "relaxed_threshold": 0.3, "radius": 2},
}
EDITING = {"threshold, editing": {"threshold": 0.4, "edit_threshold": 0.5, "max_post_edit_steps": 4}}
GRAPH: list[Node] = [
    [(1, 1)],
    [(1, 2)],
    [(2, 1)],
    [(1, 1), (2, 1)],
    [(1, 1), (2, 2)],
    [(1, 2), (2, 1)],
    [(2, 1), (3, 1)],
    [(1, 1), (2, 1), (3, 1)],
    [(1, 1), (2, 1), (3, 2)],
    [(1, 1), (2, 1), (3, 1), (4, 1)],
    [(1, 1), (2, 1), (3, 1), (5, 1)],
]
"""With alternatives to the best token, and more nodes than are drafted."""
FAMILY_NAMES = {"sdar": "SDAR", "llada2_moe": "LLaDA2", "fast_dllm_v2": "Fast-dLLM v2"}


@pytest.fixture(scope="session")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    DraftGraph(nodes=tuple(frozenset(node) for node in GRAPH)).save(path)
    return path


def assert_as_the_reference(family: str, runs: list[tuple[str, Options, StepSkipping]], **dllm: object) -> None:
    """Tokens, forwards, drafts and acceptance of every run, all of them in one batch, half of them ending early.

    Where a threshold rides on uneven steps, the engine lets exact match follow drafts step by step only, since it
    works out all next states at once, each with the quota of the step that it was drafted for. The reference asks for
    one after the other, so it may skip more.
    """
    options = FAMILIES[family]
    # Asynchronous scheduling, as on a GPU, has a forward more recorded when a text has ended.
    llm = drafting_engine(family, options, dllm=dllm, async_scheduling=False)
    by_length = {len(case.prompt): case.prompt for case in bundled(family).cases}
    prompts = [by_length[length] for length in sorted(by_length) if length < 40]
    prompts = [prompts[index % len(prompts)] for index in range(len(runs))]
    most = [40 - index % 7 for index in range(len(runs))]
    runs = [
        (name, replace(o, eos_early_stop=index % 2 == 1), skipping) for index, (name, o, skipping) in enumerate(runs)
    ]
    params = [greedy(o, skipping, max_tokens=limit) for limit, (_, o, skipping) in zip(most, runs, strict=True)]
    with recorded(llm) as forwards:
        outputs = generate(llm, prompts, params)
    failures, accepted = {}, 0
    for (name, o, skipping), prompt, limit, output in zip(runs, prompts, most, outputs, strict=True):
        expected = decode(reference_model(family), prompt, limit, o, skipping)
        stats = request_stats(output)
        hops = sum(round_.hops for round_ in expected.rounds)
        rounds = [Forward(round_.masked, round_.drafts, round_.accepted) for round_ in expected.rounds]
        equal = {
            "tokens": tokens_of(output) == expected.tokens,
            "forwards": stats.nfe == expected.nfe,
            "drafts": forwards[output.request_id] == rounds,
            "steps skipped": stats.accepted == hops,
        }
        if "uneven" in name and o.policy == "threshold" and not isinstance(skipping, PSD):
            plain = decode(reference_model(family), prompt, limit, o)
            equal = {"tokens": equal["tokens"], "forwards": expected.nfe <= stats.nfe <= plain.nfe}
        different = [what for what, same in equal.items() if not same]
        if different:
            failures[name] = different
        accepted += hops
    assert not failures
    assert accepted, "no draft was ever accepted"


def runs_of(family: str, skippings: dict[str, StepSkipping]) -> list[tuple[str, Options, StepSkipping]]:
    policies = POLICIES if family != "llada2_moe" else POLICIES | EDITING
    return [
        (f"{name}, {policy}", replace(FAMILIES[family], **policies[policy]), skipping)
        for name, skipping in skippings.items()
        for policy in policies
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_and_the_graph_that_ships_decode_as_the_reference(family: str) -> None:
    graph = [sorted(node) for node in default_graph(FAMILY_NAMES[family]).nodes]
    skippings: dict[str, StepSkipping] = {
        "freedave": FreeDave(4),
        "freedave, long": FreeDave(8),
        "freedave, subset": FreeDave(5, "subset"),
        "spiffy": Spiffy(graph, 3),
        "psd": PSD(3),
    }
    assert_as_the_reference(family, runs_of(family, skippings))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_of_ones_own_decodes_as_the_reference(family: str, graph_file: Path) -> None:
    skippings: dict[str, StepSkipping] = {
        "spiffy, pruned": Spiffy(GRAPH, 4),
        "spiffy": Spiffy(GRAPH, 7),
        "psd": PSD(5, GRAPH),
    }
    assert_as_the_reference(family, runs_of(family, skippings), draft_graph=str(graph_file))


def test_spiffy_has_all_the_drafts_it_asks_for_however_short_the_block() -> None:
    """A chain on a block of 4 has two drafts at most; a graph has alternatives."""
    options = Options(block_length=4, mask_id=MASK, policy="static")
    graph = [sorted(node) for node in default_graph("SDAR").nodes]
    prompt = bundled("sdar").cases[0].prompt
    llm = drafting_engine("sdar", options, async_scheduling=False)
    expected = decode(reference_model("sdar"), prompt, 32, options, Spiffy(graph, 3))
    with recorded(llm) as forwards:
        output = generate(llm, [prompt], greedy(options, Spiffy(graph, 3), max_tokens=32))[0]
    assert max(forward.drafts for forward in forwards[output.request_id]) == 3
    assert tokens_of(output) == expected.tokens
    assert [f.accepted for f in forwards[output.request_id]] == [round_.accepted for round_ in expected.rounds]


def test_more_drafts_than_a_graph_has_nodes_are_those_of_the_graph() -> None:
    options = Options(block_length=32, mask_id=MASK, policy="static")
    graph = [sorted(node) for node in default_graph("SDAR").nodes]
    prompt = bundled("sdar").cases[0].prompt
    llm = drafting_engine("sdar", options, dllm={"max_drafts": len(graph) + 4}, async_scheduling=False)
    expected = decode(reference_model("sdar"), prompt, 32, options, Spiffy(graph, len(graph) + 4))
    with recorded(llm) as forwards:
        output = generate(llm, [prompt], greedy(options, Spiffy(graph, len(graph) + 4), max_tokens=32))[0]
    assert max(forward.drafts for forward in forwards[output.request_id]) == len(graph)
    assert tokens_of(output) == expected.tokens
    assert [f.accepted for f in forwards[output.request_id]] == [round_.accepted for round_ in expected.rounds]


# What is refused.

BLOCK8 = Options(block_length=8, mask_id=MASK)
PROMPT = [354, 206, 479, 4]


@pytest.mark.parametrize("verify", ["freedave", "spiffy", "psd"])
def test_an_engine_without_room_for_drafts_refuses_verifiers_and_says_what_to_do(verify: str) -> None:
    llm = engine_of("sdar", BLOCK8)
    with pytest.raises(VLLMValidationError, match=f"verify='{verify}' is not allowed.*with a larger max_drafts"):
        generate(llm, [PROMPT], greedy(max_tokens=9, extra_args={"dllm_verify": verify}))


def test_no_drafts_need_no_room_and_are_the_policy_alone() -> None:
    llm = engine_of("sdar", BLOCK8)
    plain = generate(llm, [PROMPT], greedy(BLOCK8, max_tokens=30))[0]
    for skipping in (FreeDave(1), Spiffy([], 0), PSD(0)):
        output = generate(llm, [PROMPT], greedy(BLOCK8, skipping, max_tokens=30))[0]
        assert (tokens_of(output), nfe_of(output)) == (tokens_of(plain), nfe_of(plain))
        assert request_stats(output).drafted == 0


def test_an_engine_whose_own_verifier_drafts_nothing_takes_requests() -> None:
    llm = engine_of("sdar", BLOCK8, dllm={"verify": "freedave", "drafts": 1})
    assert len(tokens_of(generate(llm, [PROMPT], greedy(max_tokens=9))[0])) == 9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dllm_verify": "freedave", "dllm_drafts": 6}, "drafts=6 is not allowed: this engine has room for 5"),
        ({"dllm_verify": "spiffy", "dllm_drafts": 5}, "drafts=5 is not allowed: this engine has room for 4"),
        ({"dllm_verify": "psd", "dllm_drafts": 5}, "drafts=5 is not allowed: this engine has room for 4"),
        ({"dllm_verify": "psd", "dllm_drafts": "auto"}, "drafts='auto' is not allowed with verify='psd'"),
        (
            {"dllm_verify": "freedave", "dllm_match": "subset", "dllm_drafts": "auto"},
            "drafts='auto' is not allowed with .*match='subset'",
        ),
        ({"dllm_verify": "medusa"}, "dllm_verify='medusa' is not allowed.*'freedave'"),
    ],
)
def test_drafts_that_cannot_be_are_refused(args: dict[str, Any], message: str) -> None:
    llm = drafting_engine("sdar", BLOCK8, dllm={"max_drafts": 4})
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [PROMPT], greedy(max_tokens=9, extra_args=args))


@pytest.mark.parametrize(
    "args",
    [{"dllm_edit_threshold": 0.5}, {"dllm_denoising_steps": 3}, {"dllm_verify": "psd"}, {"dllm_match": "subset"}],
)
def test_what_is_about_a_block_at_a_time_is_refused_where_drafts_reach_further(args: dict[str, Any]) -> None:
    llm = drafting_engine("llada2_moe", BLOCK8, dllm={"eager": True})
    with pytest.raises(
        VLLMValidationError, match=f"{next(iter(args))[5:]}.* is not allowed with the engine option eager"
    ):
        generate(llm, [PROMPT], greedy(max_tokens=9, extra_args={"dllm_verify": "freedave", **args}))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"block_length": 16}, "is for block length 16, and this model has block length 8; calibrate one"),
        ({"family": "LLaDA2"}, "is for family LLaDA2, and this model has family SDAR; calibrate one"),
        (
            {"fingerprint": "ab" * 32, "model": "other/model"},
            r"made for other/model\), and this model has architecture",
        ),
    ],
)
def test_a_graph_of_another_model_is_refused_at_start(graph: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    DraftGraph(nodes=(frozenset({(1, 1)}),), **graph).save(path)
    with pytest.raises(ValueError, match=message):
        drafting_engine("sdar", BLOCK8, dllm={"draft_graph": str(path)})


def test_drafts_into_later_blocks_are_refused_for_shifted_families() -> None:
    with pytest.raises(
        ValueError, match="eager=True is not allowed: the first token of a block of Fast-dLLM v2 models"
    ):
        drafting_engine("fast_dllm_v2", BLOCK8, dllm={"eager": True})
