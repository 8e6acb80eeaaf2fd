"""systemd in plain Python: its protocols, and the texts of the units that `melld install-service` writes.

Owns the notify socket, the hand-over of listening sockets, the watchdog's beat and credentials.  Never decides whether
the daemon is ready or well.  Without a service manager it does nothing.

    $NOTIFY_SOCKET           datagrams of KEY=value lines to the manager            sd_notify(3)
    $WATCHDOG_USEC, _PID     WATCHDOG=1 is due at least this often                  sd_watchdog_enabled(3)
    $LISTEN_FDS, _PID, _FDNAMES   sockets that are open already, from number 3 on   sd_listen_fds(3)
    $CREDENTIALS_DIRECTORY   one file per secret, readable only by the service      systemd.exec(5)

The texts are pure: from the units of `systemd/` to those to write.  A written unit starts with a line that names its
writer and the digest of the rest, so that melld never overwrites a foreign or edited file unnoticed.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

import msgspec

from melld.control.status import DaemonState, DaemonStatus, workers_ready
from melld.errors import ConfigError

FIRST_DESCRIPTOR = 3
STATUS_INTERVAL_S = 5.0
"""Longest time between two refreshes of STATUS."""

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
WRITER = "# Written by `melld install-service`; local changes belong in `systemctl edit`. sha256:"
_FIRST_LINE = re.compile(re.escape(WRITER) + r"([0-9a-f]{64})\n")
PROGRAM = "/usr/local/bin/melld"
"""The program as the units of `systemd/` name it."""
CONFIG = "/etc/melld/melld.toml"
KEYS_CREDENTIAL = "api-keys"
"""Name of the keys in the unit's LoadCredential=."""
ROOT_GROUP = 0


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """Address, sockets and secrets from the service manager; empty without one."""

    notify_address: str | None = None
    watchdog_s: float | None = None
    """The manager restarts the daemon after this time without WATCHDOG=1."""
    descriptors: tuple[tuple[str, int], ...] = ()
    """(name, file descriptor) of each socket that was handed over."""
    credentials_directory: Path | None = None

    @property
    def beat_interval_s(self) -> float:
        """Return the status interval: at most half the watchdog period."""
        return STATUS_INTERVAL_S if self.watchdog_s is None else min(STATUS_INTERVAL_S, self.watchdog_s / 2)

    def listening_sockets(self, name: str = "api") -> list[socket.socket]:
        """Return the sockets handed over under `name` (FileDescriptorName= in the .socket unit), ready to accept.

        They stay open in the manager when the daemon ends: clients that connect meanwhile wait and are not refused.

        Raises:
            ConfigError: what was handed over is not a listening stream socket.
        """
        return [_adopt(name, descriptor) for its_name, descriptor in self.descriptors if its_name == name]

    def credential(self, name: str) -> Path | None:
        """Return the path of the secret with this name (LoadCredential= in the unit); it may be missing.

        The path is to be opened each time: a manager that refreshes credentials replaces the directory's content.
        """
        return None if self.credentials_directory is None else self.credentials_directory / Path(name).name


def read_supervision(environment: Mapping[str, str], pid: int) -> Supervision:
    """Read what `environment` gives to the process `pid`; ignore what is for another process, or invalid."""
    mine = environment.get("LISTEN_PID") == str(pid)
    count = _number(environment.get("LISTEN_FDS")) if mine else 0
    names = environment.get("LISTEN_FDNAMES", "").split(":") if mine else []
    names += ["unknown"] * (count - len(names))  # the name that sd_listen_fds_with_names(3) gives
    watchdog_us = _number(environment.get("WATCHDOG_USEC"))
    watched = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
    address = environment.get("NOTIFY_SOCKET", "")
    directory = environment.get("CREDENTIALS_DIRECTORY")
    return Supervision(
        notify_address=address if address[:1] in ("/", "@") and len(address) > 1 else None,
        watchdog_s=watchdog_us / 1e6 if watchdog_us and watched else None,
        descriptors=tuple((names[index], FIRST_DESCRIPTOR + index) for index in range(count)),
        credentials_directory=Path(directory) if directory else None,
    )


def take_supervision(environment: MutableMapping[str, str], pid: int) -> Supervision:
    """Read and remove the manager's variables: a worker must not speak to the manager in the daemon's name."""
    supervision = read_supervision(environment, pid)
    for name in VARIABLES:
        environment.pop(name, None)
    return supervision


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else 0


