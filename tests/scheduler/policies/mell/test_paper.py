"""Where the paper's text fails, MELL as printed fails and the corrected version does not."""

from fractions import Fraction

import pytest

from melld.scheduler.policies.mell.classes import FULL_SIXTHS, WEIGHT_SIXTHS, L, Limits, M, S, T
from melld.scheduler.policies.mell.plan import MellSettings
from tests.scheduler.policies.mell.sizes import CAPACITY, Packing

MENDED = MellSettings(batching=False)
PRINTED = MellSettings(batching=False, literal=True)
QUARTER, HALF = CAPACITY // 4, CAPACITY // 2


def quarters_then_halves(settings: MellSettings, pairs: int) -> Packing:
    """Return 2n requests of C/4, then n of just over C/2: n workers would do."""
    packing = Packing(settings)
    packing.arrive(*[QUARTER] * (2 * pairs), *[HALF + 1] * pairs)
    return packing


def test_as_printed_t_never_moves_to_l() -> None:
    """Property 5 as printed fails: 2n of C/4 and n of just over C/2 take 1.5 times the optimum."""
    packing = quarters_then_halves(PRINTED, 8)
    assert len(packing.bins()) == 12
    with pytest.raises(AssertionError, match=r"\(5\)"):
        packing.check_theorem()


def test_corrected_t_moves_to_l() -> None:
    """The corrected rules fill L-bins from T-bins: the same requests fit on as few workers as their classes allow."""
    packing = quarters_then_halves(MENDED, 8)
    packing.check_theorem()
    # C/4 + C/4 + (C/2 + 1) is one byte too much, so a worker holds one L and one T: 8 bins, and 8 T left in 2.
    assert len(packing.bins()) == 10


def test_the_bound_of_the_quarters_holds_when_they_fit() -> None:
    """With one byte less per quarter the optimum is n, and the corrected rules stay within 4/3 of it and a constant."""
    for settings, workers in ((PRINTED, 12), (MENDED, 8)):
        packing = Packing(settings)
        packing.arrive(*[QUARTER - 1] * 16, *[HALF + 1] * 8)
        assert len(packing.bins()) == workers


def test_as_printed_t_never_goes_to_an_m_worker() -> None:
    """Allocate T as printed looks at L only, so a T opens a worker beside pairs of M with room for it."""
    for settings, workers in ((PRINTED, 2), (MENDED, 1)):
        packing = Packing(settings)
        packing.arrive(CAPACITY // 3 + 1, CAPACITY // 3 + 1, CAPACITY // 8 + 1)
        assert len(packing.bins()) == workers


def test_two_m_leave_room_for_two_t() -> None:
    """M + M is above 2C/3, which leaves room for two T just over C/8, not one as the paper has it."""
    packing = Packing(MENDED)
    packing.arrive(*[CAPACITY // 3 + 1] * 2, *[CAPACITY // 8 + 1] * 2)
    assert packing.bins() == [[801, 801, 301, 301]]


def test_an_l_can_hold_three_t() -> None:
    """0.51 + 3 x 0.126 is below one."""
    packing = Packing(MENDED)
    packing.arrive(HALF + HALF // 50, *[CAPACITY // 8 + 3] * 3)
    assert [len(sizes) for sizes in packing.bins()] == [4]


def test_an_m_that_becomes_l_without_overload_gets_a_partner() -> None:
    """As printed nobody refills it, so an L stays alone beside an M-worker whose M would fit: property 4 fails."""
    for settings, bins in ((PRINTED, [[1200, 801], [1201]]), (MENDED, [[1200], [1201, 801]])):
        packing = Packing(settings)
        *_, growing = packing.arrive(CAPACITY // 3 + 1, HALF, CAPACITY // 3 + 1)
        packing.grow({growing: HALF + 1})
        assert packing.bins() == bins
        if settings.literal:
            with pytest.raises(AssertionError, match=r"\(4\)"):
                packing.check_theorem()
        else:
            packing.check_theorem()


def test_as_printed_a_lone_request_moves_when_its_class_changes() -> None:
    """T/S to S/M as printed is a departure and an arrival, so a request that could stay is moved."""
    for settings, moves in ((PRINTED, 1), (MENDED, 0)):
        packing = Packing(settings)
        (alone,) = packing.arrive(QUARTER)
        packing.grow({alone: QUARTER + 1})
        assert len(packing.moves) == moves


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
    packing = Packing(MENDED, capacity=10_000)
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
