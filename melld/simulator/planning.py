"""Adapter that runs the daemon's planner of moves on simulated workers.

Owns the boundaries that follow from the machines' settings, and the facts of each request for the planner.  Never
carries out a move: the simulation does.

    commands ──consider──► Planner ──way_of──► the log
                              └──────take────► Simulation: the moves that begin now, and those given up
"""

import bisect
from collections.abc import Sequence

from melld.ids import RequestId, WorkerId
from melld.migrate.boundaries import Boundaries, Pair, Prefill, Segment
from melld.migrate.planner import Plan, Planner
from melld.migrate.snapshot import Via
from melld.migrate.wish import Wish
from melld.scheduler.events import ActivateWorker, AnyCommand, AnyEvent, EpochStarted, MoveRequest
from melld.simulator.fleet import SimulatedFleet
from melld.simulator.latency import Latency
from melld.simulator.links import LinkSettings
from melld.simulator.run import RunState
from melld.simulator.settings import SimulatorSettings

NOTHING = Plan()
MOST_TOKENS = 1 << 20
"""Cap for workers that prefill in no time."""


class MovePlanning:
    """Planned moves of a simulation in which moves take time."""

    def __init__(self, settings: SimulatorSettings, link: LinkSettings, fleet: SimulatedFleet) -> None:
        self.planner = Planner(boundaries_of(settings, link))
        self._ways = link.ways
        self._kv_between_machines = link.kv_between_machines
        self._awake_at_once = settings.wake_s == 0.0
        self._woken: set[WorkerId] = set()
        self._plan = NOTHING
        self._fleet = fleet

    def consider(self, event: AnyEvent, commands: Sequence[AnyCommand]) -> None:
        """Plan the moves among the commands: those of an epoch together, others at once."""
        is_epoch = type(event) is EpochStarted
        starts = []
        if self._awake_at_once:  # such a worker is awake when its moves begin
            self._woken = {command.worker for command in commands if type(command) is ActivateWorker}
        for command in commands:
            if type(command) is MoveRequest and not command.after_first_token:
                self.planner.ask(self._wish(command, event.at_s), event.at_s)
                if not is_epoch and (wish := self.planner.at_once(command.request, self._fleet.batches())):
                    starts.append(wish)
        if is_epoch:
            for wish in self.planner.waiting.values():
                self._measure(wish, event.at_s)
            self._plan = self.planner.epoch(self._fleet.batches())
        elif starts:
            self._plan = Plan(tuple(starts))

    def way_of(self, request: RequestId) -> Via:
        """Return the way that the move takes or waits for."""
        decided = {wish.request: wish for wish in (*self._plan.starts, *self._plan.given_up)}
        wish = decided.get(request) or self.planner.waiting[request]
        return wish.planned or self.planner.first_way(wish)

    def take(self) -> Plan:
        """Return what to do now; a second call finds nothing."""
        plan, self._plan = self._plan, NOTHING
        return plan

    def forget(self, request: RequestId) -> None:
        """Drop a request that has ended or whose move has."""
        self.planner.drop(request)
        self.planner.ended(request)

    def _wish(self, command: MoveRequest, now_s: float) -> Wish:
        wish = Wish(
            request=command.request,
            source=command.source,
            destination=command.destination,
            urgency_s=command.urgency_s,
        )
        self._measure(wish, now_s)
        return wish

    def _measure(self, wish: Wish, now_s: float) -> None:
        """Note a request's bytes, tokens and ways.

        No way is open to a worker that is not awake yet.  A request that is preempted or still in prefill has no KV to
        send.  Where no KV goes between machines, tokens do, whatever the settings say.
        """
        run, destination = self._fleet.runs[wish.request], wish.destination
        prefilled = self._fleet.has_prefilled(run, now_s)
        machine_of = self._fleet.machine_of
        is_far = machine_of(run.worker) != machine_of(self._fleet.indexes[destination])
        no_link = is_far and not self._kv_between_machines
        kv = prefilled and Via.KV in self._ways and not no_link
        tokens = Via.TOKENS in self._ways or run.state is not RunState.RUNNING or no_link
        ways: tuple[Via, ...] = (*((Via.KV,) if kv else ()), *((Via.TOKENS,) if tokens else ()))
        if not (destination in self._woken or self._fleet.computes(destination, now_s)):
            ways = ()
        wish.kv_bytes, wish.tokens, wish.ways = self._fleet.kv_bytes(run), self._fleet.tokens(run, now_s), ways


def boundaries_of(settings: SimulatorSettings, link: LinkSettings) -> Boundaries:
    """Return what the machines can do in an epoch: the link's rate, and prefill for a share of the time.

    The share is of the tokens: a prompt that is spread over several epochs pays its fixed cost once, not in each.
    """
    epoch_s = settings.epoch_s
    link_bytes = int(link.bytes_per_s * epoch_s)
    alone = tokens_within(settings.latency, epoch_s)
    beside_others = max(int(link.prefill_share * alone), 1)
    return Boundaries(
        epoch_s=epoch_s,
        other_link_bytes=link_bytes,
        other_port_bytes=link_bytes,
        segments=switches_of(settings.gpus or 0, link, epoch_s),
        other_prefill=Prefill(alone, beside_others),
    )


def switches_of(gpus: int, link: LinkSettings, epoch_s: float) -> tuple[Segment, ...]:
    """Return each switch's uplink in both directions, as segments of the boundaries."""
    crossing: dict[tuple[int, str], set[Pair]] = {}
    for source in range(gpus):
        for destination in range(gpus) if link.gpus_per_switch else ():
            for number, way in link.path(source, destination):
                if way in ("up", "down"):
                    pair = WorkerId(f"w{source}"), WorkerId(f"w{destination}")
                    crossing.setdefault((number, way), set()).add(pair)
    nbytes = int(link.switch_bytes_per_s * epoch_s)
    return tuple(
        Segment(name=f"switch {number}, {way}", nbytes=nbytes, pairs=frozenset(pairs))
        for (number, way), pairs in crossing.items()
    )


def tokens_within(latency: Latency, seconds: float) -> int:
    """Return the longest prompt that can be prefilled in `seconds`, at least one token."""
    return max(1, bisect.bisect_right(range(1, MOST_TOKENS), seconds, key=latency.prefill_s))
