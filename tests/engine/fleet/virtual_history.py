"""Histories of the virtual daemon: a script of small numbers makes events happen, and each must end well.

For hours: `MELLD_HISTORIES=1000000 pytest tests/engine/fleet/test_who_runs_what.py`.
"""

import asyncio
import signal
from collections.abc import Sequence

import msgspec

from melld.control.status import WorkerState
from melld.ids import WorkerId
from melld.migrate import messages as say
from melld.migrate.snapshot import Via
from melld.migrate.table import MoveState
from melld.scheduler.events import MoveAsked
from tests.engine.fleet.virtual_borrower import ASKED, Borrower
from tests.engine.fleet.virtual_daemon import VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually
from tests.engine.fleet.virtual_worker import BLOCK_BYTES, BLOCKS, FrameDecoder, VirtualWorker, wire

CHOICES = 65536
STATES = tuple(MoveState)
POLICIES = ("mell-plus", "mell", "most-free", "best-fit")


class History:
    """One daemon, and its events."""

    def __init__(self, daemon: VirtualDaemon) -> None:
        self.daemon = daemon
        self.told: list[str] = []
        self._borrowers: list[Borrower] = []
        self._acts = (
            *[self._obey] * 5,
            *[self._deliver] * 5,
            *[self._advance] * 16,
            *[self._step] * 6,
            *[self._admit] * 5,
            *[self._migrate] * 6,
            *[self._move] * 8,
            *[self._pass] * 4,
            self._wait,
            self._refuse,
            self._leave,
            *[self._kill] * 2,
            *[self._kill_in_a_move] * 3,
            *[self._leave_in_a_move] * 1,
            *[self._resize] * 1,
            self._crash,
            self._hang,
            *[self._load] * 2,
            *[self._revive] * 3,
            *[self._want_again] * 2,
            self._stop,
            self._fail_to_load,
            self._lose_machine,
            *[self._return_machine] * 2,
            self._repeat,
            self._lose,
            *[self._rest] * 2,
            self._drain,
            self._resume,
            self._lend,
            self._give_back,
            *[self._flush] * 2,
        )

    async def play(self, choice: int) -> None:
        """Play one event; after an odd one nothing runs before the next."""
        act = self._acts[choice // 2 % len(self._acts)]
        argument = choice // 2 // len(self._acts)
        name = self.daemon.names[argument % len(self.daemon.names)]
        self.told.append(f"{act.__name__[1:]} {argument} {name}")
        found = act(name, argument // len(self.daemon.names))
        if found is not None:
            await found
        if choice % 2 == 0:
            await self.daemon.settle()
        self.daemon.check()

    # -- what happens, by a worker and a number

    def _worker(self, name: WorkerId) -> VirtualWorker:
        return self.daemon.worker(name)

    def _obey(self, name: WorkerId, _: int) -> None:
        self._worker(name).obey()

    def _refuse(self, name: WorkerId, _: int) -> None:
        self._worker(name).obey(willing=False)

    def _deliver(self, name: WorkerId, _: int) -> None:
        self._worker(name).deliver()

    async def _advance(self, _: WorkerId, number: int) -> None:
        """Go on without faults for this many messages."""
        for _ in range(1 + number % 10):
            if not self.daemon.advance():
                return
            await self.daemon.settle()
            self.daemon.check()

    def _step(self, name: WorkerId, _: int) -> None:
        worker = self._worker(name)
        while worker.outbox and worker.ended is None and len(worker.outbox) > 8:
            worker.deliver()
        worker.step()

    def _admit(self, _: WorkerId, number: int) -> None:
        prefix_blocks, priority = number % 3 if number % 2 else 0, (0, 1, -1, 1)[number // 4 % 4]
        self.daemon.admit(1 + number % 3, 2 + number % 12, prefix_blocks, priority)

    def _migrate(self, name: WorkerId, number: int) -> None:
        if requests := self.daemon.open:
            via = (None, Via.KV, Via.TOKENS)[number % 3]
            request = requests[number % len(requests)]
            self.daemon.spawn(self.daemon.driver.migrate(request, name, via, after_first_token=number % 4 == 0))

    async def _move(self, _: WorkerId, number: int) -> None:
        """Start a feasible move, and go on until it reaches one of its states."""
        fleet = self.daemon.fleet
        ready = [name for name in self.daemon.names if fleet.is_ready(name)]
        owned = [(request, live.worker) for request, live in fleet.live.items() if live.worker in ready]
        moves = [(request, other) for request, owner in owned for other in ready if other != owner]
        if not moves:
            return
        state = STATES[number % len(STATES)]
        request, destination = moves[number // len(STATES) % len(moves)]
        self.daemon.spawn(self.daemon.driver.migrate(request, destination, None, after_first_token=number % 2 == 0))
        for _ in range(60):
            await self.daemon.settle()
            self.daemon.check()
            move = self.daemon.executor.moves.get(request)
            if (move is not None and move.migration.state is state) or not self.daemon.advance():
                return

    async def _pass(self, _: WorkerId, number: int) -> None:
        await asyncio.sleep(0.05 * (1 + number % 8))

    async def _wait(self, _: WorkerId, number: int) -> None:
        await asyncio.sleep((1.0, 3.0, 6.0, 11.0)[number % 4])

    def _leave(self, _: WorkerId, number: int) -> None:
        if requests := self.daemon.open:
            self.daemon.leave(requests[number % len(requests)])

    def _kill(self, name: WorkerId, number: int) -> None:
        self._worker(name).die(-signal.SIGKILL, heard=number % 4)

    def _kill_in_a_move(self, _: WorkerId, number: int) -> None:
        """Kill its source or destination, in any state."""
        if moves := list(self.daemon.executor.moves.values()):
            move = moves[number // 2 % len(moves)]
            self._worker(move.wish.link[number % 2]).die(heard=number // 4 % 3)

    def _leave_in_a_move(self, _: WorkerId, number: int) -> None:
        if moves := [request for request in self.daemon.executor.moves if request in self.daemon.fleet.live]:
            self.daemon.leave(moves[number % len(moves)])

    def _resize(self, name: WorkerId, number: int) -> None:
        """Let others take memory of its device, or give it back."""
        self.daemon.fleet.change(name, capacity_bytes=(BLOCKS - number % 3) * BLOCK_BYTES)

    def _crash(self, name: WorkerId, number: int) -> None:
        self._worker(name).die(-signal.SIGABRT, heard=number % 4)

    def _hang(self, name: WorkerId, _: int) -> None:
        self._worker(name).hung = self._worker(name).ready

    def _load(self, name: WorkerId, _: int) -> None:
        self._worker(name).become_ready()

    async def _revive(self, name: WorkerId, _: int) -> None:
        """Bring it back before anybody has said another word."""
        await asyncio.sleep(1.1)
        await self.daemon.settle()
        self._worker(name).become_ready()
        while self._worker(name).outbox and self._worker(name).ended is None:
            self._worker(name).deliver()

    def _want_again(self, _: WorkerId, number: int) -> None:
        """Request the same move again, whatever has become of the first."""
        if moves := list(self.daemon.executor.moves.values()):
            wish = moves[number % len(moves)].migration.wish
            again = MoveAsked(self.daemon.now_s, request=wish.request, destination=wish.destination)
            self.daemon.driver.handle(again)

    def _stop(self, name: WorkerId, _: int) -> None:
        """Stop it for no good reason: it may have requests."""
        if self.daemon.fleet.is_ready(name):
            self.daemon.fleet.stop_worker(name)

    def _fail_to_load(self, name: WorkerId, _: int) -> None:
        if not self._worker(name).ready:
            self._worker(name).die(1)

    def _lose_machine(self, name: WorkerId, number: int) -> None:
        """Lose one of several machines: a daemon whose only machine is lost is lost itself."""
        for worker in self.daemon.of_machine(machine := self.daemon.fleet.places[name].slot.machine):
            for _ in range(number % 3):
                self._worker(worker).deliver()
        if len(self.daemon.hosts) > 1:
            self.daemon.lose_machine(machine)

    def _return_machine(self, name: WorkerId, _: int) -> None:
        self.daemon.return_machine(self.daemon.fleet.places[name].slot.machine)

    def _repeat(self, name: WorkerId, number: int) -> None:
        outbox = self._worker(name).outbox
        if self._said(name) <= {say.MoveMessage, wire.StepDone} and outbox:
            outbox.append(outbox[number % len(outbox)])

    def _lose(self, name: WorkerId, number: int) -> None:
        """Lose a report, of which the next one tells, or an answer about a migration."""
        worker = self._worker(name)
        if self._said(name) in ({wire.StepDone}, {say.MoveMessage}):
            del worker.outbox[number % len(worker.outbox)]
            worker.report()

    def _said(self, name: WorkerId) -> set[type]:
        """Return unread messages: a wire neither loses nor repeats a greeting."""
        decoder = FrameDecoder(wire.ToDaemon)
        kinds = [type(message) for frame in self._worker(name).outbox for message, _ in decoder.feed(frame)]
        return {say.MoveMessage if issubclass(kind, say.MoveMessage) else kind for kind in kinds}

    def _rest(self, name: WorkerId, _: int) -> None:
        """Do what the idle rule would do, at any moment at which it might."""
        place = self.daemon.fleet.supervisor.places[name]
        known = self.daemon.cluster.workers.get(name)
        in_use = name in self.daemon.cluster.active or name in self.daemon.cluster.draining
        if known is not None and place.is_ready and not in_use:
            if place.state is WorkerState.ASLEEP:
                self.daemon.fleet.stop_worker(name)
            else:
                self.daemon.fleet.supervisor.sleep(name)

    def _drain(self, name: WorkerId, number: int) -> None:
        deadline_s = (None, 0.2, 3.0)[number % 3]
        self.daemon.spawn(self.daemon.drains.drain(name, wait=False, deadline_s=deadline_s))

    def _resume(self, name: WorkerId, _: int) -> None:
        self.daemon.spawn(self.daemon.drains.resume(name))

    def _lend(self, name: WorkerId, number: int) -> None:
        """Lend to a program that names this device, or takes the cheapest."""
        devices = self.daemon.fleet.places[name].slot.devices if number % 2 else ()
        held_s, wait_s = (None, None, 5.0)[number // 2 % 3], (0.0, 3.0)[number // 6 % 2]
        asked = {"devices": devices, "even_last": number % 5 == 0, "wait_s": wait_s}
        if devices:
            asked["held_s"] = held_s
        self._borrowers.append(Borrower(self.daemon, msgspec.structs.replace(ASKED, **asked)))

    def _give_back(self, _: WorkerId, number: int) -> None:
        if self._borrowers:
            self._borrowers.pop(number % len(self._borrowers)).leave()

    async def _flush(self, _: WorkerId, __: int) -> None:
        await self.daemon.flush()
        found = self.daemon.misplaced()
        assert not found, found

    async def end(self) -> None:
        """Put every worker in service and in good health."""
        while self._borrowers:
            self._give_back(self.daemon.names[0], 0)
        await self.daemon.settle()
        for name in self.daemon.names:
            self._worker(name).hung = False
            self.daemon.fleet.change(name, capacity_bytes=BLOCKS * BLOCK_BYTES)
            self.daemon.spawn(self.daemon.drains.resume(name))
        await self.daemon.finish()


def play(choices: Sequence[int]) -> None:
    """Play one history, from the first start to the last answer; the first number picks the policy."""

    async def history(loop: VirtualLoop) -> None:
        policy = POLICIES[choices[0] % len(POLICIES)] if choices else POLICIES[0]
        workers = 1 + (choices[0] // len(POLICIES)) % 4 if choices else 2
        machines = 1 + (choices[0] // len(POLICIES) // 4) % 2 if choices else 1
        daemon = await VirtualDaemon(loop, workers, policy, machines=machines).start()
        history = History(daemon)
        try:
            for choice in choices[1:]:
                await history.play(choice)
            await history.end()
            await daemon.close()
        except Exception as error:
            error.add_note("\n".join(["after:", *history.told]))
            raise

    run_virtually(history)
