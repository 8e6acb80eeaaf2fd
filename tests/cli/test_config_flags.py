"""Flags over the file: what `melld serve` and `melld check-config` make of both."""

import argparse
import os
from pathlib import Path

import pytest

from melld.cli.config_flags import add_config_flags, add_daemon_flags, daemon_directories, load_config
from melld.config import Config, CpuDevices
from melld.errors import ConfigError

FILE = """
[model]
path = "models/big"
name = "big"
[model.vllm]
dtype = "bfloat16"
[server]
port = 9000
runtime_directory = "/srv/melld"
[devices]
cuda = [0, 1]
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No melld.toml in the current directory, unless the test puts one there."""
    monkeypatch.chdir(tmp_path)


def load(*words: str, environment: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return load_config(parser.parse_args(words), environment or {})


def test_flags_alone_are_enough() -> None:
    """The first try needs no file."""
    config = load("--model", "demo", "--port", "0", "--device", "cpu:3", "--kv-bytes", "64MiB")
    assert (config.model.path, config.server.port) == ("demo", 0)
    assert config.devices.cpu == CpuDevices(count=3, kv_bytes="64MiB")


def test_roles_are_given_worker_by_worker() -> None:
    """Each flag adds one."""
    config = load("--model", "demo", "--role", "w0=prefill", "--role", "w1=decode")
    assert config.scheduler.fixed_roles == {"w0": "prefill", "w1": "decode"}


def test_flags_override_the_file(tmp_path: Path) -> None:
    """One file serves several runs; settings without a flag stay as in the file."""
    (tmp_path / "own.toml").write_text(FILE)
    config = load("--config", "own.toml", "--name", "little", "--port", "8001", "--host", "::1")
    assert (config.model.name, config.server.port, config.server.host) == ("little", 8001, "::1")
    assert (config.model.path, config.model.vllm, config.devices.cuda) == ("models/big", {"dtype": "bfloat16"}, (0, 1))


def test_the_file_in_the_current_directory_is_found(tmp_path: Path) -> None:
    """`melld serve` beside its melld.toml needs no words."""
    (tmp_path / "melld.toml").write_text(FILE)
    assert load().server.port == 9000


def test_the_service_manager_s_file_is_found(tmp_path: Path) -> None:
    """Under systemd with ConfigurationDirectory=melld, too; the current directory's takes precedence."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "melld.toml").write_text(FILE)
    environment = {"CONFIGURATION_DIRECTORY": f"{tmp_path}/etc:/elsewhere"}
    assert load(environment=environment).server.port == 9000
    (tmp_path / "melld.toml").write_text(FILE.replace("9000", "9001"))
    assert load(environment=environment).server.port == 9001


@pytest.mark.parametrize(
    ("words", "cuda", "cpu"),
    [
        (["--device", "cuda:2"], (2,), None),
        (["--device", "cuda:0,GPU-5b1e"], (0, "GPU-5b1e"), None),
        (["--device", "cpu:4"], None, CpuDevices(count=4)),
        (["--device", "cpu"], None, CpuDevices()),
        (["--device", "cpu", "--kv-bytes", "1GiB"], None, CpuDevices(kv_bytes="1GiB")),
        (["--kv-bytes", "1GiB"], None, CpuDevices(kv_bytes="1GiB")),
        (["--device", "auto"], None, None),
        ([], (0, 1), None),
    ],
)
def test_a_device_flag_replaces_the_files_devices(
    tmp_path: Path, words: list[str], cuda: tuple[int | str, ...] | None, cpu: CpuDevices | None
) -> None:
    """Trying a GPU's configuration on a laptop takes one flag and no editing."""
    (tmp_path / "melld.toml").write_text(FILE)
    devices = load(*words).devices
    assert (devices.cuda, devices.cpu) == (cuda, cpu)


def test_any_key_can_be_set_in_toml() -> None:
    """No key waits for a flag of its own, vLLM's options included."""
    config = load(
        "--model=demo",
        "--set",
        "server.drain_s=5",
        "--set",
        'model.vllm.dtype="float32"',
        "--set",
        "server.api_keys=[]",
    )
    assert (config.server.drain_s, config.model.vllm, config.server.api_keys) == (5.0, {"dtype": "float32"}, ())


@pytest.mark.parametrize(
    ("words", "where", "why"),
    [
        ([], "the flags", "no model"),
        (["--config", "gone.toml"], "gone.toml", "No such file"),
        (["--config", "."], ".", "Is a directory"),
        (["--config", "latin.toml"], "latin.toml", "not text"),
        (["--config", "broken.toml"], "broken.toml", "not TOML"),
        (["--config", "odd.toml"], "odd.toml", "[server.port] wants a whole number"),
        (
            ["--config", "odd.toml", "--port", "70000"],
            "--port",
            "wants a whole number from 0 to 65535, such as 8000, not 70000",
        ),
        (["--model=m", "--device", "tpu:1"], "--device", "'tpu:1' is not cuda:0,1"),
        (["--model=m", "--device", "cpu:two"], "--device", "cpu:two"),
        (["--model=m", "--device", "cpu:0"], "--device", "wants a whole number from 1"),
        (["--model=m", "--device", "cuda"], "--device", "no GPUs given"),
        (["--model=m", "--device", "cuda:0,"], "--device", "no GPUs given"),
        (["--model=m", "--device", "auto:1"], "--device", "'auto:1' is not cuda:0,1"),
        (["--model=m", "--device", "cuda:0", "--kv-bytes", "1GiB"], "--kv-bytes", "applies to CPU devices"),
        (["--model=m", "--kv-bytes", "lots"], "devices.cpu.kv_bytes", "'lots' is not a size"),
        (
            ["--model=m", "--role", "w0"],
            "--role",
            "'w0' is not WORKER=ROLE with one of the roles mixed, prefill, decode",
        ),
        (["--model=m", "--role", "w0=first"], "--role", "'w0=first' is not WORKER=ROLE"),
        (["--model=m", "--role", "=decode"], "--role", "'=decode' is not WORKER=ROLE"),
        (["--model=m", "--set", "server.port"], "--set server.port", "is not TABLE.KEY=VALUE"),
        (["--model=m", "--set", "port=1"], "--set port=1", "is not TABLE.KEY=VALUE"),
        (["--model=m", "--set", "server.host=here"], "--set server.host", "strings need quotes"),
        (["--model=m", "--set", "server.port=1\nother=2"], "--set server.port", "not a TOML value"),
        (["--model=m", "--set", "server.port=true"], "--set server.port", "not true"),
        (["--model=m", "--set", "server.prt=1"], "the flags", "[server] unknown key `prt`"),
        (["--model=m", "--set", "model.path.deep=1"], "model.path.deep", "path is not a table"),
    ],
)
def test_an_unusable_value_is_reported_with_its_place(tmp_path: Path, words: list[str], where: str, why: str) -> None:
    """One line that names the file and key, or the flag, is enough to fix it."""
    (tmp_path / "broken.toml").write_text("[model\n")
    (tmp_path / "odd.toml").write_text(FILE.replace("9000", '"nine"'))
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError) as error:
        load(*words)
    assert error.value.where == where
    assert why in error.value.why


