"""Agents on other machines: what they relay, and what is reported when a part fails.  Real processes and TLS."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from melld.cluster import link
from melld.config import HealthConfig
from melld.engine.fleet.hung import HungWorkers
from melld.engine.fleet.life import State
from melld.engine.fleet.place import Place, Slot
from melld.engine.host.fate import is_stopped
from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire import messages as wire
from melld.ids import WorkerId
from melld.kvstore.device_reading import DeviceState
from tests.cluster.plain_agent import Proxy, Site, site, until_gone

SILENCE_S = 1.0
UNREAD = b"x" * (9 << 20)


async def lost(at: Site, name: str = "m1") -> str:
    """Wait for the loss of a machine with a worker; return the reason.  Its worker's loss follows, blaming nobody."""
    reason = await at.until(f"lost {name}")
    assert at.told[-2:] == [
        (f"lost {name}", reason),
        ("w0 ended", f"machine {name} is lost: {reason} (from outside)"),
    ]
    return reason


async def test_a_remote_worker_works_like_a_local_one(demo_model: Path) -> None:
    """It loads, answers, can be killed, and is reported by its own machine."""
    async with site(demo_model) as at:
        machine, agent = await at.join()
        worker = await at.ready_worker(machine)
        worker.send(wire.Ping(time.monotonic()))
        await at.until("w0 Pong")
        worker.kill()
        assert await at.until("w0 ended") == "ended by SIGKILL (by melld) (its own)"
        again = await at.ready_worker(machine, "w1")
        os.kill(again.pid, signal.SIGKILL)
        assert await at.until("w1 ended") == "ended by SIGKILL (from outside) (from outside)"
        machine.dismiss()
        assert await agent.word() == "the daemon has stopped"


async def test_device_readings_come_from_the_worker_s_machine(demo_model: Path) -> None:
    """Status and metrics show memory and load of remote workers, too."""
    async with site(demo_model) as at:
        machine, _ = await at.join()
        worker = await at.ready_worker(machine)
        await at.until("m1 is read", len(at.told))
        reading = machine.readings["w0"]
        assert (reading.pid, reading.device.state) == (worker.pid, DeviceState.OK)
        assert (reading.device.used_bytes or 0) > 1 << 20


async def test_a_killed_agent_takes_its_process_tree_along(demo_model: Path) -> None:
    """The machine is lost in one event before its worker, and no process stays."""
    async with site(demo_model) as at:
        machine, agent = await at.join()
        worker = await at.ready_worker(machine)
        template = psutil.Process(worker.pid).ppid()
        os.kill(agent.process.pid, signal.SIGKILL)
        await lost(at)
        await until_gone(worker.pid, template)
        with pytest.raises(OSError, match="machine m1 is lost"):
            machine.spawn(worker.spec, worker)


async def test_a_frozen_machine_is_lost_after_its_silence(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed and nothing comes: after `silence_s` its requests resume elsewhere.  No worker is blamed."""
    async with site(demo_model, SILENCE_S) as at:
        machine, agent = await at.join()
        worker = await at.ready_worker(machine)
        os.kill(agent.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(link, "QUIET_S", 0.0)
        place = Place(Slot(worker=WorkerId("w0"), device="m1/cpu:0", spec=worker.spec))
        place.process = worker
        place.life.state = State.READY
        hung = HungWorkers([place], HealthConfig())
        for _ in range(30):
            hung.look()
        assert await lost(at) == "no message received for 1 s"
        os.kill(agent.process.pid, signal.SIGCONT)
        await agent.word()
        await until_gone(worker.pid)


async def test_a_stopped_worker_is_detected_through_its_agent(demo_model: Path) -> None:
    """A rank, or a loading process, answers no ping: whoever watches it finds it, even on another machine."""
    async with site(demo_model) as at:
        machine, _ = await at.join()
        worker = await at.ready_worker(machine)

        async def looked(reach: Reach, times: int) -> Standstill:
            for _ in range(times):
                since = len(at.told)
                worker.look(reach)
                await at.until("m1 has looked", since)
            return worker.look(reach)

        os.kill(worker.pid, signal.SIGSTOP)
        while not is_stopped(worker.pid):  # it stops when it has the processor next
            pass
        seen = await looked("ranks", 6)
        assert min(seen.stopped_looks, seen.idle_looks) >= 4
        await at.until("m1 has looked", len(at.told))
        assert worker.look("itself").stopped_looks == 0, "what was seen otherwise says nothing"
        await at.until("m1 has looked", len(at.told))
        os.kill(worker.pid, signal.SIGCONT)
        assert (await looked("ranks", 3)).stopped_looks == 0


async def test_both_sides_of_a_partition_end_it(demo_model: Path) -> None:
    """The daemon gives the machine up, and later the agent ends its workers: nothing computes for nobody."""
    async with site(demo_model, SILENCE_S) as at, Proxy.open(at.gate.port) as (proxy, port):
        machine, agent = await at.join(port=port)
        worker = await at.ready_worker(machine)
        proxy.cut()
        assert await lost(at) == "no message received for 1 s"
        assert await agent.word() == f"no message received for {link.AGENT_PATIENCE} s"
        await until_gone(worker.pid)


def test_a_stalled_daemon_loses_no_machine(demo_model: Path) -> None:
    """Suspended, stopped or busy: the silence was its own; what arrived meanwhile counts as on time."""

    async def hold_up() -> None:
        async with site(demo_model, SILENCE_S) as at:
            machine, _ = await at.join(devices=2)
            killed, other = await at.ready_worker(machine), await at.ready_worker(machine, "w1")
            killed.kill()
            time.sleep(3 * SILENCE_S)  # noqa: ASYNC251  this is the fault
            other.send(wire.Ping(time.monotonic()))
            await at.until("w1 Pong")
            assert await at.until("w0 ended") == "ended by SIGKILL (by melld) (its own)"
            assert machine.why_lost is None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold_up())


@pytest.mark.long
async def test_a_long_message_arrives_whole(demo_model: Path) -> None:
    """It travels in pieces, and a worker that reads is not killed for its length."""
    async with site(demo_model) as at:
        machine, _ = await at.join()
        worker = await at.ready_worker(machine)
        worker.send(wire.AbortRequests(["nobody"]), [UNREAD, UNREAD])
        worker.send(wire.Ping(time.monotonic()))
        await at.until("w0 Pong")


async def test_an_agent_ends_with_the_daemon_and_with_its_parent(demo_model: Path) -> None:
    """Its workers have nobody left to work for."""
    async with site(demo_model) as at:
        machine, agent = await at.join()
        worker = await at.ready_worker(machine)
        machine._link._transport.abort()  # type: ignore[union-attr]  # what the kernel does when a daemon dies
        assert await agent.word() != ""
        await until_gone(worker.pid)
        _, other = await at.join("m2")
        other._ours.shutdown(1)
        assert await at.until("lost m2") == "the connection was closed"
        await asyncio.to_thread(other.process.wait)
