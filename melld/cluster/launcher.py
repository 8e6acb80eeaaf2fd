"""The launcher: the only process that talks to Ray.  It starts agents and reports the cluster's nodes.

Owns the driver's connection to the cluster.  It keeps nothing that a successor needs: agents are detached, and live as
long as their connections to the daemon do.  Pickle stays here and in the actors.
"""

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from melld.cluster.actor import AgentActor
from melld.cluster.envelopes import AgentEnded, Joined, Launch, LauncherFailed, Node, Nodes
from melld.engine.wire.frames import FrameDecoder

LOOK_S = 0.5
"""Period of looking at nodes and agents."""


def launch(daemon: socket.socket, tell: Callable[[msgspec.Struct], None], address: str, run: str, kind: str) -> None:
    """Launch agents until the daemon closes its end; `head.main` has begun the process.  `tell` sends to the daemon."""
    os.environ.pop("RAY_ADDRESS", None)  # Ray would take it in place of ours
    try:
        Launcher(daemon, tell, run, kind).run(address)
    except Exception as error:  # noqa: BLE001  Ray's many: a successor tries again
        tell(LauncherFailed(f"Ray: {type(error).__name__}: {told_by(error)}"))
    os._exit(0)  # Ray's own threads would wait for a head that may be gone


class Launcher:
    """A driver of the cluster."""

    def __init__(self, daemon: socket.socket, tell: Callable[[msgspec.Struct], None], run: str, kind: str) -> None:
        self._daemon = daemon
        self._tell = tell
        self._run = run
        self._resource = "GPU" if kind == "cuda" else "melld_device"
        self._running: dict[Any, str] = {}  # the result of an agent's actor: its node
        self._told: Nodes | None = None

    def run(self, address: str) -> None:
        """Work until the daemon closes its end."""
        ray.init(address=address, namespace="melld", log_to_driver=False, logging_level="ERROR")
        self._tell(Joined(ray.util.get_node_ip_address()))
        decoder = FrameDecoder(Launch)
        self._daemon.settimeout(LOOK_S)
        while True:
            self._look()
            try:
                data = self._daemon.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            for message, _ in decoder.feed(data):
                self._launch(message)

    def _look(self) -> None:
        nodes = Nodes(tuple(self._nodes()))
        if nodes != self._told:
            self._told = nodes
            self._tell(nodes)
        running = list(self._running)
        ended, _ = ray.wait(running, num_returns=len(running), timeout=0) if running else ([], [])
        for one in ended:
            try:
                reason = str(ray.get(one))
            except ray.exceptions.RayError as error:
                reason = f"its actor died: {told_by(error)}"
            self._tell(AgentEnded(self._running.pop(one), reason))

    def _nodes(self) -> Iterator[Node]:
        for node in ray.nodes():
            devices = int(node["Resources"].get(self._resource, 0))
            if node["Alive"] and devices:
                yield Node(node["NodeID"], node["NodeManagerAddress"], devices)

    def _launch(self, asked: Launch) -> None:
        name = f"melld-{self._run}-{asked.node}-"
        self._running = {one: node for one, node in self._running.items() if node != asked.node}
        for earlier in ray.util.list_named_actors():
            if earlier.startswith(name):  # it may be frozen, and hold its seats
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(earlier))
        there = NodeAffinitySchedulingStrategy(asked.node, soft=False)
        environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        options = {"num_cpus": 0, "scheduling_strategy": there, "runtime_env": environment}
        actor = (
            ray.remote(AgentActor).options(name=name + secrets.token_hex(4), lifetime="detached", **options).remote()
        )
        self._running[actor.run.remote(msgspec.msgpack.encode(asked.summons))] = asked.node


def told_by(error: BaseException) -> str:
    """Return the most informative line: the error at the end of Ray's traceback, or the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (causes[-1:] or lines[:1] or ["no reason given"])[0]
