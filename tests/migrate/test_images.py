"""Images in real requests: any worker computes them, and they go along wherever their request goes."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ARGUMENTS, CPU_ENVIRONMENT
from tests.api.http_client import CHAT, request
from tests.families.images import IMAGES
from tests.forked import run_python
from tests.migrate.live import Operator, Stream, linked_workers
from tests.serve.daemon_process import DaemonProcess
from tests.vision_model import make_vision_model, picture
from tests.worker_faults import slowed

PLAIN = """
import json, sys
from melld.engine.image_library import make_importable
make_importable()
from vllm import LLM, SamplingParams
model, options, messages, tokens = json.loads(sys.argv[1])
engine = LLM(model, kv_cache_memory_bytes=32 << 20, **options)
parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
(answer,) = engine.chat(messages, parameters, use_tqdm=False)
print("TOLD", json.dumps(answer.outputs[0].text))
"""


@pytest.fixture(scope="module", params=["idefics3", *(pytest.param(name, marks=pytest.mark.long) for name in IMAGES)])
def seeing(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    """A vision model."""
    if request.param in IMAGES:
        return model_of(request.param)
    model = tmp_path_factory.mktemp("models") / "vision"
    make_vision_model(model)
    return model


@pytest.fixture(scope="module")
def daemon(seeing: Path) -> Iterator[DaemonProcess]:
    """Two workers of it."""
    with linked_workers(seeing) as process:
        yield process


def about(image: str) -> dict[str, Any]:
    """Return a question about the picture."""
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": image}}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 80, "temperature": 0, "ignore_eos": True}


def test_every_worker_sees_an_image_that_it_gets(daemon: DaemonProcess, operator: Operator) -> None:
    """People ask about one picture twice; either worker has the picture, and answers alike."""
    answers = []
    for image in (picture(1), picture(2)):
        streams = []
        with slowed(daemon.faults):
            for _ in range(2):  # one after the other: the second time it might be known already
                streams.append(Stream(daemon, about(image)))
                streams[-1].wait_chunks(3)
            assert {one["worker"] for stream in streams for one in operator.requests_of(stream)} == {"w0", "w1"}
        answers += [stream.result() for stream in streams]
        operator.wait_idle()
    first, again, other, other_again = answers
    assert (first, other) == (again, other_again)
    assert first != other


@pytest.mark.parametrize("via", ["tokens", pytest.param("kv", marks=pytest.mark.long)])
def test_a_request_with_an_image_moves(daemon: DaemonProcess, operator: Operator, via: str) -> None:
    """By its blocks, and by its tokens, for which the destination has to encode the image too."""
    image = picture(3)
    unmoved = Stream(daemon, about(image) | {"cache_salt": "unmoved"}).result()
    with slowed(daemon.faults):
        stream = Stream(daemon, about(image) | {"cache_salt": via})
        stream.wait_chunks(12)
        [report] = operator.move(stream, via)
    assert (report["outcome"], report["via"]) == ("committed", via)
    assert stream.result() == unmoved
    assert unmoved.error is None


@pytest.mark.long
def test_a_request_with_an_image_survives_its_worker(daemon: DaemonProcess, operator: Operator) -> None:
    """kill -9 in mid-answer: the next worker gets the image along with the tokens."""
    image = picture(4)
    unmoved = Stream(daemon, about(image)).result()
    with slowed(daemon.faults):
        stream = Stream(daemon, about(image))
        stream.wait_chunks(12)
        [one] = operator.requests_of(stream)
        [pid] = [worker["pid"] for worker in operator.status()["workers"] if worker["worker"] == one["worker"]]
        os.kill(pid, signal.SIGKILL)
    assert stream.result() == unmoved
    assert unmoved.error is None


@pytest.mark.long
def test_answers_about_images_equal_plain_vllm_s(daemon: DaemonProcess, seeing: Path) -> None:
    """melld in between changes nothing."""
    if seeing.name == "qwen3_5_vision":
        pytest.skip("plain vLLM computes gated delta nets on CPUs in bfloat16 alone")
    asked = about(picture(5))
    given = str(seeing), CPU_ARGUMENTS | {"max_model_len": 2048}, asked["messages"], asked["max_tokens"]
    plain = run_python(*("-c", PLAIN, json.dumps(given)), env=os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT)
    (told,) = [line.removeprefix("TOLD ") for line in plain.stdout.splitlines() if line.startswith("TOLD ")]
    assert Stream(daemon, asked).result().choices[0].text == json.loads(told), plain.stderr[-2000:]


def test_an_image_cannot_be_fetched_from_internal_addresses(daemon: DaemonProcess) -> None:
    """A client learns nothing of what listens beside the daemon, only which field of its request is at fault."""
    with socket.create_server(("127.0.0.1", 0)) as inside:
        url = f"http://localhost:{inside.getsockname()[1]}/x.png"
        refused = request(daemon.url, "POST", CHAT, about(url))
        error = refused.json()["error"]
        assert (refused.status, error["code"], error["param"]) == (400, "internal_media_url", "messages")
        inside.setblocking(False)
        with pytest.raises(BlockingIOError):
            inside.accept()
