"""The flags that set the daemon's configuration, and how they override its file.

Owns the flags, the search for the file, and the runtime directory's flag that the operator commands share.
Never says what a key means: `melld.config` does.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from melld.cli.vllm_flags import add_vllm_flags, vllm_overrides
from melld.config import Config, CpuDevices
from melld.config_text import parse_config
from melld.control.runtime_directory import SYSTEM_DIRECTORY, runtime_directory
from melld.errors import ConfigError

DEFAULT_FILE = "melld.toml"
ROLES = ("mixed", "prefill", "decode")

# flag -> the key that it sets
PLAIN_FLAGS = {
    "--host": "server.host",
    "--port": "server.port",
    "--model": "model.path",
    "--name": "model.name",
    "--api-key-file": "server.api_key_file",
    "--runtime-directory": "server.runtime_directory",
    "--cluster": "cluster.address",
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `melld serve` and `melld check-config`."""
    parser.allow_abbrev = False  # --api-key is not --api-key-file
    group = parser.add_argument_group(
        "configuration", "Flags override the file.  Any option of `vllm serve` works too: --max-model-len 16k."
    )
    add_flag(group, "--config FILE", f"configuration file (default: ./{DEFAULT_FILE} if it exists)")
    add_flag(group, "--model DIR", "model to serve: a directory or a Hugging Face name")
    add_flag(group, "--name NAME", "model name for clients")
    add_flag(group, "--served-model-name NAME", "one or more model names for clients", nargs="+")
    add_flag(group, "--host ADDRESS", "API address (default: 127.0.0.1)")
    add_flag(group, "--port PORT", "API port (default: 8000; 0: any free port)", type=int)
    add_flag(
        group, "--device DEVICES", "cuda:0,1 (indices or UUIDs), cpu:2 (two workers), or auto (all GPUs, else CPU)"
    )
    add_flag(group, "--kv-bytes SIZE", "KV cache per CPU device, such as 128MiB; implies --device cpu")
    cluster = "use the devices of a Ray cluster: HOST:PORT of its head, or auto for the one this machine has joined"
    add_flag(group, "--cluster ADDRESS", cluster)
    add_flag(group, "--api-key-file FILE", "file of API keys or sha256: digests, one per line")
    keys = "API keys; every user of this machine can see them with `ps`"
    add_flag(group, "--api-key KEY", keys, nargs="+")
    add_flag(group, "--runtime-directory DIR", "directory of the control socket")
    role = "fix a worker's role: --role w0=prefill --role w1=decode (or mixed)"
    add_flag(group, "--role WORKER=ROLE", role, action="append", default=[])
    any_key = "any other key, with a TOML value: --set server.drain_s=5 --set 'model.vllm.dtype=\"float32\"'"
    add_flag(group, "--set TABLE.KEY=VALUE", any_key, action="append", default=[])
    add_vllm_flags(parser)


def add_flag(group: argparse._ActionsContainer, usage: str, text: str, **options: Any) -> None:
    """Add a flag with its help; `usage`: its name, and what stands for its value there, if it takes one."""
    name, _, value = usage.partition(" ")
    if value:
        options["metavar"] = value
    group.add_argument(name, help=text, **options)


def number_that(must: str, holds: Callable[[float], bool], kind: type[Any] = float) -> Callable[[str], Any]:
    """Return a parser of a flag's value: a number that `holds`; its error says what it `must` be."""

    def number(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{must}: {text}")
        return value

    return number


def add_daemon_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags by which an operator command finds the daemon."""
    parser.add_argument("--runtime-directory", metavar="DIR", help="directory of the daemon's control socket")
    parser.add_argument("--config", metavar="FILE", help="the daemon's configuration, which may set that directory")


def load_config(arguments: argparse.Namespace, environment: Mapping[str, str], *, again: bool = False) -> Config:
    """Build the configuration from the file, if there is one, and the flags.

    `again`: a running daemon reloads its file, and must not block on a FIFO that somebody wrote at the start.

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
    """Return the directories in which to look for a daemon: the one named, else this user's and then the system's.

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
    """Return `--config`, else ./melld.toml, else the service manager's file."""
    if named is not None:
        return Path(named)
    places = [Path(DEFAULT_FILE)]
    if managed := environment.get("CONFIGURATION_DIRECTORY"):
        places.append(Path(managed.split(":")[0]) / DEFAULT_FILE)
    return next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113  False where we may not look


def _read(file: Path, *, again: bool = False) -> str:
    try:
        if again and file.is_fifo():
            raise ConfigError(str(file), "is a FIFO and cannot be read again")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), f"is not text: {error}") from error


