"""Audio in real requests: any worker transcribes it, and it goes along wherever its request goes."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from melld.control.client import ControlRefused
from tests.audio_model import make_hearing_model, sound
from tests.migrate.live import PATIENCE_S, Operator
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

GREEDY = {"model": "demo", "language": "en", "max_completion_tokens": "80"}
SEEDED = GREEDY | {"temperature": "0.9", "seed": "7"}
SPREAD = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf", "--kv-bytes", "32MiB")
SHORT, LONG = 2.0, 8.0
"""Seconds of audio: a request, and three, one after the other."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Two workers of an audio model."""
    model = tmp_path_factory.mktemp("models") / "hearing"
    make_hearing_model(model)
    with DaemonProcess(model, "--device", "cpu:2", *SPREAD, harmable=True) as process:
        yield process.wait_ready()


class Hearing(threading.Thread):
    """One transcription, streamed and read as it comes."""

    def __init__(self, daemon: DaemonProcess, heard: bytes, fields: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.id, self.text, self.chunks = "", "", 0
        self._came = threading.Condition()
        self._asked = {"data": fields | {"stream": "true"}, "files": {"file": ("a.wav", heard)}, "timeout": PATIENCE_S}
        self._url = f"{daemon.url}/v1/audio/transcriptions"
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, **self._asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))
        with self._came:
            self._came.notify_all()

    def _take(self, chunk: dict[str, Any]) -> None:
        with self._came:
            self.id = chunk["id"]
            self.text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            self.chunks += 1
            self._came.notify_all()

    def wait_chunks(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: self.chunks >= count or not self.is_alive(), PATIENCE_S)

    def result(self) -> str:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.text


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        pytest.param(GREEDY, SHORT, id="greedy, short"),
        pytest.param(SEEDED, SHORT, id="seeded, short", marks=pytest.mark.long),
        pytest.param(GREEDY, LONG, id="greedy, long", marks=pytest.mark.long),
        pytest.param(SEEDED, LONG, id="seeded, long", marks=pytest.mark.long),
    ],
)
def test_a_transcription_moves_by_its_tokens(
    daemon: DaemonProcess, operator: Operator, fields: dict[str, Any], seconds: float
) -> None:
    """The destination encodes the audio again; KV is not copied, as it depends on the encoder's output as well."""
    heard = sound(1, seconds)
    unmoved = Hearing(daemon, heard, fields).result()
    with slowed(daemon.faults):
        hearing = Hearing(daemon, heard, fields)
        hearing.wait_chunks(12)
        with pytest.raises(ControlRefused):
            operator.move(hearing, "kv")  # type: ignore[arg-type]
        [report] = operator.move(hearing, None)  # type: ignore[arg-type]
    assert (report["outcome"], report["via"]) == ("committed", "tokens")
    assert hearing.result() == unmoved
    assert len(unmoved) > 40


@pytest.mark.long  # `test_failover` kills workers of other requests
@pytest.mark.parametrize("fields", [pytest.param(SEEDED, id="seeded"), pytest.param(GREEDY, id="greedy")])
def test_a_transcription_survives_its_worker(daemon: DaemonProcess, operator: Operator, fields: dict[str, Any]) -> None:
    """kill -9 in mid-sentence: the next worker gets the audio along with the tokens."""
    heard = sound(2)
    unmoved = Hearing(daemon, heard, fields).result()
    with slowed(daemon.faults):
        hearing = Hearing(daemon, heard, fields)
        hearing.wait_chunks(12)
        [one] = operator.requests_of(hearing)  # type: ignore[arg-type]
        [pid] = [worker["pid"] for worker in operator.status()["workers"] if worker["worker"] == one["worker"]]
        os.kill(pid, signal.SIGKILL)
    assert hearing.result() == unmoved
    operator.wait_idle()


@pytest.mark.long
def test_the_transcript_depends_on_the_audio(daemon: DaemonProcess) -> None:
    """Or the tests above would prove little."""
    assert len({Hearing(daemon, sound(seed), GREEDY).result() for seed in range(4)}) == 4


@pytest.mark.parametrize(("name", "value"), [("n", "200"), ("priority", "-1000")])
def test_limits_hold_in_forms(daemon: DaemonProcess, name: str, value: str) -> None:
    """As in any other call."""
    url, files = f"{daemon.url}/v1/audio/transcriptions", {"file": ("a.wav", sound(1))}
    answer = httpx.post(url, data=GREEDY | {name: value}, files=files, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
