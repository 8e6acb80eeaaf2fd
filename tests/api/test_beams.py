"""Beam search, which vLLM carries out over requests of its own."""

import pytest

from tests.api.http_client import CHAT, COMPLETIONS, chat, completion, request
from tests.serve.daemon_process import DaemonProcess


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_beams_are_searched(strict: DaemonProcess, path: str) -> None:
    """A call gets as many answers as it asks for."""
    asked = (chat if path == CHAT else completion)(use_beam_search=True, max_tokens=8, n=2)
    answer = request(strict.url, "POST", path, asked)
    assert answer.status == 200, answer.body
    assert len(answer.json()["choices"]) == 2
