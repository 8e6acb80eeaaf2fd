"""`melld renew` of real daemons: streams go on, a failed start harms nothing, and one daemon is left."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from melld.daemon.renewal import channel as wire
from tests.api.http_client import request
from tests.forked import nursery
from tests.migrate.live import Answer, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.serve.manager import manager_at
from tests.serve.test_serve import is_gone
from tests.worker_faults import slowed

TOKENS, FEW_TOKENS = 150, 70


def body(tokens: int = TOKENS) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, "prompt": list(range(5, 45))}


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def end(pid: int) -> None:
    """End a daemon that is no child of the tests."""
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: is_gone(pid))


def assert_answered(idle: socket.socket) -> None:
    """Ask on a connection that was opened before the renewal."""
    with idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: melld\r\nConnection: close\r\n\r\n")
        assert idle.recv(100).startswith(b"HTTP/1.1 200")


class Pair:
    """A daemon with two workers, its configuration, and its service manager."""

    def __init__(self, daemon: DaemonProcess, manager: socket.socket, configuration: Path) -> None:
        self.daemon = daemon
        self.configuration = configuration
        self.heard: list[str] = []
        """What the manager was told: it reads at once, as there is room for ten messages."""
        self._manager = manager
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self.heard.append(self._manager.recv(4096).decode())

    def stream(self, tokens: int = TOKENS) -> Stream:
        return Stream(self.daemon, body(tokens))

    def renewed(self) -> int:
        """Renew it; return the new one's pid."""
        done = self.daemon.melld("renew")
        assert done.returncode == 0, done.stderr
        return int(self.daemon.status()["pid"])

    def kept(self) -> str:
        """Try to renew it; return why that failed."""
        before = self.daemon.status()
        done = self.daemon.melld("renew")
        assert done.returncode == 1
        after = self.daemon.status()
        assert (after["pid"], after["renewal"], after["state"]) == (before["pid"], "", "ready")
        return str(done.stderr)


@pytest.fixture(scope="module")
def pair(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("renewal")
    configuration = directory / "melld.toml"
    configuration.write_text(f"[server]\ndrain_s = 5\nheader_timeout_s = {PATIENCE_S}\n")  # of who has yet to ask
    nursery()  # so that the daemon knows it, and forks its successor from it
    flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--config", str(configuration)]
    with manager_at(directory / "notify") as manager:
        manager.settimeout(None)
        told = {"NOTIFY_SOCKET": str(manager.getsockname()), "STATE_DIRECTORY": str(directory)}
        with DaemonProcess(demo_model, *flags, environment=told, harmable=True) as daemon:
            daemon.wait_ready()
            yield Pair(daemon, manager, configuration)
            pid = daemon.status()["pid"]
            if pid != daemon.process.pid:
                end(pid)


def test_a_broken_configuration_harms_nothing(pair: Pair) -> None:
    """Whoever asked for the renewal hears the reason."""
    good = pair.configuration.read_text()
    stream = pair.stream()
    pair.configuration.write_text("[server]\nprt = 1\n")
    assert "unknown key `prt`" in pair.kept()
    pair.configuration.write_text(good)
    assert stream.result().error is None


def test_a_full_disk_harms_nothing(pair: Pair) -> None:
    """What clients have stored is not lost for a renewal."""
    assert pair.stream(2).result().error is None  # a story to leave
    pid, limit = pair.daemon.status()["pid"], resource.RLIMIT_FSIZE
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (0, before[1]))
    assert "cannot save stored responses there: File too large" in pair.kept()
    resource.prlimit(pid, limit, before)


def test_an_unsuitable_version_of_vllm_is_named_as_the_reason(demo_model: Path, tmp_path: Path) -> None:
    """An upgrade that was left half done."""
    information = tmp_path / "vllm-0.0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    told = os.environ | {"PYTHONPATH": path, wire.VARIABLE: str(theirs.fileno())}
    words = [sys.executable, "-m", "melld", "serve", "--model", str(demo_model)]
    with ours, theirs:
        there: dict[str, Any] = {"pid": os.getpid(), "address": ("127.0.0.1", 0), "is_adopted": False}
        inherited = wire.Inherited(**there, devices=("cpu:0",), has_stand_in=True)
        wire.say(ours, inherited, [ours.fileno()] * 3)
        done = subprocess.run(words, check=False, env=told, pass_fds=[theirs.fileno()], capture_output=True, text=True)
        received = wire.receive(ours)
    assert received is not None
    [message, _] = received
    assert isinstance(message, wire.Failed)
    assert "0.0.1" in message.reason
    assert message.reason in done.stderr
    assert done.returncode == 1


