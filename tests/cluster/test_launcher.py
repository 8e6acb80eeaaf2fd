"""A launcher that fails to launch is reported.  Real processes, in the launcher's place."""

import msgspec
import pytest

from melld.cluster import launcher_process
from melld.cluster.cluster import EVERYWHERE, Cluster, ClusterFailed
from melld.cluster.machine import Machine
from melld.config import ClusterConfig

LATE = """
import socket, sys
sys.path[:] = {path!r}
from melld.cluster.envelopes import AgentEnded, HeadFound, Joined, Launch, Node, Nodes
from melld.engine.wire.frames import FrameDecoder, encode_frame
daemon, decoder, tries = socket.socket(fileno=({words})[0]), FrameDecoder(Launch), 0
tell = lambda message: daemon.sendall(b"".join(encode_frame(message)))
tell(HeadFound())
tell(Joined("127.0.0.1"))
tell(Nodes((Node("n1", "m1", 1),)))
while data := daemon.recv(1 << 16):
    for launch, _ in decoder.feed(data):
        tries += 1
        tell(AgentEnded(launch.node, f"told {{launch.summons.host}}, late {{tries}} times"))
"""


class Nobody:
    """No machine joins."""

    def machine_joined(self, machine: Machine) -> None: ...

    def machine_lost(self, machine: Machine, reason: str) -> None: ...


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the Ray launcher ended by SIGKILL (from outside)"),
        (
            "raise ImportError('libray.so is broken')",
            "the Ray launcher exited with code 1: ImportError: libray.so is broken",
        ),
        (
            "import os; raise SystemExit(os.getpgrp() == os.getpid())",  # signals for the daemon's group spare it
            "the Ray launcher exited with code 1",
        ),
        (
            "import time; time.sleep(60)",
            "0 of 1 machines joined within 5 s: Ray started none of their agents and gave no reason",
        ),
    ],
    ids=["killed", "broken", "in a group of its own", "hangs"],
)
async def test_a_launcher_that_exits_or_hangs_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch, code: str, told: str
) -> None:
    """The operator must not look for missing GPUs that are there."""
    monkeypatch.setattr(launcher_process, "BEGIN", code)
    made = Cluster(ClusterConfig(address="127.0.0.1:1", start_timeout_s=5.0), "cuda", [], {}, Nobody())
    with pytest.raises(ClusterFailed) as failed:
        await made.check()
    await made.stop()
    assert str(failed.value) == told


@pytest.mark.parametrize(
    "config", [ClusterConfig(), ClusterConfig(min_machines=2), ClusterConfig(listen=EVERYWHERE[1])]
)
async def test_a_late_agent_is_requested_again(monkeypatch: pytest.MonkeyPatch, config: ClusterConfig) -> None:
    """As on a loaded machine; the daemon's start fails only after three late agents.

    Also while other machines are not known yet.  It is told an address that it can call.
    """
    monkeypatch.setattr(launcher_process, "BEGIN", LATE)
    made = Cluster(msgspec.structs.replace(config, address="127.0.0.1:1"), "cpu", [], {}, Nobody())
    await made.check()
    with pytest.raises(ClusterFailed, match=r"^machine m1: told 127.0.0.1, late 3 times$"):
        await made.start()
    await made.stop()


def test_a_page_of_ray_s_output_becomes_one_line() -> None:
    """Above all for a node whose Python has no melld."""
    from melld.cluster.launcher import told_by

    page = """The actor died because of an error raised in its creation task, ray::AgentActor.__init__() (pid=1)
           ^^^^^^^^^^^^^^
RuntimeError: The actor with name AgentActor failed to import on the worker. This may be because:

ray::AgentActor.__init__() (pid=1, ip=10.0.0.2)
ModuleNotFoundError: No module named 'melld'"""
    assert told_by(RuntimeError(page)) == "ModuleNotFoundError: No module named 'melld'"
    assert told_by(RuntimeError("The actor died unexpectedly.\n\tclass_name: A")) == "The actor died unexpectedly."
