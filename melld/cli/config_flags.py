"""The flags that the daemon's configuration can be given with, and how they lie over the file.

Owns the flags, where the file is looked for, and the runtime directory's flag that the operator's commands share.
Never says what a key means: `melld.config` does.
"""

import argparse
import re
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from melld.cli.vllm_flags import PREFIX, add_vllm_flags, vllm_overrides
from melld.config import Config, CpuDevices, parse_config
from melld.control.runtime_directory import SYSTEM_DIRECTORY, runtime_directory
from melld.errors import ConfigError

DEFAULT_FILE = "melld.toml"

# flag -> the key that it sets
PLAIN_FLAGS = {
    "--host": "server.host",
    "--port": "server.port",
    "--model": "model.path",
    "--name": "model.name",
    "--api-key-file": "server.api_key_file",
    "--runtime-directory": "server.runtime_directory",
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `melld serve` and `melld check-config`."""
    parser.allow_abbrev = False  # --api-key is not --api-key-file
    group = parser.add_argument_group(
        "configuration", "Flags go before the file.  Any option of `vllm serve` is taken, too: --max-model-len 16k."
    )
    group.add_argument(
        "--config", metavar="FILE", help=f"the configuration (default: ./{DEFAULT_FILE}, where there is one)"
    )
    group.add_argument("--model", metavar="DIR", help="the model to serve: its directory, or its name on Hugging Face")
    group.add_argument("--name", metavar="NAME", help="the name that clients call it by")
    group.add_argument("--served-model-name", metavar="NAME", nargs="+", help="its names, if it has several")
    group.add_argument("--host", metavar="ADDRESS", help="where the API listens (default: 127.0.0.1)")
    group.add_argument("--port", metavar="PORT", type=int, help="its TCP port (default: 8000; 0 takes a free one)")
    group.add_argument(
        "--device", metavar="DEVICES", help="cuda:0,1 (indices or UUIDs), cpu:2 (so many), or auto: all GPUs, else CPU"
    )
    group.add_argument(
        "--kv-bytes", metavar="SIZE", help="KV cache of each CPU device, as 128MiB; implies --device cpu"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="API keys, or their sha256: digests, one a line")
    group.add_argument("--api-key", metavar="KEY", nargs="+", help="API keys themselves, for all who see `ps`")
    group.add_argument("--runtime-directory", metavar="DIR", help="where the control socket lies")
    group.add_argument(
        "--set",
        metavar="TABLE.KEY=VALUE",
        action="append",
        default=[],
        help="any other key, its value in TOML: --set server.drain_s=5 --set 'model.vllm.dtype=\"float32\"'",
    )
    add_vllm_flags(parser)


def add_daemon_flags(parser: argparse.ArgumentParser) -> None:
    """The flags by which an operator's command finds the daemon."""
    parser.add_argument("--runtime-directory", metavar="DIR", help="where the daemon's control socket lies")
    parser.add_argument("--config", metavar="FILE", help="the daemon's configuration, which may say where")


def load_config(arguments: argparse.Namespace, environment: Mapping[str, str], *, again: bool = False) -> Config:
    """The configuration that the file and the flags make together; without a file, flags alone will do.

    `again`: a daemon that runs reloads it, and must not wait for whoever wrote a FIFO at the start.

    Raises:
        ConfigError: a file, a key, a flag or a value cannot be used; `where` says which.
    """
    overrides, sources = _overrides(arguments)
    file = _config_file(arguments.config, environment)
    text = "" if file is None else _read(file, again=again)
    try:
        return parse_config(text, "the flags" if file is None else str(file), overrides)
    except ConfigError as error:
        named = re.match(r"\[([^\]]+)\] ", error.why)
        if named is not None and named[1] in sources:  # the value came from a flag, not from the file
            raise ConfigError(sources[named[1]], error.why.removeprefix(named[0])) from None
        raise


def daemon_directories(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[Path]:
    """Where an operator's command looks for a daemon: the place named, else this user's and then the system's.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    if arguments.runtime_directory:
        return [Path(arguments.runtime_directory).absolute()]
    file = _config_file(arguments.config, environment)
    configured = None if file is None else _configured_directory(file)
    found = runtime_directory(configured, environment)
    return [found] if configured or found == SYSTEM_DIRECTORY else [found, SYSTEM_DIRECTORY]


def _config_file(named: str | None, environment: Mapping[str, str]) -> Path | None:
    """`--config`, else ./melld.toml, else the service manager's."""
    if named is not None:
        return Path(named)
    places = [Path(DEFAULT_FILE)]
    if managed := environment.get("CONFIGURATION_DIRECTORY"):
        places.append(Path(managed.split(":")[0]) / DEFAULT_FILE)
    return next((place for place in places if place.is_file()), None)


def _read(file: Path, *, again: bool = False) -> str:
    try:
        if again and file.is_fifo():
            raise ConfigError(str(file), "is a FIFO, which cannot be read again")
        return file.read_text()
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), f"is not text: {error}") from error


