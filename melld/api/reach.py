"""Who can reach the API: judged by the sockets that listen, and by the names that requests ask for.

Owns the rule that what other machines reach asks for a key, and the guard against DNS rebinding where there is none.
"""

import functools
import ipaddress
import socket
from collections.abc import Iterable

from melld.api.keys import Keys
from melld.config import ServerConfig
from melld.errors import ConfigError


def refuse_open_listen(config: ServerConfig, keys: Keys) -> None:
    """Refuse a `[server] host` beyond loopback without a key, unless the configuration says so in as many words.

    Raises:
        ConfigError: it would be open to the network.
    """
    if not (keys or config.allow_remote_without_key or is_loopback(config.host)):
        raise _is_open(config.host or "every address")


def refuse_open_sockets(listeners: Iterable[socket.socket], keys: Keys, *, allowed: bool) -> None:
    """Refuse the same of sockets that are open already, whatever the configuration says of their address.

    Raises:
        ConfigError: one of them is open to the network.
    """
    for listener in listeners:
        if not (keys or allowed or is_local(listener)):
            raise _is_open(address_of(listener))


def is_local(listener: socket.socket) -> bool:
    """Return whether this machine alone can connect; of a kind of socket that is not known here nobody can tell."""
    if listener.family == socket.AF_UNIX:
        return True
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return is_loopback(listener.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address, also one of IPv4 written as IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def address_of(listener: socket.socket) -> str:
    """Return where it listens, as people write it."""
    name = listener.getsockname()
    if listener.family == socket.AF_INET6:
        return f"[{name[0]}]:{name[1]}"
    if listener.family == socket.AF_INET:
        return f"{name[0]}:{name[1]}"
    return name if isinstance(name, str) else repr(name)


@functools.lru_cache(maxsize=128)  # most clients name the same host in every request
def names_this_machine(host: str | None) -> bool:
    """Whether a `Host` header is localhost or an address, as of somebody who means this machine.

    A web page whose own name was made to point here (DNS rebinding) has its reader's browser send that name instead.
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


def _is_open(where: str) -> ConfigError:
    return ConfigError(
        "[server.host]",
        f"{where} is reachable from other machines and there is no API key: "
        "set [server] api_key_file, or start with allow_remote_without_key = true",
    )
