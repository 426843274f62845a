"""Token, confidence, entropy and margin of every row of logits, without a float32 copy of the logits.

On CUDA ``vllm_dllm.kernels.row_stats`` runs the two Triton kernels of ``confidence_triton``, elsewhere a torch function
here that goes through the rows in chunks. Both draw by the exponential race, which is the Gumbel-max trick: with
independent ``E ~ Exp(1)`` per vocabulary entry, ``argmax(logit / temperature - log E)`` is a draw from the softmax.
``E`` is a hash of (seed, position, round, token id) and of nothing else, so a request draws the same tokens whatever
else is in its batch, and both implementations draw alike.

The hash is the SplitMix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) that starts at a key mixed from seed, position and round, read at index ``token id``.
:func:`position_noise` reads the same stream at indices below 0, where no token is: it is the noise of policies that
choose positions by chance.
"""

from typing import NamedTuple

import torch

# Entries of a chunk: a share per thread that its cache holds, up to where the temporaries of a chunk
# (two int64 and two float32 tensors) take 24 MiB.
_CHUNK_ELEMENTS_PER_THREAD = 1 << 17
_MAX_CHUNK_ELEMENTS = 1 << 20

# The constants of SplitMix64: the increment of its stream and the multipliers of its mixer.
SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Draws(NamedTuple):
    """How the tokens of rows are drawn: what the noise of each row is a hash of, and its temperature."""

    temperature: torch.Tensor
    """[rows] float32, 0 for the most likely token."""
    seed: torch.Tensor
    """[rows] int64, the request's seed."""
    position: torch.Tensor
    """[rows] int64, position of the row's token in its sequence."""
    round_: torch.Tensor
    """[rows] int64, denoising round, so that a position is drawn anew in every round."""
    temperature_applied: bool = False
    """The logits are divided by the temperature already."""


class RowStats(NamedTuple):
    """What a row of logits says about the token at its position."""

    token: torch.Tensor
    """[rows] int64: the most likely token (temperature 0) or the draw, never the forbidden token."""
    confidence: torch.Tensor
    """[rows] float32: softmax probability of ``token``."""
    entropy: torch.Tensor | None
    """[rows] float32: entropy of the softmax in nats; ``None`` unless asked for."""
    margin: torch.Tensor | None = None
    """[rows] float32: softmax probability of the most likely token less that of the second, whichever was drawn and
    the forbidden token left out; ``None`` unless asked for."""


def row_stats_torch(
    logits: torch.Tensor, draws: Draws | None, forbidden_token: int, with_entropy: bool, with_margin: bool
) -> RowStats:
    """``row_stats`` in torch. Temporary memory is bounded, whatever the number of rows."""
    vocab = logits.shape[1]
    rows_per_chunk = _rows_per_chunk(vocab)
    chunks = logits.split(rows_per_chunk)
    parts = []
    if draws is None:
        for chunk in chunks:
            x = _float32_copy(chunk)
            probability, entropy = _distribution(x, with_entropy)
            parts.append(_choose_(x, probability, entropy, forbidden_token, with_margin))
    else:
        sampled = draws.temperature > 0
        scale = torch.where(sampled & (not draws.temperature_applied), draws.temperature.reciprocal(), 1.0)
        key = _row_key(draws.seed, draws.position, draws.round_)
        of_rows = (values.unsqueeze(1).split(rows_per_chunk) for values in (scale, -sampled.float(), key))
        stream = token_stream(vocab, logits.device)
        for chunk, chunk_scale, noise_factor, chunk_key in zip(chunks, *of_rows, strict=True):
            x = _float32_copy(chunk).mul_(chunk_scale)
            probability, entropy = _distribution(x, with_entropy)
            x.addcmul_(log_exponential_(_uniform(chunk_key + stream)), noise_factor)
            parts.append(_choose_(x, probability, entropy, forbidden_token, with_margin))
    if len(parts) == 1:
        return parts[0]
    return RowStats._make(None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True))


