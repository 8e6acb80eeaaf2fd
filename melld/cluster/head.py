"""Starts the launcher's process: checks with the head of a Ray cluster that it is usable, then loads Ray.

Ray's own errors come late and are long.  Owns the question.  Loads nothing of Ray before it is answered, unless it has
to find the address or certificates.
"""

import functools
import os
import socket
import sys
from pathlib import Path

import grpc
import msgspec
from setproctitle import setproctitle

from melld.cluster.envelopes import HeadFound, LauncherFailed
from melld.engine.wire.frames import encode_frame
from melld.engine.worker.start import die_with_parent
from melld.errors import MelldError

PROBE_S = 20.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call that every Ray head answers, or refuses for want of a token."""


class NoCluster(MelldError):
    """The cluster cannot be used."""


def main(descriptor: int, daemon_pid: int, address: str, run: str, kind: str, allows_open: bool) -> None:
    """Run the launcher.  `descriptor`: its end of a socket pair with the daemon; `run`: names this daemon's actors."""
    die_with_parent(daemon_pid)
    setproctitle("melld: launcher")
    daemon = socket.socket(fileno=descriptor)
    if _token():  # to be sent by Ray, which looks for that at its first import alone
        os.environ["RAY_AUTH_MODE"] = "token"
    try:
        found = check_cluster(address, allows_open=allows_open)
    except NoCluster as error:
        tell(daemon, LauncherFailed(str(error)))
        return
    tell(daemon, HeadFound())
    from melld.cluster.launcher import launch

    launch(daemon, functools.partial(tell, daemon), found, run, kind)


def tell(daemon: socket.socket, message: msgspec.Struct) -> None:
    """Send the daemon a message; exit if the daemon is gone."""
    try:
        daemon.sendall(b"".join(encode_frame(message)))
    except OSError:
        sys.exit(0)


def check_cluster(configured: str, *, allows_open: bool) -> str:
    """Ask the head; return its address.

    Raises:
        NoCluster: it is not there, takes another token, or takes everybody.
    """
    address, token = _address(configured), _token()
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
                f"the Ray cluster at {address} is open: anyone who can reach it can run code on its machines. Start "
                "its nodes with RAY_AUTH_MODE=token, or set [cluster] allow_open_cluster"
            )
        if is_open:
            return address
        if not token:
            raise NoCluster(f"the Ray cluster at {address} requires a token: copy its head's ~/.ray/auth_token here")
        try:
            call(b"", timeout=PROBE_S, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.RpcError as error:
            raise NoCluster(f"the Ray cluster at {address} rejects this token: {error.details()}") from None
    return address


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
