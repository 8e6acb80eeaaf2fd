"""Workers that die, and how soon they are restarted; a supervisor that fails itself says so."""

import asyncio
import math
import resource
from typing import Any

import pytest

from melld.config import HealthConfig
from melld.control.status import WorkerState
from melld.engine.fleet import execution
from melld.engine.fleet.execution import DOZE_DEADLINE_S, STOP_DEADLINE_S
from melld.engine.fleet.life import Event, Intent, State
from melld.engine.fleet.owner import Owner, WorkerStartFailed
from melld.engine.fleet.place import Place, Slot
from melld.engine.fleet.process import UNKILLABLE_S, WorkerEnded
from melld.engine.fleet.supervisor import Supervisor
from melld.engine.host.local import LocalHost
from melld.engine.host.ports import Ear
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.messages import Pong
from melld.engine.wire.spec import WorkerSpec
from melld.ids import WorkerId
from tests.engine.fleet.test_order import SLOT
from tests.engine.fleet.virtual_daemon import VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually
from tests.engine.fleet.virtual_worker import VirtualChild, VirtualHost, VirtualWorker
from tests.serve.offline_daemon import W0, OfflineDaemon


class Nobody:
    """Hears nothing."""

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        raise AssertionError(message)

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None: ...

    def worker_steadied(self, slot: Slot) -> None: ...


async def test_a_process_that_cannot_be_created_is_a_failed_start() -> None:
    """Without spare file descriptors no worker is left half started, and the reason is reported."""
    supervisor = Supervisor([SLOT], LocalHost(TemplateProcess("cpu")), Nobody(), HealthConfig())
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        with pytest.raises(WorkerStartFailed, match=r"cannot start a process: .*Too many open files"):
            await supervisor.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert supervisor.places[WorkerId("w0")].state is WorkerState.FAILED


async def test_a_start_that_hits_a_bug_is_logged_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that nobody restarts would be lost until the daemon's end."""

    class Buggy(VirtualHost):
        def spawn(self, spec: WorkerSpec, ear: Ear) -> VirtualChild:
            raise RuntimeError("a bug")

    supervisor = Supervisor([SLOT], Buggy(), Nobody(), HealthConfig())
    supervisor.owner.anyone_was_ready = True
    supervisor._have_all(Intent.IN_SERVICE)
    supervisor.start_worker(WorkerId("w0"))
    place = supervisor.places[WorkerId("w0")]
    assert place.state is WorkerState.FAILED
    assert place.detail == "cannot start a process: a bug"
    assert place.timer is not None, "it is started again after a rest"
    assert "RuntimeError: a bug" in caplog.text
    await supervisor.stop()


def test_a_recently_dead_worker_gets_only_overflow() -> None:
    """From the death to the scheduler: others are preferred until it has worked for a while."""
    daemon = OfflineDaemon()
    place = daemon.fleet.supervisor.places[W0]
    place.life.take(Event.DIED)
    daemon.fleet.worker_ended(place.slot, WorkerEnded("w0", "killed", expected=False))
    daemon.up(W0)
    homes = [daemon.where(daemon.admit(f"r{number}", 5)) for number in range(6)]
    assert W0 not in homes
    daemon.fleet.worker_steadied(place.slot)
    assert daemon.where(daemon.admit("next", 5)) == W0


def test_one_failing_device_does_not_keep_the_others_from_serving() -> None:
    """Before or after the first is ready: it is retried beside them, and the start completes."""

    async def told(loop: VirtualLoop) -> None:
        daemon = VirtualDaemon(loop, workers=3)
        supervisor = daemon.fleet.supervisor
        starting = asyncio.ensure_future(supervisor.start())
        await daemon.settle()
        workers = daemon.workers()
        workers[0].die(1)
        await asyncio.sleep(30)
        assert supervisor.places[W0].life.restarts == 0, (
            "nobody is tried again before it is known that anybody can serve"
        )
        workers[1].become_ready()
        await daemon.flush()
        workers[2].die(1)
        await asyncio.wait_for(starting, 1)
        assert [place.is_ready for place in supervisor.places.values()] == [False, True, False]
        await asyncio.sleep(1.5)
        for worker in daemon.workers():
            worker.become_ready()
        await daemon.flush()
        assert [place.life.restarts for place in supervisor.places.values()] == [1, 0, 1]
        assert all(place.is_ready for place in supervisor.places.values())
        assert set(daemon.cluster.unsteady) == {"w0", "w2"}
        await asyncio.sleep(1.5)  # `steady_after_s` of this daemon is a second
        assert not daemon.cluster.unsteady
        assert supervisor.places[W0].life.setbacks == 0

    run_virtually(told)


