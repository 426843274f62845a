"""The engine against the official implementations' outputs, all cases of a configuration in one batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.harness import (
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
from tests.engine.step_maps import expected_of, mapped, misplaced
from tests.reference.decode import Options
from tests.reference.golden import Case, Golden, load
from tests.reference.model import block_causal


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


def options_with(golden: Golden, block_length: int) -> Options:
    """Options of a golden case with this block length, or those of another case with its block length changed."""
    all_options = [case.options for case in golden.cases]
    other = replace(all_options[0], block_length=block_length, sub_block_length=None)
    return next((options for options in all_options if options.block_length == block_length), other)


CONFIGURATIONS = _configurations()


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=map(_id, CONFIGURATIONS))
def test_every_golden_case_gives_the_official_tokens_in_the_official_steps(
    configuration: tuple[str, int, int | None],
) -> None:
    family, *fixed = configuration
    cases = [c for c in golden(family).cases if _fixed_for_engine(c) == tuple(fixed)]
    llm = engine_of(golden(family), cases[0].options)
    outputs = generate(llm, [c.prompt for c in cases], [mapped(case_params(c)) for c in cases])
    wrong_tokens = [c.name for c, o in zip(cases, outputs, strict=True) if tokens_of(o) != c.tokens]
    assert not wrong_tokens
    wrong_nfe = {c.name: (nfe_of(o), c.nfe) for c, o in zip(cases, outputs, strict=True) if nfe_of(o) != c.nfe}
    assert not wrong_nfe, "(ours, official)"
    wrong_steps = {
        case.name: found
        for case, output in zip(cases, outputs, strict=True)
        if (found := misplaced(output, len(case.prompt), expected_of(case)))
    }
    assert not wrong_steps


@pytest.mark.parametrize("family", ["sdar", "llada2_moe", "fast_dllm_v2"])
def test_logits_of_every_position_equal_the_official_logits(family: str) -> None:
    """From the hidden states of the prefill, where all positions of a sequence pass the model at once."""
    for ids, block_length, logits in golden(family).logits:
        llm = engine_of(golden(family), options_with(golden(family), block_length))
        whole_blocks = len(ids) // block_length * block_length
        hidden_states: list[torch.Tensor] = []
        model = runner_of(llm).model

        def keep(_model: Any, _inputs: Any, output: torch.Tensor, kept: Any = hidden_states) -> None:
            kept.append(output.clone())

        hook = model.register_forward_hook(keep)
        try:
            generate(llm, [ids.tolist()[:whole_blocks]], greedy(max_tokens=1))
        finally:
            hook.remove()
        ours = model.compute_logits(hidden_states[0][:whole_blocks])
        torch.testing.assert_close(ours, logits[:whole_blocks], atol=1e-4, rtol=0)


def test_logits_of_a_partly_masked_block_behind_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoding path, where finished blocks are in the cache and only the current one is computed."""
    family = "sdar"
    for ids, block_length, _ in golden(family).logits:
        options = options_with(golden(family), block_length)
        llm = engine_of(golden(family), options)
        start = (len(ids) - 1) // block_length * block_length
        block = torch.full((start + block_length,), options.mask_id)
        known = start + block_length // 2
        block[:known] = ids[:known]
        # The golden sequence has masks of its own there.
        block[block == options.mask_id] = 7 if options.mask_id != 7 else 8
        block[known:] = options.mask_id

        rows: list[torch.Tensor] = []
        model = runner_of(llm).model
        compute = model.compute_logits

        def keep(hidden_states: torch.Tensor, compute: Any = compute, kept: Any = rows) -> torch.Tensor:
            kept.append(compute(hidden_states))
            return kept[-1]

        with monkeypatch.context() as patch:
            patch.setattr(model, "compute_logits", keep)
            generate(llm, [block[:known].tolist()], greedy(options, max_tokens=1))
        first_step = next(logits for logits in rows if len(logits))
        expected = reference_model(golden(family))(block, block_causal(len(block), block_length))[start:]
        torch.testing.assert_close(first_step, expected, atol=1e-4, rtol=0)
