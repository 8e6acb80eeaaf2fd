"""What a service manager gives to the daemon, and what the daemon tells it: systemd's protocols in plain Python.

Owns the notify socket, the hand-over of listening sockets, the watchdog's beat and credentials.  Never decides whether
the daemon is ready or well: it is told, and passes it on.  Without a service manager all of it does nothing.

    $NOTIFY_SOCKET           datagrams of KEY=value lines to the manager            sd_notify(3)
    $WATCHDOG_USEC, _PID     WATCHDOG=1 is due at least this often                  sd_watchdog_enabled(3)
    $LISTEN_FDS, _PID, _FDNAMES   sockets that are open already, from number 3 on   sd_listen_fds(3)
    $CREDENTIALS_DIRECTORY   one file per secret, readable by the service alone     systemd.exec(5)
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

import msgspec

from melld.errors import ConfigError

FIRST_DESCRIPTOR = 3
STATUS_INTERVAL_S = 5.0
"""How often STATUS is refreshed where no watchdog asks for more."""

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager has given to this process; nothing of it where there is no manager."""

    notify_address: str | None = None
    watchdog_s: float | None = None
    """The manager acts when it has heard no WATCHDOG=1 for so long."""
    descriptors: tuple[tuple[str, int], ...] = ()
    """(name, file descriptor) of each socket that was handed over."""
    credentials_directory: Path | None = None

    @property
    def beat_interval_s(self) -> float:
        """How often to tell the manager that all is well: twice in its watchdog's period."""
        return STATUS_INTERVAL_S if self.watchdog_s is None else min(STATUS_INTERVAL_S, self.watchdog_s / 2)

    def listening_sockets(self, name: str = "api") -> list[socket.socket]:
        """The sockets handed over under `name` (FileDescriptorName= in the .socket unit), ready to accept.

        They stay open in the manager when the daemon ends: clients that come meanwhile wait, and are not refused.

        Raises:
            ConfigError: what was handed over is not a listening stream socket.
        """
        return [_adopt(name, descriptor) for its_name, descriptor in self.descriptors if its_name == name]

    def credential(self, name: str) -> Path | None:
        """Return where the secret of this name lies (LoadCredential= in the unit); it may be missing.

        The path is to be opened each time: a manager that refreshes credentials replaces the directory's content.
        """
        return None if self.credentials_directory is None else self.credentials_directory / Path(name).name


def read_supervision(environment: Mapping[str, str], pid: int) -> Supervision:
    """What `environment` says to the process `pid`.  What it says to another process, or garbled, is not for us."""
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
    """`read_supervision`, and out of the environment with it: a worker must not speak to the manager in our name."""
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
    """The daemon's voice to the manager.  Every method answers at once whether it was heard; none raises or blocks."""

    def __init__(self, address: str | None) -> None:
        self._address = "\0" + address[1:] if address is not None and address.startswith("@") else address

    def ready(self, status: str = "") -> bool:
        """Start-up, or a reload, is complete."""
        return self.send(READY="1", **_status(status))

    def reloading(self, status: str = "", now_ns: int | None = None) -> bool:
        """A reload begins (SIGHUP); `ready` ends it.  `now_ns` is CLOCK_MONOTONIC's, by default the present."""
        moment_ns = time.monotonic_ns() if now_ns is None else now_ns
        return self.send(RELOADING="1", MONOTONIC_USEC=str(moment_ns // 1000), **_status(status))

    def stopping(self, status: str = "") -> bool:
        """The daemon drains and will end."""
        return self.send(STOPPING="1", **_status(status))

    def status(self, status: str) -> bool:
        """One line for people: `systemctl status` shows it."""
        return self.send(STATUS=_one_line(status))

    def send(self, **fields: str) -> bool:
        """One datagram with these assignments."""
        if self._address is None or not fields:
            return False
        message = "\n".join(f"{key}={value}" for key, value in fields.items()).encode(errors="replace")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as voice:
            voice.setblocking(False)
            return voice.sendto(message, self._address) == len(message)
        return False


def _status(status: str) -> dict[str, str]:
    return {"STATUS": _one_line(status)} if status else {}


def _one_line(text: str) -> str:
    """A line break would start another assignment."""
    return " ".join(text.split())


class Beat(msgspec.Struct, frozen=True):
    """How the daemon is, at one moment.  `well` is false when it ought to be restarted."""

    well: bool
    status: str = ""


async def keep_told(notifier: Notifier, interval_s: float, look: Callable[[], Beat]) -> None:
    """Tell the manager, for ever, how the daemon is; the watchdog is fed only while `look` says that it is well.

    It runs on the event loop on purpose: a loop that is stuck feeds nothing.  Ends by cancellation.
    """
    while True:
        beat = look()
        alive = {"WATCHDOG": "1"} if beat.well else {}
        notifier.send(**alive, **_status(beat.status))
        await asyncio.sleep(interval_s)