def test_a_reload_never_waits_on_a_fifo(tmp_path: Path) -> None:
    """`--config <(make-config)` works for a start; reloading a FIFO would wait for a writer that never comes."""
    os.mkfifo(tmp_path / "fifo")
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    with pytest.raises(ConfigError, match="is a FIFO and cannot be read again"):
        load_config(parser.parse_args(["--config", "fifo"]), {}, again=True)


def directories(*words: str, environment: dict[str, str]) -> list[str]:
    parser = argparse.ArgumentParser()
    add_daemon_flags(parser)
    return [str(path) for path in daemon_directories(parser.parse_args(words), environment)]


def test_a_command_finds_its_daemon(tmp_path: Path) -> None:
    """By the flag, else the daemon's own configuration, else this user's daemon, then the system's."""
    session = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert directories(environment=session) == ["/run/user/7/melld", "/run/melld"]
    (tmp_path / "melld.toml").write_text(FILE)
    assert directories(environment=session) == ["/srv/melld"]
    assert directories("--runtime-directory", "here", environment=session) == [str(tmp_path / "here")]
    (tmp_path / "bare.toml").write_text("[server]\nport = 1\n")
    assert directories("--config", "bare.toml", environment={"RUNTIME_DIRECTORY": "/run/melld"}) == ["/run/melld"]


def test_an_unreadable_directory_counts_as_having_no_file(tmp_path: Path) -> None:
    """`sudo -u SERVICE melld status` starts in somebody else's directory and finds the daemon all the same."""
    unseen = tmp_path / ("a" * 300)  # root may look everywhere: a name that is too long fails alike
    environment = {"CONFIGURATION_DIRECTORY": str(unseen), "RUNTIME_DIRECTORY": "/run/melld"}
    assert directories(environment=environment) == ["/run/melld"]


@pytest.mark.parametrize("words", [["--model"], ["--model", "m", "--name"]])
def test_a_flag_that_is_not_utf8_is_refused(words: list[str]) -> None:
    """A directory named in Latin-1: no message to a worker could hold it, so the start would fail there."""
    with pytest.raises(ConfigError, match=f"{words[-1]}: wants text"):
        load(*words, os.fsdecode(b"m\xf6del"))
    load("--model", "m", "--runtime-directory", os.fsdecode(b"m\xf6del"))  # of which no worker hears
