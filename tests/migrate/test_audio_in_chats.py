"""Audio in real chats: any worker takes it, and it goes along wherever its request goes."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.listening_model import make_listening_model, spoken
from tests.migrate.live import Operator, Stream, linked_workers
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Two workers of an audio chat model."""
    model = tmp_path_factory.mktemp("models") / "listening"
    make_listening_model(model)
    with linked_workers(model) as process:
        yield process


def about(seed: int, salt: str = "unmoved") -> dict[str, Any]:
    """Return a question about a sound."""
    content = [{"type": "text", "text": "What is this?"}, spoken(seed)]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 80, "temperature": 0, "ignore_eos": True, "cache_salt": salt}


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_request_with_audio_moves(daemon: DaemonProcess, operator: Operator, via: str) -> None:
    """By its blocks, and by its tokens, for which the destination has to encode it too."""
    unmoved, other = Stream(daemon, about(3)).result(), Stream(daemon, about(4)).result()
    assert unmoved.error is None
    assert unmoved.choices[0].text != other.choices[0].text
    with slowed(daemon.faults):
        stream = Stream(daemon, about(3, via))
        stream.wait_chunks(12)
        [report] = operator.move(stream, via)
    assert (report["outcome"], report["via"]) == ("committed", via)
    assert stream.result() == unmoved


def test_a_request_with_audio_survives_its_worker(daemon: DaemonProcess, operator: Operator) -> None:
    """kill -9 in mid-answer: the next worker gets the sound along with the tokens."""
    unmoved = Stream(daemon, about(5)).result()
    with slowed(daemon.faults):
        stream = Stream(daemon, about(5, "killed"))
        stream.wait_chunks(12)
        [one] = operator.requests_of(stream)
        [pid] = [worker["pid"] for worker in operator.status()["workers"] if worker["worker"] == one["worker"]]
        os.kill(pid, signal.SIGKILL)
    assert stream.result() == unmoved
    assert unmoved.error is None
