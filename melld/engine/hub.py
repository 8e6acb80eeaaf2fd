"""Asks the Hugging Face Hub for a model once, before anything slow.

Owns the time that the hub has to answer, and which of its files are needed before vLLM downloads all.
"""

import contextlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

from melld.engine.model_files import FILES
from melld.errors import ConfigError

HUB_PATIENCE_S = 5.0
log = logging.getLogger(__name__)


def check_hub(path: str) -> list[str]:
    """Ask the Hugging Face Hub for the model once; return warnings for the user.

    vLLM and transformers try five times for each of a model's files, which takes minutes without a network.
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
        found = HfApi().model_info(name, timeout=HUB_PATIENCE_S)
        _download_small_files(name, [one.rfilename for one in found.siblings or ()])
        return []
    except HFValidationError:
        raise ConfigError("[model] path", f"{path!r} is neither a directory nor a model name") from None
    except HfHubHTTPError as error:
        said = f"{error.response.status_code} {error.response.reason_phrase}"
        why = f"{constants.ENDPOINT} rejects it ({said}; a private or gated model needs HF_TOKEN)"
    except (HTTPError, OSError) as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error})"
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ConfigError("[model] path", f"{path} is not a directory, has not been downloaded, and {why}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    log.warning("%s: using the downloaded copy: %s", name, why)
    return [f"{name}: using the downloaded copy: {why}"]


def _download_small_files(name: str, there: Collection[str]) -> None:
    """Download the files that choose the parsers of a model's answers, as vLLM downloads all files later."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

    for file in FILES:
        if file in there:
            with contextlib.suppress(HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OSError):
                hf_hub_download(name, file, etag_timeout=HUB_PATIENCE_S)
