"""What distinguishes one family of diffusion language models from another, as data."""

from dataclasses import dataclass
from typing import Literal

from vllm_dllm.methods import VerifierName


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """Decoding semantics of one model family. The runtime reads these and never asks for a family by name.

    Attributes:
        family: name used in messages and documentation.
        block_length: diffusion block length where neither the checkpoint nor the user gives one.
        mask_token_id: id of the mask token where the checkpoint does not give one.
        shifted: the logits of position ``i - 1`` predict position ``i`` of the block being denoised.
        commit_predicts: the last logits of the prompt, or of the forward that commits a block, give the first token of
            the next block, so commit and denoising are separate forwards.
        threshold_inclusive: a confidence equal to the threshold passes (``>=``) or does not (``>``).
        threshold: confidence threshold of the family's published sampler.
        sub_block_length: blocks are finished in sub-blocks of this length, left to right. ``None``: whole.
        editing: the family was trained to revise tokens that are already unmasked (LLaDA2.1).
        attention: what a position sees beside the block being denoised, and where blocks are counted from.
            ``block-causal``: its own block and those before it, counted from the start of the text. ``full``: all
            positions, the masks behind the block included; blocks are counted from the end of the prompt.
            ``causal-context``: what is before it, as in an autoregressive model; only the block being denoised sees
            itself whole. Blocks are counted from the end of the prompt.
            ``causal``: what is before it, masks too, as in an autoregressive model throughout. Blocks begin anywhere.
        verifier: the one verifier that the family decodes with. ``None``: any, and none by default.
        draft_adapter: folder of the checkpoint that may hold an adapter for rows that draft. Empty: an adapter lies
            elsewhere. ``None``: rows that draft have no adapter of their own.
        timesteps: the family's sampler unmasks by a schedule of timesteps (Dream) instead of so many positions per
            step; the policy ``entropy`` then means that one.
    """

    family: str
    block_length: int
    mask_token_id: int
    shifted: bool = False
    commit_predicts: bool = False
    threshold_inclusive: bool = False
    threshold: float = 0.9
    sub_block_length: int | None = None
    editing: bool = False
    attention: Literal["block-causal", "full", "causal-context", "causal"] = "block-causal"
    verifier: VerifierName | None = None
    timesteps: bool = False
    draft_adapter: str | None = None

    @property
    def may_denoise_first_tokens(self) -> bool:
        """A block's own logits predict its first token too, so ``commit_predicts`` is the user's choice."""
        return self.commit_predicts and not self.shifted

    @property
    def sees_whole_text(self) -> bool:
        """Every position sees every other, masks included: a step computes K/V anew, and no page outlives a request."""
        return self.attention == "full"

    @property
    def causal_context(self) -> bool:
        """Finished text sees only what is before it, so prompts and K/V pages may be cut at any position."""
        return self.attention in ("causal-context", "causal")

    @property
    def causal_blocks(self) -> bool:
        """Positions of the block being denoised see only what is before them, too."""
        return self.attention == "causal"

    @property
    def blocks_from_prompt(self) -> bool:
        """Blocks are counted from the end of the prompt, not from the start of the text."""
        return self.attention != "block-causal"
