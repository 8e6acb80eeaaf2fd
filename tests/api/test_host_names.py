"""A daemon without keys serves the people on its machine, and no web page that their browsers happen to show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.api.reach import names_this_machine
from tests.api.http_client import CHAT, chat, request
from tests.serve.daemon_process import DaemonProcess

OURS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "10.1.2.3:80",
    "a.localhost:1",
    None,
]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "::1",
    "[evil]",
    "2130706433",
]


@pytest.mark.parametrize("host", OURS)
def test_localhost_and_addresses_are_this_machine(host: str | None) -> None:
    """Everybody who means this machine is let in, also a client of HTTP/1.0 that names nothing."""
    assert names_this_machine(host)


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_not(host: str) -> None:
    """However much a name looks like an address."""
    assert not names_this_machine(host)


@given(st.text())
def test_any_text_gets_an_answer(host: str) -> None:
    """The header is anybody's to write."""
    assert names_this_machine(host) in (True, False)


@given(st.ip_addresses(v=4), st.integers(0, 65535))
def test_every_address_is_taken(address: object, port: int) -> None:
    """A page cannot have an address for its name without being served from there."""
    assert names_this_machine(f"{address}:{port}")


@pytest.mark.parametrize(("method", "path", "body"), [("GET", "/status", None), ("POST", CHAT, chat())])
def test_a_rebound_name_is_refused_without_a_key(daemon: DaemonProcess, method: str, path: str, body: object) -> None:
    """Nobody's web page spends your GPUs, or reads what they do."""
    refused = request(daemon.url, method, path, body, {"Host": "evil.example:8000"})
    assert (refused.status, refused.json()["error"]["code"]) == (403, "unknown_host")
    assert request(daemon.url, method, path, body, {"Host": "localhost:8000"}).status == 200


def test_with_a_key_the_name_does_not_matter(strict: DaemonProcess) -> None:
    """Behind a proxy the daemon has whatever name the proxy has: the key says who may come in."""
    assert request(strict.url, "GET", "/status", None, {"Host": "llm.example"}).status == 200
