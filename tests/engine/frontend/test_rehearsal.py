"""What vLLM refuses is reported in one line that names the key, before any worker loads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from melld.demo_model import make_demo_model
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.audio_model import make_hearing_model
from tests.forked import run_python

# vLLM takes seconds to import, and warns: one process of its own answers all cases.
SCRIPT = """
import json, sys
from melld.config_text import parse_config
from melld.engine.frontend import prepared
from melld.engine.frontend.rehearsal import moves_of, prepare
from melld.engine.vllm_options import frontend_options
from melld.errors import ConfigError
unread = set(frontend_options())
class Watched(prepared.Namespace):
    def __getattribute__(self, name):
        unread.discard(name)
        return super().__getattribute__(name)
prepared.Namespace = Watched
for line in sys.stdin:
    model, options = json.loads(line)
    config = parse_config("", "the test", {"model.path": model, "model.vllm": options, "devices.cpu": 1})
    try:
        front = prepare(config, "cpu")
        vllm_config, arguments = front.frontend.vllm_config, front.arguments
        told = ["served", vllm_config.model_config.served_model_name, *arguments.served_model_name]
        told += filter(None, [arguments.structured_outputs_config.reasoning_parser])
        told += [moves_of(vllm_config)]
    except ConfigError as error:
        told = [error.where, error.why]
    print("TOLD", json.dumps(told), flush=True)
print("TOLD", json.dumps(sorted(unread)))
"""
TOOL_PARSER = """
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
@ToolParserManager.register_module("ours")
class Ours(Hermes2ProToolParser): ...
"""
REASONING_PARSER = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser
@ReasoningParserManager.register_module("ours")
class Ours(IdentityReasoningParser): ...
"""
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
TOOLS = {"enable_auto_tool_choice": True}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({**TOOLS, "tool_call_parser": "llama3_json", "max_model_len": 512}, "tool_call_parser", "<|python_tag|>"),
    ({**TOOLS, "tool_call_parser": "nope"}, "tool_call_parser", "nope"),
    ({"tool_call_parser": "hermse"}, "tool_call_parser", "did you mean 'hermes'?"),
    ({"reasoning_parser": "qwen"}, "reasoning_parser", "did you mean 'qwen3'?"),
    ({"max_model_len": 99999999, "max_num_seqs": 8}, "max_model_len", "greater than the derived max_model_len"),
    ({"max_model_len": "many", "max_num_seqs": 8}, "max_model_len", "valid integer"),
    ({"quantization": "fp8", "max_num_seqs": 8}, "quantization", "not supported for quantization method fp8"),
    ({"reasoning_parser": "nope", "max_num_seqs": 8}, "reasoning_parser", "is not one of auto, none"),
    ({"chat_template": "/no/such", "max_num_seqs": 8}, "chat_template", "doesn't exist"),
    ({"chat_template": "{% for", "max_num_seqs": 8}, "chat_template", "is not a Jinja template"),
    ({"gpu_memory_utilization": 3.0, "max_num_seqs": 8}, "gpu_memory_utilization", "less than or equal to 1"),
    ({"compilation_config": {"x": 1}, "max_num_seqs": 8}, "compilation_config", "x: Unexpected keyword"),
    ({"hf_overrides": {"num_hidden_layers": "x"}}, "hf_overrides", "num_hidden_layers"),
]


def remembers(directory: Path) -> None:
    """Return a Granite 4 with a Mamba layer, without its weights."""
    make_demo_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
    config |= {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 0}
    config |= {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def told(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The result of each case: those of `REFUSED`, a directory without a model, one served twice, plugins.

    At the end the options of vLLM's API that nobody has asked for.
    """
    wrong = tmp_path_factory.mktemp("wrong")
    (wrong / "config.json").write_text('{"model_type": "no such thing"}')
    served = (str(demo_model), {**TOOLS, "tool_call_parser": "hermes"})
    (wrong / "tools.py").write_text(TOOL_PARSER)
    (wrong / "reasons.py").write_text(REASONING_PARSER)
    plugins = {"tool_parser_plugin": str(wrong / "tools.py"), "reasoning_parser_plugin": str(wrong / "reasons.py")}
    ours = {**TOOLS, "tool_call_parser": "ours", "reasoning_parser": "ours"}
    cases = [*((str(demo_model), options) for options, _, _ in REFUSED), (str(wrong), {}), served, served]
    cases += [(str(demo_model), ours | plugins), (str(demo_model), {"tool_parser_plugin": "/no/such"})]
    make_hearing_model(wrong / "hears")
    remembers(wrong / "remembers")
    cases += [(str(wrong / name), {}) for name in ("hears", "remembers")]
    cases += [(str(wrong / "remembers"), {"speculative_config": NGRAMS})]
    done = run_python(
        *("-c", SCRIPT),
        input="".join(f"{json.dumps(case)}\n" for case in cases),
        env=os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]


def test_what_vllm_refuses_is_reported_in_one_line(told: list[list[str]]) -> None:
    """A mistake in one option costs seconds and one look, not a model's loading and a traceback."""
    for (options, key, words), (where, why) in zip(REFUSED, told[: len(REFUSED)], strict=True):
        assert where == f"[model.vllm] {key}", (options, why)
        assert words in why
        assert "\n" not in why


def test_files_that_are_no_model_are_reported_by_path(told: list[list[str]]) -> None:
    """With no option to blame it is the model."""
    where, why = told[len(REFUSED)]
    assert where == "[model] path"
    assert "\n" not in why


def test_what_vllm_accepts_is_prepared(told: list[list[str]], demo_model: Path) -> None:
    """Repeatedly in one process, as a daemon prepares before it serves."""
    assert told[len(REFUSED) + 1 :][:2] == [["served", demo_model.name, demo_model.name, "KV, 4.1 KB a token"]] * 2


def test_custom_parsers_are_imported(told: list[list[str]], demo_model: Path) -> None:
    """Their files are read, an unreadable one is named, and the API has the reasoning parser."""
    served, refused = told[len(REFUSED) + 3 :][:2]
    assert served == ["served", demo_model.name, demo_model.name, "ours", "KV, 4.1 KB a token"]
    assert refused == ["[model.vllm] tool_parser_plugin", "/no/such cannot be imported: see the log"]


def test_an_audio_model_is_prepared(told: list[list[str]]) -> None:
    """It has an encoder and a decoder, and no chat."""
    assert told[-4] == ["served", "hears", "hears", "tokens, not KV (an encoder's output)"]


def test_a_model_with_states_is_prepared(told: list[list[str]]) -> None:
    """Some of its layers keep a state instead of KV."""
    assert told[-3] == ["served", "remembers", "remembers", "KV with state, 39.3 KB + 1.02 KB a token"]


def test_drafts_with_states_on_a_cpu_are_refused(told: list[list[str]]) -> None:
    """The text would change: vLLM's kernels go on from the states of rejected drafts."""
    assert told[-2] == [
        "[model.vllm] speculative_config",
        "vLLM generates different text with speculative decoding on CPUs: remove this option",
    ]


def test_no_api_option_is_accepted_and_forgotten(told: list[list[str]]) -> None:
    """Every option accepted for vLLM's serving classes is read when they are built."""
    assert told[-1] == []
