"""Checks who can reach the API: by the sockets that listen, and by the host names and keys in requests.

Owns the rule that an API reachable from other machines needs a key, and the guard against DNS rebinding without one.
"""

import functools
import ipaddress
import socket
from collections.abc import Iterable, Mapping

from melld.api.answers import Refusal
from melld.api.connections.origins import is_allowed
from melld.api.keys import Client, Keys, presented_key
from melld.config_server import ServerConfig
from melld.errors import ConfigError


def refuse_open_listen(config: ServerConfig, keys: Keys) -> None:
    """Refuse a `[server] host` beyond loopback without a key, unless the configuration allows it explicitly.

    Raises:
        ConfigError: the API would be open to the network.
    """
    if not (keys or config.allow_remote_without_key or is_loopback(config.host)):
        raise _is_open(config.host or "every address")


def refuse_open_sockets(listeners: Iterable[socket.socket], keys: Keys, *, allowed: bool) -> None:
    """Refuse open sockets beyond loopback without a key, whatever address is configured.

    Raises:
        ConfigError: a socket is open to the network.
    """
    for listener in listeners:
        if not (keys or allowed or is_local(listener)):
            raise _is_open(address_of(listener))


def is_local(listener: socket.socket) -> bool:
    """Return True if only this machine can connect; False for unknown kinds of sockets."""
    if listener.family == socket.AF_UNIX:
        return True
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return is_loopback(listener.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return True if `host` is localhost or a loopback address, including IPv4 written as IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def address_of(listener: socket.socket) -> str:
    """Return the socket's address as people write it."""
    name = listener.getsockname()
    if listener.family == socket.AF_INET6:
        return f"[{name[0]}]:{name[1]}"
    if listener.family == socket.AF_INET:
        return f"{name[0]}:{name[1]}"
    return name if isinstance(name, str) else repr(name)


@functools.lru_cache(maxsize=128)  # most clients name the same host in every request
def names_this_machine(host: str | None) -> bool:
    """Return True if a `Host` header is localhost or an address.

    With DNS rebinding, a web page's name points here, and its reader's browser sends that name.
    """
    name = (host or "localhost").strip().lower()
    bracketed = name.startswith("[")
    name = name[1:].partition("]")[0] if bracketed else name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).version == (6 if bracketed else 4)
    except ValueError:
        return False


def client_of(headers: Mapping[str, str], keys: Keys, *, is_open: bool) -> Client:
    """Return who sends a request with these headers; `is_open`: anybody may, from other machines too.

    Raises:
        Refusal: 401 for a missing or wrong key; 403, without keys, for the name by which a web page could get here.
    """
    if not (keys or is_open or names_this_machine(headers.get("Host"))):
        message = "without an API key, this server only accepts requests addressed to localhost or to an IP address"
        raise Refusal(403, message, code="unknown_host")
    client = keys.client_of(presented_key(headers.get("Authorization"), headers.get("x-api-key")))
    if client is None:
        asked = {"WWW-Authenticate": "Bearer"}
        raise Refusal(401, "a valid API key is required", code="invalid_api_key", headers=asked)
    return client


def check_sender_of_form(headers: Mapping[str, str], config: ServerConfig) -> None:
    """Refuse a form that a page may have sent, unless its origin is allowed.

    For a form, unlike for JSON or a key, its browser asks nobody.

    Raises:
        Refusal: 403.
    """
    if "Origin" not in headers or is_allowed(headers, config):
        return
    if presented_key(headers.get("Authorization"), headers.get("x-api-key")) is None:
        raise Refusal(403, "a web page may only send a form with an API key", code="cross_origin")


def _is_open(where: str) -> ConfigError:
    return ConfigError(
        "[server.host]",
        f"{where} is reachable from other machines but has no API key: "
        "set [server] api_key_file, or allow_remote_without_key = true",
    )
