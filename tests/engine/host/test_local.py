"""This machine as a host."""

from melld.engine.host.local import with_own_cache
from melld.engine.wire.spec import WorkerSpec


def test_each_gpu_worker_keeps_what_it_compiles_to_itself() -> None:
    """Workers start side by side; a cache file that one writes while another reads it would fail that one's start."""
    specs = [WorkerSpec(worker=name, model_path="m", device_kind="cuda") for name in ("w0", "w1")]
    roots = [with_own_cache(spec, {"XDG_CACHE_HOME": "/cache"}).environment["VLLM_CACHE_ROOT"] for spec in specs]
    assert roots == ["/cache/vllm/melld/w0", "/cache/vllm/melld/w1"]


def test_the_cache_is_in_the_home_of_the_machine_that_the_worker_is_on() -> None:
    """The daemon's home may not be there."""
    spec = WorkerSpec(worker="w2", model_path="m", device_kind="cuda", environment={"A": "b"})
    found = with_own_cache(spec, {"HOME": "/home/there"}).environment
    assert found == {"A": "b", "VLLM_CACHE_ROOT": "/home/there/.cache/vllm/melld/w2"}
    assert with_own_cache(spec, {"VLLM_CACHE_ROOT": "/own"}).environment["VLLM_CACHE_ROOT"] == "/own/melld/w2"
    on_cpu = WorkerSpec(worker="w2", model_path="m", device_kind="cpu")
    assert with_own_cache(on_cpu, {"HOME": "/home/there"}) is on_cpu
