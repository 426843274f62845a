"""What the model classes of all block-diffusion families share."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


class BlockDiffusionModel:
    """Goes before an autoregressive model class of vLLM: same layers and weights, decoded blockwise."""

    config: Any
    sampled_hidden_states: torch.Tensor
    """What the last logits were computed of."""

    def get_model_state_cls(self) -> "type[ModelState]":
        """vLLM's hook for models that build their own inputs, attention metadata and sampler."""
        if self.config.traits.attention == "full":
            from vllm_dllm.runtime.full_attention import FullAttentionModelState

            return FullAttentionModelState
        from vllm_dllm.runtime.model_state import BlockDiffusionModelState

        return BlockDiffusionModelState

    @staticmethod
    def get_speculator_cls() -> "type[DraftModelSpeculator]":
        """What runs the model as a drafter; for `vllm_dllm.patches.draft_model_speculators`."""
        from vllm_dllm.speculators.deer import DeerSpeculator

        return DeerSpeculator

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[rows, vocab]`` of hidden states ``[rows, hidden]``.

        A step in which every request prefills has no rows. It must not reach the gather over tensor-parallel
        ranks, which kills CPU workers when the tensor is empty.
        """
        self.sampled_hidden_states = hidden_states
        if hidden_states.shape[0] == 0:
            return hidden_states.new_empty(0, self.config.vocab_size)
        return super().compute_logits(hidden_states)  # type: ignore[misc]
