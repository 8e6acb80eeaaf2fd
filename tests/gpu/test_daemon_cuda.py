"""A whole daemon on one GPU: its streams move, outlive a worker, and share the GPU with another model's."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.demo_model import make_demo_model
from tests.gpu.conftest import DEVICE
from tests.gpu.test_residency_cuda import make_large_model
from tests.migrate.live import CASES, Answer, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.small_model import make_small_model

pytestmark = pytest.mark.gpu

BODIES: dict[str, dict[str, Any]] = {
    name: {**CASES[name], "max_tokens": 600} for name in ("greedy", "seeded", "penalties", "n")
}
"""Long enough for a quick GPU to be in their midst when something is done to them."""
EXACT = 'dtype = "float32", enforce_eager = true'
OWN_KV = ", kv_cache_memory_bytes = 268435456, gpu_memory_utilization = 0.1, max_model_len = 2048"
OWN_KV = OWN_KV if DEVICE == "cuda" else ""
AHEAD = ", async_scheduling = true" if DEVICE == "cuda" else ""
"""What vLLM does by default on a GPU."""
WIDE = 88_000
"""On a CPU so wide is the hidden layer of a model most of whose memory is weights."""


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Two workers of one model, each of which can read the other's KV."""
    model = tmp_path_factory.mktemp("model") / "demo"
    make_demo_model(model)
    devices = ("--set", "devices.cuda=[0, 0]") if DEVICE == "cuda" else ("--device", "cpu:2")
    spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    with DaemonProcess(
        model, *devices, *spread, "--set", f"model.vllm={{{EXACT}{OWN_KV}{AHEAD}}}", genuine=True
    ) as daemon:
        daemon.wait_ready()
        Operator(daemon).wait_linked(daemon)
        yield daemon
        daemon.stop()
        print(*daemon.lines, sep="\n")  # noqa: T201  with `-s` in the log of a machine that is gone by then


@pytest.fixture(scope="module")
def unmoved(two_workers: DaemonProcess) -> dict[str, Answer]:
    """The undisturbed answers, each alone: on a GPU sums depend on what else is in a step.

    What counts is the third answer, whose prompt is in the prefix cache, as it is for those to come.
    """
    return {name: [Stream(two_workers, body).result() for _ in range(3)][2] for name, body in BODIES.items()}


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("name", list(BODIES))
def test_a_stream_that_moves_on_a_gpu_is_unchanged(
    two_workers: DaemonProcess, unmoved: dict[str, Answer], name: str, via: str
) -> None:
    """The client cannot tell."""
    stream = Stream(two_workers, BODIES[name])
    stream.wait_chunks(40)
    reports = Operator(two_workers).move(stream, via)
    assert [(report["outcome"], report["via"]) for report in reports] == [("committed", via)] * len(reports), reports
    assert stream.result() == unmoved[name]
    assert len(reports) == len(unmoved[name].choices)


def test_a_stream_outlives_a_killed_worker_on_a_gpu(two_workers: DaemonProcess, unmoved: dict[str, Answer]) -> None:
    """Its GPU memory is freed, its stream resumes from its tokens, and its successor serves."""
    operator, stream = Operator(two_workers), Stream(two_workers, BODIES["penalties"])
    stream.wait_chunks(40)
    [running] = operator.requests_of(stream)
    [victim] = [one for one in two_workers.status()["workers"] if one["worker"] == running["worker"]]
    os.kill(victim["pid"], signal.SIGKILL)
    assert stream.result() == unmoved["penalties"]
    operator.wait_gone(victim["worker"], victim["pid"])
    operator.wait_ready()
    operator.wait_idle()


def several(directory: Path, models: list[str], devices: str) -> DaemonProcess:
    """A daemon with several models."""
    config = directory / "melld.toml"
    config.write_text(f"models = [{', '.join(models)}]\n{devices}\n")
    return DaemonProcess(None, "--config", str(config), "--log-level", "info", genuine=True)


def test_models_in_lent_memory_answer_as_alone_and_die_alone(tmp_path: Path) -> None:
    """Both use the KV memory in turn; a death of one does not affect the other."""
    make_demo_model(tmp_path / "demo")
    make_demo_model(tmp_path / "other", seed=1)
    models = [f'{{path = "{tmp_path}/{name}", vllm = {{{EXACT}}}}}' for name in ("demo", "other")]
    devices = 'cuda = [0]\nlent_kv_bytes = "1GiB"' if DEVICE == "cuda" else 'cpu = {count = 1, memory_bytes = "1GiB"}'
    with several(tmp_path, models, f"[devices]\n{devices}") as daemon:
        daemon.wait_ready()
        for name in ("demo", "other"):
            assert Stream(daemon, {"model": name, **CASES["greedy"]}).result().error is None
        bodies = [body | {"model": name, "n": 1} for name in ("demo", "other") for body in BODIES.values()]
        quiet = [Stream(daemon, body).result() for body in bodies]
        assert [answer.error for answer in quiet] == [None] * len(bodies)
        streams = [Stream(daemon, body) for body in bodies]
        for stream in streams:
            stream.wait_chunks(40)
        workers = {one["model"]: one for one in daemon.status()["workers"]}
        os.kill(workers["other"]["pid"], signal.SIGKILL)
        assert [stream.result() for stream in streams] == quiet
        assert workers["demo"]["pid"] in [one["pid"] for one in daemon.status()["workers"]]
        Operator(daemon).wait_idle()


def test_a_model_dozes_on_a_gpu_and_answers_as_before(tmp_path: Path) -> None:
    """Its weights move from the GPU to host memory; its process stays."""
    make_demo_model(tmp_path / "demo")
    if DEVICE == "cuda":
        make_large_model(tmp_path / "wide", layers=8)
    else:
        make_small_model(tmp_path / "wide", seed=3, intermediate=WIDE)
    kind = 'dtype = "bfloat16", load_format = "dummy", enforce_eager = true' if DEVICE == "cuda" else EXACT
    models = [
        f'{{path = "{tmp_path}/demo", pinned = true, vllm = {{{EXACT}{OWN_KV}}}}}',
        f'{{path = "{tmp_path}/wide", keep_alive_s = 1, vllm = {{{kind}{OWN_KV}}}}}',
    ]
    devices = "cuda = [0]" if DEVICE == "cuda" else 'cpu = {count = 1, memory_bytes = "1GiB"}'
    idle = '[idle]\nhost_cache_bytes = "8GiB"\n' if DEVICE == "cuda" else ""
    with several(tmp_path, models, f"{idle}[devices]\n{devices}") as daemon:
        daemon.wait_ready()
        body = {"model": "wide", **CASES["greedy"], "max_tokens": 40}
        before = Stream(daemon, body).result()
        assert before.error is None

        def worker() -> dict[str, Any]:
            (wide,) = [one for one in daemon.status()["workers"] if one["model"] == "wide"]
            return dict(wide)

        pid = worker()["pid"]
        for _ in range(3):
            Operator(daemon).wait(lambda _status: worker()["state"] == "dozing", 60.0)
            assert Stream(daemon, body).result() == before
        assert worker()["pid"] == pid
