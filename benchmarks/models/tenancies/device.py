"""Simulated instances on one device: they share its time by turns, and each holds what its granules allow.

Owns the physical state.  All requests of an instance that decode get a token in each of its steps, so an instance
counts steps (`clock`), and a request ends at a step that is known when it begins.  Prompts take a chunk of each round.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np

from melld.ids import ModelName, RequestId, WorkerId
from melld.simulator.catalogue import BLOCK_TOKENS
from melld.simulator.latency import LatencyProfile

from .setting import ModelArrival

CHUNK_TOKENS = 512


class SimulatedRequest:
    """A request.  `generated`: tokens when it was last begun here; `begun_clock`: its instance's clock then.

    `worker`: where it was placed; `destination`: where it moves.
    """

    def __init__(self, request: RequestId, arrival: ModelArrival) -> None:
        self.id = request
        self.arrival = arrival
        self.worker: WorkerId | None = None
        self.destination: WorkerId | None = None
        self.generated = 0.0
        self.begun_clock = 0.0
        self.first_token_s = 0.0
        self.decodes = False
        self.version = 0
        self.blocks = -(-arrival.lengths.prompt_tokens // BLOCK_TOKENS)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.arrival.lengths.prompt_tokens + int(self.generated)


class SimulatedInstance:
    """A model's worker on a device.  `held`: placed, and not begun for lack of granules or of weights."""

    def __init__(
        self, worker: WorkerId, model: ModelName, profile: LatencyProfile, block_bytes: int, usable_bytes: int
    ) -> None:
        self.id = worker
        self.model = model
        self.profile = profile
        self.block_bytes = block_bytes
        self.blocks_per_granule = usable_bytes // block_bytes
        self.granules: set[int] = set()
        self.is_ready = False
        self.clock = 0.0
        self.used_blocks = 0
        self.held: deque[SimulatedRequest] = deque()
        self.running: dict[RequestId, SimulatedRequest] = {}
        self.decoding = 0
        self._marks: list[tuple[float, int, int, SimulatedRequest]] = []
        self._sequence = itertools.count()

    def needed_granules(self) -> int:
        """Return the granules that its blocks fill."""
        return -(-self.used_blocks // self.blocks_per_granule)

    def has_room(self, blocks: int) -> bool:
        """Return True if so many more blocks fit."""
        return self.used_blocks + blocks <= len(self.granules) * self.blocks_per_granule

    def step_s(self) -> float:
        """Return the seconds of one step of all that decode, 0 if none does."""
        if not self.decoding:
            return 0.0
        tokens = float(self.used_blocks * BLOCK_TOKENS)
        return float(self.profile.step_s(np.array([float(self.decoding)]), np.array([tokens]))[0])

    def admit(self) -> Iterator[SimulatedRequest]:
        """Begin held requests in order while they fit; yield those whose tokens must be computed first."""
        while self.is_ready and self.held and self.has_room(self.held[0].blocks):
            request = self.held.popleft()
            self.running[request.id] = request
            self.used_blocks += request.blocks
            yield request

    def attach(self, request: SimulatedRequest) -> None:
        """Continue a request that comes with its KV memory."""
        self.running[request.id] = request
        self.used_blocks += request.blocks
        self.decode(request)

    def decode(self, request: SimulatedRequest) -> None:
        """Let the request get tokens from now on."""
        request.decodes = True
        request.begun_clock = self.clock - request.generated
        self.decoding += 1
        self._mark(request)

    def remove(self, request: SimulatedRequest) -> None:
        """Take the request out, wherever it is."""
        request.version += 1
        if self.running.pop(request.id, None) is None:
            self.held.remove(request)
            return
        self.used_blocks -= request.blocks
        if request.decodes:
            request.generated = min(self.clock - request.begun_clock, float(request.arrival.lengths.output_tokens))
            request.decodes = False
            self.decoding -= 1

    def advance(self, steps: float) -> tuple[list[SimulatedRequest], dict[RequestId, int]]:
        """Advance by so many steps; remove and return requests that have ended; return the sizes of those that grew."""
        self.clock += steps
        ended, grown = [], {}
        while self._marks and self._marks[0][0] <= self.clock:
            _, _, version, request = heapq.heappop(self._marks)
            if version != request.version:
                continue
            at = self.clock - request.begun_clock
            lengths = request.arrival.lengths
            if at >= lengths.output_tokens:
                self.remove(request)
                ended.append(request)
                continue
            blocks = -(-(lengths.prompt_tokens + int(at) + 1) // BLOCK_TOKENS)
            self.used_blocks += blocks - request.blocks
            request.blocks = blocks
            grown[request.id] = blocks * self.block_bytes
            self._mark(request)
        return ended, grown

    def overflow(self) -> list[SimulatedRequest]:
        """Preempt the youngest requests until the rest fits; they are computed again later."""
        preempted = []
        while not self.has_room(0) and self.running:
            request = next(reversed(self.running.values()))
            self.remove(request)
            self.held.appendleft(request)
            preempted.append(request)
        return preempted

    def _mark(self, request: SimulatedRequest) -> None:
        room = request.blocks * BLOCK_TOKENS - request.arrival.lengths.prompt_tokens
        at = request.begun_clock + min(room, request.arrival.lengths.output_tokens)
        heapq.heappush(self._marks, (max(at, self.clock), next(self._sequence), request.version, request))


class SimulatedDevice:
    """A device's time: prompts in the order of their beginning, beside rounds of steps of all instances."""

    def __init__(self) -> None:
        self.instances: list[SimulatedInstance] = []
        self._prompts: deque[tuple[SimulatedInstance, SimulatedRequest, int, list[float]]] = deque()

    def begin(self, instance: SimulatedInstance, request: SimulatedRequest) -> None:
        """Queue the computing of the request's tokens."""
        self._prompts.append((instance, request, request.version, [instance.profile.prefill_s(request.tokens)]))

    def pass_time(self, seconds: float) -> tuple[float, list[tuple[SimulatedInstance, SimulatedRequest]]]:
        """Spend the seconds; return the steps of each that decodes, and the requests whose prompts were computed."""
        round_s = sum(one.step_s() for one in self.instances)
        left_s, begun = seconds, []
        if self._prompts:
            chunk_s = self._prompts[0][0].profile.prefill_s(CHUNK_TOKENS)
            left_s = seconds * chunk_s / (chunk_s + round_s)
        spent_s = 0.0
        while self._prompts and spent_s < left_s:
            instance, request, version, due = self._prompts[0]
            if version == request.version and request.id in instance.running:
                taken_s = min(due[0], left_s - spent_s)
                due[0] -= taken_s
                spent_s += taken_s
                if due[0] > 1e-12:
                    break
                begun.append((instance, request))
            self._prompts.popleft()
        return (seconds - spent_s) / round_s if round_s else 0.0, begun
