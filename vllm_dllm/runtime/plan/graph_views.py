"""Views at fixed addresses, for steps whose attention is part of a CUDA graph.

A graph reads the tensors that it was captured with. Here are those tensors: as many groups as a graph has room for,
each of a block. A step copies its views into them. What the graph has room for beyond is padding: groups that write no
K/V and see page 0, which vLLM gives to nobody.
"""

import numpy as np
import torch

from vllm_dllm.runtime.plan.rows import Layout, Views


class GraphViews:
    """Views of steps in which every row is of a group of a block: all requests decode."""

    def __init__(self, layout: Layout, max_rows: int, width: int, device: torch.device) -> None:
        """Make room for graphs of up to ``max_rows`` rows, whose block tables have ``width`` pages."""
        length = layout.block_length
        num_groups = -(-max_rows // length)
        self.layout = layout
        self._starts = np.minimum(np.arange(num_groups + 1) * length, max_rows).astype(np.int32)
        # By rows of a graph, since the last group may have fewer than a block.
        self._starts_on_device: dict[int, torch.Tensor] = {}
        self.seq_lens = torch.full((num_groups,), length, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_groups, width, dtype=torch.int32, device=device)
        self.causal = torch.zeros(num_groups, dtype=torch.int32, device=device) if layout.masks_differ else None

    def of(self, num_rows: int) -> Views:
        """The views of the graph with so many rows, as they stand."""
        num_groups = -(-num_rows // self.layout.block_length)
        starts = np.minimum(self._starts[: num_groups + 1], num_rows)
        if num_rows not in self._starts_on_device:
            on_device = torch.arange(num_groups + 1, dtype=torch.int32, device=self.seq_lens.device)
            self._starts_on_device[num_rows] = (on_device * self.layout.block_length).clamp_(max=num_rows)
        return Views(
            query_start_loc=starts,
            query_start_loc_on_device=self._starts_on_device[num_rows],
            block_tables=[self.block_table[:num_groups]],
            seq_lens=self.seq_lens[:num_groups],
            # A backend may choose a kernel by it, and a graph keeps the kernel.
            max_seq_len=self.layout.limit,
            causal=False if self.causal is None else self.causal[:num_groups],
        )

    def hold(self, views: Views | None, num_rows: int) -> Views:
        """Copy the views of a step into those of the graph that it runs in.

        Args:
            views: of blocks alone; ``None``: vLLM's own steps, in which nobody's rows are computed.
            num_rows: of the graph.
        """
        held = self.of(num_rows)
        num_groups, count = len(held.seq_lens), 0
        if views is not None:
            count = len(views.seq_lens)
            (table,) = views.block_tables
            self.block_table[:count, : table.shape[1]] = table[:count]
            self.seq_lens[:count] = views.seq_lens
            if self.causal is not None:
                self.causal[:count] = views.causal
        self.block_table[count:num_groups] = 0
        self.seq_lens[count:num_groups] = self.layout.block_length
        if self.causal is not None:
            self.causal[count:num_groups] = 0
        return held
