"""API keys: reads them, and checks the keys that clients present.

Owns the comparison, in constant time, of a presented key with the digests of the configured ones, and the files that
hold them.  Keeps no plain key and names none in an error.
"""

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

import msgspec

from melld.config_server import ServerConfig
from melld.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
_PREFIX = "sha256:"
_DIGEST = re.compile(f"{_PREFIX}([0-9a-f]{{64}})", re.IGNORECASE)


class Client(msgspec.Struct, frozen=True):
    """A client, identified by its key."""

    name: str = ""
    """The configured name, or its key's number; empty if no key is needed."""
    priority: int | None = None
    """The priority of requests that set none, if configured for this client."""
    min_priority: int | None = None
    """The most urgent priority that it may set, if configured for this client."""
    owner: bytes = b""
    """Owner of its stored responses: its name, or its key's digest, as numbers change with the file."""


class Keys(msgspec.Struct, frozen=True):
    """The clients by the SHA-256 digests of their keys; without any, no key is needed."""

    clients: dict[bytes, Client] = {}

    def __bool__(self) -> bool:
        return bool(self.clients)

    def count(self) -> int:
        """Return how many clients there are."""
        return len({client.name for client in self.clients.values()})

    def owners(self) -> set[bytes]:
        """Return the owners of stored responses."""
        return {client.owner for client in self.clients.values()} or {Client().owner}

    def client_of(self, presented: str | None) -> Client | None:
        """Return the client for this key, an anonymous one if none is required, or None for a wrong key.

        Every key is compared, in constant time.
        """
        if not self.clients:
            return Client()
        if presented is None:
            return None
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        matches = [client for known, client in self.clients.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None


def load_keys(config: ServerConfig, credential: Path | None = None) -> Keys:
    """Read the keys of the configuration, of its key file and of the service manager's optional credential.

    Raises:
        ConfigError: a file cannot be read or holds a bad line, or the key file holds no key.
    """
    digests = [_digest(digest) for digest in config.api_keys]
    if config.api_key_file is not None:
        found = parse_keys(_read(Path(config.api_key_file)), config.api_key_file)
        if not found:
            raise ConfigError("[server.api_key_file]", f"{config.api_key_file} contains no key")
        digests += found
    if credential is not None:
        digests += parse_keys(_read(credential, may_lack=True), str(credential))
    clients = {digest: Client(f"key{number}", owner=digest) for number, digest in enumerate(dict.fromkeys(digests))}
    named = {
        _digest(one.key): Client(one.name, one.priority, one.min_priority, one.name.encode()) for one in config.clients
    }
    return Keys(clients | named)


def parse_keys(text: str, where: str) -> list[bytes]:
    """Return the digests of the keys in `text`: one per line, plain or `sha256:<hex>`; `#` starts a comment.

    Raises:
        ConfigError: a line is a broken digest, or holds characters that no client can send.
    """
    digests = []
    for number, line in enumerate(text.split("\n"), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if key.lower().startswith(_PREFIX) and not _DIGEST.fullmatch(key):
            raise ConfigError(f"{where}, line {number}", f"{_PREFIX} must be followed by 64 hex digits")
        if not key.isprintable():
            raise ConfigError(f"{where}, line {number}", "the key contains a control or invisible character")
        digests.append(_digest(key))
    return digests


def _read(path: Path, *, may_lack: bool = False) -> str:
    """Read a small regular file; refuse anything else, such as a FIFO, which could block for ever."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(str(path), "the keys cannot be read: not a regular file")
            if about.st_size > MAX_FILE_BYTES:
                raise ConfigError(str(path), f"the keys cannot be read: larger than {MAX_FILE_BYTES} bytes")
            return file.read().decode("utf-8-sig")
    except OSError as error:
        if may_lack and isinstance(error, FileNotFoundError):
            return ""
        raise ConfigError(str(path), f"the keys cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(str(path), "the keys cannot be read: not UTF-8 text") from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def presented_key(authorization: str | None, x_api_key: str | None) -> str | None:
    """Return the key in `Authorization: Bearer KEY` (OpenAI's clients) or in `x-api-key: KEY` (Anthropic's)."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else x_api_key


def _digest(key: str) -> bytes:
    match = _DIGEST.fullmatch(key)
    return bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()
