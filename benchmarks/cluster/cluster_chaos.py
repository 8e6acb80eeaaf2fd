"""A random history on four workers of two Ray nodes: what `cluster.py chaos` plays.

Workers, agents, a node and the launcher die, a machine freezes, its cable is cut, the daemon is held up; every answer
is held against an unharmed run.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from tests.cluster.plain_agent import Proxy
from tests.cluster.ray_nodes import HEAD, OTHER, RayNodes, ancestors
from tests.migrate.chaos import History, orphans
from tests.migrate.live import CALM, Operator
from tests.serve.daemon_process import DaemonProcess

SILENCE_S = 3.0
SPREAD = (
    "--set",
    'scheduler.policy="most-free"',
    "--set",
    "idle.sleep_after_s=inf",
    "--set",
    "health.steady_after_s=0",
)
NIXL = ("--set", 'cluster.kv="nixl"', "--set", 'cluster.kv_interface="lo"')


def flags_of(nodes: RayNodes) -> tuple[str, ...]:
    """Return the flags of a daemon on both nodes."""
    silence = f"cluster.silence_s={SILENCE_S}"
    return ("--device", "cpu", "--cluster", nodes.address, "--set", "cluster.min_machines=2", "--set", silence)


CALLED_BY_PROXY = """
import os, sys
from melld.cli import main
from melld.cluster.gate import Gate

Gate.port = int(os.environ["PROXY_PORT"])
sys.exit(main(sys.argv[1:]))
"""
"""A daemon that tells its agents to call a proxy, as firewalls and routers stand between machines."""


@contextlib.contextmanager
def proxy_before(port: int) -> Iterator[tuple[Callable[[], int], int]]:
    """Forward to the gate at `port` of the head; yield what cuts a machine's cable, and where to call."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    opened = Proxy.open(port, HEAD)
    try:
        proxy, called = there(opened.__aenter__())

        async def cut() -> int:
            return proxy.cut(1)

        try:
            yield lambda: there(cut()), called
        finally:
            there(opened.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class ClusterHistory(History):
    """A history whose harms are a cluster's.  `cut`: cuts the cable to a machine."""

    def __init__(
        self, daemon: DaemonProcess, nodes: RayNodes, cut: Callable[[], int], seed: int, harm_every_s: float
    ) -> None:
        super().__init__(daemon, daemon.faults, seed, harm_every_s)
        self.rounding = 1e-4  # between machines all is computed again
        self._nodes = nodes
        self._harms: dict[str, Callable[[random.Random], None]] = {
            "worker killed": self._kill_worker,
            "agent killed": lambda chance: os.kill(self._agent(chance), signal.SIGKILL),
            "machine frozen": self._freeze_machine,
            "cable cut": lambda _: self._cut(cut),
            "daemon held up": self._hold_up,
            "node killed": self._kill_node,
            "launcher killed": lambda _: os.kill(nodes.processes("melld: launcher")[0], signal.SIGKILL),
        }

    def _harmer(self) -> None:
        """Now and then, when all workers are well."""
        chance = random.Random(self._chance.random())
        turns = itertools.cycle(self._harms)
        while not self._over.wait(self._harm_every_s):
            if any(worker["state"] not in CALM for worker in self._look()):
                continue
            name = next(turns)
            try:
                self._harms[name](chance)
                self.tally[name] += 1
            except (ProcessLookupError, AssertionError, IndexError) as missed:  # it has just been started anew
                self.tally[f"missed ({name}: {type(missed).__name__})"] += 1

    def _agent(self, chance: random.Random) -> int:
        return self._nodes.of_node(chance.choice([HEAD, OTHER]), "melld: agent")

    def _kill_worker(self, chance: random.Random) -> None:
        victim = chance.choice([worker for worker in self._look() if worker["pid"]])
        self._noted(victim["worker"], "KILL", "anywhere")
        os.kill(victim["pid"], signal.SIGKILL)

    def _freeze_machine(self, chance: random.Random) -> None:
        """Until it is given up, and its actor killed; one that thaws before counts for nothing either."""
        agent = self._agent(chance)
        self._stop([pid for pid in self._nodes.processes("melld: ") if agent in (pid, *ancestors(pid))])

    def _cut(self, cut: Callable[[], int]) -> None:
        """Forward nothing more to or from a machine and close nothing: both sides must notice."""
        assert cut() == 1

    def _hold_up(self, _: random.Random) -> None:
        """For longer than would make a machine lost: none is."""
        self._stop([self._daemon.process.pid])

    def _stop(self, pids: list[int]) -> None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._over.wait(2 * SILENCE_S if number is signal.SIGSTOP else 0.0)

    def _kill_node(self, _: random.Random) -> None:
        """Kill the node without Ray's head, and start another in its place."""
        os.kill(self._nodes.of_node(OTHER, "raylet/raylet"), signal.SIGKILL)
        self._nodes.start(OTHER, devices=2)


def chaos(nodes: RayNodes, model: Path, asked: argparse.Namespace) -> int:
    """Play; return 0 when nothing went wrong."""
    with socket.create_server((HEAD, 0)) as free:
        port = free.getsockname()[1]
    flags = (*flags_of(nodes), *SPREAD, *(NIXL if asked.nixl else ()), "--set", f"cluster.port={port}")
    with (
        proxy_before(port) as (cut, called),
        DaemonProcess(
            model,
            *flags,
            "--kv-bytes",
            "64MiB",
            program=("-c", CALLED_BY_PROXY),
            environment={"PROXY_PORT": str(called)},
        ) as daemon,
    ):
        daemon.wait_ready()
        Operator(daemon).wait_ready()
        began_s = time.monotonic()
        played = ClusterHistory(daemon, nodes, cut, asked.seed, asked.harm_every_s)
        played.play(asked.requests, asked.clients, asked.seconds)
        took_s = time.monotonic() - began_s
        pids = [
            *nodes.processes("melld: worker"),
            *nodes.processes("melld: template"),
            *nodes.processes("melld: agent"),
        ]
        ended = daemon.stop()
    left = orphans(pids)
    tally = ", ".join(f"{name} {count}" for name, count in sorted(played.tally.items()))
    print(f"{tally}\n{took_s:.0f} s; exit code {ended}; orphans {left}; wrong: {len(played.wrong)}")
    print(*played.wrong[:20], sep="\n")
    if asked.write:
        rows = "".join(f"\n| {name} | {count} |" for name, count in sorted(played.tally.items()))
        table = f"| what | times |\n|---|---|{rows}\n| answers lost, altered, hung | {len(played.wrong)} |"
        harness.record("cluster-chaos" + "-nixl" * asked.nixl, table, "two CPU cores, two Ray nodes on them")
    return int(bool(played.wrong) or ended != 0 or bool(left))
