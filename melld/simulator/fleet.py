"""The simulated workers: where requests are, when their prompts are computed, how long a migration takes.

Owns the physical state (as opposed to the scheduler's view of it), of which `memory` has what fits.  Never decides: it
does what commands say.
"""

import numpy as np

from melld.ids import EventId, RequestId, WorkerId
from melld.migrate.snapshot import Via
from melld.scheduler.events import WorkerPace
from melld.simulator.links import SimulatedLinks
from melld.simulator.memory import SimulatedMemory
from melld.simulator.prompts import Prompts, Turns
from melld.simulator.run import Run, RunState, SimulatedMove
from melld.simulator.running import PREFILL_CHUNK_TOKENS, Running
from melld.simulator.settings import SimulatorSettings

SPARE_WORKERS = 16
Ending = tuple[float, Run, int]
"""(time, run, the version that the run must still have then)."""


class SimulatedFleet:
    """Simulated workers and requests.  `awake`: indexes of active workers.  `runs`: requests arrived and not ended."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        foreign_share = settings.link.prefill_share if settings.link is not None else 0.0
        self.running = Running(settings.latency, settings.block_tokens, settings.block_bytes, foreign_share)
        self.runs: dict[RequestId, Run] = {}
        self.awake: set[int] = set()
        self.names: list[WorkerId] = []
        self.indexes: dict[WorkerId, int] = {}
        self._prefill_free_s: list[float] = []
        self._computes_s: list[float] = []  # from when on
        self._counts: list[int] = []
        self.memory = SimulatedMemory(self.running, settings.capacity_bytes)
        self._moving = self.memory.moving
        self._prefill_s = settings.latency.prefill_s
        self.turns = Turns(self.running, settings.latency, settings.targets)
        self._prompts = None if settings.targets is None else Prompts(settings.bytes_per_token)
        self._links = None if settings.link is None else SimulatedLinks(settings.link)

    # ---- workers

    def missing_workers(self) -> int:
        """Return how many workers to add now: all at first, or more when few are left asleep."""
        if self.settings.gpus is not None:
            return self.settings.gpus - len(self.names)
        spare = len(self.names) - len(self.awake)
        return 0 if spare >= SPARE_WORKERS else max(SPARE_WORKERS, len(self.awake))

    def add_workers(self, count: int) -> list[tuple[WorkerId, int]]:
        """Make workers; return their names and machines."""
        added = []
        for index in range(len(self.names), len(self.names) + count):
            name = WorkerId(f"w{index}")
            self.indexes[name] = index
            self.names.append(name)
            added.append((name, self.machine_of(index)))
        for times_s in (self._prefill_free_s, self._computes_s):
            times_s.extend([0.0] * count)
        self._counts += [0] * count
        self.turns.add_workers(count)
        self.running.add_workers(count)
        return added

    def machine_of(self, index: int) -> int:
        """Return the machine of the worker with that index."""
        return index // self.settings.gpus_per_machine

    def wake(self, worker: WorkerId, now_s: float) -> None:
        """Wake the worker; it computes after its wake time."""
        index = self.indexes[worker]
        self.awake.add(index)
        self._prefill_free_s[index] = self._computes_s[index] = now_s + self.settings.wake_s

    def computes(self, worker: WorkerId, now_s: float) -> bool:
        """Return True if the worker is awake and its wake time is over."""
        index = self.indexes[worker]
        return index in self.awake and self._computes_s[index] <= now_s

    def sleep(self, worker: WorkerId) -> None:
        """Put the worker to sleep."""
        self.awake.remove(self.indexes[worker])

    # ---- requests

    def place(self, run: Run, worker: WorkerId, now_s: float) -> float:
        """Queue the request behind the worker's prompts, then let it decode.  Returns when it may end."""
        index = run.worker = self.indexes[worker]
        if self._prefill_free_s[index] < now_s:
            self.turns.free(index)
        self._counts[index] += 1
        run.first_token_s = self._prefill(index, run.prompt, now_s)
        run.row = self.running.add(run, index, run.first_token_s)
        return run.first_token_s + (run.output - 1) / self.running.pace[index]

    def overtake(self, run: Run, now_s: float) -> list[Run]:
        """Let the prompt of a request just placed take its turn; return those that end later for it."""
        return self.turns.overtake(run, max(now_s, self._computes_s[run.worker]), now_s)

    def kv_bytes(self, run: Run) -> int:
        """Return the run's size, as last reported to the scheduler."""
        return run.prompt_bytes if run.row < 0 else self.running.told_bytes[run.row]

    def end_s(self, run: Run) -> float:
        """Return when the run ends at the current pace; infinity while it is preempted."""
        return self.running.end_s(run.row) if run.state is RunState.RUNNING else float("inf")

    def suspend(self, run: Run, now_s: float) -> None:
        """Take the request from its worker; it keeps the tokens that it has emitted."""
        if run.state is RunState.PREEMPTED:
            self.memory.preempted[run.worker].remove(run)
        else:
            self.running.advance_one(run.row, now_s)
            self.running.held[run.row] = 0
        if run.first_token_s > now_s:
            run.first_token_s = float("inf")
        run.become(RunState.QUEUED)
        run.version += 1
        self._counts[run.worker] -= 1

    def resume_suspended(self, run: Run, worker: WorkerId, now_s: float) -> None:
        """Recompute the suspended request's tokens on the worker, and resume it there."""
        run.worker = self.indexes[worker]
        self._counts[run.worker] += 1
        self.running.settle(run.row, run.worker)
        self._readmit(run, now_s)

    def drop(self, run: Run) -> None:
        """Remove an ended request and its move."""
        del self.runs[run.id]
        if run.move is not None:
            del self._moving[run.id]
            run.move = None
        self._counts[run.worker] -= 1
        self.running.remove(run.row)

    # ---- moves

    def transfer(self, run: Run, destination: WorkerId, via: Via, per_epoch: int, now_s: float) -> float:
        """Book the path or the destination's compute for a move that begins now; return when it ends.

        More tokens than an epoch allows are computed beside the destination's own prompts.
        """
        assert self._links is not None
        target, link = self.indexes[destination], self._links.settings
        if via is Via.KV:
            for end in (run.worker, target):
                self.running.debt_s[end] += link.copy_cost_s
            return self._links.transfer(run.worker, target, self.kv_bytes(run), now_s)
        tokens = self.tokens(run, now_s)
        if tokens <= per_epoch:
            return self._prefill(target, tokens, now_s) + link.delay_s
        seconds = self._prefill_s(tokens)
        self.running.foreign_s[target] += seconds
        seconds *= self.running.stretch[target]
        return now_s + max(seconds, tokens / per_epoch * self.settings.epoch_s) + link.delay_s

    def follow(self, run: Run, now_s: float) -> None:
        """Book the copies of all chunks of the prompt but the last, made while the prompt is computed."""
        assert run.move is not None
        earlier = (run.prompt - 1) // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS
        if self._links is not None and earlier:
            begun_s = max(now_s, run.first_token_s - self._prefill_s(run.prompt))
            kv_bytes = earlier * self.settings.bytes_per_token
            self._links.transfer(run.worker, run.move.destination, kv_bytes, begun_s)

    def hand_over(self, run: Run, now_s: float) -> float:
        """Freeze the request, which has its first token, and copy the last chunk; return when that is done."""
        assert run.move is not None
        if self._links is None:
            return now_s
        last = (run.prompt - 1) % PREFILL_CHUNK_TOKENS + 1
        kv_bytes = last * self.settings.bytes_per_token
        end_s = self._links.transfer(run.worker, run.move.destination, kv_bytes, now_s)
        for end in (run.worker, run.move.destination):
            self.running.debt_s[end] += self._links.settings.copy_cost_s
        run.version += 1  # it emits nothing meanwhile
        self.running.since_s[run.row] = end_s
        return end_s

    def tokens(self, run: Run, now_s: float) -> int:
        """Return the prompt and output tokens of a placed request, as of now."""
        if run.state is RunState.RUNNING:
            self.running.advance_one(run.row, now_s)
        return self.running.tokens(run.row)

    def has_prefilled(self, run: Run, now_s: float) -> bool:
        """Return True if the whole prompt is in the worker's memory."""
        return run.state is RunState.RUNNING and self.running.since_s[run.row] <= now_s

    def batches(self) -> dict[WorkerId, int]:
        """Return the number of requests on each worker that is awake."""
        return {self.names[index]: self._counts[index] for index in self.awake}

    def expect(self, run: Run, destination: WorkerId, via: Via, cause: EventId) -> SimulatedMove:
        """Announce a move: the request counts on its destination too from now on.  `via` may still change."""
        run.moves += 1
        run.move = SimulatedMove(self.indexes[destination], via, run.moves, cause)
        self._moving[run.id] = run
        return run.move

    def commit(self, run: Run, now_s: float) -> None:
        """Continue the request at its destination; recompute it there if it was preempted."""
        assert run.move is not None
        was_preempted, via = run.state is RunState.PREEMPTED, run.move.via
        if was_preempted:
            self.memory.preempted[run.worker].remove(run)
        else:
            self.running.advance_one(run.row, now_s)
        del self._moving[run.id]
        self._settle(run, run.move.destination)
        run.move = None
        if was_preempted:
            self._readmit(run, now_s)
        elif self._links is not None:
            since_s = now_s + self._links.settings.gap_s(via)
            self.running.since_s[run.row] = since_s
            run.first_token_s = min(run.first_token_s, since_s)  # a move by tokens may begin before the prompt is done

    def abort(self, run: Run) -> None:
        """Cancel the request's move and free the destination's reservation."""
        del self._moving[run.id]
        run.move = None

    # ---- the epoch

    def resume(self, now_s: float) -> dict[RequestId, int]:
        """Readmit preempted requests where there is room, the oldest first; return what they hold now."""
        resumed: dict[RequestId, int] = {}
        for run, need_bytes in self.memory.readmitted():
            resumed[run.id] = need_bytes
            self._readmit(run, now_s)
        return resumed

    def take_paces(self, now_s: float) -> dict[WorkerId, WorkerPace]:
        """Return the workers' step times since the last call."""
        assert self._prompts is not None
        return {self.names[index]: pace for index, pace in self._prompts.take(self.running, self.awake, now_s).items()}

    def replan(self, now_s: float, epoch_s: float) -> list[Ending]:
        """Set the paces for the epoch that begins; return the runs that end within it, the last first."""
        running = self.running
        rows, ends_s = running.replan(now_s, epoch_s)
        last_first = np.lexsort((running.indexes[rows], ends_s))[::-1]
        runs = list(map(running.runs.__getitem__, rows[last_first].tolist()))
        return list(zip(ends_s[last_first].tolist(), runs, [run.version for run in runs], strict=True))

    # ---- shared helpers

    def _settle(self, run: Run, worker: int) -> None:
        self._counts[run.worker] -= 1
        self._counts[worker] += 1
        run.worker = worker
        run.version += 1
        self.running.settle(run.row, worker)

    def _readmit(self, run: Run, now_s: float) -> None:
        run.become(RunState.RUNNING)
        run.version += 1
        self.running.held[run.row] = 1
        end_s = self._prefill(run.worker, self.running.tokens(run.row), now_s)
        self.running.since_s[run.row] = end_s
        if run.first_token_s > now_s:
            run.first_token_s = end_s

    def _prefill(self, worker: int, tokens: int, now_s: float) -> float:
        """Queue a prefill of `tokens` behind the worker's others; return when it is done."""
        seconds = self._prefill_s(tokens)
        end_s = max(now_s, self._prefill_free_s[worker]) + seconds * self.running.stretch[worker]
        self._prefill_free_s[worker] = end_s
        if self._prompts is not None:
            self._prompts.begun(worker, end_s, tokens, seconds)
        if self._counts[worker] > 1:  # alone, it slows nobody
            self.running.debt_s[worker] += seconds
        return end_s
