"""`melld check-config`: check that `melld serve` can use a configuration, without starting it.

Owns the checks of the files that the configuration names, and vLLM's check.  Never loads a model and starts nothing.
"""

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from melld.api.connections.reach import refuse_open_listen
from melld.api.keys import load_keys
from melld.cli import BAD_USAGE, DONE
from melld.cli.config_flags import add_config_flags, load_config
from melld.cluster.facts import check_installed
from melld.config import Config
from melld.control.runtime_directory import runtime_directory
from melld.daemon.devices import find_gpus, kind_of, make_slots, slots_by_model
from melld.daemon.preflight import check_model, check_policy
from melld.daemon.sizes import fitted
from melld.daemon.systemd import KEYS_CREDENTIAL, read_supervision, remark_on_key_file
from melld.engine.arguments import engine_arguments
from melld.engine.model_files import answer_formats
from melld.engine.pin import check_build
from melld.errors import ConfigError
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = "Validate a configuration and the files it names, and print it with all defaults filled in."
    parser.epilog = "Exit codes: 0 valid, 2 invalid; one line then says where and why."
    parser.add_argument("file", metavar="FILE", nargs="?", help="same as --config FILE")
    parser.add_argument("--quick", action="store_true", help="skip vLLM's own check, which takes several seconds")
    parser.add_argument("--json", action="store_true", help="print the configuration as JSON")
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration and print it; return 0, or 2 after one line on standard error."""
    try:
        if arguments.file is not None:
            if arguments.config is not None:
                raise ConfigError("--config", "cannot be combined with FILE")
            arguments.config = arguments.file
        config = load_config(arguments, os.environ)
        check_policy(config.scheduler.policy)
        check_installed(config.cluster)
        for model in config.served:
            check_model(model.path)
            engine_arguments(config.alone(model), "cpu")
        check_keys(config, os.environ)
        gpus = find_gpus(config.devices, Nvml(), os.environ)
        config = fitted(config, gpus)
        slots_by_model(config, gpus, os.environ)
        moves = {} if arguments.quick else check_with_vllm(config, gpus)
    except ConfigError as error:
        print(f"melld check-config: {error}", file=sys.stderr)
        return BAD_USAGE
    for model in config.served:
        if not Path(model.path).is_dir():
            where = "not a local directory: `melld serve` will look for it on Hugging Face"
            print(f"melld check-config: note: {model.path} is {where}", file=sys.stderr)
    print(_report(config, moves, as_json=arguments.json))
    if os.geteuid() == 0 and config.server.api_key_file is not None:  # root checks on behalf of the service
        remark = remark_on_key_file(config.server.api_key_file)
        if remark is not None:
            print(f"melld check-config: warning: {remark}", file=sys.stderr)
    return DONE


def check_with_vllm(config: Config, gpus: list[Device]) -> dict[str, str]:
    """Have vLLM build its configuration and its front end, if vLLM is installed, for each model that is a directory.

    Returns how each model's requests move.

    Raises:
        ConfigError: vLLM refuses a setting.
    """
    local = [model for model in config.served if Path(model.path).is_dir()]
    if importlib.util.find_spec("vllm") is None or not local:
        return {}
    kind = kind_of(gpus)
    check_build(kind)
    slots = make_slots(config.alone(local[0]), gpus, os.environ, models=len(config.served))
    os.environ.update(slots[0].spec.environment)
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"  # our one line says it
    logging.getLogger("torch._library.triton").addFilter(lambda _: False)  # the CPU build never has Triton
    from melld.engine.frontend.rehearsal import moves_of, prepare

    prepared = {model.names[0]: prepare(config.alone(model), kind).frontend.vllm_config for model in local}
    return {name: moves_of(one) for name, one in prepared.items()}


def check_keys(config: Config, environment: Mapping[str, str]) -> None:
    """Read the API keys as `melld serve` would, without printing them, including those of the service manager.

    Raises:
        ConfigError: the key file cannot be used, or the API would be open to the network.
    """
    credential = read_supervision(environment, os.getpid()).credential(KEYS_CREDENTIAL)
    refuse_open_listen(config.server, load_keys(config.server, credential))


def _report(config: Config, moves: Mapping[str, str], *, as_json: bool) -> str:
    effective = msgspec.to_builtins(config)
    del effective["model" if config.models else "models"]  # the first of several
    effective["server"]["runtime_directory"] = str(runtime_directory(config.server.runtime_directory, os.environ))
    if as_json:
        return msgspec.json.encode(effective).decode()
    told = "".join(f"# {model.names[0]}: {answer_formats(model)}\n" for model in config.served)
    told += "".join(f"# {name} moves: {text}\n" for name, text in moves.items())
    return f"ok\n{told}\n{toml_text(effective)}".rstrip()


def toml_text(tables: Mapping[str, Any]) -> str:
    """Return `tables` as TOML, without what is unset: TOML has no null."""
    return tomli_w.dumps(_set(tables))


def _set(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _set(one) for key, one in value.items() if one is not None}
    return [_set(one) for one in value] if isinstance(value, list | tuple) else value