def position_noise(seed: torch.Tensor, position: torch.Tensor, round_: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Uniform noise of positions, a property of its arguments alone and independent of the draws of ``row_stats``.

    Args:
        seed, position, round_: int64 as in ``Draws``, of any shapes that broadcast.
        stream: from 0; the streams of a position are independent of one another.

    Returns:
        float32 of the broadcast shape, in (0, 1).
    """
    if stream < 0:
        raise ValueError(f"stream must be at least 0, got {stream}")
    key = _row_key(*torch.broadcast_tensors(seed, position, round_))
    index = -(stream + 1)
    return _uniform(key.add_(_as_int64(index * SPLITMIX_INCREMENT % (1 << 64))))


def token_noise(seed: torch.Tensor, position: torch.Tensor, round_: torch.Tensor, vocab: int) -> torch.Tensor:
    """Logarithms of independent Exp(1) variables, those that ``row_stats`` draws with: [rows, vocab] float32."""
    return log_exponential_(token_uniform(seed, position, round_, token_stream(vocab, seed.device)))


def token_uniform(
    seed: torch.Tensor, position: torch.Tensor, round_: torch.Tensor, stream: torch.Tensor
) -> torch.Tensor:
    """What ``log_exponential_`` makes ``token_noise`` of: [rows, vocab] float32 in (0, 1), by a ``token_stream``."""
    return _uniform(_row_key(seed, position, round_).unsqueeze(1) + stream)


def log_exponential_(uniform: torch.Tensor) -> torch.Tensor:
    """Logarithms of Exp(1) variables, of uniform ones in (0, 1), which are overwritten."""
    # The smallest variables decide the race. -log(1 - w) keeps their relative precision, as w does towards
    # 0; -log(w) would not.
    return uniform.neg_().log1p_().neg_().log_()


def _rows_per_chunk(vocab: int) -> int:
    elements = min(_CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads(), _MAX_CHUNK_ELEMENTS)
    return max(1, elements // vocab)


def _float32_copy(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _distribution(x: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax of ``x`` [rows, vocab] float32 and, if asked for, its entropy [rows]."""
    probability = x.softmax(dim=1)
    if not with_entropy:
        return probability, None
    # Clamping makes 0 * log(0) the 0 that the entropy wants.
    log_probability = x.log_softmax(dim=1).clamp_min_(torch.finfo(torch.float32).min)
    return probability, log_probability.mul_(probability).sum(dim=1).neg_()


def _choose_(
    score: torch.Tensor,
    probability: torch.Tensor,
    entropy: torch.Tensor | None,
    forbidden_token: int,
    with_margin: bool,
) -> RowStats:
    """Best token of ``score`` [rows, vocab] that is not forbidden; overwrites entries of both tensors."""
    score[:, forbidden_token] = -torch.inf
    token = _argmax(score)
    if forbidden_token == 0:
        # The argmax of a row that has no finite score left is 0.
        token.clamp_min_(1)
    confidence = probability.gather(1, token).squeeze(1)
    margin = _margin_(probability, forbidden_token) if with_margin else None
    return RowStats(token.squeeze(1), confidence, entropy, margin)


def _margin_(probability: torch.Tensor, forbidden_token: int) -> torch.Tensor:
    """Difference of the two largest values of every row but the forbidden one's: [rows]; overwrites them with 0."""
    probability[:, forbidden_token] = 0
    best = _argmax(probability)
    largest = probability.gather(1, best).squeeze(1)
    return largest.sub_(probability.scatter_(1, best, 0).amax(dim=1))


# torch's argmax on CPU visits one entry at a time while its amax is vectorised, so where the vocabulary
# divides into blocks, search the blocks' maxima and then one block.
_ARGMAX_BLOCK = 64
_ARGMAX_BLOCKED_ABOVE = 1 << 14


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """First maximum of every row of ``x`` [rows, vocab], contiguous: [rows, 1] int64."""
    rows, vocab = x.shape
    if x.numel() < _ARGMAX_BLOCKED_ABOVE or vocab % _ARGMAX_BLOCK:
        return x.argmax(dim=1, keepdim=True)
    blocks = x.view(rows, vocab // _ARGMAX_BLOCK, _ARGMAX_BLOCK)
    best_block = blocks.amax(dim=2).argmax(dim=1, keepdim=True)
    block = blocks.take_along_dim(best_block.unsqueeze(2), dim=1).squeeze(1)
    return best_block * _ARGMAX_BLOCK + block.argmax(dim=1, keepdim=True)


def token_stream(vocab: int, device: torch.device) -> torch.Tensor:
    """[vocab] int64: offset of each token in the hash stream."""
    return torch.arange(1, vocab + 1, device=device).mul_(_as_int64(SPLITMIX_INCREMENT))


def _row_key(seed: torch.Tensor, position: torch.Tensor, round_: torch.Tensor) -> torch.Tensor:
    """Start of each row's hash stream: [rows] int64."""
    return _mix64_(_mix64_(_mix64_(seed.clone()).add_(position)).add_(round_))


def _uniform(state: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1) of states of the hash stream, int64, which are overwritten."""
    bits = _mix64_(state).bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    # Rounding may carry it to 1, where the variables of a race would be infinite.
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2.0**-24)


def _mix64_(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's mixer on int64, in place, without its last xor-shift: only the high half is used.

    torch has no unsigned 64-bit arithmetic; the masks turn its arithmetic shifts into logical ones.
    """
    first, second = SPLITMIX_MULTIPLIERS
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_as_int64(first))
    return z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_as_int64(second))


def _as_int64(word: int) -> int:
    """The signed integer with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
