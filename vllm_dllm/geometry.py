"""What an engine is: one frozen record, resolved when the engine starts, the same in every process.

`vllm_dllm.models.hook` builds the record from vLLM's configuration and leaves it at ``hf_config.geometry``, which vLLM
sends to the front end, the scheduler and the workers. Everybody else reads the record and changes nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dllm.decoding.draft_graph import DraftGraph, default_graph, fingerprint, load_graph
from vllm_dllm.methods import VERIFIER_ROWS
from vllm_dllm.options.schema import DllmConfig
from vllm_dllm.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Lengths in positions, rows per denoising step, and the engine options behind them."""

    traits: FamilyTraits
    options: DllmConfig
    """The engine's options, resolved: every option that has a default for the engine has a value."""
    block_length: int
    """Positions of a diffusion block."""
    window_blocks: int = 1
    """Blocks that are denoised together: more than one where drafts reach into later blocks (``eager``)."""
    max_drafts: int = 0
    """Drafts beside the block itself that a request may have in one forward."""
    step_rows: int
    """Rows of a step for all requests together."""
    rows_option: str = "max_num_batched_tokens"
    """The engine option that sets `step_rows`: vLLM gives a step the smaller of two."""
    max_model_len: int
    """Positions of a text when the engine started. vLLM may lower the limit later, where it was asked to choose."""
    draft_rows: int
    """Rows of one draft, at most."""
    refresh_rows: int = 0
    """Rows of one request in a refresh, at most. 0: the model keeps K/V as they are, and has no refresh."""

    @property
    def window_length(self) -> int:
        """Positions that are denoised together."""
        return self.window_blocks * self.block_length

    @property
    def canvas_length(self) -> int:
        """Rows of one request in a step, at most; vLLM calls them the canvas.

        A step has the window and its drafts, or two blocks: the finished block that it commits, and the next one, which
        it denoises. Where the commit predicts the first token of the next block, the two are separate steps.
        """
        if self.refresh_rows:
            return self.refresh_rows
        branches = 1 + self.max_drafts
        if self.window_blocks == 1 and not self.traits.commit_predicts:
            branches = max(branches, 2)
        return branches * self.window_length

    @property
    def longest_warm_up(self) -> int:
        """Positions that a request of vLLM's warm-up (``worker/gpu/warmup.py``) may come to.

        The prompt of such a request is one token longer than the canvas, and up to five steps follow, each of which may
        finish a window.
        """
        return 1 + self.canvas_length + 5 * self.window_length

    @property
    def masks_differ(self) -> bool:
        """Whether some groups of rows of a step are causal, and others are not."""
        return (self.traits.causal_context and not self.traits.causal_blocks) or self.verifies_causally

    @property
    def verifies_causally(self) -> bool:
        """Whether the engine's verifier has causal rows."""
        return VERIFIER_ROWS[self.options.verify or "none"].verifies_causally

    def longest_text(self, max_model_len: int) -> int:
        """Positions that a text of ``max_model_len`` may reach: its last block is denoised whole."""
        if self.traits.blocks_from_prompt:
            # The last block may begin on the last position.
            return max_model_len + self.block_length - 1
        return -(-max_model_len // self.block_length) * self.block_length


def not_served(hf_config: Any, model: str) -> str:
    """The message for a model that no class of ours serves, such as one with another family's ``architectures``."""
    return (
        f"{model} is not served as a diffusion model: architectures={hf_config.architectures!r} of its config.json "
        "names a model class that is not vllm-dllm's"
    )


def geometry_of(vllm_config: "VllmConfig") -> Geometry:
    """The record of an engine that serves a diffusion model, in any process.

    Raises:
        ValueError: the engine serves another model.
    """
    hf_config: Any = vllm_config.model_config.hf_config
    geometry = getattr(hf_config, "geometry", None)
    if not isinstance(geometry, Geometry):
        raise ValueError(not_served(hf_config, vllm_config.model_config.model))
    return geometry


def draft_graph_of(vllm_config: "VllmConfig") -> DraftGraph | None:
    """The graph that an engine drafts from: the user's, or the one that ships for the model family.

    Raises:
        ValueError: the graph cannot be read, or was calibrated for another model.
    """
    geometry = geometry_of(vllm_config)
    if not geometry.max_drafts:
        if geometry.options.draft_graph is not None:
            raise ValueError(
                f"draft_graph={geometry.options.draft_graph!r} is not allowed: this engine has no room for drafts; "
                "start it with verify='spiffy', or with max_drafts"
            )
        return None
    if geometry.options.draft_graph is None:
        return default_graph(geometry.traits.family)
    return load_graph(
        geometry.options.draft_graph,
        family=geometry.traits.family,
        block_length=geometry.block_length,
        fingerprint=fingerprint(vllm_config.model_config.hf_config),
    )