def _configured_directory(file: Path) -> str | None:
    """Return `[server] runtime_directory` alone: the file may be incomplete if the daemon got the rest as flags."""
    try:
        server = tomllib.loads(_read(file)).get("server", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), f"not TOML: {error}") from error
    directory = server.get("runtime_directory") if isinstance(server, dict) else None
    return directory if isinstance(directory, str) else None


def _overrides(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that flags set, and the flag that set each, both by dotted key."""
    overrides: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for flag, key in PLAIN_FLAGS.items():
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            overrides[key], sources[key] = value, flag
    for key, value in vllm_overrides(arguments).items():
        overrides[key], sources[key] = value, f"--{key.rpartition('.')[2].replace('_', '-')}"
    if arguments.served_model_name is not None:
        if arguments.name is not None:
            raise ConfigError("--served-model-name", "cannot be combined with --name")
        overrides["model.name"], sources["model.name"] = arguments.served_model_name, "--served-model-name"
    if arguments.api_key is not None:
        overrides["server.api_keys"] = [_digest(key) for key in arguments.api_key]
    for key, value in _devices(arguments.device, arguments.kv_bytes).items():
        overrides[key], sources[key] = value, "--kv-bytes" if key.endswith("kv_bytes") else "--device"
    for words in arguments.role:
        worker, role = _role(words)
        overrides[f"scheduler.fixed_roles.{worker}"] = role
    for words in arguments.set:
        key, value = _assignment(words)
        overrides[key], sources[key] = value, f"--set {key}"
    return overrides, sources


def _role(words: str) -> tuple[str, str]:
    worker, _, role = words.partition("=")
    if not worker or "." in worker or role not in ROLES:
        raise ConfigError("--role", f"{words!r} is not WORKER=ROLE with one of the roles {', '.join(ROLES)}")
    return worker, role


def _digest(key: str) -> str:
    if not key.strip():
        raise ConfigError("--api-key", "is empty")
    return key if key.startswith("sha256:") else f"sha256:{sha256(key.encode()).hexdigest()}"


def _devices(device: str | None, kv_bytes: str | None) -> dict[str, Any]:
    """Return keys of `[devices]`, with the other kind of device unset, so that a flag replaces the file's choice."""
    kind, _, which = (device or "").partition(":")
    if kind not in ("", "auto", "cpu", "cuda") or (which and kind not in ("cpu", "cuda")):
        raise ConfigError("--device", f"{device!r} is not cuda:0,1, cpu:2 or auto")
    if kv_bytes is not None and kind in ("auto", "cuda"):
        raise ConfigError("--kv-bytes", f"applies to CPU devices and cannot be combined with --device {device}")
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
        raise ConfigError("--device", "no GPUs given: write cuda:0,1 (or auto for all)")
    return [int(name) if name.isdecimal() else name for name in names]


def _count(which: str) -> int:
    if not which.isdecimal():
        raise ConfigError("--device", f"cpu:{which} is not a number of CPU devices: write cpu:2, for example")
    return int(which)


def _assignment(words: str) -> tuple[str, Any]:
    """Split `TABLE.KEY=VALUE` into its key and its value."""
    key, equals, text = words.partition("=")
    key = key.strip()
    if not equals or "." not in key or not all(key.split(".")):
        raise ConfigError(f"--set {words}", "is not TABLE.KEY=VALUE")
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        table = {}
    if set(table) != {"value"}:
        raise ConfigError(f"--set {key}", f"{text!r} is not a TOML value (strings need quotes: '{key}=\"...\"')")
    return key, table["value"]
