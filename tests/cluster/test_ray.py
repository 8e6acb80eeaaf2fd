"""Machines of a real Ray cluster: they join, are lost with agents or nodes, and outlive launcher and head.

Two nodes on this machine, at two of its addresses, for all tests of the file, which go from harm to harm.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from melld.cluster.cluster import Cluster
from melld.cluster.machine import Machine
from melld.config import ClusterConfig
from melld.engine.wire.spec import WorkerSpec
from melld.errors import MelldError
from tests.cluster.conftest import two_nodes
from tests.cluster.plain_agent import News, until_gone
from tests.cluster.ray_nodes import HEAD, OTHER, RayNodes, environment_of
from tests.patience import PATIENCE_S

SPEC = WorkerSpec(worker="w0", model_path="", device_kind="cpu")
ENDED = """
import sys
import ray
from melld.cluster.envelopes import AgentEnded
from melld.cluster.launcher import Launcher
ray.init(address=sys.argv[1], namespace="melld", log_to_driver=False, logging_level="ERROR")
told = []
launcher = Launcher(None, told.append, "run", "cpu")
launcher._running = {ray.put("it left"): node for node in ("n1", "n2", "n3")}
launcher._look()
print(*sorted(message.node for message in told if isinstance(message, AgentEnded)))
"""
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long,  # its short form: `test_agents` and `test_launcher`, without Ray
]


class Daemon(News):
    """What a daemon hears about machines."""

    def machine_joined(self, machine: Machine) -> None:
        self.tell(f"joined {machine.name}", f"{len(machine.devices)} device")

    def machine_lost(self, machine: Machine, reason: str) -> None:
        self.tell(f"lost {machine.name}", reason)


class Answer:
    """The ear of a worker without a model: what matters is that its machine reports it."""

    def __init__(self, heard: Daemon, name: str) -> None:
        self._heard = heard
        self._name = name

    def forked(self, pid: int) -> None: ...

    def received(self, data: bytes) -> None: ...

    def printed(self, line: str) -> None: ...

    def exited(self, reason: str, from_outside: bool) -> None:
        self._heard.tell(f"{self._name} answers", reason)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Nodes without PyTorch and vLLM: their workers cannot serve."""
    with two_nodes(with_engine=False) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(nodes: RayNodes) -> AsyncIterator[tuple[Daemon, Cluster]]:
    heard = Daemon()
    made = cluster(nodes.address, heard)
    try:
        await made.check()
        await made.start()
        yield heard, made
    finally:
        agents = nodes.processes("melld: agent")
        await made.stop()
    await until_gone(*agents)


def cluster(address: str, heard: Daemon, **settings: Any) -> Cluster:
    config = ClusterConfig(address=address, **{"min_machines": 2, "start_timeout_s": PATIENCE_S} | settings)
    return Cluster(config, "cpu", [], {}, heard)


async def refusal(address: str, **settings: Any) -> str:
    """Return why a cluster cannot be used, as reported before anything slow."""
    made = cluster(address, Daemon(), **settings)
    with pytest.raises(MelldError) as refused:
        await made.check()
    await made.stop()
    return str(refused.value)


async def test_every_node_becomes_a_machine(nodes: RayNodes, daemon: tuple[Daemon, Cluster]) -> None:
    """Its devices are then reserved, and its workers see nothing of Ray's environment."""
    heard, _ = daemon
    assert sorted(heard.told) == [(f"joined {HEAD}", "1 device"), (f"joined {OTHER}", "1 device")]
    agents = nodes.processes("melld: agent")
    assert len(agents) == 2
    for agent in agents:
        assert [one for one in environment_of(agent) if one.startswith(b"RAY_")] == []


