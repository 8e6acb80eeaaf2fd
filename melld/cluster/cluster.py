"""Keeps an agent on every node with devices of a Ray cluster, relaunching lost ones.

Owns the launcher, the gate, and which node has a machine.  The daemon listens, and uses each machine's devices:

    cluster = Cluster(config.cluster, "cuda", [config.model], environment, listener)
    await cluster.check()      # its head has answered
    await cluster.start()      # `min_machines` have joined, each told by `listener.machine_joined`
    machine.spawn(spec, ear)   # a `Host`: see `engine.host.ports`
    await cluster.stop()

Everything happens on the event loop, which must be the main thread's.  A lost machine that comes back is a new one.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from melld.cluster.envelopes import AgentEnded, HeadFound, Hello, Joined, Launch, LauncherFailed, Node, Nodes, Summons
from melld.cluster.facts import check_installed, facts_of, files_of
from melld.cluster.gate import Gate
from melld.cluster.launcher_process import run_launcher
from melld.cluster.link import Link
from melld.cluster.machine import Machine
from melld.config import ClusterConfig, ModelConfig
from melld.errors import MelldError

log = logging.getLogger("melld.cluster")
MAX_BACK_OFF_S = 60.0
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  no address to be called at
TRIES = 3
"""Attempts before the start of the daemon fails: on a loaded machine the first agent may be late."""


class ClusterFailed(MelldError):
    """The cluster cannot be used as it is configured."""


class ClusterListener(Protocol):
    """Receives news of the machines."""

    def machine_joined(self, machine: Machine) -> None:
        """Use its devices."""

    def machine_lost(self, machine: Machine, reason: str) -> None:
        """Take all its workers out of service, in one event, by `machine.end_children`."""


class Launching:
    """A node's agent that is or will be requested.  `timer`: until it is late, or is requested."""

    def __init__(self) -> None:
        self.back_off_s = 1.0
        self.node = ""
        """The node, by Ray's id."""
        self.timer: asyncio.TimerHandle | None = None
        self.failure, self.tries = "", 0


