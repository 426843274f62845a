"""The reference does what NVIDIA's implementation of Nemotron-Labs-Diffusion does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.reference.decode import decode
from tests.reference.golden import golden_or_skip
from tests.reference.linear_spec import decode_speculatively, greedy_text
from tests.reference.model import ReferenceModel, causal_context
from tests.reference.nemotron import NemotronGolden, load_nemotron
from tests.reference.test_reference_matches_golden import _before, differences


@pytest.fixture(scope="module")
def golden() -> NemotronGolden:
    return golden_or_skip(load_nemotron)


@pytest.fixture(scope="module")
def model(golden: NemotronGolden) -> ReferenceModel:
    return ReferenceModel(golden.checkpoint)


def test_logits_equal_the_official_ones(golden: NemotronGolden, model: ReferenceModel) -> None:
    for case in golden.logits:
        start = len(case.prompt)
        denoised, final = (torch.cat((case.prompt, block)) for block in (case.block, case.final_block))
        visible, causal = causal_context(len(final), start), causal_context(len(final), len(final))
        for got, expected in (
            (model(denoised, visible)[:start], case.prefill),
            (model(denoised, visible)[start:], case.denoise),
            (model.adapted(start)(denoised, visible)[start:], case.adapted),
            (model(final, causal)[start:], case.commit),
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_decoding_equals_the_official_sampler(golden: NemotronGolden, model: ReferenceModel) -> None:
    failures = []
    for case in [*golden.cases, *golden.thinking]:
        if case.canvas is None:
            end = len(case.prompt) + len(case.tokens)
            case = replace(case, steps=[_before(step, end) for step in case.steps])
        if case.options.commit_predicts and case.tokens[0] in case.options.stop_ids:
            # NVIDIA's code and the engine denoise once, though the prompt's logits have ended the text.
            case = replace(case, nfe=0, steps=[])
        different = differences(case, decode(model, case.prompt, case.max_new_tokens, case.options))
        if different:
            failures.append(f"{case.name}: {', '.join(different)}")
    assert not failures, f"{len(failures)} of {len(golden.cases)} cases differ:\n" + "\n".join(failures)


def test_speculation_equals_the_official_one_and_writes_the_autoregressive_text(
    golden: NemotronGolden, model: ReferenceModel
) -> None:
    for case in golden.speculative:
        got = decode_speculatively(
            model,
            model.adapted if case.lora else lambda _, model=model: model,
            case.prompt,
            case.max_new_tokens,
            block_length=case.block_length,
            mask_id=100,
            threshold=case.threshold,
            stop_ids=case.stop_ids,
        )
        assert got.tokens == case.tokens, case.name
        assert (got.nfe, got.drafts) == (case.nfe, case.drafts), case.name
        assert got.tokens == greedy_text(model, case.prompt, case.max_new_tokens, 100, case.stop_ids), case.name
    for prompt, tokens in golden.autoregressive:
        assert greedy_text(model, prompt, len(tokens), 100, frozenset()) == tokens


def test_a_budget_of_reasoning_is_kept_where_nvidia_writes_its_end_to_the_cache_alone(
    golden: NemotronGolden, model: ReferenceModel
) -> None:
    """NVIDIA's LinearSpec puts the end in the place of a token that it has output, in every round from there on."""
    for case in golden.speculative_thinking:
        thinking = case.thinking
        assert thinking is not None
        asked: dict[str, Any] = {"stop_ids": case.stop_ids, "thinking": thinking}
        got = decode_speculatively(
            model,
            lambda _: model,
            case.prompt,
            case.max_new_tokens,
            block_length=case.block_length,
            mask_id=100,
            threshold=case.threshold,
            **asked,
        )
        text = greedy_text(model, case.prompt, case.max_new_tokens, 100, **asked)
        assert got.tokens == text
        rounds = next(n for n, draft in enumerate(case.drafts) if draft[:1] == [*thinking.forced])
        assert sum(case.accepted[:rounds]) == thinking.budget
        # The round that begins with the end is the first that differs in what it outputs, by that token.
        assert got.drafts[: rounds + 1] == case.drafts[: rounds + 1]
        end = 1 + sum(case.accepted[: rounds + 1])
        expected = case.tokens[:end]
        expected[thinking.budget] = thinking.forced[0]
        assert text[:end] == expected
        assert thinking.forced[0] not in case.tokens
