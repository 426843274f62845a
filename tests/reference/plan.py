"""What the rows of a step should be, row by row: plain loops that know everything, host and device alike.

A plan is right if every group has the rows that these functions list, with their tokens, positions and K/V slots, and
sees the K/V slots that they list.
"""

from dataclasses import dataclass, field

MASK = 1000


@dataclass(frozen=True)
class Pages:
    """Where the K/V of one request is.

    Attributes:
        own: the request's row of the block table.
        slot: the worker's index of the request.
        scratch: id of the first scratch page, drafts of a request, scratch pages of a draft.
    """

    size: int
    own: list[int]
    slot: int
    scratch: tuple[int, int, int]

    def kv_slot(self, position: int, *, draft: int = 0, draft_pages: range = range(0), shift: int = 0) -> int:
        """Slot of a position's K/V. Draft ``draft``, from 1, has scratch pages for the pages ``draft_pages``."""
        index = position // self.size
        if draft and index in draft_pages:
            first, drafts, pages = self.scratch
            page = first + (self.slot * drafts + draft - 1) * pages + index - draft_pages.start
        else:
            page = self.own[index + shift]
        return page * self.size + position % self.size


@dataclass(frozen=True)
class Group:
    """Rows that see the same K/V.

    Attributes:
        tokens, positions, slots: of every row; no tokens and slots where the plan leaves rows as vLLM laid them out.
        sees: slot of the K/V at every position from 0 that the group sees.
        branch: 0: the window as it stands, -1: the commit of the finished block; padding: ``None``.
    """

    positions: list[int]
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sees: list[int] = field(default_factory=list)
    branch: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class Decoding:
    """A request that decodes blocks in order.

    Attributes:
        window: tokens of the window as it stands, then those of each draft.
        num_rows: rows that the scheduler gives the request.
    """

    pages: Pages
    block_start: int
    commit: bool
    finished: list[int]
    window: list[list[int]]
    num_drafts: int
    num_rows: int


def groups_of_blocks(
    request: Decoding, *, length: int, limit: int, commit_predicts: bool, causal_context: bool
) -> list[Group | None]:
    """Groups of a decoding request; ``None``: padding."""
    num_groups = request.num_rows // length
    commits_alone = request.commit and (commit_predicts or num_groups == 1)
    wanted = [(-1, request.block_start - length, request.finished)] if request.commit else []
    if not commits_alone:
        for branch, tokens in enumerate(request.window[: 1 + request.num_drafts]):
            for begin in range(0, len(tokens), length):
                wanted.append((branch, request.block_start + begin, tokens[begin : begin + length]))
    groups: list[Group | None] = []
    first_page = request.block_start // request.pages.size
    for branch, start, tokens in wanted[:num_groups]:
        if start + length > limit:
            groups.append(None)
            continue
        draft_pages = range(first_page, first_page + request.pages.scratch[2])
        slots = [
            request.pages.kv_slot(position, draft=max(branch, 0), draft_pages=draft_pages)
            for position in range(start + length)
        ]
        positions = list(range(start, start + length))
        groups.append(
            Group(positions, tokens, slots[start:], slots, branch=branch, causal=causal_context and branch < 0)
        )
    return groups + [None] * (num_groups - len(groups))


def groups_of_prompt(pages: Pages, start: int, num_rows: int, *, length: int, causal_context: bool) -> list[Group]:
    """Groups of a chunk of a prompt, the positions from ``start`` on."""
    groups: list[Group] = []
    for position in range(start, start + num_rows):
        if not groups or (not causal_context and position % length == 0):
            groups.append(Group([], causal=causal_context))
        groups[-1].positions.append(position)
    for group in groups:
        group.sees.extend(pages.kv_slot(position) for position in range(group.positions[-1] + 1))
    return groups


@dataclass(frozen=True)
class Sequence:
    """A request with full attention.

    Attributes:
        text: known tokens, ``block_start`` of them.
        blocks: tokens of the block as it stands, then those of each draft.
        shift: pages of the sequence, before those of the unconditional branch; ``None``: the request is not guided.
    """

    pages: Pages
    prompt_length: int
    text: list[int]
    blocks: list[list[int]]
    window_end: int
    refresh: bool
    num_drafts: int
    shift: int | None


def computed_by(cache: str, block_start: int, window_end: int, length: int) -> range:
    """Positions that a forward without a refresh computes (Fast-dLLM's caches)."""
    match cache:
        case "none":
            return range(window_end)
        case "prefix":
            return range(block_start, window_end)
        case _:
            return range(block_start, block_start + length)


def groups_of_sequence(request: Sequence, cache: str, length: int) -> list[Group]:
    """The sequence as it stands, its unconditional branch or its drafts."""
    block_start, pages = len(request.text), request.pages
    without_refresh = computed_by(cache, block_start, request.window_end, length)
    branches = [(0, 0, False)]
    if request.shift is not None:
        branches.append((0, request.shift, True))
    else:
        branches += [(draft, 0, False) for draft in range(1, 1 + request.num_drafts)]
    groups = []
    for branch, shift, unconditional in branches:
        known = [MASK if unconditional and p < request.prompt_length else token for p, token in enumerate(request.text)]
        content = known + request.blocks[branch]
        content += [MASK] * (request.window_end - len(content))
        positions = range(request.window_end) if request.refresh and branch == 0 else without_refresh
        draft_pages = range(without_refresh.start // pages.size, -(-without_refresh.stop // pages.size))
        slots = [
            pages.kv_slot(position, draft=branch, draft_pages=draft_pages, shift=shift)
            for position in range(request.window_end)
        ]
        groups.append(
            Group(list(positions), [content[p] for p in positions], [slots[p] for p in positions], slots, branch=branch)
        )
    return groups
