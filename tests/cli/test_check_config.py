"""`melld check-config`, which an operator runs before a restart."""

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.cli import main
from melld.cli.check_config import toml_text
from melld.config_text import parse_config
from tests.cli.here import melld_here
from tests.forked import run_melld

KEY = "sk-a-key-that-nobody-may-see"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model, as far as a check can tell, and a configuration that names it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "keys").write_text(f"# for the office\n{KEY}\nsha256:{hashlib.sha256(b'k').hexdigest()}\n")
    (tmp_path / "melld.toml").write_text(
        """
[model]
path = "model"
vllm = {max_model_len = 4096, compilation_config = {cudagraph_mode = "NONE"}}
[server]
port = 9000
"""
    )
    return tmp_path


def check(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return melld_here("check-config", "--quick", *words, cwd=place, env={**os.environ, **environment})


def test_success_prints_the_effective_configuration(place: Path) -> None:
    """Every default is visible, and the output is itself a valid, equal configuration."""
    done = check(place, "--device", "cpu:2", XDG_RUNTIME_DIR="/run/user/7")
    assert (done.returncode, done.stderr) == (0, "")
    ok, _, text = done.stdout.partition("\n")
    assert ok == "ok"
    flags = {"devices.cpu.count": 2, "server.runtime_directory": "/run/user/7/melld"}
    assert parse_config(text, "printed") == parse_config((place / "melld.toml").read_text(), "file", flags)


def test_a_role_must_name_an_existing_worker(place: Path) -> None:
    """The daemon would not start with another."""
    done = check(place, "--device", "cpu:2", "--role", "w2=prefill")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'w2' is not one of the workers w0, w1" in done.stderr
    assert check(place, "--device", "cpu:2", "--role", "w1=prefill").returncode == 0
    several = '[[models]]\npath = "model"\nname = "a"\n[[models]]\npath = "model"\nname = "b"\n'
    (place / "several.toml").write_text(several)
    assert "w0, w1, w2, w3" in check(place, "several.toml", "--device", "cpu:2", "--role", "w4=prefill").stderr


def test_json_is_available_for_scripts(place: Path) -> None:
    """Deployment tools read the effective values."""
    done = check(place, "melld.toml", "--json", "--name", "office")
    assert done.returncode == 0
    config = json.loads(done.stdout)
    assert (config["server"]["port"], config["model"]["name"]) == (9000, "office")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["gone.toml"], "gone.toml: cannot be read: No such file or directory"),
        (["melld.toml", "--config", "melld.toml"], "--config: cannot be combined with FILE"),
        (["--model", "./elsewhere"], "[model] path: no such directory: ./elsewhere"),
        (["--model", "."], "[model] path: . has no config.json"),
        (["--model", "scribble"], "[model] path: scribble/config.json is not JSON"),
        (["--model", "listing"], "[model] path: listing/config.json is not JSON"),
        (["--api-key-file", "gone"], "gone: the keys cannot be read: No such file"),
        (["--api-key-file", "blank"], "[server.api_key_file]: blank contains no key"),
        (["--host", "0.0.0.0"], "[server.host]: 0.0.0.0 is reachable from other machines"),  # noqa: S104
        (["--set", "model.vllm.tensor_parallel_size=2"], "[model.vllm] tensor_parallel_size: use [devices] per_worker"),
        (["--set", "model.vllm.max_num_sqs=2"], "[model.vllm] max_num_sqs: vLLM has no such option"),
        (["--set", 'scheduler.policy="luck"'], "[scheduler] policy: 'luck' is not one of "),
        (["--device", "cuda:0"], "[devices] cuda: no GPU found"),
        (["--allowed-origins", "https://a.example/chat"], '--allowed-origins: wants "*" or origins: a scheme (http,'),
        (["--allowed-origins", "*", "--allow-credentials"], '--allow-credentials: with "*" would let any web page'),
        (["--set", "server.prt=1"], "melld.toml: [server] unknown key `prt`"),
    ],
)
def test_what_would_not_start_is_reported_in_one_line(place: Path, words: list[str], why: str) -> None:
    """Found before the restart, with the same code 2 that stops systemd from restarting."""
    for name, text in {"scribble": "{", "listing": "[]"}.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(text)
    (place / "blank").write_text("\n# none yet\n")
    done = check(place, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"melld check-config: {why}")
    assert done.stderr.count("\n") == 1


