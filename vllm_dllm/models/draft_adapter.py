"""A low-rank adapter for rows that draft, beside the model's own weights: LinearSpec's, or that of I-DLM's masks.

Rows that draft and rows that verify share a forward, so every row says whether the adapter is for it. The others have
what the model computes without the adapter, to the last bit.
"""

import json
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import LinearMethodBase, MergedColumnParallelLinear, QKVParallelLinear

from vllm_dllm.models.checkpoint import CheckpointError

FILES = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
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

LAYERS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
"""vLLM's linear layers of a Llama, and the adapter's names of their parts."""

_NAME = re.compile(r"\blayers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight$")


class Source(NamedTuple):
    """Where an adapter is."""

    model: str
    """Path or hub name of the checkpoint that holds it, or of the adapter itself."""
    folder: str
    """Within ``model``; empty: it has no folder of its own."""
    revision: str | None

    @classmethod
    def of(cls, option: bool | str, model: ModelConfig, folder: str) -> "Source":
        """Of the engine option ``draft_adapter``, for a ``model`` whose checkpoint has a ``folder`` for the adapter."""
        return cls(option, "", None) if isinstance(option, str) else cls(model.model, folder, model.revision)

    def place(self, name: str) -> str:
        """One of ``FILES``, as a path in ``model``."""
        return f"{self.folder}/{name}" if self.folder else name

    def missing(self) -> list[str]:
        """Files that are not there, as paths in ``model``."""
        from vllm.transformers_utils.repo_utils import file_or_path_exists

        places = [*map(self.place, FILES)]
        try:
            return [place for place in places if not file_or_path_exists(self.model, place, self.revision)]
        except HFValidationError:  # a path, and nothing there
            return places

    def path(self, name: str) -> Path:
        """One of ``FILES`` on disk, fetched if need be."""
        found = cached_file(self.model, name, subfolder=self.folder, revision=self.revision)
        assert found is not None
        return Path(found)


class Part(NamedTuple):
    """One of the matrices of a linear layer, and this rank's share of what it puts out."""

    name: str
    outputs: int
    """Of all ranks."""
    begin: int
    """The first output of this rank."""
    size: int
    """Outputs of this rank."""


def parts_of(layer: Any, names: Sequence[str]) -> list[Part]:
    """The parts of one of ``LAYERS``, called ``names``."""
    if isinstance(layer, QKVParallelLinear):
        of_keys = layer.tp_rank // layer.num_kv_head_replicas
        heads = (
            (layer.total_num_heads * layer.head_size, layer.tp_rank),
            (layer.total_num_kv_heads * layer.head_size, of_keys),
            (layer.total_num_kv_heads * layer.v_head_size, of_keys),
        )
        return [
            Part(name, outputs, share * size, size)
            for name, (outputs, share), size in zip(names, heads, layer.output_partition_sizes, strict=True)
        ]
    if isinstance(layer, MergedColumnParallelLinear):
        sizes = zip(names, layer.output_sizes, layer.output_partition_sizes, strict=True)
        return [Part(name, outputs, layer.tp_rank * size, size) for name, outputs, size in sizes]
    (name,) = names
    return [Part(name, layer.output_size, 0, layer.output_size)]


class AdaptedLinearMethod(LinearMethodBase):
    """A linear layer with a LoRA adapter: adds ``scale * up(down(x))`` to the outputs of another method, in some rows.

    With tensor parallelism each rank adds its share of the adapter before the ranks' outputs are summed or gathered.
    """

    def __init__(self, method: Any, layer: Any, parts: Sequence[Part], rank: int, rows: torch.Tensor):
        """Takes the place of the ``method`` of ``layer``.

        Args:
            parts: of the layer, each with an adapter of its own, which may be none: zeros.
            rows: [most rows of a forward]: 1 where the adapter is for a row, 0 elsewhere; written before each forward.
        """
        self.method, self.rows, self.num_parts = method, rows, len(parts)
        # What vLLM's loader asks of every method.
        for name in ("requires_device_loading", "uses_meta_device", "supports_pre_processed_weights"):
            setattr(self, name, getattr(method, name))
        down = torch.zeros(len(parts) * rank, layer.input_size_per_partition)
        layer.register_buffer("adapter_down", down, persistent=False)
        for index, part in enumerate(parts):
            layer.register_buffer(f"adapter_up_{index}", torch.zeros(part.size, rank), persistent=False)

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.method.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.method.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.method.apply(layer, x, bias)
        inner = (x @ layer.adapter_down.T) * self.rows[: x.shape[0]].unsqueeze(1)
        ups = [getattr(layer, f"adapter_up_{index}") for index in range(self.num_parts)]
        added = [part @ up.T for part, up in zip(inner.chunk(self.num_parts, dim=1), ups, strict=True)]
        return output + (added[0] if len(added) == 1 else torch.cat(added, dim=1))


