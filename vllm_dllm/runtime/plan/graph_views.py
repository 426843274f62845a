"""Views at fixed addresses, for steps whose attention is part of a CUDA graph.

A graph reads the tensors that it was captured with. Here are those tensors: as many groups as a graph has room for,
each of a block, or two of each block (`causal_prefix`). A step copies its views into them. What the graph has room for
beyond is padding: groups that write no K/V and see page 0, which vLLM gives to nobody.
"""

import numpy as np
import torch

from vllm_dllm.runtime.plan.causal_prefix import starts_of_two_views
from vllm_dllm.runtime.plan.rows import Layout, Views


class GraphViews:
    """Views of steps in which every row is of a group of a block: all requests decode."""

    def __init__(self, layout: Layout, max_rows: int, width: int, device: torch.device) -> None:
        """Make room for graphs of up to ``max_rows`` rows, whose block tables have ``width`` pages."""
        length = layout.block_length
        num_blocks = -(-max_rows // length)
        self.layout = layout
        starts = (np.arange(num_blocks + 1) * length).astype(np.int32)
        if layout.views_of_a_group > 1:
            starts = starts_of_two_views(starts, num_blocks)
        self._starts = np.minimum(starts, max_rows)
        # By rows of a graph, since the last block may have fewer than others: the starts, and those of padding.
        self._starts_on_device: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        num_views = num_blocks * layout.views_of_a_group
        self.seq_lens = torch.full((num_views,), length, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_views, width, dtype=torch.int32, device=device)
        self.causal = torch.zeros(num_views, dtype=torch.int32, device=device) if layout.masks_differ else None

    def of(self, num_rows: int) -> Views:
        """The views of the graph with so many rows, as they stand."""
        num_views = -(-num_rows // self.layout.block_length) * self.layout.views_of_a_group
        starts = np.minimum(self._starts[: num_views + 1], num_rows)
        if num_rows not in self._starts_on_device:
            on_device = torch.from_numpy(starts).to(self.seq_lens.device)
            self._starts_on_device[num_rows] = on_device.clone(), on_device
        return Views(
            query_start_loc=starts,
            query_start_loc_on_device=self._starts_on_device[num_rows][0],
            block_tables=[self.block_table[:num_views]],
            seq_lens=self.seq_lens[:num_views],
            # A backend may choose a kernel by it, and a graph keeps the kernel.
            max_seq_len=self.layout.limit,
            causal=self.layout.causal_blocks if self.causal is None else self.causal[:num_views],
        )

    def hold(self, views: Views | None, num_rows: int) -> Views:
        """Copy the views of a step into those of the graph that it runs in.

        Args:
            views: of blocks alone; ``None``: vLLM's own steps, in which nobody's rows are computed.
            num_rows: of the graph.
        """
        held = self.of(num_rows)
        num_views, count = len(held.seq_lens), 0
        if views is not None:
            count = len(views.seq_lens)
            (table,) = views.block_tables
            self.block_table[:count, : table.shape[1]] = table[:count]
            self.seq_lens[:count] = views.seq_lens
            if self.causal is not None:
                self.causal[:count] = views.causal
        self.block_table[count:num_views] = 0
        self.seq_lens[count:num_views] = self.layout.block_length
        if self.causal is not None:
            self.causal[count:num_views] = 0
        if self.layout.views_of_a_group > 1:
            # Only the device knows where the first view of a block ends.
            starts, of_padding = self._starts_on_device[num_rows]
            starts[count:] = of_padding[count:]
            if views is not None:
                starts[:count] = views.query_start_loc_on_device[:count]
        return held
