"""How thorough randomised tests are: a sample in `make test`, everything in `make test-all`.

Owns the two profiles of Hypothesis.  Tests that only the long form runs carry `@pytest.mark.long`; CI runs most.
"""

from hypothesis import Phase, settings

SHORT, LONG, MUTANTS = "short", "long", "mutants"
settings.register_profile(SHORT, max_examples=25, deadline=None)
settings.register_profile(LONG, max_examples=100, deadline=None)
# `make mutants` asks whether a test fails, for the same reason each time: not for its smallest example.
FINDING = (Phase.explicit, Phase.generate, Phase.target)
settings.register_profile(MUTANTS, max_examples=25, deadline=None, derandomize=True, database=None, phases=FINDING)
settings.load_profile(SHORT)


def is_long() -> bool:
    """Return True in the long form."""
    return settings.get_current_profile_name() == LONG


def examples(many: int) -> int:
    """Return this many in the long form, and a share of them in the short one."""
    return max(1, many * settings().max_examples // 100)
