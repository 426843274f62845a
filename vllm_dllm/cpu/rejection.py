"""Verification of drafts of Model Runner V2 in torch, not in its Triton kernels (``vllm/v1/worker/gpu/spec_decode``).

A request brings the rows of its drafts and one more, for the bonus token. Its drafts are accepted from the left until
one is rejected; the token in the place of the rejected draft is drawn from the residual, and where all drafts are
accepted, the last row gives the bonus token. Every draw is vLLM's own, keyed by seed and position, so that the draw
depends neither on the batch nor on the device, up to rounding.

Shapes: ``cu_num_logits`` [num_reqs + 1] delimits the rows of each request, the row of draft i holding the token
*before* it; arrays by slot are [max_num_reqs, ...].
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_dllm.cpu.launch import Array, LeftToTriton
from vllm_dllm.cpu.sampling import gumbel_noise

_NEG_INF = float("-inf")
_UINT32 = 0xFFFFFFFF
_LEAST_UNIFORM = np.float32(4.6566127342e-10)  # of Triton's ``tl.rand``, and its unit


@dataclass(frozen=True)
class Drafted:
    """The n drafts of one request and what they are verified with.

    A placeholder ends the drafts: nobody proposed it, and the token in its place is drawn from the target.
    """

    drafts: list[int]
    target: torch.Tensor
    """[n + 1, vocab]: logits after temperature and all else that the request asks for."""
    proposal: torch.Tensor | None
    """[n, vocab]: logits before temperature. None: every draft had probability 1."""
    temperature: float
    seed: int
    positions: list[int]
    """[n + 1]"""
    rates: list[float] | None = None
    """[>= n]: acceptance rates instead of a verification."""

    def uniforms(self) -> list[float]:
        """What each draft is verified against."""
        return [uniform(self.seed, position) for position in self.positions[: len(self.drafts)]]

    def log_target(self) -> torch.Tensor:
        """Log-probabilities of the target, float32 [n, vocab]."""
        return self.target[: len(self.drafts)].float().log_softmax(-1)

    def log_proposal(self) -> torch.Tensor | None:
        """Log-probabilities that the drafts were drawn from, float32 [n, vocab]."""
        return None if self.proposal is None else (self.proposal.float() / self.temperature).log_softmax(-1)

    def log_ratios(self, log_p: torch.Tensor, log_q: torch.Tensor | None) -> list[float]:
        """log p(x) / q(x) of each draft x."""
        steps = range(len(self.drafts))
        target = log_p[steps, self.drafts].double()
        if log_q is not None:
            target = (target - log_q[steps, self.drafts].double()).where(target > _NEG_INF, target)
        return target.tolist()


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
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the drafts of a batch.

    Args:
        target_logits: [num_logits, vocab], after temperature.
        draft_logits: [max_num_reqs, num_speculative_steps, vocab or less], before temperature; None if every
            draft had probability 1.
        draft_sampled: [num_logits] input tokens of the rows, -1 for a placeholder; the first of a request is no draft.
        pos: [num_logits] positions of the input tokens.
        synthetic_conditional_rates: [num_speculative_steps] acceptance rates instead of a verification.
        use_block_verification: accept blocks by their joint probability (arXiv 2403.10444) and not token by
            token (arXiv 2211.17192).
        contexts: given for watermarked drafts, which stay with Triton.

    Returns:
        Tokens int64 [num_reqs, num_speculative_steps + 1] and how many of each row count, int32 [num_reqs].
    """
    if contexts is not None:
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
        end = start + 1 + (drafts.index(-1) if -1 in drafts else len(drafts))
        drafted = Drafted(
            drafts=tokens[start + 1 : end],
            target=target_logits[start:end, :vocab_size],
            proposal=None if draft_logits is None else draft_logits[slot, : end - start - 1, :vocab_size],
            temperature=float(temperature[slot]),
            seed=int(seed[slot]),
            positions=positions[start:end],
            rates=None if synthetic_conditional_rates is None else synthetic_conditional_rates.tolist(),
        )
        kept = verify(drafted, use_fp64=use_fp64, use_block_verification=use_block_verification)
        sampled[request, : len(kept)] = torch.tensor(kept)
        num_sampled[request] = len(kept)
    return sampled, num_sampled


