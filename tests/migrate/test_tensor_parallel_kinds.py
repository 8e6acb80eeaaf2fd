"""Workers of two ranks with more than a plain model: each kind moves and survives its worker."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.families.every import make_model_of
from tests.migrate.live import GREEDY, Operator, Stream
from tests.migrate.test_images import about
from tests.serve.daemon_process import DaemonProcess
from tests.small_model import make_small_model
from tests.tiny_models import make_adapter, make_drafter, make_eagle
from tests.vision_model import make_vision_model, picture

pytestmark = pytest.mark.long
LONG = GREEDY | {"max_tokens": 200}
"""It still runs when whoever looks for its worker has found it."""


def with_adapter(directory: Path) -> tuple[str, ...]:
    make_small_model(directory / "demo")
    make_adapter(directory / "demo", directory / "poet", 1)
    return ("--set", f'model.lora=[{{name = "poet", path = "{directory / "poet"}"}}]')


def with_drafter(directory: Path) -> tuple[str, ...]:
    make_small_model(directory / "demo")
    make_drafter(directory / "demo", directory / "drafter", 1)
    config = f'{{method = "draft_model", model = "{directory / "drafter"}", num_speculative_tokens = 3}}'
    return ("--set", f"model.vllm.speculative_config={config}")


def with_head(directory: Path) -> tuple[str, ...]:
    make_small_model(directory / "demo")
    make_eagle(directory / "demo", directory / "head")
    config = f'{{method = "eagle", model = "{directory / "head"}", num_speculative_tokens = 3}}'
    return ("--set", f"model.vllm.speculative_config={config}")


def with_images(directory: Path) -> tuple[str, ...]:
    make_vision_model(directory / "demo")
    return ("--set", 'model.vllm.mm_encoder_tp_mode="data"')  # where the model can: one image a rank


def with_windows(directory: Path) -> tuple[str, ...]:
    make_model_of("gemma3", directory / "demo")
    return ()


def with_states(directory: Path) -> tuple[str, ...]:
    make_model_of("granite4_h", directory / "demo")
    return ()


KINDS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "adapter": with_adapter,
    "drafter": with_drafter,
    "eagle": with_head,
    "images": with_images,
    "windows": with_windows,
    "states": with_states,
}
OWN: dict[str, dict[str, Any]] = {
    "adapter": {"model": "poet"},
    "images": {"messages": about(picture(1))["messages"]},
}
"""What a body has besides."""


class Kind:
    """A daemon of two workers with two CPU devices each, and its undisturbed answers."""

    def __init__(self, daemon: DaemonProcess, body: dict[str, Any]) -> None:
        self.daemon = daemon
        self.operator = Operator(daemon)
        self.body = body
        self.unmoved = self.begun("unmoved").result().choices[0].text

    def begun(self, salt: str) -> Stream:
        """Return a stream whose first tokens have come; its blocks are nowhere else."""
        stream = Stream(self.daemon, self.body | {"cache_salt": salt})
        stream.wait_chunks(4)
        return stream

    def check(self, stream: Stream) -> None:
        """Compare its answer with the unmoved one."""
        answer = stream.result()
        assert (answer.error, answer.choices[0].text) == (None, self.unmoved)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """Both workers, always in use."""
    directory = tmp_path_factory.mktemp("kind")
    own = KINDS[request.param](directory)
    flags = ("--device", "cpu:4", "--set", "devices.per_worker=2", "--set", "migration.checksum=true")
    spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    with DaemonProcess(directory / "demo", *flags, *spread, *own) as daemon:
        daemon.wait_ready()
        Operator(daemon).wait_ready()
        yield Kind(daemon, LONG | OWN.get(request.param, {}))


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_request_of_this_kind_moves(kind: Kind, via: str) -> None:
    """The destination's ranks have the adapter, the drafter's KV or the window's blocks of their own heads."""
    stream = kind.begun(via)
    assert [report["via"] for report in kind.operator.move(stream, via)] == [via]
    kind.check(stream)


def test_a_request_of_this_kind_survives_its_worker(kind: Kind) -> None:
    """Its data is recomputed by another worker's ranks."""
    stream = kind.begun("killed")
    [one] = kind.operator.requests_of(stream)
    [pid] = [int(w["pid"]) for w in kind.operator.status()["workers"] if w["worker"] == one["worker"]]
    os.kill(pid, signal.SIGKILL)
    kind.check(stream)
    kind.operator.wait_gone(one["worker"], pid)
    kind.operator.wait_ready()
