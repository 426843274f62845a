"""The logits of one step, and what the other parts of the step ask of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_dllm.decoding.isd import place_strides
from vllm_dllm.decoding.linear_spec import place_draws
from vllm_dllm.decoding.policies import Policy
from vllm_dllm.decoding.records import Rules, move
from vllm_dllm.decoding.verifiers import Verifier
from vllm_dllm.kernels.confidence import Draws, RowStats
from vllm_dllm.kernels.row_stats import row_stats
from vllm_dllm.methods import POLICIES
from vllm_dllm.runtime.logits.rows import DRAFT_VALUES, LogitsReader, RowGroups, draws_of, repeated
from vllm_dllm.runtime.plan.rows import BlockState, RowPlan
from vllm_dllm.runtime.states import BatchOptions

PASS_ROUND = 1 << 16
"""Rounds of a pass of FeF: more than any block has positions. A further pass comes to the same numbers of tokens."""


class Placed(NamedTuple):
    """Where rows are: fields of ``RowGroups``."""

    slots: Tensor
    positions: Tensor
    rounds: Tensor
    window: Tensor
    window_start: Tensor


Columns = tuple[Tensor, Tensor, Tensor, Tensor]
"""``slots``, ``positions``, ``window`` and ``window_start`` of ``RowGroups`` of single rows."""

ENTROPY_POLICIES, MARGIN_POLICIES = (
    {row.kind for row in POLICIES if row.orders_by == score} for score in ("entropy", "margin")
)


def place_rows(
    packed: Tensor,
    unpack: Callable[[Tensor], BlockState],
    requests: Tensor,
    branch: Tensor,
    block: Tensor,
    commit_only: Tensor,
    slots: Tensor,
    policy: Tensor,
    rules: Rules,
    temperatures: Tensor,
    seeds: Tensor,
    speculates: Tensor | None,
) -> tuple[Placed, Draws]:
    """Where the N runs of a step's logits rows are, and how their tokens are drawn.

    Args:
        packed: [D, columns] int64: of ``BlockState``.
        requests, branch, block: [N] int64: as in ``plan.rows.DeviceBranches``.
        commit_only: [D] bool.
        slots, policy: [D] int64.
        temperatures, seeds: [slots] float32 and int64.
        speculates: [D] bool: requests that decode with LinearSpec; None: none does.
    """
    progress, _, _, branches, _ = unpack(packed)
    windows = branches.unflatten(1, (-1, len(rules.columns)))
    window, window_start = windows[requests, branch], progress.block_start[requests]
    known = (window != rules.mask_id).view(len(window), -1, rules.block_length).sum(dim=2)
    if rules.window_blocks > 1:
        # Drafts take the number of their own block, as the policy alone does.
        known = known.gather(1, block.unsqueeze(1))
    rounds = (progress.post_steps + progress.passes * PASS_ROUND)[requests] + known[:, 0]
    if rules.window_blocks > 1:
        # Under MULTI_BLOCK a step may unmask nothing in a block, or only edit tokens. The number of the block's tokens
        # then stays the same, and the next step would draw the same tokens. So the noise goes by the step's number.
        is_multi_block = (policy == int(Policy.MULTI_BLOCK))[requests]
        rounds = torch.where(is_multi_block, progress.step[requests], rounds)
    # The first token of the next block, as a prefill that ends before it would draw it.
    rounds = rounds * ~commit_only[requests]
    start = torch.add(window_start, block, alpha=rules.block_length)
    positions = start.unsqueeze(1) + rules.columns[: rules.block_length]
    if rules.strides:
        positions, rounds = place_strides(positions), torch.zeros_like(rounds)
    if speculates is not None:
        positions, rounds = place_draws(positions, rounds, commit_only[requests], speculates[requests])
    rounds, slots = rounds.unsqueeze(1).expand_as(positions), slots[requests]
    placed = Placed(slots, positions, rounds, window, window_start)
    return placed, draws_of(slots, positions, rounds, temperatures, seeds)


def place_draws_of_drafts(
    which: Tensor,
    rounds: Tensor,
    window: Tensor,
    shift: Tensor | None,
    branch: Tensor,
    requests: Tensor,
    groups: Tensor,
    of_runs: tuple[Tensor, Tensor, Tensor],
    temperatures: Tensor,
    seeds: Tensor,
    rules: Rules,
) -> tuple[Tensor, Placed, Draws]:
    """Where the rows are that n of F requests draw drafts from, and how these are drawn.

    Args:
        which: [n] int64: the requests that draw.
        rounds: [F, W] int64: round in which each position would be drawn.
        window: [F, W] int64: the window that sampling parameters go by.
        shift: [F] int64: columns that rounds and windows have moved on since the logits; None: none.
        branch, requests: [F] int64: the branch that is read, and which of the step's requests each is.
        groups: [D, B, w] int64: as in ``plan.rows.Sight``.
        of_runs: ``slots``, ``positions`` and ``window_start`` of ``RowGroups`` of the step's runs.
        temperatures, seeds: [slots] float32 and int64.

    Returns:
        The n * w runs, and of their rows what ``place_rows`` returns.
    """
    rounds, window = rounds[which], window[which]
    if shift is not None:
        back = -shift[which]
        rounds, window = move(rounds, back, 0), move(window, back, 0)
    runs = groups[requests[which], branch[which]].view(-1)
    slots, positions, start = (values[runs] for values in of_runs)
    rounds = rounds.unflatten(1, (-1, rules.block_length)).flatten(0, 1)
    if rules.window_blocks > 1:
        window = window.repeat_interleave(rules.window_blocks, dim=0)
    placed = Placed(slots, positions, rounds, window, start)
    return runs, placed, draws_of(slots, positions, rounds, temperatures, seeds)


def place_columns(slots: Tensor, start: Tensor, windows: Tensor, column: Tensor) -> Columns:
    """Where single rows are, n of each of F requests.

    Args:
        slots, start: [F] int64: of the requests and of their windows.
        windows: [F, n, W] int64: the window that each row saw.
        column: [F, n] int64: column that each row predicts.
    """
    positions = (start.unsqueeze(1) + column).view(-1, 1)
    return repeated(slots, column), positions, windows.flatten(0, 1), repeated(start, column)


@dataclass(frozen=True, eq=False)
class StepLogits:
    """The logits of a step's branches: D requests, up to B branches each, w blocks of L rows in each branch."""

    reader: LogitsReader
    logits: Tensor
    """[N * L, vocab] of the plan's N runs."""
    options: BatchOptions
    """Of the D requests."""
    plan: RowPlan
    rules: Rules

    unpack: Callable[[Tensor], BlockState]
    """``DenoiseStates.unpack``."""
    place_rows: Callable[..., tuple[Placed, Draws]]
    """``place_rows``, or its compiled forms."""
    place_draws_of_drafts: Callable[..., tuple[Tensor, Placed, Draws]]
    """``place_draws_of_drafts``, or its compiled forms."""

    @cached_property
    def rows(self) -> RowGroups:
        """The rows of all branches. A row predicts its own position or, in shifted families, the next one."""
        at, sampling = self.plan.branches, self.reader.sampling_states
        speculates = None
        if Verifier.LINEAR_SPEC in self.options.verifiers:
            speculates = self.options.verifier == int(Verifier.LINEAR_SPEC)
        placed, draws = self.place_rows(
            self.plan.sight.state,
            self.unpack,
            at.requests,
            at.branch,
            at.block,
            self.plan.sight.commit_only,
            self.options.slots,
            self.options.policy,
            self.rules,
            sampling.temperature.gpu,
            sampling.seeds.gpu,
            speculates,
        )
        return RowGroups(self.logits, self.options.slots_np[self.plan.run_requests_np], *placed, draws)

    def measure(self) -> RowStats:
        """What each of the rows says."""
        policies, reader = self.options.policies, self.reader
        measures = {
            "with_entropy": not policies.isdisjoint(ENTROPY_POLICIES) or bool(self.options.estimators),
            "with_margin": not policies.isdisjoint(MARGIN_POLICIES) or bool(self.options.estimators),
        }
        if reader.is_plain(self.options.slots_np):
            return row_stats(self.logits, None, forbidden_token=self.rules.mask_id, **measures)
        return reader.measure(self.rows, **measures)

    def rows_at(self, requests: Tensor, branch: Tensor, column: Tensor) -> Tensor:
        """[F, n] int64: row that predicts each ``column`` in ``branch``, both [F, n], of the ``requests`` [F]."""
        length = self.rules.block_length
        runs = self.plan.sight.groups[requests.unsqueeze(1), branch, column // length]
        return runs * length + column % length

    def top_tokens(self, branch: Tensor, requests: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens of every position by the logits of ``branch`` [F], the mask token excluded.

        Returns [F, W, k] int64 and their logits, float32.
        """
        rows = self.rows_at(requests, branch.unsqueeze(1), self.rules.columns)
        # Copied, a bounded number of logits at a time.
        parts = [self.logits[some].topk(k + 1, dim=2) for some in rows.split(self._requests_at_a_time)]
        values, tokens = (torch.cat(part) for part in zip(*parts, strict=True))
        order = (tokens == self.rules.mask_id).long().argsort(dim=2, stable=True)[:, :, :k]
        return tokens.gather(2, order), values.gather(2, order).float()

    def alternatives(
        self, tokens: Tensor, confidence: Tensor, branch: Tensor, requests: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """``tokens`` [F, W] and the best others of every position in ``branch`` [F]: k in all, ``tokens`` first.

        Args:
            confidence: [F, W] float32: probability of ``tokens``.

        Returns:
            [F, W, k] int64 and their log-probabilities, [F, W, k] float32.
        """
        top, top_logits = self.top_tokens(branch, requests, k)
        rows = self.rows_at(requests, branch.unsqueeze(1), self.rules.columns)
        of_token = self.logits[rows, tokens].unsqueeze(2)
        relative = top_logits - of_token.float()
        # A drawn token need not be the best one: it comes first, and once.
        again = pad(top == tokens.unsqueeze(2), (1, 0))
        order = again.long().argsort(dim=2, stable=True)[:, :, :k]
        every = torch.cat((tokens.unsqueeze(2), top), dim=2).gather(2, order)
        logprobs = pad(relative, (1, 0)).gather(2, order) + confidence.log().unsqueeze(2)
        return every, logprobs

    def draw_drafts(
        self,
        which_np: np.ndarray,
        which: Tensor,
        rounds: Tensor,
        window: Tensor,
        shift: Tensor | None,
        branch: Tensor,
        requests_np: np.ndarray,
        requests: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What the positions of ``branch`` [F] would be drawn as in other rounds, in the columns of the logits.

        Args:
            which_np, which: [n] int64: the requests that draw.
            requests_np: [F] int64: ``requests``, on the host.
            rounds, window, shift, branch, requests: as in ``place_draws_of_drafts``.

        Returns:
            tokens [n, W] int64 and their probabilities [n, W] float32.
        """
        rules, states, rows = self.rules, self.reader.sampling_states, self.rows
        runs, placed, draws = self.place_draws_of_drafts(
            which,
            rounds,
            window,
            shift,
            branch,
            requests,
            self.plan.sight.groups,
            (rows.slots, rows.positions, rows.window_start),
            states.temperature.gpu,
            states.seeds.gpu,
            rules,
        )
        slots_np = np.repeat(self.options.slots_np[requests_np[which_np]], rules.window_blocks)
        logits = self.logits.view(-1, rules.block_length, self.logits.shape[1])
        parts = []
        # The branches' logits are copied, a bounded number of them at a time.
        size = self._requests_at_a_time * rules.window_blocks
        for begin in range(0, len(slots_np), size):
            some = slice(begin, begin + size)
            copied = RowGroups(
                logits[runs[some]].flatten(0, 1),
                slots_np[some],
                *Placed._make(each[some] for each in placed),
                draws if len(slots_np) <= size else None,
            )
            stats = self.reader.measure(copied)
            parts.append((stats.token.view(-1, window.shape[1]), stats.confidence.view(-1, window.shape[1])))
        tokens, confidence = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
        return tokens, confidence

    @property
    def _requests_at_a_time(self) -> int:
        return max(1, DRAFT_VALUES // (len(self.rules.columns) * self.logits.shape[1]))

    def process(self, logits: Tensor, slots_np: np.ndarray, columns: Columns) -> Tensor:
        """Logits [F * n, vocab] after all sampling parameters, fp32.

        Args:
            slots_np: [F] slots of the requests, on the host.
            columns: of ``place_columns``.
        """
        slots, positions, windows, start = columns
        if self.rules.strides:
            # Rows of a request follow each other, and each has those before it as its text.
            first = slice(None, None, len(slots) // len(slots_np))
            grouped = positions.view(len(slots_np), -1)
            placed = slots[first], grouped, grouped, windows[first], start[first]
            return self.reader.process(RowGroups(logits, slots_np, *placed))
        slots_np = np.repeat(slots_np, len(slots) // len(slots_np))
        # Sampling parameters read no rounds.
        return self.reader.process(RowGroups(logits, slots_np, slots, positions, positions, windows, start))
