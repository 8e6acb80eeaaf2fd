"""The real daemon below its API, over workers without a model, and one model of who runs what.

Fleet, supervisor, processes, driver, scheduler, planner, executor, ledger, drains and idle rule are the real ones; what
the wires carry moves when the history says so.  `disagreements` holds what each of them believes against the others.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry

from melld.config import HealthConfig
from melld.control.status import WorkerState
from melld.decisions.recorder import recording
from melld.decisions.records import Record, header_record
from melld.decisions.stories import Happened, Stories, Story
from melld.driver.driver import Driver
from melld.driver.executor import Executor
from melld.driver.idle import IdleSettings, IdleWorkers
from melld.driver.loans import Loans
from melld.driver.report import MoveMeters
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.life import Intent
from melld.engine.fleet.place import Slot
from melld.engine.fleet.request import RequestKilledWorkers
from melld.engine.wire.spec import WorkerSpec
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.migrate.boundaries import Boundaries
from melld.migrate.planner import Planner
from melld.migrate.table import MoveState
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.names import POLICIES
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.state import RequestState
from tests.decisions.audit import Auditor
from tests.engine.fleet.virtual_loop import VirtualLoop, end_all
from tests.engine.fleet.virtual_worker import VirtualCodec, VirtualHost, VirtualWorker, Words, core_request
from tests.kvstore.laws import check_ledger, pages
from tests.scheduler.law import check_cluster

REST = IdleSettings(sleep_after_s=2.0, stop_after_s=4.0)
SOON_STEADY = HealthConfig(steady_after_s=1.0)


def where_told(story: Story) -> str:
    """Return the worker that the request's story names; empty while it waits."""
    elsewhere = (Happened.QUEUED, Happened.PROMISED, Happened.MOVE_BEGAN)
    return next((line.worker for line in reversed(story.lines) if line.what not in elsewhere), "")


class LoudDriver(Driver):
    """A driver that raises what the daemon would log and survive."""

    def _try(self, _what: msgspec.Struct, act: Callable[..., None], *arguments: Any) -> None:
        act(*arguments)


