"""How many examples property tests get: a quarter of what they ask for in `make test`, all of it in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

USUAL, SHARE, LEAST = 100, 4, 5


def load_profile(thorough: bool) -> None:
    """Set how many examples tests get that do not ask for a number; to be called before test modules are imported."""
    # How long an example takes says nothing on shared cores.
    settings.register_profile("few", max_examples=USUAL // SHARE, deadline=None)
    settings.register_profile("thorough", max_examples=USUAL, deadline=None)
    settings.load_profile("thorough" if thorough else "few")


def fewer(count: int) -> int:
    """`count` in `make test-all`, else its share, but of small counts at least LEAST."""
    few = settings.get_current_profile_name() == "few"
    return max(count // SHARE, min(count, LEAST)) if few else count


def examples(count: int, **others: object) -> settings:
    """Settings of a property test that asks for `count` examples."""
    return settings(max_examples=fewer(count), **others)
