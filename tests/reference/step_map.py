"""Step maps, written plainly: from what each forward of a run wrote."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .decode import Commit


@dataclass
class Expected:
    """By position: the denoising step of the block that wrote the token last, the forward, and the block."""

    steps: dict[int, int] = field(default_factory=dict)
    forwards: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)


def step_map(
    written: Sequence[Sequence[Commit]],
    block_of: Callable[[int], int],
    first: int,
    *,
    carried: Sequence[Commit] = (),
    shifted: bool = False,
    edits: bool = False,
) -> Expected:
    """The map of a run.

    Args:
        written: tokens by denoising forward.
        block_of: of a position.
        first: position behind the prompt.
        carried: first tokens of blocks that the prefill or the forward that commits a block gave.
        shifted: a forward of its own commits each block.
        edits: a forward that writes nothing belongs to the block before, which it finds settled; otherwise to the block
            of the next token, of which its quota was 0.
    """
    found = Expected()
    order = list(enumerate(written))
    blocks: list[int] = []
    for _, commits in reversed(order) if not edits else order:
        blocks.append(block_of(commits[0][0]) if commits else blocks[-1])
    if not edits:
        blocks.reverse()
    start = block_of(first)
    steps: dict[int, int] = {}
    for (call, commits), block in zip(order, blocks, strict=True):
        step = steps.get(block, 0)
        steps[block] = step + 1
        for position, _ in commits:
            found.steps[position] = step
            found.forwards[position] = call + (block - start if shifted else 0)
            found.blocks[position] = block - start
    for position, _ in carried:
        block = block_of(position)
        calls = sum(steps.get(before, 0) for before in range(start, block))
        found.steps[position] = -1
        # The forward that commits the block before; the prefill for the first block.
        found.forwards[position] = calls + block - start - 1
        found.blocks[position] = block - start
    return found
