"""What the model classes of all block-diffusion families share."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm_dllm.models.checkpoint import CheckpointAudit
from vllm_dllm.models.quantization import check_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


class BlockDiffusionModel:
    """Goes before an autoregressive model class of vLLM: same layers and weights, decoded blockwise."""

    config: Any
    sampled_hidden_states: torch.Tensor
    """What the last logits were computed of."""
    kept_logits: torch.Tensor | None = None
    """Logits that were computed before vLLM asks for them, and that its next call gets."""

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        check_layers(self, vllm_config.model_config)
        self._audit = CheckpointAudit.of(vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint; returns the names of the parameters that were filled.

        Raises:
            CheckpointError: they are not those of the model. Only the first load is that of a whole checkpoint; the
                later ones are somebody's updates.
        """
        audit, self._audit = self._audit, None
        named: Iterable[tuple[str, torch.Tensor]]
        if audit is None:
            named = ((self.vllm_name(name), tensor) for name, tensor in weights)
        else:
            named = audit.pass_on(weights, self)
        loaded: set[str] = super().load_weights(named)  # type: ignore[misc]
        if audit is not None:
            audit.check(self)
        return loaded

    def vllm_name(self, stored_name: str) -> str:
        """What vLLM's model class calls a tensor of the checkpoint."""
        return stored_name

    def stored_name(self, vllm_name: str) -> str:
        """What the checkpoint calls a tensor of vLLM's model class."""
        return vllm_name

    def get_model_state_cls(self) -> "type[ModelState]":
        """vLLM's hook for models that build their own inputs, attention metadata and sampler."""
        from vllm_dllm.runtime.model_state import DllmModelState

        return DllmModelState

    @staticmethod
    def get_speculator_cls() -> "Callable[..., DraftModelSpeculator]":
        """What runs the model as a drafter; for `vllm_dllm.patches.draft_model_speculators`."""
        from vllm_dllm.speculators.failfast import create_speculator

        return create_speculator

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[rows, vocab]`` of hidden states ``[rows, hidden]``.

        A step in which every request prefills has no rows. It must not reach the gather over tensor-parallel
        ranks, which kills CPU workers when the tensor is empty.
        """
        kept, self.kept_logits = self.kept_logits, None
        if kept is not None:
            return kept
        self.sampled_hidden_states = hidden_states
        if hidden_states.shape[0] == 0:
            return hidden_states.new_empty(0, self.config.vocab_size)
        return super().compute_logits(hidden_states)  # type: ignore[misc]