def _configured_directory(file: Path) -> str | None:
    """`[server] runtime_directory` alone: a file that lacks what flags have given still says where its daemon is."""
    try:
        server = tomllib.loads(_read(file)).get("server", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), f"not TOML: {error}") from error
    directory = server.get("runtime_directory") if isinstance(server, dict) else None
    return directory if isinstance(directory, str) else None


def _overrides(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """What the flags set, by dotted key, and which flag set it."""
    overrides: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for flag, key in PLAIN_FLAGS.items():
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            overrides[key], sources[key] = value, flag
    for key, value in vllm_overrides(arguments).items():
        overrides[key], sources[key] = value, f"--{key.removeprefix(PREFIX).replace('_', '-')}"
    if arguments.served_model_name is not None:
        if arguments.name is not None:
            raise ConfigError("--served-model-name", "does not go together with --name")
        overrides["model.name"], sources["model.name"] = arguments.served_model_name, "--served-model-name"
    if arguments.api_key is not None:
        overrides["server.api_keys"] = [_digest(key) for key in arguments.api_key]
    for key, value in _devices(arguments.device, arguments.kv_bytes).items():
        overrides[key], sources[key] = value, "--kv-bytes" if key.endswith("kv_bytes") else "--device"
    for words in arguments.set:
        key, value = _assignment(words)
        overrides[key], sources[key] = value, f"--set {key}"
    return overrides, sources


def _digest(key: str) -> str:
    if not key.strip():
        raise ConfigError("--api-key", "is empty")
    return key if key.startswith("sha256:") else f"sha256:{sha256(key.encode()).hexdigest()}"


def _devices(device: str | None, kv_bytes: str | None) -> dict[str, Any]:
    """Keys of `[devices]`.  The kind of device that was not chosen is unset, so that a flag replaces the file's."""
    kind, _, which = (device or "").partition(":")
    if kind not in ("", "auto", "cpu", "cuda") or (which and kind not in ("cpu", "cuda")):
        raise ConfigError("--device", f"{device!r} is none of cuda:0,1 cpu:2 auto")
    if kv_bytes is not None and kind in ("auto", "cuda"):
        raise ConfigError("--kv-bytes", f"is for CPU devices, and does not go with --device {device}")
    if kind == "auto":
        return {"devices.cuda": None, "devices.cpu": None}
    if kind == "cuda":
        return {"devices.cpu": None, "devices.cuda": _gpus(which)}
    keys: dict[str, Any] = {}
    if kind == "cpu":
        keys["devices.cpu.count"] = _count(which) if which else CpuDevices().count
    if kv_bytes is not None:
        keys["devices.cpu.kv_bytes"] = kv_bytes
    return {"devices.cuda": None, **keys} if keys else {}


def _gpus(which: str) -> list[int | str]:
    names = [name.strip() for name in which.split(",")]
    if not all(names):
        raise ConfigError("--device", "say which GPUs: cuda:0,1 (or auto for all)")
    return [int(name) if name.isdecimal() else name for name in names]


def _count(which: str) -> int:
    if not which.isdecimal():
        raise ConfigError("--device", f"cpu:{which} names no number of CPU devices, as cpu:2 does")
    return int(which)


def _assignment(words: str) -> tuple[str, Any]:
    """`TABLE.KEY=VALUE` taken apart."""
    key, equals, text = words.partition("=")
    key = key.strip()
    if not equals or "." not in key or not all(key.split(".")):
        raise ConfigError(f"--set {words}", "is not TABLE.KEY=VALUE")
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        table = {}
    if set(table) != {"value"}:
        raise ConfigError(f"--set {key}", f"{text!r} is not a TOML value (a string needs its quotes: '{key}=\"...\"')")
    return key, table["value"]
