"""LoRA adapters: each is loaded before a request with it reaches the scheduler, for a step that fails ends the worker.

For the engine thread, between two steps.
"""

import logging
from typing import TYPE_CHECKING, Any

from melld.migrate.snapshot import MoveRefusal

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

log = logging.getLogger(__name__)


def adapter_refusal(engine: "EngineCore", request: Any) -> MoveRefusal | None:
    """Load the request's adapter if it is not loaded yet; return why the request cannot run here, or None.

    `request`: vLLM's `Request` or `EngineCoreRequest`.
    """
    wanted = request.lora_request
    if wanted is None:
        return None
    if engine.vllm_config.lora_config is None:
        return MoveRefusal.LORA_ABSENT
    if wanted.lora_int_id in engine.list_loras():
        return None
    try:
        engine.add_lora(wanted)
    except Exception as error:  # noqa: BLE001  whatever is wrong with its files, only its requests fail
        log.warning("cannot load the adapter %s from %s: %s", wanted.lora_name, wanted.lora_path, error)
        return MoveRefusal.LORA_ABSENT
    return None
