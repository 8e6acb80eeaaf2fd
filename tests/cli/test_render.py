"""Numbers and bars for people."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from melld.cli.render import bar_cells, duration_text, share_text, size_text

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (128 << 20, "128 MiB"),
        (73_400_320_000, "68.4 GiB"),
        ((1 << 30) - 1, "1 GiB"),
        (141 << 30, "141 GiB"),
    ],
)
def test_a_size_has_significant_figures_only(size_bytes: int, expected: str) -> None:
    """Nobody counts digits to tell gigabytes from megabytes."""
    assert size_text(size_bytes) == expected


@given(st.integers(0, 2**55))
def test_a_size_is_correctly_rounded(size_bytes: int) -> None:
    """To its last figure."""
    amount, unit = size_text(size_bytes).split()
    step = 0.1 if "." in amount or float(amount) < 100 else 1.0
    assert abs(float(amount) - size_bytes / UNITS[unit]) <= step / 2 + 1e-9
    assert float(amount) < 1024 or unit == "PiB"


def test_a_share_uses_one_unit() -> None:
    """Used and capacity can be compared at a glance."""
    assert share_text(700 << 20, 24 << 30) == "0.7/24 GiB"
    assert share_text(0, 0) == "0/0 B"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-0.2, "0.0s"),
        (0.84, "0.8s"),
        (9.96, "10s"),
        (59.99, "59s"),
        (64, "1m04s"),
        (7500, "2h05m"),
        (273_600, "3d04h"),
    ],
)
def test_a_duration_has_two_figures(seconds: float, expected: str) -> None:
    """An age is read in passing."""
    assert duration_text(seconds) == expected


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3), st.integers(0, 2000), st.integers(1, 40))
@example([3, 1], 5, 3)
def test_a_bar_never_shows_empty_or_full_falsely(parts: list[int], whole: int, cells: int) -> None:
    """A worker with one block is not empty, and one with a block left is not full, whatever the rounding."""
    filled = bar_cells(tuple(parts), whole, cells)
    assert all(count >= 0 for count in filled)
    assert sum(filled) <= cells
    if whole == 0:
        assert sum(filled) == 0
    elif sum(parts) >= whole:
        assert sum(filled) == cells
    elif sum(1 for part in parts if part) < cells:
        assert sum(filled) < cells
        assert all(count > 0 for count, part in zip(filled, parts, strict=True) if part)
        assert math.isclose(sum(filled), cells * sum(parts) / whole, abs_tol=len(parts) + 0.5)