def test_streams_outlive_a_renewal_and_stored_answers_move_over(pair: Pair) -> None:
    """On two devices no request waits: one of the daemons takes it at every moment."""
    whole = pair.stream(FEW_TOKENS).result()
    url = pair.daemon.url
    stored = request(url, "POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 2}).json()
    operator, old = Operator(pair.daemon), pair.daemon.status()["pid"]
    idle = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    with slowed(pair.daemon.faults, 0.25):
        streams = [pair.stream(FEW_TOKENS) for _ in range(4)]
        operator.wait(lambda status: sum(bool(one["output_tokens"]) for one in status["requests"]) == 4, PATIENCE_S)
        story = pair.daemon.status()["requests"][0]["request"]
        pair.heard.clear()
        new = pair.renewed()
        assert new != old
        wait_until(lambda: any("READY=1" in said for said in pair.heard))
        assert pair.heard.index(f"MAINPID={new}") < [("READY=1" in said) for said in pair.heard].index(True)
        told = pair.daemon.status()["renewal"]
        assert f"has taken over from pid {old}" in told
        assert_answered(idle)
        late = pair.stream(4)
        assert late.result().error is None
    assert [stream.result() for stream in streams] == [whole] * 4
    wait_until(lambda: not pair.daemon.status()["renewal"])
    operator.wait_ready()
    assert request(url, "GET", f"/v1/responses/{stored['id']}").json() == stored
    assert "finished" in pair.daemon.melld("why", story).stdout
    assert not (pair.configuration.parent / "left.msgpack").exists()
    goes_on = {"input": "And?", "max_output_tokens": 2, "previous_response_id": stored["id"]}
    assert request(url, "POST", "/v1/responses", goes_on).status == 200


def test_a_new_daemon_that_dies_leaves_the_old_one_serving(pair: Pair) -> None:
    """Killed while loading: its device serves again, and nobody notices."""
    daemon, done = pair.daemon, []
    (daemon.faults / "w0.starting.STOP").touch()
    (daemon.faults / "w1.starting.STOP").touch()
    streams = [pair.stream(100) for _ in range(2)]
    asking = threading.Thread(target=lambda: done.append(daemon.melld("renew")))
    asking.start()
    wait_until(lambda: len(list(daemon.faults.glob("*.STOP"))) < 2)
    new = int(daemon.status()["renewal"].partition("pid ")[2].split()[0].rstrip(","))
    for fault in daemon.faults.glob("*.STOP"):
        fault.unlink()
    os.kill(new, signal.SIGKILL)
    asking.join()
    assert done[0].returncode == 1
    assert all(stream.result().error is None for stream in streams)
    Operator(daemon).wait_ready()


def test_an_old_daemon_that_dies_leaves_the_new_one_with_everything(pair: Pair) -> None:
    """Even after the hand-over, with streams of its own, which nobody could save."""
    old = pair.daemon.status()["pid"]
    with slowed(pair.daemon.faults, 0.02):
        cut = pair.stream(2000)
        new = pair.renewed()
        cut.leave()
        os.kill(old, signal.SIGKILL)
    assert pair.stream(4).result().error is None
    Operator(pair.daemon).wait_ready()
    assert pair.daemon.status()["pid"] == new


@pytest.mark.long
def test_on_one_device_requests_wait_at_the_socket(demo_model: Path) -> None:
    """The new daemon answers them, and the operator hears that they wait."""
    nursery()
    flags = ["--device", "cpu:1", "--kv-bytes", "64MiB"]
    with DaemonProcess(demo_model, *flags, harmable=True) as daemon:
        daemon.wait_ready()
        answer: Answer = Stream(daemon, body(200)).result()
        idle = socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])))
        with ThreadPoolExecutor() as pool:
            with slowed(daemon.faults, 0.02):
                running = Stream(daemon, body(200))
                Operator(daemon).wait(lambda status: bool(status["requests"]), PATIENCE_S)
                asked = pool.submit(daemon.melld, "renew")
                wait_until(lambda: asked.done() or "new requests wait until 1" in daemon.status()["renewal"])
            done = asked.result()
        assert done.returncode == 0, done.stderr
        assert "new requests wait until 1" in done.stdout
        assert_answered(idle)
        assert running.result() == answer
        assert Stream(daemon, body(200)).result() == answer
        new = int(daemon.status()["pid"])
        assert new != daemon.process.pid
        end(new)
