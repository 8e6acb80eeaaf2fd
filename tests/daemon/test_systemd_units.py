"""The unit files: systemd accepts them, and they match melld's own settings."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"


class Unit(configparser.RawConfigParser):
    """A unit file: like an INI file, but keys are case-sensitive and may repeat (the last one counts here)."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, comment_prefixes=("#", ";"), delimiters=("=",), interpolation=None)
        self.read_string((UNITS / name).read_text())

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|min)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "min": 60}[unit]


def test_systemd_accepts_both_units_without_warnings(tmp_path: Path) -> None:
    """An ignored line in a unit is a protection that is not there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    service = (UNITS / "melld.service").read_text()
    assert "ExecStart=/usr/local/bin/melld serve " in service
    # The program is not installed here: any that exists will do for the check.
    (tmp_path / "melld.service").write_text(service.replace("/usr/local/bin/melld", sys.executable))
    shutil.copy(UNITS / "melld.socket", tmp_path)
    units = [str(tmp_path / "melld.service"), str(tmp_path / "melld.socket")]
    done = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", *units], check=False, capture_output=True, text=True
    )
    # Other units of the machine are loaded along; only what is said of ours counts.
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "melld" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_manager_waits_longer_than_the_drain() -> None:
    """`systemctl stop` must not kill answers that melld promised to finish."""
    from melld.config_server import ServerConfig

    service = Unit("melld.service")["Service"]
    assert _seconds(service["TimeoutStopSec"]) >= ServerConfig().drain_s + 15
    assert service["KillMode"] == "mixed"


def test_the_socket_unit_uses_melld_s_default_address() -> None:
    """With or without systemd, the same curl line works."""
    from melld.config_server import ServerConfig

    unit = Unit("melld.socket")["Socket"]
    server = ServerConfig()
    assert unit["ListenStream"] == f"{server.host}:{server.port}"
    assert unit["FileDescriptorName"] == "api"


def test_no_hardening_option_breaks_cuda() -> None:
    """A well-meant line must not take the GPUs away."""
    service = Unit("melld.service")["Service"]
    for forbidden in ("MemoryDenyWriteExecute", "PrivateDevices", "PrivateIPC", "PrivateUsers", "ProcSubset"):
        assert forbidden not in service
    assert not service["SystemCallFilter"].startswith("@"), "no list of what alone is allowed"
    assert service["OOMPolicy"] == "continue"
    assert service["RuntimeDirectoryMode"] == "0700"
