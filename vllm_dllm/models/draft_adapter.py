"""The low-rank adapter that a checkpoint has for draft forwards of LinearSpec, beside the model's own weights.

The adapter changes the output projections of attention, and only in rows that draft. Rows that draft and rows that
verify share a forward, so every row says whether the adapter is for it.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear

from vllm_dllm.models.checkpoint import CheckpointError

FILES = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "target_modules": (["o_proj"], "o_proj"),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "modules_to_save": (None, []),
    # The other ways to begin change the weights that the adapter is added to.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "layer_replication": (None,),
    "use_bdlora": (None, False),
    "layers_to_transform": (None,),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}
"""Values of PEFT's configuration under which an adapter is what this module adds."""

_NAME = re.compile(r"\blayers\.(\d+)\.self_attn\.o_proj\.lora_([AB])(?:\.default)?\.weight$")


def missing_files(model: ModelConfig, folder: str) -> list[str]:
    """Files of an adapter that the checkpoint lacks in ``folder``, as paths in the checkpoint."""
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    files = [f"{folder}/{name}" for name in FILES]
    return [file for file in files if not file_or_path_exists(model.model, file, model.revision)]


class AdaptedLinearMethod(LinearMethodBase):
    """A linear layer with a LoRA adapter: adds ``scale * up(down(x))`` to the outputs of another method, in some rows.

    With tensor parallelism each rank adds its share of the adapter before the ranks' outputs are summed.
    """

    def __init__(self, method: Any, layer: RowParallelLinear, rank: int, rows: torch.Tensor):
        """Takes the place of the ``method`` of ``layer``.

        Args:
            rows: [most rows of a forward]: 1 where the adapter is for a row, 0 elsewhere; written before each forward.
        """
        self.method, self.rows = method, rows
        # What vLLM's loader asks of every method.
        for name in ("requires_device_loading", "uses_meta_device", "supports_pre_processed_weights"):
            setattr(self, name, getattr(method, name))
        layer.register_buffer("adapter_down", torch.zeros(rank, layer.input_size_per_partition), persistent=False)
        layer.register_buffer("adapter_up", torch.zeros(layer.output_size, rank), persistent=False)

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.method.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.method.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.method.apply(layer, x, bias)
        inner = (x @ layer.adapter_down.T) * self.rows[: x.shape[0]].unsqueeze(1)
        return output + inner @ layer.adapter_up.T


class DraftAdapter:
    """The adapter of a model whose layers are Llama's."""

    def __init__(self, model: Any, vllm_config: VllmConfig, folder: str):
        """Put the adapter in ``folder`` of the checkpoint beside the weights of ``model``, which may come later.

        Raises:
            ValueError: the adapter is of another kind.
            CheckpointError: its tensors are not those of the model's layers.
        """
        self._model, self._folder = vllm_config.model_config, folder
        config = json.loads(self._path(CONFIG).read_text())
        for key, allowed in SUPPORTED.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise ValueError(
                    f"{folder}/{CONFIG}: {key}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}"
                )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        for key, value in (("r", rank), ("lora_alpha", alpha)):
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"{folder}/{CONFIG}: {key}={value!r} is not allowed: it must be a number above 0")
        self.rank = int(rank)
        self.scale = alpha / self.rank
        self.rows = torch.zeros(vllm_config.scheduler_config.max_num_batched_tokens)
        self.layers: list[RowParallelLinear] = [layer.self_attn.o_proj for layer in model.model.layers]
        for layer in self.layers:
            layer.quant_method = AdaptedLinearMethod(layer.quant_method, layer, self.rank, self.rows)
        if vllm_config.load_config.load_format != "dummy":
            self._load()

    def _load(self) -> None:
        """Read the adapter's tensors, this rank's share of them."""
        stored: dict[tuple[int, str], torch.Tensor] = {}
        for name, tensor in load_file(self._path(WEIGHTS)).items():
            match = _NAME.search(name)
            if match is None or int(match[1]) >= len(self.layers):
                raise CheckpointError(f"{self._folder}/{WEIGHTS}: the model has no place for {name}")
            stored[int(match[1]), match[2]] = tensor
        for index, layer in enumerate(self.layers):
            for part, shape in (("A", (self.rank, layer.input_size)), ("B", (layer.output_size, self.rank))):
                found = stored.get((index, part))
                if found is None or found.shape != shape:
                    raise CheckpointError(
                        f"{self._folder}/{WEIGHTS}: lora_{part} of layer {index} is "
                        f"{'missing' if found is None else list(found.shape)} and should be {list(shape)}"
                    )
            begin = layer.tp_rank * layer.input_size_per_partition
            down = stored[index, "A"][:, begin : begin + layer.input_size_per_partition]
            layer.adapter_down.copy_(down)
            layer.adapter_up.copy_(self.scale * stored[index, "B"].float())

    def _path(self, name: str) -> Path:
        found = cached_file(self._model.model, name, subfolder=self._folder, revision=self._model.revision)
        assert found is not None
        return Path(found)
