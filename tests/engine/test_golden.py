"""The engine against the official implementations' outputs, all cases of a configuration in one batch."""

import itertools

import pytest
import torch
from reference.golden import Case, load
from reference.model import block_causal

from engine.harness import (
    case_params,
    engine_of,
    generate,
    golden,
    greedy,
    nfe_of,
    reference_model,
    runner_of,
    tokens_of,
)


def _fixed_for_engine(case: Case) -> tuple[int, int | None]:
    return case.options.block_length, case.options.sub_block_length


def _configurations() -> list[tuple[str, int, int | None]]:
    found = []
    for family in ("sdar", "llada2_moe", "fast_dllm_v2"):
        try:
            cases = load(family).cases
        except FileNotFoundError:
            continue
        found += [(family, *fixed) for fixed in sorted({_fixed_for_engine(c) for c in cases}, key=str)]
    return found


def _id(configuration: tuple[str, int, int | None]) -> str:
    return "-".join(str(part) for part in configuration if part is not None)


CONFIGURATIONS = _configurations()


@pytest.mark.skipif(not CONFIGURATIONS, reason="no golden data (set VLLM_DLLM_GOLDEN)")
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=map(_id, CONFIGURATIONS))
def test_every_golden_case_gives_the_official_tokens_with_as_many_forwards(
    configuration: tuple[str, int, int | None],
) -> None:
    family, *fixed = configuration
    cases = [c for c in golden(family).cases if _fixed_for_engine(c) == tuple(fixed)]
    llm = engine_of(family, cases[0].options)
    outputs = generate(llm, [c.prompt for c in cases], [case_params(c) for c in cases])
    wrong_tokens = [c.name for c, o in zip(cases, outputs, strict=True) if tokens_of(o) != c.tokens]
    assert not wrong_tokens
    wrong_nfe = {
        c.name: (nfe_of(o), c.nfe) for c, o in zip(cases, outputs, strict=True) if nfe_of(o) != c.nfe
    }
    assert not wrong_nfe, "(ours, official)"


@pytest.mark.parametrize("family", ["sdar", "llada2_moe", "fast_dllm_v2"])
def test_logits_of_every_position_equal_the_official_logits(family: str) -> None:
    """Captures the hidden states of the prefill, where all positions of a sequence pass the model at once."""
    for ids, block_length, logits in golden(family).logits:
        case = next(c for c in golden(family).cases if c.options.block_length == block_length)
        llm = engine_of(family, case.options)
        model = runner_of(llm).model
        captured: list[torch.Tensor] = []
        hook = model.register_forward_hook(lambda _m, _i, output: captured.append(output.clone()))
        try:
            whole_blocks = len(ids) // block_length * block_length
            prompt = ids.tolist()[:whole_blocks]
            generate(llm, [prompt], greedy(case.options, max_tokens=1))
        finally:
            hook.remove()
        ours = model.compute_logits(captured[0][:whole_blocks])
        torch.testing.assert_close(ours, logits[:whole_blocks], atol=1e-4, rtol=0)


def test_the_block_being_denoised_sees_the_whole_prefix() -> None:
    """The last, partly masked block of the golden sequences, through the decoding path."""
    family = "sdar"
    for ids, block_length, logits in golden(family).logits:
        case = next(c for c in golden(family).cases if c.options.block_length == block_length)
        llm = engine_of(family, case.options)
        start = (len(ids) - 1) // block_length * block_length
        known = list(itertools.takewhile(lambda token: token != case.options.mask_id, ids.tolist()))
        if not start <= len(known) < len(ids):
            continue
        model = runner_of(llm).model
        captured: list[torch.Tensor] = []
        compute = model.compute_logits
        model.compute_logits = lambda hidden: captured.append(compute(hidden)) or captured[-1]
        try:
            generate(llm, [known], greedy(case.options, max_tokens=1))
        finally:
            del model.compute_logits
        first_step = next(rows for rows in captured if len(rows))
        padded = torch.full((start + block_length,), case.options.mask_id)
        padded[: len(known)] = torch.tensor(known)
        expected = reference_model(family)(padded, block_causal(len(padded), block_length))[start:]
        torch.testing.assert_close(first_step, expected, atol=1e-4, rtol=0)
        if torch.equal(ids, padded):
            torch.testing.assert_close(first_step, logits[start:], atol=1e-4, rtol=0)
