"""The metrics page matches the registry and does not stall the streams while it is written."""

import asyncio
import contextlib

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from melld.api.pages import metrics
from tests.api.contexts import context_of

FAMILIES = 20


async def test_other_work_goes_on_while_metrics_are_written() -> None:
    """Many workers mean tens of thousands of lines, which Prometheus fetches every few seconds."""
    context = context_of([])
    registry: CollectorRegistry = context.registry
    for number in range(FAMILIES):
        Gauge(f"gauge{number}", "A figure", ["of"], registry=registry).labels('a "name"').set(number)
    Histogram("seconds", "Times", registry=registry).observe(1)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    answer = await metrics(context, "")
    turning.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turning
    assert answer.body == generate_latest(registry)
    assert turns >= FAMILIES