def test_a_worker_drained_while_loading_does_not_delay_the_start() -> None:
    """Its load takes too long, or its device is wanted: the others serve without it."""

    async def told(loop: VirtualLoop) -> None:
        daemon = VirtualDaemon(loop, workers=2)
        supervisor = daemon.fleet.supervisor
        starting = asyncio.ensure_future(supervisor.start())
        await daemon.settle()
        daemon.workers()[1].become_ready()
        await daemon.flush()
        assert not starting.done()
        daemon.fleet.stop_worker(W0, stay_out=True)
        await asyncio.wait_for(starting, 60)
        assert [place.state for place in supervisor.places.values()] == [WorkerState.STOPPED, WorkerState.READY]
        await daemon.close()

    run_virtually(told)


def test_a_start_without_any_worker_fails_with_the_first_reason() -> None:
    """It waits for all of them, and reports what went wrong first."""

    async def told(loop: VirtualLoop) -> None:
        daemon = VirtualDaemon(loop, workers=2)
        starting = asyncio.ensure_future(daemon.fleet.supervisor.start())
        await daemon.settle()
        first, second = daemon.workers()
        first.die(3)
        await daemon.settle()
        assert not starting.done()
        second.die(4)
        with pytest.raises(WorkerStartFailed, match="worker w0 on cpu:0 failed to start: exited with code 3"):
            await starting

    run_virtually(told)


def test_a_crash_soon_after_a_crash_waits_longer() -> None:
    """Ready is not sound: only one that has worked for a while is restarted at once."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        place, waited_s = daemon.fleet.supervisor.places[W0], []
        for _ in range(4):
            daemon.worker(W0).die(-11)
            died_s = loop.time()
            while place.process is None:  # noqa: ASYNC110  no time passes but this loop's own
                await asyncio.sleep(0.01)
            waited_s.append(round(loop.time() - died_s))
            daemon.worker(W0).become_ready()
            await daemon.flush()
        await asyncio.sleep(2)
        daemon.worker(W0).die(-11)
        assert (waited_s, place.life.back_off_s) == ([1, 2, 4, 8], 1.0)
        await daemon.close()

    run_virtually(told)


async def watched_worker(loop: VirtualLoop, health: HealthConfig) -> tuple[VirtualDaemon, VirtualWorker]:
    """Return a ready, supervised worker; nothing puts it to sleep."""
    daemon = VirtualDaemon(loop, workers=1, health=health)
    starting = daemon.spawn(daemon.fleet.supervisor.start())
    await daemon.settle()
    worker = daemon.worker(W0)
    worker.become_ready()
    await daemon.flush()
    await starting
    daemon.spawn(daemon.fleet.supervisor.watch())
    return daemon, worker


@pytest.mark.parametrize("silence_s", [2.0, 10.0, 600.0])
def test_a_silent_worker_is_killed_after_the_configured_timeout(silence_s: float) -> None:
    """A busy machine may answer late: how late is too late is the operator's to say."""

    async def told(loop: VirtualLoop) -> None:
        daemon, worker = await watched_worker(loop, HealthConfig(ping_timeout_s=silence_s))
        worker.hung = True
        await asyncio.sleep(0.8 * silence_s)
        assert worker.ended is None
        await asyncio.sleep(0.6 * silence_s)
        assert worker.ended is not None
        await daemon.close()

    run_virtually(told)


