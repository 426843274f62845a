"""CUDA graphs of a drafter's layers; attention runs between them (piecewise graphs)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, has_compiled_submodule

Run = Callable[[torch.Tensor, torch.Tensor, CUDAGraphMode], Any]
"""Runs the drafter on ids and positions of rows."""


class DrafterGraphs(CudaGraphManager):
    """A graph for each of the engine's capture sizes. A round runs in the smallest that has room for its rows.

    Before the K/V cache is made, vLLM looks for managers among a speculator's attributes and measures their memory.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device, CUDAGraphMode.PIECEWISE, decode_query_len=1)
        most = max(self.compilation_config.cudagraph_capture_sizes or [0])
        # Where the graphs read.
        self.input_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)

    def capture_rounds(self, model: nn.Module, run: Run) -> None:
        """Capture all graphs; ``run`` is called with each size and mode that vLLM asks for."""
        if self.use_breakable_cg:
            self.init_breakable_cg_runner(model)

        def create_forward(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            rows = slice(desc.num_tokens)

            def forward(mode: CUDAGraphMode) -> None:
                run(self.input_ids[rows], self.positions[rows], mode)

            return forward

        self.capture(create_forward, "Capturing CUDA graphs of the drafter")

    def place(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, CUDAGraphMode]:
        """Put the rows ``[rows]`` where a graph reads them.

        Returns:
            The graph's rows, first those that were given and then padding, and how the drafter is to run on them. Rows
            that no graph has room for come back as they are.
        """
        desc = self.dispatch(0, len(input_ids), None, 0)
        if desc.cg_mode != CUDAGraphMode.PIECEWISE:
            return input_ids, positions, CUDAGraphMode.NONE
        self.input_ids[: len(input_ids)] = input_ids
        self.positions[: len(positions)] = positions
        return self.input_ids[: desc.num_tokens], self.positions[: desc.num_tokens], desc.cg_mode


def graphs_of(
    model: nn.Module, cudagraph_mode: CUDAGraphMode, vllm_config: VllmConfig, device: torch.device
) -> DrafterGraphs | None:
    """The graphs of a drafter, yet to be captured; ``None`` if the engine has none that are piecewise.

    Nor are there any with data parallelism, where ranks would have to agree on the size of every round.
    """
    is_cut = is_breakable_cudagraph_enabled() or has_compiled_submodule(model)
    alone = vllm_config.parallel_config.data_parallel_size == 1
    if not (cudagraph_mode.has_piecewise_cudagraphs() and is_cut and alone):
        return None
    return DrafterGraphs(vllm_config, device)
