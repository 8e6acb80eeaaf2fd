"""What users of `vllm serve` and Ollama type is understood, or answered with the nearest match."""

import argparse
import hashlib
from typing import Any

import pytest

from melld.cli import main, serve
from melld.cli.config_flags import load_config
from melld.config import Config
from melld.engine.vllm_options import option_kinds


def load(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return load_config(serve.with_model(parser.parse_args(words)), {"CONFIGURATION_DIRECTORY": "/nowhere"})


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--max-model-len 16384", {"max_model_len": 16384}),
        ("--max_model_len=16k", {"max_model_len": 16000}),
        ("--max-model-len 16K", {"max_model_len": 16384}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--gpu-memory-utilization 0.85", {"gpu_memory_utilization": 0.85}),
        ("--gpu-memory-utilization .85", {"gpu_memory_utilization": 0.85}),
        ("--gpu-memory-utilization 85e-2", {"gpu_memory_utilization": 0.85}),
        ("--enforce-eager --trust-remote-code", {"enforce_eager": True, "trust_remote_code": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("-q fp8 --dtype float16", {"quantization": "fp8", "dtype": "float16"}),
        ("--enable-auto-tool-choice --tool-call-parser hermes",
         {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}),
        ('--override-generation-config {"temperature":0.5}', {"override_generation_config": {"temperature": 0.5}}),
        ("--allowed-media-domains a.org b.org", {"allowed_media_domains": ["a.org", "b.org"]}),
        ("--tokenizer 7", {"tokenizer": "7"}),
        ("--optimization-level 1", {"optimization_level": 1}),
        ("--hf-token", {"hf_token": True}),
        ("-tp 2", {"tensor_parallel_size": 2}),
    ],
)  # fmt: skip
def test_an_option_of_vllm_serve_works_in_melld_serve(words: str, options: dict[str, Any]) -> None:
    """A vLLM command line works with one word changed; what melld refuses it refuses by name."""
    assert load("models/llama", *words.split()).model.vllm == options


def test_every_option_of_vllm_serve_is_accepted() -> None:
    """None waits for somebody to think of it."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    missing = [name for name in option_kinds() if f"--{name.replace('_', '-')}" not in parser._option_string_actions]
    assert missing == []
    assert {"max_model_len", "tool_call_parser", "ssl_keyfile", "enable_log_requests"} <= set(option_kinds())


def test_server_options_mean_melld_s_own() -> None:
    """Address, port, keys and names are spelled as in vLLM."""
    config = load(
        "models/llama", "--host", "::1", "--port", "8001", "--api-key", "sk-one", "--served-model-name", "a", "b"
    )
    assert (config.server.host, config.server.port, config.model.names) == ("::1", 8001, ("a", "b"))
    assert config.server.api_keys == (f"sha256:{hashlib.sha256(b'sk-one').hexdigest()}",)
    assert config.server.api_key_file is None


def test_origins_are_allowed_as_in_vllm() -> None:
    """A JSON list, or words; credentials by a flag without a value."""
    server = load("m", "--allowed-origins", '["http://a.example", "http://b.example"]', "--allow-credentials").server
    assert (server.allowed_origins, server.allow_credentials) == (("http://a.example", "http://b.example"), True)
    words = ("--allowed-origins", "*", "--allowed-methods", '["GET"]', "--allowed-headers", "X-A", "X-B")
    server = load("m", *words).server
    assert (server.allowed_origins, server.allowed_methods) == (("*",), ("GET",))
    assert (server.allowed_headers, server.allow_credentials) == (("X-A", "X-B"), False)


def test_the_model_is_named_without_a_flag() -> None:
    """`vllm serve MODEL`, `ollama run MODEL`."""
    assert load("models/llama").model.path == "models/llama"
    assert load("--port", "1", "models/llama", "--enforce-eager").model.path == "models/llama"
    assert load("--model", "models/llama").model.path == "models/llama"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("stauts", "unknown command 'stauts'; did you mean 'status'?"),
        ("ls", "did you mean 'models'?"),
        ("run llama3", "did you mean 'serve'?"),
        ("run --gpus 1 llama3 --keepalive 1m", "did you mean 'serve'?"),
        ("run", "melld run -- COMMAND ..."),
        ("xyzzy", "simulate"),
        ("status --wach", "did you mean '--watch'?"),
        ("serve m --max-modl-len 3", "did you mean '--max-model-len'?"),
        ("serve m --max_model_length=3", "did you mean '--max-model-len'?"),
        ("serve m --max-model-len many", "wants a whole number, such as 16384 or 16k, not 'many'"),
        ("serve m --max-model-len 1e999k", "wants a whole number, such as 16384 or 16k, not '1e999k'"),
        ("serve m --gpu-memory-utilization most", "wants a number, such as 0.9, not 'most'"),
        ("serve m --hf-overrides {x", "is not JSON"),
        ("serve m --model n", "MODEL: is m but --model is n"),
        ("serve m --name a --served-model-name b", "--served-model-name: cannot be combined with --name"),
        ("check-config --model m --api-key= --port 1", "--api-key: is empty"),
    ],
)
def test_an_unknown_word_gets_the_nearest_suggestion(words: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A typo costs one look."""
    assert main(words.split()) == 2
    assert told in capfd.readouterr().err


def test_ps_is_status(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """As `ollama ps` and `docker ps` show what runs."""
    assert main(["ps", "--runtime-directory", str(tmp_path)]) == 3
    assert "melld status:" in capsys.readouterr().err