class DraftAdapter:
    """The adapter of a model whose layers are Llama's."""

    def __init__(self, model: Any, vllm_config: VllmConfig, source: Source):
        """Put an adapter beside the weights of ``model``, which may come later.

        Raises:
            ValueError: the adapter is of another kind.
            CheckpointError: its tensors are not those of the model's layers.
        """
        self._source, self._config = source, source.place(CONFIG)
        config = json.loads(source.path(CONFIG).read_text())
        for key, allowed in SUPPORTED.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise ValueError(
                    f"{self._config}: {key}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}"
                )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        for key, value in (("r", rank), ("lora_alpha", alpha)):
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"{self._config}: {key}={value!r} is not allowed: it must be a number above 0")
        self.rank = int(rank)
        self.scale = alpha / self.rank
        self.targets = self._targets(config.get("target_modules"))
        self.rows = torch.zeros(vllm_config.scheduler_config.max_num_batched_tokens)
        self.adapted: list[tuple[int, Any, list[Part]]] = []
        """Number of the block of layers, linear layer, and its parts."""
        for index, block in enumerate(model.model.layers):
            for place, names in LAYERS.items():
                if self.targets.isdisjoint(names):
                    continue
                layer = attrgetter(place)(block)
                parts = parts_of(layer, names)
                layer.quant_method = AdaptedLinearMethod(layer.quant_method, layer, parts, self.rank, self.rows)
                self.adapted.append((index, layer, parts))
        if vllm_config.load_config.load_format != "dummy":
            self._load(len(model.model.layers))

    def _targets(self, given: Any) -> set[str]:
        """The parts that have an adapter."""
        allowed = [name for names in LAYERS.values() for name in names]
        targets = [given] if isinstance(given, str) else given
        if not isinstance(targets, list) or not targets or not set(targets) <= set(allowed):
            raise ValueError(
                f"{self._config}: target_modules={given!r} is not supported; allowed: some of {', '.join(allowed)}"
            )
        return set(targets)

    def _load(self, num_blocks: int) -> None:
        """Read the adapter's tensors, this rank's share of them."""
        file, stored = self._source.place(WEIGHTS), dict[tuple[int, str, str], torch.Tensor]()
        for name, tensor in load_file(self._source.path(WEIGHTS)).items():
            match = _NAME.search(name)
            if match is None or int(match[1]) >= num_blocks or match[2] not in self.targets:
                raise CheckpointError(f"{file}: the model has no place for {name}")
            stored[int(match[1]), match[2], match[3]] = tensor
        for index, layer, parts in self.adapted:
            for number, part in enumerate(parts):
                if part.name not in self.targets:
                    continue
                for matrix, shape in (("A", (self.rank, layer.input_size)), ("B", (part.outputs, self.rank))):
                    found = stored.get((index, part.name, matrix))
                    if found is None or found.shape != shape:
                        raise CheckpointError(
                            f"{file}: lora_{matrix} of {part.name} of layer {index} is "
                            f"{'missing' if found is None else list(found.shape)} and should be {list(shape)}"
                        )
                size = layer.input_size_per_partition
                begin = 0 if size == layer.input_size else layer.tp_rank * size
                down = stored[index, part.name, "A"][:, begin : begin + size]
                layer.adapter_down[number * self.rank : (number + 1) * self.rank].copy_(down)
                up = stored[index, part.name, "B"][part.begin : part.begin + part.size]
                getattr(layer, f"adapter_up_{number}").copy_(self.scale * up.float())
