"""Introspective strided decoding (ISD) of I-DLM (arXiv 2604.11035): every forward verifies drafts and makes the next.

The model is autoregressive in every row: a row sees what is before it, masks too, and predicts the next position. A row
behind masks predicts a token without knowing those in the places of the masks, which makes a draft. With a stride of N
tokens a forward has 2N - 1 rows, the first of which holds the *seed*, the last token of the text, whose K/V is not in
the cache yet::

    [seed, s_1, ..., s_(N-1), mask, ..., mask]     the rows up to s_(N-1) verify, the N - 1 masks draft
    accept s_1 ... s_k                             the longest run of drafts that the model writes itself
    seed = what the row of s_k predicts            one token more
    k = N - 1: the masks' rows predict the next s_1 ... s_(N-1)
    k < N - 1: they stand behind a draft that was rejected, so the next forward begins with the seed and masks alone

So a forward gives 1 to N tokens. The K/V of the rows up to s_k stays, and the next forward overwrites the rest.

Tokens are drawn as in ``vllm_dllm.decoding.linear_spec``: the noise belongs to the request's seed and the token's
position, for drafts and tokens alike, so the text is a sample of the autoregressive model, whatever the drafts were.
The published code accepts drafts by rejection sampling: the same distribution, and another text for other drafts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from vllm_dllm.decoding.linear_spec import Speculated
from vllm_dllm.decoding.records import Measured, Rules, Window
from vllm_dllm.decoding.step import Accepted, Finished, Origin


def place_strides(positions: Tensor) -> Tensor:
    """Positions that the logits rows of N runs predict, [N, L] int64.

    Args:
        positions: [N, L] int64: those of the windows. Column j is predicted by row j - 1, and column 0 stands for the
            last row, which predicts the position behind the window.
    """
    length = positions.shape[1]
    is_first = torch.arange(length, device=positions.device) == 0
    return torch.where(is_first, positions + length, positions)


def texts_of_rows(positions: Tensor, window: Tensor, start: Tensor, is_told: Tensor) -> tuple[Tensor, Tensor]:
    """The text before each of n * K logits rows, as vLLM's kernels of sampling parameters read it.

    They take the tokens that a request was told and then, for row i with a number ``d``, the ``d`` tokens of a list up
    to the row's own place, ``tokens[i - d + 1]`` to ``tokens[i]``: drafts, as vLLM has them.

    Args:
        positions: [n, K] int64: that each row predicts; of ``place_strides``, or in their order.
        window: [n, L] int64: the seed, drafts and masks.
        start: [n] int64: position of the seed.
        is_told: [n] bool: the seed is among the tokens that the request was told.

    Returns:
        ``d`` and the list, [n, K] int32 each. The row that predicts what is behind the window only drafts: if it comes
        first, there is nothing before it in the list.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    told = is_told.long().unsqueeze(1)
    number = (positions - start.unsqueeze(1) - told).clamp(min=0)
    number = torch.where(number > index, 0, number)
    # Where the list begins is the same for all rows. Where it is not told, the seed is a draft.
    begin = index[-1] - number[:, -1:] + 1 - told
    tokens = window.gather(1, (index - begin) % window.shape[1])
    return number.int(), tokens.int()


def stride(window: Window, measured: Measured, room: Tensor, rules: Rules, forced: Tensor | None = None) -> Speculated:
    """Go on from a forward over windows of L = 2N - 1 positions.

    Args:
        measured: [D, 1, L]; column 0 tells of the position behind the window.
        room: [D] int64: tokens that the request may still have.
        forced: [D, L] int64: what must follow each token of the window, whatever the model says; negative where nothing
            must (``decoding.thinking``).
    """
    progress, columns, length = window.progress, rules.columns, rules.block_length
    most = (length + 1) // 2
    tokens = window.branches[:, 0]
    # What the model writes behind each token of the window.
    follows = measured.token[:, 0].roll(-1, dims=1)
    if forced is not None:
        follows = torch.where(forced >= 0, forced, follows)
    is_drafted = (columns > 0) & (columns < most) & (tokens[:, 1:2] != rules.mask_id)
    num_drafts = is_drafted.sum(dim=1)
    agrees = is_drafted[:, 1:] & (follows[:, :-1] == tokens[:, 1:])
    agreed = agrees.long().cumprod(dim=1).sum(dim=1)
    # The rows from the last accepted draft on say the next seed, and what the drafts behind it are.
    ahead = follows.gather(1, (agreed.unsqueeze(1) + columns).clamp(max=length - 1))
    drafts_on = (agreed == num_drafts).unsqueeze(1) & (columns < most)
    restart = torch.where(drafts_on | (columns == 0), ahead, rules.mask_id)
    # The seed of the prompt is emitted with the first forward of all.
    begins = progress.step == 0
    emitted = torch.where(begins.unsqueeze(1), torch.cat((tokens[:, :1], follows[:, :-1]), dim=1), follows)
    count = agreed + 1 + begins
    nothing = torch.zeros_like(agreed)
    finished = Finished(
        progress=replace(
            progress,
            block_start=progress.block_start + agreed + 1,
            step=progress.step + 1,
            given=nothing,
            num_given=nothing,
        ),
        tokens=restart,
        before=window.before,
        may_draft=torch.zeros_like(begins),
        shift=None,
        emitted=emitted,
        num_emitted=torch.minimum(count, room),
    )
    accepted = Accepted(
        tokens=emitted,
        branch=nothing,
        skipped=agreed,
        reached=window.present,
        chosen=torch.zeros_like(is_drafted),
    )
    # Row r predicts column r + 1. The seed of the prompt comes from no row of the window.
    origin = Origin(
        written=(columns >= begins.unsqueeze(1)) & (columns < count.unsqueeze(1)),
        branch=torch.zeros_like(emitted),
        step=torch.zeros_like(emitted),
        place=columns + 1 - begins.long().unsqueeze(1),
    )
    return Speculated(accepted, finished, origin, num_drafts)
