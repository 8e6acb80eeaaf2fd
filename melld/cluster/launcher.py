"""The launcher: the daemon's child that alone speaks with Ray.  It starts agents, and tells which nodes there are.

Owns the driver's connection to the cluster.  It keeps nothing that a successor needs: agents are detached, and live as
long as their connections to the daemon do.  Pickle stays here and in the actors.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from setproctitle import setproctitle

from melld.cluster.actor import AgentActor
from melld.cluster.envelopes import AgentEnded, Joined, Launch, LauncherFailed, Node, Nodes
from melld.engine.wire.frames import FrameDecoder, encode_frame
from melld.engine.worker.start import die_with_parent
from melld.errors import MelldError

LOOK_S = 0.5
"""Period of looking at nodes and agents."""
PROBE_S = 5.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call that every Ray head answers, or refuses for want of a token."""


class NoCluster(MelldError):
    """The cluster cannot be used."""


def main(descriptor: int, daemon_pid: int, address: str, run: str, kind: str, allows_open: bool) -> None:
    """Run the launcher.  `descriptor`: its end of a socket pair with the daemon; `run`: names this daemon's actors."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the daemon
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(daemon_pid)
    setproctitle("melld: launcher")
    daemon = socket.socket(fileno=descriptor)
    try:
        found = _address(address)
        os.environ.pop("RAY_ADDRESS", None)  # Ray would take it in place of ours
        check_cluster(found, _token(), allows_open=allows_open)
        Launcher(daemon, run, kind).run(found)
    except NoCluster as error:
        _tell(daemon, LauncherFailed(str(error)))
    except Exception as error:  # noqa: BLE001  Ray's many: a successor tries again
        _tell(daemon, LauncherFailed(f"Ray: {type(error).__name__}: {_first_line(error)}"))
    os._exit(0)  # Ray's own threads would wait for a head that may be gone


def check_cluster(address: str, token: str, *, allows_open: bool) -> None:
    """Ask the head first, as Ray's own errors come late and are long.

    Raises:
        NoCluster: it is not there, takes another token, runs another version, or takes everybody.
    """
    with _channel(address) as channel:
        call = channel.unary_unary(CHECK_ALIVE)
        try:
            call(b"", timeout=PROBE_S)
            is_open = True
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise NoCluster(f"no Ray head answers at {address}: {error.details()}") from None
            is_open = False
        if is_open and not allows_open:
            raise NoCluster(
                f"the Ray cluster at {address} is open: whoever reaches it can run code on its machines. Start its "
                "nodes with RAY_AUTH_MODE=token, or set [cluster] allow_open_cluster"
            )
        if is_open:
            return
        if not token:
            raise NoCluster(f"the Ray cluster at {address} wants a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")
        try:
            call(b"", timeout=PROBE_S, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.RpcError as error:
            raise NoCluster(f"the Ray cluster at {address} refuses this token: {error.details()}") from None
    os.environ["RAY_AUTH_MODE"] = "token"


def _channel(address: str) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options)
    from ray._common.tls_utils import load_certs_from_env

    certificate, key, authority = load_certs_from_env()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)


def _token() -> str:
    """Return the token where Ray looks for it, or ""."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    try:
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser().read_text().strip()
    except OSError:
        return ""


def _address(address: str) -> str:
    """Return the head's address.

    Raises:
        NoCluster: `auto`, and no Ray node runs on this machine.
    """
    if address != "auto":
        return address
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise NoCluster("no Ray node runs on this machine: start one with `ray start --address=HEAD:6379`") from None


class Launcher:
    """A driver of the cluster."""

    def __init__(self, daemon: socket.socket, run: str, kind: str) -> None:
        self._daemon = daemon
        self._run = run
        self._resource = "GPU" if kind == "cuda" else "melld_device"
        self._running: dict[Any, str] = {}  # the result of an agent's actor: its node
        self._told: Nodes | None = None

    def run(self, address: str) -> None:
        """Work until the daemon closes its end."""
        ray.init(address=address, namespace="melld", log_to_driver=False, logging_level="ERROR")
        _tell(self._daemon, Joined(ray.util.get_node_ip_address()))
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
            _tell(self._daemon, nodes)
        ended, _ = ray.wait(list(self._running), timeout=0) if self._running else ([], [])
        for one in ended:
            try:
                reason = str(ray.get(one))
            except Exception as error:  # noqa: BLE001  Ray's many: whatever it is, the agent is gone
                reason = f"its actor died: {_first_line(error)}"
            _tell(self._daemon, AgentEnded(self._running.pop(one), reason))

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


def _tell(daemon: socket.socket, message: msgspec.Struct) -> None:
    try:
        daemon.sendall(b"".join(encode_frame(message)))
    except OSError:
        sys.exit(0)  # the daemon is gone


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
