"""What a newcomer reads when the daemon is ready, or when it cannot start."""

import math
import os
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

import melld
from melld.cli import main
from melld.config import Config, IdleConfig, ModelConfig, PrioritiesConfig, SchedulerConfig, TargetsConfig
from melld.config_server import ServerConfig
from melld.daemon.preflight import CHAT, CannotListen, bind, check_model, check_policy, ready_text, scheduler_settings
from melld.daemon.wiring import NotImported, prepare_frontends
from melld.errors import ConfigError
from melld.scheduler.scheduler import SchedulerSettings
from melld.scheduler.targets import Targets, promised


def test_the_printed_status_command_finds_this_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted as it is, it asks the daemon that printed it, even one with its own runtime directory."""
    directory = str(tmp_path / "of my own")
    line = ready_text("http://127.0.0.1:1", "demo", False, CHAT, directory).splitlines()[-1]
    command = shlex.split(line.removesuffix("\n"))[2:]
    command.remove("--watch")
    assert main(command) == 3
    assert directory in capsys.readouterr().err


def test_without_its_own_directory_the_command_is_short() -> None:
    """Most have one daemon."""
    assert ready_text("http://127.0.0.1:1", "demo", False, CHAT, None).rstrip().endswith("status --watch")


def test_printed_commands_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for a daemon started as `python -m melld`, with no melld on the PATH."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [str(Path(melld.__file__).with_name("__main__.py"))])
    command = shlex.split(ready_text("http://127.0.0.1:1", "demo", False, CHAT, None).splitlines()[-1])[1]
    assert os.access(command, os.X_OK)


def test_a_path_without_a_model_gets_an_explanation_and_a_hint(tmp_path: Path) -> None:
    """One line fixes a typo, and nobody is told to write into their models' directory."""
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B" / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    for wrong in ("Llama-3.1-8b", "Lama-3.1-8B", ""):
        with pytest.raises(ConfigError) as caught:
            check_model(f"{tmp_path}/{wrong}")
        assert "config.json, weights (*.safetensors) and a tokenizer" in str(caught.value)
        assert f"did you mean '{tmp_path}/Llama-3.1-8B'?" in str(caught.value)
        assert "demo-model" not in str(caught.value)
    for wrong in (f"{tmp_path}/notes.txt", ""):
        with pytest.raises(ConfigError, match="a model directory has"):
            check_model(wrong)
    check_model(f"{tmp_path}/Llama-3.1-8B")


@pytest.mark.parametrize(
    "wrong", ["/no/such/place", "./gone", "../gone", "~/gone", "our/models/gone", "a model", "gone/"]
)
def test_a_missing_directory_is_not_mistaken_for_a_hub_name(wrong: str) -> None:
    """A typo must not make anybody wait for Hugging Face and read about its tokens."""
    with pytest.raises(ConfigError, match=r"no such directory: .*: a model directory has"):
        check_model(wrong)


def test_an_unreadable_model_is_reported_in_one_line(tmp_path: Path) -> None:
    """It may be another user's, or on a failing disk: daemon and check say which, and why."""
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"\[model\] path: .*: Input/output error"):
        check_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"File name too long"):
        check_model(f"{tmp_path}/{'a' * 300}")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        check_model(str(tmp_path))


def test_an_impossible_host_name_is_reported_in_one_line() -> None:
    """A typo in an address is no bug of melld's."""
    with pytest.raises(CannotListen, match=r"cannot listen on 127.0..1:0: not a valid host name"):
        bind("127.0..1", 0)


@pytest.mark.parametrize("name", ["gpt2", "org/a-model_1.5", "org/model-GGUF:Q4_K_M", "s3://bucket/a/model"])
def test_a_hub_name_is_left_to_vllm(name: str) -> None:
    """It may be on Hugging Face, or in a bucket."""
    check_model(name)


def test_an_unexpanded_home_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a configuration file, `~` stands for itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=rf"no such directory: ~/mine: .*did you mean '{tmp_path}/mine'"):
        check_model("~/mine")


def test_an_unknown_policy_gets_the_nearest_suggestion() -> None:
    """`mell_plus` is one character off."""
    with pytest.raises(ConfigError, match=r"not one of best-fit, .*did you mean 'mell-plus'\?"):
        check_policy("mell_plus")
    check_policy("mell-plus")


def test_no_request_is_shed_for_a_target_unless_configured() -> None:
    """By default all requests are served, if more slowly."""
    config = Config(model=ModelConfig(path="m"))
    targets = scheduler_settings(config).cluster.targets
    assert targets == promised(None, 2.0, sheds=False, attainment=0.99)
    strict = msgspec.structs.replace(config, targets=TargetsConfig(itl_ms=40.0, ttft_s=1.0, attainment=0.9, shed=True))
    assert scheduler_settings(strict).cluster.targets == Targets(itl_s=0.04, ttft_s=1.0, sheds=True, attainment=0.9)


def test_infinity_can_be_written_into_a_decision_log() -> None:
    """Seconds may be `inf`; JSON has no such number, and a replay must decide with the same."""
    config = Config(
        model=ModelConfig(path="m"),
        server=ServerConfig(queue_deadline_s=math.inf),
        scheduler=SchedulerConfig(headroom_s=math.inf),
        priorities=PrioritiesConfig(age_s=math.inf, hole_s=math.inf),
        targets=TargetsConfig(itl_ms=math.inf, ttft_s=math.inf),
        idle=IdleConfig(sleep_after_s=math.inf),
    )
    settings = scheduler_settings(config)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=SchedulerSettings) == settings


@pytest.mark.parametrize(
    ("policy", "sleep_after_s", "seconds"),
    [("mell-slo", None, None), ("mell-plus", None, 60.0), ("mell-slo", 5.0, 5.0), ("best-fit", 5.0, 5.0)],
)
def test_the_operator_s_idle_time_overrides_the_policy(
    policy: str, sleep_after_s: float | None, seconds: float | None
) -> None:
    """Unset, the default policy computes it and the others wait a minute; set, it applies to all."""
    config = Config(
        model=ModelConfig(path="m"),
        scheduler=SchedulerConfig(policy=policy),
        idle=IdleConfig(sleep_after_s=sleep_after_s),
    )
    assert scheduler_settings(config).cluster.retire_after_s == seconds


def test_a_vllm_that_cannot_be_imported_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged environment, or a cache directory that cannot be made: `melld serve` ends without a traceback."""
    monkeypatch.setitem(sys.modules, "melld.engine.frontend.rehearsal", None)
    with pytest.raises(NotImported, match="cannot import vLLM: import of melld"):
        prepare_frontends(None)  # type: ignore[arg-type]
