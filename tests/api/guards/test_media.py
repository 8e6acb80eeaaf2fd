"""A client cannot have the daemon fetch what only the daemon can reach; the servers and sockets are real."""

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
def test_what_is_not_for_everybody_is_internal(host: str) -> None:
    """However it is written: metadata services, neighbours, the machine itself."""
    assert media.is_internal(host)


@pytest.mark.parametrize("host", PUBLIC)
def test_what_everybody_can_reach_is_not(host: str) -> None:
    """Pictures on the web are what this is for."""
    assert not media.is_internal(host)


@given(st.ip_addresses())
def test_every_address_is_judged(address: object) -> None:
    """There is none that it cannot tell of, and none differs when it is written as IPv6."""
    verdict = media.is_internal(str(address))
    if getattr(address, "version", 6) == 4:
        assert media.is_internal(f"::ffff:{address}") is verdict


class Place:
    """An HTTP server at an address, that counts who comes."""

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
    """A name server whose answer changes after the first question."""

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


async def test_a_redirect_does_not_lead_inside() -> None:
    """A public server cannot send the daemon where its client could not."""
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


async def test_a_name_that_changes_its_mind_does_not_lead_inside() -> None:
    """What was resolved when the URL was looked at counts for nothing: the address of the connection does."""
    async with place_at(OPEN) as public, media.guarded_session(lambda host: host == CLOSED) as session:
        session.connector._resolver, session.connector._use_dns_cache = Rebinding(), False
        port = public.url.rsplit(":", 1)[1]
        assert await fetch(session, f"http://rebinding.example:{port}") == "secret"
        with pytest.raises(errors.VLLMValidationError, match="not public"):
            await fetch(session, f"http://rebinding.example:{port}")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"])
async def test_vllm_fetches_nothing_from_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own connector, as requests reach it: refused at once, as the client's mistake, and nobody is asked."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with place_at(OPEN) as secret, media.media_from_public_addresses(has_domains=False):
        url = secret.url.replace(OPEN, name)
        with pytest.raises(errors.VLLMError) as refused:
            await connector.MediaConnector().fetch_image_async(url)
        with pytest.raises(errors.VLLMValidationError):
            await asyncio.to_thread(connector.MediaConnector().fetch_image, url)
        assert secret.asked == 0
        assert name[0].isdigit() or "not public" in str(refused.value)


async def test_domains_that_the_operator_has_named_are_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """`allowed_media_domains` means these: one of them cannot send the daemon to another."""
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS")
    async with media.media_from_public_addresses(has_domains=True):
        assert not envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS


def picture(size: tuple[int, int]) -> bytes:
    """A PNG of 8 x 8 that says it is of this size."""
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
async def test_media_that_cannot_be_decoded_are_a_clients_mistake(fetch: str, data: bytes) -> None:
    """No 500 with a traceback in the log, as for a bug: whatever kind of error the libraries raise."""
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    with media.broken_media_refused(), pytest.raises((ValueError, errors.VLLMError)):
        await getattr(connector.MediaConnector(), fetch)(url)
