"""The reference does what the official implementations do."""

import pytest
import torch

from .decode import Commit, Decoded, decode
from .golden import FAMILIES, Case, Golden, golden_folder, load
from .model import ReferenceModel, block_causal

pytestmark = pytest.mark.skipif(
    not golden_folder().is_dir(), reason=f"no golden data at {golden_folder()}; set VLLM_DLLM_GOLDEN"
)


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load(request.param)


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
