"""Whether a checkpoint holds the model that its ``config.json`` describes, found out while vLLM loads it, and before it
takes the place of the model's weights.

vLLM's own check leaves linear layers and embeddings out, takes a fused parameter for filled when one of its tensors was
there, cuts what is too long for its layers and drops biases that they have no place for. Such a model would answer, and
wrongly.
"""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_dllm.models.expected import Expected, expected_tensors

PARTIAL_FORMATS = ("dummy", "sharded_state", "runai_streamer_sharded", "tensorizer")
"""Values of ``--load-format`` with which vLLM does not hand a model the tensors of a whole checkpoint."""
AUDITED = ("auto_awq", "auto_gptq", "compressed-tensors", "fp8")
"""Names of quantisation methods, as vLLM's own configurations give them, whose layers have a parameter for every tensor
of a checkpoint."""
MOST_NAMES = 6
"""Tensors that a message names."""
_HEAD = "lm_head.weight"
_NOT_FINITE = "has numbers that are not finite (NaN or infinite)"


class CheckpointError(ValueError):
    """A checkpoint does not hold the model; says which tensors, and in which files."""


class CheckpointAudit:
    """Compares the tensors of one load with those that the model takes, and what they filled with numbers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.model, self._dtype = str(model_config.model), model_config.dtype
        self._revision = model_config.revision
        self._download_dir = vllm_config.load_config.download_dir
        self._all_experts = not (parallel.enable_expert_parallel and parallel.enable_ep_weight_filter)
        self._quantized = vllm_config.quant_config
        self._quantizes_kv = "fp8" in vllm_config.cache_config.cache_dtype
        self._scales = self._quantized.get_cache_scale_mapper() if self._quantized is not None else None
        self._expected: dict[str, Expected] = {}
        self._begin()

    def _begin(self) -> None:
        self._filled: set[tuple[int, ...]] = set()
        self._stored_names: dict[str, str] = {}
        self._unknown: list[str] = []
        self._misshapen: dict[str, tuple[list[int], tuple[int, ...]]] = {}

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "CheckpointAudit | None":
        """The audit of a load, or ``None`` where the tensors of a load cannot be compared: layers that vLLM quantises
        while it loads them take their tensors later."""
        quantized = vllm_config.quant_config
        if quantized is not None and (
            quantized.get_name() not in AUDITED or quantized.online_quantization_config is not None
        ):
            return None
        if vllm_config.load_config.load_format in PARTIAL_FORMATS:
            return None
        return cls(vllm_config)

    @property
    def has_begun(self) -> bool:
        """Whether the first load has begun."""
        return bool(self._expected)

    def pass_on(self, weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the `BlockDiffusionModel` has a place for, under vLLM's names. The others are remembered.

        Raises:
            CheckpointError: a file cannot be read.
        """
        # Once they are loaded, quantised layers no longer have the parameters of a checkpoint.
        self._expected = self._expected or expected_tensors(model, all_experts=self._all_experts)
        try:
            for stored_name, tensor in weights:
                name = model.vllm_name(stored_name)
                if name == _HEAD and model.config.tie_word_embeddings:
                    continue
                expected = self._expected.get(self._place(name))
                if expected is None:
                    if not self._changes_nothing(name, tensor):
                        self._unknown.append(stored_name)
                    continue
                self._filled |= expected.places
                if expected.shape is not None and expected.shape != tuple(tensor.shape):
                    self._misshapen[stored_name] = (list(tensor.shape), expected.shape)
                else:
                    self._stored_names[self._place(name)] = stored_name
                    yield name, tensor
        except SafetensorError as error:
            raise CheckpointError(self._unreadable(error)) from error

    def _place(self, name: str) -> str:
        """Where vLLM puts a tensor: scales of K/V have several names."""
        return name if self._scales is None else self._scales.map_name(name) or name

    def _changes_nothing(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor without a place in the model may be left out: tables that vLLM computes, biases of zeros."""
        if AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER.map_name(name) is None:
            return True
        if self._quantized is not None and self._is_metadata(name):
            return True
        return name.endswith("bias") and not tensor.any()

    def _is_metadata(self, name: str) -> bool:
        """Whether vLLM drops a tensor of a quantised checkpoint: GPTQ's order of inputs, since vLLM supports inputs in
        order only, and scales of K/V where the K/V cache is not quantised."""
        assert self._quantized is not None
        if self._quantized.get_checkpoint_weight_mapper().map_name(name) is None:
            return True
        return not self._quantizes_kv and self._place(name).endswith(self._quantized._ignore_unexpected_suffixes)

    def check(self, model: Any) -> None:
        """Check what was loaded.

        Raises:
            CheckpointError: names the tensors that are missing, of no use or of another shape, or not finite.
        """
        self._check_names(model)
        names = _not_finite(model)
        if names:
            raise CheckpointError(self._numbers(model, names))

    def check_replacement(self, path: str | None, weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> None:
        """Check a checkpoint that is to take the place of the one that was loaded, before it does. Reads all of it.

        Args:
            path: of the checkpoint; None: of the one that was loaded.
            weights: its `stored_tensors`.

        Raises:
            CheckpointError: as `check`.
        """
        current = self.model, self._revision
        if path is not None:
            self.model, self._revision = path, None
        try:
            self._check_replacement(weights, model)
        except CheckpointError:
            self.model, self._revision = current
            raise

    def _check_replacement(self, weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> None:
        self._begin()
        not_finite = []
        for name, tensor in self.pass_on(weights, model):
            # Numbers of 8 bits become those of the computation, as in a load.
            numbers = tensor if _has_minimum(tensor) or not tensor.is_floating_point() else tensor.to(self._dtype)
            if _has_minimum(numbers) and not torch.stack(numbers.aminmax()).to(self._dtype).isfinite().all():
                count = int((~numbers.to(self._dtype).isfinite()).sum())
                not_finite.append(f"{self._stored_names[self._place(name)]} has {count} of {numbers.numel()}")
        self._check_names(model)
        if not_finite:
            raise CheckpointError(f"{self.model} {_NOT_FINITE} in {self._dtype}: {_listed(not_finite)}")

    def _check_names(self, model: Any) -> None:
        missing: dict[frozenset[tuple[int, ...]], str] = {}
        for name, expected in self._expected.items():
            if expected.required and not expected.places <= self._filled:
                missing.setdefault(expected.places, name)
        if missing or self._unknown or self._misshapen:
            raise CheckpointError(self._differences([model.stored_name(name) for name in missing.values()]))

    # Messages. They look into the files once more, which vLLM does not name.

    def _differences(self, missing: list[str]) -> str:
        files = self._files_of_tensors()

        def place(name: str) -> str:
            return f" ({files[name].name})" if name in files else ""

        differences = []
        if missing:
            differences.append(f"missing: {_listed(missing)}")
        if self._unknown:
            differences.append(f"the model has no place for: {_listed(name + place(name) for name in self._unknown)}")
        if self._misshapen:
            differences.append(
                "of another shape: "
                + _listed(
                    f"{name}{place(name)} is {stored} and should be {list(shape)}"
                    for name, (stored, shape) in self._misshapen.items()
                )
            )
        return f"{self.model} does not hold the model that its config.json describes; {'; '.join(differences)}"

    def _numbers(self, model: Any, parameters: list[str]) -> str:
        files = self._files_of_tensors()
        of_parameter: dict[int, list[str]] = {}
        for name, stored_name in self._stored_names.items():
            for place in self._expected[name].places:
                of_parameter.setdefault(place[0], []).append(stored_name)
        tensors = []
        for name in parameters:
            for stored_name in dict.fromkeys(of_parameter.get(id(model.get_parameter(name)), ())):
                if stored_name in files:
                    with safe_open(files[stored_name], framework="pt") as file:
                        tensor = file.get_tensor(stored_name)
                    if count := int((~tensor.isfinite()).sum()):
                        tensors.append(f"{stored_name} ({files[stored_name].name}) has {count} of {tensor.numel()}")
        # What is finite in the file does not fit in the type of the computation. (Or the file is no safetensors.)
        named = _listed(tensors) if tensors else f"{_listed(parameters)} in {next(model.parameters()).dtype}"
        return f"{self.model} {_NOT_FINITE}: {named}"

    def _unreadable(self, error: SafetensorError) -> str:
        for path in self._files():
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as reason:
                return f"{path} cannot be read, {path.stat().st_size} bytes: {reason}. Is it cut off? Download it again"
        return f"{self.model} cannot be read: {error}"

    def _files(self) -> list[Path]:
        folder = Path(self.model)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            try:
                cache = snapshot_download(
                    self.model, revision=self._revision, cache_dir=self._download_dir, local_files_only=True
                )
            except (OSError, ValueError):  # loaded from elsewhere; the messages do without files
                return []
            folder = Path(cache)
        return sorted(folder.glob("*.safetensors"))

    def _files_of_tensors(self) -> dict[str, Path]:
        found = {}
        for path in self._files():
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        return found


def stored_tensors(vllm_config: VllmConfig, path: str | None, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that ``reload_weights`` reads, under the checkpoint's names. No tensors where vLLM refuses to reload.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    config, loader = copy.copy(vllm_config.model_config), get_model_loader(vllm_config.load_config)
    if path is not None:
        config.model, config.model_weights, config.revision = path, "", None
    if not hasattr(loader, "get_all_weights"):
        return
    try:
        yield from loader.get_all_weights(config, model)
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise CheckpointError(f"{config.model} cannot be loaded: {error}") from error


def _not_finite(model: Any) -> list[str]:
    """Names of the parameters with numbers that are not finite. Reads each once and waits for the device once."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if _has_minimum(parameter)}
    # Minimum and maximum take no memory, and are NaN where any number is.
    extremes = torch.stack([torch.stack(parameter.aminmax()).float() for parameter in parameters.values()])
    finite = extremes.isfinite().all(1).tolist()
    return [name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite]


def _has_minimum(tensor: torch.Tensor) -> bool:
    """PyTorch finds none of types of 8 bits: NaN is found in the scales of such weights, not in the weights."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel() > 0


def _listed(names: Iterable[str]) -> str:
    first = list(names)
    rest = len(first) - MOST_NAMES
    return ", ".join(first[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
