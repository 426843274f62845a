"""Verification of drafts of Model Runner V2 on CPU tensors (``vllm/v1/worker/gpu/spec_decode``).

A request brings the rows of its drafts and one more, for the bonus token. Its drafts are accepted from the left
until one is rejected; that one is drawn again from the residual, and where all are accepted the last row gives
the bonus token. Every draw is vLLM's own, keyed by seed and position, so that it depends neither on the batch
nor on the device, up to rounding. One row of the vocabulary is worked on at a time.

Shapes: ``cu_num_logits`` [num_reqs + 1] delimits the rows of each request, the row of draft i holding the token
*before* it; per-slot tensors are [max_num_reqs, ...]. Functions that replace a kernel carry its parameter
names; ``*_stride`` and block sizes belong to the launch and are not needed here.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample as _rejection_sample_in_triton

from vllm_dllm.cpu.sampling import gumbel_noise

_NEG_INF = float("-inf")
_UINT32 = 0xFFFFFFFF
_LEAST_UNIFORM = np.float32(4.6566127342e-10)  # of Triton's ``tl.rand``, and its unit


@dataclass(frozen=True)
class _Drafted:
    """The drafts of one request and what they are verified with."""

    drafts: list[int]
    """-1 is a placeholder, which no one proposed: it ends the verification and is drawn from the target."""
    target: torch.Tensor
    """[drafts + 1, vocab]: logits after temperature and all else that the request asks for."""
    proposal: torch.Tensor | None
    """[>= drafts, vocab]: logits before temperature. None: every draft had probability 1."""
    temperature: float
    seed: int
    positions: list[int]
    """[drafts + 1]"""

    def log_target(self, step: int) -> torch.Tensor:
        """Log-probabilities of the target, float32 [vocab]."""
        return self.target[step].float().log_softmax(-1)

    def log_proposal(self, step: int) -> torch.Tensor:
        """Log-probabilities that draft ``step`` was drawn from, float32 [vocab]."""
        assert self.proposal is not None
        return (self.proposal[step].float() / self.temperature).log_softmax(-1)

    def log_ratio(self, step: int) -> float:
        """log p(x) / q(x) of draft ``step``, which is no placeholder."""
        draft = self.drafts[step]
        log_p = float(self.log_target(step)[draft])
        if self.proposal is None or log_p == _NEG_INF:
            return log_p
        return log_p - float(self.log_proposal(step)[draft])

    def uniform(self, step: int) -> float:
        return uniform(self.seed, self.positions[step])

    def is_placeholder(self, step: int) -> bool:
        return self.drafts[step] < 0


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
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: torch.Tensor | None = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the drafts of a batch.

    Args:
        target_logits: [num_logits, vocab], after temperature.
        draft_logits: [max_num_reqs, num_speculative_steps, vocab or less], before temperature; None if every
            draft had probability 1.
        draft_sampled: [num_logits] input tokens of the rows; the first of a request is no draft.
        pos: [num_logits] positions of the input tokens.
        synthetic_conditional_rates: [num_speculative_steps] acceptance rates in the place of a verification.
        use_block_verification: accept blocks by their joint probability (arXiv 2403.10444) and not token by
            token (arXiv 2211.17192).

    Watermarked drafts are verified in Triton's interpreter.

    Returns:
        Tokens int64 [num_reqs, num_speculative_steps + 1] and how many of each row count, int32 [num_reqs].
    """
    if contexts is not None:
        return _rejection_sample_in_triton(
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            temperature,
            seed,
            num_speculative_steps,
            synthetic_conditional_rates,
            use_fp64,
            use_block_verification,
            contexts,
            watermarking,
            watermarking_skip_mask,
            watermark_key,
        )
    rates = None if synthetic_conditional_rates is None else synthetic_conditional_rates.tolist()
    vocab_size = target_logits.shape[1]
    if draft_logits is not None:
        vocab_size = min(vocab_size, draft_logits.shape[2])  # either of them may be padded
    bounds = cu_num_logits.tolist()
    sampled = torch.zeros(len(bounds) - 1, num_speculative_steps + 1, dtype=torch.int64)
    num_sampled = torch.zeros(len(bounds) - 1, dtype=torch.int32)
    tokens, positions = draft_sampled.tolist(), pos.tolist()
    rows = itertools.pairwise(bounds)
    for request, ((start, end), slot) in enumerate(zip(rows, idx_mapping.tolist(), strict=True)):
        drafted = _Drafted(
            drafts=tokens[start + 1 : end],
            target=target_logits[start:end, :vocab_size],
            proposal=None if draft_logits is None else draft_logits[slot, :, :vocab_size],
            temperature=float(temperature[slot]),
            seed=int(seed[slot]),
            positions=positions[start:end],
        )
        if drafted.temperature == 0:
            accepted, token = _verify_greedily(drafted, rates)
        else:
            if use_block_verification:
                accepted, log_scale = _accept_block(drafted)
            else:
                accepted, log_scale = _accept_tokens(drafted, rates), 0.0
            token = _draw(drafted, accepted, log_scale, use_fp64)
        sampled[request, : accepted + 1] = torch.tensor([*drafted.drafts[:accepted], token])
        num_sampled[request] = accepted + 1
    return sampled, num_sampled


