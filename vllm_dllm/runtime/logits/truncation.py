"""``top_k`` and ``top_p``, such that what they leave of a row depends on that row alone.

On a GPU vLLM seeks the border of ``top_p`` in one of two ways. It shares each of up to 64 rows among programs, the more
the fewer rows there are, and gives each of more rows a program. What the two ways leave differs by up to a thousandth
of the probability, and a number of programs rounds sums in its own way. So a request would draw other tokens beside
other requests. Here vLLM always gets 64 rows.
"""

import numpy as np
from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

ROWS = 64
"""Rows that vLLM truncates at a time."""


def apply_top_k_top_p(states: SamplingStates, logits: Tensor, slots: Tensor, slots_np: np.ndarray) -> Tensor:
    """Set the logits that ``top_k`` and ``top_p`` leave out to -inf; may change ``logits``.

    Args:
        states: vLLM's, of the slots.
        logits: [n * K, vocab] float32, K rows of each of n requests.
        slots: [n * K] int64.
        slots_np: [n], on the host.
    """
    if not logits.is_cuda or (states.top_p.np[slots_np] == 1.0).all():
        return states.apply_top_k_top_p(logits, slots, slots_np)
    has_top_k = (states.top_k.np[slots_np] != states.vocab_size).any()
    return truncate(logits, states.top_k.gpu[slots] if has_top_k else None, states.top_p.gpu[slots])


def truncate(logits: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    """``logits`` [rows, vocab] float32, changed in place, truncated ``ROWS`` at a time.

    Args:
        top_k: [rows] int32, the vocabulary's size for rows without; None: all rows are without.
        top_p: [rows] float32, 1 for rows without.
    """
    for begin in range(0, len(logits), ROWS):
        chunk = slice(begin, begin + ROWS)
        rows, k, p = logits[chunk], None if top_k is None else top_k[chunk], top_p[chunk]
        missing = ROWS - len(rows)
        if missing:
            rows, p = pad(rows, (0, 0, 0, missing)), pad(p, (0, missing), value=1.0)
            k = None if k is None else pad(k, (0, missing), value=logits.shape[1])
        truncated = topk_topp_sampler.apply_top_k_top_p(rows, k, p)
        if missing or truncated is not rows:
            logits[chunk] = truncated[: ROWS - missing]
    return logits
