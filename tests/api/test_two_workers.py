"""Two workers at work, seen from outside: which request is where, and that nothing leaks."""

import asyncio

import psutil

from tests.serve.daemon_process import DaemonProcess
from tests.serve.test_serve import QUESTION, answer, client_of, until
from tests.worker_faults import slowed


async def test_two_requests_run_on_the_two_workers(daemon: DaemonProcess) -> None:
    """Both devices work, and `melld status --json` shows which request is where."""
    async with client_of(daemon) as client:
        seen: set[str] = set()

        def both_at_work() -> bool:
            seen.update(request["worker"] for request in daemon.status()["requests"] if request["worker"])
            return len(seen) == 2

        with slowed(daemon.faults):
            answers = asyncio.gather(*(answer(client, seed, 50) for seed in range(2)))
            await until(both_at_work)
        await answers
        assert seen == {"w0", "w1"}


def test_a_worker_on_one_device_is_one_process(daemon: DaemonProcess) -> None:
    """It starts no helper, such as `multiprocessing`'s resource tracker, that nothing of its would use."""
    assert [psutil.Process(worker["pid"]).children() for worker in daemon.status()["workers"]] == [[], []]


async def test_all_blocks_are_free_when_all_requests_have_ended(daemon: DaemonProcess) -> None:
    """Nothing leaks: what a request held is there for the next."""
    async with client_of(daemon) as client:
        await asyncio.gather(*(answer(client, seed, 20) for seed in range(6)))
        await until(lambda: [w["used_blocks"] for w in daemon.status()["workers"]] == [0, 0])


async def test_a_client_that_leaves_frees_its_blocks(daemon: DaemonProcess) -> None:
    """Nobody pays for answers that nobody reads."""
    async with client_of(daemon) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            max_tokens=16_000,
            stream=True,  # type: ignore[arg-type]
        )
        async for _chunk in stream:
            break
        await stream.close()
        await until(lambda: daemon.status()["requests"] == [])
        await until(lambda: [w["used_blocks"] for w in daemon.status()["workers"]] == [0, 0])
