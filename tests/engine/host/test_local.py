"""This machine as a host."""

import os
import socket
from typing import Any

from melld.engine.host.local import LocalChild, with_own_cache
from melld.engine.host.local_process import LocalProcess
from melld.engine.wire.spec import WorkerSpec


class Cradle:
    """Stand-in for a template: keeps the ends that a worker would have."""

    def spawn(self, process: LocalProcess, _spec: WorkerSpec, descriptors: tuple[int, ...]) -> None:
        """Keep them."""
        self.process, self.wire = process, socket.socket(fileno=os.dup(descriptors[0]))


class Ear:
    """Records what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def forked(self, pid: int) -> None: ...
    def printed(self, line: str) -> None: ...

    def received(self, data: bytes) -> None:
        self.heard.append(data)

    def exited(self, reason: str, from_outside: bool) -> None:
        self.heard.append(reason)


async def test_a_worker_s_last_words_are_heard_before_its_end() -> None:
    """When two die at once the second's end may be read first; its last words explain it and hold tokens."""
    cradle, ear = Cradle(), Ear()
    child: Any = LocalChild(cradle, WorkerSpec(worker="w0", model_path="m", device_kind="cpu"), ear)  # type: ignore[arg-type]
    await child._connecting
    with cradle.wire as wire:
        wire.sendall(b"why it fails")
    cradle.process._on_exited(1, "")
    assert ear.heard == [b"why it fails", "exited with code 1"]


def test_each_gpu_worker_has_its_own_compile_cache() -> None:
    """Workers start side by side; a file that one writes while another reads it would fail that start."""
    specs = [WorkerSpec(worker=name, model_path="m", device_kind="cuda") for name in ("w0", "w1")]
    roots = [with_own_cache(spec, {"XDG_CACHE_HOME": "/cache"}).environment["VLLM_CACHE_ROOT"] for spec in specs]
    assert roots == ["/cache/vllm/melld/w0", "/cache/vllm/melld/w1"]


def test_the_cache_is_in_the_home_of_the_worker_s_machine() -> None:
    """The daemon's home may not exist there."""
    spec = WorkerSpec(worker="w2", model_path="m", device_kind="cuda", environment={"A": "b"})
    found = with_own_cache(spec, {"HOME": "/home/there"}).environment
    assert found == {"A": "b", "VLLM_CACHE_ROOT": "/home/there/.cache/vllm/melld/w2"}
    assert with_own_cache(spec, {"VLLM_CACHE_ROOT": "/own"}).environment["VLLM_CACHE_ROOT"] == "/own/melld/w2"
    on_cpu = WorkerSpec(worker="w2", model_path="m", device_kind="cpu")
    assert with_own_cache(on_cpu, {"HOME": "/home/there"}) is on_cpu
