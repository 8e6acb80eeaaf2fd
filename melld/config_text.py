"""Reads the configuration from the text of one TOML file; command-line flags override it.

An unknown key or a bad value raises a `ConfigError` that says where; so do keys that contradict each other.
`melld.cli` reads the file and the environment.
"""

import json
import re
import tomllib
from typing import Any

from melld.config import SERVED_MODEL_NAME, ClusterConfig, Config, CpuDevices, ModelConfig
from melld.config_reading import read_tables
from melld.config_server import ClientConfig, ServerConfig
from melld.config_values import DIGEST, ORIGIN_SCHEMES, is_address, origin_in
from melld.errors import ConfigError

SHORT_FORMS = {
    "model": ModelConfig.short_form,
    "cluster": ClusterConfig.short_form,
    "devices.cpu": CpuDevices.short_form,
}
TOML_HINT = 'write KEY = VALUE with text in quotes, such as host = "127.0.0.1" or port = 8000, below its [table]'


def parse_config(text: str, where: str, overrides: dict[str, Any] | None = None) -> Config:
    """Return the configuration in `text` (TOML), with `overrides` (dotted key -> value) applied.

    Raises:
        ConfigError: the text is not TOML, a key is unknown, a value is of the wrong type or out of range.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(where, f"not TOML: {error}; {TOML_HINT}") from error
    for dotted, value in (overrides or {}).items():
        _lay_over(tables, dotted, value)
    _name_first_model(tables, where)
    config = read_tables(tables, Config, where)
    _check_together(config, where)
    return config


def _name_first_model(tables: dict[str, Any], where: str) -> None:
    """Use the first of `[[models]]` as `model`, for code that knows only one."""
    models = tables.get("models")
    if not isinstance(models, list | tuple) or not models:
        return
    if "model" in tables:
        raise ConfigError(
            where,
            "[model] and [[models]] (or --model) are both given: use the first for one model, the second for several",
        )
    tables["model"] = models[0]


def _lay_over(tables: dict[str, Any], dotted: str, value: object) -> None:
    *path, key = dotted.split(".")
    table = tables
    for depth, name in enumerate(path, 1):
        inner = table.get(name, {})
        if not isinstance(inner, dict):
            short = SHORT_FORMS.get(".".join(path[:depth]))
            if short is None:
                raise ConfigError(dotted, f"{name} is not a table")
            inner = {short: inner}
        table[name] = inner
        table = inner
    table[key] = value


def _check_names(model: ModelConfig, where: str) -> None:
    served = model.vllm_option(SERVED_MODEL_NAME)
    if served is not None and model.name is not None:
        raise ConfigError(where, f"[model] has a name and [model.vllm] a {SERVED_MODEL_NAME}: keep one of them")
    key, given = ("model.name", model.name) if served is None else (f"model.vllm.{SERVED_MODEL_NAME}", served)
    names = given if isinstance(given, list | tuple) else (given,)
    if given is not None and (not names or not all(isinstance(name, str) and name for name in names)):
        raise ConfigError(where, f'[{key}] must be a name or a list of names, such as ["llama", "gpt-4o"]')


def _check_models(models: tuple[ModelConfig, ...], where: str) -> None:
    owners: dict[str, ModelConfig] = {}
    for model in models:
        _check_names(model, where)
        for name in (*model.names, *(adapter.name for adapter in model.lora)):
            if name in owners:
                raise ConfigError(
                    where,
                    f"[[models]] {owners[name].path} and {model.path} are both called {name!r}: rename one",
                )
            owners[name] = model


def _check_keys(server: ServerConfig, where: str) -> None:
    digests = [("api_keys", digest) for digest in server.api_keys]
    for name, digest in digests + [("clients.key", client.key) for client in server.clients]:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            why = f"holds something other than {DIGEST}, as `printf %s KEY | sha256sum` prints them"
            raise ConfigError(where, f"[server.{name}] {why}")
    owners: dict[str, ClientConfig] = {}
    for client in server.clients:
        if (owner := owners.setdefault(client.key, client)) != client:
            raise ConfigError(
                where, f"[server.clients] {owner.name} and {client.name} have the same key: keep one of them"
            )
        if not re.fullmatch(r"[\w.-]{1,64}", client.name):
            raise ConfigError(where, "[server.clients.name] must have at most 64 letters, digits and - . _")
        least, own = client.min_priority, client.priority
        if least is not None and own is not None and own < least:
            why = f"{client.name} has min_priority {least}: its priority must not be below that ({own})"
            raise ConfigError(where, f"[server.clients] {why}")


def _check_origins(server: ServerConfig, where: str) -> None:
    for origin in server.allowed_origins:
        if origin != "*" and (meant := origin_in(origin)) != origin:
            wants = f'"*" or origins: a scheme ({", ".join(ORIGIN_SCHEMES)}) and a host, no path'
            example = f'such as "{meant or "https://chat.example.org"}", not {json.dumps(origin)}'
            raise ConfigError(where, f"[server.allowed_origins] wants {wants}, {example}")
    if "*" in server.allowed_origins and server.allow_credentials:
        why = 'with "*" would let any web page act on behalf of its visitor: list the origins in allowed_origins'
        raise ConfigError(where, f"[server.allow_credentials] {why}")
    for key, names in (("allowed_methods", server.allowed_methods), ("allowed_headers", server.allowed_headers)):
        if wrong := [name for name in names if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII)]:
            raise ConfigError(where, f'[server.{key}] wants names, or all, such as "*", not {json.dumps(wrong[0])}')


def _check_together(config: Config, where: str) -> None:
    _check_models(config.served, where)
    if config.devices.cuda is not None and config.devices.cpu is not None:
        raise ConfigError(where, "[devices] has both cuda and cpu: keep one, such as cuda = [0, 1] or cpu = 2")
    if config.devices.cuda is not None and not config.devices.cuda:
        raise ConfigError(where, "[devices] cuda is empty: list GPUs, such as [0, 1], or omit it to use all")
    if config.devices.group_size > 1 and len(config.served) > 1:
        raise ConfigError(
            where, "[devices] per_worker above 1 requires a single model: several models share single devices"
        )
    if config.devices.cpu is not None:
        _ = config.devices.cpu.kv_cache_bytes, config.devices.cpu.memory_limit_bytes
    address = config.cluster.address
    if address not in (None, "auto") and not is_address(str(address)):
        wants = """[cluster.address] wants auto, or HOST:PORT of Ray's head, such as "10.0.0.1:6379", not"""
        raise ConfigError(where, f"{wants} {str(address)!r}")
    if address is not None and len(config.served) > 1:
        raise ConfigError(where, "[cluster] supports one model only: serve several on one machine")
    if config.cluster.kv == "nixl" and not config.cluster.kv_interface:
        raise ConfigError(
            where, '[cluster] kv = "nixl" requires kv_interface, on a trusted network: UCX does not authenticate peers'
        )
    _ = config.devices.lent_bytes, config.migration.link_limit_bytes_per_s, config.idle.cached_bytes
    _check_keys(config.server, where)
    _check_origins(config.server, where)
