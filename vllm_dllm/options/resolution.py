"""What a request's options are resolved from: the request, the engine, the model family, and what follows of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_dllm.methods import PolicyRow, VerifierRow
from vllm_dllm.options.errors import OptionError
from vllm_dllm.options.schema import DecodingOptions, DllmConfig
from vllm_dllm.traits import FamilyTraits

TIMED_STEPS_PER_POSITION = 8
"""Most timesteps of a block for each of its positions. With more timesteps most would unmask nothing."""


@dataclass(frozen=True)
class Resolution:
    """What a request's options are resolved from."""

    request: DecodingOptions
    engine: DllmConfig
    traits: FamilyTraits
    block_length: int
    max_tokens: int | None
    values: dict[str, Any]
    """Every option of a request by its name, of ``_lay_over``."""
    row: PolicyRow
    verifier: VerifierRow
    structured: bool

    def refusal(self, key: str, reason: str) -> OptionError:
        """The error of an option that may not have its value for this reason."""
        value = self.values[key]
        return OptionError(f"{key}={value!r} is not allowed{reason}", key, value)

    def unread(self, key: str, where: str, readers: Iterable[str]) -> OptionError:
        """The error of an option that nothing reads ``where`` it stands, but only ``readers``."""
        return self.refusal(key, f" with {where}, which does not read it; read by {', '.join(dict.fromkeys(readers))}")

    @property
    def editing(self) -> bool:
        return self.values["edit_threshold"] is not None

    @property
    def subset_match(self) -> bool:
        return self.verifier.name == "freedave" and self.values["match"] == "subset"

    @cached_property
    def denoising_steps(self) -> int | None:
        """Denoising steps per block, where the user gives them."""
        key = "denoising_steps" if self.values["steps"] is None else "steps"
        per_block: int | None = self.values[key]
        if per_block is None:
            return None
        if key == "steps":
            if not self.traits.sees_whole_text:
                raise self.refusal(
                    key,
                    f": blocks of {self.traits.family} models do not begin where the prompt ends; give "
                    "denoising_steps, which counts those of a block",
                )
            if self.max_tokens is None:
                return None
            num_blocks = -(-self.max_tokens // self.block_length)
            per_block, rest = divmod(per_block, num_blocks)
            if rest:
                raise self.refusal(
                    key,
                    f": max_tokens={self.max_tokens} makes {num_blocks} blocks of {self.block_length}, and each has as "
                    f"many steps; give a multiple of {num_blocks}",
                )
        most = TIMED_STEPS_PER_POSITION * self.block_length
        if self.row.timed and per_block > most:
            raise self.refusal(
                key,
                f" with policy={self.row.name!r}: that makes {per_block} timesteps per block of {self.block_length}, "
                f"and there may be {most}",
            )
        return per_block

    @cached_property
    def quota(self) -> tuple[int, int]:
        """Positions per step, and the number of first steps that unmask one more."""
        steps = self.denoising_steps
        if steps is None:
            return self.values["tokens_per_step"] or 1, 0
        if self.traits.sees_whole_text and self.traits.shifted and self.engine.cache != "none":
            # The refresh at the start of a block is its first step, and decides its first position. The rest is spread
            # over the other steps, one more each in the first of them.
            quota, remainder = divmod(self.block_length - 1, max(steps - 1, 1))
            return quota, remainder + (remainder > 0)
        return divmod(self.block_length, steps)
