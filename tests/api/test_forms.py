"""Multipart forms, in which clients send audio: parsed exactly, or refused before any work."""

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.api.answers import Refusal
from melld.api.guards.body import MAX_FIELDS, parse_form
from tests.api.http_client import MODEL, head, request, talk
from tests.serve.daemon_process import DaemonProcess

TRANSCRIPTIONS = "/v1/audio/transcriptions"
NAMES = st.from_regex(r"\A[a-eg-z_]{1,8}(\[\])?\Z")


def form(words: dict[str, Any], file: bytes | None, name: str = "a.wav") -> tuple[str, bytes]:
    """Return the content type and body as a client sends them."""
    files = [
        (key, (None, one)) for key, value in words.items() for one in (value if isinstance(value, list) else [value])
    ]
    files += [] if file is None else [("file", (name, file))]
    sent = httpx.Request("POST", "http://x", files=files)
    return sent.headers["Content-Type"], sent.read()


@given(words=st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]), min_size=1)), heard=st.binary())
def test_a_form_is_parsed_as_its_client_wrote_it(words: dict[str, str], heard: bytes) -> None:
    """Every word and byte survives; a name that ends in brackets holds a list."""
    fields = asyncio.run(parse_form(*form(words, heard)))
    assert fields.pop("file").file.read() == heard
    assert fields == {name: [word] if name.endswith("[]") else word for name, word in words.items()}


def test_a_form_in_several_pieces_is_read_whole() -> None:
    """With several values for each list."""
    heard = bytes(range(256)) * 20_000
    fields = asyncio.run(parse_form(*form({"a[]": ["1", "2"]}, heard)))
    assert fields.pop("file").file.read() == heard
    assert fields == {"a[]": ["1", "2"]}


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("multipart/form-data", b"", "boundary"),
        ("multipart/form-data; boundary=x", b"something else", "Invalid"),
        (*form({"file": "a.wav"}, None), "file must contain the audio"),
        (*form({"model": MODEL}, None), "file must contain the audio"),
        (*form({f"f{number}": "x" for number in range(MAX_FIELDS + 1)}, b""), "Too many fields"),
    ],
    ids=["no boundary", "no form", "a text as file", "no file", "too many fields"],
)
def test_a_body_that_is_no_form_with_a_file_is_refused(kind: str, body: bytes, words: str) -> None:
    with pytest.raises(Refusal, match=words) as refused:
        asyncio.run(parse_form(kind, body))
    assert refused.value.answer.status == 400


def test_audio_is_refused_by_a_model_without_audio_input(daemon: DaemonProcess) -> None:
    """By name, not as an unknown path."""
    kind, body = form({"model": MODEL}, b"RIFF")
    answer = request(daemon.url, "POST", TRANSCRIPTIONS, body, {"Content-Type": kind})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "model_not_supported")
    assert "Transcriptions" in answer.json()["error"]["message"]


def test_an_oversized_or_malformed_form_costs_nothing(daemon: DaemonProcess) -> None:
    """It is not even read."""
    answer = request(daemon.url, "POST", TRANSCRIPTIONS, {"model": MODEL})
    assert (answer.status, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    sent = head(f"Content-Length: {26 << 20}", path=TRANSCRIPTIONS)
    sent = sent.replace(b"application/json", b"multipart/form-data; boundary=x")
    assert b" 413 " in talk(daemon.url, sent).splitlines()[0]


def test_a_web_page_s_form_is_refused_without_a_key(daemon: DaemonProcess) -> None:
    """A browser would send it without a preflight; with a key it would have asked first."""
    kind, body = form({"model": MODEL}, b"RIFF")
    of_page = {"Content-Type": kind, "Origin": "https://example.org"}
    answer = httpx.post(daemon.url + TRANSCRIPTIONS, content=body, headers=of_page)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
    assert request(daemon.url, "POST", TRANSCRIPTIONS, body, of_page).status == 400
