"""What a running daemon opens to others: its API's port, and nothing else."""

import contextlib
from pathlib import Path

from tests.serve.daemon_process import DaemonProcess

LISTENING = "0A"


def listeners_of(pid: int) -> list[str]:
    """Return the TCP addresses on which a process listens, as the kernel writes them."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(str(descriptor.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in held]


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children += map(int, (task / "children").read_text().split())
    return [pid, *(one for child in children for one in family_of(child))]


def test_the_api_s_port_is_the_only_one(daemon: DaemonProcess) -> None:
    """No worker, template or library can be reached by anybody else, on loopback or from the network."""
    daemon.status()
    port = int(daemon.url.rpartition(":")[2])
    family = family_of(daemon.process.pid)
    assert len(family) >= 4, "the daemon, the template and two workers"
    found = {pid: listeners_of(pid) for pid in family}
    assert {pid: addresses for pid, addresses in found.items() if addresses} == {
        daemon.process.pid: [f"0100007F:{port:04X}"]
    }