async def test_an_unusable_cluster_is_reported_in_one_line(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, where Ray would take twenty seconds and a page."""
    assert "no Ray head answers at 127.0.0.2:1: " in await refusal("127.0.0.2:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 48)
    assert f"the Ray cluster at {nodes.address} rejects this token: " in await refusal(nodes.address)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nonexistent")
    assert "requires a token: copy its head's ~/.ray/auth_token here" in await refusal(nodes.address)


async def test_a_machine_whose_agent_is_killed_comes_back(nodes: RayNodes, daemon: tuple[Daemon, Cluster]) -> None:
    """With its actor, which Ray does not restart; the other machine notices nothing."""
    heard, made = daemon
    since, other = len(heard.told), made.machines[HEAD]
    agent = nodes.of_node(OTHER, "melld: agent")
    os.kill(nodes.of_node(OTHER, "ray::AgentActor"), signal.SIGKILL)
    await heard.until(f"lost {OTHER}", since)
    await until_gone(agent)
    assert await heard.until(f"joined {OTHER}", since) == "1 device"
    assert made.machines[HEAD] is other


async def test_agents_that_end_together_are_reported_together(nodes: RayNodes) -> None:
    """A fault that ends all of them is not reported machine by machine, half a second apart."""
    code = [sys.executable, "-c", ENDED, nodes.address]
    looked = await asyncio.create_subprocess_exec(*code, stdout=subprocess.PIPE, env=os.environ | nodes.environment)
    told, _ = await looked.communicate()
    assert told.decode().split() == ["n1", "n2", "n3"]


async def test_a_cluster_open_to_everybody_is_refused() -> None:
    """With what to do about it."""
    with RayNodes("disabled") as open_nodes, pytest.MonkeyPatch.context() as patch:
        for key, value in open_nodes.environment.items():
            patch.setenv(key, value)
        await asyncio.to_thread(open_nodes.start, HEAD)
        why = await refusal(open_nodes.address)
    assert f"the Ray cluster at {open_nodes.address} is open: anyone who can reach it can run code" in why


async def test_machines_outlive_the_launcher(nodes: RayNodes, daemon: tuple[Daemon, Cluster]) -> None:
    """Nothing is reported; its successor starts agents as before."""
    heard, _ = daemon
    since = len(heard.told)
    (launcher,) = nodes.processes("melld: launcher")
    os.kill(launcher, signal.SIGKILL)
    await until_gone(launcher)
    os.kill(nodes.of_node(OTHER, "melld: agent"), signal.SIGKILL)
    await heard.until(f"joined {OTHER}", since)
    assert [what for what, _ in heard.told[since:]] == [f"lost {OTHER}", f"joined {OTHER}"]


async def test_a_lost_node_takes_only_its_machine(nodes: RayNodes, daemon: tuple[Daemon, Cluster]) -> None:
    """With every process there; a node restarted at that address is a machine again."""
    heard, made = daemon
    since, other = len(heard.told), made.machines[HEAD]
    raylet, agent = nodes.of_node(OTHER, "raylet/raylet"), nodes.of_node(OTHER, "melld: agent")
    os.kill(raylet, signal.SIGKILL)
    await heard.until(f"lost {OTHER}", since)
    await until_gone(agent)
    await asyncio.to_thread(nodes.start, OTHER)
    await heard.until(f"joined {OTHER}", since)
    assert made.machines[HEAD] is other


async def test_machines_outlive_the_head(nodes: RayNodes, daemon: tuple[Daemon, Cluster]) -> None:
    """Ray's head decides nothing that a running request needs.  Last: there is no cluster after this."""
    heard, made = daemon
    since, (head,) = len(heard.told), nodes.processes("gcs_server")
    (launcher,) = nodes.processes("melld: launcher")
    os.kill(head, signal.SIGKILL)
    await until_gone(head)
    os.kill(launcher, signal.SIGKILL)  # it would end by itself, a minute later
    await until_gone(launcher)
    answers = [machine.spawn(SPEC, Answer(heard, name)) for name, machine in made.machines.items()]
    assert len(answers) == 2
    for name in made.machines:
        await heard.until(f"{name} answers", since)
    assert [what for what, _ in heard.told[since:] if not what.endswith("answers")] == []
