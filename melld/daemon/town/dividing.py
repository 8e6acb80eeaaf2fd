"""Divides GPUs among models if the configuration does not.

Owns which models can lend.  `landlord.division` has the arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from melld.config import Config, DevicesConfig
from melld.daemon.sizes import device_memory_bytes, first_guess
from melld.errors import ConfigError
from melld.kvstore.device_reading import Device
from melld.landlord.division import Division, divide


def lacks_sizes(config: Config) -> bool:
    """Return True if a model shares GPUs without a configured amount of KV memory."""
    return any(model.vllm_option("kv_cache_memory_bytes") is None for model in config.served)


def can_lend(vllm_config: Any) -> bool:
    """Return True if the model's layers are of plain full attention, as vLLM's configuration describes them."""
    model = vllm_config.model_config
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    special = model.has_inner_state, model.is_attention_free, model.is_encoder_decoder, model.get_sliding_window()
    return not any(special) and kinds <= {"full_attention"} and vllm_config.speculative_config is None


def division_of(config: Config, gpus: Sequence[Device], *, lends: bool) -> Division:
    """Return how each GPU is divided; the smallest decides.  Sizes that are configured, or dozing, rule out lending.

    Raises:
        ConfigError: no model fits.
    """
    given = {model.names[0]: int(model.vllm_option("kv_cache_memory_bytes") or 0) for model in config.served}
    held = [first_guess(config, model, "cuda") + given[model.names[0]] for model in config.served]
    memory = min(device_memory_bytes(config, gpus))
    division = divide(memory, held, lends=lends and not any(given.values()) and not config.idle.cached_bytes)
    if not division.together:
        told = ", ".join(f"{size / 2**20:,.0f}" for size in sorted(held))
        why = f"no model leaves room for KV memory on a GPU with {memory / 2**20:,.0f} MiB: they take {told} MiB"
        raise ConfigError("[[models]]", why)
    return division


def lending(devices: DevicesConfig, division: Division) -> DevicesConfig:
    """Return the devices' configuration with what is lent."""
    return msgspec.structs.replace(devices, lent_kv_bytes=division.lent_bytes or None)