def _verify_greedily(drafted: _Drafted, rates: list[float] | None) -> tuple[int, int]:
    """Accept the drafts that are the target's argmax; returns (their number, the argmax that follows them)."""
    for step, draft in enumerate(drafted.drafts):
        best = int(drafted.target[step].argmax())
        matches = draft == best if rates is None else drafted.uniform(step) < rates[step]
        if drafted.is_placeholder(step) or not matches:
            return step, best
    return len(drafted.drafts), int(drafted.target[-1].argmax())


def _accept_tokens(drafted: _Drafted, rates: list[float] | None) -> int:
    """Accept draft x with probability min(1, p(x) / q(x)) until the first rejection; returns their number."""
    for step in range(len(drafted.drafts)):
        if drafted.is_placeholder(step):
            return step
        u = drafted.uniform(step)
        if not (drafted.log_ratio(step) > math.log(u) if rates is None else u < rates[step]):
            return step
    return len(drafted.drafts)


def _accept_block(drafted: _Drafted) -> tuple[int, float]:
    """Block verification (arXiv 2403.10444): accept the longest prefix that passes, whatever failed before it.

    Returns (the number of accepted drafts, the log of their joint ratio, by which the residual scales p).
    """
    accepted, accepted_log_ratio = 0, 0.0
    log_ratio = 0.0  # of the prefix: min(1, prefix before it * p(x) / q(x))
    for step in range(len(drafted.drafts)):
        if drafted.is_placeholder(step):
            break
        log_ratio = min(log_ratio + drafted.log_ratio(step), 0.0)
        ratio = math.exp(log_ratio)
        threshold = ratio
        if step + 1 < len(drafted.drafts) and not drafted.is_placeholder(step + 1):
            mass = _residual_mass(drafted, step + 1, ratio)
            rest = mass + 1 - ratio
            threshold = mass / rest if rest > 0 else 1.0
        if drafted.uniform(step) <= threshold:
            accepted, accepted_log_ratio = step + 1, log_ratio
    return accepted, accepted_log_ratio


def _residual_mass(drafted: _Drafted, step: int, ratio: float) -> float:
    """Sum of max(ratio * p(x) - q(x), 0) over the vocabulary, at draft ``step``."""
    p = drafted.log_target(step).exp()
    if drafted.proposal is None:
        return ratio * (1 - float(p[drafted.drafts[step]]))
    return float((ratio * p - drafted.log_proposal(step).exp()).clamp(min=0).sum())


def _draw(drafted: _Drafted, step: int, log_scale: float, use_fp64: bool) -> int:
    """Draw the token after the accepted drafts: the bonus token, or what takes the place of a rejected draft."""
    target = drafted.target[step].float()
    logits = target
    if step < len(drafted.drafts) and not drafted.is_placeholder(step):
        logits = _residual(drafted, step, log_scale)
        # A proposal that covers the target up to rounding leaves nothing, and may be rejected up to rounding.
        if logits.max() == _NEG_INF:
            logits = target
    return int((logits.numpy() + gumbel_noise(drafted.seed, drafted.positions[step], len(logits), use_fp64)).argmax())


def _residual(drafted: _Drafted, step: int, log_scale: float) -> torch.Tensor:
    """Logits of max(p(x) - q(x), 0) at a rejected draft, with p scaled by ``exp(log_scale)``; float32 [vocab]."""
    if drafted.proposal is None:  # p without the draft; a scale cancels
        logits = drafted.target[step].float().clone()
        logits[drafted.drafts[step]] = _NEG_INF
        return logits
    log_p = drafted.log_target(step) + log_scale
    ratio = (drafted.log_proposal(step) - log_p).exp()
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio), _NEG_INF)


def gather_draft_sampled(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Gather input token and position of each logits row.

    A draft of a step that begins in the prompt is nobody's proposal and becomes a placeholder, -1.
    """
    rows = logits_indices_ptr.numpy()[:num_logits]
    local_pos = expanded_local_pos_ptr.numpy()[:num_logits]
    positions = positions_ptr.numpy()[rows]
    prefill_len = prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[:num_logits]]
    is_placeholder = (local_pos > 0) & (positions - local_pos < prefill_len)
    draft_sampled_ptr.numpy()[:num_logits] = np.where(is_placeholder, -1, input_ids_ptr.numpy()[rows])
    pos_ptr.numpy()[:num_logits] = positions


def flatten_sampled(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Put the sampled tokens of each request ([num_reqs, steps + 1]) where its logits rows are."""
    flat, sampled = flat_sampled_ptr.numpy(), sampled_ptr.numpy()
    for request, (start, count) in enumerate(zip(cu_num_logits_ptr.tolist(), num_sampled_ptr.tolist(), strict=False)):
        flat[start : start + count] = sampled[request, :count]
