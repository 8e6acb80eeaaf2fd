"""Reachable from other machines means a key is needed: judged by the sockets that listen, not by the configuration."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.api.connections.reach import (
    address_of,
    is_local,
    names_this_machine,
    refuse_open_listen,
    refuse_open_sockets,
)
from melld.api.keys import Client, Keys
from melld.config_server import ServerConfig
from melld.errors import ConfigError

ANYWHERE = "0.0.0.0"  # noqa: S104  never listened on without a key: that is what is tested


@contextlib.contextmanager
def bound(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            pytest.skip(f"this machine has no {address}: {error}")
        yield listener


REMOTE = [(socket.AF_INET, (ANYWHERE, 0)), (socket.AF_INET6, ("::", 0)), (socket.AF_INET6, (f"::ffff:{ANYWHERE}", 0))]
LOCAL = [
    (socket.AF_INET, ("127.0.0.1", 0)),
    (socket.AF_INET, ("127.8.8.8", 0)),
    (socket.AF_INET6, ("::1", 0)),
    (socket.AF_INET6, ("::ffff:127.0.0.1", 0)),
    (socket.AF_UNIX, "\0melld-test-reach"),
]


@pytest.mark.parametrize(("family", "address"), REMOTE)
def test_a_socket_open_to_the_network_needs_a_key(family: int, address: object) -> None:
    """It may come from a socket unit or predate a reload: nobody serves the whole network by accident."""
    with bound(family, address) as listener, bound(socket.AF_INET, ("127.0.0.1", 0)) as other:
        assert not is_local(listener)
        with pytest.raises(ConfigError, match="reachable from other machines") as refused:
            refuse_open_sockets([other, listener], Keys(), allowed=False)
        assert address_of(listener) in str(refused.value)
        refuse_open_sockets([other, listener], Keys({b"digest": Client()}), allowed=False)
        refuse_open_sockets([other, listener], Keys(), allowed=True)


@pytest.mark.parametrize(("family", "address"), LOCAL)
def test_a_socket_on_this_machine_alone_needs_no_key(family: int, address: object) -> None:
    """The first start asks for nothing, however loopback is written."""
    with bound(family, address) as listener:
        refuse_open_sockets([listener], Keys(), allowed=False)


@pytest.mark.parametrize(
    ("family", "address", "shown"),
    [
        (socket.AF_INET, ("127.0.0.1", 0), "127.0.0.1:{port}"),
        (socket.AF_INET6, ("::1", 0), "[::1]:{port}"),
        (socket.AF_UNIX, "\0melld-test-reach", "b'\\x00melld-test-reach'"),
    ],
)
def test_an_address_is_shown_as_people_write_it(family: int, address: object, shown: str) -> None:
    """`melld status` and every refusal print it ready to paste."""
    with bound(family, address) as listener:
        assert address_of(listener) == shown.format(port=listener.getsockname()[1])


def test_a_socket_file_is_shown_by_its_path(tmp_path: Path) -> None:
    """Unknown kinds of socket count as open to all."""
    with bound(socket.AF_UNIX, str(tmp_path / "s")) as listener:
        assert address_of(listener) == str(tmp_path / "s")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as strange:
        assert not is_local(strange)
        assert address_of(strange) == "(0, 0)"


@pytest.mark.parametrize("host", [ANYWHERE, "::", "", "192.168.1.5", "example.org"])
def test_an_open_host_is_refused_before_anything_listens(host: str) -> None:
    """`melld check-config` reports it too."""
    with pytest.raises(ConfigError, match=r"^\[server.host\].*API key"):
        refuse_open_listen(ServerConfig(host=host), Keys())
    refuse_open_listen(ServerConfig(host=host), Keys({b"digest": Client()}))
    refuse_open_listen(ServerConfig(host=host, allow_remote_without_key=True), Keys())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost"])
def test_a_host_on_loopback_needs_no_key(host: str) -> None:
    """The first start asks for nothing."""
    refuse_open_listen(ServerConfig(host=host), Keys())


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
    """Everybody who means this machine is let in, including an HTTP/1.0 client that sends no host."""
    assert names_this_machine(host)


@pytest.mark.parametrize("host", OTHERS)
def test_other_host_names_are_not_this_machine(host: str) -> None:
    """However much a name looks like an address."""
    assert not names_this_machine(host)


@given(st.text())
def test_any_host_header_gets_an_answer(host: str) -> None:
    """Clients control the header."""
    assert names_this_machine(host) in (True, False)


@given(st.ip_addresses(v=4), st.integers(0, 65535))
def test_every_address_is_accepted_as_a_host(address: object, port: int) -> None:
    """A page cannot have an address as its host without being served from there."""
    assert names_this_machine(f"{address}:{port}")
