"""The devices of an agent's seats: a stopped worker's go back to Ray, and are asked for again before it starts.

Owns which device each seat has now, and how long one is kept: a worker that is started again soon, as after a death,
keeps its devices.  Workers whose specification names no seats keep theirs always.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from melld.cluster.envelopes import Envelope, ReturnSeat, SeatAnswer, TakeSeat
from melld.cluster.facts import devices_by_seat
from melld.engine.wire.spec import WorkerSpec

RETURN_S = 5.0
"""How long after its end a worker's devices are kept for it."""


class Seats:
    """All seats of an agent.  `gpus`: what Ray calls the GPU of each; `ask` tells the actor, which speaks with Ray."""

    def __init__(self, kind: str, gpus: Sequence[str], ask: Callable[[Envelope], None]) -> None:
        self.devices = devices_by_seat(kind, gpus)
        self._made_for = {seat: device.uuid for seat, device in self.devices.items()}
        """The devices that specifications name, by seat."""
        self._kind = kind
        self._ask = ask
        self._users: Counter[int] = Counter()
        self._awaited: dict[int, asyncio.Future[str]] = {}
        self._kept: dict[int, asyncio.TimerHandle] = {}
        """Until when each seat that its worker has left keeps its device."""

    def use(self, seats: Sequence[int]) -> bool:
        """Note that a worker needs these seats; return True if all have a device."""
        self._users.update(seats)
        self._keep_no_longer(seats)
        return self.devices.keys() >= set(seats)

    async def take(self, seats: Sequence[int]) -> str:
        """Wait until all of these have a device, possibly another one; return why one got none, else ""."""
        for seat in seats:
            if seat in self.devices:
                continue
            if seat not in self._awaited:
                self._awaited[seat] = asyncio.get_running_loop().create_future()
                self._ask(TakeSeat(seat))
            if why := await self._awaited[seat]:
                return why
        return ""

    def answered(self, answer: SeatAnswer) -> None:
        """Take Ray's answer."""
        device = None if answer.failure else devices_by_seat(self._kind, [answer.gpu]).get(0)
        if device is not None:
            self.devices[answer.seat] = device
        why = "" if device is not None else answer.failure or f"NVML lists no GPU {answer.gpu}"
        self._awaited.pop(answer.seat).set_result(why)
        self._return([answer.seat])

    def leave(self, seats: Sequence[int]) -> None:
        """Note that a worker that needed these seats has ended."""
        self._users.subtract(seats)
        self._keep_no_longer(seats)
        for seat in seats:
            self._kept[seat] = asyncio.get_running_loop().call_later(RETURN_S, self._return, (seat,))

    def _keep_no_longer(self, seats: Sequence[int]) -> None:
        for timer in (self._kept.pop(seat) for seat in seats if seat in self._kept):
            timer.cancel()

    def _return(self, seats: Sequence[int]) -> None:
        for seat in seats:
            if self._users[seat] <= 0 and self.devices.pop(seat, None) is not None:
                self._ask(ReturnSeat(seat))

    def fitted(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the specification with the devices that its seats have now."""
        now = {self._made_for[seat]: self.devices[seat].uuid for seat in spec.seats}
        visible = dict.fromkeys(now.get(uuid, uuid) for uuid in spec.visible_devices)
        return msgspec.structs.replace(spec, visible_devices=tuple(visible))