def test_a_failing_probe_leaves_no_other_worker_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with one, the next that hangs is found."""

    async def told(loop: VirtualLoop) -> None:
        daemon = VirtualDaemon(loop, workers=2, health=HealthConfig())
        await daemon.start()
        supervisor = daemon.fleet.supervisor
        first, second = (place.process for place in supervisor.places.values())
        assert first is not None
        assert second is not None
        monkeypatch.setattr(first, "send", lambda _: 1 // 0)
        asked: list[Any] = []
        monkeypatch.setattr(second, "send", asked.append)
        with pytest.raises(ExceptionGroup):
            supervisor._hung.look()
        assert len(asked) == 1
        monkeypatch.undo()
        await daemon.close()

    run_virtually(told)


def test_a_silent_worker_that_computes_is_slow_not_hung() -> None:
    """Beside other programs it may answer late; its computing must end, as a step must."""

    async def told(loop: VirtualLoop) -> None:
        daemon, worker = await watched_worker(loop, HealthConfig(ping_timeout_s=10.0, step_timeout_s=100.0))
        worker.hung = worker.computes = True
        await asyncio.sleep(90)
        assert worker.ended is None
        await asyncio.sleep(20)
        assert worker.ended is not None
        await daemon.close()

    run_virtually(told)


def test_the_ping_timeout_may_be_infinite() -> None:
    """`ping_timeout_s = inf`: never."""

    async def told(loop: VirtualLoop) -> None:
        daemon, worker = await watched_worker(loop, HealthConfig(ping_timeout_s=math.inf))
        worker.hung = True
        await asyncio.sleep(1000)
        assert worker.ended is None
        await daemon.close()

    run_virtually(told)


def test_a_worker_that_cannot_be_killed_holds_nobody_up() -> None:
    """A GPU driver can keep a process forever: its requests go on elsewhere, and the daemon can stop."""

    async def told(loop: VirtualLoop) -> None:
        daemon, worker = await watched_worker(loop, HealthConfig(ping_timeout_s=2.0))
        place = daemon.fleet.places[W0]
        worker.hung = worker.unkillable = True
        await asyncio.sleep(2 + UNKILLABLE_S)
        assert place.is_ready
        await asyncio.sleep(2)
        assert place.detail.startswith("killed by melld: no ping reply for 2 s; it survived SIGKILL for 15 s")
        another = daemon.worker(W0)
        assert another is not worker
        another.become_ready()
        worker.die()  # at last
        await daemon.flush()
        assert place.is_ready
        another.unkillable = another.hung = True
        began_s = loop.time()
        await daemon.fleet.supervisor.stop()
        assert loop.time() - began_s == pytest.approx(STOP_DEADLINE_S + UNKILLABLE_S)

    run_virtually(told)


def test_a_step_may_take_as_long_as_configured() -> None:
    """A slow device is not a hung one; a step that never ends is."""

    async def told(loop: VirtualLoop) -> None:
        daemon, worker = await watched_worker(loop, HealthConfig(step_timeout_s=1000.0))
        for busy_s, is_alive in ((999.0, True), (1001.0, False)):
            worker.say(Pong(busy_s=busy_s))
            await daemon.flush()
            assert (worker.ended is None) == is_alive
        await daemon.close()

    run_virtually(told)


async def dozing(daemon: VirtualDaemon, willing: bool = True) -> Place:
    """Return the first worker, asked to doze, once it has answered."""
    daemon.fleet.supervisor.doze(W0)
    daemon.worker(W0).obey(willing)
    await daemon.flush()
    return daemon.fleet.places[W0]


def test_only_a_dozing_worker_s_process_is_left() -> None:
    """Nobody copies from it or sends to it; woken, it is a new worker, in the time that it took to wake."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        process = daemon.fleet.places[W0].process
        place = await dozing(daemon)
        assert (place.state, place.dozing_bytes, place.loading) == (WorkerState.DOZING, 7, "")
        assert W0 not in daemon.fleet.ready
        assert not any(W0 in pair for pair in daemon.executor.links)
        assert daemon.fleet.supervisor.load(W0)
        assert place.loading
        await asyncio.sleep(3)
        daemon.worker(W0).obey()
        await daemon.flush()
        assert (place.state, place.process, round(place.wake_s)) == (WorkerState.READY, process, 3)
        assert W0 in daemon.fleet.ready
        await daemon.close()

    run_virtually(told)


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_cannot_doze_is_stopped(answers: bool) -> None:
    """Whether it says so or says nothing: its memory is wanted."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        if answers:
            place = await dozing(daemon, willing=False)
        else:
            place = daemon.fleet.places[W0]
            daemon.fleet.supervisor.doze(W0)
            await asyncio.sleep(DOZE_DEADLINE_S)
        await asyncio.sleep(1)
        assert place.state is WorkerState.STOPPED
        assert daemon.worker(W0).ended is not None
        await daemon.close()

    run_virtually(told)


def test_each_doze_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dozes again soon after waking is not stopped by the previous deadline."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        place = await dozing(daemon)
        assert daemon.fleet.supervisor.load(W0)
        daemon.worker(W0).obey()
        await asyncio.sleep(2)
        await daemon.flush()
        daemon.fleet.supervisor.doze(W0)
        await asyncio.sleep(2)
        assert place.is_going_to_doze
        while daemon.worker(W0).inbox:
            daemon.worker(W0).obey()
        await daemon.flush()
        assert place.life.state is State.DOZING
        await daemon.close()

    monkeypatch.setattr(execution, "DOZE_DEADLINE_S", 3.0)
    run_virtually(told)


def test_a_worker_that_dies_while_dozing_is_reported_once() -> None:
    """Its memory was freed when it began to doze, or is about to be."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        daemon.fleet.supervisor.owner = owner = Lender()
        gone = owner.gone
        daemon.fleet.supervisor.doze(W0)
        daemon.worker(W0).obey()
        daemon.worker(W0).deliver()
        assert gone == [], "the other may still copy from it"
        daemon.worker(W0).die()
        assert gone == []
        daemon.worker(WorkerId("w1")).obey()
        await daemon.flush()
        assert gone == [W0]
        await daemon.close()

    run_virtually(told)


