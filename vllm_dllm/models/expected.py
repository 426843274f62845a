"""The tensors that a model of vLLM takes from a checkpoint, quantised or not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.parameter import PerTensorScaleParameter

UNUSED = frozenset({"weight_shape", "bias", "weight_g_idx", "g_idx", "g_idx_sort_indices"})
"""Kinds of tensors of quantised layers that the computation does without: vLLM has a default or reads none of them.
A bias of experts is one, since vLLM makes room for biases in some formats of every model."""


class Expected(NamedTuple):
    """A tensor that a model takes."""

    places: frozenset[tuple[int, ...]]
    """What it fills: parameters, by identity, or numbered parts of them. Tied parameters have several names."""
    shape: tuple[int, ...] | None
    """Before it is split over ranks; ``None``: not known."""
    required: bool


def expected_tensors(model: Any, *, all_experts: bool = True) -> dict[str, Expected]:
    """The tensors that a model of vLLM takes, by name. ``all_experts``: every rank is handed all experts."""
    expected: dict[str, Expected] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, RoutedExperts):
            expected |= _expected_experts(path.removesuffix(".routed_experts"), module, required=all_experts)
            continue
        parent, _, own_name = path.rpartition(".")
        sources = model.packed_modules_mapping.get(own_name, (own_name,))
        for kind, parameter in module.named_parameters(recurse=False):
            # Scales of K/V, which are 1 where a checkpoint has none.
            required = not isinstance(module, Attention) and not (kind in UNUSED and kind != "bias")
            for part, source in enumerate(sources):
                shape = _shape(module, parameter, None if len(sources) == 1 else part)
                name = ".".join(filter(None, (parent, source, kind)))
                expected[name] = Expected(frozenset({(id(parameter), part)}), shape, required)
    return expected


def _shape(module: Any, parameter: torch.Tensor, part: int | None) -> tuple[int, ...] | None:
    """Shape of the tensor for a parameter, or for a part of it."""
    rows: Sequence[int]
    match module:
        case QKVParallelLinear():
            keys = module.total_num_kv_heads
            rows = (
                module.total_num_heads * module.head_size,
                keys * module.head_size,
                keys * module.v_head_size,
            )
        case MergedColumnParallelLinear():
            rows = module.output_sizes
        case LinearBase():
            rows = (module.output_size,)
        case VocabParallelEmbedding():
            if not isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                return None
            return (module.org_vocab_size, module.embedding_dim)[: parameter.dim()]
        case Attention():
            # A scale of K/V is stored as one number, or as one for each head.
            return None
        case _:
            return tuple(parameter.shape)
    return _whole(module, parameter, sum(rows) if part is None else rows[part])


def _whole(module: Any, parameter: Any, outputs: int) -> tuple[int, ...] | None:
    """Shape of the tensor for ``outputs`` outputs of a linear layer, over all ranks. Integers may pack several weights,
    and scales may be shared by several."""
    if isinstance(parameter, PerTensorScaleParameter):
        return None
    shape = list(parameter.shape)
    # Layers that every rank has whole know no parts.
    outputs_here = getattr(module, "output_size_per_partition", module.output_size)
    inputs_here = getattr(module, "input_size_per_partition", module.input_size)
    for dim, wanted, here in (
        (getattr(parameter, "output_dim", None), outputs, outputs_here),
        (getattr(parameter, "input_dim", None), module.input_size, inputs_here),
    ):
        if dim is None:
            continue
        whole, rest = divmod(wanted * shape[dim], here)
        if rest:
            # Blocks of weights that the layer's size cuts.
            return None
        shape[dim] = whole
    return tuple(shape)


def _expected_experts(path: str, module: Any, *, required: bool) -> dict[str, Expected]:
    """The tensors of a layer's experts: those of each, or all in two."""
    width, hidden = module.moe_config.intermediate_size, module.moe_config.hidden_dim_unpadded
    num_experts = range(module.moe_config.num_logical_experts)
    expected: dict[str, Expected] = {}
    for own_name, parameter in module.named_parameters(recurse=False):
        side, _, kind = own_name.partition("_")
        is_plain = kind == "weight" and parameter.is_floating_point() and parameter.element_size() > 1
        projections = {
            "w13": ((module.ckpt_gate_proj_name, 0), (module.ckpt_up_proj_name, 1)),
            "w2": ((module.ckpt_down_proj_name, 0),),
        }.get(side, ())
        for projection, half in projections:
            shape = (hidden, width) if side == "w2" else (width, hidden)
            for expert in num_experts:
                place = (id(parameter), expert, half)
                expected[f"{path}.{expert}.{projection}.{kind}"] = Expected(
                    frozenset({place}), shape if is_plain else None, required and kind not in UNUSED
                )
        if is_plain:
            places = frozenset((id(parameter), expert, half) for expert in num_experts for _, half in projections)
            expected[f"{path}.{'down_proj' if side == 'w2' else 'gate_up_proj'}"] = Expected(places, None, False)
    return expected
