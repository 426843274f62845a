"""Two views of a block: what every row of a forward sees."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.runtime.plan.causal_prefix import causal_rows, in_two_views, starts_of_two_views
from vllm_dllm.runtime.plan.rows import DeviceViews

MASK = 9


@given(st.data())
def test_rows_before_the_first_mask_see_what_is_before_them_and_others_as_ever(data: st.DataObject) -> None:
    length, num_groups, num_prompts = (data.draw(st.integers(*bounds)) for bounds in ((2, 6), (0, 3), (0, 2)))
    block = st.lists(st.sampled_from([1, MASK]), min_size=length, max_size=length)
    blocks = [data.draw(block) for _ in range(num_groups)]
    drafts = [data.draw(st.booleans()) for _ in blocks]
    causal = [data.draw(st.booleans()) for _ in range(num_groups + num_prompts)]
    starts = [data.draw(st.integers(0, 3)) * length for _ in blocks]
    chunks = [data.draw(st.integers(1, length)) for _ in range(num_prompts)]
    first_rows = np.cumsum([0, *[length] * num_groups, *chunks], dtype=np.int32)
    seen_by_groups = DeviceViews(
        query_start_loc=torch.from_numpy(first_rows),
        seq_lens=torch.tensor([*(start + length for start in starts), *chunks], dtype=torch.int32),
        block_table=torch.arange(num_groups + num_prompts, dtype=torch.int32).unsqueeze(1),
        causal=torch.tensor(causal, dtype=torch.int32) if data.draw(st.booleans()) or any(causal) else False,
    )
    rows = causal_rows(
        torch.tensor(blocks, dtype=torch.int64).view(-1, length), torch.tensor(drafts, dtype=torch.bool), MASK
    )
    views = in_two_views(seen_by_groups, rows, length)

    seen = {}
    bounds, tables = views.query_start_loc.tolist(), views.block_table.flatten().tolist()
    for view, (first, end) in enumerate(pairwise(bounds)):
        assert first < end, "kernels need not expect views without rows"
        for row in range(first, end):
            behind = end - 1 - row if views.causal[view] else 0
            seen[row] = tables[view], int(views.seq_lens[view]) - behind
    expected = []
    for group, (tokens, start) in enumerate(zip(blocks, starts, strict=True)):
        masked = tokens.index(MASK) if MASK in tokens and drafts[group] else 0
        for offset in range(length):
            is_causal = causal[group] or offset < masked
            expected.append((group, start + (offset + 1 if is_causal else length)))
    for group, num_rows in enumerate(chunks, start=num_groups):
        expected += [(group, offset + 1 if causal[group] else num_rows) for offset in range(num_rows)]
    assert [seen[row] for row in range(len(seen))] == expected

    on_host = starts_of_two_views(first_rows, num_groups)
    assert len(on_host) == len(bounds)
    assert np.diff(on_host).max(initial=0) >= np.diff(bounds).max(initial=0)