def test_a_worker_that_dies_while_waking_is_restarted() -> None:
    """What it could not read again a new process reads, once asked."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        place = await dozing(daemon)
        process = place.process
        assert daemon.fleet.supervisor.load(W0)
        daemon.worker(W0).die(1)
        assert (place.state, place.life.failed_starts) == (WorkerState.FAILED, 1)
        await asyncio.sleep(2)
        daemon.worker(W0).become_ready()
        await daemon.flush()
        assert place.is_ready
        assert place.process is not process
        await daemon.close()

    run_virtually(told)


def test_a_crash_after_a_doze_is_not_forgiven_for_earlier_uptime() -> None:
    """A worker that has just died is not stable: until it has worked for a while it gets only overflow."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=2).start()
        place = daemon.fleet.places[W0]
        daemon.worker(W0).die(-11)
        await asyncio.sleep(1.1)
        daemon.worker(W0).become_ready()
        await daemon.flush()
        assert await dozing(daemon) is place
        assert daemon.fleet.supervisor.load(W0)
        daemon.worker(W0).obey()
        await daemon.flush()
        daemon.worker(W0).die(-11)
        await asyncio.sleep(1.2)
        assert place.life.setbacks == 2
        await daemon.close()

    run_virtually(told)


class Lender(Owner):
    """Hears of the workers that it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.exits: list[WorkerEnded] = []
        self.gone: list[WorkerId] = []

    def tell_offers(self) -> None: ...

    def worker_ended(self, worker: WorkerId, ended: WorkerEnded) -> None:
        self.exits.append(ended)

    def worker_gone(self, worker: WorkerId) -> None:
        self.gone.append(worker)


def test_an_owner_hears_that_a_restart_in_back_off_was_cancelled() -> None:
    """It would wait forever for a worker that an operator has drained meanwhile."""

    async def told(loop: VirtualLoop) -> None:
        owner = Lender()
        daemon = VirtualDaemon(loop, workers=1, owner=owner)
        supervisor = daemon.fleet.supervisor
        assert supervisor.load(W0)
        await daemon.settle()
        daemon.worker(W0).die(1)
        assert supervisor.load(W0)
        await daemon.settle()
        assert supervisor.places[W0].process is None
        supervisor.stop_worker(W0, stay_out=True)
        assert [ended.expected for ended in owner.exits] == [False, True]

    run_virtually(told)