def verify(drafted: Drafted, *, use_fp64: bool = False, use_block_verification: bool = False) -> list[int]:
    """Return the drafts of a request that are accepted, and the token after them."""
    drafts = drafted.drafts
    if drafted.temperature == 0:
        best = drafted.target.argmax(-1).tolist()
        passed = [draft == token for draft, token in zip(drafts, best, strict=False)]
        accepted = _prefix(passed if drafted.rates is None else _below(drafted.uniforms(), drafted.rates))
        return [*drafts[:accepted], best[accepted]]
    log_p, log_q = drafted.log_target(), drafted.log_proposal()
    log_scale = 0.0
    if use_block_verification:
        accepted, log_scale = _accept_block(drafted, log_p, log_q)
    elif drafted.rates is not None:
        accepted = _prefix(_below(drafted.uniforms(), drafted.rates))
    else:  # accept draft x with probability min(1, p(x) / q(x))
        logs = [math.log(u) for u in drafted.uniforms()]
        accepted = _prefix(_below(logs, drafted.log_ratios(log_p, log_q)))
    scores = drafted.target[accepted].float()
    if accepted < len(drafts):
        residual = _residual(scores, drafts[accepted], log_p[accepted] + log_scale, log_q, accepted)
        # A proposal that covers the target up to rounding leaves nothing, and may be rejected up to rounding.
        if residual.max() > _NEG_INF:
            scores = residual
    noise = gumbel_noise(drafted.seed, drafted.positions[accepted], len(scores), use_fp64)
    return [*drafts[:accepted], int((scores.numpy() + noise).argmax())]


def _below(values: list[float], limits: list[float]) -> list[bool]:
    return [value < limit for value, limit in zip(values, limits, strict=False)]


def _prefix(passed: list[bool]) -> int:
    """Number of items before the first that did not pass."""
    return passed.index(False) if False in passed else len(passed)


def _accept_block(drafted: Drafted, log_p: torch.Tensor, log_q: torch.Tensor | None) -> tuple[int, float]:
    """Block verification (arXiv 2403.10444): accept the longest prefix that passes, whatever failed before it.

    Returns (the number of accepted drafts, the log of their joint ratio, by which the residual scales p).
    """
    accepted, accepted_log_ratio = 0, 0.0
    log_ratio = 0.0  # of the prefix: min(1, prefix before it * p(x) / q(x))
    log_ratios = drafted.log_ratios(log_p, log_q)
    for step, u in enumerate(drafted.uniforms()):
        log_ratio = min(log_ratio + log_ratios[step], 0.0)
        threshold = ratio = math.exp(log_ratio)
        if step + 1 < len(drafted.drafts):
            # The sum of max(ratio * p(x) - q(x), 0) over the vocabulary, at the next draft.
            p = log_p[step + 1].exp()
            if log_q is None:
                mass = ratio * (1 - float(p[drafted.drafts[step + 1]]))
            else:
                mass = float((ratio * p - log_q[step + 1].exp()).clamp(min=0).sum())
            rest = mass + 1 - ratio
            threshold = mass / rest if rest > 0 else 1.0
        if u <= threshold:
            accepted, accepted_log_ratio = step + 1, log_ratio
    return accepted, accepted_log_ratio


def _residual(
    target: torch.Tensor, draft: int, log_p: torch.Tensor, log_q: torch.Tensor | None, step: int
) -> torch.Tensor:
    """Logits of max(p(x) - q(x), 0) at the rejected draft of ``step``; float32 [vocab]."""
    if log_q is None:  # p without the draft; a scale of p cancels
        return target.clone().index_fill_(0, torch.tensor(draft), _NEG_INF)
    ratio = (log_q[step] - log_p).exp()
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio), _NEG_INF)


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
    for request, count in enumerate(num_sampled):
        start = cu_num_logits[request]
        flat_sampled[start : start + count] = sampled[request, :count]
