"""Numbers and bars as text, for the commands' tables.

Owns the form of a size, a duration and a filling level.  Never reads the state of anything.
"""

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
MINUTE, HOUR, DAY = 60, 3600, 86400


def size_text(size_bytes: int) -> str:
    """Return a size such as `52.1 GiB`."""
    power = _power(size_bytes)
    return f"{_amount(size_bytes, power)} {_UNITS[power]}"


def share_text(part_bytes: int, whole_bytes: int) -> str:
    """Return a share such as `52.1/96 GiB`, both sizes in the unit of the whole."""
    power = _power(whole_bytes)
    return f"{_amount(part_bytes, power)}/{_amount(whole_bytes, power)} {_UNITS[power]}"


def _power(size_bytes: int) -> int:
    """Return the power of the largest unit in which the size, as rounded, is at least 1."""
    power = 0
    while power < len(_UNITS) - 1 and round(size_bytes / 1024**power) >= 1024:
        power += 1
    return power


def _amount(size_bytes: int, power: int) -> str:
    amount = size_bytes / 1024**power
    return f"{amount:.0f}" if round(amount, 1) >= 100 else f"{amount:.1f}".removesuffix(".0")


def duration_text(seconds: float) -> str:
    """Return a duration in at most two units: `3.2s`, `42s`, `1m04s`, `2h05m`, `3d04h`."""
    whole = math.floor(seconds)
    if whole < 10:
        return f"{max(seconds, 0.0):.1f}s" if seconds < 9.95 else "10s"
    for unit_s, smaller_s, unit, smaller in ((DAY, HOUR, "d", "h"), (HOUR, MINUTE, "h", "m"), (MINUTE, 1, "m", "s")):
        if whole >= unit_s:
            return f"{whole // unit_s}{unit}{whole % unit_s // smaller_s:02d}{smaller}"
    return f"{whole}s"


def bar_cells(parts: tuple[int, ...], whole: int, cells: int) -> tuple[int, ...]:
    """Return the number of a bar's cells that each part of the whole fills, at most `cells` in total.

    A part above zero gets a cell while one is left, and the bar is full only if the whole is.
    """
    if whole <= 0:
        return (0,) * len(parts)
    filled: list[int] = []
    so_far, left = 0, sum(part > 0 for part in parts)
    room = cells - (sum(parts) < whole and left < cells)
    for part in parts:
        so_far += max(part, 0)
        left -= part > 0
        end = cells if so_far >= whole else round(cells * so_far / whole)
        wanted = max(end - sum(filled), 1) if part > 0 else 0
        filled.append(min(wanted, max(room - left, min(room, 1))))
        room -= filled[-1]
    return tuple(filled)
