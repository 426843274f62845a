"""Hypothesis profiles: few examples while one works, all of them in CI. No test has a deadline.

``HYPOTHESIS_PROFILE=full`` or ``small`` chooses; without it, ``CI`` in the environment means ``full``.
"""

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("full" if os.environ.get("CI") else "small")
FULL, SMALL = 100, 20
"""Examples of a test that does not name its own number."""

settings.register_profile("full", deadline=None, max_examples=FULL)
settings.register_profile("small", deadline=None, max_examples=SMALL)
settings.load_profile(PROFILE)


def examples(full: int) -> settings:
    """For a test with a number of examples of its own: so many in the full profile, and its share in the small one."""
    return settings(max_examples=full if PROFILE == "full" else max(1, full * SMALL // FULL))
