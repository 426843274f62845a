"""Drafts and masks of a block under a grammar, with grammars that are finite automata over a few tokens."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.profiles import examples
from vllm_dllm.decoding.grammar import ANY, END, FREE, MOST_ROWS, Bitmask, Drafted, Masks, draft_block, left_to_right
from vllm_dllm.decoding.records import Progress, Window
from vllm_dllm.decoding.step import Choice

VOCAB, STOP, MASK = 70, 68, 69
"""More than two words of a bitmask."""


@dataclass
class Automaton:
    """A grammar: the next state by state and token. In accepting states the stop token is allowed, too."""

    moves: dict[int, dict[int, int]]
    accepting: set[int]
    states: list[int] = field(default_factory=lambda: [0])
    ended: bool = False

    def allowed(self) -> set[int]:
        state = self.states[-1]
        return {*self.moves.get(state, {}), *([STOP] if state in self.accepting else [])}

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if token not in self.allowed():
                return False
            self.ended = token == STOP
            self.states.append(self.states[-1] if self.ended else self.moves[self.states[-1]][token])
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.states[len(self.states) - num_tokens :]
        self.ended = False

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        words = np.zeros(bitmask.shape[1], dtype=np.uint32)
        # Backends may allow the mask token in strings.
        for token in {*self.allowed(), MASK} if self.allowed() else ():
            words[token // 32] |= np.uint32(1 << token % 32)
        bitmask[idx] = torch.from_numpy(words.view(np.int32))

    def is_terminated(self) -> bool:
        return self.ended


def bitmask() -> Bitmask:
    return Bitmask(lambda rows: torch.zeros(rows, 3, dtype=torch.int32), MASK)


def allowed_by(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


tokens = st.integers(0, 9)
automata = st.builds(
    Automaton,
    st.dictionaries(st.integers(0, 4), st.dictionaries(tokens, st.integers(0, 4), max_size=4), max_size=5),
    st.sets(st.integers(0, 4)),
)


@examples(400)
@given(automata, st.lists(tokens, max_size=3), st.lists(st.lists(tokens, min_size=2, max_size=2), max_size=6))
def test_masks_are_exact_behind_the_draft_and_the_grammar_is_as_before(
    grammar: Automaton, wish: list[int], candidates: list[list[int]]
) -> None:
    known = [token for token in wish if grammar.accept_tokens("", [token])]
    grammar.rollback(len(known))
    rows = bitmask()
    drafted = draft_block(grammar, "", known, np.array(candidates, dtype=np.int64).reshape(-1, 2), rows)
    assert (grammar.states, grammar.ended) == ([0], False)
    written = rows.take()
    assert grammar.accept_tokens("", known)
    for place, (token, row) in enumerate(drafted):
        if token == ANY:
            assert row == FREE
            assert grammar.ended or not grammar.allowed()
            continue
        allowed = grammar.allowed()
        assert (allowed_by(written[row]) if row != FREE else set()) == allowed
        fitting = [each for each in candidates[place] if each in allowed]
        forced = [*allowed] if len(allowed) == 1 else []
        assert token == next(iter([*fitting, *forced]), END)
        if token == END:
            assert place == len(drafted) - 1
            break
        assert grammar.accept_tokens("", [token])
    else:
        assert len(drafted) == len(candidates)


def test_text_before_the_grammar_is_free_and_its_draft_is_the_best_token() -> None:
    grammar = Automaton({0: {3: 1}, 1: {4: 2}}, {2})
    rows = bitmask()
    candidates = np.array([[7, 8], [5, 6], [9, 3], [4, 0], [1, 2]])
    # Reasoning: a known token and two masked ones.
    drafted = draft_block(grammar, "", [6], candidates, rows, grammar_start=3, mask_start=3)
    assert drafted == [(7, FREE), (5, FREE), (3, 0), (4, 1), (STOP, 2)]
    assert [allowed_by(row) for row in rows.take()] == [{3}, {4}, {STOP}]


def test_nothing_restricts_what_follows_the_end() -> None:
    grammar = Automaton({}, {0})
    drafted = draft_block(grammar, "", [STOP], np.array([[1, 2], [3, 4]]), bitmask())
    assert drafted == [(ANY, FREE), (ANY, FREE)]
    assert grammar.states == [0]


@pytest.mark.parametrize("known", [[5], []], ids=["a token that is not allowed", "no way out"])
def test_a_request_that_cannot_go_on_is_not_held_up(known: list[int]) -> None:
    # vLLM ends the request with an error when it gets the token.
    drafted = draft_block(Automaton({}, set()), "", known, np.array([[1, 2]]), bitmask())
    assert [row for _, row in drafted] == [FREE]


def test_a_bitmask_grows_and_begins_anew() -> None:
    rows, grammar = bitmask(), Automaton({0: {0: 0, 31: 0, 64: 0}}, set())
    assert [rows.fill(grammar) for _ in range(3 * MOST_ROWS)] == [*range(3 * MOST_ROWS)]
    assert [allowed_by(row) for row in rows.take()] == 3 * MOST_ROWS * [{0, 31, 64}]
    assert rows.fill(grammar) == 0
    assert len(rows.take()) == 1


def test_what_must_never_be_is_left_out() -> None:
    rows, grammar = bitmask(), Automaton({0: {3: 0, 31: 0, 64: 0}}, set())
    never = rows.words_of([31, 64, 67])
    drafted = draft_block(grammar, "", [], np.array([[64, 31], [31, 3]]), rows, never=never)
    assert drafted == [(3, 0), (3, 1)]
    assert [allowed_by(row) for row in rows.take()] == [{3}, {3}]


def test_without_candidates_only_forced_tokens_are_drafted() -> None:
    grammar = Automaton({0: {64: 1}, 1: {31: 2}, 2: {1: 0, 2: 0}}, set())
    drafted = draft_block(grammar, "", [], np.empty((5, 0), dtype=np.int64), bitmask())
    assert [token for token, _ in drafted] == [64, 31, END]


def test_masks_travel() -> None:
    import pickle

    masks = Masks(*(np.arange(4) for _ in range(5)))
    again = pickle.loads(pickle.dumps(masks))
    assert isinstance(again, Masks)
    assert all((one == other).all() for one, other in zip(masks, again, strict=True))


# What a step keeps.

WIDTH = 6
booleans = st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH)
few = st.lists(st.integers(0, 1), min_size=WIDTH, max_size=WIDTH)


@examples(1000)
@given(
    masked=booleans,
    chosen=booleans,
    exact=booleans,
    predicted=few,
    draft=st.lists(st.sampled_from([0, 1, END, ANY]), min_size=WIDTH, max_size=WIDTH),
    by_position=st.booleans(),
    denoises=st.booleans(),
)
def test_a_step_keeps_what_draft_and_policy_allow(
    masked: list[bool],
    chosen: list[bool],
    exact: list[bool],
    predicted: list[int],
    draft: list[int],
    by_position: bool,
    denoises: bool,
) -> None:
    kept = []
    number = sum(c and m for c, m in zip(chosen, masked, strict=True))
    for column in [column for column in range(WIDTH) if masked[column]] if denoises else []:
        by_policy = chosen[column] if by_position else len(kept) < number
        if not exact[column] or (kept and not by_policy):
            break
        kept.append(column)
        judged = chosen[column] or not by_position
        if draft[column] not in (predicted[column], ANY) or not judged:
            break

    block = torch.tensor([[MASK if m else 50 for m in masked]])
    columns = torch.zeros(1, dtype=torch.long)
    window = Window(
        progress=Progress(*[columns] * len(Progress.__dataclass_fields__)),
        branches=block.unsqueeze(1),
        present=torch.ones(1, 1, dtype=torch.bool),
        levels=torch.zeros(1, 1, dtype=torch.long),
        commit_only=torch.tensor([not denoises]),
        denoises=torch.tensor([denoises]),
        first_only=torch.tensor([False]),
        before=block,
        generated=torch.ones(1, WIDTH, dtype=torch.bool),
        given=torch.zeros(1, WIDTH, dtype=torch.bool),
    )
    given_ = Choice(torch.tensor([[masked]]), torch.tensor([[chosen]]), None, block.unsqueeze(1))
    drafted = Drafted(torch.tensor([draft]), torch.tensor([exact]), torch.tensor([by_position]))
    result = left_to_right(given_, window, torch.tensor([predicted]), drafted)
    assert result.chosen[0, 0].nonzero().flatten().tolist() == kept
    tokens = [predicted[c] if c in kept else int(block[0, c]) for c in range(WIDTH)]
    assert result.targets[0, 0].tolist() == tokens
