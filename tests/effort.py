"""How much of a search the tests do: a little in `make test`, all of it in `make test-all`.

Owns the two profiles of Hypothesis.  Tests that only the long form runs carry `@pytest.mark.long`.
"""

from hypothesis import settings

SHORT, LONG = "short", "long"
settings.register_profile(SHORT, max_examples=25, deadline=None)
settings.register_profile(LONG, max_examples=100, deadline=None)
settings.load_profile(SHORT)


def is_long() -> bool:
    """Whether this is the long form."""
    return settings.get_current_profile_name() == LONG


def examples(many: int) -> int:
    """So many in the long form, and their share in the short one."""
    return max(1, many * settings().max_examples // 100)
