"""Structured outputs: a block under a grammar is unmasked from left to right, several positions per step.

A grammar says which tokens may follow the tokens before them. A step predicts the positions of a block all at once, so
most of them before the tokens in front of them are known. Hence a step has a *draft*: tokens for the masked positions,
from the first on, which the grammar takes one after the other. With the draft go masks, one per position::

    draft[0], draft[1], ...                            (``draft_block``, where the grammar is)
    mask[i] = what the grammar allows behind draft[:i]
    prediction[i] = the model's choice among mask[i]    (as without a grammar)
    keep prediction[:n + 1], where prediction[:n] = draft[:n]    (``left_to_right``)

A prediction is kept where all before it are those of the draft, so its mask is exact, and no text is ever invalid. The
draft decides only how many tokens a step may unmask. It is made of the step's own logits: the first of the
``NUM_CANDIDATES`` best tokens of a position that the grammar allows. The policy may keep fewer predictions than that.

Free positions have no mask: those of reasoning that comes before the constrained text, and those behind its end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.decoding.records import PerRequest, Window
from vllm_dllm.decoding.step import Choice

MOST_ROWS = 16
"""Positions that a step may unmask of a structured request. Each has a row of the bitmask, 19 kB with 152k tokens."""
NUM_CANDIDATES = 16
"""Tokens of a position that are tried in a draft."""

END = -1
"""In the place of a token: the draft ends here, whatever the position gets."""
ANY = -2
"""In the place of a token: the draft goes on, whatever the position gets. No grammar reads what follows."""
FREE = -1
"""In the place of a row of the bitmask: the position may get any token."""


class Grammar(Protocol):
    """A request's grammar, after the tokens that the request has emitted; vLLM's ``StructuredOutputGrammar``."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on behind these tokens; False if one is not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Go back."""

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        """Write what is allowed now into row ``idx``."""

    def is_terminated(self) -> bool:
        """Whether the constrained text has ended."""


