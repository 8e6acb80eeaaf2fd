"""A gate, and agents as plain processes, without Ray, over the TLS connection of a real cluster."""

import asyncio
import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import msgspec

from melld.cluster.envelopes import Hello, Leave, ModelFiles, Readings, Seated, Seen, Summons, ToActor
from melld.cluster.facts import facts_of
from melld.cluster.gate import Gate
from melld.cluster.link import Link
from melld.cluster.machine import Machine
from melld.config import Config, CpuDevices, DevicesConfig, ModelConfig
from melld.daemon.devices import make_slots
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.host.intake import Intake
from melld.engine.wire.frames import FrameDecoder, encode_frame
from tests.forked import ForkedPython
from tests.patience import PATIENCE_S

CODE = "import os, sys; from melld.cluster.agent import main; main(int(sys.argv[1]), os.getppid())"
"""How long a test waits for what must come."""


class PlainAgent:
    """An agent's process.  `word`: why it left, as its actor would hear it."""

    def __init__(self, summons: Summons) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.process = ForkedPython(
                [sys.executable, "-c", CODE, str(theirs.fileno()), "agent"],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        for message in (summons, Seated(("",) * summons.devices)):
            self._ours.sendall(b"".join(encode_frame(message)))
        self._ours.setblocking(False)

    async def word(self) -> str:
        """Wait for its end; return why it left, or "" if it could not say."""
        decoder, loop = FrameDecoder(ToActor), asyncio.get_running_loop()
        reason = ""
        with contextlib.suppress(ConnectionResetError):
            while data := await asyncio.wait_for(loop.sock_recv(self._ours, 1 << 16), PATIENCE_S):
                for message, _ in decoder.feed(data):
                    assert isinstance(message, Leave)
                    reason = message.reason
        return reason

    def close(self) -> None:
        self._ours.close()
        self.process.kill()
        self.process.wait()


class News:
    """What was reported, in order: about whom, and the reason."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self._more = asyncio.Event()

    def tell(self, what: str, why: str = "") -> None:
        self.told.append((what, why))
        self._more.set()

    async def until(self, what: str, since: int = 0) -> str:
        """Wait for this report, ignoring the first `since`; return the reason."""

        async def look() -> str:
            while True:
                for told, why in self.told[since:]:
                    if told == what:
                        return why
                self._more.clear()
                await self._more.wait()

        return await asyncio.wait_for(look(), PATIENCE_S)


class Site(News):
    """The daemon's side: a gate, and what it hears about machines."""

    def __init__(self, models: tuple[str, ...] = (), silence_s: float = 30.0) -> None:
        super().__init__()
        self.models = tuple(map(ModelFiles, models))
        self.silence_s = silence_s
        self.gate = Gate(
            facts_of(self.models), silence_s, self._entered, lambda name, why: self.tell(f"refused {name}", why)
        )
        self.machines: dict[str, Machine] = {}
        self.agents: list[PlainAgent] = []

    def summons(self, name: str, **changes: Any) -> Summons:
        """Return what an agent of that name is started with."""
        summons = Summons(
            host="127.0.0.1",
            port=self.gate.port,
            certificate=self.gate.certificate,
            token=self.gate.expect(name),
            machine=name,
            device_kind="cpu",
            devices=1,
            models=self.models,
            environment={},
            silence_s=self.silence_s,
        )
        return msgspec.structs.replace(summons, **changes)

    def start(self, summons: Summons) -> PlainAgent:
        agent = PlainAgent(summons)
        self.agents.append(agent)
        return agent

    async def join(self, name: str = "m1", **changes: Any) -> tuple[Machine, PlainAgent]:
        """Start an agent, and wait for its machine."""
        agent = self.start(self.summons(name, **changes))
        await self.until(f"joined {name}")
        return self.machines[name], agent

    def _entered(self, hello: Hello, link: Link) -> None:
        self.machines[hello.machine] = Machine(hello, link, lambda one, why: self.tell(f"lost {one.name}", why))
        received = link.received

        def heard(message: Any, payload: list[bytes]) -> None:
            received(message, payload)
            if isinstance(message, Readings) and message.readings:
                self.tell(f"{hello.machine} is read")
            elif isinstance(message, Seen):
                self.tell(f"{hello.machine} has looked")

        link.received = heard
        self.tell(f"joined {hello.machine}")

    def worker(self, machine: Machine, name: str = "w0") -> WorkerProcess:
        """Start a worker of the site's model, reported by name: `w0 WorkerReady`, `w0 ended`."""
        config = Config(
            model=ModelConfig(path=self.models[0].path), devices=DevicesConfig(cpu=CpuDevices(count=1, kv_bytes="8MiB"))
        )
        spec = msgspec.structs.replace(make_slots(config, [], os.environ)[0].spec, worker=name)

        def said(message: Any, _payload: list[bytes]) -> None:
            self.tell(f"{name} {type(message).__name__}")

        def ended(end: WorkerEnded) -> None:
            self.tell(f"{name} ended", f"{end.reason} ({'from outside' if end.from_outside else 'its own'})")

        return WorkerProcess(spec, machine, said, ended, Intake())

    async def ready_worker(self, machine: Machine, name: str = "w0") -> WorkerProcess:
        process = self.worker(machine, name)
        await self.until(f"{name} WorkerReady")
        return process


@contextlib.asynccontextmanager
async def site(model: Path | None = None, silence_s: float = 30.0) -> AsyncIterator[Site]:
    """An open gate; every agent ends with the test."""
    made = Site(() if model is None else (str(model),), silence_s)
    await made.gate.open("127.0.0.1", 0)
    try:
        yield made
    finally:
        made.gate.close()
        for agent in made.agents:
            agent.close()


class Proxy:
    """Forwards to a gate until cut: from then on it forwards and closes nothing, like a pulled cable."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host, self._port = host, port
        self._cables: list[tuple[asyncio.Future[None], ...]] = []
        self._writers: list[asyncio.StreamWriter] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int, host: str = "127.0.0.1") -> AsyncIterator[tuple[Self, int]]:
        """Open a proxy; return it and its address."""
        proxy = cls(port, host)
        async with await asyncio.start_server(proxy._connected, host, 0) as server:
            try:
                yield proxy, int(server.sockets[0].getsockname()[1])
            finally:
                proxy.cut()
                for writer in proxy._writers:
                    writer.close()
                await asyncio.gather(*(writer.wait_closed() for writer in proxy._writers), return_exceptions=True)

    def cut(self, most: int | None = None) -> int:
        """Cut this many cables, or all, oldest first; return how many.  New connections get a whole one."""
        whole = [cable for cable in self._cables if not any(way.done() for way in cable)][:most]
        for way in itertools.chain(*whole):
            way.cancel()
        return len(whole)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back]
        ways = ((reader, back), (there, writer))
        self._cables.append(tuple(asyncio.ensure_future(self._forward(*way)) for way in ways))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while (data := await reader.read(1 << 16)) and not writer.is_closing():
                writer.write(data)
        writer.close()


async def until_gone(*pids: int) -> None:
    """Wait until none of these processes, which are not ours, runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            found = await asyncio.to_thread(select.select, [end], [], [], PATIENCE_S)
            os.close(end)
            assert found[0], f"process {pid} is still there"
