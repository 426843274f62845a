"""What ``top_k`` and ``top_p`` leave of a row does not depend on the number of rows beside it."""

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_dllm.runtime.logits import truncation

VOCAB = 300


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, ``top_k`` and ``top_p``: rows with each of the two, with both and with neither."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, VOCAB, generator=generator)
    place = torch.arange(count)
    top_k = torch.where(place % 2 == 0, VOCAB, 1 + place % 20).int()
    top_p = torch.where(place % 4 < 2, 1.0, 0.5 + place % 5 / 10)
    return logits, top_k, top_p


@pytest.mark.parametrize("count", [1, 32, 63, 64, 65, 96, 110, 128, 130])
@pytest.mark.parametrize("has_top_k", [False, True])
def test_vllm_always_gets_as_many_rows(count: int, has_top_k: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original, sizes = topk_topp_sampler.apply_top_k_top_p, []

    def apply(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        assert p is not None
        assert len(p) == len(logits)
        assert k is None or len(k) == len(logits)
        sizes.append(len(logits))
        return original(logits, k, p)

    logits, top_k, top_p = rows_of(count)
    expected = original(logits.clone(), top_k if has_top_k else None, top_p)
    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_top_p", apply)
    assert torch.equal(truncation.truncate(logits, top_k if has_top_k else None, top_p), expected)
    assert sizes == [truncation.ROWS] * -(-count // truncation.ROWS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_top_k", [False, True])
def test_a_row_is_truncated_alike_among_any_number_of_rows(has_top_k: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = 2 * torch.randn(110, 151_936, generator=generator, device="cuda")
    _, top_k, top_p = (values.cuda() for values in rows_of(110))
    top_p = torch.where(top_p == 1.0, 0.95, top_p)
    every = truncation.truncate(logits.clone(), top_k if has_top_k else None, top_p)
    for count in (1, 32, 64, 96):
        some = truncation.truncate(logits[:count].clone(), top_k[:count] if has_top_k else None, top_p[:count])
        assert torch.equal(some, every[:count])
