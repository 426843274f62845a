"""How many drafts requests keep where a step has too few rows for all of them."""

from collections.abc import Sequence


def share(drafts: Sequence[int], units: Sequence[int], room: int) -> list[int]:
    """As many of each request's ``drafts`` as fit in ``room`` rows, taken from the requests with the most drafts.

    Args:
        units: rows of one draft of each request.
        room: rows for all drafts together.
    """
    most = max(drafts, default=0)
    while most and sum(min(number, most) * unit for number, unit in zip(drafts, units, strict=True)) > room:
        most -= 1
    shares = [min(number, most) for number in drafts]
    left = room - sum(number * unit for number, unit in zip(shares, units, strict=True))
    for index, (number, unit) in enumerate(zip(drafts, units, strict=True)):
        if number > most and left >= unit:
            shares[index] += 1
            left -= unit
    return shares
