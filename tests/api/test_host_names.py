"""A daemon without keys serves this machine's users, and no web page that their browsers happen to show."""

import pytest

from tests.api.http_client import CHAT, chat, request
from tests.serve.daemon_process import DaemonProcess


@pytest.mark.parametrize(("method", "path", "body"), [("GET", "/status", None), ("POST", CHAT, chat())])
def test_a_rebound_name_is_refused_without_a_key(daemon: DaemonProcess, method: str, path: str, body: object) -> None:
    """No web page spends your GPUs or reads what they do."""
    refused = request(daemon.url, method, path, body, {"Host": "evil.example:8000"})
    assert (refused.status, refused.json()["error"]["code"]) == (403, "unknown_host")
    assert request(daemon.url, method, path, body, {"Host": "localhost:8000"}).status == 200


def test_with_a_key_the_host_name_does_not_matter(strict: DaemonProcess) -> None:
    """Behind a proxy the daemon has the proxy's name: the key decides who may come in."""
    assert request(strict.url, "GET", "/status", None, {"Host": "llm.example"}).status == 200