class Cluster:
    """The cluster, from `start` to `stop`.  `kind`: of the devices, `cuda` or `cpu`; `environment`: of the workers."""

    def __init__(
        self,
        config: ClusterConfig,
        kind: str,
        models: Sequence[ModelConfig],
        environment: Mapping[str, str],
        listener: ClusterListener,
    ) -> None:
        self.machines: dict[str, Machine] = {}
        self._config = config
        self._kind = kind
        self._models = tuple(map(files_of, models))
        self._environment = dict(environment)
        self._listener = listener
        self._run = secrets.token_hex(4)
        self._nodes: dict[str, Node] = {}
        self._launching: dict[str, Launching] = {}  # by the name of the machine
        self._launcher: Link | None = None
        self._host = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        """For the start: something has happened."""
        self._is_head_found = self._has_started = False
        self._failure = ""
        self._gate = Gate(facts_of(self._models), config.silence_s, self._entered, partial(self._refused, tries=TRIES))

    async def check(self) -> None:
        """Return when the head has answered a launcher, before anything slow.

        Raises:
            ConfigError: Ray is not installed, or NIXL, which is configured.
            MelldError: the cluster cannot be used.
        """
        check_installed(self._config)
        self._own(self._keep_launcher(), "launcher")
        await self._until(lambda: self._is_head_found)

    async def start(self) -> None:
        """Return when `min_machines` have joined; after `check`.

        Raises:
            MelldError: the cluster cannot be used, or too few machines join in time.
        """
        await self._until(lambda: len(self.machines) >= self._config.min_machines)
        self._has_started = True

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while not is_reached():
                    await self._news.wait()
                    self._news.clear()
                    if self._failure:
                        raise ClusterFailed(self._failure)
        except TimeoutError:
            had, wanted = len(self.machines), self._config.min_machines
            waited = f"{had} of {wanted} machines joined within {self._config.start_timeout_s:g} s"
            raise ClusterFailed(f"{waited}: {self._failures() or self._no_nodes()}") from None

    async def stop(self) -> None:
        """End the launcher and every agent, whose workers have ended by now; report no loss."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for launching in self._launching.values():
            if launching.timer is not None:
                launching.timer.cancel()
        self._gate.close()
        self._launcher = None
        for machine in list(self.machines.values()):
            machine.dismiss()

    # -- the launcher -----------------------------------------------------------------------------------------------

    async def _keep_launcher(self) -> None:
        """Keep a launcher running: agents survive without one, but none is started."""
        back_off_s = 1.0
        while True:
            begun_s = asyncio.get_running_loop().time()
            try:
                if ended := await run_launcher(self._config, self._run, self._kind, self._launcher_began, self._told):
                    self._cannot_use(f"the Ray launcher {ended}")
            except OSError as error:
                self._cannot_use(f"cannot start the launcher: {error}")
            self._launcher = None
            if asyncio.get_running_loop().time() - begun_s > MAX_BACK_OFF_S:
                back_off_s = 1.0
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)

    def _launcher_began(self, launcher: Link) -> None:
        self._launcher = launcher

    def _told(self, message: Any) -> None:
        match message:
            case HeadFound():
                self._is_head_found = True
                self._news.set()
            case Joined(address):
                self._failure = ""
                self._own(self._open(address), "gate")
            case Nodes(nodes):
                self._nodes = {node.address: node for node in nodes}
                self._forget(lambda name, node: name not in self._nodes or self._nodes[name].id != node)
                self._summon_missing()
            case AgentEnded(id_, reason):
                for name in [name for name, launching in self._launching.items() if launching.node == id_]:
                    self._refused(name, reason)
            case LauncherFailed(reason):
                self._cannot_use(reason)

    def _cannot_use(self, reason: str) -> None:
        if self._has_started and reason != self._failure:  # else said every minute, as long as Ray's head is away
            log.warning("%s", reason)
        self._fail(reason)

    async def _open(self, address: str) -> None:
        host = listen = self._config.listen or address
        if listen in EVERYWHERE:  # a socket is of one family: that of the address which agents dial
            host, listen = address, EVERYWHERE[":" in address]
        if not self._host:
            try:
                await self._gate.open(listen, self._config.port)
            except OSError as error:
                where = f"{listen}:{self._config.port}"
                self._fail(f"cannot listen for agents on {where}: {error.strerror} ([cluster] listen, port)")
                return
            self._host = host
        self._forget(lambda _name, _node: True)  # an earlier launcher was asked
        self._summon_missing()

    # -- agents -----------------------------------------------------------------------------------------------------

    def _summon_missing(self) -> None:
        for name in self._nodes:
            if name not in self.machines and self._launching.setdefault(name, Launching()).timer is None:
                self._summon(name)

    def _forget(self, is_void: Callable[[str, str], bool]) -> None:
        """Stop waiting for agents that will not connect, according to `is_void(name, node)`."""
        for name, launching in self._launching.items():
            if launching.timer is not None and launching.node and is_void(name, launching.node):
                launching.timer.cancel()
                launching.timer, launching.node = None, ""

    def _summon(self, name: str) -> None:
        """Request an agent on a node, if possible now."""
        launching = self._launching[name]
        launching.timer, launching.node = None, ""
        node = self._nodes.get(name)
        if node is None or self._launcher is None or not self._host:
            return  # what lacks will call again
        config = self._config
        summons = Summons(
            host=self._host,
            port=self._gate.port,
            certificate=self._gate.certificate,
            token=self._gate.expect(name),
            machine=name,
            device_kind=self._kind,
            devices=node.devices if config.devices_per_machine == "all" else config.devices_per_machine,
            models=self._models,
            environment=self._environment,
            silence_s=config.silence_s,
        )
        self._launcher.send(Launch(node.id, summons))
        launching.node = node.id
        late = f"its agent did not connect within {config.start_timeout_s:g} s"
        launching.timer = asyncio.get_running_loop().call_later(config.start_timeout_s, self._refused, name, late)

    def _refused(self, name: str, reason: str, tries: int = 1) -> None:
        """Record failed attempts of a machine to join; retry later."""
        log.warning("machine %s cannot join: %s", name, reason)
        launching = self._launching[name]
        launching.failure, launching.tries = reason, launching.tries + tries
        self._summon_later(name)
        failed = [one for one, launching in self._launching.items() if launching.tries >= TRIES]
        if name in failed and len(self._nodes.keys() - failed) < self._config.min_machines:
            self._fail(self._failures())

    def _summon_later(self, name: str) -> None:
        launching = self._launching.setdefault(name, Launching())
        if launching.timer is not None:
            launching.timer.cancel()
        launching.node = ""
        launching.timer = asyncio.get_running_loop().call_later(launching.back_off_s, self._summon, name)
        launching.back_off_s = min(2 * launching.back_off_s, MAX_BACK_OFF_S)

    def _entered(self, hello: Hello, link: Link) -> None:
        name = hello.machine
        launching = self._launching[name]
        if launching.timer is not None:
            launching.timer.cancel()
        self._launching[name] = Launching()
        machine = self.machines[name] = Machine(hello, link, self._machine_lost)
        log.info("machine %s joined with %d devices", name, len(machine.devices))
        self._listener.machine_joined(machine)
        self._news.set()

    def _machine_lost(self, machine: Machine, reason: str) -> None:
        del self.machines[machine.name]
        self._summon_later(machine.name)
        self._listener.machine_lost(machine, reason)

    # -- failures ---------------------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        """Fail the start; later, everything is tried again."""
        self._failure = reason
        self._news.set()

    def _failures(self) -> str:
        return "; ".join(f"machine {name}: {one.failure}" for name, one in self._launching.items() if one.failure)

    def _no_nodes(self) -> str:
        if not self._host:
            return "Ray started none of their agents and gave no reason"
        if self._nodes:
            return "their agents did not connect"
        what = "a GPU" if self._kind == "cuda" else "the resource melld_device, required for CPU devices"
        return f"no node of the cluster has {what}"

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the task '%s' of the cluster failed", task.get_name(), exc_info=error)
            self._fail(f"{type(error).__name__}: {error}")
