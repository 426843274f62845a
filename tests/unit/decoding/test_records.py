"""Records with a row per request."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_dllm.decoding.records import PerRequest


@dataclass(frozen=True)
class Inner(PerRequest):
    values: Tensor


@dataclass(frozen=True)
class Outer(PerRequest):
    values: Tensor
    inner: Inner
    number: int = 3
    nothing: Tensor | None = None

    @cached_property
    def twice(self) -> Inner:
        return Inner(2 * self.values)


def test_some_requests_of_a_record_are_a_record_of_them() -> None:
    record = Outer(torch.arange(3), Inner(torch.arange(3, 6)))
    assert record.twice.values.tolist() == [0, 2, 4]  # What is computed from the fields is no field.
    some = record.select(torch.tensor([2, 0]))
    assert (some.values.tolist(), some.inner.values.tolist()) == ([2, 0], [5, 3])
    assert (some.number, some.nothing, some.twice.values.tolist()) == (3, None, [4, 0])
    both = Outer.cat([some, record])
    assert (both.values.tolist(), both.inner.values.tolist()) == ([2, 0, 0, 1, 2], [5, 3, 3, 4, 5])
