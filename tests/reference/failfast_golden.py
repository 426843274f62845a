"""The golden rounds of FailFast, in this project's terms."""

import functools
import gzip
import json
from dataclasses import dataclass
from typing import Any

from tests.paths import BUNDLED

from .deer import Drafter
from .failfast import Rule
from .model import ReferenceModel

FOLDER = BUNDLED / "failfast"


@dataclass(frozen=True)
class FailFastCase:
    """A FailFast run: an untrained diffusion model drafts for an autoregressive one."""

    name: str
    kwargs: dict[str, Any]
    num_prompt: int
    text: list[int]
    """The prompt and what the target wrote."""
    rounds: list[dict[str, Any]]

    @property
    def rule(self) -> Rule:
        """The numbers that its drafts grow by."""
        kwargs = self.kwargs
        return Rule(
            first=kwargs["spec_len"],
            step=kwargs["incr_len"],
            most=kwargs["max_spec_len"],
            threshold=kwargs["lowconf_threshold"],
            unmask_threshold=kwargs["drafter_threshold"],
            sub_block_length=kwargs["small_block_size"],
        )

    def drafter(self) -> Drafter:
        """The diffusion model; the golden runs do without a shared vocabulary, which would miss the mask alone."""
        return Drafter(
            model=failfast_model(),
            num_drafts=128,
            context="block-causal",
            shifted=True,
            mask=self.kwargs["mask_id"],
            block_length=self.kwargs["block_size"],
        )


@functools.cache
def failfast_model() -> ReferenceModel:
    """The drafter of the FailFast cases."""
    return ReferenceModel(FOLDER / "checkpoint")


@functools.cache
def load_failfast() -> list[FailFastCase]:
    """All FailFast cases."""
    cases = json.loads(gzip.decompress((FOLDER / "cases.json.gz").read_bytes()))
    return [
        FailFastCase(
            case["name"],
            case["kwargs"],
            len(case["prompt_token_ids"]),
            case["prompt_token_ids"] + case["output_token_ids"],
            case["rounds"],
        )
        for case in cases
    ]
