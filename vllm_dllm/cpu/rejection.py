"""Verification of drafts of Model Runner V2 in torch, not in its Triton kernels (``vllm/v1/worker/gpu/spec_decode``).

A request brings the rows of its drafts and one more, for the bonus token. Every draw is vLLM's own, keyed by seed and
position, so that the draw depends neither on the batch nor on the device, up to rounding.

Shapes: ``cu_num_logits`` [num_reqs + 1] delimits the rows of each request, the row of draft i holding the token
*before* it; arrays by slot are [max_num_reqs, ...].
"""

import numpy as np
import torch

from vllm_dllm.cpu.launch import Array, LeftToTriton, spread
from vllm_dllm.cpu.sampling import NEG_INF, gumbel_noise

_UINT32 = 0xFFFFFFFF
_LEAST_UNIFORM = np.float32(4.6566127342e-10)  # of Triton's ``tl.rand``, and its unit


def uniform(seed: int, pos: int) -> float:
    """Return the float32 of (0, 1) that vLLM verifies a draft against: Philox-4x32-10 (Triton's ``tl.rand``)."""
    words = [pos & _UINT32, pos >> 32 & _UINT32, 0, 0]
    keys = [seed & _UINT32, seed >> 32 & _UINT32]
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [right >> 32 ^ words[1] ^ keys[0], right & _UINT32, left >> 32 ^ words[3] ^ keys[1], left & _UINT32]
        keys = [keys[0] + 0x9E3779B9 & _UINT32, keys[1] + 0xBB67AE85 & _UINT32]
    magnitude = words[0] if words[0] < 2**31 else _UINT32 - words[0]
    return float(max(np.float32(magnitude) * _LEAST_UNIFORM, _LEAST_UNIFORM))


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None,
    use_fp64: bool,
    use_block_verification: bool,
    contexts: torch.Tensor | None,
    fly_window_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the drafts of a batch, token by token.

    Args:
        target_logits: [num_logits, vocab], after temperature.
        draft_logits: [max_num_reqs, num_speculative_steps, vocab or less], before temperature; None if every
            draft had probability 1.
        draft_sampled: [num_logits] input tokens of the rows; the first of a request is no draft. -1 is a placeholder
            and ends the drafts: nobody proposed it, and the token in its place is drawn from the target.
        pos: [num_logits] positions of the input tokens.
        synthetic_conditional_rates, use_block_verification, contexts, fly_window_size: of other ways to verify, which
            stay with Triton.

    Returns:
        Tokens int64 [num_reqs, num_speculative_steps + 1] and how many of each row count, int32 [num_reqs].
    """
    if synthetic_conditional_rates is not None or use_block_verification or contexts is not None or fly_window_size:
        raise LeftToTriton
    vocab_size = target_logits.shape[1]
    if draft_logits is not None:
        vocab_size = min(vocab_size, draft_logits.shape[2])  # either of them may be padded
    bounds, tokens, positions = cu_num_logits.tolist(), draft_sampled.tolist(), pos.tolist()
    sampled = torch.zeros(len(bounds) - 1, num_speculative_steps + 1, dtype=torch.int64)
    num_sampled = torch.zeros(len(bounds) - 1, dtype=torch.int32)
    for request, slot in enumerate(idx_mapping.tolist()):
        start, end = bounds[request], bounds[request + 1]
        drafts = tokens[start + 1 : end]
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        kept = verify(
            drafts,
            target_logits[start : start + len(drafts) + 1, :vocab_size],
            None if draft_logits is None else draft_logits[slot, : len(drafts), :vocab_size],
            temperature=float(temperature[slot]),
            seed=int(seed[slot]),
            positions=positions[start:end],
            use_fp64=use_fp64,
        )
        sampled[request, : len(kept)] = torch.tensor(kept)
        num_sampled[request] = len(kept)
    return sampled, num_sampled


def verify(
    drafts: list[int],
    target: torch.Tensor,
    proposal: torch.Tensor | None,
    *,
    temperature: float,
    seed: int,
    positions: list[int],
    use_fp64: bool,
) -> list[int]:
    """Return the drafts of a request that are accepted, and the token after them (arXiv 2211.17192, Algorithm 1).

    Args:
        drafts: n tokens.
        target: [n + 1, vocab]: logits after temperature and all else that the request asks for.
        proposal: [n, vocab]: logits before temperature. None: every draft had probability 1.
        positions: n + 1 or more.
    """
    if temperature == 0:
        best = target.argmax(-1)
        return best[: _num_passed(best[:-1] == torch.tensor(drafts)) + 1].tolist()
    rows = range(len(drafts))
    log_p = target[:-1].float().log_softmax(-1)
    log_ratio = log_p[rows, drafts].double()
    if proposal is not None:
        log_q = (proposal.float() / temperature).log_softmax(-1)
        log_ratio = (log_ratio - log_q[rows, drafts].double()).where(log_ratio > NEG_INF, log_ratio)
    # Accept draft x with probability min(1, p(x) / q(x)).
    uniforms = torch.tensor([uniform(seed, positions[row]) for row in rows], dtype=torch.float64)
    accepted = _num_passed(uniforms.log() < log_ratio)
    scores = target[accepted].float()
    if accepted < len(drafts):
        if proposal is None:
            residual = scores.clone()
            residual[drafts[accepted]] = NEG_INF
        else:  # max(p(x) - q(x), 0)
            q_over_p = (log_q[accepted] - log_p[accepted]).exp()
            residual = torch.where(q_over_p < 1, log_p[accepted] + torch.log1p(-q_over_p), NEG_INF)
        # A proposal that covers the target up to rounding leaves nothing, and may be rejected up to rounding.
        if residual.max() > NEG_INF:
            scores = residual
    noise = gumbel_noise(seed, positions[accepted], len(scores), use_fp64)
    return [*drafts[:accepted], int((scores.numpy() + noise).argmax())]


def _num_passed(passed: torch.Tensor) -> int:
    """Number of items of ``passed`` [n] bool before the first False."""
    return int(passed.cumprod(0).sum())


def gather_draft_sampled(
    draft_sampled: Array,
    pos: Array,
    input_ids: Array,
    positions: Array,
    logits_indices: Array,
    expanded_idx_mapping: Array,
    expanded_local_pos: Array,
    prefill_len: Array,
    num_logits: int,
) -> None:
    """Gather input token and position of each logits row.

    A draft of a step that begins in the prompt is nobody's proposal and becomes a placeholder, -1.
    """
    rows, local_pos = logits_indices[:num_logits], expanded_local_pos[:num_logits]
    pos[:num_logits] = positions[rows]
    in_prompt = positions[rows] - local_pos < prefill_len[expanded_idx_mapping[:num_logits]]
    draft_sampled[:num_logits] = np.where((local_pos > 0) & in_prompt, -1, input_ids[rows])


def flatten_sampled(flat_sampled: Array, sampled: Array, num_sampled: Array, cu_num_logits: Array) -> None:
    """Put the sampled tokens of each request ([num_reqs, steps + 1]) where its logits rows are."""
    requests, offsets = spread(num_sampled)
    flat_sampled[cu_num_logits[requests] + offsets] = sampled[requests, offsets]
