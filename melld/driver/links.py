"""Measures what links carry: each pair of workers alone, then together the pairs that may share something.

Owns the choice of pairs to measure together and the conclusions.  Keeps nothing.

    each pair alone ──► all into one worker, all out of one, pairs over one segment ──► what they carry together
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from melld.ids import WorkerId
from melld.migrate.boundaries import Boundaries, Pair, Segment

Measure = Callable[[Pair, float], Awaitable[int | None]]
"""Measures bytes per epoch over the pair's link for that many seconds; None if it cannot be measured."""
ALONE_S, TOGETHER_S = 10.0, 5.0
"""Time for all pairs alone, and for all groups together."""
MOST_S = 0.3
MOST_PAIRS = 8
"""At most this many pairs are measured at once."""
SHARED_BELOW = 0.9
"""A segment is a limit if its pairs together carry less than this part of what they carry one by one."""


async def measure_links(workers: Sequence[WorkerId], segments: Sequence[Segment], measure: Measure) -> Boundaries:
    """Measure all pairs of these workers; `segments` are what some pairs may share.

    Returns boundaries of links alone.  Segments that are no limit are left out.
    """
    pairs = [(source, destination) for source in workers for destination in workers if source != destination]
    seconds = min(MOST_S, ALONE_S / max(len(pairs), 1))
    alone = {pair: nbytes for pair in pairs if (nbytes := await measure(pair, seconds)) is not None}
    links: dict[WorkerId, dict[WorkerId, int]] = {}
    for (source, destination), nbytes in alone.items():
        links.setdefault(source, {})[destination] = nbytes
    leaving = {worker: [pair for pair in alone if pair[0] == worker] for worker in workers}
    entering = {worker: [pair for pair in alone if pair[1] == worker] for worker in workers}
    crossing = [(segment, _apart([pair for pair in alone if pair in segment.pairs])) for segment in segments]
    tried = [*leaving.values(), *entering.values(), *(few for _, few in crossing)]
    seconds = min(MOST_S, TOGETHER_S / max(sum(len(few) > 1 for few in tried), 1))

    async def together(few: Sequence[Pair]) -> int:
        found = await _at_once([measure(pair, seconds) for pair in few[:MOST_PAIRS]])
        return 0 if None in found else sum(one for one in found if one is not None)

    out = {worker: nbytes for worker, few in leaving.items() if len(few) > 1 and (nbytes := await together(few))}
    into = {worker: nbytes for worker, few in entering.items() if len(few) > 1 and (nbytes := await together(few))}
    kept = []
    for segment, few in crossing:
        one_by_one = sum(alone[pair] for pair in few[:MOST_PAIRS])
        if len(few) > 1 and (nbytes := await together(few)) and nbytes < SHARED_BELOW * one_by_one:
            kept.append(msgspec.structs.replace(segment, nbytes=nbytes))
    return Boundaries(links=links, ports_out=out, ports_in=into, segments=tuple(kept))


def _apart(pairs: Sequence[Pair]) -> list[Pair]:
    """Return some of these pairs that share no port, so that only the segment can slow them down together."""
    chosen: list[Pair] = []
    for source, destination in pairs:
        if all(source != other and destination != another for other, another in chosen):
            chosen.append((source, destination))
    return chosen


async def _at_once(measured: Sequence[Awaitable[int | None]]) -> list[int | None]:
    """Run all measurements; once all are over, raise the first error."""
    found = await asyncio.gather(*measured, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
