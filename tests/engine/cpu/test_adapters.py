"""Rows without an adapter, among rows with one, in vLLM's torch operations."""

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from vllm_dllm.cpu import adapters

adapters.install()

INDICES = torch.tensor([0, -1, 1])
"""Two adapters, in all slots that there are; the second row has none."""
RUNS = (torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]), INDICES, 3, 1, 3)
INPUTS, WEIGHTS, BEFORE = torch.ones(3, 4), torch.ones(2, 1, 5, 4), torch.full((3, 5), 7.0)
ADDED = torch.tensor([4.0, 0.0, 4.0])[:, None].expand(3, 5)


@pytest.mark.parametrize(
    ("name", "between"),
    [
        ("bgmv_expand", (INDICES,)),
        ("sgmv_expand", RUNS),
        ("bgmv_expand_slice", (INDICES, 0, 5)),
        ("sgmv_expand_slice", (*RUNS, 0, 5)),
    ],
)
@pytest.mark.parametrize("module", [lora_ops, punica_cpu])
def test_nothing_is_added_to_a_row_without_an_adapter(module: object, name: str, between: tuple[object, ...]) -> None:
    found = BEFORE.clone()
    getattr(module, name)(INPUTS, WEIGHTS, found, *between, True)
    assert torch.equal(found, BEFORE + ADDED)


@pytest.mark.parametrize(("name", "between"), [("bgmv_shrink", (INDICES,)), ("sgmv_shrink", RUNS)])
@pytest.mark.parametrize("module", [lora_ops, punica_cpu])
def test_a_row_without_an_adapter_shrinks_to_zeros(module: object, name: str, between: tuple[object, ...]) -> None:
    found = BEFORE.clone()
    getattr(module, name)(INPUTS, WEIGHTS, found, *between, 1.0)
    assert torch.equal(found, ADDED)
