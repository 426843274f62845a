"""A record of one denoising step: the tokens and branches that the step saw, and what the step decided.

``vllm-dllm calibrate`` and ``vllm-dllm trace`` set ``BlockDiffusionSampler.recorder`` to get a `Round` for every step.
While the recorder is None, the sampler computes nothing for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm import LLM


class Round(NamedTuple):
    """One denoising step of D decoding requests with up to B branches of W positions each.

    Branch 0 is the block as it stands, the others are drafts of later states. Absent branches hold mask tokens.
    """

    req_ids: list[str]
    """D ids of requests, as the engine core names them (vLLM may add a suffix to the user's)."""
    block_start: torch.Tensor
    """[D] int64: absolute position of column 0."""
    first: torch.Tensor
    """[D] int64: first column that is not prompt."""
    denoised: torch.Tensor
    """[D] bool: False where the forward only wrote a finished block to the K/V cache."""
    branches: torch.Tensor
    """[D, B, W] int64: tokens that the forward saw."""
    present: torch.Tensor
    """[D, B] bool."""
    reached: torch.Tensor
    """[D, B] bool: branches on the accepted path, the block itself included."""
    accepted: torch.Tensor
    """[D] int64: the branch whose logits the step went on from."""
    predicted: torch.Tensor
    """[D, B, W] int64: token that each position would get."""
    confidence: torch.Tensor
    """[D, B, W] float32: its probability."""
    chosen: torch.Tensor
    """[D, W] bool: positions that the step unmasked from the accepted branch's logits."""
    tokens: torch.Tensor
    """[D, W] int64: the block after the step."""
    top_tokens: Callable[[int], torch.Tensor]
    """``top_tokens(k)``: [D, W, k] int64, the most probable tokens by the accepted branch's logits, best first, without
    the mask token."""


Recorder = Callable[[Round], None]


@contextmanager
def recording(llm: "LLM", recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` of every denoising step that an engine in this process makes meanwhile."""
    engine_core = llm.llm_engine.engine_core.engine_core
    sampler = engine_core.model_executor.driver_worker.worker.model_runner.sampler
    sampler.recorder = recorder
    try:
        yield
    finally:
        sampler.recorder = None