class VirtualDaemon:
    """`start` first.  `clients` has the tokens of every admitted request, `errors` how one ended otherwise."""

    def __init__(
        self,
        loop: VirtualLoop,
        workers: int = 3,
        policy: str = "mell-plus",
        health: HealthConfig = SOON_STEADY,
        machines: int = 1,
        owner: Any = None,
        name: str = "w",
        host: Callable[[], VirtualHost] = VirtualHost,
        is_alone: bool = False,
        loans: Loans | None = None,
    ) -> None:
        self.names = [WorkerId(f"{name}{index}") for index in range(workers)]
        specs = [WorkerSpec(worker=name, model_path="", device_kind="cpu") for name in self.names]
        devices = [f"cpu:{index}" for index in range(workers)]
        slots = [
            Slot(worker=WorkerId(spec.worker), device=device, spec=spec, machine=f"m{number}", machine_number=number)
            for number, spec, device in zip(itertools.cycle(range(machines)), specs, devices, strict=False)
        ]
        self.hosts = {slot.machine: host() for slot in slots}
        settings = SchedulerSettings(ClusterSettings(retire_after_s=0.5))
        scheduler = Scheduler(POLICIES[policy], settings)
        self.cluster = scheduler.cluster
        self.auditor = Auditor()
        self.stories = Stories(kept=1000)
        taps = [recording(scheduler, self.stories.take, self._audit)]
        self.auditor.feed(header_record(policy, settings, loop.time(), 0.0, ""))
        self.fleet = Fleet([], VirtualHost(), VirtualCodec(), lambda: self.driver, loop.time, health)
        for slot in slots:
            self.fleet.supervisor.add([slot], self.hosts[slot.machine])
        if owner is not None and not is_alone:
            self.fleet.supervisor.let_to(owner)
        self.executor = Executor(self.fleet, loop.time, MoveMeters(CollectorRegistry()))
        planner = Planner(Boundaries())
        ends = () if owner is None else (owner.tell_offers, loans)
        self.driver = LoudDriver(scheduler, self.fleet, self.executor, planner, taps, loop.time, 0.1, *ends)
        self.drains = self.driver.drains
        self.idle = IdleWorkers(self.fleet, self.cluster, REST, loop.time)
        self.clients: dict[RequestId, list[int]] = {}
        self.lengths: dict[RequestId, int] = {}
        self.finished: set[RequestId] = set()
        self._errors: dict[RequestId, MelldError] = {}
        self.left: set[RequestId] = set()
        self.tasks: set[asyncio.Task[Any]] = set()

    def _audit(self, records: Sequence[Record]) -> None:
        for record in records:
            self.auditor.feed(record)

    async def start(self) -> Self:
        """Make all workers ready and run the daemon's loops."""
        starting = self.spawn(self.fleet.supervisor.start())
        await self.settle()
        for worker in self.workers():
            worker.become_ready()
        await self.flush()
        await starting
        self.spawn(self.fleet.supervisor.watch())
        self.spawn(self.driver.run())
        self.spawn(self.idle.run())
        await self.settle()
        return self

    async def close(self) -> None:
        """End the daemon's loops; raise what one of them fell over."""
        await end_all(self.tasks)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run this beside the history, swallowing operator refusals."""

        async def quietly() -> None:
            try:
                await work
            except MelldError as error:
                self.refused = error

        task = asyncio.get_running_loop().create_task(quietly())
        self.tasks.add(task)
        return task

    async def settle(self) -> None:
        """Run everything that can run without time or a wire."""
        for _ in range(6):
            await asyncio.sleep(0)
        self._read()

    @property
    def now_s(self) -> float:
        """Return the loop's clock."""
        return asyncio.get_running_loop().time()

    # -- clients

    def admit(self, blocks: int, length: int, prefix_blocks: int = 0, priority: int = 0) -> RequestId:
        request = RequestId(f"r{len(self.lengths)}")
        self.clients[request], self.lengths[request] = [], length
        self.fleet.requests.admit(core_request(Words(request, blocks, length, prefix_blocks, priority)))
        return request

    def leave(self, request: RequestId) -> None:
        """Disconnect its client."""
        self.left.add(request)
        self.fleet.requests.abort([request])

    @property
    def errors(self) -> dict[RequestId, MelldError]:
        """Return how requests ended whose clients got an error."""
        while not self.fleet.requests.failures.empty():
            request, error = self.fleet.requests.failures.get_nowait()
            self._errors[request] = error
        return self._errors

    def _read(self) -> None:
        while not self.fleet.outputs.empty():
            step = self.fleet.outputs.get_nowait()
            made = [*step.tokens.items(), *((one.request_id, one.new_token_ids) for one in step.outputs)]
            for request, token_ids in made:
                for token in token_ids:
                    seen = self.clients[request]
                    assert token == len(seen), f"{request} got token {token} where {len(seen)} was due"
                    seen.append(token)
            for output in step.outputs:
                request = RequestId(output.request_id)
                if output.finish_reason is not None:
                    self.finished.add(request)

    @property
    def open(self) -> list[RequestId]:
        """Return requests whose clients wait for more."""
        return list(self.fleet.live)

    # -- workers

    def worker(self, name: WorkerId) -> VirtualWorker:
        return self.hosts[self.fleet.places[name].slot.machine].workers[name]

    def of_machine(self, machine: str) -> list[WorkerId]:
        return [name for name, place in self.fleet.places.items() if place.slot.machine == machine]

    def lose_machine(self, machine: str) -> None:
        """Take all its workers away; none can be started."""
        names, host = self.of_machine(machine), self.hosts[machine]
        host.is_lost = True
        with self.fleet.losing(names, "its machine is lost"):
            for name in names:
                host.workers[name].die()

    def return_machine(self, machine: str) -> None:
        """Bring it back, empty."""
        if self.hosts[machine].is_lost:
            self.hosts[machine].is_lost = False
            self.fleet.supervisor.bring_back(self.of_machine(machine), self.hosts[machine])

    def workers(self) -> list[VirtualWorker]:
        """Return those with a process."""
        return [one for host in self.hosts.values() for one in host.workers.values() if one.ended is None]

    async def flush(self) -> None:
        """Process every message and carry out every command."""
        for _ in range(2000):
            await self.settle()
            busy = [one for one in self.workers() if one.outbox or (one.inbox and (one.ready or one.stopping))]
            busy = [one for one in busy if one.outbox or not one.hung]
            if not busy:
                return
            for worker in busy:
                worker.deliver()
                worker.obey()
        raise AssertionError("it does not come to rest")

    def advance(self) -> bool:
        """Process one frame, else one command; return False if there is neither."""
        workers = [one for one in self.workers() if not one.hung or one.outbox]
        if (speaking := next((one for one in workers if one.outbox), None)) is not None:
            speaking.deliver()
        elif (busy := next((one for one in workers if one.inbox and one.ready), None)) is not None:
            busy.obey()
        else:
            return False
        return True

    async def advance_move(self, request: RequestId, state: MoveState) -> None:
        """Process one thing after the other until the request's migration reaches this state."""
        for _ in range(200):
            await self.settle()
            move = self.executor.moves.get(request)
            if move is not None and move.migration.state is state:
                return
            assert self.advance(), f"{request} waits for nobody"
            self.check()
        raise AssertionError(f"{request} never came to {state}")

    async def finish(self) -> None:
        """Stop injecting faults: every request completes, and nothing is left to do."""
        for machine in self.hosts:
            self.return_machine(machine)
        for _ in range(150):
            for name in self.names:
                if self.fleet.supervisor.places[name].life.given_up:
                    self.fleet.supervisor.start_worker(name)
            for worker in self.workers():
                worker.become_ready()
            await self.flush()
            for worker in self.workers():
                worker.step()
            await self.flush()
            self.check()
            await asyncio.sleep(0.3)
            if not self.fleet.live and not self.executor.moves:
                break
        await self.flush()
        found = [*self.disagreements(), *self.misplaced(), *self._left_over()]
        assert not found, found

    def _left_over(self) -> Iterator[str]:
        """Return clients without a complete answer, and what is still held for nobody."""
        for request, tokens in self.clients.items():
            error = self.errors.get(request)
            answered = len(tokens) == self.lengths[request] and request in self.finished
            if not (answered or request in self.left or isinstance(error, RequestKilledWorkers)):
                yield f"{request} has {len(tokens)} of {self.lengths[request]} tokens: {error}"
        if self.fleet.live or self.executor.moves or self.driver.wanted.planner.waiting:
            yield f"left over: {self.fleet.live}, {self.executor.moves}"
        held = pages(self.fleet.ledger)
        if any(one.holdings or one.used_blocks or one.reserved_blocks for one in held):
            yield f"the ledger has {held}"
        yield from (f"{one.name} has {one.copies} {one.rooms}" for one in self.workers() if one.used_blocks)

    # -- the one model of who runs what

    def check(self) -> None:
        """Check that all records of one fact agree."""
        found = self.disagreements()
        assert not found, found

    def disagreements(self) -> list[str]:
        """Return every pair of records that differ.  Between two events there is none."""
        check_cluster(self.cluster)
        check_ledger(self.fleet.ledger)
        found = [*self._of_requests(), *self._of_moves(), *self._of_notes(), *self._of_workers(), *self._of_drains()]
        found += self._of_stories()
        return found + self.auditor.faults

    def _of_requests(self) -> Iterator[str]:
        live, known = self.fleet.live, self.cluster.requests
        if live.keys() != known.keys():
            yield f"the fleet has {sorted(live)}, the scheduler {sorted(known)}"
        for request in live.keys() & known.keys():
            there = known[request].worker
            owner, believed = live[request].worker, there.id if there is not None else None
            if owner != believed:
                yield f"{request} runs on {owner}, the scheduler believes on {believed}"
            if owner is None:
                continue
            held = request in self.fleet.places[owner].held
            process = self.fleet.supervisor.places[owner].process
            if not held and process is not None and process.asked_to_end:
                continue  # stopped under its requests: they go on elsewhere when the process is gone
            if held == self.fleet.is_ready(owner):
                yield f"{request} is {'held for' if held else 'given to'} {owner}, which is {self._state(owner)}"
            if held and self._state(owner) is not WorkerState.WAKING:
                yield f"{request} is held for {owner}, which nobody wakes: {self._state(owner)}"
        probation = self.fleet.requests.probation
        lines = {request: worker for worker, line in probation._lines.items() for request in line}
        if lines != probation._worker_of:
            yield f"in the queue of suspects are {lines}, and by request {probation._worker_of}"
        for request, worker in lines.items():
            if request not in live or live[request].worker != worker:
                yield f"{request} is in the queue of suspects on {worker}, and {live.get(request)}"
        for worker, place in self.fleet.places.items():
            for request in place.held:
                if request not in live or live[request].worker != worker:
                    yield f"{request} is held for {worker}, and {live.get(request)}"

    def _of_stories(self) -> Iterator[str]:
        """Compare what `melld why` would say with the facts."""
        for request, known in self.cluster.requests.items():
            told = self.stories.story(request)
            there, told_there = known.worker.id if known.worker is not None else "", where_told(told)
            if told.ended or there != told_there:
                yield f"{request} is on {there!r}, its story says {told_there!r}: {told}"
        for request in self.clients.keys() - self.cluster.requests.keys():
            told = self.stories.story(request)
            if not told.ended or told.lines[-1].what not in (Happened.FINISHED, Happened.SENT_AWAY):
                yield f"{request} has ended, its story says {told}"

    def _of_moves(self) -> Iterator[str]:
        waiting = self.driver.wanted.planner.waiting
        for request, move in self.executor.moves.items():
            if move.migration.outcome is None:
                known = self.cluster.requests.get(request)
                link = (known.worker and known.worker.id, known.destination and known.destination.id) if known else None
                if link != move.wish.link:
                    yield f"{request} moves over {move.wish.link}, the scheduler believes {link}"
                elif self.fleet.live[request].worker != move.wish.source:
                    yield f"{request} leaves {move.wish.source}, and is not there"
        for name, known in self.cluster.requests.items():
            if known.state is not RequestState.MOVING:
                if name in waiting:
                    yield f"{name} waits to move, and the scheduler knows nothing of that"
                continue
            assert known.worker is not None
            assert known.destination is not None
            link = known.worker.id, known.destination.id
            move = self.executor.moves.get(name)
            wish = waiting.get(name)
            if wish is not None and wish.link != link:
                yield f"{name} waits to move over {wish.link}, the scheduler believes {link}"
            elif wish is None and (move is None or move.wish.link != link):
                yield f"the scheduler believes that {name} moves over {link}, and nobody carries that out"

    def _of_notes(self) -> Iterator[str]:
        """Check that notes beside requests and moves belong to existing ones."""
        executor, wanted = self.executor, self.driver.wanted
        waiting = {name for name, known in self.cluster.requests.items() if known.state is RequestState.WAITING}
        if self.driver.queue._since_s.keys() != waiting:
            yield f"the queue has {sorted(self.driver.queue._since_s)}, the scheduler {sorted(waiting)}"
        if executor._gaps.keys() - self.fleet.live.keys():
            yield f"a first token is waited for of {sorted(executor._gaps)}"
        for kept, known in (
            (wanted.asked.keys(), wanted.planner.waiting.keys()),
            ({wish.request for wish in wanted.planner._begun if not wish.has_ended}, executor.moves.keys()),
        ):
            if kept - known:
                yield f"moves are noted of {sorted(kept)}, and there are {sorted(known)}"

    def _of_workers(self) -> Iterator[str]:
        offered = {name for name, place in self.fleet.places.items() if place.offer is not None}
        if offered != self.cluster.workers.keys():
            yield f"announced are {sorted(offered)}, the scheduler knows {sorted(self.cluster.workers)}"
        for name, place in self.fleet.supervisor.places.items():
            process = place.process
            if place.is_ready and (process is None or process.asked_to_end):
                yield f"{name} is {place.state}, and its process {'ends' if process else 'is gone'}"
            if place.offer is not None and (place.offer.wake_s is not None) == place.is_ready:
                yield f"{name} is {place.state}, and the scheduler believes that it wakes in {place.offer.wake_s} s"
            if (name in self.fleet.workers) and process is None:
                yield f"{name} reports, and has no process"
            known = self.cluster.workers.get(name)
            is_out = place.life.intent is not Intent.IN_SERVICE or name in self.drains.by_worker
            if place.is_ready and known is None:
                yield f"{name} is ready, and the scheduler does not know it"
            is_out = is_out or bool(place.life.obstacle)
            if known is None and place.state in (WorkerState.STOPPED, WorkerState.STOPPING) and not is_out:
                yield f"{name} is {place.state}, and nobody will ever start it"
            if known is not None and place.state in (WorkerState.STARTING, WorkerState.FAILED):
                yield f"{name} is {place.state}, and the scheduler counts on it"
        open_pages = {page.worker for page in pages(self.fleet.ledger)}
        if open_pages != self.fleet.workers.keys():
            yield f"the ledger has pages of {sorted(open_pages)}, reports come from {sorted(self.fleet.workers)}"

    def _of_drains(self) -> Iterator[str]:
        for name, drain in self.drains.by_worker.items():
            there = {one.request for one in self.fleet.live.values() if one.worker == name}
            if drain.is_emptying and there != drain.left:
                yield f"{name} is drained of {sorted(drain.left)}, and has {sorted(there)}"
            if drain.is_over and self._state(name) is not WorkerState.STOPPED:
                yield f"{name} is drained, and {self._state(name)}"

    def _state(self, name: WorkerId) -> WorkerState:
        return self.fleet.supervisor.places[name].state

    def misplaced(self) -> list[str]:
        """Return copies without an owner and owners without one: only when wires are empty and nothing moves."""
        wrong = []
        for worker in self.workers():
            if worker.hung:
                continue
            for request, copy in worker.copies.items():
                live = self.fleet.live.get(RequestId(request))
                moves = request in self.executor.moves
                if not moves and (live is None or not live.is_of(WorkerId(worker.name), copy.lease) or copy.frozen):
                    wrong.append(f"{worker.name} has {copy} of {live}")
            wrong += [f"{worker.name} keeps room for {one}" for one in worker.rooms if one not in self.executor.moves]
        for request, live in self.fleet.live.items():
            if live.worker is None or not self.fleet.is_ready(live.worker):
                continue
            suspects = self.fleet.requests.probation._lines.get(live.worker, ())
            if request in list(suspects)[1:] or self.worker(live.worker).hung:
                continue
            if request not in self.worker(live.worker).copies:
                wrong.append(f"{request} is not on {live.worker}")
        return wrong
