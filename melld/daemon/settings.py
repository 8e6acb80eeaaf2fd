"""The daemon's configuration and API keys, read at the start and at each reload.

Owns which settings a reload changes, and the rule that the listening sockets are checked again at each.  A reload that
fails changes nothing.  Files are read in a thread.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from melld.api.connections.reach import address_of, is_loopback, refuse_open_listen, refuse_open_sockets
from melld.api.keys import Keys, load_keys
from melld.config import Config
from melld.config_server import ServerConfig
from melld.control.messages import Reloaded
from melld.daemon.preflight import bind
from melld.daemon.systemd import KEYS_CREDENTIAL, Supervision
from melld.errors import ConfigError

if TYPE_CHECKING:
    from melld.daemon.models import Models

RELOADABLE = (
    "server.api_keys",
    "server.clients",
    "server.api_key_file",
    "server.drain_s",
    "server.allowed_origins",
    "server.allowed_methods",
    "server.allowed_headers",
    "server.allow_credentials",
)


class Settings:
    """The current configuration and keys, and the listening sockets."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        supervision: Supervision,
        inherited: list[socket.socket] | None = None,
        *,
        is_adopted: bool = False,
    ) -> None:
        """Read the keys, and open the sockets, or take those of the service manager or of an earlier daemon.

        `is_adopted`: which had them from the service manager.

        Raises:
            ConfigError: the keys cannot be read, or the API would be open to the network.
            CannotListen: the address is taken.
        """
        self.config = config
        self._read = read
        self._credential = supervision.credential(KEYS_CREDENTIAL)
        self.keys = load_keys(config.server, self._credential)
        adopted = supervision.listening_sockets("api")
        self.is_adopted = bool(adopted) or is_adopted
        if not self.is_adopted:
            refuse_open_listen(config.server, self.keys)
        self.listeners = adopted or inherited or [bind(config.server.host, config.server.port)]
        self.changing = asyncio.Lock()
        try:
            refuse_open_sockets(self.listeners, self.keys, allowed=config.server.allow_remote_without_key)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets."""
        for listener in self.listeners:
            listener.close()

    def client_names(self) -> set[str]:
        """Return the names that the configuration gives to keys."""
        return {client.name for client in self.config.server.clients}

    async def reload(self, models: "Models | None" = None) -> Reloaded:
        """Read everything again and apply what a running daemon can change; `models`: if models can come and go.

        Raises:
            ConfigError: the new settings cannot be used; the old ones stay.
        """
        async with self.changing:
            new, keys = await asyncio.to_thread(self._read_again)
            self._refuse_open_sockets(new, keys)
            if models is None or not new.models or new.models == self.config.models:
                return self._apply(new, keys)
            served = msgspec.structs.replace(self.config, model=new.models[0], models=new.models)
            prepared = await models.prepare(served)
            if models.is_alone and not prepared:  # a model that stays alone follows no settings
                return self._apply(new, keys)
            done = models.carry_out(served, prepared)
            reloaded = self._apply(new, keys, (*RELOADABLE, "models"))
            self.config = msgspec.structs.replace(self.config, model=new.models[0], models=new.models)
            return msgspec.structs.replace(reloaded, models_added=done.models_added, models_removed=done.models_removed)

    def remarks(self) -> list[str]:
        """Return a warning for the operator if the configured address is not used."""
        server = self.config.server
        if not self.is_adopted or (server.host, server.port) == (ServerConfig().host, ServerConfig().port):
            return []
        if any(_is_at(listener, server.host, server.port) for listener in self.listeners):
            return []
        really = ", ".join(map(address_of, self.listeners))
        return [f"[server] host and port are ignored: the service manager's socket unit listens on {really}"]

    def _read_again(self) -> tuple[Config, Keys]:
        new = self._read()
        keys = load_keys(new.server, self._credential)
        if not self.is_adopted:
            refuse_open_listen(new.server, keys)
        return new, keys

    def _refuse_open_sockets(self, new: Config, keys: Keys) -> None:
        # The address and this permission change only at a start: until then the keys must suffice for the old ones too.
        both_allow = self.config.server.allow_remote_without_key and new.server.allow_remote_without_key
        refuse_open_sockets(self.listeners, keys, allowed=both_allow)

    def _apply(self, new: Config, keys: Keys, reloadable: Collection[str] = RELOADABLE) -> Reloaded:
        changed = changed_keys(self.config, new)
        applied = [key for key in changed if key in reloadable]
        before, after = set(self.keys.clients), set(keys.clients)
        self.keys = keys
        server = msgspec.structs.replace(
            self.config.server, **{key.split(".")[1]: changed[key] for key in applied if key in RELOADABLE}
        )
        self.config = msgspec.structs.replace(self.config, server=server)
        return Reloaded(
            applied=tuple(applied),
            needs_restart=tuple(key for key in changed if key not in reloadable),
            keys_added=len(after - before),
            keys_removed=len(before - after),
        )


def changed_keys(old: Config, new: Config) -> dict[str, Any]:
    """Return the new value of every key that differs, by `table.key`."""
    before, after = msgspec.to_builtins(old), msgspec.to_builtins(new)
    models = {"models": new.models} if new.models != old.models else {}
    without = {"models", "model"} if new.models else {"models"}
    return models | {
        f"{table}.{key}": getattr(getattr(new, table), key)
        for table in after
        if table not in without
        for key in after[table]
        if after[table][key] != before[table].get(key)
    }


def in_words(reloaded: Reloaded) -> str:
    """Say what a reload has changed, for the log: how many API keys, never which."""
    found = list(reloaded.applied)
    for what, names in (("added", reloaded.models_added), ("removed", reloaded.models_removed)):
        if names:
            found.append(f"{what} {', '.join(names)}")
    if reloaded.keys_added or reloaded.keys_removed:
        found.append(f"API keys ({reloaded.keys_added} added, {reloaded.keys_removed} removed)")
    waits = f"; at the next start: {', '.join(reloaded.needs_restart)}" if reloaded.needs_restart else ""
    return f"{', '.join(found) or 'no changes'}{waits}"


def _is_at(listener: socket.socket, host: str, port: int) -> bool:
    """Return True if it listens on `host` (a name other than localhost is not looked up) and `port` (0: any)."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    its_host, its_port = listener.getsockname()[:2]
    if port not in (0, its_port):
        return False
    if host == "localhost":
        return is_loopback(its_host)
    try:
        return ipaddress.ip_address(host or "0.0.0.0") == ipaddress.ip_address(its_host)  # noqa: S104  compared alone
    except ValueError:
        return False
