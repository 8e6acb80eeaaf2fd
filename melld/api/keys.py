"""API keys: who may talk to the daemon over TCP.

Owns the comparison, in constant time, of a presented key with the digests of the configured ones; no plain key is kept.
Reads no file itself: the caller passes the means.
"""

import functools
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable

import msgspec

from melld.config import ServerConfig
from melld.errors import ConfigError

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class Keys(msgspec.Struct, frozen=True):
    """The SHA-256 digests of the keys; none means that no key is asked for."""

    digests: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    def open_to(self, presented: str | None) -> bool:
        """Whether `presented` is one of the keys, or none is asked for."""
        return self.client_of(presented) is not None

    def client_of(self, presented: str | None) -> str | None:
        """The name of the key: its number among the keys, empty where none is asked for; None for a wrong one.

        Every key is compared, in constant time.
        """
        if not self.digests:
            return ""
        if presented is None:
            return None
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return f"key{matches.index(True)}" if any(matches) else None


def load_keys(config: ServerConfig, read_file: Callable[[str], str]) -> Keys:
    """The keys of the configuration and of its key file: one a line, plain or `sha256:<hex>`; `#` begins a comment.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    digests = [bytes.fromhex(digest.removeprefix("sha256:")) for digest in config.api_keys]
    if config.api_key_file is not None:
        try:
            lines = read_file(config.api_key_file).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("[server.api_key_file]", f"cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError("[server.api_key_file]", f"{config.api_key_file} holds no key")
        digests.extend(_digest(key) for key in keys)
    return Keys(tuple(dict.fromkeys(digests)))


def refuse_open_listen(config: ServerConfig, keys: Keys) -> None:
    """Refuse to listen beyond loopback without a key, unless the configuration says so in as many words.

    Raises:
        ConfigError: it would be open to the network.
    """
    if keys or config.allow_remote_without_key or _is_loopback(config.host):
        return
    raise ConfigError(
        "[server.host]",
        f"{config.host or 'every address'} is reachable from other machines and there is no API key: "
        "set [server] api_key_file, or allow_remote_without_key = true",
    )


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


def presented_key(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key in `Authorization: Bearer KEY` (OpenAI's clients) or in `x-api-key: KEY` (Anthropic's)."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else x_api_key


def _digest(key: str) -> bytes:
    match = _DIGEST.fullmatch(key)
    return bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
