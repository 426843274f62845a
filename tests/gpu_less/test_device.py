"""The GPU that is not there notices what it is for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engine.harness import engine_of
from tests.gpu_less.device import Device, DeviceTensor, device_world
from tests.gpu_less.test_steps import BLOCKS, params, replay
from vllm_dllm.runtime import sampler


def on_device(*values: int) -> DeviceTensor:
    return DeviceTensor(torch.tensor(values))


def problems_of(run: Callable[[Tensor, Tensor], object]) -> list[str]:
    """What is noted while ``run`` has a device tensor and a host tensor, [3] int64 both."""
    device = Device()
    with device_world(device):
        run(on_device(1, 0, 2), torch.tensor([1, 0, 2]))
    return [text.partition(" at ")[0] for text in device.problems]


WAITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda d, h: d[0].item(),
    "int": lambda d, h: int(d.sum()),
    "if": lambda d, h: bool(d.any()),
    "cpu": lambda d, h: d.cpu(),
    "numpy": lambda d, h: d.cpu().numpy(),
    "to the host": lambda d, h: d.to("cpu"),
    "to the host, read at once": lambda d, h: d.to("cpu", non_blocking=True),
    "to the device": lambda d, h: h.to("cuda"),
    "from memory that is not pinned": lambda d, h: h.to("cuda", non_blocking=True),
    "copy_ to the host": lambda d, h: h.copy_(d),
    "copy_ to the device": lambda d, h: d.copy_(h),
    "nonzero": lambda d, h: d.nonzero(),
    "where": lambda d, h: torch.where(d > 0),
    "unique": lambda d, h: d.unique(),
    "equal": lambda d, h: torch.equal(d, d),
    "mask": lambda d, h: d[d > 0],
    "write through a mask": lambda d, h: d.__setitem__(d > 0, d[:2] + 1),
    "masked_select": lambda d, h: d.masked_select(d > 0),
    "repeat_interleave": lambda d, h: d.repeat_interleave(d),
    "tensor of numbers": lambda d, h: torch.tensor([1, 2], device="cuda"),
}
MIXES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda d, h: d + h,
    "index of the host": lambda d, h: d[h],
    "index of the device": lambda d, h: h[d],
    "where": lambda d, h: torch.where(d > 0, d, h),
    "cat": lambda d, h: torch.cat((d, h)),
}
FREE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda d, h: (d + 1).sum(),
    "shape": lambda d, h: d.shape[0] + len(d) + d.numel(),
    "where": lambda d, h: torch.where(d > 0, d, 0),
    "index": lambda d, h: d[d],
    "masked_fill": lambda d, h: d.masked_fill(d > 0, 5),
    "repeat_interleave": lambda d, h: d.repeat_interleave(d, output_size=3),
    "pinned, to the device": lambda d, h: h.pin_memory().to("cuda", non_blocking=True),
    "into pinned memory": lambda d, h: torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(d, non_blocking=True),
    "work of the host": lambda d, h: h[h > 0].tolist(),
    "new": lambda d, h: torch.zeros(3, device="cuda"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for(name: str) -> None:
    assert [text for text in problems_of(WAITS[name]) if text.startswith(("the host waits", "the host may read"))]


def test_tolist() -> None:
    with pytest.raises(RuntimeError, match="tolist"):
        problems_of(lambda d, h: d.tolist())


@pytest.mark.parametrize("name", MIXES)
def test_tensors_of_host_and_device(name: str) -> None:
    assert [text for text in problems_of(MIXES[name]) if "meets a device tensor" in text]


@pytest.mark.parametrize("name", FREE)
def test_what_a_step_may_do(name: str) -> None:
    assert problems_of(FREE[name]) == []


def test_values_and_launches() -> None:
    device = Device()
    with device_world(device):
        tensor = on_device(1, 2, 3)
        view = tensor.view(3, 1)[:2]
        total = (view * 2).sum()
        new = torch.empty(4, device="cuda")
    assert (total.device.type, new.device.type) == ("cuda", "cuda")
    assert total.values.item() == 6
    # Views and allocations launch nothing.
    assert {name: count for (name, _), count in device.launches.items()} == {"mul": 1, "sum": 1}


def test_tensors_in_place_share_memory() -> None:
    device = Device()
    with device_world(device):
        tensor = on_device(1, 2, 3)
        tensor[1:].add_(10)
    assert tensor.values.tolist() == [1, 12, 13]


def test_a_wait_in_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = sampler.BlockDiffusionSampler.__call__

    def waits(self: sampler.BlockDiffusionSampler, logits: Tensor, *more: object, **named: object) -> object:
        logits.sum().item()
        return call(self, logits, *more, **named)

    monkeypatch.setattr(sampler.BlockDiffusionSampler, "__call__", waits)
    found = replay(engine_of("sdar", BLOCKS["sdar"], dllm={"max_drafts": 3}, max_num_seqs=8), params({}))
    assert any("_local_scalar_dense" in text for text in found.problems())
