"""Two-bin packing: what goes now fits, and nothing waits that would fit beside it."""

from hypothesis import given
from hypothesis import strategies as st

from melld.migrate.packing import Bin, Bins, Candidate, Choice, Way, divide

BOUNDARIES: dict[Bin, int] = {("kv", "a", "d"): 10, ("kv", "b", "d"): 6, ("tokens", "d"): 8}
LINKS = [name for name in BOUNDARIES if name[0] == "kv"]
COMPUTE: Bin = ("tokens", "d")


@st.composite
def candidates(draw: st.DrawFn, most: int) -> list[Candidate]:
    """Draw moves from two sources to one destination, a few of them larger than a bin."""
    drawn = []
    for _ in range(draw(st.integers(1, most))):
        link, kv, tokens = draw(st.sampled_from(LINKS)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
        ways = [Way((link,), kv, kv / BOUNDARIES[link]), Way((COMPUTE,), tokens, tokens / 40)]
        kept = draw(st.sampled_from([ways, ways[:1], ways[1:]]))
        drawn.append(Candidate(tuple(kept), draw(st.booleans())))
    return drawn


USED = st.fixed_dictionaries({name: st.sampled_from([0, 0, 3, size]) for name, size in BOUNDARIES.items()})


def is_allowed(choice: Choice, used: dict[Bin, int]) -> bool:
    """State the law of the bins independently."""
    for name, boundary in BOUNDARIES.items():
        costs = [way.cost for way in choice if way is not None and name in way.bins]
        alone = len(costs) == 1 and used[name] == 0
        if costs and not alone and used[name] + sum(costs) > boundary:
            return False
    return True


@given(candidates(most=12), USED)
def test_a_boundary_is_never_exceeded(moves: list[Candidate], used: dict[Bin, int]) -> None:
    """Neither a link's nor a worker's."""
    assert is_allowed(divide(moves, Bins(BOUNDARIES.__getitem__, used)), used)


@given(candidates(most=15), USED)
def test_nothing_that_would_still_fit_is_left_out(moves: list[Candidate], used: dict[Bin, int]) -> None:
    """A link is not idle while any move waits for it."""
    choice = divide(moves, Bins(BOUNDARIES.__getitem__, used))
    for index, move in enumerate(moves):
        for way in move.ways if choice[index] is None else ():
            assert not is_allowed((*choice[:index], way, *choice[index + 1 :]), used)


@given(candidates(most=10), USED)
def test_equal_moves_are_divided_equally(moves: list[Candidate], used: dict[Bin, int]) -> None:
    """The simulator shows what the daemon does."""
    first, second = (divide(moves, Bins(BOUNDARIES.__getitem__, used)) for _ in range(2))
    assert first == second


def test_the_faster_way_is_the_first_choice() -> None:
    """Alone, a short request over a slow link goes by its tokens, and over a fast one by its KV."""
    free = Bins(BOUNDARIES.__getitem__, {})
    for kv_epochs, bin_name in ((3.0, "tokens"), (0.5, "kv")):
        ways = (Way((LINKS[0],), 5, kv_epochs), Way((COMPUTE,), 5, 1.0))
        (way,) = divide([Candidate(ways, pressing=False)], free)
        assert way is not None
        assert way.bins[0][0] == bin_name


def test_one_urgent_move_goes_before_two_that_can_wait() -> None:
    """An overflow within the epoch costs a preemption; two moves in the next epoch cost nothing."""
    calm = [Candidate((Way((COMPUTE,), 4, 1.0),), pressing=False)] * 2
    urgent = Candidate((Way((COMPUTE,), 8, 2.0),), pressing=True)
    assert divide([*calm, urgent], Bins(BOUNDARIES.__getitem__, {})) == (None, None, urgent.ways[0])


def test_a_move_larger_than_a_boundary_goes_alone() -> None:
    """The longest request can leave, too: when nothing else is in its bin."""
    large = Candidate((Way((COMPUTE,), 100, 2.5),), pressing=False)
    assert divide([large], Bins(BOUNDARIES.__getitem__, {})) == (large.ways[0],)
    assert divide([large], Bins(BOUNDARIES.__getitem__, {COMPUTE: 1})) == (None,)


def test_a_closed_bin_accepts_no_move() -> None:
    """Bins kept for a move that has waited too long are not given to others."""
    small = Candidate((Way((COMPUTE,), 1, 0.1),), pressing=True)
    assert divide([small], Bins(BOUNDARIES.__getitem__, {}, [COMPUTE])) == (None,)
