"""What the model classes of all block-diffusion families share."""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.models.checkpoint import CheckpointAudit, stored_tensors
from vllm_dllm.models.draft_adapter import DraftAdapter, Source
from vllm_dllm.models.quantization import (
    check_kernels,
    check_layers,
    check_reload,
    give_checkpoint_names,
    refusals_by_name,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


class BlockDiffusionModel:
    """Goes before an autoregressive model class of vLLM: same layers and weights, decoded blockwise."""

    config: Any
    embedding_modules: ClassVar[dict[str, str]] = {}
    """Layers beside the linear ones that an adapter may change: none. vLLM changes the head's logits by request, and a
    request has many rows of logits here."""
    stored_parts: ClassVar[dict[str, list[str]]] = {}
    """Parts of a fused layer under the checkpoint's names, where these are not vLLM's (``packed_modules_mapping``)."""
    sampled_hidden_states: torch.Tensor
    """What the last logits were computed of."""
    draft_adapter: "DraftAdapter | None" = None
    """Of rows that draft, with LinearSpec or ISD."""
    kept_logits: torch.Tensor | None = None
    """Logits that were computed before vLLM asks for them, and that its next call gets."""

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        give_checkpoint_names(vllm_config, type(self), prefix)
        with refusals_by_name(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
            check_layers(self, vllm_config.model_config)
            check_kernels(self, vllm_config)
        geometry = getattr(self.config, "geometry", None)
        if geometry is not None and (option := geometry.options.draft_adapter):
            source = Source.of(option, vllm_config.model_config, geometry.traits.draft_adapter)
            self.draft_adapter = DraftAdapter(self, vllm_config, source)
        self._vllm_config = vllm_config
        self._audit = CheckpointAudit.of(vllm_config)
        if type(self).vllm_name is not BlockDiffusionModel.vllm_name:
            # For the names in adapters. Of the class vLLM would apply it to `quantization_config` too.
            every_name: Any = {re.compile(r"^.+$"): lambda match: self.vllm_name(match[0])}
            self.hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex=every_name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint; returns the names of the parameters that were filled.

        Raises:
            CheckpointError: they are not those of the model. Only the first load is that of a whole checkpoint; the
                later ones are somebody's updates.
        """
        audit = self._audit if self._audit is not None and not self._audit.has_begun else None
        named: Iterable[tuple[str, torch.Tensor]]
        if audit is None:
            named = ((self.vllm_name(name), tensor) for name, tensor in weights)
        else:
            named = audit.pass_on(weights, self)
        loaded: set[str] = super().load_weights(named)  # type: ignore[misc]
        if audit is not None:
            audit.check(self)
        return loaded

    def check_new_weights(self, path: str | None, from_disk: bool) -> None:
        """Refuse what cannot take the place of the weights; for `vllm_dllm.patches.changed_weights`.

        Args:
            path: of a checkpoint; None: of the one that was loaded last.
            from_disk: the weights come from there. Others are not looked at.

        Raises:
            CheckpointError: says which tensors are wrong.
            ValueError: the weights cannot change at all; says of which layer.
        """
        check_reload(self)
        if from_disk:
            weights = stored_tensors(self._vllm_config, path, self)
            if self._audit is None:
                next(weights, None)  # the rest cannot be compared
            else:
                self._audit.check_replacement(path, weights, self)

    def vllm_name(self, stored_name: str) -> str:
        """What vLLM's model class calls a tensor of the checkpoint."""
        return stored_name

    def stored_name(self, vllm_name: str) -> str:
        """What the checkpoint calls a tensor of vLLM's model class."""
        module, dot, kind = vllm_name.rpartition(".")
        return f"{self.stored_module(self.config, module)}{dot}{kind}"

    @classmethod
    def stored_module(cls, hf_config: Any, module: str) -> str:
        """What the checkpoint calls a module of vLLM's model class. A fused module keeps its own name."""
        return module

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
