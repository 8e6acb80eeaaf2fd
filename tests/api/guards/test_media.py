"""A client cannot make the daemon fetch what only the daemon can reach; servers and sockets are real."""

import asyncio
import base64
import contextlib
import io
import socket
import wave
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vllm import envs
from vllm import exceptions as errors
from vllm.multimodal.media import connector

from melld.api.guards import media

ADDRESSES = """
127.0.0.1 127.8.8.8 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 100.100.100.200 168.63.129.16
224.0.0.1 255.255.255.255 198.18.0.1 :: ::1 fe80::1 fe80::1%lo fd00:ec2::254 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1
2002:7f00:1:: 64:ff9b::a9fe:a9fe nonsense
"""
INTERNAL = ADDRESSES.split()
PUBLIC = ["8.8.8.8", "151.101.1.69", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
OPEN, CLOSED = "127.0.0.1", "127.0.0.2"
"""Two addresses of this machine: for most tests the one is public, the other is not."""


@pytest.mark.parametrize("host", INTERNAL)
def test_non_public_addresses_are_internal(host: str) -> None:
    """However they are written: metadata services, neighbours, the machine itself."""
    assert media.is_internal(host)


@pytest.mark.parametrize("host", PUBLIC)
def test_public_addresses_are_not_internal(host: str) -> None:
    """Pictures on the web are what this feature is for."""
    assert not media.is_internal(host)


@given(st.ip_addresses())
def test_every_address_gets_a_verdict(address: object) -> None:
    """No address is left undecided, and writing it as IPv6 changes nothing."""
    verdict = media.is_internal(str(address))
    if getattr(address, "version", 6) == 4:
        assert media.is_internal(f"::ffff:{address}") is verdict


class Place:
    """An HTTP server at an address that counts its visitors."""

    def __init__(self) -> None:
        self.asked = 0
        self.url = ""
        self.leads_to: str | None = None

    async def handle(self, _request: web.BaseRequest) -> web.Response:
        self.asked += 1
        response = web.Response(text="secret")
        if self.leads_to is not None:
            response = web.Response(status=302, headers={"Location": self.leads_to})
        response.force_close()  # each request comes by a connection of its own
        return response


@contextlib.asynccontextmanager
async def place_at(host: str) -> AsyncIterator[Place]:
    place = Place()
    async with contextlib.AsyncExitStack() as stack:
        runner = web.ServerRunner(web.Server(place.handle))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, 0)
        await site.start()
        place.url = f"http://{host}:{runner.addresses[0][1]}/x.png"
        yield place


class Rebinding(AbstractResolver):
    """A name server whose answer changes after the first query."""

    def __init__(self) -> None:
        self.answers = [OPEN, CLOSED]

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)]

    async def close(self) -> None:
        pass


async def fetch(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        return await response.text()


async def test_a_redirect_cannot_lead_to_an_internal_address() -> None:
    """A public server cannot send the daemon where its client could not go."""
    async with (
        place_at(OPEN) as public,
        place_at(CLOSED) as secret,
        media.guarded_session(lambda host: host == CLOSED) as session,
    ):
        assert await fetch(session, public.url) == "secret"
        public.leads_to = secret.url
        with pytest.raises(errors.VLLMValidationError, match="not public"):
            await fetch(session, public.url)
        assert secret.asked == 0


async def test_dns_rebinding_cannot_lead_to_an_internal_address() -> None:
    """What the name resolved to when the URL was checked is irrelevant: the address of the connection decides."""
    async with place_at(OPEN) as public, media.guarded_session(lambda host: host == CLOSED) as session:
        session.connector._resolver, session.connector._use_dns_cache = Rebinding(), False
        port = public.url.rsplit(":", 1)[1]
        assert await fetch(session, f"http://rebinding.example:{port}") == "secret"
        with pytest.raises(errors.VLLMValidationError, match="not public"):
            await fetch(session, f"http://rebinding.example:{port}")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"])
async def test_vllm_fetches_nothing_from_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own connector, as requests reach it, refuses at once with a client error and contacts nobody."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with place_at(OPEN) as secret, media.media_from_public_addresses(has_domains=False):
        url = secret.url.replace(OPEN, name)
        with pytest.raises(errors.VLLMError) as refused:
            await connector.MediaConnector().fetch_image_async(url)
        with pytest.raises(errors.VLLMValidationError):
            await asyncio.to_thread(connector.MediaConnector().fetch_image, url)
        assert secret.asked == 0
        assert name[0].isdigit() or "not public" in str(refused.value)


async def test_redirects_cannot_leave_the_allowed_media_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowed domain cannot send the daemon to a domain that is not in `allowed_media_domains`."""
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS")
    async with media.media_from_public_addresses(has_domains=True):
        assert not envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS


def picture(size: tuple[int, int]) -> bytes:
    """Return an 8 x 8 PNG that claims this size."""
    made = io.BytesIO()
    Image.new("RGB", (8, 8)).save(made, "PNG")
    head = b"IHDR" + b"".join(side.to_bytes(4, "big") for side in size) + made.getvalue()[24:29]
    return made.getvalue()[:12] + head + zlib.crc32(head).to_bytes(4, "big") + made.getvalue()[33:]


def sound() -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(3200))
    return made.getvalue()


BROKEN = {
    "too-large-a-picture": ("fetch_image_async", picture((20_000, 20_000))),
    "a-sound-without-data": ("fetch_audio_async", sound().replace(b"data", b"DATA")),
}


@pytest.mark.parametrize(("fetch", "data"), BROKEN.values(), ids=BROKEN.keys())
async def test_undecodable_media_is_a_client_error(fetch: str, data: bytes) -> None:
    """No 500 with a traceback in the log, whatever the decoder raises."""
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    with media.broken_media_refused(), pytest.raises((ValueError, errors.VLLMError)):
        await getattr(connector.MediaConnector(), fetch)(url)
