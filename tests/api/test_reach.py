"""What other machines can reach asks for a key: judged by what listens, not by what was meant to."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from melld.api.keys import Keys
from melld.api.reach import address_of, is_local, refuse_open_listen, refuse_open_sockets
from melld.config import ServerConfig
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
def test_a_socket_that_is_open_to_the_network_needs_a_key(family: int, address: object) -> None:
    """It may come from a socket unit, or from before a reload: nobody serves the whole network by accident."""
    with bound(family, address) as listener, bound(socket.AF_INET, ("127.0.0.1", 0)) as other:
        assert not is_local(listener)
        with pytest.raises(ConfigError, match="reachable from other machines") as refused:
            refuse_open_sockets([other, listener], Keys(), allowed=False)
        assert address_of(listener) in str(refused.value)
        refuse_open_sockets([other, listener], Keys((b"digest",)), allowed=False)
        refuse_open_sockets([other, listener], Keys(), allowed=True)


@pytest.mark.parametrize(("family", "address"), LOCAL)
def test_what_this_machine_alone_can_reach_needs_none(family: int, address: object) -> None:
    """The first start asks for nothing, however loopback is written."""
    with bound(family, address) as listener:
        refuse_open_sockets([listener], Keys(), allowed=False)


@pytest.mark.parametrize("host", [ANYWHERE, "::", "", "192.168.1.5", "example.org"])
def test_an_open_host_is_refused_before_anything_listens(host: str) -> None:
    """`melld check-config` says it too."""
    with pytest.raises(ConfigError, match="API key"):
        refuse_open_listen(ServerConfig(host=host), Keys())
    refuse_open_listen(ServerConfig(host=host), Keys((b"digest",)))
    refuse_open_listen(ServerConfig(host=host, allow_remote_without_key=True), Keys())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost"])
def test_a_host_on_loopback_needs_no_key(host: str) -> None:
    """The first start asks for nothing."""
    refuse_open_listen(ServerConfig(host=host), Keys())