def _adopt(name: str, descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        adopted = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"$LISTEN_FDS: {name} ({descriptor})", f"not a socket: {error.strerror}") from error
    if adopted.type != socket.SOCK_STREAM or not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        adopted.detach()
        raise ConfigError(f"$LISTEN_FDS: {name} ({descriptor})", "not a listening stream socket")
    adopted.setblocking(False)
    return adopted


class Notifier:
    """Sends the daemon's messages to the manager."""

    def __init__(self, address: str | None) -> None:
        self._address = "\0" + address[1:] if address is not None and address.startswith("@") else address

    @property
    def has_manager(self) -> bool:
        """Return True if there is a manager to notify."""
        return self._address is not None

    def reloading(self) -> bool:
        """Report the start of a reload, which READY=1 ends."""
        return self.send(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))

    def send(self, **fields: str) -> bool:
        """Send one datagram with these assignments, without empty ones; return whether it was sent.

        Never raises or blocks.  A line break in a value would start another assignment, and becomes a space.
        """
        said = [f"{key}={' '.join(value.split())}" for key, value in fields.items() if value]
        if self._address is None or not said:
            return False
        message = "\n".join(said).encode(errors="replace")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as voice:
            voice.setblocking(False)
            return voice.sendto(message, self._address) == len(message)
        return False


class Beat(msgspec.Struct, frozen=True):
    """The daemon's health at one moment.  `well` is false if it should be restarted."""

    well: bool
    status: str = ""


def beat_of(status: DaemonStatus, why_not_ready: str | None, why_closed: str | None) -> Beat:
    """Return the daemon's health: well while starting, and while any worker serves or is restarted."""
    hopeless = status.state is DaemonState.READY and why_closed is not None
    state = why_not_ready or status.state.value
    told = f"{state}: {workers_ready(status.workers)}, {len(status.requests)} requests"
    return Beat(well=not hopeless, status=told)


async def keep_told(notifier: Notifier, interval_s: float, look: Callable[[], Beat]) -> None:
    """Report the daemon's health to the manager until cancelled; feed the watchdog only while `look` says it is well.

    It runs on the event loop on purpose: a stuck loop feeds nothing.  A `look` that fails is no reason for a restart.
    """
    while True:
        try:
            beat = look()
        except Exception:
            notifier.send(WATCHDOG="1")
            raise
        notifier.send(WATCHDOG="1" if beat.well else "", STATUS=beat.status)
        await asyncio.sleep(interval_s)


def own_command() -> str:
    """Return the command that starts this installation of melld, wherever it is, as a shell reads it."""
    installed = Path(sys.executable).parent / "melld"
    return shlex.quote(str(installed)) if installed.is_file() else f"{shlex.quote(sys.executable)} -m melld"


def unit_text(unit: str, program: str) -> str:
    """Return a unit of `systemd/` with the program's actual path, quoted as for a shell."""
    return unit.replace(PROGRAM, program.replace("%", "%%"))


def signed(text: str) -> str:
    """Return the text to write, with the first line that identifies it."""
    return f"{WRITER}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def is_ours(text: str) -> bool:
    """Return True if `text` is an unedited unit that `signed` made, in any version of melld."""
    match = _FIRST_LINE.match(text)
    return match is not None and hashlib.sha256(text[match.end() :].encode()).hexdigest() == match[1]


def remark_on_key_file(named: str, root: Path = Path("/")) -> str | None:
    """Return a warning if the service cannot read `[server] api_key_file`; None if it can, or if there is no file.

    The service runs as a user that exists only while it runs (DynamicUser): by the file's mode, it may read what
    everybody may, or what a group that the unit names may.
    """
    path = root / Path(named).absolute().relative_to("/")
    way = [path, *path.parents][: len(path.relative_to(root).parts)]
    try:
        closed = next((one for one in way if not _is_open(one)), None)
    except OSError:
        return None
    if closed is None:
        return None
    return (
        f"[server] api_key_file: {named} cannot be read by the service, which runs as its own user ({closed} is "
        "for its owner only): remove this setting, and the unit hands over /etc/melld/api-keys, "
        "or give the file a group (docs/install.md)"
    )


def _is_open(path: Path) -> bool:
    about = path.stat()
    others, group = (stat.S_IXOTH, stat.S_IXGRP) if stat.S_ISDIR(about.st_mode) else (stat.S_IROTH, stat.S_IRGRP)
    return bool(about.st_mode & others or (about.st_mode & group and about.st_gid != ROOT_GROUP))
