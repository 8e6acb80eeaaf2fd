"""GPUs whose memory several models lend each other, as the daemon sees them, over a test library."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from melld.config import Config
from melld.config_text import parse_config
from melld.daemon.devices import sized, slots_by_model
from melld.daemon.town.letting import _arena, division_of, lacks_sizes
from melld.daemon.town.tenant import Tenant
from melld.engine.fleet.arena import Arena, GpuArena
from melld.engine.wire import messages as wire
from melld.errors import ConfigError
from melld.ids import DeviceName
from melld.kvstore.device_reading import Device
from melld.kvstore.geometry import KvGeometry
from melld.landlord.events import DeviceDeclared
from tests.daemon.virtual_town import BLOCK_BYTES, Town
from tests.engine.fake_cuda import build
from tests.engine.fleet.virtual_loop import VirtualLoop

READY: dict[str, Any] = {
    "total_blocks": 40, "geometry": KvGeometry(16, BLOCK_BYTES), "max_requests": 4,
    "supported_tasks": ["generate"], "load_s": 0.0, "ready_response": b"", "resident_bytes": 7 << 20,
}  # fmt: skip


def declared(memory_bytes: int = 64 << 20) -> DeviceDeclared:
    return DeviceDeclared(0.0, DeviceName("cuda:0"), memory_bytes, 2 << 20)


async def test_a_gpu_s_memory_is_reserved_before_any_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model finds out later that another program has taken it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build(tmp_path).parent))
    arena = await _arena(declared(), ["GPU-1"])
    assert isinstance(arena, GpuArena)
    assert (arena.resident_bytes, arena.spec().chunks) == (64 << 20, (64 << 20,))
    await arena.scrub([3])
    arena.close()
    monkeypatch.setenv("FAKE_CUDA_BYTES", "1000")
    with pytest.raises(ConfigError, match=r"lent_kv_bytes: cuda:0 has no memory to lend: cuMemCreate: out of memory"):
        await _arena(declared(), ["GPU-1"])


async def test_a_cpu_device_s_memory_is_a_file() -> None:
    """It takes only what is used, and needs no GPU."""
    arena = await _arena(declared(1 << 40), ())
    assert isinstance(arena, Arena)
    assert arena.resident_bytes == 0
    arena.close()


def test_weights_beside_lent_memory_take_none_of_it() -> None:
    """Otherwise the Landlord would close granules for them, and models would get less than was set aside."""
    ready = wire.WorkerReady(**READY)
    with contextlib.closing(VirtualLoop()) as loop:
        model = next(iter(Town(loop, 2, 1).models.values()))
    assert Tenant(model, BLOCK_BYTES, lends=True).measured(ready) == 7 << 20
    assert Tenant(model, BLOCK_BYTES, lends=True, displaces=False).measured(ready) == 0


def config_of(demo_model: Path, first: str = "", idle: str = "") -> Config:
    """Two models on one GPU."""
    models = f'models = [{{path = "{demo_model}", name = "one"{first}}}, {{path = "{demo_model}", name = "two"}}]'
    return parse_config(f"{models}\n[idle]\n{idle}\n[devices]\ncuda = [0]\n", "test")


def test_gpu_memory_is_divided_automatically(demo_model: Path) -> None:
    """Models without sizes lend each other what all weights leave; where they cannot, each gets its part."""
    gpu = Device(index=0, uuid="GPU-0", name="card", memory_bytes=8 << 30)
    plain = config_of(demo_model)
    assert lacks_sizes(plain)
    lent, own = (division_of(plain, [gpu], lends=lends) for lends in (True, False))
    assert lent.lent_bytes >= 2 * own.own_bytes > 4 << 30
    assert division_of(config_of(demo_model, idle="host_cache_bytes = '1GiB'"), [gpu], lends=True) == own
    given = config_of(demo_model, first=", vllm = {kv_cache_memory_bytes = 1073741824}")
    rest = division_of(given, [gpu], lends=True)
    assert rest.lent_bytes == 0
    specs = [slots[0].spec for slots in slots_by_model(given, [gpu], {})]
    sizes = [sized(spec, rest).engine_arguments["kv_cache_memory_bytes"] for spec in specs]
    assert sizes == [1 << 30, rest.own_bytes]
    shared = [sized(slots[0].spec, lent) for slots in slots_by_model(plain, [gpu], {})]
    assert {spec.engine_arguments["kv_cache_memory_bytes"] for spec in shared} == {lent.lent_bytes}
    assert {spec.environment["VLLM_USE_V2_MODEL_RUNNER"] for spec in shared} == {"0"}
    with pytest.raises(ConfigError, match="no model leaves room for KV memory"):
        division_of(plain, [msgspec.structs.replace(gpu, memory_bytes=1 << 30)], lends=True)