def test_a_cluster_without_ray_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same line and code as the daemon's, which reaches the cluster later than its files."""
    monkeypatch.chdir(place)
    words = ["check-config", "--quick", "--device", "cpu", "--cluster", "10.0.0.1:6379"]
    assert main(words) == 0
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said == "melld check-config: [cluster] address: Ray is not installed: see docs/cluster.md, step 1\n"


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('[devices]\ncpu = 1\nlent_kv_bytes = "1GiB"\n', "[devices] lent_kv_bytes: no GPU is available"),
        ('[cluster]\naddress = "auto"\n', "[cluster] supports one model"),
    ],
)
def test_unsupported_settings_of_several_models_are_reported_too(place: Path, table: str, told: str) -> None:
    """What the daemon would refuse at start, the check refuses before."""
    models = "".join(f'[[models]]\npath = "model"\nname = "{name}"\n' for name in "ab")
    (place / "melld.toml").write_text(models + table)
    done = check(place)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_configuration_is_utf_8_whatever_the_locale(place: Path) -> None:
    """TOML is; a minimal container's locale is not."""
    (place / "melld.toml").write_bytes('[model]\npath = "model"\nname = "Grüße"\n'.encode())
    words = (sys.executable, "-m", "melld", "check-config", "--quick", "--json")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["model"]["name"] == "Grüße"


def test_a_hub_name_is_left_to_vllm(place: Path) -> None:
    """A model named as on its hub is found when it is loaded, not here, and the check says so."""
    done = check(place, "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert done.returncode == 0
    assert "note: meta-llama/Llama-3.1-8B-Instruct is not a local directory" in done.stderr


def test_it_loads_nothing_heavy(place: Path) -> None:
    """A check before every restart must be quick, and work on a machine without vLLM."""
    code = """
import sys
from melld.cli import main
code = main(["check-config", "--quick", "--json"])
print(code, sorted({"torch", "vllm", "aiohttp"} & set(sys.modules)), file=sys.stderr)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.stderr == "0 []\n"


def test_keys_are_read_and_never_shown(place: Path) -> None:
    """An operator can paste the output into a ticket."""
    done = check(place, "--api-key-file", "keys", "--host", "0.0.0.0")  # noqa: S104
    assert done.returncode == 0
    assert KEY not in done.stdout + done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="an administrator is told, who checks for the service")
def test_a_key_file_that_the_service_cannot_read_is_reported(place: Path) -> None:
    """A file that only root can read would keep the service from starting."""
    (place / "keys").chmod(0o600)
    done = check(place, "--api-key-file", "keys")
    assert done.returncode == 0
    assert "warning: [server] api_key_file: keys cannot be read by the service" in done.stderr
    assert KEY not in done.stderr


def test_the_systemd_credential_counts(place: Path) -> None:
    """As ExecStartPre= of the unit, the check sees the key that the daemon will see."""
    (place / "credentials").mkdir()
    (place / "credentials" / "api-keys").write_text(KEY)
    done = check(place, "--host", "0.0.0.0", CREDENTIALS_DIRECTORY=str(place / "credentials"))  # noqa: S104
    assert (done.returncode, done.stderr) == (0, "")


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@given(st.dictionaries(words, st.dictionaries(words, values, max_size=4), max_size=3))
def test_printed_toml_round_trips(tables: dict[str, dict[str, object]]) -> None:
    """vLLM's options may hold anything; the printed file still means the same."""
    assert tomllib.loads(toml_text(tables)) == tables


def test_what_vllm_would_refuse_is_reported_too(place: Path, demo_model: Path) -> None:
    """The check finds what the start would: README's own file with a model whose tools differ."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json")
    words = ("--model", str(demo_model), "--max-model-len", "512", *tools)
    done = run_melld("check-config", *words, cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("melld check-config: [model.vllm] tool_call_parser: ")
    assert done.stderr.count("\n") == 1


def test_a_model_larger_than_its_device_is_refused_among_several(place: Path) -> None:
    """With the arithmetic: half precision takes twice as much on a CPU, which computes in float32."""
    (place / "model" / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    with (place / "model" / "model.safetensors").open("wb") as weights:
        weights.truncate(60 << 20)
    several = (
        'models = ["model", {path = "model", name = "other"}]\n[devices]\ncpu = {count = 1, memory_bytes = "%s"}\n'
    )
    (place / "several.toml").write_text(several % "100MiB")
    done = check(place, "several.toml")
    assert done.returncode == 2
    assert "[[models]] model: its weights take 120 MiB as float32, but a device may hold 100 MiB" in done.stderr
    assert "20 MiB too much" in done.stderr
    (place / "several.toml").write_text(several % "130MiB")
    assert check(place, "several.toml").returncode == 0
