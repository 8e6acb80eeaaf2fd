"""melld under a service manager: readiness, the watchdog, sockets that outlive it, and credentials."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.daemon.systemd import (
    STATUS_INTERVAL_S,
    Beat,
    Notifier,
    Supervision,
    keep_told,
    read_supervision,
    take_supervision,
)
from melld.errors import ConfigError
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


class Manager:
    """The other end of the protocol: a real datagram socket that receives the daemon's messages."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE_S)

    def hear(self) -> dict[str, str]:
        return _parse(self.socket.recv(4096))

    async def hear_soon(self) -> dict[str, str]:
        self.socket.setblocking(False)
        return _parse(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 4096), PATIENCE_S))


def _parse(datagram: bytes) -> dict[str, str]:
    fields = [line.split("=", 1) for line in datagram.decode().splitlines()]
    assert len(dict(fields)) == len(fields), "no assignment comes twice"
    return dict(fields)


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@melld-test-{os.getpid()}"
    made = Manager(address)
    yield made
    made.socket.close()


def test_the_manager_hears_start_reload_and_stop(manager: Manager) -> None:
    """In systemd's words, over either kind of socket."""
    supervision = read_supervision({"NOTIFY_SOCKET": manager.address}, os.getpid())
    notifier = Notifier(supervision.notify_address)
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert notifier.send(STATUS="loading the model")
    assert notifier.send(READY="1", STATUS="2 workers")
    assert notifier.reloading()
    assert notifier.send(READY="1")
    assert notifier.send(STOPPING="1", STATUS="draining 3 requests")
    after_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    heard = [manager.hear() for _ in range(5)]
    assert before_us <= int(heard[2].pop("MONOTONIC_USEC")) <= after_us
    assert heard == [
        {"STATUS": "loading the model"},
        {"READY": "1", "STATUS": "2 workers"},
        {"RELOADING": "1"},
        {"READY": "1"},
        {"STOPPING": "1", "STATUS": "draining 3 requests"},
    ]


@given(st.text(st.characters(codec=None), max_size=200))
def test_a_status_text_cannot_inject_other_messages(text: str) -> None:
    """An error message with a line break must not be read as READY=1 or WATCHDOG=1."""
    manager = Manager(f"@melld-test-status-{os.getpid()}")
    try:
        assert Notifier(manager.address).send(STATUS=text + "\nREADY=1\r\nWATCHDOG=1")
        assert manager.hear().keys() == {"STATUS"}
    finally:
        manager.socket.close()


@pytest.mark.parametrize("address", [None, "/nowhere/notify", "@melld-nobody-listens"])
def test_a_missing_manager_raises_nothing(address: str | None) -> None:
    """Started by hand, or with the manager gone, the daemon serves all the same."""
    assert not Notifier(address).send(READY="1")


def test_a_manager_that_does_not_read_never_blocks_the_loop(tmp_path: Path) -> None:
    """A full socket means a lost message, not a stalled daemon."""
    deaf = Manager(str(tmp_path / "notify"))
    notifier = Notifier(deaf.address)
    assert notifier.send(STATUS="x")
    for _ in range(100_000):
        if not notifier.send(STATUS="x"):
            break
    else:
        pytest.fail("the socket's queue has no end")
    deaf.socket.close()


async def test_the_watchdog_is_fed_only_while_all_is_well(manager: Manager) -> None:
    """The manager restarts a daemon whose workers hang; its status says what is wrong."""
    beats = iter([Beat(True, "serving"), Beat(False, "worker cpu:0 hangs"), Beat(True)])
    done = asyncio.Event()

    def look() -> Beat:
        beat = next(beats, None)
        if beat is None:
            done.set()
        return beat or Beat(False)

    task = asyncio.create_task(keep_told(Notifier(manager.address), 0.001, look))
    heard = [await manager.hear_soon() for _ in range(3)]
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    task.cancel()
    assert heard == [{"WATCHDOG": "1", "STATUS": "serving"}, {"STATUS": "worker cpu:0 hangs"}, {"WATCHDOG": "1"}]
    with pytest.raises(BlockingIOError):
        manager.socket.recv(4096)  # not well and nothing to say: silence


