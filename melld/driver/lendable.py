"""Which workers' devices are lent to another program: those that cost least to empty, and never the last in service.

Pure.  A loan takes whole lots: the devices of one worker go together, and workers that share a device go with it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from melld.control.messages import Lend
from melld.errors import MelldError
from melld.ids import WorkerId


class NothingToLend(MelldError):
    """No device can be lent now, but one may be later."""

    status = 409
    code = "nothing_to_lend"


class NeverLent(MelldError):
    """There is no such device, or there are too few."""

    status = 404
    code = "never_lent"


class Lendable(NamedTuple):
    """A worker whose devices may be asked for."""

    worker: WorkerId
    devices: tuple[str, ...]
    """`cuda:0`, one for each that it uses."""
    serves: bool
    """It takes requests, awake or not."""
    is_awake: bool
    requests: int
    kv_bytes: int
    model: str = ""
    taken: str = ""
    """Why its devices cannot be lent, in words; empty if they can."""


Lot = tuple[Lendable, ...]
"""Workers that are lent together."""


def devices_of(lot: Sequence[Lendable]) -> tuple[str, ...]:
    """Return the devices of these workers, each once."""
    return tuple(dict.fromkeys(device for one in lot for device in one.devices))


def choose(workers: Sequence[Lendable], wanted: Lend) -> Lot:
    """Return the workers to empty: idle ones first, asleep before awake, then those with the fewest KV bytes.

    Of equals the last: the scheduler uses the first workers most.

    Raises:
        NothingToLend: the devices are taken, or no worker would be left in service.
        NeverLent: there are no such devices.
    """
    _check(workers, wanted)
    lots = list(_lots(workers))
    if wanted.devices:
        lots = [lot for lot in lots if set(devices_of(lot)) & set(wanted.devices)]
        count = len(devices_of(sum(lots, ())))
    else:
        count = wanted.count
    ranks = {one.worker: rank for rank, one in enumerate(workers)}
    free = [lot for lot in lots if not any(one.taken for one in lot)]
    free.sort(key=lambda lot: (*_cost(lot), -ranks[lot[0].worker]))
    chosen: Lot = ()
    for lot in free:
        if len(devices_of(chosen)) >= count:
            break
        if wanted.even_last or _leaves_service(workers, chosen + lot):
            chosen += lot
    if len(devices_of(chosen)) < count:
        raise NothingToLend(_why(lots, count, chosen))
    return tuple(one for one in workers if one in chosen)


def _check(workers: Sequence[Lendable], wanted: Lend) -> None:
    known = devices_of(workers)
    if unknown := [device for device in wanted.devices if device not in known]:
        raise NeverLent(f"no device {unknown[0]!r}; available: {', '.join(known)}")
    if wanted.count > len(known):
        raise NeverLent(f"only {len(known)} devices exist, not {wanted.count}")
    if not wanted.devices and wanted.count == len(known) and not wanted.even_last:
        raise NeverLent(f"{wanted.count} is all devices, and one must stay in service: use --all to lend it too")


def _lots(workers: Sequence[Lendable]) -> Iterator[Lot]:
    """Yield the workers in groups that share no device with each other."""
    left = list(workers)
    while left:
        lot = [left.pop(0)]
        while more := [one for one in left if set(one.devices) & set(devices_of(lot))]:
            lot += more
            left = [one for one in left if one not in more]
        yield tuple(lot)


def _cost(lot: Lot) -> tuple[bool, int, bool]:
    kv_bytes = sum(one.kv_bytes for one in lot)
    return any(one.requests for one in lot), kv_bytes, any(one.is_awake for one in lot)


def _leaves_service(workers: Sequence[Lendable], chosen: Lot) -> bool:
    """Return True if a worker in service is left, also of each model that is awake."""
    left = {one.model for one in workers if one.serves and one not in chosen}
    return bool(left) and left.issuperset(one.model for one in chosen if one.is_awake)


def _why(lots: Sequence[Lot], count: int, chosen: Lot) -> str:
    reasons = []
    for lot in lots:
        if taken := [one for one in lot if one.taken]:
            reasons.append(f"{', '.join(devices_of(lot))} is {taken[0].taken}")
        elif not set(lot) <= set(chosen):
            names = ", ".join(one.worker for one in lot)
            reasons.append(f"without {names} no worker would be left in service (use --all to lend it too)")
    wanted = f"{count} {'device' if count == 1 else 'devices'} wanted"
    return f"of {wanted} {len(devices_of(chosen))} can be lent: {'; '.join(reasons)}"
