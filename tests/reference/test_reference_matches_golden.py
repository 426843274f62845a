"""The reference does what the official implementations do."""

import pytest
import torch

from tests.paths import BUNDLED, GOLDEN
from tests.reference.decode import Commit, Decoded, decode
from tests.reference.drafts import FreeDave, decode_eagerly
from tests.reference.golden import FAMILIES, Case, FreeDaveCase, Golden, golden_or_skip, load, load_freedave
from tests.reference.model import ReferenceModel, block_causal


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return golden_or_skip(load, request.param)


@pytest.fixture(scope="module")
def model(golden: Golden) -> ReferenceModel:
    return ReferenceModel(golden.checkpoint)


def test_logits_equal_the_official_ones(golden: Golden, model: ReferenceModel) -> None:
    for ids, block_length, logits in golden.logits:
        got = model(ids, block_causal(len(ids), block_length))
        torch.testing.assert_close(got, logits.reshape(got.shape), rtol=0, atol=1e-4)


def differences(case: Case, got: Decoded) -> list[str]:
    """Names of what differs from the official run."""
    steps = got.steps
    if case.canvas is None:
        # The official run does not list what it wrote behind the stop token.
        steps = [_before(step, len(case.prompt) + len(case.tokens)) for step in steps]
    equal = {
        "tokens": got.tokens == case.tokens,
        "canvas": case.canvas is None or got.canvas == case.canvas,
        "nfe": got.nfe == case.nfe,
        "steps": steps == case.steps,
        "carried": got.carried == case.carried,
    }
    return [name for name, same in equal.items() if not same]


def _before(step: list[Commit], end: int) -> list[Commit]:
    return [(position, token) for position, token in step if position < end]


def test_decoding_equals_the_official_samplers(golden: Golden, model: ReferenceModel) -> None:
    failures = []
    for case in golden.cases:
        different = differences(case, decode(model, case.prompt, case.max_new_tokens, case.options))
        if different:
            failures.append(f"{case.name}: {', '.join(different)}")
    assert not failures, f"{len(failures)} of {len(golden.cases)} cases differ:\n" + "\n".join(failures)


@pytest.fixture(scope="module")
def freedave() -> list[tuple[FreeDaveCase, Decoded]]:
    """Every official run with drafts, and the reference's."""
    sdar = ReferenceModel(GOLDEN / "sdar" / "checkpoint")
    runs = []
    for case in golden_or_skip(load_freedave):
        decoder = decode_eagerly if case.eager else decode
        skipping = FreeDave(case.draft_steps, case.match)
        runs.append((case, decoder(sdar, case.prompt, case.max_new_tokens, case.options, skipping)))
    return runs


def test_freedave_gives_the_official_tokens_in_as_many_forwards(freedave: list[tuple[FreeDaveCase, Decoded]]) -> None:
    kinds = {(case.eager, case.match) for case, _ in freedave}
    assert kinds == {(False, "exact"), (True, "exact"), (True, "subset")} or GOLDEN != BUNDLED
    assert [case.name for case, got in freedave if got.canvas != case.canvas or got.tokens != case.tokens] == []
    assert [case.name for case, got in freedave if got.nfe != case.nfe] == []


def test_freedave_accepts_the_official_drafts(freedave: list[tuple[FreeDaveCase, Decoded]]) -> None:
    """The official draft 0 is the block as it stands in ours. Its last draft may leave no mask: ours leave one, which
    the step from the accepted draft then fills, so that its acceptance is that of the draft before it here."""
    failures = []
    for case, got in freedave:
        verifying = [(round_.drafts, round_.accepted) for round_ in got.rounds if round_.step > 0]
        most = [round_.masked - 1 for round_ in got.rounds if round_.step > 0]
        official = [
            (min(drafts - 1, limit), min(accepted, limit))
            for (drafts, accepted), limit in zip(case.verifications, most, strict=True)
        ]
        if verifying != official:
            failures.append(case.name)
    assert not failures


def test_freedave_with_exact_match_decodes_what_the_policy_does(
    freedave: list[tuple[FreeDaveCase, Decoded]],
) -> None:
    sdar = ReferenceModel(GOLDEN / "sdar" / "checkpoint")
    plain = {}
    for case, got in freedave:
        if case.match != "exact":
            continue
        key = (tuple(case.prompt), case.max_new_tokens, case.options)
        if key not in plain:
            plain[key] = decode(sdar, case.prompt, case.max_new_tokens, case.options)
        assert got.canvas == plain[key].canvas, case.name
        assert got.nfe <= plain[key].nfe, case.name
