"""Whether a model that is named, not a directory, can be had from the Hugging Face Hub: asked before anything slow.

vLLM and transformers ask for each of a model's files with five retries, minutes without a network, before they fail.
"""

import logging
import os
from pathlib import Path

from melld.errors import ConfigError

PATIENCE_S = 5.0

log = logging.getLogger(__name__)


def check_hub(path: str) -> list[str]:
    """Ask the hub once.  Returns what a user should know of it.

    A hub that cannot be reached, or refuses, is not asked again by this process and those that it starts, if the model
    was downloaded before.  What is a directory, or not the hub's to find, is left to vLLM.

    Raises:
        ConfigError: it was never downloaded, and the hub has no such model for us or cannot be reached.
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
        raise ConfigError("[model] path", f"{path!r} is no directory and no name of a model") from None
    except HfHubHTTPError as error:
        said = f"{error.response.status_code} {error.response.reason_phrase}"
        why = f"{constants.ENDPOINT} does not give it out ({said}; one that is private or gated needs HF_TOKEN)"
    except (HTTPError, OSError) as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error})"
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ConfigError("[model] path", f"{path} is no directory, was not downloaded before, and {why}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    log.warning("%s is loaded as it was downloaded before: %s", name, why)
    return [f"{name} is loaded as it was downloaded before: {why}"]
