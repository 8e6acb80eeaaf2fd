"""How much memory a model needs, and on how many devices: from its files and the machine, before loading."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.config import ModelConfig
from melld.config_text import parse_config
from melld.daemon import sizes
from melld.daemon.sizes import WEIGHTS_PART, device_memory_bytes, fewest_devices, group_devices, weights_bytes
from melld.errors import ConfigError
from melld.ids import ModelName
from melld.kvstore.device_reading import Device

GIB = 1 << 30


@given(st.integers(1, 200), st.integers(1, 96), st.integers(1, 16), st.sampled_from([0, 12, 14, 32, 64]))
def test_a_worker_gets_the_fewest_devices_that_hold_the_model(
    weights: int, memory: int, devices: int, heads: int
) -> None:
    """Only whole workers whose device count divides the attention heads; if none fits, all devices are tried."""
    size = fewest_devices(weights * GIB, memory * GIB, devices, heads)
    assert devices % size == 0
    may = [one for one in range(1, devices + 1) if devices % one == 0 and heads and heads % one == 0]
    fit = [one for one in may if weights <= WEIGHTS_PART * one * memory]
    assert size == min(fit, default=max(may, default=1))
    assert fewest_devices(weights * GIB, 0, devices, heads) == 1, "of a device that does not tell its memory"


def test_seventy_billion_parameters_take_two_large_cards_or_eight_small_ones() -> None:
    """141 GB in half precision; two 80 GB cards leave little for KV, but it is tried."""
    weights = 141 * 10**9
    assert fewest_devices(weights, int(0.9 * 80e9), 2, 64) == 2
    assert fewest_devices(weights, int(0.9 * 24e9), 8, 64) == 8


@pytest.mark.parametrize(
    ("group", "limit", "available"),
    [
        ("system.slice/melld.service", "3000", 2000),
        ("system.slice", "1500", 500),
        ("", "1000", 0),
        ("", "max", 4096),
        ("other.slice", "3000", 4096),
    ],
)
def test_memory_beyond_the_service_s_limit_is_not_counted(
    tmp_path: Path, group: str, limit: str, available: int
) -> None:
    """`MemoryMax=` of the unit, or of an enclosing slice, kills a daemon that exceeds it, apart from cached files."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  4 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/system.slice/melld.service\n")
    directory = tmp_path / "sys" / "fs" / "cgroup" / group
    directory.mkdir(parents=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text("1800\n")
    (directory / "memory.stat").write_text("anon 1000\nfile 800\ninactive_file 500\nactive_file 300\n")
    assert sizes.available_bytes(tmp_path) == available


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of 100 MiB in two files, with a third kind beside them."""
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "num_attention_heads": 4}))
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors")
    for name, mib in zip(names, (60, 40, 100), strict=True):
        with (tmp_path / name).open("wb") as file:
            file.truncate(mib << 20)
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_weights_are_found_in_vllm_s_download_folder(tmp_path: Path) -> None:
    """Else a model too large for one device would be put on one."""
    kept = tmp_path / "models--us--ours"
    (kept / "refs").mkdir(parents=True)
    for revision, commit, mebibytes in (("main", "abc", 7), ("other", "def", 9)):
        (kept / "refs" / revision).write_text(commit)
        (kept / "snapshots" / commit).mkdir(parents=True)
        with (kept / "snapshots" / commit / "model.safetensors").open("wb") as file:
            file.truncate(mebibytes << 20)
    for option in ("download_dir", "download-dir"):
        assert weights_bytes(ModelConfig(path="us/ours", vllm={option: str(tmp_path)}), "auto") == 7 << 20
        other = {option: str(tmp_path), "revision": "other"}
        assert weights_bytes(ModelConfig(path="us/ours", vllm=other), "auto") == 9 << 20
    assert weights_bytes(ModelConfig(path="us/ours"), "auto") == 0


def test_only_the_files_that_are_loaded_count(model: Path) -> None:
    """Many hub models hold the same weights twice in different formats."""
    config = ModelConfig(path=str(model))
    assert weights_bytes(config, "auto") == 100 << 20
    assert weights_bytes(config, "float32") == 200 << 20
    (model / "model.safetensors.index.json").write_text("{")
    assert weights_bytes(config, "auto") == 200 << 20, "without an index all that there are"


@pytest.mark.parametrize(
    ("mib", "more", "size"),
    [
        (120, "", 2),
        (250, "", 1),
        (30, "", 4),
        (120, "per_worker = 1", 1),
        (120, "per_worker = 4", 4),
        (120, "[model.vllm]\ncpu_offload_gb = 1", 1),
    ],
)
def test_devices_are_grouped_for_a_model_too_large_for_one(model: Path, mib: int, more: str, size: int) -> None:
    """200 MiB as float32, plus a tenth for KV; the operator's settings stay."""
    text = f'[model]\npath = "{model}"\n[devices]\ncpu = {{count = 4, memory_bytes = "{mib}MiB"}}\n{more}\n'
    assert group_devices(parse_config(text, "test"), []).devices.group_size == size


def test_gpus_are_grouped_by_the_smallest_one_s_memory(model: Path) -> None:
    """Ranks divide a model evenly; a GPU that serves two workers is not grouped."""
    config = parse_config(f'[model]\npath = "{model}"\n[devices]\ncuda = [0, 1]\n', "test")
    gpus = [Device(index=0, uuid="GPU-1", memory_bytes=1 << 30), Device(index=1, uuid="GPU-2", memory_bytes=80 << 20)]
    assert group_devices(config, gpus).devices.group_size == 2
    assert group_devices(config, gpus[:1] * 2).devices.group_size == 1


def test_cpu_devices_leave_memory_for_the_template_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates while the daemon plans; an operator's explicit limit is taken as is."""
    monkeypatch.setattr(sizes, "available_bytes", lambda: 10 * GIB)
    config = parse_config('[model]\npath = "m"\n[devices]\ncpu = 2', "test", {})
    assert device_memory_bytes(config, []) == [int(0.9 * (10 * GIB - sizes.TEMPLATE_BYTES)) // 2] * 2
    config = parse_config('[model]\npath = "m"\n[devices]\ncpu = {count = 2, memory_bytes = "6GiB"}', "test", {})
    assert device_memory_bytes(config, []) == [6 * GIB] * 2


LENDING = """
[devices]
cuda = [{gpus}]
lent_kv_bytes = "{lent}"
[[models]]
path = "{model}"
name = "one"
[[models]]
path = "{model}"
name = "two"
"""


def check_lending(text: str, gpus: int, gib: int = 8) -> None:
    found = [Device(index=number, uuid=f"GPU-{number}", name="card", memory_bytes=gib * GIB) for number in range(gpus)]
    sizes.check_lending(parse_config(text, "melld.toml"), found)


def test_lent_memory_leaves_room_for_all_models(demo_model: Path) -> None:
    """It never yields to weights, so models that do not fit beside it would only fail while loading."""
    text = LENDING.format(gpus="0", lent="5GiB", model=demo_model)
    check_lending(text, 1)
    check_lending(text, 2)
    with pytest.raises(
        ConfigError, match=r"lent_kv_bytes: all models must fit next to it.*5,120 MiB, 2,0\d\d MiB, 6,451"
    ):
        check_lending(text, 1, gib=7)


@pytest.mark.parametrize(
    ("text", "gpus", "why"),
    [
        (LENDING, 0, "no GPU is available"),
        (LENDING.partition('[[models]]\npath = "{model}"\nname = "two"')[0], 1, "no other to lend to"),
    ],
)
def test_lending_gpu_memory_is_refused_where_it_is_impossible(demo_model: Path, text: str, gpus: int, why: str) -> None:
    """An operator who asks for it does not get something else."""
    with pytest.raises(ConfigError, match=why):
        check_lending(text.format(gpus="0", lent="1GiB", model=demo_model), gpus)


def test_a_gpu_with_two_workers_of_a_model_does_not_lend(demo_model: Path) -> None:
    """Each worker's device would have its own memory."""
    config = parse_config(LENDING.format(gpus="0, 0", lent="1GiB", model=demo_model), "melld.toml")
    gpu = Device(index=0, uuid="GPU-0", name="card", memory_bytes=80 * GIB)
    with pytest.raises(ConfigError, match="listed twice"):
        sizes.check_lending(config, [gpu, gpu])


@pytest.mark.parametrize(("lent", "expected"), [("1GiB", (GIB, 0, False)), ("", (int(0.9 * 8 * GIB), None, True))])
def test_the_landlord_of_lent_gpu_memory_ignores_weights(
    demo_model: Path, lent: str, expected: tuple[int, int | None, bool]
) -> None:
    """They are outside it; without lending, the whole GPU is for weights and KV."""
    text = LENDING.format(gpus="0", lent=lent or "1GiB", model=demo_model) + "[idle]\nhost_cache_bytes = '4GiB'\n"
    config = parse_config(text if lent else text.replace('lent_kv_bytes = "1GiB"', ""), "melld.toml")
    gpu = Device(index=0, uuid="GPU-0", name="card", memory_bytes=8 * GIB)
    lends = config.devices.lent_bytes
    [device] = sizes.devices_declared(config, [gpu], ["cuda:0"], [1 << 18], lends, 0.0)
    names = [ModelName(one.names[0]) for one in config.served]
    alone = zip(map(config.alone, config.served), names, strict=True)
    models = [sizes.model_declared(one, "cuda", name, 1 << 18, GIB, lends, 0.0) for one, name in alone]
    memory, resident, dozes = expected
    assert device.memory_bytes == memory
    assert {one.resident_bytes for one in models} == (
        {resident} if resident is not None else {models[0].resident_bytes}
    )
    assert (models[0].resident_bytes > 2 * GIB) is (resident is None)
    assert all(one.dozes is dozes for one in models)
