"""Checks that a model given by name can be had from the Hugging Face Hub, before anything slow.

vLLM and transformers try five times for each of a model's files, which takes minutes without a network.
"""

import logging
import os
from pathlib import Path

from melld.errors import ConfigError

PATIENCE_S = 5.0

log = logging.getLogger(__name__)


def check_hub(path: str) -> list[str]:
    """Ask the hub for the model once; return warnings for the user.

    If the hub refuses or cannot be reached and the model was downloaded before, this process and its children use
    that copy and do not ask again.  Directories, and names that are not the hub's, are left to vLLM.

    Raises:
        ConfigError: the model was never downloaded, and the hub refuses it or cannot be reached.
    """
    if Path(path).exists() or "://" in path or path.endswith(".gguf") or os.environ.get("VLLM_USE_MODELSCOPE"):
        return []
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]  # httpx's own

    if constants.HF_HUB_OFFLINE:
        return []
    name = path.partition(":")[0]  # NAME:QUANTISATION, of GGUF files
    try:
        HfApi().model_info(name, timeout=PATIENCE_S)
        return []
    except HFValidationError:
        raise ConfigError("[model] path", f"{path!r} is neither a directory nor the name of a model") from None
    except HfHubHTTPError as error:
        said = f"{error.response.status_code} {error.response.reason_phrase}"
        why = f"{constants.ENDPOINT} refuses it ({said}; a private or gated model needs HF_TOKEN)"
    except (HTTPError, OSError) as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error})"
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ConfigError("[model] path", f"{path} is not a directory, was not downloaded before, and {why}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    log.warning("%s: using the copy downloaded before: %s", name, why)
    return [f"{name}: using the copy downloaded before: {why}"]
