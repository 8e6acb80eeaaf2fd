"""The runtime directory: where the daemon's sockets live, accessible only to its own user.

Owns the directory's name, its mode, the lock that makes the daemon in it the only one, and the control socket in it.
Never speaks through the socket: `melld.control.server` answers, `melld.control.client` asks.

The kernel drops the lock when its holder ends, however it ends: so whoever holds the lock knows that a socket in the
directory is stale.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from melld.control.messages import CONTROL_SOCKET
from melld.errors import ConfigError, MelldError

SYSTEM_DIRECTORY = Path("/run/melld")
"""The directory that systemd makes (RuntimeDirectory=melld in the unit)."""
LONGEST_SOCKET_PATH = 107  # bytes: sun_path of sockaddr_un, less its final NUL
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class DaemonRunning(MelldError):
    """Another daemon uses this runtime directory."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        who = "another melld" if pid is None else f"another melld (pid {pid})"
        super().__init__(
            f"{who} runs in {directory}: stop it, or give this one its own directory with --runtime-directory"
        )
        self.directory = directory
        self.pid = pid


def runtime_directory(configured: str | None, environment: Mapping[str, str]) -> Path:
    """Return the directory's path: `[server] runtime_directory`, else the service manager's or the login session's.

    In this order: `configured`, the first of `$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/melld`, `/tmp/melld-<uid>`.
    Creates nothing.
    """
    if configured:
        return Path(configured).absolute()
    if first := environment.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return Path(first)
    if (session := Path(environment.get("XDG_RUNTIME_DIR", ""))).is_absolute():  # else it counts as none
        return session / "melld"
    return Path(f"/tmp/melld-{os.getuid()}")  # noqa: S108  its owner and mode are checked before it is used


def state_directory(environment: Mapping[str, str], runtime: Path) -> Path:
    """Return where files outlive the daemon: the service manager's `$STATE_DIRECTORY`, else the runtime directory."""
    managed = environment.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(managed) if managed else runtime


class ControlSocket:
    """A locked runtime directory and the control socket bound in it, which does not listen yet."""

    def __init__(self, path: Path, lock: int, listener: socket.socket) -> None:
        self.path = path
        self.listener = listener
        self.lock = lock
        self.is_given_away = False
        """Another daemon has the same lock and the same socket, and goes on."""
        self._file = _file_at(path)

    @property
    def is_in_place(self) -> bool:
        """Return True if the path still leads to this socket, and not to another daemon's."""
        return _file_at(self.path) == self._file

    def put_back(self) -> None:
        """Bind another socket in place of a removed one, in another directory if that is removed too.

        Raises:
            ConfigError, DaemonRunning: see `open_control_socket`; this socket stays as it is.
        """
        earlier = self.listener
        if _file_at(self.path.parent) == _identity(os.fstat(self.lock)):
            self.listener = _bind(self.path)
        else:
            fresh = open_control_socket(self.path.parent)
            os.close(self.lock)
            self.listener, self.lock = fresh.listener, fresh.lock
        earlier.close()
        self._file = _file_at(self.path)

    def close(self) -> None:
        """Remove the socket unless it was replaced or is shared with another daemon; then unlock the directory."""
        if self.is_in_place and not self.is_given_away:
            self.path.unlink(missing_ok=True)
        self.listener.close()
        os.close(self.lock)


def open_control_socket(directory: Path) -> ControlSocket:
    """Create and lock the directory, and bind the control socket in it with mode 0600, in place of a stale one.

    Raises:
        ConfigError: the directory cannot be made, is not ours, is open to others, or has too long a name.
        DaemonRunning: another daemon uses the directory.
    """
    path = directory / CONTROL_SOCKET
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ConfigError("runtime directory", f"{path} is too long for a socket: choose a shorter --runtime-directory")
    lock = _open_own_directory(directory)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock)
        _lock(lock, directory)
        opened = ControlSocket(path, lock, _bind(path))
        undo.pop_all()
    return opened


def _open_own_directory(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError("runtime directory", f"{directory}: {error.strerror}") from error
    about = os.fstat(descriptor)
    mode = stat.S_IMODE(about.st_mode)
    why = None
    if about.st_uid != os.getuid():
        why = f"belongs to user {about.st_uid}, not to {os.getuid()}"
    elif mode & 0o077:
        why = f"is open to other users (mode {mode:04o}): chmod 700 {directory}"
    if why is not None:
        os.close(descriptor)
        raise ConfigError("runtime directory", f"{directory} {why}")
    return descriptor


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DaemonRunning(directory, _listening_pid(directory / CONTROL_SOCKET)) from None


def _bind(path: Path) -> socket.socket:
    """Return a bound socket that does not listen yet, so that its mode is right before anyone can connect."""
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise ConfigError("runtime directory", f"{path}: {error.strerror}") from error
    return listener


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        return _identity(path.lstat())
    except OSError:
        return None


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _listening_pid(path: Path) -> int | None:
    """Return the pid of the process that listens at `path`, as the kernel reports it, or None if none listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(str(path))
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
    return int(_CREDENTIALS.unpack(credentials)[0])