async def test_an_unknown_health_is_no_reason_for_a_restart(manager: Manager) -> None:
    """The loop and its streams run: a bug in describing health must not make the manager kill them."""
    with pytest.raises(ZeroDivisionError):
        await keep_told(Notifier(manager.address), 0.001, lambda: Beat(well=bool(1 // 0)))
    assert manager.hear() == {"WATCHDOG": "1"}


def test_another_process_s_variables_are_left_alone() -> None:
    """A daemon started from another service's shell takes neither its sockets nor its watchdog."""
    variables = {
        "LISTEN_FDS": "2",
        "LISTEN_PID": "41",
        "LISTEN_FDNAMES": "api",
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": "41",
    }
    mine = read_supervision(variables, 41)
    assert mine.descriptors == (("api", 3), ("unknown", 4))
    assert (mine.watchdog_s, mine.beat_interval_s) == (3.0, 1.5)
    other = read_supervision(variables, 42)
    assert other == Supervision()
    assert other.beat_interval_s == STATUS_INTERVAL_S
    assert read_supervision({"WATCHDOG_USEC": "60000000"}, 42).beat_interval_s == STATUS_INTERVAL_S


NAMES = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "CREDENTIALS_DIRECTORY"]


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=8)))
def test_a_garbled_environment_at_worst_disables_supervision(variables: dict[str, str]) -> None:
    """Nothing in the environment can keep the daemon from starting."""
    supervision = read_supervision(variables | {"LISTEN_PID": "7"}, 7)
    assert supervision.beat_interval_s > 0


def test_workers_inherit_no_manager_variables() -> None:
    """A worker that spoke on the manager's socket could keep a dead daemon looking alive."""
    environment = {
        "NOTIFY_SOCKET": "/run/x",
        "LISTEN_PID": "7",
        "LISTEN_FDS": "1",
        "WATCHDOG_USEC": "5",
        "PATH": "/bin",
    }
    assert take_supervision(environment, 7).notify_address == "/run/x"
    assert environment == {"PATH": "/bin"}


def test_credential_names_cannot_leave_their_directory(tmp_path: Path) -> None:
    """Keys come from a place that only the service can read."""
    given = read_supervision({"CREDENTIALS_DIRECTORY": str(tmp_path)}, 7)
    assert given.credential("api-keys") == tmp_path / "api-keys"
    assert given.credential("../secret") == tmp_path / "secret"
    assert Supervision().credential("api-keys") is None


LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""

DAEMON = """
import json, os
from melld.daemon.systemd import Notifier, take_supervision
given = take_supervision(os.environ, os.getpid())
(api,) = given.listening_sockets()
Notifier(given.notify_address).send(READY="1")
api.setblocking(True)
client, _ = api.accept()
left = [name for name in os.environ if name.startswith(("LISTEN", "NOTIFY"))]
client.sendall(json.dumps({"pid": os.getpid(), "inheritable": api.get_inheritable(), "left": left}).encode())
client.close()
"""


def test_a_restart_refuses_nobody(tmp_path: Path) -> None:
    """Clients that connect while no daemon runs wait in the manager's socket until the next one serves them."""
    manager = Manager(str(tmp_path / "notify"))
    with socket.create_server(("127.0.0.1", 0)) as api:
        environment = os.environ | {
            "LISTEN_FDS": "1",
            "LISTEN_FDNAMES": "api",
            "NOTIFY_SOCKET": manager.address,
            "PYTHONPATH": str(ROOT),
        }
        answers = []
        for _ in range(2):
            # Before the daemon is there.
            with socket.create_connection(api.getsockname(), timeout=PATIENCE_S) as client:
                line = [sys.executable, "-c", LAUNCHER, str(api.fileno()), DAEMON]
                daemon = subprocess.Popen(line, env=environment, pass_fds=[api.fileno()])
                try:
                    assert manager.hear() == {"READY": "1"}
                    answers.append(json.loads(client.makefile().read()))
                    assert daemon.wait(PATIENCE_S) == 0
                finally:
                    daemon.kill()
                    daemon.wait()
    manager.socket.close()
    assert answers[0]["pid"] != answers[1]["pid"]
    assert all(answer["left"] == [] and not answer["inheritable"] for answer in answers)


def test_only_a_listening_stream_socket_is_accepted(tmp_path: Path) -> None:
    """A .socket unit of the wrong kind gets a clear error instead of failing at the first client."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, (tmp_path / "file").open("w") as file:
        wrong = Supervision(descriptors=(("api", datagrams.fileno()), ("file", file.fileno())))
        with pytest.raises(ConfigError, match="not a listening stream socket"):
            wrong.listening_sockets("api")
        with pytest.raises(ConfigError, match="not a socket"):
            wrong.listening_sockets("file")
        assert wrong.listening_sockets("other") == []
        assert datagrams.fileno() > 0, "and it is left open for its owner"
