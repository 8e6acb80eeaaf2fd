"""The demo model: a newcomer's first model, and the one that every other test serves."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from melld.cli import demo_model as command
from melld.demo_model import FILES, SPECIAL_TOKENS, VOCABULARY, make_demo_model
from melld.errors import ConfigError
from tests.forked import run_python
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "model"
    make_demo_model(directory)
    return directory


def _digests(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}


def _make_in_another_process(directory: Path) -> subprocess.Popen[bytes]:
    code = f"import pathlib, melld.demo_model as d; d.make_demo_model(pathlib.Path({str(directory)!r}))"
    return subprocess.Popen([sys.executable, "-c", code])


def test_the_same_seed_gives_the_same_bytes_in_every_process(model: Path, tmp_path: Path) -> None:
    """Two people who compare outputs compare the same model (hash seeds and threads differ between processes)."""
    assert _make_in_another_process(tmp_path / "again").wait(PATIENCE_S) == 0
    assert _digests(model) == _digests(tmp_path / "again")


def test_two_makers_at_once_both_get_the_whole_model(model: Path, tmp_path: Path) -> None:
    """Two daemons that start side by side for the first time do not trip over each other."""
    makers = [_make_in_another_process(tmp_path / "shared") for _ in range(2)]
    assert [maker.wait(PATIENCE_S) for maker in makers] == [0, 0]
    assert _digests(model) == _digests(tmp_path / "shared")
    assert [entry.name for entry in tmp_path.iterdir()] == ["shared"]


def test_another_seed_gives_other_weights_with_the_same_tokenizer(model: Path, tmp_path: Path) -> None:
    """A seed is a different model, not a different language."""
    make_demo_model(tmp_path / "other", seed=1)
    ours, other = _digests(model), _digests(tmp_path / "other")
    assert ours["model.safetensors"] != other["model.safetensors"]
    assert ours["tokenizer.json"] == other["tokenizer.json"]


def test_a_complete_model_is_left_alone(model: Path) -> None:
    """`make serve` twice does not rewrite files that a running worker has mapped."""
    before = {name: (model / name).stat().st_mtime_ns for name in FILES}
    make_demo_model(model)
    assert before == {name: (model / name).stat().st_mtime_ns for name in FILES}


def test_nothing_else_is_ever_overwritten(model: Path, tmp_path: Path) -> None:
    """A typo in the path must not cost anybody their files."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="cannot create a demo model here"):
        make_demo_model(tmp_path / "notes")
    with pytest.raises(ConfigError, match="was made with seed 0"):
        make_demo_model(model, seed=7)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]
    assert (tmp_path / "notes" / "precious.txt").read_text() == "keep me"


def test_a_damaged_model_is_reported(model: Path, tmp_path: Path) -> None:
    """A truncated file, say on a full disk, is named in one line."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        make_demo_model(damaged)


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    """A directory that a package or a volume mount has created is as good as none."""
    make_demo_model(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    make_demo_model(tmp_path / "empty")
    assert _digests(tmp_path / "a" / "b") == _digests(tmp_path / "empty")


def test_the_tokenizer_round_trips_any_text_and_hides_only_special_tokens(model: Path) -> None:
    """Any client's text survives, emoji included; tool and reasoning markers stay visible to their parsers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == VOCABULARY
    for text in ("Hello, how are you?", "naïve 🦙 \x00 日本語\n\t  x", '{"a": [1, 2.5e9]}', "a <tool_call> <think>b"):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    english = "This is an ordinary sentence with words that are used in many texts."
    assert len(tokenizer.encode(english)) < len(english) / 2.5


def test_the_chat_template_renders_every_role_and_tools(model: Path) -> None:
    """Agents send histories with calls and results; the order and the markers are what the hermes parser expects."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|begin|><|im_start|>system\nBe kind.\n")
    assert json.dumps(tools[0]) in text
    assert '<|im_start|>assistant\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    results = "user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    assert text.endswith(f"<|im_start|>{results}<|im_start|>assistant\n")
    plain = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert plain == "<|begin|><|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"


def test_greedy_text_is_varied_and_depends_on_the_whole_prompt(model: Path) -> None:
    """With a model that repeats one word every test of unchanged tokens would pass vacuously."""
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model)

    prompt = [0, *range(300, 360)]
    ids = torch.tensor([prompt, [0, 999, *prompt[2:]]])
    output = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)
    answer, other = output[:, len(prompt) :].tolist()
    assert len(answer) == 200, "a greedy answer runs to its limit"
    assert len(set(answer)) > 100
    assert len(set(answer[-50:])) > 25, "no cycle at the end either"
    assert sum(one == two for one, two in zip(answer, other, strict=True)) < 100


@pytest.mark.long  # its short form: all daemons of the tests serve it
def test_vllm_serves_it_like_transformers(model: Path) -> None:
    """The workers' engine accepts the files, and its greedy tokens are those of the reference."""
    import torch
    from transformers import AutoModelForCausalLM

    script = (
        "import json, sys; from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=512,"
        " kv_cache_memory_bytes=1 << 24)\n"
        "    answer = llm.generate({'prompt_token_ids': list(range(300, 340))},"
        " SamplingParams(temperature=0, max_tokens=24))\n"
        "    print('TOKENS', json.dumps(list(answer[0].outputs[0].token_ids)))\n"
    )
    knobs = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = run_python("-c", script, str(model), env=os.environ | knobs)
    assert done.returncode == 0, done.stderr[-2000:]
    served = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOKENS"))[7:])
    ids = torch.tensor([list(range(300, 340))])
    llama = AutoModelForCausalLM.from_pretrained(model)
    output = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert served == output[0][40:].tolist()


def test_the_command_makes_the_model_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script can rely on the exit code and on the JSON."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    directory = str(tmp_path / "m")
    assert command.run(parser.parse_args([directory, "--json"])) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["directory"] == directory
    assert report["size_bytes"] > 16_000_000
    assert command.run(parser.parse_args([directory, "--seed", "3"])) == 1
    assert "seed 0" in capsys.readouterr().err
