"""Where the paper's text fails, the corrected version does not."""

from fractions import Fraction

from melld.scheduler.policies.mell.classes import FULL_SIXTHS, WEIGHT_SIXTHS, L, Limits, M, S, T
from tests.scheduler.policies.mell.sizes import CAPACITY, Packing

QUARTER, HALF = CAPACITY // 4, CAPACITY // 2


def test_t_moves_to_l() -> None:
    """2n requests of C/4, then n of just over C/2: the rules fill L-bins from T-bins, which property 5 needs.

    As printed T never moves to L, and the same requests take 1.5 times the optimum.
    """
    packing = Packing()
    packing.arrive(*[QUARTER] * 16, *[HALF + 1] * 8)
    packing.check_theorem()
    # C/4 + C/4 + (C/2 + 1) is one byte too much, so a worker holds one L and one T: 8 bins, and 8 T left in 2.
    assert len(packing.bins()) == 10


def test_the_bound_of_the_quarters_holds_when_they_fit() -> None:
    """With one byte less per quarter the optimum is n, and the rules stay within 4/3 of it and a constant."""
    packing = Packing()
    packing.arrive(*[QUARTER - 1] * 16, *[HALF + 1] * 8)
    assert len(packing.bins()) == 8


def test_t_goes_to_an_m_worker() -> None:
    """Allocate T as printed looks at L only, so a T would open a worker beside pairs of M with room for it."""
    packing = Packing()
    packing.arrive(CAPACITY // 3 + 1, CAPACITY // 3 + 1, CAPACITY // 8 + 1)
    assert len(packing.bins()) == 1


def test_two_m_leave_room_for_two_t() -> None:
    """M + M is above 2C/3, which leaves room for two T just over C/8, not one as the paper has it."""
    packing = Packing()
    packing.arrive(*[CAPACITY // 3 + 1] * 2, *[CAPACITY // 8 + 1] * 2)
    assert packing.bins() == [[801, 801, 301, 301]]


def test_an_l_can_hold_three_t() -> None:
    """0.51 + 3 x 0.126 is below one."""
    packing = Packing()
    packing.arrive(HALF + HALF // 50, *[CAPACITY // 8 + 3] * 3)
    assert [len(sizes) for sizes in packing.bins()] == [4]


def test_an_m_that_becomes_l_without_overload_gets_a_partner() -> None:
    """As printed nobody refills it, so an L stays alone beside an M-worker whose M would fit: property 4 fails."""
    packing = Packing()
    *_, growing = packing.arrive(CAPACITY // 3 + 1, HALF, CAPACITY // 3 + 1)
    packing.grow({growing: HALF + 1})
    assert packing.bins() == [[1200], [1201, 801]]
    packing.check_theorem()


def test_a_lone_request_stays_when_its_class_changes() -> None:
    """T/S to S/M as printed is a departure and an arrival, which would move a request that could stay."""
    packing = Packing()
    (alone,) = packing.arrive(QUARTER)
    packing.grow({alone: QUARTER + 1})
    assert not packing.moves


def weigh(*sizes: Fraction) -> Fraction:
    """Return the weight of a bin in the proof."""
    limits = Limits.of(10_000)
    sixths = sum(WEIGHT_SIXTHS[limits.class_of(int(size * 10_000))] for size in sizes)
    return Fraction(sixths, FULL_SIXTHS)


def test_an_optimal_bin_can_weigh_more_than_four_thirds() -> None:
    """L with M weighs 3/2, a row that Table I lacks, so W <= 4/3 OPT is false as stated."""
    assert weigh(Fraction("0.51"), Fraction("0.49")) == Fraction(3, 2) > Fraction(4, 3)


def test_two_m_and_an_s_make_four_thirds_tight() -> None:
    """The row MMS, which Table I lacks too."""
    sizes = Fraction("0.34"), Fraction("0.34"), Fraction("0.26")
    assert sum(sizes) <= 1
    assert weigh(*sizes) == Fraction(4, 3)


def test_the_weights_of_single_ls_do_not_balance_bin_by_bin() -> None:
    """{.51, .49} and {.60, .40} weigh 3/2 each; with .40 placed on .51 ours needs three bins for the optimum's two.

    By property 4 a single L of ours (.60: .49 does not fit) meets there a partner that ours has beside another L, so
    the two bins of the optimum together carry one L-M pair of ours, a single L, and an M: 1 + 1 + 1/2 over 2 = 5/4.
    """
    packing = Packing(capacity=10_000)
    packing.arrive(5100, 4000, 6000, 4900)
    packing.check_theorem()
    assert sorted(packing.bins()) == [[4900], [5100, 4000], [6000]]
    ours = weigh(Fraction("0.51")) + weigh(Fraction("0.60")) + weigh(Fraction("0.49"))
    assert ours / 2 == Fraction(5, 4)
    optimum = weigh(Fraction("0.51"), Fraction("0.49")), weigh(Fraction("0.60"), Fraction("0.40"))
    assert sum(optimum) / 2 == Fraction(3, 2)


def test_the_class_limits_are_exact_to_the_byte() -> None:
    """A size on a limit is of the lower class, one byte more of the next; two M and three S always fit."""
    for capacity in (2400, 2401, 2405, 2399, 97):
        limits = Limits.of(capacity)
        for parts, below, above in ((2, M, L), (3, S, M), (4, T, S)):
            at = capacity // parts
            assert (limits.class_of(at), limits.class_of(at + 1)) == (below, above)
        assert 2 * limits.m_bytes <= capacity
        assert 3 * limits.s_bytes <= capacity
