"""The Ray actors on a machine: one that keeps melld's agent, and a seat for each of its devices.

Runs in Ray's processes.  The agent itself is a plain process without Ray, and its workers do not see Ray's environment.

A seat only holds a device, so that Ray gives it to nobody else.  Seats belong to the agent's actor and end with it.
"""

import os
import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from melld.cluster.envelopes import Seated, Summons, ToActor
from melld.engine.wire.frames import FrameDecoder, encode_frame

BEGIN = (
    "import sys; sys.path[:] = {path!r}; from melld.cluster.agent import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
SEATS_S = 30.0
"""How long Ray may take for the seats; devices that others use are not waited for."""
FIRST_SEAT_S = 60.0
"""How much longer it may take for the first: without one the machine is of no use, and it may just be slow."""
RETURNED_S = 1.0
"""How long Ray may take to fetch a result, before the process that made it ends."""


class Seat:
    """Holds a device."""

    def gpu(self) -> str:
        """Return Ray's name of the GPU, its index or UUID; "" on a CPU."""
        return str(next(iter(ray.get_gpu_ids()), ""))


class AgentActor:
    """Keeps an agent."""

    def run(self, summons_bytes: bytes) -> str:
        """Run an agent to its end and return the reason.  On the main thread: they end together.

        A detached actor that only returns would stay, and hold its seats: so its process ends.
        """
        try:
            return self._run(msgspec.msgpack.decode(summons_bytes, type=Summons))
        finally:
            threading.Timer(RETURNED_S, os._exit, [0]).start()

    def _run(self, summons: Summons) -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            code = BEGIN.format(path=sys.path)
            process = subprocess.Popen(  # noqa: S603  our own interpreter
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=_own_environment(),
                stdin=subprocess.DEVNULL,
            )
        self._agent, self._kind = ours, summons.device_kind
        try:
            self._tell(summons)
            self._tell(Seated(self._first_seats(summons.devices)))
            return self._serve()
        except (BrokenPipeError, ConnectionResetError):
            return f"the agent exited with code {process.wait()}"
        finally:
            ours.close()
            process.wait()

    def _serve(self) -> str:
        decoder = FrameDecoder(ToActor)
        while data := self._agent.recv(1 << 16):
            for message, _ in decoder.feed(data):
                return str(message.reason)
        return "the agent was killed"

    def _first_seats(self, devices: int) -> tuple[str, ...]:
        """Ask Ray for all seats at once, and keep those that get a device."""
        seats = [self._new_seat() for _ in range(devices)]
        asked = {seat.gpu.remote(): seat for seat in seats}
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=SEATS_S)
        if not ready:
            ready, late = ray.wait(late, timeout=FIRST_SEAT_S)
        for one in late:
            ray.kill(asked[one])
        self._seats = [asked[one] for one in ready]  # else they would end
        return tuple(ray.get(ready))

    def _new_seat(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        held = {"num_gpus": 1} if self._kind == "cuda" else {"resources": {"melld_device": 1}}
        return ray.remote(Seat).options(num_cpus=0, scheduling_strategy=here, **held).remote()

    def _tell(self, message: msgspec.Struct) -> None:
        self._agent.sendall(b"".join(encode_frame(message)))


def _own_environment() -> dict[str, str]:
    """Return the environment without Ray's additions: its token, and its limit of one thread."""
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key != "OMP_NUM_THREADS"}
