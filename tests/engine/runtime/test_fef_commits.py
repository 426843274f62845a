"""FeF-DLLM's further passes where the forward that commits a block gives the next block its first token.

The first token of such a block is as final as the text before it: no pass masks it again, and it counts among the
positions whose share ``remask`` is.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from tests.engine.harness import MASK, bundled, drafting_engine, generate, nfe_of, reference_model, tokens_of
from tests.engine.runtime import test_nemotron, test_pangu
from tests.engine.runtime.test_fef import EngineNoise, NoNoise
from tests.engine.runtime.test_golden import options_with
from tests.paths import BUNDLED
from tests.reference import fef
from tests.reference import nemotron as nemotron_data
from tests.reference.model import ReferenceModel, block_causal, causal_context
from vllm_dllm.kernels.confidence import token_noise

LENGTH, WINDOW, TOKENS = 8, 4, 32
CASES: list[dict[str, Any]] = [
    {"window": window, "resample_steps": passes, "remask": remask}
    for window, passes, remask in ((1, 2, 0.25), (2, 3, 0.5), (4, 2, 0.5), (4, 4, 0.25), (4, 2, 1.0), (3, 2, 0.1))
]
"""With ``remask`` 1 every position but the first is masked again."""


class Family(NamedTuple):
    """A family whose commits predict, as the plain decoder sees it."""

    llm: LLM
    model: ReferenceModel
    mask_id: int
    shifted: bool
    from_prompt: bool

    def logits(self, text: Sequence[int], start: int) -> Tensor:
        """[T, V] of a text whose block begins at ``start``."""
        causal = causal_context(len(text), start) if self.from_prompt else block_causal(len(text), LENGTH)
        return self.model(torch.tensor(text), causal)

    def distribution(self, logits: Tensor, temperature: float) -> Tensor:
        """[..., V] float64, without the mask token."""
        logits = logits.double() / (temperature or 1.0)
        logits[..., self.mask_id] = -torch.inf
        return logits.softmax(dim=-1)

    def decode(self, prompt: list[int], temperature: float, seed: int, option: dict[str, Any]) -> tuple[list[int], int]:
        """The text and the number of its forwards: each block's, and the commits before the blocks that they begin."""
        start = len(prompt) if self.from_prompt else len(prompt) // LENGTH * LENGTH
        canvas, forwards = list(prompt), 0
        while len(canvas) < len(prompt) + TOKENS:
            block = canvas[start:]
            num_generated = LENGTH - len(block)
            if not block:
                said = self.distribution(self.logits(canvas, start)[-1], temperature)
                draws = token_noise(*map(torch.tensor, ([seed], [start], [0])), len(said))[0].double().exp()
                block = [fef.draw(said.tolist(), draws.tolist()) if temperature else int(said.argmax())]
                forwards += start > len(prompt)
                if len(canvas) + 1 == len(prompt) + TOKENS:
                    # Emitted as soon as it is known, and the last one.
                    canvas += block
                    break
            decoded = fef.decode(
                block + [self.mask_id] * (LENGTH - len(block)),
                *self.blocks(canvas[:start], temperature, seed),
                mask_id=self.mask_id,
                window=option["window"],
                num_steps=option["resample_steps"],
                num_remask=max(1, math.ceil(num_generated * option["remask"] - 1e-4)),
                greedy=not temperature,
            )
            forwards += decoded.forwards
            canvas = canvas[:start] + decoded.block
            start += LENGTH
        return canvas[len(prompt) :][:TOKENS], forwards

    def blocks(self, before: list[int], temperature: float, seed: int) -> tuple[fef.Distributions, fef.Noise]:
        """Distributions of the states of the block behind ``before``, and the engine's noise."""

        def distributions(block: list[int]) -> list[list[float]]:
            logits = self.logits(before + block, len(before))[len(before) :]
            # The first row of a shifted family predicts the second position; nobody asks for the first.
            logits = logits.roll(1, dims=0) if self.shifted else logits
            return self.distribution(logits, temperature).tolist()

        if not temperature:
            return distributions, NoNoise(self.model.config["vocab_size"])
        noise = EngineNoise(seed, len(before), mask_id=self.mask_id, vocab=self.model.config["vocab_size"])
        return noise.watch(distributions), noise


def fast_dllm_v2(_: Path) -> Family:
    llm = drafting_engine(
        "fast_dllm_v2", options_with(bundled("fast_dllm_v2"), LENGTH), dllm={"max_drafts": WINDOW - 1}
    )
    return Family(llm, reference_model("fast_dllm_v2"), MASK, shifted=True, from_prompt=False)


def pangu(folder: Path) -> Family:
    checkpoint = test_pangu.save_checkpoint(folder, test_pangu.CONFIG)
    llm = test_pangu.engine_of(checkpoint, dllm={"max_drafts": WINDOW - 1})
    return Family(llm, ReferenceModel(checkpoint), MASK, shifted=True, from_prompt=True)


def nemotron(_: Path) -> Family:
    llm = test_nemotron.engine_of(test_nemotron.THRESHOLD, dllm={"max_drafts": WINDOW - 1})
    model = test_nemotron.reference_model_of(nemotron_data.load_nemotron(BUNDLED))
    return Family(llm, model, nemotron_data.MASK, shifted=False, from_prompt=True)


@pytest.mark.parametrize("make", [fast_dllm_v2, pangu, nemotron])
def test_further_passes_leave_the_first_token_that_a_commit_predicts(
    make: Callable[[Path], Family], tmp_path: Path
) -> None:
    family = make(tmp_path)
    prompts = [[5, 6, 7], list(range(20, 57)), [9] * LENGTH, [3]]
    asked = [
        (prompts[i % len(prompts)], 0.8 * (i // len(CASES)), i, option) for i, option in enumerate([*CASES, *CASES])
    ]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            extra_args={
                "dllm_verify": "fef",
                "dllm_eos_early_stop": ends_early,
                **{f"dllm_{key}": value for key, value in option.items()},
            },
        )
        for ends_early in (False, True)
        for _, temperature, seed, option in asked
    ]
    outputs = generate(family.llm, [prompt for prompt, *_ in [*asked, *asked]], params)
    for (prompt, *how), output, early in zip(asked, outputs, outputs[len(asked) :], strict=False):
        assert (tokens_of(output), nfe_of(output)) == family.decode(prompt, *how), (len(prompt), how)
        assert tokens_of(early) == tokens_of(output)
        assert nfe_of(early) <= nfe_of(output)