class Bitmask:
    """The rows of a step's bitmask: bit t % 32 of word t // 32 says whether token t is allowed."""

    def __init__(self, allocate: Callable[[int], Tensor], mask_id: int):
        """``allocate(rows)`` gives an int32 tensor [rows, words] on the host. ``mask_id`` is never allowed."""
        self._allocate, self._mask_id = allocate, mask_id
        self._rows, self.num_rows = allocate(MOST_ROWS), 0

    def words_of(self, tokens: Iterable[int]) -> np.ndarray:
        """[words] uint32: a row of these tokens."""
        bits = np.zeros(32 * self._rows.shape[1], dtype=np.uint8)
        bits[[*tokens]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def fill(self, grammar: Grammar, never: np.ndarray | None = None) -> int:
        """Add a row of what the grammar allows now, but for ``never`` [words] uint32; returns its index."""
        if self.num_rows == len(self._rows):
            self._rows = torch.cat((self._rows, self._allocate(len(self._rows))))
        row = self.num_rows
        grammar.fill_bitmask(self._rows, row)
        words = self.words(row)
        words[self._mask_id >> 5] &= np.uint32(~(1 << (self._mask_id & 31)) & 0xFFFFFFFF)
        if never is not None:
            words &= ~never
        self.num_rows += 1
        return row

    def words(self, row: int) -> np.ndarray:
        """[words] uint32 of a row; a view."""
        words: np.ndarray = self._rows[row].numpy().view(np.uint32)
        return words

    def draft(self, row: int, candidates: np.ndarray) -> int:
        """The first of the candidates [K] that the row allows, else the only token that it allows, else ``END``."""
        words = self.words(row)
        allowed = np.flatnonzero(words[candidates >> 5] >> (candidates & 31).astype(np.uint32) & 1)
        if len(allowed):
            return int(candidates[allowed[0]])
        (filled,) = words.nonzero()
        if len(filled) == 1 and int(words[filled[0]]).bit_count() == 1:
            return int(filled[0]) * 32 + int(words[filled[0]]).bit_length() - 1
        return END

    def take(self) -> np.ndarray:
        """[rows, words] int32: the rows of the step, which is over."""
        taken: np.ndarray = self._rows[: self.num_rows].numpy().copy()
        self.num_rows = 0
        return taken


class Masks(NamedTuple):
    """What the workers are sent of the S structured requests of a step."""

    column: np.ndarray
    """[S] int64: column of the first masked position."""
    num_rows: np.ndarray
    """[S] int64: positions with a draft, from that column on."""
    draft: np.ndarray
    """[sum of num_rows] int64: tokens, ``END`` or ``ANY``."""
    row: np.ndarray
    """[sum of num_rows] int64: rows of ``bitmask``, or ``FREE``."""
    bitmask: np.ndarray
    """[rows, words] int32: as in `Bitmask`."""


def draft_block(
    grammar: Grammar,
    request_id: str,
    known: Sequence[int],
    candidates: np.ndarray,
    bitmask: Bitmask,
    *,
    grammar_start: int = 0,
    mask_start: int = 0,
    never: np.ndarray | None = None,
) -> list[tuple[int, int]]:
    """Draft the masked positions of a block and fill their masks; the grammar is as before afterwards.

    Args:
        known: tokens that are unmasked and not emitted, those before the first masked position.
        candidates: [n, K] int64: best tokens of the first n masked positions, best first; K may be 0.
        grammar_start: place in this text of the first token that the grammar reads (reasoning comes before).
        mask_start: place of the first token that the grammar restricts.
        never: [words] uint32: tokens that no position gets, whatever the grammar allows.

    Returns:
        Of at most n positions: the draft's token, ``END`` or ``ANY``, and the row of the bitmask, or ``FREE``.
    """
    drafted: list[tuple[int, int]] = []
    num_read = 0

    def read(place: int, token: int) -> bool:
        nonlocal num_read
        if place < grammar_start or grammar.is_terminated():
            return True
        accepted = grammar.accept_tokens(request_id, [token])
        num_read += accepted
        return accepted

    try:
        for place, token in enumerate(known):
            if not read(place, token):
                # vLLM ends the request with an error when it emits the token.
                return [(ANY, FREE)] * len(candidates)
        for place, tokens in enumerate(candidates, len(known)):
            if grammar.is_terminated():
                drafted.append((ANY, FREE))
                continue
            if place < mask_start:
                token, row = int(tokens[0]) if len(tokens) else END, FREE
            else:
                row = bitmask.fill(grammar, never)
                token = bitmask.draft(row, tokens)
                if token == END and not bitmask.words(row).any():
                    # A grammar without a way out: vLLM ends the request with an error.
                    row = FREE
            drafted.append((token, row))
            if token == END or not read(place, token):
                break
    finally:
        if num_read:
            grammar.rollback(num_read)
    return drafted


@dataclass(frozen=True)
class Drafted(PerRequest):
    """Drafts and masks of D structured requests."""

    token: Tensor
    """[D, W] int64: of the draft, ``END`` or ``ANY``."""
    exact: Tensor
    """[D, W] bool: positions that the step may unmask, if those before them get the draft's tokens."""
    by_position: Tensor
    """[D] bool: the policy judges each position; else it says how many."""


def left_to_right(choice: Choice, window: Window, predicted: Tensor, drafted: Drafted) -> Choice:
    """What a step unmasks under a grammar: the first masked position, and as many as draft and policy allow.

    Args:
        choice: what the policy would unmask, of one branch.
        predicted: [D, W] int64: tokens under the masks.
    """
    masked, chosen = choice.masked.squeeze(1), choice.chosen.squeeze(1) & choice.masked.squeeze(1)
    rank = masked.long().cumsum(dim=1) - 1
    by_position = _holds_before(chosen | ~masked) & chosen
    by_number = rank < chosen.sum(dim=1, keepdim=True)
    wanted = torch.where(drafted.by_position.unsqueeze(1), by_position, by_number) | (rank == 0)
    agrees = (predicted == drafted.token) | (drafted.token == ANY)
    denoises = (window.denoises | window.first_only).unsqueeze(1)
    kept = masked & denoises & drafted.exact & wanted & _holds_before((agrees & drafted.exact) | ~masked)
    tokens = torch.where(kept, predicted, window.branches[:, 0])
    return Choice(choice.masked, kept.unsqueeze(1), None, tokens.unsqueeze(1))


def _holds_before(values: Tensor) -> Tensor:
    """[D, W] bool: whether ``values`` [D, W] hold in all columns before."""
    return pad(values.long().cumprod(dim=1)[:, :-1], (1, 0), value=1).bool()
