"""Restricts the media URLs of requests to public addresses, unless the operator allows more, and refuses broken media.

A client names a URL, and the daemon fetches it from behind the firewall, beside services that trust their own machine.
Every address is checked when its socket is created, after name resolution, so DNS rebinding and redirects are covered
too.  A proxy from the environment would resolve names itself, so none is used.
"""

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import aiohttp
from aiohappyeyeballs import AddrInfoType
from vllm.connections import global_http_connection
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_OTHERS = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Internal addresses in public ranges: Azure's host, which hands out secrets."""


@contextlib.asynccontextmanager
async def media_from_public_addresses(*, has_domains: bool) -> AsyncIterator[None]:
    """Make vLLM, in this process, fetch the media of requests from public addresses only.

    `has_domains`: the operator has listed the allowed domains; then redirects are not followed.
    """
    if has_domains:
        follow_no_redirects()
    connection: Any = global_http_connection
    async with guarded_session(is_internal) as session:

        async def get_async_client() -> aiohttp.ClientSession:
            return session

        connection.get_async_client, connection.get_sync_client = get_async_client, _refuse_to_block
        try:
            yield
        finally:
            del connection.get_async_client, connection.get_sync_client


def follow_no_redirects() -> None:
    """Stop vLLM from following redirects of media URLs, unless the operator's environment allows it."""
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")


def guarded_session(is_refused: Callable[[str], bool]) -> aiohttp.ClientSession:
    """Return a client that does not connect to refused addresses."""

    def make_socket(address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, place = address
        if is_refused(str(place[0])):
            raise VLLMValidationError("a media URL leads to an address that is not public")
        return socket.socket(family, kind, protocol)

    # One address after the other, so that a refusal becomes the answer.
    connector = aiohttp.TCPConnector(socket_factory=make_socket, happy_eyeballs_delay=None)
    return aiohttp.ClientSession(connector=connector, trust_env=False)


def _refuse_to_block() -> NoReturn:
    raise VLLMValidationError("media URLs may only be fetched by the event loop")


def is_internal(host: str) -> bool:
    """Return True if an address is loopback, private, link-local, a cloud's own or otherwise not public."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_internal(str(inner))
    return not address.is_global or address.is_multicast or address.is_reserved or address in _OTHERS


@contextlib.contextmanager
def broken_media_refused() -> Iterator[None]:
    """Make vLLM, in this process, report undecodable media as a client error."""
    with contextlib.ExitStack() as undo:
        for kind in (AudioMediaIO, ImageMediaIO, VideoMediaIO):
            undo.callback(setattr, kind, "load_bytes", kind.load_bytes)
            kind.load_bytes = _refusing(kind.load_bytes)
        yield


def _refusing(load: Callable[[Any, bytes], Any]) -> Callable[[Any, bytes], Any]:
    @functools.wraps(load)
    def load_bytes(kind: Any, data: bytes) -> Any:
        try:
            return load(kind, data)
        except (ValueError, VLLMError, ImportError, MemoryError):
            raise
        except Exception as error:  # libsndfile and FFmpeg have errors of their own, Pillow raises any
            raise VLLMValidationError(f"media in the request cannot be decoded: {error}") from error

    return load_bytes
