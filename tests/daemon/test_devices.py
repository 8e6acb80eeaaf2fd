"""From the configuration to the slots for workers."""

import pytest

from melld.config_text import parse_config
from melld.daemon.devices import find_gpus, make_slots, sized
from melld.engine.wire.spec import StepLimit
from melld.errors import ConfigError
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml
from melld.landlord.division import Division

FIRST, SECOND = Device(index=0, uuid="GPU-1"), Device(index=1, uuid="GPU-2")
EACH = '[model]\npath = "m"\n[model.vllm]\nkv_cache_memory_bytes = 1000\n'


def test_workers_of_one_gpu_have_distinct_names_and_split_its_memory() -> None:
    """They must neither both reserve the whole of it, nor be confused."""
    slots = make_slots(parse_config(EACH, "test"), [FIRST, FIRST, SECOND], {})
    assert [slot.device for slot in slots] == ["cuda:0.0", "cuda:0.1", "cuda:1"]
    assert [slot.spec.engine_arguments.get("gpu_memory_utilization") for slot in slots] == [0.45, 0.45, None]
    assert [slot.spec.visible_devices for slot in slots] == [("GPU-1", "GPU-2"), ("GPU-1", "GPU-2"), ("GPU-2", "GPU-1")]


def test_workers_that_share_a_gpu_have_fixed_shares() -> None:
    """vLLM measures free memory at start, while the other worker allocates: the result would be chance."""
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes.*cuda:0\.0 shares its GPU"):
        make_slots(parse_config('[model]\npath = "m"', "test"), [FIRST, FIRST], {})


def test_gpu_memory_can_be_shared_whatever_the_allocator_settings() -> None:
    """Expandable segments have no handles: all moves would go by tokens because of an unrelated setting."""
    asked = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8",
    }
    environment = make_slots(parse_config(EACH, "test"), [FIRST, SECOND], asked)[0].spec.environment
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512,expandable_segments:False"
    assert "PYTORCH_ALLOC_CONF" not in environment
    on_cpu = make_slots(parse_config('[model]\npath = "m"', "test"), [], asked)[0].spec.environment
    assert "PYTORCH_CUDA_ALLOC_CONF" not in on_cpu


def limit_of(policy: str, targets: str = "") -> StepLimit | None:
    """Return the limit of a worker's steps with this configuration."""
    text = f'[model]\npath = "m"\n[scheduler]\npolicy = "{policy}"\n{targets}'
    return make_slots(parse_config(text, "test"), [], {})[0].spec.step_limit


def test_the_step_limit_is_the_configured_target_or_the_policy_s() -> None:
    """A worker limits prompts by the configured target, else by the promise of `mell-slo`, else not at all."""
    assert limit_of("best-fit") is None
    assert limit_of("best-fit", "[targets]\nitl_ms = 40") == StepLimit(0.04)
    assert limit_of("mell-slo", "[targets]\nitl_ms = 40") == StepLimit(0.08)
    assert limit_of("mell-slo") == StepLimit(0.1, lone_steps=4.0)


def test_a_worker_of_several_gpus_sees_its_own_first_then_its_peers() -> None:
    """Its ranks take the first ones, by number, and read the memory of the others."""
    gpus = [Device(index=index, uuid=f"GPU-{index}") for index in range(4)]
    slots = make_slots(parse_config(EACH + "[devices]\nper_worker = 2\n", "test"), gpus, {})
    assert [(slot.worker, slot.device, slot.uuids) for slot in slots] == [
        ("w0", "cuda:0+1", ("GPU-0", "GPU-1")),
        ("w1", "cuda:2+3", ("GPU-2", "GPU-3")),
    ]
    assert slots[1].spec.visible_devices == ("GPU-2", "GPU-3", "GPU-0", "GPU-1")
    assert slots[1].spec.engine_arguments["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ("cpu = 3\nper_worker = 2", r"3 devices cannot be divided into workers of 2: use 2 devices, or a multiple"),
        ("per_worker = 4", r"2 devices cannot be divided into workers of 4"),
    ],
)
def test_devices_that_do_not_form_whole_workers_are_refused(devices: str, why: str) -> None:
    """Nobody has to look for a silently idle device."""
    config = parse_config(f'[model]\npath = "m"\n[devices]\n{devices}\n', "test")
    with pytest.raises(ConfigError, match=why):
        find_gpus(config.devices, Nvml(), {"CUDA_VISIBLE_DEVICES": ""})


def test_workers_that_lend_gpu_memory_are_configured_for_it() -> None:
    """Blocks can only be moved in vLLM's first runner, and an almost full device must be accepted."""
    each = '[[models]]\npath = "m"\nname = "{0}"\n'
    text = f'[devices]\nlent_kv_bytes = "1GiB"\n{each.format("a")}{each.format("b")}[idle]\nhost_cache_bytes = "1GiB"\n'
    config = parse_config(text, "test")
    [slot] = make_slots(config.alone(config.served[0]), [FIRST], {}, 0, 2)
    spec = sized(slot.spec, Division(lent_bytes=config.devices.lent_bytes))
    arguments = spec.engine_arguments
    assert spec.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
    assert arguments["gpu_memory_utilization"] < 0.02
    assert "enable_sleep_mode" not in arguments
