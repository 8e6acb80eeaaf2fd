"""The agent: melld's process on another machine, which starts workers there for the daemon and relays their wires.

Owns the template process and the workers of its machine.  Reads nothing that a worker says, decides nothing,
and keeps nothing: when its connection to the daemon or its parent is gone, its workers end and so does it.

    actor ──Summons, Seated──► agent ──TLS: Hello──► daemon
"""

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvloop
from setproctitle import setproctitle

from melld.cluster import envelopes as say
from melld.cluster.certificate import pinned_context
from melld.cluster.facts import devices_of, facts_of
from melld.cluster.link import AGENT_PATIENCE, Link
from melld.engine.host.local import LocalChild, LocalHost
from melld.engine.host.standstill import Reach, Standstill
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.spec import WorkerSpec
from melld.engine.worker.start import die_with_parent
from melld.errors import MelldError
from melld.kvstore.nvml import Nvml
from melld.kvstore.worker_readings import WorkerDevices, WorkerReadings

log = logging.getLogger("melld.agent")
DIAL_S = 30.0
READ_S = 2.0
"""Period of reading the workers' devices."""


def main(descriptor: int, parent_pid: int) -> None:
    """Run the agent.  `descriptor`: its end of a socket pair with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    setproctitle("melld: agent")
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(socket.socket(fileno=descriptor)))


async def _run(parent: socket.socket) -> None:
    await Agent(parent).run()


class NotJoined(MelldError):
    """The agent cannot join its daemon."""


class Relay:
    """Relays one worker's messages to the daemon.  `number`: the daemon's number for it on this connection."""

    def __init__(self, number: int, spec: WorkerSpec, daemon: Link, ended: Callable[[int], None]) -> None:
        self.devices = WorkerDevices(spec.worker, 0, spec.own_devices)
        """Without a process until it is forked."""
        self.child: LocalChild | None = None
        self._spec = spec
        self._number = number
        self._daemon = daemon
        self._ended = ended

    def start(self, template: TemplateProcess) -> None:
        """Start the worker."""
        try:
            self.child = LocalHost(template).spawn(self._spec, self)
        except OSError as error:
            self.exited(f"cannot start a process: {error}", from_outside=True)

    def forked(self, pid: int) -> None:
        """See `Ear.forked`."""
        self.devices = msgspec.structs.replace(self.devices, pid=pid)
        self._daemon.send(say.Forked(self._number, pid))

    def received(self, data: bytes) -> None:
        """See `Ear.received`."""
        for piece in say.pieces([data]):
            self._daemon.send(say.Bytes(self._number), piece)

    def printed(self, line: str) -> None:
        """See `Ear.printed`."""
        self._daemon.send(say.Printed(self._number, line))

    def exited(self, reason: str, from_outside: bool) -> None:
        """See `Ear.exited`."""
        self._ended(self._number)
        self._daemon.send(say.Exited(self._number, reason, from_outside))

    def write(self, payload: Sequence[bytes]) -> None:
        """See `Child.write`."""
        if self.child is not None:
            self.child.write(payload)

    def kill(self) -> None:
        """See `Child.kill`."""
        if self.child is not None:
            self.child.kill()

    def look(self, reach: Reach) -> None:
        """Check the worker's progress and report it."""
        self._daemon.send(say.Seen(self._number, self.child.look(reach) if self.child is not None else Standstill()))


class Agent:
    """The agent of this machine.  `parent`: its socket with the process that started it."""

    def __init__(self, parent: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._parent_socket = parent
        self._parent = Link(say.FromActor, None, self._parent_said, self._leave)
        self._daemon: Link | None = None
        self._summoned: asyncio.Future[say.Summons] = loop.create_future()
        self._seated: asyncio.Future[say.Seated] = loop.create_future()
        self._left: asyncio.Future[str] = loop.create_future()
        self._relays: dict[int, Relay] = {}
        self._template: TemplateProcess | None = None

    async def run(self) -> None:
        """Serve the daemon until it or the parent ends."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._parent, sock=self._parent_socket)
        serving = asyncio.ensure_future(self._serve())
        serving.add_done_callback(self._failed)
        reason = await self._left
        serving.cancel()
        if self._template is not None:
            self._template.stop()
        log.info("leaving: %s", reason)
        self._parent.send(say.Leave(reason))
        self._parent.close()

    async def _serve(self) -> None:
        """Join the daemon, and read the workers' devices.

        Raises:
            MelldError: the daemon cannot be joined.
        """
        summons = await self._summoned
        os.environ.update(summons.environment)
        self._template = TemplateProcess(summons.device_kind)
        self._template.start()  # its imports take longer than the rest of this
        facts = await asyncio.to_thread(facts_of, summons.models)
        devices = devices_of(summons.device_kind, (await self._seated).gpus)
        daemon = self._daemon = await self._dial(summons)
        daemon.send(say.Hello(token=summons.token, machine=summons.machine, facts=facts, devices=devices))
        readings = WorkerReadings(Nvml() if summons.device_kind == "cuda" else None)
        while True:
            await asyncio.sleep(READ_S)
            running = [relay.devices for relay in self._relays.values() if relay.devices.pid]
            daemon.send(say.Readings(await readings.read(running)))

    async def _dial(self, summons: say.Summons) -> Link:
        link = Link(say.ToAgent, summons.silence_s, self._received, self._leave, AGENT_PATIENCE)
        where, loop = f"the daemon at {summons.host}:{summons.port}", asyncio.get_running_loop()
        tls = pinned_context(summons.certificate)
        dialling = loop.create_connection(lambda: link, summons.host, summons.port, ssl=tls, ssl_shutdown_timeout=1.0)
        try:
            await asyncio.wait_for(dialling, DIAL_S)
        except ssl.SSLError as error:
            raise NotJoined(
                f"{where} does not have the certificate that this agent was given ({error.reason})"
            ) from error
        except TimeoutError:
            raise NotJoined(f"{where} did not answer within {DIAL_S:g} s") from None
        except OSError as error:
            raise NotJoined(f"{where} cannot be reached: {error}") from error
        return link

    def _failed(self, serving: asyncio.Future[None]) -> None:
        if not serving.cancelled():
            error = serving.exception()
            self._leave(str(error) if isinstance(error, MelldError | OSError) else repr(error))

    def _leave(self, reason: str) -> None:
        if not self._left.done():
            self._left.set_result(reason)

    def _received(self, message: Any, payload: list[bytes]) -> None:
        match message:
            case say.Bytes(number) if number in self._relays:
                self._relays[number].write(payload)
            case say.Spawn():
                self._spawn(message)
            case say.Kill(number) if number in self._relays:
                self._relays[number].kill()
            case say.Look(number, reach) if number in self._relays:
                self._relays[number].look(reach)
            case say.Leave(reason):
                self._leave(reason)

    def _spawn(self, asked: say.Spawn) -> None:
        assert self._daemon is not None
        assert self._template is not None
        relay = self._relays[asked.number] = Relay(asked.number, asked.spec, self._daemon, self._gone)
        relay.start(self._template)

    def _gone(self, number: int) -> None:
        self._relays.pop(number, None)

    def _parent_said(self, message: Any, _payload: list[bytes]) -> None:
        match message:
            case say.Summons() if not self._summoned.done():
                self._summoned.set_result(message)
            case say.Seated() if not self._seated.done():
                self._seated.set_result(message)
